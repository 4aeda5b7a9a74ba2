//! A BERT encoder (<https://arxiv.org/abs/1810.04805>), and the names of its weights in Hugging Face checkpoints.
use burn::module::Module;
use burn::tensor::{Device, Int, Tensor};
use burn_memsave::lazy::{LazyError, WeightFile};
use burn_memsave::nn::transformer::{TransformerEncoder, TransformerEncoderConfig, TransformerEncoderInput};
use burn_memsave::nn::{Embedding, EmbeddingConfig, LayerNorm, LayerNormConfig};
use serde::Deserialize;

/// The part of a `config.json` that an encoder needs.
#[derive(Clone, Debug, Deserialize)]
pub struct BertConfig {
    pub vocab_size: usize,
    pub hidden_size: usize,
    pub num_hidden_layers: usize,
    pub num_attention_heads: usize,
    pub intermediate_size: usize,
    pub max_position_embeddings: usize,
    pub type_vocab_size: usize,
    #[serde(default = "small")]
    pub layer_norm_eps: f64,
}

fn small() -> f64 {
    1e-12
}

impl BertConfig {
    /// The size of the multilingual large model: 1.6 GiB.
    pub fn large() -> Self {
        Self {
            vocab_size: 119_547,
            hidden_size: 1024,
            num_hidden_layers: 24,
            num_attention_heads: 16,
            intermediate_size: 4096,
            max_position_embeddings: 512,
            type_vocab_size: 2,
            layer_norm_eps: small(),
        }
    }

    /// The model. None of its parameters is in memory yet.
    pub fn init(&self, device: &Device) -> Bert {
        let (width, layers, heads) = (self.hidden_size, self.num_hidden_layers, self.num_attention_heads);
        let embedding = |count| EmbeddingConfig::new(count, width).init(device);
        Bert {
            word_embeddings: embedding(self.vocab_size),
            position_embeddings: embedding(self.max_position_embeddings),
            token_type_embeddings: embedding(self.type_vocab_size),
            norm: LayerNormConfig::new(width).with_epsilon(self.layer_norm_eps).init(device),
            encoder: TransformerEncoderConfig::new(width, self.intermediate_size, heads, layers)
                .with_dropout(0.0)
                .with_layer_norm_eps(self.layer_norm_eps)
                .init(device),
        }
    }
}

#[derive(Module, Debug)]
pub struct Bert {
    word_embeddings: Embedding,
    position_embeddings: Embedding,
    token_type_embeddings: Embedding,
    norm: LayerNorm,
    encoder: TransformerEncoder,
}

impl Bert {
    /// Embeddings `[batch, length, hidden_size]` of tokens `[batch, length]`.
    pub fn forward(&self, tokens: Tensor<2, Int>) -> Tensor<3> {
        let ([batch, length], device) = (tokens.dims(), tokens.device());
        let positions = Tensor::<1, Int>::arange(0..length as i64, &device).unsqueeze::<2>();
        let x = self.word_embeddings.forward(tokens)
            + self.position_embeddings.forward(positions)
            + self.token_type_embeddings.forward(Tensor::zeros([batch, length], &device));
        self.encoder.forward(TransformerEncoderInput::new(self.norm.forward(x)))
    }
}

/// A Hugging Face checkpoint whose tensors have the names of [`Bert`].
pub fn of_hugging_face(file: WeightFile) -> Result<WeightFile, LazyError> {
    let names = [
        (r"^bert\.", ""),
        (r"^embeddings\.LayerNorm\.", "norm."),
        (r"^embeddings\.", ""),
        (r"^encoder\.layer\.", "encoder.layers."),
        (r"\.attention\.self\.", ".mha."),
        (r"\.attention\.output\.dense\.", ".mha.output."),
        (r"\.attention\.output\.LayerNorm\.", ".norm_1."),
        (r"\.intermediate\.dense\.", ".pwff.linear_inner."),
        (r"\.output\.dense\.", ".pwff.linear_outer."),
        (r"\.output\.LayerNorm\.", ".norm_2."),
    ];
    Ok(file.with_key_remappings(&names)?.with_pytorch_adapter())
}
