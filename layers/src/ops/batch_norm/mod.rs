//! Batch normalization, with the statistics of the batch or with given ones.
//!
//! | | batch statistics | given statistics |
//! | --- | --- | --- |
//! | computes | `y = (x - mean(x)) / sqrt(var(x) + epsilon) * gamma + beta` | the same with given `mean`, `var` |
//! | keeps | `x`, `gamma` (handles) | `gamma` (a handle); `x` if `gamma` is tracked |
//! | | mean and variance, `[channels]` each, except in half precision | mean and variance |
//! | backward | `dx = gamma / std (dy - mean(dy) - x_hat mean(dy x_hat))` | `dx = gamma / std dy` |
//! | | `dgamma = sum(dy x_hat)`, `dbeta = sum(dy)`, `x_hat = (x - mean) / std` | the same |
//!
//! If only `beta` is tracked, nothing is kept. With batch statistics, stock Burn keeps as much, and also keeps the statistics in half
//! precision. With given statistics, its peak is two tensors of the size of `x`. A frozen module uses its running statistics.
//!
//! In half precision, a mean of 100.25 is not representable if neighboring numbers are 100 and 100.5. Rounded, it can move every
//! normalized element by a standard deviation, as it does in stock Burn. So the kernels here normalize with statistics in f32, and for the
//! gradient recompute them from `x`, which costs a pass over `x`. Only the statistics for the running averages are rounded. Rounded
//! statistics are kept if the [policy](crate::saved) gives `x` back rounded, and on backends that compose Burn's operations.
//!
//! If `x` is kept, here or by another step, the output is offered for [recomputation](crate::graph).
//!
//! `activated.rs` has an activation in the same passes. `synchronized.rs` has the statistics of a batch that is divided among replicas.
use super::row_norm::NormGrads;
use crate::backend::{ChannelSums, composing_backends, widen};
use crate::graph::policy;
use crate::graph::{BackwardPass, Inputs, KeepPlan, Operation, Recorder, Run, Tracking, extension, given};
use burn::backend::{Backend, ExtensionType, TensorMetadata, tensor::FloatTensor};
use burn::tensor::{DType, Shape};
use std::sync::Arc;

mod activated;
#[cfg(any(feature = "flex", feature = "ndarray"))]
mod cpu;
#[cfg(any(feature = "wgpu", feature = "cuda"))]
mod cube;
mod synchronized;

pub use activated::{ActivatedBatchNormOps, ElementActivation};
pub use synchronized::SynchronizedBatchNormOps;

/// Output and statistics of [`BatchNormOps::memsave_batch_norm_train`].
#[derive(ExtensionType)]
pub struct BatchNormTrain<B: Backend> {
    /// The normalized input.
    pub output: FloatTensor<B>,
    /// The mean of every channel, `[channels]`; untracked.
    pub mean: FloatTensor<B>,
    /// The biased variance of every channel, `[channels]`; untracked.
    pub variance: FloatTensor<B>,
}

extension! {
    /// Batch normalization.
    pub trait BatchNormOps(BatchNormKernels) {
        /// With the statistics of the batch; `x` `[batch, channels, ...]`, the others `[channels]`.
        fn memsave_batch_norm_train(
            x: FloatTensor<Self>,
            gamma: FloatTensor<Self>,
            beta: FloatTensor<Self>,
            epsilon: f64,
        ) -> BatchNormTrain<Self> {
            let [plain_x, plain_gamma, plain_beta] = [&x, &gamma, &beta].map(Self::primitive);
            let BatchNormOutput { output, mean, variance } =
                <Self as Run>::Plain::train_batch_norm(plain_x, plain_gamma, plain_beta, epsilon);
            let [untracked_mean, untracked_variance] =
                [&mean, &variance].map(|statistic| Self::untracked(statistic.clone()));
            let statistics = Statistics { mean, variance, epsilon };
            let statistics = statistics.kept::<<Self as Run>::Plain>(output.dtype());
            let operation = WithBatchStatistics { output, statistics, epsilon };
            BatchNormTrain {
                output: Self::run(operation, [Some(x), Some(gamma), Some(beta)]),
                mean: untracked_mean,
                variance: untracked_variance,
            }
        }
        /// With given statistics, which must not be tracked.
        fn memsave_batch_norm(
            x: FloatTensor<Self>,
            gamma: FloatTensor<Self>,
            beta: FloatTensor<Self>,
            mean: FloatTensor<Self>,
            variance: FloatTensor<Self>,
            epsilon: f64,
        ) -> FloatTensor<Self> {
            let statistics = Statistics { mean: Self::plain(mean), variance: Self::plain(variance), epsilon };
            Self::run(WithGivenStatistics(statistics), [Some(x), Some(gamma), Some(beta)])
        }
    }
}

