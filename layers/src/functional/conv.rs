//! Convolutions: ordinary, transposed and deformable.
use super::activation::relu;
use super::guard::{
    Fit, Misfit, accepts, dequantized_bias, into_maybe, into_weight, is_quantized, is_tracked, require,
    require_bias, require_dtype, require_floats,
};
use super::norm::{GivenNorm, batch_norm};
use crate::{
    backend::optional::MaybeTensor,
    ops::{
        self, ConvLoraOps, ConvNormReluOps, ConvOps, ConvTransposeOps, DeformConvOps, LoraFactors, Weight,
    },
};
use burn::backend::{Dispatch, DispatchTensor};
use burn::module::LoraAdapter;
use burn::tensor::{
    Tensor, module,
    ops::{ConvOptions, ConvTransposeOptions, DeformConvOptions},
};

/// An operation on an input, a weight, an adapter with its scale, a bias and options.
type Adapted<O> = fn(
    DispatchTensor,
    Weight<Dispatch>,
    LoraFactors<Dispatch>,
    f64,
    MaybeTensor<Dispatch>,
    O,
) -> DispatchTensor;

/// A convolution, or a transposed one, with options `O`: the operation here and Burn's function.
pub(super) struct Convolution<const D: usize, O> {
    name: &'static str,
    fits: fn(&Tensor<D>, &Tensor<D>, &Option<Tensor<1>>, &O) -> Fit,
    operation: fn(DispatchTensor, Weight<Dispatch>, MaybeTensor<Dispatch>, O) -> DispatchTensor,
    adapted: Adapted<O>,
    stock: fn(Tensor<D>, Tensor<D>, Option<Tensor<1>>, O) -> Tensor<D>,
}

impl<const D: usize, O> Convolution<D, O> {
    fn apply(&self, x: Tensor<D>, weight: Tensor<D>, bias: Option<Tensor<1>>, options: O) -> Tensor<D> {
        let bias = dequantized_bias(bias, x.dtype());
        let fit = require_dtype(&x, &weight).and((self.fits)(&x, &weight, &bias, &options));
        let tracked = x.is_tracked() || weight.is_tracked() || is_tracked(&bias);
        match accepts(self.name, fit, tracked, Some(&weight)) {
            true => self.operate(x, weight, bias, options),
            false => (self.stock)(x, weight, bias, options),
        }
    }

    /// [`apply`](Self::apply) with a frozen weight of any dtype. The operation casts it at every use, so that no converted
    /// weight is kept.
    pub(super) fn apply_with_frozen(
        &self,
        x: Tensor<D>,
        weight: Tensor<D>,
        bias: Option<Tensor<1>>,
        options: O,
    ) -> Tensor<D> {
        if weight.is_tracked() || require_dtype(&x, &weight).is_ok() {
            return self.apply(x, weight, bias, options);
        }
        let bias = dequantized_bias(bias, x.dtype());
        match (self.fits)(&x, &weight, &bias, &options) {
            Ok(()) => self.operate(x, weight, bias, options),
            Err(_) => {
                let weight = weight.cast(x.dtype());
                self.apply(x, weight, bias, options)
            }
        }
    }

    /// Applies the weight `weight + scale a b`, which is computed at every use; `None` if the arguments do not fit.
    pub(super) fn apply_adapted(
        &self,
        x: &Tensor<D>,
        weight: &Tensor<D>,
        adapter: &LoraAdapter,
        bias: &Option<Tensor<1>>,
        options: &O,
    ) -> Option<Tensor<D>>
    where
        O: Clone,
    {
        let bias = dequantized_bias(bias.clone(), x.dtype());
        (self.fits)(x, weight, &bias, options).ok()?;
        let factors = LoraFactors { a: adapter.a.val().into_dispatch(), b: adapter.b.val().into_dispatch() };
        let (x, weight, options) = (x.clone().into_dispatch(), into_weight(weight.clone()), options.clone());
        Some(Tensor::from_dispatch((self.adapted)(
            x,
            weight,
            factors,
            adapter.scale,
            into_maybe(bias),
            options,
        )))
    }

    fn operate(&self, x: Tensor<D>, weight: Tensor<D>, bias: Option<Tensor<1>>, options: O) -> Tensor<D> {
        let (x, weight) = (x.into_dispatch(), into_weight(weight));
        Tensor::from_dispatch((self.operation)(x, weight, into_maybe(bias), options))
    }
}

