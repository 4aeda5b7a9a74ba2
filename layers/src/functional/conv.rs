//! Convolutions, their transposes, and the deformable one.
use super::guard::{
    Fit, Misfit, accepts, dequantized_bias, into_maybe, into_weight, is_quantized, is_tracked, require,
    require_bias, require_dtype, require_floats,
};
use crate::ops::{ConvOps, ConvTransposeOps, DeformConvOps};
use burn::backend::Dispatch;
use burn::tensor::{
    Tensor, module,
    ops::{ConvOptions, ConvTransposeOptions, DeformConvOptions},
};

fn is_any_tracked<const D: usize>(x: &Tensor<D>, weight: &Tensor<D>, bias: &Option<Tensor<1>>) -> bool {
    x.is_tracked() || weight.is_tracked() || is_tracked(bias)
}

fn conv_fits<const D: usize, const RANK: usize>(
    x: &Tensor<D>,
    weight: &Tensor<D>,
    bias: &Option<Tensor<1>>,
    options: &ConvOptions<RANK>,
) -> Fit {
    let (sizes, kernel) = (x.dims(), weight.dims());
    let channels = sizes[1] == kernel[1] * options.groups && kernel[0].is_multiple_of(options.groups);
    let windows = (0..RANK).all(|axis| {
        let (begin, end) = options.padding[axis];
        let extent = options.dilation[axis] * (kernel[axis + 2].max(1) - 1) + 1;
        sizes[axis + 2] + begin + end >= extent
    });
    require_floats(x)?;
    require(channels && windows, Misfit::Shapes)?;
    require_bias(bias, kernel[0])?;
    require(!(RANK == 3 && options.is_asymmetric()), Misfit::AsymmetricPadding)
}

fn conv_transpose_fits<const D: usize>(
    x: &Tensor<D>,
    weight: &Tensor<D>,
    bias: &Option<Tensor<1>>,
    groups: usize,
) -> Fit {
    let kernel = weight.dims();
    require_floats(x)?;
    require(x.dims()[1] == kernel[0], Misfit::Shapes)?;
    require_bias(bias, kernel[1] * groups)
}

macro_rules! conv {
    ($($conv:ident, $with_frozen:ident = $op:ident, $rank:literal, $dims:literal;)+) => {$(
        #[doc = concat!("See [`burn::tensor::module::", stringify!($conv), "`].")]
        ///
        /// Keeps `x` only for a tracked weight and the weight only for a tracked `x`.
        pub fn $conv(
            x: Tensor<$dims>,
            weight: Tensor<$dims>,
            bias: Option<Tensor<1>>,
            options: impl Into<ConvOptions<$rank>>,
        ) -> Tensor<$dims> {
            let (options, bias) = (options.into(), dequantized_bias(bias, x.dtype()));
            let fit = require_dtype(&x, &weight).and(conv_fits(&x, &weight, &bias, &options));
            let tracked = is_any_tracked(&x, &weight, &bias);
            if !tracked || !accepts(stringify!($conv), fit, tracked, Some(&weight)) {
                return module::$conv(x, weight, bias, options);
            }
            let (x, weight) = (x.into_dispatch(), into_weight(weight));
            Tensor::from_dispatch(Dispatch::$op(x, weight, into_maybe(bias), options))
        }

        #[doc = concat!("[`", stringify!($conv), "`] with a frozen weight of any dtype: the operation casts it at every")]
        /// use, so that nothing keeps a converted one.
        pub(super) fn $with_frozen(
            x: Tensor<$dims>,
            weight: Tensor<$dims>,
            bias: Option<Tensor<1>>,
            options: ConvOptions<$rank>,
        ) -> Tensor<$dims> {
            if weight.is_tracked() || require_dtype(&x, &weight).is_ok() {
                return $conv(x, weight, bias, options);
            }
            let bias = dequantized_bias(bias, x.dtype());
            if conv_fits(&x, &weight, &bias, &options).is_err() {
                let weight = weight.cast(x.dtype());
                return $conv(x, weight, bias, options);
            }
            let (x, weight) = (x.into_dispatch(), into_weight(weight));
            Tensor::from_dispatch(Dispatch::$op(x, weight, into_maybe(bias), options))
        }
    )+};
}
conv! {
    conv1d, conv1d_with_frozen = memsave_conv1d, 1, 3;
    conv2d, conv2d_with_frozen = memsave_conv2d, 2, 4;
    conv3d, conv3d_with_frozen = memsave_conv3d, 3, 5;
}

