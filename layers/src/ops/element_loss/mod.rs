//! Element-wise losses: squared errors, Huber losses, binary cross entropies, divergences.
//!
//! | | |
//! | --- | --- |
//! | computes | `loss = f(x, t)` of every element, `f` an [`ElementLoss`], or the scaled sum of these losses |
//! | keeps | `x` (a handle), and `t` if there are targets; for a divergence only `t`, unless `t` is tracked; |
//! | | for a binary cross entropy, the slope `f'` instead of `x` and `t` |
//! | backward | `dx = dloss * f'(x, t)`, and `dt` likewise; in place of a tensor that is read, if nothing else holds it |
//!
//! A binary cross entropy makes its targets from integers, so to keep them would cost one more tensor. In f16 the kept slope is scaled,
//! because before it is multiplied by the upstream gradient, it may exceed f16 for small probabilities, and vanish for confident logits.
//!
//! Stock Burn records up to nine operations for one loss, and materializes all of their results.
use crate::backend::{Scaling, composing_backends, wide, widen};
use crate::{
    backend::optional::MaybeTensor,
    graph::{BackwardPass, Inputs, KeepPlan, Operation, Recorder, Run, Tracking, extension, given},
};
use burn::backend::{
    Backend, TensorMetadata, get_or_init_device_settings,
    tensor::{BoolTensor, FloatTensor},
};
use burn::tensor::{DType, Shape};

#[cfg(any(feature = "flex", feature = "ndarray"))]
mod cpu;
#[cfg(any(feature = "wgpu", feature = "cuda"))]
mod cube;

/// The loss of an element `x`. Some variants also read a target `t`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum ElementLoss {
    /// `x^2`
    Square,
    /// `x^2 / 2` if `|x| <= delta`, else `delta |x| - bias`
    Huber {
        /// The error from which the loss is linear.
        delta: f64,
        /// `delta^2 / 2`
        bias: f64,
    },
    /// `log(max(x, min))`
    LogAbove {
        /// The smallest argument of the logarithm.
        min: f64,
    },
    /// `-t log(p) - (1 - t) log(1 - p)`, `p = sigmoid(x)`
    BinaryLogits,
    /// `-t log(x) - (1 - t) log(1 - x)`, with logarithms clamped to at least -100
    BinaryProbabilities,
    /// `t (log(min(max(t, min), 1)) - x)`
    Divergence {
        /// The smallest argument of the logarithm.
        min: f64,
    },
    /// `exp(t) (t - x)`
    LogDivergence,
}

impl ElementLoss {
    fn is_binary(self) -> bool {
        matches!(self, Self::BinaryLogits | Self::BinaryProbabilities)
    }

    /// The factor of a slope while it is kept: in f16 a power of two, so that the slope neither overflows nor vanishes.
    fn slope_scale(self, dtype: DType) -> f64 {
        match (self, dtype) {
            // The slope is a probability minus a label, and labels may be up to 255.
            (Self::BinaryLogits, DType::F16) => 2f64.powi(8),
            // The slope is 1 / x, from 1 to 2^24.
            (Self::BinaryProbabilities, DType::F16) => 2f64.powi(-9),
            _ => 1.0,
        }
    }

    /// Whether the slope in `x` reads `x`.
    fn reads_x(self) -> bool {
        !matches!(self, Self::Divergence { .. } | Self::LogDivergence)
    }
}

/// The lower bound of logarithms of probabilities in a binary cross entropy.
const LOWEST_LOG: f64 = -100.0;

/// An argument of a loss.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Argument {
    /// The prediction, `x`.
    Input,
    /// The target, `t`.
    Target,
}

extension! {
    /// Element-wise losses.
    pub trait ElementLossOps(ElementLossKernels) {
        /// `f(x, targets)` of every element, or with a `scale` the scaled sum of all, `[1]`. The targets have the shape of `x`; those of a
        /// binary cross entropy are not tracked.
        fn memsave_element_loss(
            x: FloatTensor<Self>,
            #[extension_type] targets: MaybeTensor<Self>,
            f: ElementLoss,
            scale: Option<f64>,
        ) -> FloatTensor<Self> {
            Self::run(Loss { f, scale }, [Some(x), targets.into_option()])
        }
    }
}

const X: usize = 0;
const TARGETS: usize = 1;

/// A loss of every element, or the scaled sum of all.
#[derive(Clone, Copy, Debug)]
pub struct Loss {
    f: ElementLoss,
    /// The scale of the sum, if the losses are summed.
    scale: Option<f64>,
}