macro_rules! convolutions {
    ($($conv:ident($argument:ty), $constant:ident = $op:ident, $adapted:ident, $fits:ident, $options:ty, $dims:literal;)+) => {$(
        #[doc = concat!("See [`burn::tensor::module::", stringify!($conv), "`].")]
        ///
        /// Keeps `x` only if the weight is tracked, and the weight only if `x` is tracked.
        pub fn $conv(
            x: Tensor<$dims>,
            weight: Tensor<$dims>,
            bias: Option<Tensor<1>>,
            options: $argument,
        ) -> Tensor<$dims> {
            $constant.apply(x, weight, bias, options.into())
        }

        /// The operation here, and Burn's.
        pub(super) const $constant: Convolution<$dims, $options> = Convolution {
            name: stringify!($conv),
            fits: $fits,
            operation: Dispatch::$op,
            adapted: Dispatch::$adapted,
            stock: |x, weight, bias, options| module::$conv(x, weight, bias, options),
        };
    )+};
}
convolutions! {
    conv1d(impl Into<ConvOptions<1>>), CONV1D = memsave_conv1d, memsave_conv1d_lora, conv_fits, ConvOptions<1>, 3;
    conv2d(impl Into<ConvOptions<2>>), CONV2D = memsave_conv2d, memsave_conv2d_lora, conv_fits, ConvOptions<2>, 4;
    conv3d(impl Into<ConvOptions<3>>), CONV3D = memsave_conv3d, memsave_conv3d_lora, conv_fits, ConvOptions<3>, 5;
    conv_transpose1d(ConvTransposeOptions<1>), CONV_TRANSPOSE1D = memsave_conv_transpose1d, memsave_conv_transpose1d_lora, conv_transpose_fits, ConvTransposeOptions<1>, 3;
    conv_transpose2d(ConvTransposeOptions<2>), CONV_TRANSPOSE2D = memsave_conv_transpose2d, memsave_conv_transpose2d_lora, conv_transpose_fits, ConvTransposeOptions<2>, 4;
    conv_transpose3d(ConvTransposeOptions<3>), CONV_TRANSPOSE3D = memsave_conv_transpose3d, memsave_conv_transpose3d_lora, conv_transpose_fits, ConvTransposeOptions<3>, 5;
}

macro_rules! conv_norm_relu {
    ($($name:ident = $conv:ident, $op:ident, $rank:literal, $dims:literal;)+) => {$(
        /// A convolution, a batch normalization with given statistics and a ReLU:
        #[doc = concat!("`relu(batch_norm(", stringify!($conv), "(x, weight, bias, options), ..))`,")]
        /// in one pass over the result.
        ///
        /// Keeps `x` only if the weight is tracked, the weight only if `x` is tracked, and one bit per element. If `gamma` is
        /// tracked, its gradient reads the result of the convolution; then the three run one after the other.
        pub fn $name(
            x: Tensor<$dims>,
            weight: Tensor<$dims>,
            bias: Option<Tensor<1>>,
            norm: GivenNorm,
            options: impl Into<ConvOptions<$rank>>,
        ) -> Tensor<$dims> {
            let options = options.into();
            let dtype = x.dtype();
            let fits = norm.is_given(dtype, weight.dims()[0])
                && conv_fits(&x, &weight, &bias, &options).is_ok()
                && [weight.dtype()].into_iter().chain(bias.as_ref().map(Tensor::dtype)).all(|of| of == dtype);
            let GivenNorm { gamma, beta, mean, variance, epsilon } = norm;
            if !fits {
                return relu(batch_norm($conv(x, weight, bias, options), gamma, beta, mean, variance, epsilon));
            }
            let [x, weight] = [x, weight].map(Tensor::into_dispatch);
            let [gamma, beta, mean, variance] = [gamma, beta, mean, variance].map(Tensor::into_dispatch);
            let bias = into_maybe(bias);
            let norm = ops::GivenNorm { gamma, beta, mean, variance };
            Tensor::from_dispatch(Dispatch::$op(x, weight, bias, norm, epsilon, options))
        }
    )+};
}
conv_norm_relu! {
    conv1d_norm_relu = conv1d, memsave_conv1d_norm_relu, 1, 3;
    conv2d_norm_relu = conv2d, memsave_conv2d_norm_relu, 2, 4;
    conv3d_norm_relu = conv3d, memsave_conv3d_norm_relu, 3, 5;
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

fn conv_transpose_fits<const D: usize, const RANK: usize>(
    x: &Tensor<D>,
    weight: &Tensor<D>,
    bias: &Option<Tensor<1>>,
    options: &ConvTransposeOptions<RANK>,
) -> Fit {
    let (sizes, kernel) = (x.dims(), weight.dims());
    let channels = sizes[1] == kernel[0] && kernel[0].is_multiple_of(options.groups);
    // An axis that is not empty has a first and a last element. The padding must not remove more than there is.
    let outputs = (0..RANK).all(|axis| {
        let extent = options.dilation[axis] * (kernel[axis + 2].max(1) - 1) + 1;
        let reached = sizes[axis + 2].max(1).saturating_sub(1) * options.stride[axis] + extent;
        reached + options.padding_out[axis] > 2 * options.padding[axis]
    });
    require_floats(x)?;
    require(channels && outputs, Misfit::Shapes)?;
    require_bias(bias, kernel[1] * options.groups)
}

/// See [`burn::tensor::module::deform_conv2d`].
///
/// Keeps only the inputs that the requested gradients read.
pub fn deform_conv2d(
    x: Tensor<4>,
    offset: Tensor<4>,
    weight: Tensor<4>,
    mask: Option<Tensor<4>>,
    bias: Option<Tensor<1>>,
    options: DeformConvOptions<2>,
) -> Tensor<4> {
    let tracked =
        [&x, &offset, &weight].into_iter().chain(&mask).any(Tensor::is_tracked) || is_tracked(&bias);
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
