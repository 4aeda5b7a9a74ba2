//! Dense layers, embeddings and convolutions with the low-rank adapter that [`Module::apply_lora`](burn::module::Module::apply_lora)
//! attaches to a weight.
use super::{
    conv,
    guard::{
        Fit, Misfit, accepts, dequantized_bias, into_maybe, into_weight, is_tracked, require, require_bias,
        require_floats,
    },
};
use crate::adapter::{DoraAdapter, column_norms};
use crate::ops::{LoraFactors, LoraOps};
use burn::backend::Dispatch;
use burn::module::{LoraAdapter, Reparameterization};
use burn::tensor::{
    DType, Device, FloatDType, Int, Tensor,
    ops::{ConvOptions, ConvTransposeOptions},
};

/// `x (base + scale a b) + bias`: [`linear`](super::linear) with a low-rank adapter, without computing the effective weight.
///
/// Keeps `x` if `a` is tracked, else the narrow `x a` if `b` is tracked, and handles of `base`, `a` and `b`. A quantized `base`
/// is dequantized in the forward pass and again in the backward pass.
///
/// If the rank is not below both sizes of `base` and there are many rows (`rows (d_input + d_output) > d_input d_output`), the effective
/// weight is less work. In f32 and f64 it is then computed, and kept if `x` is tracked, unless `b` is the only tracked factor.
///
/// ```
/// use burn::module::{Lora, Module};
/// use burn::nn::LinearConfig;
/// use burn::tensor::{Device, Tensor, Tolerance};
/// use burn_memsave_layers::functional as F;
///
/// let device = Device::flex();
/// let stock = LinearConfig::new(8, 4).with_bias(false).init(&device).apply_lora(Lora::new(2, 4.0));
/// let adapter = stock.weight.adapter().unwrap();
/// let x = Tensor::<2>::ones([3, 8], &device);
/// let y = F::linear_lora(x.clone(), stock.weight.base(), adapter, None);
/// y.into_data().assert_approx_eq::<f32>(&stock.forward(x).into_data(), Tolerance::default());
/// ```
pub fn linear_lora<const D: usize>(
    x: Tensor<D>,
    base: Tensor<2>,
    adapter: &LoraAdapter,
    bias: Option<Tensor<1>>,
) -> Tensor<D> {
    if D == 1 {
        return linear_lora(x.unsqueeze::<2>(), base, adapter, bias).squeeze_dim(0);
    }
    let bias = dequantized_bias(bias, x.dtype());
    let tracked = is_any_tracked(&x, &base, adapter, &bias);
    let fit =
        lora_fits(&x, &base, adapter, &bias).and(require(is_narrow(&x, &base, adapter), Misfit::WideAdapter));
    match accepts("linear_lora", fit, tracked, Some(&base)) {
        true => run(x, base, adapter, None, bias),
        false => super::linear(x, adapter.apply(base), bias),
    }
}

/// Whether the factors are multiplied with `x`, and not with each other. If the rank is not below both sizes of the effective weight and
/// there are many rows, the effective weight is less work, and has no more elements than the larger factor. Even so it is not computed if
/// it would be rounded, if `base` is quantized, or if `x` would be kept for it alone.
fn is_narrow<const D: usize>(x: &Tensor<D>, base: &Tensor<2>, adapter: &LoraAdapter) -> bool {
    let (a, b, [d_input, d_output]) = (adapter.a.val(), adapter.b.val(), base.dims());
    let rows = x.shape().num_elements() / d_input.max(1);
    a.dims()[1] < d_input.min(d_output)
        || rows * (d_input + d_output) <= d_input * d_output
        || base.dtype() != x.dtype()
        || x.dtype().size() < 4
        || b.is_tracked() && !a.is_tracked()
}

