//! The gate of a recurrent layer.
use crate::nn::drop_in::drop_in;
use crate::nn::{Initializer, Linear};
use burn::module::Module;
use burn::tensor::{Device, Tensor};

drop_in! {
    /// A gate of a recurrent layer: one dense layer for the input and one for the hidden state; the twin of
    /// [`burn::nn::GateController`].
    ///
    /// The recurrent layers only read its parameters. [`gate_product`](Self::gate_product) keeps for the backward pass what two
    /// [`Linear`](crate::nn::Linear) keep.
    #[derive(Module, Debug)]
    pub struct GateController as MemSaveGateController = burn::nn::GateController,
        from_nn_gate_controller, into_nn_gate_controller {
        /// Represents the affine transformation applied to input vector
        pub input_transform: Linear,
        /// Represents the affine transformation applied to the hidden state
        pub hidden_transform: Linear,
    }
}

impl GateController {
    /// Initializes a gate, as [`burn::nn::GateController::new`] does.
    pub fn new(
        d_input: usize,
        d_output: usize,
        bias: bool,
        initializer: Initializer,
        device: &Device,
    ) -> Self {
        burn::nn::GateController::new(d_input, d_output, bias, initializer, device).into()
    }

    /// `input W + hidden U`, plus the biases, if there are any.
    pub fn gate_product(&self, input: Tensor<2>, hidden: Tensor<2>) -> Tensor<2> {
        self.input_transform.forward(input) + self.hidden_transform.forward(hidden)
    }
}
