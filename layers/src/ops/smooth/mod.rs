//! Smooth activations: GELU, SiLU, sigmoid and their kin.
//!
//! | | |
//! | --- | --- |
//! | computes | `y = f(x)`, `f` a [`Smooth`] function |
//! | keeps | `x` (a handle); for sigmoid and tanh `y`, unless `x` is available anyway |
//! | backward | `dx = dy * f'(x)`, in place |
//!
//! Where `x` is kept, the output is offered for [recomputation](super::recompute): the next layer then keeps nothing. Stock Burn
//! records up to six operations for one function, each of which keeps a tensor.
use crate::backend::{fusing_backends, widen};
use crate::graph::{BackwardPass, Inputs, KeepPlan, Operation, Recorder, Run, Tracking, extension, given};
use burn::backend::{
    Backend, TensorMetadata, get_or_init_device_settings,
    tensor::{BoolTensor, FloatTensor},
};

#[cfg(any(feature = "flex", feature = "ndarray"))]
pub mod cpu;
#[cfg(all(any(feature = "wgpu", feature = "cuda"), not(feature = "fusion")))]
pub mod cube;

/// A function of one variable whose slope (derivative) is computed from its input, or from its output.
///
/// Each variant is the function of the same name in [`burn::tensor::activation`], computed in f32 or in f64 as the tensor is,
/// in one pass.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Smooth {
    /// `x / 2 * (1 + erf(x / sqrt(2)))`
    Gelu,
    /// `x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3)))`
    GeluApproximate,
    /// `x * sigmoid(x)`
    Silu,
    /// `x * tanh(softplus(x))`
    Mish,
    /// `log(1 + exp(beta x)) / beta`, and `x` if `beta x > threshold`
    Softplus {
        /// The steepness.
        beta: f64,
        /// From where on the function is the identity.
        threshold: f64,
    },
    /// `x / (1 + |x|)`
    Softsign,
    /// `x` if `x > 0`, else `alpha * (exp(x) - 1)`
    Elu {
        /// The limit below, negated.
        alpha: f64,
    },
    /// `x` if `x > 0`, else `alpha * (exp(x / alpha) - 1)`
    Celu {
        /// The limit below, negated.
        alpha: f64,
    },
    /// `1.0507 * elu(x)` with `alpha = 1.6733`
    Selu,
    /// `log(sigmoid(x))`
    LogSigmoid,
    /// `x * min(max(x / 6 + 1/2, 0), 1)`
    HardSwish,
    /// `x - tanh(x)`
    Tanhshrink,
    /// `1 / (1 + exp(-x))`
    Sigmoid,
    /// The hyperbolic tangent.
    Tanh,
}

impl Smooth {
    /// Whether the slope is computed from the output; else from the input.
    pub fn reads_output(self) -> bool {
        matches!(self, Self::Sigmoid | Self::Tanh)
    }
}

extension! {
    /// Smooth activations.
    pub trait SmoothOps(SmoothKernels) {
        /// `f(x)`, element by element; any shape.
        fn memsave_smooth(x: FloatTensor<Self>, f: Smooth) -> FloatTensor<Self> {
            Self::run(f, [Some(x)])
        }
    }
}

const X: usize = 0;

impl<B: SmoothKernels> Operation<B, 1> for Smooth {
    const INPUTS: [&'static str; 1] = ["x"];
    type Saved = SavedSmooth<FloatTensor<B>>;

    fn name(&self) -> &'static str {
        match self {
            Smooth::Gelu | Smooth::GeluApproximate => "gelu",
            Smooth::Silu => "silu",
            Smooth::Mish => "mish",
            Smooth::Softplus { .. } => "softplus",
            Smooth::Softsign => "softsign",
            Smooth::Elu { .. } => "elu",
            Smooth::Celu { .. } => "celu",
            Smooth::Selu => "selu",
            Smooth::LogSigmoid => "log_sigmoid",
            Smooth::HardSwish => "hard_swish",
            Smooth::Tanhshrink => "tanhshrink",
            Smooth::Sigmoid => "sigmoid",
            Smooth::Tanh => "tanh",
        }
    }

    fn plan(&self, inputs: &Tracking<B, 1>) -> KeepPlan<1> {
        let reads_x = !self.reads_output() || inputs.available(X);
        KeepPlan::nothing().keep_if(reads_x, X, "x is tracked").offer_if(reads_x)
    }

