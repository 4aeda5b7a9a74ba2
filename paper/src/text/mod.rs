//! Networks for text, each written once and compiled for both namespaces. Weights come from checkpoints of Hugging Face: see
//! [`hugging_face`].
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
    /// Of Burn's layers.
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
    /// The same, and heads and losses in one.
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

/// A network that says which token comes next.
pub trait Decoder: Module {
    /// What there is of its kind.
    type Size: Copy;
    /// With random weights.
    fn new(size: &Self::Size, device: &Device) -> Self;
    /// `[batch, length, vocabulary]`, of tokens `[batch, length]`.
    fn logits(&self, tokens: Tensor<2, Int>) -> Tensor<3>;
    /// The mean cross entropy of the tokens that follow, `[batch, length]`.
    fn loss(&self, tokens: Tensor<2, Int>, next: Tensor<2, Int>) -> Tensor<1>;
}

/// A network that says which token of a text comes next, given another one.
pub trait EncoderDecoder: Module {
    /// With random weights.
    fn new(size: &T5Size, device: &Device) -> Self;
    /// `[batch, length, vocabulary]`, of the tokens of the given text, `[batch, other length]`, and of the other, `[batch,
    /// length]`.
    fn logits(&self, source: Tensor<2, Int>, tokens: Tensor<2, Int>) -> Tensor<3>;
    /// The mean cross entropy of the tokens that follow, `[batch, length]`.
    fn loss(&self, source: Tensor<2, Int>, tokens: Tensor<2, Int>, next: Tensor<2, Int>) -> Tensor<1>;
}
