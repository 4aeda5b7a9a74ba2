//! Scaled dot-product attention.
//!
//! | | |
//! | --- | --- |
//! | computes | `y = dropout(softmax(scores(q k^T))) v` over the keys; see [`Scores`] |
//! | keeps | handles of `q`, `k`, the mask and the bias if any input is tracked; |
//! | | of `v` if `q`, `k` or the bias is; a number per query; 1 bit per weight under dropout |
//! | backward | with `p` the weights, computed again from `q`, `k` and the number of the row: |
//! | | `dv = p^T dy`, `ds = p (dy v^T - sum(p dy v^T))`, `dq = ds k`, `dk = ds^T q`, `dbias = ds` |
//!
//! Nothing of the size of the weights, queries times keys, exists at any time but for those bits: chunks of a few MiB are made
//! and dropped, as in [arXiv 2112.05682](https://arxiv.org/abs/2112.05682) and
//! [arXiv 2205.14135](https://arxiv.org/abs/2205.14135). Memory grows linearly with the length of the sequence; stock Burn
//! keeps several tensors of the size of the weights.
use super::{
    MaybeTensor,
    kept::{Keeper, Kept},
};
use crate::backend::{Dropped, Inputs, MemBackend, Scores, plain_backends};
use burn::backend::{
    Backend, ExtensionType, TensorMetadata,
    autodiff::{
        Autodiff,
        checkpoint::{base::Checkpointer, strategy::CheckpointStrategy},
        grads::Gradients,
        ops::{Backward, NodeGuard, Ops, OpsKind},
    },
    backend_extension,
    tensor::{BoolTensor, FloatTensor},
};
use burn::tensor::Shape;
use std::any::Any;
use std::sync::{Arc, Mutex, PoisonError};

/// A mask that an operation may go without.
#[derive(ExtensionType)]
pub enum MaybeMask<B: Backend> {
    /// It is there.
    Some(BoolTensor<B>),
    /// It is not.
    None,
}

impl<B: Backend> From<Option<BoolTensor<B>>> for MaybeMask<B> {
    fn from(mask: Option<BoolTensor<B>>) -> Self {
        mask.map_or(Self::None, Self::Some)
    }
}

impl<B: Backend> MaybeMask<B> {
    /// As an option.
    pub fn into_option(self) -> Option<BoolTensor<B>> {
        match self {
            Self::Some(mask) => Some(mask),
            Self::None => None,
        }
    }
}

/// Dropout of the weights of an attention. What is dropped is drawn when it is first used; clones drop the same.
#[derive(Clone, Debug)]
pub struct WeightDropout {
    keep: f64,
    drawn: Arc<Mutex<Option<Box<dyn Any + Send>>>>,
}

impl WeightDropout {
    /// Zeroes weights with probability `prob`.
    pub fn new(prob: f64) -> Self {
        Self { keep: 1.0 - prob, drawn: Arc::default() }
    }

    /// What is dropped, drawn the first time.
    fn get<B: MemBackend>(&self, inputs: &Inputs<B>, scores: &Scores) -> Dropped<B::Mask> {
        let mut drawn = self.drawn.lock().unwrap_or_else(PoisonError::into_inner);
        let dropped = drawn.as_ref().and_then(|drawn| drawn.downcast_ref::<Dropped<B::Mask>>());
        let dropped = dropped.cloned().unwrap_or_else(|| inputs.drop_weights(scores, self.keep));
        *drawn = Some(Box::new(dropped.clone()));
        dropped
    }
}

/// How values are weighted.
#[derive(Clone, Debug)]
pub struct Attention {
    /// How scores are made.
    pub scores: Scores,
    /// What is dropped from the weights.
    pub dropout: Option<WeightDropout>,
    /// Whether the heads of the output are merged.
    pub merged: bool,
}

/// Attention.
#[backend_extension(
    Flex: cfg(feature = "flex"),
    NdArray: cfg(feature = "ndarray"),
    Cube: cfg(any(feature = "wgpu", feature = "cuda")),
    Remote: cfg(feature = "remote"),
    Autodiff
)]
pub trait AttentionOps: Backend {
    /// The values, weighted, `[batch, heads, queries, value_width]`, or `[batch, queries, heads * value_width]` if merged; query `[batch, heads, queries, width]`, key `[batch, heads, keys, width]`, value
    /// `[batch, heads, keys, value_width]`, mask (true: hidden) and bias `[batch, heads, queries, keys]` or 1 in place of any
    /// of them; nothing empty.
    fn memsave_attention(
        query: FloatTensor<Self>,
        key: FloatTensor<Self>,
        value: FloatTensor<Self>,
        #[extension_type] mask: MaybeMask<Self>,
        #[extension_type] bias: MaybeTensor<Self>,
        attention: Attention,
    ) -> FloatTensor<Self>;
}
plain_backends!(AttentionOps {
    fn memsave_attention(
        query: FloatTensor<Self>,
        key: FloatTensor<Self>,
        value: FloatTensor<Self>,
        mask: MaybeMask<Self>,
        bias: MaybeTensor<Self>,
        attention: Attention,
    ) -> FloatTensor<Self> {
        let inputs = Inputs::<Self> { query, key, mask: mask.into_option(), bias: bias.into_option() };
        let Attention { scores, dropout, merged } = attention;
        let dropped = dropout.map(|dropout| dropout.get(&inputs, &scores));
        merge_if::<Self>(merged, inputs.forward(value, &scores, dropped.as_ref(), false).0)
    }
});

