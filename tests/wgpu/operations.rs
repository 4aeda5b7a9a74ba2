//! One small case per operation, with options that the rows of the table do not have.
use crate::table::activations::smooth;
use crate::{EXACT, among_others, assert_products_close, assert_within, gpu, of_products, tensor, values};
use burn::module::{LoraAdapter, Module, Param, ParamId};
use burn::tensor::{
    Bool, DType, Device, Int, Tensor, TensorData, activation,
    ops::{
        AttentionModuleOptions, AvgPoolOptions, ConvOptions, ConvTransposeOptions, DeformConvOptions,
        InterpolateMode, InterpolateOptions, MaxPoolOptions,
    },
    quantization::{Calibration, QuantValue, compute_q_params, compute_range},
};
use burn_memsave::functional as F;
use burn_memsave::lora::DoraAdapter;
use burn_memsave::nn::activation::RReluConfig;
use burn_memsave::nn::{GateController, GruConfig, Linear, LstmConfig, RnnConfig};

/// Output and gradients of `f` on a device: of its input, and of the operands that `f` makes and tracks.
fn run<const D: usize, const O: usize>(
    device: &Device,
    shape: [usize; D],
    f: &dyn Fn(Tensor<D>, &mut Operands) -> Tensor<O>,
) -> Vec<TensorData> {
    let x = tensor::<D>(values(shape, 1), device).require_grad();
    let mut operands = Operands { device: device.clone(), vectors: vec![], kernels: vec![] };
    let y = f(x.clone(), &mut operands);
    let dy = tensor::<O>(values(y.dims(), 2), device);
    let gradients = (y.clone() * dy).sum().backward();
    let mut results = vec![y.into_data(), x.grad(&gradients).expect("tracked").into_data()];
    results.extend(operands.vectors.iter().map(|v| v.grad(&gradients).expect("tracked").into_data()));
    results.extend(operands.kernels.iter().map(|k| k.grad(&gradients).expect("tracked").into_data()));
    results
}

/// Tracked operands, so that their gradients are compared, too.
pub struct Operands {
    device: Device,
    vectors: Vec<Tensor<1>>,
    kernels: Vec<Tensor<4>>,
}

impl Operands {
    fn vector(&mut self, len: usize) -> Tensor<1> {
        let vector = tensor::<1>(values([len], 3 + self.vectors.len()), &self.device).require_grad();
        self.vectors.push(vector.clone());
        vector
    }
    fn kernel(&mut self, shape: [usize; 4]) -> Tensor<4> {
        let kernel = tensor::<4>(values(shape, 11 + self.kernels.len()), &self.device).require_grad();
        self.kernels.push(kernel.clone());
        kernel
    }
    /// With factors `[sizes[0], sizes[1]]` and `[sizes[1], sizes[2]]`.
    fn adapter(&mut self, sizes: [usize; 3], tracked: [bool; 2]) -> LoraAdapter {
        let mut factor = |number: usize| {
            let shape = [sizes[number], sizes[number + 1]];
            let tensor = match tracked[number] {
                true => self.kernel([1, 1, shape[0], shape[1]]).reshape(shape),
                false => tensor::<2>(values(shape, 7), &self.device),
            };
            Param::initialized(ParamId::new(), tensor)
        };
        LoraAdapter { a: factor(0), b: factor(1), scale: 1.5 }
    }
}

/// In 8 bits, as the device takes them.
fn quantized(weight: Tensor<2>) -> Tensor<2> {
    let scheme = weight.device().settings().quantization.scheme.with_value(QuantValue::Q8S);
    let range = compute_range(&scheme, &weight, &Calibration::MinMax);
    weight.quantize(&scheme, compute_q_params(&scheme, range))
}

/// How a test makes an autodiff device.
type Strategy = fn(Device) -> Device;

pub fn check<const D: usize, const O: usize>(
    name: &str,
    shape: [usize; D],
    f: impl Fn(Tensor<D>, &mut Operands) -> Tensor<O>,
) {
    check_with(EXACT, Device::autodiff, name, shape, f);
}

pub fn check_products<const D: usize, const O: usize>(
    name: &str,
    shape: [usize; D],
    f: impl Fn(Tensor<D>, &mut Operands) -> Tensor<O>,
) {
    check_with(of_products(), Device::autodiff, name, shape, f);
}

fn check_with<const D: usize, const O: usize>(
    tolerance: f32,
    autodiff: Strategy,
    name: &str,
    shape: [usize; D],
    f: impl Fn(Tensor<D>, &mut Operands) -> Tensor<O>,
) {
    let _shared = among_others();
    let [wgpu, flex] = [gpu(), Device::flex()].map(|device| run(&autodiff(device), shape, &f));
    for (which, (wgpu, flex)) in wgpu.iter().zip(&flex).enumerate() {
        assert_within(tolerance, 1e-6, &format!("{name}: result {which}"), wgpu, flex);
    }
}

