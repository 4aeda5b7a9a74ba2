//! A convolution, a batch normalization with given statistics and a ReLU, in one pass over the result.
//!
//! | | |
//! | --- | --- |
//! | computes | `y = max((conv(x, weight) + bias - mean) scale + beta, 0)`, `scale = gamma / sqrt(variance + epsilon)` |
//! | keeps | `x` if `weight` is tracked; `weight` (a handle) if `x` is tracked; 1 bit per element of `y`; |
//! | | `gamma` (a handle) and `variance` unless only `beta` is tracked |
//! | backward | `dbeta = sum(g)` with `g = dy where y > 0, else 0`; `dz = g scale`, also in one pass; then as a [convolution](super::conv) |
//!
//! The three operations one after the other keep as much, but write and read the result of the convolution twice more. `gamma` must
//! not be tracked, as its gradient would read that result. Stock Burn also keeps that result, twice.
use super::{
    batch_norm::{BatchNormKernels, BatchNormOps, Statistics},
    bilinear::{Weight, give_gradients},
    conv::{Conv, ConvKernels, ConvOps, Convolution},
    piecewise_linear::{PiecewiseLinear, PiecewiseLinearKernels, PiecewiseLinearOps},
};
use crate::backend::device_backends;
use crate::{
    backend::optional::MaybeTensor,
    graph::{BackwardPass, Inputs, KeepPlan, Operation, Recorder, Run, Tracking, extension, given},
};
use burn::backend::{Backend, ExtensionType, tensor::FloatTensor};
use burn::tensor::ops::ConvOptions;

#[cfg(any(feature = "flex", feature = "ndarray"))]
mod cpu;

macro_rules! conv_norm_relu {
    ($($op:ident = $conv:ident, $rank:literal;)+) => {
        extension! {
            /// A convolution, a batch normalization with given statistics and a ReLU.
            pub trait ConvNormReluOps(ConvNormReluKernels) {$(
                #[doc = concat!("Over ", $rank, " axes. `gamma`, `mean` and `variance` must not be tracked.")]
                fn $op(
                    x: FloatTensor<Self>,
                    weight: FloatTensor<Self>,
                    #[extension_type] bias: MaybeTensor<Self>,
                    #[extension_type] norm: GivenNorm<Self>,
                    epsilon: f64,
                    options: ConvOptions<$rank>,
                ) -> FloatTensor<Self> {
                    let GivenNorm { gamma, beta, mean, variance } = norm;
                    // A strategy that recomputes outputs keeps less than a bit per element, if the three are steps of their own.
                    if Self::recomputes() {
                        let z = Self::$conv(x, Weight::Dense(weight), bias, options);
                        let z = Self::memsave_batch_norm(z, gamma, beta, mean, variance, epsilon);
                        return Self::memsave_piecewise_linear(z, PiecewiseLinear::Relu);
                    }
                    let [gamma, mean, variance] = [gamma, mean, variance].map(Self::plain);
                    let statistics = Statistics { mean, variance, epsilon };
                    let operation = ConvNormRelu { conv: Conv::new(options), gamma, statistics };
                    Self::run(operation, [Some(x), Some(weight), bias.into_option(), Some(beta)])
                }
            )+}
        }
    };
}
conv_norm_relu! {
    memsave_conv1d_norm_relu = memsave_conv1d, 1;
    memsave_conv2d_norm_relu = memsave_conv2d, 2;
    memsave_conv3d_norm_relu = memsave_conv3d, 3;
}

/// A batch normalization with given statistics; tensors `[channels]`.
#[derive(Clone, Debug, ExtensionType)]
pub struct GivenNorm<B: Backend> {
    /// The scale.
    pub gamma: FloatTensor<B>,
    /// The shift.
    pub beta: FloatTensor<B>,
    /// The mean.
    pub mean: FloatTensor<B>,
    /// The variance.
    pub variance: FloatTensor<B>,
}

const X: usize = 0;
const WEIGHT: usize = 1;
const BIAS: usize = 2;
const BETA: usize = 3;

