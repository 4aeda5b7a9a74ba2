//! Rows of dense layers and embeddings.
use super::{Case, Check, Input, ROWS, Shapes, Visitor, kept, row};
use burn::module::{Lora, Module, QLora, Quantizer};
use burn::tensor::quantization::{Calibration, QuantValue};
use burn::tensor::{Device, Int, Tensor};
use burn_memsave::lora::Dora;

/// The shape of a text, whose length decides how many rows the table has. The input stands in for the indices, which have no gradient.
const TEXT: Shapes<2> = Shapes { test: [4, 16], usual: [4, 512], small: [4, 512] };

fn vocabulary(length: usize) -> usize {
    if length == TEXT.usual[1] { 32_000 } else { 500 }
}

fn scattered(x: &Tensor<2>) -> Tensor<2, Int> {
    let [batch, length] = x.dims();
    let numbers = Tensor::<1, Int>::arange(0..(batch * length) as i64, &x.device());
    numbers.mul_scalar(7919).remainder_scalar(vocabulary(length) as i64).reshape([batch, length])
}

fn quantized(device: &Device) -> QLora {
    let scheme = device.settings().quantization.scheme.with_value(QuantValue::Q8S);
    QLora::new(Lora::new(8, 16.0), Quantizer::new(Calibration::MinMax, scheme))
}

const ADAPTED: &str = "an adapter has parameters of its own: tests/memory/lora.rs, tests/gradients/lora.rs";
const BY_PARTS: &[Check] = &[Check::Bytes, Check::Gradients, Check::Wgpu];

pub fn visit(visitor: &mut impl Visitor) {
    row! {
        visitor, "linear", ROWS, kept::bilinear, config(device) |nn, [.., n]| nn::LinearConfig::new(n, n)
    }
    row! {
        visitor, "linear, few rows", ROWS.test([8, 16, 64]), kept::bilinear,
        config(device) |nn, [.., n]| nn::LinearConfig::new(n, n - 16),
        without(&[Check::Time], "as linear")
    }
    row! {
        visitor, "linear, no bias", ROWS, kept::bilinear,
        config(device) |nn, [.., n]| nn::LinearConfig::new(n, n - 16).with_bias(false),
        without(&[Check::Time], "as linear")
    }
    row! {
        visitor, "linear, columns", ROWS.test([2, 3, 4]), kept::bilinear,
        config(device) |nn, [.., n]| nn::LinearConfig::new(n, 3).with_layout(nn::LinearLayout::Col),
        without(&[Check::Time], "as linear"),
        without(&[Check::Bytes], "the weight is a view that Burn makes")
    }
    row! {
        visitor, "linear, LoRA", ROWS.test([2, 3, 4]), kept::nothing,
        module(device) |nn, [.., n]| nn::LinearConfig::new(n, n).init(device).apply_lora(Lora::new(8, 16.0)),
        without(BY_PARTS, ADAPTED)
    }
    row! {
        visitor, "linear, DoRA", ROWS.test([2, 3, 4]), kept::nothing,
        module(device) |nn, [.., n]|
            nn::LinearConfig::new(n, n).init(device).apply_reparameterization(Dora::new(Lora::new(8, 16.0))),
        without(BY_PARTS, "an adapter has parameters of its own: tests/memory/lora.rs, tests/gradients/dora.rs")
    }
    row! {
        visitor, "linear, QLoRA", ROWS.test([2, 3, 8]), kept::nothing,
        module(device) |nn, [.., n]| nn::LinearConfig::new(n, n).init(device).apply_qlora(quantized(device)),
        without(BY_PARTS, ADAPTED)
    }
    let indices = |case: Case, x: Input<2>| {
        let index = Tensor::<1, Int>::zeros([1], &Device::default()).dtype().size();
        if case.weight() { x.elements() * index } else { 0 }
    };
    row! {
        visitor, "embedding", TEXT, indices,
        config(device) |nn, [_, length]| nn::EmbeddingConfig::new(vocabulary(length), 2 * length),
        forward |nn, layer, x| layer.forward(scattered(&x))
    }
    row! {
        visitor, "embedding, LoRA", TEXT.test([2, 4]), kept::nothing,
        module(device) |nn, [_, length]|
            nn::EmbeddingConfig::new(5, 2 * length).init(device).apply_lora(Lora::new(2, 4.0)),
        forward |nn, layer, x| layer.forward(Tensor::zeros(x.dims(), &x.device())),
        without(BY_PARTS, ADAPTED), without(&[Check::Time], "as embedding")
    }
}
