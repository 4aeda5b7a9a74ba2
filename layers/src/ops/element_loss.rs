//! Losses of elements: squares, Huber's, binary cross entropies, divergences.
//!
//! | | |
//! | --- | --- |
//! | computes | `loss = f(x, t)`, `f` an [`ElementLoss`]: of every element, or their scaled sum |
//! | keeps | `x` (a handle), and `t` where there are targets; of a divergence `t` only, unless `t` is tracked; |
//! | | of a binary cross entropy the slope, and neither `x` nor `t` |
//! | backward | `dx = dloss * f'(x, t)`, `dt` alike, in place where nobody else holds what is read |
//!
//! A binary cross entropy makes its targets of integers: keeping those would be a tensor more. Stock Burn records up to nine
//! operations for one loss, and forms every one of their results.
use super::{
    MaybeTensor,
    kept::{Keeper, Kept},
};
use crate::backend::{ElementLoss, MemBackend, Side, plain_backends, widen};
use burn::backend::{
    Backend, TensorMetadata,
    autodiff::{
        Autodiff,
        checkpoint::{base::Checkpointer, strategy::CheckpointStrategy},
        grads::Gradients,
        ops::{Backward, NodeGuard, Ops, OpsKind},
    },
    backend_extension,
    tensor::FloatTensor,
};
use burn::tensor::Shape;

/// Losses of elements.
#[backend_extension(
    Flex: cfg(feature = "flex"),
    NdArray: cfg(feature = "ndarray"),
    Cube: cfg(any(feature = "wgpu", feature = "cuda")),
    Remote: cfg(feature = "remote"),
    Autodiff
)]
pub trait ElementLossOps: Backend {
    /// `f(x, targets)` of every element, or with a `scale` its scaled sum, `[1]`. The targets have the shape of `x`; those of a
    /// binary cross entropy are not tracked.
    fn memsave_element_loss(
        x: FloatTensor<Self>,
        #[extension_type] targets: MaybeTensor<Self>,
        f: ElementLoss,
        scale: Option<f64>,
    ) -> FloatTensor<Self>;
}
plain_backends!(ElementLossOps {
    fn memsave_element_loss(
        x: FloatTensor<Self>,
        targets: MaybeTensor<Self>,
        f: ElementLoss,
        scale: Option<f64>,
    ) -> FloatTensor<Self> {
        forward::<Self>(x, targets.into_option(), f, scale)
    }
});

impl<B: ElementLossOps + MemBackend, C: CheckpointStrategy> ElementLossOps for Autodiff<B, C> {
    fn memsave_element_loss(
        x: FloatTensor<Self>,
        targets: MaybeTensor<Self>,
        f: ElementLoss,
        scale: Option<f64>,
    ) -> FloatTensor<Self> {
        let (step, node) = (Step { f, scale }, x.node());
        match targets.into_option() {
            None => record::<B, C, 1>(step, x, None, [node]),
            Some(targets) => {
                let nodes = [node, targets.node()];
                record::<B, C, 2>(step, x, Some(targets), nodes)
            }
        }
    }
}

fn forward<B: MemBackend>(
    x: FloatTensor<B>,
    targets: Option<FloatTensor<B>>,
    f: ElementLoss,
    scale: Option<f64>,
) -> FloatTensor<B> {
    match scale {
        Some(scale) => B::element_loss_sum(x, targets, f, scale),
        None => B::element_loss(x, targets, f),
    }
}

