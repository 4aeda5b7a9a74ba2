//! Modules.
pub use burn::nn::*;
