//! Rows of a cross entropy by Burn's operations.
use crate::backend::LogitsGradient;
use burn::backend::{Backend, TensorMetadata, get_or_init_device_settings, tensor::FloatTensor};
use burn::tensor::Shape;

/// `[1, classes]`: device backends broadcast tensors of one rank only.
fn one_row<B: Backend>(weights: FloatTensor<B>) -> FloatTensor<B> {
    let [classes] = weights.shape().dims();
    B::float_reshape(weights, Shape::new([1, classes]))
}

/// See [`MemBackend::log_sum_exp`](crate::backend::MemBackend::log_sum_exp).
pub fn log_sum_exp<B: Backend>(x: FloatTensor<B>) -> FloatTensor<B> {
    let max = B::float_max_dim(x.clone(), 1);
    let sum = B::float_sum_dim(B::float_exp(B::float_sub(x, max.clone())), 1);
    B::float_add(max, B::float_log(sum))
}

/// See [`MemBackend::sum_log_probabilities`](crate::backend::MemBackend::sum_log_probabilities).
pub fn sum_log_probabilities<B: Backend>(
    x: FloatTensor<B>,
    log_sum_exp: FloatTensor<B>,
    weights: Option<FloatTensor<B>>,
) -> FloatTensor<B> {
    let log_probabilities = B::float_sub(x, log_sum_exp);
    B::float_sum_dim(
        match weights {
            Some(weights) => B::float_mul(log_probabilities, one_row::<B>(weights)),
            None => log_probabilities,
        },
        1,
    )
}

/// See [`MemBackend::logits_gradient`](crate::backend::MemBackend::logits_gradient).
pub fn logits_gradient<B: Backend>(x: FloatTensor<B>, gradient: LogitsGradient<B>) -> FloatTensor<B> {
    let LogitsGradient { log_sum_exp, of_probability, of_weight, weights } = gradient;
    let bools = get_or_init_device_settings::<B>(&x.device()).bool_dtype;
    let is_zero = |factors: FloatTensor<B>| B::float_equal_elem(factors, 0.into(), bools);
    let nothing = is_zero(of_probability.clone());
    let nothing = match of_weight.clone() {
        None => nothing,
        Some(of_weight) => B::bool_and(nothing, is_zero(of_weight)),
    };
    let dx = B::float_mul(B::float_exp(B::float_sub(x, log_sum_exp)), of_probability);
    let dx = match (of_weight, weights) {
        (None, _) => dx,
        (Some(of_weight), None) => B::float_add(dx, of_weight),
        (Some(of_weight), Some(weights)) => B::float_add(dx, B::float_mul(of_weight, one_row::<B>(weights))),
    };
    let nothing = B::bool_expand(nothing, dx.shape());
    B::float_mask_fill(dx, nothing, 0.into())
}
