//! [`WeightFile`]: an open file of weights, with the names, shapes and places of its tensors. Tensors are read on demand.
use super::format;
use super::gguf;
use super::names::{self, Replacement};
use super::open_file::{OpenFile, Opener};
use super::source::{Entry, Origin};
use super::tensors::{Tensors, Unreadable};
use super::{LazyError, RowOrders};
use crate::burn_next::{handed, packed};
use burn::tensor::{AllocationProperty, Bytes, DType, Shape, TensorData};
use burn_store::{ModuleAdapter, ModuleContext, PyTorchToBurnAdapter, burn_pack};
use std::any::Any;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// How weights are read from their file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ReadMode {
    /// Copies weights into memory of this process with positioned reads. The [budget](super::LazyOptions::with_budget) bounds this memory.
    /// [`WeightFile::open`] reads this way.
    #[default]
    Copy,
    /// Uses weights where they lie in the mapped file. [`WeightFile::open_mapped`] reads this way.
    Map,
}

/// An open file of weights. Only its header is in memory.
///
/// It reads [safetensors](https://github.com/huggingface/safetensors), as one file or as shards with their index; Burn's burnpack; GGUF;
/// and PyTorch checkpoints, through burn-store. Offsets, shapes and dtypes are checked when the file is opened.
///
/// # If the file changes
///
/// If a file is *replaced* (another file is renamed to its path, as `save_file` and [`prepare`](super::prepare) do), whoever has it open
/// still reads the old one. If a file is *rewritten in place* or truncated, the next read of a tensor fails with an error that says so:
/// outputs and gradients never mix the weights of two versions. Weights that are already in memory stay in use. A change is detected by the
/// length and modification time of the file, so a change right after opening, within the resolution of the file system's clock, goes
/// unnoticed. For tensors that burn-store reads (see below), a replaced file is an error, too.
///
/// None of this holds for a [mapped](Self::open_mapped) file, which must not change.
///
/// # Packed tensors
///
/// The blocks of GGUF (`Q4_0`, `Q4_1`, `Q5_0`, `Q5_1`, `Q8_0`, `Q2_K` to `Q6_K`, `IQ4_NL`, `IQ4_XS`), the four bits of bitsandbytes (`nf4`,
/// `fp4`, with scales that may be packed, too) and `float8_e4m3fn` (with `weight_scale_inv` for blocks of 128 x 128, with `weight_scale` for
/// each row or for all, or without scales) are tensors of f32 that are unpacked whenever they are read. Every element is what `gguf`,
/// bitsandbytes and PyTorch compute before they round it to the dtype of the model. Other scales, scales of bitsandbytes that are missing, and
/// other types of GGUF are an error of their tensor; types that `gguf-rs-lib` does not know, and versions of GGUF other than 3, of their file.
///
/// In a product of few rows on a CPU, as in generation, layers of this library unpack a part of such a weight at a time, past the cache. The
/// pages of a mapped file that this touches stay in memory until the system needs it.
///
/// # PyTorch checkpoints
///
/// The tensors of zip archives, which PyTorch writes since 1.6, are read where they lie in the file, and can be mapped; their checksums are
/// not compared. burn-store reads compressed entries, tensors that are not contiguous, bools, and checkpoints of older formats. It reads a
/// whole tensor at a time, also for a few rows of an embedding. A checkpoint with a kind of tensor that burn-store does not know (sparse, complex,
/// quantized by PyTorch, float8) is read without its help: only what lies in the archive in row-major order.
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
    tensors: Arc<Tensors>,
    /// Names without the prefixes of wrappers, to those in the file.
    plain_names: Arc<BTreeMap<String, String>>,
    mode: ReadMode,
    adapter: Option<Adapter>,
}

/// How tensors are adapted to the modules that they are loaded into.
#[derive(Clone)]
struct Adapter {
    adapter: Arc<dyn ModuleAdapter>,
    /// If it is known to change nothing but to swap the axes of matrices, the layers to which it does more.
    reordered: Option<RowOrders>,
}

