//! Dropout.
//!
//! | | |
//! | --- | --- |
//! | computes | `y = x / keep` where a bit drawn with probability `keep` is set, else 0 |
//! | keeps | 1 bit per element if `x` is tracked, else nothing |
//! | backward | `dx = dy / keep` where the bit is set, else 0 |
//!
//! Where `x` is kept by another step, or computed again, the output is offered for [recomputation](super::recompute).
//!
//! Stock Burn keeps a float per element. The bits are drawn as stock draws them: the same seed drops the same elements.
//! What is dropped is 0, also where `x` is infinite or NaN; stock multiplies by 0, and has a NaN there.
use super::{
    kept::Keeper,
    recompute::{Offered, is_free, offer},
};
use crate::backend::{MemBackend, plain_backends};
use burn::backend::{
    Backend, Distribution, TensorMetadata,
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
    tensor::FloatTensor,
};

/// Dropout.
#[backend_extension(
    Flex: cfg(feature = "flex"),
    NdArray: cfg(feature = "ndarray"),
    Cube: cfg(any(feature = "wgpu", feature = "cuda")),
    Remote: cfg(feature = "remote"),
    Autodiff
)]
pub trait DropoutOps: Backend {
    /// Zeroes elements with probability `1 - keep` and divides the others by `keep`; any shape.
    fn memsave_dropout(x: FloatTensor<Self>, keep: f64) -> FloatTensor<Self> {
        let bernoulli = Distribution::Bernoulli(keep);
        let drawn = Self::float_random(x.shape(), bernoulli, &x.device(), x.dtype().into());
        Self::float_mul_scalar(Self::float_mul(x, drawn), (1.0 / keep).into())
    }
}
plain_backends!(DropoutOps);

impl<B: DropoutOps + MemBackend, C: CheckpointStrategy> DropoutOps for Autodiff<B, C> {
    fn memsave_dropout(x: FloatTensor<Self>, keep: f64) -> FloatTensor<Self> {
        let (mask, scale) = (B::bernoulli_mask(x.primitive(), keep), 1.0 / keep);
        let (free, again) = (is_free::<B, C>(&x), mask.clone());
        let prep = Dropout.prepare::<BalancedCheckpointing>([x.node()]);
        let prep = offer::<_, B, _, C, _, 1>(prep, free, &[&x], move |inputs| {
            let x = inputs.into_iter().next().expect("one input");
            B::scale_by_mask(x, &again, [0.0, scale])
        });
        // Unique if nobody keeps it: the forward may work in place.
        let y = B::scale_by_mask(x.into_primitive(), &mask, [0.0, scale]);
        match prep.stateful() {
            OpsKind::Tracked(prep) => {
                let mask = Keeper::new("dropout", None).keep_state("mask", mask, "x is tracked");
                let offered = Offered::new(free);
                let y = prep.finish(Saved { mask, scale, _offered: offered.clone() }, y);
                offered.promise(y.id());
                y
            }
            OpsKind::UnTracked(prep) => prep.finish(y),
        }
    }
}

#[derive(Debug)]
struct Dropout;

/// What the backward pass reads.
#[derive(Clone, Debug)]
struct Saved<Mask> {
    /// What was not dropped, one bit per element.
    mask: Mask,
    /// What it was multiplied by.
    scale: f64,
    /// The output, if it can be computed again from a free input.
    _offered: Offered,
}

impl<B: MemBackend> Backward<B, 1> for Dropout {
    type State = Saved<B::Mask>;

    fn backward(self, ops: Ops<Self::State, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
        let Saved { mask, scale, .. } = ops.state;
        unary::<B, _>(ops.parents, ops.node, grads, |dy| B::scale_by_mask(dy, &mask, [0.0, scale]));
    }
}
