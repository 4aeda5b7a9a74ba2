//! The kernels on a CPU: fused loops. Along the last axis a row stays in the cache; along another axis, some columns do.
//!
//! Besides the tensors, a thread holds 16 bytes (24 for f64) for every column that it works on, or 24 (32) if columns are long; of 1024 columns
//! at most. Where threads take parts of rows instead, there are 8 bytes for every column of every part, together a 64th of the tensor at most
//! and 1 MiB, and 12 bytes for every column. Along the last axis, threads take parts of rows that are few and long, with a few numbers per part.
mod columns;

use super::{Softmax, SoftmaxKernels};
use crate::backend::cpu::{
    CpuBackend, CpuElement,
    exp::COST,
    in_place::in_place_or_new,
    long_rows::{self, LongRows},
    parallel::{self, Job, vectorized},
    plan::{Division, Items},
    sums::{self, Sum, SumPairs},
    with_element,
};
use burn::backend::{TensorMetadata, tensor::FloatTensor};
use burn::tensor::{DType, Shape, bf16, f16};
use columns::finish_columns;
use num_traits::Zero;

impl<B: CpuBackend> SoftmaxKernels for B {
    fn softmax_along(x: FloatTensor<B>, f: Softmax, dim: usize) -> FloatTensor<B> {
        let x = B::contiguous(x);
        let axis = SoftmaxAxis::of(&x.shape(), dim);
        with_element!(x.dtype(), "softmax", E => {
            in_place_or_new::<B, E>(x, |x| forward_in_place(x, f, axis), |x| forward(x, f, axis))
        })
    }

    fn softmax_along_backward(
        y: FloatTensor<B>,
        f: Softmax,
        dim: usize,
        dy: FloatTensor<B>,
    ) -> FloatTensor<B> {
        let (y, mut dy) = (B::contiguous(y), B::contiguous(dy));
        let axis = SoftmaxAxis::of(&y.shape(), dim);
        with_element!(dy.dtype(), "softmax", E => {
            backward(B::as_slice::<E>(&y), f, axis, B::as_slice_mut(&mut dy));
        });
        dy
    }
}

/// The axis of a softmax. The elements of the tensor, in order, are `[repeats, length, inner]`: `length` elements at distances of `inner`
/// belong together.
#[derive(Clone, Copy, Debug)]
struct SoftmaxAxis {
    length: usize,
    inner: usize,
}

impl SoftmaxAxis {
    fn of(shape: &Shape, dim: usize) -> Self {
        Self { length: shape[dim], inner: shape[dim + 1..].iter().product() }
    }

    /// The elements of one repeat, which are contiguous.
    fn block(self) -> usize {
        self.length * self.inner
    }

    /// The loop over rows along the last axis, if there are `elements` in all.
    fn rows(self, elements: usize) -> Items {
        long_rows::items([elements / self.length.max(1), self.length], work(elements))
    }
}

fn work(elements: usize) -> parallel::Work {
    parallel::Work::of([COST, elements])
}

/// Blocks of at most this many elements are copied by the thread that works on them, while they are in the cache. Larger blocks are copied
/// first, this many elements at a time.
const COPIED: usize = 1 << 14;

/// `f(x)`
fn forward<E: CpuElement>(x: &[E], f: Softmax, axis: SoftmaxAxis) -> Vec<E> {
    if axis.inner == 1
        && let Division::Whole(rows) = axis.rows(x.len()).division(parallel::threads())
    {
        let size = rows * axis.length;
        return parallel::copied(x, size, work(x.len()), |_, y| forward_rows(y, f, axis.length));
    }
    if axis.inner > 1
        && let Some(y) = columns::forward_small(x, f, axis)
    {
        return y;
    }
    let mut y = parallel::copied(x, COPIED, x.len(), |_, _| {});
    forward_in_place(&mut y, f, axis);
    y
}

