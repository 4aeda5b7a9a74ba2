//! Compares the fused head and cross entropy with their definition, with stock Burn and with the separate layers.
use crate::common::*;
use crate::loss::cross_entropy::{configs, defined, random_labels, weighted};
use crate::loss::labels;
use burn::module::Module;
use burn::nn::loss as stock;
use burn::tensor::{Bool, DType, Device, Distribution, Int, Tensor, TensorData, Tolerance, activation};
use burn_memsave::functional as F;
use burn_memsave::layers::MemSaveLinear;
use burn_memsave::nn::LinearConfig;
use burn_memsave::nn::loss as ours;
use proptest::prelude::*;

fn operands(rows: usize, d_input: usize, classes: usize, bias: bool) -> Vec<Input> {
    let mut inputs = vec![Input::random([rows, d_input]), Input::random([d_input, classes])];
    inputs.extend(bias.then(|| Input::random([classes])));
    inputs
}

fn logits(t: &Operands) -> Tensor<2> {
    let logits = t.get::<2>(0).matmul(t.get::<2>(1));
    match t.maybe::<1>(2) {
        Some(bias) => logits + bias.unsqueeze::<2>(),
        None => logits,
    }
}

fn ours(t: &Operands, config: &ours::CrossEntropyLossConfig, chunk_bytes: usize) -> Tensor<1> {
    capped(t, config, chunk_bytes, None)
}

/// With a softcap of the logits.
fn capped(
    t: &Operands,
    config: &ours::CrossEntropyLossConfig,
    chunk_bytes: usize,
    softcap: Option<f64>,
) -> Tensor<1> {
    let (x, weight) = (t.get::<2>(0), t.get::<2>(1));
    let ([rows, _], [_, classes]) = (x.dims(), weight.dims());
    let targets = labels([rows], classes, t.device());
    let class_weights: Option<Tensor<1>> = config.weights.clone().map(|weights| {
        tensor(weights.into_iter().map(f64::from).collect(), &[classes], t.device(), x.dtype())
    });
    let factors = class_weights.clone().map(|weights| {
        let weights = weights.gather(0, targets.clone());
        weights.ones_like() / weights.sum()
    });
    let options = F::LinearCrossEntropyOptions {
        factors,
        class_weights,
        smoothing: config.smoothing,
        softcap,
        chunk_bytes: Some(chunk_bytes),
    };
    F::linear_cross_entropy(x, weight, t.maybe(2), targets, options)
}

#[test]
fn equals_its_definition() {
    let shape = (1..9usize, 1..6usize, 1..20usize, any::<bool>());
    let chunk = prop::sample::select(vec![1usize, 100, 1 << 20]);
    for_all(
        96,
        (shape, configs(), chunk, settings()),
        |((rows, d_input, classes, bias), config, chunk, setting)| {
            let config = weighted(&config, classes).with_pad_tokens(None).with_logits(true);
            let tolerance = if setting.dtype == DType::F64 { 1e-7 } else { 5e-5 };
            let check = Check::new(operands(rows, d_input, classes, bias), setting).within(tolerance);
            check.compare::<1>(&|t| ours(t, &config, chunk), &|t| {
                let logits = logits(t);
                let targets = random_labels(&logits);
                defined(logits, &config, targets)
            });
        },
    );
}

