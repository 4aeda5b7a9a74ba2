// VGG (arXiv 1409.1556) with or without batch norms, written once, with the topology of torchvision. The module that includes this file
// chooses `nn`.
use crate::vision::torchvision::{Keys, Torchvision};
use crate::vision::{Classifier, Vgg};
use burn::module::Module;
use burn::tensor::{Device, Tensor};
use burn_memsave::plan;
use nn::conv::{Conv2d, Conv2dConfig};
use nn::pool::{AdaptiveAvgPool2d, AdaptiveAvgPool2dConfig, MaxPool2d, MaxPool2dConfig};
use nn::{
    BatchNorm, BatchNormConfig, Dropout, DropoutConfig, Linear, LinearConfig, PaddingConfig2d, Relu,
};

/// A convolution and, if there is one, its batch norm.
#[derive(Module, Debug)]
pub struct Conv {
    conv: Conv2d,
    norm: Option<BatchNorm>,
}

impl Conv {
    fn new(channels: [usize; 2], has_norm: bool, device: &Device) -> Self {
        let conv = Conv2dConfig::new(channels, [3, 3]).with_padding(PaddingConfig2d::Explicit(1, 1, 1, 1));
        let norm = || BatchNormConfig::new(channels[1]).init(device);
        Self { conv: conv.init(device), norm: has_norm.then(norm) }
    }

    fn forward(&self, x: Tensor<4>) -> Tensor<4> {
        let y = self.conv.forward(x);
        match &self.norm {
            Some(norm) => norm.forward(y),
            None => y,
        }
    }
}

/// Convolutions of one size of image, and the pool that halves it.
#[derive(Module, Debug)]
pub struct Stage {
    convs: Vec<Conv>,
    relu: Relu,
    pool: MaxPool2d,
}

impl Stage {
    fn new(input: usize, widths: &[usize], has_norm: bool, device: &Device) -> Self {
        let inputs = core::iter::once(&input).chain(widths);
        let convs = inputs.zip(widths).map(|(&input, &width)| Conv::new([input, width], has_norm, device));
        let pool = MaxPool2dConfig::new([2, 2]).init();
        Self { convs: convs.collect(), relu: Relu::new(), pool }
    }

    fn forward(&self, x: Tensor<4>) -> Tensor<4> {
        let y = self.convs.iter().fold(x, |x, conv| self.relu.forward(conv.forward(x)));
        self.pool.forward(y)
    }
}

/// A VGG that classifies images.
#[derive(Module, Debug)]
pub struct Net {
    stages: Vec<Stage>,
    mean: AdaptiveAvgPool2d,
    dense: Vec<Linear>,
    relu: Relu,
    dropout: Dropout,
    head: Linear,
}

impl Classifier for Net {
    type Variant = Vgg;

    fn new(net: Vgg, device: &Device) -> Self {
        let mut input = 3;
        let mut stages = Vec::new();
        for widths in net.stages {
            stages.push(Stage::new(input, widths, net.batch_norm, device));
            input = *widths.last().expect("a stage has convolutions");
        }
        let dense = [[49 * input, net.hidden], [net.hidden, net.hidden]];
        Self {
            stages,
            mean: AdaptiveAvgPool2dConfig::new([7, 7]).init(),
            dense: dense.map(|[input, output]| LinearConfig::new(input, output).init(device)).into(),
            relu: Relu::new(),
            dropout: DropoutConfig::new(net.dropout).init(),
            head: LinearConfig::new(net.hidden, net.classes).init(device),
        }
    }

    fn forward(&self, images: Tensor<4>) -> Tensor<2> {
        let x = self.stages.iter().fold(images, |x, stage| plan::block(stage, x, Stage::forward));
        let x = self.mean.forward(x).flatten(1, 3);
        let x = self.dense.iter().fold(x, |x, dense| self.dropout.forward(self.relu.forward(dense.forward(x))));
        self.head.forward(x)
    }
}

impl Torchvision for Net {
    fn keys(&self) -> Keys {
        let mut keys = Keys::default();
        let mut index = 0;
        for (at, stage) in self.stages.iter().enumerate() {
            for (at_conv, conv) in stage.convs.iter().enumerate() {
                let ours = format!("stages.{at}.convs.{at_conv}");
                keys = keys.replace(format!(r"^features\.{index}\."), format!("{ours}.conv."));
                index += 1;
                if conv.norm.is_some() {
                    keys = keys.replace(format!(r"^features\.{index}\."), format!("{ours}.norm."));
                    index += 1;
                }
                index += 1; // the relu
            }
            index += 1; // the pool
        }
        keys.replace(r"^classifier\.0\.", "dense.0.")
            .replace(r"^classifier\.3\.", "dense.1.")
            .replace(r"^classifier\.6\.", "head.")
    }
}
