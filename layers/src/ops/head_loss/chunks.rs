//! The logits of a dense layer, computed a few rows or classes at a time.
use super::{HeadLossKernels, RowLoss};
use crate::{
    backend::{wide, widen, zeros},
    graph::Report,
    ops::{cross_entropy::Classes, linear::LinearKernels},
};
use burn::backend::{
    Backend, TensorMetadata, get_or_init_device_settings,
    tensor::{BoolTensor, FloatTensor},
};
use burn::tensor::{DType, FloatDType, Shape, Slice};
use core::ops::Range;

/// A dense layer, or some of its outputs.
#[derive(Clone, Debug)]
pub(crate) struct Head<B: Backend> {
    pub(crate) weight: FloatTensor<B>,
    pub(crate) bias: Option<FloatTensor<B>>,
}

impl<B: LinearKernels> Head<B> {
    pub(crate) fn classes(&self) -> usize {
        self.weight.shape()[1]
    }

    pub(crate) fn columns(&self, columns: &Range<usize>) -> Self {
        let bias = self.bias.clone().map(|bias| B::float_slice(bias, &[Slice::from(columns.clone())]));
        Self { weight: columns_of::<B>(&self.weight, columns), bias }
    }

    pub(crate) fn logits(&self, x: FloatTensor<B>) -> FloatTensor<B> {
        B::dense(x, self.weight.clone(), self.bias.clone())
    }
}

/// A loss of the logits of all rows: what they are compared with, and how much each row counts.
#[derive(Clone, Debug)]
pub(crate) struct Loss<B: Backend, L> {
    pub(crate) what: L,
    /// `[rows, 1]`, in f32 at least.
    pub(crate) factors: FloatTensor<B>,
    /// The rows with a factor of 0, `[rows, 1]`, if there may be any.
    pub(crate) padding: Option<BoolTensor<B>>,
    /// How many bytes of logits exist at a time; if `None`, as many as suit the device.
    pub(crate) chunk_bytes: Option<usize>,
}

/// The logits of some rows, and what their gradient is computed from.
pub(crate) struct Chunk<B: Backend, L: RowLoss<B>> {
    pub(super) rows: Range<usize>,
    /// `[rows, d_input]`; the rows of padding must not be read.
    x: FloatTensor<B>,
    padding: Option<BoolTensor<B>>,
    logits: FloatTensor<B>,
    part: L::Part,
    factors: FloatTensor<B>,
}

impl<B: HeadLossKernels, L: RowLoss<B>> Chunk<B, L> {
    /// Which rows.
    pub(crate) fn rows(&self) -> &Range<usize> {
        &self.rows
    }

    /// `x` with zeros in the rows of padding.
    pub(super) fn x(&self) -> FloatTensor<B> {
        zero_rows::<B>(self.x.clone(), &self.padding)
    }

    /// The losses of the rows times their factors, and the statistics of [`RowLoss::losses`].
    pub(crate) fn losses(&self) -> (FloatTensor<B>, Vec<FloatTensor<B>>) {
        let (losses, statistics) = L::losses(&self.part, self.logits.clone());
        let losses = zero_rows::<B>(widen::<B>(losses), &self.padding);
        (B::float_mul(losses, self.factors.clone()), statistics)
    }

    /// The gradient of the logits, if the gradient of the loss is `scale`, or 1.
    pub(super) fn dlogits(
        self,
        statistics: &[FloatTensor<B>],
        scale: Option<&FloatTensor<B>>,
    ) -> FloatTensor<B> {
        let dloss = match scale {
            None => self.factors,
            Some(scale) => B::float_mul(self.factors, B::float_reshape(scale.clone(), Shape::new([1, 1]))),
        };
        L::gradients(self.part, self.logits, statistics, dloss)
    }
}

