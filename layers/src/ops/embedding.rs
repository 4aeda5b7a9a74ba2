//! Embedding: rows of a table.
//!
//! | | |
//! | --- | --- |
//! | computes | `y[b, s] = weight[indices[b, s]]` |
//! | keeps | the indices (a handle) if `weight` is tracked, else nothing |
//! | backward | `dweight[i] = sum of dy[b, s] over all (b, s) with indices[b, s] = i`, in the dtype of `weight` |
//!
//! Stock Burn keeps the indices and the table, of which it reads only the shape. It adds the rows with the same function, so
//! that its gradient equals the one here, also in half precision.
use super::{
    extension::extension,
    step::{BackwardPass, Inputs, Operation, Plan, Recorder, Run, Tracking, given},
};
use crate::backend::zeros;
use burn::backend::{
    Backend, TensorMetadata,
    tensor::{FloatTensor, IndexingUpdateOp, IntTensor},
};
use burn::tensor::Shape;

extension! {
    /// Embedding.
    pub trait EmbeddingOps(Backend) {
        /// Rows of `weight` `[n_embedding, d_model]` by `indices` `[batch, length]`.
        fn memsave_embedding(weight: FloatTensor<Self>, indices: IntTensor<Self>) -> FloatTensor<Self> {
            Self::run(Embedding { indices }, [Some(weight)])
        }
    }
}

const WEIGHT: usize = 0;

/// The rows of a table at `indices`.
#[derive(Clone, Debug)]
pub struct Embedding<Indices> {
    indices: Indices,
}

impl<B: Backend> Operation<B, 1> for Embedding<IntTensor<B>> {
    const INPUTS: [&'static str; 1] = ["weight"];
    const PARAMETERS: &'static [usize] = &[WEIGHT];
    const SHAPES: &'static [usize] = &[WEIGHT];
    /// The indices.
    type Saved = Self;

    fn name(&self) -> &'static str {
        "embedding"
    }

    fn plan(&self, _: &Tracking<B, 1>) -> Plan<1> {
        Plan::nothing()
    }

    fn forward(&self, [weight]: Inputs<B, 1>) -> FloatTensor<B> {
        B::embedding(given(weight), self.indices.clone())
    }

    fn forward_saving(&self, inputs: Inputs<B, 1>, recorder: &Recorder<1>) -> (FloatTensor<B>, Self) {
        let indices = recorder.ledger().tensor("indices", self.indices.clone(), "weight is tracked");
        (Operation::<B, 1>::forward(self, inputs), Self { indices })
    }

    fn backward(Self { indices }: Self, dy: FloatTensor<B>, pass: &mut BackwardPass<B, 1>) {
        let (shape, rows) = (pass.shape(WEIGHT), indices.shape().num_elements());
        let indices = B::int_reshape(indices, Shape::new([rows]));
        let dy = B::float_reshape(dy, Shape::new([rows, shape[1]]));
        let zeros = zeros::<B>(shape, &dy);
        pass.give(WEIGHT, B::float_select_assign(zeros, 0, indices, dy, IndexingUpdateOp::Add));
    }
}
