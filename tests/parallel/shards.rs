//! Optimizers and frozen weights that are divided among devices. Flex and NdArray are two devices, so that tensors have to move.
use super::{Pair, device, devices, worse};
use burn::module::{Lora, Module, ModuleMapper, ModuleVisitor, Param, ParamGroup, Quantizer};
use burn::optim::momentum::MomentumConfig;
use burn::optim::{
    AdamConfig, GradientsAccumulator, GradientsParams, LearningRate, ModuleOptimizer, Optimizer, Sgd,
    SgdConfig, SgdState,
};
use burn::tensor::quantization::{Calibration, QuantValue};
use burn::tensor::{Device, Distribution, Int, Tensor, TensorData};
use burn_memsave::nn::{Embedding, EmbeddingConfig, LinearConfig};
use burn_memsave::optim::{AdamW8bitConfig, InBackwardError, clip_grad_norm};
use burn_memsave::parallel::{
    FrozenOptions, ParallelError, ReplicaOptions, Replicas, Traffic, estimate_replicas, shard_frozen,
};
use burn_memsave::plan::OptimizerState;
use burn_memsave_paper::text::llama::{LanguageModel, Size, checkpointed, memsave::Llama};
use std::sync::{Arc, Mutex};

/// Two devices in turn, if there are two.
pub fn mixed(count: usize) -> Vec<Device> {
    let of = |index: usize| match index % 2 {
        #[cfg(feature = "ndarray")]
        #[allow(deprecated)] // burn-ndarray is deprecated as a whole
        1 => Device::ndarray().autodiff(),
        _ => device(),
    };
    (0..count).map(of).collect()
}

const fn are_two() -> bool {
    cfg!(feature = "ndarray")
}

pub fn sharded() -> ReplicaOptions {
    ReplicaOptions::new().with_sharded_optimizer()
}

const SIZE: Size = Size { vocabulary: 31, width: 16, heads: 2, hidden: 24, blocks: 2, length: 8 };

type Batch = (Tensor<2, Int>, Tensor<2, Int>);

fn tokens(step: usize, items: usize) -> Batch {
    super::tokens(step, items)
}

/// The parts of a batch, with these numbers of items, on these devices.
fn divide((input, next): &Batch, items: &[usize], devices: &[Device]) -> Vec<(Batch, usize)> {
    let mut start = 0;
    let part = |(&items, device): (&usize, &Device)| {
        let rows = start..start + items;
        start += items;
        let of = |tensor: &Tensor<2, Int>| match items {
            0 => tensor.clone().slice(0..1).to_device(device), // not used
            _ => tensor.clone().slice(rows.clone()).to_device(device),
        };
        ((of(input), of(next)), items)
    };
    items.iter().zip(devices).map(part).collect()
}

/// The parameters of a module that require gradients: their paths would be in the same order. Gradients, if given, in place of values.
pub fn tensors(module: &impl Module, gradients: Option<&GradientsParams>) -> Vec<Vec<f32>> {
    struct All<'a>(Option<&'a GradientsParams>, Vec<Vec<f32>>);
    impl ModuleVisitor for All<'_> {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            if param.is_require_grad() {
                let data = match self.0 {
                    Some(gradients) => gradients.get::<D>(param.id).map(Tensor::into_data),
                    None => Some(param.base().into_data()),
                };
                self.1.push(data.map_or(vec![], |data| data.convert::<f32>().iter().collect()));
            }
        }
    }
    let mut all = All(gradients, vec![]);
    module.visit(&mut all);
    all.1
}

/// The largest difference, relative to the largest value.
pub fn difference(ours: &[Vec<f32>], whole: &[Vec<f32>]) -> f32 {
    assert_eq!(
        ours.iter().map(Vec::len).collect::<Vec<_>>(),
        whole.iter().map(Vec::len).collect::<Vec<_>>(),
        "the same parameters have gradients"
    );
    let pairs = || ours.iter().flatten().zip(whole.iter().flatten());
    let largest = pairs().fold(0.0, |largest, (_, whole)| worse(largest, whole.abs()));
    assert!(largest > 0.0, "there is something to compare");
    pairs().fold(0.0, |most, (ours, whole)| worse(most, (ours - whole).abs())) / largest
}