/// A tensor of a [`WeightFile`].
#[derive(Clone, Copy, Debug)]
pub struct TensorInfo<'a> {
    /// Its name, after [remapping](WeightFile::with_key_remapping).
    pub name: &'a str,
    /// Its dtype in the file; f32 if it is packed.
    pub dtype: DType,
    /// Its shape in the file; that of its elements if it is packed.
    pub shape: &'a Shape,
    /// Its bytes in the file.
    pub bytes: usize,
    /// How its elements are packed in the file, if they are: `Q4_K`, `nf4`, ...
    pub packing: Option<&'a str>,
}

impl WeightFile {
    /// Opens a file, the index of a sharded one, or a directory with one of these.
    ///
    /// # Errors
    ///
    /// Returns an error if the file cannot be read, is not a weight file, or has a header that contradicts itself or the file.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, LazyError> {
        Self::open_by(path.as_ref(), ReadMode::Copy, &OpenFile::open)
    }

    /// Opens a file as [`open`](Self::open) does, and maps it into memory: tensors are used where they lie in the file, without a copy and
    /// without heap memory. Memory beyond the [budget](super::LazyOptions::with_budget) is given back to the system.
    ///
    /// A tensor is still copied if it is converted to another dtype, changed by an adapter, not aligned in the file
    /// ([`prepare`](super::prepare) aligns tensors), or read by burn-store.
    /// [`ReportedParameter::mapped`](super::ReportedParameter::mapped) says which parameters are used without a copy.
    ///
    /// ```
    /// use burn::module::Module;
    /// use burn::tensor::{Device, Tensor};
    /// use burn_memsave::lazy::{LazyLoad, LazyOptions, WeightFile};
    /// use burn_memsave::nn::LinearConfig;
    ///
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("model.bpk");
    /// let (device, config) = (Device::flex(), LinearConfig::new(256, 256));
    /// config.init(&device).save_file(&path)?;
    ///
    /// // SAFETY: the file is in a directory of our own, and nobody else writes there.
    /// let file = unsafe { WeightFile::open_mapped(&path)? };
    /// let (linear, report) = config.init(&device).lazy_load(&file, &LazyOptions::new())?;
    /// assert!(report.lazy[0].mapped);
    /// linear.forward(Tensor::<2>::ones([1, 256], &device));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// Safe code cannot map a file:
    ///
    /// ```compile_fail,E0133
    /// let file = burn_memsave::lazy::WeightFile::open_mapped("model.bpk");
    /// ```
    ///
    /// # Safety
    ///
    /// No process may write to the file (or its shards) or truncate it as long as the `WeightFile`, a clone of it, a module loaded from it,
    /// or a tensor of such a module is alive. Rust assumes that this memory does not change: a change is undefined behavior, and after a
    /// truncation the system ends the process (`SIGBUS`). A private mapping would not help, since it still shows changes to pages that were
    /// not touched yet. Replacing the file by renaming another one to its path is allowed.
    ///
    /// # Errors
    ///
    /// Returns the errors of [`open`](Self::open), and an error if the system cannot map the file.
    pub unsafe fn open_mapped(path: impl AsRef<Path>) -> Result<Self, LazyError> {
        // SAFETY: the promise is the same.
        let opener = |path| unsafe { OpenFile::open_mapped(path) };
        Self::open_by(path.as_ref(), ReadMode::Map, &opener)
    }

    fn open_by(path: &Path, mode: ReadMode, opener: Opener<'_>) -> Result<Self, LazyError> {
        let tensors = format::open(path, opener)?;
        let (path, plain_names) = (path.to_path_buf(), Arc::default());
        Ok(Self { path, tensors: Arc::default(), plain_names, mode, adapter: None }.with_tensors(tensors))
    }

    pub(super) fn with_tensors(self, tensors: Tensors) -> Self {
        let plain_names = names::without_wrappers(tensors.names());
        Self { tensors: Arc::new(tensors), plain_names: Arc::new(plain_names), ..self }
    }

    /// How tensors are read, as chosen when the file was opened.
    pub fn read_mode(&self) -> ReadMode {
        self.mode
    }

    /// The tensors whose names begin with `key` and a dot, without these: what a trainer saved beside its own state under a key such as
    /// `state_dict` or `model`, or one part of a model.
    ///
    /// # Errors
    ///
    /// Returns an error if there is no such tensor.
    pub fn with_key(self, key: &str) -> Result<Self, LazyError> {
        let within = |name: &str| Some(name.strip_prefix(key)?.strip_prefix('.')?.to_owned());
        let tensors = self.tensors.renamed(within).unwrap_or_default(); // different names have different rests
        if tensors.names().next().is_some() {
            return Ok(self.with_tensors(tensors));
        }
        let keys: BTreeSet<_> = self.tensors.names().filter_map(|name| name.split('.').next()).collect();
        let keys = keys.into_iter().take(64).collect::<Vec<_>>().join(", ");
        let reason = format!("no tensors under the key {key}; it has the keys {keys}");
        Err(LazyError::Malformed { file: self.path, reason })
    }

    /// Renames the tensors: in every name, matches of the regular expression `from` are replaced by `to`, which may refer to groups as
    /// `$1` (or `${1}`, before a letter, a digit or a `_`). Names are those of the file, with the prefixes of wrappers, if there are any.
    ///
    /// # Errors
    ///
    /// Returns an error if the expression is malformed or matches no name, if `to` refers to a group that the expression does not have, or
    /// if two tensors would have the same name.
    pub fn with_key_remapping(self, from: &str, to: &str) -> Result<Self, LazyError> {
        let replacement = Replacement::new(from, to)?;
        match replaced(&self.tensors, &replacement)? {
            Some(tensors) => Ok(self.with_tensors(tensors)),
            None => Err(replacement.matches_none(self.tensors.names())),
        }
    }

    /// Renames the tensors by a table, as [`with_key_remapping`](Self::with_key_remapping) does by each of its rows, one after the other. A
    /// row may match nothing: the table may be for a family of models, not each of which has all tensors.
    ///
    /// # Errors
    ///
    /// Those of `with_key_remapping`, except that an expression matches no name.
    pub fn with_key_remappings(self, table: &[(&str, &str)]) -> Result<Self, LazyError> {
        let mut tensors = (*self.tensors).clone();
        for (from, to) in table {
            tensors = replaced(&tensors, &Replacement::new(from, to)?)?.unwrap_or(tensors);
        }
        Ok(self.with_tensors(tensors))
    }

    /// Adapts the tensors to the modules that they are loaded into. A tensor that the adapter changes is read whole, and changed whenever
    /// it is read from the file. To avoid that, [`prepare`](super::prepare) the file once, from
    /// [`PrepareSource::for_module`](super::PrepareSource::for_module). What [`PyTorchToBurnAdapter`] by itself would change is read as it
    /// is: see [`with_pytorch_adapter`](Self::with_pytorch_adapter).
    pub fn with_adapter(self, adapter: impl ModuleAdapter + 'static) -> Self {
        // Of an adapter that is not known by its type, no probe could tell what it does to tensors of other shapes and values.
        let any: &dyn Any = &adapter;
        let reordered = match any.downcast_ref::<RowOrders>() {
            Some(orders) => Some(orders.clone()),
            None => any.is::<PyTorchToBurnAdapter>().then(RowOrders::new),
        };
        Self { adapter: Some(Adapter { adapter: Arc::new(adapter), reordered }), ..self }
    }

    /// Adapts a file that PyTorch wrote, in any format, as Burn's [`PyTorchToBurnAdapter`] does: it finds the parameters of norms under
    /// PyTorch's names, and transposes the weights of linear layers. PyTorch checkpoints need it, too.
    ///
    /// Lazy weights are not transposed in memory: layers use them in PyTorch's layout, as views with swapped strides. (Quantized ones are
    /// transposed when they are read.)
    pub fn with_pytorch_adapter(self) -> Self {
        self.with_adapter(PyTorchToBurnAdapter)
    }

    /// The path that was opened.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// What the beginning of a GGUF file says of its model: the architecture and its sizes, but no lists, such as that of tokens, which
    /// [`read_metadata`](Self::read_metadata) gives. `None` for other files.
    ///
    /// ```no_run
    /// let file = burn_memsave::lazy::WeightFile::open("Qwen3-0.6B-Q4_K_M.gguf")?;
    /// assert_eq!(file.metadata().unwrap()["general.architecture"], "qwen3");
    /// # Ok::<(), burn_memsave::lazy::LazyError>(())
    /// ```
    pub fn metadata(&self) -> Option<&serde_json::Map<String, serde_json::Value>> {
        self.tensors.metadata.as_deref()
    }

    /// Reads all that the beginning of a GGUF file says of its model, with lists, such as that of tokens. `None` for other files.
    ///
    /// # Errors
    ///
    /// Returns an error if the file can no longer be read.
    pub fn read_metadata(&self) -> Result<Option<serde_json::Map<String, serde_json::Value>>, LazyError> {
        match self.tensors.metadata {
            Some(_) => gguf::all_metadata(&OpenFile::open(self.path.clone())?).map(Some),
            None => Ok(None),
        }
    }

    /// Whether it has a tensor of this name, if only one that cannot be read.
    pub fn has(&self, name: &str) -> bool {
        self.tensors.has(name)
    }

    /// All tensors that can be read, by name.
    pub fn tensors(&self) -> impl ExactSizeIterator<Item = TensorInfo<'_>> {
        self.tensors.entries.iter().map(|(name, entry)| {
            let Entry { tensor, .. } = entry;
            let packing = entry.packing();
            let bytes = packing.map_or(tensor.byte_len(), |packing| packing.bytes());
            let packing = packing.map(|packing| packing.name());
            TensorInfo { name, dtype: tensor.dtype, shape: &tensor.shape, bytes, packing }
        })
    }

    /// The values of one tensor, as they are in the file.
    ///
    /// # Errors
    ///
    /// Returns an error if there is no tensor with this name, or if it cannot be read.
    pub fn read(&self, name: &str) -> Result<TensorData, LazyError> {
        self.read_if_any(name)?.ok_or_else(|| self.missing(name, &[]))
    }

    /// The same; `None` if there is no tensor with this name.
    pub(crate) fn read_if_any(&self, name: &str) -> Result<Option<TensorData>, LazyError> {
        let found = self.get(name)?;
        found.map(|(_, entry)| entry.values(entry.tensor.dtype)).transpose()
    }

    /// The tensor with this name, or with this name in a wrapper, and its name in the file.
    pub(super) fn get(&self, name: &str) -> Result<Option<(&String, &Entry)>, LazyError> {
        let Tensors { entries, unreadable, .. } = &*self.tensors;
        for name in [Some(name), self.plain_names.get(name).map(String::as_str)].into_iter().flatten() {
            if let Some(Unreadable { file, reason }) = unreadable.get(name) {
                let (file, tensor, reason) = (file.clone(), name.into(), reason.clone());
                return Err(LazyError::Tensor { file, tensor, reason });
            }
            if let Some(found) = entries.get_key_value(name) {
                return Ok(Some(found));
            }
        }
        Ok(None)
    }

    /// The tensor for a parameter, adapted to it, if there is one: under the first of these names in the file. `containers` are the types of
    /// the modules around the parameter.
    pub(crate) fn find_for(
        &self,
        names: &[String],
        containers: &[String],
    ) -> Result<Option<FoundTensor>, LazyError> {
        let found = self.find(names, containers)?;
        Ok(found.map(|(name, entry)| FoundTensor { name, entry }))
    }

    pub(super) fn has_adapter(&self) -> bool {
        self.adapter.is_some()
    }

    pub(super) fn contents(&self) -> &Tensors {
        &self.tensors
    }

    /// Finds the tensor for a parameter: its name in the file, and its adapted entry. The first path that has a tensor counts; adapters are
    /// told the first one, which is the parameter's own.
    pub(super) fn find(
        &self,
        paths: &[String],
        containers: &[String],
    ) -> Result<Option<(String, Entry)>, LazyError> {
        let context = ModuleContext::new(containers);
        for path in paths {
            let (module, parameter) = path.rsplit_once('.').unwrap_or(("", path));
            let alternative = self.adapter.as_ref().zip(context.module_type());
            let alternative = alternative
                .and_then(|(Adapter { adapter, .. }, of)| adapter.get_alternative_param_name(parameter, of))
                .map(|parameter| if module.is_empty() { parameter } else { format!("{module}.{parameter}") });
            for name in [Some(path), alternative.as_ref()].into_iter().flatten() {
                if let Some((name, entry)) = self.get(name)? {
                    return Ok(Some((name.clone(), self.adapt(entry, &paths[0], context)?)));
                }
            }
        }
        Ok(None)
    }

    /// The error that there is no tensor for a parameter, and for others.
    pub(super) fn missing(&self, parameter: &str, others: &[String]) -> LazyError {
        let similar_names = self.similar_names(parameter);
        let (parameter, others) = (parameter.into(), others.to_vec());
        LazyError::Missing { file: self.path.clone(), parameter, similar_names, others }
    }

    pub(super) fn similar_names(&self, parameter: &str) -> Vec<String> {
        names::similar(parameter, self.tensors.names())
    }

    fn adapt(&self, entry: &Entry, path: &str, context: ModuleContext<'_>) -> Result<Entry, LazyError> {
        let Some(Adapter { adapter, reordered }) = &self.adapter else { return Ok(entry.clone()) };
        let named = renamed(&entry.as_floats(), path);
        let layer = path.rsplit_once('.').map_or("", |(layer, _)| layer);
        let order = reordered.as_ref().and_then(|orders| orders.get(layer));
        if let Some(order) = order {
            order.check(&named.shape, named.dtype, 0).map_err(|reason| entry.error(reason))?;
        }
        // If the adapter leaves this tensor alone, it also leaves a probe alone that has this byte as its data.
        static BYTE: [u8; 1] = [0];
        let byte = Bytes::from_shared(bytes::Bytes::from_static(&BYTE), AllocationProperty::Other);
        let (dtype, shape) = (named.dtype, named.shape.clone());
        let probe = burn_pack::Tensor::new(path.into(), dtype, shape.clone(), named.param_id, byte);
        // An adapter that reads the data right away may panic at a tensor of one byte.
        let is_same = catch_unwind(AssertUnwindSafe(|| {
            let probe = packed(adapter.adapt(handed(probe), context));
            (probe.byte_len(), probe.dtype, &probe.shape) == (BYTE.len(), dtype, &shape)
                && probe.to_bytes().is_ok_and(|bytes| bytes.as_ptr() == BYTE.as_ptr())
        }));
        if let Ok(true) = is_same {
            return Ok(entry.clone());
        }
        let mut tensor = packed(adapter.adapt(handed(named), context));
        // The bytes of a quantized matrix depend on its rows: transposed, it is another one.
        let only_transposes = reordered.is_some() && order.is_none();
        if only_transposes && dtype == entry.tensor.dtype && tensor.shape[..] == [shape[1], shape[0]] {
            return Ok(Entry { transposed: true, ..entry.clone() });
        }
        tensor.name.clone_from(&entry.tensor.name);
        Ok(Entry { tensor, file: entry.file.clone(), origin: Origin::Whole, transposed: false })
    }
}

