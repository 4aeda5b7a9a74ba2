//! Embedding: rows of a table.
//!
//! | | |
//! | --- | --- |
//! | computes | `y[b, s] = weight[indices[b, s]]` |
//! | keeps | the indices (a handle) if `weight` is tracked, else nothing |
//! | backward | `dweight[i] = sum of dy[b, s] over all (b, s) with indices[b, s] = i` |
//!
//! Stock Burn keeps the indices and the table, of which it reads the shape.
use super::kept::Keeper;
use crate::backend::plain_backends;
use burn::backend::{
    Backend, TensorMetadata,
    autodiff::{
        Autodiff,
        checkpoint::{base::Checkpointer, strategy::CheckpointStrategy},
        grads::Gradients,
        ops::{Backward, Ops, OpsKind, unary},
    },
    backend_extension,
    tensor::{FloatTensor, IndexingUpdateOp, IntTensor},
};
use burn::tensor::Shape;

/// Embedding.
#[backend_extension(
    Flex: cfg(feature = "flex"),
    NdArray: cfg(feature = "ndarray"),
    Cube: cfg(any(feature = "wgpu", feature = "cuda")),
    Remote: cfg(feature = "remote"),
    Autodiff
)]
pub trait EmbeddingOps: Backend {
    /// Rows of `weight` `[n_embedding, d_model]` by `indices` `[batch, length]`.
    fn memsave_embedding(weight: FloatTensor<Self>, indices: IntTensor<Self>) -> FloatTensor<Self> {
        Self::embedding(weight, indices)
    }
}
plain_backends!(EmbeddingOps);

impl<B: EmbeddingOps, C: CheckpointStrategy> EmbeddingOps for Autodiff<B, C> {
    fn memsave_embedding(weight: FloatTensor<Self>, indices: IntTensor<Self>) -> FloatTensor<Self> {
        let keeper = Keeper::new("embedding", Some(weight.id()));
        let (weight, node) = weight.into_parts();
        match Embedding.prepare::<C>([node]).compute_bound().stateful() {
            OpsKind::Tracked(prep) => {
                let shape = weight.shape();
                let kept = keeper.keep_tensor("indices", indices.clone(), "weight is tracked");
                prep.finish(Saved { indices: kept, shape }, B::memsave_embedding(weight, indices))
            }
            OpsKind::UnTracked(prep) => prep.finish(B::memsave_embedding(weight, indices)),
        }
    }
}

#[derive(Debug)]
struct Embedding;

/// What the backward pass reads.
#[derive(Clone, Debug)]
struct Saved<Indices> {
    indices: Indices,
    /// The shape of the weight.
    shape: Shape,
}

impl<B: Backend> Backward<B, 1> for Embedding {
    type State = Saved<IntTensor<B>>;

    fn backward(self, ops: Ops<Self::State, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
        let Saved { indices, shape } = ops.state;
        unary::<B, _>(ops.parents, ops.node, grads, |dy| {
            let rows = indices.shape().num_elements();
            let indices = B::int_reshape(indices, Shape::new([rows]));
            let dy = B::float_reshape(dy, Shape::new([rows, shape[1]]));
            // `float_full` and not `float_zeros`, which takes twice the memory for a moment on Flex 0.22.1.
            let zeros = B::float_full(shape, 0.into(), &dy.device(), dy.dtype().into());
            B::float_select_assign(zeros, 0, indices, dy, IndexingUpdateOp::Add)
        });
    }
}
