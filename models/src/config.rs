//! Reads `config.json` as `transformers` writes it. What a configuration asks for and is not there is an error by name.
use crate::{Biases, DecoderSize, Experts, Gemma, Gpt2Size, GptJSize, RotaryStretch, Window};
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

mod encoders;

/// Why a configuration is refused.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("{}: {source}", file.display())]
    Io {
        /// The file.
        file: PathBuf,
        /// The error of the system.
        source: io::Error,
    },
    /// It is not JSON, or not an object.
    #[error("{}: {source}", file.display())]
    Json {
        /// The file.
        file: PathBuf,
        /// What is wrong.
        source: serde_json::Error,
    },
    /// A field is missing.
    #[error("{}: there is no {field}", file.display())]
    Missing {
        /// The file.
        file: PathBuf,
        /// The field.
        field: String,
    },
    /// A field has a value that no model here has.
    #[error("{}: {field} is {value}, which is not supported", file.display())]
    Unsupported {
        /// The file.
        file: PathBuf,
        /// The field; fields within others have both names, with a dot between.
        field: String,
        /// Its value.
        value: Value,
    },
}

impl DecoderSize {
    /// The size of the model in a directory of Hugging Face, by its `config.json`: a Llama, Mistral, Mixtral, Qwen2, Qwen3, a mixture of experts of
    /// these two, Gemma, Gemma 2, the text model of Gemma 3, or Phi-3.
    ///
    /// ```
    /// use burn_memsave_models::{DecoderSize, Window};
    ///
    /// # let directory = tempfile::tempdir()?;
    /// # let directory = directory.path();
    /// let config = r#"{
    ///     "model_type": "mistral", "vocab_size": 50, "hidden_size": 24, "intermediate_size": 40, "num_attention_heads": 6,
    ///     "num_key_value_heads": 2, "num_hidden_layers": 2, "max_position_embeddings": 64, "sliding_window": 16
    /// }"#;
    /// std::fs::write(directory.join("config.json"), config)?;
    /// let size = DecoderSize::from_directory(directory)?;
    /// assert_eq!((size.window, size.head_width()), (Some(Window::new(16)), 4));
    ///
    /// std::fs::write(directory.join("config.json"), config.replace("64", r#"64, "rope_scaling": {"rope_type": "yarn"}"#))?;
    /// let error = DecoderSize::from_directory(directory).unwrap_err();
    /// assert!(error.to_string().ends_with(r#"rope_scaling.rope_type is "yarn", which is not supported"#));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    ///
    /// If the file cannot be read, or asks for what these models do not have here.
    pub fn from_directory(directory: impl AsRef<Path>) -> Result<Self, ConfigError> {
        Self::of_fields(Fields::read(directory.as_ref().join("config.json"))?)
    }

    pub(crate) fn of_fields(mut fields: Fields) -> Result<Self, ConfigError> {
        let family: String = fields.require("model_type")?;
        const FAMILIES: [&str; 11] = [
            "llama",
            "mistral",
            "mixtral",
            "qwen2",
            "qwen2_moe",
            "qwen3",
            "qwen3_moe",
            "gemma",
            "gemma2",
            "gemma3_text",
            "phi3",
        ];
        if !FAMILIES.contains(&family.as_str()) {
            return Err(fields.unsupported("model_type", family.into()));
        }
        let heads = fields.positive("num_attention_heads")?;
        let (is_mixtral, is_phi3) = (family == "mixtral", family == "phi3");
        // Null means as many as heads of queries; where it is missing, so do Llamas and Phi-3 only.
        let key_heads = match family == "llama" || is_phi3 || fields.has("num_key_value_heads") {
            true => fields.take("num_key_value_heads")?.unwrap_or(heads),
            false => fields.require("num_key_value_heads")?,
        };
        let (is_gemma, is_gemma3) = (family.starts_with("gemma"), family == "gemma3_text");
        let mut size = Self {
            vocabulary: fields.positive("vocab_size")?,
            width: fields.positive("hidden_size")?,
            hidden: fields.positive("intermediate_size")?,
            heads,
            key_heads,
            head: fields.take("head_dim")?,
            layers: fields.few("num_hidden_layers")?,
            length: fields.positive("max_position_embeddings")?,
            window: None,
            theta: 10_000.0,
            stretch: None,
            rotated: None,
            biases: Biases::NONE,
            joined: is_phi3,
            normalizes_heads: false,
            epsilon: fields.real("rms_norm_eps")?.unwrap_or(if is_mixtral || is_phi3 { 1e-5 } else { 1e-6 }),
            tied: fields.take("tie_word_embeddings")?.unwrap_or(is_gemma),
            gemma: is_gemma.then(Gemma::default),
            experts: None,
        };
        match family.as_str() {
            "llama" => {
                size.biases = fields.biases()?;
                size.biases.feed_forward = fields.take("mlp_bias")?.unwrap_or(false);
            }
            "mistral" => size.window = fields.with_default("sliding_window", 4096)?.map(Window::new),
            "phi3" => {
                size.window = fields.take("sliding_window")?.map(Window::new);
                fields.without_dropout()?;
                fields.expect_code("modeling_phi3.Phi3ForCausalLM")?;
                // The length before wavelengths were stretched in a way that is refused.
                fields.values.remove("original_max_position_embeddings");
                let rotated = fields.rotated(size.head_width(), 1.0)?;
                size.rotated = Some(rotated).filter(|&width| width != size.head_width());
            }
            "mixtral" => {
                size.window = fields.take("sliding_window")?.map(Window::new);
                size.experts = Some(fields.experts_of_mixtral(&size)?);
            }
            "qwen2_moe" => {
                size.biases.inputs = fields.take("qkv_bias")?.unwrap_or(true);
                fields.without_windows()?;
                let shared = Some(fields.positive("shared_expert_intermediate_size")?);
                size.experts = Some(Experts { shared, ..fields.experts_of_qwen(&size, 4)? });
            }
            "qwen3_moe" => {
                size.biases = fields.biases()?;
                size.normalizes_heads = true;
                fields.without_windows()?;
                size.experts = Some(fields.experts_of_qwen(&size, 8)?);
            }
            "qwen2" => {
                size.biases.inputs = true;
                fields.without_windows()?;
            }
            "qwen3" => {
                size.biases = fields.biases()?;
                size.head = size.head.or(Some(128));
                size.normalizes_heads = true;
                fields.without_windows()?;
            }
            "gemma" => {
                size.biases = fields.biases()?;
                size.head = size.head.or(Some(256));
            }
            _ => {
                size.biases = fields.biases()?;
                size.head = size.head.or(Some(256));
                size.normalizes_heads = is_gemma3;
                let softcaps = if is_gemma3 { [None; 2] } else { [Some(50.0), Some(30.0)] };
                let scalar = fields.real("query_pre_attn_scalar")?.unwrap_or(256.0);
                size.gemma = Some(Gemma {
                    normalizes_outputs: true,
                    attention_scale: Some(scalar.sqrt().recip()),
                    attention_softcap: fields.softcap("attn_logit_softcapping", softcaps[0])?,
                    logit_softcap: fields.softcap("final_logit_softcapping", softcaps[1])?,
                });
                let tokens = fields.with_default("sliding_window", 4096)?;
                fields.values.remove("sliding_window_size"); // the same, of Gemma 2; transformers does not read it
                let every = fields.full_every(size.layers, if is_gemma3 { 6 } else { 2 })?;
                size.window = tokens.map(|tokens| Window { full_every: every, ..Window::new(tokens) });
            }
        }
        if is_gemma3 {
            let (theta, stretch, of_windows) = fields.rotary_positions_of_both()?;
            (size.theta, size.stretch) = (theta, stretch);
            size.window.iter_mut().for_each(|window| window.theta = Some(of_windows));
        } else {
            (size.theta, size.stretch) = fields.rotary_positions(if is_mixtral { 1e6 } else { 1e4 })?;
        }
        fields.packing()?;
        let activations = if is_gemma { &["gelu_pytorch_tanh", "gelu"][..] } else { &["silu"] };
        let activations: Vec<Value> = activations.iter().map(|&name| name.into()).collect();
        fields.expect("hidden_act", &activations)?;
        fields.expect("hidden_activation", &activations[..1])?;
        fields.expect("pretraining_tp", &[1.into()])?;
        // Dropout of attention weights, which these models do not have.
        fields.expect("attention_dropout", &[0.0.into(), 0.into()])?;
        fields.expect("is_causal", &[true.into()])?;
        if size.key_heads == 0 || !heads.is_multiple_of(size.key_heads) {
            return Err(fields.unsupported("num_key_value_heads", size.key_heads.into()));
        }
        if size.head_width() == 0 || size.head_width() > MOST || !size.head_width().is_multiple_of(2) {
            return Err(fields.unsupported("head_dim", size.head_width().into()));
        }
        if size.length.saturating_mul(size.head_width()) > MOST {
            return Err(fields.unsupported("max_position_embeddings", size.length.into()));
        }
        if size.window.is_some_and(|window| window.tokens == 0) {
            return Err(fields.unsupported("sliding_window", 0.into()));
        }
        fields.finish()?;
        Ok(size)
    }
}

