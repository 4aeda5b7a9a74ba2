//! Batch normalization with the statistics of the batch, and an activation, in the same passes.
//!
//! | | |
//! | --- | --- |
//! | computes | `y = f(z)`, `z = (x - mean(x)) / sqrt(var(x) + epsilon) * gamma + beta` |
//! | keeps | `x`, `gamma`, `beta` (handles); mean and variance, `[channels]` each, except in half precision |
//! | backward | `dz = dy f'(z)`, with `z` recomputed from `x` a few elements at a time; then as a [batch normalization](super) |
//!
//! `z` never exists as a whole. The two operations one after the other keep as much, and for a piecewise linear `f` one bit per element
//! more; but they write and read `z` in the forward pass and again in the backward pass. Stock Burn also keeps `z` or `y`.
//!
//! If only `beta` is tracked, the two operations may keep less, and should run instead. They do run where the kernels do not fuse, and with a
//! [policy](crate::saved) that rounds what is kept, for a piecewise linear `f`: a rounded `x` may lie in another piece.
use super::{
    BETA, BatchNormKernels, BatchNormOps, BatchNormOutput, BatchNormTrain, GAMMA, INPUTS, SavedBatchNorm,
    Statistics, X,
};
use crate::backend::device_backends;
use crate::graph::{
    BackwardPass, Inputs, KeepPlan, Operation, Recorder, Run, Tracking, extension, given, policy,
};
use crate::ops::{
    piecewise_linear::{PiecewiseLinear, PiecewiseLinearKernels, PiecewiseLinearOps},
    row_norm::NormGrads,
    smooth::{Smooth, SmoothKernels, SmoothOps},
};
use burn::backend::{TensorMetadata, tensor::FloatTensor};
use std::sync::Arc;

/// An activation that is computed element by element.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum ElementActivation {
    /// With at most two slopes, such as ReLU.
    PiecewiseLinear(PiecewiseLinear),
    /// Smooth, such as SiLU.
    Smooth(Smooth),
}

impl From<PiecewiseLinear> for ElementActivation {
    fn from(f: PiecewiseLinear) -> Self {
        Self::PiecewiseLinear(f)
    }
}

impl From<Smooth> for ElementActivation {
    fn from(f: Smooth) -> Self {
        Self::Smooth(f)
    }
}

impl ElementActivation {
    /// `f(z)`, as an operation of its own.
    pub(crate) fn of<B: PiecewiseLinearOps + SmoothOps>(self, z: FloatTensor<B>) -> FloatTensor<B> {
        match self {
            Self::PiecewiseLinear(f) => B::memsave_piecewise_linear(z, f),
            Self::Smooth(f) => B::memsave_smooth(z, f),
        }
    }
}

extension! {
    /// Batch normalizations with activations.
    pub trait ActivatedBatchNormOps(ActivatedBatchNormKernels) {
        /// With the statistics of the batch; `x` `[batch, channels, ...]`, the others `[channels]`.
        fn memsave_batch_norm_activated(
            x: FloatTensor<Self>,
            gamma: FloatTensor<Self>,
            beta: FloatTensor<Self>,
            epsilon: f64,
            activation: ElementActivation,
        ) -> BatchNormTrain<Self> {
            // Where `x` comes back rounded, pieces have to be those of the forward pass: their bits are kept.
            let keeps_bits = policy::is_rounding() && matches!(activation, ElementActivation::PiecewiseLinear(_));
            if keeps_bits || !<Self as Run>::Plain::fuses_activations() {
                let BatchNormTrain { output, mean, variance } =
                    Self::memsave_batch_norm_train(x, gamma, beta, epsilon);
                return BatchNormTrain { output: activation.of::<Self>(output), mean, variance };
            }
            let activation = activation.with_ends_in(x.dtype());
            let [of_x, of_gamma, of_beta] = [&x, &gamma, &beta].map(Self::primitive);
            let BatchNormOutput { output, mean, variance } =
                <Self as Run>::Plain::train_activated(of_x, of_gamma, of_beta, epsilon, activation);
            let [untracked_mean, untracked_variance] =
                [&mean, &variance].map(|statistic| Self::untracked(statistic.clone()));
            let statistics = Statistics { mean, variance, epsilon };
            let statistics = statistics.kept::<<Self as Run>::Plain>(output.dtype());
            let operation = Activated { output, statistics, epsilon, activation };
            BatchNormTrain {
                output: Self::run(operation, [Some(x), Some(gamma), Some(beta)]),
                mean: untracked_mean,
                variance: untracked_variance,
            }
        }
    }
}

/// The operation. Its output and the statistics are already known.
#[derive(Clone)]
pub struct Activated<T> {
    output: T,
    /// `None` if they are recomputed from `x`.
    statistics: Option<Statistics<T>>,
    epsilon: f64,
    activation: ElementActivation,
}