/// Trains a model on several devices and on one, with whole batches, and compares losses, gradients and values.
fn compare<M: LanguageModel>(
    mut one: M,
    mut replicas: Replicas<M>,
    optimizer: impl Fn() -> ModuleOptimizer,
    steps: usize,
    parts: &[&[usize]],
) {
    let (mut of_one, mut of_replicas) = (optimizer(), optimizer());
    for step in 0..steps {
        let parts = parts[step % parts.len()];
        let batch = tokens(step, parts.iter().sum());
        let loss = one.loss(batch.0.clone(), batch.1.clone());
        let whole = GradientsParams::from_grads(loss.clone().backward(), &one);
        let parts = divide(&batch, parts, replicas.devices());
        let (mean, gradients) =
            replicas.backward(parts, |model, (input, next)| model.loss(input, next)).expect("valid parts");
        assert!((loss.into_scalar::<f32>() - mean.into_scalar::<f32>()).abs() < 1e-5);
        let found = difference(&tensors(&one, Some(&gradients)), &tensors(&one, Some(&whole)));
        assert!(found < 1e-5, "gradients of step {step}: {found}");
        one = of_one.step(1e-2, one, whole);
        replicas.update(|model| of_replicas.step(1e-2, model, gradients));
        replicas.sync().expect("nothing can fail here");
    }
    let found = difference(&tensors(replicas.module(), None), &tensors(&one, None));
    assert!(found < 1e-5, "values: {found}");
}

/// Adam whose steps do not depend on the rounding of gradients that are almost zero.
pub fn adam() -> ModuleOptimizer {
    AdamConfig::new().with_epsilon(1e-3).init()
}

fn whole_model<M: LanguageModel>() -> M {
    device().seed(5);
    M::new(&SIZE, &device())
}

/// Uneven parts, a batch smaller than the number of devices, and parts without items.
const PARTS: [&[usize]; 4] = [&[3, 1, 2, 1], &[1, 2], &[2, 0, 3, 1], &[0, 4]];
const OF_TWO: [&[usize]; 3] = [&[3, 1], &[2], &[0, 2]];

#[test]
fn twenty_steps_with_a_divided_optimizer_equal_one_device() {
    for devices in [mixed(2), mixed(4), devices(3)] {
        let parts = if devices.len() == 2 { &OF_TWO[..] } else { &PARTS[..] };
        let parts: Vec<&[usize]> = parts.iter().map(|part| &part[..part.len().min(devices.len())]).collect();
        let model = super::language_model::<Llama>(&device());
        let replicas = Replicas::with_options(&model, devices.clone(), &sharded()).expect("replicas");
        compare(model, replicas, adam, 20, &parts);
        let model = whole_model::<Llama>();
        let replicas = Replicas::with_options(&model, devices, &sharded()).expect("replicas");
        compare(model, replicas, adam, 20, &parts);
    }
}

/// With gradient descent, since Adam's steps differ more and more: it scales up gradients that are nearly zero.
#[test]
fn two_hundred_steps_equal_one_device() {
    let descent = || SgdConfig::new().init();
    let model = whole_model::<Llama>();
    let replicas = Replicas::with_options(&model, mixed(4), &sharded()).expect("replicas");
    compare(model, replicas, descent, 200, &PARTS);
    let (divided, in_memory) = adapted::<Llama>(&mixed(4), &all_frozen());
    let replicas = Replicas::with_options(&divided, mixed(4), &sharded()).expect("replicas");
    compare(in_memory, replicas, descent, 200, &PARTS);
}

/// Blocks that are computed again in the backward pass, and an optimizer of this library.
#[test]
fn segments_and_8_bits() {
    let model = whole_model::<checkpointed::Llama>();
    let replicas = Replicas::with_options(&model, mixed(2), &sharded()).expect("replicas");
    compare(model, replicas, || SgdConfig::new().init(), 4, &OF_TWO);
    let model = whole_model::<Llama>();
    let replicas = Replicas::with_options(&model, devices(3), &sharded()).expect("replicas");
    let optimizer = || AdamW8bitConfig::new().with_epsilon(1e-3).init();
    compare(model, replicas, optimizer, 3, &PARTS[1..2]);
}

