//! AdamW with 8-bit moments.
use super::codes::{Coded, recorded};
use super::rounding;
use crate::ops::{AdamWStep, AdamWTensors, OptimizerOps};
use burn::backend::Dispatch;
use burn::config::Config;
use burn::grad_clipping::GradientClippingConfig;
use burn::module::{Module, ModuleVisitor, Param, ParamGroup, ParamId};
use burn::optim::{LearningRate, ModuleOptimizer, Optimizer, RecordState, StateSink, StateSource};
use burn::tensor::{DType, Device, Tensor};
use burn_memsave_layers::{follow_path, visit::VisitPath};
use std::collections::HashSet;

/// Configuration of [`AdamW8bit`]: the fields and defaults of [`burn::optim::AdamWConfig`], except `amsgrad`, which needs a third moment,
/// and options for the 8-bit state.
///
/// ```
/// use burn::optim::GradientsParams;
/// use burn::tensor::{Device, Tensor};
/// use burn_memsave::nn::LinearConfig;
/// use burn_memsave::optim::AdamW8bitConfig;
///
/// let device = Device::flex().autodiff();
/// let model = LinearConfig::new(64, 64).init(&device);
/// let mut optimizer = AdamW8bitConfig::new().with_weight_decay(0.01).init_for(&model);
/// let loss = model.forward(Tensor::<2>::ones([2, 64], &device)).powf_scalar(2.0).mean();
/// let gradients = GradientsParams::from_grads(loss.backward(), &model);
/// let model = optimizer.step(1e-3, model, gradients);
/// # let _ = model;
/// ```
#[derive(Config, Debug)]
pub struct AdamW8bitConfig {
    /// Decay of the first moment.
    #[config(default = 0.9)]
    pub beta_1: f32,
    /// Decay of the second moment.
    #[config(default = 0.999)]
    pub beta_2: f32,
    /// Added to the root of the second moment.
    #[config(default = 1e-5)]
    pub epsilon: f32,
    /// Weight decay, multiplied by the learning rate.
    #[config(default = 1e-4)]
    pub weight_decay: f32,
    /// Whether a weight decays only where it and the first moment have the same sign
    /// ([Chen et al., 2025](https://arxiv.org/abs/2510.12402)).
    #[config(default = false)]
    pub cautious_weight_decay: bool,
    /// Tensors with fewer elements have moments in f32.
    #[config(default = 4096)]
    pub min_8bit_size: usize,
    /// Whether codes of the second moment, and weights in half precision, are rounded stochastically, so that the mean is right. Otherwise
    /// they are rounded to nearest, and small changes are lost.
    #[config(default = true)]
    pub stochastic_rounding: bool,
    /// Seed of the stochastic rounding.
    #[config(default = 0)]
    pub seed: u64,
    /// Clips the gradient of each parameter separately.
    pub grad_clipping: Option<GradientClippingConfig>,
}

impl AdamW8bitConfig {
    /// The optimizer for single parameters, to be given to [`ModuleOptimizer::with_group`]. It does not clip gradients.
    pub fn build(&self) -> AdamW8bit {
        AdamW8bit { config: self.clone() }
    }

    /// The optimizer of any module. It treats embeddings like other tensors: see [`init_for`](Self::init_for).
    pub fn init(&self) -> ModuleOptimizer {
        let optimizer = ModuleOptimizer::from(self.build());
        match &self.grad_clipping {
            Some(clipping) => optimizer.with_grad_clipping(clipping.init()),
            None => optimizer,
        }
    }

    /// The optimizer of this module, with moments of embeddings in f32, as bitsandbytes advises. An embedding is a module whose type name
    /// ends with `Embedding`.
    pub fn init_for<M: Module>(&self, module: &M) -> ModuleOptimizer {
        let mut parameters = Parameters::default();
        module.visit(&mut parameters);
        let Parameters { paths, embeddings, .. } = parameters;
        // An optimizer finds a parameter that is in several modules by the first of its paths.
        let paths: Vec<String> =
            paths.into_iter().filter(|(id, _)| embeddings.contains(id)).map(|(_, path)| path).collect();
        if paths.is_empty() {
            return self.init();
        }
        let single = self.clone().with_min_8bit_size(usize::MAX).build();
        let clipping = self.grad_clipping.as_ref().map(GradientClippingConfig::init);
        self.init().with_group(ParamGroup::from_paths(paths), single, clipping)
    }
}

/// The paths of all parameters, and which are those of embeddings.
#[derive(Default)]
struct Parameters {
    path: VisitPath,
    paths: Vec<(ParamId, String)>,
    embeddings: HashSet<ParamId>,
}

impl ModuleVisitor for Parameters {
    follow_path!();
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.paths.push((param.id, self.path.joined()));
        if self.path.containers().last().is_some_and(|container| container.ends_with("Embedding")) {
            self.embeddings.insert(param.id);
        }
    }
}

