// MobileNetV3 (arXiv 1905.02244), written once, with the topology of torchvision. The module that includes this file chooses `nn`.
use super::conv_norm::ConvNorm;
use crate::vision::torchvision::{Keys, Torchvision};
use crate::vision::{Classifier, InvertedResidual, MobileNet};
use burn::module::Module;
use burn::tensor::{Device, Tensor};
use burn_memsave::plan;
use nn::activation::{Activation, ActivationConfig, HardSigmoid, HardSigmoidConfig, HardSwish};
use nn::conv::{Conv2d, Conv2dConfig};
use nn::pool::{AdaptiveAvgPool2d, AdaptiveAvgPool2dConfig};
use nn::{BatchNormConfig, Dropout, DropoutConfig, Linear, LinearConfig, Relu};

fn conv_norm(conv: Conv2dConfig, device: &Device) -> ConvNorm {
    let norm = BatchNormConfig::new(conv.channels[1]).with_epsilon(1e-3).with_momentum(0.01);
    ConvNorm::with_norm(conv, norm, device)
}

/// The closest multiple of 8 that is not less than nine tenths of `channels`.
fn multiple_of_8(channels: usize) -> usize {
    let rounded = ((channels + 4) / 8 * 8).max(8);
    if 10 * rounded < 9 * channels { rounded + 8 } else { rounded }
}

/// Scales channels by factors that are computed from their means (arXiv 1709.01507).
#[derive(Module, Debug)]
pub struct SqueezeExcitation {
    mean: AdaptiveAvgPool2d,
    reduce: Conv2d,
    relu: Relu,
    expand: Conv2d,
    sigmoid: HardSigmoid,
}

impl SqueezeExcitation {
    fn new(channels: usize, device: &Device) -> Self {
        let squeezed = multiple_of_8(channels / 4);
        Self {
            mean: AdaptiveAvgPool2dConfig::new([1, 1]).init(),
            reduce: Conv2dConfig::new([channels, squeezed], [1, 1]).init(device),
            relu: Relu::new(),
            expand: Conv2dConfig::new([squeezed, channels], [1, 1]).init(device),
            sigmoid: HardSigmoidConfig::new().with_alpha(1.0 / 6.0).init(), // PyTorch's
        }
    }

    fn forward(&self, x: Tensor<4>) -> Tensor<4> {
        let squeezed = self.relu.forward(self.reduce.forward(self.mean.forward(x.clone())));
        self.sigmoid.forward(self.expand.forward(squeezed)) * x
    }
}

/// An inverted bottleneck: expansion, depthwise convolution, excitation and projection.
#[derive(Module, Debug)]
pub struct Block {
    expand: Option<ConvNorm>,
    depthwise: ConvNorm,
    activation: Activation,
    excitation: Option<SqueezeExcitation>,
    project: ConvNorm,
    is_residual: bool,
}

impl Block {
    fn new(block: &InvertedResidual, input: usize, device: &Device) -> Self {
        let &InvertedResidual { kernel, expanded, width, excitation, hard_swish, stride } = block;
        let pointwise = |channels| conv_norm(Conv2dConfig::new(channels, [1, 1]), device);
        let depthwise = Conv2dConfig::new([expanded, expanded], [kernel; 2]).with_groups(expanded);
        let activation = if hard_swish { ActivationConfig::HardSwish } else { ActivationConfig::Relu };
        Self {
            expand: (expanded != input).then(|| pointwise([input, expanded])),
            depthwise: conv_norm(depthwise.with_stride([stride; 2]), device),
            activation: activation.init(device),
            excitation: excitation.then(|| SqueezeExcitation::new(expanded, device)),
            project: pointwise([expanded, width]),
            is_residual: stride == 1 && input == width,
        }
    }

    fn forward(&self, x: Tensor<4>) -> Tensor<4> {
        let convs = self.expand.iter().chain([&self.depthwise]);
        let y = convs.fold(x.clone(), |y, conv| self.activation.forward(conv.forward(y)));
        let y = self.excitation.iter().fold(y, |y, excitation| excitation.forward(y));
        let y = self.project.forward(y);
        if self.is_residual { y + x } else { y }
    }
}

/// A MobileNetV3 that classifies images.
#[derive(Module, Debug)]
pub struct Net {
    stem: ConvNorm,
    hard_swish: HardSwish,
    blocks: Vec<Block>,
    last: ConvNorm,
    mean: AdaptiveAvgPool2d,
    dense: Linear,
    dropout: Dropout,
    head: Linear,
}

impl Classifier for Net {
    type Variant = MobileNet;

    fn new(net: MobileNet, device: &Device) -> Self {
        let mut input = net.stem;
        let mut blocks = Vec::new();
        for block in net.blocks {
            blocks.push(Block::new(block, input, device));
            input = block.width;
        }
        Self {
            stem: conv_norm(Conv2dConfig::new([3, net.stem], [3, 3]).with_stride([2, 2]), device),
            hard_swish: HardSwish::new(),
            blocks,
            last: conv_norm(Conv2dConfig::new([input, 6 * input], [1, 1]), device),
            mean: AdaptiveAvgPool2dConfig::new([1, 1]).init(),
            dense: LinearConfig::new(6 * input, net.features).init(device),
            dropout: DropoutConfig::new(net.dropout).init(),
            head: LinearConfig::new(net.features, net.classes).init(device),
        }
    }

    fn forward(&self, images: Tensor<4>) -> Tensor<2> {
        let x = self.hard_swish.forward(self.stem.forward(images));
        let x = self.blocks.iter().fold(x, |x, block| plan::block(block, x, Block::forward));
        let x = self.mean.forward(self.hard_swish.forward(self.last.forward(x)));
        let x = self.hard_swish.forward(self.dense.forward(x.flatten::<2>(1, 3)));
        self.head.forward(self.dropout.forward(x))
    }
}

impl Torchvision for Net {
    fn keys(&self) -> Keys {
        let mut keys = Keys::default().replace(r"^features\.0\.", "stem.");
        for (at, block) in self.blocks.iter().enumerate() {
            let expand = block.expand.as_ref().map(|_| "expand");
            let excitation = block.excitation.as_ref().map(|_| "excitation");
            let parts = [expand, Some("depthwise"), excitation, Some("project")].into_iter().flatten();
            for (index, part) in parts.enumerate() {
                let theirs = format!(r"^features\.{}\.block\.{index}\.", at + 1);
                keys = keys.replace(theirs, format!("blocks.{at}.{part}."));
            }
        }
        keys.replace(r"^features\.\d+\.", "last.")
            .replace(r"\.fc1\.", ".reduce.")
            .replace(r"\.fc2\.", ".expand.")
            .replace(r"(stem|expand|depthwise|project|last)\.0\.", "${1}.conv.")
            .replace(r"(stem|expand|depthwise|project|last)\.1\.", "${1}.norm.")
            .replace(r"^classifier\.0\.", "dense.")
            .replace(r"^classifier\.3\.", "head.")
    }
}
