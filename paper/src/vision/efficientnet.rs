// EfficientNetV2 (arXiv 2104.00298), written once, with the topology of torchvision but without stochastic depth. The module that
// includes this file chooses `nn`.
use super::conv_norm::ConvNorm;
use crate::vision::torchvision::{Keys, Torchvision};
use crate::vision::{Classifier, EfficientNet, EfficientStage};
use burn::module::Module;
use burn::tensor::{Device, Tensor};
use burn_memsave::plan;
use nn::activation::{SiLU, Sigmoid};
use nn::conv::{Conv2d, Conv2dConfig};
use nn::pool::{AdaptiveAvgPool2d, AdaptiveAvgPool2dConfig};
use nn::{BatchNormConfig, Dropout, DropoutConfig, Linear, LinearConfig};

fn conv_norm(channels: [usize; 2], kernel: usize, stride: usize, groups: usize, device: &Device) -> ConvNorm {
    let conv = Conv2dConfig::new(channels, [kernel; 2]).with_stride([stride; 2]).with_groups(groups);
    ConvNorm::with_norm(conv, BatchNormConfig::new(channels[1]).with_epsilon(1e-3), device)
}

/// Scales channels by factors that are computed from their means (arXiv 1709.01507).
#[derive(Module, Debug)]
pub struct SqueezeExcitation {
    mean: AdaptiveAvgPool2d,
    reduce: Conv2d,
    silu: SiLU,
    expand: Conv2d,
    sigmoid: Sigmoid,
}

impl SqueezeExcitation {
    fn new(channels: usize, squeezed: usize, device: &Device) -> Self {
        Self {
            mean: AdaptiveAvgPool2dConfig::new([1, 1]).init(),
            reduce: Conv2dConfig::new([channels, squeezed], [1, 1]).init(device),
            silu: SiLU::new(),
            expand: Conv2dConfig::new([squeezed, channels], [1, 1]).init(device),
            sigmoid: Sigmoid::new(),
        }
    }

    fn forward(&self, x: Tensor<4>) -> Tensor<4> {
        let squeezed = self.silu.forward(self.reduce.forward(self.mean.forward(x.clone())));
        self.sigmoid.forward(self.expand.forward(squeezed)) * x
    }
}

/// An inverted bottleneck: expansion, depthwise convolution, excitation and projection; or, fused, a full convolution in place of the
/// first three.
#[derive(Module, Debug)]
pub struct Block {
    convs: Vec<ConvNorm>,
    silu: SiLU,
    excitation: Option<SqueezeExcitation>,
    project: Option<ConvNorm>,
    is_residual: bool,
}

impl Block {
    fn new(stage: &EfficientStage, input: usize, stride: usize, device: &Device) -> Self {
        let &EfficientStage { fused, expansion, width: output, .. } = stage;
        let inner = expansion * input;
        let conv = |channels, kernel, stride, groups| conv_norm(channels, kernel, stride, groups, device);
        let convs = match fused {
            true if expansion == 1 => vec![conv([input, output], 3, stride, 1)],
            true => vec![conv([input, inner], 3, stride, 1)],
            false => vec![conv([input, inner], 1, 1, 1), conv([inner, inner], 3, stride, inner)],
        };
        let projects = !fused || expansion > 1;
        Self {
            convs,
            silu: SiLU::new(),
            excitation: (!fused).then(|| SqueezeExcitation::new(inner, (input / 4).max(1), device)),
            project: projects.then(|| conv([inner, output], 1, 1, 1)),
            is_residual: stride == 1 && input == output,
        }
    }

    fn forward(&self, x: Tensor<4>) -> Tensor<4> {
        let y = self.convs.iter().fold(x.clone(), |y, conv| conv.forward_silu(y, &self.silu));
        let y = self.excitation.iter().fold(y, |y, excitation| excitation.forward(y));
        let y = self.project.iter().fold(y, |y, project| project.forward(y));
        if self.is_residual { y + x } else { y }
    }
}

/// An EfficientNetV2 that classifies images.
#[derive(Module, Debug)]
pub struct Net {
    stem: ConvNorm,
    silu: SiLU,
    stages: Vec<Vec<Block>>,
    last: ConvNorm,
    mean: AdaptiveAvgPool2d,
    dropout: Dropout,
    head: Linear,
}

impl Classifier for Net {
    type Variant = EfficientNet;

    fn new(net: EfficientNet, device: &Device) -> Self {
        let stem = net.stages[0].width;
        let mut input = stem;
        let mut stages = Vec::new();
        for stage in net.stages {
            let mut blocks = vec![Block::new(stage, input, stage.stride, device)];
            blocks.extend((1..stage.blocks).map(|_| Block::new(stage, stage.width, 1, device)));
            stages.push(blocks);
            input = stage.width;
        }
        Self {
            stem: conv_norm([3, stem], 3, 2, 1, device),
            silu: SiLU::new(),
            stages,
            last: conv_norm([input, net.features], 1, 1, 1, device),
            mean: AdaptiveAvgPool2dConfig::new([1, 1]).init(),
            dropout: DropoutConfig::new(net.dropout).init(),
            head: LinearConfig::new(net.features, net.classes).init(device),
        }
    }

    fn forward(&self, images: Tensor<4>) -> Tensor<2> {
        let x = self.stem.forward_silu(images, &self.silu);
        let blocks = self.stages.iter().flatten();
        let x = blocks.fold(x, |x, block| plan::block(block, x, Block::forward));
        let x = self.mean.forward(self.last.forward_silu(x, &self.silu));
        self.head.forward(self.dropout.forward(x.flatten(1, 3)))
    }
}

impl Torchvision for Net {
    fn keys(&self) -> Keys {
        let mut keys = Keys::default().replace(r"^features\.0\.", "stem.");
        for (at, stage) in self.stages.iter().enumerate() {
            keys = keys.replace(format!(r"^features\.{}\.", at + 1), format!("stages.{at}."));
            if stage.iter().all(|block| block.excitation.is_none()) {
                keys = keys.replace(format!(r"^(stages\.{at}\.\d+)\.block\.1\."), "${1}.project.");
            }
        }
        keys.replace(r"^features\.\d+\.", "last.")
            .replace(r"\.block\.2\.fc1\.", ".excitation.reduce.")
            .replace(r"\.block\.2\.fc2\.", ".excitation.expand.")
            .replace(r"\.block\.3\.", ".project.")
            .replace(r"\.block\.(\d)\.", ".convs.${1}.")
            .replace(r"(stem|convs\.\d|project|last)\.0\.", "${1}.conv.")
            .replace(r"(stem|convs\.\d|project|last)\.1\.", "${1}.norm.")
            .replace(r"^classifier\.1\.", "head.")
    }
}
