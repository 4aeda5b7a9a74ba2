//! Transformer encoder, decoder and feed-forward network, built from the layers of this library.

mod decoder;
mod encoder;
mod pwff;

pub use decoder::*;
pub use encoder::*;
pub use pwff::*;
