//! Layer, RMS, group and instance normalization, as normalizations over rows of elements.
//!
//! | | |
//! | --- | --- |
//! | computes | `y = (x - mean) / sqrt(variance + epsilon) * gamma + beta` over every row; in an RMS norm `mean = 0` |
//! | keeps | `x` if `x` or `gamma` is tracked; `gamma` (a handle) if `x` is tracked |
//! | backward | `dx = (g - mean(g) - x_hat mean(g x_hat)) / std`, `g = gamma dy`, `x_hat = (x - mean) / std` |
//! | | `dgamma = sum(dy x_hat)`, `dbeta = sum(dy)` |
//!
//! "(a handle)" means that no copy is made. [`RowNorm`] says which elements form a row, and so which of the four norms it is.
//!
//! If `x` is kept, the output is offered for [recomputation](crate::graph), so that the next layer need not keep it. The mean and the
//! variance of a row are not kept: the backward pass recomputes them while the row is in the cache.
//!
//! Burn's own layers ("stock Burn") record ten small operations, which keep two tensors of the size of `x`.
use crate::backend::{ChannelSums, composing_backends, widen};
use crate::{
    backend::optional::MaybeTensor,
    graph::{BackwardPass, Inputs, KeepPlan, Operation, Recorder, Run, Tracking, extension, given},
};
use burn::backend::{Backend, TensorMetadata, tensor::FloatTensor};
use burn::tensor::Shape;

#[cfg(any(feature = "flex", feature = "ndarray"))]
pub mod cpu;
#[cfg(any(feature = "wgpu", feature = "cuda"))]
mod cube;

/// A normalization over rows: which elements share statistics, and which parameters they get.
///
/// The elements of a tensor, in order, are `[repeats, groups, channels, inner]`: a row is `channels * inner` of them, and an
/// element at `[.., group, channel, ..]` has the parameters at `group * channels + channel`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RowNorm {
    /// Whether the mean of the row is subtracted (it is not in an RMS norm).
    pub centered: bool,
    /// Added to the variance.
    pub epsilon: f64,
    /// The number of rows after which the parameters repeat.
    pub groups: usize,
    /// Parameters per row.
    pub channels: usize,
    /// The number of consecutive elements with the same parameter.
    pub inner: usize,
}

impl RowNorm {
    /// Over the last axis, of `features` elements.
    pub fn over_last(features: usize, centered: bool, epsilon: f64) -> Self {
        Self { centered, epsilon, groups: 1, channels: features, inner: 1 }
    }

    /// The number of elements of a row.
    pub fn row(&self) -> usize {
        self.channels * self.inner
    }

    /// The number of parameters.
    pub fn parameters(&self) -> usize {
        self.groups * self.channels
    }
}

/// Gradients of a normalization: of its input, its scale and its shift, each if wanted.
pub struct NormGrads<B: Backend> {
    /// Gradient of the input.
    pub x: Option<FloatTensor<B>>,
    /// Gradient of the scale, one per parameter.
    pub gamma: Option<FloatTensor<B>>,
    /// Gradient of the shift, one per parameter.
    pub beta: Option<FloatTensor<B>>,
}

extension! {
    /// Normalization over rows.
    pub trait RowNormOps(RowNormKernels) {
        /// The rows of `x`, normalized as `norm` says.
        fn memsave_row_norm(
            x: FloatTensor<Self>,
            #[extension_type] gamma: MaybeTensor<Self>,
            #[extension_type] beta: MaybeTensor<Self>,
            norm: RowNorm,
        ) -> FloatTensor<Self> {
            Self::run(norm, [Some(x), gamma.into_option(), beta.into_option()])
        }
    }
}

const X: usize = 0;
const GAMMA: usize = 1;
const BETA: usize = 2;

