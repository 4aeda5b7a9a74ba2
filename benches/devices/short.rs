//! Many rows of a few elements: what a kernel does for each row costs more than its elements.
use crate::Devices;
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::pool::{AvgPool2dConfig, MaxPool2dConfig};
use burn::nn::{BatchNormConfig, InstanceNormConfig, LayerNormConfig, PaddingConfig2d};
use burn::tensor::{Int, Tensor, activation, module, ops::AttentionModuleOptions};
use burn_memsave::{functional as F, nn as memsave};

/// Of a tensor.
const ELEMENTS: usize = 1 << 20;
const CHANNELS: usize = 512;
/// Of a head.
const WIDTH: usize = 64;

impl Devices {
    /// Norms, a softmax and a loss over rows of a few elements; pools of small planes; attention to a few tokens.
    pub fn short_rows(&mut self) {
        for len in [2, 8, 9, 32] {
            let rows = ELEMENTS / len;
            let device = self.device.clone();
            let (matrix, planes) = (([rows, len], true), ([rows / CHANNELS, CHANNELS, len], true));

            let burn = LayerNormConfig::new(len).init(&device);
            let ours = memsave::LayerNorm::from(burn.clone());
            let sides: [&dyn Fn(Tensor<2>) -> Tensor<2>; 2] = [&|x| burn.forward(x), &|x| ours.forward(x)];
            self.measure(&format!("layer_norm, rows of {len}"), "trainable", matrix, sides);

            let sides: [&dyn Fn(Tensor<2>) -> Tensor<2>; 2] =
                [&|x| activation::softmax(x, 1), &|x| F::softmax(x, 1)];
            self.measure(&format!("softmax, rows of {len}"), "-", matrix, sides);

            let burn = CrossEntropyLossConfig::new().init(&device);
            let ours = memsave::loss::CrossEntropyLossConfig::new().init(&device);
            let targets = Tensor::<1, Int>::arange(0..rows as i64, &device) % len as i64;
            let sides: [&dyn Fn(Tensor<2>) -> Tensor<1>; 2] =
                [&|x| burn.forward(x, targets.clone()), &|x| ours.forward(x, targets.clone())];
            self.measure(&format!("cross_entropy, {len} classes"), "-", matrix, sides);

            let burn = InstanceNormConfig::new(CHANNELS).init(&device);
            let ours = memsave::InstanceNorm::from(burn.clone());
            let sides: [&dyn Fn(Tensor<3>) -> Tensor<3>; 2] = [&|x| burn.forward(x), &|x| ours.forward(x)];
            self.measure(&format!("instance_norm, channels of {len}"), "trainable", planes, sides);

            let burn = BatchNormConfig::new(CHANNELS).init(&device);
            let ours = memsave::BatchNorm::from(burn.clone());
            let sides: [&dyn Fn(Tensor<3>) -> Tensor<3>; 2] = [&|x| burn.forward(x), &|x| ours.forward(x)];
            self.measure(&format!("batch_norm, channels of {len}"), "trainable", planes, sides);
        }
        let padding = || PaddingConfig2d::Explicit(1, 1, 1, 1);
        let planes = ([ELEMENTS / (64 * 25), 64, 5, 5], true);
        let burn = MaxPool2dConfig::new([3, 3]).with_strides([2, 2]).with_padding(padding()).init();
        let ours = memsave::pool::MaxPool2d::from(burn.clone());
        let sides: [&dyn Fn(Tensor<4>) -> Tensor<4>; 2] = [&|x| burn.forward(x), &|x| ours.forward(x)];
        self.measure("max_pool2d, planes of 5 x 5", "-", planes, sides);
        let burn = AvgPool2dConfig::new([3, 3]).with_strides([2, 2]).with_padding(padding()).init();
        let ours = memsave::pool::AvgPool2d::from(burn.clone());
        let sides: [&dyn Fn(Tensor<4>) -> Tensor<4>; 2] = [&|x| burn.forward(x), &|x| ours.forward(x)];
        self.measure("avg_pool2d, planes of 5 x 5", "-", planes, sides);
        for len in [2, 8, 32, 48] {
            let options = AttentionModuleOptions::default;
            let sides: [&dyn Fn(Tensor<4>) -> Tensor<4>; 2] =
                [&|x| module::attention(x.clone() * 0.5, x.clone() * 0.7, x, None, None, options()), &|x| {
                    F::attention(x.clone() * 0.5, x.clone() * 0.7, x, None, None, options())
                }];
            let heads = ([ELEMENTS / (4 * len * WIDTH), 4, len, WIDTH], true);
            self.measure(&format!("attention, {len} tokens"), "-", heads, sides);
        }
    }
}
