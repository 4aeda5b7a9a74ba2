//! Tests the bytes that layers with a low-rank adapter keep and need at their peak: exactly what `ops/lora` says, never more than stock,
//! and never a tensor of the size of the weight.
//!
//! Kept bytes are compared as the difference of two batch sizes.
use crate::meter::{RECORDS, SCRATCH, alone, devices, measure};
use burn::module::{Lora, Module, ModuleMapper, Param, ParamGroup, QLora, Quantizer};
use burn::nn::{self, conv};
use burn::tensor::{
    DType, Device, Distribution, Int, Tensor,
    quantization::{Calibration, QuantValue, ScaleDtype},
};
use burn_memsave::layers::*;
use burn_memsave::lora::{ConvLora, Dora};
use burn_memsave::measure::{LayerMeasurement, ledger};

const MIB: i64 = 1 << 20;

fn kept(measured: &LayerMeasurement) -> i64 {
    measured.kept.expect("the allocator counts") as i64
}

fn peak(measured: &LayerMeasurement) -> i64 {
    measured.peak.expect("the allocator counts") as i64
}

/// Casts the parameters.
struct Cast(DType);

impl ModuleMapper for Cast {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        param.map(|tensor| tensor.cast(self.0).detach())
    }
}

/// Of the parameters of an adapted layer.
fn group(pattern: &str) -> ParamGroup {
    ParamGroup::from_regex(pattern).expect("a valid pattern")
}

fn quantizer(device: &Device, blocks: bool) -> Quantizer {
    let scheme = device.settings().quantization.scheme.with_value(QuantValue::Q8S);
    let scheme = if blocks { scheme.per_block([32], ScaleDtype::F32) } else { scheme };
    let mut quantizer = Quantizer::new(Calibration::MinMax, scheme);
    quantizer.set_param_group(group("weight$"));
    quantizer
}

/// How much more is kept for twice the batch.
fn growth(measure: impl Fn(usize) -> LayerMeasurement) -> (i64, LayerMeasurement) {
    let [small, large] = [1, 2].map(measure);
    (kept(&large) - kept(&small), large)
}

/// All choices of what is tracked, on dense and on quantized bases.
fn linear_keeps_what_it_says(device: &Device) {
    const ROWS: i64 = 4 * 32;
    let dtypes = [DType::F32, DType::F64, DType::F16].map(|dtype| (dtype, false));
    for (dtype, quantized) in dtypes.into_iter().chain([(DType::F32, true)]) {
        let layer = nn::LinearConfig::new(64, 48).init(device).map(&mut Cast(dtype));
        let lora = Lora::new(4, 8.0);
        let layer = match quantized {
            false => layer.apply_lora(lora),
            true => layer.apply_qlora(QLora::new(lora, quantizer(device, false))),
        };
        for tracked in 0..16 {
            let [x, a, b, bias] = [0, 1, 2, 3].map(|bit| tracked >> bit & 1 == 1);
            let parts = [(a, r"lora\.a$"), (b, r"lora\.b$"), (bias, "^bias$")];
            let stock = parts.into_iter().fold(layer.clone(), |layer, (tracked, part)| {
                layer.set_require_grad_group(group(part), tracked)
            });
            let ours = MemSaveLinear::from_nn_linear(stock.clone());
            let width = if a { 64 } else { 4 * i64::from(b) };
            let said = ROWS * width * dtype.size() as i64;
            let input = |batches: usize| {
                let x_of = Tensor::<3>::random([4 * batches, 32, 64], Distribution::Default, (device, dtype));
                x_of.set_require_grad(x)
            };
            let case = format!("{dtype:?}, quantized {quantized}, tracked {tracked:#b}, {device:?}");
            let (grown, large) = growth(|batches| measure(device, || input(batches), |x| ours.forward(x)));
            assert_eq!(grown, said, "{case}");
            let twin = measure(device, || input(2), |x| stock.forward(x));
            assert!(kept(&large) <= kept(&twin) + RECORDS, "{case}: {large:?}, stock {twin:?}");
            // Operands of half precision are packed first, in ours and in stock different ones.
            let packed = if dtype == DType::F16 { SCRATCH } else { 0 };
            assert!(peak(&large) <= peak(&twin) + RECORDS + packed, "{case}: {large:?}, stock {twin:?}");
            let totals = [1, 2].map(|batches| {
                let x = input(batches);
                ledger(&ours, x, |ours, x| ours.forward(x)).1.total() as i64
            });
            assert_eq!(totals, [said, 2 * said], "{case}: the ledger's totals");
        }
    }
}

