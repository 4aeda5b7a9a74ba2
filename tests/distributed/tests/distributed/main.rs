//! Layers in Burn's distributed training: two devices, each with its part of a batch, under Burn's learner with
//! `ExecutionStrategy::ddp` and without.
//!
//! Burn counts the gradients of a parameter in a backward pass to know when to reduce it, and waits for all devices at its end. Of a
//! layer that gave one gradient less than the graph says, the parameter would not be reduced, or all would wait forever; one more is a
//! panic, and without overflow checks would be left out of the sum.
#![recursion_limit = "256"]
use burn::backend::distributed::{DistributedConfig, ReduceOperation};
use burn::module::{Module, ModuleMapper, Param};
use burn::nn::LinearConfig;
use burn::optim::AdamConfig;
use burn::tensor::{DType, Device, Tensor, TensorData, distributed::DistributedContext};
use burn_memsave::checkpoint::checkpoint;
use burn_memsave::nn;
use burn_memsave::optim::step_in_backward;
use burn_memsave_distributed::{devices, reductions};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Mutex, MutexGuard, PoisonError, mpsc};
use std::time::Duration;
use std::{process, thread};
use table::closeness::Closeness;
use table::run::{Layer, Named, Setting, outcome, parameter_gradients};
use table::{Check, Row, Visitor};

mod learner;
#[path = "../../../remote/model.rs"]
mod model;
#[path = "../../../table/mod.rs"]
mod table;

/// Two devices whose gradients are reduced, for one test at a time: Burn has one such group per backend.
struct Group {
    devices: [Device; 2],
    _context: DistributedContext,
    _alone: MutexGuard<'static, ()>,
}

impl Group {
    fn new(op: ReduceOperation) -> Self {
        let alone = alone();
        let devices: [Device; 2] = devices(2).try_into().expect("two devices");
        let config = DistributedConfig { all_reduce_op: op };
        let _context = DistributedContext::init(devices.to_vec(), config);
        Self { devices: devices.map(Device::autodiff), _context, _alone: alone }
    }

    /// Runs a function for each device, all at once: a backward pass returns when all devices have run theirs.
    fn each<T: Send>(&self, run: impl Fn(usize, &Device) -> T + Sync) -> [T; 2] {
        let run = &run;
        in_time(|| {
            thread::scope(|scope| {
                let threads = [0, 1].map(|at| scope.spawn(move || run(at, &self.devices[at])));
                threads.map(|thread| thread.join().expect("no panic"))
            })
        })
    }
}

fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Ends the process where devices wait for each other forever, since nothing can end a thread.
fn in_time<T>(run: impl FnOnce() -> T) -> T {
    let (done, wait) = mpsc::channel::<()>();
    let name = thread::current().name().unwrap_or_default().to_string();
    thread::spawn(move || {
        if wait.recv_timeout(Duration::from_secs(120)) == Err(mpsc::RecvTimeoutError::Timeout) {
            eprintln!("{name}: Burn waits for a gradient that is not given");
            process::abort();
        }
    });
    let result = run();
    drop(done);
    result
}

/// Marks what is trained, as `ExecutionStrategy::ddp` does. Parameters at the same place are one for all devices.
#[derive(Default)]
struct Distribute {
    place: u64,
}

impl ModuleMapper for Distribute {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        self.place += 1;
        match param.is_require_grad() {
            true => param.map(|value| value.set_distributed(self.place.into())),
            false => param,
        }
    }
}

/// Every parameter's gradient is the sum of the gradients of both devices, in every case of every layer.
#[test]
fn every_layer_reduces_its_gradients() {
    let mut layers = Layers { group: Group::new(ReduceOperation::Sum), compared: 0, failures: vec![] };
    table::visit(&mut layers);
    assert!(layers.failures.is_empty(), "{}", layers.failures.join("\n"));
    assert!(layers.compared > 500, "{} gradients", layers.compared);
}

/// Rows that the same check on another backend leaves out, though they can be summed: not those that draw, for which the parts
/// would have to draw the same, nor quantized ones, since Burn's remote backend cannot quantize.
const ADAPTED: [&str; 4] = ["linear, LoRA", "linear, DoRA", "conv2d, LoRA", "embedding, LoRA"];

struct Layers {
    group: Group,
    compared: usize,
    failures: Vec<String>,
}

