//! Loads weights from torchvision checkpoints.
use burn::module::Module;
use burn::tensor::TensorData;
use burn_memsave::burn_next::{handed, packed};
use burn_store::burn_pack::Tensor;
use burn_store::{
    ApplyError, KeyRemapper, ModuleSnapshot, ModuleStore, PyTorchToBurnAdapter, PytorchStore,
    SafetensorsStore, bridge,
};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// Turns the names in a checkpoint into paths of parameters: replaces the matches of regular expressions, one after the other.
///
/// ```
/// use burn_memsave_paper::vision::torchvision::Keys;
///
/// let keys = Keys::default().replace(r"^fc\.", "head.").replace(r"\.bn(\d)\.", ".norms.${1}.");
/// assert_eq!(keys.apply("layer1.bn2.weight"), "layer1.norms.2.weight");
/// ```
#[derive(Clone, Debug, Default)]
pub struct Keys(KeyRemapper);

impl Keys {
    /// Then replaces matches of `from` by `to`, which may refer to groups as `${1}`.
    ///
    /// # Panics
    ///
    /// If the expression is malformed.
    pub fn replace(self, from: impl AsRef<str>, to: impl Into<String>) -> Self {
        Self(self.0.add_pattern(from, to).expect("a valid expression"))
    }

    /// Then replaces as `others` do.
    pub fn and(mut self, others: Self) -> Self {
        self.0.patterns.extend(others.0.patterns);
        self
    }

    /// The path of the parameter of this name.
    pub fn apply(&self, name: &str) -> String {
        let patterns = self.0.patterns.iter();
        patterns.fold(name.to_owned(), |name, (from, to)| from.replace_all(&name, to.as_str()).into_owned())
    }
}

/// A network that torchvision has, too.
pub trait Torchvision: Module {
    /// Turns torchvision's names of parameters into paths in this network.
    fn keys(&self) -> Keys;
}

/// Why a checkpoint cannot be loaded.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LoadError {
    /// The file cannot be read.
    #[error("{}: {reason}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// The file is not of this network.
    #[error(
        "{}: not the parameters of this network{}{}{}",
        path.display(),
        listed("the file has none for", missing),
        listed("the network has none for", unused),
        listed("what does not fit", wrong)
    )]
    Mismatch {
        /// The file.
        path: PathBuf,
        /// Parameters of the network that the file has no tensor for.
        missing: Vec<String>,
        /// Tensors of the file, as they are called in the network, that have no parameter.
        unused: Vec<String>,
        /// Tensors of another shape or dtype than their parameters, and those that cannot be read.
        wrong: Vec<String>,
    },
}

/// The first of the names, for an error.
fn listed(what: &str, names: &[String]) -> String {
    const SHOWN: usize = 8;
    let rest = names.len().saturating_sub(SHOWN);
    let shown = names.iter().take(SHOWN).map(String::as_str).collect::<Vec<_>>().join(", ");
    match (names.len(), rest) {
        (0, _) => String::new(),
        (_, 0) => format!("; {what}: {shown}"),
        _ => format!("; {what}: {shown}, and {rest} more"),
    }
}

/// Loads the weights of a checkpoint that torchvision, or `torch.save(model.state_dict(), path)`, wrote. A file with the extension
/// `safetensors` is read as such, any other as the format of `torch.save`.
///
/// Either every parameter and every running statistic is loaded, or nothing is. The number of batches that batch norms have seen, and the
/// auxiliary classifiers of segmentation networks, are left out.
///
/// ```no_run
/// use burn::tensor::Device;
/// use burn_memsave_paper::vision::{Classifier, ResNet, memsave::resnet, torchvision};
///
/// let model = resnet::Net::new(ResNet::D50, &Device::flex().autodiff());
/// let model = torchvision::load(model, "resnet50-11ad3fa6.pth")?;
/// # Ok::<(), torchvision::LoadError>(())
/// ```
///
/// # Errors
///
/// If the file cannot be read, or if its tensors are not the parameters of the network, one for one.
pub fn load<M: Torchvision>(mut model: M, path: impl AsRef<Path>) -> Result<M, LoadError> {
    let path = path.as_ref();
    let keys = model.keys();
    let is_wanted = |tensor: &Tensor| {
        !tensor.name.ends_with("num_batches_tracked") && !tensor.name.starts_with("aux_classifier.")
    };
    let mut tensors = read(path)?;
    tensors.retain(is_wanted);
    tensors.iter_mut().for_each(|tensor| tensor.name = keys.apply(&tensor.name));
    let tensors: Vec<_> = tensors.into_iter().flat_map(split_projections).collect();
    let mut names = BTreeSet::new();
    if let Some(tensor) = tensors.iter().find(|tensor| !names.insert(&tensor.name)) {
        let reason = format!("two tensors are {}", tensor.name);
        return Err(LoadError::Read { path: path.into(), reason });
    }
    let result = model.apply(tensors, None, Some(Box::new(PyTorchToBurnAdapter)), true);
    let missing: Vec<_> = result.missing.into_iter().map(|(path, _)| path).collect();
    let wrong: Vec<_> = result.errors.iter().map(wrong).collect();
    if missing.is_empty() && result.unused.is_empty() && wrong.is_empty() {
        return Ok(model);
    }
    Err(LoadError::Mismatch { path: path.into(), missing, unused: result.unused, wrong })
}

fn wrong(error: &ApplyError) -> String {
    match error {
        ApplyError::ShapeMismatch { path, expected, found } => {
            format!("{path} ({:?} in the network, {:?} in the file)", &expected[..], &found[..])
        }
        other => other.to_string(),
    }
}

/// The tensors of a file. Their bytes are read when they are needed.
fn read(path: &Path) -> Result<Vec<Tensor>, LoadError> {
    fn all<S: ModuleStore>(mut store: S) -> Result<Vec<Tensor>, String> {
        match store.get_all_tensors() {
            Ok(tensors) => Ok(tensors.values().cloned().map(packed).collect()),
            Err(error) => Err(error.to_string()),
        }
    }
    let tensors = match path.extension().is_some_and(|extension| extension == "safetensors") {
        true => all(SafetensorsStore::from_file(path)),
        // Indices stay as they are, because the keys of a network expect gaps.
        false => all(PytorchStore::from_file(path).map_indices_contiguous(false)),
    };
    tensors.map_err(|reason| LoadError::Read { path: path.into(), reason })
}

/// Splits the projections of queries, keys and values, which are one tensor in PyTorch's attention and three in Burn's.
fn split_projections(tensor: Tensor) -> Vec<Tensor> {
    let Some((module, parameter)) = tensor.name.split_once(".in_proj_") else { return vec![tensor] };
    let mut shape = tensor.shape.clone();
    if shape.rank() == 0 || !shape[0].is_multiple_of(3) {
        return vec![tensor];
    }
    shape[0] /= 3;
    let part = |(at, of): (usize, &str)| {
        let name = format!("{module}.{of}.{parameter}");
        let (dtype, shape) = (tensor.dtype, shape.clone());
        packed(bridge::map_data(handed(tensor.clone()), name, dtype, shape.clone(), move |data| {
            let bytes = data.as_bytes();
            let third = bytes.len() / 3;
            TensorData::from_bytes_vec(bytes[at * third..][..third].to_vec(), shape.clone(), dtype)
        }))
    };
    ["query", "key", "value"].into_iter().enumerate().map(part).collect()
}
