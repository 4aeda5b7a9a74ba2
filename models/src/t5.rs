// T5 (arXiv 1910.10683) version 1.0, written once, with the topology of Hugging Face except for the dropout of attention weights, which
// `attention` does not have. The module that includes this file chooses `nn`, `attention` and `linear`, and provides `next_token_loss`.
use crate::hugging_face::{HuggingFace, replaced};
use crate::{EncoderDecoder, T5Size};
use burn::module::Module;
use burn::tensor::{Device, Int, Tensor, TensorData, ops::AttentionModuleOptions};
use burn_memsave::plan;
use nn::{
    Dropout, DropoutConfig, Embedding, EmbeddingConfig, Initializer, Linear, LinearConfig, Relu, RmsNorm,
    RmsNormConfig,
};

fn linear_layer(input: usize, output: usize, device: &Device) -> Linear {
    LinearConfig::new(input, output).with_bias(false).init(device)
}

fn norm(size: &T5Size, device: &Device) -> RmsNorm {
    RmsNormConfig::new(size.width).with_epsilon(1e-6).init(device)
}

/// Attention whose products are not scaled.
#[derive(Module, Debug)]
pub struct Attention {
    query: Linear,
    key: Linear,
    value: Linear,
    output: Linear,
    heads: usize,
}

impl Attention {
    fn new(size: &T5Size, device: &Device) -> Self {
        let inner = size.heads * size.head;
        let input = || linear_layer(size.width, inner, device);
        let (query, key, value) = (input(), input(), input());
        Self { query, key, value, output: linear_layer(inner, size.width, device), heads: size.heads }
    }

    fn forward(&self, x: Tensor<3>, from: Tensor<3>, bias: Option<Tensor<4>>, is_causal: bool) -> Tensor<3> {
        let split = |linear: &Linear, x: Tensor<3>| {
            let [batch, length, _] = x.dims();
            linear.forward(x).reshape([batch as i64, length as i64, self.heads as i64, -1]).swap_dims(1, 2)
        };
        let query = split(&self.query, x);
        let (key, value) = (split(&self.key, from.clone()), split(&self.value, from));
        let options = AttentionModuleOptions { scale: Some(1.0), is_causal, ..Default::default() };
        let context = attention(query, key, value, None, bias, options).swap_dims(1, 2);
        self.output.forward(context.flatten(2, 3))
    }
}

/// Attention to the output of the encoder.
#[derive(Module, Debug)]
pub struct Cross {
    norm: RmsNorm,
    attention: Attention,
}

/// `x + attention(norm(x))`, in the decoder `x + cross(norm(x), memory)`, then `x + outer(relu(inner(norm(x))))`.
#[derive(Module, Debug)]
pub struct Block {
    attention_norm: RmsNorm,
    attention: Attention,
    cross: Option<Cross>,
    feed_forward_norm: RmsNorm,
    inner: Linear,
    relu: Relu,
    outer: Linear,
    dropout: Dropout,
}

impl Block {
    fn new(size: &T5Size, decodes: bool, device: &Device) -> Self {
        let cross = || Cross { norm: norm(size, device), attention: Attention::new(size, device) };
        Self {
            attention_norm: norm(size, device),
            attention: Attention::new(size, device),
            cross: decodes.then(cross),
            feed_forward_norm: norm(size, device),
            inner: linear_layer(size.width, size.hidden, device),
            relu: Relu::new(),
            outer: linear_layer(size.hidden, size.width, device),
            dropout: DropoutConfig::new(size.dropout).init(),
        }
    }

    fn forward(&self, (x, bias, memory): (Tensor<3>, Tensor<4>, Option<Tensor<3>>)) -> Tensor<3> {
        let y = self.attention_norm.forward(x.clone());
        let y = self.attention.forward(y.clone(), y, Some(bias), memory.is_some());
        let mut x = x + self.dropout.forward(y);
        if let Some((cross, memory)) = self.cross.as_ref().zip(memory) {
            let y = cross.attention.forward(cross.norm.forward(x.clone()), memory, None, false);
            x = x + self.dropout.forward(y);
        }
        let y = self.relu.forward(self.inner.forward(self.feed_forward_norm.forward(x.clone())));
        x + self.dropout.forward(self.outer.forward(self.dropout.forward(y)))
    }
}

/// The classes of distances between tokens, `[from, to]`: one for each short distance, and by the logarithm for longer ones. A decoder
/// only looks back.
fn buckets_of(length: usize, buckets: usize, farthest: usize, looks_ahead: bool) -> Vec<i32> {
    let buckets = if looks_ahead { buckets / 2 } else { buckets };
    let exact = buckets / 2;
    let scale = (farthest as f64 / exact as f64).ln() as f32;
    let bucket = |distance: usize| match distance < exact {
        true => distance,
        false => {
            let log = (distance as f32 / exact as f32).ln() / scale;
            (exact + (log * (buckets - exact) as f32) as usize).min(buckets - 1)
        }
    };
    let class = |from: usize, to: usize| match to > from {
        true if looks_ahead => buckets + bucket(to - from),
        true => 0,
        false => bucket(from - to),
    };
    (0..length).flat_map(|from| (0..length).map(move |to| class(from, to) as i32)).collect()
}

/// The encoder, or the decoder.
#[derive(Module, Debug)]
pub struct Stack {
    /// What attention adds to its products, for every class of distances and every head. All blocks share it.
    bias: Embedding,
    distance: usize,
    blocks: Vec<Block>,
    norm: RmsNorm,
    dropout: Dropout,
}

