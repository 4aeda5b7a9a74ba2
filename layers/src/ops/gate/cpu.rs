//! The kernels on a CPU: fused loops of one pass.
use super::GateKernels;
use crate::backend::cpu::{
    CpuBackend, CpuElement,
    in_place::in_place_or_copied,
    parallel::{self, Job, vectorized},
    with_element,
};
use crate::ops::smooth::{
    Smooth,
    cpu::{COST, Curve, Multiply, TASK, Visitor},
};
use burn::backend::{TensorMetadata, tensor::FloatTensor};
use burn::tensor::{DType, bf16, f16};

impl<B: CpuBackend> GateKernels for B {
    fn gate(a: FloatTensor<B>, b: FloatTensor<B>, f: Smooth) -> FloatTensor<B> {
        let (a, b) = (B::contiguous(a), B::contiguous(b));
        with_element!(a.dtype(), "gate", E => f.with::<<E as CpuElement>::Acc, _>(Gated::<B, E> { a, b: B::as_slice(&b) }))
    }

    fn gate_backward(
        a: Option<FloatTensor<B>>,
        b: FloatTensor<B>,
        f: Smooth,
        dy: FloatTensor<B>,
        wants_a: bool,
    ) -> [Option<FloatTensor<B>>; 2] {
        let Some(a) = a.map(B::contiguous) else {
            return [wants_a.then(|| B::gate(dy, b, f)), None];
        };
        let (b, mut dy) = (B::contiguous(b), B::contiguous(dy));
        with_element!(dy.dtype(), "gate", E => {
            let (a, b) = (B::as_slice::<E>(&a), B::as_slice::<E>(&b));
            let reads_output = f.reads_output();
            let da = f.with(GatedBackward { a, b, dy: B::as_slice_mut(&mut dy), reads_output, wants_a });
            [da.map(|da| B::from_vec(da, dy.shape())), Some(dy)]
        })
    }
}

/// `a * f(b)`
struct Gated<'a, B: CpuBackend, E> {
    a: FloatTensor<B>,
    b: &'a [E],
}

impl<B: CpuBackend, E: CpuElement> Visitor<E::Acc, FloatTensor<B>> for Gated<'_, B, E> {
    fn visit(self, curve: impl Curve<E::Acc>) -> FloatTensor<B> {
        let Self { a, b } = self;
        in_place_or_copied::<B, E>(a, TASK, parallel::Work::of([COST, b.len()]), |index, y| {
            vectorized(Multiply::<_, _, false> { y, read: &b[index * TASK..], curve });
        })
    }
}

/// Replaces `dy` by the gradient of `b`, and returns that of `a`, if wanted, in one pass.
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
