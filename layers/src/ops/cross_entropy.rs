//! Cross entropy of rows of logits.
//!
//! | | |
//! | --- | --- |
//! | computes | `loss = -sum(q w log p)` per row; `p = softmax(x)`, `w` the weights of the classes, `q` 1 at the target, smoothed: |
//! | | `q = (1 - smoothing) [class is target] + smoothing / classes` |
//! | keeps | `x` (a handle), `log(sum(exp(x)))` per row, the targets and the weights (handles) |
//! | backward | `dx = dloss (p sum(q w) - q w)`, in place if nobody else holds `x` |
//!
//! Stock Burn takes the logarithm of the softmax first, in several steps, which need two tensors of the size of `x` at the peak.
use super::{
    MaybeTensor,
    kept::{Keeper, Kept},
};
use crate::backend::{LogitsGradient, MemBackend, plain_backends, wide, widen};
use burn::backend::{
    Backend, TensorMetadata,
    autodiff::{
        Autodiff,
        checkpoint::{base::Checkpointer, strategy::CheckpointStrategy},
        grads::Gradients,
        ops::{Backward, Ops, OpsKind, unary},
    },
    backend_extension, get_or_init_device_settings,
    tensor::{BoolTensor, FloatTensor, IndexingUpdateOp, IntTensor},
};
use burn::tensor::{Shape, Slice};
use core::ops::Range;

/// Cross entropies.
#[backend_extension(
    Flex: cfg(feature = "flex"),
    NdArray: cfg(feature = "ndarray"),
    Cube: cfg(any(feature = "wgpu", feature = "cuda")),
    Remote: cfg(feature = "remote"),
    Autodiff
)]
pub trait CrossEntropyOps: Backend {
    /// The loss of every row; x `[rows, classes]`, targets `[rows]`, weights `[classes]` and untracked.
    fn memsave_cross_entropy(
        x: FloatTensor<Self>,
        targets: IntTensor<Self>,
        #[extension_type] weights: MaybeTensor<Self>,
        smoothing: Option<f32>,
    ) -> FloatTensor<Self>;
}
plain_backends!(CrossEntropyOps {
    fn memsave_cross_entropy(
        x: FloatTensor<Self>,
        targets: IntTensor<Self>,
        weights: MaybeTensor<Self>,
        smoothing: Option<f32>,
    ) -> FloatTensor<Self> {
        let labels = Labels::<Self>::new(targets, weights.into_option(), smoothing);
        let log_sum_exp = Self::log_sum_exp(x.clone());
        labels.loss(x, log_sum_exp)
    }
});

impl<B: CrossEntropyOps + MemBackend, C: CheckpointStrategy> CrossEntropyOps for Autodiff<B, C> {
    fn memsave_cross_entropy(
        x: FloatTensor<Self>,
        targets: IntTensor<Self>,
        weights: MaybeTensor<Self>,
        smoothing: Option<f32>,
    ) -> FloatTensor<Self> {
        let weights = weights.into_option().map(|weights| weights.into_primitive());
        let labels = Labels::new(targets, weights, smoothing);
        let log_sum_exp = |x: &FloatTensor<Self>| B::log_sum_exp(x.primitive().clone());
        match CrossEntropy.prepare::<C>([x.node()]).compute_bound().stateful() {
            OpsKind::Tracked(mut prep) => {
                let keeper = Keeper::new("cross_entropy", None);
                let log_sum_exp = log_sum_exp(&x);
                let saved = Saved {
                    x: keeper.keep(&mut prep, "x", &x, "x is tracked"),
                    log_sum_exp: keeper.keep_tensor("log_sum_exp", log_sum_exp.clone(), "x is tracked"),
                    labels: labels.clone().kept_by(&keeper, "x is tracked"),
                };
                prep.finish(saved, labels.loss(x.into_primitive(), log_sum_exp))
            }
            OpsKind::UnTracked(prep) => {
                let log_sum_exp = log_sum_exp(&x);
                prep.finish(labels.loss(x.into_primitive(), log_sum_exp))
            }
        }
    }
}

