//! Interpolation: layers that resize one or two axes.
pub use burn::nn::interpolate::*;

mod interpolate1d;
mod interpolate2d;

pub use interpolate1d::{Interpolate1d, Interpolate1dConfig, MemSaveInterpolate1d};
pub use interpolate2d::{Interpolate2d, Interpolate2dConfig, MemSaveInterpolate2d};
