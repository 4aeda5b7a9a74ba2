use super::LazyError;
use super::format;
use super::source::Entry;
use burn::tensor::{AllocationProperty, Bytes, DType, Shape};
use burn_store::{KeyRemapper, ModuleAdapter, ModuleContext, PyTorchToBurnAdapter, burn_pack};
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A file of weights, open, of which nothing but the header is in memory.
///
/// Formats: [safetensors](https://github.com/huggingface/safetensors), one file or shards with their index; Burn's burnpack; PyTorch
/// checkpoints, whose tensors are read through burn-store. Offsets, shapes and dtypes are checked when it is opened.
///
/// ```
/// use burn::module::Module;
/// use burn::tensor::Device;
/// use burn_memsave::{lazy::WeightFile, nn::LinearConfig};
///
/// # let directory = tempfile::tempdir()?;
/// # let path = directory.path().join("model.bpk");
/// let model = LinearConfig::new(4, 8).init(&Device::flex());
/// model.save_file(&path)?;
///
/// let file = WeightFile::open(&path)?;
/// let names: Vec<_> = file.tensors().map(|tensor| tensor.name).collect();
/// assert_eq!(names, ["bias", "weight"]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone)]
pub struct WeightFile {
    path: PathBuf,
    tensors: Arc<format::Tensors>,
    adapter: Option<Arc<dyn ModuleAdapter>>,
}

/// A tensor of a [`WeightFile`].
#[derive(Clone, Copy, Debug)]
pub struct TensorInfo<'a> {
    /// Its name, after [remapping](WeightFile::with_key_remapping).
    pub name: &'a str,
    /// Its dtype in the file.
    pub dtype: DType,
    /// Its shape in the file.
    pub shape: &'a Shape,
    /// Its bytes in the file.
    pub bytes: usize,
}

