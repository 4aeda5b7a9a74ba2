// A model that uses every kind of layer that is replaced, written once. Whoever includes this file says which `nn` it is
// made of.
use burn::module::Module;
use burn::tensor::{Device, Int, Tensor};
use nn::activation::{
    Activation, ActivationConfig, HardSigmoidConfig, Hardtanh, HardtanhConfig, RRelu, RReluConfig, Relu6, Threshold,
    ThresholdConfig,
};
use nn::conv::{
    Conv1d, Conv1dConfig, Conv2d, Conv2dConfig, Conv3d, Conv3dConfig, ConvTranspose1d, ConvTranspose1dConfig,
    ConvTranspose2d, ConvTranspose2dConfig, ConvTranspose3d, ConvTranspose3dConfig, DeformConv2d, DeformConv2dConfig,
};
use nn::gru::{Gru, GruConfig};
use nn::interpolate::{Interpolate1d, Interpolate1dConfig, Interpolate2d, Interpolate2dConfig, InterpolateMode};
use nn::norm::{Normalization, NormalizationConfig};
use nn::pool::{
    AdaptiveAvgPool1d, AdaptiveAvgPool1dConfig, AdaptiveAvgPool2d, AdaptiveAvgPool2dConfig, AdaptiveAvgPool3d,
    AdaptiveAvgPool3dConfig, AvgPool1d, AvgPool1dConfig, AvgPool2d, AvgPool2dConfig, MaxPool1d, MaxPool1dConfig,
    MaxPool2d, MaxPool2dConfig,
};
use nn::transformer::{TransformerEncoder, TransformerEncoderConfig, TransformerEncoderInput};
use nn::{
    BatchNormConfig, Dropout, DropoutConfig, Embedding, EmbeddingConfig, HardShrinkConfig, LeakyReluConfig, Linear,
    LinearConfig, PReluConfig, PaddingConfig1d, PaddingConfig2d, Relu, ShrinkConfig, SoftShrinkConfig,
    ThresholdedReluConfig,
};

#[derive(Module, Debug)]
pub struct Net {
    image: Image,
    volume: Volume,
    activations: Vec<Activation>,
    signal: Signal,
    position: Embedding,
    encoder: TransformerEncoder,
    gru: Gru,
    dropout: Dropout,
    head: Linear,
}

impl Net {
    pub fn new(device: &Device) -> Self {
        let activations = [
            ActivationConfig::Relu,
            ActivationConfig::from(LeakyReluConfig::new()),
            ActivationConfig::PRelu(PReluConfig::new()),
            ActivationConfig::Gelu,
            ActivationConfig::from(HardShrinkConfig::new().with_lambda(0.01)),
            ActivationConfig::from(SoftShrinkConfig::new().with_lambda(0.01)),
            ActivationConfig::from(ShrinkConfig::new().with_lambda(0.02).with_bias(0.01)),
            ActivationConfig::from(ThresholdedReluConfig::new().with_alpha(0.01)),
            ActivationConfig::from(HardSigmoidConfig::new()),
        ];
        Self {
            image: Image::new(device),
            volume: Volume::new(device),
            activations: activations.iter().map(|config| config.init(device)).collect(),
            signal: Signal::new(device),
            position: EmbeddingConfig::new(6, 4).init(device),
            encoder: TransformerEncoderConfig::new(4, 8, 2, 1)
                .with_dropout(0.0)
                .with_activation(ActivationConfig::Relu)
                .init(device),
            gru: GruConfig::new(4, 4, true).with_gate_activation(HardSigmoidConfig::new().into()).init(device),
            dropout: DropoutConfig::new(0.25).init(),
            head: LinearConfig::new(16, 3).init(device),
        }
    }

    /// `[batch, 2, 8, 8]` to `[batch, 3]`
    pub fn forward(&self, x: Tensor<4>) -> Tensor<2> {
        let x = self.volume.forward(self.image.forward(x));
        // Side by side: one behind the other, they leave nothing of the gradient.
        let x = self.activations.iter().fold(x.zeros_like(), |sum, activation| sum + activation.forward(x.clone()));
        let x = self.signal.forward(x);
        let positions = Tensor::<1, Int>::arange(1..5, &x.device()).unsqueeze();
        let x = self.encoder.forward(TransformerEncoderInput::new(x + self.position.forward(positions)));
        let x = self.gru.forward(x, None);
        self.head.forward(self.dropout.forward(x).flatten::<2>(1, 2))
    }
}

