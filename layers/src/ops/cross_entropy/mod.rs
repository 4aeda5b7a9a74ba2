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
    extension::extension,
    step::{BackwardPass, Inputs, Operation, Plan, Recorder, Run, Tracking, given},
};
use crate::backend::device_backends;
use burn::backend::{
    Backend, TensorMetadata, get_or_init_device_settings,
    tensor::{FloatTensor, IntTensor},
};
use burn::tensor::Shape;

#[cfg(any(feature = "flex", feature = "ndarray"))]
mod cpu;
mod labels;

pub use labels::Labels;

extension! {
    /// Cross entropies.
    pub trait CrossEntropyOps(CrossEntropyKernels) {
        /// The loss of every row; x `[rows, classes]`, targets `[rows]`, weights `[classes]` and untracked.
        fn memsave_cross_entropy(
            x: FloatTensor<Self>,
            targets: IntTensor<Self>,
            #[extension_type] weights: MaybeTensor<Self>,
            smoothing: Option<f32>,
        ) -> FloatTensor<Self> {
            let weights = weights.into_option().map(Self::plain);
            let labels = Labels::<<Self as Run>::Plain>::new(targets, weights, smoothing);
            Self::run(CrossEntropy { labels }, [Some(x)])
        }
    }
}

const X: usize = 0;

/// The loss of every row.
#[derive(Clone, Debug)]
pub struct CrossEntropy<B: Backend> {
    labels: Labels<B>,
}

impl<B: CrossEntropyKernels> CrossEntropy<B> {
    /// The losses, of the dtype of `x`, from its logits.
    fn losses(&self, x: FloatTensor<B>, log_sum_exp: FloatTensor<B>) -> FloatTensor<B> {
        let ([rows, _], dtype) = (x.shape().dims(), x.dtype());
        let losses = self.labels.losses(x, log_sum_exp);
        B::float_reshape(B::float_cast(losses, dtype.into()), Shape::new([rows]))
    }
}

impl<B: CrossEntropyKernels> Operation<B, 1> for CrossEntropy<B> {
    const INPUTS: [&'static str; 1] = ["x"];
    type Saved = Saved<B>;

    fn name(&self) -> &'static str {
        "cross_entropy"
    }

    fn plan(&self, inputs: &Tracking<B, 1>) -> Plan<1> {
        Plan::nothing().keep_if(inputs.tracked(X), X, "x is tracked")
    }

    fn forward(&self, [x]: Inputs<B, 1>) -> FloatTensor<B> {
        let x = given(x);
        let log_sum_exp = B::log_sum_exp(x.clone());
        self.losses(x, log_sum_exp)
    }

    fn forward_saving(&self, [x]: Inputs<B, 1>, recorder: &Recorder<1>) -> (FloatTensor<B>, Saved<B>) {
        const REASON: &str = "x is tracked";
        let x = given(x);
        let log_sum_exp = recorder.ledger().tensor("log_sum_exp", B::log_sum_exp(x.clone()), REASON);
        let labels = self.labels.clone().reported(recorder.ledger(), REASON);
        (self.losses(x, log_sum_exp.clone()), Saved { log_sum_exp, labels })
    }

    fn backward(saved: Saved<B>, dloss: FloatTensor<B>, pass: &mut BackwardPass<B, 1>) {
        let Saved { log_sum_exp, labels } = saved;
        let x = given(pass.take(X));
        let classes = x.shape()[1];
        let dloss = B::float_cast(B::float_reshape(dloss, log_sum_exp.shape()), log_sum_exp.dtype().into());
        pass.give(X, labels.gradient(log_sum_exp, dloss, classes).of(x));
    }
}

/// What the backward pass reads.
#[derive(Clone, Debug)]
pub struct Saved<B: Backend> {
    /// Of every row, `[rows, 1]`.
    log_sum_exp: FloatTensor<B>,
    labels: Labels<B>,
}

/// How logits of shape `[rows, classes]` become their gradient,
/// `probability_factor exp(x - log_sum_exp) + weight_factor weights`.
pub struct LogitsGradient<B: Backend> {
    /// As [`CrossEntropyKernels::log_sum_exp`] returns it, `[rows, 1]`.
    pub log_sum_exp: FloatTensor<B>,
    /// `[rows, 1]`, of the dtype of `log_sum_exp`.
    pub probability_factor: FloatTensor<B>,
    /// The same; missing if 0.
    pub weight_factor: Option<FloatTensor<B>>,
    /// `[classes]`, of the dtype of the logits; missing if all are 1.
    pub weights: Option<FloatTensor<B>>,
}

