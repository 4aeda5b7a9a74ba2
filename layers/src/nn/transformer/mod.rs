//! Transformers, of layers that keep less.

mod decoder;
mod encoder;
mod pwff;

pub use decoder::{
    MemSaveTransformerDecoder, MemSaveTransformerDecoder as TransformerDecoder,
    MemSaveTransformerDecoderLayer, MemSaveTransformerDecoderLayer as TransformerDecoderLayer,
    TransformerDecoderAutoregressiveCache, TransformerDecoderConfig, TransformerDecoderInput,
    TransformerDecoderLayerAutoregressiveCache,
};
pub use encoder::{
    MemSaveTransformerEncoder, MemSaveTransformerEncoder as TransformerEncoder,
    MemSaveTransformerEncoderLayer, MemSaveTransformerEncoderLayer as TransformerEncoderLayer,
    TransformerEncoderAutoregressiveCache, TransformerEncoderConfig, TransformerEncoderInput,
    TransformerEncoderLayerAutoregressiveCache,
};
pub use pwff::{
    MemSavePositionWiseFeedForward, MemSavePositionWiseFeedForward as PositionWiseFeedForward,
    PositionWiseFeedForwardConfig,
};
