//! Muon with an 8-bit momentum.
use super::codes::{Coded, recorded};
use super::rounding;
use crate::ops::{Descent, MomentumStep, OptimizerOps};
use burn::backend::Dispatch;
use burn::config::Config;
use burn::optim::{
    AdjustLrFn, LearningRate, ModuleOptimizer, Optimizer, RecordState, StateSink, StateSource,
    decay::WeightDecayConfig, momentum::MomentumConfig,
};
use burn::tensor::{DType, Device, FloatDType, Tensor};

/// Configuration of [`Muon8bit`]: the fields and defaults of [`burn::optim::MuonConfig`], and options for the 8-bit state.
///
/// ```
/// use burn::optim::GradientsParams;
/// use burn::tensor::{Device, Tensor};
/// use burn_memsave::nn::LinearConfig;
/// use burn_memsave::optim::Muon8bitConfig;
///
/// let device = Device::flex().autodiff();
/// let model = LinearConfig::new(64, 64).with_bias(false).init(&device);
/// let mut optimizer = Muon8bitConfig::new().init();
/// let loss = model.forward(Tensor::<2>::ones([2, 64], &device)).powf_scalar(2.0).mean();
/// let gradients = GradientsParams::from_grads(loss.backward(), &model);
/// let model = optimizer.step(1e-3, model, gradients);
/// # let _ = model;
/// ```
#[derive(Config, Debug)]
pub struct Muon8bitConfig {
    /// Weight decay, multiplied by the learning rate.
    pub weight_decay: Option<WeightDecayConfig>,
    /// The momentum.
    #[config(default = "MomentumConfig { momentum: 0.95, dampening: 0.0, nesterov: true }")]
    pub momentum: MomentumConfig,
    /// Coefficients of the Newton-Schulz iteration.
    #[config(default = "(3.4445, -4.775, 2.0315)")]
    pub ns_coefficients: (f32, f32, f32),
    /// The least norm that a matrix is divided by.
    #[config(default = 1e-7)]
    pub epsilon: f32,
    /// The number of Newton-Schulz steps.
    #[config(default = 5)]
    pub ns_steps: usize,
    /// How the learning rate depends on the shape.
    #[config(default = "AdjustLrFn::Original")]
    pub adjust_lr_fn: AdjustLrFn,
    /// Matrices with fewer elements have a momentum in f32.
    #[config(default = 4096)]
    pub min_8bit_size: usize,
    /// Whether weights in half precision are rounded stochastically, so that the mean is right. Otherwise they are rounded to nearest, and
    /// small changes are lost.
    #[config(default = true)]
    pub stochastic_rounding: bool,
    /// Seed of the stochastic rounding.
    #[config(default = 0)]
    pub seed: u64,
}

impl Muon8bitConfig {
    /// The optimizer for single parameters, to be given to [`ModuleOptimizer::with_group`].
    pub fn build(&self) -> Muon8bit {
        Muon8bit { config: self.clone() }
    }

    /// The optimizer of a module whose parameters are all matrices.
    pub fn init(&self) -> ModuleOptimizer {
        self.build().into()
    }
}

/// Muon ([Jordan et al., 2024](https://kellerjordan.github.io/posts/muon/)) with an 8-bit momentum
/// ([arXiv 2509.23106](https://arxiv.org/abs/2509.23106)), made by [`Muon8bitConfig`].
///
/// It computes what [`burn::optim::Muon`] does: the momentum of the gradients, orthogonalized by a Newton-Schulz iteration, times a
/// learning rate that depends on the shape. The momentum is computed in f32 before it is rounded, and the iteration runs in f32.
///
/// # State
///
/// The momentum takes 1.016 bytes per element, where Burn's takes 4: it is stored as 8-bit codes, which are multiples of 1 / 127 of the
/// largest magnitude in a block of 256 elements. Matrices with fewer than `min_8bit_size` elements have a momentum in f32. Records and half
/// precision work as in [`AdamW8bit`](super::AdamW8bit); a record of Burn's `Muon` is read, too.
///
/// # Panics
///
/// Panics if a parameter is not a matrix: give biases, norms and embeddings another optimizer, with [`ModuleOptimizer::with_group`]. It
/// also panics if the gradient has another dtype than the weight, if the state belongs to a tensor of another size, or, with
/// `stochastic_rounding`, if a weight in half precision is on a remote device.
#[derive(Clone, Debug)]
pub struct Muon8bit {
    config: Muon8bitConfig,
}