impl Gpt2Size {
    /// The size of the GPT-2 in a directory of Hugging Face, by its `config.json`. Dropout of attention weights, which the model here does not
    /// have, is left out.
    ///
    /// # Errors
    ///
    /// If the file cannot be read, or asks for what the model does not have here.
    pub fn from_directory(directory: impl AsRef<Path>) -> Result<Self, ConfigError> {
        let mut fields = Fields::read(directory.as_ref().join("config.json"))?;
        let family: String = fields.require("model_type")?;
        if family != "gpt2" {
            return Err(fields.unsupported("model_type", family.into()));
        }
        let size = Self {
            vocabulary: fields.positive("vocab_size")?,
            width: fields.positive("n_embd")?,
            heads: fields.positive("n_head")?,
            layers: fields.few("n_layer")?,
            length: fields.positive("n_positions")?,
            dropout: fields.take("resid_pdrop")?.unwrap_or(0.1),
        };
        if !size.width.is_multiple_of(size.heads) {
            return Err(fields.unsupported("n_head", size.heads.into()));
        }
        if !(0.0..1.0).contains(&size.dropout) {
            return Err(fields.unsupported("resid_pdrop", size.dropout.into()));
        }
        let of_embeddings: Option<f64> = fields.take("embd_pdrop")?;
        if let Some(other) = of_embeddings.filter(|&rate| rate != size.dropout) {
            return Err(fields.unsupported("embd_pdrop", other.into()));
        }
        fields.expect("n_inner", &[(4 * size.width).into()])?;
        fields.expect("activation_function", &["gelu_new".into()])?;
        fields.expect("layer_norm_epsilon", &[1e-5.into()])?;
        fields.expect("scale_attn_weights", &[true.into()])?;
        fields.expect("tie_word_embeddings", &[true.into()])?;
        // What was there before all of these.
        const UNUSED: [&str; 4] = ["attn_pdrop", "n_ctx", "n_special", "predict_special_tokens"];
        fields.values.retain(|field, _| !UNUSED.contains(&field.as_str()));
        fields.remove_tasks();
        fields.finish()?;
        Ok(size)
    }
}

impl GptJSize {
    /// The size of the model in a directory of Hugging Face, by its `config.json`: a GPT-J, or a Phi 1 to 2.
    ///
    /// ```
    /// use burn_memsave_models::GptJSize;
    ///
    /// # let directory = tempfile::tempdir()?;
    /// # let directory = directory.path();
    /// let config = r#"{
    ///     "model_type": "phi", "vocab_size": 50, "hidden_size": 24, "intermediate_size": 40, "num_attention_heads": 3,
    ///     "num_hidden_layers": 2, "max_position_embeddings": 64
    /// }"#;
    /// std::fs::write(directory.join("config.json"), config)?;
    /// let size = GptJSize::from_directory(directory)?;
    /// assert_eq!(size.rotated, 4); // half of the features of a head
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    ///
    /// If the file cannot be read, or asks for what these models do not have here.
    pub fn from_directory(directory: impl AsRef<Path>) -> Result<Self, ConfigError> {
        let mut fields = Fields::read(directory.as_ref().join("config.json"))?;
        let family: String = fields.require("model_type")?;
        let size = match family.as_str() {
            "gptj" => Self::of_gptj(&mut fields)?,
            "phi" => Self::of_phi(&mut fields)?,
            _ => return Err(fields.unsupported("model_type", family.into())),
        };
        // With the bias of a head that is the embedding, too, a checkpoint would be another one.
        fields.expect("tie_word_embeddings", &[false.into()])?;
        for (field, rate) in [("resid_pdrop", size.dropout), ("embd_pdrop", size.embedding_dropout)] {
            if !(0.0..1.0).contains(&rate) {
                return Err(fields.unsupported(field, rate.into()));
            }
        }
        let head = size.width / size.heads;
        if size.length.saturating_mul(head) > MOST {
            let length = if size.is_phi() { "max_position_embeddings" } else { "n_positions" };
            return Err(fields.unsupported(length, size.length.into()));
        }
        fields.finish()?;
        Ok(size)
    }

    fn of_gptj(fields: &mut Fields) -> Result<Self, ConfigError> {
        let (width, heads) = (fields.positive("n_embd")?, fields.positive("n_head")?);
        if !width.is_multiple_of(heads) {
            return Err(fields.unsupported("n_head", heads.into()));
        }
        let rotated: Option<usize> = fields.with_default("rotary_dim", 64)?;
        let of_head = |width: &usize| *width > 0 && width.is_multiple_of(2);
        let Some(rotated) = rotated.filter(of_head).filter(|&rotated| rotated <= width / heads) else {
            return Err(fields.unsupported("rotary_dim", rotated.into()));
        };
        let size = Self {
            vocabulary: fields.positive("vocab_size")?,
            width,
            hidden: if fields.is_there("n_inner") { fields.positive("n_inner")? } else { 4 * width },
            heads,
            key_heads: heads,
            layers: fields.few("n_layer")?,
            length: fields.positive("n_positions")?,
            rotated,
            epsilon: fields.real("layer_norm_epsilon")?.unwrap_or(1e-5),
            dropout: fields.take("resid_pdrop")?.unwrap_or(0.0),
            embedding_dropout: fields.take("embd_pdrop")?.unwrap_or(0.0),
            ..Self::GPT_J_6B
        };
        fields.expect("activation_function", &["gelu_new".into()])?;
        fields.expect("attn_pdrop", &[0.0.into(), 0.into()])?;
        // Of the library before `transformers`.
        fields.expect("rotary", &[true.into()])?;
        fields.expect("scale_attn_weights", &[true.into()])?;
        fields.remove_tasks();
        Ok(size)
    }

