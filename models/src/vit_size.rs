//! The size of a vision transformer.

/// The size of a vision transformer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct VitSize {
    /// Height and width of images.
    pub image: [usize; 2],
    /// Height and width of patches. What is left at the end of rows and columns is not seen.
    pub patch: [usize; 2],
    /// Channels of images.
    pub channels: usize,
    /// Features.
    pub width: usize,
    /// Features between the two layers of a feed-forward block.
    pub hidden: usize,
    /// Heads of attention.
    pub heads: usize,
    /// Blocks of attention and feed-forward layers.
    pub layers: usize,
    /// Whether the dense layers of queries, keys and values have biases.
    pub input_biases: bool,
    /// What norms add to the variance.
    pub epsilon: f64,
    /// The dropout rate.
    pub dropout: f64,
    /// That of attention weights.
    pub attention_dropout: f64,
}

impl VitSize {
    /// ViT-base with patches of 16 x 16.
    pub const BASE: Self = Self {
        image: [224; 2],
        patch: [16; 2],
        channels: 3,
        width: 768,
        hidden: 3072,
        heads: 12,
        layers: 12,
        input_biases: true,
        epsilon: 1e-12,
        dropout: 0.0,
        attention_dropout: 0.0,
    };

    /// For tests.
    pub const TINY: Self =
        Self { image: [12; 2], patch: [4; 2], width: 24, hidden: 40, heads: 3, layers: 2, ..Self::BASE };

    /// One for each patch, and one for the whole image.
    pub const fn tokens(&self) -> usize {
        (self.image[0] / self.patch[0]) * (self.image[1] / self.patch[1]) + 1
    }
}
