//! Networks for images, each written once and compiled for both namespaces.
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

            /// Networks of nothing but convolutions of 3x3, pools and dense layers.
            pub mod vgg {
                use $nn;
                include!("vgg.rs");
            }

            /// Networks that were searched for.
            pub mod efficientnet {
                use $nn;
                include!("efficientnet.rs");
            }

            /// Networks that were searched for, for phones.
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

            /// Segmentation, seen at several rates of dilation.
            pub mod deeplab {
                use $nn;
                include!("deeplab.rs");
            }

            /// Segmentation by a fully convolutional network.
            pub mod fcn {
                use $nn;
                include!("fcn.rs");
            }

            /// Segmentation with what was seen on the way down.
            pub mod unet {
                use $nn;
                include!("unet.rs");
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
    /// Logits `[batch, classes]` of images `[batch, 3, height, width]`.
    fn forward(&self, images: Tensor<4>) -> Tensor<2>;
}

/// A network that says what is at every pixel of images.
pub trait Segmenter: Module {
    /// What there is of its kind.
    type Variant: Copy;
    /// With random weights.
    fn new(variant: Self::Variant, device: &Device) -> Self;
    /// Logits `[batch, classes, height, width]` of images `[batch, 3, height, width]`.
    fn forward(&self, images: Tensor<4>) -> Tensor<4>;
}
