// Llama (arXiv 2407.21783), Mistral (arXiv 2310.06825), Mixtral (arXiv 2401.04088), Qwen2 (arXiv 2407.10671), Qwen3 (arXiv 2505.09388),
// Gemma 1 to 3 (arXiv 2403.08295, 2408.00118, 2503.19786) and Phi-3 (arXiv 2404.14219), written once, with the topology of Hugging Face. The
// module that includes this file chooses `nn`, a grouped-query `attention`, and `linear`, and provides `next_token_loss` and `rotate`.
use crate::cache::{Part, unseen};
use crate::experts::{Announcer, Chosen, Visits};
use crate::hugging_face::{HuggingFace, replaced};
use crate::{Decoder, DecoderSize, Experts, Gemma, RotaryStretch};
use burn::module::{Module, Param};
use burn::tensor::activation::{sigmoid, softmax};
use burn::tensor::{DType, Device, IndexingUpdateOp, Int, Tensor, ops::AttentionModuleOptions};
use burn_memsave::lazy::{LazyCache, LazyError, RowOrder, RowOrders, WeightFile};
use burn_memsave::plan;
use nn::activation::{Gelu, SwiGlu, SwiGluConfig};
use nn::{
    Embedding, EmbeddingConfig, Initializer, Linear, LinearConfig, RmsNorm, RmsNormConfig, RotaryEncoding,
    RotaryEncodingConfig,
};

fn linear_layer(input: usize, output: usize, bias: bool, device: &Device) -> Linear {
    LinearConfig::new(input, output).with_bias(bias).init(device)
}

/// Begins as a multiplication with 1.
fn norm(size: &DecoderSize, width: usize, device: &Device) -> RmsNorm {
    let norm = RmsNormConfig::new(width).with_epsilon(size.epsilon).init(device);
    match size.gemma {
        Some(_) => RmsNorm { gamma: Initializer::Zeros.init([width], device), ..norm },
        None => norm,
    }
}

/// Multiplies with `1 + gamma` if it `adds_one`.
fn normalized<const D: usize>(norm: &RmsNorm, x: Tensor<D>, adds_one: bool) -> Tensor<D> {
    if !adds_one {
        return norm.forward(x);
    }
    let gamma = Param::initialized(norm.gamma.id, norm.gamma.val() + 1.0);
    RmsNorm { gamma, epsilon: norm.epsilon }.forward(x)
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
    /// Whether the pairs of features that are rotated are from both halves of them, as in Hugging Face, or neighbors.
    halves: bool,
    /// Tokens that a token sees.
    window: Option<usize>,
    scale: Option<f64>,
    softcap: Option<f64>,
    adds_one: bool,
}

