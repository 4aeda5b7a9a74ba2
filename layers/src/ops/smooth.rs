//! Smooth activations: GELU, SiLU, sigmoid and their kin.
//!
//! | | |
//! | --- | --- |
//! | computes | `y = f(x)`, `f` a [`Smooth`] function |
//! | keeps | `x` (a handle); for sigmoid and tanh `y`, unless `x` is available anyway |
//! | backward | `dx = dy * f'(x)`, in place |
//!
//! Where `x` is kept, the output is offered for [recomputation](super::recompute): the layer after it keeps nothing. Stock Burn
//! records up to six operations for one function, each of which keeps a tensor.
use super::{
    extension::extension,
    step::{BackwardPass, Inputs, Operation, Plan, Recorder, Run, Tracking, given},
};
use crate::backend::{MemBackend, Smooth};
use burn::backend::tensor::FloatTensor;

extension! {
    /// Smooth activations.
    pub trait SmoothOps(MemBackend) {
        /// `f(x)`, element by element; any shape.
        fn memsave_smooth(x: FloatTensor<Self>, f: Smooth) -> FloatTensor<Self> {
            Self::run(f, [Some(x)])
        }
    }
}

const X: usize = 0;

impl<B: MemBackend> Operation<B, 1> for Smooth {
    const INPUTS: [&'static str; 1] = ["x"];
    type Saved = SavedSmooth<FloatTensor<B>>;

    fn name(&self) -> &'static str {
        match self {
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

    fn plan(&self, inputs: &Tracking<B, 1>) -> Plan<1> {
        let reads_x = !self.reads_output() || inputs.available(X);
        Plan::nothing().keep_if(reads_x, X, "x is tracked").offer_if(reads_x)
    }

    fn forward(&self, [x]: Inputs<B, 1>) -> FloatTensor<B> {
        B::smooth(given(x), *self)
    }

    fn forward_saving(&self, inputs: Inputs<B, 1>, recorder: &Recorder<1>) -> (FloatTensor<B>, Self::Saved) {
        let y = Operation::<B, 1>::forward(self, inputs);
        let output = (!recorder.keeps(X)).then(|| recorder.ledger().tensor("y", y.clone(), "x is tracked"));
        (y, SavedSmooth { f: *self, output })
    }

    fn backward(SavedSmooth { f, output }: Self::Saved, dy: FloatTensor<B>, pass: &mut BackwardPass<B, 1>) {
        let read = output.unwrap_or_else(|| match (f.reads_output(), given(pass.take(X))) {
            (true, x) => B::smooth(x, f),
            (false, x) => x,
        });
        pass.give(X, B::smooth_backward(read, f, dy));
    }
}

/// What the backward pass reads.
#[derive(Clone, Debug)]
pub struct SavedSmooth<T> {
    f: Smooth,
    /// The output, if it is read and the input is not kept.
    output: Option<T>,
}
