// Llama (arXiv 2407.21783) and Mistral (arXiv 2310.06825), written once, with the topology of Hugging Face. The module that includes
// this file chooses `nn`, a grouped-query `attention`, and `linear`, and provides `next_token_loss`.
use crate::text::hugging_face::{HuggingFace, replaced};
use crate::text::{Decoder, DecoderSize, RotaryStretch};
use burn::module::Module;
use burn::tensor::{Device, Int, Tensor, ops::AttentionModuleOptions};
use burn_memsave::lazy::{RowOrder, RowOrders};
use burn_memsave::plan;
use core::f64::consts::PI;
use nn::activation::{SwiGlu, SwiGluConfig};
use nn::{
    Embedding, EmbeddingConfig, Initializer, Linear, LinearConfig, RmsNorm, RmsNormConfig, RotaryEncoding,
    RotaryEncodingConfig,
};

fn linear_layer(input: usize, output: usize, device: &Device) -> Linear {
    LinearConfig::new(input, output).with_bias(false).init(device)
}

fn norm(size: &DecoderSize, device: &Device) -> RmsNorm {
    RmsNormConfig::new(size.width).with_epsilon(size.epsilon).init(device)
}

/// Causal attention with rotary positions, in which several heads of queries share keys and values.
#[derive(Module, Debug)]
pub struct Attention {
    query: Linear,
    key: Linear,
    value: Linear,
    output: Linear,
    heads: usize,
    key_heads: usize,
}

impl Attention {
    fn new(size: &DecoderSize, device: &Device) -> Self {
        let &DecoderSize { width, heads, key_heads, .. } = size;
        let keys = key_heads * (width / heads);
        Self {
            query: linear_layer(width, width, device),
            key: linear_layer(width, keys, device),
            value: linear_layer(width, keys, device),
            output: linear_layer(width, width, device),
            heads,
            key_heads,
        }
    }

    fn forward(&self, x: Tensor<3>, rotary: &RotaryEncoding) -> Tensor<3> {
        let [batch, length, width] = x.dims();
        let head = width / self.heads;
        let split = |linear: &Linear, heads: usize| {
            linear.forward(x.clone()).reshape([batch, length, heads, head]).swap_dims(1, 2)
        };
        let query = rotary.forward(split(&self.query, self.heads));
        let key = rotary.forward(split(&self.key, self.key_heads));
        let value = split(&self.value, self.key_heads);
        let causal = AttentionModuleOptions { is_causal: true, ..Default::default() };
        let context = attention(query, key, value, None, None, causal);
        self.output.forward(context.swap_dims(1, 2).reshape([batch, length, width]))
    }
}

/// `x + attention(norm(x))`, then `x + down(swiglu(norm(x)))`.
#[derive(Module, Debug)]
pub struct Block {
    attention_norm: RmsNorm,
    attention: Attention,
    feed_forward_norm: RmsNorm,
    gate: SwiGlu,
    down: Linear,
}

impl Block {
    fn new(size: &DecoderSize, device: &Device) -> Self {
        Self {
            attention_norm: norm(size, device),
            attention: Attention::new(size, device),
            feed_forward_norm: norm(size, device),
            gate: SwiGluConfig::new(size.width, size.hidden).with_bias(false).init(device),
            down: linear_layer(size.hidden, size.width, device),
        }
    }

    fn forward(&self, x: Tensor<3>, rotary: &RotaryEncoding) -> Tensor<3> {
        let x = x.clone() + self.attention.forward(self.attention_norm.forward(x), rotary);
        x.clone() + self.down.forward(self.gate.forward(self.feed_forward_norm.forward(x)))
    }
}

/// The language model.
#[derive(Module, Debug)]
pub struct Llama {
    words: Embedding,
    rotary: RotaryEncoding,
    blocks: Vec<Block>,
    norm: RmsNorm,
    /// `None` if the head is the embedding.
    head: Option<Linear>,
    head_width: usize,
}

impl Llama {
    /// What the head reads, `[batch, length, width]`.
    fn hidden(&self, tokens: Tensor<2, Int>) -> Tensor<3> {
        let x = self.blocks.iter().fold(self.words.forward(tokens), |x, block| {
            let block = (block.clone(), self.rotary.clone());
            plan::block(&block, x, |(block, rotary), x| block.forward(x, rotary))
        });
        self.norm.forward(x)
    }

