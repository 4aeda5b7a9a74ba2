//! Sums and maxima of slices, in several lanes, so that they are vectorized.
//!
//! Long slices are summed in [`Parts`], whose sums are added up in f64. Parts follow from the length only. So several threads can take
//! parts of a slice, and the sum is the same, whatever their number.
use super::{CpuElement, parallel::Job};
use core::ops::{Add, Range};
use num_traits::{Float, Zero};

/// Elements of the longest slice that is a single part.
pub(crate) const LONG: usize = 1 << 16;

/// Elements of a part of a longer slice, about.
const PART: usize = 1 << 13;

/// How a slice is divided into parts.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Parts {
    len: usize,
    /// Elements of a part; the last may have fewer.
    pub(crate) size: usize,
}

impl Parts {
    /// Of a slice of `len` elements.
    #[inline(always)]
    pub(crate) fn of(len: usize) -> Self {
        let size =
            if len <= LONG { len.max(1) } else { len.div_ceil(len.div_ceil(PART)).next_multiple_of(LANES) };
        Self { len, size }
    }

    pub(crate) fn count(self) -> usize {
        self.len.div_ceil(self.size).max(1)
    }

    /// The elements of part number `part`.
    pub(crate) fn range(self, part: usize) -> Range<usize> {
        part * self.size..((part + 1) * self.size).min(self.len)
    }
}

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
        if values.len() <= LONG {
            return sum_of_part(values, f);
        }
        let mut sum = -0.0; // 0.0 would change the sign of a sum of -0.0
        for part in values.chunks(Parts::of(values.len()).size) {
            sum += sum_of_part(part, &f);
        }
        sum
    }
}

/// The sum of values that may be nearly the same: in each part, of their distances from the first one, and of that one as often as there are
/// values. So their mean is exact where all are the same. (The mean of a sum in f32 of 25,088 values of 1000.1 is off by 0.015, whose square
/// is many times the epsilon of a normalization.)
pub(crate) struct SumOfNear<'a, E>(pub(crate) &'a [E]);

impl<E: CpuElement> Job for SumOfNear<'_, E> {
    type Result = f64;

    #[inline(always)]
    fn run(self) -> f64 {
        let mut sum = -0.0;
        for part in self.0.chunks(Parts::of(self.0.len()).size) {
            let first = part[0].widen();
            // Distances from infinities are no numbers, and those from very large numbers may be infinite.
            let first = if first.into_f64().abs() < 1e30 { first } else { <E::Acc as Zero>::zero() };
            sum += sum_of_part(part, |x| x.widen() - first) + first.into_f64() * part.len() as f64;
        }
        sum
    }
}

/// Adds numbers to sums, one to each.
#[inline(always)]
pub(crate) fn add_each<T: Copy + Add<Output = T>>(sums: &mut [T], numbers: &[T]) {
    for (sum, &number) in sums.iter_mut().zip(numbers) {
        *sum = *sum + number;
    }
}

/// Moves sums of a few elements, which were made in the type of these, to sums of many. Leaves zeros, where there
/// is a sum.
#[inline(always)]
pub(crate) fn move_each<A: CpuElement>(few: &mut [A], sums: &mut [f64]) {
    for (few, sum) in few.iter_mut().zip(sums) {
        *sum += few.into_f64();
        *few = A::zero();
    }
}

#[inline(always)]
fn sum_of_part<E: CpuElement>(values: &[E], f: impl Fn(E) -> E::Acc) -> f64 {
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

/// [`max`] as a [`Job`], as an f64.
pub(crate) struct Max<'a, E> {
    pub(crate) values: &'a [E],
}

impl<E: CpuElement> Job for Max<'_, E> {
    type Result = f64;

    #[inline(always)]
    fn run(self) -> f64 {
        max(self.values).into_f64()
    }
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
    let mut sum = -0.0;
    for part in values.chunks_mut(Parts::of(values.len()).size) {
        sum += map_and_sum_part(part, &f);
    }
    sum
}