/// The kernels.
pub trait CrossEntropyKernels: Backend {
    /// `log(sum(exp(x)))` of every row of `[rows, classes]`: `[rows, 1]`, in f32 for half precision where the backend can.
    fn log_sum_exp(x: FloatTensor<Self>) -> FloatTensor<Self> {
        let max = Self::float_max_dim(x.clone(), 1);
        let sum = Self::float_sum_dim(Self::float_exp(Self::float_sub(x, max.clone())), 1);
        Self::float_add(max, Self::float_log(sum))
    }

    /// `sum(weights (x - log_sum_exp))` of every row of `[rows, classes]`: `[rows, 1]`, of the dtype of `log_sum_exp`.
    fn sum_log_probabilities(
        x: FloatTensor<Self>,
        log_sum_exp: FloatTensor<Self>,
        weights: Option<FloatTensor<Self>>,
    ) -> FloatTensor<Self> {
        let log_probabilities = Self::float_sub(x, log_sum_exp);
        Self::float_sum_dim(
            match weights {
                Some(weights) => Self::float_mul(log_probabilities, one_row::<Self>(weights)),
                None => log_probabilities,
            },
            1,
        )
    }

    /// What `gradient` says of logits `[rows, classes]`. A row with factors of 0, such as padding, gets 0, whatever its logits are.
    fn logits_gradient(x: FloatTensor<Self>, gradient: LogitsGradient<Self>) -> FloatTensor<Self> {
        let LogitsGradient { log_sum_exp, probability_factor, weight_factor, weights } = gradient;
        let bools = get_or_init_device_settings::<Self>(&x.device()).bool_dtype;
        let is_zero = |factors: FloatTensor<Self>| Self::float_equal_elem(factors, 0.into(), bools);
        let nothing = is_zero(probability_factor.clone());
        let nothing = match weight_factor.clone() {
            None => nothing,
            Some(weight_factor) => Self::bool_and(nothing, is_zero(weight_factor)),
        };
        let dx = Self::float_mul(Self::float_exp(Self::float_sub(x, log_sum_exp)), probability_factor);
        let dx = match (weight_factor, weights) {
            (None, _) => dx,
            (Some(weight_factor), None) => Self::float_add(dx, weight_factor),
            (Some(weight_factor), Some(weights)) => {
                Self::float_add(dx, Self::float_mul(weight_factor, one_row::<Self>(weights)))
            }
        };
        let nothing = Self::bool_expand(nothing, dx.shape());
        Self::float_mask_fill(dx, nothing, 0.into())
    }
}
device_backends!(CrossEntropyKernels);

/// `[1, classes]`: device backends broadcast tensors of one rank only.
fn one_row<B: Backend>(weights: FloatTensor<B>) -> FloatTensor<B> {
    let [classes] = weights.shape().dims();
    B::float_reshape(weights, Shape::new([1, classes]))
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use super::*;
    use crate::ops::testing::{Composed, assert_close, composed, random};
    use burn::backend::{Flex, ops::FloatTensorOps};

    #[test]
    fn default_bodies_equal_the_kernels() {
        let x = Flex::float_mul_scalar(random(&[5, 19]), 3.0.into());
        let (weights, rows) = (random(&[19]), || random(&[5, 1]));
        let log = Flex::log_sum_exp(x.clone());
        assert_close("log_sum_exp", Composed::log_sum_exp(composed(&x)), log.clone());
        for weights in [None, Some(weights)] {
            let composed_weights = || weights.as_ref().map(composed);
            let body = Composed::sum_log_probabilities(composed(&x), composed(&log), composed_weights());
            let cpu = Flex::sum_log_probabilities(x.clone(), log.clone(), weights.clone());
            assert_close("sum of the logarithms", body, cpu);
            for weight_factor in [None, Some(rows())] {
                let probability_factor = rows();
                let gradient = || LogitsGradient::<Flex> {
                    log_sum_exp: log.clone(),
                    probability_factor: probability_factor.clone(),
                    weight_factor: weight_factor.clone(),
                    weights: weights.clone(),
                };
                let cpu = Flex::logits_gradient(x.clone(), gradient());
                let composed_gradient = LogitsGradient::<Composed> {
                    log_sum_exp: composed(&log),
                    probability_factor: composed(&probability_factor),
                    weight_factor: weight_factor.as_ref().map(composed),
                    weights: composed_weights(),
                };
                assert_close("dx", Composed::logits_gradient(composed(&x), composed_gradient), cpu.clone());
                let unique = Flex::float_mul_scalar(x.clone(), 1.0.into());
                let in_place = Flex::logits_gradient(unique, gradient());
                assert_close("dx in place", composed(&in_place), cpu);
            }
        }
    }
}
