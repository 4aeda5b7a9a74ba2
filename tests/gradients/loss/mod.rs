//! Compares losses: cross entropies of rows, binary cross entropies, and losses of elements.
use crate::common::*;
use burn::nn::loss as stock;
use burn::tensor::{DType, Device, Int, Tensor, activation};
use burn_memsave::nn::loss as ours;
use proptest::prelude::*;

mod binary_cross_entropy;
pub mod cross_entropy;
mod elementwise;

/// Whole numbers from 0 to `classes` (exclusive).
pub fn labels<const D: usize>(shape: [usize; D], classes: usize, device: &Device) -> Tensor<D, Int> {
    let labels = uniform(shape.iter().product(), 7, 0.0..classes as f64);
    let labels = labels.into_iter().map(|label| (label as i64).min(classes as i64 - 1)).collect::<Vec<_>>();
    Tensor::from_data(burn::tensor::TensorData::new(labels, shape), device)
}
