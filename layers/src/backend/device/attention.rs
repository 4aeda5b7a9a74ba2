//! Rows of scores and weights of an attention by Burn's operations.
use crate::backend::attention::{ScoreGrads, ScoreRows, Scores, narrowed, widened};
use burn::backend::{
    Backend, TensorMetadata, get_or_init_device_settings,
    tensor::{BoolTensor, FloatTensor},
};
use burn::tensor::{DType, Shape};

type Float<B> = FloatTensor<B>;

/// The keys that a row does not see, `[1, 1, rows, keys]`.
fn later<B: Backend>(rows: &ScoreRows<B>, keys: usize, device: &B::Device) -> Option<BoolTensor<B>> {
    if !rows.scores.causal {
        return None;
    }
    let settings = get_or_init_device_settings::<B>(device);
    let offset = rows.all_keys as i64 - rows.all_queries as i64;
    let range = rows.queries.start as i64 + offset..rows.queries.end as i64 + offset;
    let shape = Shape::new([1, 1, rows.queries.len(), 1]);
    let last = B::int_reshape(B::int_arange(range, device, settings.int_dtype), shape);
    let keys_shape = Shape::new([1, 1, 1, keys]);
    let key = B::int_reshape(B::int_arange(0..keys as i64, device, settings.int_dtype), keys_shape);
    let shape = Shape::new([1, 1, rows.queries.len(), keys]);
    let (last, key) = (B::int_expand(last, shape.clone()), B::int_expand(key, shape));
    Some(B::int_lower(last, key, settings.bool_dtype))
}

/// The scores of products, and their slopes under a soft cap.
fn score<B: Backend>(products: Float<B>, rows: &ScoreRows<B>) -> (Float<B>, Option<Float<B>>) {
    let Scores { scale, softcap, masked, .. } = rows.scores;
    let (device, shape) = (products.device(), products.shape());
    let scores = B::float_mul_scalar(widened::<B>(products), scale.into());
    let (scores, slopes) = match softcap {
        Some(cap) => {
            let tanh = B::float_tanh(B::float_div_scalar(scores, cap.into()));
            let square = B::float_mul(tanh.clone(), tanh.clone());
            let slopes = B::float_add_scalar(B::float_neg(square), 1.0.into());
            (B::float_mul_scalar(tanh, cap.into()), Some(slopes))
        }
        None => (scores, None),
    };
    let fill = |scores, mask: Option<BoolTensor<B>>, value: f64| match mask {
        Some(mask) => B::float_mask_fill(scores, B::bool_expand(mask, shape.clone()), value.into()),
        None => scores,
    };
    let scores = fill(scores, rows.mask.clone(), masked);
    let scores = fill(scores, later::<B>(rows, shape[3], &device), f64::NEG_INFINITY);
    let scores = match rows.bias.clone() {
        Some(bias) => B::float_add(scores, widened::<B>(bias)),
        None => scores,
    };
    (scores, slopes)
}

/// See [`MemBackend::attention_weights`](crate::backend::MemBackend::attention_weights).
pub fn attention_weights<B: Backend>(products: Float<B>, rows: &ScoreRows<B>) -> (Float<B>, Float<B>) {
    let dtype = products.dtype();
    let (scores, _) = score::<B>(products, rows);
    let (lowest, smallest) = match scores.dtype() {
        DType::F64 => (f64::MIN, f64::MIN_POSITIVE),
        _ => (f64::from(f32::MIN), f64::from(f32::MIN_POSITIVE)),
    };
    let max = B::float_clamp_min(B::float_max_dim(scores.clone(), 3), lowest.into());
    let exponentials = B::float_exp(B::float_sub(scores, max.clone()));
    let sums = B::float_sum_dim(exponentials.clone(), 3);
    let sums = match rows.scores.quiet {
        true => B::float_add(sums, B::float_exp(B::float_neg(max.clone()))),
        false => sums,
    };
    let sums = B::float_clamp_min(sums, smallest.into());
    let weights = narrowed::<B>(B::float_div(exponentials, sums.clone()), dtype);
    (weights, B::float_add(B::float_log(sums), max))
}

/// See [`MemBackend::attention_weights_backward`](crate::backend::MemBackend::attention_weights_backward).
pub fn attention_weights_backward<B: Backend>(
    products: Float<B>,
    gradients: Float<B>,
    log_sums: Float<B>,
    rows: &ScoreRows<B>,
    wants_bias: bool,
) -> ScoreGrads<B> {
    let (dtype, shape) = (products.dtype(), products.shape());
    let (scores, slopes) = score::<B>(products, rows);
    let weights = B::float_exp(B::float_sub(scores, log_sums));
    let gradients = widened::<B>(gradients);
    let mean = B::float_sum_dim(B::float_mul(weights.clone(), gradients.clone()), 3);
    let of_scores = B::float_mul(weights.clone(), B::float_sub(gradients, mean));
    let bias = wants_bias.then(|| of_scores.clone());
    let products = B::float_mul_scalar(of_scores, rows.scores.scale.into());
    let products = match slopes {
        Some(slopes) => B::float_mul(products, slopes),
        None => products,
    };
    let products = match rows.mask.clone() {
        Some(mask) => B::float_mask_fill(products, B::bool_expand(mask, shape), 0.0.into()),
        None => products,
    };
    ScoreGrads { weights: narrowed::<B>(weights, dtype), products: narrowed::<B>(products, dtype), bias }
}
