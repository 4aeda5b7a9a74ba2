//! Models of the papers behind burn-memsave, each written once and compiled for both namespaces.
#![deny(missing_docs)]
#![recursion_limit = "256"]

use burn::module::{Module, ParamGroup};
use burn::tensor::{Device, Int, Tensor};

pub mod llama;
pub mod report;

macro_rules! models {
    ($(#[$doc:meta])* $namespace:ident, $nn:path) => {
        $(#[$doc])*
        pub mod $namespace {
            /// Residual networks.
            pub mod resnet {
                use $nn;
                include!("resnet.rs");
            }

            /// Networks that were searched for.
            pub mod efficientnet {
                use $nn;
                include!("efficientnet.rs");
            }

            /// Encoders of text.
            pub mod bert {
                use $nn;
                include!("bert.rs");
            }
        }
    };
}

models!(
    /// Models of Burn's layers.
    stock,
    burn::nn
);
models!(
    /// The same files with the one line changed.
    memsave,
    burn_memsave::nn
);

/// A network that says what is in images.
pub trait Classifier: Module {
    /// What there is of its kind.
    type Variant: Copy;
    /// With random weights.
    fn new(variant: Self::Variant, device: &Device) -> Self;
    /// Logits `[batch, 1000]` of images `[batch, 3, height, width]`.
    fn forward(&self, images: Tensor<4>) -> Tensor<2>;
}

/// The depth of a residual network, as torchvision names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Depth {
    /// ResNet-18, of basic blocks.
    D18,
    /// ResNet-101, of bottlenecks.
    D101,
}

/// An EfficientNetV2, as torchvision names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EfficientNet {
    /// EfficientNetV2-S.
    V2S,
    /// EfficientNetV2-L.
    V2L,
}

impl EfficientNet {
    /// The dropout rate before the last layer.
    pub fn dropout(self) -> f64 {
        match self {
            Self::V2S => 0.2,
            Self::V2L => 0.4,
        }
    }
}

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

/// What requires a gradient: the cases of the table in [arXiv 2404.12406](https://arxiv.org/abs/2404.12406).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Case {
    /// All parameters.
    All,
    /// The input only; batch norm uses the statistics of the batch.
    Input,
    /// The input only; batch norm uses its running statistics.
    InputRunning,
    /// The parameters of norm layers.
    Norm,
    /// The first quarter of the layers.
    FirstQuarter,
}

impl Case {
    /// All cases.
    pub const ALL: [Self; 5] = [Self::All, Self::Input, Self::InputRunning, Self::Norm, Self::FirstQuarter];

    /// The name in tables.
    pub fn name(self) -> &'static str {
        match self {
            Self::All => "all trainable",
            Self::Input => "only the input requires a gradient",
            Self::InputRunning => "the same, batch norm on running statistics",
            Self::Norm => "only norm layers trainable",
            Self::FirstQuarter => "only the first quarter of the layers trainable",
        }
    }

    /// Whether the input requires a gradient.
    pub fn tracks_input(self) -> bool {
        matches!(self, Self::Input | Self::InputRunning)
    }

    /// Sets which parameters require gradients.
    ///
    /// # Panics
    ///
    /// Never: the patterns are valid.
    pub fn prepare<M: Module>(self, model: M) -> M {
        let group = |pattern: &str| ParamGroup::from_regex(pattern).expect("a valid pattern");
        match self {
            Self::All => model,
            Self::Input => model.no_grad(),
            Self::InputRunning => model.freeze(),
            Self::Norm => model.no_grad().set_require_grad_group(group(r"norm"), true),
            Self::FirstQuarter => model.no_grad().set_require_grad_group(group(r"^(stem|layer1)"), true),
        }
    }
}
