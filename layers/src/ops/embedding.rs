//! Embedding: rows of a table.
//!
//! | | |
//! | --- | --- |
//! | computes | `y[b, s] = weight[indices[b, s]]` |
//! | keeps | the indices (a handle) if `weight` is tracked, else nothing |
//! | backward | `dweight[i] = sum of dy[b, s] over all (b, s) with indices[b, s] = i` |
//!
//! Stock Burn keeps the indices and the table, although it reads only the shape of the table. It adds the rows of `dy` in the dtype of
//! `weight`. In half precision, the sum for a frequent index then stops growing. Here, rows in half precision are added in f32, some
//! columns at a time, and rounded once.
use crate::backend::{wide, widen, zeros};
use crate::graph::{BackwardPass, Inputs, KeepPlan, Operation, Recorder, Run, Tracking, extension, given};
use burn::backend::{
    Backend, TensorMetadata,
    tensor::{FloatTensor, IndexingUpdateOp, IntTensor},
};
use burn::tensor::{Shape, Slice};

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

    fn plan(&self, _: &Tracking<B, 1>) -> KeepPlan<1> {
        KeepPlan::nothing()
    }

    fn forward(&self, [weight]: Inputs<B, 1>) -> FloatTensor<B> {
        B::embedding(given(weight), self.indices.clone())
    }

    fn forward_saving(&self, inputs: Inputs<B, 1>, recorder: &Recorder<1>) -> (FloatTensor<B>, Self) {
        let indices = recorder.report().tensor("indices", self.indices.clone(), "weight is tracked");
        (Operation::<B, 1>::forward(self, inputs), Self { indices })
    }

    fn backward(Self { indices }: Self, dy: FloatTensor<B>, pass: &mut BackwardPass<B, 1>) {
        let (shape, rows) = (pass.shape(WEIGHT), indices.shape().num_elements());
        let indices = B::int_reshape(indices, Shape::new([rows]));
        let dy = B::float_reshape(dy, Shape::new([rows, shape[1]]));
        pass.give(WEIGHT, sums_of_rows::<B>(shape, indices, dy));
    }
}

/// A table of at most this many elements is summed in f32 as a whole.
const SMALL: usize = 1 << 16;

/// The number of parts into which the columns of a larger table are cut, so that at most the bytes of a second table exist besides.
const PARTS: usize = 4;

/// A table of this shape, whose rows are the sums of those rows of `dy` `[rows, width]` that have the same index.
fn sums_of_rows<B: Backend>(shape: Shape, indices: IntTensor<B>, dy: FloatTensor<B>) -> FloatTensor<B> {
    let (dtype, [entries, width]) = (dy.dtype(), shape.dims());
    let sums = |shape: Shape, dy: FloatTensor<B>| {
        B::float_select_assign(zeros::<B>(shape, &dy), 0, indices.clone(), dy, IndexingUpdateOp::Add)
    };
    if wide(dtype) == dtype {
        return sums(shape, dy);
    }
    let step = if entries * width <= SMALL { width } else { width.div_ceil(PARTS) };
    let mut table = zeros::<B>(shape, &dy);
    for start in (0..width).step_by(step.max(1)) {
        let columns = start..(start + step).min(width);
        let part = [Slice::full(), Slice::from(columns.clone())];
        let dy = widen::<B>(B::float_slice(dy.clone(), &part));
        let sums = sums(Shape::new([entries, columns.len()]), dy);
        table = B::float_slice_assign(table, &part, B::float_cast(sums, dtype.into()));
    }
    table
}
