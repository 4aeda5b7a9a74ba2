//! Models of the papers behind burn-memsave, each written once and compiled for both namespaces.
#![deny(missing_docs)]
#![recursion_limit = "256"]

use burn::module::{Module, ParamGroup};
use burn::tensor::{Device, Int, Tensor};

pub mod report;

/// Models of Burn's layers.
pub mod stock {
    use super::{LanguageModel, Size};

    /// Language models.
    pub mod llama {
        use burn::nn::{self, loss::CrossEntropyLossConfig};
        use burn::tensor::module::attention;
        include!("../../examples/finetune_lm/model.rs");

        fn next_token_loss(head: &Linear, x: Tensor<3>, next: Tensor<2, Int>) -> Tensor<1> {
            let logits = head.forward(x).flatten(0, 1);
            CrossEntropyLossConfig::new().init(&logits.device()).forward(logits, next.flatten(0, 1))
        }
    }

    /// Residual networks.
    pub mod resnet {
        use burn::nn;
        include!("resnet.rs");
    }
}

/// The same files with these lines changed.
pub mod memsave {
    use super::{LanguageModel, Size};

    /// Language models.
    pub mod llama {
        use burn_memsave::functional::attention;
        use burn_memsave::nn::{self, loss::FusedLinearCrossEntropyConfig};
        include!("../../examples/finetune_lm/model.rs");

        fn next_token_loss(head: &Linear, x: Tensor<3>, next: Tensor<2, Int>) -> Tensor<1> {
            FusedLinearCrossEntropyConfig::new().init(&x.device()).forward(head, x, next)
        }
    }

    /// Residual networks.
    pub mod resnet {
        use burn_memsave::nn;
        include!("resnet.rs");
    }
}

/// The depth of a residual network, as torchvision names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Depth {
    /// ResNet-18, of basic blocks.
    D18,
    /// ResNet-101, of bottlenecks.
    D101,
}

/// A residual network.
pub trait ResNet: Module {
    /// With random weights.
    fn new(depth: Depth, device: &Device) -> Self;
    /// Logits `[batch, 1000]` of images `[batch, 3, height, width]`.
    fn forward(&self, images: Tensor<4>) -> Tensor<2>;
}

/// The size of a language model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Size {
    /// Tokens that there are.
    pub vocabulary: usize,
    /// Features.
    pub width: usize,
    /// Heads of attention.
    pub heads: usize,
    /// Features between the two layers of a feed-forward block.
    pub hidden: usize,
    /// Blocks of attention and feed-forward layers.
    pub blocks: usize,
    /// The longest sequence.
    pub length: usize,
}

/// A model that says which token comes next.
pub trait LanguageModel: Module {
    /// With random weights.
    fn new(size: &Size, device: &Device) -> Self;
    /// `[batch, length, vocabulary]`
    fn logits(&self, tokens: Tensor<2, Int>) -> Tensor<3>;
    /// The mean cross entropy of the tokens that follow.
    fn loss(&self, tokens: Tensor<2, Int>, next: Tensor<2, Int>) -> Tensor<1>;
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
