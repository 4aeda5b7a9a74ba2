//! Training in half precision on the device ends where it ends in f32.
use crate::{alone, gpu, tensor, values};
use burn::module::Module;
use burn::optim::{AdamConfig, GradientsParams};
use burn::tensor::{Device, FloatDType, Int, Tensor};
use burn_memsave::functional as F;
use burn_memsave::mixed::{LossScaler, MixedError, Precision};
use burn_memsave_paper::text::llama::{self, LanguageModel, Size};
use burn_memsave_paper::vision::{Classifier, ResNet, memsave};

const STEPS: usize = 12;

/// The losses of all steps.
fn train<M: Module>(
    mut model: M,
    precision: Option<&Precision>,
    loss: impl Fn(&M, FloatDType) -> Tensor<1>,
) -> Result<Vec<f64>, MixedError> {
    let (mut optimizer, mut scaler) = (AdamConfig::new().init(), LossScaler::new());
    let mut losses = vec![];
    for _ in 0..STEPS {
        let found = match precision {
            Some(precision) => loss(&precision.half(&model)?, precision.dtype()),
            None => loss(&model, FloatDType::F32),
        };
        losses.push(found.clone().into_scalar::<f64>());
        let scaled = scaler.scale(found).backward();
        let gradients = scaler.unscale(&model, GradientsParams::from_grads(scaled, &model));
        model = optimizer.step(2e-3, model, gradients.expect("a good step"));
    }
    Ok(losses)
}

fn trains_alike<M: Module>(name: &str, model: M, loss: impl Fn(&M, FloatDType) -> Tensor<1>) {
    let exact = train(model.clone(), None, &loss).expect("in f32");
    assert!(exact[STEPS - 1] < 0.8 * exact[0], "{name}: {exact:?}");
    // Half of the distance of two numbers near 1.
    for (precision, rounding) in [(Precision::f16(), 2f64.powi(-11)), (Precision::bf16(), 2f64.powi(-8))] {
        let found = train(model.clone(), Some(&precision), &loss);
        if !gpu().supports_dtype(precision.dtype()) {
            let error = found.expect_err("refused").to_string();
            assert!(error.contains(&format!("does not compute in {:?}", precision.dtype())), "{error}");
            println!("refused: {error}");
            continue;
        }
        for (step, (found, exact_loss)) in found.expect("supported").iter().zip(&exact).enumerate() {
            let bound = 8.0 * rounding * exact[0];
            assert!(
                (found - exact_loss).abs() < bound,
                "{name}, {precision:?}, step {step}: {found}, f32 {exact_loss}"
            );
        }
    }
}

#[test]
fn losses_are_those_of_f32() {
    let _alone = alone();
    let device = gpu().autodiff();
    device.seed(7);

    let size = Size { vocabulary: 97, width: 32, heads: 4, hidden: 48, blocks: 2, length: 16 };
    let model = llama::memsave::Llama::new(&size, &device).fork(&device);
    trains_alike("language model", model, |model, _| {
        let tokens = |first: i64| {
            let tokens = Tensor::<1, Int>::arange(first..first + 2 * size.length as i64, &device);
            tokens.mul_scalar(7).remainder_scalar(size.vocabulary as i64).reshape([2, size.length])
        };
        model.loss(tokens(0), tokens(1))
    });

    let net = memsave::resnet::Net::new(ResNet::D18, &device).fork(&device);
    trains_alike("ResNet-18", net, |net, dtype| {
        let images = tensor::<4>(values([4, 3, 32, 32], 1), &device).cast(dtype);
        F::cross_entropy(net.forward(images), Tensor::from_ints([1, 5, 3, 7], &device), None, None)
    });
}
