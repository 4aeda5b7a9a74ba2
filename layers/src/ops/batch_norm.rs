//! Batch normalization, with the statistics of the batch or with given ones.
//!
//! | | batch statistics | given statistics |
//! | --- | --- | --- |
//! | computes | `y = (x - mean(x)) / sqrt(var(x) + epsilon) * gamma + beta` | the same with given `mean`, `var` |
//! | keeps | `x`, `gamma` (handles), mean and variance, `[channels]` each | `x` if `gamma` is tracked; `[channels]`-sized tensors |
//! | backward | `dx = gamma / std (dy - mean(dy) - x_hat mean(dy x_hat))` | `dx = gamma / std dy` |
//! | | `dgamma = sum(dy x_hat)`, `dbeta = sum(dy)`, `x_hat = (x - mean) / std` | the same |
//!
//! With only `beta` tracked, nothing is kept. Stock Burn keeps as much with batch statistics, and two tensors of the size of `x`
//! at its peak with given ones. A frozen module uses its running statistics.
//!
//! Where `x` is kept, here or by another step, the output is offered for [recomputation](super::recompute).
use super::{
    extension::extension,
    step::{BackwardPass, Inputs, Operation, Plan, Recorder, Run, Tracking, given},
};
use crate::backend::{BatchNormOutput, MemBackend, NormGrads};
use burn::backend::{Backend, ExtensionType, TensorMetadata, tensor::FloatTensor};

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
    pub trait BatchNormOps(MemBackend) {
        /// With the statistics of the batch; `x` `[batch, channels, ...]`, the others `[channels]`.
        fn memsave_batch_norm_train(
            x: FloatTensor<Self>,
            gamma: FloatTensor<Self>,
            beta: FloatTensor<Self>,
            epsilon: f64,
        ) -> BatchNormTrain<Self> {
            let [plain_x, plain_gamma, plain_beta] = [&x, &gamma, &beta].map(|tensor| Self::plain(tensor.clone()));
            let BatchNormOutput { output, mean, variance } =
                <Self as Run>::Plain::normalize_batch(plain_x, plain_gamma, plain_beta, epsilon);
            let [untracked_mean, untracked_variance] =
                [&mean, &variance].map(|statistic| Self::untracked(statistic.clone()));
            let statistics = Statistics { mean, variance, epsilon };
            let operation = WithBatchStatistics { output, statistics };
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
    mean: T,
    /// The biased variance, `[channels]`.
    variance: T,
    epsilon: f64,
}

impl<T: TensorMetadata + Clone> Statistics<T> {
    /// Reported to the ledger, if the backward pass reads them.
    fn saved(&self, recorder: &Recorder<3>) -> Option<Self> {
        let read = recorder.tracked(X) || recorder.tracked(GAMMA);
        let save =
            |name, statistic: &T| recorder.ledger().tensor(name, statistic.clone(), "x or gamma is tracked");
        read.then(|| Self {
            mean: save("mean", &self.mean),
            variance: save("variance", &self.variance),
            epsilon: self.epsilon,
        })
    }
}

/// `x`, `gamma` and `beta` to the output.
fn normalize<B: MemBackend>(
    [x, gamma, beta]: Inputs<B, 3>,
    statistics: Statistics<FloatTensor<B>>,
) -> FloatTensor<B> {
    let Statistics { mean, variance, epsilon } = statistics;
    B::normalize(given(x), given(gamma), given(beta), mean, variance, epsilon)
}

/// With the statistics of the batch, which are known already, as is the output.
#[derive(Clone)]
pub struct WithBatchStatistics<T> {
    output: T,
    statistics: Statistics<T>,
}

impl<B: MemBackend> Operation<B, 3> for WithBatchStatistics<FloatTensor<B>> {
    const INPUTS: [&'static str; 3] = INPUTS;
    const PARAMETERS: &'static [usize] = &[GAMMA];
    /// Nothing if only beta is tracked.
    type Saved = Option<Statistics<FloatTensor<B>>>;

    fn name(&self) -> &'static str {
        "batch_norm"
    }

    fn plan(&self, inputs: &Tracking<B, 3>) -> Plan<3> {
        let reads = inputs.tracked(X) || inputs.tracked(GAMMA);
        Plan::nothing()
            .keep_if(reads, X, "x or gamma is tracked")
            .keep_if(reads, GAMMA, "x or gamma is tracked")
            .offer_if(reads)
    }

    fn forward(&self, _: Inputs<B, 3>) -> FloatTensor<B> {
        self.output.clone()
    }

    fn forward_saving(&self, _: Inputs<B, 3>, recorder: &Recorder<3>) -> (FloatTensor<B>, Self::Saved) {
        (self.output.clone(), self.statistics.saved(recorder))
    }

    fn recompute(self, _: &Self::Saved) -> impl Fn(Inputs<B, 3>) -> FloatTensor<B> + Send + 'static {
        let statistics = self.statistics;
        move |inputs| normalize::<B>(inputs, statistics.clone())
    }

    fn backward(saved: Self::Saved, dy: FloatTensor<B>, pass: &mut BackwardPass<B, 3>) {
        let Some(Statistics { mean, variance, epsilon }) = saved else {
            return pass.give(BETA, B::sum_to_channels(dy));
        };
        let wanted = [X, GAMMA, BETA].map(|input| pass.wants(input));
        let (x, gamma) = (given(pass.take(X)), given(pass.take(GAMMA)));
        let NormGrads { x, gamma, beta } =
            B::normalize_batch_backward(x, gamma, mean, variance, epsilon, dy, wanted);
        pass.give_all([x, gamma, beta]);
    }
}

/// With given statistics.
#[derive(Clone)]
pub struct WithGivenStatistics<T>(Statistics<T>);

impl<B: MemBackend> Operation<B, 3> for WithGivenStatistics<FloatTensor<B>> {
    const INPUTS: [&'static str; 3] = INPUTS;
    const PARAMETERS: &'static [usize] = &[GAMMA];
    /// Nothing if only beta is tracked.
    type Saved = Option<Statistics<FloatTensor<B>>>;

    fn name(&self) -> &'static str {
        "batch_norm"
    }

    fn plan(&self, inputs: &Tracking<B, 3>) -> Plan<3> {
        let reads_x = inputs.tracked(GAMMA);
        Plan::nothing()
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

    fn backward(saved: Self::Saved, dy: FloatTensor<B>, pass: &mut BackwardPass<B, 3>) {
        let Some(Statistics { mean, variance, epsilon }) = saved else {
            return pass.give(BETA, B::sum_to_channels(dy));
        };
        let wanted = [X, BETA].map(|input| pass.wants(input));
        let (x, gamma) = (pass.take(X), given(pass.take(GAMMA)));
        let NormGrads { x, gamma, beta } =
            B::normalize_backward(x, gamma, mean, variance, epsilon, dy, wanted);
        pass.give_all([x, gamma, beta]);
    }
}