impl<B: ElementLossKernels> Operation<B, 2> for Loss {
    const INPUTS: [&'static str; 2] = ["x", "targets"];
    type Saved = SavedElementLoss<FloatTensor<B>>;

    fn name(&self) -> &'static str {
        match self.f {
            ElementLoss::Square => "mse_loss",
            ElementLoss::Huber { .. } => "huber_loss",
            ElementLoss::LogAbove { .. } => "cross_entropy",
            ElementLoss::BinaryLogits | ElementLoss::BinaryProbabilities => "binary_cross_entropy",
            ElementLoss::Divergence { .. } | ElementLoss::LogDivergence => "kl_div_loss",
        }
    }

    fn plan(&self, inputs: &Tracking<B, 2>) -> KeepPlan<2> {
        const REASON: &str = "x or the targets are tracked";
        if self.f.is_binary() {
            return KeepPlan::nothing();
        }
        let reads_x = self.f.reads_x() || inputs.tracked(TARGETS);
        KeepPlan::nothing().keep_if(reads_x, X, REASON).keep_if(true, TARGETS, REASON)
    }

    fn forward(&self, [x, targets]: Inputs<B, 2>) -> FloatTensor<B> {
        match self.scale {
            Some(scale) => B::element_loss_sum(given(x), targets, self.f, scale),
            None => B::element_loss(given(x), targets, self.f),
        }
    }

    fn forward_saving(&self, inputs: Inputs<B, 2>, recorder: &Recorder<2>) -> (FloatTensor<B>, Self::Saved) {
        if !self.f.is_binary() {
            return (Operation::<B, 2>::forward(self, inputs), SavedElementLoss { loss: *self, slope: None });
        }
        let [x, targets] = inputs;
        let (x, f) = (given(x), self.f);
        let slope_scale = f.slope_scale(x.dtype());
        let (y, slope) = match self.scale {
            Some(scale) => B::element_loss_sum_with_slopes(x, targets, f, scale, slope_scale),
            None => {
                let factor = Factor { tensor: None, by: slope_scale };
                let y = B::element_loss(x.clone(), targets.clone(), f);
                (y, B::element_loss_slopes(x, targets, f, Argument::Input, factor))
            }
        };
        let slope = Some(recorder.report().tensor("slope", slope, "x is tracked"));
        (y, SavedElementLoss { loss: *self, slope })
    }

    fn backward(saved: Self::Saved, dloss: FloatTensor<B>, pass: &mut BackwardPass<B, 2>) {
        let SavedElementLoss { loss: Loss { f, scale }, slope } = saved;
        if let Some(slope) = slope {
            return pass.give(X, times_slope::<B>(slope, dloss, f, scale));
        }
        let (x, targets) = (pass.take(X), pass.take(TARGETS));
        let x = given(x.or_else(|| targets.clone())); // if no slope reads `x`, only its shape is read
        let gradient = |x, argument, dloss| match scale {
            Some(by) => {
                B::element_loss_slopes(x, targets.clone(), f, argument, Factor { tensor: Some(dloss), by })
            }
            None => B::element_loss_backward(x, targets.clone(), f, argument, dloss),
        };
        if pass.wants(TARGETS) {
            pass.give(TARGETS, gradient(x.clone(), Argument::Target, dloss.clone()));
        }
        if pass.wants(X) {
            pass.give(X, gradient(x, Argument::Input, dloss));
        }
    }
}

/// The gradient of `x` from the kept slope of `f`.
fn times_slope<B: ElementLossKernels>(
    slope: FloatTensor<B>,
    dloss: FloatTensor<B>,
    f: ElementLoss,
    scale: Option<f64>,
) -> FloatTensor<B> {
    let slope_scale = f.slope_scale(slope.dtype());
    match scale {
        Some(scale) => B::scale(slope, dloss, scale / slope_scale),
        None if slope_scale == 1.0 => B::float_mul(slope, dloss),
        None => B::scaled_product(slope, dloss, slope_scale.recip()),
    }
}

/// What the backward pass reads.
#[derive(Clone, Debug)]
pub struct SavedElementLoss<T> {
    loss: Loss,
    /// The slope of a binary cross entropy, [scaled](ElementLoss::slope_scale). The other losses read their inputs.
    slope: Option<T>,
}

/// `tensor * by`, a number.
pub struct Factor<B: Backend> {
    /// A tensor of one element, of any dtype; 1 if missing.
    pub tensor: Option<FloatTensor<B>>,
    pub by: f64,
}

