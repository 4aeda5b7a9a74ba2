//! Basic recurrent networks.
pub use burn::nn::basic::*;

use super::GateController;
use super::sequence::{Outcome, accepted, direction, forward_methods, require_sigmoid_and_tanh, run};
use crate::functional::guard::{Misfit, require};
use crate::nn::activation::{Activation, ActivationConfig};
use crate::nn::drop_in::{config_twin, drop_in};
use crate::ops::{Cell, Recurrence};
use burn::config::Config;
use burn::module::Module;
use burn::nn::Initializer;
use burn::tensor::{Device, Tensor};

config_twin! {
    #[derive(Config, Debug)]
    pub struct RnnConfig = burn::nn::RnnConfig {
        /// The size of the input features.
        pub d_input: usize,
        /// The size of the hidden state.
        pub d_hidden: usize,
        /// If a bias should be applied during the Rnn transformation.
        pub bias: bool,
        /// Rnn initializer
        #[config(default = "Initializer::XavierNormal{gain:1.0}")]
        pub initializer: Initializer,
        /// If true, the input tensor is expected to be `[batch_size, seq_length, input_size]`.
        /// If false, the input tensor is expected to be `[seq_length, batch_size, input_size]`.
        #[config(default = true)]
        pub batch_first: bool,
        /// If true, process the sequence in reverse order.
        /// This is useful for implementing reverse-direction RNNs (e.g., ONNX reverse direction).
        #[config(default = false)]
        pub reverse: bool,
        /// Optional hidden state clip threshold. If provided, hidden state values are clipped
        /// to the range `[-clip, +clip]` after each timestep. This can help prevent
        /// exploding values during inference.
        pub clip: Option<f64>,
        /// Activation function applied to the hidden state before computing hidden output.
        /// Default is Tanh, which is standard for Rnn.
        #[config(default = "ActivationConfig::Tanh")]
        pub hidden_activation: ActivationConfig,
    }
    pub fn init(&self, device: &Device) -> Rnn;
}

config_twin! {
    #[derive(Config, Debug)]
    pub struct BiRnnConfig = burn::nn::BiRnnConfig {
        /// The size of the input features.
        pub d_input: usize,
        /// The size of the hidden state.
        pub d_hidden: usize,
        /// If a bias should be applied during the BiRnn transformation.
        pub bias: bool,
        /// BiRnn initializer
        #[config(default = "Initializer::XavierNormal{gain:1.0}")]
        pub initializer: Initializer,
        /// If true, the input tensor is expected to be `[batch_size, seq_length, input_size]`.
        /// If false, the input tensor is expected to be `[seq_length, batch_size, input_size]`.
        #[config(default = true)]
        pub batch_first: bool,
        /// Optional hidden state clip threshold.
        pub clip: Option<f64>,
        /// Activation function applied to the hidden state before computing hidden output.
        #[config(default = "ActivationConfig::Tanh")]
        pub hidden_activation: ActivationConfig,
    }
    pub fn init(&self, device: &Device) -> BiRnn;
}

drop_in! {
    /// Recurrent layer, `h = tanh(x W + b + h U + d)` step by step.
    ///
    /// For the backward pass it keeps its output (with `clip`, the values before clipping instead), and its input if its
    /// weights are trainable. [`burn::nn::Rnn`] keeps several tensors of the size of the state at every step. With an
    /// activation other than tanh, or operands of different dtypes, Burn's own forward pass runs.
    ///
    /// ```
    /// use burn::tensor::{Device, Tensor};
    /// use burn_memsave_layers::nn::RnnConfig;
    ///
    /// let device = Device::flex();
    /// let rnn = RnnConfig::new(3, 4, true).init(&device);
    /// let (y, state) = rnn.forward(Tensor::ones([2, 5, 3], &device), None);
    /// assert_eq!((y.dims(), state.hidden.dims()), ([2, 5, 4], [2, 4]));
    /// ```
    #[derive(Module, Debug)]
    pub struct Rnn as MemSaveRnn = burn::nn::Rnn, from_nn_rnn, into_nn_rnn {
        /// gate controller for Rnn (has single gate).
        pub gate: GateController,
        /// The hidden state of the Rnn.
        pub d_hidden: usize,
        /// If true, input is `[batch_size, seq_length, input_size]`.
        /// If false, input is `[seq_length, batch_size, input_size]`.
        pub batch_first: bool,
        /// If true, process the sequence in reverse order.
        pub reverse: bool,
        /// Optional hidden state clip threshold.
        pub clip: Option<f64>,
        /// Activation function for hidden output.
        pub hidden_activation: Activation,
    }
}