impl<B: RowNormKernels> Operation<B, 3> for RowNorm {
    const INPUTS: [&'static str; 3] = ["x", "gamma", "beta"];
    const PARAMETERS: &'static [usize] = &[GAMMA];
    type Saved = RowNorm;

    fn name(&self) -> &'static str {
        match self {
            RowNorm { centered: false, .. } => "rms_norm",
            RowNorm { channels: 1, .. } => "instance_norm",
            RowNorm { groups: 1, inner: 1, .. } => "layer_norm",
            _ => "group_norm",
        }
    }

    fn plan(&self, inputs: &Tracking<B, 3>) -> KeepPlan<3> {
        let reads_x = inputs.tracked(X) || inputs.tracked(GAMMA);
        KeepPlan::nothing()
            .keep_if(reads_x, X, "x or gamma is tracked")
            .keep_if(inputs.tracked(X), GAMMA, "x is tracked")
            .offer_if(reads_x)
    }

    fn forward(&self, [x, gamma, beta]: Inputs<B, 3>) -> FloatTensor<B> {
        B::row_norm(given(x), gamma, beta, self)
    }

    fn forward_saving(&self, inputs: Inputs<B, 3>, _: &Recorder<3>) -> (FloatTensor<B>, RowNorm) {
        (Operation::<B, 3>::forward(self, inputs), *self)
    }

    fn backward(norm: RowNorm, dy: FloatTensor<B>, pass: &mut BackwardPass<B, 3>) {
        let gamma = pass.take(GAMMA);
        match pass.take(X) {
            Some(x) => {
                let wanted = [X, GAMMA, BETA].map(|input| pass.wants(input));
                let NormGrads { x, gamma, beta } = B::row_norm_backward(x, gamma, &norm, dy, wanted);
                pass.give_all([x, gamma, beta]);
            }
            None => {
                let dy = B::float_reshape(dy.clone(), channels_of(&dy.shape(), &norm));
                pass.give(BETA, B::sum_to_channels(dy));
            }
        }
    }
}

/// The kernels.
pub trait RowNormKernels: ChannelSums {
    /// The rows of `x`, normalized. A missing gamma counts as 1, a missing beta as 0.
    fn row_norm(
        x: FloatTensor<Self>,
        gamma: Option<FloatTensor<Self>>,
        beta: Option<FloatTensor<Self>>,
        norm: &RowNorm,
    ) -> FloatTensor<Self> {
        let (shape, dtype) = (x.shape(), x.dtype());
        let (x, std) = rows::<Self>(x, norm);
        let y = with_parameter::<Self>(Self::float_div(x, std), gamma, norm, Self::float_mul);
        let y = with_parameter::<Self>(y, beta, norm, Self::float_add);
        Self::float_reshape(Self::float_cast(y, dtype.into()), shape)
    }

    /// Gradients of [`row_norm`](Self::row_norm); `wanted` says which of x, gamma, beta.
    fn row_norm_backward(
        x: FloatTensor<Self>,
        gamma: Option<FloatTensor<Self>>,
        norm: &RowNorm,
        dy: FloatTensor<Self>,
        wanted: [bool; 3],
    ) -> NormGrads<Self> {
        let (shape, dtype) = (x.shape(), x.dtype());
        let (x, std) = rows::<Self>(x, norm);
        let dy = Self::float_reshape(widen::<Self>(dy), x.shape());
        let x_hat = Self::float_div(x, std.clone());
        let narrowed = |grad: FloatTensor<Self>| Self::float_cast(grad, dtype.into());
        let summed = |grad: FloatTensor<Self>| {
            let channels = channels_of(&shape, norm);
            narrowed(Self::sum_to_channels(Self::float_reshape(grad, channels)))
        };
        let gamma_grad = wanted[1].then(|| summed(Self::float_mul(dy.clone(), x_hat.clone())));
        let beta_grad = wanted[2].then(|| summed(dy.clone()));
        let x_grad = wanted[0].then(|| {
            let dy = with_parameter::<Self>(dy, gamma, norm, Self::float_mul);
            let product = Self::float_mean_dim(Self::float_mul(dy.clone(), x_hat.clone()), 1);
            let dy = match norm.centered {
                true => Self::float_sub(dy.clone(), Self::float_mean_dim(dy, 1)),
                false => dy,
            };
            let dx = Self::float_div(Self::float_sub(dy, Self::float_mul(x_hat, product)), std);
            Self::float_reshape(narrowed(dx), shape.clone())
        });
        NormGrads { x: x_grad, gamma: gamma_grad, beta: beta_grad }
    }
}
composing_backends!(RowNormKernels);

