//! Sums and maxima of slices, in several lanes, so that they are vectorized.
use super::{CpuElement, parallel::Job};
use num_traits::{Float, Zero};

/// Partial sums per loop: enough to fill the vector registers and to keep the error of long sums low.
pub(crate) const LANES: usize = 16;

/// Zero in every lane.
pub(crate) fn zeros<A: CpuElement>() -> [A; LANES] {
    [<A as Zero>::zero(); LANES]
}

/// The sum over the lanes.
pub(crate) fn total<A: CpuElement>(lanes: [A; LANES]) -> f64 {
    lanes.into_iter().map(CpuElement::into_f64).sum()
}

/// The scalar product, in as many partial sums as fill vectors.
#[inline(always)]
pub(crate) fn dot(a: &[f32], b: &[f32]) -> f32 {
    const SUMS: usize = 32;
    let mut sums = [0.0; SUMS];
    let ((a, rest_of_a), (b, rest_of_b)) = (a.as_chunks::<SUMS>(), b.as_chunks::<SUMS>());
    for (a, b) in a.iter().zip(b) {
        for at in 0..SUMS {
            sums[at] += a[at] * b[at];
        }
    }
    let rest: f32 = rest_of_a.iter().zip(rest_of_b).map(|(a, b)| a * b).sum();
    sums.iter().sum::<f32>() + rest
}

/// The sum of `f` over all values.
#[inline(always)]
pub(crate) fn sum<E: CpuElement>(values: &[E], f: impl Fn(E) -> E::Acc) -> f64 {
    Sum { values, f }.run()
}

/// [`sum`] as a [`Job`], which is compiled for wide vectors.
pub(crate) struct Sum<'a, E, F> {
    pub(crate) values: &'a [E],
    pub(crate) f: F,
}

impl<E: CpuElement, F: Fn(E) -> E::Acc> Job for Sum<'_, E, F> {
    type Result = f64;

    #[inline(always)]
    fn run(self) -> f64 {
        let Self { values, f } = self;
        let mut sums = zeros::<E::Acc>();
        let (chunks, rest) = values.as_chunks::<LANES>();
        let of_rest = rest.iter().map(|&value| f(value).into_f64()).sum::<f64>();
        if chunks.is_empty() {
            return of_rest; // adding up the lanes would take longer than the rest
        }
        for chunk in chunks {
            for (sum, &value) in sums.iter_mut().zip(chunk) {
                *sum = *sum + f(value);
            }
        }
        total(sums) + of_rest
    }
}

/// `sum(dy)` and `sum(dy * (x - mean))`
pub(crate) struct Moments<'a, E: CpuElement> {
    pub(crate) x: &'a [E],
    pub(crate) dy: &'a [E],
    pub(crate) mean: E::Acc,
}

impl<E: CpuElement> Job for Moments<'_, E> {
    type Result = [f64; 2];

    #[inline(always)]
    fn run(self) -> [f64; 2] {
        let Self { x, dy, mean } = self;
        // One after the other, because a loop over both is not vectorized.
        [sum(dy, E::widen), sum_pairs(x, dy, |x, dy| dy.widen() * (x.widen() - mean))]
    }
}

/// The larger of two values; `a` if `b` is NaN.
#[inline(always)]
pub(crate) fn larger<A: CpuElement>(a: A, b: A) -> A {
    if b > a { b } else { a }
}

/// The largest value that is a number; minus infinity if there is none.
#[inline(always)]
pub(crate) fn max<E: CpuElement>(values: &[E]) -> E::Acc {
    let mut maxima = [E::Acc::neg_infinity(); LANES];
    let (chunks, rest) = values.as_chunks::<LANES>();
    for chunk in chunks {
        for (max, &value) in maxima.iter_mut().zip(chunk) {
            *max = larger(*max, value.widen());
        }
    }
    let none = E::Acc::neg_infinity();
    let max = if chunks.is_empty() { none } else { maxima.into_iter().fold(none, larger) };
    rest.iter().fold(max, |max, &value| larger(max, value.widen()))
}

/// `log(sum(exp(f(x))))` over all values, `f` increasing, in two parts: the largest `f(x)`, and `log(sum(exp(f(x) - largest)))`.
#[inline(always)]
pub(crate) fn log_sum_exp<E: CpuElement>(values: &[E], f: impl Fn(E::Acc) -> E::Acc) -> [E::Acc; 2] {
    let max = f(max(values));
    let sum = sum(values, |x| (f(x.widen()) - max).fast_exp());
    [max, <E::Acc as CpuElement>::from_f64(sum.ln())]
}

/// Replaces every value by `f` of it, and returns the sum of the results.
#[inline(always)]
pub(crate) fn map_and_sum<E: CpuElement>(values: &mut [E], f: impl Fn(E::Acc) -> E::Acc) -> f64 {
    let mut sums = zeros::<E::Acc>();
    let map = |value: &mut E| {
        let mapped = f(value.widen());
        *value = E::narrow(mapped);
        mapped
    };
    let (chunks, rest) = values.as_chunks_mut::<LANES>();
    for chunk in chunks {
        for (sum, value) in sums.iter_mut().zip(chunk) {
            *sum = *sum + map(value);
        }
    }
    total(sums) + rest.iter_mut().map(|value| map(value).into_f64()).sum::<f64>()
}

/// The sum of `f` over all pairs.
#[inline(always)]
pub(crate) fn sum_pairs<E: CpuElement, F: CpuElement>(a: &[E], b: &[F], f: impl Fn(E, F) -> E::Acc) -> f64 {
    let mut sums = zeros::<E::Acc>();
    let (a, a_rest) = a.as_chunks::<LANES>();
    let (b, b_rest) = b.as_chunks::<LANES>();
    let of_rest = a_rest.iter().zip(b_rest).map(|(&a, &b)| f(a, b).into_f64()).sum::<f64>();
    if a.is_empty() {
        return of_rest;
    }
    for (a, b) in a.iter().zip(b) {
        for lane in 0..LANES {
            sums[lane] = sums[lane] + f(a[lane], b[lane]);
        }
    }
    total(sums) + of_rest
}
