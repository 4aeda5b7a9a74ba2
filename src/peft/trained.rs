//! Parameters that are trained beside adapters: those of whole modules, such as a new head, and biases.
use super::attach::Attach;
use super::{ModuleNames, PREFIX, PeftConfig, PeftError, refused};
use crate::burn_next::{handed, packed};
use burn::module::{ModuleMapper, ModuleVisitor, Param};
use burn::tensor::{Tensor, TensorData};
use burn_memsave_layers::burn_internals::REPARAMETERIZATION;
use burn_memsave_layers::{follow_path, visit::VisitPath};
use burn_store::{BurnToPyTorchAdapter, ModuleAdapter, ModuleContext, bridge};
use std::collections::{BTreeMap, BTreeSet};

/// What follows the path of a module with an adapter in the names of its own parameters.
const BASE: &str = ".base_layer";

/// Where a parameter is. `None` for the factors of adapters.
fn place(path: &VisitPath) -> Option<(String, &str, &[String])> {
    let (name, _) = path.names().split_last()?;
    let is_factor = path.containers().iter().any(|container| container == REPARAMETERIZATION);
    (!is_factor).then(|| (path.module().join("."), name.as_str(), path.containers()))
}

/// Whether a parameter is a bias in Python. That of a norm is `beta` here.
fn is_bias(parameter: &str) -> bool {
    ["bias", "beta"].contains(&parameter)
}

/// The axis of a parameter that has the outputs of its module.
fn outputs(containers: &[String], rank: usize) -> usize {
    usize::from(rank == 2 && containers.last().is_some_and(|container| container.ends_with(":Linear")))
}

/// Loads the parameters for which the file has values.
pub(super) struct LoadTrained<'a, N> {
    path: VisitPath,
    attach: &'a mut Attach<N>,
    lazy: BTreeSet<String>,
}

impl<'a, N: ModuleNames> LoadTrained<'a, N> {
    /// For a module with these paths of lazy parameters.
    pub fn new(attach: &'a mut Attach<N>, lazy: BTreeSet<String>) -> Self {
        Self { path: VisitPath::default(), attach, lazy }
    }

    /// The values of a parameter, and whether it is trained. `None` if the file has none, or the parameter keeps its own.
    fn values<const D: usize>(
        &mut self,
        param: &Param<Tensor<D>>,
    ) -> Result<Option<(TensorData, bool)>, String> {
        let Some((module, parameter, containers)) = place(&self.path) else { return Ok(None) };
        let name = self.attach.names.name(&module);
        let keys = ["", BASE].map(|base| format!("{PREFIX}{name}{base}.{parameter}"));
        let tensors = &mut self.attach.tensors;
        let Some(found) = tensors.file.find_for(&keys, containers) else { return Ok(None) };
        let path = self.path.joined();
        tensors.mark(found.name(), &path)?;
        let shape = param.lazy_shape();
        if found.shape() != shape {
            return Err(format!("{} has the shape {}, but {path} has {shape}", found.name(), found.shape()));
        }
        let config = &self.attach.config;
        let is_trained = config.saves(&name)
            || is_bias(parameter) && config.trains_bias(found.name().contains(&format!("{BASE}.")));
        if self.lazy.contains(&path) {
            // `peft` writes the weight of an embedding beside its adapter. It is that of the base.
            return match is_trained {
                false => Ok(None),
                true => Err(format!(
                    "{} was trained, but {path} is lazy: leave it out with `LazyOptions::exclude`",
                    found.name()
                )),
            };
        }
        let data = found.read(param.base().dtype()).map_err(|error| error.to_string())?;
        let data = match self.attach.names.row_order(&module) {
            Some(order) => order
                .reorder(data, outputs(containers, D), false)
                .map_err(|reason| format!("{}: {reason}", found.name()))?,
            None => data,
        };
        Ok(Some((data, is_trained)))
    }
}

impl<N: ModuleNames> ModuleMapper for LoadTrained<'_, N> {
    follow_path!();

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        match self.values(&param) {
            Ok(None) => param,
            Ok(Some((data, is_trained))) => {
                let (id, device, dtype) = (param.id, param.lazy_device(), data.dtype());
                let loaded = param.transform_for_load(Tensor::from_data(data, (&device, dtype)), id);
                loaded.set_require_grad(is_trained && device.is_autodiff())
            }
            Err(reason) => {
                self.attach.error.get_or_insert(reason);
                param
            }
        }
    }
}

/// Collects the parameters that are trained beside adapters, under their names in the file.
pub(super) struct SaveTrained<'a, N> {
    path: VisitPath,
    config: &'a PeftConfig,
    names: &'a N,
    /// The modules with an adapter.
    adapted: &'a BTreeSet<String>,
    pub tensors: BTreeMap<String, TensorData>,
    pub error: Option<PeftError>,
}

impl<'a, N: ModuleNames> SaveTrained<'a, N> {
    pub fn new(config: &'a PeftConfig, names: &'a N, adapted: &'a BTreeSet<String>) -> Self {
        let (tensors, error) = (BTreeMap::new(), None);
        Self { path: VisitPath::default(), config, names, adapted, tensors, error }
    }

    /// The name and the values in the file, if the parameter belongs there.
    fn values<const D: usize>(
        &self,
        param: &Param<Tensor<D>>,
    ) -> Result<Option<(String, TensorData)>, PeftError> {
        let Some((module, parameter, containers)) = place(&self.path) else { return Ok(None) };
        let (name, has_adapter) = (self.names.name(&module), self.adapted.contains(&module));
        let is_trained =
            self.config.saves(&name) || is_bias(parameter) && self.config.trains_bias(has_adapter);
        if !is_trained {
            return Ok(None);
        }
        let error = |reason: String| refused(&module, format!("{parameter}: {reason}"));
        let mut data = param.val().without_autodiff().into_data();
        if let Some(order) = self.names.row_order(&module) {
            data = order.reorder(data, outputs(containers, D), true).map_err(error)?;
        }
        let tensor = bridge::from_data(data, self.path.joined(), None);
        let tensor = packed(BurnToPyTorchAdapter.adapt(handed(tensor), ModuleContext::new(containers)));
        let data = bridge::to_data(&tensor).map_err(|reason| error(reason.to_string()))?;
        let parameter = tensor.name.rsplit('.').next().unwrap_or(parameter);
        let base = if has_adapter { BASE } else { "" };
        Ok(Some((format!("{PREFIX}{name}{base}.{parameter}"), data)))
    }
}

impl<N: ModuleNames> ModuleVisitor for SaveTrained<'_, N> {
    follow_path!();

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        match self.values(param) {
            Ok(None) => {}
            Ok(Some((name, data))) => {
                if self.tensors.insert(name.clone(), data).is_some() {
                    let error = refused(&self.path.joined(), format!("{name} is there twice"));
                    self.error.get_or_insert(error);
                }
            }
            Err(error) => {
                self.error.get_or_insert(error);
            }
        }
    }
}
