//! Smooth activations by Burn's operations.
use crate::backend::{
    Smooth,
    smooth::{GELU_CUBE, SELU_ALPHA, SELU_SCALE, SOFTPLUS_THRESHOLD, SQRT_2_OVER_PI},
};
use burn::backend::{
    Backend, TensorMetadata, get_or_init_device_settings,
    tensor::{BoolTensor, FloatTensor},
};

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

/// See [`MemBackend::smooth`](crate::backend::MemBackend::smooth).
pub fn smooth<B: Backend>(x: FloatTensor<B>, f: Smooth) -> FloatTensor<B> {
    match f {
        Smooth::Gelu => B::gelu(x),
        Smooth::GeluApproximate => {
            let tanh = B::float_tanh(gelu_inner::<B>(x.clone()));
            times::<B>(B::float_mul(x, plus::<B>(tanh, 1.0)), 0.5)
        }
        Smooth::Silu => B::float_mul(x.clone(), B::sigmoid(x)),
        Smooth::Mish => B::float_mul(x.clone(), B::float_tanh(softplus::<B>(x, SOFTPLUS_THRESHOLD))),
        Smooth::Softplus { beta, threshold } => {
            B::float_div_scalar(softplus::<B>(times::<B>(x, beta), threshold), beta.into())
        }
        Smooth::Softsign => B::float_div(x.clone(), plus::<B>(B::float_abs(x), 1.0)),
        Smooth::Elu { alpha } => exp_branch::<B>(x, alpha, 1.0),
        Smooth::Celu { alpha } => exp_branch::<B>(x, alpha, alpha),
        Smooth::Selu => times::<B>(exp_branch::<B>(x, SELU_ALPHA, 1.0), SELU_SCALE),
        Smooth::LogSigmoid => B::log_sigmoid(x),
        Smooth::HardSwish => {
            let gate = B::float_clamp(hard_gate::<B>(x.clone()), 0.0.into(), 1.0.into());
            B::float_mul(x, gate)
        }
        Smooth::Tanhshrink => B::float_sub(x.clone(), B::float_tanh(x)),
        Smooth::Sigmoid => B::sigmoid(x),
        Smooth::Tanh => B::float_tanh(x),
    }
}

/// The slope of `f`, of what it reads.
fn slope<B: Backend>(read: FloatTensor<B>, f: Smooth) -> FloatTensor<B> {
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
            let s = B::sigmoid(x.clone());
            let inner = plus::<B>(B::float_mul(x, rest::<B>(s.clone())), 1.0);
            B::float_mul(s, inner)
        }
        Smooth::Mish => {
            let tanh = B::float_tanh(softplus::<B>(x.clone(), SOFTPLUS_THRESHOLD));
            let inner = B::float_mul(x.clone(), rest::<B>(square::<B>(tanh.clone())));
            B::float_add(tanh, B::float_mul(inner, B::sigmoid(x)))
        }
        Smooth::Softplus { beta, threshold } => {
            let scaled = times::<B>(x, beta);
            let linear = above::<B>(scaled.clone(), threshold);
            B::float_mask_fill(B::sigmoid(scaled), linear, 1.0.into())
        }
        Smooth::Softsign => square::<B>(B::float_recip(plus::<B>(B::float_abs(x), 1.0))),
        Smooth::Elu { alpha } => exp_branch_slope::<B>(x, alpha, 1.0),
        Smooth::Celu { alpha } => exp_branch_slope::<B>(x, alpha, alpha),
        Smooth::Selu => times::<B>(exp_branch_slope::<B>(x, SELU_ALPHA, 1.0), SELU_SCALE),
        Smooth::LogSigmoid => B::sigmoid(B::float_neg(x)),
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

/// See [`MemBackend::smooth_backward`](crate::backend::MemBackend::smooth_backward).
pub fn smooth_backward<B: Backend>(read: FloatTensor<B>, f: Smooth, dy: FloatTensor<B>) -> FloatTensor<B> {
    B::float_mul(slope::<B>(read, f), dy)
}

/// See [`MemBackend::gate`](crate::backend::MemBackend::gate).
pub fn gate<B: Backend>(a: FloatTensor<B>, b: FloatTensor<B>, f: Smooth) -> FloatTensor<B> {
    B::float_mul(a, smooth::<B>(b, f))
}

/// See [`MemBackend::gate_backward`](crate::backend::MemBackend::gate_backward).
pub fn gate_backward<B: Backend>(
    a: Option<FloatTensor<B>>,
    b: FloatTensor<B>,
    f: Smooth,
    dy: FloatTensor<B>,
    wants_a: bool,
) -> [Option<FloatTensor<B>>; 2] {
    let value = smooth::<B>(b.clone(), f);
    let read = if f.reads_output() { value.clone() } else { b };
    let b_grad = a.map(|a| B::float_mul(B::float_mul(a, slope::<B>(read, f)), dy.clone()));
    [wants_a.then(|| B::float_mul(dy, value)), b_grad]
}
