//! Gradients axis by axis, for all modes.
use super::InterpolateKernels;
use crate::backend::Placeholders;
use crate::backend::axis_map::{AxisMap, AxisMaps, Shift};
use crate::burn_next::aligns_corners;
use burn::backend::{
    TensorMetadata,
    ops::{InterpolateMode, InterpolateOptions},
    tensor::FloatTensor,
};
use burn::tensor::Shape;

impl<B: AxisMaps + Placeholders> InterpolateKernels for B {
    fn interpolate_adjoint(x: Shape, dy: FloatTensor<B>, options: InterpolateOptions) -> FloatTensor<B> {
        let out = dy.shape();
        let corners = aligns_corners(&options);
        let axes = [0, 1].map(|axis| {
            let (size, out) = (x[axis + 2], out[axis + 2]);
            match options.mode {
                InterpolateMode::Nearest => AxisMap::nearest::<B>(size, out, Shift::None),
                InterpolateMode::NearestExact => AxisMap::nearest::<B>(size, out, Shift::Half),
                InterpolateMode::Bilinear => AxisMap::linear(size, out, corners),
                InterpolateMode::Bicubic => AxisMap::cubic(size, out, corners),
                InterpolateMode::Lanczos3 => AxisMap::lanczos3(size, out, corners),
            }
        });
        B::axis_adjoint(x, dy, axes.into())
    }
}
