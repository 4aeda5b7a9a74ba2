//! One model source file, compiled for both namespaces: the same results, the same training.
#![recursion_limit = "256"]
use burn::module::{Module, ModuleVisitor, Param, ParamGroup};
use burn::optim::{AdamConfig, GradientsParams, ModuleOptimizer};
use burn::tensor::{Device, Distribution, Gradients, Tensor, TensorData};
use std::sync::{Mutex, MutexGuard};

mod lora;

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
    let turn = SEED.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    Device::flex().seed(1);
    turn
}

/// Reads the gradients, if there are any, of every parameter; else the values of those that are trained.
struct ByPath<'a> {
    gradients: Option<&'a Gradients>,
    path: Vec<String>,
    found: Vec<(String, Option<TensorData>)>,
}

impl ModuleVisitor for ByPath<'_> {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.path.push(name.into());
    }
    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.pop();
    }
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let value = param.val();
        let read = match self.gradients {
            Some(gradients) => value.grad(gradients),
            None => value.is_require_grad().then_some(value),
        };
        self.found.push((self.path.join("."), read.map(Tensor::into_data)));
    }
}

fn by_path(module: &impl Module, gradients: Option<&Gradients>) -> Vec<(String, Option<TensorData>)> {
    let mut visitor = ByPath { gradients, path: vec![], found: vec![] };
    module.visit(&mut visitor);
    visitor.found
}

