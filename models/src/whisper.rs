// Whisper (arXiv 2212.04356), written once, with the topology of Hugging Face except for the dropout of attention weights in the decoder, which
// `attention` does not have. The module that includes this file chooses `nn`, `attention` and `linear`.
use crate::cache::Part;
use crate::features::check;
use crate::heads::by_heads;
use crate::hugging_face::{HuggingFace, LoadError, load_from, named, replaced};
use crate::tables::has_another_table;
use crate::{FeatureEncoder, FeatureError, HiddenStates, WhisperSize};
use burn::module::{Module, Param, ParamId};
use burn::nn::PaddingConfig1d;
use burn::tensor::{Device, Int, Tensor, TensorData, ops::AttentionModuleOptions};
use burn_memsave::lazy::{LazyOptions, LazyReport, WeightFile};
use burn_memsave::plan;
use nn::activation::Gelu;
use nn::conv::{Conv1d, Conv1dConfig};
use nn::transformer::{TransformerEncoder, TransformerEncoderConfig};
use nn::{
    Dropout, DropoutConfig, Embedding, EmbeddingConfig, LayerNorm, LayerNormConfig, Linear, LinearConfig,
};
use std::path::Path;

/// Attention of the decoder, to itself or to the encoder.
#[derive(Module, Debug)]
pub struct Attention {
    query: Linear,
    /// Without a bias.
    key: Linear,
    value: Linear,
    output: Linear,
    heads: usize,
}

impl Attention {
    fn new(size: &WhisperSize, device: &Device) -> Self {
        let linear = |bias| LinearConfig::new(size.width, size.width).with_bias(bias).init(device);
        let (query, key, value) = (linear(true), linear(false), linear(true));
        Self { query, key, value, output: linear(true), heads: size.decoder_heads }
    }

    /// `[batch, heads, length, width of a head]`
    fn split(&self, linear: &Linear, x: Tensor<3>) -> Tensor<4> {
        by_heads(linear.forward(x), self.heads)
    }

    fn keys_and_values(&self, x: Tensor<3>) -> [Tensor<4>; 2] {
        [self.split(&self.key, x.clone()), self.split(&self.value, x)]
    }

    /// To itself.
    fn forward(&self, x: Tensor<3>, part: Part<'_>) -> Tensor<3> {
        let states = self.keys_and_values(x.clone());
        let [key, value] = match part.before {
            Some(before) => before.extend(states),
            None => states,
        };
        let query = self.split(&self.query, x);
        let causal = AttentionModuleOptions { is_causal: part.unseen.is_none(), ..Default::default() };
        self.joined(attention(query, key, value, part.unseen, None, causal))
    }

    /// To what has these keys and values.
    fn to(&self, x: Tensor<3>, [key, value]: [Tensor<4>; 2]) -> Tensor<3> {
        let query = self.split(&self.query, x);
        self.joined(attention(query, key, value, None, None, AttentionModuleOptions::default()))
    }

    fn joined(&self, context: Tensor<4>) -> Tensor<3> {
        self.output.forward(context.swap_dims(1, 2).flatten(2, 3))
    }
}

/// `x + attention(norm(x))`, `x + cross(norm(x), memory)`, then `x + outer(gelu(inner(norm(x))))`.
#[derive(Module, Debug)]
pub struct Block {
    attention_norm: LayerNorm,
    attention: Attention,
    cross_norm: LayerNorm,
    cross: Attention,
    feed_forward_norm: LayerNorm,
    inner: Linear,
    gelu: Gelu,
    outer: Linear,
    dropout: Dropout,
    inner_dropout: Dropout,
}

impl Block {
    fn new(size: &WhisperSize, device: &Device) -> Self {
        let norm = || LayerNormConfig::new(size.width).init(device);
        Self {
            attention_norm: norm(),
            attention: Attention::new(size, device),
            cross_norm: norm(),
            cross: Attention::new(size, device),
            feed_forward_norm: norm(),
            inner: LinearConfig::new(size.width, size.decoder_hidden).init(device),
            gelu: Gelu::new(),
            outer: LinearConfig::new(size.decoder_hidden, size.width).init(device),
            dropout: DropoutConfig::new(size.dropout).init(),
            inner_dropout: DropoutConfig::new(size.inner_dropout).init(),
        }
    }

