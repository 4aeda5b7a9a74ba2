//! Attention: the weights exist in blocks only, and are computed again in the backward pass.
pub use burn::nn::attention::*;

mod cross_attention;
mod mha;
mod weights;

pub use cross_attention::{
    CrossAttention, CrossAttention as MemSaveCrossAttention, CrossAttentionCache, CrossAttentionConfig,
};
pub use mha::{
    MhaCache, MhaInput, MhaOutput, MultiHeadAttention, MultiHeadAttention as MemSaveMultiHeadAttention,
    MultiHeadAttentionConfig,
};
pub use weights::AttentionWeights;
