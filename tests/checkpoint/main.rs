//! Segments that are computed again: gradients, bytes, misuse.
#![recursion_limit = "256"]
use burn::module::{Module, ModuleVisitor, Param, ParamId};
use burn::tensor::{Device, GradientCheckpointingStrategy, Gradients, Tensor, TensorData};
use burn_memsave::checkpoint::checkpoint;
use burn_memsave::measure::TrackingAllocator;
use std::sync::{Mutex, MutexGuard, PoisonError};

mod bytes;
mod misuse;
mod network;
mod segments;

#[global_allocator]
static ALLOCATOR: TrackingAllocator = TrackingAllocator::new();

/// Tests that draw numbers, or count bytes, run one after the other.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Both strategies of Burn.
fn devices() -> [Device; 2] {
    let device = Device::flex();
    [device.clone().autodiff(), device.autodiff().gradient_checkpointing()]
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
