//! One model source file, compiled for both namespaces: the same results, the same training.
#![recursion_limit = "256"]
use burn::module::{Module, ModuleVisitor, Param, ParamGroup};
use burn::optim::{AdamConfig, GradientsParams};
use burn::tensor::{Device, Distribution, Gradients, Tensor, TensorData};
use std::sync::{Mutex, MutexGuard};

mod stock {
    use burn::nn;
    include!("small_net.rs");
}

mod memsave {
    use burn_memsave::nn;
    include!("small_net.rs");
}

/// The random numbers of a backend are global.
static SEED: Mutex<()> = Mutex::new(());

fn seeded() -> MutexGuard<'static, ()> {
    SEED.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

struct GradientsByPath<'a> {
    gradients: &'a Gradients,
    path: Vec<String>,
    found: Vec<(String, Option<TensorData>)>,
}

impl ModuleVisitor for GradientsByPath<'_> {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.path.push(name.into());
    }
    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.pop();
    }
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let gradient = param.val().grad(self.gradients).map(Tensor::into_data);
        self.found.push((self.path.join("."), gradient));
    }
}

fn gradients(module: &impl Module, gradients: &Gradients) -> Vec<(String, Option<TensorData>)> {
    let mut visitor = GradientsByPath { gradients, path: vec![], found: vec![] };
    module.visit(&mut visitor);
    visitor.found
}

fn assert_close(what: &str, ours: &TensorData, stock: &TensorData) {
    let read = |data: &TensorData| data.clone().convert::<f32>().iter::<f32>().collect::<Vec<_>>();
    let (ours, stock) = (read(ours), read(stock));
    let scale = stock.iter().fold(0f32, |scale, v| scale.max(v.abs())).max(1e-3);
    for (ours, stock) in ours.into_iter().zip(stock) {
        assert!((ours - stock).abs() <= 2e-5 * scale, "{what}: {ours}, stock {stock}, largest {scale}");
    }
}

/// Both nets with the same weights.
fn nets(device: &Device) -> (stock::Net, memsave::Net) {
    let stock = stock::Net::new(device);
    let ours = memsave::Net::new(device).load_record(stock.clone().into_record());
    (stock, ours)
}

#[test]
fn gradients_are_equal_for_every_frozen_subset() {
    let _seeded = seeded();
    for device in [Device::flex().autodiff(), Device::flex().autodiff().gradient_checkpointing()] {
        let x = Tensor::<4>::random([3, 2, 8, 8], Distribution::Normal(0.0, 1.0), &device);
        let dy = Tensor::<2>::random([3, 3], Distribution::Normal(0.0, 1.0), &device);
        for trained in [".*", "^$", "norm", "head", "conv", "prelu", r"\.bias$", "encoder"] {
            let (stock, ours) = nets(&device);
            let group = || ParamGroup::from_regex(trained).expect("a valid pattern");
            let stock = stock.freeze().unfreeze_group(group());
            let ours = ours.freeze().unfreeze_group(group());
            let run = |forward: &dyn Fn(Tensor<4>) -> Tensor<2>| {
                device.seed(7);
                let x = x.clone().require_grad();
                let y = forward(x.clone());
                let gradients = (y.clone() * dy.clone()).sum().backward();
                (y.into_data(), x.grad(&gradients).expect("tracked").into_data(), gradients)
            };
            let (y_stock, dx_stock, of_stock) = run(&|x| stock.forward(x));
            let (y_ours, dx_ours, of_ours) = run(&|x| ours.forward(x));
            assert_close("y", &y_ours, &y_stock);
            assert_close("dx", &dx_ours, &dx_stock);
            let (of_stock, of_ours) = (gradients(&stock, &of_stock), gradients(&ours, &of_ours));
            assert_eq!(of_stock.len(), of_ours.len());
            for ((path, stock), (our_path, ours)) in of_stock.iter().zip(&of_ours) {
                assert_eq!(path, our_path);
                assert_eq!(stock.is_some(), ours.is_some(), "{trained}: {path}");
                if let (Some(stock), Some(ours)) = (stock, ours) {
                    assert_close(path, ours, stock);
                }
            }
        }
    }
}

#[test]
fn training_goes_the_same_way() {
    let _seeded = seeded();
    let device = Device::flex().autodiff();
    let (mut stock, mut ours) = nets(&device);
    let (mut adam_stock, mut adam_ours) = (AdamConfig::new().init(), AdamConfig::new().init());
    let x = Tensor::<4>::random([6, 2, 8, 8], Distribution::Normal(0.0, 1.0), &device);
    for step in 0..5 {
        device.seed(step);
        let loss_stock = stock.forward(x.clone()).powf_scalar(2.0).mean();
        device.seed(step);
        let loss_ours = ours.forward(x.clone()).powf_scalar(2.0).mean();
        assert_close("loss", &loss_ours.to_data(), &loss_stock.to_data());
        let gradients = GradientsParams::from_grads(loss_stock.backward(), &stock);
        stock = adam_stock.step(1e-3, stock, gradients);
        let gradients = GradientsParams::from_grads(loss_ours.backward(), &ours);
        ours = adam_ours.step(1e-3, ours, gradients);
    }
    // Running statistics moved alike, and inference agrees: the optimizer's state and the record fit both.
    let state = adam_stock.to_record();
    let _ = AdamConfig::new().init().load_record(state);
    let x = x.inner();
    assert_close(
        "inference",
        &ours.valid().forward(x.clone()).into_data(),
        &stock.valid().forward(x).into_data(),
    );
}

#[test]
fn inference_without_autodiff_is_the_same() {
    let _seeded = seeded();
    let device = Device::flex();
    let (stock, ours) = nets(&device);
    let x = Tensor::<4>::random([3, 2, 8, 8], Distribution::Normal(0.0, 1.0), &device);
    assert_close("y", &ours.forward(x.clone()).into_data(), &stock.forward(x).into_data());
}