#[test]
fn bilinear_operations_equal_flex() {
    check("approx_gelu", [7, 33], |x: Tensor<2>, _| F::approx_gelu(x * 5));
    check("approx_silu", [7, 33], |x: Tensor<2>, _| F::approx_silu(x * 9));
    check_products("linear", [2, 3, 6], |x: Tensor<3>, operands| {
        let weight = operands.kernel([1, 1, 6, 5]).reshape([6, 5]);
        F::linear(x, weight, Some(operands.vector(5)))
    });
    let adapter = |operands: &mut Operands| operands.adapter([8, 2, 16], [true; 2]);
    check_products("linear with an adapter", [2, 3, 8], |x: Tensor<3>, operands| {
        let base = tensor::<2>(values([8, 16], 5), &x.device());
        F::linear_lora(x, base, &adapter(operands), Some(operands.vector(16)))
    });
    check_products("linear with an adapter and magnitudes", [2, 3, 8], |x: Tensor<3>, operands| {
        let base = tensor::<2>(values([8, 16], 5), &x.device());
        let magnitude = Param::initialized(ParamId::new(), operands.vector(16));
        let adapter = DoraAdapter { lora: adapter(operands), magnitude };
        F::linear_dora(x, base, &adapter, Some(operands.vector(16)))
    });
    check_products("linear with an adapter on a quantized base", [2, 3, 8], |x: Tensor<3>, operands| {
        let base = quantized(tensor::<2>(values([8, 16], 5), &x.device()));
        F::linear_lora(x, base, &adapter(operands), Some(operands.vector(16)))
    });
    let options = ConvOptions::new([2], [1], [1], 2);
    check_products("conv1d", [2, 4, 9], |x: Tensor<3>, operands| {
        let weight = operands.kernel([1, 4, 2, 3]).reshape([4, 2, 3]);
        F::conv1d(x, weight, Some(operands.vector(4)), options.clone())
    });
    for padding in [[(1, 1), (1, 1)], [(0, 1), (2, 1)]] {
        let options = ConvOptions::new_with_padding([1, 2], padding, [1, 1], 1);
        check_products("conv2d", [2, 3, 6, 7], |x: Tensor<4>, operands| {
            F::conv2d(x, operands.kernel([4, 3, 3, 3]), Some(operands.vector(4)), options.clone())
        });
    }
    check_products("conv3d", [1, 2, 4, 4, 4], |x: Tensor<5>, operands| {
        let weight = operands.kernel([3, 2, 4, 2]).reshape([3, 2, 2, 2, 2]);
        F::conv3d(x, weight, Some(operands.vector(3)), ConvOptions::new([1; 3], [0; 3], [1; 3], 1))
    });
    check_products("conv_transpose1d", [2, 3, 5], |x: Tensor<3>, operands| {
        let weight = operands.kernel([1, 3, 2, 3]).reshape([3, 2, 3]);
        let options = ConvTransposeOptions::new([2], [1], [1], [1], 1);
        F::conv_transpose1d(x, weight, Some(operands.vector(2)), options)
    });
    check_products("conv_transpose2d", [2, 3, 4, 4], |x: Tensor<4>, operands| {
        let options = ConvTransposeOptions::new([2, 2], [1, 1], [1, 1], [1, 1], 1);
        F::conv_transpose2d(x, operands.kernel([3, 2, 3, 3]), Some(operands.vector(2)), options)
    });
    check_products("conv_transpose3d", [1, 2, 3, 4, 3], |x: Tensor<5>, operands| {
        let weight = operands.kernel([2, 3, 4, 2]).reshape([2, 3, 2, 2, 2]);
        let options = ConvTransposeOptions::new([2; 3], [1; 3], [0; 3], [1; 3], 1);
        F::conv_transpose3d(x, weight, Some(operands.vector(3)), options)
    });
}

/// Of ranks with a kernel of their own, of which a cube has one row or several, and of one that has none; in vectors and not; also of
/// inputs whose rows are not in order.
#[test]
fn adapted_linear_layers_equal_flex() {
    for (rank, [rows, inputs, columns], is_quantized) in [
        (1, [3, 7, 5], false),
        (2, [2049, 9, 12], false),
        (3, [3, 40, 1100], false),
        (8, [1050, 130, 36], true),
        (17, [270, 66, 35], false),
        (32, [60, 40, 36], false),
        (33, [60, 40, 36], true),
    ] {
        let factors = |operands: &mut Operands, tracked| operands.adapter([inputs, rank, columns], tracked);
        let base = |device: &Device| {
            let base = tensor::<2>(values([inputs, columns], 5), device);
            match is_quantized {
                true => quantized(base),
                false => base,
            }
        };
        for (number, tracked) in
            [[true, true], [true, false], [false, true], [false, false]].into_iter().enumerate()
        {
            let has_bias = (number + rank) % 2 == 0;
            let case = format!("rank {rank}, tracked {tracked:?}, bias: {has_bias}");
            let shape = [inputs, rows / 3, 3];
            check_products(&format!("linear with an adapter, {case}"), shape, |x: Tensor<3>, operands| {
                let (adapter, bias) =
                    (factors(operands, tracked), has_bias.then(|| operands.vector(columns)));
                F::linear_lora(x.swap_dims(0, 2), base(&operands.device), &adapter, bias)
            });
            check_products(&format!("with magnitudes, {case}"), shape, |x: Tensor<3>, operands| {
                let magnitude = Param::initialized(ParamId::new(), operands.vector(columns));
                let adapter = DoraAdapter { lora: factors(operands, tracked), magnitude };
                let bias = has_bias.then(|| operands.vector(columns));
                F::linear_dora(x.swap_dims(0, 2), base(&operands.device), &adapter, bias)
            });
        }
    }
}

