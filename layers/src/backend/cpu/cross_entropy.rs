//! Rows of a cross entropy.
use super::{CpuElement, parallel, sums};
use num_traits::Zero;

/// How much longer an exponential takes than reading an element.
const COST: usize = 16;

/// `log(sum(exp(x)))` of every row of `classes` elements.
pub(super) fn log_sum_exp<E: CpuElement>(x: &[E], classes: usize) -> Vec<E::Acc> {
    of_rows(x, classes, |_, row| {
        let max = sums::max(row);
        let sum = sums::sum(row, |x| (x.widen() - max).fast_exp());
        max + <E::Acc as CpuElement>::from_f64(sum.ln())
    })
}

/// `sum(weight (x - log_sum_exp))` of every row.
pub(super) fn sum_log_probabilities<E: CpuElement>(
    x: &[E],
    log_sum_exp: &[E::Acc],
    weights: Option<&[E]>,
) -> Vec<E::Acc> {
    of_rows(x, x.len() / log_sum_exp.len(), |at, row| {
        let shift = log_sum_exp[at];
        <E::Acc as CpuElement>::from_f64(match weights {
            Some(weights) => sums::sum_pairs(row, weights, |x, weight| weight.widen() * (x.widen() - shift)),
            None => sums::sum(row, |x| x.widen() - shift),
        })
    })
}

/// `f(index, row)` of every row of `classes` elements.
#[inline(always)]
fn of_rows<E: CpuElement>(
    x: &[E],
    classes: usize,
    f: impl Fn(usize, &[E]) -> E::Acc + Send + Sync,
) -> Vec<E::Acc> {
    let rows = x.len() / classes;
    let task = parallel::items_per_task(rows, classes);
    parallel::filled(rows, <E::Acc as Zero>::zero(), task, COST * x.len(), |index, results| {
        let rows = (index * task..).zip(x[index * task * classes..].chunks_exact(classes));
        results.iter_mut().zip(rows).for_each(|(result, (at, row))| *result = f(at, row));
    })
}

/// What becomes of the logits in the backward pass: `of_probability exp(x - log_sum_exp) + of_weight weight`, the first factors
/// one per row.
pub(super) struct Gradient<'a, E: CpuElement> {
    pub(super) log_sum_exp: &'a [E::Acc],
    pub(super) of_probability: &'a [E::Acc],
    pub(super) of_weight: Option<&'a [E::Acc]>,
    /// One per class, or all one.
    pub(super) weights: Option<&'a [E]>,
}

impl<E: CpuElement> Gradient<'_, E> {
    /// The gradient of `x`.
    pub(super) fn of(&self, x: &[E]) -> Vec<E> {
        let (classes, task) = self.task(x);
        parallel::copied(x, task * classes, COST * x.len(), |index, x| self.rows(index * task, x, classes))
    }

    /// Replaces `x` by its gradient.
    pub(super) fn in_place(&self, x: &mut [E]) {
        let ((classes, task), work) = (self.task(x), COST * x.len());
        parallel::chunks_mut(x, task * classes, work, |index, x| self.rows(index * task, x, classes));
    }

    /// The elements of a row and the rows of a task.
    fn task(&self, x: &[E]) -> (usize, usize) {
        let rows = self.log_sum_exp.len();
        let classes = x.len() / rows;
        (classes, parallel::items_per_task(rows, classes))
    }

    #[inline(always)]
    fn rows(&self, start: usize, x: &mut [E], classes: usize) {
        for (at, row) in (start..).zip(x.chunks_exact_mut(classes)) {
            let (shift, scale) = (self.log_sum_exp[at], self.of_probability[at]);
            let nothing = <E::Acc as Zero>::zero();
            if scale == nothing && self.of_weight.is_none_or(|factors| factors[at] == nothing) {
                row.fill(E::zero());
                continue;
            }
            let probability = |x: E| scale * (x.widen() - shift).fast_exp();
            match (self.of_weight, self.weights) {
                (None, _) => row.iter_mut().for_each(|x| *x = E::narrow(probability(*x))),
                (Some(of_weight), None) => {
                    let add = of_weight[at];
                    row.iter_mut().for_each(|x| *x = E::narrow(probability(*x) + add));
                }
                (Some(of_weight), Some(weights)) => {
                    let factor = of_weight[at];
                    let pairs = row.iter_mut().zip(weights);
                    pairs.for_each(|(x, w)| *x = E::narrow(probability(*x) + factor * w.widen()));
                }
            }
        }
    }
}
