// T5 (arXiv 1910.10683), also version 1.1 (arXiv 2002.05202), written once, with the topology of Hugging Face except for the dropout of attention
// weights, which `attention` does not have. The module that includes this file chooses `nn`, `attention` and `linear`, and provides
// `next_token_loss`.
use crate::features::{Padded, check, check_texts};
use crate::heads::by_heads;
use crate::hugging_face::{HuggingFace, LoadError, load_from, named, replaced};
use crate::tables::has_another_table;
use crate::{EncoderDecoder, FeatureEncoder, FeatureError, HiddenStates, T5Size};
use burn::module::Module;
use burn::tensor::{Bool, Device, Int, Tensor, TensorData, ops::AttentionModuleOptions};
use burn_memsave::lazy::{LazyError, LazyOptions, LazyReport, WeightFile};
use burn_memsave::plan;
use core::ops::Range;
use nn::activation::Gelu;
use nn::{
    Dropout, DropoutConfig, Embedding, EmbeddingConfig, Initializer, Linear, LinearConfig, Relu, RmsNorm,
    RmsNormConfig,
};
use std::path::Path;

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

    /// `[batch, heads, length, width of a head]`
    fn split(&self, linear: &Linear, x: Tensor<3>) -> Tensor<4> {
        by_heads(linear.forward(x), self.heads)
    }

    fn keys_and_values(&self, x: Tensor<3>) -> [Tensor<4>; 2] {
        [self.split(&self.key, x.clone()), self.split(&self.value, x)]
    }

    fn forward(&self, x: Tensor<3>, [key, value]: [Tensor<4>; 2], seen: Seen) -> Tensor<3> {
        let query = self.split(&self.query, x);
        self.output.forward(seen.context(query, key, value).swap_dims(1, 2).flatten(2, 3))
    }
}

/// What an attention sees, and how well.
#[derive(Default)]
struct Seen {
    /// What is added to products.
    bias: Option<Tensor<4>>,
    /// What is not seen.
    unseen: Option<Tensor<4, Bool>>,
    /// Whether no token sees those after it.
    is_causal: bool,
}

impl Seen {
    fn context(self, query: Tensor<4>, key: Tensor<4>, value: Tensor<4>) -> Tensor<4> {
        let Self { bias, unseen, is_causal } = self;
        let options = AttentionModuleOptions { scale: Some(1.0), is_causal, ..Default::default() };
        attention(query, key, value, unseen, bias, options)
    }
}

/// Attention to the output of the encoder.
#[derive(Module, Debug)]
pub struct Cross {
    norm: RmsNorm,
    attention: Attention,
}

/// `x + attention(norm(x))`, in the decoder `x + cross(norm(x), memory)`, then `x + outer(relu(inner(norm(x))))`. With a gate, the last is
/// `x + outer(gelu(inner(norm(x))) gate(norm(x)))`.
#[derive(Module, Debug)]
pub struct Block {
    attention_norm: RmsNorm,
    attention: Attention,
    cross: Option<Cross>,
    feed_forward_norm: RmsNorm,
    inner: Linear,
    relu: Relu,
    /// Instead of the ReLU, if there is a gate.
    gelu: Gelu,
    gate: Option<Linear>,
    outer: Linear,
    dropout: Dropout,
}

