//! One loop over the rows for the losses, and one for the gradient.
use super::{Classes, CrossEntropyKernels, Labels, RowLosses};
use crate::backend::cpu::{
    CpuBackend, CpuElement,
    exp::COST,
    parallel::{self, Job, Work, vectorized},
    sums::{self, Sum},
    with_element,
};
use burn::backend::{
    Backend, TensorMetadata,
    tensor::{FloatTensor, IntTensor},
};
use burn::tensor::{DType, Shape, bf16, f16};
use core::ops::Range;
use num_traits::{One, Zero};

impl<B: CpuBackend> CrossEntropyKernels for B {
    fn row_losses(x: FloatTensor<B>, labels: &Labels<B>) -> RowLosses<B> {
        let (x, labels) = (B::contiguous(x), InMemory::of(labels));
        let [rows, classes] = x.shape().dims();
        with_element!(x.dtype(), "cross_entropy", E => {
            let (losses, logs) = losses(B::as_slice::<E>(&x), &labels.of_classes(classes));
            let [losses, log_sum_exp] = [(losses, 1), (logs.into_flattened(), 2)]
                .map(|(numbers, of_row)| B::from_vec(numbers, Shape::new([rows, of_row])));
            RowLosses { losses, log_sum_exp }
        })
    }

    fn row_gradients(
        x: FloatTensor<B>,
        labels: &Labels<B>,
        log_sum_exp: FloatTensor<B>,
        dloss: FloatTensor<B>,
        classes: Classes,
    ) -> FloatTensor<B> {
        let (mut x, labels) = (B::contiguous(x), InMemory::of(labels));
        let [log_sum_exp, dloss] = [log_sum_exp, dloss].map(B::contiguous);
        debug_assert!(
            log_sum_exp.shape()[1] == 2 || classes.range == (0..classes.of),
            "the largest of all classes"
        );
        with_element!(x.dtype(), "cross_entropy", E => {
            let labels = labels.of_classes::<E>(classes.of);
            let numbers = B::as_slice(&log_sum_exp);
            let logs = match log_sum_exp.shape()[1] {
                1 => Logs::Second(numbers),
                _ => Logs::Both(parts(numbers)),
            };
            let (dloss, sum_of_weights) = (B::as_slice(&dloss), labels.sum_of_weights());
            let gradient = Gradient { labels, sum_of_weights, logs, dloss, columns: classes.range };
            if x.can_mut() {
                gradient.in_place(B::as_slice_mut(&mut x));
                x
            } else {
                B::from_vec(gradient.of(B::as_slice(&x)), x.shape())
            }
        })
    }
}

/// [`RowLosses::log_sum_exp`] of a row.
pub(crate) type Parts<A> = [A; 2];

/// Those of every row.
pub(crate) fn parts<A>(log_sum_exp: &[A]) -> &[Parts<A>] {
    log_sum_exp.as_chunks().0
}

/// Labels whose elements are slices.
struct InMemory<B: Backend> {
    targets: IntTensor<B>,
    weights: Option<FloatTensor<B>>,
    smoothing: Option<f32>,
}

impl<B: CpuBackend> InMemory<B> {
    fn of(Labels { targets, weights, smoothing }: &Labels<B>) -> Self {
        let weights = weights.clone().map(B::contiguous);
        Self { targets: B::contiguous_ints(targets.clone()), weights, smoothing: *smoothing }
    }

    /// As logits of `E` are compared with them.
    fn of_classes<E: CpuElement>(&self, classes: usize) -> OfClasses<'_, E> {
        let number = <E::Acc as CpuElement>::from_f64;
        OfClasses {
            classes,
            targets: B::as_ints(&self.targets),
            weights: self.weights.as_ref().map(B::as_slice),
            rest: self.smoothing.map(|smoothing| number(f64::from(1.0 - smoothing))),
            spread: self.smoothing.map(|smoothing| number(f64::from(smoothing / classes as f32))),
        }
    }
}

/// [`Labels`] of so many classes, in the numbers that are computed with.
struct OfClasses<'a, E: CpuElement> {
    classes: usize,
    /// One per row.
    targets: &'a [i64],
    /// One per class, or all one.
    weights: Option<&'a [E]>,
    /// The share of the target, if it is not 1.
    rest: Option<E::Acc>,
    /// What every class has besides, if it is not 0.
    spread: Option<E::Acc>,
}

impl<E: CpuElement> OfClasses<'_, E> {
    /// The class of a row; panics as Burn does if there is none of this number.
    #[inline(always)]
    fn target(&self, row: usize) -> usize {
        let (target, classes) = (self.targets[row], self.classes);
        match usize::try_from(target) {
            Ok(class) if class < classes => class,
            _ => panic!("index {target} out of bounds for dimension of size {classes}"),
        }
    }

    /// `(1 - smoothing) w` of a target, times `value`.
    #[inline(always)]
    fn times_target(&self, value: E::Acc, target: usize) -> E::Acc {
        let value = self.rest.map_or(value, |rest| value * rest);
        self.weights.map_or(value, |weights| value * weights[target].widen())
    }

    /// Of all classes; 0 if it is not read, since no class but the target counts.
    fn sum_of_weights(&self) -> E::Acc {
        <E::Acc as CpuElement>::from_f64(match (self.spread, self.weights) {
            (None, _) => 0.0,
            (Some(_), None) => self.classes as f64,
            (Some(_), Some(weights)) => vectorized(Sum { values: weights, f: E::widen }),
        })
    }
}