/// What LoRA keeps; for a tracked magnitude also the product with `v`, or of many rows `x`. Never more than Burn, which keeps `x` and
/// the effective weight.
fn dora_keeps_what_it_says(device: &Device) {
    const ROWS: i64 = 4 * 32;
    let widths = [(64, 48), (48, 64), (288, 160)]; // of fewer inputs than rows, and of more
    for (dtype, (d_input, d_output)) in
        [DType::F32, DType::F16].into_iter().flat_map(|dtype| widths.map(|widths| (dtype, widths)))
    {
        let layer = nn::LinearConfig::new(d_input, d_output).init(device).map(&mut Cast(dtype));
        let layer = layer.apply_reparameterization(Dora::new(Lora::new(4, 8.0)));
        for tracked in 0..16 {
            let [x, a, b, magnitude] = [0, 1, 2, 3].map(|bit| tracked >> bit & 1 == 1);
            let parts = [(a, r"lora\.a$"), (b, r"lora\.b$"), (magnitude, r"magnitude$")];
            let stock = parts.into_iter().fold(layer.clone(), |layer, (tracked, part)| {
                layer.set_require_grad_group(group(part), tracked)
            });
            let ours = MemSaveLinear::from_nn_linear(stock.clone());
            let again = magnitude && (d_input as i64) < ROWS;
            let width = match (a || again, b) {
                (true, _) => d_input as i64,
                (false, b) => 4 * i64::from(b),
            };
            let product = if magnitude && !again { d_output as i64 } else { 0 };
            let said = ROWS * (width + product) * dtype.size() as i64;
            let input = |batches: usize| {
                let x_of =
                    Tensor::<3>::random([4 * batches, 32, d_input], Distribution::Default, (device, dtype));
                x_of.set_require_grad(x)
            };
            let case = format!("{d_input} to {d_output}, {dtype:?}, tracked {tracked:#b}, {device:?}");
            let (grown, large) = growth(|batches| measure(device, || input(batches), |x| ours.forward(x)));
            assert_eq!(grown, said, "{case}");
            let twin = measure(device, || input(2), |x| stock.forward(x));
            assert!(kept(&large) <= kept(&twin) + RECORDS, "{case}: {large:?}, stock {twin:?}");
            let totals = [1, 2]
                .map(|batches| ledger(&ours, input(batches), |ours, x| ours.forward(x)).1.total() as i64);
            // The factors of the columns, which are no parameter.
            let factors = d_output as i64 * dtype.size() as i64 * i64::from(x || a || b);
            assert_eq!(totals, [said + factors, 2 * said + factors], "{case}: the ledger's totals");
        }
    }
    // Of a large weight: 16 MiB.
    let stock =
        nn::LinearConfig::new(4096, 1024).init(device).apply_reparameterization(Dora::new(Lora::new(4, 8.0)));
    let ours = MemSaveLinear::from_nn_linear(stock);
    let rows = || Tensor::<2>::random([16, 4096], Distribution::Default, device).require_grad();
    let measured = measure(device, rows, |x| ours.forward(x));
    assert!(peak(&measured) < 4 * MIB, "{measured:?}");
}

