//! The kernels on a CPU: one loop over the rows for the losses, and one for the gradient. Rows that are few and long are computed in parts.
use super::{Classes, CrossEntropyKernels, Labels, RowLosses};
use crate::backend::cpu::{
    CpuBackend, CpuElement,
    exp::COST,
    in_place::in_place_or_copied_in_pieces,
    long_rows::{self, LongRows},
    parallel::{self, Job, Work, vectorized},
    plan::{Division, Items},
    sums::{self, Parts as PartsOfRow, Sum},
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
            let [rows, columns] = x.shape().dims();
            let items = items(rows, columns);
            let division = items.division(parallel::threads());
            let both: Vec<Parts<<E as CpuElement>::Acc>> = match (log_sum_exp.shape()[1], division) {
                // The largest of a row is not in its parts.
                (1, Division::Cut(steps)) => {
                    let maxima = LongRows::new(columns, steps, items.work).maxima(B::as_slice::<E>(&x));
                    maxima.into_iter().zip(numbers).map(|(max, &log)| [max, log]).collect()
                }
                _ => vec![],
            };
            let logs = match log_sum_exp.shape()[1] {
                1 if both.is_empty() => Logs::Second(numbers),
                1 => Logs::Both(&both),
                _ => Logs::Both(parts(numbers)),
            };
            let (dloss, sum_of_weights) = (B::as_slice(&dloss), labels.sum_of_weights());
            let gradients = &RowGradients { labels, sum_of_weights, logs, dloss, columns: classes.range };
            let chunks = division.chunks(columns, PartsOfRow::of(columns).size);
            in_place_or_copied_in_pieces::<B, E>(x, chunks, items.work, |start, x| {
                vectorized(Replaced { x, start, gradients });
            })
        })
    }
}

/// The loop over rows of so many logits.
fn items(rows: usize, classes: usize) -> Items {
    long_rows::items([rows, classes], Work::of([COST, rows, classes]))
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

    /// The loss of a row, given the logit of its target, its logarithm of the sum, and [the sum](Self::spread_sum) of all classes if it is read.
    #[inline(always)]
    fn loss(&self, target: usize, x: E, [max, log]: Parts<E::Acc>, sum: Option<f64>) -> E::Acc {
        let loss = self.times_target(log - (x.widen() - max), target);
        match self.spread.zip(sum) {
            Some((spread, sum)) => loss - spread * <E::Acc as CpuElement>::from_f64(sum),
            None => loss,
        }
    }

    /// The sum of the weighted logarithms of the probabilities of consecutive classes, from the first one given on; `None` if it is not
    /// read.
    #[inline(always)]
    fn spread_sum(&self, first: usize, row: &[E], [max, log]: Parts<E::Acc>) -> Option<f64> {
        self.spread?;
        let log_probability = |x: E| x.widen() - max - log;
        Some(match self.weights {
            Some(weights) => {
                let weights = &weights[first..][..row.len()];
                sums::sum_pairs(row, weights, |x, w| w.widen() * log_probability(x))
            }
            None => sums::sum(row, log_probability),
        })
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
    let items = items(rows, classes);
    let task = match items.division(parallel::threads()) {
        Division::Whole(task) => task,
        Division::Cut(steps) => {
            return losses_in_parts(x, labels, &LongRows::new(classes, steps, items.work));
        }
    };
    let (zero, work) = (<E::Acc as Zero>::zero(), items.work);
    let mut logs = vec![[zero; 2]; rows];
    let losses = parallel::zip_filled((rows, zero), &mut logs, [task, task], work, |index, losses, logs| {
        let first = index * task;
        let x = &x[first * classes..][..logs.len() * classes];
        vectorized(Losses { x, labels, first, losses, logs });
    });
    (losses, logs)
}

/// [`losses`] of few long rows.
fn losses_in_parts<E: CpuElement>(
    x: &[E],
    labels: &OfClasses<'_, E>,
    of_rows: &LongRows,
) -> (Vec<E::Acc>, Vec<Parts<E::Acc>>) {
    let (rows, classes) = (labels.targets.len(), labels.classes);
    let maxima = &of_rows.maxima(x);
    let sums = of_rows.sums(rows, |row, part| {
        vectorized(Sum { values: &x[part], f: |x: E| (x.widen() - maxima[row]).fast_exp() })
    });
    let log = |(&max, sum): (&E::Acc, f64)| [max, <E::Acc as CpuElement>::from_f64(sum.ln())];
    let logs: Vec<Parts<E::Acc>> = maxima.iter().zip(sums).map(log).collect();
    let spread = labels.spread.map(|_| {
        of_rows.sums(rows, |row, part| {
            let job = SpreadSum { labels, first: part.start - row * classes, x: &x[part], log: logs[row] };
            vectorized(job)
        })
    });
    let losses = (0..rows).map(|row| {
        let target = labels.target(row);
        let sum = spread.as_ref().map(|sums| sums[row]);
        labels.loss(target, x[row * classes + target], logs[row], sum)
    });
    (losses.collect(), logs)
}

/// [`OfClasses::spread_sum`]; 0 if it is not read.
struct SpreadSum<'a, E: CpuElement> {
    labels: &'a OfClasses<'a, E>,
    first: usize,
    x: &'a [E],
    log: Parts<E::Acc>,
}

impl<E: CpuElement> Job for SpreadSum<'_, E> {
    type Result = f64;

    #[inline(always)]
    fn run(self) -> f64 {
        self.labels.spread_sum(self.first, self.x, self.log).unwrap_or(0.0)
    }
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
        for (((at, row), loss), &log) in (first..).zip(x.chunks_exact(classes)).zip(losses).zip(&*logs) {
            let target = labels.target(at);
            *loss = labels.loss(target, row[target], log, labels.spread_sum(0, row, log));
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

    /// Replaces consecutive logits of a row, from the `first` on, by their gradients, given `exp(x - max)` of each and
    /// `log(sum(exp(x - max)))`. A row with a `dloss` of 0, such as padding, gets 0, whatever its logits are.
    #[inline(always)]
    fn row(&self, at: usize, first: usize, log: E::Acc, x: &mut [E], exp: impl Fn(usize, E) -> E::Acc) {
        let Self { labels, sum_of_weights, dloss, columns, .. } = self;
        let columns = columns.start + first..columns.start + first + x.len();
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

/// Replaces whole rows, or a part of one, by their gradients.
struct Replaced<'a, E: CpuElement> {
    x: &'a mut [E],
    /// The number of the first element.
    start: usize,
    gradients: &'a RowGradients<'a, E>,
}

impl<E: CpuElement> Job for Replaced<'_, E> {
    type Result = ();

    #[inline(always)]
    fn run(self) {
        let Self { x, start, gradients } = self;
        let columns = gradients.columns.len();
        let (first, column) = (start / columns, start % columns);
        if columns >= FEW_CLASSES {
            for (at, row) in (first..).zip(x.chunks_mut(columns)) {
                let [max, log] = gradients.parts(at, || sums::max(row));
                gradients.row(at, column, log, row, |_, x| (x.widen() - max).fast_exp());
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
                gradients.row(at, 0, log, row, |class, _| exponentials[class]);
            }
        }
    }
}

#[cfg(test)]
pub(crate) mod counting {
    /// The loop over rows of classes.
    pub(crate) fn items([rows, classes]: [usize; 2]) -> super::Items {
        super::items(rows, classes)
    }
}
