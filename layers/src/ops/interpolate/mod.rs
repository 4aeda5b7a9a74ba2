//! Interpolation, a case of [`fixed_linear`](super::fixed_linear).
//!
//! On CPU backends every mode has a gradient here. Stock Burn has none for Lanczos on Flex, and only that of nearest on NdArray.
use super::fixed_linear::{FixedLinear, Image, lifted, lifted_image};
use crate::backend::{Placeholders, composing_backends};
use crate::graph::{Run, extension};
use burn::backend::{TensorMetadata, ops::InterpolateOptions, tensor::FloatTensor};
use burn::tensor::Shape;

#[cfg(any(feature = "flex", feature = "ndarray", feature = "wgpu", feature = "cuda"))]
mod axes;

extension! {
    /// Interpolation.
    pub trait InterpolateOps(InterpolateKernels) {
        /// Resizes `[batch, channels, height, width]`, or without the height, which counts as 1, to height and width `out`.
        fn memsave_interpolate(
            x: FloatTensor<Self>,
            out: Shape,
            options: InterpolateOptions,
        ) -> FloatTensor<Self> {
            Self::run(Image(Interpolate { out: out.dims(), options }), [Some(x)])
        }
    }
}

/// An interpolation to height and width `out`.
#[derive(Clone, Debug)]
pub struct Interpolate {
    out: [usize; 2],
    options: InterpolateOptions,
}

impl<B: InterpolateKernels> FixedLinear<B> for Interpolate {
    const NAME: &'static str = "interpolate";

    fn image(&self, x: FloatTensor<B>) -> FloatTensor<B> {
        lifted_image::<B>(x, |x| B::interpolate(x, self.out, self.options.clone()))
    }

    fn adjoint(&self, x: Shape, dy: FloatTensor<B>) -> FloatTensor<B> {
        lifted::<B>(x, dy, |x, dy| B::interpolate_adjoint(x, dy, self.options.clone()))
    }
}

/// The kernels.
pub trait InterpolateKernels: Placeholders {
    /// Gradient of an interpolation's input of shape `x`, `[batch, channels, height, width]`.
    fn interpolate_adjoint(
        x: Shape,
        dy: FloatTensor<Self>,
        options: InterpolateOptions,
    ) -> FloatTensor<Self> {
        adjoint::<Self>(x, dy, options)
    }
}
composing_backends!(InterpolateKernels);

/// This is a free function, so that the test can run it on a backend that has a kernel: `Composed` is an autodiff backend, where Burn's
/// gradient of an interpolation does not run.
fn adjoint<B: Placeholders>(x: Shape, dy: FloatTensor<B>, options: InterpolateOptions) -> FloatTensor<B> {
    let out = [dy.shape()[2], dy.shape()[3]];
    let like = B::shape_only(x, dy.dtype(), &dy.device());
    B::interpolate_backward(like, dy, out, options)
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use super::*;
    use crate::backend::testing::{assert_close, composed, random};
    use burn::backend::{Flex, ops::InterpolateMode};

    /// Lanczos has no gradient on Flex to compare with.
    #[test]
    fn default_bodies_equal_the_kernels() {
        for mode in [InterpolateMode::Nearest, InterpolateMode::Bilinear, InterpolateMode::Bicubic] {
            for (x, out) in [([2, 3, 4, 5], [7, 9]), ([2, 3, 7, 9], [4, 5])] {
                let options = InterpolateOptions::new(mode.clone()).with_align_corners(false);
                let (x, dy) = (Shape::new(x), random(&[2, 3, out[0], out[1]]));
                let body = composed(&adjoint::<Flex>(x.clone(), dy.clone(), options.clone()));
                assert_close("dx", body, Flex::interpolate_adjoint(x, dy, options));
            }
        }
    }
}