/// Of rows of fewer classes the exponentials of several are taken together: a loop over one would be too short for vectors.
const SHORT: usize = 64;
/// Elements of those rows.
const TOGETHER: usize = 512;

/// The losses of all rows, and their logarithms of sums.
fn losses<E: CpuElement>(x: &[E], labels: &OfClasses<'_, E>) -> (Vec<E::Acc>, Vec<Parts<E::Acc>>) {
    let (rows, classes) = (labels.targets.len(), labels.classes);
    let (task, zero) = (parallel::items_per_task(rows, classes), <E::Acc as Zero>::zero());
    let mut logs = vec![[zero; 2]; rows];
    let work = Work::of([COST, x.len()]);
    let losses = parallel::zip_filled((rows, zero), &mut logs, [task, task], work, |index, losses, logs| {
        let first = index * task;
        let x = &x[first * classes..][..logs.len() * classes];
        vectorized(Losses { x, labels, first, losses, logs });
    });
    (losses, logs)
}

/// Those of some rows.
struct Losses<'a, E: CpuElement> {
    x: &'a [E],
    labels: &'a OfClasses<'a, E>,
    first: usize,
    losses: &'a mut [E::Acc],
    logs: &'a mut [Parts<E::Acc>],
}

impl<E: CpuElement> Job for Losses<'_, E> {
    type Result = ();

    #[inline(always)]
    fn run(self) {
        let Self { x, labels, first, losses, logs } = self;
        let classes = labels.classes;
        if classes < SHORT {
            logs_of_short_rows(x, classes, logs);
        } else {
            x.chunks_exact(classes).zip(logs.iter_mut()).for_each(|(row, log)| *log = log_sum_exp(row));
        }
        for (((at, row), loss), &[max, log]) in (first..).zip(x.chunks_exact(classes)).zip(losses).zip(&*logs)
        {
            let target = labels.target(at);
            *loss = labels.times_target(log - (row[target].widen() - max), target);
            if let Some(spread) = labels.spread {
                let log_probability = |x: E| x.widen() - max - log;
                let sum = match labels.weights {
                    Some(weights) => sums::sum_pairs(row, weights, |x, w| w.widen() * log_probability(x)),
                    None => sums::sum(row, log_probability),
                };
                *loss = *loss - spread * <E::Acc as CpuElement>::from_f64(sum);
            }
        }
    }
}

/// Of one row.
#[inline(always)]
fn log_sum_exp<E: CpuElement>(row: &[E]) -> Parts<E::Acc> {
    let max = sums::max(row);
    let sum = Sum { values: row, f: |x: E| (x.widen() - max).fast_exp() }.run();
    [max, <E::Acc as CpuElement>::from_f64(sum.ln())]
}

/// Of as many rows of `classes` elements as `logs` has.
#[inline(always)]
fn logs_of_short_rows<E: CpuElement>(x: &[E], classes: usize, logs: &mut [Parts<E::Acc>]) {
    let rows = TOGETHER / classes;
    for (x, logs) in x.chunks(rows * classes).zip(logs.chunks_mut(rows)) {
        logs.iter_mut().zip(x.chunks_exact(classes)).for_each(|(log, row)| log[0] = sums::max(row));
        let exponentials = exponentials(x, classes, logs.iter().map(|&[max, _]| max));
        for (log, row) in logs.iter_mut().zip(exponentials.chunks_exact(classes)) {
            let sum = row.iter().map(|&exponential| exponential.into_f64()).sum::<f64>();
            log[1] = <E::Acc as CpuElement>::from_f64(sum.ln());
        }
    }
}

/// `exp(x - max)` of short rows, of `TOGETHER` elements at most, with the largest of every row.
#[inline(always)]
fn exponentials<E: CpuElement>(
    x: &[E],
    classes: usize,
    maxima: impl Iterator<Item = E::Acc>,
) -> [E::Acc; TOGETHER] {
    let mut values = [<E::Acc as Zero>::zero(); TOGETHER];
    let rows = x.chunks_exact(classes).zip(values.chunks_exact_mut(classes));
    for ((x, values), max) in rows.zip(maxima) {
        values.iter_mut().zip(x).for_each(|(value, x)| *value = x.widen() - max);
    }
    values[..x.len()].iter_mut().for_each(|value| *value = value.fast_exp());
    values
}

/// `log(sum(exp(x)))` of every row.
enum Logs<'a, A> {
    /// Both parts.
    Both(&'a [Parts<A>]),
    /// Without the largest of the row, which has all classes.
    Second(&'a [A]),
}

/// What logits become in the backward pass: `dloss (p sum(q w) - q w)`.
struct Gradient<'a, E: CpuElement> {
    labels: OfClasses<'a, E>,
    sum_of_weights: E::Acc,
    logs: Logs<'a, E::Acc>,
    /// One per row.
    dloss: &'a [E::Acc],
    /// The classes that the logits are of.
    columns: Range<usize>,
}

