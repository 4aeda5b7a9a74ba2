//! Compares the losses of elements (mean squared error, Huber, Kullback-Leibler) with stock Burn.
use super::*;
use ours::Reduction;

const REDUCTIONS: [Reduction; 4] = [Reduction::Mean, Reduction::Sum, Reduction::BatchMean, Reduction::Auto];

/// Compares a loss with its twin, which is made by the same expression in another namespace: every reduction, and none.
macro_rules! compare {
    ($check:expr, |$t:ident, $nn:ident| $loss:expr, |$x:ident, $y:ident| $inputs:expr) => {{
        let check: Check = $check;
        macro_rules! run {
            ($namespace:ident, $reduction:expr) => {
                &|$t: &Operands| {
                    use super::$namespace as $nn;
                    let ($x, $y) = ($t.get::<2>(0), $t.get::<2>(1));
                    let (x, targets): (Tensor<2>, Tensor<2>) = $inputs;
                    match $reduction {
                        Some(reduction) => $loss.forward(x, targets, reduction).unsqueeze::<2>(),
                        None => $loss.forward_no_reduction(x, targets),
                    }
                }
            };
        }
        check.compare_panics::<2>(run!(ours, None::<Reduction>), run!(stock, None::<Reduction>));
        for reduction in REDUCTIONS {
            check.compare_panics::<2>(
                run!(ours, Some(reduction.clone())),
                run!(stock, Some(reduction.clone())),
            );
        }
    }};
}

fn two<const D: usize>(shape: [usize; D], setting: Setting) -> Check {
    let check = Check::new([Input::between(shape, -2.0..2.0), Input::between(shape, -2.0..2.0)], setting);
    match setting.dtype {
        DType::F64 => check.within(1e-10),
        DType::F32 => check.within(1e-5),
        _ => check,
    }
}

#[test]
fn mse_equals_stock() {
    for_all(32, ([1..7usize, 1..20], settings()), |(shape, setting)| {
        compare!(two(shape, setting), |t, nn| nn::MseLoss::new(), |x, y| (x, y));
    });
}

#[test]
fn huber_equals_stock() {
    for_all(32, ([1..7usize, 1..20], settings()), |(shape, setting)| {
        for delta in [0.0f32, 0.5, 10.0] {
            compare!(two(shape, setting), |t, nn| nn::HuberLossConfig::new(delta).init(), |x, y| (x, y));
        }
    });
}

#[test]
fn kl_div_equals_stock() {
    for_all(32, ([1..7usize, 1..20], settings()), |(shape, setting)| {
        // The gradient of stock's mean over the batch is divided in f32.
        let tolerance = if setting.dtype == DType::F64 { 1e-7 } else { 5e-5 };
        for log in [false, true] {
            compare!(
                two(shape, setting).within(tolerance),
                |t, nn| nn::KLDivLossConfig::new().with_log_target(log).init(),
                |x, y| (activation::log_softmax(x, 1), if log { y } else { activation::softmax(y, 1) })
            );
        }
    });
}

/// Of a target of 0 the logarithm is cut off.
#[test]
fn kl_div_treats_certain_targets_as_stock() {
    let inputs = [Input::random([2, 3]), Input::given([2, 3], [0.0, 1.0, 0.0, 0.5, 1.5, -0.1])];
    compare!(
        Check::new(inputs, Setting::default()).within(1e-5),
        |t, nn| nn::KLDivLossConfig::new().init(),
        |x, y| (x, y)
    );
}

#[test]
fn halves_equal_stock() {
    for dtype in HALF {
        let check = || two([3, 7], Setting::of(dtype));
        compare!(check(), |t, nn| nn::MseLoss::new(), |x, y| (x, y));
        compare!(check(), |t, nn| nn::HuberLossConfig::new(0.5).init(), |x, y| (x, y));
    }
}

#[test]
fn are_differentiated() {
    let check = two([3, 4], Setting::default());
    check.differentiate::<2>(&|t| ours::MseLoss::new().forward_no_reduction(t.get(0), t.get(1)));
    let huber = ours::HuberLossConfig::new(0.7).init();
    check.differentiate::<2>(&|t| huber.forward_no_reduction(t.get(0), t.get(1)));
    for log in [false, true] {
        let divergence = ours::KLDivLossConfig::new().with_log_target(log).init();
        check.differentiate::<2>(&|t| {
            let y = t.get::<2>(1);
            divergence.forward_no_reduction(t.get(0), if log { y } else { activation::sigmoid(y) })
        });
    }
}

#[test]
fn equals_stock_for_many_elements() {
    let check = || two([70, 500], Setting::of(DType::F64)).on(Backend::Flex);
    compare!(check(), |t, nn| nn::MseLoss::new(), |x, y| (x, y));
    compare!(check(), |t, nn| nn::KLDivLossConfig::new().init(), |x, y| (x, activation::softmax(y, 1)));
}

#[test]
fn one_tensor_may_be_both() {
    compare!(two([3, 4], Setting::default()), |t, nn| nn::MseLoss::new(), |x, y| (x.clone() * y, x));
    compare!(
        two([3, 4], Setting::default()),
        |t, nn| nn::KLDivLossConfig::new().with_log_target(true).init(),
        |x, y| (x.clone() * y, x)
    );
}

#[test]
fn shapes_broadcast_as_in_stock() {
    for shapes in [[[3, 4], [1, 4]], [[3, 1], [3, 4]], [[3, 4], [2, 4]], [[0, 4], [0, 4]], [[3, 4], [3, 0]]] {
        let check = || Check::new(shapes.map(Input::random), Setting::default()).within(1e-5);
        compare!(check(), |t, nn| nn::MseLoss::new(), |x, y| (x, y));
        compare!(check(), |t, nn| nn::HuberLossConfig::new(0.5).init(), |x, y| (x, y));
        compare!(check(), |t, nn| nn::KLDivLossConfig::new().with_log_target(true).init(), |x, y| (x, y));
    }
}
