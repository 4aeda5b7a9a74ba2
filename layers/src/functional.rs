//! The operations as functions of tensors, with the signatures of [`burn::tensor::module`] and
//! [`burn::tensor::activation`].
//!
//! Where nothing is tracked, or an argument is one that Burn refuses, Burn's own function is called: the same result, or the
//! same panic. What each function keeps for the backward pass is in the head of its file in [`crate::ops`].
//!
//! ```
//! use burn::tensor::{Device, Tensor};
//! use burn_memsave_layers::functional as F;
//!
//! let device = Device::flex().autodiff();
//! let x = Tensor::<2>::from_floats([[-1.0, 2.0]], &device).require_grad();
//! let gradients = F::relu(x.clone()).sum().backward();
//! x.grad(&gradients).unwrap().to_data().assert_eq(&[[0.0f32, 1.0]].into(), true);
//! ```
use crate::backend::{LocalResponse, Smooth};
use crate::ops::{
    AvgPoolOps, BatchNormOps, ConvOps, ConvTransposeOps, DeformConvOps, DropoutOps, EmbeddingOps, GateOps,
    InterpolateOps, LinearOps, LocalResponseOps, MaxPoolOps, MaybeTensor, PReluOps, PiecewiseLinear,
    PiecewiseLinearOps, RowNorm, RowNormOps, SmoothOps, Weight,
};
use burn::backend::Dispatch;
use burn::tensor::{
    AsIndex, DType, Int, Tensor, activation, module,
    module::BatchNormTrainOutput,
    ops::{
        AvgPoolOptions, ConvOptions, ConvTransposeOptions, DeformConvOptions, InterpolateOptions,
        MaxPoolOptions,
    },
};

mod loss;
mod softmax;

pub(crate) use loss::{CHUNK_BYTES, class_weights, element_loss, element_loss_sum};
pub use loss::{LinearCrossEntropyOptions, cross_entropy, linear_cross_entropy};
pub use softmax::{log_softmax, quiet_softmax, softmax, softmin};
mod attention;
mod lora;
mod rotary;

pub use attention::attention;
pub(crate) use attention::weighted;
pub(crate) use lora::adapted_rows;
pub use lora::{
    conv_transpose1d_lora, conv_transpose2d_lora, conv_transpose3d_lora, conv1d_lora, conv2d_lora,
    conv3d_lora, embedding_lora, linear_lora,
};
pub use rotary::rotary_encoding;

/// `x weight + bias`; see [`burn::tensor::module::linear`].
///
/// Keeps `x` only for a tracked weight and the weight only for a tracked `x`; its backward pass folds the batch into the
/// rows, where stock builds one weight gradient per batch row. A quantized weight stays packed: it is dequantized here and
/// again in the backward pass, on CPU backends block by block.
pub fn linear<const D: usize>(x: Tensor<D>, weight: Tensor<2>, bias: Option<Tensor<1>>) -> Tensor<D> {
    if D == 1 {
        return linear(x.unsqueeze::<2>(), weight, bias).squeeze_dim(0);
    }
    let bias = of_bias(bias, x.dtype());
    let fits = x.dims()[D - 1] == weight.dims()[0]
        && weight.shape().num_elements() > 0
        && has_length(&bias, weight.dims()[1])
        && are_floats([x.dtype()]);
    let tracked = || x.is_tracked() || bias.as_ref().is_some_and(Tensor::is_tracked);
    // Burn has its own product with a packed matrix.
    if !fits || is_quantized(&weight) && !tracked() {
        return module::linear(x, weight, bias);
    }
    if x.shape().num_elements() == 0 {
        return empty_linear(x, weight, bias);
    }
    Tensor::from_dispatch(Dispatch::memsave_linear(x.into_dispatch(), of_weight(weight), maybe(bias)))
}

