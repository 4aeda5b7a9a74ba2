//! Losses as modules.
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
pub use cross_entropy::{CrossEntropyLoss, CrossEntropyLossConfig, IGNORE_INDEX, MemSaveCrossEntropyLoss};
pub use huber::{HuberLoss, HuberLossConfig, MemSaveHuberLoss};
pub use kldiv::{KLDivLoss, KLDivLossConfig, MemSaveKLDivLoss};
pub use linear_cross_entropy::{FusedLinearCrossEntropy, FusedLinearCrossEntropyConfig};
pub use mse::{MemSaveMseLoss, MseLoss};
