//! Piecewise linear activations, such as ReLU.
//!
//! | | |
//! | --- | --- |
//! | computes | `y = f(x)`, `f` a [`PiecewiseLinear`] function |
//! | keeps | 1 bit per element (which slope) if `x` is tracked, else nothing |
//! | backward | `dx = dy * slope[bit]` |
//!
//! If `x` is kept by another step or recomputed, the output is offered for [recomputation](crate::graph).
//!
//! Stock Burn keeps `x` for ReLU, and booleans and intermediate tensors for the other functions. The gradient passes through an infinite
//! `x`. A NaN is treated as in stock Burn.
use crate::backend::{Masks, composing_backends, widen};
use crate::graph::{BackwardPass, Inputs, KeepPlan, Operation, Recorder, Run, Tracking, extension, given};
use burn::backend::{
    Backend, TensorMetadata, get_or_init_device_settings, ops::ActivationOps, tensor::FloatTensor,
};
use burn::tensor::{DType, bf16, f16};

#[cfg(any(feature = "flex", feature = "ndarray"))]
mod cpu;
#[cfg(any(feature = "wgpu", feature = "cuda"))]
mod cube;

/// A piecewise linear function of one variable, with at most two slopes: one bit per element is enough for its backward pass.
///
/// Each variant is the function of the same name in [`burn::tensor::activation`], with the same treatment of ties and NaN.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum PiecewiseLinear {
    /// `max(x, 0)`
    Relu,
    /// `x` if `x >= 0`, else `negative_slope * x`
    LeakyRelu {
        /// The slope below zero.
        negative_slope: f64,
    },
    /// `min(max(x, min), max)`
    Clamp {
        /// The lower bound.
        min: f64,
        /// The upper bound, not below `min`.
        max: f64,
    },
    /// `min(max(alpha x + beta, 0), 1)`
    HardSigmoid {
        /// The slope.
        alpha: f64,
        /// The value at zero.
        beta: f64,
    },
    /// `x - bias` if `x > lambda`, `x + bias` if `x < -lambda`, else 0
    Shrink {
        /// Half the width of the zero piece.
        lambda: f64,
        /// How far values outside of the zero piece move toward zero.
        bias: f64,
    },
    /// `x` if `x > threshold`, else `value`
    Threshold {
        /// The upper end of the constant piece.
        threshold: f64,
        /// The value of the constant piece.
        value: f64,
    },
}

impl PiecewiseLinear {
    /// The slope where the bit is clear, and where it is set.
    pub fn slopes(self) -> [f64; 2] {
        match self {
            Self::LeakyRelu { negative_slope } => [negative_slope, 1.0],
            Self::HardSigmoid { alpha, .. } => [0.0, alpha],
            _ => [0.0, 1.0],
        }
    }

    /// With the ends of the pieces rounded to a dtype, that of `x`: an `x` equal to a bound must not count as beyond it.
    pub(super) fn with_ends_in(self, dtype: DType) -> Self {
        let end = |end: f64| match dtype {
            DType::F16 => f16::from_f64(end).to_f64(),
            DType::BF16 => bf16::from_f64(end).to_f64(),
            _ => end,
        };
        match self {
            Self::Clamp { min, max } => Self::Clamp { min: end(min), max: end(max) },
            Self::Shrink { lambda, bias } => Self::Shrink { lambda: end(lambda), bias },
            Self::Threshold { threshold, value } => Self::Threshold { threshold: end(threshold), value },
            other => other,
        }
    }

    /// Whether Burn's function is also a single pass, which keeps the elements in the order that they have in memory.
    pub(crate) fn is_a_pass_in_burn(self) -> bool {
        matches!(self, Self::Relu | Self::LeakyRelu { .. } | Self::HardSigmoid { .. })
    }

    /// Whether the pieces are in the order that the formula assumes.
    pub fn is_ordered(self) -> bool {
        match self {
            Self::Clamp { min, max } => min <= max,
            Self::Shrink { lambda, .. } => lambda >= 0.0,
            _ => true,
        }
    }
}

