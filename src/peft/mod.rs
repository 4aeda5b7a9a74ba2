//! Adapters in the files of Python's [`peft`](https://github.com/huggingface/peft): train here and use there, or the other way around.
//!
//! Adapters are a directory with `adapter_config.json` and `adapter_model.safetensors` (or `adapter_model.bin`, which is only read). The first
//! axis of Burn's weights are inputs, that of PyTorch's are outputs, so factors are converted:
//!
//! | layer | factor of Burn | tensor in the file |
//! | --- | --- | --- |
//! | `Linear` | `a` `[inputs, rank]`, `b` `[rank, outputs]` | `lora_A.weight` `[rank, inputs]`, `lora_B.weight` `[outputs, rank]` |
//! | `Embedding` | `a` `[entries, rank]`, `b` `[rank, width]` | `lora_embedding_A` `[rank, entries]`, `lora_embedding_B` `[width, rank]` |
//! | `Linear` with [DoRA](crate::lora::Dora) | the same, and `magnitude` `[outputs]` | the same, and `lora_magnitude_vector` `[outputs]` |
//! | convolutions ([`ConvLora`](crate::lora::ConvLora)) | `a` `[outputs, rank]`, `b` `[rank, inputs * size]` | `lora_B.weight` `[outputs, rank, 1..]`, `lora_A.weight` `[rank, inputs, size..]` |
//!
//! Parameters that were trained beside the adapters are in the same file: those of `modules_to_save`, such as a head for classification, and
//! biases.
//!
//! Modules have other paths in Python: you give [`ModuleNames`], which a function from a path here to the path there is. **If the weights of
//! a layer were reordered when they were loaded, its adapter must be, too**: give [`RowOrders`](crate::lazy::RowOrders) to both.
//!
//! Loaded factors get the dtype of the weight, where `peft` has them in f32. `peft` has no adapters of transposed and deformable
//! convolutions, so these are refused, and its adapters of grouped or dilated convolutions compute something else. DoRA works for dense
//! layers only, and either all adapters of a directory use it or none. A `lora_bias`, tokens that are trained alone
//! (`trainable_token_indices`), and initializations that change the base (PiSSA, OLoRA, CorDA, LoftQ, LoRA-GA) are refused.
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
//! let (loaded, config) = peft::load(base, directory.path(), python)?;
//! let x = Tensor::<2>::ones([1, 8], &device);
//! assert_eq!(loaded.query.forward(x.clone()).into_data(), adapted.query.forward(x).into_data());
//! // After more training: what the configuration says goes back.
//! peft::save(&loaded, &config, directory.path(), python)?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
use crate::lazy_paths::lazy_paths;
use adapters::{Adapter, Adapters};
use attach::{Attach, AttachDora, AttachLora};
use burn::module::Module;
use burn::tensor::{DType, TensorData};
use safetensors::{Dtype, tensor::TensorView};
use std::cell::RefCell;
use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::rc::Rc;
use tensors::{Tensors, read_config};
use trained::{LoadTrained, SaveTrained};

mod adapters;
mod attach;
mod config;
mod error;
mod merged;
mod names;
mod tensors;
mod trained;

pub use config::{PeftBias, PeftConfig};
pub use error::PeftError;
pub use merged::save_merged;
pub use names::{ModuleNames, Reordered};

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