impl<B: HeadLossKernels, L: RowLoss<B>> Loss<B, L> {
    /// For this many rows, on a device, in a dtype. Without factors, every row counts `1 / rows`, so that the sum is the mean.
    pub(crate) fn new(
        what: L,
        factors: Option<FloatTensor<B>>,
        rows: usize,
        (device, dtype): (&B::Device, DType),
        chunk_bytes: Option<usize>,
    ) -> Self {
        let (shape, dtype) = (Shape::new([rows, 1]), wide(dtype).into());
        let Some(factors) = factors else {
            let factors = B::float_full(shape, (rows as f64).recip().into(), device, dtype);
            return Self { what, factors, padding: None, chunk_bytes };
        };
        let factors = B::float_reshape(B::float_cast(factors, dtype), shape);
        let bools = get_or_init_device_settings::<B>(device).bool_dtype;
        let padding = Some(B::float_equal_elem(factors.clone(), 0.into(), bools));
        Self { what, factors, padding, chunk_bytes }
    }

    /// Reports to the ledger what is kept, that is, all of it.
    pub(super) fn reported(self, report: &Report, reason: &'static str) -> Self {
        Self {
            what: self.what.reported(report, reason),
            factors: report.tensor("factors", self.factors, reason),
            padding: self.padding.map(|padding| report.tensor("padding", padding, reason)),
            ..self
        }
    }

    /// How many bytes of the logits of `x` exist at a time, if each row or each class has `of_row` bytes.
    pub(super) fn chunk_bytes(&self, x: &FloatTensor<B>, of_row: usize) -> usize {
        self.chunk_bytes.unwrap_or_else(|| B::chunk_bytes(&x.device(), x.shape()[1], of_row))
    }

    /// Calls `visit` with the logits of one chunk of rows after the other.
    pub(crate) fn each(&self, head: &Head<B>, x: &FloatTensor<B>, visit: &mut dyn FnMut(Chunk<B, L>)) {
        let ([rows, d_input], classes) = (x.shape().dims(), head.classes());
        let of_row = L::LOGITS * classes;
        // If there is padding, the rows of `x` are copied, too.
        let widest = if self.padding.is_some() { d_input.max(of_row) } else { of_row };
        let bytes = widest * x.dtype().size();
        for chunk in chunks(rows, bytes, self.chunk_bytes(x, bytes)) {
            let factors = rows_of::<B>(&self.factors, &chunk);
            let padding = self.padding.clone();
            let padding = padding.map(|all| B::bool_slice(all, &[Slice::from(chunk.clone())]));
            let part = self.what.part(&chunk, Classes::all(classes), &padding);
            let x = rows_of::<B>(x, &chunk);
            let logits = zero_rows::<B>(head.logits(x.clone()), &padding);
            visit(Chunk { rows: chunk, x, padding, logits, part, factors });
        }
    }

    /// The sum over the rows, `[1]`. Calls `visit` with one chunk of rows after the other and their statistics.
    pub(super) fn sum(
        &self,
        head: &Head<B>,
        x: &FloatTensor<B>,
        visit: &mut dyn FnMut(Chunk<B, L>, Vec<FloatTensor<B>>),
    ) -> FloatTensor<B> {
        let mut losses = Vec::new();
        self.each(head, x, &mut |chunk| {
            let (of_rows, statistics) = chunk.losses();
            losses.push(of_rows);
            visit(chunk, statistics);
        });
        let sum = B::float_reshape(B::float_sum(B::float_cat(losses, 0)), Shape::new([1]));
        B::float_cast(sum, x.dtype().into())
    }

    /// The scale of the gradient of logits in f16, `[1]`, in f32: the largest power of two with which neither the gradient overflows nor,
    /// if `of_product`, its product with the weight. `None` for other dtypes, which have at least the range of f32.
    pub(super) fn scale(&self, head: &Head<B>, of_product: bool) -> Option<FloatTensor<B>> {
        if head.weight.dtype() != DType::F16 {
            return None;
        }
        // The absolute values of the gradient of a row sum to at most twice its bound.
        let largest = one_wide::<B>(B::float_max_abs(self.factors.clone()));
        let mut bound = self.what.bound(largest, &self.padding);
        if of_product {
            let weight = one_wide::<B>(B::largest_magnitude(head.weight.clone()));
            let weight = B::float_mul_scalar(weight, 2.into());
            bound = B::float_mul(bound, B::float_clamp_min(weight, 1.into()));
        }
        let bound = B::float_clamp_min(bound, f64::from(f32::MIN_POSITIVE).sqrt().into());
        let log = B::float_mul_scalar(B::float_log(bound), core::f64::consts::LOG2_E.into());
        let exponent = B::float_floor(B::float_add_scalar(B::float_neg(log), LARGEST_EXPONENT.into()));
        let two = B::float_full(exponent.shape(), 2.into(), &exponent.device(), FloatDType::F32);
        Some(B::float_powf(two, exponent))
    }
}

