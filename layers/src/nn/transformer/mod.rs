//! Transformers, of layers that keep less.

mod decoder;
mod encoder;
mod pwff;

pub use decoder::{
    TransformerDecoder, TransformerDecoder as MemSaveTransformerDecoder,
    TransformerDecoderAutoregressiveCache, TransformerDecoderConfig, TransformerDecoderInput,
    TransformerDecoderLayer, TransformerDecoderLayer as MemSaveTransformerDecoderLayer,
    TransformerDecoderLayerAutoregressiveCache,
};
pub use encoder::{
    TransformerEncoder, TransformerEncoder as MemSaveTransformerEncoder,
    TransformerEncoderAutoregressiveCache, TransformerEncoderConfig, TransformerEncoderInput,
    TransformerEncoderLayer, TransformerEncoderLayer as MemSaveTransformerEncoderLayer,
    TransformerEncoderLayerAutoregressiveCache,
};
pub use pwff::{
    PositionWiseFeedForward, PositionWiseFeedForward as MemSavePositionWiseFeedForward,
    PositionWiseFeedForwardConfig,
};
