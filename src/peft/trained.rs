//! Parameters that are trained beside adapters: those of whole modules, such as a new head, and biases.
use super::attach::{Attach, float_of};
use super::tensors::BATCHES;
use super::{EMBEDDING, LAYER, ModuleNames, PREFIX, PeftConfig, PeftError, Suffixes, refused};
use crate::burn_next::{handed, packed};
use crate::lazy::RowOrder;
use burn::module::{ModuleMapper, ModuleVisitor, Param};
use burn::tensor::{Tensor, TensorData};
use burn_memsave_layers::burn_internals::REPARAMETERIZATION;
use burn_memsave_layers::{follow_path, visit::VisitPath};
use burn_store::{BurnToPyTorchAdapter, ModuleAdapter, ModuleContext, bridge};
use std::collections::{BTreeMap, BTreeSet};

/// What follows the path of a module with an adapter in the names of its own parameters.
const BASE: &str = ".base_layer";

/// Where a parameter is. `None` for the factors of adapters.
pub(super) fn place(path: &VisitPath) -> Option<(String, &str, &[String])> {
    let (name, _) = path.names().split_last()?;
    let is_factor = path.containers().iter().any(|container| container == REPARAMETERIZATION);
    (!is_factor).then(|| (path.module().join("."), name.as_str(), path.containers()))
}

/// The name of a parameter in Python, where those of norms are called otherwise.
pub(super) fn python_name<'a>(parameter: &'a str, containers: &[String]) -> &'a str {
    let container = containers.last().and_then(|container| container.split_once(':'));
    match (parameter, container.is_some_and(|(_, name)| NORMS.contains(&name))) {
        ("gamma", true) => "weight",
        ("beta", true) => "bias",
        _ => parameter,
    }
}

const NORMS: [&str; 6] = ["BatchNorm", "LayerNorm", "GroupNorm", "RmsNorm", "InstanceNorm", "AddRmsNorm"];

pub(super) fn is_dense(containers: &[String]) -> bool {
    containers.last().is_some_and(|container| container.ends_with(":Linear"))
}

/// The axis of a parameter that has the outputs of its module.
pub(super) fn outputs(containers: &[String], rank: usize) -> usize {
    usize::from(rank == 2 && is_dense(containers))
}

/// The values of the parameter at this path as Python has them: their outputs in another order, if they have one, and a matrix of a dense layer transposed, if
/// it `is_transposed` there.
pub(super) fn of_python_layout(
    path: &str,
    data: TensorData,
    order: Option<RowOrder>,
    is_transposed: bool,
    containers: &[String],
    rank: usize,
) -> Result<TensorData, String> {
    let data = match order {
        Some(order) => order.reorder(data, outputs(containers, rank), true)?,
        None => data,
    };
    if rank == 2 && is_dense(containers) && !is_transposed {
        return Ok(data);
    }
    let tensor = handed(bridge::from_data(data, path.into(), None));
    let tensor = packed(BurnToPyTorchAdapter.adapt(tensor, ModuleContext::new(containers)));
    bridge::to_data(&tensor).map_err(|error| error.to_string())
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
    ) -> Result<Option<(Tensor<D>, bool)>, String> {
        let Some((module, parameter, containers)) = place(&self.path) else { return Ok(None) };
        let name = self.attach.names.name(&module);
        let parameter_there = python_name(parameter, containers);
        let keys = ["", BASE].map(|base| {
            [parameter, parameter_there].map(|parameter| format!("{PREFIX}{name}{base}.{parameter}"))
        });
        let Attach { tensors, config, names, unnamed, .. } = &mut *self.attach;
        let found = tensors.file.find_for(&keys.concat(), containers).map_err(|error| error.to_string())?;
        let Some(found) = found else { return Ok(None) };
        let path = self.path.joined();
        tensors.mark(found.name(), &path)?;
        let (is_bias, is_base) = (parameter_there == "bias", found.name().contains(&format!("{BASE}.")));
        let factors = [LAYER, EMBEDDING].map(|Suffixes(first, _)| format!("{PREFIX}{name}{first}"));
        let has_adapter = is_base || factors.iter().any(|factor| tensors.is_taken(factor));
        // `peft` writes the weight of an embedding beside its adapter. It is that of the base.
        let is_of_base = is_base && !is_bias;
        let is_trained = config.saves(&name) || is_bias && config.trains_bias(has_adapter);
        let base = param.base();
        if self.lazy.contains(&path) || !base.dtype().is_float() {
            if is_of_base && !is_trained {
                return Ok(None);
            }
            if self.lazy.contains(&path) {
                return Err(format!(
                    "{} has values of its own, but {path} is lazy: leave it out with `LazyOptions::exclude`",
                    found.name()
                ));
            }
        }
        if !is_trained && !has_adapter {
            unnamed.insert(name.clone()); // as older versions wrote heads, and all write resized embeddings
        }
        let as_stored = D == 2 && is_dense(containers) && config.has_inputs_first(&name);
        let data = if as_stored { found.read_as_stored() } else { found.read(float_of(&base)) };
        let data = data.map_err(|error| error.to_string())?;
        let (shape, expected) = (data.shape().clone(), base.shape());
        if shape != expected {
            return Err(format!("{} has the shape {shape}, but {path} has {expected}", found.name()));
        }
        let data = match names.row_order(&module) {
            Some(order) => order
                .reorder(data, outputs(containers, D), false)
                .map_err(|reason| format!("{}: {reason}", found.name()))?,
            None => data,
        };
        Ok(Some((Tensor::from_data(data, (&base.device(), float_of(&base))), is_trained)))
    }
}

