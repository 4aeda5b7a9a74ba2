//! Fused loops: one pass.
use super::GateKernels;
use crate::backend::cpu::{CpuBackend, CpuElement, parallel, with_element, zip_in_place};
use crate::ops::smooth::{
    Smooth,
    cpu::{COST, TASK, Visitor},
};
use burn::backend::{TensorMetadata, tensor::FloatTensor};
use burn::tensor::{DType, bf16, f16};

impl<B: CpuBackend> GateKernels for B {
    fn gate(a: FloatTensor<B>, b: FloatTensor<B>, f: Smooth) -> FloatTensor<B> {
        let (mut a, b) = (B::contiguous(a), B::contiguous(b));
        with_element!(a.dtype(), "gate", E => {
            if a.can_mut() {
                f.with(GatedInPlace { a: B::as_slice_mut::<E>(&mut a), b: B::as_slice(&b) });
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
    fn visit(
        self,
        value: impl Fn(E::Acc) -> E::Acc + Copy + Send + Sync,
        _: impl Fn(E::Acc) -> E::Acc + Copy + Send + Sync,
    ) -> Vec<E> {
        let Self { a, b } = self;
        parallel::filled(a.len(), E::zero(), TASK, COST * a.len(), |index, y| {
            let start = index * TASK;
            let inputs = a[start..].iter().zip(&b[start..]);
            y.iter_mut().zip(inputs).for_each(|(y, (a, b))| *y = E::narrow(a.widen() * value(b.widen())));
        })
    }
}

/// Replaces `a` by `a * f(b)`.
struct GatedInPlace<'a, E> {
    a: &'a mut [E],
    b: &'a [E],
}

impl<E: CpuElement> Visitor<E::Acc, ()> for GatedInPlace<'_, E> {
    fn visit(
        self,
        value: impl Fn(E::Acc) -> E::Acc + Copy + Send + Sync,
        _: impl Fn(E::Acc) -> E::Acc + Copy + Send + Sync,
    ) {
        let Self { a, b } = self;
        let work = COST * a.len();
        zip_in_place(a, b, TASK, work, |a, b| a * value(b));
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
    fn visit(
        self,
        value: impl Fn(E::Acc) -> E::Acc + Copy + Send + Sync,
        slope: impl Fn(E::Acc) -> E::Acc + Copy + Send + Sync,
    ) -> Option<Vec<E>> {
        let Self { a, b, dy, reads_output, wants_a } = self;
        let work = COST * dy.len();
        let slope = move |b: E::Acc| slope(if reads_output { value(b) } else { b });
        let of_b = move |dy: E, a: E, b: E| E::narrow(dy.widen() * a.widen() * slope(b.widen()));
        if !wants_a {
            parallel::chunks_mut(dy, TASK, work, |index, dy| {
                let inputs = a[index * TASK..].iter().zip(&b[index * TASK..]);
                dy.iter_mut().zip(inputs).for_each(|(dy, (&a, &b))| *dy = of_b(*dy, a, b));
            });
            return None;
        }
        let len = dy.len();
        Some(parallel::zip_filled((len, E::zero()), dy, [TASK; 2], work, |index, da, dy| {
            let inputs = a[index * TASK..].iter().zip(&b[index * TASK..]);
            for ((da, dy), (&a, &b)) in da.iter_mut().zip(dy).zip(inputs) {
                *da = E::narrow(dy.widen() * value(b.widen()));
                *dy = of_b(*dy, a, b);
            }
        }))
    }
}
