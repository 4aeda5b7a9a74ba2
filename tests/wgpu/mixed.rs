//! Training in half precision on the device is as in f32.
use crate::training::{language_loss, language_model};
use crate::{alone, gpu, tensor, values};
use burn::module::Module;
use burn::optim::{AdamConfig, GradientsParams};
use burn::tensor::{FloatDType, Tensor};
use burn_memsave::functional as F;
use burn_memsave::mixed::{LossScaler, MixedError, Precision};
use burn_memsave_paper::vision::{Classifier, ResNet, memsave};

const STEPS: usize = 6;

/// The losses of all good steps: the first scales may be too large for f16.
fn train<M: Module>(
    mut model: M,
    precision: Option<&Precision>,
    loss: impl Fn(&M, FloatDType) -> Tensor<1>,
) -> Result<Vec<f64>, MixedError> {
    let (mut optimizer, mut scaler) = (AdamConfig::new().init(), LossScaler::new());
    let mut losses = vec![];
    while losses.len() < STEPS {
        assert!(scaler.skipped() < STEPS, "a scale of {}", scaler.factor());
        let found = match precision {
            Some(precision) => loss(&precision.half_copy(&model)?, precision.dtype()),
            None => loss(&model, FloatDType::F32),
        };
        let scaled = scaler.scale(found.clone()).backward();
        if let Some(gradients) = scaler.unscale(&model, GradientsParams::from_grads(scaled, &model)) {
            losses.push(found.into_scalar::<f64>());
            model = optimizer.step(5e-3, model, gradients);
        }
    }
    Ok(losses)
}

/// The first `alike` losses are within so many roundings of those in f32; all end lower than they began.
fn trains_alike<M: Module>(
    name: &str,
    model: M,
    (alike, roundings): (usize, f64),
    loss: impl Fn(&M, FloatDType) -> Tensor<1>,
) {
    let falls = |losses: &[f64]| assert!(losses[STEPS - 1] < 0.8 * losses[0], "{name}: {losses:?}");
    let exact = train(model.clone(), None, &loss).expect("in f32");
    falls(&exact);
    // Half of the distance of two numbers near 1.
    for (precision, rounding) in [(Precision::f16(), 2f64.powi(-11)), (Precision::bf16(), 2f64.powi(-8))] {
        let found = train(model.clone(), Some(&precision), &loss);
        if !gpu().supports_dtype(precision.dtype()) {
            let error = found.expect_err("refused").to_string();
            assert!(error.contains(&format!("does not compute in {:?}", precision.dtype())), "{error}");
            println!("refused: {error}");
            continue;
        }
        let found = found.expect("supported");
        falls(&found);
        for (step, (found, exact_loss)) in found.iter().zip(&exact[..alike]).enumerate() {
            let bound = roundings * rounding * exact[0];
            assert!(
                (found - exact_loss).abs() < bound,
                "{name}, {precision:?}, step {step}: {found}, f32 {exact_loss}"
            );
        }
    }
}

#[test]
fn trains_in_half_precision() {
    let _alone = alone();
    let device = gpu().autodiff();
    device.seed(7);

    let model = language_model(&device);
    trains_alike("language model", model, (STEPS, 8.0), |model, _| language_loss(model, &device));

    let net = memsave::resnet::Net::new(ResNet::D18, &device).fork(&device);
    // Norms of four numbers per channel at its end: after a step, what was rounded is large. And Burn's convolutions sum in f16 here
    // (`docs/burn-0.22.1.md`): of eight seeds the first loss was off by 1 to 40 roundings, on Flex by at most 4.
    trains_alike("ResNet-18", net, (1, 64.0), |net, dtype| {
        let images = tensor::<4>(values([4, 3, 32, 32], 1), &device).cast(dtype);
        F::cross_entropy(net.forward(images), Tensor::from_ints([1, 5, 3, 7], &device), None, None).mean()
    });
}
