//! The kernels on a CPU: fused loops. Along the last axis a row stays in the cache; along another axis, some columns do.
//!
//! Besides the tensors, a thread holds 16 bytes (24 for f64) for every column that it works on, 1024 columns at most. Where threads take
//! parts of rows instead, all parts together hold as much for 4096 columns. Along the last axis, threads take parts of rows that are few and
//! long, with a few numbers per part.
mod columns;

use super::{Softmax, SoftmaxKernels};
use crate::backend::cpu::{
    CpuBackend, CpuElement,
    exp::COST,
    in_place::in_place_or_new,
    long_rows::{self, LongRows},
    parallel::{self, Job, vectorized},
    plan::{Division as RowDivision, Items},
    sums::{self, Sum, SumPairs},
    with_element,
};
use burn::backend::{TensorMetadata, tensor::FloatTensor};
use burn::tensor::{DType, Shape, bf16, f16};
use columns::{
    Columns, column_gradients, column_sums, exp_and_sums, finish_columns, negated_and_maxima, scale,
};
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

/// Elements of a strip, which stay in a second-level cache.
const STRIP: usize = 1 << 16;

/// The most and the fewest columns of a strip. The most bound what a thread holds besides the tensors, 16 bytes per column. With fewer than
/// the fewest, memory would be read only a few cache lines at a time.
const WIDEST: usize = 1 << 10;
const NARROWEST: usize = 1 << 6;

/// The most columns of all parts together into which the rows of a block are divided: 64 KiB are held for them.
const COLUMNS_OF_PARTS: usize = 1 << 12;

impl SoftmaxAxis {
    fn of(shape: &Shape, dim: usize) -> Self {
        Self { length: shape[dim], inner: shape[dim + 1..].iter().product() }
    }

    /// The elements of one repeat, which are contiguous.
    fn block(self) -> usize {
        self.length * self.inner
    }

    /// The elements of one task, if there are `elements` in all.
    fn task(self, elements: usize) -> usize {
        self.block() * parallel::items_per_task(elements / self.block(), self.block())
    }

    /// The loop over rows along the last axis, if there are `elements` in all.
    fn rows(self, elements: usize) -> Items {
        long_rows::items([elements / self.length.max(1), self.length], work(elements))
    }

    /// How `elements` are divided if the axis is not the last.
    fn division(self, elements: usize) -> Division {
        let (blocks, threads) = (elements / self.block().max(1), parallel::threads());
        // The width of a strip, with this many strips per thread.
        let of_threads = |each: usize| self.inner.div_ceil((each * threads).div_ceil(blocks.max(1)));
        let width = match STRIP / self.length.max(1) {
            // Nothing stays in the cache until it is read again, so strips should be wide.
            few if few < NARROWEST => of_threads(1),
            cached => cached.min(of_threads(4)),
        };
        let width = width.next_multiple_of(NARROWEST).min(WIDEST).min(self.inner).max(1);
        let strips = blocks * self.inner.div_ceil(width);
        let parts = (COLUMNS_OF_PARTS / self.inner.max(1)).min(self.length);
        // Blocks are then worked on one after the other.
        if work(self.block()).is_worth_it() && strips < threads.min(parts) {
            let job = parallel::items_per_thread(self.length, work(self.block()));
            return Division::Rows(job.max(self.length.div_ceil(parts)));
        }
        Division::Columns(width)
    }
}

/// The parts that threads take: so many columns, or where there are only few columns, so many rows.
enum Division {
    Columns(usize),
    Rows(usize),
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
        && let RowDivision::Whole(rows) = axis.rows(x.len()).division(parallel::threads())
    {
        let size = rows * axis.length;
        return parallel::copied(x, size, work(x.len()), |_, y| forward_rows(y, f, axis.length));
    }
    if axis.inner > 1 && axis.block() <= COPIED {
        return parallel::copied(x, axis.task(x.len()), work(x.len()), |_, y| {
            forward_strips(y, f, axis, axis.inner.min(WIDEST), 0.into());
        });
    }
    let mut y = parallel::copied(x, COPIED, x.len(), |_, _| {});
    forward_in_place(&mut y, f, axis);
    y
}

/// Replaces every `x` by `f(x)`.
fn forward_in_place<E: CpuElement>(x: &mut [E], f: Softmax, axis: SoftmaxAxis) {
    let (len, work) = (x.len(), work(x.len()));
    if axis.inner == 1 {
        return match axis.rows(len).division(parallel::threads()) {
            RowDivision::Whole(rows) => {
                parallel::chunks_mut(x, rows * axis.length, work, |_, x| forward_rows(x, f, axis.length));
            }
            RowDivision::Cut(parts) => forward_long_rows(x, f, &LongRows::new(axis.length, parts, work)),
        };
    }
    match axis.division(len) {
        Division::Columns(width) => forward_strips(x, f, axis, width, work),
        Division::Rows(job) => {
            x.chunks_exact_mut(axis.block()).for_each(|block| forward_block(block, f, axis.inner, job));
        }
    }
}

