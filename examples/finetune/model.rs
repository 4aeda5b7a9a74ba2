// A residual CNN for 8x8 digits, written once. The module that includes this file chooses `nn`.
use burn::module::Module;
use burn::tensor::{Device, Tensor};
use nn::conv::{Conv2d, Conv2dConfig};
use nn::pool::{AdaptiveAvgPool2d, AdaptiveAvgPool2dConfig, MaxPool2d, MaxPool2dConfig};
use nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig, PaddingConfig2d, Relu};

/// `relu(norm(conv(relu(norm(conv(x))))) + x)`
#[derive(Module, Debug)]
pub struct Block {
    conv1: Conv2d,
    norm1: BatchNorm,
    conv2: Conv2d,
    norm2: BatchNorm,
    relu: Relu,
}

fn conv3x3(channels: [usize; 2], device: &Device) -> Conv2d {
    let config = Conv2dConfig::new(channels, [3, 3]).with_padding(PaddingConfig2d::Same);
    config.with_bias(false).init(device)
}

impl Block {
    fn new(channels: usize, device: &Device) -> Self {
        Self {
            conv1: conv3x3([channels; 2], device),
            norm1: BatchNormConfig::new(channels).init(device),
            conv2: conv3x3([channels; 2], device),
            norm2: BatchNormConfig::new(channels).init(device),
            relu: Relu::new(),
        }
    }

    fn forward(&self, x: Tensor<4>) -> Tensor<4> {
        let y = self.relu.forward(self.norm1.forward(self.conv1.forward(x.clone())));
        let y = self.norm2.forward(self.conv2.forward(y));
        self.relu.forward(y + x)
    }
}

/// Two stages of two residual blocks each.
#[derive(Module, Debug)]
pub struct Net {
    stem: Conv2d,
    stem_norm: BatchNorm,
    stage1: Vec<Block>,
    pool: MaxPool2d,
    widen: Conv2d,
    widen_norm: BatchNorm,
    stage2: Vec<Block>,
    relu: Relu,
    mean: AdaptiveAvgPool2d,
    head: Linear,
}

impl super::Classifier for Net {
    fn new(device: &Device) -> Self {
        Self {
            stem: conv3x3([1, 16], device),
            stem_norm: BatchNormConfig::new(16).init(device),
            stage1: (0..2).map(|_| Block::new(16, device)).collect(),
            pool: MaxPool2dConfig::new([2, 2]).init(),
            widen: conv3x3([16, 32], device),
            widen_norm: BatchNormConfig::new(32).init(device),
            stage2: (0..2).map(|_| Block::new(32, device)).collect(),
            relu: Relu::new(),
            mean: AdaptiveAvgPool2dConfig::new([1, 1]).init(),
            head: LinearConfig::new(32, 10).init(device),
        }
    }

    fn forward(&self, images: Tensor<4>) -> Tensor<2> {
        let x = self.relu.forward(self.stem_norm.forward(self.stem.forward(images)));
        let x = self.stage1.iter().fold(x, |x, block| block.forward(x));
        let x = self.relu.forward(self.widen_norm.forward(self.widen.forward(self.pool.forward(x))));
        let x = self.stage2.iter().fold(x, |x, block| block.forward(x));
        self.head.forward(self.mean.forward(x).flatten(1, 3))
    }
}
