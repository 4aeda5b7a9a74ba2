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
    kept::{Keeper, Kept},
    recompute::{Offered, is_free, offer},
};
use crate::backend::{BatchNormOutput, MemBackend, NormGrads, plain_backends};
use burn::backend::{
    Backend, ExtensionType,
    autodiff::{
        Autodiff, NodeId,
        checkpoint::{
            base::Checkpointer,
            strategy::{BalancedCheckpointing, CheckpointStrategy},
        },
        grads::Gradients,
        ops::{Backward, Ops, OpsKind},
    },
    backend_extension,
    tensor::FloatTensor,
};

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

/// Batch normalization.
#[backend_extension(
    Flex: cfg(feature = "flex"),
    NdArray: cfg(feature = "ndarray"),
    Cube: cfg(any(feature = "wgpu", feature = "cuda")),
    Remote: cfg(feature = "remote"),
    Autodiff
)]
pub trait BatchNormOps: Backend {
    /// With the statistics of the batch; `x` `[batch, channels, ...]`, the others `[channels]`.
    fn memsave_batch_norm_train(
        x: FloatTensor<Self>,
        gamma: FloatTensor<Self>,
        beta: FloatTensor<Self>,
        epsilon: f64,
    ) -> BatchNormTrain<Self> {
        let result = Self::batch_norm_train(x, gamma, beta, epsilon);
        BatchNormTrain { output: result.output, mean: result.mean, variance: result.variance }
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
        Self::batch_norm(x, gamma, beta, mean, variance, epsilon)
    }
}
plain_backends!(BatchNormOps);

impl<B: BatchNormOps + MemBackend, C: CheckpointStrategy> BatchNormOps for Autodiff<B, C> {
    fn memsave_batch_norm_train(
        x: FloatTensor<Self>,
        gamma: FloatTensor<Self>,
        beta: FloatTensor<Self>,
        epsilon: f64,
    ) -> BatchNormTrain<Self> {
        let result = B::normalize_batch(
            x.primitive().clone(),
            gamma.primitive().clone(),
            beta.primitive().clone(),
            epsilon,
        );
        let BatchNormOutput { output, mean, variance } = result;
        let read = x.is_tracked() || gamma.is_tracked();
        let prep =
            WithBatchStatistics.prepare::<BalancedCheckpointing>([x.node(), gamma.node(), beta.node()]);
        let again = normalize_again::<B>(mean.clone(), variance.clone(), epsilon);
        let output = match offer::<_, B, _, C, _, 3>(prep, read, &[&x, &gamma, &beta], again).stateful() {
            OpsKind::Tracked(mut prep) => {
                let (keeper, offered) = (Keeper::new("batch_norm", Some(gamma.id())), Offered::new(read));
                let saved = read.then(|| SavedBatch {
                    x: keeper.keep(&mut prep, "x", &x, "x or gamma is tracked"),
                    gamma: keeper.keep(&mut prep, "gamma", &gamma, "x or gamma is tracked"),
                    mean: keeper.keep_tensor("mean", mean.clone(), "x or gamma is tracked"),
                    variance: keeper.keep_tensor("variance", variance.clone(), "x or gamma is tracked"),
                    epsilon,
                    _offered: offered.clone(),
                });
                let y = prep.finish(saved, output);
                offered.promise(y.id());
                y
            }
            OpsKind::UnTracked(prep) => prep.finish(output),
        };
        BatchNormTrain {
            output,
            mean: FloatTensor::<Self>::new(mean),
            variance: FloatTensor::<Self>::new(variance),
        }
    }

    fn memsave_batch_norm(
        x: FloatTensor<Self>,
        gamma: FloatTensor<Self>,
        beta: FloatTensor<Self>,
        mean: FloatTensor<Self>,
        variance: FloatTensor<Self>,
        epsilon: f64,
    ) -> FloatTensor<Self> {
        assert!(
            !mean.is_tracked() && !variance.is_tracked(),
            "batch_norm: the statistics must not be tracked"
        );
        let (mean, variance) = (mean.into_primitive(), variance.into_primitive());
        let free = gamma.is_tracked() || is_free::<B, C>(&x);
        let prep =
            WithGivenStatistics.prepare::<BalancedCheckpointing>([x.node(), gamma.node(), beta.node()]);
        let again = normalize_again::<B>(mean.clone(), variance.clone(), epsilon);
        let prep = offer::<_, B, _, C, _, 3>(prep, free, &[&x, &gamma, &beta], again);
        let beta = beta.into_primitive();
        match prep.stateful() {
            OpsKind::Tracked(mut prep) => {
                let (keeper, offered) = (Keeper::new("batch_norm", Some(gamma.id())), Offered::new(free));
                let saved = (x.is_tracked() || gamma.is_tracked()).then(|| SavedGiven {
                    x: gamma.is_tracked().then(|| keeper.keep(&mut prep, "x", &x, "gamma is tracked")),
                    gamma: keeper.keep(&mut prep, "gamma", &gamma, "x or gamma is tracked"),
                    mean: keeper.keep_tensor("mean", mean.clone(), "x or gamma is tracked"),
                    variance: keeper.keep_tensor("variance", variance.clone(), "x or gamma is tracked"),
                    epsilon,
                    _offered: offered.clone(),
                });
                let gamma = gamma.into_primitive();
                let x = x.into_primitive(); // unique unless it is kept: the forward may work in place
                let y = prep.finish(saved, B::normalize(x, gamma, beta, mean, variance, epsilon));
                offered.promise(y.id());
                y
            }
            OpsKind::UnTracked(prep) => {
                let (x, gamma) = (x.into_primitive(), gamma.into_primitive());
                prep.finish(B::memsave_batch_norm(x, gamma, beta, mean, variance, epsilon))
            }
        }
    }
}