/// Writes the adapters of a module into a directory, which is created if needed. `config` is the [`Lora`](burn::module::Lora) that they were
/// attached with, or the [`PeftConfig`] that came with them. Their ranks are checked, but **alpha is taken as given**, since it cannot be
/// read from a module: adapters that were loaded belong to the configuration that they were loaded with. `names` says where the modules
/// are in Python.
///
/// # Errors
///
/// Returns an error if there is no adapter; if a module to save has an adapter, too, or is lazy; if an adapter does not belong to a module's `weight`, has another rank than `config` says, or
/// belongs to a module that `peft` has no adapters for; if two modules get the same name; if rows cannot be reordered; or if a file cannot
/// be written.
pub fn save<M: Module>(
    module: &M,
    config: impl Into<PeftConfig>,
    directory: impl AsRef<Path>,
    names: impl ModuleNames,
) -> Result<(), PeftError> {
    let (directory, config) = (directory.as_ref(), config.into());
    let mut found = Adapters::default();
    module.visit(&mut found);
    if let Some(path) = found.unnamed {
        return Err(refused(&path, "it is not of a weight"));
    }
    let with_magnitude = |(_, adapter): &(&String, &Adapter)| adapter.magnitude.is_some();
    let use_dora = found.adapters.iter().any(|adapter| with_magnitude(&adapter));
    if let Some((path, _)) = found.adapters.iter().find(|adapter| use_dora && !with_magnitude(adapter)) {
        return Err(refused(path, "it is LoRA, but others are DoRA"));
    }
    let adapted: BTreeSet<String> = found.adapters.keys().cloned().collect();
    let mut trained = SaveTrained::new(&config, &names, &adapted, lazy_paths(module));
    module.visit(&mut trained);
    trained.error.map_or(Ok(()), Err)?;
    let mut tensors = trained.tensors;
    let mut targets = BTreeSet::new();
    for (path, adapter) in found.adapters {
        let name = names.name(&path);
        for (suffix, data) in of_python(&path, &name, adapter, &config, &names)? {
            if tensors.insert(format!("{PREFIX}{name}{suffix}"), data).is_some() {
                return Err(refused(&path, format!("{name} is there twice")));
            }
        }
        targets.insert(name);
    }
    if targets.is_empty() {
        return Err(PeftError::NoAdapter);
    }
    let config = config.of_targets(&targets, use_dora);
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

/// The tensors of an adapter in Python, and what follows the path of the module in their names.
fn of_python(
    path: &str,
    name: &str,
    adapter: Adapter,
    config: &PeftConfig,
    names: &impl ModuleNames,
) -> Result<Vec<(&'static str, TensorData)>, PeftError> {
    let Adapter { a: Some(a), b: Some(b), magnitude, shape, container } = adapter else {
        return Err(refused(path, "it has not both factors"));
    };
    if magnitude.is_some() && !container.ends_with("Linear") {
        return Err(refused(path, format!("its norms are other ones in peft, for a {container} with DoRA")));
    }
    if ["ConvTranspose", "DeformConv"].iter().any(|kind| container.contains(kind)) {
        return Err(refused(path, format!("peft has none for a {container}")));
    }
    config.scale(name, a.dims()[1]).map_err(|reason| refused(path, reason))?;
    let Suffixes(first, second) = if container.ends_with("Embedding") { EMBEDDING } else { LAYER };
    let (of_first, of_second) = match &shape[..] {
        [_, _] => (a.transpose().into_data(), b.transpose().into_data()),
        [_, rest @ ..] if !rest.is_empty() => {
            let ones = vec![1; rest.len() - 1];
            let [outputs, rank] = a.dims();
            let kernel = [&[rank], rest].concat();
            (reshaped(b.into_data(), kernel), reshaped(a.into_data(), [vec![outputs, rank], ones].concat()))
        }
        _ => return Err(refused(path, "its weight has fewer than two axes")),
    };
    let of_outputs = |data: TensorData| match names.row_order(path) {
        Some(order) => order.reorder(data, 0, true).map_err(|reason| refused(path, reason)),
        None => Ok(data),
    };
    let mut tensors = vec![(first, of_first), (second, of_outputs(of_second)?)];
    if let Some(magnitude) = magnitude {
        if magnitude.dims() == [0] {
            return Err(refused(path, "it has no magnitude: it is that of a model without its adapters"));
        }
        tensors.push((MAGNITUDE, of_outputs(magnitude.into_data())?));
    }
    Ok(tensors)
}

/// Attaches the adapters in a directory to a module without adapters, and freezes its other parameters, as
/// [`apply_lora`](Module::apply_lora) does. Parameters that were trained beside the adapters are loaded, and stay trainable. If the file has
/// values for other parameters, such as a resized embedding, these are loaded and frozen, and their modules are added to the
/// [`modules_to_save`](PeftConfig::modules_to_save) of the configuration, so that [`save`] writes them again (and whoever loads that takes them
/// for trained). Returns the configuration, too: give it to [`save`], and look at its [`dropout`](PeftConfig::dropout) before you go on with the training. `names` says
/// where the modules are in Python.
///
/// # Errors
///
/// Returns an error if the module has an adapter already; if a file cannot be read, or has another kind of adapter than LoRA; or if it has
/// a tensor for no parameter here, for two of them, or for one with another shape.
pub fn load<M: Module>(
    module: M,
    directory: impl AsRef<Path>,
    names: impl ModuleNames,
) -> Result<(M, PeftConfig), PeftError> {
    let mut found = Adapters::default();
    module.visit(&mut found);
    if let Some(path) = found.adapters.into_keys().next().or(found.unnamed) {
        return Err(refused(&path, "it is there already"));
    }
    let directory = directory.as_ref();
    let config = PeftConfig::read(&directory.join(CONFIG), &read_config(directory)?)?;
    let tensors = Tensors::open(directory)?;
    let file = tensors.file.path().to_path_buf();
    let use_dora = config.use_dora();
    let attach =
        Rc::new(RefCell::new(Attach { config, names, tensors, unnamed: BTreeSet::new(), error: None }));
    let module = match use_dora {
        false => module.apply_reparameterization(AttachLora(attach.clone())),
        true => module.apply_reparameterization(AttachDora(attach.clone())),
    };
    let lazy = lazy_paths(&module);
    let attach = &mut *attach.borrow_mut();
    let module = module.map(&mut LoadTrained::new(attach, lazy));
    let left = || attach.tensors.left().next().map(|name| format!("no module for {name}"));
    let none = || (!attach.tensors.has_any()).then(|| "it has no tensors".to_owned());
    match attach.error.take().or_else(left).or_else(none) {
        Some(reason) => Err(PeftError::Tensors { file, reason }),
        None => {
            let mut config = attach.config.clone();
            attach.unnamed.iter().for_each(|name| config.save_too(name));
            Ok((module, config))
        }
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
        DType::I64 => Dtype::I64,
        dtype => return Err(refused(name, format!("it has the dtype {dtype:?}"))),
    };
    TensorView::new(dtype, data.shape().to_vec(), data.as_bytes())
        .map_err(|error| refused(name, error.to_string()))
}

fn reshaped(data: TensorData, shape: Vec<usize>) -> TensorData {
    let (bytes, _, dtype) = data.into_parts();
    TensorData::from_bytes(bytes, shape, dtype)
}
