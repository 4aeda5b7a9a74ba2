// Enlarges images as torchvision's segmentation networks do, written once. The module that includes this file chooses `nn`.
use burn::tensor::Tensor;
use nn::interpolate::{Interpolate2dConfig, InterpolateMode};

/// Bilinear interpolation in which pixels are areas (`align_corners=false`).
pub fn upsample(x: Tensor<4>, size: [usize; 2]) -> Tensor<4> {
    let config = Interpolate2dConfig::new().with_output_size(Some(size)).with_mode(InterpolateMode::Linear);
    config.with_align_corners(false).init().forward(x)
}
