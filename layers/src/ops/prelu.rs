//! Parametric ReLU.
//!
//! | | |
//! | --- | --- |
//! | computes | `y = x` if `x >= 0`, else `alpha * x`; `alpha` has one element or one per channel |
//! | keeps | `x` if `alpha` is tracked, else 1 bit per element (`x < 0`); `alpha` (a handle) if `x` is tracked |
//! | backward | `dx = dy` or `alpha * dy`, `dalpha = sum(dy * min(x, 0))` |
//!
//! Stock Burn keeps `x`, a boolean and more per element.
use super::kept::{Keeper, Kept};
use crate::backend::{MemBackend, PiecewiseLinear, plain_backends};
use burn::backend::{
    Backend, TensorMetadata,
    autodiff::{
        Autodiff,
        checkpoint::{base::Checkpointer, strategy::CheckpointStrategy},
        grads::Gradients,
        ops::{Backward, Ops, OpsKind},
    },
    backend_extension,
    tensor::FloatTensor,
};
use burn::tensor::Shape;

/// Parametric ReLU.
#[backend_extension(
    Flex: cfg(feature = "flex"),
    NdArray: cfg(feature = "ndarray"),
    Cube: cfg(any(feature = "wgpu", feature = "cuda")),
    Remote: cfg(feature = "remote"),
    Autodiff
)]
pub trait PReluOps: Backend {
    /// Parametric ReLU; `alpha` has the rank of `x`, and one element on every axis but axis 1.
    fn memsave_prelu(x: FloatTensor<Self>, alpha: FloatTensor<Self>) -> FloatTensor<Self> {
        Self::prelu(x, alpha)
    }
}
plain_backends!(PReluOps);

impl<B: PReluOps + MemBackend, C: CheckpointStrategy> PReluOps for Autodiff<B, C> {
    fn memsave_prelu(x: FloatTensor<Self>, alpha: FloatTensor<Self>) -> FloatTensor<Self> {
        match PRelu.prepare::<C>([x.node(), alpha.node()]).compute_bound().stateful() {
            OpsKind::Tracked(mut prep) => {
                let keeper = Keeper::new("prelu", Some(alpha.id()));
                let negative = match alpha.is_tracked() {
                    true => Negative::Input(keeper.keep(&mut prep, "x", &x, "alpha is tracked")),
                    false => {
                        let mask = B::piecewise_mask(x.primitive().clone(), LEAKY);
                        Negative::Mask(keeper.keep_state("mask", mask, "x is tracked"))
                    }
                };
                let kept_alpha =
                    x.is_tracked().then(|| keeper.keep(&mut prep, "alpha", &alpha, "x is tracked"));
                let saved = Saved { negative, alpha: kept_alpha, alpha_shape: alpha.shape() };
                prep.finish(saved, B::memsave_prelu(x.into_primitive(), alpha.into_primitive()))
            }
            OpsKind::UnTracked(prep) => {
                prep.finish(B::memsave_prelu(x.into_primitive(), alpha.into_primitive()))
            }
        }
    }
}

/// Has the bits of a parametric ReLU.
const LEAKY: PiecewiseLinear = PiecewiseLinear::LeakyRelu { negative_slope: 0.0 };

#[derive(Debug)]
struct PRelu;

/// What the backward pass reads.
#[derive(Clone, Debug)]
struct Saved<Mask> {
    /// Where `x < 0`.
    negative: Negative<Mask>,
    /// The slopes, if `x` is tracked.
    alpha: Option<Kept>,
    alpha_shape: Shape,
}

#[derive(Clone, Debug)]
enum Negative<Mask> {
    /// One bit per element: enough for the gradient of `x`.
    Mask(Mask),
    /// The input, which the gradient of `alpha` reads.
    Input(Kept),
}

impl<B: MemBackend> Backward<B, 2> for PRelu {
    type State = Saved<B::Mask>;

    fn backward(self, ops: Ops<Self::State, 2>, grads: &mut Gradients, checkpointer: &mut Checkpointer) {
        let Saved { negative, alpha, alpha_shape } = ops.state;
        let [x_node, alpha_node] = ops.parents;
        let dy = grads.consume::<B>(&ops.node);
        let alpha = alpha.map(|alpha| alpha.get::<B>(checkpointer));
        let mask = match negative {
            Negative::Mask(mask) => Some(mask),
            Negative::Input(x) => {
                let x = x.get::<B>(checkpointer);
                let mask = x_node.is_some().then(|| B::piecewise_mask(x.clone(), LEAKY));
                if let Some(node) = alpha_node {
                    grads.register::<B>(node.id, B::prelu_alpha_backward(x, alpha_shape, dy.clone()));
                }
                mask
            }
        };
        if let (Some(node), Some(mask), Some(alpha)) = (x_node, mask, alpha) {
            grads.register::<B>(node.id, B::prelu_x_backward(&mask, alpha, dy));
        }
    }
}
