//! Multi-head attention, with its input, output and cache.
use super::weights::{AttentionWeights, Heads, scores, weight_dropout};
use crate::burn_next::masked_score;
use crate::nn::cache::TensorCache;
use crate::nn::drop_in::{config_twin, drop_in};
use crate::nn::{Dropout, Gelu, Linear};
use burn::config::Config;
use burn::module::Module;
use burn::nn::Initializer;
use burn::tensor::{Bool, Device, Tensor, assert_shape};

config_twin! {
    #[derive(Config, Debug)]
    pub struct MultiHeadAttentionConfig = burn::nn::attention::MultiHeadAttentionConfig {
        /// The size of each linear layer.
        pub d_model: usize,
        /// The number of heads.
        pub n_heads: usize,
        /// The dropout rate. Default: 0.1
        #[config(default = 0.1)]
        pub dropout: f64,
        /// The minimum value a float can take. Default: -1.0e4
        /// This is used to mask attention scores before calculating attention weights.
        /// A value too low might result in NaN.
        #[config(default = -1.0e4)]
        pub min_float: f64,
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
        /// Enable bias for the key [`Linear`] layer.
        #[config(default = true)]
        pub key_bias: bool,
        /// Enable bias for the value [`Linear`] layer.
        #[config(default = true)]
        pub value_bias: bool,
        /// Enable bias for the query [`Linear`] layer.
        #[config(default = true)]
        pub query_bias: bool,
        /// Enable bias for the output [`Linear`] layer.
        #[config(default = true)]
        pub output_bias: bool,
    }
    pub fn init(&self, device: &Device) -> MultiHeadAttention;
}

drop_in! {
    /// Multi-head attention after [Attention Is All You Need](https://arxiv.org/abs/1706.03762):
    /// `softmax(q k^T / sqrt(d_k)) v` in every head, between dense layers.
    ///
    /// In addition to what its dense layers keep, it keeps queries, keys and values, and under dropout one bit per weight.
    /// [`burn::nn::attention::MultiHeadAttention`] keeps several tensors of size queries x keys. On CPU backends, both drop the
    /// same weights with the same seed.
    ///
    /// ```
    /// use burn::tensor::{Device, Tensor};
    /// use burn_memsave_layers::nn::attention::{MhaInput, MultiHeadAttentionConfig};
    ///
    /// let device = Device::flex();
    /// let attention = MultiHeadAttentionConfig::new(8, 2).init(&device);
    /// let output = attention.forward(MhaInput::self_attn(Tensor::ones([3, 5, 8], &device)));
    /// assert_eq!(output.context.dims(), [3, 5, 8]);
    /// assert_eq!(output.weights.dims(), [3, 2, 5, 5]); // computed here
    /// ```
    #[derive(Module, Debug)]
    pub struct MultiHeadAttention as MemSaveMultiHeadAttention = burn::nn::attention::MultiHeadAttention,
        from_nn_multi_head_attention, into_nn_multi_head_attention {
        /// Linear layer to transform the input features into the query space.
        pub query: Linear,
        /// Linear layer to transform the input features into the key space.
        pub key: Linear,
        /// Linear layer to transform the input features into the value space.
        pub value: Linear,
        /// Linear layer to transform the output features back to the original space.
        pub output: Linear,
        /// Dropout layer.
        pub dropout: Dropout,
        /// Activation function.
        pub activation: Gelu,
        /// The size of each linear layer.
        pub d_model: usize,
        /// The number of heads.
        pub n_heads: usize,
        /// Size of the key and query vectors.
        pub d_k: usize,
        /// Minimum value a float can take.
        pub min_float: f64,
        /// Use "quiet softmax" instead of regular softmax.
        pub quiet_softmax: bool,
    }
}

/// Input of a [`MultiHeadAttention`].
#[derive(Debug, Clone)]
pub struct MhaInput {
    /// `[batch, queries, d_model]`
    query: Tensor<3>,
    /// `[batch, keys, d_model]`
    key: Tensor<3>,
    /// `[batch, keys, d_model]`
    value: Tensor<3>,
    mask_pad: Option<Tensor<2, Bool>>,
    mask_attn: Option<Tensor<3, Bool>>,
}

