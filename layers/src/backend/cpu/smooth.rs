//! Smooth activations, alone and as gates.
use super::{CpuElement, parallel};
use crate::backend::{Smooth, smooth::Visitor};

/// Elements per task.
const TASK: usize = 1 << 12;
/// How much longer an exponential takes than reading an element.
const COST: usize = 16;

/// `f(x)`
pub(crate) fn forward<E: CpuElement>(x: &[E], f: Smooth) -> Vec<E> {
    f.with(Forward(x))
}

/// Replaces every `x` by `f(x)`.
pub(crate) fn forward_in_place<E: CpuElement>(x: &mut [E], f: Smooth) {
    f.with(ForwardInPlace(x));
}

/// Replaces `dy` by `dy * f'`, of what `f` reads.
pub(crate) fn backward<E: CpuElement>(read: &[E], f: Smooth, dy: &mut [E]) {
    f.with(Backward { read, dy });
}

/// `a * f(b)`
pub(crate) fn gate<E: CpuElement>(a: &[E], b: &[E], f: Smooth) -> Vec<E> {
    f.with(Gate { a, b })
}

/// Replaces `dy` by the gradient of `b`; that of `a`, if it is wanted. One pass.
pub(crate) fn gate_backward<E: CpuElement>(
    a: &[E],
    b: &[E],
    f: Smooth,
    dy: &mut [E],
    wants_a: bool,
) -> Option<Vec<E>> {
    f.with(GateBackward { a, b, dy, reads_output: f.reads_output(), wants_a })
}

struct Forward<'a, E>(&'a [E]);

impl<E: CpuElement> Visitor<E::Acc, Vec<E>> for Forward<'_, E> {
    fn visit(
        self,
        value: impl Fn(E::Acc) -> E::Acc + Copy + Send + Sync,
        _: impl Fn(E::Acc) -> E::Acc + Copy + Send + Sync,
    ) -> Vec<E> {
        let x = self.0;
        parallel::filled(x.len(), E::zero(), TASK, COST * x.len(), |index, y| {
            let pairs = y.iter_mut().zip(&x[index * TASK..]);
            pairs.for_each(|(y, x)| *y = E::narrow(value(x.widen())));
        })
    }
}

struct ForwardInPlace<'a, E>(&'a mut [E]);

impl<E: CpuElement> Visitor<E::Acc, ()> for ForwardInPlace<'_, E> {
    fn visit(
        self,
        value: impl Fn(E::Acc) -> E::Acc + Copy + Send + Sync,
        _: impl Fn(E::Acc) -> E::Acc + Copy + Send + Sync,
    ) {
        let work = COST * self.0.len();
        parallel::chunks_mut(self.0, TASK, work, |_, x| {
            x.iter_mut().for_each(|x| *x = E::narrow(value(x.widen())));
        });
    }
}

struct Backward<'a, E> {
    read: &'a [E],
    dy: &'a mut [E],
}

impl<E: CpuElement> Visitor<E::Acc, ()> for Backward<'_, E> {
    fn visit(
        self,
        _: impl Fn(E::Acc) -> E::Acc + Copy + Send + Sync,
        slope: impl Fn(E::Acc) -> E::Acc + Copy + Send + Sync,
    ) {
        let Self { read, dy } = self;
        let work = COST * dy.len();
        parallel::chunks_mut(dy, TASK, work, |index, dy| {
            let pairs = dy.iter_mut().zip(&read[index * TASK..]);
            pairs.for_each(|(dy, read)| *dy = E::narrow(dy.widen() * slope(read.widen())));
        });
    }
}

struct Gate<'a, E> {
    a: &'a [E],
    b: &'a [E],
}

impl<E: CpuElement> Visitor<E::Acc, Vec<E>> for Gate<'_, E> {
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

struct GateBackward<'a, E> {
    a: &'a [E],
    b: &'a [E],
    dy: &'a mut [E],
    reads_output: bool,
    wants_a: bool,
}

impl<E: CpuElement> Visitor<E::Acc, Option<Vec<E>>> for GateBackward<'_, E> {
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