/// Two axes.
#[derive(Module, Debug)]
pub struct Image {
    conv: Conv2d,
    norm: Normalization,
    relu: Relu,
    rrelu: RRelu,
    hardtanh: Hardtanh,
    max: MaxPool2d,
    avg: AvgPool2d,
    up: ConvTranspose2d,
    relu6: Relu6,
    offset: Conv2d,
    deform: DeformConv2d,
    threshold: Threshold,
    resize: Interpolate2d,
    mean: AdaptiveAvgPool2d,
}

impl Image {
    fn new(device: &Device) -> Self {
        let norm = NormalizationConfig::from(BatchNormConfig::new(0)).with_num_features(4);
        Self {
            conv: Conv2dConfig::new([2, 4], [3, 3]).with_padding(PaddingConfig2d::Same).init(device),
            norm: norm.init(device),
            relu: Relu::new(),
            rrelu: RReluConfig::new().init(),
            hardtanh: HardtanhConfig::new().with_min_val(-1.5).with_max_val(1.5).init(),
            max: MaxPool2dConfig::new([2, 2]).init(),
            avg: AvgPool2dConfig::new([2, 2]).with_strides([1, 1]).init(),
            up: ConvTranspose2dConfig::new([4, 4], [2, 2]).with_stride([2, 2]).init(device),
            relu6: Relu6::new(),
            offset: Conv2dConfig::new([4, 18], [3, 3]).init(device),
            deform: DeformConv2dConfig::new([4, 4], [3, 3]).init(device),
            threshold: ThresholdConfig::new(-0.5, 0.1).init(),
            resize: Interpolate2dConfig::new()
                .with_output_size(Some([6, 6]))
                .with_mode(InterpolateMode::Linear)
                .init(),
            mean: AdaptiveAvgPool2dConfig::new([2, 2]).init(),
        }
    }

    /// `[batch, 2, 8, 8]` to `[batch, 4, 2, 2]`
    fn forward(&self, x: Tensor<4>) -> Tensor<4> {
        let x = self.hardtanh.forward(self.rrelu.forward(self.norm.forward(self.conv.forward(x))));
        let x = self.up.forward(self.avg.forward(self.max.forward(x))); // 8 -> 4 -> 3 -> 6
        let x = x.clone() + self.relu6.forward(x); // beside the input, so that some of the gradient is left
        let x = self.deform.forward(x.clone(), self.offset.forward(x), None);
        let x = self.mean.forward(self.resize.forward(self.threshold.forward(x)));
        x.clone() + self.relu.forward(x)
    }
}

/// Three axes.
#[derive(Module, Debug)]
pub struct Volume {
    conv: Conv3d,
    up: ConvTranspose3d,
    mean: AdaptiveAvgPool3d,
}

impl Volume {
    fn new(device: &Device) -> Self {
        Self {
            conv: Conv3dConfig::new([1, 2], [2, 1, 1]).init(device),
            up: ConvTranspose3dConfig::new([2, 1], [2, 2, 2]).init(device),
            mean: AdaptiveAvgPool3dConfig::new([4, 2, 2]).init(),
        }
    }

    /// `[batch, 4, 2, 2]` to `[batch, 4, 4]`
    fn forward(&self, x: Tensor<4>) -> Tensor<3> {
        let x = self.up.forward(self.conv.forward(x.unsqueeze_dim(1)));
        self.mean.forward(x).squeeze_dim::<4>(1).flatten(2, 3)
    }
}

/// One axis.
#[derive(Module, Debug)]
pub struct Signal {
    conv: Conv1d,
    up: ConvTranspose1d,
    max: MaxPool1d,
    avg: AvgPool1d,
    resize: Interpolate1d,
    mean: AdaptiveAvgPool1d,
}

impl Signal {
    fn new(device: &Device) -> Self {
        Self {
            conv: Conv1dConfig::new(4, 4, 3).with_padding(PaddingConfig1d::Same).init(device),
            up: ConvTranspose1dConfig::new([4, 4], 2).with_stride(2).init(device),
            max: MaxPool1dConfig::new(2).with_stride(1).init(),
            avg: AvgPool1dConfig::new(2).with_stride(1).init(),
            resize: Interpolate1dConfig::new().with_output_size(Some(9)).init(),
            mean: AdaptiveAvgPool1dConfig::new(4).init(),
        }
    }

    /// `[batch, 4, 4]` to the same
    fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        let x = self.max.forward(self.up.forward(self.conv.forward(x))); // 4 -> 8 -> 7
        self.mean.forward(self.resize.forward(self.avg.forward(x)))
    }
}