/// One value in two places.
#[test]
fn tied_parameters_have_one_owner() {
    let first = LinearConfig::new(4, 4).init(&device());
    let tied = |first: burn_memsave::nn::Linear| Pair { first: first.clone(), second: first };
    let mut one = tied(first);
    let mut replicas = Replicas::with_options(&one, mixed(3), &sharded()).expect("one value");
    let (mut optimizer, mut of_replicas) = (adam(), adam());
    let x = Tensor::<2>::random([5, 4], Distribution::Normal(0.0, 1.0), &device());
    let loss = |pair: &Pair, x: Tensor<2>| pair.second.forward(pair.first.forward(x)).powf_scalar(2.0).mean();
    for step in 0..20 {
        let whole = GradientsParams::from_grads(loss(&one, x.clone()).backward(), &one);
        let parts = [0..2, 2..3, 3..5].into_iter().zip(mixed(3));
        let parts: Vec<_> = parts
            .map(|(rows, device)| (x.clone().slice(rows.clone()).to_device(&device), rows.len()))
            .collect();
        let (_, gradients) = replicas.backward(parts, loss).expect("parts");
        assert_eq!(gradients.len(), 2);
        let found = difference(&tensors(&one, Some(&gradients)), &tensors(&one, Some(&whole)));
        assert!(found < 1e-5, "step {step}: {found}");
        one = tied(optimizer.step(1e-2, one, whole).first);
        replicas.update(|model| of_replicas.step(1e-2, model, gradients));
        let [first, second] = [&replicas.module().first, &replicas.module().second];
        first.weight.val().into_data().assert_eq(&second.weight.val().into_data(), true);
    }
    assert!(difference(&tensors(replicas.module(), None), &tensors(&one, None)) < 1e-5);
}

/// What an update freezes is frozen in all replicas, with the value of its owner; a parameter that is not used has no gradient.
#[test]
fn freezing_and_unused_parameters() {
    let linear = || LinearConfig::new(4, 4).init(&device());
    let model = Pair { first: linear(), second: linear() };
    let x = |device: &Device| Tensor::<2>::ones([2, 4], device);
    let both = |pair: &Pair, x: Tensor<2>| pair.second.forward(pair.first.forward(x)).powf_scalar(2.0).mean();
    let of = |replicas: &Replicas<Pair>, at: usize| {
        let devices = replicas.devices().iter().enumerate();
        let parts = devices.map(|(index, device)| (x(device), usize::from(index == at)));
        let (loss, gradients) = replicas.backward(parts, both).expect("parts");
        (loss.into_scalar::<f32>(), gradients.len())
    };
    for options in [ReplicaOptions::new(), sharded()] {
        let mut replicas = Replicas::with_options(&model, mixed(2), &options).expect("replicas");
        let parts: Vec<_> = replicas.devices().iter().map(|device| (x(device), 1)).collect();
        let (_, gradients) = replicas.backward(parts, both).expect("parts");
        let mut optimizer = SgdConfig::new().init();
        replicas.update(|model| {
            let model = optimizer.step(0.1, model, gradients);
            Pair { first: model.first.freeze(), ..model }
        });
        let (first, second) = (of(&replicas, 0), of(&replicas, 1));
        assert!((first.0 - second.0).abs() < 1e-6 && [first.1, second.1] == [2, 2], "{first:?}, {second:?}");
        assert!((first.0 - both(&model, x(&device())).into_scalar::<f32>()).abs() > 1e-3, "it was trained");
    }

    let replicas = Replicas::with_options(&model, mixed(2), &sharded()).expect("replicas");
    let parts: Vec<_> = replicas.devices().iter().map(|device| (x(device), 1)).collect();
    let (_, gradients) = replicas.backward(parts, |pair, x| pair.second.forward(x).mean()).expect("parts");
    assert_eq!(gradients.len(), 2, "the first layer is not used");
}