/// With an effective weight that is made, and, where it is larger than the input or only the second factor is tracked, with the
/// factors.
#[test]
fn adapted_convolutions_equal_flex() {
    const RANK: usize = 2;
    let factors = |operands: &mut Operands, [first, rest]: [usize; 2], tracked| {
        operands.adapter([first, RANK, rest], tracked)
    };
    for (groups, image) in [(1, [5, 6]), (2, [5, 6]), (1, [3, 2])] {
        for tracked in [[true, true], [true, false], [false, true], [false, false]] {
            let (shape, each) = ([2, 6, image[0], image[1]], 6 / groups);
            let case = format!("{groups} groups, {image:?}, tracked {tracked:?}");
            let frozen = |shape: [usize; 4], device: &Device| tensor::<4>(values(shape, 5), device);
            check_products(&format!("conv2d with an adapter, {case}"), shape, |x: Tensor<4>, operands| {
                let base = frozen([8, each, 3, 2], &x.device());
                let adapter = factors(operands, [8, each * 6], tracked);
                let options = ConvOptions::new([2, 1], [1, 1], [1, 2], groups);
                F::conv2d_lora(x, base, &adapter, Some(operands.vector(8)), options)
            });
            check_products(
                &format!("conv_transpose2d with an adapter, {case}"),
                shape,
                |x: Tensor<4>, operands| {
                    let base = frozen([6, 8 / groups, 3, 2], &x.device());
                    let adapter = factors(operands, [6, 8 / groups * 6], tracked);
                    let options = ConvTransposeOptions::new([2, 1], [1, 0], [1, 0], [1, 2], groups);
                    F::conv_transpose2d_lora(x, base, &adapter, Some(operands.vector(8)), options)
                },
            );
        }
    }
    check_products("conv1d with an adapter, all tracked", [2, 4, 19], |x: Tensor<3>, operands| {
        let base = operands.kernel([1, 6, 4, 3]).reshape([6, 4, 3]);
        let adapter = factors(operands, [6, 12], [true, true]);
        F::conv1d_lora(x, base, &adapter, None, ConvOptions::new([1], [1], [1], 1))
    });
    check_products("conv2d with an adapter on a quantized base", [2, 6, 5, 6], |x: Tensor<4>, operands| {
        let base = tensor::<4>(values([8, 6, 1, 4], 5), &x.device());
        let scheme = x.device().settings().quantization.scheme.with_value(QuantValue::Q8S);
        let range = compute_range(&scheme, &base, &Calibration::MinMax);
        let base = base.quantize(&scheme, compute_q_params(&scheme, range));
        let adapter = factors(operands, [8, 24], [true, true]);
        F::conv2d_lora(x, base, &adapter, None, ConvOptions::new([1, 1], [1, 1], [1, 1], 1))
    });
}

/// Offsets and mask are constant: Burn 0.22.1 itself computes other gradients for them on wgpu than on Flex.
#[test]
fn deformable_convolution_equals_flex() {
    for with_mask in [false, true] {
        check_products(
            &format!("deform_conv2d, mask {with_mask}"),
            [1, 2, 5, 5],
            |x: Tensor<4>, operands| {
                let offset = tensor::<4>(values([1, 8, 4, 4], 30), &x.device()) * 0.3;
                let weight = operands.kernel([2, 2, 2, 2]);
                let mask = with_mask.then(|| tensor(values([1, 4, 4, 4], 31), &x.device()));
                let options = DeformConvOptions::new([1, 1], [0, 0], [1, 1], 1, 1);
                F::deform_conv2d(x, offset, weight, mask, Some(operands.vector(2)), options)
            },
        );
    }
}

#[test]
fn activations_equal_flex() {
    let shape = [3, 5, 7]; // not a whole number of words
    check("relu", shape, |x: Tensor<3>, _| F::relu(x));
    check("leaky_relu", shape, |x: Tensor<3>, _| F::leaky_relu(x, 0.1));
    check("relu6", shape, |x: Tensor<3>, _| F::relu6(x * 10.0));
    check("hardtanh", shape, |x: Tensor<3>, _| F::hardtanh(x, -0.4, 0.6));
    check("hard_sigmoid", shape, |x: Tensor<3>, _| F::hard_sigmoid(x * 5.0, 0.2, 0.5));
    check("hard_shrink", shape, |x: Tensor<3>, _| F::hard_shrink(x, 0.5));
    check("soft_shrink", shape, |x: Tensor<3>, _| F::soft_shrink(x, 0.5));
    check("shrink", shape, |x: Tensor<3>, _| F::shrink(x, 0.5, 0.2));
    check("threshold", shape, |x: Tensor<3>, _| F::threshold(x, 0.3, 0.1));
    check("thresholded_relu", shape, |x: Tensor<3>, _| F::thresholded_relu(x, 0.3));
    check("rrelu, frozen", shape, |x: Tensor<3>, _| RReluConfig::new().init().freeze().forward(x));
    check("prelu", shape, |x: Tensor<3>, operands| F::prelu(x, operands.vector(5)));
    check("prelu, frozen", shape, |x: Tensor<3>, operands| {
        let alpha = operands.vector(1);
        F::prelu(x, alpha.clone().inner()) + alpha.unsqueeze::<3>()
    });
}

#[test]
fn smooth_activations_equal_flex() {
    for activation in smooth() {
        check(activation.name, [3, 4, 5], |x: Tensor<3>, _| activation.of_unit(x));
    }
    check("glu", [3, 4, 5], |x: Tensor<3>, _| F::glu(x, 1));
}

/// Burn's gradient of GELU on devices is that of the approximation by tanh; ours is that of GELU.
#[test]
fn the_gradient_of_gelu_is_exact() {
    let _shared = among_others();
    let gradient = |gelu: fn(Tensor<1>) -> Tensor<1>, device: Device, dtype| {
        let x = TensorData::new((-600..=600).map(|at| at as f32 / 100.0).collect::<Vec<_>>(), [1201]);
        let x = Tensor::<1>::from_data(x.convert_dtype(dtype), (&device.autodiff(), dtype)).require_grad();
        x.grad(&gelu(x.clone()).sum().backward()).expect("tracked").into_data().convert::<f64>()
    };
    let exact = gradient(F::gelu, Device::flex(), DType::F64);
    let error = |of: TensorData| {
        of.iter::<f64>().zip(exact.iter::<f64>()).map(|(of, exact)| (of - exact).abs()).fold(0.0, f64::max)
    };
    let ours = error(gradient(F::gelu, gpu(), DType::F32));
    let stock = error(gradient(activation::gelu, gpu(), DType::F32));
    assert!(ours < 2e-6 && stock > 2e-4, "ours is off by {ours}, Burn's by {stock}");
}

