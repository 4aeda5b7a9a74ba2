//! Local response normalization by Burn's operations.
use crate::backend::LocalResponse;
use crate::backend::widen;
use burn::backend::{Backend, TensorMetadata, ops::PadMode, tensor::FloatTensor};
use burn::tensor::Shape;

/// The mean of every window of channels that reaches so far before and behind its own; x `[batch, channels, inner]`.
fn window_means<B: Backend>(x: FloatTensor<B>, reach: [usize; 2]) -> FloatTensor<B> {
    let [batch, channels, inner] = x.shape().dims();
    let [before, behind] = reach;
    let rows = B::float_reshape(B::float_swap_dims(x, 1, 2), Shape::new([batch * inner, 1, channels]));
    let rows = B::float_pad(rows, &[(0, 0), (0, 0), (before, behind)], PadMode::Constant(0.0));
    let means = B::avg_pool1d(rows, before + behind + 1, 1, 0, true, false);
    B::float_swap_dims(B::float_reshape(means, Shape::new([batch, inner, channels])), 1, 2)
}

/// `[batch, channels, inner]`, in a type that can hold squares.
fn planes<B: Backend>(x: FloatTensor<B>) -> FloatTensor<B> {
    let shape = x.shape();
    let inner = shape[2..].iter().product();
    B::float_reshape(widen::<B>(x), Shape::new([shape[0], shape[1], inner]))
}

fn scales<B: Backend>(x: FloatTensor<B>, norm: &LocalResponse) -> FloatTensor<B> {
    let means = window_means::<B>(B::float_mul(x.clone(), x), norm.reach());
    B::float_add_scalar(B::float_mul_scalar(means, norm.alpha.into()), norm.k.into())
}

/// See [`MemBackend::normalize_response`](crate::backend::MemBackend::normalize_response).
pub fn normalize_response<B: Backend>(x: FloatTensor<B>, norm: &LocalResponse) -> FloatTensor<B> {
    let (shape, dtype) = (x.shape(), x.dtype());
    let x = planes::<B>(x);
    let power = B::float_powf_scalar(scales::<B>(x.clone(), norm), norm.beta.into());
    B::float_reshape(B::float_cast(B::float_div(x, power), dtype.into()), shape)
}

/// See [`MemBackend::normalize_response_backward`](crate::backend::MemBackend::normalize_response_backward).
pub fn normalize_response_backward<B: Backend>(
    x: FloatTensor<B>,
    norm: &LocalResponse,
    dy: FloatTensor<B>,
) -> FloatTensor<B> {
    let (shape, dtype) = (x.shape(), x.dtype());
    let (x, dy) = (planes::<B>(x), planes::<B>(dy));
    let scales = scales::<B>(x.clone(), norm);
    let scaled = B::float_div(dy, B::float_powf_scalar(scales.clone(), norm.beta.into()));
    let products = B::float_div(B::float_mul(scaled.clone(), x.clone()), scales);
    let [before, behind] = norm.reach();
    let means = window_means::<B>(products, [behind, before]);
    let factor = -2.0 * norm.alpha * norm.beta;
    let dx = B::float_add(scaled, B::float_mul_scalar(B::float_mul(x, means), factor.into()));
    B::float_reshape(B::float_cast(dx, dtype.into()), shape)
}
