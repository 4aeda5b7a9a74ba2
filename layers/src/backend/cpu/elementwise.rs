//! Loops over elements. Every result is computed in the type that sums are made in, and rounded once.
use super::{CpuElement, is_wide, parallel::Job};
use core::{hint::black_box, mem::MaybeUninit};

/// Writes `f(x)`, for as many elements as there are on both sides.
pub(crate) struct Map<'a, E, F> {
    pub(crate) x: &'a [E],
    pub(crate) y: &'a mut [MaybeUninit<E>],
    pub(crate) f: F,
}

impl<E: CpuElement, F: Fn(E::Acc) -> E::Acc> Job for Map<'_, E, F> {
    type Result = ();

    #[inline(always)]
    fn run(self) {
        let Self { x, y, f } = self;
        for (y, x) in y.iter_mut().zip(x) {
            *y = MaybeUninit::new(E::narrow(f(x.widen())));
        }
    }
}

/// Replaces every `x` by `f(x)`.
pub(crate) struct Update<'a, E, F> {
    pub(crate) x: &'a mut [E],
    pub(crate) f: F,
}

impl<E: CpuElement, F: Fn(E::Acc) -> E::Acc> Job for Update<'_, E, F> {
    type Result = ();

    #[inline(always)]
    fn run(self) {
        let Self { x, f } = self;
        for x in x {
            *x = E::narrow(f(x.widen()));
        }
    }
}

/// Replaces every `x` by `f(x, a)`, `a` being the element beside it.
pub(crate) struct UpdateWith<'a, E, F> {
    pub(crate) x: &'a mut [E],
    pub(crate) a: &'a [E],
    pub(crate) f: F,
}

impl<E: CpuElement, F: Fn(E::Acc, E::Acc) -> E::Acc> Job for UpdateWith<'_, E, F> {
    type Result = ();

    #[inline(always)]
    fn run(self) {
        let Self { x, a, f } = self;
        for (x, a) in x.iter_mut().zip(a) {
            *x = E::narrow(f(x.widen(), a.widen()));
        }
    }
}

/// -0.0, hidden from the compiler.
#[inline(always)]
pub(crate) fn nothing<E: CpuElement>() -> E {
    black_box(E::neg_zero())
}

/// `y + nothing`, which is `y`. Where a loop leaves some elements as they are, compilers store the others under a mask, which is several
/// times slower on some machines; the addition makes them store every element.
#[inline(always)]
pub(crate) fn stored<E: CpuElement>(y: E, nothing: E) -> E {
    if is_wide::<E>() { y + nothing } else { y }
}