/// A target that is no class trains none: its loss and its gradients are no numbers, and those of other rows as they were.
#[test]
fn targets_that_are_no_classes_show() {
    let _shared = among_others();
    let device = gpu().autodiff();
    for (target, smoothing) in [(-1, None), (-100, Some(0.1)), (5, None), (i32::MAX, Some(0.1))] {
        let x = tensor::<2>(values([3, 5], 1), &device).require_grad();
        let targets = Tensor::<1, Int>::from_ints([1, target, 4], &device);
        let losses = F::cross_entropy(x.clone(), targets, None, smoothing);
        let finite = |data: TensorData| data.iter::<f32>().map(f32::is_finite).collect::<Vec<_>>();
        assert_eq!(finite(losses.to_data()), [true, false, true], "{target}");
        let dx = finite(x.grad(&losses.sum().backward()).expect("tracked").into_data());
        assert_eq!(dx, [[true; 5], [false; 5], [true; 5]].concat(), "{target}");
    }
}

#[test]
fn losses_equal_flex() {
    use burn_memsave::nn::loss::*;
    let classes = |x: &Tensor<2>| Tensor::<1, Int>::from_ints([1, 0, 4], &x.device());
    for smoothing in [None, Some(0.1)] {
        let config = CrossEntropyLossConfig::new().with_smoothing(smoothing).with_pad_tokens(Some(vec![0]));
        for config in [config.clone(), config.with_weights(Some(vec![1.0, 0.5, 2.0, 1.5, 0.7]))] {
            check("cross_entropy", [3, 5], |x: Tensor<2>, _| {
                let (loss, classes) = (config.init(&x.device()), classes(&x));
                loss.forward(x, classes)
            });
            // More rows than a cube has units, one for each, and rows of several units.
            for shape @ [rows, len] in [[300, 5], [3, 75]] {
                check("cross_entropy", shape, |x: Tensor<2>, _| {
                    let weights = (0..len).map(|class| 0.5 + class as f32 / len as f32).collect();
                    let config = match &config.weights {
                        Some(_) => config.clone().with_weights(Some(weights)),
                        None => config.clone(),
                    };
                    let classes = Tensor::<1, Int>::arange(0..rows as i64, &x.device()) % len as i64;
                    config.init(&x.device()).forward(x, classes)
                });
            }
            check("cross_entropy of probabilities", [3, 5], |x: Tensor<2>, _| {
                let (loss, classes) = (config.clone().with_logits(false).init(&x.device()), classes(&x));
                loss.forward(activation::sigmoid(x), classes)
            });
        }
    }
    let config = CrossEntropyLossConfig::new().with_pad_tokens(Some(vec![IGNORE_INDEX, 7]));
    check("cross_entropy with padding that is no class", [3, 5], |x: Tensor<2>, _| {
        let targets = Tensor::<1, Int>::from_ints([-100, 3, 7], &x.device());
        config.init(&x.device()).forward(x, targets)
    });
    for (smoothing, shift) in [None, Some(0.1)].into_iter().flat_map(|s| [(s, 1e8), (s, -1e8)]) {
        let config = CrossEntropyLossConfig::new().with_smoothing(smoothing);
        check("cross_entropy of large logits", [3, 5], |x: Tensor<2>, _| {
            let (loss, classes) = (config.init(&x.device()), classes(&x));
            loss.forward(x + shift, classes)
        });
    }
    for logits in [false, true] {
        check("binary_cross_entropy", [3, 5], |x: Tensor<2>, _| {
            let config = BinaryCrossEntropyLossConfig::new().with_logits(logits).with_smoothing(Some(0.1));
            let loss = config.init(&x.device());
            let labels =
                Tensor::<2, Int>::from_ints([[0, 1, 0, 1, 1], [1, 1, 0, 0, 1], [0, 0, 1, 0, 1]], &x.device());
            loss.forward(if logits { x } else { activation::sigmoid(x) }, labels)
        });
    }
    for frozen in [false, true] {
        check_products("linear and cross_entropy", [3, 6], |x: Tensor<2>, operands| {
            let (weight, bias) = (operands.kernel([1, 1, 6, 5]).reshape([6, 5]), operands.vector(5));
            let targets = classes(&x);
            let options = || F::LinearCrossEntropyOptions {
                smoothing: Some(0.1),
                chunk_bytes: Some(40),
                ..Default::default()
            };
            let trained =
                F::linear_cross_entropy(x.clone(), weight.clone(), Some(bias), targets.clone(), options());
            match frozen {
                true => {
                    trained
                        + F::linear_cross_entropy(
                            x,
                            Tensor::from_inner(weight.inner()),
                            None,
                            targets,
                            options(),
                        )
                }
                false => trained,
            }
        });
    }
    for beta in [0.0, 0.3, 1.0] {
        check_products("linear and divergence", [3, 6], |x: Tensor<2>, operands| {
            let (weight, bias) = (operands.kernel([1, 1, 6, 5]).reshape([6, 5]), operands.vector(5));
            let [of_teacher, head] = [([3, 4], 40), ([4, 5], 41)]
                .map(|(shape, seed)| tensor::<2>(values(shape, seed), &x.device()));
            let teacher = || F::Teacher { x: of_teacher.clone(), weight: head.clone(), bias: None };
            let options = || F::DistillationOptions {
                temperature: 1.5,
                hard_labels: Some(F::HardLabels { targets: classes(&x), weight: 0.5 }),
                chunk_bytes: Some(40),
                ..Default::default()
            };
            let loss = |x: Tensor<2>, weight: Tensor<2>, bias: Option<Tensor<1>>| match beta {
                0.0 => F::linear_kl_div(x, weight, bias, teacher(), F::KlDirection::Forward, options()),
                1.0 => F::linear_kl_div(x, weight, bias, teacher(), F::KlDirection::Reverse, options()),
                _ => F::linear_jsd(x, weight, bias, teacher(), beta, options()),
            };
            // Few rows with a tracked head, and a frozen one.
            let frozen = Tensor::from_inner(weight.clone().inner());
            loss(x.clone(), weight, Some(bias)) + loss(x.clone(), frozen, None)
        });
    }
    check_products("linear and log_prob", [3, 6], |x: Tensor<2>, operands| {
        let (weight, bias) = (operands.kernel([1, 1, 6, 5]).reshape([6, 5]), operands.vector(5));
        let mask = Tensor::<1, Bool>::from_bool([true, false, true], &x.device());
        let options = F::LinearLogProbOptions { mask: Some(mask), chunk_bytes: Some(40) };
        let targets = classes(&x);
        F::linear_log_prob(x, weight, Some(bias), targets, options)
    });
    check("mse", [3, 5], |x: Tensor<2>, _| MseLoss::new().forward(x.clone() * 2.0, x, Reduction::Mean));
    let huber = HuberLossConfig::new(0.3).init();
    check("huber", [3, 5], |x: Tensor<2>, _| huber.forward(x.clone() * 2.0, x, Reduction::Sum));
    for log_target in [false, true] {
        let divergence = KLDivLossConfig::new().with_log_target(log_target).init();
        check("kl_div", [3, 5], |x: Tensor<2>, _| {
            let targets = activation::sigmoid(x.clone());
            divergence.forward(x, targets, Reduction::BatchMean)
        });
    }
}

