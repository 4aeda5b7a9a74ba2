//! Softmaxes along an axis that is not the last: all columns of some rows at once.
use super::{Softmax, finish};
use crate::backend::cpu::{CpuElement, sums};
use num_traits::{Float, Zero};

/// The maxima of all columns. Before, the elements change their sign if `f` is a softmin.
#[inline(always)]
pub(super) fn negated_and_maxima<'a, E: CpuElement>(
    rows: impl Iterator<Item = &'a mut [E]>,
    width: usize,
    f: Softmax,
) -> Vec<E::Acc> {
    let mut maxima = vec![E::Acc::neg_infinity(); width];
    for row in rows {
        if f == Softmax::Softmin {
            row.iter_mut().for_each(|x| *x = -*x);
        }
        maxima.iter_mut().zip(row).for_each(|(max, x)| *max = sums::larger(*max, x.widen()));
    }
    maxima
}

/// The sums of `exp(x - shift)` over all columns. Every `x` is replaced by its exponential, unless `f` is a log-softmax.
#[inline(always)]
pub(super) fn exp_and_sums<'a, E: CpuElement>(
    rows: impl Iterator<Item = &'a mut [E]>,
    shifts: &[E::Acc],
    f: Softmax,
) -> Vec<f64> {
    let mut sums = Columns::<E::Acc>::new(shifts.len());
    for row in rows {
        for ((x, &shift), sum) in row.iter_mut().zip(shifts).zip(sums.next()) {
            let exp = (x.widen() - shift).fast_exp();
            *sum = *sum + exp;
            *x = if f == Softmax::LogSoftmax { *x } else { E::narrow(exp) };
        }
    }
    sums.finish()
}

/// [`finish`] of every column.
#[inline(always)]
pub(super) fn finish_columns<A: CpuElement<Acc = A>>(sums: Vec<f64>, shifts: &[A], f: Softmax) -> Vec<A> {
    sums.into_iter().zip(shifts).map(|(sum, &shift)| finish(sum, shift, f)).collect()
}

/// Completes what [`exp_and_sums`] began.
#[inline(always)]
pub(super) fn scale<'a, E: CpuElement>(
    rows: impl Iterator<Item = &'a mut [E]>,
    finished: &[E::Acc],
    shifts: &[E::Acc],
    f: Softmax,
) {
    for row in rows {
        let columns = row.iter_mut().zip(finished).zip(shifts);
        if f == Softmax::LogSoftmax {
            columns.for_each(|((x, &log), &shift)| *x = E::narrow(x.widen() - shift - log));
        } else {
            columns.for_each(|((x, &scale), _)| *x = E::narrow(x.widen() * scale));
        }
    }
}

/// One sum per column. The sums of a few rows are made in the type of the elements, which is faster, and added up in f64, because over many
/// rows that type would lose precision.
pub(super) struct Columns<A> {
    sums: Vec<f64>,
    few: Vec<A>,
    rows: usize,
}

impl<A: CpuElement<Acc = A>> Columns<A> {
    /// Rows that are added up in the type of the elements.
    const FEW: usize = 32;

    pub(super) fn new(inner: usize) -> Self {
        Self { sums: vec![0.0; inner], few: vec![<A as Zero>::zero(); inner], rows: 0 }
    }

    /// The sums to which the next row is to be added.
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

    pub(super) fn merge(parts: Vec<Vec<f64>>) -> Vec<f64> {
        let add = |mut total: Vec<f64>, part: Vec<f64>| {
            total.iter_mut().zip(part).for_each(|(total, part)| *total += part);
            total
        };
        parts.into_iter().reduce(add).unwrap_or_default()
    }
}

/// The sums over all columns of `term(y, dy)`.
#[inline(always)]
pub(super) fn column_sums<'a, E: CpuElement>(
    rows: impl Iterator<Item = (&'a [E], &'a mut [E])>,
    width: usize,
    term: impl Fn(E::Acc, E::Acc) -> E::Acc,
) -> Vec<f64> {
    let mut sums = Columns::<E::Acc>::new(width);
    for (y, dy) in rows {
        let columns = y.iter().zip(dy).zip(sums.next());
        columns.for_each(|((y, dy), sum)| *sum = *sum + term(y.widen(), dy.widen()));
    }
    sums.finish()
}

/// Replaces `dy` by `dx(y, dy, sum)`, with the sum of its column.
#[inline(always)]
pub(super) fn column_gradients<'a, E: CpuElement>(
    rows: impl Iterator<Item = (&'a [E], &'a mut [E])>,
    sums: &[E::Acc],
    dx: impl Fn(E::Acc, E::Acc, E::Acc) -> E::Acc,
) {
    for (y, dy) in rows {
        let columns = dy.iter_mut().zip(y).zip(sums);
        columns.for_each(|((dy, y), &sum)| *dy = E::narrow(dx(y.widen(), dy.widen(), sum)));
    }
}
