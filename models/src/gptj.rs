// GPT-J (github.com/kingoflolz/mesh-transformer-jax) and Phi 1 to 2 (arXiv 2306.11644, 2309.05463), written once, with the topology of Hugging
// Face. The module that includes this file chooses `nn` and `linear`, and provides `next_token_loss` and the attention of `decoder.rs`.
use super::decoder::{Attention, rotary_encoding};
use crate::cache::Part;
use crate::hugging_face::{HuggingFace, replaced};
use crate::{Decoder, GptJSize};
use burn::module::Module;
use burn::tensor::{Device, Int, Tensor};
use burn_memsave::plan;
use nn::activation::Gelu;
use nn::{
    Dropout, DropoutConfig, Embedding, EmbeddingConfig, Initializer, LayerNorm, LayerNormConfig, Linear,
    LinearConfig, RotaryEncoding,
};

/// `x + attention(y) + outer(gelu(inner(y)))` with `y = norm(x)`.
#[derive(Module, Debug)]
pub struct Block {
    norm: LayerNorm,
    attention: Attention,
    inner: Linear,
    gelu: Gelu,
    outer: Linear,
    dropout: Dropout,
}

impl Block {
    fn new(size: &GptJSize, device: &Device) -> Self {
        let linear = |input, output| LinearConfig::new(input, output).init(device);
        Self {
            norm: norm(size, device),
            attention: Attention::new(&size.attention(), 0, device).with_halves(size.halves),
            inner: linear(size.width, size.hidden),
            gelu: Gelu::new_approximate(),
            outer: linear(size.hidden, size.width),
            dropout: DropoutConfig::new(size.dropout).init(),
        }
    }

    fn forward(&self, x: Tensor<3>, rotary: &RotaryEncoding, part: Part<'_>) -> Tensor<3> {
        let y = self.norm.forward(x.clone());
        let attended = self.dropout.forward(self.attention.forward(y.clone(), rotary, part));
        let y = self.outer.forward(self.gelu.forward(self.inner.forward(y)));
        attended + self.dropout.forward(y) + x
    }
}

fn norm(size: &GptJSize, device: &Device) -> LayerNorm {
    LayerNormConfig::new(size.width).with_epsilon(size.epsilon).init(device)
}

/// The language model.
#[derive(Module, Debug)]
pub struct GptJ {
    words: Embedding,
    dropout: Dropout,
    rotary: RotaryEncoding,
    blocks: Vec<Block>,
    norm: LayerNorm,
    head: Linear,
    vocabulary: usize,
    /// Whether names are those of Phi.
    is_phi: bool,
}

impl GptJ {
    /// What the head reads, `[batch, length, width]`.
    fn hidden(&self, tokens: Tensor<2, Int>) -> Tensor<3> {
        let x = self.blocks.iter().fold(self.embedded(tokens), |x, block| {
            let block = (block.clone(), self.rotary.clone());
            plan::block(&block, x, |(block, rotary), x| block.forward(x, rotary, Part::default()))
        });
        self.norm.forward(x)
    }

    fn embedded(&self, tokens: Tensor<2, Int>) -> Tensor<3> {
        self.dropout.forward(self.words.forward(tokens))
    }

    fn bias(&self) -> Option<Tensor<1>> {
        self.head.bias.as_ref().map(|bias| bias.val())
    }
}

impl Decoder for GptJ {
    type Size = GptJSize;

    fn new(size: &GptJSize, device: &Device) -> Self {
        let words = EmbeddingConfig::new(size.vocabulary, size.width);
        let &GptJSize { length, rotated, theta, stretch, .. } = size;
        Self {
            words: words.with_initializer(Initializer::Normal { mean: 0.0, std: 0.02 }).init(device),
            dropout: DropoutConfig::new(size.embedding_dropout).init(),
            rotary: rotary_encoding([length, rotated], theta, stretch, device),
            blocks: (0..size.layers).map(|_| Block::new(size, device)).collect(),
            norm: norm(size, device),
            head: LinearConfig::new(size.width, size.vocabulary).init(device),
            vocabulary: size.vocabulary,
            is_phi: size.is_phi(),
        }
    }

