//! Sizes of encoders.
use super::{ConfigError, Fields, fields::MOST};
use crate::{EncoderSize, T5Size, VitSize, WhisperSize};
use serde::Deserialize;
use std::path::Path;

/// Fields that change nothing of what the layers of an encoder compute: of heads on top of it, and of what else is returned.
const WITHOUT_EFFECT: [&str; 5] = [
    "classifier_dropout",
    "directionality",
    "output_attentions",
    "output_hidden_states",
    "tie_word_embeddings",
];

impl EncoderSize {
    /// The size of the encoder in a directory of Hugging Face, by its `config.json`: a BERT, a RoBERTa, or an XLM-RoBERTa or CamemBERT, which are
    /// RoBERTas with other tokens.
    ///
    /// ```
    /// use burn_memsave_models::EncoderSize;
    ///
    /// # let directory = tempfile::tempdir()?;
    /// # let directory = directory.path();
    /// let config = r#"{
    ///     "model_type": "roberta", "vocab_size": 50, "hidden_size": 24, "intermediate_size": 40, "num_attention_heads": 3,
    ///     "num_hidden_layers": 2, "max_position_embeddings": 14, "type_vocab_size": 1, "pad_token_id": 1
    /// }"#;
    /// std::fs::write(directory.join("config.json"), config)?;
    /// let size = EncoderSize::from_directory(directory)?;
    /// assert_eq!((size.first_position, size.length), (2, 12));
    ///
    /// std::fs::write(directory.join("config.json"), config.replace("24,", r#"24, "hidden_act": "relu","#))?;
    /// let error = EncoderSize::from_directory(directory).unwrap_err();
    /// assert!(error.to_string().ends_with(r#"hidden_act is "relu", which is not supported"#));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    ///
    /// If the file cannot be read, or asks for what these models do not have here.
    pub fn from_directory(directory: impl AsRef<Path>) -> Result<Self, ConfigError> {
        let mut fields = Fields::read(directory.as_ref().join("config.json"))?;
        let family: String = fields.require("model_type")?;
        let first_position = match family.as_str() {
            "bert" => 0,
            // The rows before it are those of padding, and of tokens before that.
            "roberta" | "xlm-roberta" | "camembert" => fields.padding_token(1)? + 1,
            _ => return Err(fields.unsupported("model_type", family.into())),
        };
        let positions = fields.positive("max_position_embeddings")?;
        if positions <= first_position {
            return Err(fields.unsupported("max_position_embeddings", positions.into()));
        }
        let size = Self {
            vocabulary: fields.positive("vocab_size")?,
            width: fields.positive("hidden_size")?,
            hidden: fields.positive("intermediate_size")?,
            heads: fields.positive("num_attention_heads")?,
            layers: fields.few("num_hidden_layers")?,
            length: positions - first_position,
            first_position,
            segments: fields.positive("type_vocab_size")?,
            epsilon: fields.real("layer_norm_eps")?.unwrap_or(1e-12),
            dropout: fields.rate("hidden_dropout_prob", 0.1)?,
            attention_dropout: Some(fields.rate("attention_probs_dropout_prob", 0.1)?),
        };
        if !size.width.is_multiple_of(size.heads) {
            return Err(fields.unsupported("num_attention_heads", size.heads.into()));
        }
        fields.expect("hidden_act", &["gelu".into()])?;
        fields.expect("position_embedding_type", &["absolute".into()])?;
        fields.without_heads();
        fields.finish()?;
        Ok(size)
    }
}

