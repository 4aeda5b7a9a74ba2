//! Loads weights from Hugging Face checkpoints: `model.safetensors`, its shards, or `pytorch_model.bin`.
//!
//! ```no_run
//! use burn::tensor::Device;
//! use burn_memsave_paper::text::{Decoder, DecoderSize, hugging_face, memsave::decoder::Llama};
//!
//! let size = DecoderSize { length: 2048, ..DecoderSize::LLAMA_3_2_1B };
//! let model = Llama::new(&size, &Device::flex().autodiff());
//! let model = hugging_face::load(model, "Llama-3.2-1B")?;
//! # Ok::<(), hugging_face::LoadError>(())
//! ```
use burn::module::Module;
use burn::tensor::{DType, TensorData};
use burn_memsave::burn_next::{StoreTensor, handed, packed};
use burn_memsave::lazy::{LazyError, LazyLoad, LazyOptions, LazyReport, WeightFile};
use burn_store::{ModuleAdapter, ModuleContext, PyTorchToBurnAdapter, bridge};
use std::path::{Path, PathBuf};

/// A network for which Hugging Face has checkpoints.
pub trait HuggingFace: Module {
    /// Replacements in the names of their tensors, applied one after the other: regular expressions, and the replacements of their
    /// matches. Tensors that the network does not need are renamed to something in `unused`.
    const NAMES: &'static [(&'static str, &'static str)];

    /// How their tensors become parameters.
    fn adapter(&self) -> impl ModuleAdapter + 'static {
        PyTorchToBurnAdapter
    }
}

/// Why a checkpoint cannot be loaded.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
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
    let file = M::NAMES
        .iter()
        .try_fold(WeightFile::open(path)?, |file, (from, to)| file.with_key_remapping(from, to))?
        .with_adapter(model.adapter());
    let (model, report) = model.lazy_load(&file, &options.clone().with_allow_partial(true))?;
    let unused: Vec<_> = report.unused.iter().filter(|name| !name.starts_with("unused.")).cloned().collect();
    match report.missing.is_empty() && unused.is_empty() {
        true => Ok((model, report)),
        false => Err(LoadError::Names { file: file.path().to_path_buf(), missing: report.missing, unused }),
    }
}

/// Reorders weights for rotary positions. Burn rotates features `2 i` and `2 i + 1` of a head by one angle, Hugging Face `i` and
/// `i + head / 2`. So the rows of the weights of queries and keys are reordered; the products of queries and keys stay the same.
#[derive(Clone, Debug)]
pub struct PairedRotations {
    /// Features of a head.
    pub head: usize,
}

impl ModuleAdapter for PairedRotations {
    fn adapt(&self, tensor: StoreTensor, context: ModuleContext<'_>) -> StoreTensor {
        let tensor = packed(tensor);
        let is_rotated = [".query.weight", ".key.weight"].iter().any(|end| tensor.name.ends_with(end));
        let tensor = match is_rotated {
            true => {
                let (head, name) = (self.head, tensor.name.clone());
                let (dtype, shape) = (tensor.dtype, tensor.shape.clone());
                bridge::map_data(handed(tensor), name, dtype, shape, move |data| paired(data, head))
            }
            false => handed(tensor),
        };
        PyTorchToBurnAdapter.adapt(tensor, context)
    }

    fn get_alternative_param_name(&self, parameter: &str, module: &str) -> Option<String> {
        PyTorchToBurnAdapter.get_alternative_param_name(parameter, module)
    }

    fn clone_box(&self) -> Box<dyn ModuleAdapter> {
        Box::new(self.clone())
    }
}

/// Row `i + half * head / 2` of every head becomes row `2 i + half`.
fn paired(data: TensorData, head: usize) -> TensorData {
    let (shape, dtype, bytes) = (data.shape(), data.dtype(), data.as_bytes());
    let row = bytes.len() / shape[0];
    let mut result = Vec::with_capacity(bytes.len());
    for rows in bytes.chunks_exact(head * row) {
        let (first, second) = rows.split_at(rows.len() / 2);
        for (first, second) in first.chunks_exact(row).zip(second.chunks_exact(row)) {
            result.extend_from_slice(first);
            result.extend_from_slice(second);
        }
    }
    TensorData::from_bytes_vec(result, shape.clone(), dtype)
}
