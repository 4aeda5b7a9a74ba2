//! The heads of an attention layer, from which its weights are computed, and [`AttentionWeights`], which are computed when they are
//! first read.
use crate::functional;
use crate::nn::Dropout;
use crate::ops::{Attention, Scores, WeightDropout};
use burn::tensor::{Bool, Tensor};
use core::ops::Deref;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

/// Heads of queries and keys, and how they become weights.
#[derive(Clone, Debug)]
pub(super) struct Heads {
    /// `[batch, heads, queries, width]`
    pub(super) query: Tensor<4>,
    /// `[batch, heads, keys, width]`, or fewer heads, each of which several query heads share.
    pub(super) key: Tensor<4>,
    /// True where a key is hidden; `[batch, heads, queries, keys]`, or 1 in place of any of them.
    pub(super) mask: Option<Tensor<4, Bool>>,
    pub(super) scores: Scores,
    pub(super) dropout: Option<WeightDropout>,
}

impl Heads {
    /// The weighted values, `[batch, heads, queries, width]`. `value` has as many heads as the keys.
    pub(super) fn weighted(self, value: Tensor<4>) -> Tensor<4> {
        self.apply(value, false)
    }

    /// [`weighted`](Self::weighted) with merged heads: `[batch, queries, heads * width]`.
    pub(super) fn merged(self, value: Tensor<4>) -> Tensor<3> {
        self.apply(value, true)
    }

    fn apply<const D: usize>(self, value: Tensor<4>, merged: bool) -> Tensor<D> {
        match value.is_tracked() && self.has_few_weights() {
            true => self.with_weights(value, merged).0,
            false => self.recomputing_weights(value, merged),
        }
    }

    /// The [`merged`](Self::merged) values, and the weights, which are computed now if they are few.
    pub(super) fn attend(self, value: Tensor<4>) -> (Tensor<3>, AttentionWeights) {
        if self.has_few_weights() {
            let (context, weights) = self.with_weights(value, true);
            return (context, weights.into());
        }
        (self.clone().recomputing_weights(value, true), AttentionWeights::new(self))
    }

    fn has_few_weights(&self) -> bool {
        functional::has_few_weights(&self.query, &self.key, &self.mask, &None)
    }

    fn with_weights<const D: usize>(self, value: Tensor<4>, merged: bool) -> (Tensor<D>, Tensor<4>) {
        let Self { query, key, mask, scores, dropout } = self;
        functional::with_weights(query, key, value, mask, None, Attention { scores, dropout, merged })
    }

    fn recomputing_weights<const D: usize>(self, value: Tensor<4>, merged: bool) -> Tensor<D> {
        let Self { query, key, mask, scores, dropout } = self;
        functional::weighted(query, key, value, mask, None, Attention { scores, dropout, merged })
    }

