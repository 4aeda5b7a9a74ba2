//! Long short-term memory.
pub use burn::nn::lstm::*;

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
    pub struct LstmConfig = burn::nn::LstmConfig {
        /// The size of the input features.
        pub d_input: usize,
        /// The size of the hidden state.
        pub d_hidden: usize,
        /// If a bias should be applied during the Lstm transformation.
        pub bias: bool,
        /// Lstm initializer
        #[config(default = "Initializer::XavierNormal{gain:1.0}")]
        pub initializer: Initializer,
        /// If true, the input tensor is expected to be `[batch_size, seq_length, input_size]`.
        /// If false, the input tensor is expected to be `[seq_length, batch_size, input_size]`.
        #[config(default = true)]
        pub batch_first: bool,
        /// If true, process the sequence in reverse order.
        /// This is useful for implementing reverse-direction LSTMs (e.g., ONNX reverse direction).
        #[config(default = false)]
        pub reverse: bool,
        /// Optional cell state clip threshold. If provided, cell state values are clipped
        /// to the range `[-clip, +clip]` after each timestep. This can help prevent
        /// exploding values during inference.
        pub clip: Option<f64>,
        /// If true, couples the input and forget gates: `f_t = 1 - i_t`.
        /// The separate forget gate is omitted, reducing the gate parameters by one quarter.
        #[config(default = false)]
        pub input_forget: bool,
        /// Activation function for the input, forget, and output gates.
        /// Default is Sigmoid, which is standard for LSTM gates.
        #[config(default = "ActivationConfig::Sigmoid")]
        pub gate_activation: ActivationConfig,
        /// Activation function for the cell gate (candidate cell state).
        /// Default is Tanh, which is standard for LSTM.
        #[config(default = "ActivationConfig::Tanh")]
        pub cell_activation: ActivationConfig,
        /// Activation function applied to the cell state before computing hidden output.
        /// Default is Tanh, which is standard for LSTM.
        #[config(default = "ActivationConfig::Tanh")]
        pub hidden_activation: ActivationConfig,
    }
    pub fn init(&self, device: &Device) -> Lstm;
}

config_twin! {
    #[derive(Config, Debug)]
    pub struct BiLstmConfig = burn::nn::BiLstmConfig {
        /// The size of the input features.
        pub d_input: usize,
        /// The size of the hidden state.
        pub d_hidden: usize,
        /// If a bias should be applied during the BiLstm transformation.
        pub bias: bool,
        /// BiLstm initializer
        #[config(default = "Initializer::XavierNormal{gain:1.0}")]
        pub initializer: Initializer,
        /// If true, the input tensor is expected to be `[batch_size, seq_length, input_size]`.
        /// If false, the input tensor is expected to be `[seq_length, batch_size, input_size]`.
        #[config(default = true)]
        pub batch_first: bool,
        /// Optional cell state clip threshold.
        pub clip: Option<f64>,
        /// If true, couples the input and forget gates and omits the separate forget gate in both directions.
        #[config(default = false)]
        pub input_forget: bool,
        /// Activation function for the input, forget, and output gates.
        #[config(default = "ActivationConfig::Sigmoid")]
        pub gate_activation: ActivationConfig,
        /// Activation function for the cell gate (candidate cell state).
        #[config(default = "ActivationConfig::Tanh")]
        pub cell_activation: ActivationConfig,
        /// Activation function applied to the cell state before computing hidden output.
        #[config(default = "ActivationConfig::Tanh")]
        pub hidden_activation: ActivationConfig,
    }
    pub fn init(&self, device: &Device) -> BiLstm;
}

