//! Cross-attention, in which the queries of one sequence attend to another, the context.
use super::weights::{Heads, scores, weight_dropout};
use crate::burn_internals::{Parameters, displayed, displayed_in};
use crate::nn::cache::TensorCache;
use crate::nn::drop_in::{config_twin, drop_in};
use crate::nn::{Dropout, Linear};
use burn::config::Config;
use burn::module::Module;
use burn::tensor::{Bool, Device, Tensor, assert_shape};

config_twin! {
    #[derive(Config, Debug)]
    pub struct CrossAttentionConfig = burn::nn::attention::CrossAttentionConfig {
        /// Dimension of the Query (e.g., Decoder state).
        pub d_model: usize,
        /// Dimension of the Context (e.g., Encoder audio embeddings).
        pub d_context: usize,
        /// Number of heads for the Query.
        pub n_heads: usize,
        /// Number of heads for Key/Value (Set to 1 for MQA, set to n_heads for MHA).
        pub n_heads_kv: usize,
        /// Dimension of a single head.
        pub d_head: usize,
        /// Dropout rate.
        #[config(default = 0.1)]
        pub dropout: f64,
        /// Masking value. Use -1.0e4 for f16/bf16 safety.
        #[config(default = -1.0e4)]
        pub min_float: f64,
        /// Use quiet_softmax to allow zero-attention (good for sparse/quantized models).
        #[config(default = false)]
        pub quiet_softmax: bool,
    }
    pub fn init(&self, device: &Device) -> CrossAttention, or panics = from_config;
}

drop_in! {
    /// Attention of queries to a context, `softmax(q k^T / sqrt(d_head)) v` in every head, between dense layers. Several query
    /// heads may share a head of keys and values.
    ///
    /// Keeps what [`MultiHeadAttention`](super::MultiHeadAttention) keeps; keys and values are not repeated for the query
    /// heads that share them. [`burn::nn::attention::CrossAttention`] keeps them repeated, and several tensors of size queries x
    /// keys.
    ///
    /// ```
    /// use burn::tensor::{Device, Tensor};
    /// use burn_memsave_layers::nn::attention::CrossAttentionConfig;
    ///
    /// let device = Device::flex();
    /// let attention = CrossAttentionConfig::new(8, 6, 4, 2, 3).init(&device);
    /// let (query, context) = (Tensor::ones([2, 5, 8], &device), Tensor::ones([2, 7, 6], &device));
    /// assert_eq!(attention.forward(query, context, None).dims(), [2, 5, 8]);
    /// ```
    #[derive(Module, Debug)]
    pub struct CrossAttention as MemSaveCrossAttention = burn::nn::attention::CrossAttention,
        from_nn_cross_attention = from_stock, into_nn_cross_attention = into_stock, own display {
        query: Linear,
        key: Linear,
        value: Linear,
        output: Linear,
        dropout: Dropout,
        n_heads: usize,
        n_heads_kv: usize,
        d_head: usize,
        scale: f64,
        min_float: f64,
        quiet_softmax: bool,
    }
}

fn from_config(config: &CrossAttentionConfig, stock: burn::nn::attention::CrossAttention) -> CrossAttention {
    let mut parameters = Parameters::of(&stock);
    let mut linear = || Linear { weight: parameters.next(), bias: Some(parameters.next()) };
    let (query, key, value, output) = (linear(), linear(), linear(), linear());
    let dropout = Dropout { prob: config.dropout, training: parameters.next() };
    let CrossAttentionConfig { n_heads, n_heads_kv, d_head, min_float, quiet_softmax, .. } = *config;
    let scale = (d_head as f64).sqrt().recip();
    CrossAttention {
        query,
        key,
        value,
        output,
        dropout,
        n_heads,
        n_heads_kv,
        d_head,
        scale,
        min_float,
        quiet_softmax,
    }
}

fn from_stock(stock: burn::nn::attention::CrossAttention) -> CrossAttention {
    let config = CrossAttentionConfig {
        d_model: 0, // known from the parameters, like `d_context`
        d_context: 0,
        n_heads: displayed(&stock, "n_heads"),
        n_heads_kv: displayed(&stock, "n_heads_kv"),
        d_head: displayed(&stock, "d_head"),
        dropout: displayed_in(&stock, "dropout", "prob"),
        min_float: displayed(&stock, "min_float"),
        quiet_softmax: displayed(&stock, "quiet_softmax"),
    };
    let scale = displayed(&stock, "scale");
    CrossAttention { scale, ..from_config(&config, stock) }
}