const X: usize = 0;
const GAMMA: usize = 1;
const BETA: usize = 2;
const INPUTS: [&str; 3] = ["x", "gamma", "beta"];

/// Statistics of every channel.
#[derive(Clone, Debug)]
pub struct Statistics<T> {
    /// The mean, `[channels]`.
    pub(super) mean: T,
    /// The biased variance, `[channels]`.
    pub(super) variance: T,
    pub(super) epsilon: f64,
}

impl<T: TensorMetadata + Clone> Statistics<T> {
    /// Those of the batch, if they are kept; `None` if they are computed again from an `x` of this dtype.
    fn kept<B: BatchNormKernels>(self, dtype: DType) -> Option<Self> {
        // If the input comes back rounded, its variance would include that of the rounding.
        (policy::is_rounding() || !B::rounds_batch_statistics(dtype)).then_some(self)
    }

    /// The statistics, reported to the ledger, if the backward pass reads them.
    fn saved(&self, recorder: &Recorder<3>) -> Option<Arc<Self>> {
        let read = recorder.tracked(X) || recorder.tracked(GAMMA);
        let save =
            |name, statistic: &T| recorder.report().tensor(name, statistic.clone(), "x or gamma is tracked");
        read.then(|| {
            let (mean, variance) = (save("mean", &self.mean), save("variance", &self.variance));
            Arc::new(Self { mean, variance, epsilon: self.epsilon })
        })
    }
}

/// The output, from `x`, `gamma` and `beta`.
fn normalize<B: BatchNormKernels>(
    [x, gamma, beta]: Inputs<B, 3>,
    statistics: Statistics<FloatTensor<B>>,
) -> FloatTensor<B> {
    let Statistics { mean, variance, epsilon } = statistics;
    B::eval_batch_norm(given(x), given(gamma), given(beta), mean, variance, epsilon)
}

/// What is kept of the inputs of a batch norm with the statistics of the batch, or of all parts of it.
fn plan_with_batch_statistics<B: Backend>(inputs: &Tracking<B, 3>) -> KeepPlan<3> {
    let reads = inputs.tracked(X) || inputs.tracked(GAMMA);
    KeepPlan::nothing()
        .keep_if(reads, X, "x or gamma is tracked")
        .keep_if(reads, GAMMA, "x or gamma is tracked")
        .offer_if(reads)
}

/// With the statistics of the batch. These and the output are already known.
#[derive(Clone)]
pub struct WithBatchStatistics<T> {
    output: T,
    /// `None` if they are recomputed from `x`.
    statistics: Option<Statistics<T>>,
    epsilon: f64,
}

/// What the backward pass reads besides `x` and gamma.
#[derive(Clone, Debug)]
pub struct SavedBatchNorm<T> {
    /// `None` if only beta is tracked, or if they are recomputed from `x`.
    statistics: Option<Arc<Statistics<T>>>,
    epsilon: f64,
}