/// AdamW ([Loshchilov and Hutter, 2019](https://arxiv.org/abs/1711.05101)) with 8-bit moments
/// ([Dettmers et al., 2022](https://arxiv.org/abs/2110.02861)), made by [`AdamW8bitConfig`].
///
/// With the gradient `g`, step `t` computes
///
/// ```text
/// m = beta_1 m + (1 - beta_1) g
/// v = beta_2 v + (1 - beta_2) g^2
/// w = (1 - lr weight_decay) w - lr (m / (1 - beta_1^t)) / (sqrt(v / (1 - beta_2^t)) + epsilon)
/// ```
///
/// in f32 (for a weight of f64, `w` in f64) and in place: in one pass over memory on CPU backends, in one kernel on wgpu and CUDA, and with
/// Burn's operations elsewhere.
///
/// # State
///
/// The two moments take 2.03 bytes per element, where Burn's take 8: they are stored as 8-bit codes, with a scale per block of 256
/// elements. The codes are bitsandbytes' dynamic ones, signed for `m` and unsigned for `v`. Tensors with fewer than `min_8bit_size`
/// elements have moments in f32, and so have embeddings with [`AdamW8bitConfig::init_for`]. A positive `v` is not rounded to 0, unless its
/// whole block is below 1.2e-38. (In bitsandbytes it may be, and the step is then as large as `epsilon` is small.)
///
/// Codes of `v` are rounded stochastically, so that the mean is right; below the least code, 3e-7 of the largest value in the block, they
/// are rounded up. With rounding to nearest, as in bitsandbytes, `v` would never fall while the largest value in its block stays the same:
/// a step lowers it by at most a thousandth, and neighboring codes are 0.35 % or more apart. On remote devices, and without
/// `stochastic_rounding`, codes are rounded to nearest.
///
/// A gradient that is not finite spoils its block: all 256 weights become NaN. The magnitude of a finite gradient is clamped to 2^63.
///
/// Records hold the codes as bytes on every device, and training resumes from a loaded record bit for bit. A record of Burn's `Adam` or
/// `AdamW` is read, too: its moments become codes in the next step, and the third moment of `amsgrad` is ignored. As in Burn, a parameter
/// starts anew if the record has no such state for it, as one of another optimizer.
///
/// # Weights in half precision
///
/// No copy of them in f32 is kept. A new weight is computed in f32 and rounded stochastically, so that its mean is right. Whether it is
/// rounded up or down depends, here as for codes, only on the seed, the step and the position. Remote devices do not support this.
///
/// # Panics
///
/// Panics if the gradient has another dtype than the weight, if the state belongs to a tensor of another size, or, with
/// `stochastic_rounding`, if a weight in half precision is on a remote device.
#[derive(Clone, Debug)]
pub struct AdamW8bit {
    config: AdamW8bitConfig,
}

/// State of [`AdamW8bit`] for a parameter.
#[derive(Clone, Debug)]
pub struct AdamW8bitState<const D: usize> {
    time: u32,
    moments: Moments<D>,
}

#[derive(Clone, Debug)]
enum Moments<const D: usize> {
    Single(Box<[Tensor<D>; 2]>),
    Coded(Box<[Coded; 2]>),
}

impl<const D: usize> Moments<D> {
    fn zeros(of: &Tensor<D>, min_8bit_size: usize) -> Self {
        let (shape, device) = (of.shape(), of.device());
        let elements = shape.num_elements();
        if elements < min_8bit_size {
            // On Flex (0.22.1), `zeros` briefly takes twice the memory.
            let zeros = || Tensor::full(shape.clone(), 0.0, (&device, DType::F32));
            return Self::Single(Box::new([zeros(), zeros()]));
        }
        let zeros = || Coded::zeros(elements, &device);
        Self::Coded(Box::new([zeros(), zeros()]))
    }

    fn is_of(&self, tensor: &Tensor<D>) -> bool {
        match self {
            Self::Single(moments) => moments.iter().all(|moment| moment.shape() == tensor.shape()),
            Self::Coded(moments) => {
                let elements = tensor.shape().num_elements();
                moments.iter().all(|moment| moment.is_of(elements))
            }
        }
    }

    /// Converts moments in f32 to 8 bits, by steps with decays of 0: their moments are the gradient and its square.
    fn coded(self, seed: Option<u32>) -> Self {
        let Self::Single(moments) = self else { return self };
        let step = AdamWStep {
            lr: 0.0,
            beta_1: 0.0,
            beta_2: 0.0,
            epsilon: 1.0,
            weight_decay: 0.0,
            cautious: false,
            time: 1,
            seed,
        };
        let [first, second] = *moments;
        let after = |gradient: Tensor<D>| {
            let (shape, device) = (gradient.shape(), gradient.device());
            let elements = shape.num_elements();
            let weight = Tensor::<D>::full(shape, 0.0, (&device, DType::F32)).into_dispatch();
            let zeros = [(); 2].map(|()| Coded::zeros(elements, &device));
            Coded::adamw(gradient.into_dispatch(), weight, zeros, step).1
        };
        let ([first, _], [_, second]) = (after(first), after(second.sqrt()));
        Self::Coded(Box::new([first, second]))
    }