fn record<B, C, const N: usize>(
    step: Step,
    x: FloatTensor<Autodiff<B, C>>,
    targets: Option<FloatTensor<Autodiff<B, C>>>,
    parents: [NodeGuard; N],
) -> FloatTensor<Autodiff<B, C>>
where
    B: MemBackend,
    C: CheckpointStrategy,
{
    let Step { f, scale } = step;
    let x_is_read = !is_divergence(f) || targets.as_ref().is_some_and(|targets| targets.is_tracked());
    match step.prepare::<C>(parents).compute_bound().stateful() {
        OpsKind::Tracked(mut prep) => {
            let keeper = Keeper::new(name(f), None);
            if is_binary(f) {
                let (x, targets) = (x.into_primitive(), targets.map(|targets| targets.into_primitive()));
                let loss = forward::<B>(x.clone(), targets.clone(), f, scale);
                let one = B::float_full(Shape::new([1]), 1.into(), &x.device(), x.dtype().into());
                let slope = B::element_loss_slopes(x, targets, f, Side::X, one);
                return prep.finish(Saved::Slope(keeper.keep_tensor("slope", slope, "x is tracked")), loss);
            }
            let saved = Saved::Inputs {
                x: x_is_read.then(|| keeper.keep(&mut prep, "x", &x, "x or the targets are tracked")),
                targets: targets.as_ref().map(|targets| {
                    keeper.keep(&mut prep, "targets", targets, "x or the targets are tracked")
                }),
            };
            let targets = targets.map(|targets| targets.into_primitive());
            prep.finish(saved, forward::<B>(x.into_primitive(), targets, f, scale))
        }
        OpsKind::UnTracked(prep) => {
            let targets = targets.map(|targets| targets.into_primitive());
            prep.finish(forward::<B>(x.into_primitive(), targets, f, scale))
        }
    }
}

fn is_binary(f: ElementLoss) -> bool {
    matches!(f, ElementLoss::BinaryLogits | ElementLoss::BinaryProbabilities)
}

fn is_divergence(f: ElementLoss) -> bool {
    matches!(f, ElementLoss::Divergence { .. } | ElementLoss::LogDivergence)
}

fn name(f: ElementLoss) -> &'static str {
    match f {
        ElementLoss::Square => "mse_loss",
        ElementLoss::Huber { .. } => "huber_loss",
        ElementLoss::LogAbove { .. } => "cross_entropy",
        ElementLoss::BinaryLogits | ElementLoss::BinaryProbabilities => "binary_cross_entropy",
        ElementLoss::Divergence { .. } | ElementLoss::LogDivergence => "kl_div_loss",
    }
}

#[derive(Debug)]
struct Step {
    f: ElementLoss,
    /// Of the sum, if the losses are summed.
    scale: Option<f64>,
}

/// What the backward pass reads.
#[derive(Clone, Debug)]
enum Saved<T> {
    Inputs {
        /// Not of a divergence whose targets are not tracked.
        x: Option<Kept>,
        targets: Option<Kept>,
    },
    Slope(T),
}

impl<B: MemBackend, const N: usize> Backward<B, N> for Step {
    type State = Saved<FloatTensor<B>>;

    fn backward(self, ops: Ops<Self::State, N>, grads: &mut Gradients, checkpointer: &mut Checkpointer) {
        let Self { f, scale } = self;
        let dloss = grads.consume::<B>(&ops.node);
        let dloss = match scale {
            // A gradient of half precision may get the range of f32 for a product that has its own.
            Some(scale) => B::float_mul_scalar(widen::<B>(dloss), scale.into()),
            None => dloss,
        };
        let summed = scale.is_some();
        let mut parents = ops.parents.into_iter();
        let [x_node, target_node] = core::array::from_fn(|_| parents.next().flatten());
        let (x, targets) = match ops.state {
            Saved::Slope(slope) => {
                if let Some(node) = x_node {
                    let times = if summed { B::scale } else { B::float_mul };
                    grads.register::<B>(node.id, times(slope, dloss));
                }
                return;
            }
            Saved::Inputs { x, targets } => {
                let [x, targets] = [x, targets].map(|kept| kept.map(|kept| kept.get::<B>(checkpointer)));
                let x = x.or_else(|| targets.clone()).expect("one of the two is kept");
                (x, targets)
            }
        };
        let gradient = |x, side, dloss| match summed {
            true => B::element_loss_slopes(x, targets.clone(), f, side, dloss),
            false => B::element_loss_backward(x, targets.clone(), f, side, dloss),
        };
        if let Some(node) = target_node {
            grads.register::<B>(node.id, gradient(x.clone(), Side::Target, dloss.clone()));
        }
        if let Some(node) = x_node {
            grads.register::<B>(node.id, gradient(x, Side::X, dloss));
        }
    }
}