impl<B: BatchNormKernels> Operation<B, 3> for WithBatchStatistics<FloatTensor<B>> {
    const INPUTS: [&'static str; 3] = INPUTS;
    const PARAMETERS: &'static [usize] = &[GAMMA];
    type Saved = SavedBatchNorm<FloatTensor<B>>;

    fn name(&self) -> &'static str {
        "batch_norm"
    }

    fn plan(&self, inputs: &Tracking<B, 3>) -> KeepPlan<3> {
        plan_with_batch_statistics(inputs)
    }

    fn forward(&self, _: Inputs<B, 3>) -> FloatTensor<B> {
        self.output.clone()
    }

    fn forward_saving(&self, _: Inputs<B, 3>, recorder: &Recorder<3>) -> (FloatTensor<B>, Self::Saved) {
        let statistics = self.statistics.as_ref().and_then(|statistics| statistics.saved(recorder));
        (self.output.clone(), SavedBatchNorm { statistics, epsilon: self.epsilon })
    }

    fn recompute(self, saved: &Self::Saved) -> impl Fn(Inputs<B, 3>) -> FloatTensor<B> + Send + 'static {
        let Self { statistics, epsilon, .. } = self;
        let statistics = saved.statistics.clone().or_else(|| statistics.map(Arc::new));
        move |inputs| match &statistics {
            Some(statistics) => normalize::<B>(inputs, Statistics::clone(statistics)),
            None => {
                let [x, gamma, beta] = inputs.map(given);
                B::train_batch_norm(x, gamma, beta, epsilon).output
            }
        }
    }

    fn backward(saved: Self::Saved, dy: FloatTensor<B>, pass: &mut BackwardPass<B, 3>) {
        let SavedBatchNorm { statistics, epsilon } = saved;
        let wanted = [X, GAMMA, BETA].map(|input| pass.wants(input));
        if wanted == [false, false, true] {
            return pass.give(BETA, B::sum_to_channels(dy));
        }
        let statistics = statistics.map(Arc::unwrap_or_clone);
        let statistics = statistics.map(|Statistics { mean, variance, .. }| [mean, variance]);
        let (x, gamma) = (given(pass.take(X)), given(pass.take(GAMMA)));
        let NormGrads { x, gamma, beta } =
            B::train_batch_norm_backward(x, gamma, statistics, epsilon, dy, wanted);
        pass.give_all([x, gamma, beta]);
    }
}

/// With given statistics.
#[derive(Clone)]
pub struct WithGivenStatistics<T>(Statistics<T>);

impl<B: BatchNormKernels> Operation<B, 3> for WithGivenStatistics<FloatTensor<B>> {
    const INPUTS: [&'static str; 3] = INPUTS;
    const PARAMETERS: &'static [usize] = &[GAMMA];
    /// Nothing if only beta is tracked.
    type Saved = Option<Arc<Statistics<FloatTensor<B>>>>;

    fn name(&self) -> &'static str {
        "batch_norm"
    }

    fn plan(&self, inputs: &Tracking<B, 3>) -> KeepPlan<3> {
        let reads_x = inputs.tracked(GAMMA);
        KeepPlan::nothing()
            .keep_if(reads_x, X, "gamma is tracked")
            .keep_if(reads_x || inputs.tracked(X), GAMMA, "x or gamma is tracked")
            .offer_if(reads_x || inputs.available(X))
    }

    fn forward(&self, inputs: Inputs<B, 3>) -> FloatTensor<B> {
        normalize::<B>(inputs, self.0.clone())
    }

    fn forward_saving(&self, inputs: Inputs<B, 3>, recorder: &Recorder<3>) -> (FloatTensor<B>, Self::Saved) {
        (normalize::<B>(inputs, self.0.clone()), self.0.saved(recorder))
    }

