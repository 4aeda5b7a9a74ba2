//! Rotary encoding: pairs of features are rotated by an angle that depends on the position.
//!
//! | | |
//! | --- | --- |
//! | computes | `y[2i] = x[2i] c[2i] - x[2i+1] s[2i]`, `y[2i+1] = x[2i+1] c[2i+1] + x[2i] s[2i+1]` |
//! | keeps | a handle of the factors `c` and `s`, if `x` is tracked |
//! | backward | `dx[2i] = dy[2i] c[2i] + dy[2i+1] s[2i+1]`, `dx[2i+1] = dy[2i+1] c[2i+1] - dy[2i] s[2i]` |
//!
//! Stock Burn multiplies by a matrix of signs, and has four tensors twice the size of `x` on the way.
use super::kept::Keeper;
use crate::backend::{MemBackend, plain_backends};
use burn::backend::{
    Backend,
    autodiff::{
        Autodiff,
        checkpoint::{base::Checkpointer, strategy::CheckpointStrategy},
        grads::Gradients,
        ops::{Backward, Ops, OpsKind, unary},
    },
    backend_extension,
    tensor::FloatTensor,
};

/// Rotary encoding.
#[backend_extension(
    Flex: cfg(feature = "flex"),
    NdArray: cfg(feature = "ndarray"),
    Cube: cfg(any(feature = "wgpu", feature = "cuda")),
    Remote: cfg(feature = "remote"),
    Autodiff
)]
pub trait RotaryOps: Backend {
    /// `x` `[..., positions, features]` rotated by `factors` `[positions, features, 2]`, which are constants: the cosine and
    /// the sine of every feature.
    fn memsave_rotary(x: FloatTensor<Self>, factors: FloatTensor<Self>) -> FloatTensor<Self>;
}
plain_backends!(RotaryOps {
    fn memsave_rotary(x: FloatTensor<Self>, factors: FloatTensor<Self>) -> FloatTensor<Self> {
        Self::rotate(x, factors, false)
    }
});

impl<B: RotaryOps + MemBackend, C: CheckpointStrategy> RotaryOps for Autodiff<B, C> {
    fn memsave_rotary(x: FloatTensor<Self>, factors: FloatTensor<Self>) -> FloatTensor<Self> {
        let (node, factors) = (x.node(), factors.into_primitive());
        match Rotary.prepare::<C>([node]).compute_bound().stateful() {
            OpsKind::Tracked(prep) => {
                let kept = Keeper::new("rotary_encoding", None);
                let kept = kept.keep_tensor("factors", factors.clone(), "x is tracked");
                prep.finish(kept, B::rotate(x.into_primitive(), factors, false))
            }
            OpsKind::UnTracked(prep) => prep.finish(B::rotate(x.into_primitive(), factors, false)),
        }
    }
}

#[derive(Debug)]
struct Rotary;

impl<B: MemBackend> Backward<B, 1> for Rotary {
    type State = FloatTensor<B>;

    fn backward(self, ops: Ops<Self::State, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
        let factors = ops.state;
        unary::<B, _>(ops.parents, ops.node, grads, |dy| B::rotate(dy, factors, true));
    }
}
