//! Large planes, also with channels last, as convolutions return them; few and many channels; long rows and axes; adapters of ranks 8 to 64;
//! odd sizes.
use crate::Devices;
use burn::module::{Lora, Module};
use burn::nn::interpolate::{Interpolate2dConfig, InterpolateMode};
use burn::nn::pool::AvgPool1dConfig;
use burn::nn::{
    BatchNormConfig, GroupNormConfig, InstanceNormConfig, LayerNormConfig, LinearConfig, LstmConfig,
};
use burn::tensor::Tensor;
use burn_memsave::nn as memsave;

/// The elements of a tensor, about.
const ELEMENTS: usize = 1 << 20;

impl Devices {
    pub fn planes(&mut self) {
        for (channels, side) in
            [(64, 56), (1, 256), (3, 255), (16, 256), (3, 512), (4, 512), (1, 1023), (1, 1024)]
        {
            for last in [false, true] {
                self.norms_of_planes(channels, side, last);
            }
        }
        self.long_rows();
        self.adapters();
        self.resized();
        self.recurrent();
    }

    fn norms_of_planes(&mut self, channels: usize, side: usize, last: bool) {
        let batch = (ELEMENTS / (channels * side * side)).max(1);
        let order = if last { ", channels last" } else { "" };
        let name = |norm: &str| format!("{norm}, {batch} x {channels} x {side} x {side}{order}");
        let shape = if last { [batch, side, side, channels] } else { [batch, channels, side, side] };
        let view = |x: Tensor<4>| if last { x.permute([0, 3, 1, 2]) } else { x };
        macro_rules! measure {
            ($name:literal, $config:expr, $layer:ty) => {
                let burn = $config.init(&self.device);
                let ours = <$layer>::from(burn.clone());
                let sides: [&dyn Fn(Tensor<4>) -> Tensor<4>; 2] =
                    [&|x| burn.forward(view(x)), &|x| ours.forward(view(x))];
                self.measure(&name($name), "trainable", (shape, true), sides);
            };
        }
        measure!("batch_norm", BatchNormConfig::new(channels), memsave::BatchNorm);
        measure!("instance_norm", InstanceNormConfig::new(channels), memsave::InstanceNorm);
        measure!("group_norm of one group", GroupNormConfig::new(1, channels), memsave::GroupNorm);
    }

    fn long_rows(&mut self) {
        for [rows, len] in [[1, ELEMENTS], [4, 1 << 18], [1, ELEMENTS - 1]] {
            let burn = LayerNormConfig::new(len).init(&self.device);
            let ours = memsave::LayerNorm::from(burn.clone());
            let sides: [&dyn Fn(Tensor<2>) -> Tensor<2>; 2] = [&|x| burn.forward(x), &|x| ours.forward(x)];
            self.measure(&format!("layer_norm, {rows} x {len}"), "trainable", ([rows, len], true), sides);
        }
    }

    fn adapters(&mut self) {
        for rank in [8, 16, 17, 32, 33, 64] {
            let burn =
                LinearConfig::new(256, 256).init(&self.device).apply_lora(Lora::new(rank, rank as f64));
            let ours = memsave::Linear::from(burn.clone());
            let sides: [&dyn Fn(Tensor<2>) -> Tensor<2>; 2] = [&|x| burn.forward(x), &|x| ours.forward(x)];
            self.measure(&format!("linear, LoRA of rank {rank}"), "adapter", ([2048, 256], true), sides);
        }
    }

    fn resized(&mut self) {
        for (channels, side, out) in [(64, 1, 64), (256, 1, 64), (64, 7, 112), (64, 33, 65)] {
            let config = || Interpolate2dConfig::new().with_output_size(Some([out, out]));
            let burn = config().with_mode(InterpolateMode::Nearest).init();
            let ours = memsave::interpolate::Interpolate2d::from(burn.clone());
            let sides: [&dyn Fn(Tensor<4>) -> Tensor<4>; 2] = [&|x| burn.forward(x), &|x| ours.forward(x)];
            let name = format!("interpolate2d, {channels} x {side} x {side} to {out}");
            self.measure(&name, "-", ([4, channels, side, side], true), sides);
        }
        let burn = AvgPool1dConfig::new(4).with_stride(4).init();
        let ours = memsave::pool::AvgPool1d::from(burn.clone());
        let sides: [&dyn Fn(Tensor<3>) -> Tensor<3>; 2] = [&|x| burn.forward(x), &|x| ours.forward(x)];
        self.measure("avg_pool1d, a long axis", "-", ([1, 1, ELEMENTS], true), sides);
    }

    fn recurrent(&mut self) {
        for features in [100, 128] {
            let burn = LstmConfig::new(features, features, true).init(&self.device);
            let ours = memsave::Lstm::from(burn.clone());
            let sides: [&dyn Fn(Tensor<3>) -> Tensor<3>; 2] =
                [&|x| burn.forward(x, None).0, &|x| ours.forward(x, None).0];
            self.measure(&format!("lstm of {features}"), "trainable", ([8, 16, features], true), sides);
        }
    }
}
