// ConvNeXt (arXiv 2201.03545), written once, with the topology of torchvision but without stochastic depth. The module that includes
// this file chooses `nn`.
use crate::vision::torchvision::{Keys, Torchvision};
use crate::vision::{Classifier, ConvNext};
use burn::module::{Module, Param};
use burn::tensor::{Device, Tensor};
use burn_memsave::plan;
use nn::conv::{Conv2d, Conv2dConfig};
use nn::pool::{AdaptiveAvgPool2d, AdaptiveAvgPool2dConfig};
use nn::{
    Gelu, Initializer, LayerNorm, LayerNormConfig, Linear, LinearConfig, PaddingConfig2d,
};

fn layer_norm(channels: usize, device: &Device) -> LayerNorm {
    LayerNormConfig::new(channels).with_epsilon(1e-6).init(device)
}

/// Normalizes over the channels.
fn over_channels(norm: &LayerNorm, x: Tensor<4>) -> Tensor<4> {
    norm.forward(x.permute([0, 2, 3, 1])).permute([0, 3, 1, 2])
}

/// `x + scale project(gelu(expand(norm(conv(x)))))`, with a depthwise convolution of 7x7.
#[derive(Module, Debug)]
pub struct Block {
    conv: Conv2d,
    norm: LayerNorm,
    expand: Linear,
    gelu: Gelu,
    project: Linear,
    scale: Param<Tensor<3>>,
}

impl Block {
    fn new(width: usize, scale: f64, device: &Device) -> Self {
        let conv = Conv2dConfig::new([width, width], [7, 7]).with_groups(width);
        Self {
            conv: conv.with_padding(PaddingConfig2d::Explicit(3, 3, 3, 3)).init(device),
            norm: layer_norm(width, device),
            expand: LinearConfig::new(width, 4 * width).init(device),
            gelu: Gelu::new(),
            project: LinearConfig::new(4 * width, width).init(device),
            scale: Initializer::Constant { value: scale }.init([width, 1, 1], device),
        }
    }

    fn forward(&self, x: Tensor<4>) -> Tensor<4> {
        let y = self.norm.forward(self.conv.forward(x.clone()).permute([0, 2, 3, 1]));
        let y = self.project.forward(self.gelu.forward(self.expand.forward(y)));
        self.scale.val().unsqueeze::<4>() * y.permute([0, 3, 1, 2]) + x
    }
}

/// Halves the size of images.
#[derive(Module, Debug)]
pub struct Downsample {
    norm: LayerNorm,
    conv: Conv2d,
}

impl Downsample {
    fn new(channels: [usize; 2], device: &Device) -> Self {
        let conv = Conv2dConfig::new(channels, [2, 2]).with_stride([2, 2]);
        Self { norm: layer_norm(channels[0], device), conv: conv.init(device) }
    }

    fn forward(&self, x: Tensor<4>) -> Tensor<4> {
        self.conv.forward(over_channels(&self.norm, x))
    }
}

/// Blocks of one width.
#[derive(Module, Debug)]
pub struct Stage {
    /// In all stages but the first.
    downsample: Option<Downsample>,
    blocks: Vec<Block>,
}

/// A ConvNeXt that classifies images.
#[derive(Module, Debug)]
pub struct Net {
    patches: Conv2d,
    patch_norm: LayerNorm,
    stages: Vec<Stage>,
    mean: AdaptiveAvgPool2d,
    norm: LayerNorm,
    head: Linear,
}

impl Classifier for Net {
    type Variant = ConvNext;

    fn new(net: ConvNext, device: &Device) -> Self {
        let [first, .., last] = net.widths;
        let stage = |at: usize| Stage {
            downsample: (at > 0).then(|| Downsample::new([net.widths[at - 1], net.widths[at]], device)),
            blocks: (0..net.blocks[at]).map(|_| Block::new(net.widths[at], net.scale, device)).collect(),
        };
        Self {
            patches: Conv2dConfig::new([3, first], [4, 4]).with_stride([4, 4]).init(device),
            patch_norm: layer_norm(first, device),
            stages: (0..net.widths.len()).map(stage).collect(),
            mean: AdaptiveAvgPool2dConfig::new([1, 1]).init(),
            norm: layer_norm(last, device),
            head: LinearConfig::new(last, net.classes).init(device),
        }
    }

    fn forward(&self, images: Tensor<4>) -> Tensor<2> {
        let mut x = over_channels(&self.patch_norm, self.patches.forward(images));
        for stage in &self.stages {
            if let Some(downsample) = &stage.downsample {
                x = downsample.forward(x);
            }
            x = stage.blocks.iter().fold(x, |x, block| plan::block(block, x, Block::forward));
        }
        self.head.forward(self.norm.forward(self.mean.forward(x).flatten::<2>(1, 3)))
    }
}

impl Torchvision for Net {
    fn keys(&self) -> Keys {
        let mut keys = Keys::default()
            .replace(r"^features\.0\.0\.", "patches.")
            .replace(r"^features\.0\.1\.", "patch_norm.");
        for at in 0..self.stages.len() {
            keys = keys
                .replace(format!(r"^features\.{}\.", 2 * at + 1), format!("stages.{at}.blocks."))
                .replace(format!(r"^features\.{}\.0\.", 2 * at + 2), format!("stages.{}.downsample.norm.", at + 1))
                .replace(format!(r"^features\.{}\.1\.", 2 * at + 2), format!("stages.{}.downsample.conv.", at + 1));
        }
        keys.replace(r"\.block\.0\.", ".conv.")
            .replace(r"\.block\.2\.", ".norm.")
            .replace(r"\.block\.3\.", ".expand.")
            .replace(r"\.block\.5\.", ".project.")
            .replace(r"\.layer_scale$", ".scale")
            .replace(r"^classifier\.0\.", "norm.")
            .replace(r"^classifier\.2\.", "head.")
    }
}
