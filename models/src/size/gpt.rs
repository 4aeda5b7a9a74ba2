//! The sizes of GPT-2, and of GPT-J and Phi.
use super::{Biases, DecoderSize, cache_bytes};
use crate::RotaryStretch;
use burn::tensor::DType;

/// The size of a GPT-2.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Gpt2Size {
    /// The number of different tokens.
    pub vocabulary: usize,
    /// Features. There are four times as many between the two layers of a feed-forward block.
    pub width: usize,
    /// Heads of attention.
    pub heads: usize,
    /// Blocks of attention and feed-forward layers.
    pub layers: usize,
    /// The longest sequence.
    pub length: usize,
    /// The dropout rate.
    pub dropout: f64,
}

impl Gpt2Size {
    /// GPT-2 of 124 million parameters.
    pub const SMALL: Self =
        Self { vocabulary: 50_257, width: 768, heads: 12, layers: 12, length: 1024, dropout: 0.1 };

    /// GPT-2 XL, of 1.6 billion parameters.
    pub const XL: Self = Self { width: 1600, heads: 25, layers: 48, ..Self::SMALL };

    /// As large as GPT-J, of 6 billion parameters: its width, heads, layers, length and vocabulary.
    pub const AS_GPT_J: Self =
        Self { vocabulary: 50_400, width: 4096, heads: 16, layers: 28, length: 2048, ..Self::SMALL };

    /// For tests.
    pub const TINY: Self = Self { vocabulary: 50, width: 24, heads: 3, layers: 2, length: 12, dropout: 0.0 };

    /// The most bytes of keys and values, as [`DecoderSize::cache_bytes`].
    pub fn cache_bytes(&self, texts: usize, length: usize, stored: DType, computed: DType) -> u64 {
        let head = self.width / self.heads.max(1);
        cache_bytes([self.layers, self.heads, texts], head, length, [stored, computed])
    }
}

/// The size of a decoder whose blocks compute attention and feed-forward layers from the same input: GPT-J, or Phi 1 to 2.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GptJSize {
    /// The number of different tokens.
    pub vocabulary: usize,
    /// Features.
    pub width: usize,
    /// Features between the two layers of a feed-forward block.
    pub hidden: usize,
    /// Heads of queries.
    pub heads: usize,
    /// Heads of keys and values, each of which serves `heads / key_heads` heads of queries.
    pub key_heads: usize,
    /// Blocks of attention and feed-forward layers.
    pub layers: usize,
    /// The longest sequence, for which rotations are tabulated.
    pub length: usize,
    /// The features of a head that are rotated, the first ones.
    pub rotated: usize,
    /// Whether the pairs of them that are rotated are from both halves, as in Phi, or neighbors, as in GPT-J. Names in checkpoints are of the same
    /// family.
    pub halves: bool,
    /// The base of the wavelengths of rotary positions.
    pub theta: f32,
    /// How these wavelengths were stretched for longer sequences.
    pub stretch: Option<RotaryStretch>,
    /// Whether the dense layers of attentions have biases, as all others.
    pub attention_biases: bool,
    /// What norms add to the variance.
    pub epsilon: f64,
    /// The dropout rate of what attentions and feed-forward layers add.
    pub dropout: f64,
    /// The dropout rate of embeddings.
    pub embedding_dropout: f64,
}

impl GptJSize {
    /// GPT-J of 6 billion parameters.
    pub const GPT_J_6B: Self = Self {
        vocabulary: 50_400,
        width: 4096,
        hidden: 16_384,
        heads: 16,
        key_heads: 16,
        layers: 28,
        length: 2048,
        rotated: 64,
        halves: false,
        theta: 10_000.0,
        stretch: None,
        attention_biases: false,
        epsilon: 1e-5,
        dropout: 0.0,
        embedding_dropout: 0.0,
    };

    /// Phi-2, of 2.8 billion parameters.
    pub const PHI_2: Self = Self {
        vocabulary: 51_200,
        width: 2560,
        hidden: 10_240,
        heads: 32,
        key_heads: 32,
        layers: 32,
        rotated: 32,
        halves: true,
        attention_biases: true,
        dropout: 0.1,
        ..Self::GPT_J_6B
    };

    /// A small size of the same kind, for tests.
    pub const fn tiny(self) -> Self {
        Self {
            vocabulary: 50,
            width: 24,
            hidden: 40,
            heads: 3,
            key_heads: 3,
            layers: 2,
            length: 12,
            rotated: 4,
            dropout: 0.0,
            embedding_dropout: 0.0,
            ..self
        }
    }

    /// With sequences of at most this length, for which rotations are tabulated.
    pub const fn with_length(self, length: usize) -> Self {
        Self { length, ..self }
    }

    /// The most bytes of keys and values, as [`DecoderSize::cache_bytes`].
    pub fn cache_bytes(&self, texts: usize, length: usize, stored: DType, computed: DType) -> u64 {
        self.attention().cache_bytes(texts, length, stored, computed)
    }

    pub(crate) const fn is_phi(&self) -> bool {
        self.halves
    }

    /// What is the same in other decoders.
    pub(crate) const fn attention(&self) -> DecoderSize {
        let &Self { width, heads, key_heads, layers, rotated, attention_biases, .. } = self;
        DecoderSize {
            width,
            heads,
            key_heads,
            layers,
            rotated: Some(rotated),
            window: None,
            biases: Biases { inputs: attention_biases, output: attention_biases, feed_forward: true },
            ..DecoderSize::MISTRAL_7B
        }
    }
}
