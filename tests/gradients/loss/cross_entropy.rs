//! Compares cross entropy with stock Burn and with its definition in f64.
use super::*;
use burn::tensor::{Distribution, TensorData, Tolerance};
use burn_memsave::functional as F;

pub fn configs() -> impl Strategy<Value = ours::CrossEntropyLossConfig> {
    let pads = prop::option::of(prop::collection::vec(0..4usize, 0..3));
    let smoothing = prop::option::of(prop::sample::select(vec![0.0f32, 0.1, 1.0]));
    (pads, any::<bool>(), smoothing, any::<bool>()).prop_map(|(pads, weighted, smoothing, logits)| {
        ours::CrossEntropyLossConfig::new()
            .with_pad_tokens(pads)
            .with_weights(weighted.then(Vec::new))
            .with_smoothing(smoothing)
            .with_logits(logits)
    })
}

/// As many weights as classes, if there shall be any.
pub fn weighted(config: &ours::CrossEntropyLossConfig, classes: usize) -> ours::CrossEntropyLossConfig {
    let weights = |_| uniform(classes, 3, 0.5..2.0).into_iter().map(|weight| weight as f32).collect();
    config.clone().with_weights(config.weights.clone().map(weights))
}

/// Logits, or their probabilities.
fn scores(logits: Tensor<2>, config: &ours::CrossEntropyLossConfig) -> Tensor<2> {
    if config.logits { logits } else { activation::softmax(logits, 1) }
}

fn compare(
    check: Check,
    config: &ours::CrossEntropyLossConfig,
    target: impl Fn(&Tensor<2>) -> Tensor<1, Int>,
) {
    check.compare_panics::<1>(
        &|t| {
            let (x, loss) = (scores(t.get(0), config), config.init(t.device()));
            let target = target(&x);
            loss.forward(x, target)
        },
        &|t| {
            let x = scores(t.get(0), config);
            let loss = stock::CrossEntropyLossConfig::from(config.clone()).init(t.device());
            let target = target(&x);
            loss.forward(x, target)
        },
    );
}

pub fn random_labels(x: &Tensor<2>) -> Tensor<1, Int> {
    let [rows, classes] = x.dims();
    labels([rows], classes, &x.device())
}

/// Kernels take rows of fewer than 64 classes together, and so many rows in several parts.
#[test]
fn many_rows_equal_stock() {
    let plain = ours::CrossEntropyLossConfig::new();
    let smoothed =
        plain.clone().with_smoothing(Some(0.1)).with_weights(Some(vec![])).with_pad_tokens(Some(vec![0]));
    for classes in [2, 3, 8, 63, 64, 65] {
        for config in [&plain, &smoothed] {
            let check =
                Check::new([Input::between([3001, classes], -4.0..4.0)], Setting::default()).within(1e-5);
            compare(check, &weighted(config, classes), random_labels);
        }
    }
}

/// In f32: stock makes weights and smoothed targets in f32, and does not compute with them in another type.
#[test]
fn equals_stock() {
    for_all(192, (1..7usize, 1..40usize, configs(), settings()), |(rows, classes, config, setting)| {
        let config = weighted(&config, classes);
        let mixed = config.weights.is_some() || config.smoothing.is_some();
        let setting = if mixed { Setting { dtype: DType::F32, ..setting } } else { setting };
        let check = Check::new([Input::between([rows, classes], -4.0..4.0)], setting).within(1e-5);
        let check = if setting.dtype == DType::F64 { check.within(1e-10) } else { check };
        compare(check, &config, random_labels);
    });
}

/// The definition, by Burn's operations.
pub fn defined(x: Tensor<2>, config: &ours::CrossEntropyLossConfig, targets: Tensor<1, Int>) -> Tensor<1> {
    let [rows, classes] = x.dims();
    let make = |values, shape: &[usize]| tensor(values, shape, &x.device(), x.dtype());
    let logs = if config.logits { activation::log_softmax(x.clone(), 1) } else { x.clone().log() };
    let alpha = f64::from(config.smoothing.unwrap_or(0.0));
    let weights = config.weights.clone().unwrap_or(vec![1.0; classes]);
    let targets: Vec<usize> = targets.into_data().iter::<i64>().map(|target| target as usize).collect();
    let pads = config.pad_tokens.clone().unwrap_or_default();
    let counts = |target: &usize| if pads.contains(target) { 0.0 } else { f64::from(weights[*target]) };
    let total = targets.iter().map(counts).sum::<f64>();
    let mut q = Vec::new();
    for target in &targets {
        let counted = if pads.contains(target) { 0.0 } else { 1.0 / total };
        q.extend((0..classes).map(|class| {
            let hard = if class == *target { 1.0 - alpha } else { 0.0 };
            -counted * f64::from(weights[class]) * (hard + alpha / classes as f64)
        }));
    }
    (logs * make(q, &[rows, classes])).sum()
}

