//! Fused loops over rows.
use super::{CrossEntropyKernels, LogitsGradient};
use crate::backend::cpu::{
    CpuBackend, CpuElement,
    exp::COST,
    parallel::{self, vectorized},
    sums::{self, Sum},
    with_element,
};
use burn::backend::{TensorMetadata, tensor::FloatTensor};
use burn::tensor::{DType, Shape, bf16, f16};
use num_traits::Zero;

impl<B: CpuBackend> CrossEntropyKernels for B {
    fn log_sum_exp(x: FloatTensor<B>) -> FloatTensor<B> {
        let x = B::contiguous(x);
        let [rows, classes] = x.shape().dims();
        with_element!(x.dtype(), "log_sum_exp", E => {
            B::from_vec(log_sum_exp(B::as_slice::<E>(&x), classes).into_flattened(), Shape::new([rows, 2]))
        })
    }

    fn largest(x: FloatTensor<B>) -> FloatTensor<B> {
        let x = B::contiguous(x);
        let [rows, classes] = x.shape().dims();
        with_element!(x.dtype(), "largest", E => {
            let zero = <<E as CpuElement>::Acc as Zero>::zero();
            let largest = of_rows(B::as_slice::<E>(&x), classes, zero, |_, row| sums::max(row));
            B::from_vec(largest, Shape::new([rows, 1]))
        })
    }

    fn sum_log_probabilities(
        x: FloatTensor<B>,
        log_sum_exp: FloatTensor<B>,
        weights: Option<FloatTensor<B>>,
    ) -> FloatTensor<B> {
        let (x, log_sum_exp, weights) =
            (B::contiguous(x), B::contiguous(log_sum_exp), weights.map(B::contiguous));
        with_element!(x.dtype(), "cross_entropy", E => {
            let weights = weights.as_ref().map(B::as_slice::<E>);
            let sums = sum_log_probabilities(B::as_slice(&x), parts(B::as_slice(&log_sum_exp)), weights);
            B::from_vec(sums, Shape::new([log_sum_exp.shape()[0], 1]))
        })
    }

    fn logits_gradient(x: FloatTensor<B>, gradient: LogitsGradient<B>) -> FloatTensor<B> {
        let mut x = B::contiguous(x);
        let [log_sum_exp, probability_factor] =
            [gradient.log_sum_exp, gradient.probability_factor].map(B::contiguous);
        let [weight_factor, weights] =
            [gradient.weight_factor, gradient.weights].map(|t| t.map(B::contiguous));
        with_element!(x.dtype(), "cross_entropy", E => {
            let gradient = Gradient::<E> {
                log_sum_exp: parts(B::as_slice(&log_sum_exp)),
                probability_factor: B::as_slice(&probability_factor),
                weight_factor: weight_factor.as_ref().map(B::as_slice),
                weights: weights.as_ref().map(B::as_slice),
            };
            if x.can_mut() {
                gradient.in_place(B::as_slice_mut(&mut x));
                x
            } else {
                B::from_vec(gradient.of(B::as_slice(&x)), x.shape())
            }
        })
    }
}

/// Both of [`CrossEntropyKernels::log_sum_exp`], of a row.
pub(crate) type Parts<A> = [A; 2];

/// Those of every row.
pub(crate) fn parts<A>(log_sum_exp: &[A]) -> &[Parts<A>] {
    log_sum_exp.as_chunks().0
}

/// The parts of `log(sum(exp(x)))` of every row of `classes` elements.
fn log_sum_exp<E: CpuElement>(x: &[E], classes: usize) -> Vec<Parts<E::Acc>> {
    of_rows(x, classes, [<E::Acc as Zero>::zero(); 2], |_, row| {
        let max = sums::max(row);
        let sum = vectorized(Sum { values: row, f: |x: E| (x.widen() - max).fast_exp() });
        [max, <E::Acc as CpuElement>::from_f64(sum.ln())]
    })
}

/// `sum(weight (x - log_sum_exp))` of every row.
fn sum_log_probabilities<E: CpuElement>(
    x: &[E],
    log_sum_exp: &[Parts<E::Acc>],
    weights: Option<&[E]>,
) -> Vec<E::Acc> {
    of_rows(x, x.len() / log_sum_exp.len(), <E::Acc as Zero>::zero(), |at, row| {
        let [max, log] = log_sum_exp[at];
        let log_probability = |x: E| x.widen() - max - log;
        <E::Acc as CpuElement>::from_f64(match weights {
            Some(weights) => sums::sum_pairs(row, weights, |x, weight| weight.widen() * log_probability(x)),
            None => vectorized(Sum { values: row, f: log_probability }),
        })
    })
}

/// `f(index, row)` of every row of `classes` elements.
#[inline(always)]
fn of_rows<E: CpuElement, R: Copy + Send + Sync>(
    x: &[E],
    classes: usize,
    zero: R,
    f: impl Fn(usize, &[E]) -> R + Send + Sync,
) -> Vec<R> {
    let rows = x.len() / classes;
    let task = parallel::items_per_task(rows, classes);
    parallel::filled(rows, zero, task, parallel::Work::of([COST, x.len()]), |index, results| {
        let rows = (index * task..).zip(x[index * task * classes..].chunks_exact(classes));
        results.iter_mut().zip(rows).for_each(|(result, (at, row))| *result = f(at, row));
    })
}

/// What logits become in the backward pass: `probability_factor exp(x - log_sum_exp) + weight_factor weight`, with one of each
/// but `weight` per row.
struct Gradient<'a, E: CpuElement> {
    log_sum_exp: &'a [Parts<E::Acc>],
    probability_factor: &'a [E::Acc],
    weight_factor: Option<&'a [E::Acc]>,
    /// One per class, or all one.
    weights: Option<&'a [E]>,
}

impl<E: CpuElement> Gradient<'_, E> {
    /// The gradient of `x`.
    fn of(&self, x: &[E]) -> Vec<E> {
        let (classes, task) = self.task(x);
        parallel::copied(x, task * classes, parallel::Work::of([COST, x.len()]), |index, x| {
            self.rows(index * task, x, classes)
        })
    }

    /// Replaces `x` by its gradient.
    fn in_place(&self, x: &mut [E]) {
        let ((classes, task), work) = (self.task(x), parallel::Work::of([COST, x.len()]));
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
            let ([max, log], factor) = (self.log_sum_exp[at], self.probability_factor[at]);
            let nothing = <E::Acc as Zero>::zero();
            if factor == nothing && self.weight_factor.is_none_or(|factors| factors[at] == nothing) {
                row.fill(E::zero());
                continue;
            }
            let scale = factor * (-log).fast_exp();
            let probability = |x: E| scale * (x.widen() - max).fast_exp();
            match (self.weight_factor, self.weights) {
                (None, _) => {
                    for x in row {
                        *x = E::narrow(probability(*x));
                    }
                }
                (Some(weight_factor), None) => {
                    let add = weight_factor[at];
                    for x in row {
                        *x = E::narrow(probability(*x) + add);
                    }
                }
                (Some(weight_factor), Some(weights)) => {
                    let factor = weight_factor[at];
                    for (x, w) in row.iter_mut().zip(weights) {
                        *x = E::narrow(probability(*x) + factor * w.widen());
                    }
                }
            }
        }
    }
}
