//! Gates: GLU and SwiGLU.
//!
//! | | |
//! | --- | --- |
//! | computes | `y = a * f(b)`, `f` a [`Smooth`] function |
//! | keeps | `b` (a handle); `a` (a handle) if `b` is tracked |
//! | backward | `da = dy * f(b)`, `db = dy * a * f'(b)` |
//!
//! If `a` and `b` are kept, the output is offered for [recomputation](crate::graph), so that the next layer need not keep it.
//!
//! Stock Burn keeps `a`, `b`, `f(b)` and more.
use super::smooth::{Smooth, SmoothKernels, slope};
use crate::backend::fusing_backends;
use crate::graph::{BackwardPass, Inputs, KeepPlan, Operation, Recorder, Run, Tracking, extension, given};
use burn::backend::tensor::FloatTensor;

#[cfg(any(feature = "flex", feature = "ndarray"))]
mod cpu;
#[cfg(all(any(feature = "wgpu", feature = "cuda"), not(feature = "fusion")))]
mod cube;

extension! {
    /// Gates.
    pub trait GateOps(GateKernels) {
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

impl<B: GateKernels> Operation<B, 2> for Gate {
    const INPUTS: [&'static str; 2] = ["a", "b"];
    type Saved = Gate;

    fn name(&self) -> &'static str {
        "gate"
    }

    fn plan(&self, inputs: &Tracking<B, 2>) -> KeepPlan<2> {
        let reads_a = inputs.tracked(GATE);
        KeepPlan::nothing()
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

/// The kernels.
pub trait GateKernels: SmoothKernels {
    /// `a * f(b)`; both have one shape. In place if `a` is the only handle of its tensor.
    fn gate(a: FloatTensor<Self>, b: FloatTensor<Self>, f: Smooth) -> FloatTensor<Self> {
        Self::float_mul(a, Self::smooth(b, f))
    }

    /// Gradients of [`gate`](Self::gate): that of `a` if wanted, and that of `b` if `a` is given.
    fn gate_backward(
        a: Option<FloatTensor<Self>>,
        b: FloatTensor<Self>,
        f: Smooth,
        dy: FloatTensor<Self>,
        wants_a: bool,
    ) -> [Option<FloatTensor<Self>>; 2] {
        let value = Self::smooth(b.clone(), f);
        let read = if f.reads_output() { value.clone() } else { b };
        let db = a.map(|a| Self::float_mul(Self::float_mul(a, slope::<Self>(read, f)), dy.clone()));
        [wants_a.then(|| Self::float_mul(dy, value)), db]
    }
}
fusing_backends!(GateKernels);

#[cfg(all(test, feature = "flex"))]
mod tests {
    use super::*;
    use crate::{
        backend::testing::{Composed, assert_close, composed, random},
        ops::smooth::ALL,
    };
    use burn::backend::{Flex, ops::FloatTensorOps};

    #[test]
    fn default_bodies_equal_the_kernels() {
        for f in ALL {
            let [a, b, dy] = [(); 3].map(|()| random(&[5, 13]));
            let body = Composed::gate(composed(&a), composed(&b), f);
            assert_close("gate", body.clone(), Flex::gate(a.clone(), b.clone(), f));
            let unique = Flex::float_mul_scalar(a.clone(), 1.0.into());
            assert_close("gate in place", body, Flex::gate(unique, b.clone(), f));
            let body = Composed::gate_backward(Some(composed(&a)), composed(&b), f, composed(&dy), true);
            let cpu = Flex::gate_backward(Some(a), b, f, dy, true);
            for (body, cpu) in body.into_iter().zip(cpu) {
                assert_close("gradients of a gate", body.expect("wanted"), cpu.expect("wanted"));
            }
        }
    }
}