/// The kernels.
pub trait ElementLossKernels: Scaling {
    /// The loss of every element.
    fn element_loss(
        x: FloatTensor<Self>,
        targets: Option<FloatTensor<Self>>,
        f: ElementLoss,
    ) -> FloatTensor<Self> {
        let clamp_log = |log: FloatTensor<Self>| Self::float_clamp_min(log, LOWEST_LOG.into());
        match (f, targets) {
            (ElementLoss::Huber { delta, bias }, _) => {
                let outside = above::<Self>(Self::float_abs(x.clone()), delta);
                let clamped = Self::float_clamp(x.clone(), (-delta).into(), delta.into());
                let linear = Self::float_add_scalar(Self::float_mul(clamped, x.clone()), (-bias).into());
                let square = Self::float_mul_scalar(Self::float_mul(x.clone(), x), 0.5.into());
                Self::float_mask_where(square, outside, linear)
            }
            (ElementLoss::LogAbove { min }, _) => Self::float_log(Self::float_clamp_min(x, min.into())),
            (ElementLoss::BinaryLogits, Some(t)) => {
                let linear = Self::float_mul(rest::<Self>(t, 1.0), x.clone());
                Self::float_sub(linear, Self::log_sigmoid(x))
            }
            (ElementLoss::BinaryProbabilities, Some(t)) => {
                let negative = clamp_log(Self::float_log1p(Self::float_neg(x.clone())));
                let negative = Self::float_mul(Self::float_add_scalar(t.clone(), (-1).into()), negative);
                Self::float_sub(negative, Self::float_mul(t, clamp_log(Self::float_log(x))))
            }
            (ElementLoss::Divergence { min }, Some(t)) => {
                let log = Self::float_log(Self::float_clamp(t.clone(), min.into(), 1.into()));
                Self::float_mul(t, Self::float_sub(log, x))
            }
            (ElementLoss::LogDivergence, Some(t)) => {
                Self::float_mul(Self::float_exp(t.clone()), Self::float_sub(t, x))
            }
            (ElementLoss::Square, _) | (_, None) => Self::float_mul(x.clone(), x),
        }
    }

    /// The sum of all losses times `scale`, `[1]`.
    fn element_loss_sum(
        x: FloatTensor<Self>,
        targets: Option<FloatTensor<Self>>,
        f: ElementLoss,
        scale: f64,
    ) -> FloatTensor<Self> {
        let (elements, dtype) = (x.shape().num_elements() as f64, x.dtype());
        // By way of the mean, since the sum of many may exceed f16.
        let mean = widen::<Self>(Self::float_mean(Self::element_loss(x, targets, f)));
        let sum =
            Self::float_mul_scalar(Self::float_reshape(mean, Shape::new([1])), (elements * scale).into());
        Self::float_cast(sum, dtype.into())
    }

    /// The sum of all losses times `scale`, `[1]`, and the slope of every element's loss in `x`, times `slope_scale`.
    fn element_loss_sum_with_slopes(
        x: FloatTensor<Self>,
        targets: Option<FloatTensor<Self>>,
        f: ElementLoss,
        scale: f64,
        slope_scale: f64,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let factor = Factor { tensor: None, by: slope_scale };
        let sum = Self::element_loss_sum(x.clone(), targets.clone(), f, scale);
        (sum, Self::element_loss_slopes(x, targets, f, Argument::Input, factor))
    }

    /// The slope of the loss of every element in an argument, times `factor`.
    fn element_loss_slopes(
        x: FloatTensor<Self>,
        targets: Option<FloatTensor<Self>>,
        f: ElementLoss,
        argument: Argument,
        factor: Factor<Self>,
    ) -> FloatTensor<Self> {
        let dtype = x.dtype();
        // The factor is composed first, so that fusion joins it with the slope, after which no view may come.
        let ones = Shape::from(vec![1; x.rank()]);
        let Factor { tensor: factor, by } = factor;
        let factor = factor.map(|factor| {
            let factor = Self::float_cast(Self::float_reshape(factor, ones), wide(dtype).into());
            Self::float_mul_scalar(factor, by.into())
        });
        // Half precision may have the range and the digits for the product, but not for the slope alone.
        let slope = slope::<Self>(widen::<Self>(x), targets.map(widen::<Self>), f, argument);
        let product = match factor {
            Some(factor) => Self::float_mul(slope, factor),
            None if by == 1.0 => slope,
            None => Self::float_mul_scalar(slope, by.into()),
        };
        Self::float_cast(product, dtype.into())
    }