/// The tensors under their new names; `None` if none of these changes.
fn replaced(tensors: &Tensors, replacement: &Replacement) -> Result<Option<Tensors>, LazyError> {
    if !tensors.names().any(|name| replacement.matches(name)) {
        return Ok(None);
    }
    let name = |name: &str| Some(replacement.apply(name).unwrap_or_else(|| name.into()));
    let renamed = tensors.renamed(name).map_err(|[first, second, name]| {
        replacement.error(format!("{first} and {second} would both be called {name}"))
    })?;
    Ok(Some(renamed))
}

/// The tensor of a parameter, not read yet.
pub(crate) struct FoundTensor {
    name: String,
    entry: Entry,
}

impl FoundTensor {
    /// Its name in the file.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its values, which are floats.
    pub fn read(&self, dtype: DType) -> Result<TensorData, LazyError> {
        match self.entry.float() {
            Some(_) => self.entry.values(dtype),
            None => Err(self.entry.error(format!("it is {:?}, no float", self.entry.tensor.dtype))),
        }
    }

    /// The same in its dtype and layout in the file.
    pub fn read_as_stored(&self) -> Result<TensorData, LazyError> {
        let entry = Entry { transposed: false, ..self.entry.clone() };
        Self { name: self.name.clone(), entry }.read(self.entry.tensor.dtype)
    }
}

fn renamed(tensor: &burn_pack::Tensor, name: &str) -> burn_pack::Tensor {
    let mut tensor = tensor.clone();
    tensor.name = name.into();
    tensor
}

impl fmt::Debug for WeightFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "WeightFile({}, {} tensors)", self.path.display(), self.tensors().len())
    }
}
