//! The size of a decoder with rotary positions.
use super::cache_bytes;
use crate::RotaryStretch;
use burn::tensor::DType;

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
    /// The features of a head that are rotated, the first ones; all of them if `None`.
    pub rotated: Option<usize>,
    /// Which dense layers have biases.
    pub biases: Biases,
    /// Whether checkpoints have one layer for queries, keys and values, and one for both halves of a gate, as
    /// those of Phi-3. Adapters of Python's `peft` are for whole layers, so those of these layers cannot be
    /// loaded or saved.
    pub joined: bool,
    /// Whether queries and keys are normalized, head by head.
    pub normalizes_heads: bool,
    /// What norms add to the mean square.
    pub epsilon: f64,
    /// Whether the head is the embedding.
    pub tied: bool,
    /// If it is a Gemma.
    pub gemma: Option<Gemma>,
    /// If feed-forward layers are mixtures of experts.
    pub experts: Option<Experts>,
}

/// Which feed-forward layers of a decoder are mixtures of experts, and what they are. For every token, a router chooses some of the experts of
/// a layer: those with the largest of its probabilities `p = softmax(router(x))`. The output is the sum of `p_i expert_i(x)` over them. No loss
/// is added that would balance how often experts are chosen.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Experts {
    /// The experts of a layer.
    pub count: usize,
    /// The experts that are chosen for a token, from 1 to [`count`](Self::count). Other numbers panic when the
    /// model is made.
    pub chosen: usize,
    /// Features between the two layers of an expert.
    pub hidden: usize,
    /// Whether the probabilities of the chosen experts are divided by their sum.
    pub normalized: bool,
    /// Features between the two layers of an expert for all tokens, whose output is multiplied by the sigmoid of a dense layer with one output.
    /// `None`: there is no such expert.
    pub shared: Option<usize>,
    /// Every n-th layer has experts, the n-th is the first. Layers without experts have a feed-forward layer of [`DecoderSize::hidden`]
    /// features.
    pub every: usize,
    /// More layers without experts: bit `n` is layer `n`, from 0.
    pub without: u128,
}

impl Experts {
    /// Whether a layer has experts.
    pub(crate) fn are_in(&self, layer: usize) -> bool {
        let is_without = layer < u128::BITS as usize && self.without >> layer & 1 == 1;
        !is_without && (layer + 1).is_multiple_of(self.every)
    }

    const fn tiny(self) -> Self {
        let shared = if self.shared.is_some() { Some(20) } else { None };
        Self { count: 6, chosen: 2, hidden: 16, shared, ..self }
    }
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

impl DecoderSize {
    /// Features of a head.
    pub const fn head_width(&self) -> usize {
        match self.head {
            Some(width) => width,
            None => self.width / self.heads,
        }
    }

    /// Features of a head that are rotated.
    pub(crate) const fn rotated_width(&self) -> usize {
        match self.rotated {
            Some(width) => width,
            None => self.head_width(),
        }
    }

    /// The most bytes of keys and values of so many texts of up to this length, where whole [pages](crate::KeyValueCache) are stored in one
    /// dtype, and the model computes in another. Layers with a [window](Window) have fewer in the end.
    pub fn cache_bytes(&self, texts: usize, length: usize, stored: DType, computed: DType) -> u64 {
        cache_bytes([self.layers, self.key_heads, texts], self.head_width(), length, [stored, computed])
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
        stretch: Some(RotaryStretch::Llama3 { factor: 32.0, low: 1.0, high: 4.0, original_length: 8192.0 }),
        rotated: None,
        biases: Biases::NONE,
        joined: false,
        normalizes_heads: false,
        epsilon: 1e-5,
        tied: true,
        gemma: None,
        experts: None,
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
        rotated: None,
        biases: Biases::NONE,
        joined: false,
        normalizes_heads: false,
        epsilon: 1e-5,
        tied: false,
        gemma: None,
        experts: None,
    };

    /// Mixtral 8x7B, of 47 billion parameters, 13 of which compute a token.
    pub const MIXTRAL_8X7B: Self = Self {
        length: 32_768,
        window: None,
        theta: 1e6,
        experts: Some(Experts {
            count: 8,
            chosen: 2,
            hidden: 14_336,
            normalized: true,
            shared: None,
            every: 1,
            without: 0,
        }),
        ..Self::MISTRAL_7B
    };

    /// Qwen3 30B A3B, of 31 billion parameters, 3 of which compute a token.
    pub const QWEN3_30B_A3B: Self = Self {
        vocabulary: 151_936,
        width: 2048,
        hidden: 6144,
        heads: 32,
        key_heads: 4,
        head: Some(128),
        layers: 48,
        length: 40_960,
        window: None,
        theta: 1e6,
        stretch: None,
        rotated: None,
        biases: Biases::NONE,
        joined: false,
        normalizes_heads: true,
        epsilon: 1e-6,
        tied: false,
        gemma: None,
        experts: Some(Experts {
            count: 128,
            chosen: 8,
            hidden: 768,
            normalized: true,
            shared: None,
            every: 1,
            without: 0,
        }),
    };

    /// Phi-3 mini for sequences of 4096 tokens, of 3.8 billion parameters.
    pub const PHI_3_MINI_4K: Self = Self {
        vocabulary: 32_064,
        width: 3072,
        hidden: 8192,
        heads: 32,
        key_heads: 32,
        window: Some(Window::new(2047)),
        joined: true,
        ..Self::MISTRAL_7B
    };

    /// A small size of the same kind, for tests.
    pub const fn tiny(self) -> Self {
        let head = if self.head.is_some() { Some(8) } else { None };
        let rotated = if self.rotated.is_some() { Some(2) } else { None };
        let experts = match self.experts {
            Some(experts) => Some(experts.tiny()),
            None => None,
        };
        Self {
            vocabulary: 50,
            width: 24,
            hidden: 40,
            heads: 6,
            key_heads: 2,
            head,
            layers: 2,
            length: 12,
            rotated,
            experts,
            ..self
        }
    }
}
