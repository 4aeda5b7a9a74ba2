//! Compares layers with a low-rank adapter with stock layers that have the effective weight.
use crate::common::*;
use burn::module::{Lora, LoraAdapter, Module, Param, ParamId, Reparameterization};
use burn::tensor::{
    DType, Device, FloatDType, Int, Tensor, TensorData, module,
    ops::{ConvOptions, ConvTransposeOptions},
    quantization::{Calibration, QuantScheme, QuantValue, ScaleDtype, compute_q_params, compute_range},
};
use burn_memsave::functional as F;
use burn_memsave::{lora::ConvLora, measure::ledger, nn};
use proptest::prelude::*;

const SCALE: f64 = 1.5;

/// The adapter of two inputs.
fn adapter(t: &Operands, a: usize, b: usize) -> LoraAdapter {
    let param = |index| Param::initialized(ParamId::new(), t.get(index));
    LoraAdapter { a: param(a), b: param(b), scale: SCALE }
}

fn ours(t: &Operands) -> Tensor<3> {
    F::linear_lora(t.get(0), t.get(1), &adapter(t, 2, 3), t.maybe(4))
}

fn stock(t: &Operands) -> Tensor<3> {
    module::linear(t.get(0), adapter(t, 2, 3).apply(t.get::<2>(1)), t.maybe(4))
}

fn inputs([batch, rows, d_input, d_output, rank]: [usize; 5], bias: bool) -> Vec<Input> {
    let mut inputs = vec![
        Input::random([batch, rows, d_input]),
        Input::random([d_input, d_output]),
        Input::random([d_input, rank]),
        Input::random([rank, d_output]),
    ];
    inputs.extend(bias.then(|| Input::random([d_output])));
    inputs
}

#[test]
fn linear_equals_stock() {
    for_all(
        32,
        ([1..4usize, 1..5, 1..8, 1..8, 1..4], any::<bool>(), settings()),
        |(sizes, bias, setting)| {
            Check::new(inputs(sizes, bias), setting).compare(&ours, &stock);
        },
    );
}

#[test]
fn linear_of_many_blocks_equals_stock() {
    let inputs = inputs([3, 700, 6, 130, 5], true);
    Check::new(inputs, Setting { reading: Reading::Transposed, ..Setting::default() })
        .within(2e-5)
        .compare(&ours, &stock);
}

#[test]
fn linear_equals_stock_for_any_rank() {
    macro_rules! compare {
        ($rank:literal, $shape:expr) => {
            let parameters = [[5, 4], [5, 2], [2, 4]].map(Input::random);
            let inputs =
                [vec![Input::random($shape)], parameters.to_vec(), vec![Input::random([4])]].concat();
            Check::new(inputs, Setting::default()).compare::<$rank>(
                &|t| F::linear_lora(t.get(0), t.get(1), &adapter(t, 2, 3), t.maybe(4)),
                &|t| module::linear(t.get(0), adapter(t, 2, 3).apply(t.get::<2>(1)), t.maybe(4)),
            );
        };
    }
    compare!(1, [5]);
    compare!(2, [3, 5]);
    compare!(4, [2, 3, 2, 5]);
}

#[test]
fn linear_equals_stock_in_half_precision() {
    for dtype in HALF {
        Check::new(inputs([2, 3, 5, 4, 2], true), Setting::of(dtype)).compare(&ours, &stock);
    }
}

#[test]
fn linear_is_differentiated() {
    Check::new(inputs([2, 3, 5, 4, 2], true), Setting::default()).differentiate(&ours);
}

#[test]
fn linear_takes_an_input_twice() {
    let both = |t: &Operands, f: fn(Tensor<3>, Tensor<2>, &LoraAdapter) -> Tensor<3>| {
        let adapter = adapter(t, 2, 3);
        f(f(t.get(0), t.get(1), &adapter), t.get(1), &adapter) + f(t.get(0), t.get(1), &adapter) * 0.5
    };
    for_all(8, settings(), |setting| {
        Check::new(inputs([2, 3, 4, 4, 2], false), setting)
            .compare::<3>(&|t| both(t, |x, base, adapter| F::linear_lora(x, base, adapter, None)), &|t| {
                both(t, |x, base, adapter| module::linear(x, adapter.apply(base), None))
            });
    });
}

