//! The losses and their gradient, composed of Burn's operations.
use super::{Classes, Labels, RowLosses, parts};
use crate::backend::{wide, widen};
use burn::backend::{
    Backend, TensorMetadata, get_or_init_device_settings,
    tensor::{BoolTensor, FloatTensor, IndexingUpdateOp, IntTensor},
};
use burn::tensor::{DType, Shape, Slice};
use core::ops::Range;

/// See [`CrossEntropyKernels::row_losses`](super::CrossEntropyKernels::row_losses).
pub(super) fn losses<B: Backend>(x: FloatTensor<B>, labels: &Labels<B>) -> RowLosses<B> {
    let log_sum_exp = log_sum_exp::<B>(x.clone());
    RowLosses { losses: labels.losses(x, log_sum_exp.clone()), log_sum_exp }
}

/// See [`CrossEntropyKernels::row_gradients`](super::CrossEntropyKernels::row_gradients).
pub(super) fn gradients<B: Backend>(
    x: FloatTensor<B>,
    labels: &Labels<B>,
    log_sum_exp: FloatTensor<B>,
    dloss: FloatTensor<B>,
    classes: Classes,
) -> FloatTensor<B> {
    let log_sum_exp = both_parts::<B>(&x, log_sum_exp);
    let gradient = labels.gradient(log_sum_exp, dloss, classes.of);
    match classes.range.len() == classes.of {
        true => gradient.of(x),
        false => gradient.columns(&classes.range).of(x),
    }
}

/// Both parts of `log_sum_exp`. If only the second is given, the first is the largest logit of every row of `x`.
pub(super) fn both_parts<B: Backend>(x: &FloatTensor<B>, log_sum_exp: FloatTensor<B>) -> FloatTensor<B> {
    match log_sum_exp.shape()[1] {
        1 => B::float_cat(vec![widen::<B>(B::float_max_dim(x.clone(), 1)), log_sum_exp], 1),
        _ => log_sum_exp,
    }
}

/// [`RowLosses::log_sum_exp`] of every row of `[rows, classes]`, in f32 at least.
pub(crate) fn log_sum_exp<B: Backend>(x: FloatTensor<B>) -> FloatTensor<B> {
    let (classes, dtype) = (x.shape()[1], x.dtype());
    let max = B::float_max_dim(x.clone(), 1);
    let exp = B::float_exp(B::float_sub(x, max.clone()));
    // In f16 the sum of more ones may be infinite.
    let parts = if dtype == DType::F16 { classes.div_ceil(1 << 15).next_power_of_two() } else { 1 };
    let exp = if parts > 1 { B::float_mul_scalar(exp, (parts as f64).recip().into()) } else { exp };
    let sum = B::float_mul_scalar(widen::<B>(B::float_sum_dim(exp, 1)), parts.into());
    B::float_cat(vec![widen::<B>(max), B::float_log(sum)], 1)
}

impl<B: Backend> Labels<B> {
    /// `-sum(q w log p)` of every row, `[rows, 1]`, of the dtype of `log_sum_exp`.
    fn losses(&self, x: FloatTensor<B>, log_sum_exp: FloatTensor<B>) -> FloatTensor<B> {
        let classes = x.shape()[1];
        let picked = picked::<B>(x.clone(), self.targets.clone());
        let picked = B::float_cast(picked, log_sum_exp.dtype().into());
        let [largest, log] = parts::<B>(log_sum_exp.clone());
        let loss = self.times_target(B::float_sub(log, B::float_sub(picked, largest)));
        match self.spread(classes) {
            None => loss,
            Some(spread) => {
                let sum = sum_log_probabilities::<B>(x, log_sum_exp, self.weights.clone());
                B::float_sub(loss, B::float_mul_scalar(sum, spread.into()))
            }
        }
    }

