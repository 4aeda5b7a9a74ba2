// The language model of <https://github.com/tracel-ai/burn/issues/5212>: embeddings of tokens and positions, Burn's transformer
// encoder with a causal mask, and a dense layer. The module that includes this file chooses `nn` and provides
// `next_token_loss(head, x, next)`.
use burn::module::Module;
use burn::tensor::{Device, Int, Tensor};
use nn::attention::generate_autoregressive_mask;
use nn::transformer::{TransformerEncoder, TransformerEncoderConfig, TransformerEncoderInput};
use nn::{Embedding, EmbeddingConfig, Linear, LinearConfig};

/// The language model.
#[derive(Module, Debug)]
pub struct Model {
    tokens: Embedding,
    positions: Embedding,
    encoder: TransformerEncoder,
    head: Linear,
}

impl super::LanguageModel for Model {
    fn new(size: &super::Size, device: &Device) -> Self {
        let embedding = |count| EmbeddingConfig::new(count, size.width).init(device);
        let encoder = TransformerEncoderConfig::new(size.width, size.hidden, size.heads, size.blocks);
        Self {
            tokens: embedding(size.vocabulary),
            positions: embedding(size.length),
            encoder: encoder.with_norm_first(true).init(device),
            head: LinearConfig::new(size.width, size.vocabulary).init(device),
        }
    }

    fn loss(&self, tokens: Tensor<2, Int>, next: Tensor<2, Int>) -> Tensor<1> {
        let ([batch, length], device) = (tokens.dims(), tokens.device());
        let places = Tensor::<1, Int>::arange(0..length as i64, &device).unsqueeze::<2>().repeat_dim(0, batch);
        let x = self.tokens.forward(tokens) + self.positions.forward(places);
        let mask = generate_autoregressive_mask(batch, length, &device);
        let x = self.encoder.forward(TransformerEncoderInput::new(x).mask_attn(mask));
        next_token_loss(&self.head, x, next)
    }
}