impl Visitor for Layers {
    fn row<const D: usize, const O: usize, S, M>(&mut self, row: Row<'_, D, O, S, M>)
    where
        S: Module + std::fmt::Display + From<M>,
        M: Module + std::fmt::Display + From<S>,
    {
        if !ADAPTED.contains(&row.name.as_str()) && row.notes.leaves_out(Check::Wgpu, &row.name) {
            return;
        }
        let (init, forward, shape) = (&row.stock.init, &row.ours.forward, row.shapes.test);
        let run = |at: usize, device: &Device, case, distributed| {
            let setting = Setting::new(device, case, DType::F32);
            let mut ours = M::from(setting.fill(init(device, shape)));
            if distributed {
                ours = ours.map(&mut Distribute::default());
            }
            // Another input on each device.
            let forward = |x| forward(&ours, x * [1.0, 0.5][at]);
            let gradients = |gradients: &_| parameter_gradients(&ours, gradients);
            outcome(&Layer { forward: &forward, gradients: &gradients }, &setting, shape)
        };
        for case in table::Case::ALL {
            for checkpointing in [false, true] {
                let strategy = |device: &Device| match checkpointing {
                    true => device.clone().gradient_checkpointing(),
                    false => device.clone(),
                };
                let host = strategy(&Device::flex().autodiff());
                let parts = [0, 1].map(|at| of_parameters(run(at, &host, case, false)));
                if parts[0].is_empty() {
                    continue;
                }
                let before = reductions();
                let reduced =
                    self.group.each(|at, device| run(at, &strategy(device), case, true)).map(of_parameters);
                let what = format!("{}, {case:?}, checkpointing: {checkpointing}", row.name);
                let count = reductions() - before;
                if count != parts[0].len() {
                    self.failures.push(format!("{what}: {count} of {} were reduced", parts[0].len()));
                }
                for (name, failure) in reduced.iter().flat_map(|reduced| differences(reduced, &parts)) {
                    self.failures.push(format!("{what}: {name}: {failure}"));
                }
                self.compared += count;
            }
        }
    }
}

/// The gradients that there are of parameters.
fn of_parameters(outcome: Vec<Named>) -> Vec<Named> {
    let of_parameter =
        |(name, data): &Named| data.is_some() && !["output", "gradient of x"].contains(&name.as_str());
    outcome.into_iter().filter(of_parameter).collect()
}

/// What is not the sum of the parts.
fn differences<'a>(
    reduced: &'a [Named],
    parts: &'a [Vec<Named>; 2],
) -> impl Iterator<Item = (&'a str, String)> {
    let lengths = (reduced.len() != parts[0].len()).then(|| ("", format!("{} gradients", reduced.len())));
    let each = reduced.iter().zip(parts[0].iter().zip(&parts[1])).filter_map(|((name, reduced), (a, b))| {
        let [a, b, reduced] =
            [&a.1, &b.1, reduced].map(|data| data.as_ref().expect("of those that there are"));
        let sum: Vec<f32> = a.iter::<f32>().zip(b.iter::<f32>()).map(|(a, b)| a + b).collect();
        let sum = TensorData::new(sum, a.shape().clone());
        Some((name.as_str(), Closeness::Relative(1e-4).compare(reduced, &sum, None).err()?))
    });
    lengths.into_iter().chain(each)
}

/// A layer that is used twice: its gradients are reduced when both are there.
#[test]
fn a_layer_used_twice_is_reduced_once() {
    let group = Group::new(ReduceOperation::Sum);
    let gradients = |at: usize, device: &Device, distributed: bool| {
        let setting = Setting::new(device, table::Case::Trainable, DType::F32);
        let mut layer = nn::Linear::from(setting.fill(LinearConfig::new(6, 6).init(device)));
        if distributed {
            layer = layer.map(&mut Distribute::default());
        }
        let x = setting.input([5, 6], -1.0..1.0, at as u64);
        let y = layer.forward(layer.forward(x).tanh());
        of_parameters(parameter_gradients(&layer, &y.powf_scalar(2.0).sum().backward()))
    };
    let before = reductions();
    let reduced = group.each(|at, device| gradients(at, device, true));
    assert_eq!(reductions() - before, 2);
    let parts = [0, 1].map(|at| gradients(at, &Device::flex().autodiff(), false));
    for reduced in &reduced {
        let differences: Vec<_> = differences(reduced, &parts).collect();
        assert!(differences.is_empty(), "{differences:?}");
    }
}

/// A backward pass within a backward pass would be counted as one of the group, also where nothing in it is trained; an update in
/// the backward pass would see the gradient of one device. Both say so before anything is computed.
#[test]
fn what_cannot_be_reduced_is_refused() {
    let group = Group::new(ReduceOperation::Sum);
    let refused = group.each(|_, device| {
        let setting = Setting::new(device, table::Case::Trainable, DType::F32);
        let layer = nn::Linear::from(setting.fill(LinearConfig::new(4, 4).init(device)));
        let x = Tensor::<2>::ones([2, 4], device).require_grad();
        let segments = [layer.clone().freeze(), layer.clone().map(&mut Distribute::default())].map(|layer| {
            let run = || drop(checkpoint(&layer, x.clone(), |layer, x: Tensor<2>| layer.forward(x)));
            let panic = catch_unwind(AssertUnwindSafe(run)).expect_err("refused");
            panic.downcast_ref::<&str>().expect("a message").to_string()
        });
        let mut optimizer = AdamConfig::new().init();
        let layer = layer.map(&mut Distribute::default());
        let step = step_in_backward(layer, &mut optimizer, 0.1, |layer| layer.forward(x.clone()).sum());
        (segments, step.expect_err("refused").to_string())
    });
    for (segments, update) in refused {
        assert!(segments.iter().all(|message| message.contains("ExecutionStrategy::ddp")), "{segments:?}");
        assert!(update.starts_with("weight") && update.contains("ExecutionStrategy::ddp"), "{update}");
    }
}
