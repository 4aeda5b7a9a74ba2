//! Losses.
pub use burn::nn::loss::*;

mod binary_cross_entropy;
mod cross_entropy;
mod huber;
mod kldiv;
mod linear_cross_entropy;
mod mse;

pub use binary_cross_entropy::{
    BinaryCrossEntropyLoss, BinaryCrossEntropyLoss as MemSaveBinaryCrossEntropyLoss,
    BinaryCrossEntropyLossConfig,
};
pub use cross_entropy::{
    CrossEntropyLoss, CrossEntropyLoss as MemSaveCrossEntropyLoss, CrossEntropyLossConfig,
};
pub use huber::{HuberLoss, HuberLoss as MemSaveHuberLoss, HuberLossConfig};
pub use kldiv::{KLDivLoss, KLDivLoss as MemSaveKLDivLoss, KLDivLossConfig};
pub use linear_cross_entropy::{FusedLinearCrossEntropy, FusedLinearCrossEntropyConfig};
pub use mse::{MseLoss, MseLoss as MemSaveMseLoss};

use burn::tensor::{DType, Tensor};

/// Whether two tensors are operands of one element-wise loss as they are: nothing to broadcast, to convert or to dequantize.
fn are_alike<const D: usize>(a: &Tensor<D>, b: &Tensor<D>) -> bool {
    let float = !matches!(a.dtype(), DType::QFloat(_));
    float && a.dims() == b.dims() && a.dtype() == b.dtype() && a.shape().num_elements() > 0
}
