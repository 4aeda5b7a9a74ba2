//! Adapters in the files of Python's [`peft`](https://github.com/huggingface/peft): train here and use there, or the other way around.
//!
//! Adapters are a directory with `adapter_config.json` and `adapter_model.safetensors`. The first axis of Burn's weights are inputs, that
//! of PyTorch's are outputs, so factors are converted:
//!
//! | layer | factor of Burn | tensor in the file |
//! | --- | --- | --- |
//! | `Linear` | `a` `[inputs, rank]`, `b` `[rank, outputs]` | `lora_A.weight` `[rank, inputs]`, `lora_B.weight` `[outputs, rank]` |
//! | `Embedding` | `a` `[entries, rank]`, `b` `[rank, width]` | `lora_embedding_A` `[rank, entries]`, `lora_embedding_B` `[width, rank]` |
//! | `Linear` with [DoRA](crate::lora::Dora) | the same, and `magnitude` `[outputs]` | the same, and `lora_magnitude_vector` `[outputs]` |
//! | convolutions ([`ConvLora`](crate::lora::ConvLora)) | `a` `[outputs, rank]`, `b` `[rank, inputs * size]` | `lora_B.weight` `[outputs, rank, 1..]`, `lora_A.weight` `[rank, inputs, size..]` |
//!
//! Modules have other paths in Python: you give a function from a path here to the path there. Loaded factors get the dtype of the weight,
//! where `peft` has them in f32. `peft` has no adapters of transposed and deformable convolutions, so these are refused, and its adapters
//! of grouped or dilated convolutions compute something else. DoRA works for dense layers only, and either all adapters of a directory use
//! it or none.
//!
//! ```
//! use burn::module::{Lora, Module};
//! use burn::tensor::{Device, Tensor};
//! use burn_memsave::nn::{Linear, LinearConfig};
//! use burn_memsave::peft;
//!
//! #[derive(Module, Debug)]
//! struct Model {
//!     query: Linear,
//! }
//!
//! let device = Device::flex();
//! let base = Model { query: LinearConfig::new(8, 4).init(&device) };
//! let python = |path: &str| path.replace("query", "model.layers.0.self_attn.q_proj");
//!
//! let lora = Lora::new(2, 4.0);
//! let adapted = base.clone().apply_lora(lora.clone());
//! let directory = tempfile::tempdir()?;
//! peft::save(&adapted, &lora, directory.path(), python)?;
//! let loaded = peft::load(base, directory.path(), python)?;
//! let x = Tensor::<2>::ones([1, 8], &device);
//! assert_eq!(loaded.query.forward(x.clone()).into_data(), adapted.query.forward(x).into_data());
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
use crate::lora::DoraAdapter;
use burn::module::{Lora, LoraAdapter, Module, ModuleVisitor, Param, Reparameterization, Reparameterizer};
use burn::tensor::{DType, Tensor, TensorData, bf16, f16};
use burn_memsave_layers::burn_internals::REPARAMETERIZATION;
use burn_memsave_layers::{follow_path, visit::VisitPath};
use bytemuck::pod_collect_to_vec;
use config::Config;
use safetensors::{Dtype, SafeTensors, tensor::TensorView};
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;
use std::rc::Rc;

mod config;
mod error;

pub use error::PeftError;

const CONFIG: &str = "adapter_config.json";
const TENSORS: &str = "adapter_model.safetensors";
/// The prefix of every module's path.
const PREFIX: &str = "base_model.model.";

/// What follows the path of the module in the name of a tensor: for the factor that is applied first, and for the second.
#[derive(Clone, Copy)]
struct Suffixes(&'static str, &'static str);

const LAYER: Suffixes = Suffixes(".lora_A.weight", ".lora_B.weight");
const MAGNITUDE: &str = ".lora_magnitude_vector";
const EMBEDDING: Suffixes = Suffixes(".lora_embedding_A", ".lora_embedding_B");

