//! Scaled dot-product attention.
//!
//! | | |
//! | --- | --- |
//! | computes | `y = dropout(softmax(scores(q k^T))) v` over the keys; see [`Scores`] |
//! | keeps | handles of `q`, `k`, the mask and the bias if any input is tracked; with dropout, 1 bit per weight; |
//! | | a handle of `v` if `q`, `k` or the bias is tracked; |
//! | | only the weights if only `v` is tracked and they take no more memory than what they are computed from |
//! | backward | with `p` the weights, recomputed from `q` and `k`: |
//! | | `dv = p^T dy`, `ds = p (dy v^T - sum(p dy v^T))`, `dq = ds k`, `dk = ds^T q`, `dbias = ds` |
//!
//! The "weights" are the results of the softmax, one for each query and key. Except for the bits of dropout and weights that are kept
//! because they are few, no tensor has their size. They are computed and dropped in chunks, as in
//! [arXiv 2112.05682](https://arxiv.org/abs/2112.05682) and [arXiv 2205.14135](https://arxiv.org/abs/2205.14135), so memory grows linearly
//! with the length of the sequence. Burn's own operations ("stock Burn") keep several tensors of the size of the weights.
//!
//! A chunk has about 1 MiB of weights in f32 for every four threads on CPU backends. On device backends it has 64 MiB, or as much as keeps
//! a GPU busy. A chunk may be larger, by up to the size of the queries, if that makes it the only one.
//!
//! Heads may share keys and values in groups ([arXiv 2305.13245](https://arxiv.org/abs/2305.13245)). Keys and values are never repeated for
//! that: in a chunk, the queries of all heads of a group are the rows of one product.
//!
//! Dropout is drawn chunk by chunk. Since other kinds of devices have other chunks, they may drop other weights with the same seed.
//!
//! - [`chunks`]: how the weights are divided into chunks.
//! - [`chunked`]: the loop over the chunks, forward and backward.
//! - [`kernels`]: what is computed for a chunk.
//! - [`parts`] and [`sums`]: how the results of chunks become outputs and gradients.
//! - [`values`]: the operation whose weights are kept.
use crate::{
    backend::optional::{MaybeMask, MaybeTensor},
    graph::{BackwardPass, Inputs, KeepPlan, Operation, Recorder, Run, Tracking, extension, given},
};
use burn::backend::{
    Backend, ExtensionType, TensorMetadata,
    tensor::{BoolTensor, FloatTensor},
};
use burn::tensor::Shape;
use chunked::{DroppedWeights, Operands, Terms, Weighted};
use std::any::Any;
use std::sync::{Arc, Mutex, PoisonError};
use values::WeightsKept;

mod chunked;
mod chunks;
#[cfg(any(feature = "flex", feature = "ndarray"))]
mod cpu;
#[cfg(any(feature = "wgpu", feature = "cuda"))]
mod cube;
mod kernels;
mod parts;
mod sums;
mod values;

pub use kernels::{AttentionKernels, ScoreGrads, ScoreRows, Scores};

/// How values are weighted.
#[derive(Clone, Debug)]
pub struct Attention {
    /// How scores are made.
    pub scores: Scores,
    /// Dropout of the weights.
    pub dropout: Option<WeightDropout>,
    /// Whether the heads of the output are merged.
    pub merged: bool,
}

/// Dropout of the weights of an attention. It is drawn when it is first used; clones drop the same weights.
#[derive(Clone, Debug)]
pub struct WeightDropout {
    /// The probability that a weight is kept.
    keep: f64,
    drawn: Arc<Mutex<Option<Box<dyn Any + Send>>>>,
}

impl WeightDropout {
    /// Zeroes weights with probability `prob`.
    pub fn new(prob: f64) -> Self {
        Self { keep: 1.0 - prob, drawn: Arc::default() }
    }

    /// What is dropped; the first call draws it. In all calls queries and keys must have the same shapes.
    fn get<B: AttentionKernels>(&self, operands: &Operands<B>) -> DroppedWeights<B::Mask> {
        let mut drawn = self.drawn.lock().unwrap_or_else(PoisonError::into_inner);
        let known = drawn.as_ref().and_then(|drawn| drawn.downcast_ref::<DroppedWeights<B::Mask>>());
        let dropped = known.cloned().unwrap_or_else(|| operands.drop_weights(self.keep));
        *drawn = Some(Box::new(dropped.clone()));
        dropped
    }
}

