//! Optimizers, and updates in the backward pass.
#![cfg(feature = "flex")]
#![recursion_limit = "256"]
use burn::module::{Module, ModuleVisitor, Param};
use burn::optim::{GradientsParams, ModuleOptimizer};
use burn::tensor::{Device, Distribution, FloatDType, Tensor, TensorData};
use burn_memsave::measure::TrackingAllocator;
use meter::alone;

mod adamw;
mod bytes;
mod in_backward;
#[path = "../memory/meter.rs"]
#[allow(dead_code, reason = "every test uses its part")]
mod meter;
mod muon;
mod rounding;

#[global_allocator]
static ALLOCATOR: TrackingAllocator = TrackingAllocator::new();

fn device() -> Device {
    Device::flex().autodiff()
}

fn random<const D: usize>(shape: [usize; D], device: &Device) -> Tensor<D> {
    Tensor::random(shape, Distribution::Normal(0.0, 1.0), device)
}

/// A parameter by itself is a module.
fn parameter<const D: usize>(value: Tensor<D>) -> Param<Tensor<D>> {
    Param::from_tensor(value)
}

/// A step with a given gradient.
fn step_with<const D: usize>(
    optimizer: &mut ModuleOptimizer,
    parameter: Param<Tensor<D>>,
    gradient: Tensor<D>,
    lr: f64,
) -> Param<Tensor<D>> {
    let mut gradients = GradientsParams::new();
    gradients.register(parameter.id, gradient.inner());
    optimizer.step(lr, parameter, gradients)
}

/// All values of a module.
fn values<M: Module>(module: &M) -> Vec<TensorData> {
    struct Values(Vec<TensorData>);
    impl ModuleVisitor for Values {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            self.0.push(param.base().into_data());
        }
    }
    let mut values = Values(vec![]);
    module.visit(&mut values);
    values.0
}

fn f64s(data: &TensorData) -> Vec<f64> {
    data.iter::<f64>().collect()
}

#[track_caller]
fn assert_near(a: &TensorData, b: &[f64], relative: f64, absolute: f64) {
    assert_eq!(a.num_elements(), b.len());
    for (at, (a, b)) in a.iter::<f64>().zip(b).enumerate() {
        assert!((a - b).abs() <= relative * b.abs() + absolute, "at {at}: {a}, not {b}");
    }
}