    /// How logits of `classes` classes become their gradient, given their `log_sum_exp`, and `dloss` `[rows, 1]` of its dtype.
    fn gradient(
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

    /// The part of `q` that every class gets, whatever the target.
    fn spread(&self, classes: usize) -> Option<f64> {
        self.smoothing.map(|smoothing| f64::from(smoothing / classes as f32))
    }
}

/// The element of every row of `x` `[rows, classes]` that `targets` `[rows, 1]` names, `[rows, 1]`.
///
/// The third axis keeps fusion away from the gather. Burn 0.22.1 fuses a gather on two axes with operations of the width of `x`, and then
/// reads the targets of other rows. (For `select` and `cat` it is careful.)
fn picked<B: Backend>(x: FloatTensor<B>, targets: IntTensor<B>) -> FloatTensor<B> {
    let [rows, classes] = x.shape().dims();
    let x = B::float_reshape(x, Shape::new([rows, 1, classes]));
    let picked = B::float_gather(2, x, B::int_reshape(targets, Shape::new([rows, 1, 1])));
    B::float_reshape(picked, Shape::new([rows, 1]))
}

/// How logits become their gradient.
struct LabelsGradient<B: Backend> {
    of_logits: LogitsGradient<B>,
    /// `[rows, 1]`
    targets: IntTensor<B>,
    /// What is added to the gradients of the logits of the targets, `[rows, 1]`.
    target_term: FloatTensor<B>,
    /// The rows whose target is not one of these classes, `[rows, 1]`. Their `targets` mean nothing, and their `target_term` is 0.
    elsewhere: Option<BoolTensor<B>>,
}

impl<B: Backend> LabelsGradient<B> {
    /// The gradient of logits `[rows, classes]`, in place if they are the only handle of their tensor.
    fn of(self, x: FloatTensor<B>) -> FloatTensor<B> {
        let dtype = x.dtype();
        let (x, target_term) =
            if wide(dtype) == dtype { (x, self.target_term.clone()) } else { self.without_targets(x) };
        let dx = logits_gradient(x, self.of_logits);
        let target_term = B::float_cast(target_term, dtype.into());
        B::float_scatter(1, dx, self.targets, target_term, IndexingUpdateOp::Add)
    }

    /// The logits, with minus infinity at the targets, and the gradients at the targets. Their difference `p - q` is computed in f32 and
    /// rounded once. Rounded to half precision before, `q dloss` would have the same error in many rows.
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

