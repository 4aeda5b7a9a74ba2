//! Local response normalization: over a window of channels.
//!
//! | | |
//! | --- | --- |
//! | computes | `y = x / s^beta`, `s = k + alpha / size * sum(x^2)` over the window of the channel |
//! | keeps | `x` (a handle) |
//! | backward | `dx = dy / s^beta - 2 alpha beta / size * x * sum(dy x / s^(beta + 1))` over the windows that the channel is in |
//!
//! The sums are computed again. The output is offered for [recomputation](super::recompute): the layer after it keeps nothing.
//! Stock Burn records ten operations, which keep four tensors of the size of `x`.
use super::{
    extension::extension,
    step::{BackwardPass, Inputs, Operation, Plan, Recorder, Run, Tracking, given},
};
use crate::backend::{LocalResponse, MemBackend};
use burn::backend::tensor::FloatTensor;

extension! {
    /// Local response normalization.
    pub trait LocalResponseOps(MemBackend) {
        /// `x`, `[batch, channels, ...]`, as `norm` says.
        fn memsave_local_response(x: FloatTensor<Self>, norm: LocalResponse) -> FloatTensor<Self> {
            Self::run(norm, [Some(x)])
        }
    }
}

const X: usize = 0;

impl<B: MemBackend> Operation<B, 1> for LocalResponse {
    const INPUTS: [&'static str; 1] = ["x"];
    type Saved = LocalResponse;

    fn name(&self) -> &'static str {
        "local_response_norm"
    }

    fn plan(&self, _: &Tracking<B, 1>) -> Plan<1> {
        Plan::nothing().keep_if(true, X, "x is tracked").offer_if(true)
    }

    fn forward(&self, [x]: Inputs<B, 1>) -> FloatTensor<B> {
        B::normalize_response(given(x), self)
    }

    fn forward_saving(&self, inputs: Inputs<B, 1>, _: &Recorder<1>) -> (FloatTensor<B>, LocalResponse) {
        (Operation::<B, 1>::forward(self, inputs), *self)
    }

    fn backward(norm: LocalResponse, dy: FloatTensor<B>, pass: &mut BackwardPass<B, 1>) {
        let x = given(pass.take(X));
        pass.give(X, B::normalize_response_backward(x, &norm, dy));
    }
}
