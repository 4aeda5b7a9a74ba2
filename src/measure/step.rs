//! [`measure_step`] and [`measure_layer`]: memory and time of one forward and backward pass.
use super::allocator::TrackingAllocator;
use super::bytes::{bytes_or_unknown, human_bytes, seconds, tensor_bytes};
use super::device::{Meter, Metering, warm_up};
use super::table::{number, table};
use crate::parameters::{EachOnce, each_once};
use burn::backend::autodiff::NodeId;
use burn::module::{Module, Param};
use burn::tensor::{Bool, Device, Gradients, Int, Tensor};
use burn_memsave_layers::node::node_id;
use comfy_table::Cell;
use serde::Serialize;
use std::fmt;
use std::time::Duration;
use web_time::Instant;

/// Memory, gradients and time of one training step. Made by [`measure_step`], displayed as a table, serialized with times in seconds.
///
/// ```
/// use burn::nn::LinearConfig;
/// use burn::tensor::{Device, Tensor};
/// use burn_memsave::measure::measure_step;
///
/// let device = Device::flex().autodiff();
/// let model = LinearConfig::new(8, 4).init(&device);
/// let step = measure_step(&model, Tensor::<2>::ones([2, 8], &device), |model, x| model.forward(x).sum());
/// assert!(step.to_string().contains("gradients"));
/// assert_eq!(step.gradients, 4 * (8 * 4 + 4));
/// ```
#[derive(Clone, Debug, Serialize)]
pub struct Measurement {
    /// Bytes that are alive after the forward pass, when only the loss is held, and were not before: what the graph keeps. The input counts
    /// if the graph keeps it. Parameters and the loss do not count.
    pub kept: Option<u64>,
    /// The most bytes alive at one time during the forward and backward pass, beyond parameters and input. Gradients count. On a
    /// device, the memory is read at launches of kernels.
    pub peak: Option<u64>,
    /// Bytes that the memory pool of a device had reserved for everything after the step.
    pub reserved: Option<u64>,
    /// Kernels launched on a device.
    pub launches: Option<u64>,
    /// Bytes of the gradients of the model's parameters.
    pub gradients: u64,
    /// Time of the forward pass and the loss.
    #[serde(rename = "forward_seconds", serialize_with = "seconds")]
    pub forward_time: Duration,
    /// Time of the backward pass; zero if nothing requires a gradient.
    #[serde(rename = "backward_seconds", serialize_with = "seconds")]
    pub backward_time: Duration,
}

impl fmt::Display for Measurement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let time = |time: Duration| format!("{:.3} ms", time.as_secs_f64() * 1e3);
        let rows = [
            ("kept after the forward pass", bytes_or_unknown(self.kept)),
            ("peak beyond parameters and input", bytes_or_unknown(self.peak)),
            ("gradients of parameters", human_bytes(self.gradients)),
            ("forward", time(self.forward_time)),
            ("backward", time(self.backward_time)),
        ];
        let of_device = [
            ("reserved by the device's pool", self.reserved.map(human_bytes)),
            ("kernels launched", self.launches.map(|launches| launches.to_string())),
        ];
        let of_device = of_device.into_iter().filter_map(|(name, value)| Some((name, value?)));
        let mut table = table(["one step", ""]);
        for (name, value) in rows.into_iter().chain(of_device) {
            table.add_row([Cell::new(name), number(value)]);
        }
        write!(f, "{table}")
    }
}

/// Memory of the forward and backward pass of one layer. Made by [`measure_layer`].
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use burn_memsave::measure::{TrackingAllocator, measure_layer};
///
/// let device = Device::flex().autodiff();
/// let layer = measure_layer(|| Tensor::<1>::ones([640], &device).require_grad(), |x| x.exp());
/// assert_eq!(layer.kept.is_some(), TrackingAllocator::is_installed());
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct LayerMeasurement {
    /// Bytes that are alive after the forward pass, when only the output is held. The input counts if and only if the graph keeps it. The
    /// output and everything that lived before, such as parameters, do not count.
    pub kept: Option<u64>,
    /// The most bytes alive at one time during the forward pass, beyond the input and what lived before.
    pub forward_peak: Option<u64>,
    /// The same for the forward and the backward pass.
    pub peak: Option<u64>,
    /// Bytes that the memory pool of a device had reserved for everything afterwards.
    pub reserved: Option<u64>,
    /// Kernels launched on a device.
    pub launches: Option<u64>,
}

