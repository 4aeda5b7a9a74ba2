//! Mixed precision: a step in bf16 or f16, with master weights, gradients and an optimizer in f32.
//!
//! ```
//! use burn::module::Module;
//! use burn::optim::{AdamConfig, GradientsParams};
//! use burn::tensor::{DType, Device, Tensor};
//! use burn_memsave::mixed::{LossScaler, Precision};
//! use burn_memsave::nn::LinearConfig;
//!
//! let device = Device::flex().autodiff();
//! let precision = Precision::f16(); // or `Precision::bf16()`, which needs no scaler
//! let mut model = precision.narrow_frozen(LinearConfig::new(8, 4).init(&device))?;
//! let (mut optimizer, mut scaler) = (AdamConfig::new().init(), LossScaler::new());
//! for _ in 0..3 {
//!     let half = precision.half_copy(&model)?;
//!     let x = Tensor::<2>::ones([2, 8], &device).cast(precision.dtype());
//!     let loss = half.forward(x).powf_scalar(2.0).mean();
//!     let gradients = GradientsParams::from_grads(scaler.scale(loss).backward(), &model); // of the masters
//!     if let Some(gradients) = scaler.unscale(&model, gradients) {
//!         model = optimizer.step(1e-3, model, gradients); // else a gradient was not finite: skip the step
//!     }
//! }
//! assert_eq!(model.weight.val().dtype(), DType::F32);
//! # Ok::<(), burn_memsave::mixed::MixedError>(())
//! ```
//!
//! [`Precision::half_copy`] returns a copy of the module for one step: each parameter is cast by an operation of the graph, so gradients arrive
//! at the parameters of the original module, in their dtype. The copy has no leaves of its own, so no gradients have to be copied back.
//! [`checkpoint`](crate::checkpoint), [`plan::micro_batched`](crate::plan::micro_batched) and
//! [`parallel::Replicas`](crate::parallel::Replicas) work inside and around it. A parameter that is in several places is cast in each, and
//! its gradients are summed in f32.
//!
//! Compared with a step in f32, everything that is kept takes half of the bytes, and the copy takes two bytes per trainable parameter as
//! long as it lives. Frozen parameters need no master weights: [`Precision::narrow_frozen`] casts them once, for good.
//!
//! # What stays in f32
//!
//! Layers pass tensors to each other in half precision. Inside, the layers of this library compute sums of many numbers in f32, on CPU
//! backends and on devices, and round once:
//!
//! | layer | in f32 | rounded to half |
//! | --- | --- | --- |
//! | dense layers, adapters, convolutions, attention | the sums of each product of matrices | the output, each gradient once |
//! | `LayerNorm`, `RmsNorm`, `GroupNorm`, `InstanceNorm`, `BatchNorm` | mean, variance, root, and the sums for gradients | the output, the gradients |
//! | running statistics of `BatchNorm` | the statistics themselves, which [`Precision`] does not cast; those of a batch are added in f32 | the statistics of a batch; the running ones for their use |
//! | `softmax` and its variants, the weights of attention | maximum, exponentials, sum | the output |
//! | losses | everything; the mean | the loss itself and the gradient of the logits |
//! | average pools | the sums, on CPU backends; on devices Burn's kernels sum in the type of the input | the output, the gradient |
//! | `Embedding` | the sums of the rows of its gradient | that gradient |
//! | recurrent layers | each product, and the sums over all steps for gradients of weights | gates and states of each step |
//! | residual sums, elementwise operations | one operation at a time | each result |
//!
//! For an average pool over many elements on a device, you can cast the input: `pool.forward(x.cast(DType::F32)).cast(DType::F16)`.
//!
//! A loss in half precision has two or three digits. To read more of it, or for a loss above 65504 in f16, cast the logits:
//! `loss.forward(logits.cast(DType::F32), targets)`. If a layer is called many times, the gradients of its parameters are summed over the
//! calls in half precision, with one rounding per call.
//!
//! `RotaryEncoding` reads its table, which is no parameter, in f32, also for an input in half precision. Not all of Burn's own layers take
//! constants or running statistics of another dtype than their input.
mod error;
mod scaler;

pub use error::MixedError;
pub use scaler::LossScaler;
pub(crate) use scaler::watch_scaling;

use crate::lazy_paths::lazy_paths;
use crate::parameters::running_statistics;
use burn::module::{Module, ModuleMapper, ModuleVisitor, Param, ParamGroup, ParamId};
use burn::tensor::{Device, FloatDType, Tensor};
use burn_memsave_layers::{follow_path, visit::VisitPath};
use std::collections::{BTreeSet, HashSet};

/// The half precision of a step, and which parameters are exempt from it.
#[derive(Clone, Debug)]
pub struct Precision {
    dtype: FloatDType,
    exempt: Option<ParamGroup>,
}

impl Precision {
    /// bf16: the range of f32, with two to three digits. It needs no loss scaling.
    pub fn bf16() -> Self {
        Self { dtype: FloatDType::BF16, exempt: None }
    }

    /// f16: three to four digits, nothing above 65504 and nothing below 6e-8. Gradients need a [`LossScaler`].
    pub fn f16() -> Self {
        Self { dtype: FloatDType::F16, exempt: None }
    }

