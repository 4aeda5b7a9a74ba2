//! Models of the two namespaces compute the same from the same record.
#![recursion_limit = "256"]
use burn::module::Module;
use burn::tensor::{Device, Distribution, Int, Tensor, TensorData, Tolerance};
use burn_memsave_paper::text::{self, Encoder, EncoderSize};
use burn_memsave_paper::vision::{Classifier, EfficientNet, ResNet, memsave, stock};

fn assert_close(ours: TensorData, stock: &TensorData) {
    ours.assert_approx_eq::<f32>(stock, Tolerance::rel_abs(1e-3, 1e-4));
}

/// Norms use their running statistics, and nothing is dropped out.
fn compare_classifiers<V: Copy, S: Classifier<Variant = V>, M: Classifier<Variant = V>>(variant: V) {
    let device = Device::flex().autodiff();
    let stock = S::new(variant, &device);
    let ours = M::new(variant, &device).load_record(stock.clone().into_record());
    let images = Tensor::<4>::random([2, 3, 64, 64], Distribution::Normal(0.0, 1.0), &device).require_grad();
    fn run<M: Classifier>(model: &M, images: &Tensor<4>) -> [TensorData; 2] {
        let logits = model.forward(images.clone());
        let gradients = (logits.clone() * logits.clone()).sum().backward();
        [logits.into_data(), images.grad(&gradients).expect("the input is tracked").into_data()]
    }
    let [ours, stock] = [run(&ours.freeze(), &images), run(&stock.freeze(), &images)];
    ours.into_iter().zip(&stock).for_each(|(ours, stock)| assert_close(ours, stock));
}

#[test]
fn residual_networks() {
    compare_classifiers::<_, stock::resnet::Net, memsave::resnet::Net>(ResNet::D18);
}

#[test]
fn efficient_networks() {
    compare_classifiers::<_, stock::efficientnet::Net, memsave::efficientnet::Net>(EfficientNet::V2S);
}

/// Without autodiff nothing is dropped out.
#[test]
fn encoders() {
    let device = Device::flex();
    let size =
        EncoderSize { vocabulary: 50, width: 24, hidden: 40, heads: 3, layers: 2, length: 12, dropout: 0.1 };
    let stock = text::stock::bert::Bert::new(&size, &device);
    let ours = text::memsave::bert::Bert::new(&size, &device).load_record(stock.clone().into_record());
    let tokens = Tensor::<2, Int>::random([3, 10], Distribution::Uniform(0.0, 50.0), &device);
    assert_close(ours.forward(tokens.clone()).into_data(), &stock.forward(tokens).into_data());
}
