//! Tensors that are filled part by part: every chunk of an attention puts its part into the output and into the gradients.
use crate::backend::Placeholders;
use burn::backend::{Backend, TensorMetadata, tensor::FloatTensor};
use burn::tensor::{DType, Shape, Slice};
use core::ops::Range;

/// A tensor that is filled part by part. If one part is the whole tensor, nothing else is allocated.
pub struct Parts<B: Placeholders> {
    pub(super) shape: Shape,
    /// Whether the parts cover the whole tensor, so that it need not be zeroed before.
    cover: bool,
    pub(super) all: Option<FloatTensor<B>>,
}

impl<B: Placeholders> Parts<B> {
    /// Zeros where no part is put.
    pub(super) fn new(shape: Shape) -> Self {
        Self { shape, cover: false, all: None }
    }

    /// For parts that cover the whole tensor, or for no part at all.
    pub(super) fn covering(shape: Shape) -> Self {
        Self { cover: true, ..Self::new(shape) }
    }

    /// The tensor so far; before the first part, a new one of this dtype.
    pub(super) fn take(&mut self, dtype: DType, device: &B::Device) -> FloatTensor<B> {
        let shape = self.shape.clone();
        self.all.take().unwrap_or_else(|| match self.cover {
            true => B::unwritten(shape, dtype, device),
            false => B::float_full(shape, 0.0.into(), device, dtype.into()), // as `zeros`
        })
    }

    /// Sets a part that was not set before.
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

    /// The whole tensor. If there was no part, it is zeros of this device and dtype.
    pub(super) fn finish(self, (device, dtype): &(B::Device, DType)) -> FloatTensor<B> {
        self.all.unwrap_or_else(|| B::float_full(self.shape, 0.0.into(), device, (*dtype).into()))
    }
}

/// A part, and where it belongs.
pub struct Put<'a, B: Placeholders> {
    pub(super) whole: &'a mut Parts<B>,
    pub(super) ranges: [Range<usize>; 4],
    pub(super) part: FloatTensor<B>,
}

impl<B: Placeholders> Put<'_, B> {
    /// Puts the part there.
    pub(super) fn put(self) {
        self.whole.put(self.ranges.each_ref(), self.part);
    }
}

/// The slices that select a part of a tensor. An axis of length 1 is always whole. `None` if the part is the whole tensor.
pub(super) fn slices(shape: &Shape, ranges: [&Range<usize>; 4]) -> Option<Vec<Slice>> {
    let ranges = shape.iter().zip(ranges).map(|(&len, range)| if len == 1 { 0..1 } else { range.clone() });
    let ranges: Vec<_> = ranges.collect();
    let all = shape.iter().zip(&ranges).all(|(&len, range)| *range == (0..len));
    (!all).then(|| ranges.into_iter().map(Slice::from).collect())
}

/// A part of a tensor. An axis of length 1 is always whole.
pub(super) fn part<B: Backend>(x: FloatTensor<B>, ranges: [&Range<usize>; 4]) -> FloatTensor<B> {
    match slices(&x.shape(), ranges) {
        Some(slices) => B::float_slice(x, &slices),
        None => x,
    }
}
