// EfficientNetV2 with the topology of torchvision (arXiv 2104.00298), without stochastic depth, written once. Whoever includes this
// file says which `nn` it is made of.
use crate::vision::{Classifier, EfficientNet};
use burn::module::Module;
use burn::tensor::{Device, Tensor};
use nn::activation::{SiLU, Sigmoid};
use nn::conv::{Conv2d, Conv2dConfig};
use nn::pool::{AdaptiveAvgPool2d, AdaptiveAvgPool2dConfig};
use nn::{BatchNorm, BatchNormConfig, Dropout, DropoutConfig, Linear, LinearConfig, PaddingConfig2d};

/// A convolution, its batch norm and, if there is one, the activation.
#[derive(Module, Debug)]
pub struct ConvNorm {
    conv: Conv2d,
    norm: BatchNorm,
    activation: Option<SiLU>,
}

impl ConvNorm {
    fn new(channels: [usize; 2], kernel: usize, stride: usize, groups: usize, device: &Device) -> Self {
        let pad = kernel / 2;
        let conv = Conv2dConfig::new(channels, [kernel; 2])
            .with_stride([stride; 2])
            .with_padding(PaddingConfig2d::Explicit(pad, pad, pad, pad))
            .with_groups(groups)
            .with_bias(false);
        Self {
            conv: conv.init(device),
            norm: BatchNormConfig::new(channels[1]).with_epsilon(1e-3).init(device),
            activation: Some(SiLU::new()),
        }
    }

    fn without_activation(self) -> Self {
        Self { activation: None, ..self }
    }

    fn forward(&self, x: Tensor<4>) -> Tensor<4> {
        let y = self.norm.forward(self.conv.forward(x));
        match &self.activation {
            Some(activation) => activation.forward(y),
            None => y,
        }
    }
}

/// Scales channels by what their means say (arXiv 1709.01507).
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
    excitation: Option<SqueezeExcitation>,
    project: Option<ConvNorm>,
    is_residual: bool,
}

impl Block {
    fn new(fused: bool, expansion: usize, [input, output]: [usize; 2], stride: usize, device: &Device) -> Self {
        let inner = expansion * input;
        let conv = |channels, kernel, stride, groups| ConvNorm::new(channels, kernel, stride, groups, device);
        let convs = match fused {
            true if expansion == 1 => vec![conv([input, output], 3, stride, 1)],
            true => vec![conv([input, inner], 3, stride, 1)],
            false => vec![conv([input, inner], 1, 1, 1), conv([inner, inner], 3, stride, inner)],
        };
        let projects = !fused || expansion > 1;
        Self {
            convs,
            excitation: (!fused).then(|| SqueezeExcitation::new(inner, (input / 4).max(1), device)),
            project: projects.then(|| conv([inner, output], 1, 1, 1).without_activation()),
            is_residual: stride == 1 && input == output,
        }
    }

    fn forward(&self, x: Tensor<4>) -> Tensor<4> {
        let y = self.convs.iter().fold(x.clone(), |y, conv| conv.forward(y));
        let y = self.excitation.iter().fold(y, |y, excitation| excitation.forward(y));
        let y = self.project.iter().fold(y, |y, project| project.forward(y));
        if self.is_residual { y + x } else { y }
    }
}

/// An EfficientNetV2 for images of 1000 classes.
#[derive(Module, Debug)]
pub struct Net {
    stem: ConvNorm,
    blocks: Vec<Block>,
    last: ConvNorm,
    mean: AdaptiveAvgPool2d,
    dropout: Dropout,
    head: Linear,
}

impl Classifier for Net {
    type Variant = EfficientNet;

    fn new(variant: EfficientNet, device: &Device) -> Self {
        // Fused or not, expansion, stride, channels, blocks.
        type Stage = (bool, usize, usize, usize, usize);
        let stages: &[Stage] = match variant {
            EfficientNet::V2S => &[
                (true, 1, 1, 24, 2),
                (true, 4, 2, 48, 4),
                (true, 4, 2, 64, 4),
                (false, 4, 2, 128, 6),
                (false, 6, 1, 160, 9),
                (false, 6, 2, 256, 15),
            ],
            EfficientNet::V2L => &[
                (true, 1, 1, 32, 4),
                (true, 4, 2, 64, 7),
                (true, 4, 2, 96, 7),
                (false, 4, 2, 192, 10),
                (false, 6, 1, 224, 19),
                (false, 6, 2, 384, 25),
                (false, 6, 1, 640, 7),
            ],
        };
        let stem = stages[0].3;
        let mut blocks = Vec::new();
        let mut input = stem;
        for &(fused, expansion, stride, output, count) in stages {
            for at in 0..count {
                let stride = if at == 0 { stride } else { 1 };
                blocks.push(Block::new(fused, expansion, [input, output], stride, device));
                input = output;
            }
        }
        Self {
            stem: ConvNorm::new([3, stem], 3, 2, 1, device),
            blocks,
            last: ConvNorm::new([input, 1280], 1, 1, 1, device),
            mean: AdaptiveAvgPool2dConfig::new([1, 1]).init(),
            dropout: DropoutConfig::new(variant.dropout()).init(),
            head: LinearConfig::new(1280, 1000).init(device),
        }
    }

    fn forward(&self, images: Tensor<4>) -> Tensor<2> {
        let x = self.blocks.iter().fold(self.stem.forward(images), |x, block| block.forward(x));
        let x = self.mean.forward(self.last.forward(x)).flatten(1, 3);
        self.head.forward(self.dropout.forward(x))
    }
}
