//! Models in GGUF files: their sizes, and the names of their tensors. What a file asks for and is not there is an error by name.
use crate::config::Fields;
use crate::hugging_face::LoadError;
use crate::{ConfigError, DecoderSize};
use burn_memsave::lazy::{LazyError, WeightFile};
use serde_json::{Map, Value, json};
use std::path::Path;

/// The table of the embedding, which every model has.
const EMBEDDING: &str = "token_embd.weight";

/// The factors of wavelengths that were stretched as in Llama 3.
const FACTORS: &str = "rope_freqs.weight";

/// Replacements that make Hugging Face's names of those of GGUF.
const NAMES: &[(&str, &str)] = &[
    (r"^token_embd\.", "model.embed_tokens."),
    (r"^output_norm\.", "model.norm."),
    (r"^output\.", "lm_head."),
    (r"^rope_freqs\.", "unused.rope_freqs."),
    (r"^blk\.", "model.layers."),
    (r"\.attn_norm\.", ".input_layernorm."),
    (r"\.attn_([qkv])\.", ".self_attn.${1}_proj."),
    (r"\.attn_([qk])_norm\.", ".self_attn.${1}_norm."),
    (r"\.attn_output\.", ".self_attn.o_proj."),
    (r"\.ffn_(gate|up|down)\.", ".mlp.${1}_proj."),
];

/// The norms before feed-forward layers of all but Gemmas, which have others, too.
const NORMS: &[(&str, &str)] = &[(r"\.ffn_norm\.", ".post_attention_layernorm.")];
const NORMS_OF_GEMMAS: &[(&str, &str)] = &[
    (r"\.post_attention_norm\.", ".post_attention_layernorm."),
    (r"\.ffn_norm\.", ".pre_feedforward_layernorm."),
    (r"\.post_ffw_norm\.", ".post_feedforward_layernorm."),
];

/// The architectures that are read, and what `config.json` calls them.
const ARCHITECTURES: &[(&str, &str)] = &[
    ("llama", "llama"),
    ("qwen2", "qwen2"),
    ("qwen3", "qwen3"),
    ("gemma2", "gemma2"),
    ("gemma3", "gemma3_text"),
];

/// The keys of sizes, behind the name of the architecture, and what they are called in `config.json`.
const SIZES: &[(&str, &str)] = &[
    ("attention.head_count", "num_attention_heads"),
    ("attention.head_count_kv", "num_key_value_heads"),
    ("attention.key_length", "head_dim"),
    ("attention.layer_norm_rms_epsilon", "rms_norm_eps"),
    ("attention.sliding_window", "sliding_window"),
    ("attention.sliding_window_pattern", "sliding_window_pattern"),
    ("attn_logit_softcapping", "attn_logit_softcapping"),
    ("final_logit_softcapping", "final_logit_softcapping"),
    ("block_count", "num_hidden_layers"),
    ("context_length", "max_position_embeddings"),
    ("embedding_length", "hidden_size"),
    ("feed_forward_length", "intermediate_size"),
    ("rope.freq_base", "rope_theta"),
    ("rope.freq_base_swa", "rope_local_base_freq"),
];

/// The same tensors under the names that they have in Hugging Face.
pub(crate) fn with_usual_names(file: WeightFile, architecture: &str) -> Result<WeightFile, LazyError> {
    let norms = if is_gemma(architecture) { NORMS_OF_GEMMAS } else { NORMS };
    file.with_key_remappings(NAMES)?.with_key_remappings(norms)
}

/// Whether norms have 1 added, which they have not in Hugging Face.
pub(crate) fn is_gemma(architecture: &str) -> bool {
    architecture.starts_with("gemma")
}

/// The kind of model that a GGUF file says it has; `None` for other files.
pub(crate) fn architecture(file: &WeightFile) -> Result<Option<&str>, ConfigError> {
    const FIELD: &str = "general.architecture";
    let Some(metadata) = file.metadata() else { return Ok(None) };
    let (path, field) = (file.path().to_path_buf(), FIELD.to_owned());
    match metadata.get(FIELD) {
        Some(Value::String(name)) if ARCHITECTURES.iter().any(|(known, _)| known == name) => Ok(Some(name)),
        Some(value) => Err(ConfigError::Unsupported { file: path, field, value: value.clone() }),
        None => Err(ConfigError::Missing { file: path, field }),
    }
}

impl DecoderSize {
    /// The size of the model in a GGUF file: a Llama (or Mistral), Qwen2, Qwen3, Gemma 2 or the text model of Gemma 3.
    ///
    /// # Errors
    ///
    /// If the file cannot be read, or asks for what these models do not have here.
    pub fn from_gguf(path: impl AsRef<Path>) -> Result<Self, LoadError> {
        let file = WeightFile::open(path)?;
        let Some(architecture) = architecture(&file)? else {
            let (file, reason) = (file.path().to_path_buf(), "it is not in the format GGUF".into());
            return Err(LazyError::Malformed { file, reason }.into());
        };
        let of_architecture = file.metadata().into_iter().flatten().filter_map(|(key, value)| {
            let key = key.strip_prefix(architecture)?.strip_prefix('.')?.to_owned();
            Some((key, value.clone()))
        });
        let config = configuration(&file, architecture, of_architecture.collect())?;
        let size = Self::of_fields(Fields::new(file.path().to_path_buf(), config))?;
        check_factors(&file, &size)?;
        Ok(size)
    }
}

