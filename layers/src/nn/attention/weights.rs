use crate::backend::Scores;
use crate::functional;
use crate::nn::Dropout;
use crate::ops::{Attention, WeightDropout};
use burn::tensor::{Bool, Tensor};
use core::ops::Deref;
use std::sync::OnceLock;

/// Heads of queries and keys, and how they become weights.
#[derive(Clone, Debug)]
pub(super) struct Heads {
    /// `[batch, heads, queries, width]`
    pub(super) query: Tensor<4>,
    /// `[batch, heads, keys, width]`
    pub(super) key: Tensor<4>,
    /// True where a key is hidden; `[batch, heads, queries, keys]`, or 1 in place of any of them.
    pub(super) mask: Option<Tensor<4, Bool>>,
    pub(super) scores: Scores,
    pub(super) dropout: Option<WeightDropout>,
}

impl Heads {
    /// The values `[batch, heads, keys, width]`, weighted: `[batch, heads, queries, width]`.
    pub(super) fn weighted(self, value: Tensor<4>) -> Tensor<4> {
        self.apply(value, false)
    }

    /// [`weighted`](Self::weighted) with merged heads: `[batch, queries, heads * width]`.
    pub(super) fn merged(self, value: Tensor<4>) -> Tensor<3> {
        self.apply(value, true)
    }

    fn apply<const D: usize>(self, value: Tensor<4>, merged: bool) -> Tensor<D> {
        let Self { query, key, mask, scores, dropout } = self;
        functional::weighted(query, key, value, mask, None, Attention { scores, dropout, merged })
    }

    /// The last query alone.
    pub(super) fn last_query(self) -> Self {
        let last = |len: usize| len.saturating_sub(1)..len;
        let query = self.query.dims()[2];
        let mask = self.mask.map(|mask| {
            let queries = mask.dims()[2];
            mask.slice_dim(2, last(queries))
        });
        Self { query: self.query.slice_dim(2, last(query)), mask, ..self }
    }
}

/// Scores of a module: masked ones are `min_float`.
pub(super) fn scores(scale: f64, min_float: f64, quiet: bool) -> Scores {
    Scores { scale, softcap: None, causal: false, masked: min_float, quiet }
}

/// What a dropout layer does to weights: on an autodiff device while it is in training, as [`Dropout::forward`].
pub(super) fn weight_dropout(dropout: &Dropout, query: &Tensor<4>) -> Option<WeightDropout> {
    let active = dropout.training.is_enabled() && query.device().is_autodiff() && dropout.prob > 0.0;
    active.then(|| WeightDropout::new(dropout.prob))
}

/// The weights of an attention, `[batch, heads, queries, keys]`: computed when they are first read, and kept by nobody else.
///
/// It dereferences to the tensor. Until it is read it holds handles of the queries and keys.
#[derive(Debug)]
pub struct AttentionWeights {
    heads: Option<Box<Heads>>,
    weights: OnceLock<Tensor<4>>,
}

impl AttentionWeights {
    pub(super) fn new(heads: Heads) -> Self {
        Self { heads: Some(Box::new(heads)), weights: OnceLock::new() }
    }

    /// The weights.
    pub fn into_tensor(self) -> Tensor<4> {
        self.tensor();
        self.weights.into_inner().expect("just computed")
    }

    fn tensor(&self) -> &Tensor<4> {
        self.weights.get_or_init(|| {
            let heads = self.heads.as_ref().expect("there are heads, or weights").as_ref().clone();
            // Weighted rows of the identity are the weights, also after dropout.
            let [batch, n_heads, keys, _] = heads.key.dims();
            let rows = Tensor::<2>::eye(keys, &heads.key.device()).cast(heads.key.dtype());
            heads.weighted(rows.unsqueeze::<4>().expand([batch, n_heads, keys, keys]))
        })
    }
}

impl Deref for AttentionWeights {
    type Target = Tensor<4>;

    fn deref(&self) -> &Tensor<4> {
        self.tensor()
    }
}

impl From<Tensor<4>> for AttentionWeights {
    fn from(weights: Tensor<4>) -> Self {
        Self { heads: None, weights: OnceLock::from(weights) }
    }
}

impl From<AttentionWeights> for Tensor<4> {
    fn from(weights: AttentionWeights) -> Self {
        weights.into_tensor()
    }
}
