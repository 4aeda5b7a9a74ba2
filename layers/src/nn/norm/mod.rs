//! Normalizations.
mod batch;
mod group;
mod instance;
mod layer;
mod local_response;
mod normalization_wrapper;
mod rms;

pub use batch::{BatchNormConfig, MemSaveBatchNorm, MemSaveBatchNorm as BatchNorm};
pub use group::{GroupNormConfig, MemSaveGroupNorm, MemSaveGroupNorm as GroupNorm};
pub use instance::{InstanceNormConfig, MemSaveInstanceNorm, MemSaveInstanceNorm as InstanceNorm};
pub use layer::{LayerNormConfig, MemSaveLayerNorm, MemSaveLayerNorm as LayerNorm};
pub use local_response::{
    LocalResponseNormConfig, MemSaveLocalResponseNorm, MemSaveLocalResponseNorm as LocalResponseNorm,
};
pub use normalization_wrapper::{
    MemSaveNormalization, MemSaveNormalization as Normalization, NormalizationConfig,
};
pub use rms::{MemSaveRmsNorm, MemSaveRmsNorm as RmsNorm, RmsNormConfig};
