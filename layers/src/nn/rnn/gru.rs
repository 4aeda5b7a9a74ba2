//! Gated recurrent units.

use super::GateController;
use super::sequence::{Outcome, accepted, direction, forward_methods, require_sigmoid_and_tanh, run};
use crate::functional::guard::{Misfit, is_tracked, require};
use crate::nn::activation::{Activation, ActivationConfig};
use crate::nn::drop_in::{config_twin, drop_in};
use crate::ops::{Cell, Recurrence};
use burn::config::Config;
use burn::module::Module;
use burn::nn::Initializer;
use burn::tensor::{Device, Tensor};

config_twin! {
    #[derive(Config, Debug)]
    pub struct GruConfig = burn::nn::GruConfig {
        /// The size of the input features.
        pub d_input: usize,
        /// The size of the hidden state.
        pub d_hidden: usize,
        /// If a bias should be applied during the Gru transformation.
        pub bias: bool,
        /// If reset gate should be applied after weight multiplication.
        ///
        /// This configuration option controls how the reset gate is applied to the hidden state.
        /// * `true` - (Default) Match the initial arXiv version of the paper [Learning Phrase Representations using RNN
        ///   Encoder-Decoder for Statistical Machine Translation (v1)](https://arxiv.org/abs/1406.1078v1) and apply the reset
        ///   gate after multiplication by the weights. This matches the behavior of
        ///   [PyTorch GRU](https://pytorch.org/docs/stable/generated/torch.nn.GRU.html#torch.nn.GRU).
        /// * `false` - Match the most recent revision of [Learning Phrase Representations using RNN Encoder-Decoder for Statistical Machine
        ///   Translation (v3)](https://arxiv.org/abs/1406.1078) and apply the reset gate before the weight multiplication.
        ///
        /// The differing implementations can give slightly different numerical results and have different efficiencies. For
        /// more motivation for why the `true` can be more efficient see [Optimizing RNNs with Differentiable
        /// Graphs](https://svail.github.io/diff_graphs).
        ///
        /// To set this field to `false` use [`with_reset_after`](`GruConfig::with_reset_after`).
        #[config(default = "true")]
        pub reset_after: bool,
        /// Gru initializer
        #[config(default = "Initializer::XavierNormal{gain:1.0}")]
        pub initializer: Initializer,
        /// Activation function for the update and reset gates.
        /// Default is Sigmoid, which is standard for GRU gates.
        #[config(default = "ActivationConfig::Sigmoid")]
        pub gate_activation: ActivationConfig,
        /// Activation function for the new/candidate gate.
        /// Default is Tanh, which is standard for GRU.
        #[config(default = "ActivationConfig::Tanh")]
        pub hidden_activation: ActivationConfig,
        /// Optional hidden state clip threshold. If provided, hidden state values are clipped
        /// to the range `[-clip, +clip]` after each timestep. This can help prevent
        /// exploding values during inference.
        pub clip: Option<f64>,
    }
    pub fn init(&self, device: &Device) -> Gru;
}

config_twin! {
    #[derive(Config, Debug)]
    pub struct BiGruConfig = burn::nn::BiGruConfig {
        /// The size of the input features.
        pub d_input: usize,
        /// The size of the hidden state.
        pub d_hidden: usize,
        /// If a bias should be applied during the BiGru transformation.
        pub bias: bool,
        /// If reset gate should be applied after weight multiplication.
        #[config(default = "true")]
        pub reset_after: bool,
        /// BiGru initializer
        #[config(default = "Initializer::XavierNormal{gain:1.0}")]
        pub initializer: Initializer,
        /// If true, the input tensor is expected to be `[batch_size, seq_length, input_size]`.
        /// If false, the input tensor is expected to be `[seq_length, batch_size, input_size]`.
        #[config(default = true)]
        pub batch_first: bool,
        /// Activation function for the update and reset gates.
        #[config(default = "ActivationConfig::Sigmoid")]
        pub gate_activation: ActivationConfig,
        /// Activation function for the new/candidate gate.
        #[config(default = "ActivationConfig::Tanh")]
        pub hidden_activation: ActivationConfig,
        /// Optional hidden state clip threshold.
        pub clip: Option<f64>,
    }
    pub fn init(&self, device: &Device) -> BiGru;
}