/// The device and the bytes of everything that the optimizer is given.
#[derive(Clone)]
struct Probe {
    inner: Sgd,
    seen: Arc<Mutex<Vec<(Device, usize)>>>,
}

impl Optimizer for Probe {
    type State<const D: usize> = SgdState<D>;

    fn step<const D: usize>(
        &self,
        lr: LearningRate,
        tensor: Tensor<D>,
        gradient: Tensor<D>,
        state: Option<SgdState<D>>,
    ) -> (Tensor<D>, Option<SgdState<D>>) {
        assert_eq!(tensor.device(), gradient.device());
        let bytes = tensor.shape().num_elements() * 4;
        self.seen.lock().expect("no panic").push((tensor.device(), bytes));
        self.inner.step(lr, tensor, gradient, state)
    }

    fn to_device<const D: usize>(state: SgdState<D>, device: &Device) -> SgdState<D> {
        Sgd::to_device(state, device)
    }
}

/// Each device has its part of gradients and states, and what is sent is what `estimate_replicas` says.
#[test]
fn bytes_of_each_device_and_bytes_that_travel() {
    let (model, devices) = (whole_model::<Llama>(), mixed(2));
    for options in [ReplicaOptions::new(), sharded()] {
        let needed = estimate_replicas(&model, &devices, &options, OptimizerState::One).expect("an estimate");
        let mut replicas = Replicas::with_options(&model, devices.clone(), &options).expect("replicas");
        let seen = Arc::<Mutex<Vec<_>>>::default();
        let inner = SgdConfig::new().with_momentum(Some(MomentumConfig::new())).build();
        let mut optimizer = ModuleOptimizer::from(Probe { inner, seen: seen.clone() });
        for step in 1..4u64 {
            let parts = divide(&tokens(0, 4), &[3, 1], &devices);
            let (_, gradients) =
                replicas.backward(parts, |model, (input, next)| model.loss(input, next)).expect("parts");
            seen.lock().expect("no panic").clear();
            replicas.update(|model| optimizer.step(1e-2, model, gradients));
            let expected = match are_two() {
                true => Traffic {
                    gradients: needed.sent.gradients * step,
                    values: needed.sent.values * step,
                    frozen: 0,
                },
                false => Traffic::default(),
            };
            assert_eq!(replicas.traffic(), expected, "step {step} of {options:?}");
            if are_two() {
                for (device, needed) in devices.iter().zip(&needed.devices) {
                    let seen = seen.lock().expect("no panic");
                    let bytes: usize =
                        seen.iter().filter(|(of, _)| of == device).map(|(_, bytes)| bytes).sum();
                    assert_eq!((needed.gradients, needed.optimizer), (bytes as u64, bytes as u64));
                }
            }
        }
        let trained = needed.devices[0].trained;
        let of_optimizer: Vec<u64> = needed.devices.iter().map(|device| device.optimizer).collect();
        assert_eq!(of_optimizer.iter().sum::<u64>(), trained);
        if replicas.traffic() != Traffic::default() && options_are_sharded(&options) {
            assert!(
                of_optimizer.iter().all(|bytes| *bytes as f64 <= 0.55 * trained as f64),
                "{of_optimizer:?}"
            );
        }
    }
}

fn options_are_sharded(options: &ReplicaOptions) -> bool {
    format!("{options:?}").contains("optimizer: true")
}