    /// Leaves the parameters of a group as they are, for layers that get inputs in f32.
    ///
    /// ```
    /// use burn::module::ParamGroup;
    /// use burn::tensor::{DType, Device};
    /// use burn_memsave::{mixed::Precision, nn::LinearConfig};
    ///
    /// let group = ParamGroup::from_regex("bias$").expect("a regular expression");
    /// let precision = Precision::bf16().with_exempt(group);
    /// let half = precision.half_copy(&LinearConfig::new(2, 2).init(&Device::flex()))?;
    /// assert_eq!(half.weight.val().dtype(), DType::BF16);
    /// assert_eq!(half.bias.map(|bias| bias.val().dtype()), Some(DType::F32));
    /// # Ok::<(), burn_memsave::mixed::MixedError>(())
    /// ```
    pub fn with_exempt(mut self, group: ParamGroup) -> Self {
        self.exempt = Some(group);
        self
    }

    /// The dtype of activations, to which inputs must be cast.
    pub fn dtype(&self) -> FloatDType {
        self.dtype
    }

    /// Whether a device computes in this precision.
    ///
    /// # Errors
    ///
    /// Returns an error if it does not.
    pub fn check(&self, device: &Device) -> Result<(), MixedError> {
        match device.supports_dtype(self.dtype) {
            true => Ok(()),
            false => Err(MixedError::Unsupported { device: Box::new(device.clone()), dtype: self.dtype }),
        }
    }

    /// Copies the module to half precision, for one backward pass or for inference. The parameters of the copy are casts of those of
    /// `module`, where the gradients arrive: give `module`, not its copy, to
    /// [`GradientsParams::from_grads`](burn::optim::GradientsParams::from_grads).
    ///
    /// Running statistics, quantized and lazy weights are shared with `module`, and are not cast. The casts are part of the graph, so a
    /// second backward pass through the same copy panics, as Burn does for any graph: make a copy per backward pass.
    ///
    /// # Errors
    ///
    /// Returns an error if a device does not compute in this precision, if a trainable parameter is in half precision itself, or if a lazy
    /// weight has another dtype.
    pub fn half_copy<M: Module>(&self, module: &M) -> Result<M, MixedError> {
        self.cast(module.clone(), |_| true)
    }

    /// Casts the frozen parameters once, so that no step needs copies of them. Parameters that require gradients stay as they are.
    ///
    /// # Errors
    ///
    /// Returns the errors of [`half_copy`](Self::half_copy), and an error if the module is on a device without autodiff.
    pub fn narrow_frozen<M: Module>(&self, module: M) -> Result<M, MixedError> {
        let running = running_statistics(&module);
        let mut plain = Plain { running, path: VisitPath::default(), first: None };
        module.visit(&mut plain);
        if let Some(path) = plain.first {
            return Err(MixedError::NotAutodiff { path });
        }
        self.cast(module, |is_trainable| !is_trainable)
    }

    /// Casts the parameters that `is_cast` selects, which is told whether a parameter is trainable.
    fn cast<M: Module>(&self, module: M, is_cast: fn(bool) -> bool) -> Result<M, MixedError> {
        for device in module.devices() {
            self.check(&device)?;
        }
        let (lazy, running) = (lazy_paths(&module).into_iter().collect(), running_statistics(&module));
        let mut cast =
            Cast { precision: self, is_cast, lazy, running, path: VisitPath::default(), error: None };
        let module = module.map(&mut cast);
        cast.error.map_or(Ok(module), Err)
    }
}

/// Casts parameters by operations of the graph.
struct Cast<'a> {
    precision: &'a Precision,
    is_cast: fn(bool) -> bool,
    lazy: BTreeSet<String>,
    /// See [`running_statistics`]: a mapper would change them in all clones of the module.
    running: HashSet<ParamId>,
    path: VisitPath,
    /// The first one.
    error: Option<MixedError>,
}

impl ModuleMapper for Cast<'_> {
    follow_path!();

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let (path, expected) = (self.path.joined(), self.precision.dtype);
        let is_exempt =
            self.precision.exempt.as_ref().is_some_and(|group| group.matches(&param.id, Some(&path)));
        if is_exempt || self.running.contains(&param.id) {
            return param;
        }
        let (found, is_trainable) = (param.dtype(), param.is_tracked());
        if self.lazy.contains(&path) {
            // A packed weight is dequantized to the dtype of what it is multiplied with.
            if found.is_float() && found != expected.into() {
                self.error.get_or_insert(MixedError::Lazy { path, found, expected });
            }
            return param;
        }
        if is_trainable && found.is_float() && found.size() < 4 {
            self.error.get_or_insert(MixedError::NarrowMaster { path, dtype: found });
            return param;
        }
        match found.is_float() && (self.is_cast)(is_trainable) {
            true => param.map(|value| value.cast(expected)),
            false => param,
        }
    }
}

/// Finds a parameter without autodiff.
struct Plain {
    running: HashSet<ParamId>,
    path: VisitPath,
    first: Option<String>,
}

impl ModuleVisitor for Plain {
    follow_path!();

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if !param.lazy_device().is_autodiff() && self.first.is_none() && !self.running.contains(&param.id) {
            self.first = Some(self.path.joined());
        }
    }
}
