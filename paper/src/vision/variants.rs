//! The variants of every kind of network, with torchvision's names. Other sizes are made with struct updates:
//! `ResNet { classes: 10, ..ResNet::D18 }`.

/// A residual network.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ResNet {
    /// Whether blocks have 1x1, 3x3 and 1x1 convolutions and end four times as wide. Basic blocks have two 3x3 convolutions.
    pub bottleneck: bool,
    /// Blocks in each of the four stages.
    pub blocks: [usize; 4],
    /// Channels of the first convolution and stage; each further stage has twice as many.
    pub width: usize,
    /// Groups of the 3x3 convolutions.
    pub groups: usize,
    /// Channels of a group, if the width is 64.
    pub group_width: usize,
    /// Which of the last three stages are dilated instead of halving the size.
    pub dilated: [bool; 3],
    /// Classes in the result.
    pub classes: usize,
}

impl ResNet {
    /// ResNet-18, of basic blocks.
    pub const D18: Self = Self {
        bottleneck: false,
        blocks: [2, 2, 2, 2],
        width: 64,
        groups: 1,
        group_width: 64,
        dilated: [false; 3],
        classes: 1000,
    };
    /// ResNet-50.
    pub const D50: Self = Self { bottleneck: true, blocks: [3, 4, 6, 3], ..Self::D18 };
    /// ResNet-101.
    pub const D101: Self = Self { bottleneck: true, blocks: [3, 4, 23, 3], ..Self::D18 };
    /// ResNeXt-101 64x4d.
    pub const NEXT101: Self = Self { groups: 64, group_width: 4, ..Self::D101 };

    /// Channels of the features.
    pub fn features(&self) -> usize {
        let expansion = if self.bottleneck { 4 } else { 1 };
        8 * self.width * expansion
    }
}

/// A VGG.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Vgg {
    /// Channels of the convolutions, up to each pool.
    pub stages: &'static [&'static [usize]],
    /// Whether convolutions have batch norms.
    pub batch_norm: bool,
    /// Features between dense layers.
    pub hidden: usize,
    /// The dropout rate after dense layers.
    pub dropout: f64,
    /// Classes in the result.
    pub classes: usize,
}

impl Vgg {
    /// VGG-16.
    pub const D16: Self = Self {
        stages: &[&[64, 64], &[128, 128], &[256, 256, 256], &[512, 512, 512], &[512, 512, 512]],
        batch_norm: false,
        hidden: 4096,
        dropout: 0.5,
        classes: 1000,
    };
    /// VGG-16 with batch norms.
    pub const D16_NORM: Self = Self { batch_norm: true, ..Self::D16 };
}

/// An EfficientNetV2.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct EfficientNet {
    /// Stages of equal blocks. The first stage has the width of the first convolution.
    pub stages: &'static [EfficientStage],
    /// Channels of the last convolution.
    pub features: usize,
    /// The dropout rate before the last layer.
    pub dropout: f64,
    /// Classes in the result.
    pub classes: usize,
}

/// A stage of an [`EfficientNet`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EfficientStage {
    /// Whether blocks have a full convolution in place of expansion, depthwise convolution and excitation.
    pub fused: bool,
    /// How much wider blocks are inside.
    pub expansion: usize,
    /// The stride of the first block.
    pub stride: usize,
    /// Channels.
    pub width: usize,
    /// The number of blocks.
    pub blocks: usize,
}

impl EfficientStage {
    /// From the columns of the tables.
    pub const fn new(fused: bool, expansion: usize, stride: usize, width: usize, blocks: usize) -> Self {
        Self { fused, expansion, stride, width, blocks }
    }
}

impl EfficientNet {
    /// EfficientNetV2-S.
    pub const V2S: Self = Self {
        stages: &[
            EfficientStage::new(true, 1, 1, 24, 2),
            EfficientStage::new(true, 4, 2, 48, 4),
            EfficientStage::new(true, 4, 2, 64, 4),
            EfficientStage::new(false, 4, 2, 128, 6),
            EfficientStage::new(false, 6, 1, 160, 9),
            EfficientStage::new(false, 6, 2, 256, 15),
        ],
        features: 1280,
        dropout: 0.2,
        classes: 1000,
    };
    /// EfficientNetV2-L.
    pub const V2L: Self = Self {
        stages: &[
            EfficientStage::new(true, 1, 1, 32, 4),
            EfficientStage::new(true, 4, 2, 64, 7),
            EfficientStage::new(true, 4, 2, 96, 7),
            EfficientStage::new(false, 4, 2, 192, 10),
            EfficientStage::new(false, 6, 1, 224, 19),
            EfficientStage::new(false, 6, 2, 384, 25),
            EfficientStage::new(false, 6, 1, 640, 7),
        ],
        dropout: 0.4,
        ..Self::V2S
    };
}

/// A MobileNetV3.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MobileNet {
    /// Channels of the first convolution.
    pub stem: usize,
    /// The blocks, in order.
    pub blocks: &'static [InvertedResidual],
    /// Between the two dense layers.
    pub features: usize,
    /// The dropout rate before the last layer.
    pub dropout: f64,
    /// Classes in the result.
    pub classes: usize,
}