/// The operation over `N` axes.
#[derive(Clone, Debug)]
pub struct ConvNormRelu<T, const N: usize> {
    conv: Conv<N>,
    /// `[channels]`
    gamma: T,
    statistics: Statistics<T>,
}

/// What the backward pass reads.
#[derive(Clone, Debug)]
pub struct SavedConvNormRelu<B: ConvNormReluKernels, const N: usize> {
    conv: Conv<N>,
    /// Where the output is not zero.
    mask: B::Mask,
    /// `None` if only `beta` is tracked.
    scale: Option<Scale<FloatTensor<B>>>,
}

/// `gamma / sqrt(variance + epsilon)`
#[derive(Clone, Debug)]
pub struct Scale<T> {
    gamma: T,
    variance: T,
    epsilon: f64,
}

impl<B: ConvNormReluKernels + Convolution<N>, const N: usize> Operation<B, 4>
    for ConvNormRelu<FloatTensor<B>, N>
{
    const INPUTS: [&'static str; 4] = ["x", "weight", "bias", "beta"];
    const PARAMETERS: &'static [usize] = &[WEIGHT];
    const SHAPES: &'static [usize] = &[X, WEIGHT];
    type Saved = SavedConvNormRelu<B, N>;

    fn name(&self) -> &'static str {
        ["conv1d_norm_relu", "conv2d_norm_relu", "conv3d_norm_relu"][N - 1]
    }

    fn plan(&self, inputs: &Tracking<B, 4>) -> KeepPlan<4> {
        let [reads_x, reads_weight] = [WEIGHT, X].map(|input| inputs.tracked(input));
        KeepPlan::nothing().keep_if(reads_x, X, "weight is tracked").keep_if(
            reads_weight,
            WEIGHT,
            "x is tracked",
        )
    }

    fn forward(&self, [x, weight, bias, beta]: Inputs<B, 4>) -> FloatTensor<B> {
        let Self { conv, gamma, statistics } = self;
        let norm = (gamma.clone(), given(beta), statistics.clone());
        B::conv_norm_relu(given(x), given(weight), bias, conv, norm)
    }

    fn forward_saving(&self, inputs: Inputs<B, 4>, recorder: &Recorder<4>) -> (FloatTensor<B>, Self::Saved) {
        let y = Operation::<B, 4>::forward(self, inputs);
        let report = recorder.report();
        let mask = B::piecewise_mask(y.clone(), PiecewiseLinear::Relu);
        let scaled = [X, WEIGHT, BIAS].into_iter().any(|input| recorder.tracked(input));
        let save = |name, tensor: &FloatTensor<B>| {
            report.tensor(name, tensor.clone(), "x, weight or bias is tracked")
        };
        let Statistics { variance, epsilon, .. } = &self.statistics;
        let scale = scaled.then(|| Scale {
            gamma: save("gamma", &self.gamma),
            variance: save("variance", variance),
            epsilon: *epsilon,
        });
        let mask = report.state("mask", mask, "an input is tracked");
        (y, SavedConvNormRelu { conv: self.conv.clone(), mask, scale })
    }

    fn backward(saved: Self::Saved, mut dy: FloatTensor<B>, pass: &mut BackwardPass<B, 4>) {
        let SavedConvNormRelu { conv, mask, scale } = saved;
        if pass.wants(BETA) {
            dy = B::scale_by_mask(dy, &mask, PiecewiseLinear::Relu.slopes());
            pass.give(BETA, B::sum_to_channels(dy.clone()));
        }
        if let Some(scale) = scale {
            let dz = B::norm_relu_backward(dy, &mask, scale);
            drop(mask);
            give_gradients(&conv, None, dz, pass);
        }
    }
}

