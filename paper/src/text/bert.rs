// A BERT encoder (arXiv 1810.04805), written once. Whoever includes this file says which `nn` it is made of.
use crate::text::{Encoder, EncoderSize};
use burn::module::Module;
use burn::tensor::{Device, Int, Tensor};
use nn::transformer::{TransformerEncoder, TransformerEncoderConfig, TransformerEncoderInput};
use nn::{Dropout, DropoutConfig, Embedding, EmbeddingConfig, LayerNorm, LayerNormConfig};

/// Embeddings of words, positions and segments, and the encoder.
#[derive(Module, Debug)]
pub struct Bert {
    words: Embedding,
    positions: Embedding,
    segments: Embedding,
    norm: LayerNorm,
    dropout: Dropout,
    encoder: TransformerEncoder,
}

impl Encoder for Bert {
    fn new(size: &EncoderSize, device: &Device) -> Self {
        let &EncoderSize { vocabulary, width, hidden, heads, layers, length, dropout } = size;
        let embedding = |count| EmbeddingConfig::new(count, width).init(device);
        let encoder = TransformerEncoderConfig::new(width, hidden, heads, layers).with_dropout(dropout);
        Self {
            words: embedding(vocabulary),
            positions: embedding(length),
            segments: embedding(2),
            norm: LayerNormConfig::new(width).with_epsilon(1e-12).init(device),
            dropout: DropoutConfig::new(dropout).init(),
            encoder: encoder.with_layer_norm_eps(1e-12).init(device),
        }
    }

    fn forward(&self, tokens: Tensor<2, Int>) -> Tensor<3> {
        let ([batch, length], device) = (tokens.dims(), tokens.device());
        let positions = Tensor::<1, Int>::arange(0..length as i64, &device).unsqueeze::<2>();
        let segments = Tensor::zeros([batch, length], &device);
        let x = self.words.forward(tokens) + self.positions.forward(positions) + self.segments.forward(segments);
        let x = self.dropout.forward(self.norm.forward(x));
        self.encoder.forward(TransformerEncoderInput::new(x))
    }
}
