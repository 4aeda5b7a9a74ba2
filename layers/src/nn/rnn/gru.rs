//! Configs of recurrent networks.
//!
//! The modules are those of Burn; their configs name an activation, and take ours.
pub use burn::nn::gru::*;

use crate::nn::activation::ActivationConfig;
use crate::nn::drop_in::config_into_stock;
use burn::config::Config;
use burn::nn::Initializer;
use burn::tensor::Device;

/// Configuration of [`Gru`](burn::nn::Gru); the same as [`burn::nn::GruConfig`].
#[derive(Config, Debug)]
pub struct GruConfig {
    /// The size of the input features.
    pub d_input: usize,
    /// The size of the hidden state.
    pub d_hidden: usize,
    /// If a bias should be applied during the Gru transformation.
    pub bias: bool,
    /// If reset gate should be applied after weight multiplication.
    ///
    /// This configuration option controls how the reset gate is applied to the hidden state.
    /// * `true` - (Default) Match the initial arXiv version of the paper [Learning Phrase Representations using RNN Encoder-Decoder for
    ///   Statistical Machine Translation (v1)](https://arxiv.org/abs/1406.1078v1) and apply the reset gate after multiplication by
    ///   the weights. This matches the behavior of [PyTorch GRU](https://pytorch.org/docs/stable/generated/torch.nn.GRU.html#torch.nn.GRU).
    /// * `false` - Match the most recent revision of [Learning Phrase Representations using RNN Encoder-Decoder for Statistical Machine
    ///   Translation (v3)](https://arxiv.org/abs/1406.1078) and apply the reset gate before the weight multiplication.
    ///
    /// The differing implementations can give slightly different numerical results and have different efficiencies. For more
    /// motivation for why the `true` can be more efficient see [Optimizing RNNs with Differentiable Graphs](https://svail.github.io/diff_graphs).
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

config_into_stock!(
    GruConfig = burn::nn::GruConfig {
        d_input,
        d_hidden,
        bias,
        reset_after,
        initializer,
        gate_activation,
        hidden_activation,
        clip
    }
);

impl GruConfig {
    /// Initializes the module, as the stock config does.
    pub fn init(&self, device: &Device) -> burn::nn::Gru {
        burn::nn::GruConfig::from(self.clone()).init(device)
    }
}

/// Configuration of [`BiGru`](burn::nn::BiGru); the same as [`burn::nn::BiGruConfig`].
#[derive(Config, Debug)]
pub struct BiGruConfig {
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

config_into_stock!(
    BiGruConfig = burn::nn::BiGruConfig {
        d_input,
        d_hidden,
        bias,
        reset_after,
        initializer,
        batch_first,
        gate_activation,
        hidden_activation,
        clip
    }
);

impl BiGruConfig {
    /// Initializes the module, as the stock config does.
    pub fn init(&self, device: &Device) -> burn::nn::BiGru {
        burn::nn::BiGruConfig::from(self.clone()).init(device)
    }
}
