//! Gradients that are sums over chunks: those of keys, values and the bias. Half precision is summed in f32 and narrowed once.
use super::chunks::{Chunk, Sizes};
use super::kernels::AttentionKernels;
use super::parts::{Parts, Put};
use crate::backend::{Placeholders, widen};
use burn::backend::{TensorMetadata, tensor::FloatTensor};
use burn::tensor::{DType, Shape};

/// The gradient of keys or values: a sum over the queries of each group. The chunks come in reverse order.
pub(super) struct KeyGrads<B: Placeholders> {
    all: Parts<B>,
    /// The sum so far over the chunks of the present groups.
    sum: Option<Parts<B>>,
}

impl<B: AttentionKernels> KeyGrads<B> {
    pub(super) fn new(shape: Shape) -> Self {
        Self { all: Parts::covering(shape), sum: None }
    }

    /// Adds `rows^T x` of a chunk, both by group. Returns the gradient of its groups, a part of the whole, once all their chunks are added.
    pub(super) fn add(
        &mut self,
        chunk: &Chunk,
        sizes: &Sizes,
        rows: FloatTensor<B>,
        x: FloatTensor<B>,
    ) -> Option<Put<'_, B>> {
        let (all_keys, width) = (0..self.all.shape[2], 0..self.all.shape[3]);
        let ranges = [chunk.batch.clone(), chunk.groups.clone(), all_keys.clone(), width.clone()];
        let rows = B::float_transpose(rows);
        if chunk.holds_its_groups(sizes) {
            return Some(Put { whole: &mut self.all, ranges, part: B::product(rows, x) });
        }
        let dtype = x.dtype();
        let more = match B::WIDE_PRODUCTS {
            true => B::product(widen::<B>(rows), widen::<B>(x)),
            false => widen::<B>(B::product(rows, x)),
        };
        let shape = [chunk.batch.len(), chunk.groups.len(), all_keys.len(), width.len()];
        let sum = self.sum.get_or_insert_with(|| Parts::new(Shape::new(shape)));
        sum.add([&(0..shape[0]), &(0..shape[1]), &(0..chunk.keys), &width], more);
        let sum = chunk.begins_its_groups(sizes).then(|| self.sum.take()?.all).flatten()?;
        Some(Put { whole: &mut self.all, ranges, part: B::float_cast(sum, dtype.into()) })
    }

    /// The gradient, if a part was put into it.
    pub(super) fn all(self) -> Option<FloatTensor<B>> {
        self.all.all
    }

    pub(super) fn finish(self, like: &(B::Device, DType)) -> FloatTensor<B> {
        self.all.finish(like)
    }
}

/// The gradient of a bias: a sum over chunks where an axis of the bias has length 1.
pub(super) struct BiasGrad<B: Placeholders> {
    all: Parts<B>,
    is_sum: bool,
}

impl<B: Placeholders> BiasGrad<B> {
    pub(super) fn new(bias: &FloatTensor<B>, sizes: &Sizes) -> Self {
        let (shape, weights) = (bias.shape(), [sizes.batch, sizes.heads, sizes.queries, sizes.keys]);
        let is_sum = shape.iter().zip(weights).any(|(&len, of)| len != of);
        Self { all: Parts::new(shape), is_sum }
    }

    /// Adds gradients of scores, in f32 at least. `dtype` is that of the bias.
    pub(super) fn add(&mut self, chunk: &Chunk, scores: FloatTensor<B>, dtype: DType) {
        let ranges = [&chunk.batch, &chunk.heads, &chunk.queries, &(0..chunk.keys)];
        if !self.is_sum {
            return self.all.put(ranges, B::float_cast(scores, dtype.into()));
        }
        let sum = (0..4).filter(|&axis| self.all.shape[axis] == 1).fold(scores, B::float_sum_dim);
        self.all.add(ranges, sum);
    }

    pub(super) fn finish(self, like: &(B::Device, DType)) -> FloatTensor<B> {
        B::float_cast(self.all.finish(like), like.1.into())
    }
}