/// An effective weight of other factors, an empty batch, and what stock refuses.
#[test]
fn linear_treats_odd_shapes_as_stock() {
    let of = |x: [usize; 3], [base, a, b]: [[usize; 2]; 3]| {
        vec![Input::random(x), Input::random(base), Input::random(a), Input::random(b)]
    };
    let odd = [
        of([2, 3, 4], [[4, 6], [8, 2], [2, 3]]), // the same number of elements
        of([2, 3, 5], [[4, 6], [4, 2], [2, 6]]),
        of([2, 3, 4], [[4, 6], [4, 2], [3, 6]]),
        of([2, 3, 4], [[4, 6], [4, 2], [2, 5]]),
    ];
    for inputs in odd {
        Check::new(inputs, Setting::default()).compare_panics(&ours, &stock);
    }
    Check::new(inputs([2, 0, 4, 6, 2], true), Setting::default()).compare(&ours, &|t| {
        let sum = (0..4).fold(t.get::<1>(4).sum(), |sum, index| match index {
            0 => sum + t.get::<3>(0).sum(),
            _ => sum + t.get::<2>(index).sum(),
        });
        Tensor::zeros([2, 0, 6], t.device()) + sum.unsqueeze::<3>()
    });
}

/// A base of half precision below an adapter and activations of full precision.
#[test]
fn linear_casts_the_base_as_stock() {
    let inputs = inputs([2, 3, 5, 4, 2], true);
    let base = |t: &Operands| t.get::<2>(1).cast(DType::F16);
    Check::new(inputs, Setting::default())
        .on(Backend::Flex)
        .gradients_within(2e-3)
        .compare::<3>(&|t| F::linear_lora(t.get(0), base(t), &adapter(t, 2, 3), t.maybe(4)), &|t| {
            module::linear(t.get(0), adapter(t, 2, 3).apply(base(t)), t.maybe(4))
        });
}

/// By one scale, by scales of blocks (of a row, and of two), and by both.
fn schemes(device: &Device) -> [QuantScheme; 4] {
    let scheme = device.settings().quantization.scheme.with_value(QuantValue::Q8S);
    [
        scheme,
        scheme.per_block([8], ScaleDtype::F32),
        scheme.per_block([2, 4], ScaleDtype::F32),
        scheme.per_block([8], ScaleDtype::UE4M3).per_tensor(ScaleDtype::F32),
    ]
}

fn quantized<const D: usize>(shape: [usize; D], scheme: &QuantScheme, device: &Device) -> Tensor<D> {
    let values = uniform(shape.iter().product(), 7, -1.0..1.0);
    let weight = tensor::<D>(values, &shape, device, DType::F32);
    let range = compute_range(scheme, &weight, &Calibration::MinMax);
    weight.quantize(scheme, compute_q_params(scheme, range))
}

#[test]
fn linear_on_a_quantized_base_equals_stock() {
    for which in 0..4 {
        let base = |t: &Operands| quantized([16, 24], &schemes(t.device())[which], t.device());
        Check::new([Input::random([2, 3, 16]), Input::random([24])], Setting::default())
            .compare::<3>(&|t| F::linear(t.get(0), base(t), t.maybe(1)), &|t| {
                module::linear(t.get(0), base(t).dequantize(), t.maybe(1))
            });
        let inputs =
            [Input::random([2, 3, 16]), Input::random([16, 2]), Input::random([2, 24]), Input::random([24])];
        Check::new(inputs, Setting::default())
            .compare::<3>(&|t| F::linear_lora(t.get(0), base(t), &adapter(t, 1, 2), t.maybe(3)), &|t| {
                module::linear(t.get(0), adapter(t, 1, 2).apply(base(t)), t.maybe(3))
            });
    }
}

/// A base that is dequantized in several blocks of columns in the forward pass, of rows in the backward pass.
#[test]
fn linear_on_a_large_quantized_base_equals_stock() {
    for which in [0, 2] {
        let base = |t: &Operands| quantized([1024, 304], &schemes(t.device())[which], t.device());
        let inputs = [Input::random([2, 3, 1024]), Input::random([304])];
        Check::new(inputs, Setting::default())
            .within(1e-5)
            .compare::<3>(&|t| F::linear(t.get(0), base(t), t.maybe(1)), &|t| {
                module::linear(t.get(0), base(t).dequantize(), t.maybe(1))
            });
    }
}

