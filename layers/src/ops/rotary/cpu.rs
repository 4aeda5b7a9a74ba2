//! The kernel on a CPU: one loop over all pairs, in place.
use super::{Pairing, RotaryKernels};
use crate::backend::cpu::{CpuBackend, CpuElement, parallel, with_element};
use burn::backend::{TensorMetadata, tensor::FloatTensor};
use burn::tensor::{DType, bf16, f16};

impl<B: CpuBackend> RotaryKernels for B {
    fn rotate(x: FloatTensor<B>, factors: FloatTensor<B>, pairing: Pairing, adjoint: bool) -> FloatTensor<B> {
        let (mut x, factors) = (B::contiguous(x), B::contiguous(factors));
        let [_, features, _] = factors.shape().dims();
        let is_wider = factors.dtype() != x.dtype();
        with_element!(x.dtype(), "rotary_encoding", E => {
            let x = B::as_slice_mut::<E>(&mut x);
            if is_wider {
                rotate(x, B::as_slice::<<E as CpuElement>::Acc>(&factors), features, pairing, adjoint);
            } else {
                rotate(x, B::as_slice::<E>(&factors), features, pairing, adjoint);
            }
        });
        x
    }
}

/// Rotates rows of pairs by the `factors` of all positions, or back if `adjoint`.
fn rotate<E: CpuElement, F: CpuElement<Acc = E::Acc>>(
    x: &mut [E],
    factors: &[F],
    features: usize,
    pairing: Pairing,
    adjoint: bool,
) {
    let positions = factors.len() / (2 * features);
    let task = parallel::items_per_task(x.len() / features, features);
    let work = 2 * x.len();
    parallel::chunks_mut(x, task * features, work, |index, rows| {
        for (row, x) in (index * task..).zip(rows.chunks_exact_mut(features)) {
            let at = row % positions * 2 * features;
            let factors = factors[at..][..2 * features].as_chunks::<4>().0;
            match pairing {
                Pairing::Adjacent => {
                    for (pair, factors) in x.as_chunks_mut::<2>().0.iter_mut().zip(factors) {
                        *pair = rotated(*pair, factors.map(F::widen), adjoint);
                    }
                }
                Pairing::Halves => {
                    let (first, second) = x.split_at_mut(features / 2);
                    for ((a, b), factors) in first.iter_mut().zip(second).zip(factors) {
                        [*a, *b] = rotated([*a, *b], factors.map(F::widen), adjoint);
                    }
                }
            }
        }
    });
}

/// One pair, rotated by the cosine and the sine of its first feature, and those of its second.
#[inline]
fn rotated<E: CpuElement>(pair: [E; 2], [cos_a, sin_a, cos_b, sin_b]: [E::Acc; 4], adjoint: bool) -> [E; 2] {
    let [a, b] = pair.map(E::widen);
    let rotated = match adjoint {
        false => [a * cos_a - b * sin_a, b * cos_b + a * sin_b],
        true => [a * cos_a + b * sin_b, b * cos_b - a * sin_a],
    };
    rotated.map(E::narrow)
}
