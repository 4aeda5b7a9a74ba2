//! Normalizations.
pub use burn::nn::norm::*;

mod batch;
mod group;
mod instance;
mod layer;
mod normalization_wrapper;
mod rms;

pub use batch::{BatchNormConfig, MemSaveBatchNorm, MemSaveBatchNorm as BatchNorm};
pub use group::{GroupNormConfig, MemSaveGroupNorm, MemSaveGroupNorm as GroupNorm};
pub use instance::{InstanceNormConfig, MemSaveInstanceNorm, MemSaveInstanceNorm as InstanceNorm};
pub use layer::{LayerNormConfig, MemSaveLayerNorm, MemSaveLayerNorm as LayerNorm};
pub use normalization_wrapper::{
    MemSaveNormalization, MemSaveNormalization as Normalization, NormalizationConfig,
};
pub use rms::{MemSaveRmsNorm, MemSaveRmsNorm as RmsNorm, RmsNormConfig};
