//! The size of a Whisper.

/// The size of a Whisper.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct WhisperSize {
    /// The number of different tokens.
    pub vocabulary: usize,
    /// Numbers of a frame of sound.
    pub mels: usize,
    /// Places of the encoder's output: half as many as the frames of a sound.
    pub places: usize,
    /// The longest text.
    pub length: usize,
    /// Features.
    pub width: usize,
    /// Features between the two layers of a feed-forward block of the encoder.
    pub hidden: usize,
    /// Heads of attention in the encoder.
    pub heads: usize,
    /// Blocks of the encoder.
    pub layers: usize,
    /// As [`hidden`](Self::hidden), in the decoder.
    pub decoder_hidden: usize,
    /// As [`heads`](Self::heads), in the decoder.
    pub decoder_heads: usize,
    /// As [`layers`](Self::layers), in the decoder.
    pub decoder_layers: usize,
    /// The dropout rate.
    pub dropout: f64,
    /// That of attention weights in the encoder.
    pub attention_dropout: f64,
    /// That between the two layers of a feed-forward block.
    pub inner_dropout: f64,
}

impl WhisperSize {
    /// Whisper-tiny, multilingual.
    pub const TINY_MULTILINGUAL: Self = Self {
        vocabulary: 51_865,
        mels: 80,
        places: 1500,
        length: 448,
        width: 384,
        hidden: 1536,
        heads: 6,
        layers: 4,
        decoder_hidden: 1536,
        decoder_heads: 6,
        decoder_layers: 4,
        dropout: 0.0,
        attention_dropout: 0.0,
        inner_dropout: 0.0,
    };
}
