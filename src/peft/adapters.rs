//! [`Adapters`]: collects the adapters of a module.
use crate::lora::DoraAdapter;
use burn::module::{LoraAdapter, ModuleVisitor, Param, Reparameterization};
use burn::tensor::Tensor;
use burn_memsave_layers::burn_internals::REPARAMETERIZATION;
use burn_memsave_layers::{follow_path, visit::VisitPath};
use std::collections::BTreeMap;

/// The factors of adapters, by the paths of their modules.
#[derive(Default)]
pub(super) struct Adapters {
    path: VisitPath,
    /// The shape of the parameter that was visited last.
    shape: Vec<usize>,
    pub adapters: BTreeMap<String, Adapter>,
    /// A parameter that has an adapter and is not a `weight`.
    pub unnamed: Option<String>,
}

#[derive(Default)]
pub(super) struct Adapter {
    pub a: Option<Tensor<2>>,
    pub b: Option<Tensor<2>>,
    /// The magnitudes, with DoRA.
    pub magnitude: Option<Tensor<1>>,
    /// The shape of the weight.
    pub shape: Vec<usize>,
    /// The type of the module.
    pub container: String,
}

impl ModuleVisitor for Adapters {
    follow_path!();

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let (names, containers) = (self.path.names(), self.path.containers());
        let is_adapter = |&at: &usize| {
            [LoraAdapter::NAME, DoraAdapter::NAME].contains(&names[at].as_str())
                && containers[at] == REPARAMETERIZATION
        };
        let Some(lora) = (0..names.len()).rev().find(is_adapter) else {
            self.shape = param.base().dims().to_vec();
            return;
        };
        let [module @ .., name] = &names[..lora] else { return };
        if name != "weight" {
            self.unnamed = Some(names[..lora].join("."));
            return;
        }
        let adapter = self.adapters.entry(module.join(".")).or_default();
        adapter.shape = self.shape.clone();
        adapter.container = containers[module.len()].trim_start_matches("Struct:").into();
        let name = names.last().map(String::as_str);
        if name == Some("magnitude") {
            let magnitude = param.val().without_autodiff();
            adapter.magnitude = Some(magnitude.flatten::<1>(0, D - 1));
            return;
        }
        let factor = param.val().without_autodiff();
        let [rows, columns] = [0, 1].map(|axis| factor.dims().get(axis).copied().unwrap_or(1));
        let factor = factor.reshape([rows, columns]);
        match name {
            Some("a") => adapter.a = Some(factor),
            Some("b") => adapter.b = Some(factor),
            _ => {}
        }
    }
}
