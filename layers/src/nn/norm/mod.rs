//! Normalizations.
mod batch;
mod group;
mod instance;
mod layer;
mod local_response;
mod normalization_wrapper;
mod rms;

pub use batch::{BatchNorm, BatchNorm as MemSaveBatchNorm, BatchNormConfig};
pub use group::{GroupNorm, GroupNorm as MemSaveGroupNorm, GroupNormConfig};
pub use instance::{InstanceNorm, InstanceNorm as MemSaveInstanceNorm, InstanceNormConfig};
pub use layer::{LayerNorm, LayerNorm as MemSaveLayerNorm, LayerNormConfig};
pub use local_response::{
    LocalResponseNorm, LocalResponseNorm as MemSaveLocalResponseNorm, LocalResponseNormConfig,
};
pub use normalization_wrapper::{Normalization, Normalization as MemSaveNormalization, NormalizationConfig};
pub use rms::{RmsNorm, RmsNorm as MemSaveRmsNorm, RmsNormConfig};