    fn of_phi(fields: &mut Fields) -> Result<Self, ConfigError> {
        let (width, heads) = (fields.positive("hidden_size")?, fields.positive("num_attention_heads")?);
        if !width.is_multiple_of(heads) {
            return Err(fields.unsupported("num_attention_heads", heads.into()));
        }
        let key_heads = fields.take("num_key_value_heads")?.unwrap_or(heads);
        if key_heads == 0 || !heads.is_multiple_of(key_heads) {
            return Err(fields.unsupported("num_key_value_heads", key_heads.into()));
        }
        let rotated = fields.rotated(width / heads, 0.5)?;
        let (theta, stretch) = fields.rotary_positions(1e4)?;
        let size = Self {
            vocabulary: fields.positive("vocab_size")?,
            width,
            hidden: fields.positive("intermediate_size")?,
            heads,
            key_heads,
            layers: fields.few("num_hidden_layers")?,
            length: fields.positive("max_position_embeddings")?,
            rotated,
            theta,
            stretch,
            epsilon: fields.real("layer_norm_eps")?.unwrap_or(1e-5),
            dropout: fields.take("resid_pdrop")?.unwrap_or(0.0),
            embedding_dropout: fields.take("embd_pdrop")?.unwrap_or(0.0),
            ..Self::PHI_2
        };
        fields.expect("hidden_act", &["gelu_new".into()])?;
        fields.expect("attention_dropout", &[0.0.into(), 0.into()])?;
        Ok(size)
    }
}

/// The fields of a configuration that nobody has taken yet.
pub(crate) struct Fields {
    file: PathBuf,
    /// The field that has these fields, and a dot; empty for all of the file.
    within: String,
    values: Map<String, Value>,
}

/// The largest of all sizes, and of the tabulated rotations: what comes from them can be counted in 64 bits.
const MOST: usize = 1 << 31;

/// Fields that change nothing of what a decoder computes: of tokens, of training, of how it is run elsewhere, and what `transformers` wrote in
/// all configurations before version 5.
const WITHOUT_EFFECT: &[&str] = &[
    "_attn_implementation",
    "_attn_implementation_autoset",
    "_name_or_path",
    "_num_labels",
    "architectures",
    "bos_token_id",
    "cache_implementation",
    "chunk_size_feed_forward",
    "diversity_penalty",
    "dtype",
    "encoder_no_repeat_ngram_size",
    "eos_token_id",
    "finetuning_task",
    "gradient_checkpointing",
    "id2label",
    "initializer_range",
    "is_llama_config", // of SmolLM2
    "label2id",
    "length_penalty",
    "max_length",
    "min_length",
    "neftune_noise_alpha",
    "no_repeat_ngram_size",
    "num_beam_groups",
    "num_beams",
    "num_labels",
    "num_return_sequences",
    "output_past",
    "pad_token_id",
    "prefix",
    "problem_type",
    "repetition_penalty",
    "return_dict",
    "temperature",
    "tokenizer_class",
    "top_k",
    "top_p",
    "torch_dtype",
    "transformers.js_config",
    "transformers_version",
    "typical_p",
    "unsloth_fixed",
    "unsloth_version",
    "use_cache",
];

impl Fields {
    pub(crate) fn new(file: PathBuf, values: Map<String, Value>) -> Self {
        Self { file, within: String::new(), values }
    }

    fn read(file: PathBuf) -> Result<Self, ConfigError> {
        let text =
            fs::read_to_string(&file).map_err(|source| ConfigError::Io { file: file.clone(), source })?;
        match serde_json::from_str(&text) {
            Ok(values) => Ok(Self::new(file, values)),
            Err(source) => Err(ConfigError::Json { file, source }),
        }
    }

    fn named(&self, field: &str) -> String {
        format!("{}{field}", self.within)
    }

    fn unsupported(&self, field: &str, value: Value) -> ConfigError {
        ConfigError::Unsupported { file: self.file.clone(), field: self.named(field), value }
    }

    /// Whether a field is there and is not null.
    fn is_there(&self, field: &str) -> bool {
        self.values.get(field).is_some_and(|value| !value.is_null())
    }

    fn has(&self, field: &str) -> bool {
        self.values.contains_key(field)
    }

    /// The value of a field. Null counts as none.
    fn take<T: DeserializeOwned>(&mut self, field: &str) -> Result<Option<T>, ConfigError> {
        match self.values.remove(field) {
            None | Some(Value::Null) => Ok(None),
            Some(value) => {
                serde_json::from_value(value.clone()).map(Some).map_err(|_| self.unsupported(field, value))
            }
        }
    }

    fn require<T: DeserializeOwned>(&mut self, field: &str) -> Result<T, ConfigError> {
        let missing = self.missing(field);
        self.take(field)?.ok_or(missing)
    }

    fn positive(&mut self, field: &str) -> Result<usize, ConfigError> {
        match self.require(field)? {
            number @ 1..=MOST => Ok(number),
            number => Err(self.unsupported(field, number.into())),
        }
    }

    /// A number of layers, all of which are made.
    fn few(&mut self, field: &str) -> Result<usize, ConfigError> {
        match self.positive(field)? {
            number if number <= 1 << 16 => Ok(number),
            number => Err(self.unsupported(field, number.into())),
        }
    }

    /// A positive number, also in f32.
    fn real(&mut self, field: &str) -> Result<Option<f64>, ConfigError> {
        match self.take::<f64>(field)? {
            Some(number) if !(number as f32 > 0.0 && (number as f32).is_finite()) => {
                Err(self.unsupported(field, number.into()))
            }
            number => Ok(number),
        }
    }

    fn require_real(&mut self, field: &str) -> Result<f64, ConfigError> {
        let missing = self.missing(field);
        self.real(field)?.ok_or(missing)
    }

    fn missing(&self, field: &str) -> ConfigError {
        ConfigError::Missing { file: self.file.clone(), field: self.named(field) }
    }

    /// If the field is there, it has one of these values.
    fn expect(&mut self, field: &str, known: &[Value]) -> Result<(), ConfigError> {
        match self.take::<Value>(field)? {
            Some(value) if !known.contains(&value) => Err(self.unsupported(field, value)),
            _ => Ok(()),
        }
    }

    /// The fields within a field.
    fn take_fields(&mut self, field: &str) -> Result<Option<Self>, ConfigError> {
        let within = format!("{}.", self.named(field));
        let values = self.take(field)?;
        Ok(values.map(|values| Self { file: self.file.clone(), within, values }))
    }

    /// A field that has a value where it is missing, and where null means none.
    fn with_default(&mut self, field: &str, value: usize) -> Result<Option<usize>, ConfigError> {
        if self.has(field) { self.take(field) } else { Ok(Some(value)) }
    }

    /// The same for a softcap.
    fn softcap(&mut self, field: &str, value: Option<f64>) -> Result<Option<f64>, ConfigError> {
        if self.has(field) { self.real(field) } else { Ok(value) }
    }