/// State of [`Muon8bit`] for a parameter.
#[derive(Clone, Debug)]
pub struct Muon8bitState<const D: usize> {
    time: u32,
    momentum: Momentum<D>,
}

#[derive(Clone, Debug)]
enum Momentum<const D: usize> {
    Single(Box<Tensor<D>>),
    Coded(Box<Coded>),
}

impl<const D: usize> Momentum<D> {
    /// Converts a momentum in f32 to 8 bits, by a step with a decay of 0: its momentum is the gradient.
    fn coded(self) -> Self {
        let Self::Single(momentum) = self else { return self };
        let zeros = Coded::zeros(momentum.shape().num_elements(), &momentum.device());
        let step = MomentumStep { momentum: 0.0, gradient: 1.0, nesterov: false };
        Self::Coded(Box::new(zeros.momentum(momentum.into_dispatch(), step).1))
    }
}

impl<const D: usize> RecordState for Muon8bitState<D> {
    fn state_flatten(&self, prefix: &str, out: &mut StateSink) {
        out.push_scalar(prefix, "time", u64::from(self.time).into());
        match &self.momentum {
            Momentum::Single(momentum) => out.push_tensor(prefix, "momentum", momentum.to_data()),
            Momentum::Coded(momentum) => momentum.flatten(prefix, "momentum", out),
        }
    }

    fn state_unflatten(prefix: &str, source: &mut StateSource, device: &Device) -> Option<Self> {
        let Some(time) = source.take_scalar(prefix, "time") else {
            // Records of Burn's Muon do not count steps. There was at least one.
            let velocity = recorded(prefix, "momentum.velocity", source, device)?;
            return Some(Self { time: 1, momentum: Momentum::Single(Box::new(velocity)) });
        };
        let time = u64::try_from(time).ok()?;
        let momentum = match recorded(prefix, "momentum", source, device) {
            Some(momentum) => Momentum::Single(Box::new(momentum)),
            None => Momentum::Coded(Box::new(Coded::unflatten(prefix, "momentum", source, device)?)),
        };
        Some(Self { time: u32::try_from(time).ok()?, momentum })
    }
}

impl Muon8bit {
    /// The direction for a gradient in f32, and the new momentum. `time`: how many steps there were before.
    fn direction<const D: usize>(
        &self,
        gradient: Tensor<D>,
        momentum: Momentum<D>,
        time: u32,
    ) -> (Tensor<D>, Momentum<D>) {
        let MomentumConfig { momentum: keep, dampening, nesterov } = self.config.momentum;
        // As in Burn, the first gradient counts in full.
        let factor = if time == 0 { 1.0 } else { 1.0 - dampening };
        match momentum {
            Momentum::Single(momentum) => {
                let momentum = momentum.mul_scalar(keep) + gradient.clone().mul_scalar(factor);
                let direction = match nesterov {
                    true => momentum.clone().mul_scalar(keep) + gradient,
                    false => momentum.clone(),
                };
                (direction, Momentum::Single(Box::new(momentum)))
            }
            Momentum::Coded(coded) => {
                let step = MomentumStep { momentum: keep as f32, gradient: factor as f32, nesterov };
                let (direction, coded) = coded.momentum(gradient.into_dispatch(), step);
                (Tensor::from_dispatch(direction), Momentum::Coded(Box::new(coded)))
            }
        }
    }