impl VitSize {
    /// The size of the vision transformer in a directory of Hugging Face, by its `config.json`.
    ///
    /// # Errors
    ///
    /// If the file cannot be read, or asks for what the model does not have here.
    pub fn from_directory(directory: impl AsRef<Path>) -> Result<Self, ConfigError> {
        let mut fields = Fields::read(directory.as_ref().join("config.json"))?;
        let family: String = fields.require("model_type")?;
        if family != "vit" {
            return Err(fields.unsupported("model_type", family.into()));
        }
        let size = Self {
            image: fields.height_and_width("image_size", 224)?,
            patch: fields.height_and_width("patch_size", 16)?,
            channels: if fields.is_there("num_channels") { fields.positive("num_channels")? } else { 3 },
            width: fields.positive("hidden_size")?,
            hidden: fields.positive("intermediate_size")?,
            heads: fields.positive("num_attention_heads")?,
            layers: fields.few("num_hidden_layers")?,
            input_biases: fields.take("qkv_bias")?.unwrap_or(true),
            epsilon: fields.real("layer_norm_eps")?.unwrap_or(1e-12),
            dropout: fields.rate("hidden_dropout_prob", 0.0)?,
            attention_dropout: fields.rate("attention_probs_dropout_prob", 0.0)?,
        };
        if !size.width.is_multiple_of(size.heads) {
            return Err(fields.unsupported("num_attention_heads", size.heads.into()));
        }
        let fits = size.image.iter().zip(&size.patch).all(|(image, patch)| image >= patch);
        if !fits || size.image[0].saturating_mul(size.image[1]) > MOST {
            return Err(fields.unsupported("image_size", size.image.into()));
        }
        fields.expect("hidden_act", &["gelu".into()])?;
        fields.without_heads();
        fields.values.remove("encoder_stride"); // of what guesses patches
        fields.finish()?;
        Ok(size)
    }
}

impl T5Size {
    /// The size of the T5 in a directory of Hugging Face, by its `config.json`: version 1.0, or 1.1 with gates of GELUs, as FLAN-T5 has them. Dropout
    /// of attention weights, which the model here does not have, is left out.
    ///
    /// # Errors
    ///
    /// If the file cannot be read, or asks for what the model does not have here.
    pub fn from_directory(directory: impl AsRef<Path>) -> Result<Self, ConfigError> {
        let mut fields = Fields::read(directory.as_ref().join("config.json"))?;
        let family: String = fields.require("model_type")?;
        if family != "t5" {
            return Err(fields.unsupported("model_type", family.into()));
        }
        let projection: Option<String> = fields.take("feed_forward_proj")?;
        let gated = match projection.as_deref() {
            None | Some("relu") => false,
            Some("gated-gelu") => true,
            Some(other) => return Err(fields.unsupported("feed_forward_proj", other.into())),
        };
        let tied = fields.take("tie_word_embeddings")?.unwrap_or(true);
        let layers = fields.few("num_layers")?;
        let of_decoder = match fields.is_there("num_decoder_layers") {
            true => fields.few("num_decoder_layers")?,
            false => layers,
        };
        let size = Self {
            vocabulary: fields.positive("vocab_size")?,
            width: fields.positive("d_model")?,
            hidden: fields.positive("d_ff")?,
            heads: fields.positive("num_heads")?,
            head: fields.positive("d_kv")?,
            layers,
            decoder_layers: Some(of_decoder).filter(|&of_decoder| of_decoder != layers),
            buckets: fields.take("relative_attention_num_buckets")?.unwrap_or(32),
            distance: fields.take("relative_attention_max_distance")?.unwrap_or(128),
            gated,
            tied,
            // Version 5 of `transformers` writes it, and says that all heads are tied.
            scales_outputs: fields.take("scale_decoder_outputs")?.unwrap_or(tied),
            dropout: fields.rate("dropout_rate", 0.1)?,
        };
        // Half of them for tokens on each side, and half of these for short distances.
        if size.buckets < 4 || size.buckets > MOST {
            return Err(fields.unsupported("relative_attention_num_buckets", size.buckets.into()));
        }
        if size.distance <= size.buckets / 2 || size.distance > MOST {
            return Err(fields.unsupported("relative_attention_max_distance", size.distance.into()));
        }
        fields.expect("dense_act_fn", &[if gated { "gelu_new" } else { "relu" }.into()])?;
        fields.expect("is_gated_act", &[gated.into()])?;
        fields.expect("layer_norm_epsilon", &[1e-6.into()])?;
        // What generation begins with, how weights were drawn, and defaults of pipelines.
        const UNUSED: [&str; 5] = [
            "decoder_start_token_id",
            "initializer_factor",
            "is_encoder_decoder", // false if the file has the encoder alone
            "n_positions",
            "task_specific_params",
        ];
        fields.values.retain(|field, _| !UNUSED.contains(&field.as_str()));
        fields.without_heads();
        fields.finish()?;
        Ok(size)
    }
}