/// The input of a block of the encoder, or of the decoder, which reads another text, too.
type BlockInput = (Tensor<3>, Tensor<4>, Option<Tensor<4, Bool>>, Option<Tensor<3>>);

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
            gelu: Gelu::new_approximate(),
            gate: size.gated.then(|| linear_layer(size.width, size.hidden, device)),
            outer: linear_layer(size.hidden, size.width, device),
            dropout: DropoutConfig::new(size.dropout).init(),
        }
    }

    fn forward(&self, (x, bias, unseen, memory): BlockInput) -> Tensor<3> {
        let y = self.attention_norm.forward(x.clone());
        let (states, is_causal) = (self.attention.keys_and_values(y.clone()), memory.is_some());
        let y = self.attention.forward(y, states, Seen { bias: Some(bias), unseen, is_causal });
        let mut x = x + self.dropout.forward(y);
        if let Some((cross, memory)) = self.cross.as_ref().zip(memory) {
            x = self.crossed(cross, x, cross.attention.keys_and_values(memory), None);
        }
        self.fed_forward(x)
    }

    /// Adds what the attention to another text sees of its keys and values.
    fn crossed(
        &self,
        cross: &Cross,
        x: Tensor<3>,
        states: [Tensor<4>; 2],
        unseen: Option<Tensor<4, Bool>>,
    ) -> Tensor<3> {
        let seen = Seen { unseen, ..Seen::default() };
        let y = cross.attention.forward(cross.norm.forward(x.clone()), states, seen);
        x + self.dropout.forward(y)
    }

    fn fed_forward(&self, x: Tensor<3>) -> Tensor<3> {
        let y = self.feed_forward_norm.forward(x.clone());
        let y = match &self.gate {
            Some(gate) => self.gelu.forward(self.inner.forward(y.clone())) * gate.forward(y),
            None => self.relu.forward(self.inner.forward(y)),
        };
        x + self.dropout.forward(self.outer.forward(self.dropout.forward(y)))
    }
}

/// The classes of distances from these tokens to all tokens up to their end, `[from, to]`: one for each short distance, and by the logarithm for
/// longer ones. A decoder only looks back.
fn buckets_of(tokens: Range<usize>, buckets: usize, farthest: usize, looks_ahead: bool) -> Vec<i32> {
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
    let end = tokens.end;
    tokens.flat_map(|from| (0..end).map(move |to| class(from, to) as i32)).collect()
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
        let layers = if decodes { size.decoder_layers.unwrap_or(size.layers) } else { size.layers };
        Self {
            bias: bias.init(device),
            distance: size.distance,
            blocks: (0..layers).map(|_| Block::new(size, decodes, device)).collect(),
            norm: norm(size, device),
            dropout: DropoutConfig::new(size.dropout).init(),
        }
    }

    /// What is added to the products of these tokens with all tokens up to their end, `[1, heads, from, to]`.
    fn bias(&self, tokens: Range<usize>, looks_ahead: bool, device: &Device) -> Tensor<4> {
        let shape = [tokens.len(), tokens.end];
        let buckets = self.bias.weight.lazy_shape()[0];
        let buckets = buckets_of(tokens, buckets, self.distance, looks_ahead);
        let buckets = Tensor::<2, Int>::from_data(TensorData::new(buckets, shape), device);
        self.bias.forward(buckets).permute([2, 0, 1]).unsqueeze::<4>()
    }

    /// What so many blocks make of embedded tokens.
    fn through(
        &self,
        layers: usize,
        x: Tensor<3>,
        unseen: Option<Tensor<4, Bool>>,
        memory: Option<Tensor<3>>,
    ) -> Tensor<3> {
        let bias = self.bias(0..x.dims()[1], memory.is_none(), &x.device());
        self.blocks.iter().take(layers).fold(self.dropout.forward(x), |x, block| {
            plan::block(block, (x, bias.clone(), unseen.clone(), memory.clone()), Block::forward)
        })
    }

    fn forward(&self, x: Tensor<3>, unseen: Option<Tensor<4, Bool>>, memory: Option<Tensor<3>>) -> Tensor<3> {
        self.normalized(self.through(self.blocks.len(), x, unseen, memory))
    }

    fn normalized(&self, x: Tensor<3>) -> Tensor<3> {
        self.dropout.forward(self.norm.forward(x))
    }

    /// [`FeatureEncoder::hidden_states`] of the encoder.
    fn hidden_states(
        &self,
        words: &Embedding,
        texts: &[Vec<u32>],
        layer: Option<usize>,
    ) -> Result<HiddenStates, FeatureError> {
        check_texts(texts, words.weight.lazy_shape()[0], None)?;
        let Padded { tokens, padding, lengths } = Padded::new(texts, &self.norm.gamma.device());
        let (x, padding) = (words.forward(tokens), unseen(padding));
        let states = match layer {
            Some(layers) if layers < self.blocks.len() => self.through(layers, x, padding, None),
            // In `transformers`, those of the last layer are normalized, too.
            _ => self.forward(x, padding, None),
        };
        Ok(HiddenStates { states, lengths })
    }

    /// [`HuggingFace::module_name`] of what is in the encoder or the decoder, as this one has it.
    fn module_name(&self, path: &str) -> String {
        if let Some(stack) = path.strip_suffix(".bias") {
            return format!("{stack}.block.0.layer.0.SelfAttention.relative_attention_bias");
        }
        let is_gated = self.blocks.iter().any(|block| block.gate.is_some());
        let inner = if is_gated { "wi_0" } else { "wi" };
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
            (".inner", &format!("{feed_forward}.DenseReluDense.{inner}")),
            (".gate", &format!("{feed_forward}.DenseReluDense.wi_1")),
            (".outer", &format!("{feed_forward}.DenseReluDense.wo")),
            (".attention_norm", ".layer.0.layer_norm"),
            (".cross.norm", ".layer.1.layer_norm"),
            (".feed_forward_norm", &format!("{feed_forward}.layer_norm")),
            (".norm", ".final_layer_norm"),
        ];
        replaced(path, &here_and_there)
    }
}

