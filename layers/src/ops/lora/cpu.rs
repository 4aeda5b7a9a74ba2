//! The kernels of low-rank adapters on a CPU: products are added in place, in half precision block by block.
use super::{LoraKernels, scaled};
use crate::backend::cpu::{CpuBackend, CpuElement, Matrix, gemm, is_wide, parallel, with_element};
use burn::backend::{TensorMetadata, tensor::FloatTensor};
use burn::tensor::{DType, Shape, Slice, bf16, f16};

impl<B: CpuBackend> LoraKernels for B {
    fn add_scaled_product(
        y: FloatTensor<B>,
        u: FloatTensor<B>,
        v: FloatTensor<B>,
        scale: f64,
    ) -> FloatTensor<B> {
        let u = scaled::<B>(u, scale);
        with_element!(y.dtype(), "add_product", E => add_product::<B, E>(y, u, v))
    }
}

/// Elements of a block: few, compared with the whole tensor.
const BLOCK: usize = 1 << 18;

/// A matrix product with fewer rows than this does not pay for its call.
const FEW_ROWS: usize = 16;

/// `y + u v`, in place of `y`.
fn add_product<B: CpuBackend, E: CpuElement>(
    y: FloatTensor<B>,
    u: FloatTensor<B>,
    v: FloatTensor<B>,
) -> FloatTensor<B> {
    let [rank, columns] = v.shape().dims();
    let (mut y, u) = (B::contiguous(y), B::contiguous(u));
    // In half precision, this would round several times.
    if is_wide::<E>() {
        let v = B::contiguous(v);
        let (rows, sums) = (u.shape().num_elements() / rank.max(1), B::as_slice_mut::<E>(&mut y));
        let u = Matrix::in_order(B::as_slice(&u), [rows, rank]);
        let v = Matrix::in_order(B::as_slice(&v), [rank, columns]);
        if let Some((u, v)) = u.zip(v) {
            gemm::add_product(u, v, sums);
        }
        return y;
    }
    add_product_by_blocks::<B, E>(y, u, v)
}

/// `y + u v`, in place of `y`, by blocks of rows.
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
