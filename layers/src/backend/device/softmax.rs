//! Softmaxes by Burn's operations.
use crate::backend::Softmax;
use burn::backend::{Backend, TensorMetadata, get_or_init_device_settings, tensor::FloatTensor};

/// See [`MemBackend::softmax_along`](crate::backend::MemBackend::softmax_along).
pub fn softmax_along<B: Backend>(x: FloatTensor<B>, f: Softmax, dim: usize) -> FloatTensor<B> {
    match f {
        Softmax::Softmax => B::softmax(x, dim),
        Softmax::LogSoftmax => B::log_softmax(x, dim),
        Softmax::Softmin => B::softmin(x, dim),
        Softmax::QuietSoftmax => {
            let max = B::float_max_dim(x.clone(), dim);
            // A row without any finite element is one of zeros, not of NaN.
            let bools = get_or_init_device_settings::<B>(&x.device()).bool_dtype;
            let masked = B::float_equal_elem(max.clone(), f32::NEG_INFINITY.into(), bools);
            let max = B::float_mask_fill(max, masked, 0.into());
            let exp = B::float_exp(B::float_sub(x, max.clone()));
            let sum = B::float_sum_dim(exp.clone(), dim);
            B::float_div(exp, B::float_add(sum, B::float_exp(B::float_neg(max))))
        }
    }
}

/// See [`MemBackend::softmax_along_backward`](crate::backend::MemBackend::softmax_along_backward).
pub fn softmax_along_backward<B: Backend>(
    y: FloatTensor<B>,
    f: Softmax,
    dim: usize,
    dy: FloatTensor<B>,
) -> FloatTensor<B> {
    if f == Softmax::LogSoftmax {
        let sum = B::float_sum_dim(dy.clone(), dim);
        return B::float_sub(dy, B::float_mul(B::float_exp(y), sum));
    }
    let sum = B::float_sum_dim(B::float_mul(y.clone(), dy.clone()), dim);
    let dx = B::float_mul(y, B::float_sub(dy, sum));
    if f == Softmax::Softmin { B::float_neg(dx) } else { dx }
}