/// Replaces every `x` by `f(x)`.
fn forward_in_place<E: CpuElement>(x: &mut [E], f: Softmax, axis: SoftmaxAxis) {
    if axis.inner != 1 {
        return columns::forward_in_place(x, f, axis);
    }
    let (length, work) = (axis.length, work(x.len()));
    match axis.rows(x.len()).division(parallel::threads()) {
        Division::Whole(rows) => {
            parallel::chunks_mut(x, rows * length, work, |_, x| forward_rows(x, f, length));
        }
        Division::Cut(parts) => forward_long_rows(x, f, &LongRows::new(length, parts, work)),
    }
}

#[inline(always)]
fn forward_rows<E: CpuElement>(x: &mut [E], f: Softmax, length: usize) {
    for x in x.chunks_exact_mut(length) {
        let shift = shift(E::Acc::from_f64(Maximum { x, f }.run()), f);
        let finished = finish(Exponentials { x, shift, f }.run(), shift, f);
        Finish { x, shift, finished, f }.run();
    }
}

/// [`forward_rows`] of few rows, part by part.
fn forward_long_rows<E: CpuElement>(x: &mut [E], f: Softmax, rows: &LongRows) {
    let maxima = rows.map_mut(x, |_, _, x| vectorized(Maximum { x, f }));
    let maxima = rows.merged(&maxima, sums::larger);
    let shifts: Vec<_> = maxima.into_iter().map(|max| shift(E::Acc::from_f64(max), f)).collect();
    let sums = rows.map_mut(x, |row, _, x| vectorized(Exponentials { x, shift: shifts[row], f }));
    let finished = finish_columns(rows.merged(&sums, |sum, part| sum + part), &shifts, f);
    rows.map_mut(x, |row, _, x| {
        vectorized(Finish { x, shift: shifts[row], finished: finished[row], f });
    });
}

/// The number that is subtracted before the exponential.
#[inline(always)]
fn shift<A: CpuElement<Acc = A>>(max: A, f: Softmax) -> A {
    // In a quiet softmax, a row without a finite element gives zeros, not NaN.
    if f == Softmax::QuietSoftmax && max == A::neg_infinity() { <A as Zero>::zero() } else { max }
}

/// The factor of `exp(x - shift)`; for a log-softmax, the number that is subtracted from `x - shift`.
#[inline(always)]
fn finish<A: CpuElement<Acc = A>>(sum: f64, shift: A, f: Softmax) -> A {
    A::from_f64(match f {
        Softmax::LogSoftmax => sum.ln(),
        Softmax::QuietSoftmax => (sum + (-shift.into_f64()).fast_exp()).recip(),
        Softmax::Softmax | Softmax::Softmin => sum.recip(),
    })
}

/// The largest number of a row or a part of one. Before, the elements change their sign if `f` is a softmin.
struct Maximum<'a, E> {
    x: &'a mut [E],
    f: Softmax,
}

impl<E: CpuElement> Job for Maximum<'_, E> {
    type Result = f64;

    #[inline(always)]
    fn run(self) -> f64 {
        if self.f == Softmax::Softmin {
            self.x.iter_mut().for_each(|x| *x = -*x);
        }
        sums::max(self.x).into_f64()
    }
}

/// The sum of `exp(x - shift)`. Every `x` is replaced by its exponential, unless `f` is a log-softmax.
struct Exponentials<'a, E: CpuElement> {
    x: &'a mut [E],
    shift: E::Acc,
    f: Softmax,
}

impl<E: CpuElement> Job for Exponentials<'_, E> {
    type Result = f64;

    #[inline(always)]
    fn run(self) -> f64 {
        let Self { x, shift, f } = self;
        match f {
            Softmax::LogSoftmax => vectorized(Sum { values: x, f: |x: E| (x.widen() - shift).fast_exp() }),
            _ => sums::map_and_sum(x, |x| (x - shift).fast_exp()),
        }
    }
}

/// Completes what [`Exponentials`] began, given what [`finish`] returns.
struct Finish<'a, E: CpuElement> {
    x: &'a mut [E],
    shift: E::Acc,
    finished: E::Acc,
    f: Softmax,
}