/// Logits of up to 6 are on the flat parts of a softcap of 2.
#[test]
fn a_softcap_equals_its_definition() {
    let shape = (1..9usize, 1..6usize, 1..20usize, any::<bool>());
    let options = (prop::sample::select(vec![1usize, 100, 1 << 20]), prop::sample::select(vec![2.0, 30.0]));
    for_all(
        48,
        (shape, configs(), options, settings()),
        |((rows, d_input, classes, bias), config, (chunk, cap), setting)| {
            let config = weighted(&config, classes).with_pad_tokens(None).with_logits(true);
            let tolerance = if setting.dtype == DType::F64 { 1e-7 } else { 5e-5 };
            let check = Check::new(operands(rows, d_input, classes, bias), setting).within(tolerance);
            check.compare::<1>(&|t| capped(t, &config, chunk, Some(cap)), &|t| {
                let logits = (logits(t) / cap).tanh() * cap;
                let targets = random_labels(&logits);
                defined(logits, &config, targets)
            });
        },
    );
    let config = ours::CrossEntropyLossConfig::new().with_smoothing(Some(0.1));
    Check::new(operands(5, 3, 7, true), Setting::default())
        .differentiate::<1>(&|t| capped(t, &config, 100, Some(1.5)));
    // The square of a cap of 300 is beyond f16.
    for (dtype, cap) in HALF.into_iter().flat_map(|dtype| [(dtype, 2.0), (dtype, 300.0)]) {
        let check = Check::new(operands(7, 5, 11, false), Setting::of(dtype));
        check.compare::<1>(&|t| capped(t, &config, 100, Some(cap)), &|t| {
            let logits = (logits(t) / cap).tanh() * cap;
            let targets = random_labels(&logits);
            defined(logits, &config, targets)
        });
    }
}

#[test]
fn equals_stock_for_many_elements() {
    let config = ours::CrossEntropyLossConfig::new();
    for (rows, d_input, classes, chunk) in
        [(70, 30, 900, 1 << 14), (70, 30, 900, 1 << 24), (20, 30, 900, 1 << 14), (70, 64, 5000, 1 << 19)]
    {
        let check = Check::new(operands(rows, d_input, classes, true), Setting::default());
        let check = check.within(1e-5).on(Backend::Flex);
        check.compare::<1>(&|t| ours(t, &config, chunk), &|t| {
            let logits = logits(t);
            let targets = random_labels(&logits);
            stock::CrossEntropyLoss::new(None, t.device()).forward(logits, targets)
        });
    }
}

#[test]
fn equals_stock_in_half_precision() {
    let config = ours::CrossEntropyLossConfig::new();
    for dtype in HALF {
        let check = Check::new(operands(7, 5, 11, false), Setting::of(dtype));
        check.compare::<1>(&|t| ours(t, &config, 100), &|t| {
            let logits = logits(t);
            let targets = random_labels(&logits);
            stock::CrossEntropyLoss::new(None, t.device()).forward(logits, targets)
        });
    }
}

#[test]
fn is_differentiated() {
    let config = ours::CrossEntropyLossConfig::new().with_smoothing(Some(0.1));
    Check::new(operands(5, 3, 7, true), Setting::default()).differentiate::<1>(&|t| ours(t, &config, 100));
}

/// Loss and gradients of x, weight and bias, with the head trainable or frozen.
fn results(
    frozen: bool,
    device: &Device,
    f: impl Fn(&MemSaveLinear, Tensor<3>, Tensor<2, Int>) -> Tensor<1>,
) -> Vec<Option<Vec<f64>>> {
    let head = LinearConfig::new(4, 9).init(device);
    let values = |shape: &[usize], seed| uniform(shape.iter().product(), seed, -1.0..1.0);
    let weight =
        head.weight.map(|_| tensor::<2>(values(&[4, 9], 1), &[4, 9], device, DType::F32).require_grad());
    let bias = head
        .bias
        .map(|bias| bias.map(|_| tensor::<1>(values(&[9], 2), &[9], device, DType::F32).require_grad()));
    let head = MemSaveLinear { weight, bias };
    let head = if frozen { head.freeze() } else { head };
    let x = tensor::<3>(values(&[2, 5, 4], 3), &[2, 5, 4], device, DType::F32).require_grad();
    let loss = f(&head, x.clone(), labels([2, 5], 9, device));
    let gradients = loss.backward();
    let bias = head.bias.as_ref().expect("a bias").val();
    vec![
        Some(numbers(&loss.into_data())),
        x.grad(&gradients).map(|g| numbers(&g.into_data())),
        head.weight.val().grad(&gradients).map(|g| numbers(&g.into_data())),
        bias.grad(&gradients).map(|g| numbers(&g.into_data())),
    ]
}

