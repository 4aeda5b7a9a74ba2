//! Normalizations.
pub use burn::nn::norm::*;

mod batch;
mod normalization_wrapper;

pub use batch::{BatchNormConfig, MemSaveBatchNorm, MemSaveBatchNorm as BatchNorm};
pub use normalization_wrapper::{
    MemSaveNormalization, MemSaveNormalization as Normalization, NormalizationConfig,
};
