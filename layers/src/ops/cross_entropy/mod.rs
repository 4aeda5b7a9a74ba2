//! Cross entropy of rows of logits.
//!
//! | | |
//! | --- | --- |
//! | computes | `loss = -sum(q w log p)` per row; `p = softmax(x)`, `w` the class weights, |
//! | | `q = (1 - smoothing) [class is target] + smoothing / classes` |
//! | keeps | `x` (a handle), `log(sum(exp(x - max(x))))` per row, the targets and the weights (handles) |
//! | backward | `dx = dloss (p sum(q w) - q w)`, in place if nothing else holds `x` |
//!
//! Stock Burn computes the log-softmax first, in several steps, which need two tensors of the size of `x` at the peak.
use super::{
    MaybeTensor,
    extension::extension,
    step::{BackwardPass, Inputs, Operation, Plan, Recorder, Run, Tracking, given},
};
use crate::backend::{composing_backends, widen};
use burn::backend::{
    Backend, TensorMetadata, get_or_init_device_settings,
    tensor::{FloatTensor, IntTensor},
};
use burn::tensor::{DType, Shape, Slice};
use core::ops::Range;

#[cfg(any(feature = "flex", feature = "ndarray"))]
pub(crate) mod cpu;
#[cfg(any(feature = "wgpu", feature = "cuda"))]
mod cube;
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
    /// The losses, of the dtype of `x`, and [`RowLosses::log_sum_exp`].
    fn losses(&self, x: FloatTensor<B>) -> (FloatTensor<B>, FloatTensor<B>) {
        let ([rows, _], dtype) = (x.shape().dims(), x.dtype());
        let RowLosses { losses, log_sum_exp } = B::row_losses(x, &self.labels);
        (B::float_reshape(B::float_cast(losses, dtype.into()), Shape::new([rows])), log_sum_exp)
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
        self.losses(given(x)).0
    }

    fn forward_saving(&self, [x]: Inputs<B, 1>, recorder: &Recorder<1>) -> (FloatTensor<B>, Saved<B>) {
        const REASON: &str = "x is tracked";
        let (losses, log_sum_exp) = self.losses(given(x));
        let [_, log] = parts::<B>(log_sum_exp);
        // A copy: a view would keep both parts, and the largest is taken again.
        let log = recorder.ledger().tensor("log_sum_exp", B::float_mul_scalar(log, 1.0.into()), REASON);
        let labels = self.labels.clone().reported(recorder.ledger(), REASON);
        (losses, Saved { log, labels })
    }

    fn backward(saved: Saved<B>, dloss: FloatTensor<B>, pass: &mut BackwardPass<B, 1>) {
        let Saved { log, labels } = saved;
        let x = given(pass.take(X));
        let classes = x.shape()[1];
        let dloss = B::float_cast(B::float_reshape(dloss, log.shape()), log.dtype().into());
        let log_sum_exp = B::float_cat(vec![B::largest(x.clone()), log], 1);
        pass.give(X, B::row_gradients(x, &labels, log_sum_exp, dloss, Classes::all(classes)));
    }
}

/// What the backward pass reads.
#[derive(Clone, Debug)]
pub struct Saved<B: Backend> {
    /// The second part of [`CrossEntropyKernels::log_sum_exp`], `[rows, 1]`.
    log: FloatTensor<B>,
    labels: Labels<B>,
}

/// The losses of rows, and what their gradient is made of; both of f32 at least.
pub struct RowLosses<B: Backend> {
    /// `-sum(q w log p)`, `[rows, 1]`.
    pub losses: FloatTensor<B>,
    /// See [`CrossEntropyKernels::log_sum_exp`].
    pub log_sum_exp: FloatTensor<B>,
}

/// The classes that columns of logits belong to.
#[derive(Clone, Debug)]
pub struct Classes {
    /// Those of the columns.
    pub range: Range<usize>,
    /// How many there are in all.
    pub of: usize,
}

impl Classes {
    /// All of them.
    pub fn all(of: usize) -> Self {
        Self { range: 0..of, of }
    }
}

/// How logits of shape `[rows, classes]` become their gradient,
/// `probability_factor exp(x - log_sum_exp) + weight_factor weights`.
pub struct LogitsGradient<B: Backend> {
    /// See [`CrossEntropyKernels::log_sum_exp`].
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
    /// The losses of all rows of `[rows, classes]`.
    fn row_losses(x: FloatTensor<Self>, labels: &Labels<Self>) -> RowLosses<Self> {
        let log_sum_exp = Self::log_sum_exp(x.clone());
        RowLosses { losses: labels.losses(x, log_sum_exp.clone()), log_sum_exp }
    }

