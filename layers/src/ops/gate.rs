//! Gates: GLU and SwiGLU.
//!
//! | | |
//! | --- | --- |
//! | computes | `y = a * f(b)`, `f` a [`Smooth`] function |
//! | keeps | `b` (a handle); `a` (a handle) if `b` is tracked |
//! | backward | `da = dy * f(b)`, `db = dy * a * f'(b)` |
//!
//! The product is offered for [recomputation](super::recompute) if both are kept: the layer after it keeps nothing. Stock Burn
//! keeps `a`, `b`, `f(b)` and more.
use super::{
    extension::extension,
    step::{BackwardPass, Inputs, Operation, Plan, Recorder, Run, Tracking, given},
};
use crate::backend::{MemBackend, Smooth};
use burn::backend::tensor::FloatTensor;

extension! {
    /// Gates.
    pub trait GateOps(MemBackend) {
        /// `a * f(b)`, element by element; both of one shape.
        fn memsave_gate(a: FloatTensor<Self>, b: FloatTensor<Self>, f: Smooth) -> FloatTensor<Self> {
            Self::run(Gate(f), [Some(a), Some(b)])
        }
    }
}

const A: usize = 0;
const GATE: usize = 1;

/// `a * f(b)`
#[derive(Clone, Copy, Debug)]
pub struct Gate(Smooth);

impl<B: MemBackend> Operation<B, 2> for Gate {
    const INPUTS: [&'static str; 2] = ["a", "b"];
    type Saved = Gate;

    fn name(&self) -> &'static str {
        "gate"
    }

    fn plan(&self, inputs: &Tracking<B, 2>) -> Plan<2> {
        let reads_a = inputs.tracked(GATE);
        Plan::nothing()
            .keep_if(reads_a, A, "b is tracked")
            .keep_if(true, GATE, "a or b is tracked")
            .offer_if(reads_a)
    }

    fn forward(&self, [a, b]: Inputs<B, 2>) -> FloatTensor<B> {
        B::gate(given(a), given(b), self.0)
    }

    fn forward_saving(&self, inputs: Inputs<B, 2>, _: &Recorder<2>) -> (FloatTensor<B>, Gate) {
        (Operation::<B, 2>::forward(self, inputs), *self)
    }

    fn backward(Gate(f): Gate, dy: FloatTensor<B>, pass: &mut BackwardPass<B, 2>) {
        let (a, b) = (pass.take(A), given(pass.take(GATE)));
        pass.give_all(B::gate_backward(a, b, f, dy, pass.wants(A)));
    }
}
