//! The sizes of text models: published ones, and small ones for tests.
use crate::cache::PAGE;
use burn::tensor::DType;
use core::f64::consts::PI;

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
    /// The row of the first token in the table of positions.
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

    /// RoBERTa-base. The first two rows of its table of positions are for padding, which is not used here.
    pub const ROBERTA_BASE: Self =
        Self { vocabulary: 50_265, first_position: 2, segments: 1, epsilon: 1e-5, ..Self::BERT_BASE };

    /// A small size of the same kind, for tests.
    pub const fn tiny(self) -> Self {
        Self { vocabulary: 50, width: 24, hidden: 40, heads: 3, layers: 2, length: 12, dropout: 0.0, ..self }
    }
}

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
        cache_bytes([self.layers, self.width, texts, 1], length, stored, computed)
    }
}

/// The most bytes of so many keys, and as many values, for each token of up to this length.
fn cache_bytes(features: [usize; 4], length: usize, stored: DType, computed: DType) -> u64 {
    let bytes = |length: usize| {
        let tail = length % PAGE;
        ((length - tail) as u64).saturating_mul(stored.size() as u64) + (tail * computed.size()) as u64
    };
    // Those of a page that is not complete may be more than those of one that is.
    let most = bytes(length).max(bytes((length / PAGE * PAGE).saturating_sub(1)));
    features.iter().fold(most.saturating_mul(2), |bytes, &count| bytes.saturating_mul(count as u64))
}

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

/// The size of a decoder in the style of Llama.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DecoderSize {
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
    /// Features of a head; `width / heads` if `None`.
    pub head: Option<usize>,
    /// Blocks of attention and feed-forward layers.
    pub layers: usize,
    /// The longest sequence, for which rotations are tabulated.
    pub length: usize,
    /// If each token does not see all tokens before it.
    pub window: Option<Window>,
    /// The base of the wavelengths of rotary positions.
    pub theta: f32,
    /// How these wavelengths were stretched for longer sequences.
    pub stretch: Option<RotaryStretch>,
    /// Which dense layers have biases.
    pub biases: Biases,
    /// Whether queries and keys are normalized, head by head.
    pub normalizes_heads: bool,
    /// What norms add to the mean square.
    pub epsilon: f64,
    /// Whether the head is the embedding.
    pub tied: bool,
    /// If it is a Gemma.
    pub gemma: Option<Gemma>,
}

/// How many tokens each token sees.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Window {
    /// Itself and those before it, so many in all.
    pub tokens: usize,
    /// Every n-th layer sees all tokens.
    pub full_every: Option<usize>,
    /// The base of the wavelengths of rotary positions in layers with the window, which are not stretched. `None`: as in other layers.
    pub theta: Option<f32>,
}

impl Window {
    /// The same in all layers.
    pub const fn new(tokens: usize) -> Self {
        Self { tokens, full_every: None, theta: None }
    }

    /// Whether a layer has it.
    pub(crate) fn is_of(&self, layer: usize) -> bool {
        self.full_every.is_none_or(|every| !(layer + 1).is_multiple_of(every))
    }
}

/// What only Gemmas have: GELUs instead of SiLUs in gates, norms that multiply with `1 + gamma`, and embeddings that are multiplied with the
/// square root of the width. In half precision `1 + gamma` is rounded, which `transformers` computes in f32.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Gemma {
    /// Whether the outputs of attentions and of feed-forward layers are normalized, too.
    pub normalizes_outputs: bool,
    /// What products of queries and keys are multiplied with; the inverse square root of the features of a head if `None`.
    pub attention_scale: Option<f64>,
    /// The softcap `c tanh(x / c)` of the products of queries and keys.
    pub attention_softcap: Option<f64>,
    /// The softcap of logits.
    pub logit_softcap: Option<f64>,
}

/// The dense layers of a decoder that have biases.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Biases {
    /// Those of queries, keys and values.
    pub inputs: bool,
    /// The one after an attention.
    pub output: bool,
    /// Those of feed-forward layers.
    pub feed_forward: bool,
}

impl Biases {
    /// None of them.
    pub const NONE: Self = Self { inputs: false, output: false, feed_forward: false };
}

/// How the wavelengths of rotary positions are stretched: `rope_type` `llama3`, or [`linear`](Self::linear).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RotaryStretch {
    /// The factor by which long wavelengths are stretched.
    pub factor: f64,
    /// Wavelengths that fit fewer times than this into the original length are long.
    pub low: f64,
    /// Wavelengths that fit more times than this into it are short, and stay as they are.
    pub high: f64,
    /// The longest sequence before the stretching.
    pub original_length: f64,
}

impl RotaryStretch {
    /// All wavelengths alike: `rope_type` `linear`.
    pub const fn linear(factor: f64) -> Self {
        // No wavelength fits into nothing, so all of them are long.
        Self { factor, low: 1.0, high: 2.0, original_length: 0.0 }
    }

    /// The stretched frequency, the inverse of a wavelength, for `2 pi` of them.
    pub(crate) fn stretched(&self, frequency: f64) -> f64 {
        let fits = frequency * self.original_length / (2.0 * PI);
        let short = ((fits - self.low) / (self.high - self.low)).clamp(0.0, 1.0);
        frequency * (short + (1.0 - short) / self.factor)
    }
}

impl DecoderSize {
    /// Features of a head.
    pub const fn head_width(&self) -> usize {
        match self.head {
            Some(width) => width,
            None => self.width / self.heads,
        }
    }

    /// The most bytes of keys and values of so many texts of up to this length, where whole [pages](crate::KeyValueCache) are stored in one
    /// dtype, and the model computes in another.
    pub fn cache_bytes(&self, texts: usize, length: usize, stored: DType, computed: DType) -> u64 {
        cache_bytes([self.layers, self.key_heads, self.head_width(), texts], length, stored, computed)
    }

    /// With sequences of at most this length, for which rotations are tabulated: 8 bytes for each token and each feature of a head,
    /// twice that if layers with a [window](Window::theta) have other ones.
    pub const fn with_length(self, length: usize) -> Self {
        Self { length, ..self }
    }

    /// Llama 3.2 of 1.2 billion parameters.
    pub const LLAMA_3_2_1B: Self = Self {
        vocabulary: 128_256,
        width: 2048,
        hidden: 8192,
        heads: 32,
        key_heads: 8,
        head: None,
        layers: 16,
        length: 131_072,
        window: None,
        theta: 500_000.0,
        stretch: Some(RotaryStretch { factor: 32.0, low: 1.0, high: 4.0, original_length: 8192.0 }),
        biases: Biases::NONE,
        normalizes_heads: false,
        epsilon: 1e-5,
        tied: true,
        gemma: None,
    };

    /// Mistral 7B, version 0.1, for sequences as long as its window.
    pub const MISTRAL_7B: Self = Self {
        vocabulary: 32_000,
        width: 4096,
        hidden: 14_336,
        heads: 32,
        key_heads: 8,
        head: None,
        layers: 32,
        length: 4096,
        window: Some(Window::new(4096)),
        theta: 10_000.0,
        stretch: None,
        biases: Biases::NONE,
        normalizes_heads: false,
        epsilon: 1e-5,
        tied: false,
        gemma: None,
    };

    /// A small size of the same kind, for tests.
    pub const fn tiny(self) -> Self {
        Self { vocabulary: 50, width: 24, hidden: 40, heads: 6, key_heads: 2, layers: 2, length: 12, ..self }
    }
}