    /// The gradient of logits `[rows, classes]`, in place if nothing else holds them. A row with a `dloss` of 0, such as padding,
    /// gets 0, whatever its logits are. `dloss` is `[rows, 1]`, of f32 at least.
    fn row_gradients(
        x: FloatTensor<Self>,
        labels: &Labels<Self>,
        log_sum_exp: FloatTensor<Self>,
        dloss: FloatTensor<Self>,
        classes: Classes,
    ) -> FloatTensor<Self> {
        let gradient = labels.gradient(log_sum_exp, dloss, classes.of);
        match classes.range.len() == classes.of {
            true => gradient.of(x),
            false => gradient.columns(&classes.range).of(x),
        }
    }

    /// `log(sum(exp(x)))` of every row of `[rows, classes]`, in two parts: the largest `x`, and `log(sum(exp(x - largest)))`;
    /// `[rows, 2]`, of f32 at least. In one number the second part would be lost where the first is large: with logits of 1e8 all of it.
    fn log_sum_exp(x: FloatTensor<Self>) -> FloatTensor<Self> {
        let (classes, dtype) = (x.shape()[1], x.dtype());
        let max = Self::float_max_dim(x.clone(), 1);
        let exp = Self::float_exp(Self::float_sub(x, max.clone()));
        // The sum of more ones may be more than f16 can hold.
        let parts = if dtype == DType::F16 { classes.div_ceil(1 << 15).next_power_of_two() } else { 1 };
        let exp = if parts > 1 { Self::float_mul_scalar(exp, (parts as f64).recip().into()) } else { exp };
        let sum = Self::float_mul_scalar(widen::<Self>(Self::float_sum_dim(exp, 1)), parts.into());
        Self::float_cat(vec![widen::<Self>(max), Self::float_log(sum)], 1)
    }

    /// The largest element of every row of `[rows, classes]`: `[rows, 1]`, of f32 at least.
    fn largest(x: FloatTensor<Self>) -> FloatTensor<Self> {
        widen::<Self>(Self::float_max_dim(x, 1))
    }

    /// `sum(weights (x - log_sum_exp))` of every row of `[rows, classes]`: `[rows, 1]`, of the dtype of `log_sum_exp`.
    fn sum_log_probabilities(
        x: FloatTensor<Self>,
        log_sum_exp: FloatTensor<Self>,
        weights: Option<FloatTensor<Self>>,
    ) -> FloatTensor<Self> {
        let (classes, dtype) = (x.shape()[1], x.dtype());
        let [largest, log] = parts::<Self>(log_sum_exp);
        let terms = Self::float_sub(x, Self::float_cast(largest, dtype.into()));
        let terms = match weights.clone() {
            Some(weights) => Self::float_mul(terms, one_row::<Self>(weights)),
            None => terms,
        };
        // By the mean, since the sum may be more than f16 can hold.
        let mean = widen::<Self>(Self::float_mean_dim(terms, 1));
        let log = match weights {
            None => log,
            Some(weights) => {
                let weight =
                    Self::float_reshape(widen::<Self>(Self::float_mean(weights)), Shape::new([1, 1]));
                Self::float_mul(log, weight)
            }
        };
        Self::float_mul_scalar(Self::float_sub(mean, log), classes.into())
    }

