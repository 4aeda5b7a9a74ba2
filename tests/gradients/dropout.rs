//! Tests dropout. Every test here draws random numbers, and holds the lock for that.
use crate::common::*;
use burn::nn::DropoutConfig;
use burn::tensor::{DType, Distribution, Tensor};
use burn_memsave::functional as F;
use proptest::prelude::*;

fn ours<const D: usize>(t: &Operands, prob: f64, seed: u64) -> Tensor<D> {
    t.device().seed(seed);
    F::dropout(t.get(0), prob)
}

/// `nn::Dropout` does nothing without autodiff; then, what it would do.
fn stock<const D: usize>(t: &Operands, prob: f64, seed: u64) -> Tensor<D> {
    let x = t.get(0);
    t.device().seed(seed);
    match t.device().is_autodiff() {
        true => DropoutConfig::new(prob).init().forward(x),
        false => {
            let kept = x.random_like(Distribution::Bernoulli(1.0 - prob));
            x * kept * (1.0 / (1.0 - prob))
        }
    }
}

#[test]
fn equals_stock_with_the_same_seed() {
    let _generator = generator();
    let rates = prop::sample::select(vec![0.0, 0.1, 0.25, 0.5, 0.9, 0.999]);
    for_all(96, ([1..4usize, 1..40, 1..40], rates, settings()), |(shape, prob, setting)| {
        let check = Check::new([Input::random(shape)], setting).same();
        check.compare::<3>(&|t| ours(t, prob, setting.seed), &|t| stock(t, prob, setting.seed));
    });
}

/// More than one thread draws, and more than one chunk is packed.
#[test]
fn equals_stock_for_many_elements() {
    let _generator = generator();
    for (dtype, prob, len) in [
        (DType::F32, 0.5, 16384),
        (DType::F32, 0.1, 16385),
        (DType::F64, 0.3, 70001),
        (DType::F32, 0.8, 200_003),
    ] {
        let check = Check::new([Input::random([len])], Setting::of(dtype)).same();
        check.compare::<1>(&|t| ours(t, prob, 11), &|t| stock(t, prob, 11));
        let check = Check::new([Input::random([len / 100, 4, 25])], Setting::of(dtype)).same();
        check.compare::<3>(&|t| ours(t, prob, 12), &|t| stock(t, prob, 12));
    }
}

#[test]
fn equals_stock_in_half_precision() {
    let _generator = generator();
    for dtype in HALF {
        let check = Check::new([Input::random([3, 50, 7])], Setting::of(dtype));
        check.compare::<3>(&|t| ours(t, 0.3, 5), &|t| stock(t, 0.3, 5));
    }
}

/// What is drawn afterwards is what would be drawn after stock's.
#[test]
fn draws_as_much_as_stock() {
    let _generator = generator();
    for shape in [[2, 3, 5], [1, 1, 1], [3, 80, 80]] {
        let check = Check::new([Input::random(shape)], Setting::default()).same();
        check.compare::<3>(&|t| ours(t, 0.4, 3) + F::dropout(t.get(0), 0.4), &|t| {
            stock(t, 0.4, 3)
                + t.get(0) * t.get::<3>(0).random_like(Distribution::Bernoulli(0.6)) * (1.0 / 0.6)
        });
    }
}

/// Of ones, the output and the gradient are the same tensor: 0 or `1 / (1 - prob)`.
#[test]
fn drops_the_same_elements_of_the_gradient() {
    let _generator = generator();
    for device in Backend::ALL.into_iter().flat_map(Backend::autodiff_devices) {
        for (prob, len) in [(0.5, 100), (0.2, 20_000)] {
            let x = Tensor::<1>::ones([len], &device).require_grad();
            let y = F::dropout(x.clone(), prob);
            let gradient = x.grad(&y.clone().sum().backward()).unwrap();
            let (y, gradient) = (numbers(&y.into_data()), numbers(&gradient.into_data()));
            assert_eq!(y, gradient);
            let dropped = y.iter().filter(|value| **value == 0.0).count() as f64 / len as f64;
            assert!((dropped - prob).abs() < 0.2, "{dropped} of {prob}");
            let kept = f64::from(1.0 / (1.0 - prob as f32));
            assert!(y.iter().all(|&value| value == 0.0 || (value - kept).abs() < 1e-6));
        }
    }
}

/// A dropped infinity is nothing in the output, where stock's product makes NaN of it; its gradient is 0.
#[test]
fn drops_infinity() {
    let _generator = generator();
    for device in Backend::ALL.into_iter().flat_map(Backend::autodiff_devices) {
        let x = Tensor::<1>::full([1000], f32::INFINITY, &device).require_grad();
        let y = F::dropout(x.clone(), 0.5);
        let gradient = x.grad(&y.clone().sum().backward()).unwrap();
        for (y, gradient) in numbers(&y.into_data()).into_iter().zip(numbers(&gradient.into_data())) {
            assert!((y, gradient) == (0.0, 0.0) || (y, gradient) == (f64::INFINITY, 2.0), "{y}, {gradient}");
        }
    }
}

#[test]
fn treats_empty_inputs_as_stock() {
    let _generator = generator();
    let check = Check::new([Input::random([2, 0, 3])], Setting::default());
    check.compare_panics::<3>(&|t| ours(t, 0.5, 1), &|t| stock(t, 0.5, 1));
}