/// Input of a measured step: a tensor of any kind, a pair of inputs, or your own batch type.
///
/// A measurement runs on a copy of the input, so it does not matter who else holds the input.
///
/// ```
/// use burn::tensor::{Device, Int, Tensor};
/// use burn_memsave::measure::StepInput;
///
/// let device = Device::flex();
/// let (tokens, weights) = (Tensor::<2, Int>::ones([4, 16], &device), Tensor::<1>::ones([4], &device));
/// let batch = (tokens, weights);
/// assert_eq!(batch.bytes(), 4 * 16 * batch.0.dtype().size() as u64 + 4 * 4);
/// assert_eq!(batch.copy().1.to_data(), batch.1.to_data());
/// ```
pub trait StepInput {
    /// The same values in memory of their own. Each tensor is tracked if its original is.
    fn copy(&self) -> Self;
    /// The bytes of the values.
    fn bytes(&self) -> u64;
    /// Where they are.
    fn device(&self) -> Device;
    /// The nodes of its tensors in graphs.
    #[doc(hidden)]
    fn nodes(&self) -> Vec<NodeId> {
        vec![]
    }
}

impl<const D: usize> StepInput for Tensor<D> {
    fn copy(&self) -> Self {
        let copy = Self::from_data(self.to_data(), (&self.device(), self.dtype()));
        if self.is_tracked() { copy.require_grad() } else { copy }
    }
    fn bytes(&self) -> u64 {
        tensor_bytes(self)
    }
    fn device(&self) -> Device {
        Tensor::device(self)
    }
    fn nodes(&self) -> Vec<NodeId> {
        node_id(self.clone()).into_iter().collect()
    }
}

macro_rules! untracked_step_input {
    ($($kind:ty),+) => {$(
        impl<const D: usize> StepInput for Tensor<D, $kind> {
            fn copy(&self) -> Self {
                Self::from_data(self.to_data(), (&self.device(), self.dtype()))
            }
            fn bytes(&self) -> u64 {
                tensor_bytes(self)
            }
            fn device(&self) -> Device {
                Tensor::device(self)
            }
        }
    )+};
}
untracked_step_input!(Int, Bool);

impl<A: StepInput, B: StepInput> StepInput for (A, B) {
    fn copy(&self) -> Self {
        (self.0.copy(), self.1.copy())
    }
    fn bytes(&self) -> u64 {
        self.0.bytes() + self.1.bytes()
    }
    fn device(&self) -> Device {
        self.0.device()
    }
    fn nodes(&self) -> Vec<NodeId> {
        [self.0.nodes(), self.1.nodes()].concat()
    }
}

/// Measures one training step: `loss` runs the forward pass and returns the loss, and the backward pass follows.
///
/// The step runs on a copy of `input`, which is a leaf that requires a gradient if `input` is tracked. The backward pass ends there.
///
/// The step runs twice, and the second run is measured, since the first one also initializes lazy parameters, starts thread pools and
/// compiles kernels. On a device the times are those of a third run, since reading the memory at every launch takes time. Side effects of a
/// step (running statistics, random numbers) happen each time. Nothing else should run at the same time, since memory is counted for the
/// whole program or device. A few hundred bytes per operation are the graph's own records. On devices with a memory pool, the unused part
/// of the pool is released first (see [`peak_bytes`](super::peak_bytes)), which may lengthen the forward pass.
///
/// ```
/// use burn::nn::LinearConfig;
/// use burn::tensor::{Device, Tensor};
/// use burn_memsave::measure::{TrackingAllocator, measure_step};
///
/// #[global_allocator]
/// static ALLOCATOR: TrackingAllocator = TrackingAllocator::new();
///
/// let device = Device::flex().autodiff();
/// let model = LinearConfig::new(256, 256).init(&device);
/// let x = Tensor::<2>::ones([64, 256], &device);
/// let step = measure_step(&model, x, |model, x| model.forward(x).sum());
/// assert!(step.kept >= Some(64 * 256 * 4)); // x
/// assert!(step.peak >= Some(step.gradients + 64 * 256 * 4)); // gradients and the output's gradient
/// ```
pub fn measure_step<M: Module, I: StepInput>(
    model: &M,
    input: I,
    loss: impl Fn(&M, I) -> Tensor<1>,
) -> Measurement {
    let step = |metering| step(metering, model, &input, &loss);
    drop(step(Metering::Nothing));
    let run = step(Metering::Launches);
    // Reading the memory of a device takes time that does not belong to the step.
    let times = run.memory.launches.map(|_| step(Metering::Nothing));
    let [forward_time, backward_time] = times.as_ref().unwrap_or(&run).times;
    let LayerMeasurement { kept, peak, reserved, launches, .. } = run.memory;
    Measurement {
        kept,
        peak,
        reserved,
        launches,
        gradients: run.gradients.map_or(0, |gradients| gradient_bytes(model, &gradients)),
        forward_time,
        backward_time,
    }
}

