// A convolution and its batch norm, the building block of most image networks, written once. The module that includes this file
// chooses `nn`.
use burn::module::Module;
use burn::tensor::{Device, Tensor};
use nn::conv::{Conv2d, Conv2dConfig};
use nn::{BatchNorm, BatchNormConfig, PaddingConfig2d};

/// A convolution without a bias, and its batch norm.
#[derive(Module, Debug)]
pub struct ConvNorm {
    conv: Conv2d,
    norm: BatchNorm,
}

impl ConvNorm {
    /// Padded so that a stride of 1 keeps the size of the image; the norm is torchvision's default.
    pub fn new(conv: Conv2dConfig, device: &Device) -> Self {
        let norm = BatchNormConfig::new(conv.channels[1]);
        Self::with_norm(conv, norm, device)
    }

    /// With another norm.
    pub fn with_norm(conv: Conv2dConfig, norm: BatchNormConfig, device: &Device) -> Self {
        let [pad_y, pad_x] = core::array::from_fn(|axis| conv.kernel_size[axis] / 2 * conv.dilation[axis]);
        let conv = conv.with_padding(PaddingConfig2d::Explicit(pad_y, pad_x, pad_y, pad_x)).with_bias(false);
        Self { conv: conv.init(device), norm: norm.init(device) }
    }

    /// `norm(conv(x))`.
    pub fn forward(&self, x: Tensor<4>) -> Tensor<4> {
        self.norm.forward(self.conv.forward(x))
    }
}
