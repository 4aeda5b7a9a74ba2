//! Another learning rate for the second factors of adapters.
#![cfg(feature = "flex")]
use burn::lr_scheduler::linear::LinearLrSchedulerConfig;
use burn::module::{Lora, Module, ModuleVisitor, Param};
use burn::optim::{AdamConfig, GradientsParams};
use burn::tensor::{Device, Distribution, Tensor, TensorData};
use burn_memsave::lora::{Dora, lora_plus};
use burn_memsave::nn::{Linear, LinearConfig};

#[derive(Module, Debug)]
struct Model {
    lora: Linear,
    dora: Linear,
}

impl Model {
    fn new(device: &Device) -> Self {
        let layer = || LinearConfig::new(6, 6).init(device);
        Self {
            lora: layer().apply_lora(Lora::new(2, 4.0)),
            dora: layer().apply_reparameterization(Dora::new(Lora::new(2, 4.0))),
        }
    }

    fn gradients(&self, x: &Tensor<2>) -> GradientsParams {
        let loss = self.dora.forward(self.lora.forward(x.clone())).powf_scalar(2.0).mean();
        GradientsParams::from_grads(loss.backward(), self)
    }
}

/// Trainable parameters, by their paths.
#[derive(Default)]
struct Values {
    path: Vec<String>,
    values: Vec<(String, TensorData)>,
}

impl ModuleVisitor for Values {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.path.push(name.into());
    }
    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.pop();
    }
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if param.is_require_grad() {
            self.values.push((self.path.join("."), param.val().into_data()));
        }
    }
}

fn values(model: &Model) -> Vec<(String, TensorData)> {
    let mut values = Values::default();
    model.visit(&mut values);
    values.values
}

/// Gives one of two their gradients.
struct Split {
    path: Vec<String>,
    all: GradientsParams,
    second: GradientsParams,
    rest: GradientsParams,
}

impl ModuleVisitor for Split {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.path.push(name.into());
    }
    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.pop();
    }
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let Some(gradient) = self.all.remove::<D>(param.id) else { return };
        let is_second = self.path.last().is_some_and(|name| name == "b");
        let part = if is_second { &mut self.second } else { &mut self.rest };
        part.register(param.id, gradient);
    }
}

#[test]
fn equals_two_optimizers() {
    const RATIO: f64 = 16.0;
    let device = Device::flex().autodiff();
    device.seed(42);
    let x = Tensor::<2>::random([5, 6], Distribution::Default, &device);
    let start = Model::new(&device);
    drop(start.gradients(&x)); // initializes the parameters
    let schedule = || LinearLrSchedulerConfig::new(1e-2, 1e-3, 10).init().unwrap();
    let (mut one, mut rates) = (start.clone(), lora_plus(schedule(), RATIO));
    let (mut two, mut rate) = (start.clone(), schedule());
    let mut optimizer = AdamConfig::new().init();
    let [mut of_rest, mut of_second] = [(); 2].map(|()| AdamConfig::new().init());
    for step in 0..6 {
        // Written and read in between.
        let record = rates.to_record();
        rates = lora_plus(schedule(), RATIO).load_record(record);
        let gradients = one.gradients(&x);
        one = optimizer.step(rates.step(), one, gradients);
        let [second, rest] = [(); 2].map(|()| GradientsParams::new());
        let mut split = Split { path: vec![], all: two.gradients(&x), second, rest };
        two.visit(&mut split);
        assert_eq!((split.second.len(), split.rest.len()), (2, 3));
        let rate = rate.step().base();
        two = of_rest.step(rate, two, split.rest);
        two = of_second.step(rate * RATIO, two, split.second);
        assert_eq!(values(&one), values(&two), "step {step}");
    }
    let moved = |of: &[(String, TensorData)]| {
        let start = values(&start);
        let largest = |((path, a), (_, b)): (&(String, TensorData), &(String, TensorData))| {
            let moved = a.iter::<f32>().zip(b.iter::<f32>()).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            (path.clone(), moved)
        };
        of.iter().zip(&start).map(largest).collect::<Vec<_>>()
    };
    for (path, moved) in moved(&values(&one)) {
        assert_eq!(moved > 0.1, path.ends_with("lora.b"), "{path} moved by {moved}");
    }
}

#[test]
#[should_panic(expected = "a ratio of 0")]
fn a_ratio_is_positive() {
    drop(lora_plus(1e-3, 0.0));
}
