//! [`timeline`](timeline()): follows the memory over one step, by categories.
mod moments;

use super::bytes::tensor_bytes;
use super::device::{Laps, bytes_in_use, warm_up};
use super::ledger::{Path, bytes_once, modules_of, paths, shown};
use super::step::{StepInput, gradient_bytes};
use crate::parameters::{EachOnce, each_once};
use crate::strategy::sweep;
use burn::backend::autodiff::NodeId;
use burn::module::{Module, Param};
use burn::tensor::Tensor;
use burn_memsave_layers::graph::watch::{Happened, LiveStep, Phase, Watch};
pub use moments::{Moment, Timeline};
use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use web_time::Instant;

/// Follows one training step: what is alive after each operation of this library, forward and backward.
///
/// `loss` runs the forward pass and returns the loss. If it is tracked, the backward pass follows. The step runs twice on a copy of the
/// input, and the second run is followed. Bytes are counted on CPU devices if the [`TrackingAllocator`](super::TrackingAllocator) is
/// installed, and on devices with a memory pool. Elsewhere the timeline has only what is known without counting. Nothing else should run
/// meanwhile.
///
/// At each [moment](Moment), the categories add up to exactly what is counted, and [`most`](Moment::most) is the peak since the moment
/// before, so no peak is missed. The categories are exact for operations of this library. What other operations keep is `temporary`.
/// Gradients of parameters that come from operations of Burn or from [segments](crate::checkpoint) are `temporary` until the end. An
/// [update in the backward pass](crate::optim) frees gradients without this knowing.
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use burn_memsave::measure::{TrackingAllocator, timeline};
/// use burn_memsave::nn::LinearConfig;
///
/// #[global_allocator]
/// static ALLOCATOR: TrackingAllocator = TrackingAllocator::new();
///
/// let device = Device::flex().autodiff();
/// let model = vec![LinearConfig::new(64, 64).init(&device), LinearConfig::new(64, 4).init(&device)];
/// let x = Tensor::<2>::ones([32, 64], &device);
/// let timeline = timeline(&model, x, |model, x| model[1].forward(model[0].forward(x)).mean());
/// let operations: Vec<_> = timeline.moments.iter().map(|moment| (moment.phase, moment.module.as_str())).collect();
/// assert_eq!(
///     operations,
///     [("start", ""), ("forward", "0"), ("forward", "1"), ("turn", ""), ("backward", "1"), ("backward", "0"), ("end", "")]
/// );
/// assert_eq!(timeline.moments[3].input + timeline.moments[3].activation, 2 * 32 * 64 * 4);
/// assert!(timeline.to_svg().starts_with("<svg"));
/// ```
pub fn timeline<M: Module, I: StepInput>(model: &M, input: I, loss: impl Fn(&M, I) -> Tensor<1>) -> Timeline {
    let warm_up = follow(model, &input, &loss, 0);
    follow(model, &input, &loss, warm_up.moments.len())
}

/// `moments`: the expected number of moments. Room for them is allocated before memory is counted.
fn follow<M: Module, I: StepInput>(
    model: &M,
    input: &I,
    loss: impl Fn(&M, I) -> Tensor<1>,
    moments: usize,
) -> Timeline {
    let device = input.device();
    sweep(&device);
    let modules = modules_of(model);
    let mut log = Log {
        laps: None,
        base: 0,
        start: Instant::now(),
        parameters: modules.keys().copied().collect(),
        parameter_bytes: parameter_bytes(model),
        inputs: HashSet::new(),
        gradients: HashMap::with_capacity(modules.len()),
        moments: Vec::with_capacity(moments),
    };
    warm_up();
    log.base = bytes_in_use(&device).unwrap_or(0) as i64;
    let copy = input.copy();
    log.inputs.extend(copy.nodes());
    log.laps = Laps::start(&device);
    log.start = Instant::now();
    let log = Arc::new(Mutex::new(log));
    lock(&log).record(At { phase: "start", operation: "", weight: None }, &mut std::iter::empty());
    if let Some(start) = lock(&log).moments.last_mut() {
        start.0.input = input.bytes();
        start.0.temporary = start.0.temporary.map(|bytes| bytes.saturating_sub(input.bytes()));
    }

    let told = log.clone();
    let watch = Watch::telling(Box::new(move |happened, steps| lock(&told).tell(happened, steps)));
    let result = watch.during(|| loss(model, copy));
    lock(&log).record(At { phase: "turn", operation: "", weight: None }, &mut watch.alive().iter());
    if result.is_tracked() {
        let gradients = watch.during(|| result.backward());
        let mut log = lock(&log);
        log.gradients.clear();
        log.record(At { phase: "end", operation: "", weight: None }, &mut watch.alive().iter());
        let bytes = gradient_bytes(model, &gradients);
        if let Some((end, _)) = log.moments.last_mut() {
            end.gradient = bytes;
            end.temporary = end.temporary.map(|temporary| temporary.saturating_sub(bytes));
        }
    }

    let moments = std::mem::take(&mut lock(&log).moments);
    let paths = paths(moments.iter().map(|(_, weight)| *weight), &modules);
    let named = moments.into_iter().zip(paths).map(|((moment, _), path): (_, Path)| {
        let module = if moment.operation.is_empty() { String::new() } else { shown(&path, moment.operation) };
        Moment { module, ..moment }
    });
    Timeline { moments: named.collect() }
}

