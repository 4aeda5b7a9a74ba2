// BERT (arXiv 1810.04805) and RoBERTa (arXiv 1907.11692), written once, with the topology of Hugging Face up to the end of the encoder.
// The module that includes this file chooses `nn`.
use crate::features::{Padded, check, check_texts, padding};
use crate::hugging_face::{HuggingFace, LoadError, load_file, replaced};
use crate::{Encoder, EncoderSize, FeatureEncoder, FeatureError, HiddenStates};
use burn::module::Module;
use burn::tensor::{Bool, Device, Int, Tensor};
use burn_memsave::lazy::{LazyOptions, LazyReport, WeightFile};
use burn_memsave::plan;
use nn::transformer::{TransformerEncoder, TransformerEncoderConfig};
use nn::{Dropout, DropoutConfig, Embedding, EmbeddingConfig, Initializer, LayerNorm, LayerNormConfig};
use std::path::Path;

/// Embeddings of words, positions and segments, and the encoder.
#[derive(Module, Debug)]
pub struct Bert {
    words: Embedding,
    positions: Embedding,
    segments: Embedding,
    norm: LayerNorm,
    dropout: Dropout,
    encoder: TransformerEncoder,
    first_position: usize,
}

impl Bert {
    /// The encoder in a directory of Hugging Face: the size in its `config.json`, and its weights, which stay in their file as far as the
    /// options say. What a checkpoint has on top of the encoder is not loaded.
    ///
    /// ```no_run
    /// use burn::tensor::Device;
    /// use burn_memsave::lazy::LazyOptions;
    /// use burn_memsave_models::{FeatureOptions, Pooling, features, memsave::bert::Bert};
    ///
    /// let options = LazyOptions::new().with_budget(512 << 20);
    /// let (model, _) = Bert::from_directory("xlm-roberta-large", &options, &Device::flex())?;
    /// let batch = vec![vec![0, 35378, 8999, 2], vec![0, 6, 2]];
    /// for rows in features(&model, [batch], FeatureOptions::new(Pooling::Mean)) {
    ///     println!("{}", rows?); // [2, 1024]
    /// }
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
        let size = EncoderSize::from_directory(directory.as_ref())?;
        Self::from_file(&size, WeightFile::open(directory)?, options, device)
    }

    /// An encoder of this size with the weights in a file that is open, or [mapped](WeightFile::open_mapped).
    ///
    /// # Errors
    ///
    /// If the weights cannot be loaded.
    pub fn from_file(
        size: &EncoderSize,
        file: WeightFile,
        options: &LazyOptions,
        device: &Device,
    ) -> Result<(Self, LazyReport), LoadError> {
        load_file(Self::new(size, device), file, options)
    }

    fn embedded(&self, tokens: Tensor<2, Int>, positions: Tensor<2, Int>) -> Tensor<3> {
        let segments = Tensor::zeros(tokens.shape(), &tokens.device());
        let x =
            self.words.forward(tokens) + self.positions.forward(positions) + self.segments.forward(segments);
        self.dropout.forward(self.norm.forward(x))
    }

    /// The rows of tokens `[batch, length]` in the table of positions, `[1, length]`.
    fn positions(&self, tokens: &Tensor<2, Int>) -> Tensor<2, Int> {
        let (first, length) = (self.first_position as i64, tokens.dims()[1] as i64);
        Tensor::<1, Int>::arange(first..first + length, &tokens.device()).unsqueeze()
    }

    /// Tokens that may be those of padding, also within a text, which RoBERTas do not count.
    fn embedded_padded(&self, tokens: Tensor<2, Int>) -> Tensor<3> {
        let positions = match self.first_position.checked_sub(1) {
            Some(padding) => {
                let counts = tokens.clone().not_equal_elem(padding as i64).int();
                counts.clone().cumsum(1) * counts + padding as i64
            }
            None => self.positions(&tokens),
        };
        self.embedded(tokens, positions)
    }

    /// What so many layers make of embedded tokens. None of them sees padding, `[batch, length]`.
    fn through(&self, layers: usize, x: Tensor<3>, padding: Option<Tensor<2, Bool>>) -> Tensor<3> {
        self.encoder.layers.iter().take(layers).fold(x, |x, layer| {
            plan::block(layer, (x, padding.clone()), |layer, (x, padding)| layer.forward(x, padding, None))
        })
    }
}

