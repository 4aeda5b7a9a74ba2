//! Activations made of pieces of a line: ReLU and its kin.
//!
//! | | |
//! | --- | --- |
//! | computes | `y = f(x)`, `f` a [`PiecewiseLinear`] function |
//! | keeps | 1 bit per element (which piece) if `x` is tracked, else nothing |
//! | backward | `dx = dy * slope[bit]` |
//!
//! Where `x` is kept by another step, or computed again, the output is offered for [recomputation](super::recompute).
//!
//! Stock Burn keeps `x` for ReLU, and booleans and intermediate tensors for the others. An infinite `x` passes its gradient;
//! a NaN does as in stock.
use super::{
    kept::Keeper,
    recompute::{Offered, is_free, is_recomputed, offer},
};
use crate::backend::{MemBackend, PiecewiseLinear, device, plain_backends};
use burn::backend::{
    Backend,
    autodiff::{
        Autodiff,
        checkpoint::{
            base::Checkpointer,
            strategy::{BalancedCheckpointing, CheckpointStrategy},
        },
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
        let free = is_free::<B, C>(&x);
        let prep = Step(f).prepare::<BalancedCheckpointing>([x.node()]);
        let prep = offer::<_, B, _, C, _, 1>(prep, free, &[&x], move |inputs| {
            inputs.into_iter().map(|x| B::memsave_piecewise_linear(x, f)).next().expect("one input")
        });
        let x = x.into_primitive(); // unique if nobody keeps it: the forward may work in place
        match prep.stateful() {
            OpsKind::Tracked(prep) => {
                let (y, mask) = B::piecewise_linear(x, f);
                let (keeper, offered) = (Keeper::new(name(f), None), Offered::new(free));
                let mask = keeper.keep_state("mask", mask, "x is tracked");
                let y = prep.finish(Saved { mask, _offered: offered.clone() }, y);
                offered.promise(y.id());
                y
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
    /// The output, if it can be computed again from a free input.
    _offered: Offered,
}

impl<B: MemBackend> Backward<B, 1> for Step {
    type State = Saved<B::Mask>;

    fn backward(self, ops: Ops<Self::State, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
        let mask = ops.state.mask;
        unary::<B, _>(ops.parents, ops.node, grads, |dy| B::scale_by_mask(dy, &mask, self.0.slopes()));
    }
}
