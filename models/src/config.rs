//! Reads `config.json` as `transformers` writes it. What a configuration asks for and is not there is an error by name.
use crate::{Biases, DecoderSize, Experts, Gemma, Gpt2Size, Window};
use fields::MOST;
use rotary::Sequences;
use serde_json::Value;
use std::io;
use std::path::{Path, PathBuf};

mod encoders;
mod fields;
mod gptj;
mod rotary;

pub(crate) use fields::Fields;

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
    /// A model with `longrope` has factors for short sequences and others for long ones. The length of its size is that of short sequences;
    /// [`with_length`](Self::with_length) of more tokens chooses the others, for all sequences.
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
    /// std::fs::write(directory.join("config.json"), config.replace("64", r#"64, "rope_scaling": {"rope_type": "dynamic"}"#))?;
    /// let error = DecoderSize::from_directory(directory).unwrap_err();
    /// assert!(error.to_string().ends_with(r#"rope_scaling.rope_type is "dynamic", which is not supported"#));
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
                // The length before wavelengths were stretched.
                let original = fields.values.entry("original_max_position_embeddings");
                original.or_insert(4096.into());
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
        let sequences = Sequences { length: size.length, original: None, rotated: size.rotated_width() };
        if is_gemma3 {
            let (theta, stretch, of_windows) = fields.rotary_positions_of_both(sequences)?;
            (size.theta, size.stretch) = (theta, stretch);
            size.window.iter_mut().for_each(|window| window.theta = Some(of_windows));
        } else {
            (size.theta, size.stretch) =
                fields.rotary_positions(if is_mixtral { 1e6 } else { 1e4 }, sequences)?;
        }
        size.length = size.stretch.map_or(size.length, |stretch| stretch.short_length(size.length));
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

#[cfg(test)]
mod tests;
