//! Loads weights from Hugging Face checkpoints: `model.safetensors`, its shards, or `pytorch_model.bin`.
//!
//! ```no_run
//! use burn::tensor::Device;
//! use burn_memsave_models::{Decoder, DecoderSize, hugging_face, memsave::decoder::Llama};
//!
//! let size = DecoderSize { length: 2048, ..DecoderSize::LLAMA_3_2_1B };
//! let model = Llama::new(&size, &Device::flex().autodiff());
//! let model = hugging_face::load(model, "Llama-3.2-1B")?;
//! # Ok::<(), hugging_face::LoadError>(())
//! ```
use crate::{ConfigError, Decoder};
use burn::module::{Module, ModuleVisitor, Param};
use burn::tensor::{DType, Tensor};
use burn_memsave::lazy::{
    LazyCache, LazyError, LazyLoad, LazyOptions, LazyReport, RowOrder, RowOrders, WeightFile,
};
use burn_memsave::peft::{self, ModuleNames, PeftConfig, PeftError};
use burn_store::ModuleAdapter;
use std::fs;
use std::path::{Path, PathBuf};

/// A network for which Hugging Face has checkpoints.
pub trait HuggingFace: Module {
    /// Replacements in the names of their tensors, applied one after the other: regular expressions, and the replacements of their
    /// matches. Tensors that the network does not need are renamed to something in `unused`.
    const NAMES: &'static [(&'static str, &'static str)];

    /// Replacements before those in [`NAMES`](Self::NAMES).
    fn first_names(&self) -> &'static [(&'static str, &'static str)] {
        &[]
    }

    /// The path here of an embedding whose weight other layers have, too: the head, or other embeddings.
    fn tied_table(&self) -> Option<&'static str> {
        None
    }

    /// The path there of the module at this path here.
    fn module_name(&self, path: &str) -> String;

    /// The layers whose outputs are in another order there.
    fn row_orders(&self) -> RowOrders {
        RowOrders::new()
    }

    /// Whether dense layers have their weights `[inputs, outputs]` there, too.
    fn has_inputs_first(&self) -> bool {
        false
    }

    /// The file, whose tensors have their names here, with those split that are several parameters here.
    ///
    /// # Errors
    ///
    /// If a tensor cannot be split.
    fn split(&self, file: WeightFile) -> Result<WeightFile, LazyError> {
        Ok(file)
    }

    /// The layer there that the layer at this path is a part of, if it is a part. Python's `peft` has adapters of whole layers only.
    fn whole(&self, _path: &str) -> Option<&'static str> {
        None
    }

    /// Why Python's `peft` has no adapter of the layer at this path for another reason, if it has none.
    fn without_adapter(&self, _path: &str) -> Option<&'static str> {
        None
    }

    /// The network, which may tell this cache which of its lazy weights are next. See [`LazyCache::expect`].
    fn with_cache(self, _cache: &LazyCache) -> Self {
        self
    }

    /// How their tensors become parameters.
    fn adapter(&self) -> impl ModuleAdapter + 'static {
        self.row_orders()
    }
}

/// Why a checkpoint cannot be loaded.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LoadError {
    /// The configuration asks for what the network does not have.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The file is damaged, or its tensors have other shapes than the parameters.
    #[error(transparent)]
    File(#[from] LazyError),
    /// It has tensors for other parameters than those of the network.
    #[error("{}: no tensor for the parameters [{}], no parameter for the tensors [{}]",
        file.display(), missing.join(", "), unused.join(", "))]
    Names {
        /// The file.
        file: PathBuf,
        /// Paths of parameters.
        missing: Vec<String>,
        /// Names of tensors, after the replacement of [`HuggingFace::NAMES`].
        unused: Vec<String>,
    },
}

/// The network with the weights of a checkpoint, a file or a directory, in f32.
///
/// # Errors
///
/// If the file cannot be read, or if it does not have a tensor for each parameter, and a parameter for each tensor.
pub fn load<M: HuggingFace>(model: M, path: impl AsRef<Path>) -> Result<M, LoadError> {
    let all_now = LazyOptions::new().exclude("*").with_dtype(DType::F32);
    Ok(lazy_load(model, path, &all_now)?.0)
}

