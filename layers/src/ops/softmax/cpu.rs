//! Fused loops: along the last axis a row stays in the cache, along another one all columns go at once.
use super::{Softmax, SoftmaxKernels};
use crate::backend::cpu::{
    CpuBackend, CpuElement,
    exp::COST,
    parallel::{self, vectorized},
    sums::{self, Sum},
    with_element,
};
use burn::backend::{TensorMetadata, tensor::FloatTensor};
use burn::tensor::{DType, Shape, bf16, f16};
use num_traits::{Float, Zero};

impl<B: CpuBackend> SoftmaxKernels for B {
    fn softmax_along(x: FloatTensor<B>, f: Softmax, dim: usize) -> FloatTensor<B> {
        let mut x = B::contiguous(x);
        let axis = Axis::of(&x.shape(), dim);
        with_element!(x.dtype(), "softmax", E => {
            if x.can_mut() {
                forward_in_place(B::as_slice_mut::<E>(&mut x), f, axis);
                x
            } else {
                B::from_vec(forward(B::as_slice::<E>(&x), f, axis), x.shape())
            }
        })
    }

    fn softmax_along_backward(
        y: FloatTensor<B>,
        f: Softmax,
        dim: usize,
        dy: FloatTensor<B>,
    ) -> FloatTensor<B> {
        let (y, mut dy) = (B::contiguous(y), B::contiguous(dy));
        let axis = Axis::of(&y.shape(), dim);
        with_element!(dy.dtype(), "softmax", E => {
            backward(B::as_slice::<E>(&y), f, axis, B::as_slice_mut(&mut dy));
        });
        dy
    }
}

/// The elements of a tensor, in order, are `[repeats, length, inner]`: `length` elements that are `inner` apart belong together.
#[derive(Clone, Copy, Debug)]
struct Axis {
    length: usize,
    inner: usize,
}

impl Axis {
    fn of(shape: &Shape, dim: usize) -> Self {
        Self { length: shape[dim], inner: shape[dim + 1..].iter().product() }
    }

    /// The elements that lie together.
    fn block(self) -> usize {
        self.length * self.inner
    }

    /// The elements of one task, of `elements` in all.
    fn task(self, elements: usize) -> usize {
        self.block() * parallel::items_per_task(elements / self.block(), self.block())
    }
}

/// `f(x)`
fn forward<E: CpuElement>(x: &[E], f: Softmax, axis: Axis) -> Vec<E> {
    parallel::copied(x, axis.task(x.len()), parallel::Work::of([COST, x.len()]), |_, y| {
        forward_blocks(y, f, axis)
    })
}

/// Replaces every `x` by `f(x)`.
fn forward_in_place<E: CpuElement>(x: &mut [E], f: Softmax, axis: Axis) {
    let work = parallel::Work::of([COST, x.len()]);
    parallel::chunks_mut(x, axis.task(x.len()), work, |_, x| forward_blocks(x, f, axis));
}

#[inline(always)]
fn forward_blocks<E: CpuElement>(x: &mut [E], f: Softmax, axis: Axis) {
    for block in x.chunks_exact_mut(axis.block()) {
        if f == Softmax::Softmin {
            block.iter_mut().for_each(|x| *x = -*x);
        }
        match axis.inner {
            1 => forward_row(block, f),
            inner => forward_columns(block, f, inner),
        }
    }
}

/// What is subtracted before the exponential.
#[inline(always)]
fn shift<A: CpuElement<Acc = A>>(max: A, f: Softmax) -> A {
    // A row without any finite element is one of zeros in a quiet softmax, not of NaN.
    if f == Softmax::QuietSoftmax && max == A::neg_infinity() { <A as Zero>::zero() } else { max }
}

/// What `exp(x - shift)` is multiplied by; for a log-softmax, what is subtracted from `x - shift`.
#[inline(always)]
fn finish<A: CpuElement<Acc = A>>(sum: f64, shift: A, f: Softmax) -> A {
    A::from_f64(match f {
        Softmax::LogSoftmax => sum.ln(),
        Softmax::QuietSoftmax => (sum + (-shift.into_f64()).fast_exp()).recip(),
        Softmax::Softmax | Softmax::Softmin => sum.recip(),
    })
}