fn lora_fits<const D: usize>(
    x: &Tensor<D>,
    base: &Tensor<2>,
    adapter: &LoraAdapter,
    bias: &Option<Tensor<1>>,
) -> Fit {
    let (a, b, [d_input, d_output]) = (adapter.a.val(), adapter.b.val(), base.dims());
    let rank = a.dims()[1];
    let shapes = x.dims()[D - 1] == d_input && (a.dims(), b.dims()) == ([d_input, rank], [rank, d_output]);
    require_floats(x)
        .and(require(shapes, Misfit::Shapes))
        .and(require(rank > 0 && d_output > 0, Misfit::Empty))
        .and(require_bias(bias, d_output))
        .and(require([a.dtype(), b.dtype()] == [x.dtype(); 2], Misfit::Dtypes))
}

/// `x (base + scale a b) * factor + bias`, for arguments that fit.
fn run<const D: usize>(
    x: Tensor<D>,
    base: Tensor<2>,
    adapter: &LoraAdapter,
    factor: Option<Tensor<1>>,
    bias: Option<Tensor<1>>,
) -> Tensor<D> {
    let base = match base.is_tracked() {
        true => base.cast(x.dtype()), // the gradient is cast back
        false => base,
    };
    let factors = LoraFactors { a: adapter.a.val().into_dispatch(), b: adapter.b.val().into_dispatch() };
    let (x, base, scale) = (x.into_dispatch(), into_weight(base), adapter.scale);
    Tensor::from_dispatch(Dispatch::memsave_lora(
        x,
        base,
        factors,
        scale,
        into_maybe(factor),
        into_maybe(bias),
    ))
}

/// `x weight + bias`, `weight = magnitude * v / |v|` with `v = base + scale a b` and `|v|` the norm of each of its columns:
/// [`linear`](super::linear) with weight-decomposed low-rank adaptation ([DoRA](https://arxiv.org/abs/2402.09353)). As in its
/// section 4.3, no gradient flows through `|v|`.
///
/// The result is computed as `(x base + scale (x a) b) * (magnitude / |v|) + bias`. Keeps what [`linear_lora`] keeps and, if
/// the magnitude is tracked, also `x v`, which has the size of the output. If `x` has more rows than columns, it keeps `x`
/// instead of `x v`, which the backward pass recomputes. Every forward pass computes the norms, in f32 at least, a block of
/// rows of `v` at a time; for this, a quantized `base` is temporarily dequantized as a whole. If `magnitude` has no elements,
/// this is [`linear_lora`].
///
/// ```
/// use burn::module::{Lora, Module};
/// use burn::nn::LinearConfig;
/// use burn::tensor::{Device, Tensor, Tolerance};
/// use burn_memsave_layers::{functional as F, lora::{Dora, DoraAdapter}};
///
/// let device = Device::flex();
/// let stock = LinearConfig::new(8, 4).with_bias(false).init(&device).apply_reparameterization(Dora::new(Lora::new(2, 4.0)));
/// let adapter = stock.weight.reparameterization::<DoraAdapter>().unwrap();
/// let x = Tensor::<2>::ones([3, 8], &device);
/// let y = F::linear_dora(x.clone(), stock.weight.base(), adapter, None);
/// y.into_data().assert_approx_eq::<f32>(&stock.forward(x).into_data(), Tolerance::default());
/// ```
pub fn linear_dora<const D: usize>(
    x: Tensor<D>,
    base: Tensor<2>,
    adapter: &DoraAdapter,
    bias: Option<Tensor<1>>,
) -> Tensor<D> {
    if D == 1 {
        return linear_dora(x.unsqueeze::<2>(), base, adapter, bias).squeeze_dim(0);
    }
    if !adapter.has_magnitude() {
        return linear_lora(x, base, &adapter.lora, bias);
    }
    let (magnitude, bias) = (adapter.magnitude.val(), dequantized_bias(bias, x.dtype()));
    let (lora, [_, d_output]) = (&adapter.lora, base.dims());
    let fit = lora_fits(&x, &base, lora, &bias)
        .and(require(magnitude.dims() == [d_output], Misfit::Shapes))
        .and(require(magnitude.dtype().is_float(), Misfit::Quantized));
    let tracked = is_any_tracked(&x, &base, lora, &bias) || magnitude.is_tracked();
    if !accepts("linear_dora", fit, tracked, Some(&base)) {
        return super::linear(x, adapter.apply(base), bias);
    }
    let norms = column_norms(base.clone(), lora);
    let factor = (magnitude.cast(FloatDType::from(norms.dtype())) / norms).cast(x.dtype());
    run(x, base, lora, Some(factor), bias)
}

