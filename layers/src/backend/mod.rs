//! What a plain backend (one without autodiff) provides beyond Burn's own operations.
//!
//! Nothing here is routed by Burn's dispatch: these traits only bound the `Autodiff` implementations in [`crate::ops`].
//! CPU backends share fused kernels on slices ([`cpu`]); any other backend composes Burn's operations ([`device`]).
use burn::backend::{
    Backend, TensorMetadata,
    ops::InterpolateOptions,
    tensor::{BoolTensor, FloatTensor},
};
use burn::tensor::{
    DType, Shape,
    ops::{AvgPoolOptions, MaxPoolOptions},
};

/// Implements an operation trait for every plain backend: by its default bodies, or by those given.
macro_rules! plain_backends {
    ($ops:ident) => {
        plain_backends!($ops {});
    };
    ($ops:ident $bodies:tt) => {
        #[cfg(feature = "flex")]
        impl $ops for burn::backend::Flex $bodies
        #[cfg(feature = "ndarray")]
        impl $ops for burn::backend::NdArray $bodies
        #[cfg(any(feature = "wgpu", feature = "cuda"))]
        impl $ops for burn::backend::Cube $bodies
        #[cfg(feature = "remote")]
        impl $ops for burn::backend::Remote $bodies
    };
}

/// Implements kernels for every backend but those of the CPU: by their default bodies, which compose Burn's operations, or by
/// those given. In tests also for [`Composed`](crate::ops::testing::Composed), to compare the default bodies with the kernels of
/// the CPU.
macro_rules! device_backends {
    ($kernels:ident) => {
        device_backends!($kernels {});
    };
    ($kernels:ident $bodies:tt) => {
        #[cfg(any(feature = "wgpu", feature = "cuda"))]
        impl $kernels for burn::backend::Cube $bodies
        #[cfg(feature = "remote")]
        impl $kernels for burn::backend::Remote $bodies
        #[cfg(all(test, feature = "flex"))]
        impl $kernels for crate::ops::testing::Composed $bodies
    };
}
pub(crate) use {device_backends, plain_backends};

mod attention;
#[cfg(any(feature = "flex", feature = "ndarray"))]
pub mod cpu;
pub mod device;
#[cfg(feature = "flex")]
mod flex;
#[cfg(feature = "ndarray")]
mod ndarray;
mod windows;

pub(crate) use crate::ops::PiecewiseLinear;
pub(crate) use attention::{Dropped, Inputs};
pub use attention::{ScoreGrads, ScoreRows, Scores};
pub(crate) use windows::pool_output_size;

/// Something kept from the forward pass for the backward pass that is no tensor of the graph.
pub trait Saved: Clone + Send + core::fmt::Debug + 'static {
    /// The bytes it keeps alive.
    fn bytes(&self) -> usize;
}

/// Masks of one bit per element, in logical (row-major) order whatever the strides of the tensor.
pub trait Masks: Backend {
    /// One bit per element.
    type Mask: Saved;

    /// Packs booleans.
    fn pack(bits: BoolTensor<Self>) -> Self::Mask;

    /// `x * slope`, where the bit of the element chooses the slope: `[if clear, if set]`. A slope of 0 gives 0, even
    /// for an infinite `x`. In the place of `x`, if that is the only handle.
    fn scale_by_mask(x: FloatTensor<Self>, mask: &Self::Mask, slopes: [f64; 2]) -> FloatTensor<Self>;

    /// Bits that are set with probability `probability`, drawn exactly as `float_random` of `like`'s shape and dtype
    /// would draw a Bernoulli tensor, without holding that tensor.
    fn bernoulli_mask(like: &FloatTensor<Self>, probability: f64) -> Self::Mask;
}

device_backends!(Masks {
    type Mask = device::DeviceMask<Self>;

    fn pack(bits: BoolTensor<Self>) -> device::DeviceMask<Self> {
        device::pack::<Self>(bits)
    }
    fn scale_by_mask(x: FloatTensor<Self>, mask: &device::DeviceMask<Self>, slopes: [f64; 2]) -> FloatTensor<Self> {
        device::scale_by_mask::<Self>(x, mask, slopes)
    }
    fn bernoulli_mask(like: &FloatTensor<Self>, probability: f64) -> device::DeviceMask<Self> {
        device::bernoulli_mask::<Self>(like, probability)
    }
});

/// Sums over all axes but the channels.
pub trait ChannelSums: Backend {
    /// `[batch, channels, ...]` to `[channels]`.
    fn sum_to_channels(x: FloatTensor<Self>) -> FloatTensor<Self> {
        let channels = x.shape()[1];
        let axes: Vec<usize> = (0..x.rank()).filter(|&axis| axis != 1).collect();
        Self::float_reshape(Self::float_sum_dims(x, &axes), Shape::new([channels]))
    }
}
device_backends!(ChannelSums);

/// Products with one factor.
pub trait Scaling: Backend {
    /// `x * factor`, a tensor of one element, of any dtype; rounded once to the dtype of `x`. In place if `x` is the only handle.
    fn scale(x: FloatTensor<Self>, factor: FloatTensor<Self>) -> FloatTensor<Self> {
        let (dtype, factor_dtype) = (x.dtype(), factor.dtype());
        let factor = Self::float_reshape(factor, Shape::from(vec![1; x.rank()]));
        let product = Self::float_mul(Self::float_cast(x, factor_dtype.into()), factor);
        Self::float_cast(product, dtype.into())
    }
}
device_backends!(Scaling);

