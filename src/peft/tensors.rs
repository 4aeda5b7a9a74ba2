//! [`Tensors`]: the file of tensors in a directory of adapters.
use super::{CONFIG, PeftError, TENSORS};
use crate::lazy::WeightFile;
use burn::tensor::TensorData;
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

/// The same in the format of `torch.save`, which older versions of `peft` wrote.
const PICKLED: &str = "adapter_model.bin";

/// A counter of batch norm in PyTorch.
pub(super) const BATCHES: &str = ".num_batches_tracked";

/// An open file of tensors, and which of them were taken.
pub(super) struct Tensors {
    pub file: WeightFile,
    /// The tensors that were taken, with the paths of the parameters that took them.
    taken: BTreeMap<String, String>,
}

impl Tensors {
    /// Opens the file in a directory.
    pub fn open(directory: &Path) -> Result<Self, PeftError> {
        let found =
            [TENSORS, PICKLED].map(|name| directory.join(name)).into_iter().find(|file| file.exists());
        let file = WeightFile::open(found.unwrap_or_else(|| directory.join(TENSORS)))?;
        Ok(Self { file: file.with_pytorch_adapter(), taken: BTreeMap::new() })
    }

    /// The values of a tensor for a parameter, if there is one with this name.
    pub fn take(&mut self, name: &str, path: &str) -> Result<Option<TensorData>, String> {
        let Some(data) = self.file.read_if_any(name).map_err(|error| error.to_string())? else {
            return Ok(None);
        };
        if !data.dtype().is_float() {
            return Err(format!("{name} is {:?}, no float", data.dtype()));
        }
        self.mark(name, path)?;
        Ok(Some(data))
    }

    /// Marks a tensor as taken.
    pub fn mark(&mut self, name: &str, path: &str) -> Result<(), String> {
        // Some parameters are offered twice. They have the second adapter, which is the same.
        match self.taken.insert(name.into(), path.into()).filter(|other| other != path) {
            Some(other) => Err(format!("{name} is for {other} and for {path}")),
            None => Ok(()),
        }
    }

    pub fn has_any(&self) -> bool {
        !self.taken.is_empty()
    }

    pub fn is_taken(&self, name: &str) -> bool {
        self.taken.contains_key(name)
    }

    /// The names of tensors that no parameter took. `peft` has two copies of a module that is trained as a whole, and may write biases and
    /// embeddings of both beside what is loaded. A counter of batches is not used here.
    pub fn left(&self) -> impl Iterator<Item = &str> {
        let is_known = |name: &&str| {
            let trained = name.replace(".modules_to_save.", ".");
            self.is_taken(&trained) || name.contains(".original_module.") || name.ends_with(BATCHES)
        };
        self.file.tensors().map(|tensor| tensor.name).filter(move |name| !is_known(name))
    }
}

/// Reads the configuration in a directory. If there is none, the error says where others are.
pub(super) fn read_config(directory: &Path) -> Result<Vec<u8>, PeftError> {
    let file = directory.join(CONFIG);
    fs::read(&file).map_err(|source| {
        let below = fs::read_dir(directory).into_iter().flatten().flatten();
        let mut below: Vec<_> = below.filter(|entry| entry.path().join(CONFIG).exists()).collect();
        below.sort_by_key(fs::DirEntry::file_name);
        match below.is_empty() {
            true => PeftError::Io { file, source },
            false => {
                let names: Vec<_> =
                    below.iter().map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
                let reason = format!("there is none, but in the folders {}", names.join(", "));
                PeftError::Config { file, reason }
            }
        }
    })
}