/// Rows of `base + scale a b`: [`embedding`](super::embedding) with a low-rank adapter, without computing the effective table.
///
/// Keeps the indices if `a` is tracked, the rows of `a` if `b` is tracked, and a handle of `b`. If `base` is quantized per
/// tensor, only the rows are dequantized; if it is quantized per block, the whole table is, temporarily.
pub fn embedding_lora(base: Tensor<2>, adapter: &LoraAdapter, indices: Tensor<2, Int>) -> Tensor<3> {
    let (a, b) = (adapter.a.val(), adapter.b.val());
    let [n_embedding, d_model] = base.dims();
    let rank = a.dims()[1];
    let fit = require((a.dims(), b.dims()) == ([n_embedding, rank], [rank, d_model]), Misfit::Shapes)
        .and(require(rank > 0 && indices.shape().num_elements() > 0, Misfit::Empty))
        .and(require(a.dtype() == b.dtype(), Misfit::Dtypes));
    if !accepts("embedding_lora", fit, is_any_tracked(&a, &base, adapter, &None), Some(&base)) {
        return super::embedding(adapter.apply(base), indices);
    }
    adapted_rows(rows_of(base, indices.clone()), adapter, indices)
}

/// The `rows` of a table, `[batch, length, d_model]`, plus `scale` times the same rows of `a b`.
pub(crate) fn adapted_rows(rows: Tensor<3>, adapter: &LoraAdapter, indices: Tensor<2, Int>) -> Tensor<3> {
    let (a, b) = (adapter.a.val(), adapter.b.val());
    let dtype = a.dtype();
    rows.cast(dtype) + super::linear(super::embedding(a, indices) * adapter.scale, b, None)
}

fn rows_of(table: Tensor<2>, indices: Tensor<2, Int>) -> Tensor<3> {
    let DType::QFloat(scheme) = table.dtype() else { return super::embedding(table, indices) };
    let ([batch, length], [_, d_model]) = (indices.dims(), table.dims());
    // Rows selected from a table with blocks would have to be quantized again.
    let table = if scheme.block_size().is_some() { table.dequantize() } else { table };
    table.select(0, indices.flatten(0, 1)).dequantize().reshape([batch, length, d_model])
}

/// The weight `[groups * count, ...]` that has `rows` `[count, ...]` in every group.
fn in_every_group<const D: usize>(rows: Tensor<D>, groups: usize) -> Tensor<D> {
    match groups {
        1 => rows,
        _ => rows.repeat_dim(0, groups),
    }
}

fn is_any_tracked<const X: usize, const D: usize>(
    x: &Tensor<X>,
    base: &Tensor<D>,
    adapter: &LoraAdapter,
    bias: &Option<Tensor<1>>,
) -> bool {
    let factors = [adapter.a.val(), adapter.b.val()];
    x.is_tracked() || base.is_tracked() || factors.iter().any(Tensor::is_tracked) || is_tracked(bias)
}

