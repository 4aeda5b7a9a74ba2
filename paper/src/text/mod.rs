//! Text models, each written once and compiled twice: with Burn's layers and with burn-memsave's. [`hugging_face`] loads their weights
//! from checkpoints.
use burn::module::Module;
use burn::tensor::{Device, Int, Tensor};

pub mod hugging_face;
pub mod llama;
pub mod repeated;
mod size;

pub use size::{DecoderSize, EncoderSize, Gpt2Size, RotaryStretch, T5Size};

macro_rules! models {
    ($(#[$doc:meta])* $namespace:ident, $nn:path, $functional:path, $grouped:path, $loss:literal) => {
        $(#[$doc])*
        pub mod $namespace {
            /// Encoders: BERT and RoBERTa.
            pub mod bert {
                use $nn;
                include!("bert.rs");
            }

            /// Decoders with learned positions.
            pub mod gpt2 {
                use $nn;
                use $functional as functional;
                use super::loss::next_token_loss;
                use functional::{attention, linear};
                include!("gpt2.rs");
            }

            /// Encoders with decoders.
            pub mod t5 {
                use $nn;
                use $functional as functional;
                use super::loss::next_token_loss;
                use functional::{attention, linear};
                include!("t5.rs");
            }

            /// Decoders with rotary positions: Llama and Mistral.
            pub mod decoder {
                use $nn;
                use $functional as functional;
                use $grouped as attention;
                use super::loss::next_token_loss;
                use functional::linear;
                include!("decoder.rs");
            }

            mod loss {
                #[allow(unused_imports)]
                use $nn;
                use $functional as functional;
                include!($loss);
            }
        }
    };
}

models!(
    /// The models with Burn's layers.
    stock,
    burn::nn,
    burn::tensor::module,
    crate::text::repeated::attention,
    "loss.rs"
);
models!(
    /// The same files with these lines changed.
    memsave,
    burn_memsave::nn,
    burn_memsave::functional,
    burn_memsave::functional::attention,
    "loss.rs"
);
models!(
    /// The same with fused heads and losses.
    fused,
    burn_memsave::nn,
    burn_memsave::functional,
    burn_memsave::functional::attention,
    "fused_loss.rs"
);

/// An encoder of text.
pub trait Encoder: Module {
    /// With random weights.
    fn new(size: &EncoderSize, device: &Device) -> Self;
    /// Features `[batch, length, width]` of tokens `[batch, length]`, none of which is padding.
    fn forward(&self, tokens: Tensor<2, Int>) -> Tensor<3>;
}

/// A network that predicts the next token.
pub trait Decoder: Module {
    /// The type of its size.
    type Size: Copy;
    /// With random weights.
    fn new(size: &Self::Size, device: &Device) -> Self;
    /// Logits `[batch, length, vocabulary]` of tokens `[batch, length]`.
    fn logits(&self, tokens: Tensor<2, Int>) -> Tensor<3>;
    /// The mean cross entropy of the tokens that follow, `[batch, length]`.
    fn loss(&self, tokens: Tensor<2, Int>, next: Tensor<2, Int>) -> Tensor<1>;
}

/// A network that predicts the next token of a text, given another text.
pub trait EncoderDecoder: Module {
    /// With random weights.
    fn new(size: &T5Size, device: &Device) -> Self;
    /// Logits `[batch, length, vocabulary]` of the tokens of the given text, `source [batch, other length]`, and of the predicted one,
    /// `tokens [batch, length]`.
    fn logits(&self, source: Tensor<2, Int>, tokens: Tensor<2, Int>) -> Tensor<3>;
    /// The mean cross entropy of the tokens that follow, `[batch, length]`.
    fn loss(&self, source: Tensor<2, Int>, tokens: Tensor<2, Int>, next: Tensor<2, Int>) -> Tensor<1>;
}