/// [`Padded::padding`] as attention takes it.
fn unseen(padding: Option<Tensor<2, Bool>>) -> Option<Tensor<4, Bool>> {
    padding.map(|padding| padding.unsqueeze_dims(&[1, 1]))
}

/// The tables of words in old files, which are `shared`, too.
const TABLES: [&str; 2] = ["encoder.embed_tokens", "decoder.embed_tokens"];

/// A file with the table of words, which some files have under the name of the encoder only.
fn with_words(file: WeightFile) -> Result<WeightFile, LazyError> {
    match file.has("words.weight") {
        true => Ok(file),
        false => file.with_key_remappings(&[(r"^unused\.encoder\.embed_tokens\.", "words.")]),
    }
}

/// None of these tables has other numbers than `shared`.
fn check_tables(
    file: &WeightFile,
    tables: &[&str],
    size: &T5Size,
    device: &Device,
) -> Result<(), LoadError> {
    for table in tables {
        let unused = format!("unused.{table}.weight");
        if has_another_table(file, &unused, [size.vocabulary, size.width], device)? {
            let (file, unused) = (file.path().to_path_buf(), vec![format!("{table}.weight")]);
            return Err(LoadError::Names { file, missing: vec![], unused });
        }
    }
    Ok(())
}

/// Encoder and decoder. Both embeddings share one weight, and so does the head, if it is not one of its own.
///
/// In f16, numbers that become too large are infinite here, where `transformers` clamps them. Features, and
/// texts that are generated, then end with an error (`NotFinite`); bf16 and f32 have room for such numbers.
#[derive(Module, Debug)]
pub struct T5 {
    words: Embedding,
    encoder: Stack,
    decoder: Stack,
    /// `None` if the head is the embedding.
    head: Option<Linear>,
    scales_outputs: bool,
}

impl T5 {
    /// The model in a directory of Hugging Face: the size in its `config.json`, and its weights, which stay in their file as far as the options
    /// say. If the file has a head, and the configuration says that the embedding is the head, both are compared; a head with other numbers is used,
    /// as `transformers` does.
    ///
    /// ```no_run
    /// use burn::tensor::Device;
    /// use burn_memsave::lazy::LazyOptions;
    /// use burn_memsave_models::{GenerateOptions, generate, memsave::t5::T5};
    ///
    /// let (model, _) = T5::from_directory("flan-t5-large", &LazyOptions::new().with_budget(1 << 30), &Device::flex())?;
    /// let reader = model.reader(&[vec![13959, 1566, 12, 2968, 10, 8774, 1]])?; // a question
    /// let generated = generate(&reader, &[vec![0]], &GenerateOptions::new(64).with_ends([1]), |_, _| ())?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    ///
    /// If the configuration asks for what this model does not have, or if the weights cannot be loaded.
    pub fn from_directory(
        directory: impl AsRef<Path>,
        options: &LazyOptions,
        device: &Device,
    ) -> Result<(Self, LazyReport), LoadError> {
        let size = T5Size::from_directory(directory.as_ref())?;
        Self::from_file(&size, WeightFile::open(directory)?, options, device)
    }