#[test]
fn module_equals_its_parts() {
    let _generator = generator();
    let all = (0..9).collect();
    let weights = || uniform(9, 5, 0.5..2.0).into_iter().map(|w| w as f32).collect::<Vec<_>>();
    for pads in [None, Some(vec![0, 3]), Some(vec![]), Some(all)] {
        for (weights, smoothing) in [(None, None), (Some(weights()), None), (Some(weights()), Some(0.1))] {
            let parts = ours::CrossEntropyLossConfig::new()
                .with_pad_tokens(pads.clone())
                .with_weights(weights.clone())
                .with_smoothing(smoothing);
            let fused = ours::FusedLinearCrossEntropyConfig::new()
                .with_pad_tokens(pads.clone())
                .with_weights(weights.clone())
                .with_smoothing(smoothing)
                .with_chunk_bytes(Some(80));
            for (backend, frozen) in Backend::ALL.into_iter().flat_map(|b| [(b, false), (b, true)]) {
                let device = &backend.device().autodiff();
                let fused = results(frozen, device, |head, x, t| fused.init(device).forward(head, x, t));
                let parts = results(frozen, device, |head, x, t| {
                    let parts = stock::CrossEntropyLossConfig::from(parts.clone()).init(device);
                    parts.forward(head.forward(x).reshape([10, 9]), t.reshape([10]))
                });
                for (which, (fused, parts)) in fused.into_iter().zip(parts).enumerate() {
                    let what =
                        format!("{backend:?}, frozen {frozen}, {pads:?}, {smoothing:?}, result {which}");
                    assert_eq!(fused.is_some(), parts.is_some(), "{what}");
                    for (a, b) in fused.into_iter().flatten().zip(parts.into_iter().flatten()) {
                        assert!(
                            (a - b).abs() <= 1e-5 || a.is_nan() && b.is_nan(),
                            "{what}: {a} instead of {b}"
                        );
                    }
                }
            }
        }
    }
}

#[test]
fn refuses_targets_of_another_shape() {
    let _generator = generator();
    let device = Device::flex();
    let head = LinearConfig::new(4, 9).init(&device);
    let loss = ours::FusedLinearCrossEntropyConfig::new().init(&device);
    let run = |shape: [usize; 2]| {
        let x = Tensor::<3>::ones([2, 3, 4], &device);
        loss.forward(&head, x, Tensor::<2, Int>::zeros(shape, &device));
    };
    run([2, 3]);
    for shape in [[3, 2], [2, 4], [6, 1]] {
        assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| run(shape))).is_err(), "{shape:?}");
    }
}

/// Half precision: the errors against f64 are not above those of stock, as far as those of single elements are random.
mod half {
    use super::*;

    #[derive(Clone, Copy, Debug)]
    struct Case {
        rows: usize,
        d_input: usize,
        classes: usize,
        /// Of x, weight, bias.
        tracked: [bool; 3],
        /// Of all rows.
        factor: Option<f64>,
        /// What the loss is multiplied with.
        upstream: f64,
        smoothing: Option<f32>,
    }

    const MANY_CHUNKS: Case = Case {
        rows: 1000,
        d_input: 32,
        classes: 150,
        tracked: [true; 3],
        factor: None,
        upstream: 1.0,
        smoothing: None,
    };

    /// Loss and gradients, from values that are rounded to `rounded` first.
    fn results(
        case: Case,
        [rounded, dtype]: [DType; 2],
        loss: impl Fn(Tensor<2>, Tensor<2>, Tensor<1>, Tensor<1, Int>) -> Tensor<1>,
    ) -> Vec<Option<Vec<f64>>> {
        let Case { rows, d_input, classes, tracked, upstream, .. } = case;
        let device = &Device::flex().autodiff();
        let leaf = |shape: &[usize], index: usize| {
            let values = uniform(shape.iter().product(), index as u64, -1.0..1.0);
            numbers(&TensorData::new(values, shape.to_vec()).convert_dtype(rounded))
        };
        let [x, weight] = [(0, [rows, d_input]), (1, [d_input, classes])].map(|(index, shape)| {
            let leaf = tensor::<2>(leaf(&shape, index), &shape, device, dtype);
            if tracked[index] { leaf.require_grad() } else { leaf }
        });
        let bias = tensor::<1>(leaf(&[classes], 2), &[classes], device, dtype);
        let bias = if tracked[2] { bias.require_grad() } else { bias };
        let loss = loss(x.clone(), weight.clone(), bias.clone(), labels([rows], classes, device));
        let gradients = loss.clone().mul_scalar(upstream).backward();
        vec![
            Some(numbers(&loss.into_data())),
            x.grad(&gradients).map(|g| numbers(&g.into_data())),
            weight.grad(&gradients).map(|g| numbers(&g.into_data())),
            bias.grad(&gradients).map(|g| numbers(&g.into_data())),
        ]
    }

