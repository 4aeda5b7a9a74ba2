//! [`Owners`]: which device sums the gradient of a parameter, and updates it.
use super::divide::divide;
use crate::parameters::{EachOnce, each_once};
use burn::module::{Module, Param, ParamId};
use burn::tensor::Tensor;
use std::collections::HashMap;

/// The position of the device that owns each trained parameter.
#[derive(Clone, Debug, Default)]
pub(super) struct Owners(HashMap<ParamId, usize>);

impl Owners {
    /// Divides the parameters of a module that require gradients among devices, by their bytes.
    pub fn of_module(module: &impl Module, devices: usize) -> Self {
        struct Trained(Vec<(ParamId, u64)>);
        impl EachOnce for Trained {
            fn visit<const D: usize>(&mut self, param: &Param<Tensor<D>>, _: &[String]) {
                if param.is_require_grad() {
                    let bytes = param.lazy_shape().num_elements() * param.base().dtype().size();
                    self.0.push((param.id, bytes as u64));
                }
            }
        }
        let mut trained = Trained(vec![]);
        each_once(module, &mut trained);
        let bytes: Vec<u64> = trained.0.iter().map(|(_, bytes)| *bytes).collect();
        Self(trained.0.iter().map(|(id, _)| *id).zip(divide(&bytes, devices)).collect())
    }

    /// The owner of a parameter.
    pub fn of(&self, id: ParamId) -> usize {
        self.0[&id]
    }

    /// The owner of a parameter; `None` if it is not trained.
    pub fn get(&self, id: ParamId) -> Option<usize> {
        self.0.get(&id).copied()
    }
}
