//! Average pools, adaptive or not: the mean of every window. Two cases of [`fixed_linear`](super::fixed_linear).
//!
//! Stock Burn keeps the input, of which it reads the shape. NdArray 0.22.1 finds the windows of its adaptive pools in f32, and
//! errs by one on axes of more than 4096 elements or so; the windows of the gradient here are the exact ones.
use super::fixed_linear::{FixedLinear, fixed_linear, lifted};
use crate::backend::{MemBackend, plain_backends};
use burn::backend::{
    Backend,
    autodiff::{Autodiff, checkpoint::strategy::CheckpointStrategy},
    backend_extension,
    tensor::FloatTensor,
};
use burn::tensor::{Shape, ops::AvgPoolOptions};

/// Average pools.
#[backend_extension(
    Flex: cfg(feature = "flex"),
    NdArray: cfg(feature = "ndarray"),
    Cube: cfg(any(feature = "wgpu", feature = "cuda")),
    Remote: cfg(feature = "remote"),
    Autodiff
)]
pub trait AvgPoolOps: Backend {
    /// Records that `y` is the average pool of `x`, `[batch, channels, height, width]` or without the height, which counts
    /// as 1.
    fn memsave_avg_pool2d(
        _x: FloatTensor<Self>,
        y: FloatTensor<Self>,
        _options: AvgPoolOptions<2>,
    ) -> FloatTensor<Self> {
        y
    }
    /// Records that `y` is the adaptive average pool of `x`, `[batch, channels, ...]`, with one to three spatial axes.
    fn memsave_adaptive_avg_pool(_x: FloatTensor<Self>, y: FloatTensor<Self>) -> FloatTensor<Self> {
        y
    }
}
plain_backends!(AvgPoolOps);

impl<B: AvgPoolOps + MemBackend, C: CheckpointStrategy> AvgPoolOps for Autodiff<B, C> {
    fn memsave_avg_pool2d(
        x: FloatTensor<Self>,
        y: FloatTensor<Self>,
        options: AvgPoolOptions<2>,
    ) -> FloatTensor<Self> {
        fixed_linear::<B, C, _>(AvgPool(options), x, y)
    }
    fn memsave_adaptive_avg_pool(x: FloatTensor<Self>, y: FloatTensor<Self>) -> FloatTensor<Self> {
        fixed_linear::<B, C, _>(AdaptiveAvgPool, x, y)
    }
}

#[derive(Clone, Debug)]
struct AvgPool(AvgPoolOptions<2>);

impl<B: MemBackend> FixedLinear<B> for AvgPool {
    fn adjoint(&self, x: Shape, dy: FloatTensor<B>) -> FloatTensor<B> {
        lifted::<B>(x, dy, |x, dy| B::avg_pool2d_adjoint(x, dy, &self.0))
    }
}

#[derive(Clone, Debug)]
struct AdaptiveAvgPool;

impl<B: MemBackend> FixedLinear<B> for AdaptiveAvgPool {
    fn adjoint(&self, x: Shape, dy: FloatTensor<B>) -> FloatTensor<B> {
        B::adaptive_avg_pool_adjoint(x, dy)
    }
}