/// The normalization of `[x, gamma, beta]` with known statistics.
fn normalize_again<B: MemBackend>(
    mean: FloatTensor<B>,
    variance: FloatTensor<B>,
    epsilon: f64,
) -> impl Fn(Vec<FloatTensor<B>>) -> FloatTensor<B> + Send + 'static {
    move |inputs| {
        let [x, gamma, beta] = <[_; 3]>::try_from(inputs).unwrap_or_else(|_| unreachable!("three inputs"));
        B::normalize(x, gamma, beta, mean.clone(), variance.clone(), epsilon)
    }
}

/// What is wanted where only beta is tracked.
pub(super) fn of_beta<B: MemBackend>(dy: FloatTensor<B>) -> NormGrads<B> {
    NormGrads { x: None, gamma: None, beta: Some(B::sum_to_channels(dy)) }
}

/// Registers the gradients that there are.
pub(super) fn register<B: Backend>(parents: [Option<NodeId>; 3], from: NormGrads<B>, grads: &mut Gradients) {
    for (node, grad) in parents.into_iter().zip([from.x, from.gamma, from.beta]) {
        if let (Some(node), Some(grad)) = (node, grad) {
            grads.register::<B>(node, grad);
        }
    }
}

#[derive(Debug)]
struct WithBatchStatistics;

/// What the backward pass reads with the statistics of the batch.
#[derive(Clone, Debug)]
struct SavedBatch<T> {
    x: Kept,
    gamma: Kept,
    /// The mean of the batch, `[channels]`.
    mean: T,
    /// Its biased variance, `[channels]`.
    variance: T,
    epsilon: f64,
    /// The output, which can be computed again from what is read.
    _offered: Offered,
}

impl<B: MemBackend> Backward<B, 3> for WithBatchStatistics {
    /// Nothing if only beta is tracked.
    type State = Option<SavedBatch<FloatTensor<B>>>;

    fn backward(self, ops: Ops<Self::State, 3>, grads: &mut Gradients, checkpointer: &mut Checkpointer) {
        let dy = grads.consume::<B>(&ops.node);
        let result = match ops.state {
            None => of_beta::<B>(dy),
            Some(SavedBatch { x, gamma, mean, variance, epsilon, .. }) => {
                let wanted = ops.parents.each_ref().map(Option::is_some);
                let (x, gamma) = (x.get::<B>(checkpointer), gamma.get::<B>(checkpointer));
                B::normalize_batch_backward(x, gamma, mean, variance, epsilon, dy, wanted)
            }
        };
        register(ops.parents.map(|parent| parent.map(|node| node.id)), result, grads);
    }
}

#[derive(Debug)]
struct WithGivenStatistics;

/// What the backward pass reads with given statistics.
#[derive(Clone, Debug)]
struct SavedGiven<T> {
    /// The input, if gamma is tracked.
    x: Option<Kept>,
    gamma: Kept,
    mean: T,
    variance: T,
    epsilon: f64,
    /// The output, if it can be computed again from an input that is free or read.
    _offered: Offered,
}

impl<B: MemBackend> Backward<B, 3> for WithGivenStatistics {
    /// Nothing if only beta is tracked.
    type State = Option<SavedGiven<FloatTensor<B>>>;

    fn backward(self, ops: Ops<Self::State, 3>, grads: &mut Gradients, checkpointer: &mut Checkpointer) {
        let dy = grads.consume::<B>(&ops.node);
        let result = match ops.state {
            None => of_beta::<B>(dy),
            Some(SavedGiven { x, gamma, mean, variance, epsilon, .. }) => {
                let wanted = [ops.parents[0].is_some(), ops.parents[2].is_some()];
                let x = x.map(|x| x.get::<B>(checkpointer));
                let gamma = gamma.get::<B>(checkpointer);
                B::normalize_backward(x, gamma, mean, variance, epsilon, dy, wanted)
            }
        };
        register(ops.parents.map(|parent| parent.map(|node| node.id)), result, grads);
    }
}
