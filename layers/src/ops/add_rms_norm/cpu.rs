//! The kernel on a CPU: a fused loop that normalizes a row of the sum while it is in the cache.
use super::{AddRmsNormKernels, RowNorm, RowNormKernels};
use crate::backend::cpu::{CpuBackend, CpuElement, parallel, sums::add_each, with_element};
use crate::ops::row_norm::cpu::statistics;
use burn::backend::{TensorMetadata, tensor::FloatTensor};
use burn::tensor::{DType, bf16, f16};
use num_traits::Zero;

impl<B: CpuBackend> AddRmsNormKernels for B {
    fn add_rms_norm(
        x: FloatTensor<B>,
        residual: FloatTensor<B>,
        gamma: FloatTensor<B>,
        norm: &RowNorm,
    ) -> [FloatTensor<B>; 2] {
        let in_place = [&x, &residual].into_iter().any(|x| x.can_mut());
        if !in_place || ![&x, &residual].into_iter().all(B::is_contiguous) {
            // Burn adds views without copying them, and allocates the sum.
            let sum = B::float_add(x, residual);
            let y = B::row_norm(sum.clone(), Some(gamma), None, norm);
            return [sum, y];
        }
        let (mut sum, other) = if x.can_mut() { (x, residual) } else { (residual, x) };
        let gamma = B::contiguous(gamma);
        let (shape, size) = (sum.shape(), norm.row());
        with_element!(sum.dtype(), "add_rms_norm", E => {
            let gamma: Vec<_> = B::as_slice::<E>(&gamma).iter().map(|gamma| gamma.widen()).collect();
            let (sums, other) = (B::as_slice_mut::<E>(&mut sum), B::as_slice::<E>(&other));
            let (len, task) = (sums.len(), size * parallel::items_per_task(sums.len() / size, size));
            let y = parallel::zip_filled((len, E::zero()), sums, [task; 2], len, |index, y, sums| {
                let rows = sums.chunks_exact_mut(size).zip(other[index * task..].chunks_exact(size));
                for (y, (sum, other)) in y.chunks_exact_mut(size).zip(rows) {
                    add_each(sum, other);
                    let [_, inv_std] = statistics(sum, norm);
                    let pairs = y.iter_mut().zip(sum).zip(&gamma);
                    pairs.for_each(|((y, sum), &gamma)| *y = E::narrow(sum.widen() * inv_std * gamma));
                }
            });
            [sum, B::from_vec(y, shape)]
        })
    }
}
