//! Pooling layers: average, adaptive average and max.

mod adaptive_avg_pool1d;
mod adaptive_avg_pool2d;
mod adaptive_avg_pool3d;
mod avg_pool1d;
mod avg_pool2d;
mod max_pool1d;
mod max_pool2d;

pub use adaptive_avg_pool1d::*;
pub use adaptive_avg_pool2d::*;
pub use adaptive_avg_pool3d::*;
pub use avg_pool1d::*;
pub use avg_pool2d::*;
pub use max_pool1d::*;
pub use max_pool2d::*;

#[allow(unused_imports)] // there are none in Burn 0.22.1
pub use crate::burn_next::pools::*;