/// What rows of logits are compared with. Nothing of it is tracked.
#[derive(Debug)]
pub(crate) struct Labels<B: Backend> {
    /// `[rows, 1]`
    targets: IntTensor<B>,
    /// `[classes]`
    weights: Option<FloatTensor<B>>,
    smoothing: Option<f32>,
}

impl<B: Backend> Clone for Labels<B> {
    fn clone(&self) -> Self {
        Self { targets: self.targets.clone(), weights: self.weights.clone(), smoothing: self.smoothing }
    }
}

impl<B: MemBackend> Labels<B> {
    /// `targets`: one per row.
    pub(crate) fn new(
        targets: IntTensor<B>,
        weights: Option<FloatTensor<B>>,
        smoothing: Option<f32>,
    ) -> Self {
        let rows = targets.shape().num_elements();
        Self { targets: B::int_reshape(targets, Shape::new([rows, 1])), weights, smoothing }
    }

    /// Reports to the ledger what is kept of it.
    pub(crate) fn kept_by(self, keeper: &Keeper, reason: &'static str) -> Self {
        Self {
            targets: keeper.keep_tensor("targets", self.targets, reason),
            weights: self.weights.map(|weights| keeper.keep_tensor("weights", weights, reason)),
            ..self
        }
    }

    /// The weights of the classes.
    pub(crate) fn weights(&self) -> Option<&FloatTensor<B>> {
        self.weights.as_ref()
    }

    /// Those of some rows.
    pub(crate) fn rows(&self, rows: &Range<usize>) -> Self {
        Self { targets: B::int_slice(self.targets.clone(), &[Slice::from(rows.clone())]), ..self.clone() }
    }

    /// `-sum(q w log p)` of every row, `[rows]`, of the dtype of `x`.
    fn loss(&self, x: FloatTensor<B>, log_sum_exp: FloatTensor<B>) -> FloatTensor<B> {
        let ([rows, _], dtype) = (x.shape().dims(), x.dtype());
        let losses = self.losses(x, log_sum_exp);
        B::float_reshape(B::float_cast(losses, dtype.into()), Shape::new([rows]))
    }

    /// `-sum(q w log p)` of every row, `[rows, 1]`, of the dtype of `log_sum_exp`.
    pub(crate) fn losses(&self, x: FloatTensor<B>, log_sum_exp: FloatTensor<B>) -> FloatTensor<B> {
        let classes = x.shape()[1];
        let picked = B::float_gather(1, x.clone(), self.targets.clone());
        let picked = B::float_cast(picked, log_sum_exp.dtype().into());
        let loss = self.times_target(B::float_sub(log_sum_exp.clone(), picked));
        match self.spread(classes) {
            None => loss,
            Some(spread) => {
                let sum = B::sum_log_probabilities(x, log_sum_exp, self.weights.clone());
                B::float_sub(loss, B::float_mul_scalar(sum, spread.into()))
            }
        }
    }

    /// What makes gradients of logits of `classes` classes and of `log_sum_exp`, from `dloss` `[rows, 1]` of its dtype.
    pub(crate) fn gradient(
        &self,
        log_sum_exp: FloatTensor<B>,
        dloss: FloatTensor<B>,
        classes: usize,
    ) -> LabelsGradient<B> {
        let spread = self.spread(classes);
        let of_target = self.times_target(dloss.clone());
        let of_probability = match spread {
            None => of_target.clone(),
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
                B::float_add(of_target.clone(), all)
            }
        };
        let of_weight = spread.map(|spread| B::float_mul_scalar(dloss, (-spread).into()));
        let weights = self.weights.clone();
        LabelsGradient {
            of_logits: LogitsGradient { log_sum_exp, of_probability, of_weight, weights },
            targets: self.targets.clone(),
            of_target: B::float_neg(of_target),
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

    /// What every class has of `q`, whatever the target.
    fn spread(&self, classes: usize) -> Option<f64> {
        self.smoothing.map(|smoothing| f64::from(smoothing / classes as f32))
    }
}

/// How logits become their gradient.
pub(crate) struct LabelsGradient<B: Backend> {
    of_logits: LogitsGradient<B>,
    /// `[rows, 1]`
    targets: IntTensor<B>,
    /// What the gradients of the targets get more, `[rows, 1]`.
    of_target: FloatTensor<B>,
    /// The rows whose target is no class of these, `[rows, 1]`; their `targets` are anything, and their `of_target` is 0.
    elsewhere: Option<BoolTensor<B>>,
}

impl<B: MemBackend> LabelsGradient<B> {
    /// The gradient of logits `[rows, classes]`, in place if nobody else holds them.
    pub(crate) fn of(self, x: FloatTensor<B>) -> FloatTensor<B> {
        let dtype = x.dtype();
        let (x, of_target) =
            if wide(dtype) == dtype { (x, self.of_target.clone()) } else { self.without_targets(x) };
        let dx = B::logits_gradient(x, self.of_logits);
        let of_target = B::float_cast(of_target, dtype.into());
        B::float_scatter(1, dx, self.targets, of_target, IndexingUpdateOp::Add)
    }

