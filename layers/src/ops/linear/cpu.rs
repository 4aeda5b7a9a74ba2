//! The kernels of dense layers on a CPU: products of all rows at once, and products with a quantized matrix, a block at a time.
use super::{LinearKernels, x_backward};
use crate::backend::cpu::{CpuBackend, CpuElement, Matrix, gemm, half_precision, parallel, with_element};
use burn::backend::{
    TensorMetadata,
    tensor::{FloatTensor, QuantizedTensor},
};
use burn::tensor::{DType, Shape, bf16, f16};
use core::ops::Range;

/// Elements of a block: few, compared with the whole matrix.
const BLOCK: usize = 1 << 18;

/// A block may also have one element per this many elements of the result, since joining the results of blocks costs a pass over them.
const SMALL_PART: usize = 8;

/// A matrix product with fewer columns than this spends most of its time packing the other operand.
const NARROW: usize = 64;

/// The product of two matrices plus a bias. Each matrix has all rows of a tensor; if `transposed`, it is transposed. `None` if a tensor
/// does not lie in memory as a matrix, if the matrices do not fit, or if Burn's product is to be taken.
fn product<B: CpuBackend>(
    factors: [&FloatTensor<B>; 2],
    transposed: [bool; 2],
    bias: Option<&FloatTensor<B>>,
) -> Option<FloatTensor<B>> {
    let dtype = factors[0].dtype();
    if factors.into_iter().chain(bias).any(|x| x.dtype() != dtype) {
        return None;
    }
    match dtype {
        DType::F32 => {
            product_by::<B, f32>(factors, transposed, bias, |a, b, bias| Some(gemm::product(a, b, bias)))
        }
        DType::F64 => {
            product_by::<B, f64>(factors, transposed, bias, |a, b, bias| Some(gemm::product(a, b, bias)))
        }
        DType::F16 => product_by::<B, f16>(factors, transposed, bias, half_precision::product_of_few_rows),
        DType::BF16 => product_by::<B, bf16>(factors, transposed, bias, |a, b, bias| {
            Some(half_precision::product(a, b, bias))
        }),
        _ => None,
    }
}

/// [`product`], by a function of matrices.
fn product_by<B: CpuBackend, E: CpuElement>(
    [left, right]: [&FloatTensor<B>; 2],
    transposed: [bool; 2],
    bias: Option<&FloatTensor<B>>,
    product: impl Fn(Matrix<'_, E>, Matrix<'_, E>, Option<&[E]>) -> Option<Vec<E>>,
) -> Option<FloatTensor<B>> {
    let (left, right) = (B::matrix::<E>(left)?, B::matrix::<E>(right)?);
    let left = if transposed[0] { left.transpose() } else { left };
    let right = if transposed[1] { right.transpose() } else { right };
    let bias = bias.map(|bias| B::contiguous(bias.clone()));
    let bias = bias.as_ref().map(|bias| B::as_slice::<E>(bias));
    let fits = left.columns() == right.rows() && bias.is_none_or(|bias| bias.len() == right.columns());
    let shape = Shape::new([left.rows(), right.columns()]);
    fits.then(|| product(left, right, bias)).flatten().map(|values| B::from_vec(values, shape))
}

/// A matrix with a row for every row of `x`, in the shape of `x` but for the last axis.
fn rows_of<B: CpuBackend>(x: &FloatTensor<B>, matrix: FloatTensor<B>) -> FloatTensor<B> {
    let (mut shape, last) = (x.shape(), x.rank() - 1);
    shape[last] = matrix.shape()[1];
    B::float_reshape(matrix, shape)
}

impl<B: CpuBackend> LinearKernels for B {
    fn dense(x: FloatTensor<B>, weight: FloatTensor<B>, bias: Option<FloatTensor<B>>) -> FloatTensor<B> {
        match product::<B>([&x, &weight], [false, false], bias.as_ref()) {
            Some(y) => rows_of::<B>(&x, y),
            None => B::linear(x, weight, bias),
        }
    }

    fn dense_x_backward(weight: FloatTensor<B>, dy: FloatTensor<B>) -> FloatTensor<B> {
        match product::<B>([&dy, &weight], [false, true], None) {
            Some(dx) => rows_of::<B>(&dy, dx),
            None => x_backward::<B>(weight, dy),
        }
    }

    fn dense_weight_backward(x: FloatTensor<B>, dy: FloatTensor<B>) -> FloatTensor<B> {
        match product::<B>([&x, &dy], [true, false], None) {
            Some(dweight) => dweight,
            None => B::linear_weight_backward(x, dy),
        }
    }

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

/// See [`LinearKernels::by_dequantized_blocks`]. `result_rows`: the number of rows of the result.
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
