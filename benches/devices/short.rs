//! Many rows of a few elements, where the work of a kernel per row costs more than its elements, and a few long columns. They are measured
//! on devices, and on the CPU by the bench of layers.
use burn::module::{Lora, Module};
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::pool::{AvgPool2dConfig, MaxPool2dConfig};
use burn::nn::{BatchNormConfig, InstanceNormConfig, LayerNormConfig, LinearConfig, PaddingConfig2d};
use burn::tensor::{Device, Int, Tensor, activation, module, ops::AttentionModuleOptions};
use burn_memsave::{functional as F, nn as memsave};

/// The elements of a tensor.
const ELEMENTS: usize = 1 << 20;
const CHANNELS: usize = 512;
/// The width of a head.
const WIDTH: usize = 64;

/// The bench that measures rows.
pub trait Bench {
    /// The device, with autodiff.
    fn device(&self) -> Device;

    /// Measures Burn's side and ours of a layer on an input of a shape, tracked or not.
    fn measure<const D: usize, const O: usize>(
        &mut self,
        name: &str,
        parameters: &str,
        input: ([usize; D], bool),
        sides: [&dyn Fn(Tensor<D>) -> Tensor<O>; 2],
    );
}

/// Measures norms, softmaxes and a loss over rows of a few elements; pools and a ReLU of small planes; adapters as wide as what they adapt;
/// and attention to a few tokens.
pub fn rows(bench: &mut impl Bench) {
    let device = bench.device();
    for len in [2, 8, 9, 32] {
        let rows = ELEMENTS / len;
        let (matrix, planes) = (([rows, len], true), ([rows / CHANNELS, CHANNELS, len], true));

        let burn = LayerNormConfig::new(len).init(&device);
        let ours = memsave::LayerNorm::from(burn.clone());
        let sides: [&dyn Fn(Tensor<2>) -> Tensor<2>; 2] = [&|x| burn.forward(x), &|x| ours.forward(x)];
        bench.measure(&format!("layer_norm, rows of {len}"), "trainable", matrix, sides);

        let sides: [&dyn Fn(Tensor<2>) -> Tensor<2>; 2] =
            [&|x| activation::softmax(x, 1), &|x| F::softmax(x, 1)];
        bench.measure(&format!("softmax, rows of {len}"), "-", matrix, sides);

        let burn = CrossEntropyLossConfig::new().init(&device);
        let ours = memsave::loss::CrossEntropyLossConfig::new().init(&device);
        let targets = Tensor::<1, Int>::arange(0..rows as i64, &device) % len as i64;
        let sides: [&dyn Fn(Tensor<2>) -> Tensor<1>; 2] =
            [&|x| burn.forward(x, targets.clone()), &|x| ours.forward(x, targets.clone())];
        bench.measure(&format!("cross_entropy, {len} classes"), "-", matrix, sides);

        let columns = ([rows / CHANNELS, len, CHANNELS], true);
        let sides: [&dyn Fn(Tensor<3>) -> Tensor<3>; 2] =
            [&|x| activation::softmax(x, 1), &|x| F::softmax(x, 1)];
        bench.measure(&format!("softmax, columns of {len}"), "-", columns, sides);

        let burn = InstanceNormConfig::new(CHANNELS).init(&device);
        let ours = memsave::InstanceNorm::from(burn.clone());
        let sides: [&dyn Fn(Tensor<3>) -> Tensor<3>; 2] = [&|x| burn.forward(x), &|x| ours.forward(x)];
        bench.measure(&format!("instance_norm, channels of {len}"), "trainable", planes, sides);

        let burn = BatchNormConfig::new(CHANNELS).init(&device);
        let ours = memsave::BatchNorm::from(burn.clone());
        let sides: [&dyn Fn(Tensor<3>) -> Tensor<3>; 2] = [&|x| burn.forward(x), &|x| ours.forward(x)];
        bench.measure(&format!("batch_norm, channels of {len}"), "trainable", planes, sides);
    }
    for [len, columns] in [[4096, 256], [1 << 14, 64]] {
        let sides: [&dyn Fn(Tensor<3>) -> Tensor<3>; 2] =
            [&|x| activation::softmax(x, 1), &|x| F::softmax(x, 1)];
        let name = format!("softmax, {columns} columns of {len}");
        bench.measure(&name, "-", ([ELEMENTS / (len * columns), len, columns], true), sides);
    }
    let padding = || PaddingConfig2d::Explicit(1, 1, 1, 1);
    let planes = ([ELEMENTS / (64 * 25), 64, 5, 5], true);
    let burn = MaxPool2dConfig::new([3, 3]).with_strides([2, 2]).with_padding(padding()).init();
    let ours = memsave::pool::MaxPool2d::from(burn.clone());
    let sides: [&dyn Fn(Tensor<4>) -> Tensor<4>; 2] = [&|x| burn.forward(x), &|x| ours.forward(x)];
    bench.measure("max_pool2d, planes of 5 x 5", "-", planes, sides);
    let burn = AvgPool2dConfig::new([3, 3]).with_strides([2, 2]).with_padding(padding()).init();
    let ours = memsave::pool::AvgPool2d::from(burn.clone());
    let sides: [&dyn Fn(Tensor<4>) -> Tensor<4>; 2] = [&|x| burn.forward(x), &|x| ours.forward(x)];
    bench.measure("avg_pool2d, planes of 5 x 5", "-", planes, sides);
    let planes = ([64, 64, 13, 13], true);
    let sides: [&dyn Fn(Tensor<4>) -> Tensor<4>; 2] = [&|x| activation::relu(x), &|x| F::relu(x)];
    bench.measure("relu, planes of 13 x 13", "-", planes, sides);
    for [rows, d_input, d_output] in [[64, 512, 1], [256, 64, 1], [128, 4, 256], [256, 64, 64]] {
        let burn = LinearConfig::new(d_input, d_output).init(&device).apply_lora(Lora::new(8, 16.0));
        let ours = memsave::Linear::from(burn.clone());
        let sides: [&dyn Fn(Tensor<2>) -> Tensor<2>; 2] = [&|x| burn.forward(x), &|x| ours.forward(x)];
        let name = format!("linear, LoRA of rank 8, {rows} x {d_input} to {d_output}");
        bench.measure(&name, "adapter", ([rows, d_input], true), sides);
    }
    for len in [2, 8, 32, 48] {
        let options = AttentionModuleOptions::default;
        let sides: [&dyn Fn(Tensor<4>) -> Tensor<4>; 2] =
            [&|x| module::attention(x.clone() * 0.5, x.clone() * 0.7, x, None, None, options()), &|x| {
                F::attention(x.clone() * 0.5, x.clone() * 0.7, x, None, None, options())
            }];
        let heads = ([ELEMENTS / (4 * len * WIDTH), 4, len, WIDTH], true);
        bench.measure(&format!("attention, {len} tokens"), "-", heads, sides);
    }
}