    fn by_parts(case: Case) -> impl Fn(Tensor<2>, Tensor<2>, Tensor<1>, Tensor<1, Int>) -> Tensor<1> {
        move |x, weight, bias, targets| {
            let rows = case.rows;
            let logs = activation::log_softmax(x.matmul(weight) + bias.unsqueeze::<2>(), 1);
            let alpha = case.smoothing.unwrap_or(0.0);
            let picked = logs.clone().gather(1, targets.reshape([rows, 1]));
            let losses = match case.smoothing {
                None => picked.neg(),
                Some(_) => (picked * (1.0 - alpha) + logs.mean_dim(1) * alpha).neg(),
            };
            match case.factor {
                None => losses.mean(),
                Some(factor) => losses.mul_scalar(factor).sum(),
            }
        }
    }

    fn fused(case: Case) -> impl Fn(Tensor<2>, Tensor<2>, Tensor<1>, Tensor<1, Int>) -> Tensor<1> {
        move |x, weight, bias, targets| {
            let factors =
                case.factor.map(|factor| Tensor::full([case.rows], factor, (&x.device(), DType::F32)));
            let options = F::LinearCrossEntropyOptions {
                factors,
                smoothing: case.smoothing,
                chunk_bytes: Some(1000),
                ..Default::default()
            };
            F::linear_cross_entropy(x, weight, Some(bias), targets, options)
        }
    }

    /// The root mean square of the errors, and of the values.
    fn error(result: &[f64], truth: &[f64]) -> [f64; 2] {
        let mean_square = |values: &mut dyn Iterator<Item = f64>| {
            (values.map(|value| value * value).sum::<f64>() / truth.len() as f64).sqrt()
        };
        let errors = &mut result.iter().zip(truth).map(|(a, b)| a - b);
        [mean_square(errors), mean_square(&mut truth.iter().copied())]
    }

    fn is_not_worse_than_stock(case: Case, dtype: DType) {
        let truth = results(case, [dtype, DType::F64], by_parts(case));
        let stock = results(case, [dtype; 2], by_parts(case));
        let ours = results(case, [dtype; 2], fused(case));
        for (which, ((ours, stock), truth)) in ours.into_iter().zip(stock).zip(truth).enumerate() {
            assert_eq!(ours.is_some(), truth.is_some());
            let (Some(ours), Some(stock), Some(truth)) = (ours, stock, truth) else { continue };
            let ([ours, scale], [stock, _]) = (error(&ours, &truth), error(&stock, &truth));
            assert!(
                (which == 0 || ours <= 1.05 * stock) && ours <= 1e-2 * scale,
                "{case:?}, {dtype:?}, {which}: {ours:e}, stock {stock:e}, of {scale:e}"
            );
        }
    }

    #[test]
    fn sums_of_many_chunks_are_not_worse_than_stock() {
        for dtype in HALF {
            for tracked in [[true; 3], [false, true, false], [false, false, true], [true, false, false]] {
                is_not_worse_than_stock(Case { tracked, ..MANY_CHUNKS }, dtype);
            }
            let few_rows = Case { rows: 60, d_input: 128, ..MANY_CHUNKS };
            is_not_worse_than_stock(few_rows, dtype);
            is_not_worse_than_stock(Case { smoothing: Some(0.1), ..MANY_CHUNKS }, dtype);
        }
    }