/// What `config.json` would say.
fn configuration(
    file: &WeightFile,
    architecture: &str,
    mut metadata: Map<String, Value>,
) -> Result<Map<String, Value>, LoadError> {
    let unsupported = |key: &str, value: Value| {
        let (file, field) = (file.path().to_path_buf(), format!("{architecture}.{key}"));
        LoadError::Config(ConfigError::Unsupported { file, field, value })
    };
    let mut config = Map::new();
    for (key, field) in SIZES {
        config.extend(metadata.remove(*key).map(|value| ((*field).to_owned(), value)));
    }
    // The tables of some files have more rows than there are tokens.
    metadata.remove("vocab_size");
    let vocabulary = match file.tensors().find(|tensor| tensor.name == EMBEDDING) {
        Some(table) => table.shape.first().copied().unwrap_or(0),
        None => file.read(EMBEDDING)?.shape().num_elements(), // an error that says why
    };
    config.insert("vocab_size".into(), vocabulary.into());
    let kind = ARCHITECTURES.iter().find(|(known, _)| *known == architecture).map(|(_, kind)| *kind);
    config.insert("model_type".into(), kind.into());
    config.insert("tie_word_embeddings".into(), (!file.has("output.weight")).into());
    if architecture == "llama" {
        config.insert("attention_bias".into(), file.has("blk.0.attn_q.bias").into());
        config.insert("mlp_bias".into(), file.has("blk.0.ffn_up.bias").into());
    }

    let number = |value: &Value| value.as_u64().and_then(|number| usize::try_from(number).ok());
    let [width, heads] =
        ["hidden_size", "num_attention_heads"].map(|field| config.get(field).and_then(number));
    let head = config.get("head_dim").and_then(number);
    let of_heads = width.zip(heads).and_then(|(width, heads)| width.checked_div(heads));
    let head = head.or(of_heads);
    config.extend(head.map(|head| ("head_dim".to_owned(), head.into())));
    if is_gemma(architecture) {
        // Files do not have what products of queries and keys are divided by; `llama.cpp` knows it of the largest by their layers.
        let layers = config.get("num_hidden_layers").and_then(number);
        let is_largest = layers == Some(if architecture == "gemma2" { 46 } else { 62 });
        let scalar = if is_largest { of_heads } else { head };
        config.extend(scalar.map(|scalar| ("query_pre_attn_scalar".to_owned(), scalar.into())));
    }
    // All features of a head are rotated, and values have as many as keys.
    for key in ["rope.dimension_count", "attention.value_length"] {
        if let Some(value) = metadata.remove(key).filter(|value| head.is_some() && number(value) != head) {
            return Err(unsupported(key, value));
        }
    }
    if let Some(value) = metadata.remove("attention.causal").filter(|value| *value != true) {
        return Err(unsupported("attention.causal", value));
    }
    metadata.remove("rope.scaling.finetuned");
    let original = metadata.remove("rope.scaling.original_context_length");
    // Mixtures of no experts.
    for key in ["expert_count", "expert_used_count"] {
        metadata
            .remove(key)
            .map_or(Ok(()), |count| if count == 0 { Ok(()) } else { Err(unsupported(key, count)) })?;
    }
    const KIND: &str = "rope.scaling.type";
    let (kind, factor) = (metadata.remove(KIND), metadata.remove("rope.scaling.factor"));
    // A factor alone is one of all wavelengths.
    let stretches = factor.as_ref().is_some_and(|factor| *factor != 1.0);
    let kind = kind.or_else(|| stretches.then(|| "linear".into())).filter(|kind| kind != "none");
    let stretch = match factors(file)? {
        Some(_) if let Some(kind) = kind => return Err(unsupported(KIND, kind)),
        Some(factors) => {
            let factor = factors.into_iter().fold(1.0f32, f32::max);
            // Of these three, files have only the factors that follow from them: `check_factors` compares those.
            Some(json!({
                "rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            }))
        }
        None => kind.map(|kind| match kind == "yarn" {
            true => {
                json!({ "rope_type": kind, "factor": factor, "original_max_position_embeddings": original })
            }
            false => json!({ "rope_type": kind, "factor": factor }),
        }),
    };
    config.extend(stretch.map(|stretch| ("rope_scaling".to_owned(), stretch)));
    // Whatever is left is refused by its name.
    config.extend(metadata.into_iter().map(|(key, value)| (format!("{architecture}.{key}"), value)));
    Ok(config)
}

/// The factors of stretched wavelengths, if there are any.
fn factors(file: &WeightFile) -> Result<Option<Vec<f32>>, LazyError> {
    if !file.has(FACTORS) {
        return Ok(None);
    }
    Ok(Some(file.read(FACTORS)?.iter::<f32>().collect()))
}

/// The factors in the file are those of Llama 3.1 to 3.3, for which alone the size can be known.
fn check_factors(file: &WeightFile, size: &DecoderSize) -> Result<(), LoadError> {
    let (Some(factors), Some(stretch)) = (factors(file)?, &size.stretch) else { return Ok(()) };
    let expected = stretch.factors([size.length, size.head_width()], size.theta);
    let is_close = |(found, expected): (&f32, f64)| (f64::from(*found) - expected).abs() <= 1e-3 * expected;
    match factors.len() == expected.len() && factors.iter().zip(expected).all(is_close) {
        true => Ok(()),
        false => {
            let (file, value) = (file.path().to_path_buf(), factors.into());
            Err(ConfigError::Unsupported { file, field: FACTORS.into(), value }.into())
        }
    }
}