drop_in! {
    /// Long short-term memory, after [Hochreiter and Schmidhuber](https://www.researchgate.net/publication/13853244): per gate
    /// `a = x W + b + h U + d`, `i, f, o = sigmoid(a_i, a_f, a_o)`, `g = tanh(a_g)`, `c = f c + i g`, `h = o tanh(c)`, step by
    /// step; with `input_forget`, `f = 1 - i`.
    ///
    /// For the backward pass it keeps its gates, four tensors of the size of the output (three with `input_forget`), and its
    /// input if the weights are trainable; [`burn::nn::Lstm`] keeps a dozen such tensors. With activations other than sigmoid
    /// and tanh, or operands of different dtypes, Burn's own forward pass runs.
    ///
    /// For the compatibility of records, see [`burn::nn::Lstm`].
    ///
    /// ```
    /// use burn::tensor::{Device, Tensor};
    /// use burn_memsave_layers::nn::LstmConfig;
    ///
    /// let device = Device::flex();
    /// let lstm = LstmConfig::new(3, 4, true).init(&device);
    /// let (y, state) = lstm.forward(Tensor::ones([2, 5, 3], &device), None);
    /// assert_eq!((y.dims(), state.cell.dims()), ([2, 5, 4], [2, 4]));
    /// ```
    #[derive(Module, Debug)]
    pub struct Lstm as MemSaveLstm = burn::nn::Lstm, from_nn_lstm, into_nn_lstm {
        /// The input gate regulates which information to update and store in the cell state at each time step.
        pub input_gate: GateController,
        /// The forget gate is used to control which information to discard or keep in the memory cell at each time step.
        /// Absent when `input_forget` is true (forget = 1 - input).
        pub forget_gate: Option<GateController>,
        /// The output gate determines which information from the cell state to output at each time step.
        pub output_gate: GateController,
        /// The cell gate is used to compute the cell state that stores and carries information through time.
        pub cell_gate: GateController,
        /// The hidden state of the LSTM.
        pub d_hidden: usize,
        /// If true, input is `[batch_size, seq_length, input_size]`.
        /// If false, input is `[seq_length, batch_size, input_size]`.
        pub batch_first: bool,
        /// If true, process the sequence in reverse order.
        pub reverse: bool,
        /// Optional cell state clip threshold.
        pub clip: Option<f64>,
        /// If true, couples input and forget gates: f_t = 1 - i_t.
        pub input_forget: bool,
        /// Activation function for gates (input, forget, output).
        pub gate_activation: Activation,
        /// Activation function for cell gate (candidate cell state).
        pub cell_activation: Activation,
        /// Activation function for hidden output.
        pub hidden_activation: Activation,
    }
}

forward_methods! {
    /// Applies the layer to a sequence, starting from a state or from zeros. Returns the hidden states after all steps, and the
    /// last state.
    ///
    /// # Shapes
    ///
    /// - input: `[batch, steps, d_input]` if `batch_first`, else `[steps, batch, d_input]`
    /// - state: `[batch, d_hidden]` each
    /// - output: as the input, with `d_hidden` features
    Lstm: LstmState<2> => (Tensor<3>, LstmState<2>)
}

impl Lstm {
    fn forward_with(
        &self,
        batched_input: Tensor<3>,
        state: Option<LstmState<2>>,
        checkpoint: Option<usize>,
    ) -> (Tensor<3>, LstmState<2>) {
        let tracked = batched_input.is_tracked() || is_state_tracked(&state);
        let outcome = self.run(&batched_input, state.as_ref(), self.batch_first, self.reverse, checkpoint);
        match accepted("lstm", outcome, tracked, self, &self.input_gate) {
            Some((y, hidden, cell)) => (y, LstmState::new(cell, hidden)),
            None => self.clone().into_nn_lstm().forward(batched_input, state),
        }
    }

    /// Applies the layer to steps that come one by one. This calls [`burn::nn::Lstm::forward_iter`], and keeps what that keeps.
    pub fn forward_iter<I: Iterator<Item = (usize, Tensor<3>)>>(
        &self,
        input_timestep_iter: I,
        state: Option<LstmState<2>>,
        batch_size: usize,
        seq_length: usize,
        device: &Device,
    ) -> (Tensor<3>, LstmState<2>) {
        let mut steps = input_timestep_iter.peekable();
        let tracked = steps.peek().is_some_and(|(_, x)| x.is_tracked()) || is_state_tracked(&state);
        accepted::<Outcome>("lstm", Err(Misfit::StepByStep), tracked, self, &self.input_gate);
        self.clone().into_nn_lstm().forward_iter(steps, state, batch_size, seq_length, device)
    }