#[test]
fn equals_its_definition_in_f64() {
    for_all(64, (1..7usize, 1..20usize, configs(), any::<u64>()), |(rows, classes, config, seed)| {
        let config = weighted(&config, classes);
        let setting = Setting { dtype: DType::F64, seed, ..Setting::default() };
        let check = Check::new([Input::between([rows, classes], -4.0..4.0)], setting).within(1e-7);
        let targets = |x: &Tensor<2>| {
            let targets = random_labels(x);
            let pads = config.pad_tokens.clone().unwrap_or_default();
            let all_padded = targets.to_data().iter::<i64>().all(|t| pads.contains(&(t as usize)));
            (!all_padded).then_some(targets)
        };
        for device in Backend::ALL.map(Backend::device) {
            if targets(&Tensor::zeros([rows, classes], &device)).is_none() {
                return;
            }
        }
        // Without autodiff it is stock that computes.
        let ours = |t: &Operands| {
            let x = scores(t.get(0), &config);
            let targets = targets(&x).expect("not all padded");
            match x.is_tracked() {
                true => config.init(t.device()).forward(x, targets),
                false => defined(x, &config, targets),
            }
        };
        let truth = |t: &Operands| {
            let x = scores(t.get(0), &config);
            let targets = targets(&x).expect("not all padded");
            defined(x, &config, targets)
        };
        check.compare::<1>(&ours, &truth);
    });
}

#[test]
fn equals_stock_in_half_precision() {
    for dtype in HALF {
        let check = Check::new([Input::between([5, 19], -4.0..4.0)], Setting::of(dtype));
        compare(check, &ours::CrossEntropyLossConfig::new(), random_labels);
    }
}

#[test]
fn equals_stock_for_many_elements() {
    let check = || Check::new([Input::between([70, 5000], -4.0..4.0)], Setting::default()).on(Backend::Flex);
    let config = ours::CrossEntropyLossConfig::new();
    compare(check().within(1e-5), &config, random_labels);
    compare(
        check().within(1e-4),
        &weighted(&config.with_smoothing(Some(0.1)).with_weights(Some(vec![])), 5000),
        random_labels,
    );
}

#[test]
fn is_differentiated() {
    let check = Check::new([Input::between([4, 5], -2.0..2.0)], Setting::default());
    let weights = |x: &Tensor<2>| tensor::<1>(vec![1.0, 0.5, 2.0, 0.7, 1.5], &[5], &x.device(), x.dtype());
    for smoothing in [None, Some(0.2)] {
        check.differentiate::<1>(&|t| {
            let x = t.get::<2>(0);
            let (labels, weights) = (random_labels(&x), weights(&x));
            F::cross_entropy(x, labels, Some(weights), smoothing)
        });
    }
}

/// Logits that another layer reads, too, are not overwritten.
#[test]
fn shares_its_logits() {
    let check = Check::new([Input::between([4, 9], -2.0..2.0)], Setting::default()).within(1e-5);
    let twice = |t: &Operands, loss: &dyn Fn(Tensor<2>, Tensor<1, Int>) -> Tensor<1>| {
        let x = t.get::<2>(0) * 2.0;
        let labels = random_labels(&x);
        loss(x.clone(), labels.clone()) + loss(x.clone(), labels) + x.clone().mul(x).sum()
    };
    check.compare::<1>(
        &|t| twice(t, &|x, labels| ours::CrossEntropyLoss::new(None, &x.device()).forward(x, labels)),
        &|t| twice(t, &|x, labels| stock::CrossEntropyLoss::new(None, &x.device()).forward(x, labels)),
    );
}

#[test]
fn treats_odd_arguments_as_stock() {
    let plain = ours::CrossEntropyLossConfig::new();
    let check = |rows, classes| {
        Check::new([Input::between([rows, classes], -2.0..2.0)], Setting::default()).within(1e-5)
    };
    let given =
        |labels: &'static [i64]| move |x: &Tensor<2>| Tensor::<1, Int>::from_data(labels, &x.device());
    // Only padding; targets that are no class, also as padding; too few targets; nothing at all.
    let padded = plain.clone().with_pad_tokens(Some(vec![1]));
    compare(check(2, 3), &padded, given(&[1, 1]));
    for labels in [&[0i64, 3][..], &[0, -1], &[0, 1, 1]] {
        for smoothing in [None, Some(0.1)] {
            let config = plain.clone().with_smoothing(smoothing);
            compare(check(2, 3).on(Backend::Flex), &config, given(labels));
        }
    }
    compare(check(2, 3), &plain.clone().with_weights(Some(vec![1.0, 2.0, 3.0])), given(&[0, 2]));
    compare(check(2, 1), &plain, given(&[0, 0]));
}