    /// Those of all dense layers of an attention, or none.
    fn biases(&mut self) -> Result<Biases, ConfigError> {
        let inputs = self.take("attention_bias")?.unwrap_or(false);
        Ok(Biases { inputs, output: inputs, feed_forward: false })
    }

    /// Removes summaries, which language models do not have, and defaults of pipelines.
    fn remove_tasks(&mut self) {
        self.values.retain(|field, _| !field.starts_with("summary_") && field != "task_specific_params");
    }

    /// No features are dropped.
    fn without_dropout(&mut self) -> Result<(), ConfigError> {
        let none = [0.0.into(), 0.into()];
        self.expect("resid_pdrop", &none)?;
        self.expect("embd_pdrop", &none)
    }

    /// If the checkpoint has code of its own, it is that of the model in `transformers` before it was there.
    fn expect_code(&mut self, model: &str) -> Result<(), ConfigError> {
        let Some(mut code) = self.take_fields("auto_map")? else { return Ok(()) };
        code.expect("AutoModelForCausalLM", &[model.into()])?;
        for other in ["AutoConfig", "AutoTokenizer"] {
            code.values.remove(other);
        }
        code.finish()
    }

    /// The number of features of a head that are rotated, by the part of them that may be beside the other parameters of the rotations or among
    /// them, or else the usual one.
    fn rotated(&mut self, head: usize, usual: f64) -> Result<usize, ConfigError> {
        const PART: &str = "partial_rotary_factor";
        let outer = self.values.remove(PART);
        let within = ["rope_parameters", "rope_scaling"];
        let inner =
            within.iter().find_map(|within| self.values.get_mut(*within)?.as_object_mut()?.remove(PART));
        let value = inner.or(outer).filter(|value| !value.is_null()).unwrap_or(usual.into());
        // Rounded down as in Python.
        let width =
            value.as_f64().map(|part| head as f64 * part).filter(|width| (0.0..=head as f64).contains(width));
        match width.map(|width| width as usize) {
            Some(width) if width > 0 && width.is_multiple_of(2) => Ok(width),
            _ => Err(self.unsupported(PART, value)),
        }
    }

    fn experts_of_mixtral(&mut self, size: &DecoderSize) -> Result<Experts, ConfigError> {
        // Of training in Python.
        self.expect("router_jitter_noise", &[0.0.into(), 0.into()])?;
        let experts = self.experts(size, 2)?;
        Ok(Experts { hidden: size.hidden, normalized: true, ..experts })
    }

    fn experts_of_qwen(&mut self, size: &DecoderSize, usually_chosen: usize) -> Result<Experts, ConfigError> {
        const WITHOUT: &str = "mlp_only_layers";
        let mut experts = self.experts(size, usually_chosen)?;
        experts.hidden = self.positive("moe_intermediate_size")?;
        experts.normalized = self.take("norm_topk_prob")?.unwrap_or(false);
        experts.every = self.take("decoder_sparse_step")?.unwrap_or(1);
        if experts.every == 0 {
            return Err(self.unsupported("decoder_sparse_step", 0.into()));
        }
        let without: Vec<usize> = self.take(WITHOUT)?.unwrap_or_default();
        for layer in without.into_iter().filter(|&layer| layer < size.layers) {
            if layer >= u128::BITS as usize {
                return Err(self.unsupported(WITHOUT, layer.into()));
            }
            experts.without |= 1 << layer;
        }
        Ok(experts)
    }

    /// How many experts there are, in all layers, and how many are chosen.
    fn experts(&mut self, size: &DecoderSize, usually_chosen: usize) -> Result<Experts, ConfigError> {
        // Version 5 of `transformers` writes the second name for some families whose configurations had the first.
        const NAMES: [&str; 2] = ["num_experts", "num_local_experts"];
        const CHOSEN: &str = "num_experts_per_tok";
        let [first, second] = NAMES.map(|name| self.take::<usize>(name));
        let (count, name) = match (first?, second?) {
            (Some(first), Some(second)) if first != second => {
                return Err(self.unsupported(NAMES[1], second.into()));
            }
            (Some(count), _) => (count, NAMES[0]),
            (None, Some(count)) => (count, NAMES[1]),
            (None, None) => return Err(self.missing(NAMES[0])),
        };
        // All of them are made.
        if count == 0 || count.saturating_mul(size.layers) > 1 << 20 {
            return Err(self.unsupported(name, count.into()));
        }
        let chosen = self.take(CHOSEN)?.unwrap_or(usually_chosen);
        if chosen == 0 || chosen > count {
            return Err(self.unsupported(CHOSEN, chosen.into()));
        }
        // The factor of a loss that is added if `output_router_logits` is true, which is refused.
        self.values.remove("router_aux_loss_coef");
        Ok(Experts { count, chosen, hidden: 0, normalized: false, shared: None, every: 1, without: 0 })
    }

    /// [`Window::full_every`] of a Gemma: by the kinds of its layers, or else by a pattern, which may be the usual one.
    fn full_every(&mut self, count: usize, usual: usize) -> Result<Option<usize>, ConfigError> {
        const PATTERN: &str = "sliding_window_pattern";
        self.values.remove("_sliding_window_pattern"); // what the kinds of the layers came from
        let pattern = if self.has(PATTERN) { self.positive(PATTERN)? } else { usual };
        let Some(layers) = self.take::<Vec<String>>("layer_types")? else { return Ok(Some(pattern)) };
        let every = layers.iter().position(|kind| kind == "full_attention").map(|first| first + 1);
        let window = Window { full_every: every, ..Window::new(1) };
        let kind = |layer| if window.is_of(layer) { "sliding_attention" } else { "full_attention" };
        match layers.len() == count && layers.iter().enumerate().all(|(layer, name)| name == kind(layer)) {
            true => Ok(every),
            false => Err(self.unsupported("layer_types", layers.into())),
        }
    }

    /// Every layer sees all tokens: Qwen's configurations name a window, and say that it is not used.
    fn without_windows(&mut self) -> Result<(), ConfigError> {
        self.expect("use_sliding_window", &[false.into()])?;
        for unused in ["sliding_window", "max_window_layers"] {
            self.values.remove(unused);
        }
        let layers: Option<Vec<String>> = self.take("layer_types")?;
        match layers.into_iter().flatten().find(|kind| kind != "full_attention") {
            Some(kind) => Err(self.unsupported("layer_types", kind.into())),
            None => Ok(()),
        }
    }

    /// [`rotary_positions`](Self::rotary_positions) of layers that see all tokens, and the base in those with a window: of Gemma 3.
    fn rotary_positions_of_both(&mut self) -> Result<(f32, Option<RotaryStretch>, f32), ConfigError> {
        const FULL: f64 = 1e6;
        const WINDOW: f64 = 1e4;
        let Some(mut both) = self.take_fields("rope_parameters")? else {
            let of_windows = self.real("rope_local_base_freq")?.unwrap_or(WINDOW);
            let (theta, stretch) = self.rotary_positions(FULL)?;
            return Ok((theta, stretch, of_windows as f32));
        };
        let mut of = |kind: &str, usual: f64| {
            let mut parameters = match both.take_fields(kind)? {
                Some(parameters) => parameters,
                None => return Ok((usual as f32, None)),
            };
            let theta = parameters.real("rope_theta")?.unwrap_or(usual);
            let stretch = parameters.stretch()?;
            Ok((theta as f32, stretch))
        };
        let ((theta, stretch), (of_windows, none)) =
            (of("full_attention", FULL)?, of("sliding_attention", WINDOW)?);
        if none.is_some() {
            return Err(both.unsupported("sliding_attention", "stretched".into()));
        }
        both.finish()?;
        Ok((theta, stretch, of_windows))
    }

