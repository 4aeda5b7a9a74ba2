//! Weights in half precision.
use super::*;
use burn_memsave::optim::{AdamW8bitConfig, Muon8bitConfig};

/// In the mean over seeds a weight is what it is in f32, and never further away than the next number on either side.
#[test]
fn the_mean_is_right() {
    let _alone = alone();
    const SEEDS: u64 = 2000;
    let device = device();
    for (dtype, bits) in [(FloatDType::BF16, 8), (FloatDType::F16, 11)] {
        let (value, gradient) = (random([300], &device).cast(dtype), random([300], &device).cast(dtype));
        // Some of them subnormal in f16.
        let value =
            value.clone() * Tensor::arange(0..300, &device).float().cast(dtype).div_scalar(-20.0).exp();
        let wide = |x: &Tensor<1>| x.clone().cast(FloatDType::F32);
        let after = |value: Tensor<1>, gradient: Tensor<1>, seed: u64| {
            let mut optimizer = AdamW8bitConfig::new().with_seed(seed).with_weight_decay(0.0).init();
            f64s(&step_with(&mut optimizer, parameter(value), gradient, 1e-4).val().into_data())
        };
        let exact = after(wide(&value), wide(&gradient), 0);
        let mut means = vec![0.0; 300];
        for seed in 0..SEEDS {
            let rounded = after(value.clone(), gradient.clone(), seed);
            for ((mean, x), exact) in means.iter_mut().zip(rounded).zip(&exact) {
                let gap = (exact.abs() * 2f64.powi(2 - bits)).max(2f64.powi(-24));
                assert!((x - exact).abs() <= gap, "{x}, {exact}");
                *mean += x / SEEDS as f64;
            }
        }
        for (mean, exact) in means.iter().zip(&exact) {
            let gap = exact.abs() * 2f64.powi(1 - bits) + if bits == 11 { 2f64.powi(-24) } else { 0.0 };
            // Six deviations of the mean.
            assert!(
                (mean - exact).abs() <= 6.0 * 0.5 * gap / (SEEDS as f64).sqrt() + 1e-9,
                "{mean}, {exact}"
            );
        }
    }
}

/// A weight that nothing changes stays what it is, whichever way others are rounded.
#[test]
fn weights_without_a_change_stay() {
    let _alone = alone();
    let device = device();
    // Subnormal numbers of f16, of both signs.
    let steps: Vec<f32> = (0..8192).map(|at| ((at % 2047) - 1023) as f32 / (1 << 24) as f32).collect();
    for dtype in [FloatDType::F16, FloatDType::BF16] {
        let value = Tensor::<1>::from_data(TensorData::new(steps.clone(), [8192]), &device).cast(dtype);
        for seed in 0..100 {
            let mut optimizer = AdamW8bitConfig::new().with_seed(seed).with_weight_decay(0.0).init();
            let after = step_with(&mut optimizer, parameter(value.clone()), value.zeros_like(), 1e-2);
            assert_eq!(after.val().into_data(), value.to_data());
        }
    }
}

/// Changes that are too small for the type are not lost.
#[test]
fn small_changes_add_up() {
    let _alone = alone();
    let device = device();
    let ones = || Tensor::<1>::ones([8192], &device).cast(FloatDType::BF16);
    let run = |is_random: bool| {
        let config = AdamW8bitConfig::new().with_weight_decay(0.0).with_stochastic_rounding(is_random);
        let (mut optimizer, mut ours) = (config.init(), parameter(ones()));
        for _ in 0..200 {
            ours = step_with(&mut optimizer, ours, ones(), 1e-4);
        }
        let data = ours.val().into_data();
        data.iter::<f64>().sum::<f64>() / 8192.0
    };
    assert_eq!(run(false), 1.0); // half of the distance to the next number is 2^-9
    assert!((run(true) - (1.0 - 200.0 * 1e-4)).abs() < 2e-4, "{}", run(true));
}

/// The same seed draws the same, another one something else; so with Muon.
#[test]
fn draws_depend_on_the_seed() {
    let _alone = alone();
    let device = device();
    let (value, gradient) = (random([64, 80], &device), random([64, 80], &device));
    let [value, gradient] = [value, gradient].map(|x| x.cast(FloatDType::BF16));
    let adamw = |seed| AdamW8bitConfig::new().with_seed(seed).init();
    let muon = |seed| Muon8bitConfig::new().with_seed(seed).init();
    let after = |mut optimizer: ModuleOptimizer| {
        step_with(&mut optimizer, parameter(value.clone()), gradient.clone(), 1e-4).val().into_data()
    };
    assert_eq!(after(adamw(3)), after(adamw(3)));
    assert_ne!(after(adamw(3)), after(adamw(4)));
    assert_eq!(after(muon(3)), after(muon(3)));
    assert_ne!(after(muon(3)), after(muon(4)));
}