    /// Gradients that f16 cannot hold until a scaled loss brings them into its range.
    #[test]
    fn a_scaled_loss_brings_small_gradients_back() {
        for (rows, d_input) in [(200, 40), (40, 200)] {
            for tracked in [[true; 3], [true, false, false], [false, false, true]] {
                for smoothing in [None, Some(0.1)] {
                    let small = Case { rows, d_input, tracked, smoothing, ..MANY_CHUNKS };
                    let small = Case { factor: Some(2f64.powi(-20)), upstream: 2f64.powi(15), ..small };
                    // Stock, which scales by 2^-5 at once.
                    let large = Case { factor: Some(2f64.powi(-5)), upstream: 1.0, ..small };
                    let truth = results(large, [DType::F16, DType::F64], by_parts(large));
                    let stock = results(large, [DType::F16; 2], by_parts(large));
                    let ours = results(small, [DType::F16; 2], fused(small));
                    for ((ours, stock), truth) in ours.into_iter().zip(stock).zip(truth).skip(1) {
                        assert_eq!(ours.is_some(), truth.is_some());
                        let (Some(ours), Some(stock), Some(truth)) = (ours, stock, truth) else { continue };
                        let ([ours, scale], [stock, _]) = (error(&ours, &truth), error(&stock, &truth));
                        assert!(
                            ours <= 1.05 * stock && ours <= 4e-3 * scale,
                            "{small:?}: {ours:e}, stock {stock:e}, of {scale:e}"
                        );
                    }
                }
            }
        }
    }

    /// Weights, factors and weights of classes as large as f16 takes them: what is scaled does not overflow.
    #[test]
    fn large_values_do_not_overflow() {
        let device = &Device::flex().autodiff();
        let make = |values: &[f64], shape: &[usize]| {
            tensor::<2>(values.to_vec(), shape, device, DType::F16).require_grad()
        };
        for (rows, weight_tracked) in [(2, true), (2, false), (1, true)] {
            let x = make(&[1e-4, -1e-4, 2e-4, 0.0][..2 * rows], &[rows, 2]);
            let weight = tensor::<2>(vec![3e4, -3e4, -2e4, 3e4], &[2, 2], device, DType::F16);
            let weight = if weight_tracked { weight.require_grad() } else { weight };
            let row = |value: f64, len| tensor::<1>(vec![value; len], &[len], device, DType::F32);
            let options = F::LinearCrossEntropyOptions {
                factors: Some(row(1e-2, rows)),
                class_weights: Some(row(100.0, 2)),
                chunk_bytes: Some(1),
                ..Default::default()
            };
            let targets = Tensor::<1, Int>::zeros([rows], device);
            let loss = F::linear_cross_entropy(x.clone(), weight.clone(), None, targets.clone(), options);
            let dx = x.grad(&loss.backward()).expect("tracked").into_data();
            let wide = |t: &Tensor<2>| {
                let values = numbers(&t.to_data());
                tensor::<2>(values, &t.dims(), device, DType::F64).require_grad()
            };
            let (x, weight) = (wide(&x), wide(&weight));
            let logs = activation::log_softmax(x.clone().matmul(weight), 1);
            let loss = logs.gather(1, targets.reshape([rows, 1])).sum().neg();
            let truth = x.grad(&loss.backward()).expect("tracked").into_data();
            for (ours, truth) in numbers(&dx).into_iter().zip(numbers(&truth)) {
                assert!((ours - truth).abs() <= 4e-3 * 6e4, "{ours} instead of {truth}");
            }
        }
    }

    #[test]
    fn small_contributions_do_not_vanish() {
        let device = &Device::flex().autodiff();
        for dtype in [DType::BF16, DType::F16, DType::F32] {
            let x = Tensor::<2>::ones([2048, 1], (device, dtype));
            let weight = Tensor::<2>::zeros([1, 2], (device, dtype)).require_grad();
            let bias = Tensor::<1>::zeros([2], (device, dtype)).require_grad();
            let targets = Tensor::<1, Int>::zeros([2048], device);
            let options = F::LinearCrossEntropyOptions { chunk_bytes: Some(4), ..Default::default() };
            let loss = F::linear_cross_entropy(x, weight.clone(), Some(bias.clone()), targets, options);
            let gradients = loss.backward();
            for gradient in [weight.grad(&gradients).map(|g| g.reshape([2])), bias.grad(&gradients)] {
                assert_eq!(numbers(&gradient.expect("tracked").into_data()), [-0.5, 0.5], "{dtype:?}");
            }
        }
    }

