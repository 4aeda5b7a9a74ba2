//! Activations, gates and dropout.
use super::guard::{Misfit, NO_WEIGHT, accepts, require, require_alike, require_floats};
use crate::ops::{
    Approx, ApproxOps, DropoutOps, ElementActivation, GateOps, PReluOps, PiecewiseLinear, PiecewiseLinearOps,
    RReluOps, Smooth, SmoothOps,
};
use burn::backend::Dispatch;
use burn::nn::activation::RReluConfig;
use burn::tensor::{AsIndex, Tensor, activation};

/// Zeroes elements with probability `prob` and divides the others by `1 - prob`.
///
/// Keeps one bit per element, and draws the same numbers as [`burn::nn::Dropout`]. On wgpu and CUDA devices it keeps a seed of
/// 16 bytes instead, from which the backward pass draws again.
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use burn_memsave_layers::functional as F;
///
/// let x = Tensor::<1>::ones([1000], &Device::flex());
/// let kept = F::dropout(x, 0.25).equal_elem(4.0 / 3.0).int().sum().into_scalar::<i64>();
/// assert!((650..850).contains(&kept));
/// ```
pub fn dropout<const D: usize>(x: Tensor<D>, prob: f64) -> Tensor<D> {
    Tensor::from_dispatch(Dispatch::memsave_dropout(x.into_dispatch(), 1.0 - prob))
}

fn piecewise_linear<const D: usize>(
    operation: &'static str,
    x: Tensor<D>,
    f: PiecewiseLinear,
    stock: impl FnOnce(Tensor<D>) -> Tensor<D>,
) -> Tensor<D> {
    let fit = require_floats(&x).and(require(f.is_ordered(), Misfit::Bounds));
    let tracked = x.is_tracked();
    let is_burns = !tracked && f.is_a_pass_in_burn();
    match !is_burns && accepts(operation, fit, tracked, NO_WEIGHT) {
        true => Tensor::from_dispatch(Dispatch::memsave_piecewise_linear(x.into_dispatch(), f)),
        false => stock(x),
    }
}

macro_rules! piecewise_linear {
    ($($function:ident($($argument:ident),*) = $f:expr, $formula:literal;)+) => {$(
        #[doc = concat!("`", $formula, "`; see [`burn::tensor::activation::", stringify!($function), "`].")]
        ///
        /// Keeps one bit per element.
        pub fn $function<const D: usize>(x: Tensor<D>, $($argument: f64),*) -> Tensor<D> {
            piecewise_linear(stringify!($function), x, $f, |x| activation::$function(x, $($argument),*))
        }
    )+};
}
piecewise_linear! {
    relu() = PiecewiseLinear::Relu, "max(x, 0)";
    leaky_relu(negative_slope) = PiecewiseLinear::LeakyRelu { negative_slope }, "x if x >= 0, else negative_slope x";
    relu6() = PiecewiseLinear::Clamp { min: 0.0, max: 6.0 }, "min(max(x, 0), 6)";
    hardtanh(min_val, max_val) = PiecewiseLinear::Clamp { min: min_val, max: max_val }, "min(max(x, min_val), max_val)";
    hard_sigmoid(alpha, beta) = PiecewiseLinear::HardSigmoid { alpha, beta }, "min(max(alpha x + beta, 0), 1)";
    hard_shrink(lambda) = PiecewiseLinear::Shrink { lambda, bias: 0.0 }, "x if |x| > lambda, else 0";
    soft_shrink(lambda) = PiecewiseLinear::Shrink { lambda, bias: lambda }, "x - sign(x) lambda if |x| > lambda, else 0";
    shrink(lambda, bias) = PiecewiseLinear::Shrink { lambda, bias }, "x - sign(x) bias if |x| > lambda, else 0";
    threshold(threshold, value) = PiecewiseLinear::Threshold { threshold, value }, "x if x > threshold, else value";
    thresholded_relu(alpha) = PiecewiseLinear::Threshold { threshold: alpha, value: 0.0 }, "x if x > alpha, else 0";
}

fn smooth<const D: usize>(
    operation: &'static str,
    x: Tensor<D>,
    f: Smooth,
    stock: impl FnOnce(Tensor<D>) -> Tensor<D>,
) -> Tensor<D> {
    match accepts(operation, require_floats(&x), x.is_tracked(), NO_WEIGHT) {
        true => Tensor::from_dispatch(Dispatch::memsave_smooth(x.into_dispatch(), f)),
        false => stock(x),
    }
}

