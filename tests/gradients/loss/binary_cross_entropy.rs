//! Compares binary cross entropy with stock Burn, and with exact values for extreme probabilities and logits.
use super::*;

fn compare<const D: usize>(check: Check, config: &ours::BinaryCrossEntropyLossConfig) {
    let scores = |t: &Operands| {
        let x = t.get::<D>(0);
        if config.logits { x } else { activation::sigmoid(x) }
    };
    check.compare::<1>(
        &|t| {
            let (x, loss) = (scores(t), config.init(t.device()));
            let targets = labels(x.dims(), 2, t.device());
            loss.forward(x, targets)
        },
        &|t| {
            let x = scores(t);
            let loss = stock::BinaryCrossEntropyLossConfig::from(config.clone()).init(t.device());
            let targets = labels(x.dims(), 2, t.device());
            loss.forward(x, targets)
        },
    );
}

/// In f32: stock does not compute in another type.
#[test]
fn equals_stock() {
    let smoothing = prop::option::of(prop::sample::select(vec![0.0f32, 0.1, 1.0]));
    let options = (any::<bool>(), smoothing, any::<bool>());
    for_all(128, (1..7usize, 1..20usize, options, settings()), |(rows, classes, options, setting)| {
        let (weighted, smoothing, logits) = options;
        let setting = Setting { dtype: DType::F32, ..setting };
        let config = |weights: usize| {
            let weights = uniform(weights, 3, 0.5..2.0).into_iter().map(|weight| weight as f32).collect();
            ours::BinaryCrossEntropyLossConfig::new()
                .with_weights(weighted.then_some(weights))
                .with_smoothing(smoothing)
                .with_logits(logits)
        };
        let check = |input| Check::new([input], setting).within(1e-5);
        compare::<2>(check(Input::between([rows, classes], -4.0..4.0)), &config(classes));
        compare::<1>(check(Input::between([rows], -4.0..4.0)), &config(2));
        compare::<3>(check(Input::between([2, rows, classes], -4.0..4.0)), &config(classes));
    });
}

#[test]
fn is_differentiated() {
    for logits in [true, false] {
        let config = ours::BinaryCrossEntropyLossConfig::new().with_logits(logits).with_smoothing(Some(0.1));
        let check = Check::new([Input::between([3, 4], -2.0..2.0)], Setting::default());
        // The differences are of untracked runs, where it is stock that computes, in f32 only.
        check.differentiate::<1>(&|t| {
            let x = t.get::<2>(0);
            let x = if logits { x } else { activation::sigmoid(x) };
            let targets = labels(x.dims(), 2, t.device());
            if x.is_tracked() {
                return config.init(t.device()).forward(x, targets);
            }
            let soft = targets.float().cast(x.dtype()) * 0.9f32 + 0.1f32 / 4.0;
            let p = if logits { activation::sigmoid(x) } else { x };
            ((soft.clone() - 1.0) * (-p.clone()).log1p() - soft * p.log()).mean()
        });
    }
}

/// Where stock's gradient is NaN.
#[test]
fn certain_probabilities_have_a_gradient() {
    for backend in Backend::ALL {
        let device = backend.device().autodiff();
        let loss = ours::BinaryCrossEntropyLossConfig::new().init(&device);
        let x = Tensor::<1>::from_data([0.0f32, 1.0, 0.0, 1.0], &device).require_grad();
        let y = loss.forward(x.clone(), Tensor::from_data([0i64, 1, 1, 0], &device));
        let gradient = x.grad(&y.clone().backward()).expect("tracked");
        y.into_data().assert_eq(&[50.0f32].into(), true);
        gradient.into_data().assert_eq(&[0.25f32, -0.25, 0.0, 0.0].into(), true);
    }
}

#[test]
fn odd_arguments_are_treated_as_stock_treats_them() {
    for (shape, labelled, weights) in [([3, 4], [3, 3], 4), ([3, 4], [3, 4], 3), ([0, 4], [0, 4], 4)] {
        let check = Check::new([Input::random(shape)], Setting::default());
        let config = ours::BinaryCrossEntropyLossConfig::new().with_weights(Some(vec![1.0; weights]));
        let stock = stock::BinaryCrossEntropyLossConfig::from(config.clone());
        check.compare_panics::<1>(
            &|t| config.init(t.device()).forward(t.get::<2>(0), labels(labelled, 2, t.device())),
            &|t| stock.init(t.device()).forward(t.get::<2>(0), labels(labelled, 2, t.device())),
        );
    }
}

/// f16: what the upstream gradient and the mean bring into its range is there.
mod half {
    use super::*;

    /// The gradient of every element, for targets that are all `target`, is that of `exact`, scaled by `upstream`; with weights of
    /// the classes, which are 1, too.
    fn check(logits: bool, x: &[f64], target: i64, upstream: f64, exact: impl Fn(f64) -> f64) {
        let device = Device::flex().autodiff();
        let len = x.len();
        for weights in [None, Some(vec![1.0f32; len])] {
            let leaf = tensor::<2>(x.to_vec(), &[1, len], &device, DType::F16).require_grad();
            let loss = ours::BinaryCrossEntropyLossConfig::new().with_logits(logits).with_weights(weights);
            let loss = loss.init(&device).forward(leaf.clone(), Tensor::full([1, len], target, &device));
            let gradient = leaf.grad(&loss.mul_scalar(upstream).backward()).expect("tracked").into_data();
            for (&x, ours) in x.iter().zip(numbers(&gradient)) {
                let exact = exact(x) * upstream / len as f64;
                assert!((ours - exact).abs() <= exact.abs() / 1000.0 + 1e-7, "{x}: {ours}, not {exact}");
            }
        }
    }

    /// Slopes of up to 2^24, of a mean of 4096.
    #[test]
    fn small_probabilities_have_finite_gradients() {
        let x: Vec<f64> = (0..4096).map(|at| 2f64.powi(-(at % 25)).min(0.75)).collect();
        check(false, &x, 1, 1.0, |x| -x.recip());
    }

    /// Slopes down to 2^-28, scaled by 2^15.
    #[test]
    fn certain_logits_have_gradients() {
        let x: Vec<f64> = (0..17).map(|at| -f64::from(at)).collect();
        check(true, &x, 0, 32768.0, |x| ((-x).exp() + 1.0).recip());
    }
}