#[inline(always)]
fn map_and_sum_part<E: CpuElement>(values: &mut [E], f: impl Fn(E::Acc) -> E::Acc) -> f64 {
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

/// The sum of `f` over all pairs of two slices of the same length.
#[inline(always)]
pub(crate) fn sum_pairs<E: CpuElement, F: CpuElement>(a: &[E], b: &[F], f: impl Fn(E, F) -> E::Acc) -> f64 {
    if a.len() <= LONG {
        return sum_of_pairs(a, b, f);
    }
    let mut sum = -0.0;
    let size = Parts::of(a.len()).size;
    for (a, b) in a.chunks(size).zip(b.chunks(size)) {
        sum += sum_of_pairs(a, b, &f);
    }
    sum
}

/// [`sum_pairs`] as a [`Job`].
pub(crate) struct SumPairs<'a, A, B, F> {
    pub(crate) a: &'a [A],
    pub(crate) b: &'a [B],
    pub(crate) f: F,
}

impl<A: CpuElement, B: CpuElement, F: Fn(A, B) -> A::Acc> Job for SumPairs<'_, A, B, F> {
    type Result = f64;

    #[inline(always)]
    fn run(self) -> f64 {
        sum_pairs(self.a, self.b, self.f)
    }
}

#[inline(always)]
fn sum_of_pairs<E: CpuElement, F: CpuElement>(a: &[E], b: &[F], f: impl Fn(E, F) -> E::Acc) -> f64 {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_the_whole() {
        for len in [0, 1, 17, PART, LONG, LONG + 1, LONG + PART, 3 * LONG + 5, 1 << 20, (1 << 20) + 1] {
            let parts = Parts::of(len);
            let ends: Vec<usize> = (0..parts.count()).map(|part| parts.range(part).end).collect();
            let starts = (0..parts.count()).map(|part| parts.range(part).start);
            assert!(starts.eq([0].into_iter().chain(ends[..ends.len() - 1].iter().copied())), "{len}");
            assert_eq!(ends.last(), Some(&len));
            assert!(parts.size <= if len <= LONG { LONG } else { PART + LANES }, "{len}: {parts:?}");
        }
    }

    #[test]
    fn sums_of_near_values_are_exact() {
        let sum = |values: &[f32]| SumOfNear(values).run();
        assert_eq!(sum(&[1000.1; 25_088]), f64::from(1000.1_f32) * 25_088.0);
        assert_eq!(sum(&[1000.1; 100_000]), f64::from(1000.1_f32) * 100_000.0);
        assert_eq!((sum(&[]), sum(&[f32::INFINITY, 1.0])), (0.0, f64::INFINITY));
        assert!(sum(&[f32::NAN, 1.0]).is_nan() && sum(&[1.0, f32::NAN]).is_nan());
        assert_eq!(sum(&[f32::MAX, f32::MIN]), 0.0);
    }

    /// All sums of a slice are those of its parts, to the last bit.
    #[test]
    fn sums_are_those_of_parts() {
        for len in [0, 5, 100, LONG, LONG + 3, 21 * PART + 77] {
            let values: Vec<f32> = (0..len).map(|at| ((at * 7919) % 1021) as f32 / 7.0 - 60.0).collect();
            let parts = Parts::of(len);
            let of_parts = |f: &dyn Fn(&[f32]) -> f64| {
                (0..parts.count())
                    .map(|part| f(&values[parts.range(part)]))
                    .fold(-0.0, |sum, part| sum + part)
            };
            assert_eq!(sum(&values, |x| x * x).to_bits(), of_parts(&|x| sum(x, |x| x * x)).to_bits());
            let product = |a: f32, b: f32| a * b;
            let of_pairs = sum_pairs(&values, &values, product);
            assert_eq!(of_pairs.to_bits(), of_parts(&|x| sum_pairs(x, x, product)).to_bits());
            let near = |values: &[f32]| SumOfNear(values).run();
            assert_eq!(near(&values).to_bits(), of_parts(&near).to_bits());
            let mapped = |values: &[f32]| map_and_sum(&mut values.to_vec(), |x| x / 3.0);
            assert_eq!(mapped(&values).to_bits(), of_parts(&mapped).to_bits());
            let exact: f64 = values.iter().map(|&x| f64::from(x * x)).sum();
            assert!((of_pairs - exact).abs() <= 1e-6 * exact, "{len}: {of_pairs}, {exact}");
        }
    }
}