    /// 4096 rows with a scale of 1024: 1024 / 3200 for every class but that of the targets.
    #[test]
    fn many_classes_and_rows_have_gradients() {
        let device = &Device::flex().autodiff();
        let (rows, classes) = (4096, 3200);
        let x = Tensor::<2>::ones([rows, 2], (device, DType::F16));
        let weight = Tensor::<2>::zeros([2, classes], (device, DType::F16)).require_grad();
        let loss = F::linear_cross_entropy(
            x,
            weight.clone(),
            None,
            Tensor::<1, Int>::zeros([rows], device),
            Default::default(),
        );
        let gradient = weight.grad(&loss.mul_scalar(1024).backward()).expect("tracked").into_data();
        for (_, gradient) in numbers(&gradient).into_iter().enumerate().filter(|(at, _)| at % classes > 0) {
            assert!((gradient / 0.32 - 1.0).abs() < 2e-3, "{gradient} instead of 0.32");
        }
    }
}

/// Padding whose own loss is infinite, and whose rows of x hold anything, changes nothing.
#[test]
fn padding_is_not_read() {
    let _generator = generator();
    let (rows, d_input, classes) = (6, 3, 5);
    for (backend, few_rows) in Backend::ALL.into_iter().flat_map(|b| [(b, false), (b, true)]) {
        let device = &backend.device().autodiff();
        let d_input = if few_rows { 2 * rows } else { d_input };
        let targets = Tensor::<1, Int>::from_data([0i64, 2, 0, 4, 1, 0], device);
        let padding = targets.clone().equal_scalar(0);
        let run = |head_is_frozen: bool, garbage: f32, fused: bool| {
            let random = |shape: [usize; 2], seed| {
                tensor::<2>(uniform(shape[0] * shape[1], seed, -1.0..1.0), &shape, device, DType::F32)
            };
            let head = LinearConfig::new(d_input, classes).init(device);
            let weight = head.weight.map(|_| random([d_input, classes], 1).require_grad());
            let bias = head.bias.map(|bias| {
                bias.map(|_| {
                    Tensor::<1>::from_data([f32::NEG_INFINITY, 0.1, 0.2, 0.3, 0.4], device).require_grad()
                })
            });
            let head = MemSaveLinear { weight, bias };
            let head = if head_is_frozen { head.freeze() } else { head };
            let mask: Tensor<2, Bool> = padding.clone().unsqueeze_dim::<2>(1).expand([rows, d_input]);
            let x = random([rows, d_input], 3).mask_fill(mask, garbage).require_grad();
            let loss = match fused {
                true => {
                    let config = ours::FusedLinearCrossEntropyConfig::new();
                    let config = config.with_pad_tokens(Some(vec![0])).with_chunk_bytes(Some(40));
                    config.init(device).forward(&head, x.clone(), targets.clone())
                }
                false => {
                    let loss =
                        stock::CrossEntropyLossConfig::new().with_pad_tokens(Some(vec![0])).init(device);
                    loss.forward(head.forward(x.clone()), targets.clone())
                }
            };
            let gradients = loss.backward();
            let bias = head.bias.as_ref().expect("a bias").val();
            [
                Some(loss.into_data()),
                x.grad(&gradients).map(Tensor::into_data),
                head.weight.val().grad(&gradients).map(Tensor::into_data),
                bias.grad(&gradients).map(Tensor::into_data),
            ]
        };
        for head_is_frozen in [false, true] {
            let stock = run(head_is_frozen, 0.0, false);
            for garbage in [0.0, f32::NAN, f32::INFINITY] {
                for (which, (ours, stock)) in
                    run(head_is_frozen, garbage, true).into_iter().zip(stock.clone()).enumerate()
                {
                    assert_eq!(ours.is_some(), stock.is_some());
                    let (Some(ours), Some(stock)) = (ours, stock) else { continue };
                    for (ours, stock) in numbers(&ours).into_iter().zip(numbers(&stock)) {
                        assert!(
                            (ours - stock).abs() < 1e-5,
                            "{backend:?}, {garbage}, frozen {head_is_frozen}, {which}: {ours} instead of {stock}"
                        );
                    }
                }
            }
        }
    }
}

