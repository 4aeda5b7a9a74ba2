//! A loss whose gradient was computed with it: that of a head that is read block by block, once.
//!
//! | | |
//! | --- | --- |
//! | computes | `value`, a function of `x` |
//! | keeps | its gradient, `dx` (a handle), in the dtype of `x` |
//! | backward | `dx` times the gradient of the value |
use super::head_loss::HeadLossKernels;
use crate::graph::{BackwardPass, Inputs, KeepPlan, Operation, Recorder, Run, Tracking, extension};
use burn::backend::{Backend, TensorMetadata, tensor::FloatTensor};

extension! {
    /// Numbers with known gradients.
    pub trait KnownGradientOps(HeadLossKernels) {
        /// `value`, `[1]`, as a function of `x` with the gradient `dx`; both untracked, of the dtype of `x`.
        fn memsave_known_gradient(
            x: FloatTensor<Self>,
            value: FloatTensor<Self>,
            dx: FloatTensor<Self>,
        ) -> FloatTensor<Self> {
            let [value, dx] = [value, dx].map(Self::plain);
            Self::run(KnownGradient::<<Self as Run>::Plain> { value, dx }, [Some(x)])
        }
    }
}

const X: usize = 0;

/// The loss and its gradient, which are computed from tensors that no graph has.
#[derive(Clone, Debug)]
pub(crate) struct KnownGradient<B: Backend> {
    value: FloatTensor<B>,
    dx: FloatTensor<B>,
}

impl<B: HeadLossKernels> Operation<B, 1> for KnownGradient<B> {
    const INPUTS: [&'static str; 1] = ["x"];
    type Saved = FloatTensor<B>;

    fn name(&self) -> &'static str {
        "linear_cross_entropy"
    }

    fn plan(&self, _: &Tracking<B, 1>) -> KeepPlan<1> {
        KeepPlan::nothing()
    }

    fn forward(&self, _: Inputs<B, 1>) -> FloatTensor<B> {
        self.value.clone()
    }

    fn forward_saving(&self, _: Inputs<B, 1>, recorder: &Recorder<1>) -> (FloatTensor<B>, FloatTensor<B>) {
        let dx = recorder.report().tensor("dx", self.dx.clone(), "made in the forward pass");
        (self.value.clone(), dx)
    }

    fn backward(dx: FloatTensor<B>, dvalue: FloatTensor<B>, pass: &mut BackwardPass<B, 1>) {
        let dtype = dx.dtype().into();
        pass.give(X, B::float_cast(B::scale(dx, dvalue, 1.0), dtype));
    }
}
