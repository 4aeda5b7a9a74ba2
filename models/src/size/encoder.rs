//! The size of an encoder of text.

/// The size of an encoder of text.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct EncoderSize {
    /// The number of different tokens.
    pub vocabulary: usize,
    /// Features.
    pub width: usize,
    /// Features between the two layers of a feed-forward block.
    pub hidden: usize,
    /// Heads of attention.
    pub heads: usize,
    /// Blocks of attention and feed-forward layers.
    pub layers: usize,
    /// The longest sequence.
    pub length: usize,
    /// The row of the first token in the table of positions. If it is not 0, the row before it is that of padding.
    pub first_position: usize,
    /// The number of segment types. All tokens are of the first.
    pub segments: usize,
    /// What norms add to the variance.
    pub epsilon: f64,
    /// The dropout rate.
    pub dropout: f64,
    /// That of attention weights, if it is another one.
    pub attention_dropout: Option<f64>,
}

impl EncoderSize {
    /// BERT-base, uncased.
    pub const BERT_BASE: Self = Self {
        vocabulary: 30_522,
        width: 768,
        hidden: 3072,
        heads: 12,
        layers: 12,
        length: 512,
        first_position: 0,
        segments: 2,
        epsilon: 1e-12,
        dropout: 0.1,
        attention_dropout: None,
    };

    /// RoBERTa-base. Row 1 of its table of positions is that of padding, and row 0 is not used.
    pub const ROBERTA_BASE: Self =
        Self { vocabulary: 50_265, first_position: 2, segments: 1, epsilon: 1e-5, ..Self::BERT_BASE };

    /// A small size of the same kind, for tests.
    pub const fn tiny(self) -> Self {
        Self { vocabulary: 50, width: 24, hidden: 40, heads: 3, layers: 2, length: 12, dropout: 0.0, ..self }
    }
}