    /// The logits without those of the targets, and the gradients of these: the difference `p - q` is made in f32, and rounded
    /// once. In half precision `q dloss` is the same in many rows, and so would be its error.
    fn without_targets(&self, x: FloatTensor<B>) -> (FloatTensor<B>, FloatTensor<B>) {
        let LogitsGradient { log_sum_exp, of_probability, .. } = &self.of_logits;
        let bools = get_or_init_device_settings::<B>(&x.device()).bool_dtype;
        let zero_if = |value, mask: BoolTensor<B>| B::float_mask_fill(value, mask, 0.into());
        let here = |value| match &self.elsewhere {
            Some(elsewhere) => zero_if(value, elsewhere.clone()),
            None => value,
        };
        let of_probability = widen::<B>(of_probability.clone());
        let nothing = B::float_equal_elem(of_probability.clone(), 0.into(), bools);
        let picked = widen::<B>(B::float_gather(1, x.clone(), self.targets.clone()));
        let probability = B::float_exp(B::float_sub(picked, widen::<B>(log_sum_exp.clone())));
        let of_logit = here(zero_if(B::float_mul(probability, of_probability), nothing));
        let of_target = B::float_add(widen::<B>(self.of_target.clone()), of_logit);
        let shape = of_target.shape();
        let infinity = B::float_full(shape, f32::NEG_INFINITY.into(), &x.device(), x.dtype().into());
        let x = B::float_scatter(1, x, self.targets.clone(), here(infinity), IndexingUpdateOp::Add);
        (x, of_target)
    }

    /// That of the logits of some classes.
    pub(crate) fn columns(&self, columns: &Range<usize>) -> Self {
        let LogitsGradient { log_sum_exp, of_probability, of_weight, weights } = &self.of_logits;
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
                of_probability: of_probability.clone(),
                of_weight: of_weight.clone(),
                weights: weights.clone().map(of_columns),
            },
            targets: B::int_mask_fill(targets, elsewhere.clone(), 0.into()),
            of_target: B::float_mask_fill(self.of_target.clone(), elsewhere.clone(), 0.into()),
            elsewhere: Some(elsewhere),
        }
    }
}

#[derive(Debug)]
struct CrossEntropy;

/// What the backward pass reads.
#[derive(Clone, Debug)]
struct Saved<B: MemBackend> {
    x: Kept,
    /// Of every row, `[rows, 1]`.
    log_sum_exp: FloatTensor<B>,
    labels: Labels<B>,
}

impl<B: MemBackend> Backward<B, 1> for CrossEntropy {
    type State = Saved<B>;

    fn backward(self, ops: Ops<Saved<B>, 1>, grads: &mut Gradients, checkpointer: &mut Checkpointer) {
        let Saved { x, log_sum_exp, labels } = ops.state;
        let x = x.get::<B>(checkpointer);
        unary::<B, _>(ops.parents, ops.node, grads, |dloss| {
            let shape = log_sum_exp.shape();
            let dloss = B::float_cast(B::float_reshape(dloss, shape), log_sum_exp.dtype().into());
            let classes = x.shape()[1];
            labels.gradient(log_sum_exp, dloss, classes).of(x)
        });
    }
}
