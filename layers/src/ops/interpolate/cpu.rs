//! Gradients axis by axis, for all modes.
use super::InterpolateKernels;
use crate::backend::cpu::{
    CpuBackend,
    axis_map::{AxisMap, adjoint},
};
use burn::backend::{
    TensorMetadata,
    ops::{InterpolateMode, InterpolateOptions},
    tensor::FloatTensor,
};
use burn::tensor::Shape;

impl<B: CpuBackend> InterpolateKernels for B {
    fn interpolate_adjoint(x: Shape, dy: FloatTensor<B>, options: InterpolateOptions) -> FloatTensor<B> {
        let out = dy.shape();
        let corners = options.align_corners;
        let axes: [AxisMap; 2] = core::array::from_fn(|axis| {
            let (size, out) = (x[axis + 2], out[axis + 2]);
            match options.mode {
                InterpolateMode::Nearest => AxisMap::nearest(size, out),
                InterpolateMode::NearestExact => AxisMap::nearest_exact(size, out),
                InterpolateMode::Bilinear => AxisMap::linear(size, out, corners),
                InterpolateMode::Bicubic => AxisMap::cubic(size, out, corners),
                InterpolateMode::Lanczos3 => AxisMap::lanczos3(size, out, corners),
            }
        });
        adjoint::<B>(x, dy, &axes)
    }
}