impl WeightFile {
    /// Opens a file, the index of a sharded one, or a directory with one of these.
    ///
    /// # Errors
    ///
    /// Returns an error for a file that cannot be read, is no weight file, or whose header contradicts itself or the file.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, LazyError> {
        let path = path.as_ref();
        Ok(Self { path: path.to_path_buf(), tensors: Arc::new(format::open(path)?), adapter: None })
    }

    /// Renames the tensors: in every name, matches of the regular expression `from` become `to` (which may refer to groups, `$1`).
    ///
    /// # Errors
    ///
    /// Returns an error for a malformed expression, and if two tensors would have one name.
    pub fn with_key_remapping(self, from: &str, to: &str) -> Result<Self, LazyError> {
        let error = |reason: String| LazyError::Pattern { pattern: from.into(), reason };
        let remapper = KeyRemapper::new().add_pattern(from, to).map_err(|regex| error(regex.to_string()))?;
        // Names only: the entries keep those of the file, for messages.
        let tensors = self.tensors.iter().map(|(name, entry)| renamed(&entry.tensor, name)).collect();
        let entries = self.tensors.values().cloned();
        let (tensors, _) = remapper.remap(tensors);
        let count = self.tensors.len();
        let tensors: format::Tensors = tensors.into_iter().map(|tensor| tensor.name).zip(entries).collect();
        match tensors.len() == count {
            true => Ok(Self { tensors: Arc::new(tensors), ..self }),
            false => Err(error(format!("{} tensors would have the names of others", count - tensors.len()))),
        }
    }

    /// Adapts the tensors to the modules they go to, such as [`PyTorchToBurnAdapter`] does. A tensor that an adapter changes is
    /// read as a whole, and changed, at every use: [`prepare`](super::prepare) such a file once, instead, from
    /// [`PrepareSource::for_module`](super::PrepareSource::for_module).
    pub fn with_adapter(self, adapter: impl ModuleAdapter + 'static) -> Self {
        Self { adapter: Some(Arc::new(adapter)), ..self }
    }

    /// For files that PyTorch wrote, whatever their format: transposes the weights of linear layers, and knows the names of the
    /// parameters of norms. PyTorch checkpoints want it, too.
    pub fn from_pytorch(self) -> Self {
        self.with_adapter(PyTorchToBurnAdapter)
    }

    /// The path it was opened by.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// All tensors, by name.
    pub fn tensors(&self) -> impl ExactSizeIterator<Item = TensorInfo<'_>> {
        self.tensors.iter().map(|(name, Entry { tensor, .. })| TensorInfo {
            name,
            dtype: tensor.dtype,
            shape: &tensor.shape,
            bytes: tensor.byte_len(),
        })
    }

    pub(super) fn has_adapter(&self) -> bool {
        self.adapter.is_some()
    }

    pub(super) fn entries(&self) -> impl Iterator<Item = (&String, &Entry)> {
        self.tensors.iter()
    }

    /// The tensor for a parameter, as the adapter makes it, and its name; by the first of its paths that there is a tensor for.
    pub(super) fn find(&self, paths: &[String], containers: &[String]) -> Option<(String, Entry)> {
        let context = ModuleContext::new(containers);
        for path in paths {
            if let Some(entry) = self.tensors.get(path) {
                return Some((path.clone(), self.adapt(entry, path, context)));
            }
            let (module, parameter) = path.rsplit_once('.').unwrap_or(("", path));
            let alternative = self.adapter.as_ref().zip(context.module_type());
            let alternative = alternative.and_then(|(a, of)| a.get_alternative_param_name(parameter, of));
            if let Some(parameter) = alternative {
                let name = if module.is_empty() { parameter } else { format!("{module}.{parameter}") };
                if let Some(entry) = self.tensors.get(&name) {
                    let entry = self.adapt(entry, path, context);
                    return Some((name, entry));
                }
            }
        }
        None
    }

    /// That there is no tensor for a parameter.
    pub(super) fn missing(&self, parameter: String) -> LazyError {
        let mut parts = parameter.rsplitn(3, '.');
        let end = match (parts.next(), parts.next()) {
            (Some(name), Some(module)) => format!("{module}.{name}"),
            _ => parameter.clone(),
        };
        let similar_names =
            self.tensors.keys().filter(|name| name.ends_with(&end)).take(3).cloned().collect();
        LazyError::Missing { file: self.path.clone(), parameter, similar_names }
    }

    fn adapt(&self, entry: &Entry, path: &str, context: ModuleContext<'_>) -> Entry {
        let Some(adapter) = &self.adapter else { return entry.clone() };
        let named = renamed(&entry.as_floats(), path);
        // What an adapter leaves alone keeps its bytes: this very byte.
        static BYTE: [u8; 1] = [0];
        let byte = Bytes::from_shared(bytes::Bytes::from_static(&BYTE), AllocationProperty::Other);
        let (dtype, shape) = (named.dtype, named.shape.clone());
        let probe = burn_pack::Tensor::new(path.into(), dtype, shape.clone(), named.param_id, byte);
        // An adapter that works at once may well panic at a tensor of one byte.
        let is_same = catch_unwind(AssertUnwindSafe(|| {
            let probe = adapter.adapt(probe, context);
            (probe.byte_len(), probe.dtype, &probe.shape) == (BYTE.len(), dtype, &shape)
                && probe.to_bytes().is_ok_and(|bytes| bytes.as_ptr() == BYTE.as_ptr())
        }));
        if let Ok(true) = is_same {
            return entry.clone();
        }
        let mut tensor = adapter.adapt(named, context);
        tensor.name.clone_from(&entry.tensor.name);
        Entry { tensor, file: entry.file.clone(), span: None }
    }
}

fn renamed(tensor: &burn_pack::Tensor, name: &str) -> burn_pack::Tensor {
    let mut tensor = tensor.clone();
    tensor.name = name.into();
    tensor
}

impl fmt::Debug for WeightFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "WeightFile({}, {} tensors)", self.path.display(), self.tensors.len())
    }
}