/// A record that replicas on two devices wrote is read by others on four and on one; training goes on as if nothing had been.
#[test]
fn records_are_whole() {
    let run =
        |replicas: &mut Replicas<Llama>, optimizer: &mut ModuleOptimizer, steps: std::ops::Range<usize>| {
            for step in steps {
                let (batch, count) = (tokens(step, 4), replicas.devices().len());
                let items = vec![4 / count; count];
                let parts = divide(&batch, &items, replicas.devices());
                let (_, gradients) =
                    replicas.backward(parts, |model, (input, next)| model.loss(input, next)).expect("parts");
                replicas.update(|model| optimizer.step(1e-2, model, gradients));
            }
        };
    let model = whole_model::<Llama>();
    let (mut whole, mut of_whole) = (Replicas::new(&model, devices(1)).expect("one"), adam());
    run(&mut whole, &mut of_whole, 0..6);
    let (mut two, mut of_two) = (Replicas::with_options(&model, mixed(2), &sharded()).expect("two"), adam());
    run(&mut two, &mut of_two, 0..3);
    let record = of_two.into_bytes().expect("a record");
    for count in [1, 2, 4] {
        let model = two.module().clone();
        let mut replicas = Replicas::with_options(&model, mixed(count), &sharded()).expect("replicas");
        let mut optimizer = adam().from_bytes(record.clone()).expect("a whole record");
        run(&mut replicas, &mut optimizer, 3..6);
        let found = difference(&tensors(replicas.module(), None), &tensors(whole.module(), None));
        assert!(found < 1e-5, "{count} devices: {found}");
    }
}

/// The norm of all gradients, wherever they are; and sums over batches.
#[test]
fn clipping_and_accumulation() {
    let (model, devices) = (whole_model::<Llama>(), mixed(2));
    let replicas = Replicas::with_options(&model, devices.clone(), &sharded()).expect("replicas");
    let batch = tokens(0, 8);
    let whole = GradientsParams::from_grads(model.loss(batch.0.clone(), batch.1.clone()).backward(), &model);
    let mut accumulator = GradientsAccumulator::new();
    for rows in [0..4, 4..8] {
        let half = (batch.0.clone().slice(rows.clone()), batch.1.clone().slice(rows));
        let parts = divide(&half, &[1, 3], &devices);
        let (_, gradients) = replicas
            .backward(parts, |model, (input, next)| model.loss(input, next).div_scalar(2.0))
            .expect("parts");
        accumulator.accumulate(replicas.module(), gradients);
    }
    let gradients = accumulator.grads();
    assert!(difference(&tensors(&model, Some(&gradients)), &tensors(&model, Some(&whole))) < 1e-5);

    let values = tensors(&model, Some(&whole));
    let norm = values.iter().flatten().map(|value| f64::from(*value).powi(2)).sum::<f64>().sqrt();
    for max in [norm / 3.0, norm * 2.0] {
        let factor = (max / (norm + 1e-6)).min(1.0) as f32;
        let expected: Vec<Vec<f32>> =
            values.iter().map(|values| values.iter().map(|value| value * factor).collect()).collect();
        let copy = copied(&model, &gradients);
        let (clipped, found) = clip_grad_norm(replicas.module(), copy, max);
        let found = found.expect("gradients").into_scalar::<f32>();
        assert!((f64::from(found) - norm).abs() < 1e-5 * norm, "{found}, {norm}");
        assert!(difference(&tensors(&model, Some(&clipped)), &expected) < 1e-5);
    }
    let (none, norm) = clip_grad_norm(&model, GradientsParams::new(), 1.0);
    assert!(none.is_empty() && norm.is_none());
}

fn copied(module: &impl Module, gradients: &GradientsParams) -> GradientsParams {
    struct Copy<'a>(&'a GradientsParams, GradientsParams);
    impl ModuleVisitor for Copy<'_> {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            if let Some(gradient) = self.0.get::<D>(param.id) {
                self.1.register(param.id, gradient);
            }
        }
    }
    let mut copy = Copy(gradients, GradientsParams::new());
    module.visit(&mut copy);
    copy.1
}

#[test]
fn losses_without_gradients_are_refused() {
    let model = LinearConfig::new(2, 2).init(&device());
    let replicas = Replicas::with_options(&model, devices(2), &sharded()).expect("replicas");
    let part = || (Tensor::<2>::ones([1, 2], &device()), 1);
    let refused = replicas.backward([part(), part()], |_, x: Tensor<2>| x.sum()).expect_err("no parameter");
    assert!(
        matches!(refused, ParallelError::Loss { part: 0, error: InBackwardError::Untracked }),
        "{refused}"
    );
    let several = replicas.backward([part()], |model, x: Tensor<2>| model.forward(x).reshape([2]));
    assert!(matches!(
        several,
        Err(ParallelError::Loss { error: InBackwardError::NoScalar { elements: 2 }, .. })
    ));
    assert!(replicas.backward([part()], |model, x: Tensor<2>| model.forward(x).sum()).is_ok());
}

