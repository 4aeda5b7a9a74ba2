//! Burn's learner with `ExecutionStrategy::ddp`.
use crate::model::{ADAPTER_FACTORS, Batch, language_model, tokens};
use crate::table::closeness::Closeness;
use crate::table::run::{Named, parameter_gradients};
use crate::{alone, in_time, of_parameters};
use burn::backend::distributed::{DistributedConfig, ReduceOperation};
use burn::data::{
    dataloader::{DataLoaderBuilder, batcher::Batcher},
    dataset::InMemDataset,
};
use burn::module::Module;
use burn::optim::{AdamConfig, GradientsParams, lr_scheduler::constant::ConstantLr};
use burn::tensor::Device;
use burn_memsave_distributed::{devices, reductions};
use burn_memsave_paper::text::llama::{LanguageModel, memsave::Llama};
use burn_train::logger::InMemoryMetricLogger;
use burn_train::{ExecutionStrategy, InferenceStep, Learner, SupervisedTraining, TrainOutput, TrainStep};
use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Barrier, Mutex, PoisonError};
use std::thread::{self, ThreadId};

const STEPS: usize = 20;
const RATE: f64 = 1e-2;
/// The passages of a step, and those of each device.
const PASSAGES: usize = 4;
const PARTS: [Range<usize>; 2] = [0..2, 2..4];

/// The gradients of every step of the learner, by the thread of the device.
static GRADIENTS: Mutex<Vec<(ThreadId, Vec<Named>)>> = Mutex::new(vec![]);

/// Where devices wait for each other after a backward pass: Burn's server would forget what one of them announces for the next pass
/// before the other one has ended this.
static TOGETHER: Barrier = Barrier::new(PARTS.len());

/// What the learner trains.
#[derive(Module, Debug)]
struct Student {
    model: Llama,
}

impl TrainStep for Student {
    type Input = Batch;
    type Output = ();

    fn step(&self, (input, next): Batch) -> TrainOutput<()> {
        let gradients = self.model.loss(input, next).backward();
        TOGETHER.wait();
        let found = of_parameters(parameter_gradients(&self.model, &gradients));
        GRADIENTS.lock().unwrap_or_else(PoisonError::into_inner).push((thread::current().id(), found));
        TrainOutput::new(self, gradients, ())
    }
}

impl InferenceStep for Student {
    type Input = Batch;
    type Output = ();

    fn step(&self, (input, next): Batch) {
        assert!(self.model.loss(input, next).into_scalar::<f32>().is_finite());
    }
}

/// Consecutive passages of one step.
struct Passages;

/// A step, and the number of a passage.
type Passage = (usize, usize);

impl Batcher<Passage, Batch> for Passages {
    fn batch(&self, passages: Vec<Passage>, device: &Device) -> Batch {
        let (step, first) = passages[0];
        let (input, next) = tokens(step, PASSAGES, device);
        let part = first..first + passages.len();
        (input.slice(part.clone()), next.slice(part))
    }
}

/// Adapters in twenty steps of Adam: the gradients of each device are those of the whole batch on one device, and what is frozen
/// is not reduced.
#[test]
fn adapters_train_as_on_one_device() {
    let _alone = alone();
    let host = Device::flex().autodiff();
    let model = language_model(&host);
    let mut one = model.clone();
    let mut optimizer = AdamConfig::new().init();
    let whole: Vec<Vec<Named>> = (0..STEPS)
        .map(|step| {
            let (input, next) = tokens(step, PASSAGES, &host);
            let gradients = one.loss(input, next).backward();
            let found = of_parameters(parameter_gradients(&one, &gradients));
            let gradients = GradientsParams::from_grads(gradients, &one);
            one = optimizer.step(RATE, one.clone(), gradients);
            found
        })
        .collect();

    // The learner gives each device one half of the items, in order.
    let items =
        PARTS.iter().flat_map(|part| (0..STEPS).flat_map(|step| part.clone().map(move |at| (step, at))));
    let loader = |items: Vec<Passage>| {
        DataLoaderBuilder::new(Passages).batch_size(PASSAGES / PARTS.len()).build(InMemDataset::new(items))
    };
    let folder = tempfile::tempdir().expect("a folder");
    let before = reductions();
    let config = DistributedConfig { all_reduce_op: ReduceOperation::Mean };
    let strategy = ExecutionStrategy::ddp(devices(2), config);
    let training = SupervisedTraining::new(folder.path(), loader(items.collect()), loader(vec![(0, 0)]))
        .with_training_strategy(strategy.into())
        .with_metric_logger(InMemoryMetricLogger::new())
        .with_application_logger(None)
        .num_epochs(1);
    let learner = Learner::new(Student { model }, AdamConfig::new().init(), ConstantLr::new(RATE));
    let trained = in_time(|| training.launch(learner)).model.model;
    assert_eq!(reductions() - before, STEPS * ADAPTER_FACTORS);

    let mut of_devices = HashMap::<ThreadId, Vec<Vec<Named>>>::new();
    for (device, gradients) in GRADIENTS.lock().unwrap_or_else(PoisonError::into_inner).drain(..) {
        of_devices.entry(device).or_default().push(gradients);
    }
    assert_eq!(of_devices.len(), PARTS.len());
    for steps in of_devices.values() {
        assert_eq!(steps.len(), STEPS);
        for (step, (gradients, whole)) in steps.iter().zip(&whole).enumerate() {
            assert_eq!((gradients.len(), whole.len()), (ADAPTER_FACTORS, ADAPTER_FACTORS));
            for ((name, found), (_, whole)) in gradients.iter().zip(whole) {
                let [found, whole] =
                    [found, whole].map(|data| data.clone().expect("of those that there are"));
                if let Err(difference) = Closeness::Relative(1e-5).compare(&found, &whole, None) {
                    panic!("step {step}, {name}: {difference}");
                }
            }
        }
    }
    let loss = |model: &Llama, device: &Device| {
        let (input, next) = tokens(0, PASSAGES, device);
        model.loss(input, next).into_scalar::<f32>()
    };
    let device = trained.devices().remove(0);
    let [found, whole] = [loss(&trained, &device), loss(&one, &host)];
    assert!((found - whole).abs() < 1e-4 * whole, "a loss of {found} after all steps, on one device {whole}");
}
