//! What rows of logits are compared with, and the gradient that follows.
use super::{CrossEntropyKernels, LogitsGradient, parts};
use crate::{
    backend::{wide, widen},
    ops::kept::Ledger,
};
use burn::backend::{
    Backend, TensorMetadata, get_or_init_device_settings,
    tensor::{BoolTensor, FloatTensor, IndexingUpdateOp, IntTensor},
};
use burn::tensor::{Shape, Slice};
use core::ops::Range;

/// What rows of logits are compared with; all of it untracked.
#[derive(Clone, Debug)]
pub struct Labels<B: Backend> {
    /// `[rows, 1]`
    pub(super) targets: IntTensor<B>,
    /// `[classes]`
    pub(super) weights: Option<FloatTensor<B>>,
    pub(super) smoothing: Option<f32>,
}

impl<B: CrossEntropyKernels> Labels<B> {
    /// `targets`: one per row.
    pub(crate) fn new(
        targets: IntTensor<B>,
        weights: Option<FloatTensor<B>>,
        smoothing: Option<f32>,
    ) -> Self {
        let rows = targets.shape().num_elements();
        // Without smoothing the other classes do not count, even where one has no logarithm.
        let smoothing = smoothing.filter(|&smoothing| smoothing != 0.0);
        Self { targets: B::int_reshape(targets, Shape::new([rows, 1])), weights, smoothing }
    }

    /// Reports to the ledger what is kept, that is, all of it.
    pub(crate) fn reported(self, ledger: &Ledger, reason: &'static str) -> Self {
        Self {
            targets: ledger.tensor("targets", self.targets, reason),
            weights: self.weights.map(|weights| ledger.tensor("weights", weights, reason)),
            ..self
        }
    }

    /// The class weights.
    pub(crate) fn weights(&self) -> Option<&FloatTensor<B>> {
        self.weights.as_ref()
    }

    /// The labels of some rows.
    pub(crate) fn rows(&self, rows: &Range<usize>) -> Self {
        Self { targets: B::int_slice(self.targets.clone(), &[Slice::from(rows.clone())]), ..self.clone() }
    }

    /// `-sum(q w log p)` of every row, `[rows, 1]`, of the dtype of `log_sum_exp`.
    pub(crate) fn losses(&self, x: FloatTensor<B>, log_sum_exp: FloatTensor<B>) -> FloatTensor<B> {
        let classes = x.shape()[1];
        let picked = picked::<B>(x.clone(), self.targets.clone());
        let picked = B::float_cast(picked, log_sum_exp.dtype().into());
        let [largest, log] = parts::<B>(log_sum_exp.clone());
        let loss = self.times_target(B::float_sub(log, B::float_sub(picked, largest)));
        match self.spread(classes) {
            None => loss,
            Some(spread) => {
                let sum = B::sum_log_probabilities(x, log_sum_exp, self.weights.clone());
                B::float_sub(loss, B::float_mul_scalar(sum, spread.into()))
            }
        }
    }

    /// How logits of `classes` classes and with `log_sum_exp` become their gradient, given `dloss` `[rows, 1]` of its dtype.
    pub(crate) fn gradient(
        &self,
        log_sum_exp: FloatTensor<B>,
        dloss: FloatTensor<B>,
        classes: usize,
    ) -> LabelsGradient<B> {
        let spread = self.spread(classes);
        let target_term = self.times_target(dloss.clone());
        let probability_factor = match spread {
            None => target_term.clone(),
            Some(spread) => {
                let all = B::float_mul_scalar(dloss.clone(), spread.into());
                let all = match &self.weights {
                    None => B::float_mul_scalar(all, classes.into()),
                    Some(weights) => {
                        let sum = B::float_sum(widen::<B>(weights.clone()));
                        let sum = B::float_reshape(sum, Shape::new([1, 1]));
                        B::float_mul(all, B::float_cast(sum, dloss.dtype().into()))
                    }
                };
                B::float_add(target_term.clone(), all)
            }
        };
        let weight_factor = spread.map(|spread| B::float_mul_scalar(dloss, (-spread).into()));
        let weights = self.weights.clone();
        LabelsGradient {
            of_logits: LogitsGradient { log_sum_exp, probability_factor, weight_factor, weights },
            targets: self.targets.clone(),
            target_term: B::float_neg(target_term),
            elsewhere: None,
        }
    }

    /// `(1 - smoothing) w` of the target, times `value` `[rows, 1]`.
    fn times_target(&self, value: FloatTensor<B>) -> FloatTensor<B> {
        let dtype = value.dtype();
        let value = match self.smoothing {
            None => value,
            Some(smoothing) => B::float_mul_scalar(value, (1.0 - smoothing).into()),
        };
        let Some(weights) = self.weights.clone() else {
            return value;
        };
        let rows = self.targets.shape()[0];
        let weights = B::float_gather(0, weights, B::int_reshape(self.targets.clone(), Shape::new([rows])));
        let weights = B::float_reshape(B::float_cast(weights, dtype.into()), Shape::new([rows, 1]));
        B::float_mul(value, weights)
    }

