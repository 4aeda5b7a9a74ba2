//! Functions and slopes composed of Burn's operations.
use super::{
    Smooth,
    functions::{constants::*, smooth_functions},
};
use crate::backend::widen;
use burn::backend::{
    Backend, TensorMetadata, get_or_init_device_settings,
    tensor::{BoolTensor, FloatTensor},
};

type Float<B> = FloatTensor<B>;

macro_rules! compose {
    ($(
        $(#[$doc:meta])*
        $variant:ident $({ $($(#[$of_field:meta])* $field:ident = $tested:literal,)+ })?, $name:literal, slope from $read:ident:
            cpu $cpu:tt
            #[cube] $cube:tt
            composed {
                value($x:ident) $value:tt
                slope($y:ident) $slope:tt
            }
    )+) => {
        /// `f(x)`
        pub(super) fn value<B: Backend>(x: Float<B>, f: Smooth) -> Float<B> {
            match f {$(
                Smooth::$variant $({ $($field),+ })? => {
                    let $x = x;
                    $value
                }
            )+}
        }

        /// The slope of `f`, from its input or its [output](Smooth::reads_output).
        pub(in crate::ops) fn slope<B: Backend>(read: Float<B>, f: Smooth) -> Float<B> {
            match f {$(
                Smooth::$variant $({ $($field),+ })? => {
                    let $y = read;
                    $slope
                }
            )+}
        }
    };
}
smooth_functions!(compose);

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

/// `x > v`
pub(super) fn above<B: Backend>(x: Float<B>, v: f64) -> BoolTensor<B> {
    let bools = get_or_init_device_settings::<B>(&x.device()).bool_dtype;
    B::float_greater_elem(x, v.into(), bools)
}

/// `x >= v`
fn at_least<B: Backend>(x: Float<B>, v: f64) -> BoolTensor<B> {
    let bools = get_or_init_device_settings::<B>(&x.device()).bool_dtype;
    B::float_greater_equal_elem(x, v.into(), bools)
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
