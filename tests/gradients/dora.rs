//! Compares dense layers with weight-decomposed adapters with the definition of DoRA, with constant norms.
use crate::common::*;
use burn::module::{Lora, LoraAdapter, Module, Param, ParamGroup, ParamId, Quantizer, Reparameterization};
use burn::nn as stock;
use burn::optim::GradientsParams;
use burn::tensor::{
    Device, Tensor, Tolerance, module,
    quantization::{Calibration, QuantValue},
};
use burn_memsave::functional as F;
use burn_memsave::lora::{Dora, DoraAdapter};
use burn_memsave::{measure::ledger, nn};
use proptest::prelude::*;

/// Small beside the base, so that no column of their sum is near zero, where norms and rounding are of one size.
const SCALE: f64 = 0.2;

fn lora(t: &Operands) -> LoraAdapter {
    let param = |index| Param::initialized(ParamId::new(), t.get(index));
    LoraAdapter { a: param(2), b: param(3), scale: SCALE }
}

fn ours<const D: usize>(t: &Operands) -> Tensor<D> {
    let adapter = DoraAdapter { lora: lora(t), magnitude: Param::initialized(ParamId::new(), t.get(4)) };
    F::linear_dora(t.get(0), t.get(1), &adapter, t.maybe(5))
}

/// `x (magnitude * v / |v|) + bias`
fn definition<const D: usize>(t: &Operands) -> Tensor<D> {
    let v: Tensor<2> = t.get::<2>(1) + t.get::<2>(2).matmul(t.get(3)) * SCALE;
    let norms = v.clone().square().sum_dim(0).sqrt().detach().set_require_grad(false);
    let magnitude: Tensor<1> = t.get(4);
    module::linear(t.get(0), v * (magnitude.unsqueeze() / norms), t.maybe(5))
}

fn inputs<const D: usize>(x: [usize; D], d_output: usize, rank: usize, bias: bool) -> Vec<Input> {
    let d_input = x[D - 1];
    let mut inputs = vec![
        Input::random(x),
        Input::between([d_input, d_output], 1.0..2.0),
        Input::random([d_input, rank]),
        Input::random([rank, d_output]),
        Input::random([d_output]),
    ];
    inputs.extend(bias.then(|| Input::random([d_output])));
    inputs
}

#[test]
fn equals_its_definition() {
    let sizes = [1..4usize, 1..5, 2..8, 1..8, 1..4];
    for_all(
        48,
        (sizes, any::<bool>(), settings()),
        |([batch, rows, d_input, d_output, rank], bias, setting)| {
            let inputs = inputs([batch, rows, d_input], d_output, rank, bias);
            Check::new(inputs, setting).compare::<3>(&ours, &definition);
        },
    );
}

#[test]
fn equals_its_definition_for_any_rank() {
    Check::new(inputs([5], 4, 2, true), Setting::default()).within(2e-5).compare::<1>(&ours, &definition);
    Check::new(inputs([2, 3, 2, 5], 4, 2, true), Setting::default())
        .within(2e-5)
        .compare::<4>(&ours, &definition);
}

/// Several blocks of rows, the last one smaller.
#[test]
fn norms_of_many_rows_equal_their_definition() {
    Check::new(inputs([3, 1030], 600, 3, false), Setting::default())
        .within(2e-5)
        .compare::<2>(&ours, &definition);
}

#[test]
fn equals_its_definition_in_half_precision() {
    for dtype in HALF {
        // Of fewer rows than columns, and of more.
        for rows in [3, 12] {
            Check::new(inputs([2, rows, 16], 6, 2, true), Setting::of(dtype))
                .compare::<3>(&ours, &definition);
        }
    }
}

type Layers = (stock::Linear, nn::Linear);

/// Burn's layer, which makes the effective weight, and ours.
fn layers(device: &Device, quantizes: bool) -> Layers {
    let layer = stock::LinearConfig::new(32, 16).init(device);
    let layer = match quantizes {
        false => layer,
        true => {
            let scheme = device.settings().quantization.scheme.with_value(QuantValue::Q8S);
            let mut quantizer = Quantizer::new(Calibration::MinMax, scheme);
            quantizer.set_param_group(ParamGroup::from_regex("weight$").unwrap());
            layer.quantize_weights(&mut quantizer)
        }
    };
    let before = layer.forward(Tensor::<2>::ones([3, 32], device));
    let layer = layer.apply_reparameterization(Dora::new(Lora::new(4, 8.0)));
    let after = layer.forward(Tensor::<2>::ones([3, 32], device));
    after.into_data().assert_approx_eq::<f32>(&before.into_data(), Tolerance::absolute(1e-4));
    (layer.clone(), nn::Linear::from_nn_linear(layer))
}

