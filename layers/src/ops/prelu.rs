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
    /// Parametric ReLU; `alpha` is `[1]` or `[channels]`.
    fn memsave_prelu(x: FloatTensor<Self>, alpha: FloatTensor<Self>) -> FloatTensor<Self> {
        let shape = along_channels(&alpha.shape(), &x.shape());
        Self::prelu(x, Self::float_reshape(alpha, shape))
    }
}
plain_backends!(PReluOps);

/// The shape in which slopes of shape `alpha` broadcast along the channels (axis 1) of `x`. They are reshaped in the op
/// itself, so that what is kept is the parameter.
fn along_channels(alpha: &Shape, x: &Shape) -> Shape {
    let mut shape = vec![1; x.num_dims()];
    shape[1.min(x.num_dims() - 1)] = alpha.num_elements();
    shape.into()
}

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
        let broadcast = along_channels(&alpha_shape, &dy.shape());
        let alpha = alpha.map(|alpha| B::float_reshape(alpha.get::<B>(checkpointer), broadcast.clone()));
        let mask = match negative {
            Negative::Mask(mask) => Some(mask),
            Negative::Input(x) => {
                let x = x.get::<B>(checkpointer);
                let mask = x_node.is_some().then(|| B::piecewise_mask(x.clone(), LEAKY));
                if let Some(node) = alpha_node {
                    let dalpha = B::prelu_alpha_backward(x, broadcast, dy.clone());
                    grads.register::<B>(node.id, B::float_reshape(dalpha, alpha_shape));
                }
                mask
            }
        };
        if let (Some(node), Some(mask), Some(alpha)) = (x_node, mask, alpha) {
            grads.register::<B>(node.id, B::prelu_x_backward(&mask, alpha, dy));
        }
    }
}
