//! [`estimate`](estimate()) and [`estimate_step`]: what training needs, before anything is allocated.
use super::{PlanError, dry_run};
use crate::measure::{StepInput, measure_step};
use crate::ops::BLOCK;
use crate::optim::{AdamW8bitConfig, Muon8bitConfig};
use crate::parameters::{EachOnce, each_once};
use burn::module::{Module, Param, ParamGroup};
use burn::tensor::{DType, Device, Tensor};

/// What an optimizer keeps of a parameter between steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum OptimizerState {
    /// Nothing: stochastic gradient descent.
    None,
    /// One number per element, of the parameter's type: descent with momentum, Muon, AdaGrad, RMSProp.
    One,
    /// Two: Adam, AdamW.
    Two,
    /// [`AdamW8bit`](crate::optim::AdamW8bit), as it is configured by default.
    AdamW8bit,
    /// [`Muon8bit`](crate::optim::Muon8bit), as it is configured by default.
    Muon8bit,
}

impl OptimizerState {
    /// Bytes for a parameter with this number of elements and bytes per element.
    pub(crate) fn bytes(self, elements: u64, element: u64) -> u64 {
        // Codes in whole blocks, with a scale per block; f32 for a smaller parameter.
        let coded = |least: usize| match elements < least as u64 {
            true => 4 * elements,
            false => elements.div_ceil(BLOCK as u64) * (BLOCK as u64 + 4),
        };
        match self {
            Self::None => 0,
            Self::One => elements * element,
            Self::Two => 2 * elements * element,
            Self::AdamW8bit => 2 * coded(AdamW8bitConfig::new().min_8bit_size),
            Self::Muon8bit => coded(Muon8bitConfig::new().min_8bit_size),
        }
    }
}

/// Bytes of this many floats, which may be quantized, without their scales.
pub(crate) fn float_bytes(dtype: DType, elements: u64) -> u64 {
    match dtype {
        DType::QFloat(scheme) => (elements * scheme.size_bits_value() as u64).div_ceil(8),
        _ => elements * dtype.size() as u64,
    }
}

/// Bytes that training needs for any batch. Made by [`estimate`](estimate()).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Estimate {
    /// All parameters.
    pub parameters: u64,
    /// The gradients of the trained parameters at the end of the backward pass. With
    /// [`step_in_backward`](crate::optim::step_in_backward) they never exist at the same time.
    pub gradients: u64,
    /// The state of the optimizer.
    pub optimizer: u64,
}

impl Estimate {
    /// The sum of all three.
    pub fn total(&self) -> u64 {
        self.parameters + self.gradients + self.optimizer
    }
}

/// Reports the bytes of parameters, gradients and the optimizer's state before anything is allocated. The parameters of the model need not
/// exist: a model that was just made by its config has only their shapes, and this does not allocate them.
///
/// `trained`: the parameters that will be trained. A parameter that exists must also require a gradient to count as trained. If it does not
/// exist, Burn does not know whether it requires one, so it counts, and its elements count as f32. Weights that
/// [stay in a file](crate::lazy) count as if they were in memory. The scales of quantized weights do not count.
///
/// What a forward pass keeps and the peak depend on what runs. [`measure_step`] reports them for a batch of one item, and
/// [`largest_batch`](super::largest_batch) finds how they grow. On wgpu and CUDA, [`estimate_step`] reports them before there is memory for
/// the step.
///
/// ```
/// use burn::module::ParamGroup;
/// use burn::tensor::Device;
/// use burn_memsave::nn::LinearConfig;
/// use burn_memsave::plan::{OptimizerState, estimate};
///
/// // 16 GiB that are not there.
/// let model = LinearConfig::new(65_536, 65_536).with_bias(false).init(&Device::flex());
/// let needed = estimate(&model, &ParamGroup::all(), OptimizerState::Two);
/// assert_eq!((needed.parameters, needed.total()), (16 << 30, 64 << 30));
/// ```
pub fn estimate<M: Module>(model: &M, trained: &ParamGroup, optimizer: OptimizerState) -> Estimate {
    struct Sum<'a> {
        trained: &'a ParamGroup,
        optimizer: OptimizerState,
        sum: Estimate,
    }
    impl EachOnce for Sum<'_> {
        fn visit<const D: usize>(&mut self, param: &Param<Tensor<D>>, path: &[String]) {
            let (dtype, may_train) = match param.is_initialized() {
                true => (param.base().dtype(), param.is_require_grad()),
                false => (DType::F32, true),
            };
            let (elements, element) = (param.lazy_shape().num_elements() as u64, dtype.size() as u64);
            self.sum.parameters += float_bytes(dtype, elements);
            if may_train && self.trained.matches(&param.id, Some(&path.join("."))) {
                self.sum.gradients += elements * element;
                self.sum.optimizer += self.optimizer.bytes(elements, element);
            }
        }
    }
    let mut visitor = Sum { trained, optimizer, sum: Estimate::default() };
    each_once(model, &mut visitor);
    visitor.sum
}