    fn run(
        &self,
        x: &Tensor<3>,
        state: Option<&LstmState<2>>,
        batch_first: bool,
        reverse: bool,
        checkpoint: Option<usize>,
    ) -> Result<Outcome, Misfit> {
        let others = [&self.cell_activation, &self.hidden_activation];
        require_sigmoid_and_tanh(&[&self.gate_activation], &others)?;
        let cell = Cell::Lstm { coupled: self.input_forget };
        let recurrence = Recurrence { cell, clip: self.clip, batch_first, reverse, checkpoint };
        let mut gates = vec![&self.input_gate, &self.output_gate, &self.cell_gate];
        if !self.input_forget {
            gates.push(self.forget_gate.as_ref().ok_or(Misfit::MissingParameter)?);
        }
        let (hidden, cell) = (state.map(|state| &state.hidden), state.map(|state| &state.cell));
        run(recurrence, x, hidden, cell, &gates)
    }
}

fn is_state_tracked<const D: usize>(state: &Option<LstmState<D>>) -> bool {
    state.as_ref().is_some_and(|state| state.cell.is_tracked() || state.hidden.is_tracked())
}

drop_in! {
    /// Two LSTMs that run over a sequence in opposite directions; their outputs are concatenated.
    ///
    /// Keeps for the backward pass what two [`Lstm`] keep.
    ///
    /// ```
    /// use burn::tensor::{Device, Tensor};
    /// use burn_memsave_layers::nn::BiLstmConfig;
    ///
    /// let device = Device::flex();
    /// let lstm = BiLstmConfig::new(3, 4, true).init(&device);
    /// let (y, state) = lstm.forward(Tensor::ones([2, 5, 3], &device), None);
    /// assert_eq!((y.dims(), state.cell.dims()), ([2, 5, 8], [2, 2, 4]));
    /// ```
    #[derive(Module, Debug)]
    pub struct BiLstm as MemSaveBiLstm = burn::nn::BiLstm, from_nn_bilstm, into_nn_bilstm {
        /// LSTM for the forward direction.
        pub forward: Lstm,
        /// LSTM for the reverse direction.
        pub reverse: Lstm,
        /// The size of the hidden state.
        pub d_hidden: usize,
        /// If true, input is `[batch_size, seq_length, input_size]`.
        /// If false, input is `[seq_length, batch_size, input_size]`.
        pub batch_first: bool,
    }
}

forward_methods! {
    /// Applies the layers to a sequence, starting from a state per direction or from zeros. Returns the hidden states after all
    /// steps, and the last state of each direction.
    ///
    /// # Shapes
    ///
    /// - input: `[batch, steps, d_input]` if `batch_first`, else `[steps, batch, d_input]`
    /// - state: `[2, batch, d_hidden]` each
    /// - output: as the input, with `2 * d_hidden` features
    BiLstm: LstmState<3> => (Tensor<3>, LstmState<3>)
}

impl BiLstm {
    fn forward_with(
        &self,
        batched_input: Tensor<3>,
        state: Option<LstmState<3>>,
        checkpoint: Option<usize>,
    ) -> (Tensor<3>, LstmState<3>) {
        let layer = |layer: &Lstm, index| {
            let of = |state: &LstmState<3>| {
                LstmState::new(direction(&state.cell, index), direction(&state.hidden, index))
            };
            let state = state.as_ref().map(of);
            // The second layer runs backwards whatever its own `reverse` says, as in Burn.
            layer.run(
                &batched_input,
                state.as_ref(),
                self.batch_first,
                index == 1 || layer.reverse,
                checkpoint,
            )
        };
        let two = |state: &LstmState<3>| state.cell.dims()[0] == 2 && state.hidden.dims()[0] == 2;
        let has_both = state.as_ref().is_none_or(two);
        let fit =
            require(self.forward.batch_first, Misfit::BatchFirst).and(require(has_both, Misfit::Shapes));
        let both = fit.and_then(|()| Ok((layer(&self.forward, 0)?, layer(&self.reverse, 1)?)));
        let tracked = batched_input.is_tracked() || is_state_tracked(&state);
        match accepted("lstm", both, tracked, self, &self.forward.input_gate) {
            Some(((forward, h, c), (reverse, first_h, first_c))) => {
                let stack = |last, first| Tensor::stack(vec![last, first], 0);
                (Tensor::cat(vec![forward, reverse], 2), LstmState::new(stack(c, first_c), stack(h, first_h)))
            }
            None => self.clone().into_nn_bilstm().forward(batched_input, state),
        }
    }
}
