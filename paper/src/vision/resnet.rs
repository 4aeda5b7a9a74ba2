// Residual networks with the topology of torchvision (arXiv 1512.03385), written once. Whoever includes this file says which
// `nn` they are made of.
use crate::vision::{Classifier, Depth};
use burn::module::Module;
use burn::tensor::{Device, Tensor};
use burn_memsave::plan;
use nn::conv::{Conv2d, Conv2dConfig};
use nn::pool::{AdaptiveAvgPool2d, AdaptiveAvgPool2dConfig, MaxPool2d, MaxPool2dConfig};
use nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig, PaddingConfig2d, Relu};

/// A convolution and its batch norm.
#[derive(Module, Debug)]
pub struct ConvNorm {
    conv: Conv2d,
    norm: BatchNorm,
}

impl ConvNorm {
    fn new(channels: [usize; 2], kernel: usize, stride: usize, device: &Device) -> Self {
        let pad = kernel / 2;
        let conv = Conv2dConfig::new(channels, [kernel; 2])
            .with_stride([stride; 2])
            .with_padding(PaddingConfig2d::Explicit(pad, pad, pad, pad))
            .with_bias(false);
        Self { conv: conv.init(device), norm: BatchNormConfig::new(channels[1]).init(device) }
    }

    fn forward(&self, x: Tensor<4>) -> Tensor<4> {
        self.norm.forward(self.conv.forward(x))
    }
}

/// `relu(convs(x) + shortcut(x))`, with a relu between the convolutions.
#[derive(Module, Debug)]
pub struct Block {
    convs: Vec<ConvNorm>,
    shortcut: Option<ConvNorm>,
    relu: Relu,
}

impl Block {
    /// Two convolutions of 3x3.
    fn basic(input: usize, width: usize, stride: usize, device: &Device) -> Self {
        let convs = [([input, width], 3, stride), ([width, width], 3, 1)];
        Self::of(&convs, [input, width], stride, device)
    }

    /// 1x1, 3x3 and 1x1, the last four times as wide.
    fn bottleneck(input: usize, width: usize, stride: usize, device: &Device) -> Self {
        let convs = [([input, width], 1, 1), ([width, width], 3, stride), ([width, 4 * width], 1, 1)];
        Self::of(&convs, [input, 4 * width], stride, device)
    }

    fn of(convs: &[([usize; 2], usize, usize)], channels: [usize; 2], stride: usize, device: &Device) -> Self {
        let new = |&(channels, kernel, stride): &_| ConvNorm::new(channels, kernel, stride, device);
        let changes = stride != 1 || channels[0] != channels[1];
        Self {
            convs: convs.iter().map(new).collect(),
            shortcut: changes.then(|| ConvNorm::new(channels, 1, stride, device)),
            relu: Relu::new(),
        }
    }

    fn forward(&self, x: Tensor<4>) -> Tensor<4> {
        let y = self.convs.iter().enumerate().fold(x.clone(), |y, (at, conv)| {
            let y = if at > 0 { self.relu.forward(y) } else { y };
            conv.forward(y)
        });
        let shortcut = match &self.shortcut {
            Some(shortcut) => shortcut.forward(x),
            None => x,
        };
        self.relu.forward(y + shortcut)
    }
}

/// A residual network for images of 1000 classes.
#[derive(Module, Debug)]
pub struct Net {
    stem: ConvNorm,
    relu: Relu,
    pool: MaxPool2d,
    layer1: Vec<Block>,
    layer2: Vec<Block>,
    layer3: Vec<Block>,
    layer4: Vec<Block>,
    mean: AdaptiveAvgPool2d,
    head: Linear,
}

impl Classifier for Net {
    type Variant = Depth;

    fn new(depth: Depth, device: &Device) -> Self {
        type New = fn(usize, usize, usize, &Device) -> Block;
        let (blocks, expansion, block): ([usize; 4], usize, New) = match depth {
            Depth::D18 => ([2, 2, 2, 2], 1, Block::basic),
            Depth::D101 => ([3, 4, 23, 3], 4, Block::bottleneck),
        };
        let layer = |at: usize| -> Vec<Block> {
            let width = 64 << at;
            let (input, stride) = if at == 0 { (64, 1) } else { (expansion * width / 2, 2) };
            let first = block(input, width, stride, device);
            let rest = (1..blocks[at]).map(|_| block(expansion * width, width, 1, device));
            core::iter::once(first).chain(rest).collect()
        };
        let pool = MaxPool2dConfig::new([3, 3]).with_strides([2, 2]);
        Self {
            stem: ConvNorm::new([3, 64], 7, 2, device),
            relu: Relu::new(),
            pool: pool.with_padding(PaddingConfig2d::Explicit(1, 1, 1, 1)).init(),
            layer1: layer(0),
            layer2: layer(1),
            layer3: layer(2),
            layer4: layer(3),
            mean: AdaptiveAvgPool2dConfig::new([1, 1]).init(),
            head: LinearConfig::new(512 * expansion, 1000).init(device),
        }
    }

    fn forward(&self, images: Tensor<4>) -> Tensor<2> {
        let x = self.pool.forward(self.relu.forward(self.stem.forward(images)));
        let layers = [&self.layer1, &self.layer2, &self.layer3, &self.layer4];
        let x = layers.into_iter().flatten().fold(x, |x, block| plan::block(block, x, Block::forward));
        self.head.forward(self.mean.forward(x).flatten(1, 3))
    }
}