extension! {
    /// Piecewise linear activations.
    pub trait PiecewiseLinearOps(PiecewiseLinearKernels) {
        /// `f(x)`, element by element; any shape.
        fn memsave_piecewise_linear(x: FloatTensor<Self>, f: PiecewiseLinear) -> FloatTensor<Self> {
            // Where the checkpointing strategy of the device recomputes x, stock keeps nothing for a ReLU. A mask would be more.
            if f == PiecewiseLinear::Relu && Self::is_recomputed(&x) {
                return <Self as ActivationOps<Self>>::relu(x);
            }
            let f = f.with_ends_in(x.dtype());
            Self::run(f, [Some(x)])
        }
    }
}

const X: usize = 0;

impl<B: PiecewiseLinearKernels> Operation<B, 1> for PiecewiseLinear {
    const INPUTS: [&'static str; 1] = ["x"];
    type Saved = SavedMask<B>;

    fn name(&self) -> &'static str {
        match self {
            Self::Relu => "relu",
            Self::LeakyRelu { .. } => "leaky_relu",
            Self::Clamp { .. } => "hardtanh",
            Self::HardSigmoid { .. } => "hard_sigmoid",
            Self::Shrink { .. } => "shrink",
            Self::Threshold { .. } => "threshold",
        }
    }

    fn plan(&self, inputs: &Tracking<B, 1>) -> KeepPlan<1> {
        KeepPlan::nothing().offer_if(inputs.available(X))
    }

    fn forward(&self, [x]: Inputs<B, 1>) -> FloatTensor<B> {
        B::piecewise_linear(given(x), *self)
    }

    fn forward_saving(&self, [x]: Inputs<B, 1>, recorder: &Recorder<1>) -> (FloatTensor<B>, SavedMask<B>) {
        let (y, mask) = B::piecewise_linear_with_mask(given(x), *self);
        (y, SavedMask { mask: recorder.report().state("mask", mask, "x is tracked"), slopes: self.slopes() })
    }

    fn backward(SavedMask { mask, slopes }: SavedMask<B>, dy: FloatTensor<B>, pass: &mut BackwardPass<B, 1>) {
        pass.give(X, B::scale_by_mask(dy, &mask, slopes));
    }
}

/// What the backward pass reads.
#[derive(Clone, Debug)]
pub struct SavedMask<B: Masks> {
    /// Per element, the bit that selects the slope.
    mask: B::Mask,
    /// The slope where the bit is clear, and where it is set.
    slopes: [f64; 2],
}

/// `f(x)` by Burn's operations.
fn by_burn<B: Backend>(x: FloatTensor<B>, f: PiecewiseLinear) -> FloatTensor<B> {
    let bools = get_or_init_device_settings::<B>(&x.device()).bool_dtype;
    match f {
        PiecewiseLinear::Relu => B::relu(x),
        PiecewiseLinear::LeakyRelu { negative_slope } => B::leaky_relu(x, negative_slope.into()),
        PiecewiseLinear::Clamp { min, max } => B::float_clamp(x, min.into(), max.into()),
        PiecewiseLinear::HardSigmoid { alpha, beta } => B::hard_sigmoid(x, alpha.into(), beta.into()),
        PiecewiseLinear::Shrink { lambda, bias } => {
            let zero = B::float_lower_equal_elem(B::float_abs(x.clone()), lambda.into(), bools);
            let shift = B::float_mul_scalar(B::float_sign(x.clone()), bias.into());
            B::float_mask_fill(B::float_sub(x, shift), zero, 0.into())
        }
        PiecewiseLinear::Threshold { threshold, value } => {
            let constant = B::float_lower_equal_elem(x.clone(), threshold.into(), bools);
            B::float_mask_fill(x, constant, value.into())
        }
    }
}