/// Writes the adapters of a module into a directory, which is created if needed. `lora` is what they were attached with. Its rank is
/// checked, but its alpha **is taken as given**, since it cannot be read from a module. `names` maps the path of a module here to its path
/// in Python.
///
/// # Errors
///
/// Returns an error if there is no adapter; if an adapter does not belong to a module's `weight`, has another rank than `lora`, or belongs
/// to a module that `peft` has no adapters for; if two modules get the same name; or if a file cannot be written.
pub fn save<M: Module>(
    module: &M,
    lora: &Lora,
    directory: impl AsRef<Path>,
    names: impl Fn(&str) -> String,
) -> Result<(), PeftError> {
    let directory = directory.as_ref();
    let mut found = Adapters::default();
    module.visit(&mut found);
    let mut tensors = BTreeMap::new();
    let mut targets = BTreeSet::new();
    if let Some(path) = found.unnamed {
        return Err(refused(&path, "it is not of a weight"));
    }
    let with_magnitude = |(_, adapter): &(&String, &Adapter)| adapter.magnitude.is_some();
    let use_dora = found.adapters.iter().any(|adapter| with_magnitude(&adapter));
    if let Some((path, _)) = found.adapters.iter().find(|adapter| use_dora && !with_magnitude(adapter)) {
        return Err(refused(path, "it is LoRA, but others are DoRA"));
    }
    for (path, adapter) in found.adapters {
        let name = names(&path);
        let Adapter { a: Some(a), b: Some(b), magnitude, shape, container } = adapter else {
            return Err(refused(&path, "it has not both factors"));
        };
        if use_dora && !container.ends_with("Linear") {
            return Err(refused(
                &path,
                format!("its norms are other ones in peft, for a {container} with DoRA"),
            ));
        }
        if ["ConvTranspose", "DeformConv"].iter().any(|kind| container.contains(kind)) {
            return Err(refused(&path, format!("peft has none for a {container}")));
        }
        if a.dims()[1] != lora.rank {
            let reason = format!("it has the rank {}, but {} is given", a.dims()[1], lora.rank);
            return Err(refused(&path, reason));
        }
        let Suffixes(first, second) = if container.ends_with("Embedding") { EMBEDDING } else { LAYER };
        let [of_first, of_second] = match &shape[..] {
            [_, _] => [a.transpose().into_data(), b.transpose().into_data()],
            [_, rest @ ..] if !rest.is_empty() => {
                let ones = vec![1; rest.len() - 1];
                let [outputs, rank] = a.dims();
                let kernel = [&[rank], rest].concat();
                [
                    reshaped(b.into_data(), kernel),
                    reshaped(a.into_data(), [vec![outputs, rank], ones].concat()),
                ]
            }
            _ => return Err(refused(&path, "its weight has fewer than two axes")),
        };
        if magnitude.as_ref().is_some_and(|magnitude| magnitude.dims() == [0]) {
            return Err(refused(&path, "it has no magnitude: it is that of a model without its adapters"));
        }
        let magnitude = magnitude.map(|magnitude| (MAGNITUDE, magnitude.into_data()));
        for (suffix, data) in [(first, of_first), (second, of_second)].into_iter().chain(magnitude) {
            if tensors.insert(format!("{PREFIX}{name}{suffix}"), data).is_some() {
                return Err(refused(&path, format!("{name} is there twice")));
            }
        }
        targets.insert(name);
    }
    if targets.is_empty() {
        return Err(PeftError::NoAdapter);
    }
    let config = Config::new(lora.rank, lora.alpha, targets, use_dora);
    let text = serde_json::to_string_pretty(&config)
        .map_err(|error| PeftError::Config { file: directory.join(CONFIG), reason: error.to_string() })?;
    let io = |file: &Path| {
        let file = file.to_path_buf();
        move |source| PeftError::Io { file, source }
    };
    fs::create_dir_all(directory).map_err(io(directory))?;
    let views: Vec<_> =
        tensors.iter().map(|(name, data)| Ok((name, view(name, data)?))).collect::<Result<_, PeftError>>()?;
    let format = [("format".to_string(), "pt".to_string())].into();
    let file = directory.join(TENSORS);
    let bytes = safetensors::serialize(views, Some(format))
        .map_err(|error| PeftError::Tensors { file: file.clone(), reason: error.to_string() })?;
    fs::write(&file, bytes).map_err(io(&file))?;
    let file = directory.join(CONFIG);
    fs::write(&file, text).map_err(io(&file))
}

/// Attaches the adapters in a directory to a module without adapters, and freezes its other parameters, as
/// [`apply_lora`](Module::apply_lora) does. `names` maps the path of a module here to its path in Python.
///
/// # Errors
///
/// Returns an error if the module has an adapter already; if a file cannot be read, or has another kind of adapter than LoRA; or if it has
/// an adapter for no module here, for two of them, or for one whose weight has another shape.
pub fn load<M: Module>(
    module: M,
    directory: impl AsRef<Path>,
    names: impl Fn(&str) -> String,
) -> Result<M, PeftError> {
    let mut found = Adapters::default();
    module.visit(&mut found);
    if let Some(path) = found.adapters.into_keys().next().or(found.unnamed) {
        return Err(refused(&path, "it is there already"));
    }
    let directory = directory.as_ref();
    let read = |file: &Path| fs::read(file).map_err(|source| PeftError::Io { file: file.into(), source });
    let config = Config::read(&directory.join(CONFIG), &read(&directory.join(CONFIG))?)?;
    let file = directory.join(TENSORS);
    let bytes = read(&file)?;
    let malformed = |reason: String| PeftError::Tensors { file: file.clone(), reason };
    let tensors = SafeTensors::deserialize(&bytes).map_err(|error| malformed(error.to_string()))?;
    let mut given = BTreeMap::new();
    for (name, view) in tensors.tensors() {
        let data = data(&view).ok_or_else(|| malformed(format!("{name} is {:?}, no float", view.dtype())))?;
        given.insert(name, data);
    }
    let use_dora = config.use_dora();
    let attach = Rc::new(RefCell::new(Attach { config, names, given, taken: BTreeMap::new(), error: None }));
    let module = match use_dora {
        false => module.apply_reparameterization(Shared(attach.clone())),
        true => module.apply_reparameterization(SharedDora(attach.clone())),
    };
    let attach = attach.borrow();
    let is_left = |name: &&String| !attach.taken.contains_key(*name);
    match (&attach.error, attach.given.keys().find(is_left)) {
        (Some(reason), _) => Err(malformed(reason.clone())),
        (None, Some(name)) => Err(malformed(format!("no module for {name}"))),
        (None, None) => Ok(module),
    }
}