/// The same with weights that stay in the file as far as the options say. See [`LazyLoad::lazy_load`].
///
/// # Errors
///
/// As [`load`].
pub fn lazy_load<M: HuggingFace>(
    model: M,
    path: impl AsRef<Path>,
    options: &LazyOptions,
) -> Result<(M, LazyReport), LoadError> {
    load_file(model, WeightFile::open(path)?, options)
}

/// [`lazy_load`] from an open file.
pub(crate) fn load_file<M: HuggingFace>(
    model: M,
    file: WeightFile,
    options: &LazyOptions,
) -> Result<(M, LazyReport), LoadError> {
    let file = named(&model, file)?;
    load_from(model, &file, options, &[])
}

/// A file whose tensors have the names, and become the parameters, of a network.
pub(crate) fn named<M: HuggingFace>(model: &M, file: WeightFile) -> Result<WeightFile, LazyError> {
    Ok(with_names_of(model, file)?.with_adapter(model.adapter()))
}

/// A file whose tensors have the names of the parameters of a network.
pub(crate) fn with_names_of<M: HuggingFace>(model: &M, file: WeightFile) -> Result<WeightFile, LazyError> {
    model.split(file.with_key_remappings(model.first_names())?.with_key_remappings(M::NAMES)?)
}

/// [`lazy_load`] from an open file, in which these tensors may be left over.
pub(crate) fn load_from<M: HuggingFace>(
    model: M,
    file: &WeightFile,
    options: &LazyOptions,
    left_over: &[&str],
) -> Result<(M, LazyReport), LoadError> {
    let (model, report) = model.lazy_load(file, &options.clone().with_allow_partial(true))?;
    let is_left_over = |name: &str| name.starts_with("unused.") || left_over.contains(&name);
    let unused: Vec<_> = report.unused.iter().filter(|name| !is_left_over(name)).cloned().collect();
    match report.missing.is_empty() && unused.is_empty() {
        true if report.lazy.is_empty() => Ok((model, report)),
        true => Ok((model.with_cache(&report.cache), report)),
        false => Err(LoadError::Names { file: file.path().to_path_buf(), missing: report.missing, unused }),
    }
}

/// A path here with its parts replaced by those there, one after the other.
pub(crate) fn replaced(path: &str, here_and_there: &[(&str, &str)]) -> String {
    here_and_there.iter().fold(path.into(), |path: String, (here, there)| path.replace(here, there))
}

/// The network with the adapters in a directory of Python's `peft`, and their configuration. See [`peft::load`].
///
/// # Errors
///
/// Those of [`peft::load`], and an error if an embedding whose [weight](HuggingFace::tied_table) other layers
/// have, too, has an adapter or is trained: in Python, these layers then stay as they were.
pub fn load_adapters<M: HuggingFace>(
    model: M,
    directory: impl AsRef<Path>,
) -> Result<(M, PeftConfig), PeftError> {
    let names = names(&model);
    let (model, config) = peft::load(model, directory, names)?;
    check_tied_table(&model, &config)?;
    Ok((model, config))
}

fn check_tied_table<M: HuggingFace>(model: &M, config: &PeftConfig) -> Result<(), PeftError> {
    let Some(table) = model.tied_table() else { return Ok(()) };
    let name = model.module_name(table);
    let last = name.rsplit('.').next().unwrap_or(&name);
    let mut adapted = Adapted { table, path: vec![], found: false };
    model.visit(&mut adapted);
    if !adapted.found && !config.modules_to_save().iter().any(|module| module == last) {
        return Ok(());
    }
    let reason =
        "other layers have the same weight, which would change with it here and not in Python".to_string();
    Err(PeftError::Adapter { module: table.into(), reason })
}

/// Whether there are parameters of an adapter at the weight of a table.
struct Adapted {
    table: &'static str,
    path: Vec<String>,
    found: bool,
}

impl ModuleVisitor for Adapted {
    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.path.push(name.into());
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, _param: &Param<Tensor<D>>) {
        self.found |= self.path.first().is_some_and(|first| first == self.table) && self.path.len() > 2;
    }
}

