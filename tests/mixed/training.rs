//! Networks trained in half precision end where they end in f32, with gradients near those in f64.
use super::{BOTH, Images, Language, WORDS, Widen, compare, indices, rounding, values};
use crate::meter::alone;
use burn::module::{Module, RunningState};
use burn::optim::{AdamConfig, GradientsParams};
use burn::tensor::{DType, Device, FloatDType, Tensor, TensorData};
use burn_memsave::mixed::{LossScaler, Precision};
use burn_memsave::nn::{Linear, LinearConfig};

const STEPS: usize = 20;

/// The losses of all steps.
fn train<M: Module>(
    mut model: M,
    precision: Option<&Precision>,
    loss: impl Fn(&M, FloatDType) -> Tensor<1>,
) -> (Vec<f64>, M) {
    let (mut optimizer, mut scaler) = (AdamConfig::new().init(), LossScaler::new());
    let mut losses = vec![];
    for _ in 0..STEPS {
        let found = match precision {
            Some(precision) => loss(&precision.half_copy(&model).unwrap(), precision.dtype()),
            None => loss(&model, FloatDType::F32),
        };
        losses.push(found.clone().into_scalar::<f64>());
        let scales = precision.is_some_and(|precision| precision.dtype() == FloatDType::F16);
        let found = if scales { scaler.scale(found) } else { found };
        let gradients = GradientsParams::from_grads(found.backward(), &model);
        let gradients = if scales { scaler.unscale(&model, gradients) } else { Some(gradients) };
        model = optimizer.step(5e-3, model, gradients.expect("a good step"));
    }
    (losses, model)
}

fn trains_alike<M: Module>(name: &str, model: impl Fn() -> M, loss: impl Fn(&M, FloatDType) -> Tensor<1>) {
    let (exact, _) = train(model(), None, &loss);
    let first = exact[0];
    assert!(exact[STEPS - 1] < 0.8 * first, "{name}: {exact:?}");
    for precision in BOTH.map(|precision| precision()) {
        let (found, _) = train(model(), Some(&precision), &loss);
        for (step, (found, exact)) in found.iter().zip(&exact).enumerate() {
            let bound = 4.0 * rounding(&precision) * first;
            assert!(
                (found - exact).abs() < bound,
                "{name}, {precision:?}, step {step}: {found}, f32 {exact}"
            );
        }
        println!("{name}, {:?}: {:.4}, f32 {:.4}", precision.dtype(), found[STEPS - 1], exact[STEPS - 1]);
    }
}

#[test]
fn losses_are_those_of_f32() {
    let _alone = alone();
    let device = Device::flex().autodiff();
    trains_alike(
        "images",
        || Images::new(&device),
        |model, dtype| model.loss(values([6, 3, 8, 8], 1, &device).cast(dtype)),
    );
    trains_alike(
        "language",
        || Language::new(&device),
        |model, _| model.loss(indices([4, 12], WORDS, &device)),
    );
}

/// Of one step, in half precision and in f64, of the same parameters.
fn has_gradients<M: Module>(name: &str, model: M, loss: impl Fn(&M, FloatDType) -> Tensor<1>) {
    let wide = model.clone().map(&mut Widen);
    let exact = GradientsParams::from_grads(loss(&wide, FloatDType::F64).backward(), &wide);
    for precision in BOTH.map(|precision| precision()) {
        let half = precision.half_copy(&model).unwrap();
        let mut scaler = LossScaler::new().with_scale(1024.0);
        let found = scaler.scale(loss(&half, precision.dtype())).backward();
        let found = scaler.unscale(&model, GradientsParams::from_grads(found, &model)).unwrap();
        assert_eq!(found.len(), exact.len());
        let (worst, count) = compare(&model, &found, &exact, 4.0 * rounding(&precision));
        assert_eq!(count, exact.len());
        println!("{name}, {:?}: {:.2} of a rounding", precision.dtype(), worst / rounding(&precision));
    }
}

#[test]
fn gradients_are_near_those_of_f64() {
    let _alone = alone();
    let device = Device::flex().autodiff();
    has_gradients("images", Images::new(&device), |model, dtype| {
        model.loss(values([6, 3, 8, 8], 1, &device).cast(dtype))
    });
    has_gradients("language", Language::new(&device), |model, _| {
        model.loss(indices([4, 12], WORDS, &device))
    });
}

/// A module of a user's own, whose running statistics no name tells.
#[derive(Module, Debug)]
struct Own {
    linear: Linear,
    average: RunningState<Tensor<1>>,
}

/// Those of the copy are those of the master, which a cast would change for good.
#[test]
fn running_statistics_of_any_module_stay_in_f32() {
    let _alone = alone();
    let device = Device::flex().autodiff();
    let average = RunningState::new(Tensor::from_data([1.0 / 3.0, 2.0], &device));
    let own = Own { linear: LinearConfig::new(2, 2).init(&device), average };
    for precision in BOTH.map(|precision| precision()) {
        for model in [own.clone(), own.valid()] {
            let half = precision.half_copy(&model).unwrap();
            assert_eq!(half.linear.weight.val().dtype(), precision.dtype().into());
            assert_eq!(half.average.value().dtype(), DType::F32);
            assert_eq!(model.average.value().into_data(), TensorData::from([1.0f32 / 3.0, 2.0]));
        }
        let narrow = precision.narrow_frozen(own.clone()).unwrap();
        assert_eq!(narrow.average.value().dtype(), DType::F32);
    }
}

/// They are neither cast nor lost: what a step in half precision adds to them is there.
#[test]
fn running_statistics_stay_in_f32() {
    let _alone = alone();
    let device = Device::flex().autodiff();
    let x = values([6, 3, 8, 8], 1, &device) + 3.0;
    let running = |precision: Option<Precision>| {
        let model = Images::new(&device);
        for _ in 0..3 {
            match &precision {
                Some(precision) => {
                    drop(precision.half_copy(&model).unwrap().loss(x.clone().cast(precision.dtype())))
                }
                None => drop(model.loss(x.clone())),
            }
        }
        let model = model.valid();
        let of = [model.norm.running_mean.value(), model.norm.running_var.value()];
        assert!(of.iter().all(|of| of.dtype() == DType::F32));
        // Evaluated with statistics in f32.
        let output = match &precision {
            Some(precision) => {
                precision.half_copy(&model).unwrap().loss(x.clone().inner().cast(precision.dtype()))
            }
            None => model.loss(x.clone().inner()),
        };
        let of_output = output.into_scalar::<f64>();
        (of.map(|of| of.into_data().iter::<f64>().collect::<Vec<_>>()), of_output)
    };
    let (exact, of_exact) = running(None);
    for precision in BOTH.map(|precision| precision()) {
        let tolerance = rounding(&precision);
        let (found, of_found) = running(Some(precision));
        for (found, exact) in found.iter().flatten().zip(exact.iter().flatten()) {
            assert!((found - exact).abs() <= tolerance * exact.abs().max(0.1), "{found}, f32 {exact}");
        }
        assert!((of_found - of_exact).abs() <= 2.0 * tolerance * of_exact, "{of_found}, f32 {of_exact}");
    }
}
