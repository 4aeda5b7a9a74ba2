// A fully convolutional network (arXiv 1411.4038) on a residual network, written once, with the topology of torchvision but without the
// auxiliary classifier. The module that includes this file chooses `nn`.
use super::conv_norm::ConvNorm;
use super::resnet::Residual;
use super::upsample::upsample;
use crate::vision::torchvision::{Keys, Torchvision};
use crate::vision::{Fcn, Segmenter};
use burn::module::Module;
use burn::tensor::{Device, Tensor};
use burn_memsave::plan;
use nn::conv::{Conv2d, Conv2dConfig};
use nn::{Dropout, DropoutConfig, Relu};

/// Logits of features.
#[derive(Module, Debug)]
pub struct Head {
    conv: ConvNorm,
    relu: Relu,
    dropout: Dropout,
    classes: Conv2d,
}

impl Head {
    fn new(net: &Fcn, device: &Device) -> Self {
        let input = net.backbone.features();
        Self {
            conv: ConvNorm::new(Conv2dConfig::new([input, input / 4], [3, 3]), device),
            relu: Relu::new(),
            dropout: DropoutConfig::new(net.dropout).init(),
            classes: Conv2dConfig::new([input / 4, net.classes], [1, 1]).init(device),
        }
    }

    fn forward(&self, x: Tensor<4>) -> Tensor<4> {
        let y = self.relu.forward(self.conv.forward(x));
        self.classes.forward(self.dropout.forward(y))
    }
}

/// A fully convolutional network.
pub type Net = Residual<Head>;

impl Segmenter for Net {
    type Variant = Fcn;

    fn new(net: Fcn, device: &Device) -> Self {
        Self::with_head(net.backbone, Head::new(&net, device), device)
    }

    fn forward(&self, images: Tensor<4>) -> Tensor<4> {
        let [_, _, height, width] = images.dims();
        upsample(plan::block(&self.head, self.features(images), Head::forward), [height, width])
    }
}

impl Torchvision for Net {
    fn keys(&self) -> Keys {
        let keys = Keys::default().replace(r"^backbone\.", "");
        keys.and(Self::feature_keys())
            .replace(r"^classifier\.0\.", "head.conv.conv.")
            .replace(r"^classifier\.1\.", "head.conv.norm.")
            .replace(r"^classifier\.4\.", "head.classes.")
    }
}