impl WhisperSize {
    /// The size of the Whisper in a directory of Hugging Face, by its `config.json`. Dropout of attention weights in the decoder, which the model
    /// here does not have, is left out, and so is the augmentation of sounds in training.
    ///
    /// # Errors
    ///
    /// If the file cannot be read, or asks for what the model does not have here.
    pub fn from_directory(directory: impl AsRef<Path>) -> Result<Self, ConfigError> {
        let mut fields = Fields::read(directory.as_ref().join("config.json"))?;
        let family: String = fields.require("model_type")?;
        if family != "whisper" {
            return Err(fields.unsupported("model_type", family.into()));
        }
        let size = Self {
            vocabulary: fields.positive("vocab_size")?,
            mels: fields.positive("num_mel_bins")?,
            places: fields.positive("max_source_positions")?,
            length: fields.positive("max_target_positions")?,
            width: fields.positive("d_model")?,
            hidden: fields.positive("encoder_ffn_dim")?,
            heads: fields.positive("encoder_attention_heads")?,
            layers: fields.few("encoder_layers")?,
            decoder_hidden: fields.positive("decoder_ffn_dim")?,
            decoder_heads: fields.positive("decoder_attention_heads")?,
            decoder_layers: fields.few("decoder_layers")?,
            dropout: fields.rate("dropout", 0.0)?,
            attention_dropout: fields.rate("attention_dropout", 0.0)?,
            inner_dropout: fields.rate("activation_dropout", 0.0)?,
        };
        for (field, heads) in
            [("encoder_attention_heads", size.heads), ("decoder_attention_heads", size.decoder_heads)]
        {
            if !size.width.is_multiple_of(heads) {
                return Err(fields.unsupported(field, heads.into()));
            }
        }
        // Half of the features are sines of a place, and half of them cosines.
        if !size.width.is_multiple_of(2) {
            return Err(fields.unsupported("d_model", size.width.into()));
        }
        fields.expect("activation_function", &["gelu".into()])?;
        fields.expect("num_hidden_layers", &[size.layers.into()])?;
        fields.expect("is_encoder_decoder", &[true.into()])?;
        fields.expect("tie_word_embeddings", &[true.into()])?;
        for layers in ["encoder_layerdrop", "decoder_layerdrop"] {
            fields.expect(layers, &[0.0.into(), 0.into()])?;
        }
        // What generation begins with and leaves out, timestamps, classifiers, and how weights were drawn.
        const UNUSED: [&str; 8] = [
            "apply_spec_augment",
            "begin_suppress_tokens",
            "classifier_proj_size",
            "decoder_start_token_id",
            "forced_decoder_ids",
            "init_std",
            "median_filter_width",
            "suppress_tokens",
        ];
        fields.values.retain(|field, _| !field.starts_with("mask_") && !UNUSED.contains(&field.as_str()));
        fields.without_heads();
        fields.finish()?;
        Ok(size)
    }
}

/// A number for both, or one for each.
#[derive(Deserialize)]
#[serde(untagged)]
enum HeightAndWidth {
    Square(usize),
    Both([usize; 2]),
}

impl Fields {
    /// Two numbers, which may be one, and where the field is missing, are the usual one.
    fn height_and_width(&mut self, field: &str, usual: usize) -> Result<[usize; 2], ConfigError> {
        let both = match self.take(field)? {
            Some(HeightAndWidth::Both(both)) => both,
            Some(HeightAndWidth::Square(number)) => [number; 2],
            None => [usual; 2],
        };
        match both.iter().all(|number| (1..=MOST).contains(number)) {
            true => Ok(both),
            false => Err(self.unsupported(field, both.into())),
        }
    }