/// The factors of adapters, by the paths of their modules.
#[derive(Default)]
struct Adapters {
    path: VisitPath,
    /// The shape of the parameter that was visited last.
    shape: Vec<usize>,
    adapters: BTreeMap<String, Adapter>,
    /// A parameter that has an adapter and is not a `weight`.
    unnamed: Option<String>,
}

#[derive(Default)]
struct Adapter {
    a: Option<Tensor<2>>,
    b: Option<Tensor<2>>,
    /// The magnitudes, with DoRA.
    magnitude: Option<Tensor<1>>,
    /// The shape of the weight.
    shape: Vec<usize>,
    /// The type of the module.
    container: String,
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

/// Attaches adapters.
struct Attach<N> {
    config: Config,
    names: N,
    given: BTreeMap<String, TensorData>,
    /// The tensors that were taken, with the paths of the parameters that took them.
    taken: BTreeMap<String, String>,
    error: Option<String>,
}

impl<N: Fn(&str) -> String> Attach<N> {
    /// The value of a result. The first error is stored, and every error gives `None`.
    fn or_error<T>(&mut self, result: Result<Option<T>, String>) -> Option<T> {
        result.unwrap_or_else(|reason| {
            self.error.get_or_insert(reason);
            None
        })
    }
}

struct Shared<N>(Rc<RefCell<Attach<N>>>);

impl<N: Fn(&str) -> String> Reparameterizer for Shared<N> {
    type Reparam = LoraAdapter;

    fn reparameterize<const D: usize>(
        &mut self,
        path: &str,
        param: Param<Tensor<D>>,
    ) -> (Param<Tensor<D>>, Option<LoraAdapter>) {
        let mut attach = self.0.borrow_mut();
        let adapter = attach.adapter(path, &param);
        (param.set_require_grad(false), attach.or_error(adapter))
    }
}

/// [`Shared`] for DoRA, which has magnitudes.
struct SharedDora<N>(Rc<RefCell<Attach<N>>>);

impl<N: Fn(&str) -> String> Reparameterizer for SharedDora<N> {
    type Reparam = DoraAdapter;

    fn reparameterize<const D: usize>(
        &mut self,
        path: &str,
        param: Param<Tensor<D>>,
    ) -> (Param<Tensor<D>>, Option<DoraAdapter>) {
        let mut attach = self.0.borrow_mut();
        let adapter = attach.dora_adapter(path, &param);
        (param.set_require_grad(false), attach.or_error(adapter))
    }
}

impl<N: Fn(&str) -> String> Attach<N> {
    /// The adapter of a weight with its magnitude, if there is one.
    fn dora_adapter<const D: usize>(
        &mut self,
        path: &str,
        param: &Param<Tensor<D>>,
    ) -> Result<Option<DoraAdapter>, String> {
        let Some(lora) = self.adapter(path, param)? else { return Ok(None) };
        let module = path.strip_suffix("weight").unwrap_or(path).trim_end_matches('.');
        let name = (self.names)(module);
        let key = format!("{PREFIX}{name}{MAGNITUDE}");
        if D != 2 || self.taken.contains_key(&format!("{PREFIX}{name}{}", EMBEDDING.0)) {
            return Err(format!("the adapter of {name} is DoRA, which is supported for dense layers only"));
        }
        let Some(magnitude) = self.given.get(&key).cloned() else {
            return Err(format!("the adapter of {name} is DoRA without {key}"));
        };
        self.taken.insert(key, path.into());
        let outputs = param.base().dims()[1];
        let shape = magnitude.shape().to_vec();
        if magnitude.num_elements() != outputs || shape.iter().filter(|&&len| len > 1).count() > 1 {
            return Err(format!(
                "the magnitudes of {name} have the shape {shape:?}, but {module} has {outputs} outputs"
            ));
        }
        let (device, dtype) = (param.base().device(), lora.a.dtype());
        let magnitude = Tensor::<1>::from_data(reshaped(magnitude, vec![outputs]), (&device, dtype));
        Ok(Some(DoraAdapter { lora, magnitude: Param::from_tensor(magnitude) }))
    }

