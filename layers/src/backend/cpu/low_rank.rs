//! Products with factors of low rank, and with quantized matrices, block by block.
use super::{CpuBackend, CpuElement, parallel};
use burn::backend::{
    TensorMetadata,
    tensor::{FloatTensor, QuantizedTensor},
};
use burn::tensor::{Shape, Slice, quantization::BlockLayout};
use core::ops::Range;

/// Elements of a block: few enough to be nothing beside the whole.
const BLOCK: usize = 1 << 18;

/// A block of a weight may also be this part of the result: joining the results of blocks costs a pass over them.
const SMALL_PART: usize = 8;

/// A matrix product with fewer rows than this is not worth its call.
const FEW_ROWS: usize = 16;

/// A matrix product with fewer columns than this wastes its time on packing the other operand.
const NARROW: usize = 64;

/// Up to this rank a product costs less than to make it and to read it again.
const SMALL_RANK: usize = 32;

/// `y + u v` in `y`.
pub(super) fn add_product<B: CpuBackend, E: CpuElement>(
    y: FloatTensor<B>,
    u: FloatTensor<B>,
    v: FloatTensor<B>,
) -> FloatTensor<B> {
    let [rank, _] = v.shape().dims();
    let (mut y, u) = (B::contiguous(y), B::contiguous(u));
    // Half precisions would be rounded several times.
    if rank > SMALL_RANK || size_of::<E>() < size_of::<E::Acc>() {
        return add_product_by_blocks::<B, E>(y, u, v);
    }
    let v = B::contiguous(v);
    add_small_product(B::as_slice_mut::<E>(&mut y), B::as_slice(&u), B::as_slice(&v), rank);
    y
}

/// `y + u v` of slices in row-major order, by rows, and four of the products of a row at a time: a row stays in the cache.
fn add_small_product<E: CpuElement>(y: &mut [E], u: &[E], v: &[E], rank: usize) {
    const AT_ONCE: usize = 4;
    let columns = v.len() / rank;
    let rows_per_task = parallel::items_per_task(y.len() / columns, columns * rank.div_ceil(AT_ONCE));
    let work = y.len() * rank.div_ceil(AT_ONCE);
    parallel::chunks_mut(y, rows_per_task * columns, work, |task, y| {
        let u = u[task * rows_per_task * rank..].chunks(rank);
        for (y, u) in y.chunks_mut(columns).zip(u) {
            let (u, u_rest) = u.as_chunks::<AT_ONCE>();
            let (v, v_rest) = v.split_at(u.len() * AT_ONCE * columns);
            for (&[a, b, c, d], v) in u.iter().zip(v.chunks(AT_ONCE * columns)) {
                let (v, w) = v.split_at(2 * columns);
                let ((va, vb), (vc, vd)) = (v.split_at(columns), w.split_at(columns));
                for ((((y, &va), &vb), &vc), &vd) in y.iter_mut().zip(va).zip(vb).zip(vc).zip(vd) {
                    *y = *y + ((a * va + b * vb) + (c * vc + d * vd));
                }
            }
            for (&u, v) in u_rest.iter().zip(v_rest.chunks(columns)) {
                y.iter_mut().zip(v).for_each(|(y, &v)| *y = *y + u * v);
            }
        }
    });
}

/// `y + u v` in `y`, by blocks of rows.
fn add_product_by_blocks<B: CpuBackend, E: CpuElement>(
    mut y: FloatTensor<B>,
    u: FloatTensor<B>,
    v: FloatTensor<B>,
) -> FloatTensor<B> {
    let [rank, columns] = v.shape().dims();
    let rows = y.shape().num_elements() / columns;
    let u = B::float_reshape(u, Shape::new([rows, rank]));
    let step = rows.div_ceil(8).max(FEW_ROWS).min(BLOCK / columns).max(1);
    let task = columns * parallel::items_per_task(step, columns);
    for start in (0..rows).step_by(step) {
        let rows = start..(start + step).min(rows);
        let block = B::float_slice(u.clone(), &[Slice::from(rows.clone()), Slice::full()]);
        let product = B::contiguous(B::float_matmul(block, v.clone()));
        let product = B::as_slice::<E>(&product);
        let target = &mut B::as_slice_mut::<E>(&mut y)[rows.start * columns..rows.end * columns];
        parallel::chunks_mut(target, task, product.len(), |index, target| {
            let product = &product[index * task..];
            for (y, &product) in target.iter_mut().zip(product) {
                *y = E::narrow(y.widen() + product.widen());
            }
        });
    }
    y
}

