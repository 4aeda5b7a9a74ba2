//! Tensors with the gradient-checkpointing strategy of a device, by which Burn decides how an operation is recorded. `Module::train` gives
//! them the default one.
use burn::module::{ModuleMapper, Param};
use burn::tensor::{Bool, Device, Float, Int, Tensor, kind::Autodiff};

/// The tensor with autodiff and with the strategy of a device, if the device has one.
pub(crate) fn with_strategy<const D: usize, K: Autodiff>(
    tensor: Tensor<D, K>,
    device: &Device,
) -> Tensor<D, K> {
    match device.gradient_checkpointing_strategy() {
        Some(strategy) => tensor.autodiff().with_gradient_checkpointing_strategy(strategy),
        None => tensor,
    }
}

/// A token, which links steps of the graph and carries no value.
pub(crate) fn token(device: &Device) -> Tensor<1> {
    with_strategy(Tensor::zeros([1], &device.clone().without_autodiff()), device)
}

/// Runs a backward pass of one number. Burn frees graphs whose tensors are gone only at the end of other backward passes.
pub(crate) fn sweep(device: &Device) {
    drop(token(&device.clone().autodiff()).require_grad().backward());
}

/// Gives the tensors of a module the strategy of a device.
pub(crate) struct WithStrategy<'a> {
    pub(crate) device: &'a Device,
}

macro_rules! with_strategy {
    ($map:ident, $kind:ty) => {
        fn $map<const D: usize>(&mut self, param: Param<Tensor<D, $kind>>) -> Param<Tensor<D, $kind>> {
            param.map(|value| with_strategy(value, self.device))
        }
    };
}

impl ModuleMapper for WithStrategy<'_> {
    with_strategy!(map_float, Float);
    with_strategy!(map_int, Int);
    with_strategy!(map_bool, Bool);
}