fn all_frozen() -> FrozenOptions {
    FrozenOptions::new().with_min_bytes(0)
}

fn lora() -> Lora {
    let group = ParamGroup::from_regex(r"^blocks\..*\.weight$").expect("a regular expression");
    Lora::new(2, 4.0).set_param_group(group)
}

/// A model whose frozen weights are on these devices, and the same in memory, both with the same adapters.
fn adapted<M: LanguageModel>(devices: &[Device], options: &FrozenOptions) -> (M, M) {
    let frozen = whole_model::<M>().freeze();
    let in_memory = frozen.clone().apply_lora(lora());
    let divided = shard_frozen(frozen, devices, options).expect("nothing is quantized").apply_lora(lora());
    struct Shift;
    impl burn::module::ModuleMapper for Shift {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
            match param.is_require_grad() {
                true => param.map(|value| (value.inner() + 0.05).autodiff().require_grad()),
                false => param,
            }
        }
    }
    let divided = divided.map(&mut Shift);
    let adapters = ParamGroup::from_regex(r"(^|\.)lora\.").expect("a regular expression");
    let record = divided.clone().into_record_group(adapters).allow_partial(true);
    (divided, in_memory.load_record(record))
}

#[test]
fn twenty_steps_with_divided_frozen_weights_equal_one_device() {
    for devices in [mixed(2), mixed(4)] {
        let parts = if devices.len() == 2 { &OF_TWO[..] } else { &PARTS[..] };
        for options in [ReplicaOptions::new(), sharded()] {
            let (divided, in_memory) = adapted::<Llama>(&devices, &all_frozen());
            let replicas = Replicas::with_options(&divided, devices.clone(), &options).expect("replicas");
            compare(in_memory, replicas, adam, 20, parts);
        }
    }
    let (divided, in_memory) = adapted::<checkpointed::Llama>(&mixed(2), &all_frozen().with_budget(1500));
    let replicas = Replicas::with_options(&divided, mixed(2), &sharded()).expect("replicas");
    compare(in_memory, replicas, adam, 3, &OF_TWO);
}

#[derive(Module, Debug)]
struct Layered {
    table: Embedding,
    layers: Vec<burn_memsave::nn::Linear>,
}

impl Layered {
    fn new() -> Self {
        let linear = || LinearConfig::new(8, 8).init(&device());
        Self {
            table: EmbeddingConfig::new(100, 8).init(&device()),
            layers: vec![linear(), linear(), linear()],
        }
    }

    fn loss(&self, tokens: Tensor<2, Int>) -> Tensor<1> {
        let x = self.table.forward(tokens);
        self.layers.iter().fold(x, |x, layer| layer.forward(x)).powf_scalar(2.0).mean()
    }
}

