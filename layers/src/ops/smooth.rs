//! Smooth activations: GELU, SiLU, sigmoid and their kin.
//!
//! | | |
//! | --- | --- |
//! | computes | `y = f(x)`, `f` a [`Smooth`] function |
//! | keeps | `x` (a handle); for sigmoid and tanh `y`, unless `x` is free |
//! | backward | `dx = dy * f'(x)`, in place |
//!
//! Where `x` is kept, the output is offered for [recomputation](super::recompute): the layer behind keeps nothing. Stock Burn
//! records up to six operations for one function, each of which keeps a tensor.
use super::{
    kept::{Keeper, Kept},
    recompute::{Offered, is_free, offer},
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
        ops::{Backward, Ops, OpsKind, unary},
    },
    backend_extension,
    tensor::FloatTensor,
};

/// Smooth activations.
#[backend_extension(
    Flex: cfg(feature = "flex"),
    NdArray: cfg(feature = "ndarray"),
    Cube: cfg(any(feature = "wgpu", feature = "cuda")),
    Remote: cfg(feature = "remote"),
    Autodiff
)]
pub trait SmoothOps: Backend {
    /// `f(x)`, element by element; any shape.
    fn memsave_smooth(x: FloatTensor<Self>, f: Smooth) -> FloatTensor<Self>;
}
plain_backends!(SmoothOps {
    fn memsave_smooth(x: FloatTensor<Self>, f: Smooth) -> FloatTensor<Self> {
        Self::smooth(x, f)
    }
});

impl<B: SmoothOps + MemBackend, C: CheckpointStrategy> SmoothOps for Autodiff<B, C> {
    fn memsave_smooth(x: FloatTensor<Self>, f: Smooth) -> FloatTensor<Self> {
        let keeps_output = f.reads_output() && !is_free::<B, C>(&x);
        let prep = Step(f).prepare::<BalancedCheckpointing>([x.node()]);
        let prep = offer::<_, B, _, C, _, 1>(prep, !keeps_output, &[&x], move |inputs| {
            inputs.into_iter().map(|x| B::smooth(x, f)).next().expect("one input")
        });
        match prep.stateful() {
            OpsKind::Tracked(mut prep) => {
                let keeper = Keeper::new(name(f), None);
                if keeps_output {
                    let y = B::smooth(x.into_primitive(), f);
                    let saved = Saved::Output(keeper.keep_tensor("y", y.clone(), "x is tracked"));
                    return prep.finish(saved, y);
                }
                let offered = Offered::new(true);
                let kept = keeper.keep(&mut prep, "x", &x, "x is tracked");
                let saved = Saved::Input { x: kept, _offered: offered.clone() };
                let y = prep.finish(saved, B::smooth(x.into_primitive(), f));
                offered.promise(y.id());
                y
            }
            OpsKind::UnTracked(prep) => prep.finish(B::smooth(x.into_primitive(), f)),
        }
    }
}

fn name(f: Smooth) -> &'static str {
    match f {
        Smooth::Gelu | Smooth::GeluApproximate => "gelu",
        Smooth::Silu => "silu",
        Smooth::Mish => "mish",
        Smooth::Softplus { .. } => "softplus",
        Smooth::Softsign => "softsign",
        Smooth::Elu { .. } => "elu",
        Smooth::Celu { .. } => "celu",
        Smooth::Selu => "selu",
        Smooth::LogSigmoid => "log_sigmoid",
        Smooth::HardSwish => "hard_swish",
        Smooth::Tanhshrink => "tanhshrink",
        Smooth::Sigmoid => "sigmoid",
        Smooth::Tanh => "tanh",
    }
}

#[derive(Debug)]
struct Step(Smooth);

/// What the backward pass reads.
#[derive(Clone, Debug)]
enum Saved<T> {
    Input {
        x: Kept,
        /// The output, which can be computed again from it.
        _offered: Offered,
    },
    Output(T),
}

impl<B: MemBackend> Backward<B, 1> for Step {
    type State = Saved<FloatTensor<B>>;

    fn backward(self, ops: Ops<Self::State, 1>, grads: &mut Gradients, checkpointer: &mut Checkpointer) {
        let Self(f) = self;
        let read = match ops.state {
            Saved::Output(y) => y,
            Saved::Input { x, .. } => match (f.reads_output(), x.get::<B>(checkpointer)) {
                (true, x) => B::smooth(x, f),
                (false, x) => x,
            },
        };
        unary::<B, _>(ops.parents, ops.node, grads, |dy| B::smooth_backward(read, f, dy));
    }
}