#[test]
fn softmaxes_equal_flex() {
    type Function = fn(Tensor<3>, usize) -> Tensor<3>;
    let functions: [(&str, Function); 4] = [
        ("softmax", F::softmax),
        ("log_softmax", F::log_softmax),
        ("softmin", F::softmin),
        ("quiet_softmax", F::quiet_softmax),
    ];
    for (name, f) in functions {
        for dim in [1, 2] {
            check(name, [2, 3, 5], |x: Tensor<3>, _| f(x * 3.0, dim));
        }
    }
}

#[test]
fn batch_norm_equals_flex() {
    // Where there are many channels, sums are of several examples, the last ones of fewer.
    for shape @ [_, channels, _] in [[4, 3, 5], [5, 600, 3], [5, 600, 4]] {
        check("batch_norm_train", shape, |x: Tensor<3>, operands| {
            F::batch_norm_train(x, operands.vector(channels), operands.vector(channels), 1e-5).output
        });
    }
    check("batch_norm_train, examples between channels", [600, 5, 4], |x: Tensor<3>, operands| {
        let x = x.swap_dims(0, 1);
        F::batch_norm_train(x, operands.vector(600), operands.vector(600), 1e-5).output.swap_dims(0, 1)
    });
    check("batch_norm, beta alone", [5, 600, 4], |x: Tensor<3>, operands| {
        let fixed = tensor::<1>(values([600], 20), &x.device()).abs() + 0.5;
        F::batch_norm(x, fixed.clone(), operands.vector(600), fixed.clone(), fixed, 1e-5)
    });
    check("batch_norm", [4, 3, 5], |x: Tensor<3>, operands| {
        let statistics = |seed| tensor::<1>(values([3], seed), &x.device()).abs() + 0.5;
        let (mean, variance) = (statistics(20), statistics(21));
        F::batch_norm(x, operands.vector(3), operands.vector(3), mean, variance, 1e-5)
    });
}

/// With and without a bias, also where the strategy of the device computes outputs again.
#[test]
fn convolutions_with_norm_and_relu_equal_flex() {
    for autodiff in [Device::autodiff as Strategy, |device| device.autodiff().gradient_checkpointing()] {
        for with_bias in [true, false] {
            check_with(
                of_products(),
                autodiff,
                "conv2d_norm_relu",
                [2, 4, 7, 6],
                |x: Tensor<4>, operands| {
                    let weight = operands.kernel([6, 2, 3, 2]);
                    let bias = with_bias.then(|| operands.vector(6));
                    let given = |seed| tensor::<1>(values([6], seed), &operands.device);
                    let (gamma, mean, variance) = (given(21), given(22), given(23).abs() + 0.5);
                    let norm =
                        F::GivenNorm { gamma, mean, variance, beta: operands.vector(6), epsilon: 1e-5 };
                    let options = ConvOptions::new([1, 2], [1, 0], [1, 1], 2);
                    F::conv2d_norm_relu(x, weight, bias, norm, options)
                },
            );
        }
    }
}