    fn forward(&self, [x]: Inputs<B, 1>) -> FloatTensor<B> {
        B::smooth(given(x), *self)
    }

    fn forward_saving(&self, inputs: Inputs<B, 1>, recorder: &Recorder<1>) -> (FloatTensor<B>, Self::Saved) {
        let y = Operation::<B, 1>::forward(self, inputs);
        let output = (!recorder.keeps(X)).then(|| recorder.report().tensor("y", y.clone(), "x is tracked"));
        (y, SavedSmooth { f: *self, output })
    }

    fn backward(SavedSmooth { f, output }: Self::Saved, dy: FloatTensor<B>, pass: &mut BackwardPass<B, 1>) {
        let read = output.unwrap_or_else(|| match (f.reads_output(), given(pass.take(X))) {
            (true, x) => B::smooth(x, f),
            (false, x) => x,
        });
        pass.give(X, B::smooth_backward(read, f, dy));
    }
}

/// What the backward pass reads.
#[derive(Clone, Debug)]
pub struct SavedSmooth<T> {
    f: Smooth,
    /// The output, if the slope reads it and the input is not kept.
    output: Option<T>,
}

/// The kernels.
pub trait SmoothKernels: Backend {
    /// `f(x)`; in place of `x`, if that is the only handle of its tensor.
    fn smooth(x: FloatTensor<Self>, f: Smooth) -> FloatTensor<Self> {
        match f {
            Smooth::Gelu => Self::gelu(x),
            Smooth::GeluApproximate => {
                let tanh = Self::float_tanh(gelu_inner::<Self>(x.clone()));
                times::<Self>(Self::float_mul(x, plus::<Self>(tanh, 1.0)), 0.5)
            }
            Smooth::Silu => Self::float_mul(x.clone(), Self::sigmoid(x)),
            Smooth::Mish => {
                Self::float_mul(x.clone(), Self::float_tanh(softplus::<Self>(x, SOFTPLUS_THRESHOLD)))
            }
            Smooth::Softplus { beta, threshold } => {
                Self::float_div_scalar(softplus::<Self>(times::<Self>(x, beta), threshold), beta.into())
            }
            Smooth::Softsign => Self::float_div(x.clone(), plus::<Self>(Self::float_abs(x), 1.0)),
            Smooth::Elu { alpha } => exp_branch::<Self>(x, alpha, 1.0),
            Smooth::Celu { alpha } => exp_branch::<Self>(x, alpha, alpha),
            Smooth::Selu => times::<Self>(exp_branch::<Self>(x, SELU_ALPHA, 1.0), SELU_SCALE),
            Smooth::LogSigmoid => Self::log_sigmoid(x),
            Smooth::HardSwish => {
                let gate = Self::float_clamp(hard_gate::<Self>(x.clone()), 0.0.into(), 1.0.into());
                Self::float_mul(x, gate)
            }
            Smooth::Tanhshrink => Self::float_sub(x.clone(), Self::float_tanh(x)),
            Smooth::Sigmoid => Self::sigmoid(x),
            Smooth::Tanh => Self::float_tanh(x),
        }
    }

    /// `dy * f'`, with the slope computed from `read`: the input of `f`, or its [output](Smooth::reads_output).
    fn smooth_backward(read: FloatTensor<Self>, f: Smooth, dy: FloatTensor<Self>) -> FloatTensor<Self> {
        Self::float_mul(slope::<Self>(read, f), dy)
    }
}
fusing_backends!(SmoothKernels);

/// The scale of SELU, <https://arxiv.org/abs/1706.02515>.
const SELU_SCALE: f64 = 1.050_700_987_355_480_5;
/// The limit of SELU below, negated and without the scale.
const SELU_ALPHA: f64 = 1.673_263_242_354_377_2;
/// `sqrt(2 / pi)`
const SQRT_2_OVER_PI: f64 = core::f64::consts::FRAC_2_SQRT_PI * core::f64::consts::FRAC_1_SQRT_2;
/// The coefficient of the cube in the approximation of GELU.
const GELU_CUBE: f64 = 0.044715;
/// From where on `log(1 + exp(x))` is `x`.
const SOFTPLUS_THRESHOLD: f64 = 20.0;

