//! Training on the device: what is in use after a step stays the same, step after step.
use crate::{alone, assert_close, gpu, same_bytes, tensor, values};
use burn::module::Module;
use burn::optim::{GradientsParams, SgdConfig};
use burn::tensor::{Device, Int, Tensor, TensorData};
use burn_memsave::functional as F;
use burn_memsave::measure::bytes_in_use;
use burn_memsave_paper::text::llama::{self, LanguageModel, Size};
use burn_memsave_paper::vision::{Classifier, ResNet, memsave};

const STEPS: usize = 64;
const VOCABULARY: usize = 97;
const LENGTH: usize = 16;
/// Steps after which kernels are chosen, and what fusion found worth joining.
const WARM_UP: usize = 20;

/// Bytes in use after every step.
fn train<M: Module>(name: &str, model: M, device: &Device, loss: impl Fn(&M) -> Tensor<1>) {
    let mut optimizer = SgdConfig::new().init();
    let mut model = model;
    let mut in_use = vec![];
    for _ in 0..STEPS {
        let gradients = GradientsParams::from_grads(loss(&model).backward(), &model);
        model = optimizer.step(1e-3, model, gradients);
        device.sync().expect("the device works");
        in_use.push(bytes_in_use(device).expect("the pool counts"));
    }
    let steady = in_use[WARM_UP];
    assert!(
        steady > 0 && in_use[WARM_UP..].iter().all(|&bytes| same_bytes(bytes, steady)),
        "{name}: {in_use:?}"
    );
}

/// A small language model.
pub fn language_model(device: &Device) -> llama::memsave::Llama {
    let size = Size { vocabulary: VOCABULARY, width: 32, heads: 4, hidden: 48, blocks: 2, length: LENGTH };
    llama::memsave::Llama::new(&size, device).fork(device)
}

/// Its loss, of the same tokens in every step.
pub fn language_loss(model: &llama::memsave::Llama, device: &Device) -> Tensor<1> {
    let tokens = |first: i64| {
        let tokens = Tensor::<1, Int>::arange(first..first + 2 * LENGTH as i64, device);
        tokens.mul_scalar(7).remainder_scalar(VOCABULARY as i64).reshape([2, LENGTH])
    };
    model.loss(tokens(0), tokens(1))
}

#[test]
fn bytes_in_use_stay_the_same() {
    let _alone = alone();
    let device = gpu().autodiff();

    let net = memsave::resnet::Net::new(ResNet::D18, &device).fork(&device);
    train("ResNet-18", net, &device, |net| {
        let images = tensor::<4>(values([1, 3, 32, 32], 1), &device);
        F::cross_entropy(net.forward(images), Tensor::from_ints([1], &device), None, None)
    });

    train("language model", language_model(&device), &device, |model| language_loss(model, &device));
}

/// The bits of a dropout are drawn again from the same seed, also where its output is computed again. (With fusion, other numbers
/// are rounded in another order: that they are close is enough.)
#[test]
fn dropout_is_the_same_in_checkpoints() {
    let _alone = alone();
    let run = |device: Device| {
        device.seed(17);
        let x = tensor::<2>(values([37, 65], 3), &device).require_grad();
        let y = F::dropout(F::silu(x.clone() + 2.0) * 2.0, 0.3);
        let loss = (F::silu(y.clone()) * y.clone()).sum();
        let gradient = x.grad(&loss.backward()).expect("tracked");
        [y, gradient].map(|tensor| tensor.into_data())
    };
    let device = gpu();
    let (kept, again) = (run(device.clone().autodiff()), run(device.autodiff().gradient_checkpointing()));
    for (kept, again) in kept.iter().zip(&again) {
        assert_close("computed again", again, kept);
        let dropped = |data: &TensorData| data.iter::<f32>().map(|v| v == 0.0).collect::<Vec<_>>();
        assert_eq!(dropped(kept), dropped(again));
        let share = dropped(kept).iter().filter(|&&dropped| dropped).count() as f64 / (37.0 * 65.0);
        assert!((share - 0.3).abs() < 0.05, "{share} dropped at a rate of 0.3");
    }
}