/// One number, `[1]`, in f32.
pub(crate) fn one_wide<B: Backend>(x: FloatTensor<B>) -> FloatTensor<B> {
    B::float_cast(B::float_reshape(x, Shape::new([1])), FloatDType::F32)
}

/// The exponent of the largest power of two that f16 can hold.
const LARGEST_EXPONENT: f64 = 15.0;

/// `x` `[rows, columns]` with zeros in the rows of padding.
pub(crate) fn zero_rows<B: Backend>(x: FloatTensor<B>, padding: &Option<BoolTensor<B>>) -> FloatTensor<B> {
    match padding.clone() {
        None => x,
        Some(padding) => {
            let padding = B::bool_expand(padding, x.shape());
            B::float_mask_fill(x, padding, 0.into())
        }
    }
}

pub(crate) fn rows_of<B: Backend>(x: &FloatTensor<B>, rows: &Range<usize>) -> FloatTensor<B> {
    B::float_slice(x.clone(), &[Slice::from(rows.clone())])
}

/// `all`, a tensor of `count` rows, with `part` in these rows. The first part makes it: the part itself if it has all rows, else zeros
/// with the part in them.
pub(super) fn put_rows<B: Backend>(
    all: Option<FloatTensor<B>>,
    count: usize,
    rows: Range<usize>,
    part: FloatTensor<B>,
) -> FloatTensor<B> {
    match all {
        None if rows.len() == count => part,
        all => {
            let shape = Shape::new([count, part.shape()[1]]);
            let all = all.unwrap_or_else(|| zeros::<B>(shape, &part));
            B::float_slice_assign(all, &[Slice::from(rows)], part)
        }
    }
}

fn columns_of<B: Backend>(x: &FloatTensor<B>, columns: &Range<usize>) -> FloatTensor<B> {
    B::float_slice(x.clone(), &[Slice::from(0..x.shape()[0]), Slice::from(columns.clone())])
}

/// Ranges that cover `0..len`, each of as many items of `item` bytes as fit into a chunk. Their lengths differ by at most one, so that no
/// range is left with a single row, whose product Flex computes in f16.
pub(crate) fn chunks(len: usize, item: usize, chunk_bytes: usize) -> impl Iterator<Item = Range<usize>> {
    let most = (chunk_bytes / item.max(1)).clamp(1, len.max(1));
    let count = len.div_ceil(most);
    (0..count).map(move |chunk| len * chunk / count..len * (chunk + 1) / count)
}

/// The sum of the rows, `[classes]`, in f32 at least.
pub(super) fn sum_of_rows<B: HeadLossKernels>(dlogits: FloatTensor<B>) -> FloatTensor<B> {
    let [rows, classes] = dlogits.shape().dims();
    let wide = wide(dlogits.dtype());
    let sums = if dlogits.dtype() == wide {
        B::float_sum_dim(dlogits, 0)
    } else {
        let block_bytes = B::block_bytes(&dlogits.device());
        let sum = |block| B::float_sum_dim(widen::<B>(columns_of::<B>(&dlogits, &block)), 0);
        B::float_cat(chunks(classes, rows * wide.size(), block_bytes).map(sum).collect(), 1)
    };
    B::float_reshape(sums, Shape::new([classes]))
}

/// `sum + u v`, in place, a few columns at a time.
pub(super) fn add_product<B: HeadLossKernels>(
    mut sum: FloatTensor<B>,
    u: FloatTensor<B>,
    v: FloatTensor<B>,
) -> FloatTensor<B> {
    let [rows, columns] = sum.shape().dims();
    let block_bytes = B::block_bytes(&sum.device());
    for block in chunks(columns, rows * sum.dtype().size(), block_bytes) {
        let product = B::float_matmul(u.clone(), columns_of::<B>(&v, &block));
        if block.len() == columns {
            return B::float_add(sum, product);
        }
        let more = B::float_add(product, columns_of::<B>(&sum, &block));
        sum = B::float_slice_assign(sum, &[Slice::from(0..rows), Slice::from(block)], more);
    }
    sum
}