type Float<B> = FloatTensor<B>;

fn plus<B: Backend>(x: Float<B>, v: f64) -> Float<B> {
    B::float_add_scalar(x, v.into())
}

fn times<B: Backend>(x: Float<B>, v: f64) -> Float<B> {
    B::float_mul_scalar(x, v.into())
}

fn square<B: Backend>(x: Float<B>) -> Float<B> {
    B::float_mul(x.clone(), x)
}

/// `1 - x`
fn rest<B: Backend>(x: Float<B>) -> Float<B> {
    plus::<B>(B::float_neg(x), 1.0)
}

fn above<B: Backend>(x: Float<B>, v: f64) -> BoolTensor<B> {
    let bools = get_or_init_device_settings::<B>(&x.device()).bool_dtype;
    B::float_greater_elem(x, v.into(), bools)
}

/// `1 / (1 + exp(-x))`, with one exponential: Burn's composition takes two and a logarithm.
fn sigmoid<B: Backend>(x: Float<B>) -> Float<B> {
    let dtype = x.dtype();
    let y = B::float_recip(plus::<B>(B::float_exp(B::float_neg(widen::<B>(x))), 1.0));
    if y.dtype() == dtype { y } else { B::float_cast(y, dtype.into()) }
}

/// `log(1 + exp(x))`, and `x` above the threshold.
fn softplus<B: Backend>(x: Float<B>, threshold: f64) -> Float<B> {
    // Where the exponential would overflow, the function is the identity to the last digit.
    let threshold = x.dtype().finfo().map_or(threshold, |info| threshold.min(info.max.ln().floor()));
    let linear = above::<B>(x.clone(), threshold);
    let capped = B::float_mask_fill(x.clone(), linear.clone(), threshold.into());
    B::float_mask_where(B::float_log1p(B::float_exp(capped)), linear, x)
}

/// `exp(x / width)` where `x <= 0`, else 1.
fn exp_below<B: Backend>(x: Float<B>, width: f64) -> Float<B> {
    B::float_exp(B::float_div_scalar(B::float_clamp_max(x, 0.0.into()), width.into()))
}

/// `x` where `x > 0`, else `alpha * (exp(x / width) - 1)`.
fn exp_branch<B: Backend>(x: Float<B>, alpha: f64, width: f64) -> Float<B> {
    let below = times::<B>(plus::<B>(exp_below::<B>(x.clone(), width), -1.0), alpha);
    B::float_mask_where(below, above::<B>(x.clone(), 0.0), x)
}

/// The slope of [`exp_branch`].
fn exp_branch_slope<B: Backend>(x: Float<B>, alpha: f64, width: f64) -> Float<B> {
    let below = times::<B>(exp_below::<B>(x.clone(), width), alpha / width);
    B::float_mask_fill(below, above::<B>(x, 0.0), 1.0.into())
}

/// The argument of the tanh in the approximation of GELU.
fn gelu_inner<B: Backend>(x: Float<B>) -> Float<B> {
    let cubic = plus::<B>(times::<B>(square::<B>(x.clone()), GELU_CUBE), 1.0);
    times::<B>(B::float_mul(x, cubic), SQRT_2_OVER_PI)
}

/// `x / 6 + 1/2`
fn hard_gate<B: Backend>(x: Float<B>) -> Float<B> {
    plus::<B>(times::<B>(x, 1.0 / 6.0), 0.5)
}