impl MhaInput {
    /// Self-attention: queries, keys and values from one tensor.
    ///
    /// # Shapes
    ///
    /// - tensor: `[batch_size, seq_length, d_model]`
    pub fn self_attn(tensor: Tensor<3>) -> Self {
        Self::new(tensor.clone(), tensor.clone(), tensor)
    }

    /// Queries, keys and values from three tensors.
    pub fn new(query: Tensor<3>, key: Tensor<3>, value: Tensor<3>) -> Self {
        Self { query, key, value, mask_pad: None, mask_attn: None }
    }

    /// Hides padding: every query ignores the keys where the mask `[batch_size, seq_length_2]` is true.
    pub fn mask_pad(mut self, mask_pad: Tensor<2, Bool>) -> Self {
        self.mask_pad = Some(mask_pad);
        self
    }

    /// Hides keys from queries where the mask `[batch_size, seq_length_1, seq_length_2]` is true.
    pub fn mask_attn(mut self, mask_attn: Tensor<3, Bool>) -> Self {
        self.mask_attn = Some(mask_attn);
        self
    }

    fn mask(&self) -> Option<Tensor<4, Bool>> {
        let attn = self.mask_attn.clone().map(|mask| mask.unsqueeze_dim::<4>(1));
        let pad = self.mask_pad.clone().map(|mask| mask.unsqueeze_dims::<4>(&[1, 1]));
        match (pad, attn) {
            (Some(pad), Some(attn)) => {
                let [batch, ..] = pad.dims();
                let [_, _, queries, keys] = attn.dims();
                let shape = [batch, 1, queries, keys];
                Some(pad.expand(shape).bool_or(attn.expand(shape)))
            }
            (pad, attn) => pad.or(attn),
        }
    }
}

/// Output of a [`MultiHeadAttention`]. Converting it into the output of the stock layer computes the weights.
#[derive(Debug, Clone)]
pub struct MhaOutput {
    /// The attention weights `[batch_size, n_heads, seq_length_1, seq_length_2]`, computed when they are first read.
    /// During training, dropout is applied to these weights after softmax, so rows may not sum to 1.
    pub weights: AttentionWeights,
    /// The context tensor `[batch_size, seq_length_1, d_model]`.
    pub context: Tensor<3>,
}

impl From<MhaOutput> for burn::nn::attention::MhaOutput {
    fn from(MhaOutput { weights, context }: MhaOutput) -> Self {
        Self { weights: weights.into_tensor(), context }
    }
}

impl MultiHeadAttention {
    /// Applies the layer.
    ///
    /// # Shapes
    ///
    /// - query: `[batch_size, seq_length_1, d_model]`
    /// - key: `[batch_size, seq_length_2, d_model]`
    /// - value: `[batch_size, seq_length_2, d_model]`
    /// - output: `[batch_size, seq_length_1, d_model]`
    ///
    /// # Panics
    ///
    /// Panics if the last axis of `query`, `key` or `value` is not `d_model`, if the batch size of `key` or `value` differs
    /// from `query`, if the sequence length of `value` differs from `key`, or if a mask has another shape.
    pub fn forward(&self, input: MhaInput) -> MhaOutput {
        self.run(input, None)
    }

    /// Applies the layer with a cache: after the first call, only the last position of the input is computed. (Under dropout
    /// the attention of all positions is computed, as in the stock layer.)
    ///
    /// # Shapes
    ///
    /// - query: `[batch_size, seq_length_1, d_model]`
    /// - key: `[batch_size, seq_length_2, d_model]`
    /// - value: `[batch_size, seq_length_2, d_model]`
    /// - output: `[batch_size, seq_length_1, d_model]`
    ///
    /// # Panics
    ///
    /// Panics as [`forward`](Self::forward) does.
    pub fn forward_cache(&self, input: MhaInput, cache: &mut MhaCache) -> MhaOutput {
        self.run(input, Some(cache))
    }