/// A block of a [`MobileNet`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InvertedResidual {
    /// The kernel of the depthwise convolution.
    pub kernel: usize,
    /// Channels inside.
    pub expanded: usize,
    /// Channels of the result.
    pub width: usize,
    /// Whether it has an excitation.
    pub excitation: bool,
    /// Whether activations are hard swishes. Otherwise they are relus.
    pub hard_swish: bool,
    /// The stride of the depthwise convolution.
    pub stride: usize,
}

impl InvertedResidual {
    /// From the columns of the table: kernel, channels inside, channels of the result, `[excitation, hard_swish]`, stride.
    pub const fn new(
        kernel: usize,
        expanded: usize,
        width: usize,
        [excitation, hard_swish]: [bool; 2],
        stride: usize,
    ) -> Self {
        Self { kernel, expanded, width, excitation, hard_swish, stride }
    }
}

impl MobileNet {
    /// MobileNetV3-Large.
    pub const V3_LARGE: Self = Self {
        stem: 16,
        blocks: &[
            InvertedResidual::new(3, 16, 16, [false, false], 1),
            InvertedResidual::new(3, 64, 24, [false, false], 2),
            InvertedResidual::new(3, 72, 24, [false, false], 1),
            InvertedResidual::new(5, 72, 40, [true, false], 2),
            InvertedResidual::new(5, 120, 40, [true, false], 1),
            InvertedResidual::new(5, 120, 40, [true, false], 1),
            InvertedResidual::new(3, 240, 80, [false, true], 2),
            InvertedResidual::new(3, 200, 80, [false, true], 1),
            InvertedResidual::new(3, 184, 80, [false, true], 1),
            InvertedResidual::new(3, 184, 80, [false, true], 1),
            InvertedResidual::new(3, 480, 112, [true, true], 1),
            InvertedResidual::new(3, 672, 112, [true, true], 1),
            InvertedResidual::new(5, 672, 160, [true, true], 2),
            InvertedResidual::new(5, 960, 160, [true, true], 1),
            InvertedResidual::new(5, 960, 160, [true, true], 1),
        ],
        features: 1280,
        dropout: 0.2,
        classes: 1000,
    };
}

/// A ConvNeXt.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ConvNext {
    /// Channels of each stage.
    pub widths: [usize; 4],
    /// Blocks in each stage.
    pub blocks: [usize; 4],
    /// The initial scale of residual branches, per channel.
    pub scale: f64,
    /// Classes in the result.
    pub classes: usize,
}

impl ConvNext {
    /// ConvNeXt-Tiny.
    pub const TINY: Self =
        Self { widths: [96, 192, 384, 768], blocks: [3, 3, 9, 3], scale: 1e-6, classes: 1000 };
}

/// A vision transformer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Vit {
    /// Height and width of images.
    pub image: usize,
    /// Height and width of a patch.
    pub patch: usize,
    /// Blocks of attention and feed-forward layers.
    pub layers: usize,
    /// Heads of attention.
    pub heads: usize,
    /// Features.
    pub width: usize,
    /// Features between the two layers of a feed-forward block.
    pub hidden: usize,
    /// The dropout rate of features.
    pub dropout: f64,
    /// The dropout rate of the weights of attention.
    pub attention_dropout: f64,
    /// Classes in the result.
    pub classes: usize,
}

impl Vit {
    /// ViT-B/16.
    pub const B16: Self = Self {
        image: 224,
        patch: 16,
        layers: 12,
        heads: 12,
        width: 768,
        hidden: 3072,
        dropout: 0.0,
        attention_dropout: 0.0,
        classes: 1000,
    };
}

/// A DeepLabV3.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DeepLab {
    /// The network that computes the features. Its classes are ignored.
    pub backbone: ResNet,
    /// Channels of the head.
    pub width: usize,
    /// The rates of dilation of the head.
    pub rates: [usize; 3],
    /// The dropout rate in the head.
    pub dropout: f64,
    /// Classes in the result.
    pub classes: usize,
}

impl DeepLab {
    /// DeepLabV3-ResNet101.
    pub const D101: Self = Self {
        backbone: ResNet { dilated: [false, true, true], ..ResNet::D101 },
        width: 256,
        rates: [12, 24, 36],
        dropout: 0.5,
        classes: 21,
    };
}

/// A fully convolutional network.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Fcn {
    /// The network that computes the features. Its classes are ignored.
    pub backbone: ResNet,
    /// The dropout rate in the head.
    pub dropout: f64,
    /// Classes in the result.
    pub classes: usize,
}

impl Fcn {
    /// FCN-ResNet101.
    pub const D101: Self = Self { backbone: DeepLab::D101.backbone, dropout: 0.1, classes: 21 };
}

/// A U-Net.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UNet {
    /// Channels of the first convolution; every halving of the images doubles them.
    pub width: usize,
    /// Halvings.
    pub depth: usize,
    /// Classes in the result.
    pub classes: usize,
}

impl UNet {
    /// That of the paper.
    pub const CLASSIC: Self = Self { width: 64, depth: 4, classes: 2 };
}