/// The kernels.
pub trait ConvNormReluKernels: ConvKernels + BatchNormKernels + PiecewiseLinearKernels {
    /// `max(norm(conv(x, weight) + bias), 0)`. The norm is given as gamma, beta and its statistics.
    fn conv_norm_relu<const N: usize>(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        bias: Option<FloatTensor<Self>>,
        conv: &Conv<N>,
        (gamma, beta, statistics): (FloatTensor<Self>, FloatTensor<Self>, Statistics<FloatTensor<Self>>),
    ) -> FloatTensor<Self>
    where
        Self: Convolution<N>,
    {
        let Statistics { mean, variance, epsilon } = statistics;
        let z = Self::convolve(x, weight, bias, conv.options().clone());
        let z = Self::eval_batch_norm(z, gamma, beta, mean, variance, epsilon);
        Self::piecewise_linear(z, PiecewiseLinear::Relu)
    }

    /// `dy scale` where the mask is set, else 0; in place of `dy` if that is the only handle of its tensor.
    fn norm_relu_backward(
        dy: FloatTensor<Self>,
        mask: &Self::Mask,
        scale: Scale<FloatTensor<Self>>,
    ) -> FloatTensor<Self> {
        let Scale { gamma, variance, epsilon } = scale;
        let dy = Self::scale_by_mask(dy, mask, PiecewiseLinear::Relu.slopes());
        let mean = variance.clone(); // any tensor: only the gradient of gamma reads the mean
        given(Self::eval_batch_norm_backward(None, gamma, mean, variance, epsilon, dy, [true, false]).x)
    }
}
device_backends!(ConvNormReluKernels);

#[cfg(all(test, feature = "flex"))]
mod tests {
    use super::*;
    use crate::backend::testing::{Composed, assert_close, composed, random};
    use burn::backend::{Flex, TensorMetadata, ops::FloatTensorOps};

    #[test]
    fn default_bodies_equal_the_kernels() {
        // Few points, which Burn's own convolution computes; planes that are no multiple of a word of bits; depthwise.
        for (image, weight, groups) in [
            ([1, 3, 5, 4], [6, 3, 3, 2], 1),
            ([3, 4, 13, 11], [6, 2, 3, 3], 2),
            ([2, 4, 17, 9], [4, 1, 3, 3], 4),
            ([2, 70, 9, 8], [5, 70, 1, 1], 1),
            ([8, 16, 13, 27], [64, 16, 3, 3], 1),
        ] {
            let (x, weight) = (random(&image), random(&weight));
            let channels = weight.shape()[0];
            let [bias, gamma, beta, mean] = [(); 4].map(|()| random(&[channels]));
            let variance = Flex::float_abs(random(&[channels]));
            let conv = Conv::new(ConvOptions::new([1, 2], [1, 0], [1, 1], groups));
            let norm = (gamma, beta, Statistics { mean, variance, epsilon: 0.1 });
            let of_composed = {
                let (gamma, beta, Statistics { mean, variance, epsilon }) = &norm;
                let [gamma, beta, mean, variance] = [gamma, beta, mean, variance].map(composed);
                (gamma, beta, Statistics { mean, variance, epsilon: *epsilon })
            };
            for bias in [Some(bias), None] {
                let y = Flex::conv_norm_relu(x.clone(), weight.clone(), bias.clone(), &conv, norm.clone());
                let of_body = (composed(&x), composed(&weight), bias.as_ref().map(composed));
                let body =
                    Composed::conv_norm_relu(of_body.0, of_body.1, of_body.2, &conv, of_composed.clone());
                assert_close("y", body, y.clone());
                let dy = random(y.shape().as_slice());
                // Both masks are of one output: sums in another order may lie on the other side of zero.
                let packed = Composed::piecewise_mask(composed(&y), PiecewiseLinear::Relu);
                let mask = Flex::piecewise_mask(y, PiecewiseLinear::Relu);
                let (gamma, _, Statistics { variance, epsilon, .. }) = norm.clone();
                let scale = Scale { gamma, variance, epsilon };
                let of_body = Scale {
                    gamma: composed(&scale.gamma),
                    variance: composed(&scale.variance),
                    epsilon: scale.epsilon,
                };
                let body = Composed::norm_relu_backward(composed(&dy), &packed, of_body);
                assert_close("dz", body, Flex::norm_relu_backward(dy, &mask, scale));
            }
        }
    }
}
