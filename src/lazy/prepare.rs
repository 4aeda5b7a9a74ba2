//! [`prepare`]: writes weights into one file that is fast to read lazily. Tensors are read and converted one at a time, while the file is
//! written.
use super::load::find_fitting;
use super::quantized;
use super::source::{Entry, Origin};
use super::targets::Targets;
use super::tensors::{Tensors, Unreadable};
use super::words::{into_bytes, words_for};
use super::{LazyError, WeightFile};
use burn::module::{Module, ModuleVisitor, Param, ParamId};
use burn::tensor::{Bool, Bytes, DType, Int, Tensor};
use burn_memsave_layers::{follow_path, frozen::Recorded, visit::VisitPath};
use burn_store::{bridge, burn_pack};
use std::convert::Infallible;
use std::ffi::OsStr;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// What [`prepare`] writes.
pub struct PrepareSource {
    /// The file that the tensors come from, for messages.
    path: PathBuf,
    tensors: Vec<(String, Entry)>,
}

impl PrepareSource {
    /// The parameters of a module, in the order of its fields, which is usually the order of execution. Lazy ones are read one at a time,
    /// so the file may be larger than memory; `save_file` would first make a record of all of them.
    pub fn of_module(module: &impl Module) -> Self {
        let path = PathBuf::from("a module");
        let mut collector = Collector::default();
        module.visit(&mut collector);
        let entry = |tensor: burn_pack::Tensor| {
            (
                tensor.name.clone(),
                Entry { tensor, file: path.clone(), origin: Origin::Whole, transposed: false },
            )
        };
        Self { tensors: collector.tensors.into_iter().map(entry).collect(), path }
    }

    /// The tensors of a file that a module has parameters for, in the order of the module's fields, and with its names and layouts. A
    /// module that was just initialized is enough, and takes no memory.
    ///
    /// # Errors
    ///
    /// Returns an error if the file has no tensor for a parameter, or one of another shape or kind.
    pub fn for_module(file: &WeightFile, module: &impl Module) -> Result<Self, LazyError> {
        let mut targets = Targets::default();
        module.visit(&mut targets);
        let (mut tensors, mut missing) = (vec![], vec![]);
        for target in targets.targets {
            match find_fitting(file, &target)? {
                Some((_, entry)) => tensors.push((target.path, entry)),
                None => missing.push(target.path),
            }
        }
        match &missing[..] {
            [] => Ok(Self { path: file.path().to_path_buf(), tensors }),
            [first, others @ ..] => Err(file.missing(first, others)),
        }
    }
}

/// Collects the parameters of a module as they are in records, without reading lazy ones.
#[derive(Default)]
struct Collector {
    path: VisitPath,
    tensors: Vec<burn_pack::Tensor>,
}

impl Collector {
    fn add(&mut self, param: ParamId, collected: impl FnOnce(String, Option<u64>) -> burn_pack::Tensor) {
        self.tensors.push(collected(self.path.joined(), Some(param.val())));
    }
}

impl ModuleVisitor for Collector {
    follow_path!();
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.add(param.id, |name, id| match Recorded::of(param) {
            Recorded::Value(value) => bridge::from_tensor(&value, name, id),
            Recorded::Frozen(weight) => {
                let (dtype, shape) = (weight.dtype(), weight.shape());
                bridge::deferred(name, dtype, shape, id, move || Ok(weight.read()))
            }
        });
    }
    fn visit_int<const D: usize>(&mut self, param: &Param<Tensor<D, Int>>) {
        self.add(param.id, |name, id| bridge::from_tensor(&param.transform_for_save().val(), name, id));
    }
    fn visit_bool<const D: usize>(&mut self, param: &Param<Tensor<D, Bool>>) {
        self.add(param.id, |name, id| bridge::from_tensor(&param.transform_for_save().val(), name, id));
    }
}

impl TryFrom<&WeightFile> for PrepareSource {
    type Error = LazyError;

    /// All tensors as they are in the file, sorted by name. Numbers in names are compared by value (`layers.2` comes before `layers.10`).
    ///
    /// Returns an error for a file with an adapter, which depends on the module: use [`for_module`](Self::for_module). So it does if one of
    /// the tensors cannot be read.
    fn try_from(file: &WeightFile) -> Result<Self, LazyError> {
        if file.has_adapter() {
            return Err(LazyError::Adapter { file: file.path().to_path_buf() });
        }
        let Tensors { entries, unreadable, incomplete, .. } = file.contents();
        if let Some((name, Unreadable { file, reason })) = unreadable.first_key_value() {
            let (file, tensor, reason) = (file.clone(), name.clone(), reason.clone());
            return Err(LazyError::Tensor { file, tensor, reason });
        }
        if let Some(reason) = incomplete {
            let (file, reason) = (file.path().to_path_buf(), format!("not all of it can be read: {reason}"));
            return Err(LazyError::Malformed { file, reason });
        }
        let mut tensors: Vec<_> = entries.iter().map(|(name, entry)| (name.clone(), entry.clone())).collect();
        tensors.sort_by_cached_key(|(name, _)| natural_order(name));
        Ok(Self { path: file.path().to_path_buf(), tensors })
    }
}