    /// Approximates the nearest orthogonal matrix by a quintic Newton-Schulz iteration, as Burn does.
    fn orthogonal<const D: usize>(&self, x: Tensor<D>) -> Tensor<D> {
        let [rows, columns] = [x.dims()[0], x.dims()[1]];
        let is_tall = rows > columns;
        let x = if is_tall { x.transpose() } else { x };
        let norm = x.clone().square().sum().sqrt().clamp_min(self.config.epsilon);
        let mut x = x / norm.unsqueeze();
        let (a, b, c) = self.config.ns_coefficients;
        for _ in 0..self.config.ns_steps {
            let product = x.clone().matmul(x.clone().transpose());
            let square = product.clone().matmul(product.clone());
            let factor = product.mul_scalar(b) + square.mul_scalar(c);
            let change = factor.matmul(x.clone());
            x = x.mul_scalar(a) + change;
        }
        if is_tall { x.transpose() } else { x }
    }

    /// The factor of the learning rate for a matrix of this shape.
    fn adjusted(&self, [rows, columns]: [usize; 2]) -> f64 {
        let [rows, columns] = [rows as f64, columns as f64];
        match self.config.adjust_lr_fn {
            AdjustLrFn::Original => (rows / columns).max(1.0).sqrt(),
            AdjustLrFn::MatchRmsAdamW => 0.2 * rows.max(columns).sqrt(),
        }
    }
}

impl Optimizer for Muon8bit {
    type State<const D: usize> = Muon8bitState<D>;

    fn step<const D: usize>(
        &self,
        lr: LearningRate,
        tensor: Tensor<D>,
        grad: Tensor<D>,
        state: Option<Self::State<D>>,
    ) -> (Tensor<D>, Option<Self::State<D>>) {
        assert!(D == 2, "Muon8bit: parameters are matrices, this one has {D} axes");
        let (shape, dtype) = (tensor.shape(), tensor.dtype());
        assert_eq!(grad.dtype(), dtype, "Muon8bit: the gradient has the dtype of its parameter");
        assert_eq!(grad.shape(), shape, "Muon8bit: the gradient has the shape of its parameter");
        let elements = shape.num_elements();
        let (time, momentum) = match state {
            Some(Muon8bitState { time, momentum }) => (time, momentum),
            None if elements < self.config.min_8bit_size => {
                let zeros = Tensor::full(shape.clone(), 0.0, (&tensor.device(), DType::F32));
                (0, Momentum::Single(Box::new(zeros)))
            }
            None => (0, Momentum::Coded(Box::new(Coded::zeros(elements, &tensor.device())))),
        };
        let fits = match &momentum {
            Momentum::Single(momentum) => momentum.shape() == shape,
            Momentum::Coded(momentum) => momentum.is_of(elements),
        };
        assert!(fits, "Muon8bit: the state is that of a tensor that is not {shape:?}");
        let momentum = if elements < self.config.min_8bit_size { momentum } else { momentum.coded() };
        let gradient = if dtype == DType::F32 { grad } else { grad.cast(FloatDType::F32) };
        let (direction, momentum) = self.direction(gradient, momentum, time);
        let direction = self.orthogonal(direction);
        let time = time.saturating_add(1);
        let penalty = self.config.weight_decay.as_ref().map_or(0.0, |decay| decay.penalty.into());
        let random = self.config.stochastic_rounding;
        let descent = Descent {
            keep: 1.0 - lr * penalty,
            lr: lr * self.adjusted([shape[0], shape[1]]),
            seed: random.then(|| rounding::seed(self.config.seed, time)),
        };
        let (weight, direction) = (tensor.into_dispatch(), direction.into_dispatch());
        let weight = Tensor::from_dispatch(Dispatch::memsave_descend(weight, direction, descent));
        (weight, Some(Muon8bitState { time, momentum }))
    }

    fn to_device<const D: usize>(state: Self::State<D>, device: &Device) -> Self::State<D> {
        let momentum = match state.momentum {
            Momentum::Single(momentum) => Momentum::Single(Box::new(momentum.to_device(device))),
            Momentum::Coded(momentum) => Momentum::Coded(Box::new(momentum.moved(device))),
        };
        Muon8bitState { momentum, ..state }
    }
}