    /// Drops what changes nothing below the heads of an encoder. The pooler is one: it reads the features that there are here.
    fn without_heads(&mut self) {
        let is_of_head = |field: &str| field.starts_with("pooler_") || WITHOUT_EFFECT.contains(&field);
        self.values.retain(|field, _| !is_of_head(field));
    }

    /// The token of padding, which must be there if the field is not missing.
    fn padding_token(&mut self, usual: usize) -> Result<usize, ConfigError> {
        const FIELD: &str = "pad_token_id";
        let token = if self.has(FIELD) { self.require(FIELD)? } else { usual };
        match token {
            0..MOST => Ok(token),
            _ => Err(self.unsupported(FIELD, token.into())),
        }
    }

    /// A rate of dropout.
    fn rate(&mut self, field: &str, usual: f64) -> Result<f64, ConfigError> {
        match self.take(field)?.unwrap_or(usual) {
            rate if (0.0..1.0).contains(&rate) => Ok(rate),
            rate => Err(self.unsupported(field, rate.into())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};
    use std::fs;

    /// What a configuration with these changes is read as.
    fn read<T>(
        config: &Value,
        changes: Value,
        of: impl Fn(&Path) -> Result<T, ConfigError>,
    ) -> Result<T, String> {
        let mut config = config.clone();
        for (field, value) in changes.as_object().expect("fields") {
            config[field] = value.clone();
        }
        let directory = tempfile::tempdir().expect("a directory");
        fs::write(directory.path().join("config.json"), config.to_string()).expect("a file");
        of(directory.path()).map_err(|error| {
            let error = error.to_string();
            error.split_once("config.json: ").map_or(error.clone(), |(_, what)| what.into())
        })
    }

    #[test]
    fn encoders_of_text() {
        // As bert-base-multilingual-cased and all-MiniLM-L6-v2 have them.
        let config = json!({
            "model_type": "bert", "vocab_size": 50, "hidden_size": 24, "intermediate_size": 40, "num_attention_heads": 3,
            "num_hidden_layers": 2, "max_position_embeddings": 12, "type_vocab_size": 2, "layer_norm_eps": 1e-12,
            "hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0.1, "hidden_act": "gelu", "pad_token_id": 0,
            "directionality": "bidi", "pooler_fc_size": 768, "pooler_type": "first_token_transform",
            "position_embedding_type": "absolute", "gradient_checkpointing": false, "initializer_range": 0.02,
            "classifier_dropout": 0.1, "is_decoder": false, "architectures": ["BertModel"]
        });
        let of = |changes| read(&config, changes, |directory| EncoderSize::from_directory(directory));
        let bert = EncoderSize { attention_dropout: Some(0.1), ..EncoderSize::BERT_BASE.tiny() };
        assert_eq!(of(json!({})), Ok(bert));
        for family in ["roberta", "xlm-roberta", "camembert"] {
            let roberta = EncoderSize { first_position: 2, length: 10, ..bert };
            assert_eq!(of(json!({"model_type": family, "pad_token_id": 1})), Ok(roberta));
            let roberta = EncoderSize { first_position: 4, length: 8, ..bert };
            assert_eq!(of(json!({"model_type": family, "pad_token_id": 3})), Ok(roberta));
        }
        for (changes, expected) in [
            (json!({"model_type": "distilbert"}), r#"model_type is "distilbert", which is not supported"#),
            (json!({"num_attention_heads": 5}), "num_attention_heads is 5, which is not supported"),
            (json!({"hidden_act": "gelu_new"}), r#"hidden_act is "gelu_new", which is not supported"#),
            (json!({"hidden_dropout_prob": 1.0}), "hidden_dropout_prob is 1.0, which is not supported"),
            (json!({"type_vocab_size": null}), "there is no type_vocab_size"),
            (json!({"is_decoder": true}), "is_decoder is true, which is not supported"),
            (json!({"pruned_heads": {"0": [1]}}), r#"pruned_heads is {"0":[1]}, which is not supported"#),
            (json!({"embedding_size": 8}), "embedding_size is 8, which is not supported"),
            (
                json!({"position_embedding_type": "relative_key"}),
                r#"position_embedding_type is "relative_key", which is not supported"#,
            ),
            (json!({"model_type": "roberta", "pad_token_id": null}), "there is no pad_token_id"),
            (
                json!({"model_type": "roberta", "pad_token_id": 11}),
                "max_position_embeddings is 12, which is not supported",
            ),
            (
                json!({"model_type": "roberta", "pad_token_id": -1}),
                "pad_token_id is -1, which is not supported",
            ),
        ] {
            assert_eq!(of(changes), Err(expected.into()));
        }
    }
    #[test]
    fn vision_transformers() {
        // As `transformers` writes vit-base-patch16-224.
        let config = json!({
            "model_type": "vit", "image_size": 12, "patch_size": 4, "num_channels": 3, "hidden_size": 24, "intermediate_size": 40,
            "num_attention_heads": 3, "num_hidden_layers": 2, "qkv_bias": true, "layer_norm_eps": 1e-12, "hidden_act": "gelu",
            "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "encoder_stride": 16, "pooler_act": "tanh",
            "pooler_output_size": 24, "initializer_range": 0.02, "id2label": {"0": "cat"}
        });
        let of = |changes| read(&config, changes, |directory| VitSize::from_directory(directory));
        assert_eq!(of(json!({})), Ok(VitSize::TINY));
        assert_eq!(of(json!({"num_channels": null})), Ok(VitSize::TINY));
        let wide = VitSize { image: [12, 20], input_biases: false, ..VitSize::TINY };
        assert_eq!(of(json!({"image_size": [12, 20], "qkv_bias": false})), Ok(wide));
        assert_eq!(wide.tokens(), 16);
        for (changes, expected) in [
            (json!({"model_type": "deit"}), r#"model_type is "deit", which is not supported"#),
            (json!({"image_size": 3}), "image_size is [3,3], which is not supported"),
            (json!({"patch_size": 0}), "patch_size is [0,0], which is not supported"),
            (json!({"patch_size": "large"}), r#"patch_size is "large", which is not supported"#),
            (json!({"image_size": 1 << 20}), "image_size is [1048576,1048576], which is not supported"),
            (json!({"hidden_act": "gelu_new"}), r#"hidden_act is "gelu_new", which is not supported"#),
            (json!({"head_dim": 16}), "head_dim is 16, which is not supported"),
        ] {
            assert_eq!(of(changes), Err(expected.into()));
        }
    }
    #[test]
    fn encoders_with_decoders() {
        // As `transformers` writes t5-small; flan-t5 and byt5 differ in what follows.
        let config = json!({
            "model_type": "t5", "vocab_size": 50, "d_model": 24, "d_ff": 40, "d_kv": 8, "num_heads": 4, "num_layers": 2,
            "feed_forward_proj": "relu", "dense_act_fn": "relu", "is_gated_act": false, "layer_norm_epsilon": 1e-6,
            "relative_attention_num_buckets": 32, "relative_attention_max_distance": 128, "dropout_rate": 0.0,
            "is_encoder_decoder": true, "decoder_start_token_id": 0, "initializer_factor": 1.0, "n_positions": 512,
            "num_decoder_layers": 2, "task_specific_params": {"summarization": {"num_beams": 4}}, "classifier_dropout": 0.0
        });
        let of = |changes| read(&config, changes, |directory| T5Size::from_directory(directory));
        assert_eq!(of(json!({})), Ok(T5Size::TINY));
        assert_eq!(of(json!({"num_decoder_layers": null})), Ok(T5Size::TINY));
        let flan = json!({
            "feed_forward_proj": "gated-gelu", "dense_act_fn": "gelu_new", "is_gated_act": true, "tie_word_embeddings": false,
            "num_decoder_layers": 1
        });
        let gated = T5Size {
            gated: true,
            tied: false,
            scales_outputs: false,
            decoder_layers: Some(1),
            ..T5Size::TINY
        };
        assert_eq!(of(flan), Ok(gated));
        let scaled = json!({"tie_word_embeddings": true, "scale_decoder_outputs": false});
        assert_eq!(of(scaled), Ok(T5Size { scales_outputs: false, ..T5Size::TINY }));
        for (changes, expected) in [
            (json!({"model_type": "mt5"}), r#"model_type is "mt5", which is not supported"#),
            (
                json!({"feed_forward_proj": "gated-silu"}),
                r#"feed_forward_proj is "gated-silu", which is not supported"#,
            ),
            (json!({"dense_act_fn": "gelu"}), r#"dense_act_fn is "gelu", which is not supported"#),
            (json!({"is_decoder": true}), "is_decoder is true, which is not supported"),
            (json!({"layer_norm_epsilon": 0.5}), "layer_norm_epsilon is 0.5, which is not supported"),
            (json!({"num_decoder_layers": 0}), "num_decoder_layers is 0, which is not supported"),
            (
                json!({"relative_attention_num_buckets": 3}),
                "relative_attention_num_buckets is 3, which is not supported",
            ),
            (
                json!({"relative_attention_max_distance": 16}),
                "relative_attention_max_distance is 16, which is not supported",
            ),
        ] {
            assert_eq!(of(changes), Err(expected.into()));
        }
    }
    #[test]
    fn encoders_of_sound() {
        // As `transformers` writes whisper-tiny.
        let config = json!({
            "model_type": "whisper", "vocab_size": 51865, "num_mel_bins": 80, "max_source_positions": 1500, "d_model": 384,
            "max_target_positions": 448, "encoder_layers": 4, "encoder_attention_heads": 6, "encoder_ffn_dim": 1536,
            "decoder_layers": 4, "decoder_attention_heads": 6, "decoder_ffn_dim": 1536, "activation_function": "gelu",
            "dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0, "encoder_layerdrop": 0.0, "init_std": 0.02,
            "decoder_layerdrop": 0.0, "scale_embedding": false, "is_encoder_decoder": true, "num_hidden_layers": 4,
            "begin_suppress_tokens": [220, 50257], "suppress_tokens": [1, 2], "decoder_start_token_id": 50258,
            "forced_decoder_ids": [[1, 50259]], "mask_time_prob": 0.05, "median_filter_width": 7, "max_length": 448
        });
        let of = |changes| read(&config, changes, |directory| WhisperSize::from_directory(directory));
        assert_eq!(of(json!({})), Ok(WhisperSize::TINY_MULTILINGUAL));
        let deep = WhisperSize { decoder_layers: 2, decoder_heads: 8, ..WhisperSize::TINY_MULTILINGUAL };
        assert_eq!(of(json!({"decoder_layers": 2, "decoder_attention_heads": 8})), Ok(deep));
        for (changes, expected) in [
            (
                json!({"activation_function": "relu"}),
                r#"activation_function is "relu", which is not supported"#,
            ),
            (json!({"decoder_attention_heads": 5}), "decoder_attention_heads is 5, which is not supported"),
            (
                json!({"d_model": 9, "encoder_attention_heads": 3, "decoder_attention_heads": 1}),
                "d_model is 9, which is not supported",
            ),
            (json!({"scale_embedding": true}), "scale_embedding is true, which is not supported"),
            (json!({"encoder_layerdrop": 0.1}), "encoder_layerdrop is 0.1, which is not supported"),
            (json!({"max_source_positions": null}), "there is no max_source_positions"),
        ] {
            assert_eq!(of(changes), Err(expected.into()));
        }
    }
}