fn assert_close(a: &TensorData, b: &TensorData) {
    a.assert_approx_eq::<f32>(b, Tolerance::absolute(1e-6));
}

/// Padding that is no class, as data sets have it; of the loss without its rows, the gradients of those are 0. (Stock refuses it.)
#[test]
fn padding_may_be_no_class() {
    let _generator = generator();
    let labels: [i64; 5] = [-100, 2, 7, 0, -100];
    let kept = [1i64, 3];
    let plain = ours::CrossEntropyLossConfig::new();
    let pads = Some(vec![ours::IGNORE_INDEX, 7]);
    let settings = [(None, None), (None, Some(0.1)), (Some(vec![1.0, 2.0, 3.0]), Some(0.1))];
    for (backend, (weights, smoothing)) in
        Backend::ALL.into_iter().flat_map(|backend| settings.clone().map(|setting| (backend, setting)))
    {
        for [logits, tracked] in [[true, true], [true, false], [false, true], [false, false]] {
            let device = if tracked { backend.device().autodiff() } else { backend.device() };
            let config = plain.clone().with_weights(weights.clone()).with_smoothing(smoothing);
            let config = config.with_logits(logits);
            let loss = config.clone().with_pad_tokens(pads.clone()).init(&device);
            let x = Tensor::<2>::random([5, 3], Distribution::Uniform(0.1, 0.9), &device);
            let rows = |x: Tensor<2>| x.select(0, Tensor::from_data(kept, &device));
            let rest = rows(x.clone()).set_require_grad(tracked);
            let x = x.set_require_grad(tracked);
            let y = loss.forward(x.clone(), Tensor::from_data(labels, &device));
            let targets = kept.map(|row| labels[row as usize]);
            let expected = config.init(&device).forward(rest.clone(), Tensor::from_data(targets, &device));
            assert_close(&y.to_data(), &expected.to_data());
            if tracked {
                let dx = x.grad(&y.backward()).expect("tracked");
                let expected = rest.grad(&expected.backward()).expect("tracked").into_data();
                assert_close(&rows(dx.clone()).into_data(), &expected);
                let padded = numbers(&dx.select(0, Tensor::from_data([0, 2, 4], &device)).into_data());
                assert!(padded.iter().all(|&dx| dx == 0.0), "{padded:?}");
            }
        }
    }
    // No padding of eight bits: 156 would be -100.
    let device = Device::flex().autodiff();
    let loss = plain.with_pad_tokens(Some(vec![ours::IGNORE_INDEX])).init(&device);
    let x = Tensor::<2>::ones([1, 200], &device).require_grad();
    let y = loss.forward(x, Tensor::<1, Int>::from_data([156], (&device, DType::U8)));
    assert!((numbers(&y.into_data())[0] - 200f64.ln()).abs() < 1e-5);
}

/// The weights of the classes of targets of eight bits, of which there are fewer than classes.
#[test]
fn classes_may_be_more_than_targets_can_name() {
    let device = Device::flex().autodiff();
    let weights = (0..300).map(|class| if class == 200 { 3.0 } else { 1.0 }).collect();
    let loss = ours::CrossEntropyLossConfig::new().with_weights(Some(weights)).init(&device);
    let x = Tensor::<2>::zeros([2, 300], &device);
    let x = x.slice_assign([1..2, 7..8], Tensor::full([1, 1], 2.0, &device)).require_grad();
    let y = loss.forward(x, Tensor::<1, Int>::from_data([200, 7], (&device, DType::U8)));
    let exact = (3.0 * 300f64.ln() + (299.0 + 2f64.exp()).ln() - 2.0) / 4.0;
    assert!((numbers(&y.to_data())[0] - exact).abs() < 1e-5, "{y}");
}

/// A padded row has an infinite loss, and the gradient 0.
#[test]
fn padding_of_infinite_loss_is_treated_as_stock_treats_it() {
    let inf = f64::INFINITY;
    let x = || Input::given([3, 3], [-inf, 0.5, 1.0, -inf, 1.0, 0.3, -inf, 2.0, 0.1]);
    for (weights, targets) in [(None, [0i64, 1, 2]), (Some(vec![1.0, 2.0, 3.0]), [0, 1, 0])] {
        let config = ours::CrossEntropyLossConfig::new().with_pad_tokens(Some(vec![0])).with_weights(weights);
        let check = Check::new([x()], Setting { reading: Reading::Sum, ..Setting::default() }).within(1e-5);
        compare(check, &config, |x| Tensor::<1, Int>::from_data(targets, &x.device()));
    }
}