    fn recompute(self, saved: &Self::Saved) -> impl Fn(Inputs<B, 3>) -> FloatTensor<B> + Send + 'static {
        let statistics = saved.clone().unwrap_or_else(|| Arc::new(self.0));
        move |inputs| normalize::<B>(inputs, Statistics::clone(&statistics))
    }

    fn backward(saved: Self::Saved, dy: FloatTensor<B>, pass: &mut BackwardPass<B, 3>) {
        let Some(Statistics { mean, variance, epsilon }) = saved.map(Arc::unwrap_or_clone) else {
            return pass.give(BETA, B::sum_to_channels(dy));
        };
        let wanted = [X, BETA].map(|input| pass.wants(input));
        let (x, gamma) = (pass.take(X), given(pass.take(GAMMA)));
        let NormGrads { x, gamma, beta } =
            B::eval_batch_norm_backward(x, gamma, mean, variance, epsilon, dy, wanted);
        pass.give_all([x, gamma, beta]);
    }
}

/// Output and statistics of a normalization over the batch.
pub struct BatchNormOutput<B: Backend> {
    /// The normalized input.
    pub output: FloatTensor<B>,
    /// The mean of every channel, `[channels]`.
    pub mean: FloatTensor<B>,
    /// The biased variance of every channel, `[channels]`.
    pub variance: FloatTensor<B>,
}

/// The kernels.
pub trait BatchNormKernels: ChannelSums {
    /// With the statistics of the batch.
    fn train_batch_norm(
        x: FloatTensor<Self>,
        gamma: FloatTensor<Self>,
        beta: FloatTensor<Self>,
        epsilon: f64,
    ) -> BatchNormOutput<Self> {
        let result = Self::batch_norm_train(x, gamma, beta, epsilon);
        BatchNormOutput { output: result.output, mean: result.mean, variance: result.variance }
    }

    /// Whether [`train_batch_norm`](Self::train_batch_norm) rounds the statistics that it returns, after it has normalized with them.
    fn rounds_batch_statistics(_: DType) -> bool {
        false
    }

    /// Gradients of [`train_batch_norm`](Self::train_batch_norm); `wanted` says which of x, gamma, beta. `statistics` are the mean and the
    /// variance. They may be `None` only where they were rounded, and are then recomputed from `x`.
    fn train_batch_norm_backward(
        x: FloatTensor<Self>,
        gamma: FloatTensor<Self>,
        statistics: Option<[FloatTensor<Self>; 2]>,
        epsilon: f64,
        dy: FloatTensor<Self>,
        wanted: [bool; 3],
    ) -> NormGrads<Self> {
        let [mean, variance] = statistics.expect("statistics, of which none were rounded");
        let grads = Self::batch_norm_train_backward(x, gamma, mean, variance, epsilon, dy);
        NormGrads {
            x: wanted[0].then_some(grads.x_grad),
            gamma: wanted[1].then_some(grads.gamma_grad),
            beta: wanted[2].then_some(grads.beta_grad),
        }
    }

    /// With given statistics; in place if `x` is the only handle of its tensor.
    fn eval_batch_norm(
        x: FloatTensor<Self>,
        gamma: FloatTensor<Self>,
        beta: FloatTensor<Self>,
        mean: FloatTensor<Self>,
        variance: FloatTensor<Self>,
        epsilon: f64,
    ) -> FloatTensor<Self> {
        Self::batch_norm(x, gamma, beta, mean, variance, epsilon)
    }

