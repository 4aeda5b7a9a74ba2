//! Interpolation.
pub use burn::nn::interpolate::*;

mod interpolate1d;
mod interpolate2d;

pub use interpolate1d::{Interpolate1dConfig, MemSaveInterpolate1d, MemSaveInterpolate1d as Interpolate1d};
pub use interpolate2d::{Interpolate2dConfig, MemSaveInterpolate2d, MemSaveInterpolate2d as Interpolate2d};
