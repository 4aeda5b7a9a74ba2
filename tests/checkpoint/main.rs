//! Tests checkpointed segments: gradients, bytes, misuse.
#![recursion_limit = "256"]
use burn::module::{Module, ModuleVisitor, Param, ParamId};
use burn::tensor::{Device, Distribution, Gradients, Tensor, TensorData};
use burn_memsave::checkpoint::checkpoint;
use burn_memsave::measure::TrackingAllocator;
use meter::{alone, devices};

mod bytes;
mod ends;
#[path = "../memory/meter.rs"]
#[allow(dead_code, reason = "every test uses its part")]
mod meter;
mod misuse;
mod network;
mod segments;

#[global_allocator]
static ALLOCATOR: TrackingAllocator = TrackingAllocator::new();

fn random<const D: usize>(shape: [usize; D], device: &Device) -> Tensor<D> {
    Tensor::random(shape, Distribution::Normal(0.0, 1.0), device)
}

/// The gradients of all parameters, by id.
struct Found<'a> {
    gradients: &'a Gradients,
    found: Vec<(ParamId, Option<TensorData>)>,
}

impl ModuleVisitor for Found<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let gradient = param.base().grad(self.gradients).map(Tensor::into_data);
        self.found.push((param.id, gradient));
    }
}

fn gradients_of<M: Module>(module: &M, gradients: &Gradients) -> Vec<(ParamId, Option<TensorData>)> {
    let mut found = Found { gradients, found: vec![] };
    module.visit(&mut found);
    found.found
}

/// Runs both ways from the same seed, and compares the output, all gradients and what is drawn afterwards, bit by bit.
#[track_caller]
fn same<M: Module, const D: usize>(
    module: &M,
    x: Tensor<D>,
    tracked: bool,
    plain: impl Fn(&M, Tensor<D>) -> Tensor<D>,
    checked: impl Fn(&M, Tensor<D>) -> Tensor<D>,
) {
    let device = x.device();
    drop(plain(module, x.clone())); // initializes the parameters
    let run = |forward: &dyn Fn(&M, Tensor<D>) -> Tensor<D>| {
        let x = x.clone().detach().set_require_grad(tracked);
        device.seed(7);
        let y = forward(module, x.clone());
        let loss = (y.clone() * y.clone()).sum();
        let gradients = loss.is_tracked().then(|| loss.backward());
        let after = random([3], &device.clone().without_autodiff()).into_data();
        let of_x = gradients.as_ref().and_then(|gradients| x.grad(gradients)).map(Tensor::into_data);
        (y.into_data(), of_x, gradients.map(|gradients| gradients_of(module, &gradients)), after)
    };
    let (plain, checked) = (run(&plain), run(&checked));
    assert_eq!(plain, checked);
}