    /// Gradients of [`eval_batch_norm`](Self::eval_batch_norm). `x` is read only for the gradient of gamma, and is given if that is
    /// wanted. `wanted` says whether the gradients of x and of beta are wanted.
    fn eval_batch_norm_backward(
        x: Option<FloatTensor<Self>>,
        gamma: FloatTensor<Self>,
        mean: FloatTensor<Self>,
        variance: FloatTensor<Self>,
        epsilon: f64,
        dy: FloatTensor<Self>,
        wanted: [bool; 2],
    ) -> NormGrads<Self> {
        let rank = dy.shape().num_dims();
        let [gamma, mean, variance] = [gamma, mean, variance].map(|x| per_channel::<Self>(x, rank));
        let inverse_std = inverse_std::<Self>(variance, epsilon);
        let gamma_grad = x.map(|x| {
            let centered = Self::float_sub(x, mean);
            // Scaled before it is summed, since the sum of unscaled products may exceed f16.
            let normalized = Self::float_mul(centered, inverse_std.clone());
            Self::sum_to_channels(Self::float_mul(normalized, dy.clone()))
        });
        let beta_grad = wanted[1].then(|| Self::sum_to_channels(dy.clone()));
        let x_grad = wanted[0].then(|| Self::float_mul(dy, Self::float_mul(gamma, inverse_std)));
        NormGrads { x: x_grad, gamma: gamma_grad, beta: beta_grad }
    }

    /// The mean and the biased variance of every channel, `[channels]` each, in the type that sums are made in.
    fn batch_moments(x: FloatTensor<Self>) -> [FloatTensor<Self>; 2] {
        let x = widen::<Self>(x);
        let [rank, channels] = [x.shape().num_dims(), x.shape()[1]];
        let share = channels as f64 / x.shape().num_elements() as f64;
        let mean = |x| Self::float_mul_scalar(Self::sum_to_channels(x), share.into());
        let of_x = mean(x.clone());
        let centered = Self::float_sub(x, per_channel::<Self>(of_x.clone(), rank));
        [of_x, mean(Self::float_mul(centered.clone(), centered))]
    }

    /// Normalizes with this mean and variance, which are in the type that sums are made in.
    fn normalize_by(
        x: FloatTensor<Self>,
        gamma: FloatTensor<Self>,
        beta: FloatTensor<Self>,
        [mean, variance]: [FloatTensor<Self>; 2],
        epsilon: f64,
    ) -> FloatTensor<Self> {
        let dtype = x.dtype();
        let [x, gamma, beta] = [x, gamma, beta].map(widen::<Self>);
        let y = Self::eval_batch_norm(x, gamma, beta, mean, variance, epsilon);
        if y.dtype() == dtype { y } else { Self::float_cast(y, dtype.into()) }
    }

    /// `sum(dy)` and `sum(dy * x_hat)` of every channel, with this mean and variance; all in the type that sums are made in.
    fn gradient_sums(
        x: FloatTensor<Self>,
        [mean, variance]: [FloatTensor<Self>; 2],
        epsilon: f64,
        dy: FloatTensor<Self>,
    ) -> [FloatTensor<Self>; 2] {
        let [x, dy] = [x, dy].map(widen::<Self>);
        let gamma = variance.clone(); // any tensor: only the gradient of x reads it
        let sums = Self::eval_batch_norm_backward(Some(x), gamma, mean, variance, epsilon, dy, [false, true]);
        [given(sums.beta), given(sums.gamma)]
    }

    /// `dx = gamma / std * (dy - mean_dy - x_hat * mean_product)`; `means` are `[mean_dy, mean_product]`. Statistics and means are in the
    /// type that sums are made in. In place if `dy` is the only handle of its tensor.
    fn x_backward_by(
        x: FloatTensor<Self>,
        gamma: FloatTensor<Self>,
        [mean, variance]: [FloatTensor<Self>; 2],
        epsilon: f64,
        dy: FloatTensor<Self>,
        means: [FloatTensor<Self>; 2],
    ) -> FloatTensor<Self> {
        let (dtype, rank) = (dy.dtype(), dy.shape().num_dims());
        let [x, gamma, dy] = [x, gamma, dy].map(widen::<Self>);
        let of_channels = |x| per_channel::<Self>(x, rank);
        let inverse_std = inverse_std::<Self>(variance, epsilon);
        let [of_dy, of_product] = means;
        let slope = of_channels(Self::float_mul(inverse_std.clone(), of_product));
        let shifted = Self::float_sub(dy, of_channels(of_dy));
        let along_x = Self::float_mul(Self::float_sub(x, of_channels(mean)), slope);
        let scale = of_channels(Self::float_mul(gamma, inverse_std));
        let dx = Self::float_mul(Self::float_sub(shifted, along_x), scale);
        if dx.dtype() == dtype { dx } else { Self::float_cast(dx, dtype.into()) }
    }
}
composing_backends!(BatchNormKernels);

