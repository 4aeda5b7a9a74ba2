//! The gradients of all modes, computed axis by axis.
use super::InterpolateKernels;
use crate::backend::Placeholders;
use crate::backend::axis_map::{AxisMap, AxisMaps, Regular, Rule, Shift};
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
        let axes = [0, 1].map(|axis| resized(&options, axis, x[axis + 2], out[axis + 2]));
        let nearest = |shift| axes.map(|axis| Regular { axis, rule: Rule::Nearest(shift) }).into();
        let map = match options.mode {
            InterpolateMode::Nearest => return B::regular_adjoint(x, dy, nearest(Shift::None)),
            InterpolateMode::NearestExact => return B::regular_adjoint(x, dy, nearest(Shift::Half)),
            InterpolateMode::Bilinear => AxisMap::linear,
            InterpolateMode::Bicubic => AxisMap::cubic,
            InterpolateMode::Lanczos3 => AxisMap::lanczos3,
        };
        B::axis_adjoint(x, dy, axes.map(map).into())
    }
}