/// Of weights that are much larger than what goes through the layer.
fn no_dense_weight_exists(device: &Device) {
    let lora = Lora::new(4, 8.0);
    let rows = || Tensor::<2>::random([16, 4096], Distribution::Default, device).require_grad();

    let stock = nn::LinearConfig::new(4096, 1024).init(device).apply_lora(lora.clone()); // 16 MiB
    let ours = MemSaveLinear::from_nn_linear(stock);
    let measured = measure(device, rows, |x| ours.forward(x));
    assert!(peak(&measured) < MIB, "linear: {measured:?}");
    let measured = measure(device, || rows().inner(), |x| ours.valid().forward(x));
    assert!(peak(&measured) < MIB, "linear, inference: {measured:?}");

    for blocks in [false, true] {
        let layer = nn::LinearConfig::new(4096, 1024).init(device);
        let quantized = || quantizer(device, blocks);
        let ours = MemSaveLinear::from_nn_linear(layer.clone().quantize_weights(&mut quantized()).freeze());
        let measured = measure(device, rows, |x| ours.forward(x));
        assert!(peak(&measured) < 3 * MIB, "quantized linear, blocks {blocks}: {measured:?}");
        // Flex has no handle of block scales: a clone copies them (0.22.1).
        let scales = if blocks { 4 * 4096 * 1024 / 32 } else { 0 };
        assert!(kept(&measured) < scales + 2 * RECORDS, "quantized linear, blocks {blocks}: {measured:?}");
        let ours = MemSaveLinear::from_nn_linear(layer.apply_qlora(QLora::new(lora.clone(), quantized())));
        let measured = measure(device, rows, |x| ours.forward(x));
        assert!(peak(&measured) < 3 * MIB, "linear on a quantized base, blocks {blocks}: {measured:?}");
        assert!(
            kept(&measured) < scales + 16 * 4096 * 4 + 2 * RECORDS,
            "linear on a quantized base, blocks {blocks}: {measured:?}"
        );
    }

    let embedding = nn::EmbeddingConfig::new(20_000, 128).init(device).apply_lora(lora.clone()); // 9.8 MiB
    let ours = MemSaveEmbedding::from_nn_embedding(embedding);
    let indices = Tensor::<2, Int>::from_ints([[1, 19_999, 4, 4], [0, 7, 1, 2]], device);
    let scaled = || Tensor::<3>::ones([1, 1, 1], device).require_grad();
    let measured = measure(device, scaled, |scale| ours.forward(indices.clone()) * scale);
    assert!(peak(&measured) < 2 * MIB, "embedding: {measured:?}"); // the gradient of a: 0.3 MiB

    // Burn's convolution packs the weight for itself; its gradient, or a product of factors, would be another two.
    let conv = conv::Conv2dConfig::new([256, 256], [3, 3]).init(device); // 2.25 MiB
    let images = || Tensor::<4>::random([1, 256, 4, 4], Distribution::Default, device);
    let measured_with = |adapted: bool, tracked: bool| {
        let conv = match adapted {
            false => conv.clone().no_grad(),
            true => conv.clone().apply_reparameterization(ConvLora::new(lora.clone())),
        };
        let ours = MemSaveConv2d::from_nn_conv2d(conv);
        measure(device, || images().set_require_grad(tracked), |x| ours.forward(x))
    };
    for tracked in [false, true] {
        let (adapted, plain) = (measured_with(true, tracked), measured_with(false, tracked));
        assert!(peak(&adapted) < peak(&plain) + MIB / 2, "conv2d: {adapted:?}, without adapter {plain:?}");
    }
}

/// The shape and the ceilings of the README's table.
fn the_targets_are_met(device: &Device) {
    let layer = nn::LinearConfig::new(1024, 1024).init(device).apply_lora(Lora::new(8, 16.0));
    let ours = MemSaveLinear::from_nn_linear(layer);
    let rows = || Tensor::<3>::random([64, 128, 1024], Distribution::Default, device);
    let measured = measure(device, || rows().require_grad(), |x| ours.forward(x));
    assert!(kept(&measured) <= 323 * MIB / 10, "{measured:?}");
    assert!(peak(&measured) <= 104 * MIB, "{measured:?}");
    println!("linear with an adapter: {measured:?}");
    let ours = ours.freeze_group(burn_memsave::lora::a_factors());
    let measured = measure(device, rows, |x| ours.forward(x));
    assert!(kept(&measured) <= 3 * MIB / 10, "{measured:?}");
    println!("the same, input untracked, a frozen: {measured:?}");

    // All frozen: stock has the effective weight once, and no more.
    let qlora = QLora::new(Lora::new(8, 16.0), quantizer(device, false));
    let stock = nn::LinearConfig::new(1024, 1024).init(device).apply_qlora(qlora).freeze();
    let ours = MemSaveLinear::from_nn_linear(stock.clone());
    let measured = measure(device, || rows().require_grad(), |x| ours.forward(x));
    let twin = measure(device, || rows().require_grad(), |x| stock.forward(x));
    assert!(peak(&measured) <= peak(&twin) + RECORDS, "{measured:?}, stock {twin:?}");
}

#[test]
fn adapted_linear_layers_keep_what_they_say() {
    let _alone = alone();
    devices().iter().for_each(linear_keeps_what_it_says);
}

#[test]
fn layers_with_magnitudes_keep_what_they_say() {
    let _alone = alone();
    devices().iter().for_each(dora_keeps_what_it_says);
}

#[test]
fn adapted_layers_have_no_dense_weight() {
    let _alone = alone();
    no_dense_weight_exists(&Device::flex().autodiff());
}

#[test]
fn adapted_layers_meet_their_targets() {
    let _alone = alone();
    the_targets_are_met(&Device::flex().autodiff());
}
