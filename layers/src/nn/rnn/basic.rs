//! Configs of recurrent networks.
//!
//! The modules are those of Burn; their configs name an activation, and take ours.
pub use burn::nn::basic::*;

use crate::nn::activation::ActivationConfig;
use crate::nn::drop_in::config_into_stock;
use burn::config::Config;
use burn::nn::Initializer;
use burn::tensor::Device;

/// Configuration of [`Rnn`](burn::nn::Rnn); the same as [`burn::nn::RnnConfig`].
#[derive(Config, Debug)]
pub struct RnnConfig {
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

config_into_stock!(
    RnnConfig = burn::nn::RnnConfig {
        d_input,
        d_hidden,
        bias,
        initializer,
        batch_first,
        reverse,
        clip,
        hidden_activation
    }
);

impl RnnConfig {
    /// Initializes the module, as the stock config does.
    pub fn init(&self, device: &Device) -> burn::nn::Rnn {
        burn::nn::RnnConfig::from(self.clone()).init(device)
    }
}

/// Configuration of [`BiRnn`](burn::nn::BiRnn); the same as [`burn::nn::BiRnnConfig`].
#[derive(Config, Debug)]
pub struct BiRnnConfig {
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

config_into_stock!(
    BiRnnConfig =
        burn::nn::BiRnnConfig { d_input, d_hidden, bias, initializer, batch_first, clip, hidden_activation }
);

impl BiRnnConfig {
    /// Initializes the module, as the stock config does.
    pub fn init(&self, device: &Device) -> burn::nn::BiRnn {
        burn::nn::BiRnnConfig::from(self.clone()).init(device)
    }
}
