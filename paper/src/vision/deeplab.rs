// DeepLabV3 (arXiv 1706.05587) on a residual network, written once, with the topology of torchvision but without the auxiliary
// classifier. The module that includes this file chooses `nn`.
use super::conv_norm::ConvNorm;
use super::resnet::Residual;
use super::upsample::upsample;
use crate::vision::torchvision::{Keys, Torchvision};
use crate::vision::{DeepLab, Segmenter};
use burn::module::Module;
use burn::tensor::{Device, Tensor};
use burn_memsave::plan;
use nn::conv::{Conv2d, Conv2dConfig};
use nn::pool::{AdaptiveAvgPool2d, AdaptiveAvgPool2dConfig};
use nn::{Dropout, DropoutConfig, Relu};

/// Logits from convolutions of the features with several rates of dilation, and from their means.
#[derive(Module, Debug)]
pub struct Head {
    /// The first is 1x1.
    convs: Vec<ConvNorm>,
    mean: AdaptiveAvgPool2d,
    pooled: ConvNorm,
    project: ConvNorm,
    dropout: Dropout,
    conv: ConvNorm,
    relu: Relu,
    classes: Conv2d,
}

impl Head {
    fn new(net: &DeepLab, device: &Device) -> Self {
        let (input, width) = (net.backbone.features(), net.width);
        let pointwise = |input| ConvNorm::new(Conv2dConfig::new([input, width], [1, 1]), device);
        let conv = |input, rate| {
            ConvNorm::new(Conv2dConfig::new([input, width], [3, 3]).with_dilation([rate; 2]), device)
        };
        let dilated = net.rates.into_iter().map(|rate| conv(input, rate));
        Self {
            convs: core::iter::once(pointwise(input)).chain(dilated).collect(),
            mean: AdaptiveAvgPool2dConfig::new([1, 1]).init(),
            pooled: pointwise(input),
            project: pointwise((net.rates.len() + 2) * width),
            dropout: DropoutConfig::new(net.dropout).init(),
            conv: conv(width, 1),
            relu: Relu::new(),
            classes: Conv2dConfig::new([width, net.classes], [1, 1]).init(device),
        }
    }

    fn forward(&self, x: Tensor<4>) -> Tensor<4> {
        let [_, _, height, width] = x.dims();
        let conv = |conv: &ConvNorm, x| self.relu.forward(conv.forward(x));
        let pooled = upsample(conv(&self.pooled, self.mean.forward(x.clone())), [height, width]);
        let seen = self.convs.iter().map(|of| conv(of, x.clone())).chain([pooled]);
        let y = conv(&self.project, Tensor::cat(seen.collect(), 1));
        self.classes.forward(conv(&self.conv, self.dropout.forward(y)))
    }
}

/// A DeepLabV3.
pub type Net = Residual<Head>;

impl Segmenter for Net {
    type Variant = DeepLab;

    fn new(net: DeepLab, device: &Device) -> Self {
        Self::with_head(net.backbone, Head::new(&net, device), device)
    }

    fn forward(&self, images: Tensor<4>) -> Tensor<4> {
        let [_, _, height, width] = images.dims();
        upsample(plan::block(&self.head, self.features(images), Head::forward), [height, width])
    }
}

impl Torchvision for Net {
    fn keys(&self) -> Keys {
        let pooled = self.head.convs.len();
        let keys = Keys::default().replace(r"^backbone\.", "");
        keys.and(Self::feature_keys())
            .replace(format!(r"^classifier\.0\.convs\.{pooled}\.1\."), "head.pooled.conv.")
            .replace(format!(r"^classifier\.0\.convs\.{pooled}\.2\."), "head.pooled.norm.")
            .replace(r"^classifier\.0\.(convs\.\d|project)\.0\.", "head.${1}.conv.")
            .replace(r"^classifier\.0\.(convs\.\d|project)\.1\.", "head.${1}.norm.")
            .replace(r"^classifier\.1\.", "head.conv.conv.")
            .replace(r"^classifier\.2\.", "head.conv.norm.")
            .replace(r"^classifier\.4\.", "head.classes.")
    }
}