/// The type that sums are made in: f32 for the half precisions.
pub(crate) fn wide(dtype: DType) -> DType {
    match dtype {
        DType::F16 | DType::BF16 => DType::F32,
        dtype => dtype,
    }
}

/// A tensor in the type that sums are made in.
pub(crate) fn widen<B: Backend>(x: FloatTensor<B>) -> FloatTensor<B> {
    match wide(x.dtype()) {
        dtype if dtype == x.dtype() => x,
        dtype => B::float_cast(x, dtype.into()),
    }
}

/// Gradients of a normalization: of its input, its scale and its shift, each if wanted.
pub struct NormGrads<B: Backend> {
    /// Gradient of the input.
    pub x: Option<FloatTensor<B>>,
    /// Gradient of the scale, `[channels]`.
    pub gamma: Option<FloatTensor<B>>,
    /// Gradient of the shift, `[channels]`.
    pub beta: Option<FloatTensor<B>>,
}

/// What the backward passes of [`crate::ops`] need of a plain backend.
///
/// Bits and elements are in logical (row-major) order, whatever the strides of the tensor. Functions that take a tensor by
/// value work in place when it is the only handle.
pub trait MemBackend:
    Masks + ChannelSums + crate::ops::PiecewiseLinearKernels + crate::ops::LinearKernels
{
    /// The position of the winner in its window, for every output of a max pool.
    type Offsets: Saved;

    /// Gradient of a parametric ReLU's input: `dy` where the bit is set, `alpha * dy` where not; `alpha` broadcasts.
    fn prelu_x_backward(
        mask: &Self::Mask,
        alpha: FloatTensor<Self>,
        dy: FloatTensor<Self>,
    ) -> FloatTensor<Self>;

    /// Gradient of a parametric ReLU's slope, `sum(dy * min(x, 0))` over what `alpha` broadcasts over; the shape of
    /// `alpha`.
    fn prelu_alpha_backward(x: FloatTensor<Self>, alpha: Shape, dy: FloatTensor<Self>) -> FloatTensor<Self>;

    /// Pairs of `x` `[..., positions, features]` rotated by the cosines and sines `factors` `[positions, features, 2]`;
    /// `adjoint`: back, as gradients are.
    fn rotate(x: FloatTensor<Self>, factors: FloatTensor<Self>, adjoint: bool) -> FloatTensor<Self>;

    /// How many weights of an attention are made at once.
    const ATTENTION_CHUNK: usize;

    /// The weights of an attention, from the products of queries and keys `[batch, heads, rows, keys]`, and the logarithm of the
    /// sum of the exponentials of every row of scores, `[batch, heads, rows, 1]`, in f32 at least.
    fn attention_weights(
        products: FloatTensor<Self>,
        rows: &ScoreRows<Self>,
    ) -> (FloatTensor<Self>, FloatTensor<Self>);

    /// The weights again, and the gradients of the products from those of the weights; of the scores before the bias is added
    /// if `wants_bias`.
    fn attention_weights_backward(
        products: FloatTensor<Self>,
        gradients: FloatTensor<Self>,
        log_sums: FloatTensor<Self>,
        rows: &ScoreRows<Self>,
        wants_bias: bool,
    ) -> ScoreGrads<Self>;

    /// `y + u v`, of `y` `[..., columns]`, `u` `[..., rank]` and `v` `[rank, columns]`; where the backend can, in `y`, and
    /// without the whole product.
    fn add_product(y: FloatTensor<Self>, u: FloatTensor<Self>, v: FloatTensor<Self>) -> FloatTensor<Self>;

    /// Max pool of `[batch, channels, height, width]`, and where each maximum was. No window may be larger than the
    /// padded input.
    fn max_pool2d_with_offsets(
        x: FloatTensor<Self>,
        options: &MaxPoolOptions<2>,
    ) -> (FloatTensor<Self>, Self::Offsets);

    /// Gradient of a max pool's input of shape `x`.
    fn max_pool2d_with_offsets_backward(
        x: Shape,
        offsets: &Self::Offsets,
        dy: FloatTensor<Self>,
        options: &MaxPoolOptions<2>,
    ) -> FloatTensor<Self>;

    /// Gradient of an average pool's input of shape `x`, `[batch, channels, height, width]`.
    fn avg_pool2d_adjoint(x: Shape, dy: FloatTensor<Self>, options: &AvgPoolOptions<2>) -> FloatTensor<Self>;

    /// Gradient of an adaptive average pool's input of shape `x`, `[batch, channels, ...]` with one to three spatial
    /// axes.
    fn adaptive_avg_pool_adjoint(x: Shape, dy: FloatTensor<Self>) -> FloatTensor<Self>;

    /// Gradient of an interpolation's input of shape `x`, `[batch, channels, height, width]`.
    fn interpolate_adjoint(x: Shape, dy: FloatTensor<Self>, options: InterpolateOptions)
    -> FloatTensor<Self>;

    /// A tensor for operations that read the shape, dtype and device of an argument but never its elements: nothing is
    /// written, and where the backend has views of stride zero nothing of that size exists.
    fn shape_only(shape: Shape, dtype: DType, device: &Self::Device) -> FloatTensor<Self>;
}

/// Zeros of the dtype and device of another tensor: `float_zeros` of Flex 0.22.1 takes twice the memory for a moment.
pub(crate) fn zeros<B: Backend>(shape: Shape, like: &FloatTensor<B>) -> FloatTensor<B> {
    B::float_full(shape, 0.0.into(), &like.device(), like.dtype().into())
}
