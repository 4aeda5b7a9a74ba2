//! Activations made of pieces of a line: ReLU and its kin.
//!
//! | | |
//! | --- | --- |
//! | computes | `y = f(x)`, `f` a [`PiecewiseLinear`] function |
//! | keeps | 1 bit per element (which piece) if `x` is tracked, else nothing |
//! | backward | `dx = dy * slope[bit]` |
//!
//! Stock Burn keeps `x` for ReLU, and booleans and intermediate tensors for the others. An infinite `x` passes its gradient;
//! a NaN does as in stock.
use super::{kept::Keeper, recompute::is_recomputed};
use crate::backend::{MemBackend, PiecewiseLinear, device, plain_backends};
use burn::backend::{
    Backend,
    autodiff::{
        Autodiff,
        checkpoint::{base::Checkpointer, strategy::CheckpointStrategy},
        grads::Gradients,
        ops::{Backward, Ops, OpsKind, unary},
    },
    backend_extension,
    ops::ActivationOps,
    tensor::FloatTensor,
};

/// Piecewise linear activations.
#[backend_extension(
    Flex: cfg(feature = "flex"),
    NdArray: cfg(feature = "ndarray"),
    Cube: cfg(any(feature = "wgpu", feature = "cuda")),
    Remote: cfg(feature = "remote"),
    Autodiff
)]
pub trait PiecewiseLinearOps: Backend {
    /// `f(x)`, element by element; any shape.
    fn memsave_piecewise_linear(x: FloatTensor<Self>, f: PiecewiseLinear) -> FloatTensor<Self> {
        device::piecewise_linear::<Self>(x, f)
    }
}
plain_backends!(PiecewiseLinearOps);

impl<B: PiecewiseLinearOps + MemBackend, C: CheckpointStrategy> PiecewiseLinearOps for Autodiff<B, C> {
    fn memsave_piecewise_linear(x: FloatTensor<Self>, f: PiecewiseLinear) -> FloatTensor<Self> {
        // Where the device's strategy computes x again, stock keeps nothing at all for a ReLU, and a mask would be more.
        if f == PiecewiseLinear::Relu && is_recomputed::<B, C>(&x) {
            return <Self as ActivationOps<Self>>::relu(x);
        }
        let (x, node) = x.into_parts(); // keeps `x` unique, so that the forward may work in place
        match Step(f).prepare::<C>([node]).compute_bound().stateful() {
            OpsKind::Tracked(prep) => {
                let (y, mask) = B::piecewise_linear(x, f);
                let keeper = Keeper::new(name(f), None);
                prep.finish(Saved { mask: keeper.keep_state("mask", mask, "x is tracked") }, y)
            }
            OpsKind::UnTracked(prep) => prep.finish(B::memsave_piecewise_linear(x, f)),
        }
    }
}

fn name(f: PiecewiseLinear) -> &'static str {
    match f {
        PiecewiseLinear::Relu => "relu",
        PiecewiseLinear::LeakyRelu { .. } => "leaky_relu",
        PiecewiseLinear::Clamp { .. } => "hardtanh",
        PiecewiseLinear::HardSigmoid { .. } => "hard_sigmoid",
        PiecewiseLinear::Shrink { .. } => "shrink",
        PiecewiseLinear::Threshold { .. } => "threshold",
    }
}

#[derive(Debug)]
struct Step(PiecewiseLinear);

/// What the backward pass reads.
#[derive(Clone, Debug)]
struct Saved<Mask> {
    /// The bit that chooses the slope, per element.
    mask: Mask,
}

impl<B: MemBackend> Backward<B, 1> for Step {
    type State = Saved<B::Mask>;

    fn backward(self, ops: Ops<Self::State, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
        let mask = ops.state.mask;
        unary::<B, _>(ops.parents, ops.node, grads, |dy| B::scale_by_mask(dy, &mask, self.0.slopes()));
    }
}
