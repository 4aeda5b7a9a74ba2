#![doc = include_str!("../README.md")]
//!
//! # Modules
//!
//! - [`hugging_face`] loads weights and adapters from checkpoints. Weights may stay in their file until a layer runs.
//! - [`memsave`] has the models, one file for each family; [`fused`] the same with fused heads and losses, for training.
#![deny(missing_docs)]
#![recursion_limit = "256"]
use burn::module::Module;
use burn::tensor::{Device, Int, Tensor};

mod cache;
mod config;
mod experts;
mod features;
mod generate;
mod gguf;
#[cfg(feature = "text")]
mod gguf_tokenizer;
mod heads;
pub mod hugging_face;
pub mod repeated;
mod rotary_stretch;
mod rotate;
mod size;
mod tables;
mod vit_size;
mod whisper_size;

pub use cache::KeyValueCache;
pub use config::ConfigError;
pub use features::{FeatureEncoder, FeatureError, FeatureOptions, HiddenStates, Pooling, features};
pub use generate::{Generate, GenerateError, GenerateOptions, Generated, Sampling, generate};
#[cfg(feature = "text")]
pub use gguf_tokenizer::tokenizer_of_gguf;
pub use rotary_stretch::{LongRope, RotaryStretch};
pub use size::{Biases, DecoderSize, EncoderSize, Experts, Gemma, Gpt2Size, GptJSize, T5Size, Window};
pub use vit_size::VitSize;
pub use whisper_size::WhisperSize;

macro_rules! models {
    (
        $(#[$doc:meta])* $namespace:ident, $nn:path, $functional:path, $grouped:path, $rotate:path, $loss:literal
        $(
            , [$($decoder:literal),*], [$($gpt2:literal),*], [$($gptj:literal),*], [$($t5:literal),*],
            [$($whisper:literal),*]
        )?
    ) => {
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
                $($(include!($gpt2);)*)?
            }

            /// Encoders with decoders.
            pub mod t5 {
                use $nn;
                use $functional as functional;
                use super::loss::next_token_loss;
                use functional::{attention, linear};
                include!("t5.rs");
                include!("t5_encoder.rs");
                $($(include!($t5);)*)?
            }

            /// Encoders of sound with decoders of text.
            pub mod whisper {
                use $nn;
                use $functional as functional;
                use functional::{attention, linear};
                include!("whisper.rs");
                $($(include!($whisper);)*)?
            }

            /// Encoders of images: vision transformers.
            pub mod vit {
                use $nn;
                include!("vit.rs");
            }

            /// Decoders with rotary positions: Llama, Mistral, Mixtral, Qwen2, Qwen3, Gemma and Phi-3.
            pub mod decoder {
                use $nn;
                use $functional as functional;
                use $grouped as attention;
                use $rotate as rotate;
                use super::loss::next_token_loss;
                use functional::linear;
                include!("decoder.rs");
                include!("mixture.rs");
                $($(include!($decoder);)*)?
            }

            /// Decoders whose blocks compute attention and feed-forward layers from the same input: GPT-J and Phi.
            pub mod gptj {
                use $nn;
                use $functional as functional;
                use super::loss::next_token_loss;
                use functional::linear;
                include!("gptj.rs");
                $($(include!($gptj);)*)?
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

#[cfg(feature = "stock")]
models!(
    /// The models with Burn's layers, to compare with.
    stock,
    burn::nn,
    burn::tensor::module,
    crate::repeated::attention,
    crate::rotate::rotate_by_burn,
    "loss.rs"
);
models!(
    /// The models.
    memsave,
    burn_memsave::nn,
    burn_memsave::functional,
    burn_memsave::functional::attention,
    crate::rotate::rotate,
    "loss.rs",
    ["decoder_inference.rs", "decoder_tests.rs"],
    ["gpt2_inference.rs"],
    ["gptj_inference.rs"],
    ["t5_inference.rs"],
    ["whisper_inference.rs"]
);
models!(
    /// The same with fused heads and losses.
    fused,
    burn_memsave::nn,
    burn_memsave::functional,
    burn_memsave::functional::attention,
    crate::rotate::rotate,
    "fused_loss.rs",
    ["decoder_inference.rs"],
    ["gpt2_inference.rs"],
    ["gptj_inference.rs"],
    [],
    []
);

/// An encoder of text.
pub trait Encoder: Module {
    /// With random weights.
    fn new(size: &EncoderSize, device: &Device) -> Self;
    /// Features `[batch, length, width]` of tokens `[batch, length]`, none of which is padding.
    fn forward(&self, tokens: Tensor<2, Int>) -> Tensor<3>;
    /// The same for texts of different lengths, each of which ends with padding. No token sees padding, whose features mean nothing.
    ///
    /// # Panics
    ///
    /// If there is not a length for each text, or if one is 0 or larger than `length`.
    fn forward_padded(&self, tokens: Tensor<2, Int>, lengths: &[usize]) -> Tensor<3>;
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
    /// The mean cross entropy of the tokens in `next [batch, length]` for which `counts [batch, length]` is 1. Tokens for which it is 0 are not
    /// learned: questions, or padding, which belongs after a text, where no other token sees it. If it is 0 everywhere, the result is NaN.
    ///
    /// The decoders of [`fused`] compute logits in chunks, and read a lazy head that is not in memory once, block by block.
    ///
    /// ```
    /// use burn::tensor::{Device, Int, Tensor, Tolerance};
    /// use burn_memsave_models::{Decoder, DecoderSize, fused::decoder::Llama};
    ///
    /// let device = Device::flex();
    /// let model = Llama::new(&DecoderSize::LLAMA_3_2_1B.tiny(), &device);
    /// let [text, next] = [[[1, 2, 3]], [[2, 3, 4]]].map(|tokens| Tensor::<2, Int>::from_ints(tokens, &device));
    /// let [padded, follows] = [[[1, 2, 3, 0]], [[2, 3, 4, 0]]].map(|tokens| Tensor::<2, Int>::from_ints(tokens, &device));
    /// let counts = Tensor::<2>::from_floats([[1.0, 1.0, 1.0, 0.0]], &device);
    /// let loss = model.loss_of_some(padded, follows, counts).into_data();
    /// loss.assert_approx_eq::<f32>(&model.loss(text, next).into_data(), Tolerance::default());
    /// ```
    fn loss_of_some(&self, tokens: Tensor<2, Int>, next: Tensor<2, Int>, counts: Tensor<2>) -> Tensor<1>;
}

/// A network that predicts the next token of a text, given another text. In a batch, all given texts have one
/// length, and all predicted ones: none of their tokens is padding.
pub trait EncoderDecoder: Module {
    /// With random weights.
    fn new(size: &T5Size, device: &Device) -> Self;
    /// Logits `[batch, length, vocabulary]` of the tokens of the given text, `source [batch, other length]`, and of the predicted one,
    /// `tokens [batch, length]`.
    fn logits(&self, source: Tensor<2, Int>, tokens: Tensor<2, Int>) -> Tensor<3>;
    /// The mean cross entropy of the tokens that follow, `[batch, length]`.
    fn loss(&self, source: Tensor<2, Int>, tokens: Tensor<2, Int>, next: Tensor<2, Int>) -> Tensor<1>;
}