/// A line ends with `, not in Burn` if Burn does not have the function.
macro_rules! smooth {
    ($($function:ident($($argument:ident),*) = $f:expr, $formula:literal, keeps $kept:literal $(, not in $burn:ident)?;)+) => {$(
        #[doc = concat!("`", $formula, "`", smooth!(@twin $function $($burn)?))]
        ///
        #[doc = concat!("Keeps ", $kept, ".")]
        pub fn $function<const D: usize>(x: Tensor<D>, $($argument: f64),*) -> Tensor<D> {
            smooth(stringify!($function), x, $f, |x| smooth!(@stock $function(x $(, $argument)*), $f $(, $burn)?))
        }
    )+};
    (@twin $function:ident) => { concat!("; see [`burn::tensor::activation::", stringify!($function), "`].") };
    (@twin $function:ident Burn) => { ", which Burn does not have." };
    (@stock $function:ident($($argument:ident),+), $f:expr) => { activation::$function($($argument),+) };
    // An empty tensor is its own result; another one that does not fit is quantized.
    (@stock $function:ident($x:ident $(, $argument:ident)*), $f:expr, Burn) => {
        match $x.dequantize() {
            x if x.shape().num_elements() == 0 => x,
            x => Tensor::from_dispatch(Dispatch::memsave_smooth(x.into_dispatch(), $f)),
        }
    };
}
smooth! {
    gelu() = Smooth::Gelu, "x / 2 (1 + erf(x / sqrt(2)))", keeps "`x`";
    gelu_approximate() = Smooth::GeluApproximate, "x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))", keeps "`x`";
    silu() = Smooth::Silu, "x sigmoid(x)", keeps "`x`";
    mish() = Smooth::Mish, "x tanh(log(1 + exp(x)))", keeps "`x`";
    softplus(beta) = Smooth::Softplus { beta, threshold: activation::DEFAULT_SOFTPLUS_THRESHOLD }, "log(1 + exp(beta x)) / beta", keeps "`x`";
    softplus_with_threshold(beta, threshold) = Smooth::Softplus { beta, threshold }, "x if beta x > threshold, else log(1 + exp(beta x)) / beta", keeps "`x`";
    softsign() = Smooth::Softsign, "x / (1 + |x|)", keeps "`x`";
    elu(alpha) = Smooth::Elu { alpha }, "x if x > 0, else alpha (exp(x) - 1)", keeps "`x`";
    celu(alpha) = Smooth::Celu { alpha }, "x if x > 0, else alpha (exp(x / alpha) - 1)", keeps "`x`";
    selu() = Smooth::Selu, "1.0507 (x if x > 0, else 1.6733 (exp(x) - 1))", keeps "`x`";
    log_sigmoid() = Smooth::LogSigmoid, "log(sigmoid(x))", keeps "`x`";
    hard_swish() = Smooth::HardSwish, "x min(max(x / 6 + 1/2, 0), 1)", keeps "`x`";
    tanhshrink() = Smooth::Tanhshrink, "x - tanh(x)", keeps "`x`";
    sigmoid() = Smooth::Sigmoid, "1 / (1 + exp(-x))", keeps "its output";
    tanh() = Smooth::Tanh, "tanh(x)", keeps "its output";
}

/// `f(x)`, for a float `x`.
///
/// # Panics
///
/// Panics if the bounds of a piecewise linear activation are not in order.
pub(crate) fn activate<const D: usize>(x: Tensor<D>, f: ElementActivation) -> Tensor<D> {
    assert!(f.is_ordered(), "the bounds of {f:?} are not in order");
    match x.shape().num_elements() {
        0 => x,
        _ => Tensor::from_dispatch(f.of::<Dispatch>(x.into_dispatch())),
    }
}

macro_rules! approx {
    ($($function:ident = $f:expr, $exact:ident, $formula:literal;)+) => {$(
        #[doc = concat!("`", $formula, "`, as [`", stringify!($exact), "`], with **approximate gradients**: every slope is one of four numbers.")]
        ///
        /// Keeps two bits per element, after [arXiv 2406.16282](https://arxiv.org/abs/2406.16282).
        pub fn $function<const D: usize>(x: Tensor<D>) -> Tensor<D> {
            match x.is_tracked() && accepts(stringify!($function), require_floats(&x), true, NO_WEIGHT) {
                true => Tensor::from_dispatch(Dispatch::memsave_approx(x.into_dispatch(), $f)),
                false => $exact(x),
            }
        }
    )+};
}
approx! {
    approx_gelu = Approx::Gelu, gelu, "x / 2 (1 + erf(x / sqrt(2)))";
    approx_silu = Approx::Silu, silu, "x sigmoid(x)";
}

