//! The gradients of all modes, computed axis by axis.
use super::InterpolateKernels;
use crate::backend::Placeholders;
use crate::backend::axis_map::{AxisMap, AxisMaps, Shift};
use crate::burn_next::resized;
use burn::backend::{
    TensorMetadata,
    ops::{InterpolateMode, InterpolateOptions},
    tensor::FloatTensor,
};
use burn::tensor::Shape;

impl<B: AxisMaps + Placeholders> InterpolateKernels for B {
    fn interpolate_adjoint(x: Shape, dy: FloatTensor<B>, options: InterpolateOptions) -> FloatTensor<B> {
        let out = dy.shape();
        let axes = [0, 1].map(|axis| {
            let resized = resized(&options, axis, x[axis + 2], out[axis + 2]);
            match options.mode {
                InterpolateMode::Nearest => AxisMap::nearest::<B>(resized, Shift::None),
                InterpolateMode::NearestExact => AxisMap::nearest::<B>(resized, Shift::Half),
                InterpolateMode::Bilinear => AxisMap::linear(resized),
                InterpolateMode::Bicubic => AxisMap::cubic(resized),
                InterpolateMode::Lanczos3 => AxisMap::lanczos3(resized),
            }
        });
        B::axis_adjoint(x, dy, axes.into())
    }
}