/// Rows of an embedding, a weight once where its backward pass does not need it and else twice, and less with a budget.
#[test]
fn frozen_bytes_that_travel() {
    let devices = mixed(2);
    let model = || {
        let model = Layered::new();
        Layered { table: model.table.freeze(), layers: freeze_weights(model.layers) }
    };
    let weight = 8 * 8 * 4u64;
    let step = |replicas: &Replicas<Layered>| {
        let tokens = |device: &Device| Tensor::<2, Int>::from_data([[1, 7, 50]], device);
        let parts: Vec<_> = replicas.devices().iter().map(|device| (tokens(device), 1)).collect();
        let before = replicas.traffic().frozen;
        replicas.backward(parts, |model, tokens| model.loss(tokens)).expect("parts");
        replicas.traffic().frozen - before
    };
    for options in [ReplicaOptions::new(), sharded()] {
        let replicas = Replicas::with_options(
            &model(),
            devices.clone(),
            &options.clone().with_sharded_frozen(all_frozen()),
        )
        .expect("replicas");
        // The table is the largest, so the layers are on the other device. The first layer's weight is not needed in the backward pass, since
        // what the table gives is frozen.
        let each = if are_two() { 3 * 8 * 4 + (1 + 2 + 2) * weight } else { 0 };
        assert_eq!([step(&replicas), step(&replicas)], [each; 2]);

        let budget = all_frozen().with_budget(2 * weight);
        let replicas =
            Replicas::with_options(&model(), devices.clone(), &options.clone().with_sharded_frozen(budget))
                .expect("replicas");
        let (first, later) = match are_two() {
            true => (3 * 8 * 4 + (1 + 1 + 2) * weight, 3 * 8 * 4 + 2 * weight),
            false => (0, 0),
        };
        assert_eq!([step(&replicas), step(&replicas), step(&replicas)], [first, later, later]);
    }
    let options = ReplicaOptions::new().with_sharded_frozen(all_frozen());
    let needed = estimate_replicas(&model(), &devices, &options, OptimizerState::None).expect("an estimate");
    let table = 100 * 8 * 4;
    let frozen: Vec<u64> = needed.devices.iter().map(|device| device.frozen).collect();
    assert_eq!(frozen, [table, 3 * weight]);
    assert_eq!(needed.sent.frozen, 2 * (table + 3 * weight));
    let biases = 3 * 8 * 4;
    assert!(needed.devices.iter().all(|device| device.trained == biases));
}

fn freeze_weights(layers: Vec<burn_memsave::nn::Linear>) -> Vec<burn_memsave::nn::Linear> {
    let group = ParamGroup::from_regex(r"weight$").expect("a regular expression");
    layers.into_iter().map(|layer| layer.freeze_group(group.clone())).collect()
}

/// A record has the weights, wherever they are.
#[test]
fn records_have_divided_weights() {
    let data = |model: &Layered| -> Vec<TensorData> {
        let weights = model.layers.iter().map(|layer| layer.weight.val().into_data());
        weights.chain([model.table.weight.val().into_data()]).collect()
    };
    let model = Layered::new().freeze();
    let options = ReplicaOptions::new().with_sharded_frozen(all_frozen());
    let replicas = Replicas::with_options(&model, mixed(2), &options).expect("replicas");
    let record = replicas.module().clone().into_record();
    let loaded = Layered::new().load_record(record);
    let materialized = replicas.into_module().materialize();
    for found in [data(&loaded), data(&materialized)] {
        for (found, expected) in found.iter().zip(data(&model)) {
            found.assert_eq(&expected, true);
        }
    }
}

#[test]
fn weights_that_cannot_be_divided_are_refused() {
    let model = Layered::new().freeze();
    let adapted = model.clone().apply_lora(Lora::new(2, 4.0));
    let refused = shard_frozen(adapted.clone(), &devices(2), &all_frozen()).expect_err("an adapter");
    assert!(matches!(&refused, ParallelError::Adapted { path } if path == "table.weight"), "{refused}");
    let options = ReplicaOptions::new().with_sharded_frozen(all_frozen());
    assert!(matches!(
        Replicas::with_options(&adapted, devices(2), &options),
        Err(ParallelError::Adapted { .. })
    ));

    let scheme = device().settings().quantization.scheme.with_value(QuantValue::Q8S);
    let quantized = model.quantize_weights(&mut Quantizer::new(Calibration::MinMax, scheme));
    let refused = shard_frozen(quantized.clone(), &devices(2), &all_frozen()).expect_err("quantized");
    assert!(matches!(&refused, ParallelError::Quantized { path } if path == "table.weight"), "{refused}");
    let none = all_frozen().with_group(ParamGroup::from_path("nothing"));
    assert!(shard_frozen(quantized, &devices(2), &none).is_ok());
    assert!(matches!(shard_frozen(Layered::new(), &[], &all_frozen()), Err(ParallelError::NoDevices)));
}

