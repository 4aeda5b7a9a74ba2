// A model that uses every kind of layer, written once. Whoever includes this file says which `nn` it is made of.
use burn::module::Module;
use burn::tensor::{Device, Tensor};
use nn::activation::{Activation, ActivationConfig, HardSigmoidConfig, HardtanhConfig};
use nn::conv::{Conv1d, Conv1dConfig, Conv2d, Conv2dConfig, ConvTranspose2d, ConvTranspose2dConfig};
use nn::interpolate::{Interpolate2d, Interpolate2dConfig, InterpolateMode};
use nn::norm::{Normalization, NormalizationConfig};
use nn::pool::{AdaptiveAvgPool2d, AdaptiveAvgPool2dConfig, AvgPool2d, AvgPool2dConfig, MaxPool2d, MaxPool2dConfig};
use nn::transformer::{TransformerEncoder, TransformerEncoderConfig, TransformerEncoderInput};
use nn::{
    BatchNormConfig, Dropout, DropoutConfig, LeakyRelu, LeakyReluConfig, Linear, LinearConfig, PRelu, PReluConfig,
    PaddingConfig1d, PaddingConfig2d, Relu,
};

#[derive(Module, Debug)]
pub struct Net {
    conv: Conv2d,
    norm: Normalization,
    relu: Relu,
    prelu: PRelu,
    leaky: LeakyRelu,
    max: MaxPool2d,
    avg: AvgPool2d,
    up: ConvTranspose2d,
    resize: Interpolate2d,
    mean: AdaptiveAvgPool2d,
    activations: Vec<Activation>,
    conv1d: Conv1d,
    encoder: TransformerEncoder,
    dropout: Dropout,
    head: Linear,
}

impl Net {
    pub fn new(device: &Device) -> Self {
        let norm = NormalizationConfig::from(BatchNormConfig::new(0)).with_num_features(4);
        let activations = [
            ActivationConfig::Relu,
            ActivationConfig::from(HardSigmoidConfig::new()),
            ActivationConfig::PRelu(PReluConfig::new()),
            ActivationConfig::Gelu,
        ];
        let _ = HardtanhConfig::new().init();
        Self {
            conv: Conv2dConfig::new([2, 4], [3, 3]).with_padding(PaddingConfig2d::Same).init(device),
            norm: norm.init(device),
            relu: Relu::new(),
            prelu: PReluConfig::new().with_num_parameters(4).init(device),
            leaky: LeakyReluConfig::new().init(),
            max: MaxPool2dConfig::new([2, 2]).init(),
            avg: AvgPool2dConfig::new([2, 2]).init(),
            up: ConvTranspose2dConfig::new([4, 4], [2, 2]).with_stride([2, 2]).init(device),
            resize: Interpolate2dConfig::new()
                .with_output_size(Some([6, 6]))
                .with_mode(InterpolateMode::Linear)
                .init(),
            mean: AdaptiveAvgPool2dConfig::new([2, 2]).init(),
            activations: activations.iter().map(|config| config.init(device)).collect(),
            conv1d: Conv1dConfig::new(4, 4, 3).with_padding(PaddingConfig1d::Same).init(device),
            encoder: TransformerEncoderConfig::new(4, 8, 2, 1)
                .with_dropout(0.0)
                .with_activation(ActivationConfig::Relu)
                .init(device),
            dropout: DropoutConfig::new(0.25).init(),
            head: LinearConfig::new(16, 3).init(device),
        }
    }

    /// `[batch, 2, 8, 8]` to `[batch, 3]`
    pub fn forward(&self, x: Tensor<4>) -> Tensor<2> {
        let x = self.relu.forward(self.norm.forward(self.conv.forward(x)));
        let x = self.max.forward(self.prelu.forward(x));
        let x = self.up.forward(self.avg.forward(self.leaky.forward(x)));
        let x = self.mean.forward(self.resize.forward(x));
        let x = self.activations.iter().fold(x, |x, activation| activation.forward(x));
        let x = self.conv1d.forward(x.flatten::<3>(2, 3));
        let x = self.encoder.forward(TransformerEncoderInput::new(x));
        self.head.forward(self.dropout.forward(x).flatten::<2>(1, 2))
    }
}