/// The dense layer of an empty batch: an empty output, and gradients of zero. (A matrix product with an empty batch reads
/// beyond its operands on Flex 0.22.1, and ends the process.)
fn empty_linear<const D: usize>(x: Tensor<D>, weight: Tensor<2>, bias: Option<Tensor<1>>) -> Tensor<D> {
    let mut shape = x.dims();
    shape[D - 1] = weight.dims()[1];
    let sum = x.sum() + weight.sum();
    let sum = bias.into_iter().fold(sum, |sum, bias| sum + bias.sum());
    Tensor::zeros(shape, (&sum.device(), sum.dtype())) + (sum * 0.0).reshape([1; D])
}

fn maybe<const D: usize>(tensor: Option<Tensor<D>>) -> MaybeTensor<Dispatch> {
    tensor.map(Tensor::into_dispatch).into()
}

/// A bias as floats: it is small, even where the weight must stay packed.
fn of_bias(bias: Option<Tensor<1>>, dtype: DType) -> Option<Tensor<1>> {
    bias.map(|bias| if is_quantized(&bias) { bias.dequantize().cast(dtype) } else { bias })
}

fn has_length(bias: &Option<Tensor<1>>, length: usize) -> bool {
    bias.as_ref().is_none_or(|bias| bias.dims() == [length] && are_floats([bias.dtype()]))
}

fn is_quantized<const D: usize>(tensor: &Tensor<D>) -> bool {
    !are_floats([tensor.dtype()])
}

fn of_weight<const D: usize>(weight: Tensor<D>) -> Weight<Dispatch> {
    match is_quantized(&weight) {
        true => Weight::Quantized(weight.into_dispatch()),
        false => Weight::Dense(weight.into_dispatch()),
    }
}

/// Not quantized: Burn's own functions dequantize what is.
fn are_floats<const N: usize>(dtypes: [DType; N]) -> bool {
    !dtypes.iter().any(|dtype| matches!(dtype, DType::QFloat(_)))
}

/// Floats that are not quantized, one at least.
fn has_floats<const D: usize>(x: &Tensor<D>) -> bool {
    x.shape().num_elements() > 0 && are_floats([x.dtype()])
}

fn any_tracked<const D: usize>(x: &Tensor<D>, weight: &Tensor<D>, bias: &Option<Tensor<1>>) -> bool {
    x.is_tracked() || weight.is_tracked() || bias.as_ref().is_some_and(Tensor::is_tracked)
}

macro_rules! conv {
    ($($conv:ident = $op:ident, $rank:literal, $dims:literal;)+) => {$(
        #[doc = concat!("See [`burn::tensor::module::", stringify!($conv), "`].")]
        ///
        /// Keeps `x` only for a tracked weight and the weight only for a tracked `x`.
        pub fn $conv(
            x: Tensor<$dims>,
            weight: Tensor<$dims>,
            bias: Option<Tensor<1>>,
            options: impl Into<ConvOptions<$rank>>,
        ) -> Tensor<$dims> {
            let (options, bias) = (options.into(), of_bias(bias, x.dtype()));
            let (sizes, kernel) = (x.dims(), weight.dims());
            let fits = sizes[1] == kernel[1] * options.groups
                && kernel[0].is_multiple_of(options.groups)
                && has_floats(&x)
                && has_length(&bias, kernel[0])
                && (0..$rank).all(|axis| {
                    let (begin, end) = options.padding[axis];
                    let extent = options.dilation[axis] * (kernel[axis + 2].max(1) - 1) + 1;
                    sizes[axis + 2] + begin + end >= extent
                })
                && !($rank == 3 && options.is_asymmetric());
            if !fits || !any_tracked(&x, &weight, &bias) {
                return module::$conv(x, weight, bias, options);
            }
            let (x, weight) = (x.into_dispatch(), of_weight(weight));
            Tensor::from_dispatch(Dispatch::$op(x, weight, maybe(bias), options))
        }
    )+};
}
conv! {
    conv1d = memsave_conv1d, 1, 3;
    conv2d = memsave_conv2d, 2, 4;
    conv3d = memsave_conv3d, 3, 5;
}