    /// `memory`: keys and values of what the encoder made.
    fn forward(&self, x: Tensor<3>, memory: [Tensor<4>; 2], part: Part<'_>) -> Tensor<3> {
        let y = self.attention.forward(self.attention_norm.forward(x.clone()), part);
        let x = x + self.dropout.forward(y);
        let y = self.cross.to(self.cross_norm.forward(x.clone()), memory);
        let x = x + self.dropout.forward(y);
        let y = self.gelu.forward(self.inner.forward(self.feed_forward_norm.forward(x.clone())));
        x + self.dropout.forward(self.outer.forward(self.inner_dropout.forward(y)))
    }
}

/// `sin(place f)` and then `cos(place f)` for frequencies `f` from 1 to 1/10,000, `[places, width]`.
fn sinusoids(places: usize, width: usize) -> TensorData {
    let waves = width / 2;
    let step = 1e4f64.ln() / waves.saturating_sub(1).max(1) as f64;
    let angle = |place: usize, wave: usize| place as f64 * (-step * wave as f64).exp();
    let number = |place: usize, feature: usize| match feature < waves {
        true => angle(place, feature).sin() as f32,
        false => angle(place, feature - waves).cos() as f32,
    };
    let numbers = (0..places).flat_map(|place| (0..width).map(move |feature| number(place, feature)));
    TensorData::new(numbers.collect::<Vec<_>>(), [places, width])
}

/// Encoder of sound, and decoder of text.
///
/// In f16, numbers that become too large are infinite here, where `transformers` clamps those of the encoder.
/// Features, and texts that are generated, then end with an error (`NotFinite`); bf16 and f32 have room for such
/// numbers.
#[derive(Module, Debug)]
pub struct Whisper {
    conv_1: Conv1d,
    conv_2: Conv1d,
    gelu: Gelu,
    /// Waves, which are not trained.
    positions: Embedding,
    encoder: TransformerEncoder,
    encoder_norm: LayerNorm,
    words: Embedding,
    token_positions: Embedding,
    blocks: Vec<Block>,
    norm: LayerNorm,
    dropout: Dropout,
}

impl Whisper {
    /// With random weights, and waves as the positions of the encoder, which are not trained.
    pub fn new(size: &WhisperSize, device: &Device) -> Self {
        let &WhisperSize { width, places, .. } = size;
        let conv = |channels, stride| {
            let config = Conv1dConfig::new(channels, width, 3).with_stride(stride);
            config.with_padding(PaddingConfig1d::Explicit(1, 1)).init(device)
        };
        let encoder = TransformerEncoderConfig::new(width, size.hidden, size.heads, size.layers)
            .with_dropout(size.dropout)
            .with_norm_first(true);
        let mut encoder = encoder.init(device);
        for layer in &mut encoder.layers {
            layer.pwff.dropout = DropoutConfig::new(size.inner_dropout).init();
            layer.mha.dropout = DropoutConfig::new(size.attention_dropout).init();
            layer.mha.key.bias = None;
        }
        let embedding = |count| EmbeddingConfig::new(count, width).init(device);
        let waves = Param::uninitialized(
            ParamId::new(),
            move |device, _| Tensor::from_data(sinusoids(places, width), device),
            device.clone(),
            false,
            [places, width].into(),
        );
        let norm = || LayerNormConfig::new(width).init(device);
        Self {
            conv_1: conv(size.mels, 1),
            conv_2: conv(width, 2),
            gelu: Gelu::new(),
            positions: Embedding { weight: waves },
            encoder,
            encoder_norm: norm(),
            words: embedding(size.vocabulary),
            token_positions: embedding(size.length),
            blocks: (0..size.decoder_layers).map(|_| Block::new(size, device)).collect(),
            norm: norm(),
            dropout: DropoutConfig::new(size.dropout).init(),
        }
    }

    /// The model in a directory of Hugging Face: the size in its `config.json`, and its weights, which stay in their file as far as the options
    /// say.
    ///
    /// ```no_run
    /// use burn::tensor::{Device, Tensor};
    /// use burn_memsave::lazy::{LazyOptions, WeightFile};
    /// use burn_memsave_models::{GenerateOptions, generate, memsave::whisper::Whisper};
    ///
    /// let device = Device::flex();
    /// let (model, _) = Whisper::from_directory("whisper-large-v3", &LazyOptions::new().with_budget(1 << 30), &device)?;
    /// // `input_features` of Python's `WhisperFeatureExtractor`, `[batch, mels, frames]`
    /// let sound = Tensor::from_data(WeightFile::open("sound.safetensors")?.read("input_features")?, &device);
    /// let listener = model.listener(sound)?;
    /// let prompt = vec![50258, 50259, 50360, 50364]; // start, language, task, no timestamps
    /// let generated = generate(&listener, &[prompt], &GenerateOptions::new(200).with_ends([50257]), |_, _| ())?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    ///
    /// If the configuration asks for what this model does not have, if the weights cannot be loaded, or if the file has a head with other
    /// numbers than the embedding.
    pub fn from_directory(
        directory: impl AsRef<Path>,
        options: &LazyOptions,
        device: &Device,
    ) -> Result<(Self, LazyReport), LoadError> {
        let size = WhisperSize::from_directory(directory.as_ref())?;
        Self::from_file(&size, WeightFile::open(directory)?, options, device)
    }