impl TryFrom<WeightFile> for PrepareSource {
    type Error = LazyError;

    fn try_from(file: WeightFile) -> Result<Self, LazyError> {
        Self::try_from(&file)
    }
}

impl TryFrom<&Path> for PrepareSource {
    type Error = LazyError;

    fn try_from(path: &Path) -> Result<Self, LazyError> {
        WeightFile::open(path)?.try_into()
    }
}

impl TryFrom<&str> for PrepareSource {
    type Error = LazyError;

    fn try_from(path: &str) -> Result<Self, LazyError> {
        Self::try_from(Path::new(path))
    }
}

impl From<Infallible> for LazyError {
    fn from(never: Infallible) -> Self {
        match never {}
    }
}

/// A key that sorts names, with numbers in them compared by value.
fn natural_order(name: &str) -> Vec<Result<u64, String>> {
    let part = |part: &str| part.parse().map_err(|_| part.to_owned());
    name.split('.').map(part).collect()
}

/// How [`prepare`] stores weights.
#[derive(Clone, Default)]
pub struct PrepareOptions {
    dtype: Option<DType>,
    int8: bool,
    on_progress: Option<OnProgress>,
}

type OnProgress = Arc<dyn Fn(PrepareProgress<'_>) + Send + Sync>;

/// How far [`prepare`] has come.
#[derive(Clone, Copy, Debug)]
pub struct PrepareProgress<'a> {
    /// The name of the tensor that is written next.
    pub tensor: &'a str,
    /// Bytes that were written so far.
    pub bytes: u64,
    /// Bytes that will be written in total.
    pub of: u64,
}

impl PrepareOptions {
    /// Stores every tensor in the dtype that it has. What is [packed](super::TensorInfo::packing) is stored unpacked, in f32.
    pub fn new() -> Self {
        Self::default()
    }

    /// Stores float tensors with two or more axes as `dtype` (f64, f32, bf16 or f16), rounded where it is narrower than theirs. Tensors
    /// with one axis keep their dtype.
    ///
    /// # Panics
    ///
    /// Panics for a dtype that is not a float.
    pub fn with_dtype(mut self, dtype: DType) -> Self {
        assert!(dtype.is_float(), "weights are stored as floats, not as {dtype:?}");
        (self.dtype, self.int8) = (Some(dtype), false);
        self
    }

    /// Stores float tensors with two or more axes, the last of which is a multiple of 32, in eight bits per weight and one scale per 32
    /// weights. This is approximate: the error is at most 1/254 of the largest of the 32. In memory such weights are f32.
    pub fn with_approximate_int8(mut self) -> Self {
        (self.dtype, self.int8) = (None, true);
        self
    }

    /// Calls this function for every tensor before it is written.
    pub fn with_progress(
        mut self,
        on_progress: impl Fn(PrepareProgress<'_>) + Send + Sync + 'static,
    ) -> Self {
        self.on_progress = Some(Arc::new(on_progress));
        self
    }

    /// The dtype that a tensor is stored in.
    fn stored(&self, entry: &Entry) -> DType {
        let (dtype, shape) = (entry.tensor.dtype, entry.shape());
        match entry.float() {
            Some(_) if self.int8 && quantized::fits(&shape) => DType::QFloat(quantized::scheme()),
            Some(_) if shape.num_dims() > 1 => self.dtype.unwrap_or(dtype),
            _ => dtype,
        }
    }
}

impl fmt::Debug for PrepareOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PrepareOptions")
            .field("dtype", &self.dtype)
            .field("int8", &self.int8)
            .finish_non_exhaustive()
    }
}

/// What [`prepare`] wrote.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Prepared {
    /// The number of tensors.
    pub tensors: usize,
    /// Their bytes in the file.
    pub bytes: u64,
}