impl Attention {
    pub(super) fn new(size: &DecoderSize, layer: usize, device: &Device) -> Self {
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
            // Orders of rows are those of heads that are rotated as a whole.
            halves: size.rotated.is_some(),
            window: size.window.filter(|window| window.is_of(layer)).map(|window| window.tokens),
            scale: size.gemma.and_then(|gemma| gemma.attention_scale),
            softcap: size.gemma.and_then(|gemma| gemma.attention_softcap),
            adds_one: size.gemma.is_some(),
        }
    }

    /// With other pairs of features that are rotated.
    pub(super) fn with_halves(self, halves: bool) -> Self {
        Self { halves, ..self }
    }

    pub(super) fn forward(&self, x: Tensor<3>, rotary: &RotaryEncoding, part: Part<'_>) -> Tensor<3> {
        let [batch, length, _] = x.dims();
        let split = |linear: &Linear, heads: usize| -> Tensor<4> {
            linear.forward(x.clone()).reshape([batch as i64, length as i64, heads as i64, -1])
        };
        let rotated = |x: Tensor<4>, norm: &Option<RmsNorm>| {
            let x = match norm {
                Some(norm) => normalized(norm, x, self.adds_one),
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
        let mut options = AttentionModuleOptions { is_causal: part.unseen.is_none(), ..Default::default() };
        (options.scale, options.softcap) = (self.scale, self.softcap);
        let context = attention(query, key, value, part.unseen, None, options);
        self.output.forward(context.swap_dims(1, 2).flatten(2, 3))
    }
}

/// `x + attention(norm(x))`, then `x + down(gate(norm(x)))`, or `x + mixture(norm(x))`. In later Gemmas, what is added is normalized, too.
#[derive(Module, Debug)]
pub struct Block {
    attention_norm: RmsNorm,
    attention: Attention,
    attention_output_norm: Option<RmsNorm>,
    feed_forward_norm: RmsNorm,
    gate: Option<SwiGlu>,
    /// Instead of the gate's SiLU.
    gelu: Option<Gelu>,
    down: Option<Linear>,
    /// Instead of the gate and what is after it.
    mixture: Option<Mixture>,
    feed_forward_output_norm: Option<RmsNorm>,
    adds_one: bool,
}

impl Block {
    fn new(size: &DecoderSize, layer: usize, device: &Device) -> Self {
        let norm = || norm(size, size.width, device);
        let normalizes_outputs = size.gemma.is_some_and(|gemma| gemma.normalizes_outputs);
        let &DecoderSize { width, hidden, biases, .. } = size;
        let experts = size.experts.filter(|experts| experts.are_in(layer));
        let gate = SwiGluConfig::new(width, hidden).with_bias(biases.feed_forward);
        let is_dense = experts.is_none();
        Self {
            attention_norm: norm(),
            attention: Attention::new(size, layer, device),
            attention_output_norm: normalizes_outputs.then(norm),
            feed_forward_norm: norm(),
            gate: is_dense.then(|| gate.init(device)),
            gelu: size.gemma.map(|_| Gelu::new_approximate()),
            down: is_dense.then(|| linear_layer(hidden, width, biases.feed_forward, device)),
            mixture: experts.map(|experts| Mixture::new(size, &experts, device)),
            feed_forward_output_norm: normalizes_outputs.then(norm),
            adds_one: size.gemma.is_some(),
        }
    }

    fn forward(&self, x: Tensor<3>, rotary: &RotaryEncoding, part: Part<'_>) -> Tensor<3> {
        let normalized = |norm: &RmsNorm, x| normalized(norm, x, self.adds_one);
        let output = |norm: &Option<RmsNorm>, x| match norm {
            Some(norm) => normalized(norm, x),
            None => x,
        };
        let y = self.attention.forward(normalized(&self.attention_norm, x.clone()), rotary, part);
        let x = x + output(&self.attention_output_norm, y);
        let y = self.feed_forward(normalized(&self.feed_forward_norm, x.clone()));
        x + output(&self.feed_forward_output_norm, y)
    }

    fn feed_forward(&self, x: Tensor<3>) -> Tensor<3> {
        match (&self.gate, &self.down, &self.mixture) {
            (Some(gate), Some(down), None) => down.forward(self.gated(gate, x)),
            (None, None, Some(mixture)) => mixture.forward(x),
            _ => unreachable!("a block has a gate and what is after it, or a mixture"),
        }
    }

    fn gated(&self, gate: &SwiGlu, x: Tensor<3>) -> Tensor<3> {
        let SwiGlu { linear_inner, linear_outer } = gate;
        match &self.gelu {
            Some(gelu) => gelu.forward(linear_inner.forward(x.clone())) * linear_outer.forward(x),
            None => gate.forward(x),
        }
    }
}

/// The language model.
#[derive(Module, Debug)]
pub struct Llama {
    words: Embedding,
    rotary: RotaryEncoding,
    /// That of layers with a window, if it is another one.
    window_rotary: Option<RotaryEncoding>,
    blocks: Vec<Block>,
    norm: RmsNorm,
    /// `None` if the head is the embedding.
    head: Option<Linear>,
    vocabulary: usize,
    head_width: usize,
    /// Whether checkpoints have one layer for queries, keys and values, and one for both halves of a gate.
    joined: bool,
    /// What embeddings are multiplied with.
    words_scale: Option<f64>,
    logit_softcap: Option<f64>,
    adds_one: bool,
}

impl Llama {
    /// What the head reads, `[batch, length, width]`.
    fn hidden(&self, tokens: Tensor<2, Int>) -> Tensor<3> {
        let x = self.blocks.iter().fold(self.embedded(tokens), |x, block| {
            let block = (block.clone(), self.rotary(block).clone());
            plan::block(&block, x, |(block, rotary), x| {
                let unseen = unseen([0, 0, x.dims()[1]], block.attention.window, &[], &x.device());
                block.forward(x, rotary, Part { unseen, ..Part::default() })
            })
        });
        self.normalized(x)
    }

    fn embedded(&self, tokens: Tensor<2, Int>) -> Tensor<3> {
        let x = self.words.forward(tokens);
        match self.words_scale {
            Some(scale) => x * scale,
            None => x,
        }
    }

    /// The rotations in a block.
    fn rotary(&self, block: &Block) -> &RotaryEncoding {
        self.window_rotary.as_ref().filter(|_| block.attention.window.is_some()).unwrap_or(&self.rotary)
    }

    fn normalized(&self, x: Tensor<3>) -> Tensor<3> {
        normalized(&self.norm, x, self.adds_one)
    }

    fn normalizes_outputs(&self) -> bool {
        self.blocks.iter().any(|block| block.attention_output_norm.is_some())
    }

    fn mixtures(&self) -> impl Iterator<Item = &Mixture> {
        self.blocks.iter().filter_map(|block| block.mixture.as_ref())
    }

    fn capped(&self, logits: Tensor<3>) -> Tensor<3> {
        match self.logit_softcap {
            Some(cap) => (logits / cap).tanh() * cap,
            None => logits,
        }
    }

    /// `[width, vocabulary]`
    fn head(&self) -> Tensor<2> {
        match &self.head {
            Some(head) => head.weight.val(),
            None => self.words.weight.val().transpose(),
        }
    }
}

/// The rotations of heads of `width` features, for sequences of this length.
pub(super) fn rotary_encoding(
    [length, width]: [usize; 2],
    theta: f32,
    stretch: Option<RotaryStretch>,
    device: &Device,
) -> RotaryEncoding {
    let config = RotaryEncodingConfig::new(length, width).with_theta(theta);
    let Some(stretch) = stretch else { return config.init(device) };
    let factors: Vec<f32> =
        stretch.factors([length, width], theta).into_iter().map(|factor| factor as f32).collect();
    let stretched = |frequencies: Tensor<1>| frequencies / Tensor::from_floats(factors.as_slice(), device);
    let mut encoding = config.init_with_frequency_scaling(stretched, device);
    if stretch.scale() != 1.0 {
        encoding.freq_complex = encoding.freq_complex * stretch.scale();
    }
    encoding
}

impl Decoder for Llama {
    type Size = DecoderSize;

    fn new(size: &DecoderSize, device: &Device) -> Self {
        let head_width = size.head_width();
        let words = EmbeddingConfig::new(size.vocabulary, size.width);
        let rotary =
            |theta, stretch| rotary_encoding([size.length, size.rotated_width()], theta, stretch, device);
        Self {
            words: words.with_initializer(Initializer::Normal { mean: 0.0, std: 0.02 }).init(device),
            rotary: rotary(size.theta, size.stretch),
            window_rotary: size.window.and_then(|window| Some(rotary(window.theta?, None))),
            blocks: (0..size.layers).map(|layer| Block::new(size, layer, device)).collect(),
            norm: norm(size, size.width, device),
            head: (!size.tied).then(|| linear_layer(size.width, size.vocabulary, false, device)),
            vocabulary: size.vocabulary,
            head_width,
            joined: size.joined,
            words_scale: size.gemma.map(|_| (size.width as f64).sqrt()),
            logit_softcap: size.gemma.and_then(|Gemma { logit_softcap, .. }| logit_softcap),
            adds_one: size.gemma.is_some(),
        }
    }

    fn logits(&self, tokens: Tensor<2, Int>) -> Tensor<3> {
        self.capped(linear(self.hidden(tokens), self.head(), None))
    }

    fn loss(&self, tokens: Tensor<2, Int>, next: Tensor<2, Int>) -> Tensor<1> {
        let (x, head) = (self.hidden(tokens), self.head.as_ref());
        next_token_loss(x, &self.words, head, self.logit_softcap, next, None)
    }

    fn loss_of_some(&self, tokens: Tensor<2, Int>, next: Tensor<2, Int>, counts: Tensor<2>) -> Tensor<1> {
        let (x, head) = (self.hidden(tokens), self.head.as_ref());
        next_token_loss(x, &self.words, head, self.logit_softcap, next, Some(counts))
    }
}

/// Names of later Gemmas, where `post_attention_layernorm` is what its name says.
const GEMMA: &[(&str, &str)] = &[
    (r"\.post_attention_layernorm\.", ".attention_output_norm."),
    (r"\.pre_feedforward_layernorm\.", ".feed_forward_norm."),
    (r"\.post_feedforward_layernorm\.", ".feed_forward_output_norm."),
];

/// Modules of mixtures here and in checkpoints, which have one tensor for each expert. (Since version 5, `transformers` joins the tensors when it
/// loads them, and splits them when it saves them.)
const MIXTRAL: &[(&str, &str)] = &[
    (".mixture.router", ".block_sparse_moe.gate"),
    (".mixture.experts", ".block_sparse_moe.experts"),
    (".gate.linear_inner", ".w1"),
    (".gate.linear_outer", ".w3"),
    (".down", ".w2"),
];

/// The same of Qwen2 and Qwen3.
const QWEN: &[(&str, &str)] = &[
    (".mixture.router", ".mlp.gate"),
    (".mixture.experts", ".mlp.experts"),
    (".mixture.shared_gate", ".mlp.shared_expert_gate"),
    (".mixture.shared", ".mlp.shared_expert"),
    (".gate.linear_inner", ".gate_proj"),
    (".gate.linear_outer", ".up_proj"),
    (".down", ".down_proj"),
];

/// The tensors of a layer have so many rows, and not more, which would be left out.
fn check_rows(file: &WeightFile, layer: &str, rows: usize) -> Result<(), LazyError> {
    let differs = |shape: &[usize]| shape.first() != Some(&rows);
    let of_layer = file.tensors().filter(|tensor| tensor.name.contains(layer));
    let Some(tensor) = of_layer.into_iter().find(|tensor| differs(&tensor.shape[..])) else { return Ok(()) };
    let found = Box::from(&tensor.shape[..]);
    let expected = core::iter::once(&rows).chain(tensor.shape.iter().skip(1)).copied().collect();
    let parameter = "attention.query, attention.key, attention.value".into();
    let (file, tensor) = (file.path().to_path_buf(), tensor.name.into());
    Err(LazyError::Shape { file, tensor, parameter, expected, found })
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
        (r"\.block_sparse_moe\.", ".mlp."),
        (r"\.mlp\.gate\.", ".mixture.router."),
        (r"\.mlp\.(experts\.\d+)\.", ".mixture.$1."),
        (r"\.mlp\.shared_expert\.", ".mixture.shared."),
        (r"\.mlp\.shared_expert_gate\.", ".mixture.shared_gate."),
        (r"(\.mixture\..*)\.(gate_proj|w1)\.", "$1.gate.linear_inner."),
        (r"(\.mixture\..*)\.(up_proj|w3)\.", "$1.gate.linear_outer."),
        (r"(\.mixture\..*)\.(down_proj|w2)\.", "$1.down."),
        (r"\.mlp\.gate_proj\.", ".gate.linear_inner."),
        (r"\.mlp\.up_proj\.", ".gate.linear_outer."),
        (r"\.mlp\.down_proj\.", ".down."),
    ];

    fn tied_table(&self) -> Option<&'static str> {
        self.head.is_none().then_some("words")
    }

    fn first_names(&self) -> &'static [(&'static str, &'static str)] {
        if self.normalizes_outputs() { GEMMA } else { &[] }
    }

    fn module_name(&self, path: &str) -> String {
        if path == "head" {
            return "lm_head".into();
        }
        if path.contains(".mixture.") {
            let is_mixtral = self.mixtures().any(|mixture| mixture.is_mixtral);
            let names = if is_mixtral { MIXTRAL } else { QWEN };
            return format!("model.{}", replaced(&replaced(path, names), &[("blocks.", "layers.")]));
        }
        let gemma = [
            (".attention_output_norm", ".post_attention_layernorm"),
            (".feed_forward_norm", ".pre_feedforward_layernorm"),
            (".feed_forward_output_norm", ".post_feedforward_layernorm"),
        ];
        let path = if self.normalizes_outputs() { &replaced(path, &gemma) } else { path };
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

    fn with_cache(mut self, cache: &LazyCache) -> Self {
        for (layer, block) in self.blocks.iter_mut().enumerate() {
            let path = format!("blocks.{layer}.mixture.experts");
            let announcer = Announcer { cache: cache.clone(), path };
            block.mixture.iter_mut().for_each(|mixture| mixture.announcer = Some(announcer.clone()));
        }
        self
    }

    fn whole(&self, path: &str) -> Option<&'static str> {
        let ends = |names: &[&str]| names.iter().any(|name| path.ends_with(name));
        match self.joined {
            true if ends(&[".attention.query", ".attention.key", ".attention.value"]) => Some("qkv_proj"),
            true if ends(&[".gate.linear_inner", ".gate.linear_outer"]) => Some("gate_up_proj"),
            _ => None,
        }
    }

    fn without_adapter(&self, path: &str) -> Option<&'static str> {
        // `transformers` joins the matrices of experts, and `peft` takes any layer with one of their names for them.
        let is_feed_forward = path.starts_with("blocks.") && !path.contains(".attention.");
        (is_feed_forward && self.mixtures().next().is_some()).then_some(
            "in a model with mixtures of experts, Python's `peft` has no adapters of feed-forward layers",
        )
    }

    fn split(&self, file: WeightFile) -> Result<WeightFile, LazyError> {
        let Some(block) = self.blocks.first().filter(|_| self.joined) else { return Ok(file) };
        let Attention { heads, key_heads, .. } = block.attention;
        let [queries, keys] = [heads, key_heads].map(|heads| heads * self.head_width);
        let ends = [queries, queries + keys, queries + 2 * keys];
        let has = |file: &WeightFile, layer: &str| file.tensors().any(|tensor| tensor.name.contains(layer));
        let file = match has(&file, ".self_attn.qkv_proj.") {
            true => {
                check_rows(&file, ".self_attn.qkv_proj.", ends[2])?;
                let parts = [
                    (".attention.query.", 0..ends[0]),
                    (".attention.key.", ends[0]..ends[1]),
                    (".attention.value.", ends[1]..ends[2]),
                ];
                file.with_rows(r"\.self_attn\.qkv_proj\.", &parts)?
            }
            false => file,
        };
        match has(&file, ".mlp.gate_up_proj.") {
            true => {
                let halves = [".gate.linear_inner.", ".gate.linear_outer."];
                file.with_equal_rows(r"\.mlp\.gate_up_proj\.", &halves)
            }
            false => Ok(file),
        }
    }

    /// Burn rotates pairs of neighbors.
    fn row_orders(&self) -> RowOrders {
        if self.blocks.iter().all(|block| block.attention.halves) {
            return RowOrders::new();
        }
        let order = RowOrder::rotary_pairs(self.head_width);
        RowOrders::new().with(r"\.attention\.(query|key)(_norm)?$", order).expect("a regular expression")
    }
}
