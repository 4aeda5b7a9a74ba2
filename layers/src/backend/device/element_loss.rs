//! Losses of elements by Burn's operations.
use crate::backend::{ElementLoss, Side, element_loss::LOWEST_LOG, widen};
use burn::backend::{
    Backend, TensorMetadata, get_or_init_device_settings,
    tensor::{BoolTensor, FloatTensor},
};
use burn::tensor::Shape;

type Float<B> = FloatTensor<B>;

fn below<B: Backend>(x: Float<B>, v: f64) -> BoolTensor<B> {
    let bools = get_or_init_device_settings::<B>(&x.device()).bool_dtype;
    B::float_lower_elem(x, v.into(), bools)
}

fn above<B: Backend>(x: Float<B>, v: f64) -> BoolTensor<B> {
    let bools = get_or_init_device_settings::<B>(&x.device()).bool_dtype;
    B::float_greater_elem(x, v.into(), bools)
}

/// `v - x`
fn rest<B: Backend>(x: Float<B>, v: f64) -> Float<B> {
    B::float_add_scalar(B::float_neg(x), v.into())
}

/// `weight / x`, and 0 where the logarithm of `x` is not above the lowest.
fn log_slope<B: Backend>(weight: Float<B>, x: Float<B>) -> Float<B> {
    let clamped = below::<B>(x.clone(), LOWEST_LOG.exp().max(f64::from(f32::MIN_POSITIVE)));
    let x = B::float_mask_fill(x, clamped.clone(), 1.into());
    B::float_mask_fill(B::float_div(weight, x), clamped, 0.into())
}

/// See [`MemBackend::element_loss`](crate::backend::MemBackend::element_loss).
pub fn element_loss<B: Backend>(
    x: FloatTensor<B>,
    targets: Option<FloatTensor<B>>,
    f: ElementLoss,
) -> FloatTensor<B> {
    let clamp_log = |log: Float<B>| B::float_clamp_min(log, LOWEST_LOG.into());
    match (f, targets) {
        (ElementLoss::Huber { delta, bias }, _) => {
            let outside = above::<B>(B::float_abs(x.clone()), delta);
            let clamped = B::float_clamp(x.clone(), (-delta).into(), delta.into());
            let linear = B::float_add_scalar(B::float_mul(clamped, x.clone()), (-bias).into());
            let square = B::float_mul_scalar(B::float_mul(x.clone(), x), 0.5.into());
            B::float_mask_where(square, outside, linear)
        }
        (ElementLoss::LogAbove { min }, _) => B::float_log(B::float_clamp_min(x, min.into())),
        (ElementLoss::BinaryLogits, Some(t)) => {
            let linear = B::float_mul(rest::<B>(t, 1.0), x.clone());
            B::float_sub(linear, B::log_sigmoid(x))
        }
        (ElementLoss::BinaryProbabilities, Some(t)) => {
            let negative = clamp_log(B::float_log1p(B::float_neg(x.clone())));
            let negative = B::float_mul(B::float_add_scalar(t.clone(), (-1).into()), negative);
            B::float_sub(negative, B::float_mul(t, clamp_log(B::float_log(x))))
        }
        (ElementLoss::Divergence { min }, Some(t)) => {
            let log = B::float_log(B::float_clamp(t.clone(), min.into(), 1.into()));
            B::float_mul(t, B::float_sub(log, x))
        }
        (ElementLoss::LogDivergence, Some(t)) => B::float_mul(B::float_exp(t.clone()), B::float_sub(t, x)),
        (ElementLoss::Square, _) | (_, None) => B::float_mul(x.clone(), x),
    }
}

/// See [`MemBackend::element_loss_sum`](crate::backend::MemBackend::element_loss_sum).
pub fn element_loss_sum<B: Backend>(
    x: FloatTensor<B>,
    targets: Option<FloatTensor<B>>,
    f: ElementLoss,
    scale: f64,
) -> FloatTensor<B> {
    let (elements, dtype) = (x.shape().num_elements() as f64, x.dtype());
    // Of the mean, since the sum of many may be more than f16 can hold.
    let mean = widen::<B>(B::float_mean(element_loss::<B>(x, targets, f)));
    let sum = B::float_mul_scalar(B::float_reshape(mean, Shape::new([1])), (elements * scale).into());
    B::float_cast(sum, dtype.into())
}

fn slope<B: Backend>(x: Float<B>, targets: Option<Float<B>>, f: ElementLoss, side: Side) -> Float<B> {
    match (f, targets, side) {
        (ElementLoss::Huber { delta, .. }, ..) => B::float_clamp(x, (-delta).into(), delta.into()),
        (ElementLoss::LogAbove { min }, ..) => {
            let clamped = below::<B>(x.clone(), min);
            B::float_mask_fill(B::float_recip(x), clamped, 0.into())
        }
        (ElementLoss::BinaryLogits, Some(t), _) => B::float_sub(B::sigmoid(x), t),
        (ElementLoss::BinaryProbabilities, Some(t), _) => {
            let negative = log_slope::<B>(rest::<B>(t.clone(), 1.0), rest::<B>(x.clone(), 1.0));
            B::float_sub(negative, log_slope::<B>(t, x))
        }
        (ElementLoss::Divergence { .. }, Some(t), Side::X) => B::float_neg(t),
        (ElementLoss::Divergence { min }, Some(t), Side::Target) => {
            let log = B::float_log(B::float_clamp(t.clone(), min.into(), 1.into()));
            let outside = B::bool_or(below::<B>(t.clone(), min), above::<B>(t.clone(), 1.0));
            let inside = B::float_ones(t.shape(), &t.device(), t.dtype().into());
            B::float_add(B::float_sub(log, x), B::float_mask_fill(inside, outside, 0.into()))
        }
        (ElementLoss::LogDivergence, Some(t), Side::X) => B::float_neg(B::float_exp(t)),
        (ElementLoss::LogDivergence, Some(t), Side::Target) => {
            let factor = B::float_add_scalar(B::float_sub(t.clone(), x), 1.into());
            B::float_mul(B::float_exp(t), factor)
        }
        (ElementLoss::Square, ..) | (_, None, _) => B::float_mul_scalar(x, 2.into()),
    }
}

/// See [`MemBackend::element_loss_slopes`](crate::backend::MemBackend::element_loss_slopes).
pub fn element_loss_slopes<B: Backend>(
    x: FloatTensor<B>,
    targets: Option<FloatTensor<B>>,
    f: ElementLoss,
    side: Side,
    factor: FloatTensor<B>,
) -> FloatTensor<B> {
    scale::<B>(slope::<B>(x, targets, f, side), factor)
}

/// See [`MemBackend::element_loss_backward`](crate::backend::MemBackend::element_loss_backward).
pub fn element_loss_backward<B: Backend>(
    x: FloatTensor<B>,
    targets: Option<FloatTensor<B>>,
    f: ElementLoss,
    side: Side,
    dy: FloatTensor<B>,
) -> FloatTensor<B> {
    B::float_mul(slope::<B>(x, targets, f, side), dy)
}

/// See [`MemBackend::scale`](crate::backend::MemBackend::scale).
pub fn scale<B: Backend>(x: FloatTensor<B>, factor: FloatTensor<B>) -> FloatTensor<B> {
    let (dtype, factor_dtype) = (x.dtype(), factor.dtype());
    let factor = B::float_reshape(factor, Shape::from(vec![1; x.shape().num_dims()]));
    let product = B::float_mul(B::float_cast(x, factor_dtype.into()), factor);
    B::float_cast(product, dtype.into())
}