#[test]
fn linear_on_a_quantized_base_in_other_precisions() {
    for dtype in [DType::F64, DType::F16] {
        let inputs =
            [Input::random([2, 3, 16]), Input::random([16, 2]), Input::random([2, 24]), Input::random([24])];
        let base = |t: &Operands| quantized([16, 24], &schemes(t.device())[0], t.device());
        Check::new(inputs, Setting::of(dtype))
            .compare::<3>(&|t| F::linear_lora(t.get(0), base(t), &adapter(t, 1, 2), t.maybe(3)), &|t| {
                module::linear(t.get(0), adapter(t, 1, 2).apply(base(t)), t.maybe(3))
            });
    }
}

/// Rows to look up, as often as may be.
fn indices(t: &Operands) -> Tensor<2, Int> {
    let numbers = uniform(10, 5, 0.0..6.0).into_iter().map(|row| (row as i64).min(5)).collect::<Vec<_>>();
    Tensor::from_data(TensorData::new(numbers, [2, 5]), t.device())
}

#[test]
fn embedding_equals_stock() {
    let inputs = || [Input::random([6, 4]), Input::random([6, 2]), Input::random([2, 4])];
    let ours = |t: &Operands| F::embedding_lora(t.get(0), &adapter(t, 1, 2), indices(t));
    for_all(16, settings(), |setting| {
        Check::new(inputs(), setting)
            .compare::<3>(&ours, &|t| module::embedding(adapter(t, 1, 2).apply(t.get::<2>(0)), indices(t)));
    });
    Check::new(inputs(), Setting::default()).differentiate::<3>(&ours);
    let odd = [Input::random([6, 4]), Input::random([3, 2]), Input::random([2, 8])];
    Check::new(odd, Setting::default())
        .compare::<3>(&ours, &|t| module::embedding(adapter(t, 1, 2).apply(t.get::<2>(0)), indices(t)));
}

#[test]
fn embedding_of_a_quantized_base_equals_stock() {
    for which in 0..4 {
        let base = |t: &Operands| quantized([6, 8], &schemes(t.device())[which], t.device());
        let inputs = [Input::random([6, 2]), Input::random([2, 8])];
        Check::new(inputs, Setting::default())
            .compare::<3>(&|t| F::embedding_lora(base(t), &adapter(t, 0, 1), indices(t)), &|t| {
                module::embedding(adapter(t, 0, 1).apply(base(t)), indices(t))
            });
    }
}

macro_rules! convolutions {
    ($($test:ident, $rank:literal, $dims:literal, $conv:ident, $lora:ident: $options:expr, $x:expr, $weight:expr, $bias:expr;)+) => {$(
        /// Per group; with a rank that is narrower than the channels, and one that is not.
        #[test]
        fn $test() {
            for groups in [1, 2] {
                for rank in [1, 2, 5] {
                    let options = $options(groups);
                    let weight: [usize; $dims] = $weight(groups);
                    let rest = weight.iter().product::<usize>() / weight[0];
                    let inputs = [
                        Input::random($x),
                        Input::random(weight),
                        Input::random([weight[0], rank]),
                        Input::random([rank, rest]),
                        Input::random([$bias]),
                    ];
                    let ours =
                        |t: &Operands| F::$lora(t.get(0), t.get(1), &adapter(t, 2, 3), t.maybe(4), options.clone());
                    let check = Check::new(inputs, Setting::of(DType::F64));
                    check.compare::<$dims>(&ours, &|t| {
                        let weight = adapter(t, 2, 3).apply(t.get::<$dims>(1));
                        module::$conv(t.get(0), weight, t.maybe(4), options.clone())
                    });
                    check.differentiate::<$dims>(&ours);
                }
            }
        }
    )+};
}
convolutions! {
    conv1d_equals_stock, 1, 3, conv1d, conv1d_lora:
        |groups| ConvOptions::new([1], [1], [1], groups),
        [2, 6, 5], |groups| [8, 6 / groups, 3], 8;
    conv2d_equals_stock, 2, 4, conv2d, conv2d_lora:
        |groups| ConvOptions::new([2, 1], [1, 0], [1, 2], groups),
        [2, 6, 5, 6], |groups| [8, 6 / groups, 3, 2], 8;
    conv3d_equals_stock, 3, 5, conv3d, conv3d_lora:
        |groups| ConvOptions::new([1, 1, 2], [1, 0, 0], [1, 1, 1], groups),
        [1, 6, 3, 3, 3], |groups| [8, 6 / groups, 2, 1, 2], 8;
    conv_transpose1d_equals_stock, 1, 3, conv_transpose1d, conv_transpose1d_lora:
        |groups| ConvTransposeOptions::new([2], [1], [1], [1], groups),
        [2, 6, 5], |groups| [6, 8 / groups, 3], 8;
    conv_transpose2d_equals_stock, 2, 4, conv_transpose2d, conv_transpose2d_lora:
        |groups| ConvTransposeOptions::new([2, 1], [1, 0], [1, 0], [1, 2], groups),
        [2, 6, 3, 4], |groups| [6, 8 / groups, 3, 2], 8;
    conv_transpose3d_equals_stock, 3, 5, conv_transpose3d, conv_transpose3d_lora:
        |groups| ConvTransposeOptions::new([2, 1, 1], [1, 0, 0], [0, 0, 0], [1, 1, 1], groups),
        [1, 6, 2, 2, 3], |groups| [6, 8 / groups, 2, 1, 2], 8;
}

