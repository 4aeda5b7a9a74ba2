//! Attention layers, which compute their weights in blocks and recompute them in the backward pass.
pub use burn::nn::attention::*;

mod by_value;
mod cross_attention;
mod mha;
mod weights;

pub use cross_attention::{CrossAttention, CrossAttentionCache, CrossAttentionConfig, MemSaveCrossAttention};
pub use mha::{
    MemSaveMultiHeadAttention, MhaCache, MhaInput, MhaOutput, MultiHeadAttention, MultiHeadAttentionConfig,
};
pub use weights::AttentionWeights;