    /// A model of this size with the weights in a file that is open, or [mapped](WeightFile::open_mapped).
    ///
    /// # Errors
    ///
    /// If the weights cannot be loaded, or if the file has a head with other numbers than the embedding.
    pub fn from_file(
        size: &WhisperSize,
        file: WeightFile,
        options: &LazyOptions,
        device: &Device,
    ) -> Result<(Self, LazyReport), LoadError> {
        let model = Self::new(size, device);
        let file = named(&model, file)?;
        if has_another_table(&file, "unused.proj_out.weight", [size.vocabulary, size.width], device)? {
            let file = file.path().to_path_buf();
            return Err(LoadError::Names { file, missing: vec![], unused: vec!["proj_out.weight".into()] });
        }
        load_from(model, &file, options, &[])
    }

    /// Mels and frames of a sound.
    fn sound_shape(&self) -> [usize; 2] {
        // The second convolution takes every second frame.
        [self.conv_1.weight.lazy_shape()[1], 2 * self.positions.weight.lazy_shape()[0]]
    }

    /// What so many layers of the encoder make of sound, `[batch, mels, frames]`: `[batch, frames / 2, width]`.
    fn through(&self, layers: usize, sound: Tensor<3>) -> Tensor<3> {
        let x = self.gelu.forward(self.conv_1.forward(sound));
        let x = self.gelu.forward(self.conv_2.forward(x)).swap_dims(1, 2);
        let places = Tensor::<1, Int>::arange(0..x.dims()[1] as i64, &x.device()).unsqueeze::<2>();
        let x = self.dropout.forward(x + self.positions.forward(places));
        self.encoder
            .layers
            .iter()
            .take(layers)
            .fold(x, |x, layer| plan::block(layer, x, |layer, x| layer.forward(x, None, None)))
    }

    /// `places`: those of the tokens in their texts, `[batch or 1, length]`.
    fn embedded(&self, tokens: Tensor<2, Int>, places: Tensor<2, Int>) -> Tensor<3> {
        self.dropout.forward(self.words.forward(tokens) + self.token_positions.forward(places))
    }

    /// Logits `[batch, length, vocabulary]` of tokens `[batch, length]`, given sound `[batch, mels, frames]`.
    ///
    /// # Panics
    ///
    /// If the sound has other mels than the model, or not two frames for each position of the encoder; if a text
    /// is longer than the table of positions; or if there is not a text for each sound.
    pub fn logits(&self, sound: Tensor<3>, tokens: Tensor<2, Int>) -> Tensor<3> {
        let ([sounds, mels, frames], [texts, length]) = (sound.dims(), tokens.dims());
        assert_eq!([mels, frames], self.sound_shape(), "mels and frames of the sound, and those of the model");
        let longest = self.token_positions.weight.lazy_shape()[0];
        assert!(length <= longest, "{length} tokens, and the longest text of the model has {longest}");
        assert_eq!(texts, sounds, "a text for each sound");
        let memory = self.encoder_norm.forward(self.through(self.encoder.layers.len(), sound));
        let places = Tensor::<1, Int>::arange(0..length as i64, &tokens.device()).unsqueeze();
        let x = self.blocks.iter().fold(self.embedded(tokens, places), |x, block| {
            plan::block(block, (x, memory.clone()), |block, (x, memory)| {
                block.forward(x, block.cross.keys_and_values(memory), Part::default())
            })
        });
        linear(self.norm.forward(x), self.words.weight.val().transpose(), None)
    }
}

/// Those of the encoder, of log-mel spectrograms `[batch, mels, frames]`. Weights of the decoder are not read.
impl FeatureEncoder for Whisper {
    type Batch = Tensor<3>;

    fn layers(&self) -> usize {
        self.encoder.layers.len()
    }

    fn device(&self) -> Device {
        self.norm.gamma.device()
    }

