//! The transformer decoder, with its layers, input and caches.
use super::encoder::Masks;
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
    pub struct TransformerDecoderConfig = burn::nn::transformer::TransformerDecoderConfig {
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
    pub fn init(&self, device: &Device) -> TransformerDecoder;
}

drop_in! {
    /// Transformer decoder after [Attention Is All You Need](https://arxiv.org/abs/1706.03762).
    ///
    /// Keeps for the backward pass what its layers keep, and nothing between a norm or an activation and the next dense layer.
    ///
    /// ```
    /// use burn::tensor::{Device, Tensor};
    /// use burn_memsave_layers::nn::transformer::{TransformerDecoderConfig, TransformerDecoderInput};
    ///
    /// let device = Device::flex();
    /// let decoder = TransformerDecoderConfig::new(8, 16, 2, 1).init(&device);
    /// let (target, memory) = (Tensor::ones([2, 5, 8], &device), Tensor::ones([2, 7, 8], &device));
    /// assert_eq!(decoder.forward(TransformerDecoderInput::new(target, memory)).dims(), [2, 5, 8]);
    /// ```
    #[derive(Module, Debug)]
    pub struct TransformerDecoder as MemSaveTransformerDecoder = burn::nn::transformer::TransformerDecoder,
        from_nn_transformer_decoder, into_nn_transformer_decoder {
        /// Transformer decoder layers.
        pub layers: Vec<TransformerDecoderLayer>,
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

/// Input of a [`TransformerDecoder`].
#[derive(Debug)]
pub struct TransformerDecoderInput {
    target: Tensor<3>,
    target_masks: Masks,
    memory: Tensor<3>,
    memory_masks: Masks,
}

impl TransformerDecoderInput {
    /// The input of a decoder: target and memory, `[batch_size, seq_length, d_model]` each.
    pub fn new(target: Tensor<3>, memory: Tensor<3>) -> Self {
        Self { target, target_masks: Masks::default(), memory, memory_masks: Masks::default() }
    }

    /// Hides padding of the memory: the mask is true for padding, `[batch_size, memory_length]`.
    pub fn memory_mask_pad(mut self, mask_pad: Tensor<2, Bool>) -> Self {
        self.memory_masks.pad = Some(mask_pad);
        self
    }

    /// Hides the memory from target positions where the mask is true, `[batch_size, target_length, memory_length]`.
    pub fn memory_mask_attn(mut self, mask_attn: Tensor<3, Bool>) -> Self {
        self.memory_masks.attn = Some(mask_attn);
        self
    }

    /// Hides padding of the target: the mask is true for padding, `[batch_size, target_length]`.
    pub fn target_mask_pad(mut self, mask_pad: Tensor<2, Bool>) -> Self {
        self.target_masks.pad = Some(mask_pad);
        self
    }

    /// Hides target positions from each other where the mask is true, `[batch_size, target_length, target_length]`.
    pub fn target_mask_attn(mut self, mask_attn: Tensor<3, Bool>) -> Self {
        self.target_masks.attn = Some(mask_attn);
        self
    }
}

impl TransformerDecoder {
    /// Applies the layers. The output has the shape of the target, `[batch_size, target_length, d_model]`.
    pub fn forward(&self, input: TransformerDecoderInput) -> Tensor<3> {
        self.layers.iter().fold(input, |input, layer| layer.run(input, None)).target
    }

    /// Applies the layers with a cache: after the first call, only the last position of the target is computed.
    ///
    /// # Panics
    ///
    /// Panics if the cache is of a decoder with fewer layers.
    pub fn forward_autoregressive_inference(
        &self,
        input: TransformerDecoderInput,
        cache: &mut TransformerDecoderAutoregressiveCache,
    ) -> Tensor<3> {
        assert!(cache.layers.len() >= self.layers.len(), "the cache of a decoder with fewer layers");
        let layers = self.layers.iter().zip(&mut cache.layers);
        layers.fold(input, |input, (layer, cache)| layer.run(input, Some(cache))).target
    }

    /// Create an empty autoregressive cache.
    pub fn new_autoregressive_cache(&self) -> TransformerDecoderAutoregressiveCache {
        let layers = self.layers.iter().map(|_| TransformerDecoderLayerAutoregressiveCache::empty());
        TransformerDecoderAutoregressiveCache { layers: layers.collect() }
    }
}

drop_in! {
    /// Layer of a [`TransformerDecoder`]: attention to the target, attention to the memory and a feed-forward network, each
    /// with a norm and a residual path.
    #[derive(Module, Debug)]
    pub struct TransformerDecoderLayer as MemSaveTransformerDecoderLayer =
        burn::nn::transformer::TransformerDecoderLayer, from_nn_transformer_decoder_layer, into_nn_transformer_decoder_layer, own display {
        /// Cross-attention module.
        pub cross_attn: MultiHeadAttention,
        /// Self-attention module.
        pub self_attn: MultiHeadAttention,
        /// Position-wise feed-forward module.
        pub pwff: PositionWiseFeedForward,
        /// First layer norm.
        pub norm_1: LayerNorm,
        /// Second layer norm.
        pub norm_2: LayerNorm,
        /// Third layer norm.
        pub norm_3: LayerNorm,
        /// Dropout.
        pub dropout: Dropout,
        /// Whether to apply norm first.
        pub norm_first: bool,
    }
}

impl TransformerDecoderLayer {
    /// Initializes a layer of the decoder that the config describes.
    pub fn new(config: &TransformerDecoderConfig, device: &Device) -> Self {
        let attention = MultiHeadAttentionConfig::new(config.d_model, config.n_heads)
            .with_initializer(config.initializer.clone())
            .with_dropout(config.dropout)
            .with_quiet_softmax(config.quiet_softmax);
        let norm = LayerNormConfig::new(config.d_model).with_epsilon(config.layer_norm_eps);
        Self {
            self_attn: attention.init(device),
            cross_attn: attention.init(device),
            norm_1: norm.init(device),
            norm_2: norm.init(device),
            norm_3: norm.init(device),
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
    pub fn forward(&self, input: TransformerDecoderInput) -> TransformerDecoderInput {
        self.run(input, None)
    }

    /// Applies the layer with a cache: after the first call, only the last position of the target is computed.
    pub fn forward_autoregressive_inference(
        &self,
        input: TransformerDecoderInput,
        cache: &mut TransformerDecoderLayerAutoregressiveCache,
    ) -> TransformerDecoderInput {
        self.run(input, Some(cache))
    }

    fn run(
        &self,
        input: TransformerDecoderInput,
        cache: Option<&mut TransformerDecoderLayerAutoregressiveCache>,
    ) -> TransformerDecoderInput {
        let TransformerDecoderInput { target: x, target_masks, memory, memory_masks } = input;
        let (mut norm_1, mut norm_2, mut norm_3, mut pwff) = (None, None, None, None);
        let (mut self_attention, mut cross_attention) = (None, None);
        if let Some(cache) = cache {
            (norm_1, norm_2, norm_3) =
                (Some(&mut cache.norm_1), Some(&mut cache.norm_2), Some(&mut cache.norm_3));
            pwff = Some(&mut cache.pwff);
            (self_attention, cross_attention) = (Some(&mut cache.self_attn), Some(&mut cache.cross_attn));
        }
        let mut norm_1 = |x| cached(norm_1.as_deref_mut(), x, |x| self.norm_1.forward(x));
        let mut norm_2 = |x| cached(norm_2.as_deref_mut(), x, |x| self.norm_2.forward(x));
        let mut norm_3 = |x| cached(norm_3.as_deref_mut(), x, |x| self.norm_3.forward(x));
        // Applies the norm between two sub-layers. Returns the residual and the input of the next sub-layer.
        let norm_first = self.norm_first;
        let between = |x: Tensor<3>, norm: &mut dyn FnMut(Tensor<3>) -> Tensor<3>| {
            if norm_first {
                (x.clone(), norm(x))
            } else {
                let x = norm(x);
                (x.clone(), x)
            }
        };

        let residual = if norm_first { norm_3(x.clone()) } else { x.clone() };
        let attended = target_masks.clone().on(MhaInput::self_attn(residual));
        let residual = self.self_attn.run(attended, self_attention).context;
        let x = x + self.dropout.forward(residual);

        let (x, residual) = between(x, &mut norm_1);
        let attended = memory_masks.clone().on(MhaInput::new(residual, memory.clone(), memory.clone()));
        let residual = self.cross_attn.run(attended, cross_attention).context;
        let x = x + self.dropout.forward(residual);

        let (x, residual) = between(x, &mut norm_2);
        let residual = cached(pwff, residual, |x| self.pwff.forward(x));
        let x = x + self.dropout.forward(residual);
        let target = if norm_first { x } else { norm_3(x) };
        TransformerDecoderInput { target, target_masks, memory, memory_masks }
    }
}

/// Cache of a [`TransformerDecoderLayer`], for inference token by token.
pub struct TransformerDecoderLayerAutoregressiveCache {
    /// Cross-attention cache.
    pub cross_attn: MhaCache,
    /// Self-attention cache.
    pub self_attn: MhaCache,
    /// Position-wise feed-forward cache.
    pub pwff: TensorCache<3>,
    /// First layer norm cache.
    pub norm_1: TensorCache<3>,
    /// Second layer norm cache.
    pub norm_2: TensorCache<3>,
    /// Third layer norm cache.
    pub norm_3: TensorCache<3>,
}

impl TransformerDecoderLayerAutoregressiveCache {
    /// Create an empty cache.
    pub fn empty() -> Self {
        Self {
            cross_attn: MhaCache::autoregressive_cross_attention(),
            self_attn: MhaCache::autoregressive(),
            pwff: TensorCache::empty(),
            norm_1: TensorCache::empty(),
            norm_2: TensorCache::empty(),
            norm_3: TensorCache::empty(),
        }
    }
}

/// Cache of a [`TransformerDecoder`], for inference token by token.
pub struct TransformerDecoderAutoregressiveCache {
    layers: Vec<TransformerDecoderLayerAutoregressiveCache>,
}