impl<N: ModuleNames> ModuleMapper for LoadTrained<'_, N> {
    follow_path!();

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        match self.values(&param) {
            Ok(None) => param,
            // The values are laid out as in the module, not as in a record.
            Ok(Some((values, is_trained))) => param.map(|_| values).set_require_grad(is_trained),
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
    lazy: BTreeSet<String>,
    pub tensors: BTreeMap<String, TensorData>,
    pub error: Option<PeftError>,
}

impl<'a, N: ModuleNames> SaveTrained<'a, N> {
    /// For a module with these paths of lazy parameters.
    pub fn new(
        config: &'a PeftConfig,
        names: &'a N,
        adapted: &'a BTreeSet<String>,
        lazy: BTreeSet<String>,
    ) -> Self {
        let (tensors, error) = (BTreeMap::new(), None);
        Self { path: VisitPath::default(), config, names, adapted, lazy, tensors, error }
    }

    /// The names and values in the file, if the parameter belongs there.
    fn values<const D: usize>(
        &self,
        param: &Param<Tensor<D>>,
    ) -> Result<Vec<(String, TensorData)>, PeftError> {
        let Some((module, parameter, containers)) = place(&self.path) else { return Ok(vec![]) };
        let (name, has_adapter) = (self.names.name(&module), self.adapted.contains(&module));
        let is_saved = self.config.saves(&name);
        let parameter_there = python_name(parameter, containers);
        if !(is_saved || parameter_there == "bias" && self.config.trains_bias(has_adapter)) {
            return Ok(vec![]);
        }
        let error = |reason: String| refused(&module, format!("{parameter}: {reason}"));
        if is_saved && has_adapter {
            return Err(refused(&module, "it has an adapter, and is one of the modules to save"));
        }
        if self.lazy.contains(&self.path.joined()) {
            let reason = "it is lazy, so it was not trained, but its module is one of those to save".into();
            return Err(PeftError::Parameter { parameter: self.path.joined(), reason });
        }
        let data = param.val().without_autodiff().into_data();
        let (order, is_transposed) = (self.names.row_order(&module), !self.config.has_inputs_first(&name));
        let data = of_python_layout(&self.path.joined(), data, order, is_transposed, containers, D)
            .map_err(error)?;
        let base = if has_adapter { BASE } else { "" };
        let mut tensors = vec![(format!("{PREFIX}{name}{base}.{parameter_there}"), data)];
        if parameter == "running_mean" {
            // PyTorch has a counter beside the statistics, and `peft` asks for it.
            tensors.push((format!("{PREFIX}{name}{BATCHES}"), TensorData::new(vec![0i64], [0; 0])));
        }
        Ok(tensors)
    }
}

impl<N: ModuleNames> ModuleVisitor for SaveTrained<'_, N> {
    follow_path!();

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        match self.values(param) {
            Ok(tensors) => {
                for (name, data) in tensors {
                    if self.tensors.insert(name.clone(), data).is_some() {
                        let error = refused(&self.path.joined(), format!("{name} is there twice"));
                        self.error.get_or_insert(error);
                    }
                }
            }
            Err(error) => {
                self.error.get_or_insert(error);
            }
        }
    }
}