drop_in! {
    /// Gated recurrent unit, after [arXiv 1406.1078](https://arxiv.org/abs/1406.1078): per gate `a = x W + b + h U + d`,
    /// `r = sigmoid(a_r)`, `z = sigmoid(a_z)`, `n = tanh(x W + b + r * (h U + d))` (or, without `reset_after`,
    /// `tanh(x W + b + (r h) U + d)`), `h = (1 - z) n + z h`, step by step.
    ///
    /// For the backward pass it keeps its gates, three tensors of the size of the output, and its input if the weights are
    /// trainable; [`burn::nn::Gru`] keeps a dozen such tensors. With activations other than sigmoid and tanh, or operands of
    /// different dtypes, Burn's own forward pass runs.
    ///
    /// ```
    /// use burn::tensor::{Device, Tensor};
    /// use burn_memsave_layers::nn::GruConfig;
    ///
    /// let device = Device::flex();
    /// let gru = GruConfig::new(3, 4, true).init(&device);
    /// assert_eq!(gru.forward(Tensor::ones([2, 5, 3], &device), None).dims(), [2, 5, 4]);
    /// ```
    #[derive(Module, Debug)]
    pub struct Gru as MemSaveGru = burn::nn::Gru, from_nn_gru, into_nn_gru {
        /// The update gate controller.
        pub update_gate: GateController,
        /// The reset gate controller.
        pub reset_gate: GateController,
        /// The new gate controller.
        pub new_gate: GateController,
        /// The size of the hidden state.
        pub d_hidden: usize,
        /// If reset gate should be applied after weight multiplication.
        pub reset_after: bool,
        /// Activation function for gates (update, reset).
        pub gate_activation: Activation,
        /// Activation function for new/candidate gate.
        pub hidden_activation: Activation,
        /// Optional hidden state clip threshold.
        pub clip: Option<f64>,
    }
}

forward_methods! {
    /// Applies the layer to a sequence, starting from a hidden state or from zeros. Returns the hidden states after all steps.
    ///
    /// # Shapes
    ///
    /// - input: `[batch, steps, d_input]`
    /// - state: `[batch, d_hidden]`
    /// - output: `[batch, steps, d_hidden]`
    Gru: Tensor<2> => Tensor<3>
}

impl Gru {
    fn forward_with(
        &self,
        batched_input: Tensor<3>,
        state: Option<Tensor<2>>,
        checkpoint: Option<usize>,
    ) -> Tensor<3> {
        let tracked = batched_input.is_tracked() || is_tracked(&state);
        let outcome = self.run(&batched_input, state.as_ref(), true, false, checkpoint);
        match accepted("gru", outcome, tracked, self, &self.reset_gate) {
            Some((y, ..)) => y,
            None => self.clone().into_nn_gru().forward(batched_input, state),
        }
    }

    fn run(
        &self,
        x: &Tensor<3>,
        state: Option<&Tensor<2>>,
        batch_first: bool,
        reverse: bool,
        checkpoint: Option<usize>,
    ) -> Result<Outcome, Misfit> {
        require_sigmoid_and_tanh(&[&self.gate_activation], &[&self.hidden_activation])?;
        let cell = Cell::Gru { reset_after: self.reset_after };
        let recurrence = Recurrence { cell, clip: self.clip, batch_first, reverse, checkpoint };
        let gates = [&self.reset_gate, &self.update_gate, &self.new_gate];
        run(recurrence, x, state, None, &gates)
    }
}

drop_in! {
    /// Two gated recurrent units that run over a sequence in opposite directions; their outputs are concatenated.
    ///
    /// Keeps for the backward pass what two [`Gru`] keep.
    ///
    /// ```
    /// use burn::tensor::{Device, Tensor};
    /// use burn_memsave_layers::nn::BiGruConfig;
    ///
    /// let device = Device::flex();
    /// let gru = BiGruConfig::new(3, 4, true).init(&device);
    /// let (y, state) = gru.forward(Tensor::ones([2, 5, 3], &device), None);
    /// assert_eq!((y.dims(), state.dims()), ([2, 5, 8], [2, 2, 4]));
    /// ```
    #[derive(Module, Debug)]
    pub struct BiGru as MemSaveBiGru = burn::nn::BiGru, from_nn_bigru, into_nn_bigru {
        /// GRU for the forward direction.
        pub forward: Gru,
        /// GRU for the reverse direction.
        pub reverse: Gru,
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
    BiGru: Tensor<3> => (Tensor<3>, Tensor<3>)
}

impl BiGru {
    fn forward_with(
        &self,
        batched_input: Tensor<3>,
        state: Option<Tensor<3>>,
        checkpoint: Option<usize>,
    ) -> (Tensor<3>, Tensor<3>) {
        let layer = |layer: &Gru, index| {
            let state = state.as_ref().map(|state| direction(state, index));
            layer.run(&batched_input, state.as_ref(), self.batch_first, index == 1, checkpoint)
        };
        let has_both = state.as_ref().is_none_or(|state| state.dims()[0] == 2);
        let fit = require(has_both, Misfit::Shapes);
        let both = fit.and_then(|()| Ok((layer(&self.forward, 0)?, layer(&self.reverse, 1)?)));
        let tracked = batched_input.is_tracked() || is_tracked(&state);
        match accepted("gru", both, tracked, self, &self.forward.reset_gate) {
            Some(((forward, last, _), (reverse, first, _))) => {
                (Tensor::cat(vec![forward, reverse], 2), Tensor::stack(vec![last, first], 0))
            }
            None => self.clone().into_nn_bigru().forward(batched_input, state),
        }
    }
}