/// What is recorded of a step.
struct Log {
    laps: Option<Laps>,
    /// Bytes alive before the step, parameters included.
    base: i64,
    start: Instant,
    parameters: HashSet<NodeId>,
    parameter_bytes: u64,
    inputs: HashSet<NodeId>,
    /// Bytes of the gradients of parameters, so far.
    gradients: HashMap<NodeId, u64>,
    /// Each with the node of the operation's weight.
    moments: Vec<(Moment, Option<NodeId>)>,
}

fn lock(log: &Mutex<Log>) -> MutexGuard<'_, Log> {
    log.lock().unwrap_or_else(PoisonError::into_inner) // every statement leaves it whole
}

/// Where a moment is.
struct At {
    phase: &'static str,
    operation: &'static str,
    weight: Option<NodeId>,
}

impl Log {
    fn tell(&mut self, happened: Happened, steps: &mut dyn Iterator<Item = &LiveStep>) {
        let Happened { operation, weight, phase } = happened;
        let phase = match phase {
            Phase::Forward => "forward",
            Phase::Backward(gradients) => {
                for (node, bytes) in gradients {
                    if self.parameters.contains(&node) {
                        self.gradients.insert(node, bytes as u64);
                    }
                }
                "backward"
            }
        };
        self.record(At { phase, operation, weight }, steps);
    }

    fn record(&mut self, at: At, steps: &mut dyn Iterator<Item = &LiveStep>) {
        let lap = self.laps.as_mut().map(Laps::lap);
        let time = self.start.elapsed();
        let entries = steps.flat_map(|step| &step.entries);
        let (tensors, others) = bytes_once(entries, |node| self.parameters.contains(node));
        let (mut input, mut activation) = (0, others);
        for (node, bytes) in tensors {
            if self.inputs.contains(&node) { input += bytes } else { activation += bytes }
        }
        let gradient = self.gradients.values().sum::<u64>();
        let known = (input + activation + gradient) as i64;
        let (parameter, base) = (self.parameter_bytes, self.base);
        let beyond = |bytes: i64| (bytes - base).max(0);
        let moment = Moment {
            time,
            phase: at.phase,
            module: String::new(),
            operation: at.operation,
            parameter,
            optimizer_state: 0,
            input,
            activation,
            gradient,
            temporary: lap.map(|lap| (beyond(lap.live) - known).max(0) as u64),
            most: lap.map(|lap| parameter + beyond(lap.most) as u64),
        };
        self.moments.push((moment, at.weight));
    }
}

/// Bytes of the parameters of a model. A tied parameter counts once.
fn parameter_bytes<M: Module>(model: &M) -> u64 {
    struct Bytes(u64);
    impl EachOnce for Bytes {
        fn visit<const D: usize>(&mut self, param: &Param<Tensor<D>>, _: &[String]) {
            // A parameter that is still lazy takes no memory.
            if param.is_initialized() {
                self.0 += tensor_bytes(&param.base());
            }
        }
    }
    let mut bytes = Bytes(0);
    each_once(model, &mut bytes);
    bytes.0
}