    /// The base of the wavelengths of rotary positions, which may be the usual one, and how they are stretched: `rope_parameters` as of version
    /// 5, before that `rope_theta` and `rope_scaling`.
    fn rotary_positions(&mut self, usual: f64) -> Result<(f32, Option<RotaryStretch>), ConfigError> {
        let theta = self.real("rope_theta")?;
        let (parameters, theta) = match self.take_fields("rope_parameters")? {
            Some(mut parameters) => {
                let inner = parameters.real("rope_theta")?;
                (parameters, inner.or(theta))
            }
            None => match self.take_fields("rope_scaling")? {
                Some(parameters) => (parameters, theta),
                None => return Ok((theta.unwrap_or(usual) as f32, None)),
            },
        };
        let stretch = parameters.stretch()?;
        Ok((theta.unwrap_or(usual) as f32, stretch))
    }

    /// Weights are packed in a way that is read: in four bits of bitsandbytes, or in float8 with a scale for 128 x 128 of them.
    fn packing(&mut self) -> Result<(), ConfigError> {
        let Some(mut packing) = self.take_fields("quantization_config")? else { return Ok(()) };
        let method: String = packing.require("quant_method")?;
        match method.as_str() {
            "bitsandbytes" => {
                packing.expect("load_in_8bit", &[false.into()])?;
                packing.expect("load_in_4bit", &[true.into()])?;
                // How their files are read in Python; the files themselves say the rest.
                let is_told = |field: &str| {
                    ["bnb_4bit_", "llm_int8_", "_load_in_"].iter().any(|of| field.starts_with(of))
                };
                packing.values.retain(|field, _| !is_told(field));
            }
            "fp8" => {
                packing.expect("fmt", &["e4m3".into()])?;
                packing.expect("weight_block_size", &[[128, 128].as_slice().into()])?;
                packing.expect("scale_fmt", &["float".into()])?;
                // Activations stay as they are here; static scales of them would be tensors that nothing uses.
                packing.expect("activation_scheme", &["dynamic".into()])?;
                for field in ["modules_to_not_convert", "ignored_layers", "dequantize", "expert_dtype"] {
                    packing.values.remove(field);
                }
            }
            _ => return Err(packing.unsupported("quant_method", method.into())),
        }
        packing.finish()
    }

    /// How wavelengths are stretched, by the fields that say so and no others.
    fn stretch(mut self) -> Result<Option<RotaryStretch>, ConfigError> {
        let name = if self.has("rope_type") { "rope_type" } else { "type" };
        let kind: Option<String> = self.take(name)?;
        let kind = kind.unwrap_or("default".into());
        self.expect("type", &[kind.clone().into()])?; // both, with the same name
        self.expect("partial_rotary_factor", &[1.0.into(), 1.into()])?;
        let stretch = match kind.as_str() {
            "default" => None,
            "linear" => Some(RotaryStretch::linear(self.require_real("factor")?)),
            "llama3" => {
                let factor = self.require_real("factor")?;
                let [low, high] =
                    ["low_freq_factor", "high_freq_factor"].map(|field| self.require_real(field));
                let (low, high) = (low?, high?);
                if low >= high {
                    return Err(self.unsupported("high_freq_factor", high.into()));
                }
                let original_length = self.require_real("original_max_position_embeddings")?;
                Some(RotaryStretch { factor, low, high, original_length })
            }
            _ => return Err(self.unsupported(name, kind.into())),
        };
        self.finish()?;
        Ok(stretch)
    }