forward_methods! {
    /// Applies the layer to a sequence, starting from a hidden state or from zeros. Returns the hidden states after all steps,
    /// and the last one.
    ///
    /// # Shapes
    ///
    /// - input: `[batch, steps, d_input]` if `batch_first`, else `[steps, batch, d_input]`
    /// - state: `[batch, d_hidden]`
    /// - output: as the input, with `d_hidden` features
    Rnn: RnnState<2> => (Tensor<3>, RnnState<2>)
}

impl Rnn {
    fn forward_with(
        &self,
        batched_input: Tensor<3>,
        state: Option<RnnState<2>>,
        checkpoint: Option<usize>,
    ) -> (Tensor<3>, RnnState<2>) {
        let hidden = state.as_ref().map(|state| &state.hidden);
        let tracked = batched_input.is_tracked() || hidden.is_some_and(Tensor::is_tracked);
        let outcome = self.run(&batched_input, hidden, self.batch_first, self.reverse, checkpoint);
        match accepted("rnn", outcome, tracked, self, &self.gate) {
            Some((y, hidden, _)) => (y, RnnState::new(hidden)),
            None => self.clone().into_nn_rnn().forward(batched_input, state),
        }
    }

    fn run(
        &self,
        x: &Tensor<3>,
        hidden: Option<&Tensor<2>>,
        batch_first: bool,
        reverse: bool,
        checkpoint: Option<usize>,
    ) -> Result<Outcome, Misfit> {
        require_sigmoid_and_tanh(&[], &[&self.hidden_activation])?;
        let recurrence = Recurrence { cell: Cell::Rnn, clip: self.clip, batch_first, reverse, checkpoint };
        run(recurrence, x, hidden, None, &[&self.gate])
    }
}

drop_in! {
    /// Two recurrent layers that run over a sequence in opposite directions; their outputs are concatenated.
    ///
    /// Keeps for the backward pass what two [`Rnn`] keep.
    ///
    /// ```
    /// use burn::tensor::{Device, Tensor};
    /// use burn_memsave_layers::nn::BiRnnConfig;
    ///
    /// let device = Device::flex();
    /// let rnn = BiRnnConfig::new(3, 4, true).init(&device);
    /// let (y, state) = rnn.forward(Tensor::ones([2, 5, 3], &device), None);
    /// assert_eq!((y.dims(), state.hidden.dims()), ([2, 5, 8], [2, 2, 4]));
    /// ```
    #[derive(Module, Debug)]
    pub struct BiRnn as MemSaveBiRnn = burn::nn::BiRnn, from_nn_birnn, into_nn_birnn {
        /// RNN for the forward direction.
        pub forward: Rnn,
        /// RNN for the reverse direction.
        pub reverse: Rnn,
        /// The size of the hidden state.
        pub d_hidden: usize,
        /// If true, input is `[batch_size, seq_length, input_size]`.
        /// If false, input is `[seq_length, batch_size, input_size]`.
        pub batch_first: bool,
    }
}

forward_methods! {
    /// Applies the layers to a sequence, starting from a hidden state per direction or from zeros. Returns the hidden states
    /// after all steps, and the last one of each direction.
    ///
    /// # Shapes
    ///
    /// - input: `[batch, steps, d_input]` if `batch_first`, else `[steps, batch, d_input]`
    /// - state: `[2, batch, d_hidden]`
    /// - output: as the input, with `2 * d_hidden` features
    BiRnn: RnnState<3> => (Tensor<3>, RnnState<3>)
}

impl BiRnn {
    fn forward_with(
        &self,
        batched_input: Tensor<3>,
        state: Option<RnnState<3>>,
        checkpoint: Option<usize>,
    ) -> (Tensor<3>, RnnState<3>) {
        let layer = |layer: &Rnn, index| {
            let state = state.as_ref().map(|state| direction(&state.hidden, index));
            // The second layer runs backwards whatever its own `reverse` says, as in Burn.
            layer.run(
                &batched_input,
                state.as_ref(),
                self.batch_first,
                index == 1 || layer.reverse,
                checkpoint,
            )
        };
        let has_both = state.as_ref().is_none_or(|state| state.hidden.dims()[0] == 2);
        let fit =
            require(self.forward.batch_first, Misfit::BatchFirst).and(require(has_both, Misfit::Shapes));
        let both = fit.and_then(|()| Ok((layer(&self.forward, 0)?, layer(&self.reverse, 1)?)));
        let state_tracked = state.as_ref().is_some_and(|state| state.hidden.is_tracked());
        let tracked = batched_input.is_tracked() || state_tracked;
        match accepted("rnn", both, tracked, self, &self.forward.gate) {
            Some(((forward, last, _), (reverse, first, _))) => {
                let hidden = Tensor::stack(vec![last, first], 0);
                (Tensor::cat(vec![forward, reverse], 2), RnnState::new(hidden))
            }
            None => self.clone().into_nn_birnn().forward(batched_input, state),
        }
    }
}
