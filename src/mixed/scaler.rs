//! [`LossScaler`]: dynamic loss scaling, which keeps small gradients from vanishing in f16.
use crate::parameters::{EachOnce, each_once};
use crate::widened::widened;
use burn::module::{Module, Param};
use burn::optim::GradientsParams;
use burn::tensor::{Bool, DType, Device, FloatDType, Tensor};
use serde::{Deserialize, Serialize};
use std::cell::Cell;

/// The largest power of two in f16.
const LARGEST_IN_F16: f64 = 32768.0;

/// The least scale: if gradients in f16 still overflow with it, the model diverges.
const LEAST: f64 = 1.0 / LARGEST_IN_F16;

/// Dynamic loss scaling, after [arXiv 1710.03740](https://arxiv.org/abs/1710.03740): the loss is multiplied by a scale, so that small
/// gradients do not vanish in f16, and the gradients are divided by it in f32.
///
/// A step is bad if its gradients are not all finite: skip it. The scale is then multiplied by the backoff factor, 1/2. After 2000 good
/// steps in a row, it is multiplied by the growth factor, 2. The scale starts at 32768, the largest power of two in f16, and does not grow
/// beyond that, since the gradient of a loss in f16 is the scale itself. If the loss is computed in f32,
/// [`with_max_scale`](Self::with_max_scale) allows more.
///
/// [`step_in_backward`](crate::optim::step_in_backward) has no gradients to divide, and refuses a scaled loss.
///
/// The scaler is its own state: save it with serde, beside the optimizer's record.
///
/// ```
/// use burn::optim::GradientsParams;
/// use burn::tensor::{Device, Tensor};
/// use burn_memsave::{mixed::LossScaler, nn::LinearConfig};
///
/// let device = Device::flex().autodiff();
/// let model = LinearConfig::new(2, 1).init(&device);
/// let mut scaler = LossScaler::new();
/// let loss = (model.forward(Tensor::<2>::ones([1, 2], &device)) * f32::INFINITY).mean();
/// let gradients = GradientsParams::from_grads(scaler.scale(loss).backward(), &model);
/// assert!(scaler.unscale(&model, gradients).is_none());
/// assert_eq!((scaler.factor(), scaler.skipped()), (16384.0, 1));
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LossScaler {
    factor: f64,
    growth: f64,
    backoff: f64,
    interval: usize,
    max: f64,
    /// Good steps since the factor changed.
    good: usize,
    skipped: usize,
}

impl Default for LossScaler {
    fn default() -> Self {
        let (factor, max) = (LARGEST_IN_F16, LARGEST_IN_F16);
        Self { factor, growth: 2.0, backoff: 0.5, interval: 2000, max, good: 0, skipped: 0 }
    }
}

impl LossScaler {
    /// A scaler with the schedule above.
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets the initial scale, and raises the largest scale to it if necessary.
    ///
    /// # Panics
    ///
    /// Panics if it is not a positive finite number.
    pub fn with_scale(mut self, scale: f64) -> Self {
        assert!(scale > 0.0 && scale.is_finite(), "a scale of {scale}");
        self.factor = scale;
        self.max = self.max.max(scale);
        self
    }

    /// Sets the largest scale, and lowers the current scale to it if necessary.
    ///
    /// # Panics
    ///
    /// Panics if it is not a positive finite number.
    pub fn with_max_scale(mut self, scale: f64) -> Self {
        assert!(scale > 0.0 && scale.is_finite(), "a scale of {scale}");
        self.max = scale;
        self.factor = self.factor.min(scale);
        self
    }

    /// Sets after how many good steps in a row the scale grows, and by which factor.
    ///
    /// # Panics
    ///
    /// Panics if `steps` is 0, or if the factor is below 1 or not finite.
    pub fn with_growth(mut self, steps: usize, factor: f64) -> Self {
        assert!(steps > 0 && factor >= 1.0 && factor.is_finite(), "growth by {factor} after {steps} steps");
        (self.interval, self.growth) = (steps, factor);
        self
    }