/// The rows, centered if `norm` says so, and their standard deviations, `[rows, 1]`; in a dtype that can hold squares.
fn rows<B: Backend>(x: FloatTensor<B>, norm: &RowNorm) -> (FloatTensor<B>, FloatTensor<B>) {
    let rows = Shape::new([x.shape().num_elements() / norm.row().max(1), norm.row()]);
    let x = B::float_reshape(widen::<B>(x), rows);
    let x = match norm.centered {
        true => B::float_sub(x.clone(), B::float_mean_dim(x, 1)),
        false => x,
    };
    let variance = B::float_mean_dim(B::float_mul(x.clone(), x.clone()), 1);
    (x, B::float_sqrt(B::float_add_scalar(variance, norm.epsilon.into())))
}

/// `op` of `x` and a parameter per channel, in the dtype of `x`.
fn with_parameter<B: Backend>(
    x: FloatTensor<B>,
    parameter: Option<FloatTensor<B>>,
    norm: &RowNorm,
    op: impl FnOnce(FloatTensor<B>, FloatTensor<B>) -> FloatTensor<B>,
) -> FloatTensor<B> {
    let Some(parameter) = parameter else { return x };
    let (shape, dtype) = (x.shape(), x.dtype());
    let x = B::float_reshape(x, channels_of(&shape, norm));
    let parameter = B::float_reshape(parameter, Shape::new([1, norm.parameters(), 1]));
    B::float_reshape(op(x, B::float_cast(parameter, dtype.into())), shape)
}

/// `[repeats, parameters, inner]`
fn channels_of(shape: &Shape, norm: &RowNorm) -> Shape {
    let repeat = norm.parameters() * norm.inner;
    Shape::new([shape.num_elements() / repeat.max(1), norm.parameters(), norm.inner])
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use super::*;
    use crate::backend::testing::{Composed, assert_close, composed, random};
    use burn::backend::Flex;

    #[test]
    fn default_bodies_equal_the_kernels() {
        for (norm, shape) in [
            (RowNorm::over_last(6, true, 1e-3), [5, 4, 6]),
            (RowNorm::over_last(6, false, 1e-3), [5, 4, 6]),
            (RowNorm { centered: true, epsilon: 1e-3, groups: 2, channels: 2, inner: 3 }, [5, 4, 3]),
        ] {
            let ([x, dy], parameter) = ([random(&shape), random(&shape)], || random(&[norm.parameters()]));
            let (gamma, beta) = (parameter(), parameter());
            let body = Composed::row_norm(composed(&x), Some(composed(&gamma)), Some(composed(&beta)), &norm);
            assert_close("y", body, Flex::row_norm(x.clone(), Some(gamma.clone()), Some(beta), &norm));
            let wanted = [true; 3];
            let body = Composed::row_norm_backward(
                composed(&x),
                Some(composed(&gamma)),
                &norm,
                composed(&dy),
                wanted,
            );
            let cpu = Flex::row_norm_backward(x, Some(gamma), &norm, dy, wanted);
            for (body, cpu) in [(body.x, cpu.x), (body.gamma, cpu.gamma), (body.beta, cpu.beta)] {
                assert_close("gradients", body.expect("wanted"), cpu.expect("wanted"));
            }
        }
    }
}
