//! Transformers.
//!
//! The modules are those of Burn; their configs name an activation, and take ours.
use crate::nn::activation::ActivationConfig;
use crate::nn::drop_in::config_into_stock;
use burn::config::Config;
use burn::nn::Initializer;
use burn::tensor::Device;

pub use burn::nn::transformer::*;

/// Configuration of [`PositionWiseFeedForward`]; the same as [`burn::nn::transformer::PositionWiseFeedForwardConfig`].
#[derive(Config, Debug)]
pub struct PositionWiseFeedForwardConfig {
    /// The size of the input and output features.
    pub d_model: usize,
    /// The size of the hidden inner features.
    pub d_ff: usize,
    /// The dropout rate. Default: 0.1
    #[config(default = 0.1)]
    pub dropout: f64,
    /// The type of function used to initialize neural network parameters
    #[config(
        default = "Initializer::KaimingUniform{gain:1.0/num_traits::Float::sqrt(3.0), fan_out_only:false}"
    )]
    pub initializer: Initializer,
    /// The activation function used between the two linear layers. Default: Gelu
    #[config(default = "ActivationConfig::Gelu")]
    pub activation: ActivationConfig,
}

config_into_stock!(
    PositionWiseFeedForwardConfig = burn::nn::transformer::PositionWiseFeedForwardConfig {
        d_model,
        d_ff,
        dropout,
        initializer,
        activation
    }
);

impl PositionWiseFeedForwardConfig {
    /// Initializes the module, as the stock config does.
    pub fn init(&self, device: &Device) -> burn::nn::transformer::PositionWiseFeedForward {
        burn::nn::transformer::PositionWiseFeedForwardConfig::from(self.clone()).init(device)
    }
}

/// Configuration of [`TransformerEncoder`]; the same as [`burn::nn::transformer::TransformerEncoderConfig`].
#[derive(Config, Debug)]
pub struct TransformerEncoderConfig {
    /// The size of the model.
    pub d_model: usize,
    /// The size of the position-wise feed-forward network.
    pub d_ff: usize,
    /// The number of attention heads.
    pub n_heads: usize,
    /// The number of layers.
    pub n_layers: usize,
    /// The dropout rate. Default: 0.1
    #[config(default = 0.1)]
    pub dropout: f64,
    /// Layer norm will be applied first instead of after the other modules.
    #[config(default = false)]
    pub norm_first: bool,
    /// Use "quiet softmax" instead of regular softmax.
    ///
    /// - Usage may improve performance by allowing attention heads to deposit no information (if the sequence contains no information relevant to that head).
    /// - Usage may reduce the entropy of weights in the model, enhancing quantization and compression.
    ///
    /// Reference: <https://www.evanmiller.org/attention-is-off-by-one.html>
    #[config(default = false)]
    pub quiet_softmax: bool,
    /// The type of function used to initialize neural network parameters
    #[config(
        default = "Initializer::KaimingUniform{gain:1.0/num_traits::Float::sqrt(3.0), fan_out_only:false}"
    )]
    pub initializer: Initializer,
    /// The activation function used in the position-wise feed-forward network. Default: Gelu
    #[config(default = "ActivationConfig::Gelu")]
    pub activation: ActivationConfig,
    /// The epsilon value for layer normalization. Default: 1e-5
    #[config(default = 1e-5)]
    pub layer_norm_eps: f64,
}

config_into_stock!(
    TransformerEncoderConfig = burn::nn::transformer::TransformerEncoderConfig {
        d_model,
        d_ff,
        n_heads,
        n_layers,
        dropout,
        norm_first,
        quiet_softmax,
        initializer,
        activation,
        layer_norm_eps
    }
);

impl TransformerEncoderConfig {
    /// Initializes the module, as the stock config does.
    pub fn init(&self, device: &Device) -> burn::nn::transformer::TransformerEncoder {
        burn::nn::transformer::TransformerEncoderConfig::from(self.clone()).init(device)
    }
}

/// Configuration of [`TransformerDecoder`]; the same as [`burn::nn::transformer::TransformerDecoderConfig`].
#[derive(Config, Debug)]
pub struct TransformerDecoderConfig {
    /// The size of the model.
    pub d_model: usize,
    /// The size of the position-wise feed-forward network.
    pub d_ff: usize,
    /// The number of attention heads.
    pub n_heads: usize,
    /// The number of layers.
    pub n_layers: usize,
    /// The dropout rate. Default: 0.1
    #[config(default = 0.1)]
    pub dropout: f64,
    /// Layer norm will be applied first instead of after the other modules.
    #[config(default = false)]
    pub norm_first: bool,
    /// Use "quiet softmax" instead of regular softmax.
    ///
    /// - Usage may improve performance by allowing attention heads to deposit no information (if the sequence contains no information relevant to that head).
    /// - Usage may reduce the entropy of weights in the model, enhancing quantization and compression.
    ///
    /// Reference: <https://www.evanmiller.org/attention-is-off-by-one.html>
    #[config(default = false)]
    pub quiet_softmax: bool,
    /// The type of function used to initialize neural network parameters
    #[config(
        default = "Initializer::KaimingUniform{gain:1.0/num_traits::Float::sqrt(3.0), fan_out_only:false}"
    )]
    pub initializer: Initializer,
    /// The activation function used in the position-wise feed-forward network. Default: Gelu
    #[config(default = "ActivationConfig::Gelu")]
    pub activation: ActivationConfig,
    /// The epsilon value for layer normalization. Default: 1e-5
    #[config(default = 1e-5)]
    pub layer_norm_eps: f64,
}

config_into_stock!(
    TransformerDecoderConfig = burn::nn::transformer::TransformerDecoderConfig {
        d_model,
        d_ff,
        n_heads,
        n_layers,
        dropout,
        norm_first,
        quiet_softmax,
        initializer,
        activation,
        layer_norm_eps
    }
);

impl TransformerDecoderConfig {
    /// Initializes the module, as the stock config does.
    pub fn init(&self, device: &Device) -> burn::nn::transformer::TransformerDecoder {
        burn::nn::transformer::TransformerDecoderConfig::from(self.clone()).init(device)
    }
}