macro_rules! conv_transpose {
    ($($conv:ident = $op:ident, $rank:literal, $dims:literal;)+) => {$(
        #[doc = concat!("See [`burn::tensor::module::", stringify!($conv), "`].")]
        ///
        /// Keeps `x` only for a tracked weight and the weight only for a tracked `x`.
        pub fn $conv(
            x: Tensor<$dims>,
            weight: Tensor<$dims>,
            bias: Option<Tensor<1>>,
            options: ConvTransposeOptions<$rank>,
        ) -> Tensor<$dims> {
            let (kernel, bias) = (weight.dims(), of_bias(bias, x.dtype()));
            let fits = x.dims()[1] == kernel[0]
                && has_floats(&x)
                && has_length(&bias, kernel[1] * options.groups);
            if !fits || !any_tracked(&x, &weight, &bias) {
                return module::$conv(x, weight, bias, options);
            }
            let (x, weight) = (x.into_dispatch(), of_weight(weight));
            Tensor::from_dispatch(Dispatch::$op(x, weight, maybe(bias), options))
        }
    )+};
}
conv_transpose! {
    conv_transpose1d = memsave_conv_transpose1d, 1, 3;
    conv_transpose2d = memsave_conv_transpose2d, 2, 4;
    conv_transpose3d = memsave_conv_transpose3d, 3, 5;
}

/// See [`burn::tensor::module::deform_conv2d`].
///
/// Keeps only the inputs that the wanted gradients read.
pub fn deform_conv2d(
    x: Tensor<4>,
    offset: Tensor<4>,
    weight: Tensor<4>,
    mask: Option<Tensor<4>>,
    bias: Option<Tensor<1>>,
    options: DeformConvOptions<2>,
) -> Tensor<4> {
    let tracked = any_tracked(&x, &weight, &bias)
        || offset.is_tracked()
        || mask.as_ref().is_some_and(Tensor::is_tracked);
    let fits = x.dims()[1] == weight.dims()[1] * options.weight_groups
        && x.shape().num_elements() > 0
        && has_length(&bias, weight.dims()[0])
        && are_floats([x.dtype(), offset.dtype(), weight.dtype()])
        && mask.as_ref().is_none_or(|mask| are_floats([mask.dtype()]));
    if !fits || !tracked {
        return module::deform_conv2d(x, offset, weight, mask, bias, options);
    }
    let [x, offset, weight] = [x, offset, weight].map(Tensor::into_dispatch);
    Tensor::from_dispatch(Dispatch::memsave_deform_conv2d(
        x,
        offset,
        weight,
        maybe(mask),
        maybe(bias),
        options,
    ))
}

fn per_channel<const D: usize>(x: &Tensor<D>, parameters: &[&Tensor<1>]) -> bool {
    let parameters: Vec<_> = parameters.iter().copied().map(Some).collect();
    D >= 2 && x.shape().num_elements() > 0 && are_parameters(x, x.dims()[1], &parameters)
}

/// Batch normalization with given statistics, which must not be tracked; see [`burn::tensor::module::batch_norm`].
///
/// Keeps `x` only for a tracked `gamma`, else tensors of the size of `gamma`.
pub fn batch_norm<const D: usize>(
    x: Tensor<D>,
    gamma: Tensor<1>,
    beta: Tensor<1>,
    mean: Tensor<1>,
    variance: Tensor<1>,
    epsilon: f64,
) -> Tensor<D> {
    let tracked = x.is_tracked() || gamma.is_tracked() || beta.is_tracked();
    let statistics_tracked = mean.is_tracked() || variance.is_tracked();
    if !per_channel(&x, &[&gamma, &beta, &mean, &variance]) || !tracked || statistics_tracked {
        return module::batch_norm(x, gamma, beta, mean, variance, epsilon);
    }
    let [gamma, beta, mean, variance] = [gamma, beta, mean, variance].map(Tensor::into_dispatch);
    let x = x.into_dispatch();
    Tensor::from_dispatch(Dispatch::memsave_batch_norm(x, gamma, beta, mean, variance, epsilon))
}

