//! Pools.

mod adaptive_avg_pool1d;
mod adaptive_avg_pool2d;
mod adaptive_avg_pool3d;
mod avg_pool1d;
mod avg_pool2d;
mod max_pool1d;
mod max_pool2d;

pub use adaptive_avg_pool1d::{
    AdaptiveAvgPool1dConfig, MemSaveAdaptiveAvgPool1d, MemSaveAdaptiveAvgPool1d as AdaptiveAvgPool1d,
};
pub use adaptive_avg_pool2d::{
    AdaptiveAvgPool2dConfig, MemSaveAdaptiveAvgPool2d, MemSaveAdaptiveAvgPool2d as AdaptiveAvgPool2d,
};
pub use adaptive_avg_pool3d::{
    AdaptiveAvgPool3dConfig, MemSaveAdaptiveAvgPool3d, MemSaveAdaptiveAvgPool3d as AdaptiveAvgPool3d,
};
pub use avg_pool1d::{AvgPool1dConfig, MemSaveAvgPool1d, MemSaveAvgPool1d as AvgPool1d};
pub use avg_pool2d::{AvgPool2dConfig, MemSaveAvgPool2d, MemSaveAvgPool2d as AvgPool2d};
pub use max_pool1d::{MaxPool1dConfig, MemSaveMaxPool1d, MemSaveMaxPool1d as MaxPool1d};
pub use max_pool2d::{MaxPool2dConfig, MemSaveMaxPool2d, MemSaveMaxPool2d as MaxPool2d};
