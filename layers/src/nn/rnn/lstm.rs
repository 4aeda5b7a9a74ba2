//! Configs of recurrent networks.
//!
//! The modules are those of Burn; their configs name an activation, and take ours.
pub use burn::nn::lstm::*;

use crate::nn::activation::ActivationConfig;
use crate::nn::drop_in::config_into_stock;
use burn::config::Config;
use burn::nn::Initializer;
use burn::tensor::Device;

/// Configuration of [`Lstm`](burn::nn::Lstm); the same as [`burn::nn::LstmConfig`].
#[derive(Config, Debug)]
pub struct LstmConfig {
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

config_into_stock!(
    LstmConfig = burn::nn::LstmConfig {
        d_input,
        d_hidden,
        bias,
        initializer,
        batch_first,
        reverse,
        clip,
        input_forget,
        gate_activation,
        cell_activation,
        hidden_activation
    }
);

impl LstmConfig {
    /// Initializes the module, as the stock config does.
    pub fn init(&self, device: &Device) -> burn::nn::Lstm {
        burn::nn::LstmConfig::from(self.clone()).init(device)
    }
}

/// Configuration of [`BiLstm`](burn::nn::BiLstm); the same as [`burn::nn::BiLstmConfig`].
#[derive(Config, Debug)]
pub struct BiLstmConfig {
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

config_into_stock!(
    BiLstmConfig = burn::nn::BiLstmConfig {
        d_input,
        d_hidden,
        bias,
        initializer,
        batch_first,
        clip,
        input_forget,
        gate_activation,
        cell_activation,
        hidden_activation
    }
);

impl BiLstmConfig {
    /// Initializes the module, as the stock config does.
    pub fn init(&self, device: &Device) -> burn::nn::BiLstm {
        burn::nn::BiLstmConfig::from(self.clone()).init(device)
    }
}