    fn hidden_states(&self, batch: &Self::Batch, layer: Option<usize>) -> Result<HiddenStates, FeatureError> {
        let [sounds, mels, frames] = batch.dims();
        check(self, sounds, layer)?;
        let expected = self.sound_shape();
        if [mels, frames] != expected {
            return Err(FeatureError::Sound { found: [mels, frames], expected });
        }
        let batch = batch.clone().to_device(&self.device()).cast(self.norm.gamma.val().dtype());
        let states = match layer.filter(|&layer| layer < self.encoder.layers.len()) {
            Some(layers) => self.through(layers, batch),
            // In `transformers`, those of the last layer are normalized, too.
            None => self.encoder_norm.forward(self.through(self.encoder.layers.len(), batch)),
        };
        let [_, tokens, _] = states.dims();
        Ok(HiddenStates { states, lengths: vec![tokens; sounds] })
    }
}

impl HuggingFace for Whisper {
    const NAMES: &'static [(&'static str, &'static str)] = &[
        (r"^proj_out\.", "unused.proj_out."), // the embedding
        (r"^model\.", ""),
        (r"\.self_attn\.q_proj\.", ".attention.query."),
        (r"\.self_attn\.k_proj\.", ".attention.key."),
        (r"\.self_attn\.v_proj\.", ".attention.value."),
        (r"\.self_attn\.out_proj\.", ".attention.output."),
        (r"\.encoder_attn\.q_proj\.", ".cross.query."),
        (r"\.encoder_attn\.k_proj\.", ".cross.key."),
        (r"\.encoder_attn\.v_proj\.", ".cross.value."),
        (r"\.encoder_attn\.out_proj\.", ".cross.output."),
        (r"^encoder\.conv([12])\.", "conv_$1."),
        (r"^encoder\.embed_positions\.", "positions."),
        (r"^encoder\.layer_norm\.", "encoder_norm."),
        (r"^(encoder\..*)\.attention\.", "$1.mha."),
        (r"^(encoder\..*)\.self_attn_layer_norm\.", "$1.norm_2."),
        (r"^(encoder\..*)\.final_layer_norm\.", "$1.norm_1."),
        (r"^(encoder\..*)\.fc1\.", "$1.pwff.linear_inner."),
        (r"^(encoder\..*)\.fc2\.", "$1.pwff.linear_outer."),
        (r"^decoder\.embed_tokens\.", "words."),
        (r"^decoder\.embed_positions\.", "token_positions."),
        (r"^decoder\.layer_norm\.", "norm."),
        (r"^decoder\.layers\.", "blocks."),
        (r"\.self_attn_layer_norm\.", ".attention_norm."),
        (r"\.encoder_attn_layer_norm\.", ".cross_norm."),
        (r"\.final_layer_norm\.", ".feed_forward_norm."),
        (r"\.fc1\.", ".inner."),
        (r"\.fc2\.", ".outer."),
    ];

    fn tied_table(&self) -> Option<&'static str> {
        Some("words")
    }

    fn module_name(&self, path: &str) -> String {
        let of_file = match path {
            "words" => "decoder.embed_tokens".into(),
            "token_positions" => "decoder.embed_positions".into(),
            "positions" => "encoder.embed_positions".into(),
            "norm" => "decoder.layer_norm".into(),
            "encoder_norm" => "encoder.layer_norm".into(),
            "conv_1" => "encoder.conv1".into(),
            "conv_2" => "encoder.conv2".into(),
            _ => replaced(
                path,
                &[
                    ("blocks.", "decoder.layers."),
                    (".norm_2", ".self_attn_layer_norm"),
                    (".norm_1", ".final_layer_norm"),
                    (".attention_norm", ".self_attn_layer_norm"),
                    (".cross_norm", ".encoder_attn_layer_norm"),
                    (".feed_forward_norm", ".final_layer_norm"),
                    (".mha.", ".attention."),
                    (".attention.output", ".self_attn.out_proj"),
                    (".cross.output", ".encoder_attn.out_proj"),
                    (".attention.query", ".self_attn.q_proj"),
                    (".attention.key", ".self_attn.k_proj"),
                    (".attention.value", ".self_attn.v_proj"),
                    (".cross.query", ".encoder_attn.q_proj"),
                    (".cross.key", ".encoder_attn.k_proj"),
                    (".cross.value", ".encoder_attn.v_proj"),
                    (".pwff.linear_inner", ".fc1"),
                    (".pwff.linear_outer", ".fc2"),
                    (".inner", ".fc1"),
                    (".outer", ".fc2"),
                ],
            ),
        };
        format!("model.{of_file}")
    }
}