/// Batch normalization with the statistics of the batch, and those; see [`burn::tensor::module::batch_norm_train`].
///
/// Keeps `x`, and nothing at all if only `beta` is tracked.
pub fn batch_norm_train<const D: usize>(
    x: Tensor<D>,
    gamma: Tensor<1>,
    beta: Tensor<1>,
    epsilon: f64,
) -> BatchNormTrainOutput<D> {
    if !per_channel(&x, &[&gamma, &beta]) {
        return module::batch_norm_train(x, gamma, beta, epsilon);
    }
    let (x, gamma, beta) = (x.into_dispatch(), gamma.into_dispatch(), beta.into_dispatch());
    let result = Dispatch::memsave_batch_norm_train(x, gamma, beta, epsilon);
    BatchNormTrainOutput {
        output: Tensor::from_dispatch(result.output),
        mean: Tensor::from_dispatch(result.mean),
        variance: Tensor::from_dispatch(result.variance),
    }
}

/// Layer normalization over the last axis; see [`burn::tensor::module::layer_norm`].
///
/// Keeps `x`, and nothing at all if only `beta` is tracked.
pub fn layer_norm<const D: usize>(
    x: Tensor<D>,
    gamma: Tensor<1>,
    beta: Option<Tensor<1>>,
    epsilon: f64,
) -> Tensor<D> {
    let tracked = x.is_tracked() || gamma.is_tracked() || beta.as_ref().is_some_and(Tensor::is_tracked);
    let features = x.dims()[D - 1];
    if !tracked || !are_parameters(&x, features, &[Some(&gamma), beta.as_ref()]) {
        return module::layer_norm(x, gamma, beta, epsilon);
    }
    row_norm(x, Some(gamma), beta, RowNorm::over_last(features, true, epsilon))
}

/// RMS normalization over the last axis, `x / sqrt(mean(x^2) + epsilon) * gamma`, as [`burn::nn::RmsNorm`] (which computes
/// the root in f32 whatever the dtype; here it is exact for f64).
///
/// Keeps `x`.
///
/// ```
/// use burn::tensor::{Device, Tensor, Tolerance};
/// use burn_memsave_layers::functional as F;
///
/// let device = Device::flex();
/// let (x, gamma) = (Tensor::<1>::from_floats([3.0, 4.0], &device), Tensor::ones([2], &device));
/// let y = F::rms_norm(x, gamma, 0.0); // the root mean square is 5 / sqrt(2)
/// y.to_data().assert_approx_eq::<f32>(&[0.8485281f32, 1.1313708].into(), Tolerance::default());
/// ```
pub fn rms_norm<const D: usize>(x: Tensor<D>, gamma: Tensor<1>, epsilon: f64) -> Tensor<D> {
    let features = x.dims()[D - 1];
    if features == 0 || !are_parameters(&x, features, &[Some(&gamma)]) {
        let dtype = x.dtype();
        let rms = (x.clone().cast(DType::F32).square().mean_dim(D - 1) + epsilon).sqrt();
        return (x / rms.cast(dtype)) * gamma.unsqueeze();
    }
    row_norm(x, Some(gamma), None, RowNorm::over_last(features, false, epsilon))
}

