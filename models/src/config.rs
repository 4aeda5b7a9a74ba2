//! Reads `config.json` as `transformers` writes it. What a configuration asks for and is not there is an error by name.
use crate::{Biases, DecoderSize, Gemma, Gpt2Size, RotaryStretch, Window};
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
    /// The size of the model in a directory of Hugging Face, by its `config.json`: a Llama, Mistral, Qwen2, Qwen3, Gemma, Gemma 2 or the
    /// text model of Gemma 3.
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
        const FAMILIES: [&str; 7] = ["llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text"];
        if !FAMILIES.contains(&family.as_str()) {
            return Err(fields.unsupported("model_type", family.into()));
        }
        let heads = fields.positive("num_attention_heads")?;
        // Null means as many as heads of queries; where it is missing, so do Llamas only.
        let key_heads = match family == "llama" || fields.has("num_key_value_heads") {
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
            biases: Biases::NONE,
            normalizes_heads: false,
            epsilon: fields.real("rms_norm_eps")?.unwrap_or(1e-6),
            tied: fields.take("tie_word_embeddings")?.unwrap_or(is_gemma),
            gemma: is_gemma.then(Gemma::default),
        };
        match family.as_str() {
            "llama" => {
                size.biases = fields.biases()?;
                size.biases.feed_forward = fields.take("mlp_bias")?.unwrap_or(false);
            }
            "mistral" => size.window = fields.with_default("sliding_window", 4096)?.map(Window::new),
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
            (size.theta, size.stretch) = fields.rotary_positions(1e4)?;
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
        // Summaries, which language models do not have, defaults of pipelines, and what was there before all of these.
        const UNUSED: [&str; 5] =
            ["attn_pdrop", "n_ctx", "n_special", "predict_special_tokens", "task_specific_params"];
        fields.values.retain(|field, _| !field.starts_with("summary_") && !UNUSED.contains(&field.as_str()));
        fields.finish()?;
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
            biases: Biases::NONE,
            normalizes_heads: false,
            epsilon: 1e-6,
            tied: false,
            gemma: None,
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