/// The output of an attention, and its weights.
#[derive(ExtensionType)]
pub struct Attended<B: Backend> {
    /// The weighted values.
    pub output: FloatTensor<B>,
    /// The weights, `[batch, heads, queries, keys]`, after dropout; untracked.
    pub weights: FloatTensor<B>,
}

extension! {
    /// Attention.
    pub trait AttentionOps(AttentionKernels) {
        /// The weighted values, `[batch, heads, queries, value_width]`, or `[batch, queries, heads * value_width]` if merged;
        /// query `[batch, heads, queries, width]`, key `[batch, groups, keys, width]`, value
        /// `[batch, groups, keys, value_width]`, each group for `heads / groups` heads that follow each other, mask (true: hidden)
        /// and bias `[batch, heads, queries, keys]` or 1 in place of any of them; nothing empty.
        fn memsave_attention(
            query: FloatTensor<Self>,
            key: FloatTensor<Self>,
            value: FloatTensor<Self>,
            #[extension_type] mask: MaybeMask<Self>,
            #[extension_type] bias: MaybeTensor<Self>,
            attention: Attention,
        ) -> FloatTensor<Self> {
            let masked = MaskedAttention::<<Self as Run>::Plain> { attention, mask: mask.into_option() };
            Self::run(masked, [Some(query), Some(key), Some(value), bias.into_option()])
        }
        /// [`memsave_attention`](Self::memsave_attention) with its weights, which are kept. Only the value may be tracked.
        fn memsave_attention_with_weights(
            query: FloatTensor<Self>,
            key: FloatTensor<Self>,
            value: FloatTensor<Self>,
            #[extension_type] mask: MaybeMask<Self>,
            #[extension_type] bias: MaybeTensor<Self>,
            attention: Attention,
        ) -> Attended<Self> {
            let masked = MaskedAttention::<<Self as Run>::Plain> { attention, mask: mask.into_option() };
            let [query, key] = [query, key].map(Self::plain);
            let (operands, dropped) = masked.operands(query, key, bias.into_option().map(Self::plain));
            let Weighted { output, weights } =
                operands.forward(Self::primitive(&value), dropped.as_ref(), true);
            let (weights, merged) = (given(weights), masked.attention.merged);
            let kept = WeightsKept { output: merge::<<Self as Run>::Plain>(output, merged), weights: weights.clone(), merged };
            Attended { output: Self::run(kept, [Some(value)]), weights: Self::untracked(weights) }
        }
        /// Whether the weights take no more memory than what they are computed from, and fit into one tensor. Then whoever needs them
        /// again may keep them.
        fn memsave_has_few_weights(
            query: FloatTensor<Self>,
            key: FloatTensor<Self>,
            #[extension_type] mask: MaybeMask<Self>,
            #[extension_type] bias: MaybeTensor<Self>,
        ) -> bool {
            let [query, key] = [query, key].map(Self::plain);
            let (mask, bias) = (mask.into_option(), bias.into_option().map(Self::plain));
            chunked::has_few_weights::<<Self as Run>::Plain>(&query, &key, mask.as_ref(), bias.as_ref())
        }
    }
}

/// An attention, and its mask.
#[derive(Clone)]
struct MaskedAttention<B: Backend> {
    attention: Attention,
    mask: Option<BoolTensor<B>>,
}

const QUERY: usize = 0;
const KEY: usize = 1;
const VALUE: usize = 2;
const BIAS: usize = 3;

/// The reason to keep what the weights are computed from.
const TRACKED: &str = "an input is tracked";

impl<B: AttentionKernels> Operation<B, 4> for MaskedAttention<B> {
    const INPUTS: [&'static str; 4] = ["query", "key", "value", "bias"];
    type Saved = SavedAttention<B>;

    fn name(&self) -> &'static str {
        "attention"
    }

