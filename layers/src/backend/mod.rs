//! What a plain backend (one without autodiff) provides beyond Burn's own operations.
//!
//! Nothing here is routed by Burn's dispatch: these traits only bound the `Autodiff` implementations in [`crate::ops`].
//! CPU backends share fused kernels on slices ([`cpu`]); any other backend composes Burn's operations ([`device`]).
use burn::backend::{Backend, TensorMetadata, tensor::FloatTensor};
use burn::tensor::{DType, Shape};

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

#[cfg(any(feature = "flex", feature = "ndarray"))]
pub mod cpu;
pub mod device;
mod element_loss;
#[cfg(feature = "flex")]
mod flex;
mod mask;
#[cfg(feature = "ndarray")]
mod ndarray;
mod softmax;

pub use element_loss::{ElementLoss, Side};
pub use mask::{DeviceMask, Masks};
pub use softmax::Softmax;

/// Something kept from the forward pass for the backward pass that is no tensor of the graph.
pub trait Saved: Clone + Send + core::fmt::Debug + 'static {
    /// The bytes it keeps alive.
    fn bytes(&self) -> usize;
}

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

/// Placeholders of tensors.
pub trait Placeholders: Backend {
    /// A tensor for operations that read the shape, dtype and device of an argument but never its elements: nothing is
    /// written, and where the backend has views of stride zero nothing of that size exists.
    fn shape_only(shape: Shape, dtype: DType, device: &Self::Device) -> FloatTensor<Self> {
        Self::float_empty(shape, device, dtype.into())
    }
}
device_backends!(Placeholders);

/// The half precisions as f32.
pub(crate) fn widen<B: Backend>(x: FloatTensor<B>) -> FloatTensor<B> {
    match x.dtype() {
        DType::F16 | DType::BF16 => B::float_cast(x, DType::F32.into()),
        _ => x,
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

/// How logits of shape `[rows, classes]` become their gradient,
/// `of_probability exp(x - log_sum_exp) + of_weight weights`.
pub struct LogitsGradient<B: Backend> {
    /// As [`MemBackend::log_sum_exp`] returns it, `[rows, 1]`.
    pub log_sum_exp: FloatTensor<B>,
    /// `[rows, 1]`, of the dtype of `log_sum_exp`.
    pub of_probability: FloatTensor<B>,
    /// The same; missing if 0.
    pub of_weight: Option<FloatTensor<B>>,
    /// `[classes]`, of the dtype of the logits; missing if all are 1.
    pub weights: Option<FloatTensor<B>>,
}

/// What the backward passes of [`crate::ops`] need of a plain backend.
///
/// Bits and elements are in logical (row-major) order, whatever the strides of the tensor. Functions that take a tensor by
/// value work in place when it is the only handle.
pub trait MemBackend:
    Masks + ChannelSums + Placeholders + crate::ops::PiecewiseLinearKernels + crate::ops::LinearKernels
{
    /// `adjoint`: back, as gradients are.

    /// `f(x)` along axis `dim`.
    fn softmax_along(x: FloatTensor<Self>, f: Softmax, dim: usize) -> FloatTensor<Self>;

    /// Gradient of the input of [`softmax_along`](Self::softmax_along), from its output.
    fn softmax_along_backward(
        y: FloatTensor<Self>,
        f: Softmax,
        dim: usize,
        dy: FloatTensor<Self>,
    ) -> FloatTensor<Self>;

    /// `log(sum(exp(x)))` of every row of `[rows, classes]`: `[rows, 1]`, in f32 for half precision where the backend can.
    fn log_sum_exp(x: FloatTensor<Self>) -> FloatTensor<Self>;

    /// `sum(weights (x - log_sum_exp))` of every row of `[rows, classes]`: `[rows, 1]`, of the dtype of `log_sum_exp`.
    fn sum_log_probabilities(
        x: FloatTensor<Self>,
        log_sum_exp: FloatTensor<Self>,
        weights: Option<FloatTensor<Self>>,
    ) -> FloatTensor<Self>;

    /// What `gradient` says of logits `[rows, classes]`.
    fn logits_gradient(x: FloatTensor<Self>, gradient: LogitsGradient<Self>) -> FloatTensor<Self>;

    /// The loss of every element.
    fn element_loss(
        x: FloatTensor<Self>,
        targets: Option<FloatTensor<Self>>,
        f: ElementLoss,
    ) -> FloatTensor<Self>;

    /// The sum of all losses times `scale`, `[1]`.
    fn element_loss_sum(
        x: FloatTensor<Self>,
        targets: Option<FloatTensor<Self>>,
        f: ElementLoss,
        scale: f64,
    ) -> FloatTensor<Self>;

    /// The slope of the loss of every element on a side, times `factor`, a tensor of one element.
    fn element_loss_slopes(
        x: FloatTensor<Self>,
        targets: Option<FloatTensor<Self>>,
        f: ElementLoss,
        side: Side,
        factor: FloatTensor<Self>,
    ) -> FloatTensor<Self>;

    /// The slope of the loss of every element on a side, times its `dy`.
    fn element_loss_backward(
        x: FloatTensor<Self>,
        targets: Option<FloatTensor<Self>>,
        f: ElementLoss,
        side: Side,
        dy: FloatTensor<Self>,
    ) -> FloatTensor<Self>;

    /// `x * factor`, a tensor of one element.
    fn scale(x: FloatTensor<Self>, factor: FloatTensor<Self>) -> FloatTensor<Self>;
}

/// Zeros of the dtype and device of another tensor: `float_zeros` of Flex 0.22.1 takes twice the memory for a moment.
pub(crate) fn zeros<B: Backend>(shape: Shape, like: &FloatTensor<B>) -> FloatTensor<B> {
    B::float_full(shape, 0.0.into(), &like.device(), like.dtype().into())
}
