//! Max pool over one or two axes.
//!
//! | | |
//! | --- | --- |
//! | computes | the maximum of every window |
//! | keeps | the winner's position in its window if `x` is tracked: 1 byte per output for windows of up to 255 elements, else 2 or 4 (device backends: Burn's index) |
//! | backward | every `dy` goes to its winner |
//!
//! Stock Burn keeps `x` and an index of 8 bytes per output.
use super::{
    fixed_linear::{lift, lifted},
    kept::Keeper,
};
use crate::backend::{MemBackend, device, plain_backends};
use burn::backend::{
    Backend, TensorMetadata,
    autodiff::{
        Autodiff,
        checkpoint::{base::Checkpointer, strategy::CheckpointStrategy},
        grads::Gradients,
        ops::{Backward, Ops, OpsKind, unary},
    },
    backend_extension,
    tensor::FloatTensor,
};
use burn::tensor::{Shape, ops::MaxPoolOptions};

/// Max pools.
#[backend_extension(
    Flex: cfg(feature = "flex"),
    NdArray: cfg(feature = "ndarray"),
    Cube: cfg(any(feature = "wgpu", feature = "cuda")),
    Remote: cfg(feature = "remote"),
    Autodiff
)]
pub trait MaxPoolOps: Backend {
    /// Max pool of `[batch, channels, height, width]` or without the height, which counts as 1. No window may be larger
    /// than the padded input.
    fn memsave_max_pool2d(x: FloatTensor<Self>, options: MaxPoolOptions<2>) -> FloatTensor<Self> {
        max_pool::<Self, _>(x, |x| (device::max_pool2d_with_offsets::<Self>(x, &options).0, ())).0
    }
}
plain_backends!(MaxPoolOps);

impl<B: MaxPoolOps + MemBackend, C: CheckpointStrategy> MaxPoolOps for Autodiff<B, C> {
    fn memsave_max_pool2d(x: FloatTensor<Self>, options: MaxPoolOptions<2>) -> FloatTensor<Self> {
        let (x, node) = x.into_parts();
        let shape = x.shape();
        let (y, offsets) = max_pool::<B, _>(x, |x| B::max_pool2d_with_offsets(x, &options));
        match MaxPool.prepare::<C>([node]).compute_bound().stateful() {
            OpsKind::Tracked(prep) => {
                let offsets = Keeper::new("max_pool", None).keep_state("offsets", offsets, "x is tracked");
                prep.finish(Saved { offsets, shape, options }, y)
            }
            OpsKind::UnTracked(prep) => prep.finish(y),
        }
    }
}

/// Pools over two axes, also where there is only one.
fn max_pool<B: Backend, T>(
    x: FloatTensor<B>,
    pool: impl FnOnce(FloatTensor<B>) -> (FloatTensor<B>, T),
) -> (FloatTensor<B>, T) {
    let shape = x.shape();
    let (y, rest) = pool(B::float_reshape(x, lift(&shape)));
    match shape.num_dims() {
        3 => {
            let [batch, channels, _, length] = y.shape().dims();
            (B::float_reshape(y, Shape::new([batch, channels, length])), rest)
        }
        _ => (y, rest),
    }
}

#[derive(Debug)]
struct MaxPool;

/// What the backward pass reads.
#[derive(Clone, Debug)]
struct Saved<Offsets> {
    /// Where the maximum of every window is.
    offsets: Offsets,
    /// The shape of the input.
    shape: Shape,
    options: MaxPoolOptions<2>,
}

impl<B: MemBackend> Backward<B, 1> for MaxPool {
    type State = Saved<B::Offsets>;

    fn backward(self, ops: Ops<Self::State, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
        let Saved { offsets, shape, options } = ops.state;
        unary::<B, _>(ops.parents, ops.node, grads, |dy| {
            lifted::<B>(shape, dy, |x, dy| B::max_pool2d_with_offsets_backward(x, &offsets, dy, &options))
        });
    }
}
