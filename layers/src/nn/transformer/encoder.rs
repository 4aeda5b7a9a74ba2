//! The transformer encoder, with its layers, input and caches.
use super::{PositionWiseFeedForward, PositionWiseFeedForwardConfig};
use crate::nn::activation::ActivationConfig;
use crate::nn::attention::{MhaCache, MhaInput, MultiHeadAttention, MultiHeadAttentionConfig};
use crate::nn::cache::{TensorCache, cached};
use crate::nn::drop_in::{config_twin, drop_in};
use crate::nn::{Dropout, DropoutConfig, LayerNorm, LayerNormConfig};
use burn::config::Config;
use burn::module::Module;
use burn::nn::Initializer;
use burn::tensor::{Bool, Device, Tensor};

config_twin! {
    #[derive(Config, Debug)]
    pub struct TransformerEncoderConfig = burn::nn::transformer::TransformerEncoderConfig {
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
        /// - Usage may improve performance by allowing attention heads to deposit no information (if the sequence contains no
        ///   information relevant to that head).
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
    pub fn init(&self, device: &Device) -> TransformerEncoder;
}

drop_in! {
    /// Transformer encoder after [Attention Is All You Need](https://arxiv.org/abs/1706.03762).
    ///
    /// Keeps for the backward pass what its layers keep, and nothing between a norm or an activation and the next dense layer.
    ///
    /// ```
    /// use burn::tensor::{Device, Tensor};
    /// use burn_memsave_layers::nn::transformer::{TransformerEncoderConfig, TransformerEncoderInput};
    ///
    /// let device = Device::flex();
    /// let encoder = TransformerEncoderConfig::new(8, 16, 2, 1).init(&device);
    /// let x = Tensor::ones([2, 5, 8], &device);
    /// assert_eq!(encoder.forward(TransformerEncoderInput::new(x)).dims(), [2, 5, 8]);
    /// ```
    #[derive(Module, Debug)]
    pub struct TransformerEncoder as MemSaveTransformerEncoder = burn::nn::transformer::TransformerEncoder,
        from_nn_transformer_encoder, into_nn_transformer_encoder {
        /// The transformer encoder layers.
        pub layers: Vec<TransformerEncoderLayer>,
        /// The size of the model.
        pub d_model: usize,
        /// The size of the position-wise feed-forward network.
        pub d_ff: usize,
        /// The number of attention heads.
        pub n_heads: usize,
        /// The number of layers.
        pub n_layers: usize,
        /// The dropout rate. Default: 0.1
        pub dropout: f64,
        /// Layer norm will be applied first instead of after the other modules.
        pub norm_first: bool,
        /// Use "quiet softmax" instead of regular softmax.
        pub quiet_softmax: bool,
    }
}

/// Input of a [`TransformerEncoder`].
#[derive(Debug)]
pub struct TransformerEncoderInput {
    tensor: Tensor<3>,
    masks: Masks,
}

/// Positions that attention must not see.
#[derive(Clone, Debug, Default)]
pub(super) struct Masks {
    /// `[batch, keys]`
    pub(super) pad: Option<Tensor<2, Bool>>,
    /// `[batch, queries, keys]`
    pub(super) attn: Option<Tensor<3, Bool>>,
}

impl Masks {
    pub(super) fn on(self, input: MhaInput) -> MhaInput {
        let input = self.pad.into_iter().fold(input, MhaInput::mask_pad);
        self.attn.into_iter().fold(input, MhaInput::mask_attn)
    }
}

impl TransformerEncoderInput {
    /// The input of an encoder, `[batch_size, seq_length, d_model]`.
    pub fn new(tensor: Tensor<3>) -> Self {
        Self { tensor, masks: Masks::default() }
    }

    /// Hides padding from all positions: the mask is true for padding, `[batch_size, seq_length]`.
    pub fn mask_pad(mut self, mask_pad: Tensor<2, Bool>) -> Self {
        self.masks.pad = Some(mask_pad);
        self
    }

    /// Hides keys from queries where the mask is true, `[batch_size, seq_length, seq_length]`.
    pub fn mask_attn(mut self, mask_attn: Tensor<3, Bool>) -> Self {
        self.masks.attn = Some(mask_attn);
        self
    }
}

impl TransformerEncoder {
    /// Applies the layers.
    ///
    /// # Shapes
    ///
    /// - tensor: `[batch_size, seq_length, d_model]`
    /// - output: `[batch_size, seq_length, d_model]`
    pub fn forward(&self, input: TransformerEncoderInput) -> Tensor<3> {
        let TransformerEncoderInput { tensor, masks } = input;
        self.layers.iter().fold(tensor, |x, layer| layer.run(x, masks.clone(), None))
    }

    /// Applies the layers with a cache: after the first call, only the last position of the input is computed.
    ///
    /// # Shapes
    ///
    /// - tensor: `[batch_size, seq_length, d_model]`
    /// - output: `[batch_size, seq_length, d_model]`
    ///
    /// # Panics
    ///
    /// Panics if the cache is of an encoder with fewer layers.
    pub fn forward_autoregressive_inference(
        &self,
        input: TransformerEncoderInput,
        cache: &mut TransformerEncoderAutoregressiveCache,
    ) -> Tensor<3> {
        assert!(cache.layers.len() >= self.layers.len(), "the cache of an encoder with fewer layers");
        let TransformerEncoderInput { tensor, masks } = input;
        let layers = self.layers.iter().zip(&mut cache.layers);
        layers.fold(tensor, |x, (layer, cache)| layer.run(x, masks.clone(), Some(cache)))
    }

    /// Create an empty autoregressive cache.
    pub fn new_autoregressive_cache(&self) -> TransformerEncoderAutoregressiveCache {
        let layers = self.layers.iter().map(|_| TransformerEncoderLayerAutoregressiveCache::empty());
        TransformerEncoderAutoregressiveCache { layers: layers.collect() }
    }
}

drop_in! {
    /// Layer of a [`TransformerEncoder`]: attention and a feed-forward network, each with a norm and a residual path.
    #[derive(Module, Debug)]
    pub struct TransformerEncoderLayer as MemSaveTransformerEncoderLayer =
        burn::nn::transformer::TransformerEncoderLayer, from_nn_transformer_encoder_layer, into_nn_transformer_encoder_layer, own display {
        /// Multi-head self-attention sub-layer.
        pub mha: MultiHeadAttention,
        /// Position-wise feed-forward sub-layer.
        pub pwff: PositionWiseFeedForward,
        /// Layer normalization applied around the feed-forward sub-layer.
        pub norm_1: LayerNorm,
        /// Layer normalization applied around the attention sub-layer.
        pub norm_2: LayerNorm,
        /// Dropout module applied to residual connections.
        pub dropout: Dropout,
        /// If `true`, apply layer normalization before sub-layers (pre-norm),
        /// otherwise apply it after (post-norm).
        pub norm_first: bool,
    }
}

impl TransformerEncoderLayer {
    /// Initializes a layer of the encoder that the config describes.
    pub fn new(config: &TransformerEncoderConfig, device: &Device) -> Self {
        let norm = LayerNormConfig::new(config.d_model).with_epsilon(config.layer_norm_eps);
        Self {
            mha: MultiHeadAttentionConfig::new(config.d_model, config.n_heads)
                .with_initializer(config.initializer.clone())
                .with_dropout(config.dropout)
                .with_quiet_softmax(config.quiet_softmax)
                .init(device),
            norm_1: norm.init(device),
            norm_2: norm.init(device),
            dropout: DropoutConfig::new(config.dropout).init(),
            pwff: PositionWiseFeedForwardConfig::new(config.d_model, config.d_ff)
                .with_initializer(config.initializer.clone())
                .with_dropout(config.dropout)
                .with_activation(config.activation.clone())
                .init(device),
            norm_first: config.norm_first,
        }
    }

    /// Applies the layer.
    ///
    /// # Shapes
    ///
    /// - input: `[batch_size, seq_length, d_model]`
    /// - output: `[batch_size, seq_length, d_model]`
    pub fn forward(
        &self,
        input: Tensor<3>,
        mask_pad: Option<Tensor<2, Bool>>,
        mask_attn: Option<Tensor<3, Bool>>,
    ) -> Tensor<3> {
        self.run(input, Masks { pad: mask_pad, attn: mask_attn }, None)
    }

    /// Applies the layer with a cache: after the first call, only the last position of the input is computed.
    pub fn forward_autoregressive_inference(
        &self,
        input: Tensor<3>,
        mask_pad: Option<Tensor<2, Bool>>,
        mask_attn: Option<Tensor<3, Bool>>,
        cache: &mut TransformerEncoderLayerAutoregressiveCache,
    ) -> Tensor<3> {
        self.run(input, Masks { pad: mask_pad, attn: mask_attn }, Some(cache))
    }

    fn run(
        &self,
        x: Tensor<3>,
        masks: Masks,
        cache: Option<&mut TransformerEncoderLayerAutoregressiveCache>,
    ) -> Tensor<3> {
        let [mut norm_1, mut norm_2, mut pwff] = [None, None, None];
        let mut attention = None;
        if let Some(cache) = cache {
            (norm_1, norm_2, pwff) =
                (Some(&mut cache.norm_1), Some(&mut cache.norm_2), Some(&mut cache.pwff));
            attention = Some(&mut cache.mha);
        }
        let mut norm_1 = |x| cached(norm_1.as_deref_mut(), x, |x| self.norm_1.forward(x));
        let mut norm_2 = |x| cached(norm_2.as_deref_mut(), x, |x| self.norm_2.forward(x));

        let residual = if self.norm_first { norm_2(x.clone()) } else { x.clone() };
        let input = masks.on(MhaInput::self_attn(residual));
        let residual = self.mha.run(input, attention).context;
        let x = x + self.dropout.forward(residual);

        let (x, residual) = if self.norm_first {
            (x.clone(), norm_1(x))
        } else {
            let x = norm_1(x);
            (x.clone(), x)
        };
        let residual = cached(pwff, residual, |x| self.pwff.forward(x));
        let x = x + self.dropout.forward(residual);
        if self.norm_first { x } else { norm_2(x) }
    }
}

/// Cache of a [`TransformerEncoderLayer`], for inference token by token.
pub struct TransformerEncoderLayerAutoregressiveCache {
    /// Multi-head attention cache.
    pub mha: MhaCache,
    /// Position-wise feed-forward cache.
    pub pwff: TensorCache<3>,
    /// First layer norm cache.
    pub norm_1: TensorCache<3>,
    /// Second layer norm cache.
    pub norm_2: TensorCache<3>,
}

impl TransformerEncoderLayerAutoregressiveCache {
    /// Create an empty cache.
    pub fn empty() -> Self {
        Self {
            mha: MhaCache::autoregressive(),
            pwff: TensorCache::empty(),
            norm_1: TensorCache::empty(),
            norm_2: TensorCache::empty(),
        }
    }
}

/// Cache of a [`TransformerEncoder`], for inference token by token.
pub struct TransformerEncoderAutoregressiveCache {
    layers: Vec<TransformerEncoderLayerAutoregressiveCache>,
}
