// BERT (arXiv 1810.04805) and RoBERTa (arXiv 1907.11692), written once, with the topology of Hugging Face up to the end of the encoder.
// The module that includes this file chooses `nn`.
use crate::hugging_face::{HuggingFace, replaced};
use crate::{Encoder, EncoderSize};
use burn::module::Module;
use burn::tensor::{Device, Int, Tensor};
use burn_memsave::plan;
use nn::transformer::{TransformerEncoder, TransformerEncoderConfig};
use nn::{Dropout, DropoutConfig, Embedding, EmbeddingConfig, Initializer, LayerNorm, LayerNormConfig};

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
        // Burn's layer has a dropout between the two dense layers, too; BERT has none there.
        encoder.layers.iter_mut().for_each(|layer| layer.pwff.dropout = DropoutConfig::new(0.0).init());
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
        let ([batch, length], device) = (tokens.dims(), tokens.device());
        let first = self.first_position as i64;
        let positions = Tensor::<1, Int>::arange(first..first + length as i64, &device).unsqueeze::<2>();
        let segments = Tensor::zeros([batch, length], &device);
        let x =
            self.words.forward(tokens) + self.positions.forward(positions) + self.segments.forward(segments);
        let x = self.dropout.forward(self.norm.forward(x));
        let layers = self.encoder.layers.iter();
        layers.fold(x, |x, layer| plan::block(layer, x, |layer, x| layer.forward(x, None, None)))
    }
}

impl HuggingFace for Bert {
    const NAMES: &'static [(&'static str, &'static str)] = &[
        (r"^(bert|roberta)\.", ""),
        (r"^(pooler|cls|lm_head)\.", "unused.$1."),
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