/// Bytes that a training step needs. Made by [`estimate_step`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StepEstimate {
    /// What any batch needs.
    pub training: Estimate,
    /// The input.
    pub input: u64,
    /// What the graph keeps after the forward pass, as [`Measurement::kept`](crate::measure::Measurement::kept).
    pub kept: u64,
    /// The most at one time, beyond parameters and input, as [`Measurement::peak`](crate::measure::Measurement::peak). Gradients count.
    pub peak: u64,
}

impl StepEstimate {
    /// The most at one time, including parameters, the optimizer's state and the input.
    pub fn total(&self) -> u64 {
        self.training.parameters + self.training.optimizer + self.input + self.peak
    }
}

/// Reports what a training step needs before anything of it is allocated: [`estimate`](estimate()), and the kept bytes and the peak of a
/// step of `loss` in a [`dry_run`](dry_run()), in which the model and the input are also made.
///
/// `model` and `input` return the model and the input on `device`. Parameters that are not frozen are trained. The optimizer does not run:
/// its step needs its state, the gradients, and memory for what it computes from one parameter.
///
/// As in any [`dry_run`](dry_run()), memory is allocated only for what comes from the host, for the input, which is read, and for what Burn
/// tunes. All values are undefined, so nothing may depend on them.
///
/// ```no_run
/// # // Needs a device of wgpu or CUDA.
/// use burn::tensor::{Device, Tensor};
/// use burn_memsave::nn::{Linear, LinearConfig};
/// use burn_memsave::plan::{OptimizerState, estimate_step};
///
/// # let device = Device::default();
/// let device = device.autodiff();
/// let model = || -> Vec<Linear> { (0..100).map(|_| LinearConfig::new(8192, 8192).init(&device)).collect() }; // 25 GiB
/// let input = || Tensor::<2>::zeros([64, 8192], &device);
/// let loss = |layers: &Vec<Linear>, x| layers.iter().fold(x, |x, layer| layer.forward(x)).mean();
/// let needed = estimate_step(&device, model, input, loss, OptimizerState::AdamW8bit)?;
/// println!("{} bytes, of which {} are kept by the graph", needed.total(), needed.kept);
/// # Ok::<(), burn_memsave::plan::PlanError>(())
/// ```
///
/// # Errors
///
/// [`PlanError::NoDryRun`] on all devices except those of wgpu and CUDA. There, measure a step of a small batch by [`measure_step`]. Also
/// if the device has failed before.
pub fn estimate_step<M: Module, I: StepInput>(
    device: &Device,
    model: impl FnOnce() -> M,
    input: impl FnOnce() -> I,
    loss: impl Fn(&M, I) -> Tensor<1>,
    optimizer: OptimizerState,
) -> Result<StepEstimate, PlanError> {
    dry_run(device, || {
        let (model, input) = (model(), input());
        let bytes = input.bytes();
        let step = measure_step(&model, input, loss);
        // Parameters exist now, so it is known which of them are trained.
        let training = estimate(&model, &ParamGroup::all(), optimizer);
        let (kept, peak) = step.kept.zip(step.peak).ok_or(PlanError::NotCounted)?;
        Ok(StepEstimate { training, input: bytes, kept, peak })
    })?
}
