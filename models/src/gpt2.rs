// GPT-2, written once, with the topology of Hugging Face except for the dropout of attention weights, which `attention` does not have.
// The module that includes this file chooses `nn`, `attention` and `linear`, and provides `next_token_loss`.
use crate::cache::Part;
use crate::hugging_face::{HuggingFace, replaced};
use crate::{Decoder, Gpt2Size};
use burn::module::Module;
use burn::tensor::{Device, Int, Tensor, ops::AttentionModuleOptions};
use burn_memsave::plan;
use burn_store::{IdentityAdapter, ModuleAdapter};
use nn::activation::Gelu;
use nn::{
    Dropout, DropoutConfig, Embedding, EmbeddingConfig, Initializer, LayerNorm, LayerNormConfig, Linear,
    LinearConfig,
};

/// Causal attention.
#[derive(Module, Debug)]
pub struct Attention {
    /// Queries, keys and values.
    qkv: Linear,
    output: Linear,
    heads: usize,
}

impl Attention {
    fn forward(&self, x: Tensor<3>, part: Part<'_>) -> Tensor<3> {
        let [batch, length, width] = x.dims();
        let all = self.qkv.forward(x).reshape([batch, length, 3, self.heads, width / self.heads]);
        let [query, key, value] =
            [0, 1, 2].map(|at| all.clone().narrow(2, at, 1).squeeze_dim::<4>(2).swap_dims(1, 2));
        let [key, value] = match part.before {
            Some(before) => before.extend([key, value]),
            None => [key, value],
        };
        let causal = AttentionModuleOptions { is_causal: part.unseen.is_none(), ..Default::default() };
        let context = attention(query, key, value, part.unseen, None, causal);
        self.output.forward(context.swap_dims(1, 2).reshape([batch, length, width]))
    }
}

/// `x + attention(norm(x))`, then `x + outer(gelu(inner(norm(x))))`.
#[derive(Module, Debug)]
pub struct Block {
    norm_1: LayerNorm,
    attention: Attention,
    norm_2: LayerNorm,
    inner: Linear,
    gelu: Gelu,
    outer: Linear,
    dropout: Dropout,
}

impl Block {
    fn new(size: &Gpt2Size, device: &Device) -> Self {
        let width = size.width;
        let linear = |input, output| LinearConfig::new(input, output).init(device);
        let norm = || LayerNormConfig::new(width).init(device);
        let (qkv, output) = (linear(width, 3 * width), linear(width, width));
        Self {
            norm_1: norm(),
            attention: Attention { qkv, output, heads: size.heads },
            norm_2: norm(),
            inner: linear(width, 4 * width),
            gelu: Gelu::new_approximate(),
            outer: linear(4 * width, width),
            dropout: DropoutConfig::new(size.dropout).init(),
        }
    }

    fn forward(&self, x: Tensor<3>, part: Part<'_>) -> Tensor<3> {
        let y = self.attention.forward(self.norm_1.forward(x.clone()), part);
        let x = x + self.dropout.forward(y);
        let y = self.inner.forward(self.norm_2.forward(x.clone()));
        x + self.dropout.forward(self.outer.forward(self.gelu.forward(y)))
    }
}

/// The language model, whose head is its embedding.
#[derive(Module, Debug)]
pub struct Gpt2 {
    words: Embedding,
    positions: Embedding,
    dropout: Dropout,
    blocks: Vec<Block>,
    norm: LayerNorm,
    vocabulary: usize,
    length: usize,
}

impl Gpt2 {
    /// What the head reads, `[batch, length, width]`.
    fn hidden(&self, tokens: Tensor<2, Int>) -> Tensor<3> {
        let ([_, length], device) = (tokens.dims(), tokens.device());
        let places = Tensor::<1, Int>::arange(0..length as i64, &device).unsqueeze::<2>();
        let x = self.blocks.iter().fold(self.embedded(tokens, places), |x, block| {
            plan::block(block, x, |block, x| block.forward(x, Part::default()))
        });
        self.norm.forward(x)
    }

    /// `places`: those of the tokens in their texts, `[batch or 1, length]`.
    fn embedded(&self, tokens: Tensor<2, Int>, places: Tensor<2, Int>) -> Tensor<3> {
        self.dropout.forward(self.words.forward(tokens) + self.positions.forward(places))
    }

    /// `[width, vocabulary]`
    fn head(&self) -> Tensor<2> {
        self.words.weight.val().transpose()
    }
}

impl Decoder for Gpt2 {
    type Size = Gpt2Size;

    fn new(size: &Gpt2Size, device: &Device) -> Self {
        let initializer = Initializer::Normal { mean: 0.0, std: 0.02 };
        let embedding = |count| {
            EmbeddingConfig::new(count, size.width).with_initializer(initializer.clone()).init(device)
        };
        Self {
            words: embedding(size.vocabulary),
            positions: embedding(size.length),
            dropout: DropoutConfig::new(size.dropout).init(),
            blocks: (0..size.layers).map(|_| Block::new(size, device)).collect(),
            norm: LayerNormConfig::new(size.width).init(device),
            vocabulary: size.vocabulary,
            length: size.length,
        }
    }

    fn logits(&self, tokens: Tensor<2, Int>) -> Tensor<3> {
        linear(self.hidden(tokens), self.head(), None)
    }

    fn loss(&self, tokens: Tensor<2, Int>, next: Tensor<2, Int>) -> Tensor<1> {
        next_token_loss(self.hidden(tokens), &self.words, None, None, next, None)
    }

    fn loss_of_some(&self, tokens: Tensor<2, Int>, next: Tensor<2, Int>, counts: Tensor<2>) -> Tensor<1> {
        next_token_loss(self.hidden(tokens), &self.words, None, None, next, Some(counts))
    }
}

impl HuggingFace for Gpt2 {
    const NAMES: &'static [(&'static str, &'static str)] = &[
        (r"^transformer\.", ""),
        (r"^lm_head\.", "unused.lm_head."), // the embedding
        (r"^h\.(\d+)\.attn\.(bias|masked_bias)$", "unused.$1.$2"), // constants
        (r"^wte\.", "words."),
        (r"^wpe\.", "positions."),
        (r"^h\.", "blocks."),
        (r"\.ln_(\d)\.weight$", ".norm_$1.gamma"),
        (r"\.ln_(\d)\.bias$", ".norm_$1.beta"),
        (r"^ln_f\.weight$", "norm.gamma"),
        (r"^ln_f\.bias$", "norm.beta"),
        (r"\.attn\.c_attn\.", ".attention.qkv."),
        (r"\.attn\.c_proj\.", ".attention.output."),
        (r"\.mlp\.c_fc\.", ".inner."),
        (r"\.mlp\.c_proj\.", ".outer."),
    ];

    fn tied_table(&self) -> Option<&'static str> {
        Some("words")
    }

    fn module_name(&self, path: &str) -> String {
        let here_and_there = [
            ("words", "transformer.wte"),
            ("positions", "transformer.wpe"),
            ("blocks.", "transformer.h."),
            (".attention.qkv", ".attn.c_attn"),
            (".attention.output", ".attn.c_proj"),
            (".inner", ".mlp.c_fc"),
            (".outer", ".mlp.c_proj"),
            (".norm_", ".ln_"),
            ("norm", "transformer.ln_f"),
        ];
        replaced(path, &here_and_there)
    }

    fn has_inputs_first(&self) -> bool {
        true
    }

    /// In Hugging Face its dense layers are `Conv1D`, whose weights are `[input, output]` like Burn's.
    fn adapter(&self) -> impl ModuleAdapter + 'static {
        IdentityAdapter
    }
}