/// Rows of one unit each, also more of them than a cube has units; and rows of several units.
#[test]
fn normalizations_over_rows_equal_flex() {
    for (rows, len) in [(4, 6), (3, 5), (300, 6), (4, 75)] {
        check("layer_norm", [rows, 3, len], |x: Tensor<3>, operands| {
            F::layer_norm(x, operands.vector(len), Some(operands.vector(len)), 1e-5)
        });
        check("rms_norm", [rows, 3, len], |x: Tensor<3>, operands| {
            F::rms_norm(x, operands.vector(len), 1e-5)
        });
        check("group_norm", [rows, 4, len], |x: Tensor<3>, operands| {
            F::group_norm(x, Some(operands.vector(4)), Some(operands.vector(4)), 2, 1e-5)
        });
        check("instance_norm", [rows, 4, len], |x: Tensor<3>, _| F::group_norm(x, None, None, 4, 1e-5));
    }
    check("local_response_norm", [2, 5, 3], |x: Tensor<3>, _| F::local_response_norm(x, 4, 0.5, 0.75, 0.8));
}

#[test]
fn attention_equals_flex() {
    let heads = |x: &Tensor<4>| [0, 1, 2].map(|part| x.clone().slice_dim(1, 2 * part..2 * part + 2));
    for (softcap, is_causal) in [(None, false), (Some(2.0), true)] {
        let causal = AttentionModuleOptions { is_causal, ..Default::default() };
        let options = AttentionModuleOptions { scale: Some(0.7), softcap, ..causal };
        // Rows of one unit, more of them than a cube has units, and rows of several; products of small matrices, and others.
        for (batch, length) in [(2, 5), (40, 5), (1, 45), (1, 70)] {
            check_products("attention", [batch, 6, length, 3], |x: Tensor<4>, operands| {
                let [query, key, value] = heads(&x);
                let bias = operands.kernel([1, 2, length, length]);
                let hidden = Tensor::<1, Int>::arange(0..length as i64, &x.device()).equal_elem(2);
                let mask = hidden.reshape([1, 1, 1, length]);
                F::attention(query, key, value, Some(mask), Some(bias), options)
            });
        }
    }
    // Keys that are all hidden by a finite number, for rows of one unit and of several.
    for (hides, length) in [-1e4, -1e9, f32::MIN].into_iter().flat_map(|hides| [(hides, 5), (hides, 70)]) {
        check_products("attention, hidden", [1, 6, length, 3], |x: Tensor<4>, operands| {
            let [query, key, value] = heads(&x);
            let bias = operands.kernel([1, 2, length, length]);
            let hidden = Tensor::full([1, 1, length, length], hides, &x.device());
            let attended = |bias| {
                F::attention(query.clone(), key.clone(), value.clone(), None, Some(bias), Default::default())
            };
            attended(hidden.clone()) + attended(bias + hidden)
        });
    }
    let options = AttentionModuleOptions { is_causal: true, ..Default::default() };
    check_products("attention, grouped", [2, 10, 5, 3], |x: Tensor<4>, operands| {
        let heads = |first: usize, len: usize| x.clone().slice_dim(1, first..first + len);
        let bias = operands.kernel([2, 6, 1, 5]);
        F::attention(heads(0, 6), heads(6, 2), heads(8, 2), None, Some(bias), options)
    });
    // Only the values are tracked, by weights that are kept.
    for groups in [2, 6] {
        check_products("attention, values alone", [2, groups, 5, 3], |value: Tensor<4>, _| {
            let fixed = |heads, seed| tensor::<4>(values([2, heads, 5, 4], seed), &value.device());
            F::attention(fixed(6, 40), fixed(groups, 41), value, None, None, options)
        });
    }
    check("rotary encoding", [2, 3, 5, 4], |x: Tensor<4>, _| {
        let factors = tensor::<3>(values([5, 4, 2], 30), &x.device());
        F::rotary_encoding(x, factors)
    });
    check("rotary encoding of halves", [2, 3, 5, 6], |x: Tensor<4>, _| {
        let factors = tensor::<3>(values([5, 6, 2], 30), &x.device());
        F::rotary_encoding_halves(x, factors)
    });
}

/// Some queries of all heads; and with more weights than a chunk has, some batches, or some groups of heads of one.
#[test]
fn attention_in_chunks_equals_that_of_every_group() {
    const LENGTH: usize = 1500;
    let device = gpu().autodiff();
    let options = AttentionModuleOptions::default;
    let causal = AttentionModuleOptions { is_causal: true, ..options() };
    check_products("attention, causal, in parts", [2, 8, 200, 6], |x: Tensor<4>, operands| {
        let heads = |first: usize, len: usize| x.clone().slice_dim(1, first..first + len);
        let bias = operands.kernel([1, 4, 1, 200]);
        let unbiased = F::attention(heads(0, 4), heads(4, 2), heads(6, 2), None, None, causal);
        unbiased + F::attention(heads(0, 4), heads(4, 2), heads(6, 2), None, Some(bias), causal)
    });
    let _shared = among_others();
    for ([batch, heads, groups], [width, value_width]) in [([3, 4, 2], [8, 12]), ([1, 8, 4], [6, 5])] {
        let of_group = heads / groups;
        let input = |heads, width, seed| tensor::<4>(values([batch, heads, LENGTH, width], seed), &device);
        let inputs = [input(heads, width, 1), input(groups, width, 2), input(groups, value_width, 3)];
        let dy = input(heads, value_width, 4);
        let run = |inputs: [Tensor<4>; 3], dy: Tensor<4>| {
            let inputs = inputs.map(Tensor::require_grad);
            let [query, key, value] = inputs.clone();
            let y = F::attention(query, key, value, None, None, options());
            let gradients = (y.clone() * dy).sum().backward();
            let [dquery, dkey, dvalue] = inputs.map(|input| input.grad(&gradients).expect("tracked"));
            [y.inner(), dquery, dkey, dvalue]
        };
        let of_all = run(inputs.clone(), dy.clone());
        for (at, group) in (0..batch).flat_map(|at| (0..groups).map(move |group| (at, group))) {
            let of_heads = group * of_group..(group + 1) * of_group;
            let part = |x: &Tensor<4>| {
                let heads = if x.dims()[1] == heads { of_heads.clone() } else { group..group + 1 };
                x.clone().slice([at..at + 1, heads])
            };
            let of_part = run(inputs.each_ref().map(|input| part(&input.clone().detach())), part(&dy));
            for (what, (all, of_part)) in
                ["y", "dquery", "dkey", "dvalue"].iter().zip(of_all.iter().zip(of_part))
            {
                let case = format!("{what} of batch {at}, group {group} of {groups}");
                assert_products_close(&case, &part(all).into_data(), &of_part.into_data());
            }
        }
    }
}

