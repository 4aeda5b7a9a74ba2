//! [`Fields`] of a configuration, each of which is taken once: what is left over is refused, unless it changes nothing.
use super::ConfigError;
use crate::{Biases, DecoderSize, Experts, Window};
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};
use std::fs;
use std::path::PathBuf;

/// The fields of a configuration that nobody has taken yet.
pub(crate) struct Fields {
    file: PathBuf,
    /// The field that has these fields, and a dot; empty for all of the file.
    within: String,
    pub(super) values: Map<String, Value>,
}

/// The largest of all sizes, and of the tabulated rotations: what comes from them can be counted in 64 bits.
pub(super) const MOST: usize = 1 << 31;

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

    pub(super) fn read(file: PathBuf) -> Result<Self, ConfigError> {
        let text =
            fs::read_to_string(&file).map_err(|source| ConfigError::Io { file: file.clone(), source })?;
        match serde_json::from_str(&text) {
            Ok(values) => Ok(Self::new(file, values)),
            Err(source) => Err(ConfigError::Json { file, source }),
        }
    }

    pub(super) fn named(&self, field: &str) -> String {
        format!("{}{field}", self.within)
    }

    pub(super) fn unsupported(&self, field: &str, value: Value) -> ConfigError {
        ConfigError::Unsupported { file: self.file.clone(), field: self.named(field), value }
    }

    /// Whether a field is there and is not null.
    pub(super) fn is_there(&self, field: &str) -> bool {
        self.values.get(field).is_some_and(|value| !value.is_null())
    }

    pub(super) fn has(&self, field: &str) -> bool {
        self.values.contains_key(field)
    }

    /// The value of a field. Null counts as none.
    pub(super) fn take<T: DeserializeOwned>(&mut self, field: &str) -> Result<Option<T>, ConfigError> {
        match self.values.remove(field) {
            None | Some(Value::Null) => Ok(None),
            Some(value) => {
                serde_json::from_value(value.clone()).map(Some).map_err(|_| self.unsupported(field, value))
            }
        }
    }

    pub(super) fn require<T: DeserializeOwned>(&mut self, field: &str) -> Result<T, ConfigError> {
        let missing = self.missing(field);
        self.take(field)?.ok_or(missing)
    }

    pub(super) fn positive(&mut self, field: &str) -> Result<usize, ConfigError> {
        match self.require(field)? {
            number @ 1..=MOST => Ok(number),
            number => Err(self.unsupported(field, number.into())),
        }
    }

    /// A number of layers, all of which are made.
    pub(super) fn few(&mut self, field: &str) -> Result<usize, ConfigError> {
        match self.positive(field)? {
            number if number <= 1 << 16 => Ok(number),
            number => Err(self.unsupported(field, number.into())),
        }
    }

    /// A positive number, also in f32.
    pub(super) fn real(&mut self, field: &str) -> Result<Option<f64>, ConfigError> {
        match self.take::<f64>(field)? {
            Some(number) if !(number as f32 > 0.0 && (number as f32).is_finite()) => {
                Err(self.unsupported(field, number.into()))
            }
            number => Ok(number),
        }
    }

    pub(super) fn require_real(&mut self, field: &str) -> Result<f64, ConfigError> {
        let missing = self.missing(field);
        self.real(field)?.ok_or(missing)
    }

    pub(super) fn missing(&self, field: &str) -> ConfigError {
        ConfigError::Missing { file: self.file.clone(), field: self.named(field) }
    }

    /// If the field is there, it has one of these values.
    pub(super) fn expect(&mut self, field: &str, known: &[Value]) -> Result<(), ConfigError> {
        match self.take::<Value>(field)? {
            Some(value) if !known.contains(&value) => Err(self.unsupported(field, value)),
            _ => Ok(()),
        }
    }

    /// The fields within a field.
    pub(super) fn take_fields(&mut self, field: &str) -> Result<Option<Self>, ConfigError> {
        let within = format!("{}.", self.named(field));
        let values = self.take(field)?;
        Ok(values.map(|values| Self { file: self.file.clone(), within, values }))
    }

    /// A field that has a value where it is missing, and where null means none.
    pub(super) fn with_default(&mut self, field: &str, value: usize) -> Result<Option<usize>, ConfigError> {
        if self.has(field) { self.take(field) } else { Ok(Some(value)) }
    }

    /// The same for a softcap.
    pub(super) fn softcap(&mut self, field: &str, value: Option<f64>) -> Result<Option<f64>, ConfigError> {
        if self.has(field) { self.real(field) } else { Ok(value) }
    }

    /// Those of all dense layers of an attention, or none.
    pub(super) fn biases(&mut self) -> Result<Biases, ConfigError> {
        let inputs = self.take("attention_bias")?.unwrap_or(false);
        Ok(Biases { inputs, output: inputs, feed_forward: false })
    }

    /// Removes summaries, which language models do not have, and defaults of pipelines.
    pub(super) fn remove_tasks(&mut self) {
        self.values.retain(|field, _| !field.starts_with("summary_") && field != "task_specific_params");
    }

    /// No features are dropped.
    pub(super) fn without_dropout(&mut self) -> Result<(), ConfigError> {
        let none = [0.0.into(), 0.into()];
        self.expect("resid_pdrop", &none)?;
        self.expect("embd_pdrop", &none)
    }

    /// If the checkpoint has code of its own, it is that of the model in `transformers` before it was there.
    pub(super) fn expect_code(&mut self, model: &str) -> Result<(), ConfigError> {
        let Some(mut code) = self.take_fields("auto_map")? else { return Ok(()) };
        code.expect("AutoModelForCausalLM", &[model.into()])?;
        for other in ["AutoConfig", "AutoTokenizer"] {
            code.values.remove(other);
        }
        code.finish()
    }

    /// The number of features of a head that are rotated, by the part of them that may be beside the other parameters of the rotations or among
    /// them, or else the usual one.
    pub(super) fn rotated(&mut self, head: usize, usual: f64) -> Result<usize, ConfigError> {
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

    pub(super) fn experts_of_mixtral(&mut self, size: &DecoderSize) -> Result<Experts, ConfigError> {
        // Of training in Python.
        self.expect("router_jitter_noise", &[0.0.into(), 0.into()])?;
        let experts = self.experts(size, 2)?;
        Ok(Experts { hidden: size.hidden, normalized: true, ..experts })
    }

    pub(super) fn experts_of_qwen(
        &mut self,
        size: &DecoderSize,
        usually_chosen: usize,
    ) -> Result<Experts, ConfigError> {
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
    pub(super) fn experts(
        &mut self,
        size: &DecoderSize,
        usually_chosen: usize,
    ) -> Result<Experts, ConfigError> {
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
    pub(super) fn full_every(&mut self, count: usize, usual: usize) -> Result<Option<usize>, ConfigError> {
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
    pub(super) fn without_windows(&mut self) -> Result<(), ConfigError> {
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

    /// Weights are packed in a way that is read: in four bits of bitsandbytes, or in float8 with a scale for 128 x 128 of them.
    pub(super) fn packing(&mut self) -> Result<(), ConfigError> {
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

    /// Nothing is left that may have an effect. Null, false and what is empty ask for nothing.
    pub(super) fn finish(self) -> Result<(), ConfigError> {
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