    /// `x y factor` of every element, rounded once.
    fn scaled_product(x: FloatTensor<Self>, y: FloatTensor<Self>, factor: f64) -> FloatTensor<Self> {
        let dtype = x.dtype();
        let product = Self::float_mul(widen::<Self>(x), widen::<Self>(y));
        Self::float_cast(Self::float_mul_scalar(product, factor.into()), dtype.into())
    }

    /// The slope of the loss of every element in an argument, times its `dy`.
    fn element_loss_backward(
        x: FloatTensor<Self>,
        targets: Option<FloatTensor<Self>>,
        f: ElementLoss,
        argument: Argument,
        dy: FloatTensor<Self>,
    ) -> FloatTensor<Self> {
        Self::float_mul(slope::<Self>(x, targets, f, argument), dy)
    }
}
composing_backends!(ElementLossKernels);

fn below<B: Backend>(x: FloatTensor<B>, v: f64) -> BoolTensor<B> {
    let bools = get_or_init_device_settings::<B>(&x.device()).bool_dtype;
    B::float_lower_elem(x, v.into(), bools)
}

fn above<B: Backend>(x: FloatTensor<B>, v: f64) -> BoolTensor<B> {
    let bools = get_or_init_device_settings::<B>(&x.device()).bool_dtype;
    B::float_greater_elem(x, v.into(), bools)
}

/// `v - x`
fn rest<B: Backend>(x: FloatTensor<B>, v: f64) -> FloatTensor<B> {
    B::float_add_scalar(B::float_neg(x), v.into())
}

/// `weight / x`, and 0 where the logarithm of `x` is not above [`LOWEST_LOG`].
fn log_slope<B: Backend>(weight: FloatTensor<B>, x: FloatTensor<B>) -> FloatTensor<B> {
    let bools = get_or_init_device_settings::<B>(&x.device()).bool_dtype;
    let highest = LOWEST_LOG.exp().max(f64::from(f32::MIN_POSITIVE)); // becomes 0 in f16, where only 0 is clamped
    let clamped = B::float_lower_equal_elem(x.clone(), highest.into(), bools);
    let x = B::float_mask_fill(x, clamped.clone(), 1.into());
    B::float_mask_fill(B::float_div(weight, x), clamped, 0.into())
}