    /// Nothing is left that may have an effect. Null, false and what is empty ask for nothing.
    fn finish(self) -> Result<(), ConfigError> {
        let asks = |value: &Value| match value {
            Value::Null | Value::Bool(false) => false,
            Value::Array(values) => !values.is_empty(),
            Value::Object(values) => !values.is_empty(),
            Value::String(text) => !text.is_empty(),
            _ => true,
        };
        let is_left =
            |(field, value): &(&String, &Value)| !WITHOUT_EFFECT.contains(&field.as_str()) && asks(value);
        match self.values.iter().find(is_left) {
            Some((field, value)) => Err(self.unsupported(field, value.clone())),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn size(changes: Value) -> Result<DecoderSize, String> {
        let mut config = json!({
            "model_type": "llama", "vocab_size": 50, "hidden_size": 24, "intermediate_size": 40,
            "num_attention_heads": 6, "num_hidden_layers": 2, "max_position_embeddings": 64,
            "architectures": ["LlamaForCausalLM"], "torch_dtype": "bfloat16", "use_cache": true, "hidden_act": "silu",
        });
        for (field, value) in changes.as_object().expect("fields") {
            config[field] = value.clone();
        }
        let directory = tempfile::tempdir().expect("a directory");
        fs::write(directory.path().join("config.json"), config.to_string()).expect("a file");
        DecoderSize::from_directory(directory.path()).map_err(|error| {
            let error = error.to_string();
            error.split_once("config.json: ").map_or(error.clone(), |(_, what)| what.into())
        })
    }

    #[test]
    fn sizes_are_those_of_the_configuration() {
        let llama = DecoderSize {
            vocabulary: 50,
            width: 24,
            hidden: 40,
            heads: 6,
            key_heads: 6,
            head: None,
            layers: 2,
            length: 64,
            window: None,
            theta: 10_000.0,
            stretch: None,
            rotated: None,
            biases: Biases::NONE,
            joined: false,
            normalizes_heads: false,
            epsilon: 1e-6,
            tied: false,
            gemma: None,
            experts: None,
        };
        assert_eq!(size(json!({})), Ok(llama));
        let changes = json!({"num_key_value_heads": 3, "rms_norm_eps": 1e-5, "tie_word_embeddings": true, "head_dim": 6});
        let changed = DecoderSize { key_heads: 3, epsilon: 1e-5, tied: true, head: Some(6), ..llama };
        assert_eq!(size(changes), Ok(changed));
        let biases = Biases { inputs: true, output: true, feed_forward: true };
        assert_eq!(
            size(json!({"attention_bias": true, "mlp_bias": true})),
            Ok(DecoderSize { biases, ..llama })
        );
        let mistral = |window| Ok(DecoderSize { window, key_heads: 2, ..llama });
        assert_eq!(
            size(json!({"model_type": "mistral", "num_key_value_heads": 2})),
            mistral(Some(Window::new(4096)))
        );
        let changes = json!({"model_type": "mistral", "num_key_value_heads": 2, "sliding_window": null});
        assert_eq!(size(changes), mistral(None));
        let inputs = Biases { inputs: true, ..Biases::NONE };
        let unused = json!({
            "model_type": "qwen2", "num_key_value_heads": null, "use_sliding_window": false, "sliding_window": 8,
            "max_window_layers": 1
        });
        assert_eq!(size(unused), Ok(DecoderSize { biases: inputs, ..llama }));
        let layers = ["full_attention", "full_attention"];
        let qwen3 = json!({"model_type": "qwen3", "num_key_value_heads": 6, "layer_types": layers});
        assert_eq!(size(qwen3), Ok(DecoderSize { head: Some(128), normalizes_heads: true, ..llama }));
    }

    #[test]
    fn gemmas_have_options_of_their_own() {
        let of = |changes: Value| {
            let mut gemma = json!({"num_key_value_heads": 6, "hidden_act": "gelu_pytorch_tanh"});
            for (field, value) in changes.as_object().expect("fields") {
                gemma[field] = value.clone();
            }
            size(gemma)
        };
        let first = of(json!({"model_type": "gemma", "hidden_act": "gelu"})).expect("a Gemma");
        assert_eq!((first.head, first.tied, first.gemma), (Some(256), true, Some(Gemma::default())));
        let second =
            of(json!({"model_type": "gemma2", "query_pre_attn_scalar": 64, "final_logit_softcapping": null}));
        let gemma = Gemma {
            normalizes_outputs: true,
            attention_scale: Some(0.125),
            attention_softcap: Some(50.0),
            logit_softcap: None,
        };
        let window = Window { full_every: Some(2), ..Window::new(4096) };
        let expected = DecoderSize { gemma: Some(gemma), window: Some(window), ..first };
        assert_eq!(second, Ok(expected));
        // As versions 4 and 5 of `transformers` write it.
        let window = Window { full_every: Some(2), theta: Some(100.0), ..Window::new(8) };
        let gemma = Gemma { attention_softcap: None, attention_scale: Some(1.0 / 16.0), ..gemma };
        let third = DecoderSize {
            gemma: Some(gemma),
            window: Some(window),
            theta: 1e6,
            stretch: Some(RotaryStretch::linear(8.0)),
            normalizes_heads: true,
            ..first
        };
        let linear = json!({"rope_type": "linear", "factor": 8.0});
        let before = json!({
            "model_type": "gemma3_text", "sliding_window": 8, "sliding_window_pattern": 2, "rope_local_base_freq": 100.0,
            "rope_theta": 1000000.0, "rope_scaling": linear.clone(), "attn_logit_softcapping": null
        });
        assert_eq!(of(before), Ok(third));
        let mut full = linear;
        full["rope_theta"] = 1e6.into();
        let now = json!({
            "model_type": "gemma3_text", "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": {"full_attention": full, "sliding_attention": {"rope_type": "default", "rope_theta": 100.0}}
        });
        assert_eq!(of(now), Ok(third));
        let kinds = |kinds: &[&str]| {
            of(json!({"model_type": "gemma2", "layer_types": kinds, "num_hidden_layers": 3}))
        };
        let (full, window) = ("full_attention", "sliding_attention");
        let every = |size: Result<DecoderSize, String>| {
            size.map(|size| size.window.and_then(|window| window.full_every))
        };
        assert_eq!(every(kinds(&[window, window, full])), Ok(Some(3)));
        assert_eq!(every(kinds(&[full; 3])), Ok(Some(1)));
        assert_eq!(every(kinds(&[window; 3])), Ok(None));
        for wrong in [&[full, window, window][..], &[window; 2], &[window, "chunked_attention", window]] {
            assert!(kinds(wrong).is_err_and(|error| error.starts_with("layer_types is")));
        }
        let both_ways = json!({"model_type": "gemma3_text", "use_bidirectional_attention": true});
        assert_eq!(of(both_ways), Err("use_bidirectional_attention is true, which is not supported".into()));
    }

    #[test]
    fn phi3_may_rotate_a_part_of_a_head() {
        let of = |changes: Value| {
            let mut phi3 =
                json!({"model_type": "phi3", "original_max_position_embeddings": 64, "hidden_size": 48});
            for (field, value) in changes.as_object().expect("fields") {
                phi3[field] = value.clone();
            }
            size(phi3)
        };
        // As versions 4 and 5 of `transformers` write it.
        let whole = of(json!({
            "rope_scaling": null, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "sliding_window": null, "attention_bias": false,
            "auto_map": {
                "AutoConfig": "configuration_phi3.Phi3Config", "AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM"
            },
        }))
        .expect("a Phi-3");
        assert_eq!((whole.rotated, whole.window, whole.joined, whole.epsilon), (None, None, true, 1e-5));
        let rotary = json!({"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0});
        assert_eq!(of(json!({"rope_parameters": rotary})), Ok(whole));
        let part = Ok(DecoderSize { rotated: Some(6), window: Some(Window::new(7)), ..whole });
        assert_eq!(of(json!({"partial_rotary_factor": 0.75, "sliding_window": 7})), part);
        let rotary = json!({"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.75});
        assert_eq!(of(json!({"rope_parameters": rotary, "sliding_window": 7})), part);
        for (changes, expected) in [
            (json!({"partial_rotary_factor": 0.4}), "partial_rotary_factor is 0.4"),
            (json!({"partial_rotary_factor": 1.5}), "partial_rotary_factor is 1.5"),
            (json!({"partial_rotary_factor": 0}), "partial_rotary_factor is 0"),
            (json!({"partial_rotary_factor": "half"}), r#"partial_rotary_factor is "half""#),
            (
                json!({"rope_scaling": {"type": "longrope", "long_factor": [1.0]}}),
                r#"rope_scaling.type is "longrope""#,
            ),
            (json!({"rope_scaling": {"type": "su", "long_factor": [1.0]}}), r#"rope_scaling.type is "su""#),
            (json!({"resid_pdrop": 0.1}), "resid_pdrop is 0.1"),
            (json!({"embd_pdrop": 0.1}), "embd_pdrop is 0.1"),
            (
                json!({"auto_map": {"AutoModelForCausalLM": "x.Y"}}),
                r#"auto_map.AutoModelForCausalLM is "x.Y""#,
            ),
            // Others rotate all features.
            (
                json!({
                    "model_type": "llama", "original_max_position_embeddings": null, "partial_rotary_factor": 0.5
                }),
                "partial_rotary_factor is 0.5",
            ),
        ] {
            let error = of(changes).expect_err(expected);
            assert!(error.starts_with(expected), "{error}, not {expected}");
        }
    }

    #[test]
    fn mixtures_of_experts() {
        let of = |changes: Value| {
            let mut mixture =
                json!({"num_key_value_heads": 6, "num_experts": 8, "moe_intermediate_size": 16});
            for (field, value) in changes.as_object().expect("fields") {
                mixture[field] = value.clone();
            }
            size(mixture)
        };
        let mixtral = of(json!({
            "model_type": "mixtral", "num_experts": null, "num_local_experts": 8, "moe_intermediate_size": null,
            "router_aux_loss_coef": 0.02, "output_router_logits": false, "router_jitter_noise": 0.0, "sliding_window": null,
        }))
        .expect("a Mixtral");
        let experts =
            Experts { count: 8, chosen: 2, hidden: 40, normalized: true, shared: None, every: 1, without: 0 };
        assert_eq!((mixtral.experts, mixtral.theta, mixtral.epsilon), (Some(experts), 1e6, 1e-5));
        assert_eq!((mixtral.window, mixtral.biases), (None, Biases::NONE));

        let qwen2 = of(
            json!({"model_type": "qwen2_moe", "shared_expert_intermediate_size": 20, "sliding_window": 0}),
        );
        let experts = Experts { chosen: 4, hidden: 16, normalized: false, shared: Some(20), ..experts };
        let inputs = Biases { inputs: true, ..Biases::NONE };
        let expected =
            DecoderSize { experts: Some(experts), biases: inputs, theta: 1e4, epsilon: 1e-6, ..mixtral };
        assert_eq!(qwen2, Ok(expected));
        let qwen3 = of(json!({
            "model_type": "qwen3_moe", "head_dim": 6, "norm_topk_prob": true, "num_experts_per_tok": 3, "decoder_sparse_step": 2,
            "mlp_only_layers": [1, 3], "num_local_experts": 8, "num_hidden_layers": 6, "use_sliding_window": false,
        }))
        .expect("a mixture of Qwen3");
        let experts = Experts {
            chosen: 3,
            hidden: 16,
            normalized: true,
            shared: None,
            every: 2,
            without: 0b1010,
            ..experts
        };
        assert_eq!((qwen3.experts, qwen3.normalizes_heads, qwen3.head), (Some(experts), true, Some(6)));
        assert_eq!(qwen3.biases, Biases::NONE);
        let with: Vec<usize> = (0..6).filter(|&layer| experts.are_in(layer)).collect();
        assert_eq!(with, [5]);

        for (changes, expected) in [
            (json!({"output_router_logits": true}), "output_router_logits is true"),
            (json!({"num_experts": null}), "there is no num_experts"),
            (json!({"num_experts": 0}), "num_experts is 0"),
            (json!({"num_experts": 1 << 20}), "num_experts is 1048576"),
            (json!({"num_local_experts": 4}), "num_local_experts is 4"),
            (json!({"num_experts_per_tok": 9}), "num_experts_per_tok is 9"),
            (json!({"num_experts_per_tok": 0}), "num_experts_per_tok is 0"),
            (json!({"moe_intermediate_size": null}), "there is no moe_intermediate_size"),
            (json!({"decoder_sparse_step": 0}), "decoder_sparse_step is 0"),
            (json!({"mlp_only_layers": [128], "num_hidden_layers": 200}), "mlp_only_layers is 128"),
            (json!({"use_sliding_window": true}), "use_sliding_window is true"),
            (json!({"model_type": "qwen2_moe"}), "there is no shared_expert_intermediate_size"),
            (json!({"model_type": "mixtral", "router_jitter_noise": 0.1}), "router_jitter_noise is 0.1"),
            // Mixtral does not read it.
            (json!({"model_type": "mixtral"}), "moe_intermediate_size is 16"),
            (json!({"model_type": "mistral", "moe_intermediate_size": null}), "num_experts is 8"),
        ] {
            let mut mixture = json!({"model_type": "qwen3_moe"});
            for (field, value) in changes.as_object().expect("fields") {
                mixture[field] = value.clone();
            }
            let error = of(mixture).expect_err(expected);
            assert!(error.starts_with(expected), "{error}, not {expected}");
        }
    }

    /// As versions 4 and 5 of `transformers` write them.
    #[test]
    fn rotary_positions_are_read_in_both_forms() {
        let of = |changes| size(changes).map(|size| (size.theta, size.stretch));
        let stretch = RotaryStretch { factor: 8.0, low: 1.0, high: 4.0, original_length: 8192.0 };
        let mut llama3 = json!({
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192
        });
        let before = json!({"rope_theta": 500000.0, "rope_scaling": llama3.clone()});
        assert_eq!(of(before), Ok((500_000.0, Some(stretch))));
        llama3["rope_theta"] = 500_000.into();
        assert_eq!(of(json!({"rope_parameters": llama3})), Ok((500_000.0, Some(stretch))));
        let default = json!({"rope_parameters": {"rope_type": "default", "rope_theta": 100.0}});
        assert_eq!(of(default), Ok((100.0, None)));
        let linear = json!({"rope_scaling": {"type": "linear", "rope_type": "linear", "factor": 2.0}});
        assert_eq!(of(linear), Ok((10_000.0, Some(RotaryStretch::linear(2.0)))));
    }

    #[test]
    fn the_sizes_of_a_gpt2() {
        let of = |changes: Value| {
            let mut config = json!({
                "model_type": "gpt2", "vocab_size": 50, "n_embd": 24, "n_head": 3, "n_layer": 2, "n_positions": 12, "n_ctx": 12,
                "n_inner": null, "activation_function": "gelu_new", "attn_pdrop": 0.1, "embd_pdrop": 0.1, "resid_pdrop": 0.1,
                "layer_norm_epsilon": 1e-5, "scale_attn_weights": true, "summary_type": "cls_index",
                "summary_use_proj": true, "task_specific_params": {"text-generation": {"do_sample": true}},
            });
            for (field, value) in changes.as_object().expect("fields") {
                config[field] = value.clone();
            }
            let directory = tempfile::tempdir().expect("a directory");
            fs::write(directory.path().join("config.json"), config.to_string()).expect("a file");
            Gpt2Size::from_directory(directory.path()).map_err(|error| error.to_string())
        };
        assert_eq!(of(json!({})), Ok(Gpt2Size { dropout: 0.1, ..Gpt2Size::TINY }));
        // Of gpt2-medium and distilgpt2.
        let old = json!({
            "n_ctx": 13, "n_special": 0, "predict_special_tokens": true, "_num_labels": 1, "output_past": true,
            "resid_pdrop": 0, "embd_pdrop": 0.0
        });
        assert_eq!(of(old), Ok(Gpt2Size::TINY));
        for (changes, expected) in [
            (json!({"model_type": "gptj"}), "model_type"),
            (json!({"n_head": 5}), "n_head"),
            (json!({"n_inner": 100}), "n_inner"),
            (json!({"embd_pdrop": 0.2}), "embd_pdrop"),
            (json!({"resid_pdrop": 1.0}), "resid_pdrop"),
            (json!({"scale_attn_by_inverse_layer_idx": true}), "scale_attn_by_inverse_layer_idx"),
            (json!({"reorder_and_upcast_attn": true}), "reorder_and_upcast_attn"),
        ] {
            let error = of(changes).expect_err(expected);
            assert!(error.contains(&format!("config.json: {expected} is")), "{error}");
        }
    }

    #[test]
    fn the_sizes_of_gptj_and_phi() {
        let of = |config: &Value, changes: Value| {
            let mut config = config.clone();
            for (field, value) in changes.as_object().expect("fields") {
                config[field] = value.clone();
            }
            let directory = tempfile::tempdir().expect("a directory");
            fs::write(directory.path().join("config.json"), config.to_string()).expect("a file");
            GptJSize::from_directory(directory.path()).map_err(|error| error.to_string())
        };
        // As that of GPT-J 6B.
        let gptj = json!({
            "model_type": "gptj", "vocab_size": 50, "n_embd": 24, "n_head": 3, "n_layer": 2, "n_positions": 12, "n_inner": 40,
            "rotary_dim": 4, "activation_function": "gelu_new", "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0,
            "layer_norm_epsilon": 1e-5, "scale_attn_weights": true, "rotary": true, "summary_type": "cls_index",
            "tie_word_embeddings": false, "task_specific_params": {"text-generation": {"do_sample": true}},
        });
        let tiny = GptJSize::GPT_J_6B.tiny();
        assert_eq!(of(&gptj, json!({})), Ok(tiny));
        let changed = GptJSize { hidden: 96, dropout: 0.1, epsilon: 1e-6, ..tiny };
        assert_eq!(
            of(&gptj, json!({"n_inner": null, "resid_pdrop": 0.1, "layer_norm_epsilon": 1e-6})),
            Ok(changed)
        );
        for (changes, expected) in [
            (json!({"n_head": 5}), "n_head is 5"),
            (json!({"rotary_dim": null}), "rotary_dim is null"),
            (json!({"rotary_dim": 3}), "rotary_dim is 3"),
            (json!({"rotary_dim": 10}), "rotary_dim is 10"),
            (json!({"activation_function": "gelu"}), r#"activation_function is "gelu""#),
            (json!({"attn_pdrop": 0.1}), "attn_pdrop is 0.1"),
            (json!({"embd_pdrop": 1.0}), "embd_pdrop is 1.0"),
            (json!({"tie_word_embeddings": true}), "tie_word_embeddings is true"),
            (json!({"model_type": "gpt2"}), r#"model_type is "gpt2""#),
        ] {
            let error = of(&gptj, changes).expect_err(expected);
            assert!(error.contains(&format!("config.json: {expected}")), "{error}");
        }

        // As that of Phi-2.
        let phi = json!({
            "model_type": "phi", "vocab_size": 50, "hidden_size": 24, "intermediate_size": 40, "num_attention_heads": 3,
            "num_key_value_heads": 3, "num_hidden_layers": 2, "max_position_embeddings": 12, "partial_rotary_factor": 0.5,
            "qk_layernorm": false, "rope_scaling": null, "rope_theta": 10000.0, "hidden_act": "gelu_new",
            "attention_dropout": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0, "layer_norm_eps": 1e-5, "tie_word_embeddings": false,
        });
        let tiny = GptJSize::PHI_2.tiny();
        assert_eq!(of(&phi, json!({})), Ok(tiny));
        assert_eq!(of(&phi, json!({"partial_rotary_factor": null, "num_key_value_heads": null})), Ok(tiny));
        let rotary = json!({"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.25});
        let changed =
            GptJSize { rotated: 2, theta: 100.0, key_heads: 1, dropout: 0.1, embedding_dropout: 0.2, ..tiny };
        let changes = json!({
            "rope_parameters": rotary, "num_key_value_heads": 1, "resid_pdrop": 0.1, "embd_pdrop": 0.2,
            "partial_rotary_factor": null, "rope_theta": null,
        });
        assert_eq!(of(&phi, changes), Ok(changed));
        for (changes, expected) in [
            (json!({"qk_layernorm": true}), "qk_layernorm is true"),
            (json!({"num_key_value_heads": 2}), "num_key_value_heads is 2"),
            (json!({"num_attention_heads": 5}), "num_attention_heads is 5"),
            (json!({"partial_rotary_factor": 0.4}), "partial_rotary_factor is 0.4"),
            (json!({"hidden_act": "gelu"}), r#"hidden_act is "gelu""#),
            (json!({"attention_dropout": 0.1}), "attention_dropout is 0.1"),
            (json!({"resid_pdrop": -0.1}), "resid_pdrop is -0.1"),
            (json!({"max_position_embeddings": 1 << 30}), "max_position_embeddings is 1073741824"),
            (json!({"tie_word_embeddings": true}), "tie_word_embeddings is true"),
        ] {
            let error = of(&phi, changes).expect_err(expected);
            assert!(error.contains(&format!("config.json: {expected}")), "{error}");
        }
    }

    #[test]
    fn what_is_not_there_is_refused_by_name() {
        for (changes, expected) in [
            (
                json!({"model_type": "gemma3", "text_config": {}}),
                r#"model_type is "gemma3", which is not supported"#,
            ),
            (json!({"num_hidden_layers": 1 << 17}), "num_hidden_layers is 131072, which is not supported"),
            (json!({"hidden_act": "gelu"}), r#"hidden_act is "gelu", which is not supported"#),
            (json!({"vocab_size": null}), "there is no vocab_size"),
            (json!({"vocab_size": "many"}), r#"vocab_size is "many", which is not supported"#),
            (json!({"hidden_size": 0}), "hidden_size is 0, which is not supported"),
            (json!({"num_key_value_heads": 4}), "num_key_value_heads is 4, which is not supported"),
            (json!({"head_dim": 3}), "head_dim is 3, which is not supported"),
            (json!({"attention_dropout": 0.1}), "attention_dropout is 0.1, which is not supported"),
            (
                json!({"quantization_config": {"quant_method": "gptq", "bits": 4}}),
                r#"quantization_config.quant_method is "gptq", which is not supported"#,
            ),
            (
                json!({"quantization_config": {"quant_method": "bitsandbytes", "load_in_8bit": true}}),
                "quantization_config.load_in_8bit is true, which is not supported",
            ),
            (
                json!({"quantization_config": {"quant_method": "fp8", "weight_block_size": [64, 64]}}),
                "quantization_config.weight_block_size is [64,64], which is not supported",
            ),
            (
                json!({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}),
                r#"rope_scaling.rope_type is "dynamic", which is not supported"#,
            ),
            (json!({"rope_scaling": {"rope_type": "llama3"}}), "there is no rope_scaling.factor"),
            (
                json!({"rope_scaling": {"type": "linear", "factor": 2.0, "finetuned": true}}),
                "rope_scaling.finetuned is true, which is not supported",
            ),
            (
                json!({"model_type": "qwen2", "num_key_value_heads": 6, "use_sliding_window": true}),
                "use_sliding_window is true, which is not supported",
            ),
            (json!({"model_type": "qwen3"}), "there is no num_key_value_heads"),
            (json!({"vocab_size": 1u64 << 40}), "vocab_size is 1099511627776, which is not supported"),
            (json!({"rms_norm_eps": 0}), "rms_norm_eps is 0.0, which is not supported"),
            (json!({"rope_theta": -1}), "rope_theta is -1.0, which is not supported"),
            (json!({"rope_theta": 1e300}), "rope_theta is 1e+300, which is not supported"),
            (
                json!({"model_type": "mistral", "num_key_value_heads": 6, "sliding_window": 0}),
                "sliding_window is 0, which is not supported",
            ),
            (
                json!({"rope_scaling": {"rope_type": "linear", "factor": 0}}),
                "rope_scaling.factor is 0.0, which is not supported",
            ),
            (json!({"is_causal": false}), "is_causal is false, which is not supported"),
            (
                json!({"auto_map": {"AutoModel": "x"}}),
                r#"auto_map is {"AutoModel":"x"}, which is not supported"#,
            ),
            (json!({"logit_softcap": 30.0}), "logit_softcap is 30.0, which is not supported"),
        ] {
            assert_eq!(size(changes), Err(expected.to_string()));
        }
        let nothing = DecoderSize::from_directory(Path::new("nothing"));
        assert!(nothing.is_err_and(|error| error.to_string().contains("config.json")));
    }
}
