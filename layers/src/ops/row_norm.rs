//! Layer, RMS, group and instance normalization: over rows of elements.
//!
//! | | |
//! | --- | --- |
//! | computes | `y = (x - mean) / sqrt(variance + epsilon) * gamma + beta` over every row; in an RMS norm `mean = 0` |
//! | keeps | `x` if `x` or `gamma` is tracked; `gamma` (a handle) if `x` is tracked |
//! | backward | `dx = (g - mean(g) - x_hat mean(g x_hat)) / std`, `g = gamma dy`, `x_hat = (x - mean) / std` |
//! | | `dgamma = sum(dy x_hat)`, `dbeta = sum(dy)` |
//!
//! Where `x` is kept, the output is offered for [recomputation](super::recompute): the layer behind keeps nothing.
//!
//! The statistics of a row are computed again, while it is in the cache for its gradient. Stock Burn records ten small
//! operations, which keep two tensors of the size of `x`.
use super::{
    MaybeTensor,
    batch_norm::{of_beta, register},
    kept::{Keeper, Kept},
    recompute::{Offered, offer},
};
use crate::backend::{MemBackend, RowNorm, plain_backends};
use burn::backend::{
    Backend, TensorMetadata,
    autodiff::{
        Autodiff,
        checkpoint::{
            base::Checkpointer,
            strategy::{BalancedCheckpointing, CheckpointStrategy},
        },
        grads::Gradients,
        ops::{Backward, NodeGuard, Ops, OpsKind},
    },
    backend_extension,
    tensor::FloatTensor,
};
use burn::tensor::Shape;

/// Normalization over rows.
#[backend_extension(
    Flex: cfg(feature = "flex"),
    NdArray: cfg(feature = "ndarray"),
    Cube: cfg(any(feature = "wgpu", feature = "cuda")),
    Remote: cfg(feature = "remote"),
    Autodiff
)]
pub trait RowNormOps: Backend {
    /// The rows of `x` as `norm` says; `beta` only beside a `gamma`.
    fn memsave_row_norm(
        x: FloatTensor<Self>,
        #[extension_type] gamma: MaybeTensor<Self>,
        #[extension_type] beta: MaybeTensor<Self>,
        norm: RowNorm,
    ) -> FloatTensor<Self>;
}
plain_backends!(RowNormOps {
    fn memsave_row_norm(
        x: FloatTensor<Self>,
        gamma: MaybeTensor<Self>,
        beta: MaybeTensor<Self>,
        norm: RowNorm,
    ) -> FloatTensor<Self> {
        Self::normalize_rows(x, gamma.into_option(), beta.into_option(), &norm)
    }
});

impl<B: RowNormOps + MemBackend, C: CheckpointStrategy> RowNormOps for Autodiff<B, C> {
    fn memsave_row_norm(
        x: FloatTensor<Self>,
        gamma: MaybeTensor<Self>,
        beta: MaybeTensor<Self>,
        norm: RowNorm,
    ) -> FloatTensor<Self> {
        let node = x.node();
        match (gamma.into_option(), beta.into_option()) {
            (None, None) => record::<B, C, 1>(norm, x, None, None, [node]),
            (Some(gamma), None) => {
                let nodes = [node, gamma.node()];
                record::<B, C, 2>(norm, x, Some(gamma), None, nodes)
            }
            (Some(gamma), Some(beta)) => {
                let nodes = [node, gamma.node(), beta.node()];
                record::<B, C, 3>(norm, x, Some(gamma), Some(beta), nodes)
            }
            (None, Some(_)) => panic!("{}: a shift without a scale", name(&norm)),
        }
    }
}

fn name(norm: &RowNorm) -> &'static str {
    match norm {
        RowNorm { centered: false, .. } => "rms_norm",
        RowNorm { channels: 1, .. } => "instance_norm",
        RowNorm { groups: 1, inner: 1, .. } => "layer_norm",
        _ => "group_norm",
    }
}

fn record<B, C, const N: usize>(
    norm: RowNorm,
    x: FloatTensor<Autodiff<B, C>>,
    gamma: Option<FloatTensor<Autodiff<B, C>>>,
    beta: Option<FloatTensor<Autodiff<B, C>>>,
    parents: [NodeGuard; N],
) -> FloatTensor<Autodiff<B, C>>
where
    B: MemBackend,
    C: CheckpointStrategy,
{
    let x_is_read = x.is_tracked() || gamma.as_ref().is_some_and(|gamma| gamma.is_tracked());
    let prep = Step(norm).prepare::<BalancedCheckpointing>(parents);
    let inputs: Vec<_> = [Some(&x), gamma.as_ref(), beta.as_ref()].into_iter().flatten().collect();
    let prep = offer::<_, B, _, C, _, N>(prep, x_is_read, &inputs, move |inputs| {
        let mut inputs = inputs.into_iter();
        let x = inputs.next().expect("x is the first");
        B::normalize_rows(x, inputs.next(), inputs.next(), &norm)
    });
    let beta = beta.map(|beta| beta.into_primitive());
    match prep.stateful() {
        OpsKind::Tracked(mut prep) => {
            let keeper = Keeper::new(name(&norm), gamma.as_ref().map(|gamma| gamma.id()));
            let offered = Offered::new(x_is_read);
            let saved = Saved {
                _offered: offered.clone(),
                x: x_is_read.then(|| keeper.keep(&mut prep, "x", &x, "x or gamma is tracked")),
                gamma: gamma
                    .as_ref()
                    .filter(|_| x.is_tracked())
                    .map(|gamma| keeper.keep(&mut prep, "gamma", gamma, "x is tracked")),
            };
            let gamma = gamma.map(|gamma| gamma.into_primitive());
            let y = prep.finish(saved, B::normalize_rows(x.into_primitive(), gamma, beta, &norm));
            offered.promise(y.id());
            y
        }
        OpsKind::UnTracked(prep) => {
            let gamma = gamma.map(|gamma| gamma.into_primitive());
            prep.finish(B::normalize_rows(x.into_primitive(), gamma, beta, &norm))
        }
    }
}

#[derive(Debug)]
struct Step(RowNorm);

/// What the backward pass reads.
#[derive(Clone, Debug)]
struct Saved {
    /// The input, if it or the scale is tracked.
    x: Option<Kept>,
    /// The scale, if the input is tracked.
    gamma: Option<Kept>,
    /// The output, if it can be computed again from what is read.
    _offered: Offered,
}

impl<B: MemBackend, const N: usize> Backward<B, N> for Step {
    type State = Saved;

    fn backward(self, ops: Ops<Saved, N>, grads: &mut Gradients, checkpointer: &mut Checkpointer) {
        let Self(norm) = self;
        let dy = grads.consume::<B>(&ops.node);
        let mut parents = ops.parents.into_iter();
        let nodes: [_; 3] = core::array::from_fn(|_| parents.next().flatten());
        let wanted = nodes.each_ref().map(Option::is_some);
        let gamma = ops.state.gamma.map(|gamma| gamma.get::<B>(checkpointer));
        let result = match ops.state.x {
            Some(x) => B::normalize_rows_backward(x.get::<B>(checkpointer), gamma, &norm, dy, wanted),
            None => {
                let repeats = dy.shape().num_elements() / (norm.groups * norm.row()).max(1);
                let dy = B::float_reshape(dy, Shape::new([repeats, norm.parameters(), norm.inner]));
                of_beta::<B>(dy)
            }
        };
        register::<B>(nodes.map(|parent| parent.map(|node| node.id)), result, grads);
    }
}