fn slope<B: Backend>(
    x: FloatTensor<B>,
    targets: Option<FloatTensor<B>>,
    f: ElementLoss,
    argument: Argument,
) -> FloatTensor<B> {
    match (f, targets, argument) {
        (ElementLoss::Huber { delta, .. }, ..) => B::float_clamp(x, (-delta).into(), delta.into()),
        (ElementLoss::LogAbove { min }, ..) => {
            let clamped = below::<B>(x.clone(), min);
            B::float_mask_fill(B::float_recip(x), clamped, 0.into())
        }
        (ElementLoss::BinaryLogits, Some(t), _) => B::float_sub(B::sigmoid(x), t),
        (ElementLoss::BinaryProbabilities, Some(t), _) => {
            let negative = log_slope::<B>(rest::<B>(t.clone(), 1.0), rest::<B>(x.clone(), 1.0));
            B::float_sub(negative, log_slope::<B>(t, x))
        }
        (ElementLoss::Divergence { .. }, Some(t), Argument::Input) => B::float_neg(t),
        (ElementLoss::Divergence { min }, Some(t), Argument::Target) => {
            let log = B::float_log(B::float_clamp(t.clone(), min.into(), 1.into()));
            let outside = B::bool_or(below::<B>(t.clone(), min), above::<B>(t.clone(), 1.0));
            let inside = B::float_ones(t.shape(), &t.device(), t.dtype().into());
            B::float_add(B::float_sub(log, x), B::float_mask_fill(inside, outside, 0.into()))
        }
        (ElementLoss::LogDivergence, Some(t), Argument::Input) => B::float_neg(B::float_exp(t)),
        (ElementLoss::LogDivergence, Some(t), Argument::Target) => {
            let factor = B::float_add_scalar(B::float_sub(t.clone(), x), 1.into());
            B::float_mul(B::float_exp(t), factor)
        }
        (ElementLoss::Square, ..) | (_, None, _) => B::float_mul_scalar(x, 2.into()),
    }
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use super::*;
    use crate::backend::testing::{Composed, assert_close, composed, random};
    use burn::backend::{
        Flex,
        flex::FlexDevice,
        ops::{ActivationOps, FloatTensorOps},
        read_sync,
    };
    use burn::tensor::{TensorData, f16};

    #[test]
    fn default_bodies_equal_the_kernels() {
        let probabilities =
            || <Flex as ActivationOps<Flex>>::sigmoid(Flex::float_mul_scalar(random(&[5, 13]), 3.0.into()));
        let alone = [
            ElementLoss::Square,
            ElementLoss::Huber { delta: 0.5, bias: 0.125 },
            ElementLoss::LogAbove { min: 0.3 },
        ];
        let with_targets = [
            ElementLoss::BinaryLogits,
            ElementLoss::BinaryProbabilities,
            ElementLoss::Divergence { min: 0.3 },
            ElementLoss::LogDivergence,
        ];
        let cases = alone.map(|f| (f, None)).into_iter();
        for (f, targets) in cases.chain(with_targets.map(|f| (f, Some(probabilities())))) {
            let (x, dy, factor) = (probabilities(), random(&[5, 13]), random(&[1]));
            let t = || targets.clone();
            let composed_t = || targets.as_ref().map(composed);
            let body = Composed::element_loss(composed(&x), composed_t(), f);
            assert_close("loss", body, Flex::element_loss(x.clone(), t(), f));
            let body = Composed::element_loss_sum(composed(&x), composed_t(), f, 0.5);
            assert_close("sum", body, Flex::element_loss_sum(x.clone(), t(), f, 0.5));
            // Targets of a binary cross entropy have no gradient.
            let arguments = match targets.is_some() && !f.is_binary() {
                true => &[Argument::Input, Argument::Target][..],
                false => &[Argument::Input],
            };
            for &argument in arguments {
                let body =
                    Composed::element_loss_backward(composed(&x), composed_t(), f, argument, composed(&dy));
                let cpu = Flex::element_loss_backward(x.clone(), t(), f, argument, dy.clone());
                assert_close("dx", body, cpu);
                for (tensor, by) in [(None, 1.0), (None, 2.5), (Some(&factor), 0.5)] {
                    let of = Factor::<Composed> { tensor: tensor.map(composed), by };
                    let body = Composed::element_loss_slopes(composed(&x), composed_t(), f, argument, of);
                    let of = Factor { tensor: tensor.cloned(), by };
                    let cpu = Flex::element_loss_slopes(x.clone(), t(), f, argument, of);
                    assert_close("slope", body, cpu);
                }
            }
            let body = Composed::scale(composed(&x), composed(&factor), 3.0);
            assert_close("scaled", body, Flex::scale(x, factor, 3.0));
        }
    }

    /// Scaled slopes in f16, for small probabilities of all sizes, and for 0 and 1.
    #[test]
    fn slopes_of_small_probabilities_are_finite() {
        let f = ElementLoss::BinaryProbabilities;
        let mut x: Vec<f32> = (0..=24).map(|exponent| 2f32.powi(-exponent)).collect();
        x.push(0.0);
        let exact = |x: f64, t: f64| {
            let log_slope = |weight: f64, x: f64| if x > 0.0 { weight / x } else { 0.0 };
            f.slope_scale(DType::F16) * (log_slope(1.0 - t, 1.0 - x) - log_slope(t, x))
        };
        for target in [0.0, 1e-5, 1e-4, 1.0] {
            let make = |values: Vec<f32>| {
                let shape = [values.len()];
                let data = TensorData::new(values, shape).convert_dtype(DType::F16);
                <Flex as FloatTensorOps<Flex>>::float_from_data(data, &FlexDevice)
            };
            let t = make(vec![target; x.len()]);
            let by = f.slope_scale(DType::F16);
            let x_f16 = make(x.clone());
            let input = Argument::Input;
            let cpu = Flex::element_loss_slopes(
                x_f16.clone(),
                Some(t.clone()),
                f,
                input,
                Factor { tensor: None, by },
            );
            let body = Composed::element_loss_slopes(
                composed(&x_f16),
                Some(composed(&t)),
                f,
                input,
                Factor { tensor: None, by },
            );
            for slopes in [cpu, body.into_primitive()] {
                let slopes = read_sync(Flex::float_into_data(slopes)).expect("a CPU tensor");
                for (&x, slope) in x.iter().zip(slopes.iter::<f64>()) {
                    let exact = exact(f64::from(x), f16::from_f32(target).to_f64());
                    assert!(
                        (slope - exact).abs() <= exact.abs() / 1024.0 + 2f64.powi(-25),
                        "{x}, {target}: {slope}, not {exact}"
                    );
                }
            }
        }
    }
}
