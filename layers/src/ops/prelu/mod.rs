//! Parametric ReLU.
//!
//! | | |
//! | --- | --- |
//! | computes | `y = x` if `x >= 0`, else `alpha * x`; `alpha` has one element or one per channel |
//! | keeps | `x` if `alpha` is tracked, else 1 bit per element (`x < 0`); `alpha` (a handle) if `x` is tracked |
//! | backward | `dx = dy` or `alpha * dy`, `dalpha = sum(dy * min(x, 0))` |
//!
//! Stock Burn keeps `x`, a boolean per element and more.
use super::piecewise_linear::{PiecewiseLinear, PiecewiseLinearKernels};
use crate::backend::composing_backends;
use crate::graph::{BackwardPass, Inputs, KeepPlan, Operation, Recorder, Run, Tracking, extension, given};
use burn::backend::{TensorMetadata, tensor::FloatTensor};
use burn::tensor::Shape;

#[cfg(any(feature = "flex", feature = "ndarray"))]
mod cpu;
#[cfg(any(feature = "wgpu", feature = "cuda"))]
mod cube;

extension! {
    /// Parametric ReLU.
    pub trait PReluOps(PReluKernels) {
        /// Parametric ReLU; `alpha` is `[1]` or `[channels]`.
        fn memsave_prelu(x: FloatTensor<Self>, alpha: FloatTensor<Self>) -> FloatTensor<Self> {
            Self::run(PRelu, [Some(x), Some(alpha)])
        }
    }
}

const X: usize = 0;
const ALPHA: usize = 1;

/// The function that has the same bits as a parametric ReLU.
const LEAKY: PiecewiseLinear = PiecewiseLinear::LeakyRelu { negative_slope: 0.0 };

/// Parametric ReLU.
#[derive(Clone)]
pub struct PRelu;

impl<B: PReluKernels> Operation<B, 2> for PRelu {
    const INPUTS: [&'static str; 2] = ["x", "alpha"];
    const PARAMETERS: &'static [usize] = &[ALPHA];
    const SHAPES: &'static [usize] = &[ALPHA];
    type Saved = SavedPRelu<B::Mask>;

    fn name(&self) -> &'static str {
        "prelu"
    }

    fn plan(&self, inputs: &Tracking<B, 2>) -> KeepPlan<2> {
        KeepPlan::nothing().keep_if(inputs.tracked(ALPHA), X, "alpha is tracked").keep_if(
            inputs.tracked(X),
            ALPHA,
            "x is tracked",
        )
    }

    fn forward(&self, [x, alpha]: Inputs<B, 2>) -> FloatTensor<B> {
        let (x, alpha) = (given(x), given(alpha));
        let shape = along_channels(&alpha.shape(), &x.shape());
        B::prelu_of(x, B::float_reshape(alpha, shape))
    }

    fn forward_saving(&self, inputs: Inputs<B, 2>, recorder: &Recorder<2>) -> (FloatTensor<B>, Self::Saved) {
        let mask = match recorder.keeps(X) {
            true => None,
            false => {
                let mask = B::piecewise_mask(given(inputs[X].clone()), LEAKY);
                Some(recorder.report().state("mask", mask, "x is tracked"))
            }
        };
        (Operation::<B, 2>::forward(self, inputs), SavedPRelu { mask })
    }

    fn backward(SavedPRelu { mask }: Self::Saved, dy: FloatTensor<B>, pass: &mut BackwardPass<B, 2>) {
        let alpha = pass.take(ALPHA);
        let alpha_shape = alpha.as_ref().map_or_else(|| pass.shape(ALPHA), |alpha| alpha.shape());
        let broadcast = along_channels(&alpha_shape, &dy.shape());
        let x = pass.take(X);
        if let Some(x) = x.clone() {
            let dalpha = B::prelu_alpha_backward(x, broadcast.clone(), dy.clone());
            pass.give(ALPHA, B::float_reshape(dalpha, alpha_shape));
        }
        if let Some(alpha) = alpha.map(|alpha| B::float_reshape(alpha, broadcast)) {
            pass.give(
                X,
                match (mask, x) {
                    (Some(mask), _) => B::prelu_x_backward(&mask, alpha, dy),
                    (None, x) => B::prelu_x_backward_of(given(x), alpha, dy),
                },
            );
        }
    }
}

