//! Softmax and its kin.
//!
//! | | |
//! | --- | --- |
//! | computes | `y = f(x)` along one axis, `f` a [`Softmax`] |
//! | keeps | `y` (a handle) |
//! | backward | `dx = y (dy - sum(y dy))`; of a log-softmax `dx = dy - exp(y) sum(dy)`; in place |
//!
//! Stock Burn records up to eight small operations, which keep several tensors of the size of `x`.
use super::kept::Keeper;
use crate::backend::{MemBackend, Softmax, plain_backends};
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

/// Softmaxes.
#[backend_extension(
    Flex: cfg(feature = "flex"),
    NdArray: cfg(feature = "ndarray"),
    Cube: cfg(any(feature = "wgpu", feature = "cuda")),
    Remote: cfg(feature = "remote"),
    Autodiff
)]
pub trait SoftmaxOps: Backend {
    /// `f(x)` along axis `dim`.
    fn memsave_softmax(x: FloatTensor<Self>, f: Softmax, dim: usize) -> FloatTensor<Self>;
}
plain_backends!(SoftmaxOps {
    fn memsave_softmax(x: FloatTensor<Self>, f: Softmax, dim: usize) -> FloatTensor<Self> {
        Self::softmax_along(x, f, dim)
    }
});

impl<B: SoftmaxOps + MemBackend, C: CheckpointStrategy> SoftmaxOps for Autodiff<B, C> {
    fn memsave_softmax(x: FloatTensor<Self>, f: Softmax, dim: usize) -> FloatTensor<Self> {
        let (x, node) = x.into_parts();
        let y = B::softmax_along(x, f, dim);
        match (Step { f, dim }).prepare::<C>([node]).compute_bound().stateful() {
            OpsKind::Tracked(prep) => {
                let kept = Keeper::new(name(f), None).keep_tensor("y", y.clone(), "x is tracked");
                prep.finish(kept, y)
            }
            OpsKind::UnTracked(prep) => prep.finish(y),
        }
    }
}

fn name(f: Softmax) -> &'static str {
    match f {
        Softmax::Softmax => "softmax",
        Softmax::LogSoftmax => "log_softmax",
        Softmax::Softmin => "softmin",
        Softmax::QuietSoftmax => "quiet_softmax",
    }
}

#[derive(Debug)]
struct Step {
    f: Softmax,
    dim: usize,
}

impl<B: MemBackend> Backward<B, 1> for Step {
    /// The output.
    type State = FloatTensor<B>;

    fn backward(self, ops: Ops<Self::State, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
        let y = ops.state;
        unary::<B, _>(ops.parents, ops.node, grads, |dy| B::softmax_along_backward(y, self.f, self.dim, dy));
    }
}