impl<E: CpuElement> Job for Finish<'_, E> {
    type Result = ();

    #[inline(always)]
    fn run(self) {
        let Self { x, shift, finished, f } = self;
        if f == Softmax::LogSoftmax {
            for x in x {
                *x = E::narrow(x.widen() - shift - finished);
            }
        } else {
            for x in x {
                *x = E::narrow(x.widen() * finished);
            }
        }
    }
}

/// Replaces `dy` by the gradient of `x`, from `y = f(x)`.
fn backward<E: CpuElement>(y: &[E], f: Softmax, axis: SoftmaxAxis, dy: &mut [E]) {
    match f {
        Softmax::LogSoftmax => backward_by(y, axis, dy, |_, dy| dy, |y, dy, sum| dy - y.fast_exp() * sum),
        Softmax::Softmin => backward_by(y, axis, dy, |y, dy| y * dy, |y, dy, sum| y * (sum - dy)),
        Softmax::Softmax | Softmax::QuietSoftmax => {
            backward_by(y, axis, dy, |y, dy| y * dy, |y, dy, sum| y * (dy - sum));
        }
    }
}

/// Replaces `dy` by `dx(y, dy, sum(term(y, dy)))`, with the sum along the axis.
#[inline(always)]
fn backward_by<E: CpuElement>(
    y: &[E],
    axis: SoftmaxAxis,
    dy: &mut [E],
    term: impl Fn(E::Acc, E::Acc) -> E::Acc + Copy + Send + Sync,
    dx: impl Fn(E::Acc, E::Acc, E::Acc) -> E::Acc + Copy + Send + Sync,
) {
    if axis.inner != 1 {
        return columns::backward_by(y, axis, dy, term, dx);
    }
    let (length, work) = (axis.length, work(y.len()));
    let term = |y: E, dy: E| term(y.widen(), dy.widen());
    match axis.rows(y.len()).division(parallel::threads()) {
        Division::Whole(rows) => {
            let task = rows * length;
            parallel::chunks_mut(dy, task, work, |index, dy| {
                let rows = dy.chunks_exact_mut(length).zip(y[index * task..].chunks_exact(length));
                rows.for_each(|(dy, y)| {
                    let sum = E::Acc::from_f64(sums::sum_pairs(y, dy, term));
                    Gradient { y, dy, sum, dx }.run();
                });
            });
        }
        Division::Cut(parts) => {
            let rows = LongRows::new(length, parts, work);
            let part =
                |part: core::ops::Range<usize>| SumPairs { a: &y[part.clone()], b: &dy[part], f: term };
            let sums = rows.sums(y.len() / length, |_, elements| vectorized(part(elements)));
            rows.map_mut(dy, |row, elements, dy| {
                vectorized(Gradient { y: &y[elements], dy, sum: E::Acc::from_f64(sums[row]), dx });
            });
        }
    }
}

/// Replaces `dy` by `dx(y, dy, sum)`.
struct Gradient<'a, E: CpuElement, F> {
    y: &'a [E],
    dy: &'a mut [E],
    sum: E::Acc,
    dx: F,
}

impl<E: CpuElement, F: Fn(E::Acc, E::Acc, E::Acc) -> E::Acc> Job for Gradient<'_, E, F> {
    type Result = ();

    #[inline(always)]
    fn run(self) {
        let Self { y, dy, sum, dx } = self;
        for (dy, y) in dy.iter_mut().zip(y) {
            *dy = E::narrow(dx(y.widen(), dy.widen(), sum));
        }
    }
}

#[cfg(test)]
pub(crate) mod counting {
    pub(crate) use super::columns::counting::division;
    use super::*;

    /// The loop over rows along the last axis.
    pub(crate) fn items([rows, length]: [usize; 2]) -> Items {
        SoftmaxAxis { length, inner: 1 }.rows(rows * length)
    }
}
