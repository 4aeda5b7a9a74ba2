//! Interpolation, a case of [`fixed_linear`](super::fixed_linear).
//!
//! Stock Burn keeps the input, of which it reads the shape. On CPU backends every mode has a gradient here; stock has none
//! for some (Lanczos on Flex, all but nearest on NdArray).
use super::fixed_linear::{FixedLinear, fixed_linear, lifted};
use crate::backend::{MemBackend, plain_backends};
use burn::backend::{
    Backend,
    autodiff::{Autodiff, checkpoint::strategy::CheckpointStrategy},
    backend_extension,
    ops::InterpolateOptions,
    tensor::FloatTensor,
};
use burn::tensor::Shape;

/// Interpolation.
#[backend_extension(
    Flex: cfg(feature = "flex"),
    NdArray: cfg(feature = "ndarray"),
    Cube: cfg(any(feature = "wgpu", feature = "cuda")),
    Remote: cfg(feature = "remote"),
    Autodiff
)]
pub trait InterpolateOps: Backend {
    /// Records that `y` is `x`, `[batch, channels, height, width]` or without the height, which counts as 1, resized.
    fn memsave_interpolate(
        _x: FloatTensor<Self>,
        y: FloatTensor<Self>,
        _options: InterpolateOptions,
    ) -> FloatTensor<Self> {
        y
    }
}
plain_backends!(InterpolateOps);

impl<B: InterpolateOps + MemBackend, C: CheckpointStrategy> InterpolateOps for Autodiff<B, C> {
    fn memsave_interpolate(
        x: FloatTensor<Self>,
        y: FloatTensor<Self>,
        options: InterpolateOptions,
    ) -> FloatTensor<Self> {
        fixed_linear::<B, C, _>(Interpolate(options), x, y)
    }
}

#[derive(Clone, Debug)]
struct Interpolate(InterpolateOptions);

impl<B: MemBackend> FixedLinear<B> for Interpolate {
    fn adjoint(&self, x: Shape, dy: FloatTensor<B>) -> FloatTensor<B> {
        lifted::<B>(x, dy, |x, dy| B::interpolate_adjoint(x, dy, self.0.clone()))
    }
}