/// What the backward pass reads besides inputs.
#[derive(Clone, Debug)]
pub struct SavedActivated<T> {
    norm: SavedBatchNorm<T>,
    activation: ElementActivation,
}

impl<B: ActivatedBatchNormKernels> Operation<B, 3> for Activated<FloatTensor<B>> {
    const INPUTS: [&'static str; 3] = INPUTS;
    const PARAMETERS: &'static [usize] = &[GAMMA, BETA];
    type Saved = SavedActivated<FloatTensor<B>>;

    fn name(&self) -> &'static str {
        "batch_norm_activated"
    }

    fn plan(&self, inputs: &Tracking<B, 3>) -> KeepPlan<3> {
        let reads = [X, GAMMA, BETA].into_iter().any(|input| inputs.tracked(input));
        [X, GAMMA, BETA]
            .into_iter()
            .fold(KeepPlan::nothing(), |plan, input| plan.keep_if(reads, input, "an input is tracked"))
            .offer_if(reads)
    }

    fn forward(&self, _: Inputs<B, 3>) -> FloatTensor<B> {
        self.output.clone()
    }

    fn forward_saving(&self, _: Inputs<B, 3>, recorder: &Recorder<3>) -> (FloatTensor<B>, Self::Saved) {
        // Where only beta is tracked, they would be computed again.
        let statistics = self.statistics.as_ref().and_then(|statistics| statistics.saved(recorder));
        let norm = SavedBatchNorm { statistics, epsilon: self.epsilon };
        (self.output.clone(), SavedActivated { norm, activation: self.activation })
    }

    fn recompute(self, saved: &Self::Saved) -> impl Fn(Inputs<B, 3>) -> FloatTensor<B> + Send + 'static {
        let SavedActivated { norm: SavedBatchNorm { statistics, epsilon }, activation } = saved.clone();
        move |inputs| {
            let [x, gamma, beta] = inputs.map(given);
            match statistics.as_deref() {
                Some(Statistics { mean, variance, .. }) => {
                    let statistics = [mean, variance].map(Clone::clone);
                    B::normalize_activated(x, [gamma, beta], statistics, epsilon, activation)
                }
                None => B::train_activated(x, gamma, beta, epsilon, activation).output,
            }
        }
    }

    fn backward(saved: Self::Saved, dy: FloatTensor<B>, pass: &mut BackwardPass<B, 3>) {
        let SavedActivated { norm: SavedBatchNorm { statistics, epsilon }, activation } = saved;
        let wanted = [X, GAMMA, BETA].map(|input| pass.wants(input));
        let statistics = statistics.map(Arc::unwrap_or_clone);
        let statistics = statistics.map(|Statistics { mean, variance, .. }| [mean, variance]);
        let [x, gamma, beta] = [X, GAMMA, BETA].map(|input| given(pass.take(input)));
        let NormGrads { x, gamma, beta } =
            B::activated_backward(x, [gamma, beta], statistics, epsilon, activation, dy, wanted);
        pass.give_all([x, gamma, beta]);
    }
}

/// The kernels.
pub trait ActivatedBatchNormKernels: BatchNormKernels + PiecewiseLinearKernels + SmoothKernels {
    /// Whether the other methods make fewer passes than the two operations one after the other.
    fn fuses_activations() -> bool {
        false
    }

    /// `f` of the normalization with the statistics of the batch, and these.
    fn train_activated(
        x: FloatTensor<Self>,
        gamma: FloatTensor<Self>,
        beta: FloatTensor<Self>,
        epsilon: f64,
        activation: ElementActivation,
    ) -> BatchNormOutput<Self> {
        let BatchNormOutput { output, mean, variance } = Self::train_batch_norm(x, gamma, beta, epsilon);
        BatchNormOutput { output: value::<Self>(output, activation), mean, variance }
    }

    /// `f` of the normalization with gamma and beta, and with a mean and a variance.
    fn normalize_activated(
        x: FloatTensor<Self>,
        [gamma, beta]: [FloatTensor<Self>; 2],
        [mean, variance]: [FloatTensor<Self>; 2],
        epsilon: f64,
        activation: ElementActivation,
    ) -> FloatTensor<Self> {
        value::<Self>(Self::eval_batch_norm(x, gamma, beta, mean, variance, epsilon), activation)
    }

    /// Gradients of [`train_activated`](Self::train_activated); `wanted` says which of x, gamma, beta. `statistics` as in
    /// [`train_batch_norm_backward`](BatchNormKernels::train_batch_norm_backward).
    fn activated_backward(
        x: FloatTensor<Self>,
        [gamma, beta]: [FloatTensor<Self>; 2],
        statistics: Option<[FloatTensor<Self>; 2]>,
        epsilon: f64,
        activation: ElementActivation,
        dy: FloatTensor<Self>,
        wanted: [bool; 3],
    ) -> NormGrads<Self> {
        let z = match statistics.clone() {
            Some([mean, variance]) => {
                Self::eval_batch_norm(x.clone(), gamma.clone(), beta, mean, variance, epsilon)
            }
            None => Self::train_batch_norm(x.clone(), gamma.clone(), beta, epsilon).output,
        };
        let dz = slope_times::<Self>(z, activation, dy);
        Self::train_batch_norm_backward(x, gamma, statistics, epsilon, dz, wanted)
    }
}
device_backends!(ActivatedBatchNormKernels);