/// What the backward pass reads besides inputs.
#[derive(Clone, Debug)]
pub struct SavedPRelu<Mask> {
    /// Where `x >= 0`, one bit per element: enough for the gradient of `x`. `None` if `x` is kept, since the bits follow from it.
    mask: Option<Mask>,
}

/// The shape in which slopes of shape `alpha` broadcast against `x`, along its channels (axis 1). The operation itself reshapes them, so
/// that it keeps the parameter and not a view.
fn along_channels(alpha: &Shape, x: &Shape) -> Shape {
    let mut shape = vec![1; x.num_dims()];
    shape[1.min(x.num_dims() - 1)] = alpha.num_elements();
    shape.into()
}

/// The kernels.
pub trait PReluKernels: PiecewiseLinearKernels {
    /// `x` where it is not negative, else `alpha * x`; `alpha` broadcasts.
    fn prelu_of(x: FloatTensor<Self>, alpha: FloatTensor<Self>) -> FloatTensor<Self> {
        Self::prelu(x, alpha)
    }

    /// Gradient of the input: `dy` where the bit is set, `alpha * dy` where not; `alpha` broadcasts.
    fn prelu_x_backward(
        mask: &Self::Mask,
        alpha: FloatTensor<Self>,
        dy: FloatTensor<Self>,
    ) -> FloatTensor<Self>;

    /// [`prelu_x_backward`](Self::prelu_x_backward) with the bits of this input.
    fn prelu_x_backward_of(
        x: FloatTensor<Self>,
        alpha: FloatTensor<Self>,
        dy: FloatTensor<Self>,
    ) -> FloatTensor<Self> {
        Self::prelu_x_backward(&Self::piecewise_mask(x, LEAKY), alpha, dy)
    }

    /// Gradient of the slopes, of shape `alpha`: `sum(dy * min(x, 0))` over the axes along which `alpha` broadcasts.
    fn prelu_alpha_backward(x: FloatTensor<Self>, alpha: Shape, dy: FloatTensor<Self>) -> FloatTensor<Self> {
        let product = Self::float_mul(Self::float_clamp_max(x, 0.into()), dy);
        let axes: Vec<usize> = (0..alpha.num_dims()).filter(|&axis| alpha[axis] == 1).collect();
        Self::float_reshape(Self::float_sum_dims(product, &axes), alpha)
    }
}
composing_backends!(PReluKernels {
    fn prelu_x_backward(
        mask: &crate::backend::DeviceMask<Self>,
        alpha: FloatTensor<Self>,
        dy: FloatTensor<Self>,
    ) -> FloatTensor<Self> {
        use burn::backend::ops::FloatTensorOps;
        Self::float_mask_where(Self::float_mul(dy.clone(), alpha), mask.unpack(), dy)
    }
});

#[cfg(all(test, feature = "flex"))]
mod tests {
    use super::*;
    use crate::backend::testing::{Composed, assert_close, composed, random};
    use burn::backend::Flex;

    #[test]
    fn default_bodies_equal_the_kernels() {
        for slopes in [1, 3] {
            let (x, dy, alpha) = (random(&[4, 3, 7]), random(&[4, 3, 7]), random(&[1, slopes, 1]));
            let body = Composed::prelu_x_backward(
                &Composed::piecewise_mask(composed(&x), LEAKY),
                composed(&alpha),
                composed(&dy),
            );
            let mask = Flex::piecewise_mask(x.clone(), LEAKY);
            assert_close("dx", body, Flex::prelu_x_backward(&mask, alpha.clone(), dy.clone()));
            let body = Composed::prelu_alpha_backward(composed(&x), alpha.shape(), composed(&dy));
            assert_close("dalpha", body, Flex::prelu_alpha_backward(x, alpha.shape(), dy));
        }
    }
}