#[test]
fn layers_take_it() {
    let _generator = generator();
    let device = Device::flex().autodiff();
    // Of fewer rows than columns, and of more.
    for (quantizes, rows, tracks_x) in
        [(false, 5, true), (true, 5, true), (false, 40, true), (true, 40, true), (true, 40, false)]
    {
        let (stock, ours) = layers(&device, quantizes);
        let x = Tensor::<2>::random([rows, 32], burn::tensor::Distribution::Default, &device);
        let x = x.set_require_grad(tracks_x);
        let (found, ledger) = ledger(&ours, x.clone(), |ours, x| ours.forward(x));
        assert!(ledger.fallbacks().next().is_none(), "{ledger}");
        let expected = stock.forward(x);
        found
            .clone()
            .into_data()
            .assert_approx_eq::<f32>(&expected.clone().into_data(), Tolerance::default());
        let [found, expected] = [
            GradientsParams::from_grads(found.powf_scalar(2.0).sum().backward(), &ours),
            GradientsParams::from_grads(expected.powf_scalar(2.0).sum().backward(), &stock),
        ];
        assert_eq!((found.len(), expected.len()), (3, 3), "a, b and the magnitude");
        let adapter = ours.weight.reparameterization::<DoraAdapter>().unwrap();
        let close = |found: Option<Tensor<2>>, expected: Option<Tensor<2>>| {
            let (found, expected) = (found.unwrap().into_data(), expected.unwrap().into_data());
            found.assert_approx_eq::<f32>(&expected, Tolerance::relative(1e-3).set_absolute(1e-3));
        };
        for id in [adapter.lora.a.id, adapter.lora.b.id] {
            close(found.get(id), expected.get(id));
        }
        let [found, expected] =
            [found, expected].map(|of| of.get::<1>(adapter.magnitude.id).map(Tensor::unsqueeze));
        close(found, expected);
    }
}

#[test]
fn it_is_merged() {
    let device = Device::flex().autodiff();
    let (_, ours) = layers(&device, false);
    let x = Tensor::<2>::ones([3, 32], &device.clone().inner());
    let merged = ours.valid().materialize();
    assert!(merged.weight.reparameterization::<DoraAdapter>().is_none());
    merged
        .forward(x.clone())
        .into_data()
        .assert_approx_eq::<f32>(&ours.valid().forward(x).into_data(), Tolerance::absolute(1e-5));
}

/// A magnitude of another length is refused as Burn refuses it.
#[test]
#[should_panic]
fn another_magnitude_is_refused() {
    let device = Device::flex();
    let factor = |shape: [usize; 2]| Param::from_tensor(Tensor::<2>::ones(shape, &device));
    let lora = LoraAdapter { a: factor([4, 2]), b: factor([2, 3]), scale: 1.0 };
    let adapter = DoraAdapter { lora, magnitude: Param::from_tensor(Tensor::ones([2], &device)) };
    let base = Tensor::<2>::ones([4, 3], &device);
    let _ = adapter.apply(base.clone());
    F::linear_dora(Tensor::<2>::ones([5, 4], &device), base, &adapter, None);
}

/// Columns of zeros have no direction, and stay zeros.
#[test]
fn columns_of_zeros_stay_zeros() {
    let device = Device::flex().autodiff();
    let factor = |shape: [usize; 2]| Param::from_tensor(Tensor::<2>::zeros(shape, &device));
    let lora = LoraAdapter { a: factor([4, 2]), b: factor([2, 3]), scale: 1.0 };
    let adapter = DoraAdapter::new(Tensor::zeros([4, 3], &device), lora);
    let x = Tensor::<2>::ones([5, 4], &device).require_grad();
    let y = F::linear_dora(x.clone(), Tensor::zeros([4, 3], &device), &adapter, None);
    let gradient = x.grad(&y.clone().sum().backward()).unwrap();
    assert_eq!((y.abs().max().into_scalar::<f32>(), gradient.abs().max().into_scalar::<f32>()), (0.0, 0.0));
}