/// A module that records no gradients, since it is on a plain device or in validation, is divided as what replicas train.
#[test]
fn modules_without_autodiff_are_trained() {
    let model = whole_model::<Llama>();
    let devices = mixed(2);
    let gradients = |model: &Llama, options: &ReplicaOptions| {
        let replicas = Replicas::with_options(model, devices.clone(), options).expect("replicas");
        let parts = divide(&tokens(0, 4), &[3, 1], &devices);
        let (loss, gradients) =
            replicas.backward(parts, |model, (input, next)| model.loss(input, next)).expect("parts");
        (loss.into_scalar::<f32>(), gradients.len(), replicas.traffic())
    };
    let frozen = ReplicaOptions::new().with_sharded_frozen(FrozenOptions::new().with_min_bytes(0));
    for options in [ReplicaOptions::new(), sharded(), frozen] {
        let expected = gradients(&model, &options);
        assert!(expected.1 > 2, "{expected:?}");
        assert_eq!(gradients(&model.valid(), &options), expected, "{options:?}");
        let [ours, plain] = [&model, &model.valid()].map(|model| {
            estimate_replicas(model, &devices, &options, OptimizerState::Two).expect("an estimate")
        });
        assert_eq!(ours, plain);
        assert!(plain.devices[0].trained > 0);
    }
}

/// A teacher that follows a student is frozen, and changes in all replicas.
#[test]
fn frozen_values_that_a_step_changes_are_those_of_all_replicas() {
    let device = device();
    for options in [ReplicaOptions::new(), sharded()] {
        device.seed(1);
        let [student, teacher] = [0, 1].map(|_| LinearConfig::new(3, 2).init(&device));
        let mut replicas =
            Replicas::with_options(&vec![student, teacher.freeze()], mixed(2), &options).expect("replicas");
        for step in 0..3 {
            replicas.update(|mut model| {
                let student = model[0].clone().valid().train();
                let student = student.map(&mut Shift(step as f32 + 1.0));
                model[1] = student.clone().freeze();
                model
            });
            let x = || Tensor::<2>::ones([1, 3], &device);
            let expected = replicas.module()[1].forward(x()).sum().into_scalar::<f32>();
            for replica in 0..2 {
                let part = |index: usize| (x().to_device(&mixed(2)[index]), usize::from(index == replica));
                let loss = |model: &Vec<burn_memsave::nn::Linear>, x: Tensor<2>| {
                    model[0].forward(x.clone()).sum() * 0.0 + model[1].forward(x).sum()
                };
                let (loss, _) = replicas.backward([part(0), part(1)], loss).expect("parts");
                assert!(
                    (loss.into_scalar::<f32>() - expected).abs() < 1e-5,
                    "step {step}, replica {replica}"
                );
            }
        }
    }
}

/// Adds a number to every parameter.
struct Shift(f32);

impl ModuleMapper for Shift {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        param.map(|value| (value.inner() + self.0).autodiff().require_grad())
    }
}

/// With a divided optimizer, one backward pass runs through all graphs.
#[test]
fn strategies_of_a_divided_optimizer_are_equal() {
    let devices = || [device(), device().gradient_checkpointing()];
    let model = whole_model::<Llama>();
    let refused = Replicas::with_options(&model, devices(), &sharded()).expect_err("two strategies");
    assert!(matches!(refused, ParallelError::Strategy { index: 1 }), "{refused}");
    assert!(Replicas::new(&model, devices()).is_ok());
}

/// The estimate is what initializes them.
#[test]
fn tied_parameters_that_are_not_initialized_count_once() {
    let first = LinearConfig::new(4, 4).init(&device());
    let pair = Pair { first: first.clone(), second: first };
    let options = sharded();
    let needed = estimate_replicas(&pair, &mixed(2), &options, OptimizerState::One).expect("an estimate");
    let bytes = (4 * 4 + 4) * 4;
    assert!(needed.devices.iter().all(|device| device.trained == bytes));
    assert_eq!(needed.devices.iter().map(|device| device.optimizer).sum::<u64>(), bytes);
}