    fn moved(self, device: &Device) -> Self {
        match self {
            Self::Single(moments) => {
                Self::Single(Box::new((*moments).map(|moment| moment.to_device(device))))
            }
            Self::Coded(moments) => Self::Coded(Box::new(moments.map(|moment| moment.moved(device)))),
        }
    }
}

/// The names of the step and the moments in records of Burn's `Adam` and `AdamW`.
const BURN: [&str; 3] = ["momentum.time", "momentum.moment_1", "momentum.moment_2"];

impl<const D: usize> RecordState for AdamW8bitState<D> {
    fn state_flatten(&self, prefix: &str, out: &mut StateSink) {
        out.push_scalar(prefix, "time", u64::from(self.time).into());
        match &self.moments {
            Moments::Single(moments) => {
                let [first, second] = &**moments;
                out.push_tensor(prefix, "first", first.to_data());
                out.push_tensor(prefix, "second", second.to_data());
            }
            Moments::Coded(moments) => {
                let [first, second] = &**moments;
                first.flatten(prefix, "first", out);
                second.flatten(prefix, "second", out);
            }
        }
    }

    fn state_unflatten(prefix: &str, source: &mut StateSource, device: &Device) -> Option<Self> {
        // In Burn's records the names begin with that of a field.
        let burn = source.take_scalar(prefix, "time").is_none();
        let names = if burn { BURN } else { ["time", "first", "second"] };
        let time = u64::try_from(source.take_scalar(prefix, names[0])?).ok()?;
        let mut single = |name: &str| recorded(prefix, name, source, device);
        let moments = match single(names[1]) {
            Some(first) => Moments::Single(Box::new([first, single(names[2])?])),
            None if burn => return None,
            None => Moments::Coded(Box::new([
                Coded::unflatten(prefix, "first", source, device)?,
                Coded::unflatten(prefix, "second", source, device)?,
            ])),
        };
        Some(Self { time: u32::try_from(time).ok()?, moments })
    }
}

impl Optimizer for AdamW8bit {
    type State<const D: usize> = AdamW8bitState<D>;

    fn step<const D: usize>(
        &self,
        lr: LearningRate,
        tensor: Tensor<D>,
        grad: Tensor<D>,
        state: Option<Self::State<D>>,
    ) -> (Tensor<D>, Option<Self::State<D>>) {
        let AdamW8bitConfig {
            beta_1,
            beta_2,
            epsilon,
            weight_decay,
            cautious_weight_decay,
            min_8bit_size,
            ..
        } = self.config;
        let dtype = tensor.dtype();
        assert_eq!(grad.dtype(), dtype, "AdamW8bit: the gradient has the dtype of its parameter");
        assert_eq!(grad.shape(), tensor.shape(), "AdamW8bit: the gradient has the shape of its parameter");
        let AdamW8bitState { time, moments } = state
            .unwrap_or_else(|| AdamW8bitState { time: 0, moments: Moments::zeros(&tensor, min_8bit_size) });
        let shape = tensor.shape();
        assert!(moments.is_of(&tensor), "AdamW8bit: the state is that of a tensor that is not {shape:?}");
        let time = time.saturating_add(1);
        let seed = self.config.stochastic_rounding.then(|| rounding::seed(self.config.seed, time));
        // Moments may still be in f32 if they come from a record of Burn's, or one with another `min_8bit_size`.
        let moments = if shape.num_elements() < min_8bit_size { moments } else { moments.coded(seed) };
        let step = AdamWStep {
            lr,
            beta_1,
            beta_2,
            epsilon,
            weight_decay: weight_decay.into(),
            cautious: cautious_weight_decay,
            time,
            seed,
        };
        let (gradient, weight) = (grad.into_dispatch(), tensor.into_dispatch());
        let (weight, moments) = match moments {
            Moments::Single(moments) => {
                let [first, second] = (*moments).map(Tensor::into_dispatch);
                let tensors = AdamWTensors { weight, first, second };
                let AdamWTensors { weight, first, second } = Dispatch::memsave_adamw(gradient, tensors, step);
                (weight, Moments::Single(Box::new([first, second].map(Tensor::from_dispatch))))
            }
            Moments::Coded(moments) => {
                let (weight, moments) = Coded::adamw(gradient, weight, *moments, step);
                (weight, Moments::Coded(Box::new(moments)))
            }
        };
        (Tensor::from_dispatch(weight), Some(AdamW8bitState { time, moments }))
    }

    fn to_device<const D: usize>(state: Self::State<D>, device: &Device) -> Self::State<D> {
        AdamW8bitState { moments: state.moments.moved(device), ..state }
    }
}