impl<E: CpuElement> Gradient<'_, E> {
    /// The gradient of `x`.
    fn of(&self, x: &[E]) -> Vec<E> {
        let (task, work) = self.task(x);
        parallel::copied(x, task * self.columns.len(), work, |index, x| self.replace(index * task, x))
    }

    /// Replaces `x` by its gradient.
    fn in_place(&self, x: &mut [E]) {
        let (task, work) = self.task(x);
        parallel::chunks_mut(x, task * self.columns.len(), work, |index, x| self.replace(index * task, x));
    }

    /// The rows of a task.
    fn task(&self, x: &[E]) -> (usize, Work) {
        let rows = parallel::items_per_task(self.dloss.len(), self.columns.len());
        (rows, Work::of([COST, x.len()]))
    }

    /// Replaces whole rows of `x`, from row `first` on.
    fn replace(&self, first: usize, x: &mut [E]) {
        vectorized(Replaced { x, first, gradient: self });
    }

    /// The parts of `log(sum(exp(x)))` of a row.
    #[inline(always)]
    fn parts(&self, at: usize, max: impl FnOnce() -> E::Acc) -> Parts<E::Acc> {
        match self.logs {
            Logs::Both(logs) => logs[at],
            Logs::Second(logs) => [max(), logs[at]],
        }
    }

    /// Replaces a row, given `exp(x - max)` of its elements and `log(sum(exp(x - max)))`. A row with a `dloss` of 0, such as padding,
    /// gets 0, whatever its logits are.
    #[inline(always)]
    fn row(&self, at: usize, log: E::Acc, x: &mut [E], exp: impl Fn(usize, E) -> E::Acc) {
        let Self { labels, sum_of_weights, dloss, columns, .. } = self;
        let (target, dloss) = (labels.target(at), dloss[at]);
        let target_term = labels.times_target(dloss, target);
        // Of every class, times its weight.
        let spread = labels.spread.map_or(E::Acc::zero(), |spread| dloss * spread);
        let weights =
            labels.weights.filter(|_| labels.spread.is_some()).map(|weights| &weights[columns.clone()]);
        let factor = target_term + spread * *sum_of_weights;
        if factor.is_zero() && spread.is_zero() {
            return x.fill(E::zero());
        }
        let scale = factor * (-log).fast_exp();
        let probability = |class, x| scale * exp(class, x);
        // The target's is rounded once: `q dloss` is the same in many rows, and so would be its error.
        let target = target.checked_sub(columns.start).filter(|&target| target < x.len());
        let of_target = target.map(|class| {
            let weight = weights.map_or(E::Acc::one(), |weights| weights[class].widen());
            (class, E::narrow(probability(class, x[class]) - spread * weight - target_term))
        });
        match weights {
            None => {
                for (class, x) in x.iter_mut().enumerate() {
                    *x = E::narrow(probability(class, *x) - spread);
                }
            }
            Some(weights) => {
                for ((class, x), weight) in x.iter_mut().enumerate().zip(weights) {
                    *x = E::narrow(probability(class, *x) - spread * weight.widen());
                }
            }
        }
        if let Some((class, of_target)) = of_target {
            x[class] = of_target;
        }
    }
}

/// Of whole rows.
struct Replaced<'a, E: CpuElement> {
    x: &'a mut [E],
    /// Of the first row.
    first: usize,
    gradient: &'a Gradient<'a, E>,
}

impl<E: CpuElement> Job for Replaced<'_, E> {
    type Result = ();

    #[inline(always)]
    fn run(self) {
        let Self { x, first, gradient } = self;
        let columns = gradient.columns.len();
        if columns >= SHORT {
            for (at, row) in (first..).zip(x.chunks_exact_mut(columns)) {
                let [max, log] = gradient.parts(at, || sums::max(row));
                gradient.row(at, log, row, |_, x| (x.widen() - max).fast_exp());
            }
            return;
        }
        let rows = TOGETHER / columns;
        for (first, x) in (first..).step_by(rows).zip(x.chunks_mut(rows * columns)) {
            // Padding is seldom alone.
            let dloss = &gradient.dloss[first..][..x.len() / columns];
            if dloss.iter().all(Zero::is_zero) {
                x.fill(E::zero());
                continue;
            }
            let rows = (first..).zip(x.chunks_exact(columns));
            let maxima = rows.map(|(at, row)| gradient.parts(at, || sums::max(row))[0]);
            let exponentials = exponentials(x, columns, maxima);
            let rows = (first..).zip(x.chunks_exact_mut(columns)).zip(exponentials.chunks_exact(columns));
            for ((at, row), exponentials) in rows {
                let [_, log] = gradient.parts(at, E::Acc::zero);
                gradient.row(at, log, row, |class, _| exponentials[class]);
            }
        }
    }
}