/// The slope of `f`, from its input or its [output](Smooth::reads_output).
pub(super) fn slope<B: Backend>(read: FloatTensor<B>, f: Smooth) -> FloatTensor<B> {
    let x = read;
    match f {
        Smooth::Gelu => {
            let normal = times::<B>(
                plus::<B>(B::float_erf(times::<B>(x.clone(), core::f64::consts::FRAC_1_SQRT_2)), 1.0),
                0.5,
            );
            let density =
                times::<B>(B::float_exp(times::<B>(square::<B>(x.clone()), -0.5)), SQRT_2_OVER_PI * 0.5);
            B::float_add(normal, B::float_mul(x, density))
        }
        Smooth::GeluApproximate => {
            let tanh = B::float_tanh(gelu_inner::<B>(x.clone()));
            let inner = plus::<B>(times::<B>(square::<B>(x.clone()), 3.0 * GELU_CUBE), 1.0);
            let inner = times::<B>(B::float_mul(x, inner), SQRT_2_OVER_PI);
            let falling = B::float_mul(inner, rest::<B>(square::<B>(tanh.clone())));
            times::<B>(B::float_add(plus::<B>(tanh, 1.0), falling), 0.5)
        }
        Smooth::Silu => {
            let s = sigmoid::<B>(x.clone());
            let inner = plus::<B>(B::float_mul(x, rest::<B>(s.clone())), 1.0);
            B::float_mul(s, inner)
        }
        Smooth::Mish => {
            let tanh = B::float_tanh(softplus::<B>(x.clone(), SOFTPLUS_THRESHOLD));
            let inner = B::float_mul(x.clone(), rest::<B>(square::<B>(tanh.clone())));
            B::float_add(tanh, B::float_mul(inner, sigmoid::<B>(x)))
        }
        Smooth::Softplus { beta, threshold } => {
            let scaled = times::<B>(x, beta);
            let linear = above::<B>(scaled.clone(), threshold);
            B::float_mask_fill(sigmoid::<B>(scaled), linear, 1.0.into())
        }
        Smooth::Softsign => square::<B>(B::float_recip(plus::<B>(B::float_abs(x), 1.0))),
        Smooth::Elu { alpha } => exp_branch_slope::<B>(x, alpha, 1.0),
        Smooth::Celu { alpha } => exp_branch_slope::<B>(x, alpha, alpha),
        Smooth::Selu => {
            // At 0 the slope is that of the line, as in stock.
            let below = times::<B>(exp_below::<B>(x.clone(), 1.0), SELU_ALPHA);
            let bools = get_or_init_device_settings::<B>(&x.device()).bool_dtype;
            let line = B::float_greater_equal_elem(x, 0.into(), bools);
            times::<B>(B::float_mask_fill(below, line, 1.0.into()), SELU_SCALE)
        }
        Smooth::LogSigmoid => sigmoid::<B>(B::float_neg(x)),
        Smooth::HardSwish => {
            let gate = hard_gate::<B>(x.clone());
            let inside = B::float_add(gate.clone(), times::<B>(x, 1.0 / 6.0));
            let inside = B::float_mask_fill(inside, above::<B>(gate.clone(), 1.0), 1.0.into());
            B::float_mask_fill(inside, above::<B>(B::float_neg(gate), 0.0), 0.0.into())
        }
        Smooth::Tanhshrink => square::<B>(B::float_tanh(x)),
        Smooth::Sigmoid => B::float_mul(x.clone(), rest::<B>(x)),
        Smooth::Tanh => rest::<B>(square::<B>(x)),
    }
}

#[cfg(all(test, feature = "flex"))]
pub(crate) mod tests {
    use super::*;
    use crate::backend::testing::{Composed, assert_close, composed, random};
    use burn::backend::{Flex, ops::FloatTensorOps};

    pub(crate) const ALL: [Smooth; 14] = [
        Smooth::Gelu,
        Smooth::GeluApproximate,
        Smooth::Silu,
        Smooth::Mish,
        Smooth::Softplus { beta: 1.5, threshold: 1.0 },
        Smooth::Softsign,
        Smooth::Elu { alpha: 1.5 },
        Smooth::Celu { alpha: 1.5 },
        Smooth::Selu,
        Smooth::LogSigmoid,
        Smooth::HardSwish,
        Smooth::Tanhshrink,
        Smooth::Sigmoid,
        Smooth::Tanh,
    ];

    #[test]
    fn default_bodies_equal_the_kernels() {
        for f in ALL {
            let [x, dy] = [(); 2].map(|()| Flex::float_mul_scalar(random(&[5, 13]), 3.0.into()));
            let x = Flex::float_mask_fill(
                x.clone(),
                above::<Flex>(Flex::float_neg(Flex::float_abs(x)), -0.5),
                0.0.into(),
            );
            let y = Flex::smooth(x.clone(), f);
            assert_close("y", Composed::smooth(composed(&x), f), y.clone());
            let read = if f.reads_output() { y } else { x };
            let body = Composed::smooth_backward(composed(&read), f, composed(&dy));
            assert_close("dx", body, Flex::smooth_backward(read, f, dy));
        }
    }
}
