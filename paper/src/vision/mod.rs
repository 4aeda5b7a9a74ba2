//! Networks for images, each written once and compiled for both namespaces.
use burn::module::Module;
use burn::tensor::{Device, Tensor};

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
