//! The gradients on a CPU, in fused loops.
use super::PReluKernels;
use crate::backend::cpu::{BitMask, CpuBackend, CpuElement, parallel, with_element};
use burn::backend::{TensorMetadata, tensor::FloatTensor};
use burn::tensor::{DType, Shape, bf16, f16};

impl<B: CpuBackend> PReluKernels for B {
    fn prelu_x_backward(mask: &BitMask, alpha: FloatTensor<B>, dy: FloatTensor<B>) -> FloatTensor<B> {
        let alpha = B::contiguous(alpha);
        let mut dx = B::contiguous(dy);
        let inner = inner_size(&dx.shape(), &alpha.shape());
        with_element!(dx.dtype(), "prelu", E => {
            x_backward::<E>(mask, B::as_slice(&alpha), B::as_slice_mut(&mut dx), inner)
        });
        dx
    }

    fn prelu_alpha_backward(x: FloatTensor<B>, alpha: Shape, dy: FloatTensor<B>) -> FloatTensor<B> {
        let (x, dy) = (B::contiguous(x), B::contiguous(dy));
        let inner = inner_size(&dy.shape(), &alpha);
        with_element!(dy.dtype(), "prelu", E => {
            let dalpha = alpha_backward::<E>(B::as_slice(&x), B::as_slice(&dy), alpha.num_elements(), inner);
            B::from_vec(dalpha, alpha)
        })
    }
}

/// The number of consecutive elements of `x` that share a slope.
///
/// `alpha` broadcasts against `x`: it has one element, or as many as `x` has channels (axis 1).
fn inner_size(x: &Shape, alpha: &Shape) -> usize {
    match alpha.num_elements() {
        1 => x.num_elements().max(1),
        _ => x[2..].iter().product::<usize>().max(1),
    }
}

/// Multiplies `dy` by its slope where the bit is clear.
fn x_backward<E: CpuElement>(mask: &BitMask, alpha: &[E], dy: &mut [E], inner: usize) {
    if let [alpha] = alpha {
        return mask.scale(dy, [alpha.into_f64(), 1.0]);
    }
    let slope = |channel: usize| alpha[channel].widen();
    let scaled = |dy: E, alpha| E::narrow(dy.widen() * alpha);
    mask.select_by_channel(dy, [alpha.len(), inner], slope, scaled, |dy, _| dy);
}

/// `sum(dy * min(x, 0))` per slope.
fn alpha_backward<E: CpuElement>(x: &[E], dy: &[E], slopes: usize, inner: usize) -> Vec<E> {
    // Planes are cut into parts, so that the threads share the work even if there is only one slope.
    const PART: usize = 1 << 12;
    const SUMS: usize = 1 << 13;
    let planes = x.len() / inner;
    let parts = inner.div_ceil(PART);
    // The sums of all jobs take at most 64 KiB, or a quarter of the bytes of x in f32.
    let least = parallel::items_per_part(inner.min(PART), 2 * slopes);
    let least = least.min((planes * parts).div_ceil((SUMS / slopes.max(1)).max(1)));
    let size = parallel::items_per_job(planes * parts, x.len()).max(least);
    let sums = parallel::map_ranges(planes * parts, size, |range| {
        let mut sums = vec![0.0f64; slopes];
        for part in range {
            let (plane, part) = (part / parts, part % parts);
            let (start, end) = (plane * inner + part * PART, plane * inner + ((part + 1) * PART).min(inner));
            let zero = <E::Acc as num_traits::Zero>::zero();
            let pairs = x[start..end].iter().zip(&dy[start..end]);
            let sum = pairs.fold(zero, |sum, (x, dy)| {
                let x = x.widen();
                sum + if x >= zero { zero } else { x * dy.widen() } // a NaN stays a NaN
            });
            sums[plane % slopes] += sum.into_f64();
        }
        sums
    });
    let total = |slope: usize| sums.iter().map(|part| part[slope]).sum::<f64>();
    (0..slopes).map(|slope| E::from_f64(total(slope))).collect()
}
