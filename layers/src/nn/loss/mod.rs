//! Losses.
pub use burn::nn::loss::*;

mod binary_cross_entropy;
mod cross_entropy;
mod huber;
mod kldiv;
mod linear_cross_entropy;
mod mse;

pub use binary_cross_entropy::{
    BinaryCrossEntropyLoss, BinaryCrossEntropyLossConfig, MemSaveBinaryCrossEntropyLoss,
};
pub use cross_entropy::{CrossEntropyLoss, CrossEntropyLossConfig, MemSaveCrossEntropyLoss};
pub use huber::{HuberLoss, HuberLossConfig, MemSaveHuberLoss};
pub use kldiv::{KLDivLoss, KLDivLossConfig, MemSaveKLDivLoss};
pub use linear_cross_entropy::{FusedLinearCrossEntropy, FusedLinearCrossEntropyConfig};
pub use mse::{MemSaveMseLoss, MseLoss};

use burn::tensor::{DType, Tensor};

/// Whether two tensors can be the operands of an element-wise loss as they are, with nothing to broadcast, convert or
/// dequantize.
fn are_elementwise_operands<const D: usize>(a: &Tensor<D>, b: &Tensor<D>) -> bool {
    let float = !matches!(a.dtype(), DType::QFloat(_));
    float && a.dims() == b.dims() && a.dtype() == b.dtype() && a.shape().num_elements() > 0
}