    /// The `gradient` of logits `x` `[rows, classes]`. A row with factors of 0, such as padding, gets 0, whatever its logits are.
    fn logits_gradient(x: FloatTensor<Self>, gradient: LogitsGradient<Self>) -> FloatTensor<Self> {
        let LogitsGradient { log_sum_exp, probability_factor, weight_factor, weights } = gradient;
        let bools = get_or_init_device_settings::<Self>(&x.device()).bool_dtype;
        let is_zero = |factors: FloatTensor<Self>| Self::float_equal_elem(factors, 0.into(), bools);
        let nothing = is_zero(probability_factor.clone());
        let nothing = match weight_factor.clone() {
            None => nothing,
            Some(weight_factor) => Self::bool_and(nothing, is_zero(weight_factor)),
        };
        let dtype = x.dtype();
        let narrow = |of_rows| Self::float_cast(of_rows, dtype.into());
        let [largest, log] = parts::<Self>(log_sum_exp);
        let exponentials = Self::float_exp(Self::float_sub(x, narrow(largest)));
        let factor = Self::float_mul(probability_factor, Self::float_exp(Self::float_neg(log)));
        let weight_factor = weight_factor.map(narrow);
        let dx = Self::float_mul(exponentials, narrow(factor));
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
composing_backends!(CrossEntropyKernels);

/// Both of [`CrossEntropyKernels::log_sum_exp`], `[rows, 1]` each. The largest logit is one, so that its dtype holds it.
pub(crate) fn parts<B: Backend>(log_sum_exp: FloatTensor<B>) -> [FloatTensor<B>; 2] {
    let rows = log_sum_exp.shape()[0];
    [0, 1]
        .map(|part| B::float_slice(log_sum_exp.clone(), &[Slice::from(0..rows), Slice::from(part..part + 1)]))
}

/// `[1, classes]`: device backends broadcast tensors of one rank only.
fn one_row<B: Backend>(weights: FloatTensor<B>) -> FloatTensor<B> {
    let [classes] = weights.shape().dims();
    B::float_reshape(weights, Shape::new([1, classes]))
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use super::*;
    use crate::ops::testing::{Composed, assert_close, composed, drawn, random};
    use burn::backend::{
        Distribution, Flex,
        flex::FlexDevice,
        ops::{FloatTensorOps, IntTensorOps},
        read_sync,
    };
    use burn::tensor::{FloatDType, IntDType};

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

    /// A loss scale of 2^15, and logits whose `log_sum_exp` f16 rounds by nearly 1.
    #[test]
    fn large_logits_and_factors_do_not_overflow_in_half_precision() {
        let full = |shape: [usize; 2], value: f32, dtype| {
            Flex::float_full(Shape::new(shape), value.into(), &FlexDevice, dtype)
        };
        let x = composed(&full([1, 3], 2048.0, FloatDType::F16));
        let gradient = LogitsGradient::<Composed> {
            log_sum_exp: Composed::log_sum_exp(x.clone()),
            probability_factor: composed(&full([1, 1], 32768.0, FloatDType::F32)),
            weight_factor: None,
            weights: None,
        };
        let dx = Composed::logits_gradient(x, gradient).into_primitive();
        let dx = read_sync(Flex::float_into_data(dx)).expect("a CPU tensor");
        assert!(dx.iter::<f32>().all(|dx| (dx / (32768.0 / 3.0) - 1.0).abs() < 2e-3), "{dx}");
    }

    /// Sums over more classes than f16 can count: of exponentials, of weights, of logarithms.
    #[test]
    fn many_classes_do_not_overflow_in_half_precision() {
        const CLASSES: usize = 80_000;
        let smoothing = Some(0.1);
        let random = |shape: &[usize], low, high| drawn(shape, Distribution::Uniform(low, high));
        let numbers = |x: FloatTensor<Flex>| {
            let data = read_sync(Flex::float_into_data(x)).expect("a CPU tensor");
            data.iter::<f64>().collect::<Vec<_>>()
        };
        for dtype in [FloatDType::F16, FloatDType::BF16] {
            let x = Flex::float_cast(random(&[2, CLASSES], -1.0, 1.0), dtype);
            let weights = Flex::float_cast(random(&[CLASSES], 1.0, 2.0), dtype);
            let dloss = || Flex::float_full(Shape::new([2, 1]), 4096.into(), &FlexDevice, FloatDType::F32);
            let targets = Flex::int_zeros(Shape::new([2]), &FlexDevice, IntDType::I64);

            let [x_f64, weights_f64] = [&x, &weights].map(|x| Flex::float_cast(x.clone(), FloatDType::F64));
            let labels = Labels::<Flex>::new(targets.clone(), Some(weights_f64), smoothing);
            let log = Flex::log_sum_exp(x_f64.clone());
            let exact_losses = numbers(labels.losses(x_f64.clone(), log.clone()));
            let dloss_f64 = Flex::float_cast(dloss(), FloatDType::F64);
            let exact_dx = numbers(labels.gradient(log, dloss_f64, CLASSES).of(x_f64));

            let labels = Labels::<Composed>::new(targets, Some(composed(&weights)), smoothing);
            let (x, log) = (composed(&x), Composed::log_sum_exp(composed(&x)));
            let losses = numbers(labels.losses(x.clone(), log.clone()).into_primitive());
            let close = |what, found: Vec<f64>, exact: Vec<f64>, tolerance: f64| {
                for (found, exact) in found.into_iter().zip(exact) {
                    assert!((found - exact).abs() <= tolerance * exact.abs(), "{what}: {found}, not {exact}");
                }
            };
            let is_f16 = dtype == FloatDType::F16;
            close("losses", losses, exact_losses, if is_f16 { 1e-3 } else { 1e-2 });
            let dloss = Composed::float_cast(composed(&dloss()), log.dtype().into());
            let dx = labels.gradient(log, dloss, CLASSES).of(x).into_primitive();
            // Probabilities of 1e-5, of which f16 has few digits, from logarithms of about -12, of which bf16 has.
            close("dx", numbers(dx), exact_dx, if is_f16 { 0.03 } else { 0.1 });
        }
    }
}
