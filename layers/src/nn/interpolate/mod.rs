//! Interpolation.
pub use burn::nn::interpolate::*;

mod interpolate1d;
mod interpolate2d;

pub use interpolate1d::{Interpolate1d, Interpolate1d as MemSaveInterpolate1d, Interpolate1dConfig};
pub use interpolate2d::{Interpolate2d, Interpolate2d as MemSaveInterpolate2d, Interpolate2dConfig};