impl<B: AttentionOps + MemBackend, C: CheckpointStrategy> AttentionOps for Autodiff<B, C> {
    fn memsave_attention(
        query: FloatTensor<Self>,
        key: FloatTensor<Self>,
        value: FloatTensor<Self>,
        mask: MaybeMask<Self>,
        bias: MaybeTensor<Self>,
        attention: Attention,
    ) -> FloatTensor<Self> {
        let (mask, nodes) = (mask.into_option(), [query.node(), key.node(), value.node()]);
        match bias.into_option() {
            None => record::<B, C, 3>(attention, [query, key, value], mask, None, nodes),
            Some(bias) => {
                let [query_node, key_node, value_node] = nodes;
                let nodes = [query_node, key_node, value_node, bias.node()];
                record::<B, C, 4>(attention, [query, key, value], mask, Some(bias), nodes)
            }
        }
    }
}

/// Merges the heads, which follow each other in memory.
fn merge_if<B: Backend>(merged: bool, y: FloatTensor<B>) -> FloatTensor<B> {
    if !merged {
        return y;
    }
    let [batch, heads, queries, width] = y.shape().dims();
    B::float_reshape(B::float_swap_dims(y, 1, 2), Shape::new([batch, queries, heads * width]))
}

fn record<B, C, const N: usize>(
    Attention { scores, dropout, merged }: Attention,
    [query, key, value]: [FloatTensor<Autodiff<B, C>>; 3],
    mask: Option<BoolTensor<B>>,
    bias: Option<FloatTensor<Autodiff<B, C>>>,
    parents: [NodeGuard; N],
) -> FloatTensor<Autodiff<B, C>>
where
    B: MemBackend,
    C: CheckpointStrategy,
{
    let inputs = Inputs::<B> {
        query: query.primitive().clone(),
        key: key.primitive().clone(),
        mask,
        bias: bias.as_ref().map(|bias| bias.primitive().clone()),
    };
    let dropped = dropout.map(|dropout| dropout.get(&inputs, &scores));
    match (Step { scores, merged }).prepare::<C>(parents).compute_bound().stateful() {
        OpsKind::Tracked(mut prep) => {
            let keeper = Keeper::new("attention", None);
            let weights_change =
                query.is_tracked() || key.is_tracked() || bias.as_ref().is_some_and(|bias| bias.is_tracked());
            let reason = "an input is tracked";
            let [query, key] =
                [("query", query), ("key", key)].map(|(name, x)| keeper.keep(&mut prep, name, &x, reason));
            let bias = bias.map(|bias| keeper.keep(&mut prep, "bias", &bias, reason));
            let kept_value = weights_change
                .then(|| keeper.keep(&mut prep, "value", &value, "query, key or bias is tracked"));
            let mask = inputs.mask.clone().map(|mask| keeper.keep_tensor("mask", mask, reason));
            let dropped = dropped.map(|dropped| Dropped {
                masks: dropped
                    .masks
                    .into_iter()
                    .map(|mask| keeper.keep_state("dropped", mask, reason))
                    .collect(),
                keep: dropped.keep,
            });
            let (y, log_sums) =
                inputs.forward(value.into_primitive(), &scores, dropped.as_ref(), weights_change);
            let log_sums = log_sums.map(|sums| keeper.keep_tensor("log_sums", sums, reason));
            let saved = Saved { query, key, value: kept_value, bias, mask, dropped, log_sums };
            prep.finish(saved, merge_if::<B>(merged, y))
        }
        OpsKind::UnTracked(prep) => {
            let (y, _) = inputs.forward(value.into_primitive(), &scores, dropped.as_ref(), false);
            prep.finish(merge_if::<B>(merged, y))
        }
    }
}

#[derive(Clone, Copy, Debug)]
struct Step {
    scores: Scores,
    /// Whether the heads of the output are one axis.
    merged: bool,
}

/// What the backward pass reads.
#[derive(Clone, Debug)]
struct Saved<B: MemBackend> {
    query: Kept,
    key: Kept,
    /// The values, if the weights change: if the queries, the keys or the bias are tracked.
    value: Option<Kept>,
    bias: Option<Kept>,
    mask: Option<BoolTensor<B>>,
    dropped: Option<Dropped<B::Mask>>,
    /// The logarithm of the sum of the exponentials of every row of scores, if the weights change.
    log_sums: Option<FloatTensor<B>>,
}

impl<B: MemBackend, const N: usize> Backward<B, N> for Step {
    type State = Saved<B>;

    fn backward(self, ops: Ops<Self::State, N>, grads: &mut Gradients, checkpointer: &mut Checkpointer) {
        let Self { scores, merged } = self;
        let mut dy = grads.consume::<B>(&ops.node);
        let Saved { query, key, value, bias, mask, dropped, log_sums } = ops.state;
        let mut get = |kept: Kept| kept.get::<B>(checkpointer);
        let inputs = Inputs::<B> { query: get(query), key: get(key), mask, bias: bias.map(&mut get) };
        if merged {
            let [batch, heads, ..] = inputs.query.shape().dims::<4>();
            let [_, queries, width] = dy.shape().dims();
            let split = Shape::new([batch, queries, heads, width / heads]);
            dy = B::float_swap_dims(B::float_reshape(dy, split), 1, 2);
        }
        let mut parents = ops.parents.into_iter();
        let nodes: [_; 4] = core::array::from_fn(|_| parents.next().flatten());
        let wanted = nodes.each_ref().map(Option::is_some);
        let results = match (value.map(get), log_sums) {
            (Some(value), Some(log_sums)) => {
                inputs.backward(value, &scores, dropped.as_ref(), log_sums, dy, wanted)
            }
            _ => [None, None, Some(inputs.value_backward(&scores, dropped.as_ref(), dy)), None],
        };
        for (node, grad) in nodes.into_iter().zip(results) {
            if let (Some(node), Some(grad)) = (node, grad) {
                grads.register::<B>(node.id, grad);
            }
        }
    }
}