impl Encoder for Bert {
    fn new(size: &EncoderSize, device: &Device) -> Self {
        let &EncoderSize { vocabulary, width, hidden, heads, layers, length, first_position, .. } = size;
        let initializer = Initializer::Normal { mean: 0.0, std: 0.02 };
        let embedding =
            |count| EmbeddingConfig::new(count, width).with_initializer(initializer.clone()).init(device);
        let encoder = TransformerEncoderConfig::new(width, hidden, heads, layers)
            .with_dropout(size.dropout)
            .with_layer_norm_eps(size.epsilon);
        let mut encoder = encoder.init(device);
        for layer in &mut encoder.layers {
            // Burn's layer has a dropout between the two dense layers, too; BERT has none there.
            layer.pwff.dropout = DropoutConfig::new(0.0).init();
            let of_attention = size.attention_dropout.unwrap_or(size.dropout);
            layer.mha.dropout = DropoutConfig::new(of_attention).init();
        }
        Self {
            words: embedding(vocabulary),
            positions: embedding(first_position + length),
            segments: embedding(size.segments),
            norm: LayerNormConfig::new(width).with_epsilon(size.epsilon).init(device),
            dropout: DropoutConfig::new(size.dropout).init(),
            encoder,
            first_position,
        }
    }

    fn forward(&self, tokens: Tensor<2, Int>) -> Tensor<3> {
        let positions = self.positions(&tokens);
        self.through(self.encoder.layers.len(), self.embedded(tokens, positions), None)
    }

    fn forward_padded(&self, tokens: Tensor<2, Int>, lengths: &[usize]) -> Tensor<3> {
        let padding = padding(tokens.dims(), lengths, &tokens.device());
        self.through(self.encoder.layers.len(), self.embedded_padded(tokens), padding)
    }
}

impl FeatureEncoder for Bert {
    type Batch = Vec<Vec<u32>>;

    fn layers(&self) -> usize {
        self.encoder.layers.len()
    }

    fn device(&self) -> Device {
        self.norm.gamma.device()
    }

    fn hidden_states(&self, batch: &Self::Batch, layer: Option<usize>) -> Result<HiddenStates, FeatureError> {
        check(self, batch.len(), layer)?;
        let (words, positions) = (self.words.weight.lazy_shape(), self.positions.weight.lazy_shape());
        check_texts(batch, words[0], Some(positions[0] - self.first_position))?;
        let Padded { tokens, padding, lengths } = Padded::new(batch, &self.device());
        let x = self.embedded_padded(tokens);
        Ok(HiddenStates { states: self.through(layer.unwrap_or(self.layers()), x, padding), lengths })
    }
}

impl HuggingFace for Bert {
    const NAMES: &'static [(&'static str, &'static str)] = &[
        (r"^(bert|roberta)\.", ""),
        // What is on top of the encoder.
        (r"^(pooler|cls|lm_head|classifier|qa_outputs)\.", "unused.$1."),
        (r"^embeddings\.(position|token_type)_ids$", "unused.$1"),
        (r"^embeddings\.LayerNorm\.", "norm."),
        (r"^embeddings\.word_embeddings\.", "words."),
        (r"^embeddings\.position_embeddings\.", "positions."),
        (r"^embeddings\.token_type_embeddings\.", "segments."),
        (r"^encoder\.layer\.", "encoder.layers."),
        (r"\.attention\.self\.", ".mha."),
        (r"\.attention\.output\.dense\.", ".mha.output."),
        (r"\.attention\.output\.LayerNorm\.", ".norm_1."),
        (r"\.intermediate\.dense\.", ".pwff.linear_inner."),
        (r"\.output\.dense\.", ".pwff.linear_outer."),
        (r"\.output\.LayerNorm\.", ".norm_2."),
    ];

    fn module_name(&self, path: &str) -> String {
        let here_and_there = [
            ("words", "embeddings.word_embeddings"),
            ("positions", "embeddings.position_embeddings"),
            ("segments", "embeddings.token_type_embeddings"),
            (".norm_1", ".attention.output.LayerNorm"),
            (".norm_2", ".output.LayerNorm"),
            ("norm", "embeddings.LayerNorm"),
            ("encoder.layers.", "encoder.layer."),
            (".mha.output", ".attention.output.dense"),
            (".mha.", ".attention.self."),
            (".pwff.linear_inner", ".intermediate.dense"),
            (".pwff.linear_outer", ".output.dense"),
        ];
        replaced(path, &here_and_there)
    }
}