/// Only the bias is quantized: head and loss run one after the other.
#[test]
fn takes_a_quantized_bias() {
    let _generator = generator();
    for backend in Backend::ALL {
        let device = &backend.device().autodiff();
        let mut head = LinearConfig::new(3, 32).init(device);
        let scheme = device.settings().quantization.scheme;
        head.bias = head.bias.map(|bias| bias.no_grad().map(|bias| bias.quantize_dynamic(&scheme)));
        let x = Tensor::<2>::ones([4, 3], device).require_grad();
        let targets = Tensor::<1, Int>::zeros([4], device);
        let parts = ours::CrossEntropyLossConfig::new().init(device);
        let expected = parts.forward(head.forward(x.clone()), targets.clone());
        let fused = ours::FusedLinearCrossEntropyConfig::new().init(device).forward(&head, x, targets);
        assert_eq!(fused.into_data(), expected.into_data(), "{backend:?}");
    }
}

/// Padding that is no class, and a target that is none in a row of factor 0: those of the loss without its rows.
#[test]
fn padding_may_be_no_class() {
    let _generator = generator();
    for device in Backend::ALL.map(|backend| backend.device().autodiff()) {
        let head = LinearConfig::new(4, 5).init(&device);
        let x = Tensor::<2>::random([6, 4], Distribution::Default, &device);
        let run = |rows: &[i64], loss: &dyn Fn(Tensor<2>, Tensor<1, Int>) -> Tensor<1>| {
            let labels = [-100i64, 2, 7, 0, 4, -100];
            let x = x.clone().select(0, Tensor::from_data(rows, &device)).require_grad();
            let labels: Vec<i64> = rows.iter().map(|&row| labels[row as usize]).collect();
            let y = loss(x.clone(), Tensor::from_data(&labels[..], &device));
            let gradients = y.backward();
            let weight = head.weight.val().grad(&gradients).expect("tracked");
            (y.into_data(), weight.into_data(), x.grad(&gradients).expect("tracked"))
        };
        for weights in [None, Some(vec![1.0, 2.0, 3.0, 4.0, 5.0])] {
            let config = ours::FusedLinearCrossEntropyConfig::new().with_weights(weights.clone());
            let padded = config.clone().with_pad_tokens(Some(vec![7, ours::IGNORE_INDEX])).init(&device);
            let plain = config.init(&device);
            let all = run(&[0, 1, 2, 3, 4, 5], &|x, labels| padded.forward(&head, x, labels));
            let rest = run(&[1, 3, 4], &|x, labels| plain.forward(&head, x, labels));
            let mut found = vec![all];
            if weights.is_none() {
                found.push(run(&[0, 1, 2, 3, 4, 5], &|x, labels| {
                    let factors = [0.0f32, 1.0, 0.0, 1.0, 1.0, 0.0].map(|factor| factor / 3.0);
                    let factors = Some(Tensor::from_data(factors, &x.device()));
                    let options = F::LinearCrossEntropyOptions { factors, ..Default::default() };
                    let bias = head.bias.as_ref().map(|bias| bias.val());
                    F::linear_cross_entropy(x, head.weight.val(), bias, labels, options)
                }));
            }
            for (loss, weight, dx) in found {
                let close = |a: TensorData, b: &TensorData| {
                    a.assert_approx_eq::<f32>(b, Tolerance::absolute(1e-6));
                };
                close(loss, &rest.0);
                close(weight, &rest.1);
                let rows = |rows: [i64; 3]| dx.clone().select(0, Tensor::from_data(rows, &device));
                close(rows([1, 3, 4]).into_data(), &rest.2.to_data());
                close(rows([0, 2, 5]).into_data(), &Tensor::<2>::zeros([3, 4], &device).into_data());
            }
        }
    }
}