    /// The gradient of the logits of some classes.
    fn columns(&self, columns: &Range<usize>) -> Self {
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

/// How logits of shape `[rows, classes]` become their gradient,
/// `probability_factor exp(x - log_sum_exp) + weight_factor weights`.
struct LogitsGradient<B: Backend> {
    /// See [`RowLosses::log_sum_exp`].
    log_sum_exp: FloatTensor<B>,
    /// `[rows, 1]`, of the dtype of `log_sum_exp`.
    probability_factor: FloatTensor<B>,
    /// `[rows, 1]`, of the dtype of `log_sum_exp`; missing if 0.
    weight_factor: Option<FloatTensor<B>>,
    /// `[classes]`, of the dtype of the logits; missing if all are 1.
    weights: Option<FloatTensor<B>>,
}

/// `sum(weights (x - log_sum_exp))` of every row of `[rows, classes]`: `[rows, 1]`, of the dtype of `log_sum_exp`.
fn sum_log_probabilities<B: Backend>(
    x: FloatTensor<B>,
    log_sum_exp: FloatTensor<B>,
    weights: Option<FloatTensor<B>>,
) -> FloatTensor<B> {
    let (classes, dtype) = (x.shape()[1], x.dtype());
    let [largest, log] = parts::<B>(log_sum_exp);
    let terms = B::float_sub(x, B::float_cast(largest, dtype.into()));
    let terms = match weights.clone() {
        Some(weights) => B::float_mul(terms, one_row::<B>(weights)),
        None => terms,
    };
    // By way of the mean, since the sum may exceed f16.
    let mean = widen::<B>(B::float_mean_dim(terms, 1));
    let log = match weights {
        None => log,
        Some(weights) => {
            let weight = B::float_reshape(widen::<B>(B::float_mean(weights)), Shape::new([1, 1]));
            B::float_mul(log, weight)
        }
    };
    B::float_mul_scalar(B::float_sub(mean, log), classes.into())
}

/// The `gradient` of logits `x` `[rows, classes]`. A row with factors of 0, such as padding, gets 0, whatever its logits are.
fn logits_gradient<B: Backend>(x: FloatTensor<B>, gradient: LogitsGradient<B>) -> FloatTensor<B> {
    let LogitsGradient { log_sum_exp, probability_factor, weight_factor, weights } = gradient;
    let bools = get_or_init_device_settings::<B>(&x.device()).bool_dtype;
    let is_zero = |factors: FloatTensor<B>| B::float_equal_elem(factors, 0.into(), bools);
    let nothing = is_zero(probability_factor.clone());
    let nothing = match weight_factor.clone() {
        None => nothing,
        Some(weight_factor) => B::bool_and(nothing, is_zero(weight_factor)),
    };
    let dtype = x.dtype();
    let narrow = |of_rows| B::float_cast(of_rows, dtype.into());
    let [largest, log] = parts::<B>(log_sum_exp);
    let exponentials = B::float_exp(B::float_sub(x, narrow(largest)));
    let factor = B::float_mul(probability_factor, B::float_exp(B::float_neg(log)));
    let weight_factor = weight_factor.map(narrow);
    let dx = B::float_mul(exponentials, narrow(factor));
    let dx = match (weight_factor, weights) {
        (None, _) => dx,
        (Some(weight_factor), None) => B::float_add(dx, weight_factor),
        (Some(weight_factor), Some(weights)) => {
            B::float_add(dx, B::float_mul(weight_factor, one_row::<B>(weights)))
        }
    };
    let nothing = B::bool_expand(nothing, dx.shape());
    B::float_mask_fill(dx, nothing, 0.into())
}

/// `[1, classes]`: device backends broadcast tensors of one rank only.
fn one_row<B: Backend>(weights: FloatTensor<B>) -> FloatTensor<B> {
    let [classes] = weights.shape().dims();
    B::float_reshape(weights, Shape::new([1, classes]))
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use super::super::CrossEntropyKernels;
    use super::*;
    use crate::backend::testing::{Composed, assert_close, composed, drawn, random};
    use burn::backend::{
        Distribution, Flex,
        flex::FlexDevice,
        ops::{FloatTensorOps, IntTensorOps},
        read_sync,
    };
    use burn::tensor::{FloatDType, IntDType};

    #[test]
    fn default_bodies_equal_the_kernels() {
        const ROWS: usize = 5;
        for classes in [2, 19, 70, 300] {
            let x = Flex::float_mul_scalar(random(&[ROWS, classes]), 3.0.into());
            let dloss = random(&[ROWS, 1]);
            let targets = || {
                // In all parts of the classes.
                let rows = Flex::int_mul_scalar(
                    Flex::int_arange(0..ROWS as i64, &FlexDevice, IntDType::I64),
                    37.into(),
                );
                Flex::int_remainder_scalar(rows, (classes as i64).into())
            };
            let weights = random(&[classes]);
            for (weights, smoothing) in [None, Some(weights)]
                .into_iter()
                .flat_map(|weights| [None, Some(0.1)].map(|s| (weights.clone(), s)))
            {
                let of_composed =
                    Labels::<Composed>::new(targets(), weights.as_ref().map(composed), smoothing);
                let labels = Labels::<Flex>::new(targets(), weights, smoothing);
                let expected = Composed::row_losses(composed(&x), &of_composed);
                let RowLosses { losses, log_sum_exp } = Flex::row_losses(x.clone(), &labels);
                assert_close("log_sum_exp", expected.log_sum_exp.clone(), log_sum_exp.clone());
                assert_close("losses", expected.losses, losses);

                let [_, log] = parts::<Flex>(log_sum_exp.clone());
                let some = classes / 3..classes - classes / 4;
                for (range, log_sum_exp) in
                    [(0..classes, log), (0..classes, log_sum_exp.clone()), (some, log_sum_exp)]
                {
                    let columns = |x: &FloatTensor<Flex>| {
                        let slices = [Slice::from(0..ROWS), Slice::from(range.clone())];
                        Flex::float_mul_scalar(Flex::float_slice(x.clone(), &slices), 1.0.into())
                    };
                    let classes = || Classes { range: range.clone(), of: classes };
                    let body = Composed::row_gradients(
                        composed(&columns(&x)),
                        &of_composed,
                        expected.log_sum_exp.clone(),
                        composed(&dloss),
                        classes(),
                    );
                    let shared = columns(&x);
                    let of =
                        |x| Flex::row_gradients(x, &labels, log_sum_exp.clone(), dloss.clone(), classes());
                    assert_close("dx", body.clone(), of(shared.clone()));
                    assert_close("dx in place", body, of(columns(&x)));
                    drop(shared);
                }
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
            log_sum_exp: log_sum_exp::<Composed>(x.clone()),
            probability_factor: composed(&full([1, 1], 32768.0, FloatDType::F32)),
            weight_factor: None,
            weights: None,
        };
        let dx = logits_gradient::<Composed>(x, gradient).into_primitive();
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
            let log = log_sum_exp::<Flex>(x_f64.clone());
            let exact_losses = numbers(labels.losses(x_f64.clone(), log.clone()));
            let dloss_f64 = Flex::float_cast(dloss(), FloatDType::F64);
            let exact_dx = numbers(labels.gradient(log, dloss_f64, CLASSES).of(x_f64));

            let labels = Labels::<Composed>::new(targets, Some(composed(&weights)), smoothing);
            let (x, log) = (composed(&x), log_sum_exp::<Composed>(composed(&x)));
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