    pub(crate) fn run(&self, input: MhaInput, cache: Option<&mut MhaCache>) -> MhaOutput {
        self.check(&input);
        let mask = input.mask();
        let query = |x| self.split(x, &self.query);
        let key = |x| self.split(x, &self.key);
        let value = |x| self.split(x, &self.value);
        let output = |x| self.output.forward(x);
        let Some(cache) = cache else {
            let heads = self.heads(query(input.query), key(input.key), mask);
            let (context, weights) = heads.attend(value(input.value));
            return MhaOutput { weights, context: output(context) };
        };
        let heads = self.heads(
            cache.query.extend(input.query, 2, query),
            grown(cache.fixed, &mut cache.key, input.key, key),
            mask,
        );
        // All positions but the last are known, but dropout is drawn for all at once, as in stock.
        let last_only = !cache.output.is_empty() && heads.dropout.is_none();
        let queries = if last_only { heads.clone().last_query() } else { heads.clone() };
        let context = queries.merged(grown(cache.fixed, &mut cache.value, input.value, value));
        let context = cache.output.extend(context, 1, output);
        MhaOutput { weights: AttentionWeights::new(heads), context }
    }

    fn check(&self, input: &MhaInput) {
        let [batch_size, seq_length_1, _] = input.query.dims();
        let [_, seq_length_2, _] = input.key.dims();
        assert_shape!(input.query, [_, _, self.d_model]);
        assert_shape!(input.key, [batch_size, _, self.d_model]);
        assert_shape!(input.value, [batch_size, seq_length_2, self.d_model]);
        if let Some(mask) = &input.mask_pad {
            assert_shape!(mask, [batch_size, seq_length_2]);
        }
        if let Some(mask) = &input.mask_attn {
            assert_shape!(mask, [batch_size, seq_length_1, seq_length_2]);
        }
    }

    fn heads(&self, query: Tensor<4>, key: Tensor<4>, mask: Option<Tensor<4, Bool>>) -> Heads {
        let scale = f64::from((self.d_k as f32).sqrt()).recip(); // rounded as stock rounds it
        let dropout = weight_dropout(&self.dropout, &query);
        Heads {
            query,
            key,
            mask,
            scores: scores(scale, masked_score(self.min_float), self.quiet_softmax),
            dropout,
        }
    }

    /// `[batch, length, d_model]` to `[batch, heads, length, d_k]`.
    fn split(&self, x: Tensor<3>, linear: &Linear) -> Tensor<4> {
        let [batch_size, seq_length, _] = x.dims();
        linear.forward(x).reshape([batch_size, seq_length, self.n_heads, self.d_k]).swap_dims(1, 2)
    }
}

/// Cache of a [`MultiHeadAttention`], for inference token by token.
pub struct MhaCache {
    query: TensorCache<4>,
    key: TensorCache<4>,
    value: TensorCache<4>,
    output: TensorCache<3>,
    /// Whether keys and values never grow.
    fixed: bool,
}

impl MhaCache {
    /// Initialize a cache for autoregressive inference.
    pub fn autoregressive() -> Self {
        Self::new(false)
    }

    /// Initialize a cache for autoregressive inference, but with a fixed memory used for keys and values (cross-attention).
    pub fn autoregressive_cross_attention() -> Self {
        Self::new(true)
    }

    fn new(fixed: bool) -> Self {
        let heads = TensorCache::empty;
        Self { query: heads(), key: heads(), value: heads(), output: TensorCache::empty(), fixed }
    }
}

/// The cached keys or values, extended by the last position of the input. If they are `fixed`, they stay those of the first
/// input.
fn grown(
    fixed: bool,
    cache: &mut TensorCache<4>,
    x: Tensor<3>,
    f: impl FnOnce(Tensor<3>) -> Tensor<4>,
) -> Tensor<4> {
    match fixed {
        true => cache.once(x, f),
        false => cache.extend(x, 2, f),
    }
}