#[inline(always)]
fn forward_row<E: CpuElement>(row: &mut [E], f: Softmax) {
    let shift = shift(sums::max(row), f);
    if f == Softmax::LogSoftmax {
        let log_sum =
            finish(vectorized(Sum { values: row, f: |x: E| (x.widen() - shift).fast_exp() }), shift, f);
        row.iter_mut().for_each(|x| *x = E::narrow(x.widen() - shift - log_sum));
    } else {
        let scale = finish(sums::map_and_sum(row, |x| (x - shift).fast_exp()), shift, f);
        row.iter_mut().for_each(|x| *x = E::narrow(x.widen() * scale));
    }
}

/// [`forward_row`] of every column of `[length, inner]`, row by row.
fn forward_columns<E: CpuElement>(block: &mut [E], f: Softmax, inner: usize) {
    let rows = block.len() / inner;
    let job = parallel::items_per_thread(rows, parallel::Work::of([COST, block.len()]));
    let maxima = parallel::map_ranges(rows, job, |range| {
        let mut maxima = vec![E::Acc::neg_infinity(); inner];
        for row in block[range.start * inner..range.end * inner].chunks_exact(inner) {
            maxima.iter_mut().zip(row).for_each(|(max, x)| *max = sums::larger(*max, x.widen()));
        }
        maxima
    });
    let merge = |mut merged: Vec<E::Acc>, other: Vec<E::Acc>| {
        merged.iter_mut().zip(other).for_each(|(max, other)| *max = sums::larger(*max, other));
        merged
    };
    let maxima = maxima.into_iter().reduce(merge).unwrap_or_default();
    let shifts: Vec<_> = maxima.into_iter().map(|max| shift(max, f)).collect();
    let sums = parallel::map_chunks_mut(block, job * inner, |_, block| {
        let mut sums = Columns::<E::Acc>::new(inner);
        for row in block.chunks_exact_mut(inner) {
            for ((x, &shift), sum) in row.iter_mut().zip(&shifts).zip(sums.next()) {
                let exp = (x.widen() - shift).fast_exp();
                *sum = *sum + exp;
                *x = if f == Softmax::LogSoftmax { *x } else { E::narrow(exp) };
            }
        }
        sums.finish()
    });
    let finish = |(sum, &shift)| finish(sum, shift, f);
    let finished: Vec<_> = Columns::<E::Acc>::merge(sums).into_iter().zip(&shifts).map(finish).collect();
    parallel::chunks_mut(block, job * inner, rows * inner, |_, block| {
        for row in block.chunks_exact_mut(inner) {
            let columns = row.iter_mut().zip(&finished).zip(&shifts);
            if f == Softmax::LogSoftmax {
                columns.for_each(|((x, &log), &shift)| *x = E::narrow(x.widen() - shift - log));
            } else {
                columns.for_each(|((x, &scale), _)| *x = E::narrow(x.widen() * scale));
            }
        }
    });
}

/// One sum per column. Adding in the type of the elements is faster, but loses precision over many rows.
struct Columns<A> {
    sums: Vec<f64>,
    few: Vec<A>,
    rows: usize,
}

impl<A: CpuElement<Acc = A>> Columns<A> {
    /// Rows that are added up in the type of the elements.
    const FEW: usize = 32;

    fn new(inner: usize) -> Self {
        Self { sums: vec![0.0; inner], few: vec![<A as Zero>::zero(); inner], rows: 0 }
    }

    /// Where the next row is added.
    #[inline(always)]
    fn next(&mut self) -> &mut [A] {
        if self.rows == Self::FEW {
            self.flush();
        }
        self.rows += 1;
        &mut self.few
    }

    fn flush(&mut self) {
        for (sum, few) in self.sums.iter_mut().zip(&mut self.few) {
            *sum += few.into_f64();
            *few = <A as Zero>::zero();
        }
        self.rows = 0;
    }

    fn finish(mut self) -> Vec<f64> {
        self.flush();
        self.sums
    }