fn inverse_std<B: Backend>(variance: FloatTensor<B>, epsilon: f64) -> FloatTensor<B> {
    B::float_recip(B::float_sqrt(B::float_add_scalar(variance, epsilon.into())))
}

/// `[channels]` as it broadcasts against a tensor of rank `rank`.
fn per_channel<B: Backend>(x: FloatTensor<B>, rank: usize) -> FloatTensor<B> {
    let mut shape = vec![1; rank];
    shape[1] = x.shape()[0];
    B::float_reshape(x, Shape::from(shape))
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use super::*;
    use crate::backend::testing::{Composed, assert_close, composed, random};
    use burn::backend::{Flex, ops::FloatTensorOps};
    use burn::tensor::FloatDType;

    /// The sums over two images cancel out; their variance is large.
    #[test]
    fn channel_sums_do_not_overflow_in_half_precision() {
        let full = |shape: &[usize], value: f32| {
            let shape = Shape::from(shape.to_vec());
            composed(&Flex::float_full(shape, value.into(), &Default::default(), FloatDType::F16))
        };
        let image = [1, 2, 56, 56];
        let halves = |value| Composed::float_cat(vec![full(&image, value), full(&image, -value)], 0);
        assert_close("sum", Composed::sum_to_channels(halves(30.0)), full(&[2], 0.0).into_primitive());
        let [gamma, mean, variance] = [1.0, 0.0, 1e4].map(|value| full(&[2], value));
        let (x, dy) = (Some(halves(100.0)), halves(0.25));
        let gradients =
            Composed::eval_batch_norm_backward(x, gamma, mean, variance, 1e-5, dy, [false, false]);
        let exact = full(&[2], 2.0 * 56.0 * 56.0 * 0.25).into_primitive();
        assert_close("gamma", gradients.gamma.expect("x is given"), exact);
    }

    #[test]
    fn default_bodies_equal_the_kernels() {
        let [gamma, beta] = [(); 2].map(|()| random(&[3]));
        for shape in [&[6, 3][..], &[4, 3, 5], &[2, 3, 4, 4]] {
            let [x, dy] = [(); 2].map(|()| random(shape));
            let body = Composed::train_batch_norm(composed(&x), composed(&gamma), composed(&beta), 1e-5);
            let cpu = Flex::train_batch_norm(x.clone(), gamma.clone(), beta.clone(), 1e-5);
            let (mean, variance) = (cpu.mean.clone(), cpu.variance.clone());
            assert_close("y", body.output, cpu.output);
            assert_close("mean", body.mean, cpu.mean);
            assert_close("variance", body.variance, cpu.variance);
            // (The gradients with the statistics of the batch are Burn's own, which Burn does not differentiate.)
            let [c_x, c_gamma, c_mean, c_variance, c_dy] = [&x, &gamma, &mean, &variance, &dy].map(composed);
            let wanted = [true; 2];
            let body = Composed::eval_batch_norm_backward(
                Some(c_x),
                c_gamma,
                c_mean,
                c_variance,
                1e-5,
                c_dy,
                wanted,
            );
            let cpu =
                Flex::eval_batch_norm_backward(Some(x), gamma.clone(), mean, variance, 1e-5, dy, wanted);
            for (body, cpu) in [(body.x, cpu.x), (body.gamma, cpu.gamma), (body.beta, cpu.beta)] {
                assert_close("gradients", body.expect("wanted"), cpu.expect("wanted"));
            }
        }
    }
}