#[test]
fn recurrent_layers_equal_flex() {
    fn gate(operands: &mut Operands) -> GateController {
        let mut dense = |d_input| {
            let weight = operands.kernel([1, 1, d_input, 5]).reshape([d_input, 5]);
            Linear {
                weight: Param::initialized(ParamId::new(), weight),
                bias: Some(Param::initialized(ParamId::new(), operands.vector(5))),
            }
        };
        GateController { input_transform: dense(4), hidden_transform: dense(5) }
    }
    for clip in [None, Some(0.3)] {
        check_products("rnn", [3, 6, 4], |x: Tensor<3>, operands| {
            let mut rnn = RnnConfig::new(4, 5, true).with_clip(clip).init(&x.device());
            rnn.gate = gate(operands);
            rnn.forward(x, None).0
        });
        for reset_after in [false, true] {
            check_products("gru", [3, 6, 4], |x: Tensor<3>, operands| {
                let config = GruConfig::new(4, 5, true).with_reset_after(reset_after).with_clip(clip);
                let mut gru = config.init(&x.device());
                gru.reset_gate = gate(operands);
                gru.update_gate = gate(operands);
                gru.new_gate = gate(operands);
                gru.forward(x, None)
            });
        }
        check_products("lstm", [3, 6, 4], |x: Tensor<3>, operands| {
            let mut lstm = LstmConfig::new(4, 5, true).with_clip(clip).init(&x.device());
            lstm.input_gate = gate(operands);
            lstm.output_gate = gate(operands);
            lstm.cell_gate = gate(operands);
            lstm.forget_gate = Some(gate(operands));
            lstm.forward(x, None).0
        });
    }
}

#[test]
fn pools_equal_flex() {
    let options = MaxPoolOptions::new([3, 2]).with_stride([2, 2]).with_padding([1, 1]);
    check("max_pool2d", [2, 3, 7, 8], |x: Tensor<4>, _| F::max_pool2d(x, options.clone()));
    let options = MaxPoolOptions::new([2, 3]).with_stride([2, 1]).with_padding_pairs([(0, 1), (1, 0)]);
    check("max_pool2d, asymmetric", [2, 3, 6, 5], |x: Tensor<4>, _| F::max_pool2d(x, options.clone()));
    let options = MaxPoolOptions::new([3, 2]).with_dilation([1, 3]);
    check("max_pool2d, dilated", [2, 3, 7, 8], |x: Tensor<4>, _| F::max_pool2d(x, options.clone()));
    let options = MaxPoolOptions::new([3, 2]).with_stride([2, 3]).with_ceil_mode(true);
    check("max_pool2d, rounded up", [2, 3, 8, 9], |x: Tensor<4>, _| F::max_pool2d(x, options.clone()));
    check("max_pool1d", [2, 3, 9], |x: Tensor<3>, _| F::max_pool1d(x, MaxPoolOptions::new([3])));
    let options = AvgPoolOptions::new([2, 3]).with_stride([2, 2]).with_padding([1, 1]);
    check("avg_pool2d", [2, 3, 6, 7], |x: Tensor<4>, _| F::avg_pool2d(x, options.clone()));
    let options = options.with_padding_pairs([(1, 0), (0, 1)]).with_count_include_pad(false);
    check("avg_pool2d, asymmetric", [2, 3, 6, 7], |x: Tensor<4>, _| F::avg_pool2d(x, options.clone()));
    check("avg_pool1d", [2, 3, 9], |x: Tensor<3>, _| F::avg_pool1d(x, AvgPoolOptions::new([3])));
    check("adaptive_avg_pool1d", [2, 3, 9], |x: Tensor<3>, _| F::adaptive_avg_pool1d(x, 4));
    check("adaptive_avg_pool2d", [2, 3, 6, 7], |x: Tensor<4>, _| F::adaptive_avg_pool2d(x, [3, 2]));
    let volume = [1, 2, 4, 5, 6];
    check("adaptive_avg_pool3d", volume, |x: Tensor<5>, _| F::adaptive_avg_pool3d(x, [2, 3, 4]));
    let options = InterpolateOptions::new(InterpolateMode::Nearest).with_output_size([9, 4]);
    check("interpolate", [2, 3, 6, 7], |x: Tensor<4>, _| F::interpolate(x, options.clone()));
}

/// Few inputs with many outputs each, which the units of a cube gather.
#[test]
fn images_of_one_element_are_resized_as_on_flex() {
    for mode in [InterpolateMode::Nearest, InterpolateMode::Bilinear] {
        for (shape, size) in [
            ([2, 3, 1, 1], [64, 65]),
            ([1, 9, 1, 1], [130, 128]),
            ([1, 5, 2, 1], [40, 48]),
            ([1, 1, 3, 2], [50, 31]),
        ] {
            let options = InterpolateOptions::new(mode.clone()).with_output_size(size);
            check("interpolate", shape, |x: Tensor<4>, _| F::interpolate(x, options.clone()));
        }
    }
    // Windows of which every input has many.
    let options = AvgPoolOptions::new([16, 16]).with_stride([1, 1]).with_padding([8, 8]);
    check("avg_pool2d", [1, 2, 20, 24], |x: Tensor<4>, _| F::avg_pool2d(x, options.clone()));
    check("adaptive_avg_pool3d", [1, 3, 1, 2, 1], |x: Tensor<5>, _| F::adaptive_avg_pool3d(x, [7, 8, 9]));
}