impl Stack {
    fn new(size: &T5Size, decodes: bool, device: &Device) -> Self {
        let initializer = Initializer::Normal { mean: 0.0, std: (size.width as f64).powf(-0.5) };
        let bias = EmbeddingConfig::new(size.buckets, size.heads).with_initializer(initializer);
        Self {
            bias: bias.init(device),
            distance: size.distance,
            blocks: (0..size.layers).map(|_| Block::new(size, decodes, device)).collect(),
            norm: norm(size, device),
            dropout: DropoutConfig::new(size.dropout).init(),
        }
    }

    fn forward(&self, x: Tensor<3>, memory: Option<Tensor<3>>) -> Tensor<3> {
        let ([_, length, _], device) = (x.dims(), x.device());
        let [buckets, _] = self.bias.weight.dims();
        let buckets = buckets_of(length, buckets, self.distance, memory.is_none());
        let buckets = Tensor::<2, Int>::from_data(TensorData::new(buckets, [length, length]), &device);
        let bias = self.bias.forward(buckets).permute([2, 0, 1]).unsqueeze::<4>();
        let x = self.blocks.iter().fold(self.dropout.forward(x), |x, block| {
            plan::block(block, (x, bias.clone(), memory.clone()), Block::forward)
        });
        self.dropout.forward(self.norm.forward(x))
    }
}

/// Encoder and decoder. Both embeddings and the head share one weight.
#[derive(Module, Debug)]
pub struct T5 {
    words: Embedding,
    encoder: Stack,
    decoder: Stack,
}

impl T5 {
    /// What the head reads, `[batch, length, width]`.
    fn hidden(&self, source: Tensor<2, Int>, tokens: Tensor<2, Int>) -> Tensor<3> {
        let memory = self.encoder.forward(self.words.forward(source), None);
        let x = self.decoder.forward(self.words.forward(tokens), Some(memory));
        let [_, width] = self.words.weight.dims();
        x * (width as f64).powf(-0.5)
    }

    /// `[width, vocabulary]`
    fn head(&self) -> Tensor<2> {
        self.words.weight.val().transpose()
    }
}

impl EncoderDecoder for T5 {
    fn new(size: &T5Size, device: &Device) -> Self {
        Self {
            words: EmbeddingConfig::new(size.vocabulary, size.width).init(device),
            encoder: Stack::new(size, false, device),
            decoder: Stack::new(size, true, device),
        }
    }

    fn logits(&self, source: Tensor<2, Int>, tokens: Tensor<2, Int>) -> Tensor<3> {
        linear(self.hidden(source, tokens), self.head(), None)
    }

    fn loss(&self, source: Tensor<2, Int>, tokens: Tensor<2, Int>, next: Tensor<2, Int>) -> Tensor<1> {
        next_token_loss(self.hidden(source, tokens), self.head(), None, next)
    }
}

impl HuggingFace for T5 {
    const NAMES: &'static [(&'static str, &'static str)] = &[
        (r"^shared\.", "words."),
        (r"^(encoder\.embed_tokens|decoder\.embed_tokens|lm_head)\.", "unused.$1."), // the same
        // Old checkpoints have it, though attention to the encoder has no positions.
        (r"^decoder\.(.*\.EncDecAttention\.relative_attention_bias)\.", "unused.$1."),
        (r"^(\w+)\.block\.0\.layer\.0\.SelfAttention\.relative_attention_bias\.", "$1.bias."),
        (r"^(\w+)\.final_layer_norm\.", "$1.norm."),
        (r"^(\w+)\.block\.", "$1.blocks."),
        (r"\.layer\.0\.layer_norm\.", ".attention_norm."),
        (r"\.layer\.0\.SelfAttention\.", ".attention."),
        (r"^(decoder\..*)\.layer\.1\.layer_norm\.", "$1.cross.norm."),
        (r"\.layer\.1\.EncDecAttention\.", ".cross.attention."),
        (r"\.layer\.[12]\.layer_norm\.", ".feed_forward_norm."),
        (r"\.layer\.[12]\.DenseReluDense\.wi\.", ".inner."),
        (r"\.layer\.[12]\.DenseReluDense\.wo\.", ".outer."),
        (r"\.attention\.q\.", ".attention.query."),
        (r"\.attention\.k\.", ".attention.key."),
        (r"\.attention\.v\.", ".attention.value."),
        (r"\.attention\.o\.", ".attention.output."),
    ];

    fn module_name(&self, path: &str) -> String {
        let feed_forward = if path.starts_with("decoder") { ".layer.2" } else { ".layer.1" };
        let here_and_there = [
            ("words", "shared"),
            (".blocks.", ".block."),
            (".cross.attention.", ".layer.1.EncDecAttention."),
            (".attention.", ".layer.0.SelfAttention."),
            ("Attention.query", "Attention.q"),
            ("Attention.key", "Attention.k"),
            ("Attention.value", "Attention.v"),
            ("Attention.output", "Attention.o"),
            (".inner", &format!("{feed_forward}.DenseReluDense.wi")),
            (".outer", &format!("{feed_forward}.DenseReluDense.wo")),
            (".attention_norm", ".layer.0.layer_norm"),
            (".cross.norm", ".layer.1.layer_norm"),
            (".feed_forward_norm", &format!("{feed_forward}.layer_norm")),
            (".norm", ".final_layer_norm"),
        ];
        replaced(path, &here_and_there)
    }
}
