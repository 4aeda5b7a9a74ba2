//! Blocks of a quantized matrix, dequantized one after the other.
use super::LinearKernels;
use crate::backend::cpu::{CpuBackend, CpuElement, parallel, with_element};
use burn::backend::{
    TensorMetadata,
    tensor::{FloatTensor, QuantizedTensor},
};
use burn::tensor::{DType, Shape, bf16, f16};
use core::ops::Range;

/// Elements of a block: few enough to be nothing beside the whole.
const BLOCK: usize = 1 << 18;

/// A block may also have one element per this many of the result: joining the results of blocks costs a pass over them.
const SMALL_PART: usize = 8;

/// A matrix product with fewer columns than this spends its time packing the other operand.
const NARROW: usize = 64;

impl<B: CpuBackend> LinearKernels for B {
    fn by_dequantized_blocks(
        x: &FloatTensor<B>,
        weight: &QuantizedTensor<B>,
        axis: usize,
        f: impl Fn(FloatTensor<B>, Range<usize>) -> FloatTensor<B>,
    ) -> FloatTensor<B> {
        let rows = x.shape().num_elements() / weight.shape()[1 - axis];
        with_element!(x.dtype(), "dequantize", E => blocks::<B, E>(rows, weight, axis, f))
    }
}

/// See [`LinearKernels::by_dequantized_blocks`]; `result_rows`: the rows of the result.
fn blocks<B: CpuBackend, E: CpuElement>(
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
