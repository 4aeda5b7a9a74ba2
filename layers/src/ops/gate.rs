//! Gates: GLU and SwiGLU.
//!
//! | | |
//! | --- | --- |
//! | computes | `y = a * f(b)`, `f` a [`Smooth`] function |
//! | keeps | `b` (a handle); `a` (a handle) if `b` is tracked |
//! | backward | `da = dy * f(b)`, `db = dy * a * f'(b)` |
//!
//! The product is offered for [recomputation](super::recompute) if both are kept: the layer behind keeps nothing. Stock Burn
//! keeps `a`, `b`, `f(b)` and more.
use super::{
    kept::{Keeper, Kept},
    recompute::{Offered, offer},
};
use crate::backend::{MemBackend, Smooth, plain_backends};
use burn::backend::{
    Backend,
    autodiff::{
        Autodiff,
        checkpoint::{
            base::Checkpointer,
            strategy::{BalancedCheckpointing, CheckpointStrategy},
        },
        grads::Gradients,
        ops::{Backward, Ops, OpsKind},
    },
    backend_extension,
    tensor::FloatTensor,
};

/// Gates.
#[backend_extension(
    Flex: cfg(feature = "flex"),
    NdArray: cfg(feature = "ndarray"),
    Cube: cfg(any(feature = "wgpu", feature = "cuda")),
    Remote: cfg(feature = "remote"),
    Autodiff
)]
pub trait GateOps: Backend {
    /// `a * f(b)`, element by element; both of one shape.
    fn memsave_gate(a: FloatTensor<Self>, b: FloatTensor<Self>, f: Smooth) -> FloatTensor<Self>;
}
plain_backends!(GateOps {
    fn memsave_gate(a: FloatTensor<Self>, b: FloatTensor<Self>, f: Smooth) -> FloatTensor<Self> {
        Self::gate(a, b, f)
    }
});

impl<B: GateOps + MemBackend, C: CheckpointStrategy> GateOps for Autodiff<B, C> {
    fn memsave_gate(a: FloatTensor<Self>, b: FloatTensor<Self>, f: Smooth) -> FloatTensor<Self> {
        let both = b.is_tracked();
        let prep = Gate(f).prepare::<BalancedCheckpointing>([a.node(), b.node()]);
        let prep = offer::<_, B, _, C, _, 2>(prep, both, &[&a, &b], move |inputs| {
            let [a, b] = <[_; 2]>::try_from(inputs).unwrap_or_else(|_| unreachable!("two inputs"));
            B::gate(a, b, f)
        });
        match prep.stateful() {
            OpsKind::Tracked(mut prep) => {
                let (keeper, offered) = (Keeper::new("gate", None), Offered::new(both));
                let saved = Saved {
                    a: both.then(|| keeper.keep(&mut prep, "a", &a, "b is tracked")),
                    b: keeper.keep(&mut prep, "b", &b, "a or b is tracked"),
                    _offered: offered.clone(),
                };
                let y = prep.finish(saved, B::gate(a.into_primitive(), b.into_primitive(), f));
                offered.promise(y.id());
                y
            }
            OpsKind::UnTracked(prep) => prep.finish(B::gate(a.into_primitive(), b.into_primitive(), f)),
        }
    }
}

#[derive(Debug)]
struct Gate(Smooth);

/// What the backward pass reads.
#[derive(Clone, Debug)]
struct Saved {
    /// What is gated, if the gate is tracked.
    a: Option<Kept>,
    b: Kept,
    /// The output, if it can be computed again from both.
    _offered: Offered,
}

impl<B: MemBackend> Backward<B, 2> for Gate {
    type State = Saved;

    fn backward(self, ops: Ops<Saved, 2>, grads: &mut Gradients, checkpointer: &mut Checkpointer) {
        let Self(f) = self;
        let dy = grads.consume::<B>(&ops.node);
        let Saved { a, b, .. } = ops.state;
        let (a, b) = (a.map(|a| a.get::<B>(checkpointer)), b.get::<B>(checkpointer));
        let results = B::gate_backward(a, b, f, dy, ops.parents[0].is_some());
        for (parent, grad) in ops.parents.into_iter().zip(results) {
            if let (Some(node), Some(grad)) = (parent, grad) {
                grads.register::<B>(node.id, grad);
            }
        }
    }
}