    /// The part of `q` that every class has, whatever the target.
    fn spread(&self, classes: usize) -> Option<f64> {
        self.smoothing.map(|smoothing| f64::from(smoothing / classes as f32))
    }
}

/// The element of every row of `x` `[rows, classes]` that `targets` `[rows, 1]` names, `[rows, 1]`.
///
/// A third axis sets the gather apart: Burn's fusion joins one of two axes with what is computed in the width of `x`, and then
/// reads the targets of other rows (0.22.1; for `select` and `cat` it takes care of that).
fn picked<B: Backend>(x: FloatTensor<B>, targets: IntTensor<B>) -> FloatTensor<B> {
    let [rows, classes] = x.shape().dims();
    let x = B::float_reshape(x, Shape::new([rows, 1, classes]));
    let picked = B::float_gather(2, x, B::int_reshape(targets, Shape::new([rows, 1, 1])));
    B::float_reshape(picked, Shape::new([rows, 1]))
}

/// How logits become their gradient.
pub(crate) struct LabelsGradient<B: Backend> {
    of_logits: LogitsGradient<B>,
    /// `[rows, 1]`
    targets: IntTensor<B>,
    /// What is added to the gradients of the logits of the targets, `[rows, 1]`.
    target_term: FloatTensor<B>,
    /// The rows whose target is none of these classes, `[rows, 1]`; their `targets` are anything, and their `target_term` is 0.
    elsewhere: Option<BoolTensor<B>>,
}

impl<B: CrossEntropyKernels> LabelsGradient<B> {
    /// The gradient of logits `[rows, classes]`, in place if nothing else holds them.
    pub(crate) fn of(self, x: FloatTensor<B>) -> FloatTensor<B> {
        let dtype = x.dtype();
        let (x, target_term) =
            if wide(dtype) == dtype { (x, self.target_term.clone()) } else { self.without_targets(x) };
        let dx = B::logits_gradient(x, self.of_logits);
        let target_term = B::float_cast(target_term, dtype.into());
        B::float_scatter(1, dx, self.targets, target_term, IndexingUpdateOp::Add)
    }

    /// The logits without those of the targets, and the gradients of the latter: the difference `p - q` is made in f32, and
    /// rounded once. In half precision `q dloss` is the same in many rows, and so would be its error.
    fn without_targets(&self, x: FloatTensor<B>) -> (FloatTensor<B>, FloatTensor<B>) {
        let LogitsGradient { log_sum_exp, probability_factor, .. } = &self.of_logits;
        let bools = get_or_init_device_settings::<B>(&x.device()).bool_dtype;
        let zero_if = |value, mask: BoolTensor<B>| B::float_mask_fill(value, mask, 0.into());
        let here = |value| match &self.elsewhere {
            Some(elsewhere) => zero_if(value, elsewhere.clone()),
            None => value,
        };
        let probability_factor = widen::<B>(probability_factor.clone());
        let nothing = B::float_equal_elem(probability_factor.clone(), 0.into(), bools);
        let picked = widen::<B>(picked::<B>(x.clone(), self.targets.clone()));
        let [largest, log] = parts::<B>(widen::<B>(log_sum_exp.clone()));
        let probability = B::float_exp(B::float_sub(B::float_sub(picked, largest), log));
        let of_logit = here(zero_if(B::float_mul(probability, probability_factor), nothing));
        let target_term = B::float_add(widen::<B>(self.target_term.clone()), of_logit);
        let shape = target_term.shape();
        let infinity = B::float_full(shape, f32::NEG_INFINITY.into(), &x.device(), x.dtype().into());
        let x = B::float_scatter(1, x, self.targets.clone(), here(infinity), IndexingUpdateOp::Add);
        (x, target_term)
    }

    /// The same for the logits of some classes.
    pub(crate) fn columns(&self, columns: &Range<usize>) -> Self {
        let LogitsGradient { log_sum_exp, probability_factor, weight_factor, weights } = &self.of_logits;
        let bools = get_or_init_device_settings::<B>(&log_sum_exp.device()).bool_dtype;
        let targets = B::int_sub_scalar(self.targets.clone(), columns.start.into());
        let elsewhere = B::bool_or(
            B::int_lower_elem(targets.clone(), 0.into(), bools),
            B::int_greater_equal_elem(targets.clone(), columns.len().into(), bools),
        );
        let of_columns = |weights| B::float_slice(weights, &[Slice::from(columns.clone())]);
        Self {
            of_logits: LogitsGradient {
                log_sum_exp: log_sum_exp.clone(),
                probability_factor: probability_factor.clone(),
                weight_factor: weight_factor.clone(),
                weights: weights.clone().map(of_columns),
            },
            targets: B::int_mask_fill(targets, elsewhere.clone(), 0.into()),
            target_term: B::float_mask_fill(self.target_term.clone(), elsewhere.clone(), 0.into()),
            elsewhere: Some(elsewhere),
        }
    }
}