    /// Sets what the scale is multiplied by after a bad step.
    ///
    /// # Panics
    ///
    /// Panics if it is not between 0 and 1.
    pub fn with_backoff(mut self, factor: f64) -> Self {
        assert!(factor > 0.0 && factor < 1.0, "a backoff of {factor}");
        self.backoff = factor;
        self
    }

    /// The current scale.
    pub fn factor(&self) -> f64 {
        self.factor
    }

    /// How many steps were bad.
    pub fn skipped(&self) -> usize {
        self.skipped
    }

    /// The loss times the scale, in f32 at least. Call `backward` on the result.
    pub fn scale(&self, loss: Tensor<1>) -> Tensor<1> {
        SCALED.set(true);
        widened(loss).mul_scalar(self.factor)
    }

    /// Divides the gradients of a module's parameters by the scale. Returns `None`, and lowers the scale, if one is infinite or NaN. The
    /// scale must still be the one that [`scale`](Self::scale) used, so call this once per step.
    ///
    /// Gradients are divided in f32 at least, and keep their dtype. They are checked on their devices, and one number per device is read.
    ///
    /// # Panics
    ///
    /// Panics if a gradient belongs to a parameter that the module does not have, or to one in f16: once divided, small gradients would be
    /// lost again, as would the updates. Train parameters in f32, from which [`Precision::half_copy`](super::Precision::half_copy) makes a copy for
    /// each step.
    pub fn unscale<M: Module>(&mut self, module: &M, gradients: GradientsParams) -> Option<GradientsParams> {
        let mut unscale = Unscale {
            found: gradients,
            factor: self.factor.recip(),
            unscaled: GradientsParams::new(),
            finite: vec![],
        };
        each_once(module, &mut unscale);
        let Unscale { found, unscaled, finite, .. } = unscale;
        assert!(
            found.is_empty(),
            "{} gradients are of parameters that the module does not have",
            found.len()
        );
        // Every device gets all of its work before the first one is waited for.
        let is_good = finite.into_iter().all(|(_, finite)| finite.into_scalar::<bool>());
        self.update(is_good);
        is_good.then_some(unscaled)
    }

    fn update(&mut self, is_good: bool) {
        self.good = if is_good { self.good + 1 } else { 0 };
        if !is_good {
            self.skipped += 1;
            self.factor = (self.factor * self.backoff).max(LEAST.min(self.factor));
        } else if self.good == self.interval {
            self.good = 0;
            self.factor = (self.factor * self.growth).min(self.max);
        }
    }
}

thread_local! {
    /// Whether this thread scaled a loss since [`watch_scaling`] began.
    static SCALED: Cell<bool> = const { Cell::new(false) };
}

/// What `f` returns, and whether this thread scaled a loss in it.
pub(crate) fn watch_scaling<R>(f: impl FnOnce() -> R) -> (R, bool) {
    /// Restores the value of the caller, also after a panic.
    struct Outer(bool);
    impl Drop for Outer {
        fn drop(&mut self) {
            SCALED.set(self.0);
        }
    }
    let _outer = Outer(SCALED.replace(false));
    let result = f();
    (result, SCALED.get())
}

/// Scales gradients, and finds out whether they are finite.
struct Unscale {
    found: GradientsParams,
    factor: f64,
    unscaled: GradientsParams,
    /// Whether all gradients are finite, by device.
    finite: Vec<(Device, Tensor<1, Bool>)>,
}

impl EachOnce for Unscale {
    fn visit<const D: usize>(&mut self, param: &Param<Tensor<D>>, path: &[String]) {
        let Some(gradient) = self.found.remove::<D>(param.id) else { return };
        assert!(
            gradient.dtype() != DType::F16,
            "the gradient of {} is of f16, in which what the scale kept would be lost: make the parameter f32, and compute with \
             the copy of `Precision::half_copy`",
            path.join(".")
        );
        let dtype = FloatDType::from(gradient.dtype());
        let gradient = widened(gradient).mul_scalar(self.factor).cast(dtype);
        let (device, finite) = (gradient.device(), gradient.clone().is_finite().all());
        match self.finite.iter_mut().find(|(of, _)| *of == device) {
            Some((_, all)) => *all = all.clone().bool_and(finite),
            None => self.finite.push((device, finite)),
        }
        self.unscaled.register(param.id, gradient);
    }
}