    /// The adapter of a weight, if there is one.
    fn adapter<const D: usize>(
        &mut self,
        path: &str,
        param: &Param<Tensor<D>>,
    ) -> Result<Option<LoraAdapter>, String> {
        let Some(module) = path.strip_suffix("weight").filter(|_| D >= 2) else { return Ok(None) };
        let module = module.strip_suffix('.').unwrap_or(module);
        let name = (self.names)(module);
        // Some parameters are offered twice. They have the second adapter, which is the same.
        let mut take = |Suffixes(first, second): Suffixes| {
            let keys = [first, second].map(|suffix| format!("{PREFIX}{name}{suffix}"));
            let [of_first, of_second] = keys.each_ref().map(|key| self.given.get(key).cloned());
            let (of_first, of_second) = match (of_first, of_second) {
                (None, None) => return Ok(None),
                (Some(first), Some(second)) => (first, second),
                _ => return Err(format!("{name} has only one of {first} and {second}")),
            };
            for key in keys {
                if let Some(other) = self.taken.insert(key, path.into()).filter(|other| other != path) {
                    return Err(format!("{name} is the name of {other} and of {path}"));
                }
            }
            Ok(Some((of_first, of_second)))
        };
        let factors = match take(LAYER)? {
            Some(factors) => Some(factors),
            None => take(EMBEDDING)?,
        };
        let Some((first, second)) = factors else { return Ok(None) };
        let base = param.base();
        let shape = base.dims();
        let rank = first.shape().first().copied().unwrap_or(0);
        let scale = self.config.scale(&name, rank)?;
        let rest = &shape[1..];
        let (expected_first, expected_second) = match D {
            2 => (vec![rank, shape[0]], vec![shape[1], rank]),
            _ => ([&[rank], rest].concat(), [&[shape[0], rank][..], &vec![1; D - 2]].concat()),
        };
        if first.shape()[..] != expected_first || second.shape()[..] != expected_second {
            return Err(format!(
                "the adapter of {name} has the shapes {:?} and {:?}, but the weight of {module} needs {expected_first:?} and \
                 {expected_second:?}",
                &first.shape()[..],
                &second.shape()[..]
            ));
        }
        let dtype = if base.dtype().is_float() { base.dtype() } else { first.dtype() };
        let tensor = |data: TensorData, shape: [usize; 2]| {
            Tensor::<2>::from_data(reshaped(data, shape.to_vec()), (&base.device(), dtype))
        };
        let (a, b) = match D {
            2 => (tensor(first, [rank, shape[0]]).transpose(), tensor(second, [shape[1], rank]).transpose()),
            _ => (tensor(second, [shape[0], rank]), tensor(first, [rank, rest.iter().product()])),
        };
        // In row-major order, as `Lora` makes them.
        let param = |factor: Tensor<2>| {
            let data = factor.into_data();
            Param::from_tensor(Tensor::<2>::from_data(data, (&base.device(), dtype)))
        };
        Ok(Some(LoraAdapter { a: param(a), b: param(b), scale }))
    }
}

fn refused(module: &str, reason: impl Into<String>) -> PeftError {
    PeftError::Adapter { module: module.into(), reason: reason.into() }
}

fn view<'a>(name: &str, data: &'a TensorData) -> Result<TensorView<'a>, PeftError> {
    let dtype = match data.dtype() {
        DType::F64 => Dtype::F64,
        DType::F32 => Dtype::F32,
        DType::F16 => Dtype::F16,
        DType::BF16 => Dtype::BF16,
        dtype => return Err(refused(name, format!("it has the dtype {dtype:?}"))),
    };
    TensorView::new(dtype, data.shape().to_vec(), data.as_bytes())
        .map_err(|error| refused(name, error.to_string()))
}

fn data(view: &TensorView<'_>) -> Option<TensorData> {
    let (bytes, shape) = (view.data(), view.shape());
    Some(match view.dtype() {
        Dtype::F64 => TensorData::new(pod_collect_to_vec::<u8, f64>(bytes), shape),
        Dtype::F32 => TensorData::new(pod_collect_to_vec::<u8, f32>(bytes), shape),
        Dtype::F16 => TensorData::new(pod_collect_to_vec::<u8, f16>(bytes), shape),
        Dtype::BF16 => TensorData::new(pod_collect_to_vec::<u8, bf16>(bytes), shape),
        _ => return None,
    })
}

fn reshaped(data: TensorData, shape: Vec<usize>) -> TensorData {
    let (bytes, _, dtype) = data.into_parts();
    TensorData::from_bytes(bytes, shape, dtype)
}
