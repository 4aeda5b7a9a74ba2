// A Llama-style language model, written once. The module that includes this file chooses `nn`, `attention`, `SwiGlu` and `SwiGluConfig`.
// It provides `next_token_loss(head, x, next)`, the mean cross entropy of the outputs of the head, and `run_block(block, x, rotary)`,
// which runs `block.forward(x, rotary)` directly or, for example, in a checkpointed segment.
use burn::module::Module;
use burn::tensor::{Device, Int, Tensor, ops::AttentionModuleOptions};
use nn::{
    Embedding, EmbeddingConfig, Linear, LinearConfig, RmsNorm, RmsNormConfig, RotaryEncoding, RotaryEncodingConfig,
};

fn linear(d_input: usize, d_output: usize, device: &Device) -> Linear {
    LinearConfig::new(d_input, d_output).with_bias(false).init(device)
}

/// Causal attention with rotary positions.
#[derive(Module, Debug)]
pub struct Attention {
    query: Linear,
    key: Linear,
    value: Linear,
    output: Linear,
    heads: usize,
}

impl Attention {
    fn forward(&self, x: Tensor<3>, rotary: &RotaryEncoding) -> Tensor<3> {
        let [batch, length, width] = x.dims();
        let head = width / self.heads;
        let split = |linear: &Linear| {
            linear.forward(x.clone()).reshape([batch, length, self.heads, head]).swap_dims(1, 2)
        };
        let (query, key) = (rotary.forward(split(&self.query)), rotary.forward(split(&self.key)));
        let causal = AttentionModuleOptions { is_causal: true, ..Default::default() };
        let context = attention(query, key, split(&self.value), None, None, causal);
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
    fn new(size: &super::Size, device: &Device) -> Self {
        let width = size.width;
        let square = || linear(width, width, device);
        let (query, key, value, output) = (square(), square(), square(), square());
        Self {
            attention_norm: RmsNormConfig::new(width).init(device),
            attention: Attention { query, key, value, output, heads: size.heads },
            feed_forward_norm: RmsNormConfig::new(width).init(device),
            gate: SwiGluConfig::new(width, size.hidden).with_bias(false).init(device),
            down: linear(size.hidden, width, device),
        }
    }

    /// The output of the block is the sum of both. The caller adds them, because a product at the end of a segment is not recomputed.
    fn forward(&self, x: Tensor<3>, rotary: &RotaryEncoding) -> [Tensor<3>; 2] {
        let x = x.clone() + self.attention.forward(self.attention_norm.forward(x), rotary);
        let y = self.down.forward(self.gate.forward(self.feed_forward_norm.forward(x.clone())));
        [x, y]
    }
}

/// The language model. Its head is not tied to its embedding.
#[derive(Module, Debug)]
pub struct Llama {
    embedding: Embedding,
    rotary: RotaryEncoding,
    blocks: Vec<Block>,
    norm: RmsNorm,
    head: Linear,
}

impl Llama {
    /// What the head reads, `[batch, length, width]`.
    fn hidden(&self, tokens: Tensor<2, Int>) -> Tensor<3> {
        let x = self.embedding.forward(tokens);
        let x = self.blocks.iter().fold(x, |x, block| {
            let [x, y] = run_block(block, x, &self.rotary);
            x + y
        });
        self.norm.forward(x)
    }
}

impl super::LanguageModel for Llama {
    fn new(size: &super::Size, device: &Device) -> Self {
        Self {
            embedding: EmbeddingConfig::new(size.vocabulary, size.width).init(device),
            rotary: RotaryEncodingConfig::new(size.length, size.width / size.heads).init(device),
            blocks: (0..size.blocks).map(|_| Block::new(size, device)).collect(),
            norm: RmsNormConfig::new(size.width).init(device),
            head: linear(size.width, size.vocabulary, device),
        }
    }

    fn logits(&self, tokens: Tensor<2, Int>) -> Tensor<3> {
        self.head.forward(self.hidden(tokens))
    }

    fn loss(&self, tokens: Tensor<2, Int>, next: Tensor<2, Int>) -> Tensor<1> {
        next_token_loss(&self.head, self.hidden(tokens), next)
    }
}
