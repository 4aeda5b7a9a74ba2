//! Models of the papers behind burn-memsave, each written once and compiled for both namespaces.
#![deny(missing_docs)]
#![recursion_limit = "256"]

use burn::module::{Module, ParamGroup};
use burn::tensor::{Device, Tensor};

pub mod llama;
pub mod report;

/// Models of Burn's layers.
pub mod stock {
    /// Residual networks.
    pub mod resnet {
        use burn::nn;
        include!("resnet.rs");
    }
}

/// The same file with the one line changed.
pub mod memsave {
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