/// `f(z)`
fn value<B: ActivatedBatchNormKernels>(z: FloatTensor<B>, activation: ElementActivation) -> FloatTensor<B> {
    match activation {
        ElementActivation::PiecewiseLinear(f) => B::piecewise_linear(z, f),
        ElementActivation::Smooth(f) => B::smooth(z, f),
    }
}

/// `dy f'(z)`
fn slope_times<B: ActivatedBatchNormKernels>(
    z: FloatTensor<B>,
    activation: ElementActivation,
    dy: FloatTensor<B>,
) -> FloatTensor<B> {
    match activation {
        ElementActivation::PiecewiseLinear(f) => B::scale_by_mask(dy, &B::piecewise_mask(z, f), f.slopes()),
        ElementActivation::Smooth(f) => {
            let read = if f.reads_output() { B::smooth(z, f) } else { z };
            B::smooth_backward(read, f, dy)
        }
    }
}

impl ElementActivation {
    /// With the ends of pieces rounded to a dtype.
    fn with_ends_in(self, dtype: burn::tensor::DType) -> Self {
        match self {
            Self::PiecewiseLinear(f) => Self::PiecewiseLinear(f.with_ends_in(dtype)),
            smooth => smooth,
        }
    }

    /// Whether pieces are in the order that the formula assumes.
    pub(crate) fn is_ordered(self) -> bool {
        match self {
            Self::PiecewiseLinear(f) => f.is_ordered(),
            Self::Smooth(_) => true,
        }
    }
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use super::*;
    use crate::backend::testing::{Composed, assert_close, composed, random};
    use burn::backend::{Flex, ops::FloatTensorOps};

    /// The body of `activated_backward`, with kernels of its parts: Burn composes no backward pass of a batch norm.
    fn apart(
        x: FloatTensor<Flex>,
        [gamma, beta]: [FloatTensor<Flex>; 2],
        [mean, variance]: [FloatTensor<Flex>; 2],
        activation: ElementActivation,
        dy: FloatTensor<Flex>,
    ) -> NormGrads<Flex> {
        let statistics = [mean.clone(), variance.clone()];
        let z = Flex::eval_batch_norm(x.clone(), gamma.clone(), beta, mean, variance, 0.1);
        let dz = slope_times::<Flex>(z, activation, dy);
        Flex::train_batch_norm_backward(x, gamma, Some(statistics), 0.1, dz, [true; 3])
    }

    #[test]
    fn default_bodies_equal_the_kernels() {
        let activations: [ElementActivation; 4] = [
            PiecewiseLinear::Relu.into(),
            PiecewiseLinear::HardSigmoid { alpha: 0.4, beta: 0.5 }.into(),
            Smooth::Silu.into(),
            Smooth::Tanh.into(),
        ];
        // Rows; planes of less and more than a chunk; a plane of several chunks.
        for shape in [&[6, 5][..], &[3, 4, 7, 9], &[2, 3, 40, 30], &[1, 2, 110, 120]] {
            for activation in activations {
                let x = random(shape);
                let [gamma, beta] = [(); 2].map(|()| random(&[shape[1]]));
                let found = Flex::train_activated(x.clone(), gamma.clone(), beta.clone(), 0.1, activation);
                let [of_x, of_gamma, of_beta] = [&x, &gamma, &beta].map(composed);
                let body = Composed::train_activated(
                    of_x.clone(),
                    of_gamma.clone(),
                    of_beta.clone(),
                    0.1,
                    activation,
                );
                assert_close("y", body.output, found.output.clone());
                let statistics = [found.mean, found.variance];
                let again = Flex::normalize_activated(
                    x.clone(),
                    [gamma.clone(), beta.clone()],
                    statistics.clone(),
                    0.1,
                    activation,
                );
                assert_close("y again", composed(&found.output), again);
                let dy = random(shape);
                let unshared = || Flex::float_mul_scalar(dy.clone(), 1.0.into());
                let parameters = || [gamma.clone(), beta.clone()];
                let body = apart(x.clone(), parameters(), statistics.clone(), activation, unshared());
                let grads = Flex::activated_backward(
                    x,
                    parameters(),
                    Some(statistics),
                    0.1,
                    activation,
                    unshared(),
                    [true; 3],
                );
                for (name, body, found) in [
                    ("x", body.x, grads.x),
                    ("gamma", body.gamma, grads.gamma),
                    ("beta", body.beta, grads.beta),
                ] {
                    assert_close(name, composed(&body.expect("wanted")), found.expect("wanted"));
                }
            }
        }
    }
}