/// `a sigmoid(b)`, where `a` and `b` are the two halves of `x` along an axis; see [`burn::tensor::activation::glu`].
///
/// Keeps the two halves.
///
/// # Panics
///
/// Panics if the axis does not exist or has an odd length.
pub fn glu<const D: usize>(x: Tensor<D>, dim: impl AsIndex) -> Tensor<D> {
    let dim = dim.as_index();
    let axis = usize::try_from(if dim < 0 { dim + D as isize } else { dim }).ok();
    let halves = |&axis: &usize| axis < D && x.dims()[axis].is_multiple_of(2);
    match axis.filter(halves) {
        Some(axis) if x.is_tracked() && accepts("glu", require_floats(&x), true, NO_WEIGHT) => {
            let half = x.dims()[axis] / 2;
            let [a, b] = [0, half].map(|start| x.clone().narrow(axis, start, half));
            gate(a, b, Smooth::Sigmoid)
        }
        _ => activation::glu(x, dim),
    }
}

/// `a silu(b)`, the product in a SwiGLU, for `a` and `b` of the same shape and dtype.
///
/// Keeps `b`, and `a` if `b` is tracked.
///
/// ```
/// use burn::tensor::{Device, Tensor, Tolerance};
/// use burn_memsave_layers::functional as F;
///
/// let [a, b] = [[2.0], [1.0]].map(|x| Tensor::<1>::from_floats(x, &Device::flex()));
/// F::silu_gate(a, b).to_data().assert_approx_eq::<f32>(&[1.4621172f32].into(), Tolerance::default());
/// ```
pub fn silu_gate<const D: usize>(a: Tensor<D>, b: Tensor<D>) -> Tensor<D> {
    match accepts("silu_gate", require_alike(&a, &b), a.is_tracked() || b.is_tracked(), NO_WEIGHT) {
        true => gate(a, b, Smooth::Silu),
        false => activation::silu(b) * a,
    }
}

fn gate<const D: usize>(a: Tensor<D>, b: Tensor<D>, f: Smooth) -> Tensor<D> {
    Tensor::from_dispatch(Dispatch::memsave_gate(a.into_dispatch(), b.into_dispatch(), f))
}

/// `x` if `x >= 0`, else `alpha x`, with one slope or one per channel; see [`burn::tensor::activation::prelu`].
///
/// Keeps `x` if `alpha` is tracked, else one bit per element.
pub fn prelu<const D: usize>(x: Tensor<D>, alpha: Tensor<1>) -> Tensor<D> {
    let [slopes] = alpha.dims();
    let fit = require_floats(&x)
        .and(require(slopes == 1 || (D >= 2 && x.dims()[1] == slopes), Misfit::Shapes))
        .and(require(alpha.dtype() == x.dtype(), Misfit::Dtypes));
    let tracked = x.is_tracked() || alpha.is_tracked();
    if !tracked || !accepts("prelu", fit, tracked, Some(&alpha)) {
        return activation::prelu(x, alpha);
    }
    Tensor::from_dispatch(Dispatch::memsave_prelu(x.into_dispatch(), alpha.into_dispatch()))
}

/// `x` if `x >= 0`, else `slope x` with a slope drawn for each element from `lower..upper`, as [`burn::nn::activation::RRelu`]
/// does during training. With the same seed, the slopes are those of Burn, except on wgpu and CUDA devices.
///
/// Keeps one float per element; on wgpu and CUDA devices, one bit per element and a seed of 16 bytes, from which the backward
/// pass draws again.
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use burn_memsave_layers::functional as F;
///
/// let y = F::rrelu(Tensor::<1>::from_floats([-4.0, 1.0], &Device::flex()), 0.25, 0.5);
/// let y = y.into_data().try_to_vec::<f32>().unwrap();
/// assert!((-2.0..=-1.0).contains(&y[0]) && y[1] == 1.0);
/// ```
pub fn rrelu<const D: usize>(x: Tensor<D>, lower: f64, upper: f64) -> Tensor<D> {
    match accepts("rrelu", require_floats(&x), x.is_tracked(), NO_WEIGHT) {
        true => Tensor::from_dispatch(Dispatch::memsave_rrelu(x.into_dispatch(), lower, upper)),
        false => RReluConfig::new().with_lower(lower).with_upper(upper).init().forward(x),
    }
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use super::*;
    use burn::tensor::{Device, quantization::QuantValue};

    smooth! {
        squashed() = Smooth::Tanh, "tanh(x)", keeps "its output", not in Burn;
    }

    #[test]
    fn what_burn_lacks_takes_quantized_and_empty_tensors() {
        let device = Device::flex();
        let x = Tensor::<2>::from_floats([[-1.0, 0.5, 2.0, 0.0]; 32], &device);
        assert_eq!(squashed(x.clone()).into_data(), tanh(x.clone()).into_data());
        let scheme = device.settings().quantization.scheme.with_value(QuantValue::Q8S);
        let x = x.quantize_dynamic(&scheme);
        assert_eq!(squashed(x.clone()).into_data(), tanh(x.dequantize()).into_data());
        assert_eq!(squashed(Tensor::<2>::zeros([2, 0], &device)).dims(), [2, 0]);
    }
}
