//! The gradient on a CPU, in one loop.
use super::{ApproxKernels, Pieces};
use crate::backend::cpu::{BitMask, CpuBackend, CpuElement, bit_mask::BITS, with_element};
use burn::backend::{TensorMetadata, tensor::FloatTensor};
use burn::tensor::{DType, bf16, f16};
use num_traits::{One, Zero};

impl<B: CpuBackend> ApproxKernels for B {
    fn approx_backward(dy: FloatTensor<B>, pieces: Pieces<BitMask>) -> FloatTensor<B> {
        let mut dy = B::contiguous(dy);
        with_element!(dy.dtype(), "approx", E => scale(B::as_slice_mut::<E>(&mut dy), &pieces));
        dy
    }
}

/// Multiplies every value by the slope of its piece.
fn scale<E: CpuElement>(values: &mut [E], Pieces { positive, inner, slope }: &Pieces<BitMask>) {
    let slope = <E::Acc as CpuElement>::from_f64(*slope);
    let slopes = [[E::Acc::zero(), slope], [E::Acc::one(), E::Acc::one() - slope]];
    positive.chunks(values, values.len(), |first, positive, values| {
        let masks = positive.iter().zip(&inner.words()[first / BITS..]);
        for ((&positive, &inner), values) in masks.zip(values.chunks_mut(BITS)) {
            for (bit, value) in values.iter_mut().enumerate() {
                let piece = |word: u64| (word >> bit & 1) as usize;
                let scaled = E::narrow(value.widen() * slopes[piece(positive)][piece(inner)]);
                // 0 must be 0 for an infinite value, too.
                *value = if (positive | inner) >> bit & 1 == 0 { E::zero() } else { scaled };
            }
        }
    });
}