/// Group normalization of `[batch, channels, ...]`, as [`burn::nn::GroupNorm`]; with as many groups as channels,
/// instance normalization. A `beta` needs a `gamma`.
///
/// Keeps `x`, and nothing at all if only `beta` is tracked.
///
/// # Panics
///
/// Panics if the channels cannot be divided into `groups`, or if `gamma` or `beta` is not one number per channel of the
/// dtype of `x`.
pub fn group_norm<const D: usize>(
    x: Tensor<D>,
    gamma: Option<Tensor<1>>,
    beta: Option<Tensor<1>>,
    groups: usize,
    epsilon: f64,
) -> Tensor<D> {
    let dims = x.dims();
    let channels = dims.get(1).copied().unwrap_or(0);
    assert!(
        D >= 2 && groups > 0 && channels.is_multiple_of(groups),
        "group_norm: axis 1 of {dims:?} cannot be {groups} groups"
    );
    assert!(
        are_parameters(&x, channels, &[gamma.as_ref(), beta.as_ref()]),
        "group_norm: gamma and beta must be [{channels}] of {:?}, not {:?} and {:?}",
        x.dtype(),
        gamma.as_ref().map(|gamma| (gamma.dims(), gamma.dtype())),
        beta.as_ref().map(|beta| (beta.dims(), beta.dtype())),
    );
    let inner = dims[2..].iter().product();
    row_norm(x, gamma, beta, RowNorm { centered: true, epsilon, groups, channels: channels / groups, inner })
}

fn row_norm<const D: usize>(
    x: Tensor<D>,
    gamma: Option<Tensor<1>>,
    beta: Option<Tensor<1>>,
    norm: RowNorm,
) -> Tensor<D> {
    Tensor::from_dispatch(Dispatch::memsave_row_norm(x.into_dispatch(), maybe(gamma), maybe(beta), norm))
}

/// `x / (k + alpha / size * sum(x^2))^beta`, the sum over a window of `size` channels around each; as
/// [`burn::nn::LocalResponseNorm`] computes it for an input `[batch, channels, ...]`. Keeps `x`.
///
/// ```
/// use burn::tensor::{Device, Tensor, Tolerance};
/// use burn_memsave_layers::functional as F;
///
/// let x = Tensor::<3>::from_floats([[[1.0], [3.0]]], &Device::flex());
/// let y = F::local_response_norm(x, 1, 1.0, 0.5, 0.0);
/// y.to_data().assert_approx_eq::<f32>(&[[[1.0f32], [1.0]]].into(), Tolerance::default());
/// ```
///
/// # Panics
///
/// Panics for an input of rank 1, and for an empty window.
pub fn local_response_norm<const D: usize>(
    x: Tensor<D>,
    size: usize,
    alpha: f64,
    beta: f64,
    k: f64,
) -> Tensor<D> {
    assert!(D >= 2, "local_response_norm: an input of rank {D} has no channels");
    assert!(size > 0, "local_response_norm: the window must have a channel");
    let norm = LocalResponse { size, alpha, beta, k };
    Tensor::from_dispatch(Dispatch::memsave_local_response(x.into_dispatch(), norm))
}

/// Whether the parameters that are there are `[length]`, and of the dtype of `x`.
fn are_parameters<const D: usize>(x: &Tensor<D>, length: usize, parameters: &[Option<&Tensor<1>>]) -> bool {
    let fits = |p: &&Tensor<1>| p.dims() == [length] && p.dtype() == x.dtype();
    are_floats([x.dtype()]) && parameters.iter().flatten().all(fits)
}

/// Rows of `weights`; see [`burn::tensor::module::embedding`]. Keeps the indices.
pub fn embedding(weights: Tensor<2>, indices: Tensor<2, Int>) -> Tensor<3> {
    if !weights.is_tracked() || indices.shape().num_elements() == 0 {
        return module::embedding(weights, indices);
    }
    Tensor::from_dispatch(Dispatch::memsave_embedding(weights.into_dispatch(), indices.into_dispatch()))
}

