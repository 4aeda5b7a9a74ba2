//! Products with factors of low rank, block by block.
use super::LoraKernels;
use crate::backend::cpu::{CpuBackend, CpuElement, parallel, with_element};
use burn::backend::{TensorMetadata, tensor::FloatTensor};
use burn::tensor::{DType, Shape, Slice, bf16, f16};

impl<B: CpuBackend> LoraKernels for B {
    fn add_product(y: FloatTensor<B>, u: FloatTensor<B>, v: FloatTensor<B>) -> FloatTensor<B> {
        with_element!(y.dtype(), "add_product", E => add_product::<B, E>(y, u, v))
    }
}

/// Elements of a block: few enough to be nothing beside the whole.
const BLOCK: usize = 1 << 18;

/// A matrix product with fewer rows than this is not worth its call.
const FEW_ROWS: usize = 16;

/// Up to this rank, adding a product directly costs less than writing it and reading it again.
const SMALL_RANK: usize = 32;

/// `y + u v` in `y`.
fn add_product<B: CpuBackend, E: CpuElement>(
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