/// Requires that the factors are `[count, rank]` and `[rank, elements / count]`, and that their rank, over all groups, is below
/// both `channels`.
fn factors_fit<const D: usize>(
    weight: &Tensor<D>,
    [a, b]: [&Tensor<2>; 2],
    groups: usize,
    channels: [usize; 2],
) -> Fit {
    let (count, rank) = (weight.dims()[0], a.dims()[1]);
    let rest = weight.shape().num_elements() / count.max(1);
    let dtypes = a.dtype() == b.dtype() && (!weight.is_tracked() || weight.dtype() == a.dtype());
    require((a.dims(), b.dims()) == ([count, rank], [rank, rest]), Misfit::Shapes)?;
    require(rank > 0, Misfit::Empty)?;
    require(dtypes, Misfit::Dtypes)?;
    require(channels.into_iter().all(|channels| rank * groups < channels), Misfit::WideAdapter)
}

/// Whether a convolution computes its effective weight. It does so on devices, where every convolution with a factor needs
/// kernel launches of its own, if the weight has no more elements than the input, and the input is kept anyway for the factor
/// that is applied first.
fn makes_weight<const D: usize>(x: &Tensor<D>, weight: &Tensor<D>, [first, second]: [&Tensor<2>; 2]) -> bool {
    is_launched_on(&x.device())
        && weight.shape().num_elements() <= x.shape().num_elements()
        && first.dtype() == x.dtype()
        && (first.is_tracked() || !second.is_tracked())
}

/// Whether operations on the device are kernel launches.
fn is_launched_on(device: &Device) -> bool {
    match device.clone().without_autodiff().as_dispatch() {
        #[cfg(any(feature = "wgpu", feature = "cuda"))]
        burn::backend::DispatchDevice::Cube(_) => true,
        #[allow(unreachable_patterns)] // without any other backend
        _ => false,
    }
}

macro_rules! conv {
    ($($lora:ident = $conv:ident, $constant:ident, $rank:literal, $dims:literal;)+) => {$(
        #[doc = concat!("[`", stringify!($conv), "`](super::", stringify!($conv), ") with a low-rank adapter:")]
        /// `a` `[channels_out, rank]` and `b` `[rank, channels_in / groups * kernel size]`. The effective weight is
        /// `base + scale a b` in the shape of `base`.
        ///
        /// On CPU backends it is not computed: `b` is a convolution to `rank` channels (per group), `a` a pointwise convolution
        /// from there. Keeps `x` if `b` is tracked, and the result of `b` if `a` is tracked. The factors are multiplied only if
        /// their shapes do not fit, or if they are no narrower than the channels. A frozen base of another dtype than `x` is
        /// cast at every use.
        ///
        /// On wgpu and CUDA, each of these convolutions needs kernel launches of its own. There, the effective weight is
        /// computed in the forward and again in the backward pass, if it has no more elements than `x`, the factors have the
        /// dtype of `x`, and `a` is not the only tracked factor. This keeps `x` if a factor is tracked, and nothing else.
        pub fn $lora(
            x: Tensor<$dims>,
            base: Tensor<$dims>,
            adapter: &LoraAdapter,
            bias: Option<Tensor<1>>,
            options: impl Into<ConvOptions<$rank>>,
        ) -> Tensor<$dims> {
            let options = options.into();
            let (a, b) = (adapter.a.val(), adapter.b.val());
            let (shape, groups) = (base.dims(), options.groups);
            let fit = factors_fit(&base, [&a, &b], groups, [shape[0], x.dims()[1]]);
            let tracked = is_any_tracked(&x, &base, adapter, &bias);
            if !accepts(stringify!($lora), fit, tracked, Some(&base)) {
                return super::$conv(x, adapter.apply(base), bias, options);
            }
            if makes_weight(&x, &base, [&b, &a])
                && let Some(y) = conv::$constant.apply_adapted(&x, &base, adapter, &bias, &options)
            {
                return y;
            }
            let rank = a.dims()[1];
            let (mut down, mut up) = (shape, [1; $dims]);
            down[0] = rank;
            up[..2].copy_from_slice(&[shape[0], rank]);
            let y = conv::$constant.apply_with_frozen(x.clone(), base, bias, options.clone());
            let h = super::$conv(x, in_every_group(b.reshape(down), groups), None, options);
            let pointwise = ConvOptions::new([1; $rank], [0; $rank], [1; $rank], groups);
            y + super::$conv(h, (a * adapter.scale).reshape(up), None, pointwise)
        }
    )+};
}
conv! {
    conv1d_lora = conv1d, CONV1D, 1, 3;
    conv2d_lora = conv2d, CONV2D, 2, 4;
    conv3d_lora = conv3d, CONV3D, 3, 5;
}