/// [`forward_rows`] of every column, in strips of `width` columns.
fn forward_strips<E: CpuElement>(
    x: &mut [E],
    f: Softmax,
    axis: SoftmaxAxis,
    width: usize,
    work: parallel::Work,
) {
    parallel::strips_mut(x, [axis.length, axis.inner], width, work, |_, mut strip| {
        let maxima = negated_and_maxima(strip.rows(), width, f);
        let shifts: Vec<_> = maxima.into_iter().map(|max| shift(max, f)).collect();
        let sums = exp_and_sums(strip.rows(), &shifts, f);
        let finished = finish_columns(sums, &shifts, f);
        scale(strip.rows(), &finished, &shifts, f);
    });
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

/// [`forward_rows`] of every column of `[length, inner]`, in parts of `job` rows.
fn forward_block<E: CpuElement>(block: &mut [E], f: Softmax, inner: usize, job: usize) {
    let maxima = parallel::map_chunks_mut(block, job * inner, |_, part| {
        negated_and_maxima(part.chunks_exact_mut(inner), inner, f)
    });
    let merge = |mut merged: Vec<E::Acc>, other: Vec<E::Acc>| {
        merged.iter_mut().zip(other).for_each(|(max, other)| *max = sums::larger(*max, other));
        merged
    };
    let maxima = maxima.into_iter().reduce(merge).unwrap_or_default();
    let shifts: Vec<_> = maxima.into_iter().map(|max| shift(max, f)).collect();
    let sums = parallel::map_chunks_mut(block, job * inner, |_, part| {
        exp_and_sums(part.chunks_exact_mut(inner), &shifts, f)
    });
    let finished = finish_columns(Columns::<E::Acc>::merge(sums), &shifts, f);
    let work = block.len();
    parallel::chunks_mut(block, job * inner, work, |_, part| {
        scale(part.chunks_exact_mut(inner), &finished, &shifts, f);
    });
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
    let (length, inner, len, work) = (axis.length, axis.inner, y.len(), work(y.len()));
    if inner == 1 {
        let term = |y: E, dy: E| term(y.widen(), dy.widen());
        return match axis.rows(len).division(parallel::threads()) {
            RowDivision::Whole(rows) => {
                let task = rows * length;
                parallel::chunks_mut(dy, task, work, |index, dy| {
                    let rows = dy.chunks_exact_mut(length).zip(y[index * task..].chunks_exact(length));
                    rows.for_each(|(dy, y)| {
                        let sum = E::Acc::from_f64(sums::sum_pairs(y, dy, term));
                        Gradient { y, dy, sum, dx }.run();
                    });
                });
            }
            RowDivision::Cut(parts) => {
                let rows = LongRows::new(length, parts, work);
                let part =
                    |part: core::ops::Range<usize>| SumPairs { a: &y[part.clone()], b: &dy[part], f: term };
                let sums = rows.sums(len / length, |_, elements| vectorized(part(elements)));
                rows.map_mut(dy, |row, elements, dy| {
                    vectorized(Gradient { y: &y[elements], dy, sum: E::Acc::from_f64(sums[row]), dx });
                });
            }
        };
    }
    match axis.division(len) {
        Division::Columns(width) => {
            parallel::strips_mut(dy, [length, inner], width, work, |start, mut strip| {
                let of_y = || y[start..].chunks(inner);
                let sums = column_sums(of_y().zip(strip.rows()), width, term);
                let sums: Vec<_> = sums.into_iter().map(E::Acc::from_f64).collect();
                column_gradients(of_y().zip(strip.rows()), &sums, dx);
            })
        }
        Division::Rows(job) => {
            for (dy, y) in dy.chunks_exact_mut(axis.block()).zip(y.chunks_exact(axis.block())) {
                let rows = |index: usize| y[index * job * inner..].chunks_exact(inner);
                let sums = parallel::map_chunks_mut(dy, job * inner, |index, dy| {
                    column_sums(rows(index).zip(dy.chunks_exact_mut(inner)), inner, term)
                });
                let sums: Vec<_> = Columns::<E::Acc>::merge(sums).into_iter().map(E::Acc::from_f64).collect();
                let work = dy.len();
                parallel::chunks_mut(dy, job * inner, work, |index, dy| {
                    column_gradients(rows(index).zip(dy.chunks_exact_mut(inner)), &sums, dx);
                });
            }
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
    use super::*;

    /// The loop over rows along the last axis.
    pub(crate) fn items([rows, length]: [usize; 2]) -> Items {
        SoftmaxAxis { length, inner: 1 }.rows(rows * length)
    }
}