/// Measures `forward(input())` and the backward pass of its sum.
///
/// `input` must make a new tensor and return the only handle of it. Then `kept` is exact: the live bytes after the forward pass, minus
/// those before the input was made, minus those of the output. The peaks do not count the input either. If nothing requires a gradient,
/// there is no backward pass.
///
/// The layer runs once: call this twice with the same shapes, and use the second result. Everything else is as for [`measure_step`].
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use burn_memsave::{functional, measure::{TrackingAllocator, measure_layer}};
///
/// #[global_allocator]
/// static ALLOCATOR: TrackingAllocator = TrackingAllocator::new();
///
/// let device = Device::flex().autodiff();
/// let kept = |forward: fn(Tensor<1>) -> Tensor<1>| {
///     let run = || measure_layer(|| Tensor::<1>::ones([64_000], &device).require_grad(), forward);
///     run();
///     run().kept.unwrap()
/// };
/// assert!(kept(burn::tensor::activation::relu) >= 4 * 64_000); // the input
/// assert!(kept(functional::relu) < 64_000 / 8 + 4000); // one bit per element
/// ```
pub fn measure_layer<const D: usize, const O: usize>(
    input: impl FnOnce() -> Tensor<D>,
    forward: impl Fn(Tensor<D>) -> Tensor<O>,
) -> LayerMeasurement {
    run(Metering::Launches, input, forward, |output| output.sum()).memory
}

/// One step on a copy of the input.
pub(super) fn step<M: Module, I: StepInput>(
    metering: Metering,
    model: &M,
    input: &I,
    loss: &impl Fn(&M, I) -> Tensor<1>,
) -> MeasuredPass {
    run(metering, || input.copy(), |input| loss(model, input), |loss| loss)
}

pub(super) struct MeasuredPass {
    pub(super) memory: LayerMeasurement,
    gradients: Option<Gradients>,
    /// Forward and backward.
    times: [Duration; 2],
}

/// One forward and, if the output is tracked, one backward pass from `scalar(output)`.
fn run<I: StepInput, const O: usize>(
    metering: Metering,
    input: impl FnOnce() -> I,
    forward: impl FnOnce(I) -> Tensor<O>,
    scalar: impl FnOnce(Tensor<O>) -> Tensor<1>,
) -> MeasuredPass {
    warm_up();
    let live_before = TrackingAllocator::live();
    let input = input();
    let input_bytes = input.bytes();
    let meter = Meter::start(metering, input.device(), input_bytes, live_before);
    let peak = || Some(meter.peak()?.saturating_sub(input_bytes));

    let start = Instant::now();
    let output = forward(input);
    meter.settle();
    let forward_time = start.elapsed();
    let kept = meter.live().map(|live| live.saturating_sub(tensor_bytes(&output)));
    let forward_peak = peak();

    let start = Instant::now();
    let gradients = output.is_tracked().then(|| scalar(output).backward());
    meter.settle();
    let backward_time = if gradients.is_some() { start.elapsed() } else { Duration::ZERO };
    let (launches, peak, reserved) = (meter.launches(), peak(), meter.reserved());
    let memory = LayerMeasurement { kept, forward_peak, peak, reserved, launches };
    MeasuredPass { memory, gradients, times: [forward_time, backward_time] }
}

/// Bytes of the gradients of a model's parameters. A tied parameter counts once.
pub(super) fn gradient_bytes<M: Module>(model: &M, gradients: &Gradients) -> u64 {
    let mut visitor = GradientBytes { gradients, bytes: 0 };
    each_once(model, &mut visitor);
    visitor.bytes
}

struct GradientBytes<'a> {
    gradients: &'a Gradients,
    bytes: u64,
}

impl EachOnce for GradientBytes<'_> {
    fn visit<const D: usize>(&mut self, param: &Param<Tensor<D>>, _: &[String]) {
        // A parameter that is still lazy took no part, and reading its value would initialize it.
        if param.is_initialized() {
            self.bytes += param.grad(self.gradients).map_or(0, |gradient| tensor_bytes(&gradient));
        }
    }
}