/// The kernels.
pub trait PiecewiseLinearKernels: Masks {
    /// `f(x)`.
    fn piecewise_linear(x: FloatTensor<Self>, f: PiecewiseLinear) -> FloatTensor<Self> {
        by_burn::<Self>(x, f)
    }

    /// `f(x)` and, per element, the bit that selects the slope of `f` there.
    fn piecewise_linear_with_mask(
        x: FloatTensor<Self>,
        f: PiecewiseLinear,
    ) -> (FloatTensor<Self>, Self::Mask) {
        let mask = Self::piecewise_mask(x.clone(), f);
        (Self::piecewise_linear(x, f), mask)
    }

    /// The bit that selects the slope of `f` at every element of `x`.
    fn piecewise_mask(x: FloatTensor<Self>, f: PiecewiseLinear) -> Self::Mask {
        let bools = get_or_init_device_settings::<Self>(&x.device()).bool_dtype;
        let below = |x: FloatTensor<Self>, v: f64| Self::float_lower_elem(x, v.into(), bools);
        let outside = |x: FloatTensor<Self>, low: f64, high: f64| {
            Self::bool_or(below(x.clone(), low), Self::float_greater_elem(x, high.into(), bools))
        };
        let clear = match f {
            PiecewiseLinear::Relu => Self::float_lower_equal_elem(x, 0.into(), bools),
            PiecewiseLinear::LeakyRelu { .. } => below(x, 0.0),
            PiecewiseLinear::Clamp { min, max } => outside(x, min, max),
            // In half precision, sums beside 0 and 1 would be rounded to these.
            PiecewiseLinear::HardSigmoid { alpha, beta } => outside(
                Self::float_add_scalar(Self::float_mul_scalar(widen::<Self>(x), alpha.into()), beta.into()),
                0.0,
                1.0,
            ),
            PiecewiseLinear::Shrink { lambda, .. } => {
                Self::float_lower_equal_elem(Self::float_abs(x), lambda.into(), bools)
            }
            PiecewiseLinear::Threshold { threshold, .. } => {
                Self::float_lower_equal_elem(x, threshold.into(), bools)
            }
        };
        Self::pack(Self::bool_not(clear))
    }
}
composing_backends!(PiecewiseLinearKernels);

#[cfg(all(test, feature = "flex"))]
mod tests {
    use super::*;
    use crate::backend::Saved;
    use crate::backend::testing::{Composed, assert_close, composed, random};
    use burn::backend::{Flex, ops::FloatTensorOps};

    #[test]
    fn default_bodies_equal_the_kernels() {
        for f in [
            PiecewiseLinear::Relu,
            PiecewiseLinear::LeakyRelu { negative_slope: 0.1 },
            PiecewiseLinear::Clamp { min: -0.5, max: 0.7 },
            PiecewiseLinear::HardSigmoid { alpha: 0.9, beta: 0.4 },
            PiecewiseLinear::Shrink { lambda: 0.5, bias: 0.2 },
            PiecewiseLinear::Threshold { threshold: 0.3, value: 0.1 },
        ] {
            let (x, dy) = (random(&[5, 13]), random(&[5, 13])); // 65 bits: one more than a word
            let (y, mask) = Flex::piecewise_linear_with_mask(x.clone(), f);
            let (body, packed) = Composed::piecewise_linear_with_mask(composed(&x), f);
            assert_close("y", body, y.clone());
            assert_close("y alone", composed(&y), Flex::piecewise_linear(x.clone(), f));
            let unique = Flex::float_mul_scalar(x, 1.0.into());
            assert_close("y alone, in place", composed(&y), Flex::piecewise_linear(unique, f));
            assert_eq!(packed.bytes(), 4 * 65usize.div_ceil(32));
            let body = Composed::scale_by_mask(composed(&dy), &packed, f.slopes());
            assert_close("dx", body, Flex::scale_by_mask(dy, &mask, f.slopes()));
        }
    }
}
