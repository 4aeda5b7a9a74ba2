//! The kernels on a CPU: one loop over the rows for the losses, and one for the gradient.
use super::{Classes, CrossEntropyKernels, Labels, RowLosses};
use crate::backend::cpu::{
    CpuBackend, CpuElement,
    exp::COST,
    in_place::in_place_or_copied,
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
        let (x, labels) = (B::contiguous(x), InMemory::of(labels));
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
            let [rows, columns] = x.shape().dims();
            let (task, work) = (parallel::items_per_task(rows, columns), Work::of([COST, rows, columns]));
            let gradients = &RowGradients { labels, sum_of_weights, logs, dloss, columns: classes.range };
            in_place_or_copied::<B, E>(x, task * columns, work, |index, x| {
                vectorized(Replaced { x, first: index * task, gradients });
            })
        })
    }
}

/// [`RowLosses::log_sum_exp`] of a row.
pub(crate) type Parts<A> = [A; 2];

/// The [`Parts`] of every row.
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

    /// The labels in the numbers that logits of `E` are computed with.
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

/// [`Labels`] in the numbers that the kernels compute with.
struct OfClasses<'a, E: CpuElement> {
    classes: usize,
    /// One per row.
    targets: &'a [i64],
    /// One per class; 1 if missing.
    weights: Option<&'a [E]>,
    /// The share of the target, if it is not 1.
    rest: Option<E::Acc>,
    /// The share that every class gets besides, if it is not 0.
    spread: Option<E::Acc>,
}

impl<E: CpuElement> OfClasses<'_, E> {
    /// The class of a row. Panics as Burn does if there is no such class.
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

    /// The sum of the weights of all classes; 0 if it is not read, because only the target counts.
    fn sum_of_weights(&self) -> E::Acc {
        <E::Acc as CpuElement>::from_f64(match (self.spread, self.weights) {
            (None, _) => 0.0,
            (Some(_), None) => self.classes as f64,
            (Some(_), Some(weights)) => vectorized(Sum { values: weights, f: E::widen }),
        })
    }
}

/// Rows of fewer classes are too short for a vectorized loop over one. The exponentials of several such rows are computed together.
const FEW_CLASSES: usize = 64;
/// The most exponentials that are computed together.
const EXPONENTIALS: usize = 512;

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

/// The losses and logarithms of some rows.
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
        if classes < FEW_CLASSES {
            logs_of_short_rows(x, classes, logs);
        } else {
            for (row, log) in x.chunks_exact(classes).zip(logs.iter_mut()) {
                *log = sums::log_sum_exp(row, |x| x);
            }
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

/// Writes the logarithms of rows of fewer than [`FEW_CLASSES`] elements.
#[inline(always)]
fn logs_of_short_rows<E: CpuElement>(x: &[E], classes: usize, logs: &mut [Parts<E::Acc>]) {
    let rows = EXPONENTIALS / classes;
    for (x, logs) in x.chunks(rows * classes).zip(logs.chunks_mut(rows)) {
        logs.iter_mut().zip(x.chunks_exact(classes)).for_each(|(log, row)| log[0] = sums::max(row));
        let exponentials = exponentials(x, classes, logs.iter().map(|&[max, _]| max));
        for (log, row) in logs.iter_mut().zip(exponentials.chunks_exact(classes)) {
            let sum = row.iter().map(|&exponential| exponential.into_f64()).sum::<f64>();
            log[1] = <E::Acc as CpuElement>::from_f64(sum.ln());
        }
    }
}

/// `exp(x - max)` of short rows, [`EXPONENTIALS`] elements at most, given the largest of every row.
#[inline(always)]
fn exponentials<E: CpuElement>(
    x: &[E],
    classes: usize,
    maxima: impl Iterator<Item = E::Acc>,
) -> [E::Acc; EXPONENTIALS] {
    let mut values = [<E::Acc as Zero>::zero(); EXPONENTIALS];
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
    /// Only the second part. The rows have all classes, so the first is the largest of the row.
    Second(&'a [A]),
}

/// What the gradients of rows of logits, `dloss (p sum(q w) - q w)`, are computed from.
struct RowGradients<'a, E: CpuElement> {
    labels: OfClasses<'a, E>,
    sum_of_weights: E::Acc,
    logs: Logs<'a, E::Acc>,
    /// One per row.
    dloss: &'a [E::Acc],
    /// The classes that the logits are of.
    columns: Range<usize>,
}

impl<E: CpuElement> RowGradients<'_, E> {
    /// The parts of `log(sum(exp(x)))` of a row.
    #[inline(always)]
    fn parts(&self, at: usize, max: impl FnOnce() -> E::Acc) -> Parts<E::Acc> {
        match self.logs {
            Logs::Both(logs) => logs[at],
            Logs::Second(logs) => [max(), logs[at]],
        }
    }

    /// Replaces a row by its gradient, given `exp(x - max)` of its elements and `log(sum(exp(x - max)))`. A row with a `dloss` of 0, such
    /// as padding, gets 0, whatever its logits are.
    #[inline(always)]
    fn row(&self, at: usize, log: E::Acc, x: &mut [E], exp: impl Fn(usize, E) -> E::Acc) {
        let Self { labels, sum_of_weights, dloss, columns, .. } = self;
        let (target, dloss) = (labels.target(at), dloss[at]);
        let target_term = labels.times_target(dloss, target);
        // Every class gets this, times its weight.
        let spread = labels.spread.map_or(E::Acc::zero(), |spread| dloss * spread);
        let weights =
            labels.weights.filter(|_| labels.spread.is_some()).map(|weights| &weights[columns.clone()]);
        let factor = target_term + spread * *sum_of_weights;
        if factor.is_zero() && spread.is_zero() {
            return x.fill(E::zero());
        }
        let scale = factor * (-log).fast_exp();
        let probability = |class, x| scale * exp(class, x);
        // The gradient at the target is rounded once. Rounded before, `q dloss` would have the same error in many rows.
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

/// Replaces whole rows by their gradients.
struct Replaced<'a, E: CpuElement> {
    x: &'a mut [E],
    /// The number of the first row.
    first: usize,
    gradients: &'a RowGradients<'a, E>,
}

impl<E: CpuElement> Job for Replaced<'_, E> {
    type Result = ();

    #[inline(always)]
    fn run(self) {
        let Self { x, first, gradients } = self;
        let columns = gradients.columns.len();
        if columns >= FEW_CLASSES {
            for (at, row) in (first..).zip(x.chunks_exact_mut(columns)) {
                let [max, log] = gradients.parts(at, || sums::max(row));
                gradients.row(at, log, row, |_, x| (x.widen() - max).fast_exp());
            }
            return;
        }
        let rows = EXPONENTIALS / columns;
        for (first, x) in (first..).step_by(rows).zip(x.chunks_mut(rows * columns)) {
            // Rows of padding often come together.
            let dloss = &gradients.dloss[first..][..x.len() / columns];
            if dloss.iter().all(Zero::is_zero) {
                x.fill(E::zero());
                continue;
            }
            let rows = (first..).zip(x.chunks_exact(columns));
            let maxima = rows.map(|(at, row)| gradients.parts(at, || sums::max(row))[0]);
            let exponentials = exponentials(x, columns, maxima);
            let rows = (first..).zip(x.chunks_exact_mut(columns)).zip(exponentials.chunks_exact(columns));
            for ((at, row), exponentials) in rows {
                let [_, log] = gradients.parts(at, E::Acc::zero);
                gradients.row(at, log, row, |class, _| exponentials[class]);
            }
        }
    }
}
