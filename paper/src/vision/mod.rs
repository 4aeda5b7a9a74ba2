//! Image networks, each written once and compiled twice: with Burn's layers and with burn-memsave's.
use burn::module::Module;
use burn::tensor::{Device, Tensor};

pub mod torchvision;
mod variants;

pub use variants::{
    ConvNext, DeepLab, EfficientNet, EfficientStage, Fcn, InvertedResidual, MobileNet, ResNet, UNet, Vgg, Vit,
};

macro_rules! models {
    ($(#[$doc:meta])* $namespace:ident, $nn:path) => {
        $(#[$doc])*
        pub mod $namespace {
            /// Convolutions with their batch norms.
            pub mod conv_norm {
                use $nn;
                include!("conv_norm.rs");
                include!("activated_apart.rs");
            }

            /// Enlarging images.
            pub mod upsample {
                use $nn;
                include!("upsample.rs");
            }

            /// Residual networks.
            pub mod resnet {
                use $nn;
                include!("resnet.rs");
            }

            /// Networks of only 3x3 convolutions, pools and dense layers.
            pub mod vgg {
                use $nn;
                include!("vgg.rs");
            }

            /// Networks found by architecture search.
            pub mod efficientnet {
                use $nn;
                include!("efficientnet.rs");
            }

            /// Networks found by architecture search, for phones.
            pub mod mobilenet {
                use $nn;
                include!("mobilenet.rs");
            }

            /// Convolutional networks after the pattern of transformers.
            pub mod convnext {
                use $nn;
                include!("convnext.rs");
            }

            /// Vision transformers.
            pub mod vit {
                use $nn;
                include!("vit.rs");
            }

            /// Segmentation with several rates of dilation.
            pub mod deeplab {
                use $nn;
                include!("deeplab.rs");
            }

            /// Segmentation by a fully convolutional network.
            pub mod fcn {
                use $nn;
                include!("fcn.rs");
            }

            /// Segmentation with skip connections from the way down to the way up.
            pub mod unet {
                use $nn;
                include!("unet.rs");
            }
        }
    };
}

/// Networks of our layers whose batch norms also activate.
pub mod activated {
    /// Convolutions with their batch norms.
    pub mod conv_norm {
        use burn_memsave::nn;
        include!("conv_norm.rs");
        include!("activated_together.rs");
    }

    /// Residual networks.
    pub mod resnet {
        use burn_memsave::nn;
        include!("resnet.rs");
    }

    /// Networks found by architecture search.
    pub mod efficientnet {
        use burn_memsave::nn;
        include!("efficientnet.rs");
    }
}

models!(
    /// The networks with Burn's layers.
    stock,
    burn::nn
);
models!(
    /// The same files with the one line changed.
    memsave,
    burn_memsave::nn
);

/// A network that classifies images.
pub trait Classifier: Module {
    /// The type of its variants.
    type Variant: Copy;
    /// With random weights.
    fn new(variant: Self::Variant, device: &Device) -> Self;
    /// Logits `[batch, classes]` of images `[batch, 3, height, width]`.
    fn forward(&self, images: Tensor<4>) -> Tensor<2>;
}

/// A network that classifies every pixel of images.
pub trait Segmenter: Module {
    /// The type of its variants.
    type Variant: Copy;
    /// With random weights.
    fn new(variant: Self::Variant, device: &Device) -> Self;
    /// Logits `[batch, classes, height, width]` of images `[batch, 3, height, width]`.
    fn forward(&self, images: Tensor<4>) -> Tensor<4>;
}