/// Zeroes elements with probability `prob` and divides the others by `1 - prob`, drawing as
/// [`burn::nn::Dropout`] does. Keeps one bit per element.
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
    x: Tensor<D>,
    f: PiecewiseLinear,
    stock: impl FnOnce(Tensor<D>) -> Tensor<D>,
) -> Tensor<D> {
    match x.is_tracked() && x.shape().num_elements() > 0 && f.is_ordered() {
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
            piecewise_linear(x, $f, |x| activation::$function(x, $($argument),*))
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

macro_rules! smooth {
    ($($function:ident($($argument:ident),*) = $f:expr, $formula:literal, keeps $kept:literal;)+) => {$(
        #[doc = concat!("`", $formula, "`; see [`burn::tensor::activation::", stringify!($function), "`].")]
        ///
        #[doc = concat!("Keeps ", $kept, ".")]
        pub fn $function<const D: usize>(x: Tensor<D>, $($argument: f64),*) -> Tensor<D> {
            match has_floats(&x) {
                true => Tensor::from_dispatch(Dispatch::memsave_smooth(x.into_dispatch(), $f)),
                false => activation::$function(x, $($argument),*),
            }
        }
    )+};
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

/// `a sigmoid(b)` of the two halves of `x` along an axis; see [`burn::tensor::activation::glu`].
///
/// Keeps the two halves.
///
/// # Panics
///
/// Panics if the axis does not exist or has an odd length.
pub fn glu<const D: usize>(x: Tensor<D>, dim: impl AsIndex) -> Tensor<D> {
    let dim = dim.as_index();
    let axis = usize::try_from(if dim < 0 { dim + D as isize } else { dim }).ok();
    match axis.filter(|&axis| axis < D && x.is_tracked() && has_floats(&x)) {
        Some(axis) if x.dims()[axis].is_multiple_of(2) => {
            let half = x.dims()[axis] / 2;
            let [a, b] = [0, half].map(|start| x.clone().narrow(axis, start, half));
            gate(a, b, Smooth::Sigmoid)
        }
        _ => activation::glu(x, dim),
    }
}

/// `a silu(b)`, the product of a SwiGLU, for tensors of one shape and dtype.
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
    let fits = a.dims() == b.dims() && a.dtype() == b.dtype() && has_floats(&a);
    match fits {
        true => gate(a, b, Smooth::Silu),
        false => activation::silu(b) * a,
    }
}

fn gate<const D: usize>(a: Tensor<D>, b: Tensor<D>, f: Smooth) -> Tensor<D> {
    Tensor::from_dispatch(Dispatch::memsave_gate(a.into_dispatch(), b.into_dispatch(), f))
}

/// `x` if `x >= 0`, else `alpha x`, with one slope or one per channel; see [`burn::tensor::activation::prelu`].
///
/// Keeps `x` for a tracked `alpha`, else one bit per element.
pub fn prelu<const D: usize>(x: Tensor<D>, alpha: Tensor<1>) -> Tensor<D> {
    let [slopes] = alpha.dims();
    let fits =
        (slopes == 1 || (D >= 2 && x.dims()[1] == slopes)) && has_floats(&x) && alpha.dtype() == x.dtype();
    if !fits || !(x.is_tracked() || alpha.is_tracked()) {
        return activation::prelu(x, alpha);
    }
    Tensor::from_dispatch(Dispatch::memsave_prelu(x.into_dispatch(), alpha.into_dispatch()))
}

/// Max pool over one axis; see [`burn::tensor::module::max_pool1d`]. Keeps one byte per output, see
/// [`max_pool2d`].
pub fn max_pool1d(x: Tensor<3>, options: MaxPoolOptions<1>) -> Tensor<3> {
    if !x.is_tracked() {
        return module::max_pool1d(x, options);
    }
    let lifted = MaxPoolOptions {
        kernel_size: [1, options.kernel_size[0]],
        stride: [1, options.stride[0]],
        padding: [(0, 0), options.padding[0]],
        dilation: [1, options.dilation[0]],
        ceil_mode: options.ceil_mode,
    };
    match fits_max_pool(x.dims().into(), &options) {
        false => module::max_pool1d(x, options),
        true => Tensor::from_dispatch(Dispatch::memsave_max_pool2d(x.into_dispatch(), lifted)),
    }
}

/// Max pool over two axes; see [`burn::tensor::module::max_pool2d`].
///
/// Keeps the position of each maximum in its window: one byte per output for windows of up to 255 elements, else two
/// or four.
pub fn max_pool2d(x: Tensor<4>, options: MaxPoolOptions<2>) -> Tensor<4> {
    match x.is_tracked() && fits_max_pool(x.dims().into(), &options) {
        true => Tensor::from_dispatch(Dispatch::memsave_max_pool2d(x.into_dispatch(), options)),
        false => module::max_pool2d(x, options),
    }
}

/// Whether there are windows, and each fits into the padded input.
fn fits_max_pool<const N: usize>(x: Vec<usize>, options: &MaxPoolOptions<N>) -> bool {
    x.iter().product::<usize>() > 0
        && (0..N).all(|axis| {
            let (begin, end) = options.padding[axis];
            let (kernel, stride) = (options.kernel_size[axis], options.stride[axis]);
            kernel > 0 && stride > 0 && x[axis + 2] + begin + end > options.dilation[axis] * (kernel - 1)
        })
}

/// Average pool over one axis; see [`burn::tensor::module::avg_pool1d`]. Keeps nothing.
pub fn avg_pool1d(x: Tensor<3>, options: AvgPoolOptions<1>) -> Tensor<3> {
    if !x.is_tracked() {
        return module::avg_pool1d(x, options);
    }
    let lifted = AvgPoolOptions {
        kernel_size: [1, options.kernel_size[0]],
        stride: [1, options.stride[0]],
        padding: [(0, 0), options.padding[0]],
        count_include_pad: options.count_include_pad,
        ceil_mode: options.ceil_mode,
    };
    let y = module::avg_pool1d(x.clone().inner(), options);
    Tensor::from_dispatch(Dispatch::memsave_avg_pool2d(x.into_dispatch(), y.into_dispatch(), lifted))
}

/// Average pool over two axes; see [`burn::tensor::module::avg_pool2d`]. Keeps nothing.
pub fn avg_pool2d(x: Tensor<4>, options: AvgPoolOptions<2>) -> Tensor<4> {
    if !x.is_tracked() {
        return module::avg_pool2d(x, options);
    }
    let y = module::avg_pool2d(x.clone().inner(), options.clone());
    Tensor::from_dispatch(Dispatch::memsave_avg_pool2d(x.into_dispatch(), y.into_dispatch(), options))
}

macro_rules! adaptive_avg_pool {
    ($($pool:ident, $dims:literal, $size:ty;)+) => {$(
        #[doc = concat!("See [`burn::tensor::module::", stringify!($pool), "`]. Keeps nothing.")]
        pub fn $pool(x: Tensor<$dims>, output_size: $size) -> Tensor<$dims> {
            if !x.is_tracked() {
                return module::$pool(x, output_size);
            }
            let y = module::$pool(x.clone().inner(), output_size);
            Tensor::from_dispatch(Dispatch::memsave_adaptive_avg_pool(x.into_dispatch(), y.into_dispatch()))
        }
    )+};
}
adaptive_avg_pool! {
    adaptive_avg_pool1d, 3, usize;
    adaptive_avg_pool2d, 4, [usize; 2];
    adaptive_avg_pool3d, 5, [usize; 3];
}

/// See [`burn::tensor::module::interpolate`]. Keeps nothing.
pub fn interpolate(x: Tensor<4>, options: InterpolateOptions) -> Tensor<4> {
    if !x.is_tracked() {
        return module::interpolate(x, options);
    }
    let y = module::interpolate(x.clone().inner(), options.clone());
    Tensor::from_dispatch(Dispatch::memsave_interpolate(x.into_dispatch(), y.into_dispatch(), options))
}

/// [`interpolate`] over the last axis of `[batch, channels, length]`.
pub(crate) fn interpolate1d(x: Tensor<3>, options: InterpolateOptions) -> Tensor<3> {
    let resize = |x: Tensor<3>| module::interpolate(x.unsqueeze_dim(2), options.clone()).squeeze_dim::<3>(2);
    if !x.is_tracked() {
        return resize(x);
    }
    let y = resize(x.clone().inner());
    Tensor::from_dispatch(Dispatch::memsave_interpolate(x.into_dispatch(), y.into_dispatch(), options))
}
