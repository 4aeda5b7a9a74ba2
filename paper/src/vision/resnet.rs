// Residual networks (arXiv 1512.03385), written once, with the topology of torchvision; also with groups (ResNeXt, arXiv 1611.05431) and
// with dilation in place of strides (arXiv 1706.05587). The module that includes this file chooses `nn`.
use super::conv_norm::ConvNorm;
use crate::vision::torchvision::{Keys, Torchvision};
use crate::vision::{Classifier, ResNet};
use burn::module::Module;
use burn::tensor::{Device, Tensor};
use burn_memsave::plan;
use nn::conv::Conv2dConfig;
use nn::pool::{AdaptiveAvgPool2d, AdaptiveAvgPool2dConfig, MaxPool2d, MaxPool2dConfig};
use nn::{Linear, LinearConfig, PaddingConfig2d, Relu};

/// `relu(convs(x) + shortcut(x))`, with a relu between the convolutions.
#[derive(Module, Debug)]
pub struct Block {
    convs: Vec<ConvNorm>,
    shortcut: Option<ConvNorm>,
    relu: Relu,
}

impl Block {
    /// Two convolutions of 3x3.
    fn basic([input, output]: [usize; 2], stride: usize, device: &Device) -> Self {
        let conv = |channels| Conv2dConfig::new(channels, [3, 3]);
        let convs = [conv([input, output]).with_stride([stride; 2]), conv([output, output])];
        Self::of(convs.into(), [input, output], stride, device)
    }

    /// Convolutions of 1x1, 3x3 and 1x1. The second may have groups and dilation.
    fn bottleneck(input: usize, inner: Conv2dConfig, output: usize, device: &Device) -> Self {
        let conv = |channels| Conv2dConfig::new(channels, [1, 1]);
        let (stride, [first, last]) = (inner.stride[0], inner.channels);
        let convs = vec![conv([input, first]), inner, conv([last, output])];
        Self::of(convs, [input, output], stride, device)
    }

    fn of(convs: Vec<Conv2dConfig>, channels: [usize; 2], stride: usize, device: &Device) -> Self {
        let new = |conv| ConvNorm::new(conv, device);
        let changes = stride != 1 || channels[0] != channels[1];
        let shortcut = || new(Conv2dConfig::new(channels, [1, 1]).with_stride([stride; 2]));
        Self {
            convs: convs.into_iter().map(new).collect(),
            shortcut: changes.then(shortcut),
            relu: Relu::new(),
        }
    }

    fn forward(&self, x: Tensor<4>) -> Tensor<4> {
        let (last, others) = self.convs.split_last().expect("two or three convolutions");
        let y = others.iter().fold(x.clone(), |y, conv| conv.forward_relu(y, &self.relu));
        let y = last.forward(y);
        let shortcut = match &self.shortcut {
            Some(shortcut) => shortcut.forward(x),
            None => x,
        };
        self.relu.forward(y + shortcut)
    }
}

/// A residual network with a head for its features.
#[derive(Module, Debug)]
pub struct Residual<H: Module> {
    stem: ConvNorm,
    relu: Relu,
    pool: MaxPool2d,
    layer1: Vec<Block>,
    layer2: Vec<Block>,
    layer3: Vec<Block>,
    layer4: Vec<Block>,
    /// Reads the features.
    pub head: H,
}

impl<H: Module> Residual<H> {
    /// With random weights.
    ///
    /// # Panics
    ///
    /// If basic blocks should have groups or dilation, which torchvision does not support.
    pub fn with_head(net: ResNet, head: H, device: &Device) -> Self {
        assert!(
            net.bottleneck || (net.groups, net.group_width, net.dilated) == (1, 64, [false; 3]),
            "basic blocks have neither groups nor dilation: {net:?}"
        );
        let [mut input, mut dilation] = [net.width, 1];
        let mut layer = |at: usize| -> Vec<Block> {
            let width = net.width << at;
            let output = if net.bottleneck { 4 * width } else { width };
            let inner = width * net.group_width / 64 * net.groups;
            let dilates = at > 0 && net.dilated[at - 1];
            let block = |(at_block, [stride, dilation]): (usize, [usize; 2])| {
                let input = if at_block == 0 { input } else { output };
                if !net.bottleneck {
                    return Block::basic([input, output], stride, device);
                }
                let conv = Conv2dConfig::new([inner, inner], [3, 3]).with_groups(net.groups);
                let conv = conv.with_stride([stride; 2]).with_dilation([dilation; 2]);
                Block::bottleneck(input, conv, output, device)
            };
            // The first block still has the dilation of the stage before.
            let first = [if at == 0 || dilates { 1 } else { 2 }, dilation];
            dilation *= if dilates { 2 } else { 1 };
            let rest = core::iter::repeat_n([1, dilation], net.blocks[at] - 1);
            let blocks = core::iter::once(first).chain(rest).enumerate().map(block).collect();
            input = output;
            blocks
        };
        let pool = MaxPool2dConfig::new([3, 3]).with_strides([2, 2]);
        Self {
            stem: ConvNorm::new(Conv2dConfig::new([3, net.width], [7, 7]).with_stride([2, 2]), device),
            relu: Relu::new(),
            pool: pool.with_padding(PaddingConfig2d::Explicit(1, 1, 1, 1)).init(),
            layer1: layer(0),
            layer2: layer(1),
            layer3: layer(2),
            layer4: layer(3),
            head,
        }
    }

    /// Features `[batch, channels, height / 32, width / 32]` of images `[batch, 3, height, width]`; larger ones with dilation.
    pub fn features(&self, images: Tensor<4>) -> Tensor<4> {
        let x = self.pool.forward(self.stem.forward_relu(images, &self.relu));
        let layers = [&self.layer1, &self.layer2, &self.layer3, &self.layer4];
        layers.into_iter().flatten().fold(x, |x, block| plan::block(block, x, Block::forward))
    }

    /// The keys of everything but the head.
    pub fn feature_keys() -> Keys {
        let mut keys = Keys::default().replace(r"^conv1\.", "stem.conv.").replace(r"^bn1\.", "stem.norm.");
        for at in 0..3 {
            keys = keys
                .replace(format!(r"\.conv{}\.", at + 1), format!(".convs.{at}.conv."))
                .replace(format!(r"\.bn{}\.", at + 1), format!(".convs.{at}.norm."));
        }
        keys.replace(r"\.downsample\.0\.", ".shortcut.conv.").replace(r"\.downsample\.1\.", ".shortcut.norm.")
    }
}

/// Logits of the means of features.
#[derive(Module, Debug)]
pub struct Head {
    mean: AdaptiveAvgPool2d,
    dense: Linear,
}

/// A residual network that classifies images.
pub type Net = Residual<Head>;

impl Classifier for Net {
    type Variant = ResNet;

    fn new(net: ResNet, device: &Device) -> Self {
        let mean = AdaptiveAvgPool2dConfig::new([1, 1]).init();
        let dense = LinearConfig::new(net.features(), net.classes).init(device);
        Self::with_head(net, Head { mean, dense }, device)
    }

    fn forward(&self, images: Tensor<4>) -> Tensor<2> {
        let x = self.head.mean.forward(self.features(images));
        self.head.dense.forward(x.flatten(1, 3))
    }
}

impl Torchvision for Net {
    fn keys(&self) -> Keys {
        Self::feature_keys().replace(r"^fc\.", "head.dense.")
    }
}