fn into_stock(ours: CrossAttention) -> burn::nn::attention::CrossAttention {
    let d_input = |linear: &Linear| linear.weight.shape()[0];
    let config = burn::nn::attention::CrossAttentionConfig {
        d_model: d_input(&ours.query),
        d_context: d_input(&ours.key),
        n_heads: ours.n_heads,
        n_heads_kv: ours.n_heads_kv,
        d_head: ours.d_head,
        dropout: ours.dropout.prob,
        min_float: ours.min_float,
        quiet_softmax: ours.quiet_softmax,
    };
    config.init(&ours.query.weight.lazy_device()).map(&mut Parameters::of(&ours))
}

impl CrossAttention {
    /// Applies cross-attention to query using context as key and value.
    ///
    /// # Shapes
    ///
    /// - query: `[batch, seq_len_query, d_model]`
    /// - context: `[batch, seq_len_context, d_context]`
    /// - mask: `[batch, seq_len_context]`, true where the context is hidden
    /// - output: `[batch, seq_len_query, d_model]`
    ///
    /// # Panics
    ///
    /// Panics if the batch size of `context` differs from `query`, or if the mask has another shape.
    pub fn forward(&self, query: Tensor<3>, context: Tensor<3>, mask: Option<Tensor<2, Bool>>) -> Tensor<3> {
        let [batch, _, _] = query.dims();
        assert_shape!(context, [batch, _, _]);
        let key = self.split(context.clone(), &self.key);
        self.attend(query, key, self.split(context, &self.value), mask)
    }

    /// [`forward`](Self::forward) with a cache: keys and values are computed once, from the first context.
    ///
    /// # Panics
    ///
    /// Panics as [`forward`](Self::forward) does.
    pub fn forward_cache(
        &self,
        query: Tensor<3>,
        context: Tensor<3>,
        mask: Option<Tensor<2, Bool>>,
        cache: &mut CrossAttentionCache,
    ) -> Tensor<3> {
        let [batch, _, _] = query.dims();
        assert_shape!(context, [batch, _, _]);
        let key = cache.k.once(context.clone(), |context| self.split(context, &self.key));
        let value = cache.v.once(context, |context| self.split(context, &self.value));
        self.attend(query, key, value, mask)
    }

    fn attend(
        &self,
        query: Tensor<3>,
        key: Tensor<4>,
        value: Tensor<4>,
        mask: Option<Tensor<2, Bool>>,
    ) -> Tensor<3> {
        let [batch, queries, _] = query.dims();
        let [_, _, keys, _] = key.dims();
        if let Some(mask) = &mask {
            assert_shape!(mask, [batch, keys]);
        }
        let query =
            self.query.forward(query).reshape([batch, queries, self.n_heads, self.d_head]).swap_dims(1, 2);
        let dropout = weight_dropout(&self.dropout, &query);
        let scores = scores(self.scale, self.min_float, self.quiet_softmax);
        let mask = mask.map(|mask| mask.unsqueeze_dims::<4>(&[1, 1]));
        let heads = Heads { query, key, mask, scores, dropout };
        self.output.forward(heads.merged(value))
    }

    /// `[batch, length, d_context]` to `[batch, heads, length, d_head]`.
    fn split(&self, x: Tensor<3>, linear: &Linear) -> Tensor<4> {
        let [batch, length, _] = x.dims();
        linear.forward(x).reshape([batch, length, self.n_heads_kv, self.d_head]).swap_dims(1, 2)
    }
}

/// Cache of a [`CrossAttention`], for inference with one context.
pub struct CrossAttentionCache {
    /// Cached key tensor.
    pub k: TensorCache<4>,
    /// Cached value tensor.
    pub v: TensorCache<4>,
}

impl CrossAttentionCache {
    /// Create a new empty cache.
    pub fn new() -> Self {
        Self { k: TensorCache::empty(), v: TensorCache::empty() }
    }
}

impl Default for CrossAttentionCache {
    fn default() -> Self {
        Self::new()
    }
}