    fn plan(&self, inputs: &Tracking<B, 4>) -> KeepPlan<4> {
        let weights_change = [QUERY, KEY, BIAS].into_iter().any(|input| inputs.tracked(input));
        KeepPlan::nothing()
            .keep_if(true, QUERY, TRACKED)
            .keep_if(true, KEY, TRACKED)
            .keep_if(true, BIAS, TRACKED)
            .keep_if(weights_change, VALUE, "query, key or bias is tracked")
    }

    fn forward(&self, [query, key, value, bias]: Inputs<B, 4>) -> FloatTensor<B> {
        let (operands, dropped) = self.operands(given(query), given(key), bias);
        merge::<B>(operands.forward(given(value), dropped.as_ref(), false).output, self.attention.merged)
    }

    fn forward_saving(
        &self,
        [query, key, value, bias]: Inputs<B, 4>,
        recorder: &Recorder<4>,
    ) -> (FloatTensor<B>, SavedAttention<B>) {
        let report = recorder.report();
        let (operands, dropped) = self.operands(given(query), given(key), bias);
        let Weighted { output, .. } = operands.forward(given(value), dropped.as_ref(), false);
        let dropped = dropped.map(|DroppedWeights { masks, keep, elements }| {
            let masks = masks.into_iter().map(|mask| report.state("dropped", mask, TRACKED)).collect();
            DroppedWeights { masks, keep, elements }
        });
        let Attention { scores, merged, .. } = self.attention;
        let mask = self.mask.clone().map(|mask| report.tensor("mask", mask, TRACKED));
        (merge::<B>(output, merged), SavedAttention { scores, merged, mask, dropped })
    }

    fn backward(saved: SavedAttention<B>, dy: FloatTensor<B>, pass: &mut BackwardPass<B, 4>) {
        let SavedAttention { scores, merged, mask, dropped } = saved;
        let (query, key, bias) = (given(pass.take(QUERY)), given(pass.take(KEY)), pass.take(BIAS));
        let dy = if merged { split_heads::<B>(dy, query.shape()[1]) } else { dy };
        let operands = Operands::<B> { query, key, terms: Terms { mask, bias, scores } };
        match pass.take(VALUE) {
            Some(value) => {
                let wanted = [QUERY, KEY, VALUE, BIAS].map(|input| pass.wants(input));
                let give = |input, gradient| pass.give(input, gradient);
                operands.backward(value, dropped.as_ref(), dy, wanted, give);
            }
            None => pass.give(VALUE, operands.value_backward(dropped.as_ref(), dy)),
        }
    }
}

/// What the backward pass reads besides inputs.
#[derive(Clone, Debug)]
struct SavedAttention<B: AttentionKernels> {
    scores: Scores,
    /// Whether the heads of the output are merged.
    merged: bool,
    mask: Option<BoolTensor<B>>,
    dropped: Option<DroppedWeights<B::Mask>>,
}

impl<B: AttentionKernels> MaskedAttention<B> {
    /// What the weights are computed from, and which of them are dropped.
    fn operands(
        &self,
        query: FloatTensor<B>,
        key: FloatTensor<B>,
        bias: Option<FloatTensor<B>>,
    ) -> (Operands<B>, Option<DroppedWeights<B::Mask>>) {
        let terms = Terms { mask: self.mask.clone(), bias, scores: self.attention.scores };
        let operands = Operands { query, key, terms };
        let dropped = self.attention.dropout.as_ref().map(|dropout| dropout.get(&operands));
        (operands, dropped)
    }
}

/// The output, with merged heads if `merged`. Merging copies nothing, as the heads lie side by side in memory.
fn merge<B: Backend>(y: FloatTensor<B>, merged: bool) -> FloatTensor<B> {
    if !merged {
        return y;
    }
    let [batch, heads, queries, width] = y.shape().dims();
    B::float_reshape(B::float_swap_dims(y, 1, 2), Shape::new([batch, queries, heads * width]))
}

/// `[batch, queries, heads * width]` to `[batch, heads, queries, width]`.
fn split_heads<B: Backend>(dy: FloatTensor<B>, heads: usize) -> FloatTensor<B> {
    let [batch, queries, width] = dy.shape().dims();
    let split = Shape::new([batch, queries, heads, width / heads]);
    B::float_swap_dims(B::float_reshape(dy, split), 1, 2)
}
