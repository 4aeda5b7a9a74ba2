//! Muon with a momentum of 8 bits.
use super::*;
use burn::optim::{AdjustLrFn, MuonConfig, decay::WeightDecayConfig, momentum::MomentumConfig};
use burn_memsave::optim::Muon8bitConfig;

const LR: f64 = 0.02;

fn configs() -> Vec<(MuonConfig, Muon8bitConfig)> {
    let plain = MomentumConfig { momentum: 0.9, dampening: 0.2, nesterov: false };
    let decay = || Some(WeightDecayConfig::new(0.1));
    vec![
        (MuonConfig::new(), Muon8bitConfig::new()),
        (
            MuonConfig::new()
                .with_momentum(plain.clone())
                .with_weight_decay(decay())
                .with_adjust_lr_fn(AdjustLrFn::MatchRmsAdamW),
            Muon8bitConfig::new()
                .with_momentum(plain)
                .with_weight_decay(decay())
                .with_adjust_lr_fn(AdjustLrFn::MatchRmsAdamW),
        ),
    ]
}

/// A momentum in f32 is Burn's.
#[test]
fn small_matrices_are_burns_muon() {
    let _alone = alone();
    let device = device();
    for (burn, ours) in configs() {
        for shape in [[20, 30], [30, 20]] {
            let (mut burn, mut optimizer) = (burn.init(), ours.init());
            let value = random(shape, &device);
            let [mut a, mut b] = [parameter(value.clone()), parameter(value)];
            for _ in 0..5 {
                let gradient = random(shape, &device);
                a = step_with(&mut burn, a, gradient.clone(), LR);
                b = step_with(&mut optimizer, b, gradient, LR);
                assert_near(&b.val().into_data(), &f64s(&a.val().into_data()), 1e-4, 1e-5);
            }
        }
    }
}

/// To codes and back: multiples of 1 / 127 of the largest in a block.
fn rounded(momentum: &mut [f64]) {
    for block in momentum.chunks_mut(256) {
        let scale = block.iter().fold(0.0, |scale: f64, x| scale.max(x.abs()));
        block.iter_mut().for_each(|x| *x = (*x / scale * 127.0).round() * scale / 127.0);
    }
}

/// What Burn computes of a gradient that brings its momentum to where it is rounded.
#[test]
fn large_matrices_are_burns_muon_in_codes() {
    let _alone = alone();
    let device = device();
    for shape in [[64, 65], [90, 60]] {
        let keep = 0.95;
        let (mut optimizer, mut ours) = (Muon8bitConfig::new().init(), parameter(random(shape, &device)));
        let mut momentum = vec![0.0; shape[0] * shape[1]];
        for _ in 0..4 {
            let gradient = random(shape, &device);
            let data = f64s(&gradient.to_data());
            momentum.iter_mut().zip(&data).for_each(|(momentum, g)| *momentum = keep * *momentum + g);
            // Without momentum, Burn makes the direction orthogonal that it is given.
            let direction: Vec<f32> =
                momentum.iter().zip(&data).map(|(m, g)| (keep * m + g) as f32).collect();
            let direction = Tensor::from_data(TensorData::new(direction, shape), &device);
            let none = MomentumConfig { momentum: 0.0, dampening: 0.0, nesterov: false };
            let mut burn = MuonConfig::new().with_momentum(none).init();
            let expected =
                step_with(&mut burn, parameter(ours.val().detach()), direction, LR).val().into_data();
            ours = step_with(&mut optimizer, ours, gradient, LR);
            // A momentum between two codes may be rounded the other way in f32.
            assert_near(&ours.val().into_data(), &f64s(&expected), 1e-3, 2e-4);
            rounded(&mut momentum);
        }
    }
}

#[test]
fn records_are_exact() {
    let _alone = alone();
    let device = device();
    for shape in [[20, 30], [90, 60]] {
        for dtype in [FloatDType::F32, FloatDType::BF16] {
            let mut optimizer = Muon8bitConfig::new().init();
            let draw = || random(shape, &device).cast(dtype);
            let mut ours = parameter(draw());
            for _ in 0..2 {
                ours = step_with(&mut optimizer, ours, draw(), LR);
            }
            let bytes = optimizer.into_bytes().expect("a record");
            let mut restored = Muon8bitConfig::new().init().from_bytes(bytes).expect("the same record");
            let gradient = draw();
            let other = step_with(&mut restored, ours.clone(), gradient.clone(), LR);
            let ours = step_with(&mut optimizer, ours, gradient, LR);
            assert_eq!(ours.val().into_data(), other.val().into_data());
        }
    }
}

/// From a record of Burn's, training goes on: exactly in f32, to within the codes in 8 bits, where a step anew is far off.
#[test]
fn records_of_burn_are_read() {
    let _alone = alone();
    let device = device();
    for (config, ours) in configs() {
        for (shape, bound) in [([20, 30], 1e-4), ([90, 60], 0.05)] {
            let mut burn = config.init();
            let mut weight = parameter(random(shape, &device));
            for _ in 0..5 {
                weight = step_with(&mut burn, weight, random(shape, &device), LR);
            }
            let record = burn.into_bytes().expect("a record");
            let (mut restored, mut anew) = (ours.init().from_bytes(record).expect("a record"), ours.init());
            let (gradient, before) = (random(shape, &device), weight.val());
            let [expected, ours, anew] = [&mut burn, &mut restored, &mut anew].map(|optimizer| {
                let stepped = step_with(optimizer, weight.clone(), gradient.clone(), LR).val();
                f64s(&(stepped - before.clone()).into_data())
            });
            let norm = |x: &mut dyn Iterator<Item = f64>| x.map(|x| x * x).sum::<f64>().sqrt();
            let error = |of: &[f64]| {
                let difference = norm(&mut of.iter().zip(&expected).map(|(of, expected)| of - expected));
                difference / norm(&mut expected.iter().copied())
            };
            assert!(error(&ours) < bound, "{shape:?}: {}", error(&ours));
            assert!(error(&anew) > 3.0 * bound, "{shape:?}: {}", error(&anew));
            let bytes = restored.into_bytes().expect("a record").len();
            assert!(shape == [20, 30] || bytes < 2 * 90 * 60, "in 8 bits after a step: {bytes} bytes");
        }
    }
}

#[test]
#[should_panic = "parameters are matrices"]
fn vectors_are_refused() {
    let _alone = alone();
    let device = device();
    step_with(&mut Muon8bitConfig::new().init(), parameter(random([5], &device)), random([5], &device), LR);
}

/// Of as many blocks.
#[test]
#[should_panic = "the state is that of a tensor that is not"]
fn a_state_of_another_shape_is_refused() {
    let _alone = alone();
    let device = device();
    let mut optimizer = Muon8bitConfig::new().init();
    let ours = step_with(&mut optimizer, parameter(random([70, 70], &device)), random([70, 70], &device), LR);
    let other = Param::initialized(ours.id, random::<2>([70, 71], &device).require_grad());
    step_with(&mut optimizer, other, random([70, 71], &device), LR);
}
