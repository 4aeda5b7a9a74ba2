//! Attention: the weights exist in blocks only, and are computed again in the backward pass.
pub use burn::nn::attention::*;

mod cross_attention;
mod mha;
mod weights;

pub use cross_attention::{
    CrossAttentionCache, CrossAttentionConfig, MemSaveCrossAttention, MemSaveCrossAttention as CrossAttention,
};
pub use mha::{
    MemSaveMultiHeadAttention, MemSaveMultiHeadAttention as MultiHeadAttention, MhaCache, MhaInput,
    MhaOutput, MultiHeadAttentionConfig,
};
pub use weights::AttentionWeights;
