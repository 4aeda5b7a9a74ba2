//! Convolutions, their transposes, and the deformable one.
use super::guard::{any_tracked, are_floats, has_floats, has_length, maybe, of_bias, of_weight};
use crate::ops::{ConvOps, ConvTransposeOps, DeformConvOps};
use burn::backend::Dispatch;
use burn::tensor::{
    Tensor, module,
    ops::{ConvOptions, ConvTransposeOptions, DeformConvOptions},
};

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