/// A quantized matrix in memory: `scale * value`.
pub struct QuantizedMatrix<'a> {
    /// In row-major order.
    pub values: &'a [i8],
    /// One for all, or one per block.
    pub scales: &'a [f32],
    /// What the scales of blocks are multiplied by.
    pub global: Option<f32>,
    /// How the blocks lie.
    pub blocks: Option<BlockLayout>,
}

impl QuantizedMatrix<'_> {
    /// A part of a matrix that has `width` columns.
    fn dequantize<E: CpuElement>(&self, width: usize, rows: Range<usize>, columns: Range<usize>) -> Vec<E> {
        let to_float = |scale: f32, value: i8| E::from_f64(f64::from(scale * f32::from(value)));
        let row_of_blocks = |blocks: &BlockLayout, start: usize, target: &mut [E]| {
            let global = self.global.unwrap_or(1.0);
            for (at, target) in target.iter_mut().enumerate() {
                let scale = global * self.scales[blocks.block_of(start + at)];
                *target = to_float(scale, self.values[start + at]);
            }
        };
        let (len, task) = (rows.len() * columns.len(), parallel::items_per_task(rows.len(), columns.len()));
        parallel::filled(len, E::zero(), task * columns.len(), len, |index, targets| {
            for (row, target) in targets.chunks_mut(columns.len()).enumerate() {
                let start = (rows.start + index * task + row) * width + columns.start;
                match &self.blocks {
                    Some(blocks) => row_of_blocks(blocks, start, target),
                    None => {
                        let values = &self.values[start..start + columns.len()];
                        let targets = target.iter_mut().zip(values);
                        targets.for_each(|(target, &value)| *target = to_float(self.scales[0], value));
                    }
                }
            }
        })
    }
}

/// See [`MemBackend::by_dequantized_blocks`](crate::backend::MemBackend::by_dequantized_blocks); `result_rows`: of the result.
pub(super) fn by_dequantized_blocks<B: CpuBackend, E: CpuElement>(
    result_rows: usize,
    weight: &QuantizedTensor<B>,
    axis: usize,
    f: impl Fn(FloatTensor<B>, Range<usize>) -> FloatTensor<B>,
) -> FloatTensor<B> {
    let [rows, columns] = weight.shape().dims();
    let (len, across) = if axis == 0 { (rows, columns) } else { (columns, rows) };
    let size = (BLOCK.max(result_rows * len / SMALL_PART) / across).max(NARROW);
    let Some(matrix) = B::quantized_matrix(weight) else {
        return f(B::dequantize(weight.clone(), E::dtype().into()), 0..len);
    };
    let result = |range: Range<usize>| {
        let (rows, columns_of_block) =
            if axis == 0 { (range.clone(), 0..columns) } else { (0..rows, range.clone()) };
        let shape = Shape::new([rows.len(), columns_of_block.len()]);
        f(B::from_vec(matrix.dequantize::<E>(columns, rows, columns_of_block), shape), range)
    };
    if len <= size {
        return result(0..len);
    }
    let (mut whole, mut shape) = (Vec::new(), Shape::new([0]));
    for start in (0..len).step_by(size) {
        let range = start..(start + size).min(len);
        let part = B::contiguous(result(range.clone()));
        if whole.is_empty() {
            shape = part.shape();
            let last = shape.num_dims() - 1;
            shape[last] = len;
            whole = vec![E::zero(); shape.num_elements()];
        }
        let part = B::as_slice::<E>(&part);
        let task = parallel::items_per_task(part.len() / range.len(), range.len());
        parallel::chunks_mut(&mut whole, task * len, part.len(), |index, rows| {
            let parts = part[index * task * range.len()..].chunks(range.len());
            let rows = rows.chunks_mut(len).zip(parts);
            rows.for_each(|(row, part)| row[range.clone()].copy_from_slice(part));
        });
    }
    B::from_vec(whole, shape)
}
