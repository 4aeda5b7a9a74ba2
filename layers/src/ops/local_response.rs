//! Local response normalization: over a window of channels.
//!
//! | | |
//! | --- | --- |
//! | computes | `y = x / s^beta`, `s = k + alpha / size * sum(x^2)` over the window of the channel |
//! | keeps | `x` (a handle) |
//! | backward | `dx = dy / s^beta - 2 alpha beta / size * x * sum(dy x / s^(beta + 1))` over the windows that the channel is in |
//!
//! The sums are computed again. The output is offered for [recomputation](super::recompute): the layer behind keeps nothing.
//! Stock Burn records ten operations, which keep four tensors of the size of `x`.
use super::{
    kept::{Keeper, Kept},
    recompute::{Offered, offer},
};
use crate::backend::{LocalResponse, MemBackend, plain_backends};
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
    tensor::FloatTensor,
};

/// Local response normalization.
#[backend_extension(
    Flex: cfg(feature = "flex"),
    NdArray: cfg(feature = "ndarray"),
    Cube: cfg(any(feature = "wgpu", feature = "cuda")),
    Remote: cfg(feature = "remote"),
    Autodiff
)]
pub trait LocalResponseOps: Backend {
    /// `x`, `[batch, channels, ...]`, as `norm` says.
    fn memsave_local_response(x: FloatTensor<Self>, norm: LocalResponse) -> FloatTensor<Self>;
}
plain_backends!(LocalResponseOps {
    fn memsave_local_response(x: FloatTensor<Self>, norm: LocalResponse) -> FloatTensor<Self> {
        Self::normalize_response(x, &norm)
    }
});

impl<B: LocalResponseOps + MemBackend, C: CheckpointStrategy> LocalResponseOps for Autodiff<B, C> {
    fn memsave_local_response(x: FloatTensor<Self>, norm: LocalResponse) -> FloatTensor<Self> {
        let prep = Step(norm).prepare::<BalancedCheckpointing>([x.node()]);
        let prep = offer::<_, B, _, C, _, 1>(prep, x.is_tracked(), &[&x], move |inputs| {
            inputs.into_iter().map(|x| B::normalize_response(x, &norm)).next().expect("one input")
        });
        match prep.stateful() {
            OpsKind::Tracked(mut prep) => {
                let offered = Offered::new(true);
                let keeper = Keeper::new("local_response_norm", None);
                let kept = keeper.keep(&mut prep, "x", &x, "x is tracked");
                let saved = Saved { x: kept, _offered: offered.clone() };
                let y = prep.finish(saved, B::normalize_response(x.into_primitive(), &norm));
                offered.promise(y.id());
                y
            }
            OpsKind::UnTracked(prep) => prep.finish(B::normalize_response(x.into_primitive(), &norm)),
        }
    }
}

#[derive(Debug)]
struct Step(LocalResponse);

/// What the backward pass reads.
#[derive(Clone, Debug)]
struct Saved {
    x: Kept,
    /// The output, which can be computed again from it.
    _offered: Offered,
}

impl<B: MemBackend> Backward<B, 1> for Step {
    type State = Saved;

    fn backward(self, ops: Ops<Saved, 1>, grads: &mut Gradients, checkpointer: &mut Checkpointer) {
        let Self(norm) = self;
        let x = ops.state.x.get::<B>(checkpointer);
        unary::<B, _>(ops.parents, ops.node, grads, |dy| B::normalize_response_backward(x, &norm, dy));
    }
}