    fn logits(&self, tokens: Tensor<2, Int>) -> Tensor<3> {
        linear(self.hidden(tokens), self.head.weight.val(), self.bias())
    }

    fn loss(&self, tokens: Tensor<2, Int>, next: Tensor<2, Int>) -> Tensor<1> {
        next_token_loss(self.hidden(tokens), &self.words, Some(&self.head), None, next, None)
    }

    fn loss_of_some(&self, tokens: Tensor<2, Int>, next: Tensor<2, Int>, counts: Tensor<2>) -> Tensor<1> {
        next_token_loss(self.hidden(tokens), &self.words, Some(&self.head), None, next, Some(counts))
    }
}

impl HuggingFace for GptJ {
    const NAMES: &'static [(&'static str, &'static str)] = &[
        (r"^lm_head\.", "head."),
        // Those of GPT-J.
        (r"^transformer\.", ""),
        (r"^h\.(\d+)\.attn\.(bias|masked_bias)$", "unused.$1.$2"), // constants
        (r"^wte\.", "words."),
        (r"^h\.", "blocks."),
        (r"^ln_f\.", "norm."),
        (r"\.ln_1\.", ".norm."),
        (r"\.attn\.q_proj\.", ".attention.query."),
        (r"\.attn\.k_proj\.", ".attention.key."),
        (r"\.attn\.v_proj\.", ".attention.value."),
        (r"\.attn\.out_proj\.", ".attention.output."),
        (r"\.mlp\.fc_in\.", ".inner."),
        (r"\.mlp\.fc_out\.", ".outer."),
        // Those of Phi.
        (r"^model\.", ""),
        (r"^layers\.(\d+)\.self_attn\.rotary_emb\.inv_freq$", "unused.$1.inv_freq"), // constants
        (r"^embed_tokens\.", "words."),
        (r"^layers\.", "blocks."),
        (r"^final_layernorm\.", "norm."),
        (r"\.input_layernorm\.", ".norm."),
        (r"\.self_attn\.q_proj\.", ".attention.query."),
        (r"\.self_attn\.k_proj\.", ".attention.key."),
        (r"\.self_attn\.v_proj\.", ".attention.value."),
        (r"\.self_attn\.dense\.", ".attention.output."),
        (r"\.mlp\.fc1\.", ".inner."),
        (r"\.mlp\.fc2\.", ".outer."),
    ];

    fn module_name(&self, path: &str) -> String {
        if path == "head" {
            return "lm_head".into();
        }
        let gptj = [
            ("words", "wte"),
            ("blocks.", "h."),
            (".attention.query", ".attn.q_proj"),
            (".attention.key", ".attn.k_proj"),
            (".attention.value", ".attn.v_proj"),
            (".attention.output", ".attn.out_proj"),
            (".inner", ".mlp.fc_in"),
            (".outer", ".mlp.fc_out"),
            (".norm", ".ln_1"),
            ("norm", "ln_f"),
        ];
        let phi = [
            ("words", "embed_tokens"),
            ("blocks.", "layers."),
            (".attention.query", ".self_attn.q_proj"),
            (".attention.key", ".self_attn.k_proj"),
            (".attention.value", ".self_attn.v_proj"),
            (".attention.output", ".self_attn.dense"),
            (".inner", ".mlp.fc1"),
            (".outer", ".mlp.fc2"),
            (".norm", ".input_layernorm"),
        ];
        match self.is_phi {
            true if path == "norm" => "model.final_layernorm".into(),
            true => format!("model.{}", replaced(path, &phi)),
            false => format!("transformer.{}", replaced(path, &gptj)),
        }
    }
}
