//! The size of an encoder with a decoder.

/// The size of a T5.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct T5Size {
    /// The number of different tokens.
    pub vocabulary: usize,
    /// Features.
    pub width: usize,
    /// Features between the two layers of a feed-forward block.
    pub hidden: usize,
    /// Heads of attention.
    pub heads: usize,
    /// Features of a head.
    pub head: usize,
    /// Blocks of the encoder, and as many of the decoder.
    pub layers: usize,
    /// Blocks of the decoder, if they are not as many.
    pub decoder_layers: Option<usize>,
    /// Classes of distances between tokens.
    pub buckets: usize,
    /// The distance from which all distances share one class.
    pub distance: usize,
    /// Whether feed-forward layers have a gate with a GELU, as of version 1.1, instead of a ReLU.
    pub gated: bool,
    /// Whether the head is the embedding, as in version 1.0.
    pub tied: bool,
    /// Whether the head reads features that are divided by the square root of their number, as in version 1.0.
    pub scales_outputs: bool,
    /// The dropout rate.
    pub dropout: f64,
}

impl T5Size {
    /// T5-base, of 223 million parameters.
    pub const BASE: Self = Self {
        vocabulary: 32_128,
        width: 768,
        hidden: 3072,
        heads: 12,
        head: 64,
        layers: 12,
        decoder_layers: None,
        buckets: 32,
        distance: 128,
        gated: false,
        tied: true,
        scales_outputs: true,
        dropout: 0.1,
    };

    /// For tests; its heads together are wider than its features.
    pub const TINY: Self = Self {
        vocabulary: 50,
        width: 24,
        hidden: 40,
        heads: 4,
        head: 8,
        layers: 2,
        dropout: 0.0,
        ..Self::BASE
    };
}