/// Why the layer at this path is refused, if it is a part of one in Python.
fn part<M: HuggingFace>(model: &M, path: &str) -> Option<String> {
    model.whole(path).map(|whole| format!("in Python, it is a part of `{whole}`, which is one layer"))
}

/// No layer with an adapter, or, with `all`, no layer at all, is refused for a reason.
fn check_layers<M: Module>(
    model: &M,
    all: bool,
    reason: impl Fn(&str) -> Option<String>,
) -> Result<(), PeftError> {
    let mut layers = Layers { reason, all, path: vec![], refused: None };
    model.visit(&mut layers);
    match layers.refused {
        Some((module, reason)) => Err(PeftError::Adapter { module, reason }),
        None => Ok(()),
    }
}

struct Layers<R> {
    reason: R,
    all: bool,
    path: Vec<String>,
    /// The path of a layer, and the reason.
    refused: Option<(String, String)>,
}

impl<R: Fn(&str) -> Option<String>> ModuleVisitor for Layers<R> {
    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.path.push(name.into());
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, _param: &Param<Tensor<D>>) {
        // Adapters are in the weights of their layers.
        let Some(end) = self.path.iter().position(|name| name == "weight") else { return };
        if self.refused.is_none() && (self.all || end + 1 < self.path.len()) {
            let path = self.path[..end].join(".");
            self.refused = (self.reason)(&path).map(|reason| (path, reason));
        }
    }
}

/// Checks whether Python's `peft` has a counterpart of each adapter of a network, as [`save_adapters`] does.
/// Ask before the adapters are trained.
///
/// # Errors
///
/// If one of these has an adapter:
/// - an embedding whose [weight](HuggingFace::tied_table) other layers have, too (also if it is trained),
/// - a layer that is only a part of one in Python,
/// - a router, an expert, or another feed-forward layer of a model with mixtures of experts.
pub fn check_adapters<M: HuggingFace>(model: &M, config: impl Into<PeftConfig>) -> Result<(), PeftError> {
    check_tied_table(model, &config.into())?;
    let reason = |path: &str| part(model, path).or_else(|| model.without_adapter(path).map(String::from));
    check_layers(model, false, reason)
}

/// Writes the adapters of a network for Python's `peft`. See [`peft::save`].
///
/// # Errors
///
/// Those of [`peft::save`] and of [`check_adapters`].
pub fn save_adapters<M: HuggingFace>(
    model: &M,
    config: impl Into<PeftConfig>,
    directory: impl AsRef<Path>,
) -> Result<(), PeftError> {
    let config = config.into();
    check_adapters(model, &config)?;
    peft::save(model, config, directory, names(model))
}

/// Writes a decoder with its adapters merged into its weights to `model.safetensors` in a directory, for Python's `transformers`. See
/// [`peft::save_merged`]. `config` is that of the adapters, which may be those of experts, too. (That of an
/// embedding that is the head changes both, as here.) The directory also needs `config.json`, and the files of
/// the tokenizer, of the model that was fine-tuned.
///
/// # Errors
///
/// Those of [`peft::save_merged`]. Also if there is a layer that is only a part of one in Python.
pub fn save_merged<M: HuggingFace + Decoder>(
    model: &M,
    config: impl Into<PeftConfig>,
    directory: impl AsRef<Path>,
    dtype: DType,
) -> Result<(), PeftError> {
    check_layers(model, true, |path| part(model, path))?;
    let directory = directory.as_ref();
    fs::create_dir_all(directory)
        .map_err(|source| PeftError::Io { file: directory.to_path_buf(), source })?;
    peft::save_merged(model, config, directory.join("model.safetensors"), names(model), dtype)
}

/// Where the modules of a network are in Python.
struct Names<M> {
    model: M,
    orders: RowOrders,
}

impl<M: HuggingFace> ModuleNames for Names<M> {
    fn name(&self, path: &str) -> String {
        self.model.module_name(path)
    }

    fn row_order(&self, path: &str) -> Option<RowOrder> {
        self.orders.get(path)
    }

    fn has_inputs_first(&self, _path: &str) -> bool {
        self.model.has_inputs_first()
    }
}

fn names<M: HuggingFace>(model: &M) -> Names<M> {
    Names { model: model.clone(), orders: model.row_orders() }
}
