//! Networks for text, each written once and compiled for both namespaces.
use burn::module::Module;
use burn::tensor::{Device, Int, Tensor};

pub mod llama;

macro_rules! models {
    ($(#[$doc:meta])* $namespace:ident, $nn:path) => {
        $(#[$doc])*
        pub mod $namespace {
            /// Encoders.
            pub mod bert {
                use $nn;
                include!("bert.rs");
            }
        }
    };
}

models!(
    /// Of Burn's layers.
    stock,
    burn::nn
);
models!(
    /// The same files with the one line changed.
    memsave,
    burn_memsave::nn
);

/// The size of an encoder of text.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct EncoderSize {
    /// Tokens that there are.
    pub vocabulary: usize,
    /// Features.
    pub width: usize,
    /// Features between the two layers of a feed-forward block.
    pub hidden: usize,
    /// Heads of attention.
    pub heads: usize,
    /// Blocks of attention and feed-forward layers.
    pub layers: usize,
    /// The longest sequence.
    pub length: usize,
    /// The dropout rate.
    pub dropout: f64,
}

impl EncoderSize {
    /// BERT-base, uncased.
    pub const BERT_BASE: Self = Self {
        vocabulary: 30_522,
        width: 768,
        hidden: 3072,
        heads: 12,
        layers: 12,
        length: 512,
        dropout: 0.1,
    };
}

/// An encoder of text.
pub trait Encoder: Module {
    /// With random weights.
    fn new(size: &EncoderSize, device: &Device) -> Self;
    /// Features `[batch, length, width]` of tokens `[batch, length]`.
    fn forward(&self, tokens: Tensor<2, Int>) -> Tensor<3>;
}