/// Writes weights into one burnpack, which both [`WeightFile`] and Burn read. Tensors are converted, aligned so that they can be mapped,
/// and written in the order of their source, so that a pass over a module reads its file from beginning to end.
///
/// One tensor is in memory at a time. The file appears only when it is complete.
///
/// ```
/// use burn::tensor::{DType, Device};
/// use burn_memsave::lazy::{PrepareOptions, PrepareSource, WeightFile, prepare};
/// use burn_memsave::nn::LinearConfig;
///
/// # let directory = tempfile::tempdir()?;
/// # let path = directory.path().join("model.bpk");
/// let model = LinearConfig::new(64, 64).init(&Device::flex());
/// let options = PrepareOptions::new().with_dtype(DType::BF16);
/// let prepared = prepare(PrepareSource::of_module(&model), &path, &options)?;
/// assert_eq!((prepared.tensors, prepared.bytes), (2, 64 * 64 * 2 + 64 * 4));
/// assert_eq!(WeightFile::open(&path)?.tensors().len(), 2);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
///
/// Returns an error if the source cannot be read or has no tensors; if the destination cannot be written, is a directory, or has the ending
/// of another format; or if a weight to be stored in eight bits is infinite or NaN.
pub fn prepare(
    source: impl TryInto<PrepareSource, Error: Into<LazyError>>,
    destination: impl AsRef<Path>,
    options: &PrepareOptions,
) -> Result<Prepared, LazyError> {
    let PrepareSource { path, tensors } = source.try_into().map_err(Into::into)?;
    let destination = destination.as_ref();
    let refused = |reason: &str| {
        let (source_file, file, reason) = (path.clone(), destination.to_path_buf(), reason.into());
        LazyError::Prepare { source_file, file, reason }
    };
    if tensors.is_empty() {
        return Err(refused("it has no tensors"));
    }
    if destination.is_dir() {
        return Err(refused("it is a directory"));
    }
    if let Some(extension) = destination.extension().and_then(OsStr::to_str)
        && OTHER_FORMATS.contains(&extension)
    {
        return Err(refused(&format!("what is written is a burnpack, no .{extension}; call it .bpk")));
    }
    let stored: Vec<DType> = tensors.iter().map(|(_, entry)| options.stored(entry)).collect();
    let bytes = tensors.iter().zip(&stored).map(|((_, entry), dtype)| entry.len_as(*dtype) as u64).sum();
    let (count, written) = (tensors.len(), Arc::new(AtomicU64::new(0)));
    let deferred = tensors.into_iter().zip(stored).map(|((name, entry), dtype)| {
        let (len, shape, id) = (entry.len_as(dtype), entry.shape(), entry.tensor.param_id);
        let (written, on_progress, tensor) = (written.clone(), options.on_progress.clone(), name.clone());
        let provide = move || {
            let done = written.fetch_add(len as u64, Ordering::Relaxed);
            if let Some(on_progress) = &on_progress {
                on_progress(PrepareProgress { tensor: &tensor, bytes: done, of: bytes });
            }
            read(&entry, dtype).map_err(|error| burn_pack::Error::IoError(error.to_string()))
        };
        burn_pack::Tensor::deferred(name, dtype, shape, id, len, provide)
    });
    let writer = burn_pack::Writer::new(deferred.collect()).auto_extension(false);
    writer.write_to_file(destination).map_err(|error| refused(&error.to_string()))?;
    Ok(Prepared { tensors: count, bytes })
}

/// Endings of files that a burnpack must not be taken for.
const OTHER_FORMATS: [&str; 7] = ["safetensors", "json", "bin", "pt", "pth", "ckpt", "gguf"];

/// The bytes of a tensor as `dtype`.
fn read(entry: &Entry, dtype: DType) -> Result<Bytes, LazyError> {
    match dtype {
        DType::QFloat(_) if dtype != entry.tensor.dtype => {
            let len = entry.len_as(dtype);
            let count = entry.tensor.shape.num_elements();
            let mut words = words_for(len);
            let bytes = &mut bytemuck::cast_slice_mut::<u64, u8>(&mut words)[..len];
            let (values, scales) = bytes.split_at_mut(count); // whole blocks, so the scales are aligned
            let (values, scales) = (bytemuck::cast_slice_mut(values), bytemuck::cast_slice_mut(scales));
            // What an adapter changes is read whole every time, so read it only once.
            let in_parts = entry.has_parts() && !entry.transposed;
            let whole = if in_parts { None } else { Some(entry.read(DType::F32)?) };
            let chunk = if in_parts { CHUNK.min(count) } else { count };
            let mut part = words_for(if in_parts { chunk * size_of::<f32>() } else { 0 });
            let parts = values.chunks_mut(chunk).zip(scales.chunks_mut(chunk / quantized::BLOCK));
            for (index, (values, scales)) in parts.enumerate() {
                let x = match &whole {
                    Some(whole) => &whole[..],
                    None => {
                        let part =
                            &mut bytemuck::cast_slice_mut(&mut part)[..values.len() * size_of::<f32>()];
                        entry.read_range_as(DType::F32, index * chunk, part)?;
                        part
                    }
                };
                quantized::quantize(bytemuck::cast_slice(x), values, scales).map_err(|(at, value)| {
                    entry.error(format!(
                        "element {} is {value}, of which eight bits have none",
                        index * chunk + at
                    ))
                })?;
            }
            Ok(into_bytes(words, len))
        }
        _ => entry.read(dtype),
    }
}

/// Elements that are quantized at a time, a multiple of the block size.
const CHUNK: usize = 1 << 20;