macro_rules! conv_transpose {
    ($($conv:ident, $with_frozen:ident = $op:ident, $rank:literal, $dims:literal;)+) => {$(
        #[doc = concat!("See [`burn::tensor::module::", stringify!($conv), "`].")]
        ///
        /// Keeps `x` only for a tracked weight and the weight only for a tracked `x`.
        pub fn $conv(
            x: Tensor<$dims>,
            weight: Tensor<$dims>,
            bias: Option<Tensor<1>>,
            options: ConvTransposeOptions<$rank>,
        ) -> Tensor<$dims> {
            let bias = dequantized_bias(bias, x.dtype());
            let fit =
                require_dtype(&x, &weight).and(conv_transpose_fits(&x, &weight, &bias, options.groups));
            let tracked = is_any_tracked(&x, &weight, &bias);
            if !tracked || !accepts(stringify!($conv), fit, tracked, Some(&weight)) {
                return module::$conv(x, weight, bias, options);
            }
            let (x, weight) = (x.into_dispatch(), into_weight(weight));
            Tensor::from_dispatch(Dispatch::$op(x, weight, into_maybe(bias), options))
        }

        #[doc = concat!("[`", stringify!($conv), "`] with a frozen weight of any dtype: the operation casts it at every")]
        /// use, so that nothing keeps a converted one.
        pub(super) fn $with_frozen(
            x: Tensor<$dims>,
            weight: Tensor<$dims>,
            bias: Option<Tensor<1>>,
            options: ConvTransposeOptions<$rank>,
        ) -> Tensor<$dims> {
            if weight.is_tracked() || require_dtype(&x, &weight).is_ok() {
                return $conv(x, weight, bias, options);
            }
            let bias = dequantized_bias(bias, x.dtype());
            if conv_transpose_fits(&x, &weight, &bias, options.groups).is_err() {
                let weight = weight.cast(x.dtype());
                return $conv(x, weight, bias, options);
            }
            let (x, weight) = (x.into_dispatch(), into_weight(weight));
            Tensor::from_dispatch(Dispatch::$op(x, weight, into_maybe(bias), options))
        }
    )+};
}
conv_transpose! {
    conv_transpose1d, conv_transpose1d_with_frozen = memsave_conv_transpose1d, 1, 3;
    conv_transpose2d, conv_transpose2d_with_frozen = memsave_conv_transpose2d, 2, 4;
    conv_transpose3d, conv_transpose3d_with_frozen = memsave_conv_transpose3d, 3, 5;
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
    let tracked = is_any_tracked(&x, &weight, &bias) || offset.is_tracked() || is_tracked(&mask);
    let quantized = [&x, &offset, &weight].into_iter().chain(&mask).any(is_quantized);
    let channels = x.dims()[1] == weight.dims()[1] * options.weight_groups;
    let fit = require_floats(&x)
        .and(require(!quantized, Misfit::Quantized))
        .and(require(channels, Misfit::Shapes))
        .and(require_bias(&bias, weight.dims()[0]));
    if !tracked || !accepts("deform_conv2d", fit, tracked, Some(&weight)) {
        return module::deform_conv2d(x, offset, weight, mask, bias, options);
    }
    let [x, offset, weight] = [x, offset, weight].map(Tensor::into_dispatch);
    Tensor::from_dispatch(Dispatch::memsave_deform_conv2d(
        x,
        offset,
        weight,
        into_maybe(mask),
        into_maybe(bias),
        options,
    ))
}
