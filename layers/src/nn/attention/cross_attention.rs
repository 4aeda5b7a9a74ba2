use super::weights::{Heads, scores, weight_dropout};
use crate::burn_internals::{displayed, displayed_in};
use crate::nn::cache::TensorCache;
use crate::nn::drop_in::{config_twin, drop_in};
use crate::nn::{Dropout, Linear};
use burn::config::Config;
use burn::module::{Flag, Module, ModuleMapper, ModuleVisitor, Param};
use burn::tensor::{Bool, Device, Tensor, assert_shape};
use core::any::Any;

/// Configuration of [`CrossAttention`]; the same as [`burn::nn::attention::CrossAttentionConfig`].
#[derive(Config, Debug)]
pub struct CrossAttentionConfig {
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

config_twin!(
    CrossAttentionConfig = burn::nn::attention::CrossAttentionConfig {
        d_model,
        d_context,
        n_heads,
        n_heads_kv,
        d_head,
        dropout,
        min_float,
        quiet_softmax
    }
);

/// Attention of queries to a context, whose heads may serve several heads of queries each.
///
/// Keeps what [`MultiHeadAttention`](super::MultiHeadAttention) keeps; keys and values are not repeated for the
/// heads that share them. [`burn::nn::attention::CrossAttention`] keeps the repeated ones and several tensors of queries times
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
#[module(custom_display)]
pub struct CrossAttention {
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

drop_in!(@from CrossAttention = burn::nn::attention::CrossAttention, from_nn_cross_attention, into_nn_cross_attention);
drop_in!(@display CrossAttention);

/// Parameters and flags of a module, in the order of its fields.
#[derive(Default)]
struct Parameters(Vec<Box<dyn Any>>);

impl ModuleVisitor for Parameters {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.0.push(Box::new(param.clone()));
    }
    fn visit_flag(&mut self, flag: &Param<Flag>) {
        self.0.push(Box::new(flag.clone()));
    }
}

/// Parameters that are taken one by one.
struct Taken<I>(I);

impl Taken<std::vec::IntoIter<Box<dyn Any>>> {
    fn of(module: &impl Module) -> Self {
        let mut parameters = Parameters::default();
        module.visit(&mut parameters);
        Self(parameters.0.into_iter())
    }
}

impl<I: Iterator<Item = Box<dyn Any>>> Taken<I> {
    fn next<T: 'static>(&mut self) -> Option<T> {
        self.0.next()?.downcast().ok().map(|parameter| *parameter)
    }

    fn linear(&mut self) -> Option<Linear> {
        Some(Linear { weight: self.next()?, bias: Some(self.next()?) })
    }
}

impl<I: Iterator<Item = Box<dyn Any>>> ModuleMapper for Taken<I> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        self.next().unwrap_or(param)
    }
    fn map_flag(&mut self, flag: Param<Flag>) -> Param<Flag> {
        self.next().unwrap_or(flag)
    }
}

impl CrossAttention {
    /// Converts the stock module; parameters keep their ids, values and settings, and stay shared with others.
    pub fn from_nn_cross_attention(stock: burn::nn::attention::CrossAttention) -> Self {
        let mut parameters = Taken::of(&stock);
        let mut linear = || parameters.linear().expect("burn 0.22.1 has four dense layers with a bias here");
        let (query, key, value, output) = (linear(), linear(), linear(), linear());
        let training = parameters.next().expect("burn 0.22.1 has a flag in a dropout layer");
        Self {
            query,
            key,
            value,
            output,
            dropout: Dropout { prob: displayed_in(&stock, "dropout", "prob"), training },
            n_heads: displayed(&stock, "n_heads"),
            n_heads_kv: displayed(&stock, "n_heads_kv"),
            d_head: displayed(&stock, "d_head"),
            scale: displayed(&stock, "scale"),
            min_float: displayed(&stock, "min_float"),
            quiet_softmax: displayed(&stock, "quiet_softmax"),
        }
    }

    /// Converts back to the stock module.
    pub fn into_nn_cross_attention(self) -> burn::nn::attention::CrossAttention {
        let d_input = |linear: &Linear| linear.weight.shape()[0];
        let config = burn::nn::attention::CrossAttentionConfig::new(
            d_input(&self.query),
            d_input(&self.key),
            self.n_heads,
            self.n_heads_kv,
            self.d_head,
        );
        let config = config
            .with_dropout(self.dropout.prob)
            .with_min_float(self.min_float)
            .with_quiet_softmax(self.quiet_softmax);
        config.init(&self.query.weight.lazy_device()).map(&mut Taken::of(&self))
    }

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

    /// [`forward`](Self::forward) with keys and values computed once, for the first context.
    ///
    /// # Panics
    ///
    /// As [`forward`](Self::forward).
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
        let (heads, shared, width) = (self.n_heads_kv, self.n_heads / self.n_heads_kv, self.d_head);
        let query = self.query.forward(query).reshape([batch, queries, self.n_heads, width]).swap_dims(1, 2);
        // Queries that share keys and values are more queries of one head.
        let query = match shared {
            1 => query,
            _ => query.reshape([batch, heads, shared * queries, width]),
        };
        let dropout = weight_dropout(&self.dropout, &query);
        let scores = scores(self.scale, self.min_float, self.quiet_softmax);
        let mask = mask.map(|mask| mask.unsqueeze_dims::<4>(&[1, 1]));
        let heads = Heads { query, key, mask, scores, dropout };
        let output = match shared {
            1 => heads.merged(value),
            _ => {
                let output = heads.weighted(value).reshape([batch, self.n_heads, queries, width]);
                output.swap_dims(1, 2).reshape([batch, queries, self.n_heads * width])
            }
        };
        self.output.forward(output)
    }

    /// `[batch, length, d_context]` to `[batch, heads, length, d_head]`.
    fn split(&self, x: Tensor<3>, linear: &Linear) -> Tensor<4> {
        let [batch, length, _] = x.dims();
        linear.forward(x).reshape([batch, length, self.n_heads_kv, self.d_head]).swap_dims(1, 2)
    }
}

impl CrossAttentionConfig {
    /// Initializes the module, as the stock config does.
    ///
    /// # Panics
    ///
    /// Panics for the values that the stock config refuses, with its message.
    pub fn init(&self, device: &Device) -> CrossAttention {
        burn::nn::attention::CrossAttentionConfig::from(self.clone()).init(device).into()
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
