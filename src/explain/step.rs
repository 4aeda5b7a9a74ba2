//! [`Step`]: the step that is explained, which runs with the model and with variants of it.
use crate::measure::{Ledger, StepInput, bytes_in_use, ledger, tensor_bytes};
use burn::module::Module;
use burn::tensor::Tensor;

/// A step that runs with one model after the other.
pub(super) struct Step<'a, I, F> {
    pub(super) input: &'a I,
    pub(super) loss: F,
}

impl<I: StepInput, F> Step<'_, I, F> {
    pub(super) fn ledger<M: Module>(&self, model: &M) -> Ledger
    where
        F: Fn(&M, I) -> Tensor<1>,
    {
        let (loss, ledger) = ledger(model, self.input.copy(), &self.loss);
        end(loss);
        ledger
    }

    /// Bytes that are alive after the forward pass and were not before; `None` where bytes are not counted.
    pub(super) fn kept<M: Module>(&self, model: &M) -> Option<i64>
    where
        F: Fn(&M, I) -> Tensor<1>,
    {
        let device = self.input.device();
        let settled = || {
            let _ = device.sync(); // a failure of the device shows in the next operation
            bytes_in_use(&device)
        };
        let before = settled()?;
        let loss = (self.loss)(model, self.input.copy());
        let after = settled()?;
        let of_loss = tensor_bytes(&loss);
        end(loss);
        Some(after as i64 - before as i64 - of_loss as i64)
    }
}

/// Frees the graph of a loss by its backward pass, since Burn does not free the graph at once if the loss is dropped.
pub(super) fn end(loss: Tensor<1>) {
    if loss.is_tracked() {
        drop(loss.backward());
    }
}
