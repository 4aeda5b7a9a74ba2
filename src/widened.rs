//! [`widened`]: the dtype in which losses and gradients are summed and scaled.
use burn::tensor::{DType, FloatDType, Tensor};

/// Casts a tensor in half precision to f32.
pub(crate) fn widened<const D: usize>(tensor: Tensor<D>) -> Tensor<D> {
    match tensor.dtype() {
        DType::F16 | DType::BF16 => tensor.cast(FloatDType::F32),
        _ => tensor,
    }
}
