// Llama (arXiv 2407.21783), Mistral (arXiv 2310.06825), Qwen2 (arXiv 2407.10671) and Qwen3 (arXiv 2505.09388), written once, with the
// topology of Hugging Face. The module that includes this file chooses `nn`, a grouped-query `attention`, and `linear`, and provides
// `next_token_loss` and `rotate`.
use crate::cache::{Part, unseen};
use crate::hugging_face::{HuggingFace, replaced};
use crate::{Decoder, DecoderSize, RotaryStretch};
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

fn linear_layer(input: usize, output: usize, bias: bool, device: &Device) -> Linear {
    LinearConfig::new(input, output).with_bias(bias).init(device)
}

fn norm(size: &DecoderSize, width: usize, device: &Device) -> RmsNorm {
    RmsNormConfig::new(width).with_epsilon(size.epsilon).init(device)
}

/// Causal attention with rotary positions, in which several heads of queries share keys and values.
#[derive(Module, Debug)]
pub struct Attention {
    query: Linear,
    key: Linear,
    value: Linear,
    output: Linear,
    query_norm: Option<RmsNorm>,
    key_norm: Option<RmsNorm>,
    heads: usize,
    key_heads: usize,
    /// Whether the pairs of features that are rotated are halves of a head, as in Hugging Face, or neighbors.
    halves: bool,
}

impl Attention {
    fn new(size: &DecoderSize, device: &Device) -> Self {
        let &DecoderSize { width, heads, key_heads, biases, .. } = size;
        let head = size.head_width();
        let input = |heads: usize| linear_layer(width, heads * head, biases.inputs, device);
        let head_norm = || size.normalizes_heads.then(|| norm(size, head, device));
        Self {
            query: input(heads),
            key: input(key_heads),
            value: input(key_heads),
            output: linear_layer(heads * head, width, biases.output, device),
            query_norm: head_norm(),
            key_norm: head_norm(),
            heads,
            key_heads,
            halves: false,
        }
    }

    fn forward(&self, x: Tensor<3>, rotary: &RotaryEncoding, part: Part<'_>) -> Tensor<3> {
        let [batch, length, _] = x.dims();
        let split = |linear: &Linear, heads: usize| -> Tensor<4> {
            linear.forward(x.clone()).reshape([batch as i64, length as i64, heads as i64, -1])
        };
        let rotated = |x: Tensor<4>, norm: &Option<RmsNorm>| {
            let x = match norm {
                Some(norm) => norm.forward(x),
                None => x,
            };
            rotate(rotary, x.swap_dims(1, 2), part.start, self.halves)
        };
        let query = rotated(split(&self.query, self.heads), &self.query_norm);
        let key = rotated(split(&self.key, self.key_heads), &self.key_norm);
        let value = split(&self.value, self.key_heads).swap_dims(1, 2);
        let [key, value] = match part.before {
            Some(before) => before.extend([key, value]),
            None => [key, value],
        };
        let causal = AttentionModuleOptions { is_causal: part.unseen.is_none(), ..Default::default() };
        let context = attention(query, key, value, part.unseen, None, causal);
        self.output.forward(context.swap_dims(1, 2).flatten(2, 3))
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
            attention_norm: norm(size, size.width, device),
            attention: Attention::new(size, device),
            feed_forward_norm: norm(size, size.width, device),
            gate: SwiGluConfig::new(size.width, size.hidden).with_bias(size.biases.feed_forward).init(device),
            down: linear_layer(size.hidden, size.width, size.biases.feed_forward, device),
        }
    }

    fn forward(&self, x: Tensor<3>, rotary: &RotaryEncoding, part: Part<'_>) -> Tensor<3> {
        let x = x.clone() + self.attention.forward(self.attention_norm.forward(x), rotary, part);
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
    vocabulary: usize,
    head_width: usize,
    window: Option<usize>,
}

impl Llama {
    /// What the head reads, `[batch, length, width]`.
    fn hidden(&self, tokens: Tensor<2, Int>) -> Tensor<3> {
        let window = self.window;
        let x = self.blocks.iter().fold(self.words.forward(tokens), |x, block| {
            let block = (block.clone(), self.rotary.clone());
            plan::block(&block, x, move |(block, rotary), x| {
                let unseen = unseen([0, x.dims()[1]], window, &[], &x.device());
                block.forward(x, rotary, Part { start: 0, unseen, before: None })
            })
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
        let head_width = size.head_width();
        let words = EmbeddingConfig::new(size.vocabulary, size.width);
        let rotary = RotaryEncodingConfig::new(size.length, head_width).with_theta(size.theta);
        Self {
            words: words.with_initializer(Initializer::Normal { mean: 0.0, std: 0.02 }).init(device),
            rotary: match &size.stretch {
                Some(stretch) => rotary.init_with_frequency_scaling(|x| stretched(x, stretch), device),
                None => rotary.init(device),
            },
            blocks: (0..size.layers).map(|_| Block::new(size, device)).collect(),
            norm: norm(size, size.width, device),
            head: (!size.tied).then(|| linear_layer(size.width, size.vocabulary, false, device)),
            vocabulary: size.vocabulary,
            head_width,
            window: size.window,
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
        (r"\.self_attn\.q_norm\.", ".attention.query_norm."),
        (r"\.self_attn\.k_norm\.", ".attention.key_norm."),
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
            (".attention.query_norm", ".self_attn.q_norm"),
            (".attention.key_norm", ".self_attn.k_norm"),
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
        if self.blocks.iter().all(|block| block.attention.halves) {
            return RowOrders::new();
        }
        let order = RowOrder::rotary_pairs(self.head_width);
        RowOrders::new().with(r"\.attention\.(query|key)$", order).expect("a regular expression")
    }
}