    /// A model of this size with the weights in a file that is open, or [mapped](WeightFile::open_mapped).
    ///
    /// # Errors
    ///
    /// If the weights cannot be loaded, or if the file has more than one table of words, with different numbers.
    pub fn from_file(
        size: &T5Size,
        file: WeightFile,
        options: &LazyOptions,
        device: &Device,
    ) -> Result<(Self, LazyReport), LoadError> {
        let with_names = |size: &T5Size| {
            let model = Self::new(size, device);
            named(&model, file.clone()).map(|file| (model, file))
        };
        let (mut model, mut names) = with_names(size)?;
        check_tables(&names, &TABLES, size, device)?;
        let shape = [size.vocabulary, size.width];
        if size.tied && has_another_table(&names, "unused.lm_head.weight", shape, device)? {
            (model, names) = with_names(&T5Size { tied: false, ..*size })?;
        }
        load_from(model, &names, options, &[])
    }

    /// What the head reads, `[batch, length, width]`.
    fn hidden(&self, source: Tensor<2, Int>, tokens: Tensor<2, Int>) -> Tensor<3> {
        let memory = self.encoder.forward(self.words.forward(source), None, None);
        self.scaled(self.decoder.forward(self.words.forward(tokens), None, Some(memory)))
    }

    fn scaled(&self, x: Tensor<3>) -> Tensor<3> {
        if !self.scales_outputs {
            return x;
        }
        let width = self.words.weight.lazy_shape()[1];
        x * (width as f64).powf(-0.5)
    }

    /// `[width, vocabulary]`
    fn head(&self) -> Tensor<2> {
        match &self.head {
            Some(head) => head.weight.val(),
            None => self.words.weight.val().transpose(),
        }
    }
}

impl EncoderDecoder for T5 {
    fn new(size: &T5Size, device: &Device) -> Self {
        Self {
            words: EmbeddingConfig::new(size.vocabulary, size.width).init(device),
            encoder: Stack::new(size, false, device),
            decoder: Stack::new(size, true, device),
            head: (!size.tied).then(|| linear_layer(size.width, size.vocabulary, device)),
            scales_outputs: size.scales_outputs,
        }
    }

    fn logits(&self, source: Tensor<2, Int>, tokens: Tensor<2, Int>) -> Tensor<3> {
        linear(self.hidden(source, tokens), self.head(), None)
    }

    fn loss(&self, source: Tensor<2, Int>, tokens: Tensor<2, Int>, next: Tensor<2, Int>) -> Tensor<1> {
        next_token_loss(self.hidden(source, tokens), &self.words, self.head.as_ref(), None, next, None)
    }
}

/// Those of the encoder. Weights of the decoder are not read. In memory is also a number for each head and each pair of places in the longest text,
/// which attention adds to its products.
impl FeatureEncoder for T5 {
    type Batch = Vec<Vec<u32>>;

    fn layers(&self) -> usize {
        self.encoder.blocks.len()
    }

    fn device(&self) -> Device {
        self.encoder.norm.gamma.device()
    }

    fn hidden_states(&self, batch: &Self::Batch, layer: Option<usize>) -> Result<HiddenStates, FeatureError> {
        check(self, batch.len(), layer)?;
        self.encoder.hidden_states(&self.words, batch, layer)
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
        (r"\.layer\.[12]\.DenseReluDense\.wi(_0)?\.", ".inner."),
        (r"\.layer\.[12]\.DenseReluDense\.wi_1\.", ".gate."),
        (r"\.layer\.[12]\.DenseReluDense\.wo\.", ".outer."),
        (r"\.attention\.q\.", ".attention.query."),
        (r"\.attention\.k\.", ".attention.key."),
        (r"\.attention\.v\.", ".attention.value."),
        (r"\.attention\.o\.", ".attention.output."),
    ];

    fn first_names(&self) -> &'static [(&'static str, &'static str)] {
        if self.head.is_some() { &[(r"^lm_head\.", "head.")] } else { &[] }
    }

    fn tied_table(&self) -> Option<&'static str> {
        Some("words") // Python reads the tables of encoder and decoder
    }

    fn module_name(&self, path: &str) -> String {
        if path == "head" { "lm_head".into() } else { self.encoder.module_name(path) }
    }

    fn split(&self, file: WeightFile) -> Result<WeightFile, LazyError> {
        with_words(file)
    }
}
