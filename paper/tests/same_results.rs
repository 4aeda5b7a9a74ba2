//! Models of the two namespaces compute the same from the same record.
#![recursion_limit = "256"]
use burn::tensor::{Device, Distribution, Tensor, TensorData, Tolerance};
use burn_memsave_paper::vision::{Classifier, Depth, EfficientNet, memsave, stock};

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
    compare_classifiers::<_, stock::resnet::Net, memsave::resnet::Net>(Depth::D18);
}

#[test]
fn efficient_networks() {
    compare_classifiers::<_, stock::efficientnet::Net, memsave::efficientnet::Net>(EfficientNet::V2S);
}
