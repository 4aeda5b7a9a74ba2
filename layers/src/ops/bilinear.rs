//! Operations that are linear in their input and linear in their weight: dense layers, convolutions and their transposes.
//!
//! | | |
//! | --- | --- |
//! | computes | `y = op(x, weight) + bias` |
//! | keeps | `x` if `weight` is tracked; `weight` (a handle) if `x` is tracked; never more than the shapes of the rest |
//! | backward | `dx = adjoint(weight, dy)`, `dweight = adjoint(x, dy)`, `dbias = sum(dy)` |
//!
//! This is the observation of [arXiv 2404.12406](https://arxiv.org/abs/2404.12406), written once: each gradient reads the
//! other factor only.
use super::kept::{Keeper, Kept};
use burn::backend::{
    Backend, TensorMetadata,
    autodiff::{
        Autodiff,
        checkpoint::{base::Checkpointer, strategy::CheckpointStrategy},
        grads::Gradients,
        ops::{Backward, NodeGuard, Ops, OpsKind},
    },
    tensor::FloatTensor,
};
use burn::tensor::Shape;

/// A map that is linear in `x` and in `weight`, with its two adjoints. Implementors hold the options (stride, padding, ...).
pub(crate) trait Bilinear<B: Backend>: Clone + Send + core::fmt::Debug + 'static {
    /// The name of the operation.
    const NAME: &'static str;

    fn forward(
        &self,
        x: FloatTensor<B>,
        weight: FloatTensor<B>,
        bias: Option<FloatTensor<B>>,
    ) -> FloatTensor<B>;
    /// Gradient of `x`, from its shape alone.
    fn x_backward(&self, x: Shape, weight: FloatTensor<B>, dy: FloatTensor<B>) -> FloatTensor<B>;
    /// Gradient of `weight`, from its shape alone.
    fn weight_backward(&self, x: FloatTensor<B>, weight: Shape, dy: FloatTensor<B>) -> FloatTensor<B>;
    /// Gradient of the bias.
    fn bias_backward(&self, dy: FloatTensor<B>) -> FloatTensor<B>;
}

/// Records `op(x, weight) + bias`, keeping each factor only for the gradient of the other.
pub(crate) fn bilinear<B, C, O>(
    op: O,
    x: FloatTensor<Autodiff<B, C>>,
    weight: FloatTensor<Autodiff<B, C>>,
    bias: Option<FloatTensor<Autodiff<B, C>>>,
) -> FloatTensor<Autodiff<B, C>>
where
    B: Backend,
    C: CheckpointStrategy,
    O: Bilinear<B>,
{
    let nodes = [x.node(), weight.node()];
    match bias {
        None => record::<B, C, O, 2>(op, x, weight, None, nodes),
        Some(bias) => {
            let [x_node, weight_node] = nodes;
            let (bias, bias_node) = bias.into_parts();
            record::<B, C, O, 3>(op, x, weight, Some(bias), [x_node, weight_node, bias_node])
        }
    }
}

fn record<B, C, O, const N: usize>(
    op: O,
    x: FloatTensor<Autodiff<B, C>>,
    weight: FloatTensor<Autodiff<B, C>>,
    bias: Option<FloatTensor<B>>,
    parents: [NodeGuard; N],
) -> FloatTensor<Autodiff<B, C>>
where
    B: Backend,
    C: CheckpointStrategy,
    O: Bilinear<B>,
{
    match Step(op.clone()).prepare::<C>(parents).compute_bound().stateful() {
        OpsKind::Tracked(mut prep) => {
            let keeper = Keeper::new(O::NAME, Some(weight.id()));
            let saved = Saved {
                x: weight.is_tracked().then(|| keeper.keep(&mut prep, "x", &x, "weight is tracked")),
                weight: x.is_tracked().then(|| keeper.keep(&mut prep, "weight", &weight, "x is tracked")),
                x_shape: x.shape(),
                weight_shape: weight.shape(),
            };
            let y = op.forward(x.into_primitive(), weight.into_primitive(), bias);
            prep.finish(saved, y)
        }
        OpsKind::UnTracked(prep) => {
            prep.finish(op.forward(x.into_primitive(), weight.into_primitive(), bias))
        }
    }
}

#[derive(Debug)]
struct Step<O>(O);

/// What the backward pass reads.
#[derive(Clone, Debug)]
struct Saved {
    /// The input, if the weight is tracked.
    x: Option<Kept>,
    /// The weight, if the input is tracked.
    weight: Option<Kept>,
    x_shape: Shape,
    weight_shape: Shape,
}

impl<B: Backend, O: Bilinear<B>, const N: usize> Backward<B, N> for Step<O> {
    type State = Saved;

    fn backward(self, ops: Ops<Saved, N>, grads: &mut Gradients, checkpointer: &mut Checkpointer) {
        let Self(op) = self;
        let dy = grads.consume::<B>(&ops.node);
        let saved = ops.state;
        let x = saved.x.map(|x| x.get::<B>(checkpointer));
        let weight = saved.weight.map(|weight| weight.get::<B>(checkpointer));

        let mut parents = ops.parents.into_iter();
        let mut next = || parents.next().flatten();
        if let Some(node) = next() {
            let weight = weight.expect("kept because x is tracked");
            grads.register::<B>(node.id, op.x_backward(saved.x_shape, weight, dy.clone()));
        }
        if let Some(node) = next() {
            let x = x.expect("kept because the weight is tracked");
            grads.register::<B>(node.id, op.weight_backward(x, saved.weight_shape, dy.clone()));
        }
        if let Some(node) = next() {
            grads.register::<B>(node.id, op.bias_backward(dy));
        }
    }
}