/// With frozen quantized weights, of layers that Burn's adapters are not for.
#[test]
fn convolutions_with_quantized_weights_equal_stock() {
    let options = || ConvOptions::new([2, 1], [1, 0], [1, 1], 1);
    let transposed = || ConvTransposeOptions::new([2, 1], [1, 0], [1, 0], [1, 1], 1);
    let weight = |t: &Operands| quantized([8, 8, 3, 2], &schemes(t.device())[0], t.device());
    let check = Check::new([Input::random([2, 8, 5, 4]), Input::random([8])], Setting::default());
    check.compare::<4>(&|t| F::conv2d(t.get(0), weight(t), t.maybe(1), options()), &|t| {
        module::conv2d(t.get(0), weight(t).dequantize(), t.maybe(1), options())
    });
    check.compare::<4>(&|t| F::conv_transpose2d(t.get(0), weight(t), t.maybe(1), transposed()), &|t| {
        module::conv_transpose2d(t.get(0), weight(t).dequantize(), t.maybe(1), transposed())
    });
}

/// The gradients are those of the converted weight, which nothing keeps.
#[test]
fn convolutions_cast_a_frozen_weight_at_every_use() {
    let options = || ConvOptions::new([2, 1], [1, 0], [1, 1], 1);
    let transposed = || ConvTransposeOptions::new([2, 1], [1, 0], [1, 0], [1, 1], 1);
    let base = |t: &Operands| {
        tensor::<4>(uniform(8 * 8 * 3 * 2, 7, -1.0..1.0), &[8, 8, 3, 2], t.device(), DType::F64)
    };
    let inputs = [
        Input::random([2, 8, 5, 4]),
        Input::random([8, 2]),
        Input::random([2, 8 * 3 * 2]),
        Input::random([8]),
    ];
    let check = Check::new(inputs, Setting::default());
    check.compare::<4>(
        &|t| F::conv2d_lora(t.get(0), base(t), &adapter(t, 1, 2), t.maybe(3), options()),
        &|t| module::conv2d(t.get(0), adapter(t, 1, 2).apply(base(t)), t.maybe(3), options()),
    );
    check.compare::<4>(
        &|t| F::conv_transpose2d_lora(t.get(0), base(t), &adapter(t, 1, 2), t.maybe(3), transposed()),
        &|t| module::conv_transpose2d(t.get(0), adapter(t, 1, 2).apply(base(t)), t.maybe(3), transposed()),
    );

    let _generator = generator();
    let device = Device::flex().autodiff();
    let mut conv = nn::conv::Conv2dConfig::new([8, 8], [3, 2]).init(&device);
    conv.weight = conv.weight.map(|weight| weight.cast(DType::F16));
    let conv = conv.apply_reparameterization(ConvLora::new(Lora::new(2, 4.0).set_dtype(FloatDType::F32)));
    let x = Tensor::<4>::ones([2, 8, 5, 4], &device).require_grad();
    let (_, kept) = ledger(&conv, x, |conv, x| conv.forward(x));
    let weight = kept.rows.iter().find(|row| row.operation == "conv2d" && row.tensor == "weight");
    let weight = weight.unwrap_or_else(|| panic!("the weight is kept:\n{kept}"));
    assert!(weight.parameter && weight.bytes == Some(2 * 8 * 8 * 3 * 2), "not a copy in f32:\n{kept}");
}