    /// `[width, vocabulary]`
    fn head(&self) -> Tensor<2> {
        match &self.head {
            Some(head) => head.weight.val(),
            None => self.words.weight.val().transpose(),
        }
    }
}

/// The stretched frequencies of rotary positions.
fn stretched(frequencies: Tensor<1>, stretch: &RotaryStretch) -> Tensor<1> {
    let &RotaryStretch { factor, low, high, original_length } = stretch;
    // How often a wave fits into the original length. `short` is 0 for long waves and 1 for short ones.
    let fits = frequencies.clone() * (original_length / (2.0 * PI));
    let short = ((fits - low) / (high - low)).clamp(0.0, 1.0);
    frequencies * (short.clone() + (-short + 1.0) / factor)
}

impl Decoder for Llama {
    type Size = DecoderSize;

    fn new(size: &DecoderSize, device: &Device) -> Self {
        let head_width = size.width / size.heads;
        let words = EmbeddingConfig::new(size.vocabulary, size.width);
        let rotary = RotaryEncodingConfig::new(size.length, head_width).with_theta(size.theta);
        Self {
            words: words.with_initializer(Initializer::Normal { mean: 0.0, std: 0.02 }).init(device),
            rotary: match &size.stretch {
                Some(stretch) => rotary.init_with_frequency_scaling(|x| stretched(x, stretch), device),
                None => rotary.init(device),
            },
            blocks: (0..size.layers).map(|_| Block::new(size, device)).collect(),
            norm: norm(size, device),
            head: (!size.tied).then(|| linear_layer(size.width, size.vocabulary, device)),
            head_width,
        }
    }

    fn logits(&self, tokens: Tensor<2, Int>) -> Tensor<3> {
        linear(self.hidden(tokens), self.head(), None)
    }

    fn loss(&self, tokens: Tensor<2, Int>, next: Tensor<2, Int>) -> Tensor<1> {
        next_token_loss(self.hidden(tokens), self.head(), next)
    }
}

impl HuggingFace for Llama {
    const NAMES: &'static [(&'static str, &'static str)] = &[
        (r"^lm_head\.", "head."),
        (r"^model\.", ""),
        (r"^embed_tokens\.", "words."),
        (r"^layers\.(\d+)\.self_attn\.rotary_emb\.inv_freq$", "unused.$1.inv_freq"), // constants
        (r"^layers\.", "blocks."),
        (r"\.input_layernorm\.", ".attention_norm."),
        (r"\.post_attention_layernorm\.", ".feed_forward_norm."),
        (r"\.self_attn\.([qkvo])_proj\.", ".attention.$1."),
        (r"\.attention\.q\.", ".attention.query."),
        (r"\.attention\.k\.", ".attention.key."),
        (r"\.attention\.v\.", ".attention.value."),
        (r"\.attention\.o\.", ".attention.output."),
        (r"\.mlp\.gate_proj\.", ".gate.linear_inner."),
        (r"\.mlp\.up_proj\.", ".gate.linear_outer."),
        (r"\.mlp\.down_proj\.", ".down."),
    ];

    fn module_name(path: &str) -> String {
        if path == "head" {
            return "lm_head".into();
        }
        let here_and_there = [
            ("words", "embed_tokens"),
            ("blocks.", "layers."),
            (".attention.query", ".self_attn.q_proj"),
            (".attention.key", ".self_attn.k_proj"),
            (".attention.value", ".self_attn.v_proj"),
            (".attention.output", ".self_attn.o_proj"),
            (".gate.linear_inner", ".mlp.gate_proj"),
            (".gate.linear_outer", ".mlp.up_proj"),
            (".down", ".mlp.down_proj"),
            (".attention_norm", ".input_layernorm"),
            (".feed_forward_norm", ".post_attention_layernorm"),
        ];
        format!("model.{}", replaced(path, &here_and_there))
    }

    /// Burn rotates pairs of neighbors.
    fn row_orders(&self) -> RowOrders {
        let order = RowOrder::rotary_pairs(self.head_width);
        RowOrders::new().with(r"\.attention\.(query|key)$", order).expect("a regular expression")
    }
}
