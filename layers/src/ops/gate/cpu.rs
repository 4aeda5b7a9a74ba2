//! Fused loops: one pass.
use super::GateKernels;
use crate::backend::cpu::{
    CpuBackend, CpuElement,
    parallel::{self, Job, vectorized},
    with_element,
};
use crate::ops::smooth::{
    Smooth,
    cpu::{COST, Curve, Multiplied, Multiply, TASK, Visitor},
};
use burn::backend::{TensorMetadata, tensor::FloatTensor};
use burn::tensor::{DType, bf16, f16};

impl<B: CpuBackend> GateKernels for B {
    fn gate(a: FloatTensor<B>, b: FloatTensor<B>, f: Smooth) -> FloatTensor<B> {
        let (mut a, b) = (B::contiguous(a), B::contiguous(b));
        with_element!(a.dtype(), "gate", E => {
            if a.can_mut() {
                f.with(Multiplied::<_, false> { y: B::as_slice_mut::<E>(&mut a), read: B::as_slice(&b) });
                a
            } else {
                B::from_vec(f.with(Gated { a: B::as_slice::<E>(&a), b: B::as_slice(&b) }), a.shape())
            }
        })
    }

    fn gate_backward(
        a: Option<FloatTensor<B>>,
        b: FloatTensor<B>,
        f: Smooth,
        dy: FloatTensor<B>,
        wants_a: bool,
    ) -> [Option<FloatTensor<B>>; 2] {
        let (b, mut dy) = (B::contiguous(b), B::contiguous(dy));
        with_element!(dy.dtype(), "gate", E => {
            let (a_grad, b_grad) = match a.map(B::contiguous) {
                Some(a) => {
                    let (a, b) = (B::as_slice::<E>(&a), B::as_slice::<E>(&b));
                    let da = f.with(GatedBackward { a, b, dy: B::as_slice_mut(&mut dy), reads_output: f.reads_output(), wants_a });
                    (da.map(|da| B::from_vec(da, dy.shape())), Some(dy))
                }
                None => {
                    let da = || f.with(Gated { a: B::as_slice::<E>(&dy), b: B::as_slice(&b) });
                    (wants_a.then(|| B::from_vec(da(), dy.shape())), None)
                }
            };
            [a_grad, b_grad]
        })
    }
}

/// `a * f(b)`
struct Gated<'a, E> {
    a: &'a [E],
    b: &'a [E],
}

impl<E: CpuElement> Visitor<E::Acc, Vec<E>> for Gated<'_, E> {
    fn visit(self, curve: impl Curve<E::Acc>) -> Vec<E> {
        let Self { a, b } = self;
        parallel::copied(a, TASK, parallel::Work::of([COST, a.len()]), |index, y| {
            vectorized(Multiply::<_, _, false> { y, read: &b[index * TASK..], curve });
        })
    }
}

/// Replaces `dy` by the gradient of `b`; returns that of `a`, if wanted. One pass.
struct GatedBackward<'a, E> {
    a: &'a [E],
    b: &'a [E],
    dy: &'a mut [E],
    reads_output: bool,
    wants_a: bool,
}

impl<E: CpuElement> Visitor<E::Acc, Option<Vec<E>>> for GatedBackward<'_, E> {
    fn visit(self, curve: impl Curve<E::Acc>) -> Option<Vec<E>> {
        let Self { a, b, dy, reads_output, wants_a } = self;
        let (len, work) = (dy.len(), parallel::Work::of([COST, dy.len()]));
        let part = |index: usize| [a, b].map(|input| &input[index * TASK..]);
        if !wants_a {
            parallel::chunks_mut(dy, TASK, work, |index, dy| {
                let [a, b] = part(index);
                vectorized(GateSlopes { dy, a, b, curve, reads_output });
            });
            return None;
        }
        Some(parallel::zip_filled((len, E::zero()), dy, [TASK; 2], work, |index, da, dy| {
            let [a, b] = part(index);
            da.copy_from_slice(dy);
            vectorized(Multiply::<_, _, false> { y: da, read: b, curve });
            vectorized(GateSlopes { dy, a, b, curve, reads_output });
        }))
    }
}

/// Multiplies `dy` by `a` and the slope at `b`.
struct GateSlopes<'a, E, C> {
    dy: &'a mut [E],
    a: &'a [E],
    b: &'a [E],
    curve: C,
    reads_output: bool,
}

impl<E: CpuElement, C: Curve<E::Acc>> Job for GateSlopes<'_, E, C> {
    type Result = ();

    #[inline(always)]
    fn run(self) {
        let Self { dy, a, b, curve, reads_output } = self;
        for ((dy, a), b) in dy.iter_mut().zip(a).zip(b) {
            let read = if reads_output { curve.value(b.widen()) } else { b.widen() };
            *dy = E::narrow(dy.widen() * a.widen() * curve.slope(read));
        }
    }
}