    fn merge(parts: Vec<Vec<f64>>) -> Vec<f64> {
        let add = |mut total: Vec<f64>, part: Vec<f64>| {
            total.iter_mut().zip(part).for_each(|(total, part)| *total += part);
            total
        };
        parts.into_iter().reduce(add).unwrap_or_default()
    }
}

/// Replaces `dy` by the gradient of `x`, from `y = f(x)`.
fn backward<E: CpuElement>(y: &[E], f: Softmax, axis: Axis, dy: &mut [E]) {
    match f {
        Softmax::LogSoftmax => backward_by(y, axis, dy, |_, dy| dy, |y, dy, sum| dy - y.fast_exp() * sum),
        Softmax::Softmin => backward_by(y, axis, dy, |y, dy| y * dy, |y, dy, sum| y * (sum - dy)),
        Softmax::Softmax | Softmax::QuietSoftmax => {
            backward_by(y, axis, dy, |y, dy| y * dy, |y, dy, sum| y * (dy - sum));
        }
    }
}

/// Replaces `dy` by `dx(y, dy, sum(term(y, dy)))`, the sum over what belongs together.
#[inline(always)]
fn backward_by<E: CpuElement>(
    y: &[E],
    axis: Axis,
    dy: &mut [E],
    term: impl Fn(E::Acc, E::Acc) -> E::Acc + Copy + Send + Sync,
    dx: impl Fn(E::Acc, E::Acc, E::Acc) -> E::Acc + Copy + Send + Sync,
) {
    let (block, task, work) = (axis.block(), axis.task(y.len()), parallel::Work::of([COST, y.len()]));
    parallel::chunks_mut(dy, task, work, |index, dy| {
        for (dy, y) in dy.chunks_exact_mut(block).zip(y[index * task..].chunks_exact(block)) {
            match axis.inner {
                1 => backward_row(y, dy, term, dx),
                inner => backward_columns(y, dy, inner, term, dx),
            }
        }
    });
}

#[inline(always)]
fn backward_row<E: CpuElement>(
    y: &[E],
    dy: &mut [E],
    term: impl Fn(E::Acc, E::Acc) -> E::Acc,
    dx: impl Fn(E::Acc, E::Acc, E::Acc) -> E::Acc,
) {
    let sum = <E::Acc as CpuElement>::from_f64(sums::sum_pairs(y, dy, |y, dy| term(y.widen(), dy.widen())));
    dy.iter_mut().zip(y).for_each(|(dy, y)| *dy = E::narrow(dx(y.widen(), dy.widen(), sum)));
}

/// [`backward_row`] of every column of `[length, inner]`, row by row.
fn backward_columns<E: CpuElement>(
    y: &[E],
    dy: &mut [E],
    inner: usize,
    term: impl Fn(E::Acc, E::Acc) -> E::Acc + Send + Sync,
    dx: impl Fn(E::Acc, E::Acc, E::Acc) -> E::Acc + Send + Sync,
) {
    let rows = y.len() / inner;
    let job = parallel::items_per_thread(rows, parallel::Work::of([COST, y.len()]));
    let sums = parallel::map_ranges(rows, job, |range| {
        let (mut sums, range) = (Columns::<E::Acc>::new(inner), range.start * inner..range.end * inner);
        for (y, dy) in y[range.clone()].chunks_exact(inner).zip(dy[range].chunks_exact(inner)) {
            let columns = y.iter().zip(dy).zip(sums.next());
            columns.for_each(|((y, dy), sum)| *sum = *sum + term(y.widen(), dy.widen()));
        }
        sums.finish()
    });
    let sums: Vec<_> = Columns::<E::Acc>::merge(sums).into_iter().map(E::Acc::from_f64).collect();
    parallel::chunks_mut(dy, job * inner, parallel::Work::of([COST, y.len()]), |index, dy| {
        let rows = dy.chunks_exact_mut(inner).zip(y[index * job * inner..].chunks_exact(inner));
        for (dy, y) in rows {
            let columns = dy.iter_mut().zip(y).zip(&sums);
            columns.for_each(|((dy, y), &sum)| *dy = E::narrow(dx(y.widen(), dy.widen(), sum)));
        }
    });
}