/// The sum is more than f16 can hold.
#[test]
fn many_rows_of_half_precision_have_a_mean() {
    let device = Device::flex().autodiff();
    let (rows, classes) = (20_000, 64);
    let x = Tensor::<2>::zeros([rows, classes], (&device, DType::F16)).require_grad();
    let loss = ours::CrossEntropyLossConfig::new().with_pad_tokens(Some(vec![1])).init(&device);
    let loss = loss.forward(x.clone(), Tensor::<1, Int>::zeros([rows], &device));
    assert!((numbers(&loss.to_data())[0] - 64f64.ln()).abs() < 2e-3);
    let dx = numbers(&x.grad(&loss.mul_scalar(1024).backward()).expect("tracked").into_data());
    assert!((dx[1] / (1024.0 / 20_000.0 / 64.0) - 1.0).abs() < 2e-3, "{}", dx[1]);
}

/// By hand: of two equal logits the loss is the logarithm of 2, and the gradient a half, however large they are.
#[test]
fn large_logits_have_exact_losses_and_gradients() {
    for (backend, smoothing) in Backend::ALL.into_iter().flat_map(|b| [(b, None), (b, Some(0.5))]) {
        let device = backend.device().autodiff();
        for logit in [0f32, -1e4, 1e5, 1e8, -1e8, 1e30] {
            let loss = ours::CrossEntropyLossConfig::new().with_smoothing(smoothing).init(&device);
            let x = Tensor::<2>::full([3, 2], logit, &device).require_grad();
            let y = loss.forward(x.clone(), Tensor::<1, Int>::ones([3], &device));
            let found = numbers(&y.to_data())[0];
            assert!((found - 2f64.ln()).abs() < 1e-6, "{logit}: {found}");
            let dx = numbers(&x.grad(&y.backward()).expect("tracked").into_data());
            let smoothed = 0.5 * f64::from(smoothing.unwrap_or(0.0));
            let exact = [0.5 - smoothed, smoothed - 0.5].map(|dx| dx / 3.0).repeat(3);
            assert!(dx.iter().zip(&exact).all(|(dx, exact)| (dx - exact).abs() < 1e-6), "{logit}: {dx:?}");
        }
    }
}

/// Of a smoothing of 0 the other classes do not count, also where one is excluded: 0 times infinity in stock.
#[test]
fn a_smoothing_of_zero_is_none() {
    for device in Backend::ALL.map(|backend| backend.device().autodiff()) {
        let run = |smoothing| {
            let loss = ours::CrossEntropyLossConfig::new().with_smoothing(smoothing).init(&device);
            let x = Tensor::<2>::from_data([[0.5, f32::NEG_INFINITY, -1.0]], &device).require_grad();
            let y = loss.forward(x.clone(), Tensor::<1, Int>::zeros([1], &device));
            [y.to_data(), x.grad(&y.backward()).expect("tracked").into_data()]
        };
        let ([loss, dx], [loss_of_none, dx_of_none]) = (run(Some(0.0)), run(None));
        loss.assert_eq(&loss_of_none, true);
        dx.assert_eq(&dx_of_none, true);
        assert!(numbers(&dx).iter().all(|dx| dx.is_finite()), "{dx}");
    }
}

/// Whose gradient is NaN in stock.
#[test]
fn padding_may_hold_anything() {
    for (backend, smoothing) in Backend::ALL.into_iter().flat_map(|b| [(b, None), (b, Some(0.1))]) {
        let device = backend.device().autodiff();
        let config = ours::CrossEntropyLossConfig::new().with_pad_tokens(Some(vec![0]));
        let loss = config.with_smoothing(smoothing).init(&device);
        let gradient = |padded: f32| {
            let x = Tensor::<2>::from_data([[padded, 1.0], [2.0, 0.5]], &device).require_grad();
            let y = loss.forward(x.clone(), Tensor::<1, Int>::from_data([0i64, 1], &device));
            x.grad(&y.backward()).expect("tracked").into_data()
        };
        gradient(f32::NAN).assert_eq(&gradient(1.0), true);
        gradient(f32::INFINITY).assert_eq(&gradient(1.0), true);
    }
}

#[test]
fn masked_classes_are_treated_as_stock_treats_them() {
    let inf = f64::INFINITY;
    let x = || Input::given([2, 3], [0.5, -inf, 1.0, 2.0, 1.0, -inf]);
    for (smoothing, labels) in [(None, [0i64, 0]), (None, [1, 0]), (Some(0.1), [0, 0])] {
        let config = ours::CrossEntropyLossConfig::new().with_smoothing(smoothing);
        let check = Check::new([x()], Setting { reading: Reading::Sum, ..Setting::default() }).within(1e-5);
        compare(check, &config, |x| Tensor::<1, Int>::from_data(labels, &x.device()));
    }
}
