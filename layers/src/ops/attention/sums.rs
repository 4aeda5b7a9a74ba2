//! Results that chunks are put into, or summed in: sums of half precision are in f32, and narrowed once.
use super::chunks::{Chunk, Sizes, slices};
use super::kernels::AttentionKernels;
use crate::backend::{Placeholders, widen};
use burn::backend::{TensorMetadata, tensor::FloatTensor};
use burn::tensor::{DType, Shape};
use core::ops::Range;

/// A tensor that is filled part by part. If one part is the whole, nothing else is allocated.
pub struct Parts<B: Placeholders> {
    pub(super) shape: Shape,
    /// Whether the parts cover the whole, so that nothing needs to be 0 before.
    cover: bool,
    pub(super) all: Option<FloatTensor<B>>,
}

impl<B: Placeholders> Parts<B> {
    /// Zeros where no part is.
    pub(super) fn new(shape: Shape) -> Self {
        Self { shape, cover: false, all: None }
    }

    /// For parts that cover the whole, or for none.
    pub(super) fn covering(shape: Shape) -> Self {
        Self { cover: true, ..Self::new(shape) }
    }

    /// What there is, or what the first part, of this dtype, is put into.
    pub(super) fn take(&mut self, dtype: DType, device: &B::Device) -> FloatTensor<B> {
        let shape = self.shape.clone();
        self.all.take().unwrap_or_else(|| match self.cover {
            true => B::unwritten(shape, dtype, device),
            false => B::float_full(shape, 0.0.into(), device, dtype.into()), // as `zeros`
        })
    }

    /// Sets a part that is not set yet.
    pub(super) fn put(&mut self, ranges: [&Range<usize>; 4], part: FloatTensor<B>) {
        self.all = Some(match slices(&self.shape, ranges) {
            None => part,
            Some(slices) => {
                let all = self.take(part.dtype(), &part.device());
                B::float_slice_assign(all, &slices, part)
            }
        });
    }

    /// Adds to a part, which is 0 at first.
    pub(super) fn add(&mut self, ranges: [&Range<usize>; 4], more: FloatTensor<B>) {
        debug_assert!(!self.cover, "a part of nothing that is written");
        if self.all.is_none() && more.shape() == self.shape {
            self.all = Some(more);
            return;
        }
        let all = self.take(more.dtype(), &more.device());
        self.all = Some(match slices(&self.shape, ranges) {
            None => B::float_add(all, more),
            Some(slices) => {
                let sum = B::float_add(more, B::float_slice(all.clone(), &slices));
                B::float_slice_assign(all, &slices, sum)
            }
        });
    }

    /// The tensor. Zeros, if there was no part, are of this device and dtype.
    pub(super) fn finish(self, (device, dtype): &(B::Device, DType)) -> FloatTensor<B> {
        self.all.unwrap_or_else(|| B::float_full(self.shape, 0.0.into(), device, (*dtype).into()))
    }
}

/// A part, and the tensor that it belongs to.
pub struct Put<'a, B: Placeholders> {
    pub(super) whole: &'a mut Parts<B>,
    pub(super) ranges: [Range<usize>; 4],
    pub(super) part: FloatTensor<B>,
}

impl<B: Placeholders> Put<'_, B> {
    /// Puts it there.
    pub(super) fn put(self) {
        self.whole.put(self.ranges.each_ref(), self.part);
    }
}

/// A gradient of keys or values, a sum over the queries of a group, whose chunks come in reverse order.
pub(super) struct KeyGrads<B: Placeholders> {
    all: Parts<B>,
    /// The sum of the chunks of these groups so far.
    sum: Option<Parts<B>>,
}

impl<B: AttentionKernels> KeyGrads<B> {
    pub(super) fn new(shape: Shape) -> Self {
        Self { all: Parts::covering(shape), sum: None }
    }

    /// Adds `rows^T x` of a chunk, both by group. With the last one of its groups their gradient is there: a part of the whole.
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

    /// What the parts were put into, if they were.
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

    /// Adds gradients of scores, in f32 at least; `dtype`: that of the bias.
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
