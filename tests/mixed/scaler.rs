//! Loss scaling.
use super::{Language, WORDS, compare, indices, values};
use crate::meter::alone;
use burn::module::Module;
use burn::optim::GradientsParams;
use burn::tensor::{DType, Device, FloatDType, Tensor};
use burn_memsave::mixed::{LossScaler, Precision};
use burn_memsave::nn::{Linear, LinearConfig};

fn linear(device: &Device) -> Linear {
    LinearConfig::new(3, 2).init(device)
}

/// Gradients of which one element is `value`.
fn gradients(model: &Linear, value: f32) -> GradientsParams {
    let device = model.weight.device().inner();
    let mut gradients = GradientsParams::new();
    gradients
        .register(model.weight.id, Tensor::<2>::from_floats([[1.0, 2.0], [3.0, value], [5.0, 6.0]], &device));
    gradients.register(model.bias.as_ref().unwrap().id, Tensor::<1>::from_floats([7.0, 8.0], &device));
    gradients
}

#[test]
fn bad_steps_are_skipped_and_lower_the_scale() {
    let _alone = alone();
    let model = linear(&Device::flex().autodiff());
    for bad in [f32::INFINITY, f32::NEG_INFINITY, f32::NAN] {
        let mut scaler = LossScaler::new().with_scale(8.0);
        assert!(scaler.unscale(&model, gradients(&model, bad)).is_none());
        assert_eq!((scaler.factor(), scaler.skipped()), (4.0, 1));
        let good = scaler.unscale(&model, gradients(&model, 4.0)).unwrap();
        good.get::<2>(model.weight.id)
            .unwrap()
            .into_data()
            .assert_eq(&[[0.25f32, 0.5], [0.75, 1.0], [1.25, 1.5]].into(), true);
        assert_eq!(good.len(), 2);
    }
    // The largest numbers are good: sums of them would be infinite.
    let mut scaler = LossScaler::new().with_scale(1.0);
    assert!(scaler.unscale(&model, gradients(&model, f32::MAX)).is_some());
    assert!(scaler.unscale(&model, GradientsParams::new()).is_some_and(|none| none.is_empty()));
}

#[test]
fn the_schedule_is_that_of_its_settings() {
    let _alone = alone();
    let model = linear(&Device::flex().autodiff());
    let mut scaler =
        LossScaler::new().with_scale(64.0).with_growth(3, 4.0).with_backoff(0.25).with_max_scale(512.0);
    let steps = [
        (true, 64.0),
        (true, 64.0),
        (true, 256.0),
        (true, 256.0),
        (false, 64.0), // begins to count anew
        (true, 64.0),
        (true, 64.0),
        (true, 256.0),
        (true, 256.0),
        (true, 256.0),
        (true, 512.0), // the largest
    ];
    for (step, (is_good, after)) in steps.into_iter().enumerate() {
        let value = if is_good { 1.0 } else { f32::NAN };
        assert_eq!(scaler.unscale(&model, gradients(&model, value)).is_some(), is_good);
        assert_eq!(scaler.factor(), after, "step {step}");
        // Written and read in between.
        scaler = serde_json::from_str(&serde_json::to_string(&scaler).unwrap()).unwrap();
    }
    assert_eq!(scaler.skipped(), 1);
    for _ in 0..40 {
        assert!(scaler.unscale(&model, gradients(&model, f32::NAN)).is_none());
    }
    assert_eq!(scaler.factor(), 1.0 / 32768.0); // no further
}

/// Without a scale they vanish in f16.
#[test]
fn small_gradients_are_saved() {
    let _alone = alone();
    let device = Device::flex().autodiff();
    let model = Language::new(&device);
    let precision = Precision::f16();
    const SMALL: f64 = 1e-7;
    let exact = model.loss(indices([4, 12], WORDS, &device)) * SMALL;
    let exact = GradientsParams::from_grads(exact.backward(), &model);
    let half = || {
        let half = precision.half_copy(&model).unwrap();
        half.loss(indices([4, 12], WORDS, &device)).cast(FloatDType::F32) * SMALL
    };
    let lost = GradientsParams::from_grads(half().backward(), &model);
    let lost = lost.get::<2>(model.head.weight.id).unwrap().abs().max().into_scalar::<f32>();
    assert_eq!(lost, 0.0);
    let mut scaler = LossScaler::new().with_scale(1e10);
    let found = GradientsParams::from_grads(scaler.scale(half()).backward(), &model);
    let found = scaler.unscale(&model, found).unwrap();
    compare(&model, &found, &exact, 4.0 / 1024.0);
}

/// The first steps of a scale that is too large are bad, and then it trains.
#[test]
fn a_scale_that_is_too_large_finds_its_place() {
    let _alone = alone();
    let device = Device::flex().autodiff();
    let (model, precision) = (linear(&device), Precision::f16());
    let mut scaler = LossScaler::new().with_scale(2f64.powi(20));
    let x = values([4, 3], 1, &device);
    let mut step = || {
        let half = precision.half_copy(&model).unwrap();
        let loss = half.forward(x.clone().cast(precision.dtype())).powf_scalar(2.0).mean();
        assert_eq!(loss.dtype(), DType::F16);
        let gradients = GradientsParams::from_grads(scaler.scale(loss).backward(), &model);
        (scaler.unscale(&model, gradients).is_some(), scaler.factor())
    };
    let bad = (0..20).take_while(|_| !step().0).count();
    assert_eq!(bad, 5, "2^15 is the largest in f16");
    assert_eq!(step(), (true, 32768.0));
}

#[test]
#[should_panic(expected = "1 gradients are of parameters that the module does not have")]
fn gradients_of_another_module_are_refused() {
    let _alone = alone();
    let device = Device::flex().autodiff();
    let model = linear(&device);
    let part = Linear { bias: None, ..model.clone() };
    LossScaler::new().unscale(&part, gradients(&model, 1.0));
}

/// A gradient in half precision is divided in f32.
#[test]
fn gradients_keep_their_type() {
    let _alone = alone();
    let device = Device::flex().autodiff();
    let model = LinearConfig::new(1, 1).with_bias(false).init(&device).no_grad();
    let mut gradients = GradientsParams::new();
    let gradient = Tensor::<2>::from_floats([[3.0]], &device.inner()).cast(FloatDType::BF16);
    gradients.register(model.weight.id, gradient);
    let mut scaler = LossScaler::new().with_scale(2f64.powi(17));
    let unscaled = scaler.unscale(&model, gradients).unwrap().get::<2>(model.weight.id).unwrap();
    assert_eq!(unscaled.dtype(), DType::BF16);
    assert_eq!(unscaled.into_scalar::<f64>(), 3.0 * 2f64.powi(-17));
}

/// In f16 the smallest gradients that a scale keeps would vanish when it is taken away.
#[test]
#[should_panic(expected = "the gradient of weight is of f16")]
fn gradients_of_f16_are_refused() {
    let _alone = alone();
    let device = Device::flex().autodiff();
    let model = LinearConfig::new(1, 1).with_bias(false).init(&device).no_grad();
    let mut gradients = GradientsParams::new();
    let gradient = Tensor::<2>::from_floats([[3.0]], &device.inner()).cast(FloatDType::F16);
    gradients.register(model.weight.id, gradient);
    LossScaler::new().unscale(&model, gradients);
}
