//! Sizes of GPT-J and of Phi 1 to 2.
use super::{ConfigError, Fields, fields::MOST, rotary::Sequences};
use crate::GptJSize;
use std::path::Path;

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
        let length = fields.positive("max_position_embeddings")?;
        let (theta, stretch) = fields.rotary_positions(1e4, Sequences { length, original: None, rotated })?;
        let size = Self {
            vocabulary: fields.positive("vocab_size")?,
            width,
            hidden: fields.positive("intermediate_size")?,
            heads,
            key_heads,
            layers: fields.few("num_hidden_layers")?,
            length: stretch.map_or(length, |stretch| stretch.short_length(length)),
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