/// Stock panics for these: CubeCL has gradients of the nearest modes only (cubek-interpolate 0.3.1).
#[test]
fn smooth_interpolations_equal_flex() {
    for mode in [InterpolateMode::Bilinear, InterpolateMode::Bicubic] {
        for align_corners in [false, true] {
            let options = InterpolateOptions::new(mode.clone()).with_align_corners(align_corners);
            for size in [[9, 4], [3, 15], [1, 1]] {
                let options = options.clone().with_output_size(size);
                check("interpolate", [2, 3, 6, 7], |x: Tensor<4>, _| F::interpolate(x, options.clone()));
            }
        }
    }
}

#[test]
fn gradient_checkpointing_equals_flex() {
    let checkpointing = |device: Device| device.autodiff().gradient_checkpointing();
    check_with(EXACT, checkpointing, "checkpointed", [2, 3, 6, 7], |x: Tensor<4>, operands| {
        let y = F::relu(x * operands.vector(1).unsqueeze::<4>());
        let y = F::conv2d(
            y.clone() * 2.0,
            operands.kernel([3, 3, 1, 1]),
            None,
            ConvOptions::new([1, 1], [0, 0], [1, 1], 1),
        ) + y;
        F::max_pool2d(F::prelu(y, operands.vector(3)), MaxPoolOptions::new([2, 2]))
    });
}

#[test]
fn embedding_equals_flex() {
    check("embedding", [1, 1, 2], |x: Tensor<3>, operands| {
        let table = operands.kernel([1, 1, 6, 2]).reshape([6, 2]);
        let indices = Tensor::<2, Int>::from_ints([[0, 5, 5], [1, 2, 0]], &x.device());
        F::embedding(table, indices) + x
    });
}

/// Where there are gaps between rows, as CUDA has them, and nobody else holds a tensor, its place is taken with its gaps: inputs
/// are such, and gradients of outputs.
#[test]
fn rows_with_gaps_are_replaced() {
    use burn_memsave::nn::loss::{HuberLossConfig, MseLoss};
    const GAP: usize = 64;
    fn gaps<const D: usize>(x: Tensor<D>) -> Tensor<D> {
        let mut shape = x.dims();
        let len = std::mem::replace(&mut shape[D - 1], GAP);
        let gap = Tensor::zeros(shape, &x.device());
        Tensor::cat(vec![x, gap], D - 1).slice_dim(D - 1, 0..len)
    }
    type Op = fn(Tensor<3>, &mut Operands) -> Tensor<3>;
    let ops: [(&str, Op); 21] = [
        ("relu", |x, _| F::relu(x)),
        ("hardtanh", |x, _| F::hardtanh(x, -0.5, 0.25)),
        ("rrelu", |x, _| RReluConfig::new().init().freeze().forward(x)),
        ("sigmoid", |x, _| F::sigmoid(x)),
        ("tanh", |x, _| F::tanh(x)),
        ("gelu", |x, _| F::gelu(x)),
        ("silu", |x, _| F::silu(x)),
        ("softplus", |x, _| F::softplus(x, 2.0)),
        ("silu_gate", |x, _| F::silu_gate(gaps(x.clone() * 0.5), gaps(x))),
        ("prelu", |x, operands| F::prelu(x, operands.vector(5))),
        ("prelu, frozen", |x, _| {
            let alpha = Tensor::from_floats([0.25], &x.device());
            F::prelu(x, alpha)
        }),
        ("softmax", |x, _| F::softmax(x, 2)),
        ("layer_norm", |x, operands| F::layer_norm(x, operands.vector(72), None, 1e-5)),
        ("rms_norm", |x, operands| F::rms_norm(x, operands.vector(72), 1e-5)),
        ("group_norm", |x, _| F::group_norm(x, None, None, 5, 1e-5)),
        ("batch_norm_train", |x, operands| {
            F::batch_norm_train(x, operands.vector(5), operands.vector(5), 1e-5).output
        }),
        ("batch_norm", |x, _| {
            let [gamma, mean, variance] = [0.5, 0.25, 1.5].map(|v| Tensor::full([5], v, &x.device()));
            F::batch_norm(x, gamma.clone(), gamma, mean, variance, 1e-5)
        }),
        ("rotary_encoding", |x, _| {
            let factors = tensor::<3>(values([5, 72, 2], 30), &x.device());
            F::rotary_encoding(x, factors)
        }),
        ("cross_entropy", |x, _| {
            let rows = gaps(x.clone().flatten::<2>(0, 1));
            let targets = Tensor::<1, Int>::arange(0..15, &x.device());
            F::cross_entropy(rows, targets, None, Some(0.1)).reshape([3, 5, 1])
        }),
        ("huber", |x, _| {
            HuberLossConfig::new(0.5).init().forward_no_reduction(gaps(x.clone() * 2.0), gaps(x))
        }),
        ("mse", |x, _| MseLoss::new().forward_no_reduction(gaps(x.clone() * 2.0), gaps(x))),
    ];
    for (name, op) in ops {
        check(&format!("{name}, gaps"), [3, 5, 72], |x: Tensor<3>, operands| gaps(op(gaps(x), operands)));
    }
}