macro_rules! conv_transpose {
    ($($lora:ident = $conv_transpose:ident, $constant:ident, $conv:ident, $rank:literal, $dims:literal;)+) => {$(
        #[doc = concat!("[`", stringify!($conv_transpose), "`](super::", stringify!($conv_transpose), ")")]
        /// with a low-rank adapter: `a` `[channels_in, rank]` and `b` `[rank, channels_out / groups * kernel size]`. The
        /// effective weight is `base + scale a b` in the shape of `base`.
        ///
        /// On CPU backends it is not computed: `a` is a pointwise convolution to `rank` channels (per group), `b` a transposed
        /// convolution from there. Keeps `x` if `a` is tracked, and the result of `a` if `b` is tracked. The factors are
        /// multiplied only if their shapes do not fit, or if they are no narrower than the channels. A frozen base of another
        /// dtype than `x` is cast at every use.
        ///
        /// On wgpu and CUDA, each of these convolutions needs kernel launches of its own. There, the effective weight is
        /// computed in the forward and again in the backward pass, if it has no more elements than `x`, the factors have the
        /// dtype of `x`, and `b` is not the only tracked factor. This keeps `x` if a factor is tracked, and nothing else.
        pub fn $lora(
            x: Tensor<$dims>,
            base: Tensor<$dims>,
            adapter: &LoraAdapter,
            bias: Option<Tensor<1>>,
            options: ConvTransposeOptions<$rank>,
        ) -> Tensor<$dims> {
            let (a, b) = (adapter.a.val(), adapter.b.val());
            let (shape, groups) = (base.dims(), options.groups);
            let fit = factors_fit(&base, [&a, &b], groups, [shape[0], shape[1] * groups]);
            let tracked = is_any_tracked(&x, &base, adapter, &bias);
            if !accepts(stringify!($lora), fit, tracked, Some(&base)) {
                return super::$conv_transpose(x, adapter.apply(base), bias, options);
            }
            if makes_weight(&x, &base, [&a, &b])
                && let Some(y) = conv::$constant.apply_adapted(&x, &base, adapter, &bias, &options)
            {
                return y;
            }
            let (rank, each) = (a.dims()[1], shape[0] / groups);
            let (mut down, mut up) = ([1; $dims], shape);
            down[..2].copy_from_slice(&[groups * rank, each]);
            up[0] = rank;
            // Per group: `[channels, rank]` to `[rank, channels]`.
            let a = a.reshape([groups, each, rank]).swap_dims(1, 2).reshape(down);
            let y = conv::$constant.apply_with_frozen(x.clone(), base, bias, options.clone());
            let pointwise = ConvOptions::new([1; $rank], [0; $rank], [1; $rank], groups);
            let h = super::$conv(x, a * adapter.scale, None, pointwise);
            y + super::$conv_transpose(h, in_every_group(b.reshape(up), groups), None, options)
        }
    )+};
}
conv_transpose! {
    conv_transpose1d_lora = conv_transpose1d, CONV_TRANSPOSE1D, conv1d, 1, 3;
    conv_transpose2d_lora = conv_transpose2d, CONV_TRANSPOSE2D, conv2d, 2, 4;
    conv_transpose3d_lora = conv_transpose3d, CONV_TRANSPOSE3D, conv3d, 3, 5;
}