fn assert_close(what: &str, ours: &TensorData, stock: &TensorData) {
    let read = |data: &TensorData| data.clone().convert::<f32>().iter::<f32>().collect::<Vec<_>>();
    let (ours, stock) = (read(ours), read(stock));
    let scale = stock.iter().fold(0f32, |scale, v| scale.max(v.abs())).max(1e-2); // sums may cancel
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

/// Output and all gradients of one step are equal; returns the gradient of the input.
fn gradients_agree(stock: &stock::Net, ours: &memsave::Net, x: &Tensor<4>, dy: &Tensor<2>) -> TensorData {
    let run = |forward: &dyn Fn(Tensor<4>) -> Tensor<2>| {
        x.device().seed(7);
        let x = x.clone().require_grad();
        let y = forward(x.clone());
        let gradients = (y.clone() * dy.clone()).sum().backward();
        (y.into_data(), x.grad(&gradients).expect("tracked").into_data(), gradients)
    };
    let (y_stock, dx_stock, of_stock) = run(&|x| stock.forward(x));
    let (y_ours, dx_ours, of_ours) = run(&|x| ours.forward(x));
    assert_close("y", &y_ours, &y_stock);
    assert_close("dx", &dx_ours, &dx_stock);
    let (of_stock, of_ours) = (by_path(stock, Some(&of_stock)), by_path(ours, Some(&of_ours)));
    assert_eq!(of_stock.len(), of_ours.len());
    for ((path, stock), (our_path, ours)) in of_stock.iter().zip(&of_ours) {
        assert_eq!(path, our_path);
        assert_eq!(stock.is_some(), ours.is_some(), "{path}");
        if let (Some(stock), Some(ours)) = (stock, ours) {
            assert_close(path, ours, stock);
        }
    }
    dx_stock
}

#[test]
fn gradients_are_equal_for_every_frozen_subset() {
    let _seeded = seeded();
    for device in [Device::flex().autodiff(), Device::flex().autodiff().gradient_checkpointing()] {
        let x = Tensor::<4>::random([3, 2, 8, 8], Distribution::Normal(0.0, 1.0), &device);
        let dy = Tensor::<2>::random([3, 3], Distribution::Normal(0.0, 1.0), &device);
        for trained in
            [".*", "^$", "norm", "head", "conv", "activations", r"\.bias$", "encoder", "position", "deform"]
        {
            let (stock, ours) = nets(&device);
            let group = || ParamGroup::from_regex(trained).expect("a valid pattern");
            let stock = stock.freeze().unfreeze_group(group());
            let ours = ours.freeze().unfreeze_group(group());
            let dx = gradients_agree(&stock, &ours, &x, &dy);
            assert!(dx.iter::<f32>().any(|g| g.abs() > 1e-4), "{trained}: nothing reaches the input");
        }
    }
}

/// All numbers that are trained.
fn weights(module: &impl Module) -> Vec<f32> {
    let tensors = by_path(module, None).into_iter().filter_map(|(_, data)| data);
    tensors.flat_map(|data| data.iter::<f32>().collect::<Vec<_>>()).collect()
}

type Forward<M> = fn(&M, Tensor<4>) -> Tensor<2>;

const LEARNING_RATE: f64 = 1e-2;

/// One step of training: the model after it, and the loss. `seed` is that of the dropout.
fn step<M: Module>(
    (model, forward): (M, Forward<M>),
    adam: &mut ModuleOptimizer,
    x: &Tensor<4>,
    seed: u64,
) -> (M, TensorData) {
    x.device().seed(seed);
    let loss = forward(&model, x.clone()).powf_scalar(2.0).mean();
    let gradients = GradientsParams::from_grads(loss.backward(), &model);
    (adam.step(LEARNING_RATE, model, gradients), loss.into_data())
}

#[test]
fn training_goes_the_same_way() {
    let _seeded = seeded();
    let device = Device::flex().autodiff();
    let (mut stock, mut ours) = nets(&device);
    let (mut adam_stock, mut adam_ours) = (AdamConfig::new().init(), AdamConfig::new().init());
    let x = Tensor::<4>::random([6, 2, 8, 8], Distribution::Normal(0.0, 1.0), &device);
    for seed in 0..5 {
        let (loss_stock, loss_ours);
        (stock, loss_stock) = step((stock, stock::Net::forward), &mut adam_stock, &x, seed);
        (ours, loss_ours) = step((ours, memsave::Net::forward), &mut adam_ours, &x, seed);
        assert_close("loss", &loss_ours, &loss_stock);
    }
    // Running statistics moved alike, and inference agrees.
    let x = x.inner();
    assert_close(
        "inference",
        &ours.valid().forward(x.clone()).into_data(),
        &stock.valid().forward(x).into_data(),
    );
}

/// One model trains for a step; another one takes over its weights and its optimizer's state. Both go on alike.
fn training_is_taken_over<A: Module, B: Module>(
    (model, of_a): (A, Forward<A>),
    (other, of_b): (B, Forward<B>),
) {
    let x = Tensor::<4>::random([6, 2, 8, 8], Distribution::Normal(0.0, 1.0), &Device::flex().autodiff());
    let mut adam = AdamConfig::new().init();
    let (model, _) = step((model, of_a), &mut adam, &x, 1);
    let other = other.load_record(model.clone().into_record());
    let state = adam.into_bytes().expect("a record");
    let mut loaded = AdamConfig::new().init().from_bytes(state).expect("a record that was just written");

    let (next, _) = step((model, of_a), &mut adam, &x, 2);
    let next = weights(&next);
    let steps_apart = |adam: &mut ModuleOptimizer| {
        let (model, _) = step((other.clone(), of_b), adam, &x, 2);
        let weights = weights(&model);
        assert_eq!(weights.len(), next.len());
        let distances = weights.iter().zip(&next).map(|(a, b)| (a - b).abs());
        f64::from(distances.fold(0.0, f32::max)) / LEARNING_RATE
    };
    let (loaded, fresh) = (steps_apart(&mut loaded), steps_apart(&mut AdamConfig::new().init()));
    assert!(loaded < 0.01, "{loaded} steps apart");
    assert!(fresh > 0.1, "only {fresh} steps apart without the state");
}

#[test]
fn the_optimizers_state_moves_to_ours_and_back() {
    let _seeded = seeded();
    let (stock, ours) = nets(&Device::flex().autodiff());
    let stock = (stock, stock::Net::forward as Forward<_>);
    let ours = (ours, memsave::Net::forward as Forward<_>);
    training_is_taken_over(stock.clone(), ours.clone());
    training_is_taken_over(ours, stock);
}

#[test]
fn inference_without_autodiff_is_the_same() {
    let _seeded = seeded();
    let device = Device::flex();
    let (stock, ours) = nets(&device);
    let x = Tensor::<4>::random([3, 2, 8, 8], Distribution::Normal(0.0, 1.0), &device);
    assert_close("y", &ours.forward(x.clone()).into_data(), &stock.forward(x).into_data());
}