    /// The weights after dropout: the values are the rows of an identity matrix.
    fn weights(self) -> Tensor<4> {
        let [batch, n_heads, keys, _] = self.key.dims();
        let rows = Tensor::<2>::eye(keys, &self.key.device()).cast(self.key.dtype());
        self.weighted(rows.unsqueeze::<4>().expand([batch, n_heads, keys, keys]))
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

/// The scores of a module, with `min_float` for masked keys.
pub(super) fn scores(scale: f64, min_float: f64, quiet: bool) -> Scores {
    Scores { scale, softcap: None, causal: false, masked: min_float, quiet }
}

/// The dropout that a dropout layer applies to the weights. As in [`Dropout::forward`], it is active on an autodiff device
/// while `training` is enabled.
pub(super) fn weight_dropout(dropout: &Dropout, query: &Tensor<4>) -> Option<WeightDropout> {
    let active = dropout.training.is_enabled() && query.device().is_autodiff() && dropout.prob > 0.0;
    active.then(|| WeightDropout::new(dropout.prob))
}

/// Attention weights, `[batch, heads, queries, keys]`, computed when they are first read.
///
/// Until then, only handles of the queries and keys are held. Clones share the result. (Weights that need no gradient, and take
/// no more memory than the queries and keys, are computed at once.)
///
/// # In place of a `Tensor<4>`
///
/// They dereference to a tensor, and have the operators of [`Tensor`] and its methods that take `self` by value; all of these
/// compute the weights. So `output.weights.dims()`, `output.weights.mean_dim(3)` and `output.weights * 2.0` work as in
/// [`burn::nn::attention`]. Where Rust does not convert implicitly, convert explicitly:
///
/// - `let w: Tensor<4> = output.weights`, and wherever else a `Tensor<4>` is expected (an argument of a function or of
///   `Tensor::cat`, the second operand of a method, a field of a struct): [`into_tensor`](Self::into_tensor) or `into()`;
/// - a tensor that is assigned to the field of the output: `into()`;
/// - functions of [`Tensor`] called by their path, `Tensor::sum(output.weights)`, and code that is generic over tensors
///   (serialization) or takes `&mut Tensor<4>`: as in the first case.
///
/// Code that must compile with both layers converts to the output of the stock layer, whose weights are a tensor and are
/// computed then: `let output: burn::nn::attention::MhaOutput = layer.forward(input).into()`.
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use burn_memsave_layers::nn::attention::{MhaInput, MultiHeadAttentionConfig};
///
/// let device = Device::flex();
/// let attention = MultiHeadAttentionConfig::new(8, 2).init(&device);
/// let output = attention.forward(MhaInput::self_attn(Tensor::ones([3, 5, 8], &device)));
/// let per_query: Tensor<3> = output.weights.clone().mean_dim(1).squeeze_dim(1);
/// assert_eq!(per_query.dims(), [3, 5, 5]);
/// let weights: Tensor<4> = output.weights.into();
/// ```
#[derive(Clone, Debug)]
pub struct AttentionWeights(Arc<Lazy>);

#[derive(Debug)]
struct Lazy {
    /// What the weights are computed from; `None` once they are computed.
    heads: Mutex<Option<Heads>>,
    weights: OnceLock<Tensor<4>>,
}

impl Lazy {
    /// The weights. No lock is held while they are computed: in a thread pool, a thread that waits for a part of the
    /// computation may start another task that reads the weights, too. That task then also computes them, and all readers get
    /// the result that is stored first.
    fn get(&self) -> &Tensor<4> {
        let heads = || self.heads.lock().unwrap_or_else(PoisonError::into_inner);
        if self.weights.get().is_none() {
            let known = heads().clone();
            if let Some(known) = known {
                let _ = self.weights.set(known.weights()); // fails if another thread was first
                heads().take();
            }
        }
        self.weights.get().expect(THERE)
    }
}

const THERE: &str = "there before the heads are taken";

impl AttentionWeights {
    pub(super) fn new(heads: Heads) -> Self {
        Self(Arc::new(Lazy { heads: Mutex::new(Some(heads)), weights: OnceLock::new() }))
    }

    /// The weights.
    pub fn into_tensor(self) -> Tensor<4> {
        match Arc::try_unwrap(self.0) {
            Ok(Lazy { heads, weights }) => {
                let heads = heads.into_inner().unwrap_or_else(PoisonError::into_inner);
                // The heads move into the computation, so that nothing else holds them meanwhile.
                weights.into_inner().or_else(|| heads.map(Heads::weights)).expect(THERE)
            }
            Err(shared) => shared.get().clone(),
        }
    }
}

impl Deref for AttentionWeights {
    type Target = Tensor<4>;

    fn deref(&self) -> &Tensor<4> {
        self.0.get()
    }
}

impl From<Tensor<4>> for AttentionWeights {
    fn from(weights: Tensor<4>) -> Self {
        Self(Arc::new(Lazy { heads: Mutex::default(), weights: weights.into() }))
    }
}

impl From<AttentionWeights> for Tensor<4> {
    fn from(weights: AttentionWeights) -> Self {
        weights.into_tensor()
    }
}
