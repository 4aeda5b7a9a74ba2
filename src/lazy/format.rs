//! Reads the headers of weight files of all formats: which tensors there are, and where. No tensor is read.
use super::source::{Entry, OpenFile, Span};
use super::{LazyError, archive, quantized};
use crate::burn_next::{StoreTensor, packed};
use burn::tensor::{BoolStore, DType, Shape};
use burn_store::bridge::data_len;
use burn_store::{ModuleStore, PytorchStore, burn_pack};
use safetensors::{Dtype, tensor::Metadata};
use serde::Deserialize;
use std::collections::{BTreeMap, HashMap};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;

/// The largest header that the format allows.
const SAFETENSORS_HEADER: u64 = 100_000_000;
/// The largest index of shards that is read, far larger than any real one.
const INDEX_BYTES: u64 = 1 << 28;
/// Bytes of the length in front of a safetensors header.
const LENGTH: u64 = size_of::<u64>() as u64;

pub(super) type Tensors = BTreeMap<String, Entry>;

/// How files are opened: mapped or not.
pub(super) type Opener<'a> = &'a dyn Fn(PathBuf) -> Result<OpenFile, LazyError>;

/// The tensors of a file, of the shards that an index names, or of what is in a directory.
pub(super) fn open(path: &Path, opener: Opener<'_>) -> Result<Tensors, LazyError> {
    if path.is_dir() {
        return open_directory(path, opener);
    }
    let file = Arc::new(opener(path.to_path_buf())?);
    match file.head(LENGTH + 1)?[..] {
        [_, _, _, _, _, _, _, _, b'{'] => open_tensors(file),
        [b'{' | b'\n' | b' ', ..] => sharded(file, opener),
        _ => open_tensors(file),
    }
}

/// The tensors of a file that is not an index.
fn open_tensors(file: Arc<OpenFile>) -> Result<Tensors, LazyError> {
    match file.head(LENGTH + 1)?[..] {
        [0x4e, 0x52, 0x55, 0x42, ..] => burnpack(file),
        [_, _, _, _, _, _, _, _, b'{'] => safetensors(file),
        [b'P', b'K', 3, 4, ..] | [0x80, ..] => pytorch(file),
        _ => Err(file
            .malformed("neither safetensors nor burnpack nor a PyTorch checkpoint nor an index of shards")),
    }
}

fn open_directory(path: &Path, opener: Opener<'_>) -> Result<Tensors, LazyError> {
    let error = |source| LazyError::Io { file: path.to_path_buf(), source };
    let files = std::fs::read_dir(path).and_then(Iterator::collect::<Result<Vec<_>, _>>).map_err(error)?;
    let mut names: Vec<PathBuf> = files.into_iter().map(|file| file.path()).collect();
    names.sort();
    let ending = |ending: &str| -> Vec<&PathBuf> {
        names.iter().filter(|name| name.to_string_lossy().ends_with(ending)).collect()
    };
    if let [index] = ending(".index.json")[..] {
        return open(index, opener);
    }
    for kind in [".safetensors", ".bpk", ".bin", ".pt", ".pth"] {
        match ending(kind)[..] {
            [] => continue,
            [file] => return open(file, opener),
            _ if kind != ".safetensors" => break,
            _ => (),
        }
        let mut tensors = Tensors::new();
        for file in ending(kind) {
            for (name, entry) in open(file, opener)? {
                if let Some(other) = tensors.get(&name) {
                    let reason = format!("tensor {name} is in {}, too", other.file.display());
                    return Err(LazyError::Malformed { file: file.clone(), reason });
                }
                tensors.insert(name, entry);
            }
        }
        return Ok(tensors);
    }
    let reason =
        "a directory with neither one index (*.index.json) nor safetensors, nor one file of another format";
    Err(LazyError::Malformed { file: path.to_path_buf(), reason: reason.into() })
}

/// The index of a sharded checkpoint, as Hugging Face writes it.
#[derive(Deserialize)]
struct Index {
    /// Tensor to file.
    weight_map: BTreeMap<String, String>,
}

fn sharded(file: Arc<OpenFile>, opener: Opener<'_>) -> Result<Tensors, LazyError> {
    if file.len > INDEX_BYTES {
        return Err(file.malformed("too large for an index of shards"));
    }
    let Index { weight_map } =
        serde_json::from_slice(&file.head(file.len)?).map_err(|error| file.malformed(error))?;
    let directory = file.path.parent().unwrap_or(Path::new(""));
    let mut shards = HashMap::new();
    let mut tensors = Tensors::new();
    for (name, shard) in weight_map {
        let plain = Path::new(&shard).components().all(|part| matches!(part, Component::Normal(_)));
        if !plain {
            return Err(file.malformed(format!("tensor {name} is said to be in {shard:?}")));
        }
        if !shards.contains_key(&shard) {
            let opened = open_tensors(Arc::new(opener(directory.join(&shard))?))?;
            shards.insert(shard.clone(), opened);
        }
        let entry = shards.get_mut(&shard).and_then(|tensors| tensors.remove(&name));
        let entry =
            entry.ok_or_else(|| file.malformed(format!("{shard} does not have the tensor {name}")))?;
        tensors.insert(name, entry);
    }
    Ok(tensors)
}

fn safetensors(file: Arc<OpenFile>) -> Result<Tensors, LazyError> {
    let length = file.head(LENGTH)?;
    let header = u64::from_le_bytes(length.try_into().expect("eight bytes"));
    let data = LENGTH.saturating_add(header);
    if header > SAFETENSORS_HEADER || data > file.len {
        return Err(file.malformed(format!("a header of {header} bytes in a file of {}", file.len)));
    }
    let head = file.head(data)?;
    // Checks that tensors follow each other, and have the bytes that their shapes say.
    let metadata: Metadata =
        serde_json::from_slice(&head[LENGTH as usize..]).map_err(|error| file.malformed(error))?;
    let (has, needs) = (file.len - data, metadata.data_len() as u64);
    if has != needs {
        return Err(file.malformed(format!("{needs} bytes of tensors in the header, {has} in the file")));
    }
    let mut tensors = Tensors::new();
    for (name, info) in metadata.tensors() {
        let (start, end) = info.data_offsets;
        let span = Span { file: file.clone(), offset: data + start as u64, len: end - start };
        let shape = Shape::from(info.shape.clone());
        let dtype = dtype_of(info.dtype).ok_or_else(|| {
            file.malformed(format!("tensor {name} is of the unknown dtype {:?}", info.dtype))
        })?;
        tensors.insert(name.clone(), Entry::of_span(name, dtype, shape, span));
    }
    Ok(tensors)
}

fn dtype_of(dtype: Dtype) -> Option<DType> {
    Some(match dtype {
        Dtype::F64 => DType::F64,
        Dtype::F32 => DType::F32,
        Dtype::F16 => DType::F16,
        Dtype::BF16 => DType::BF16,
        Dtype::I64 => DType::I64,
        Dtype::I32 => DType::I32,
        Dtype::I16 => DType::I16,
        Dtype::I8 => DType::I8,
        Dtype::U64 => DType::U64,
        Dtype::U32 => DType::U32,
        Dtype::U16 => DType::U16,
        Dtype::U8 => DType::U8,
        Dtype::BOOL => DType::Bool(BoolStore::Native),
        _ => return None,
    })
}

/// The part of the metadata of a burnpack that its reader does not give: where the tensors are.
#[derive(Deserialize)]
struct Places {
    tensors: BTreeMap<String, Place>,
}

#[derive(Deserialize)]
struct Place {
    data_offsets: (u64, u64),
}

fn burnpack(file: Arc<OpenFile>) -> Result<Tensors, LazyError> {
    let malformed = |error: &dyn ToString| file.malformed(error.to_string());
    // Checks everything.
    let reader = burn_pack::Reader::from_file_exact(&file.path).map_err(|error| malformed(&error))?;
    let header = file.head(burn_pack::HEADER_SIZE as u64)?;
    let header = burn_pack::Header::from_bytes(&header).map_err(|error| malformed(&error))?;
    let metadata = header.metadata_size as usize;
    let head = file.head((burn_pack::HEADER_SIZE + metadata) as u64)?;
    let metadata = &head[burn_pack::HEADER_SIZE..];
    let Places { tensors: places } =
        ciborium::de::from_reader_with_recursion_limit(metadata, burn_pack::MAX_CBOR_RECURSION_DEPTH)
            .map_err(|error| malformed(&error))?;
    let data = burn_pack::aligned_data_section_start(metadata.len()) as u64;
    let mut tensors = Tensors::new();
    for tensor in reader.into_tensors().map_err(|error| malformed(&error))? {
        check_packed(&tensor).map_err(|reason| malformed(&reason))?;
        let place = places.get(&tensor.name).filter(|place| data + place.data_offsets.1 <= file.len);
        let offset = data + place.ok_or_else(|| malformed(&"the file changed"))?.data_offsets.0;
        let span = Span { file: file.clone(), offset, len: tensor.byte_len() };
        let mut entry = Entry::of_span(tensor.name.clone(), tensor.dtype, tensor.shape, span);
        entry.tensor.param_id = tensor.param_id;
        tensors.insert(tensor.name, entry);
    }
    file.check_not_replaced().map_err(|error| malformed(&error))?;
    Ok(tensors)
}

/// Checks the length of a quantized tensor. (Burn checks those of all others.)
fn check_packed(tensor: &burn_pack::Tensor) -> Result<(), String> {
    let DType::QFloat(scheme) = tensor.dtype else { return Ok(()) };
    // The bytes of the dequantized tensor must be countable, too.
    let elements = tensor.shape.iter().try_fold(1usize, |product, axis| product.checked_mul(*axis));
    let fits = elements.and_then(|elements| elements.checked_mul(size_of::<f64>())).is_some();
    let is_ours = || scheme == quantized::scheme() && quantized::fits(&tensor.shape);
    match fits && (!is_ours() || data_len(tensor.dtype, &tensor.shape) == tensor.byte_len()) {
        true => Ok(()),
        false => Err(format!("tensor {} of {:?} has {} bytes", tensor.name, tensor.shape, tensor.byte_len())),
    }
}

fn pytorch(file: Arc<OpenFile>) -> Result<Tensors, LazyError> {
    // The reader of checkpoints may panic at damaged data.
    let read =
        || PytorchStore::from_file(&file.path).map_indices_contiguous(false).get_all_tensors().cloned();
    let tensors = catch_unwind(AssertUnwindSafe(read)).map_err(|_| file.malformed("a damaged checkpoint"))?;
    let tensors = tensors.map_err(|error| file.malformed(format!("{error:?}")))?;
    let is_archive = file.head(2)?[..] == *b"PK";
    let places = || if is_archive { archive::places(&file) } else { Ok(HashMap::new()) };
    let places =
        catch_unwind(AssertUnwindSafe(places)).map_err(|_| file.malformed("a damaged archive"))??;
    file.check_not_replaced().map_err(|error| file.malformed(error))?;
    let entry = |(name, tensor): (String, StoreTensor)| {
        let tensor = packed(tensor);
        if let Some(archive::Placed { dtype, shape, span }) = places.get(&name)
            && (*dtype, &shape[..]) == (tensor.dtype, &tensor.shape[..])
        {
            return (name.clone(), Entry::of_span(name, *dtype, tensor.shape, span.clone()));
        }
        // The reader opens the file again for every tensor.
        let burn_pack::Tensor { name: own_name, dtype, shape, param_id, .. } = tensor.clone();
        let (len, source) = (tensor.byte_len(), file.clone());
        let read = move || {
            let bytes = tensor.to_bytes()?;
            let unchanged = source.check_not_replaced();
            unchanged.map_err(|error| burn_pack::Error::IoError(error.to_string())).map(|()| bytes)
        };
        let tensor = burn_pack::Tensor::deferred(own_name, dtype, shape, param_id, len, read);
        (name, Entry { tensor, file: file.path.clone(), span: None, transposed: false })
    };
    Ok(tensors.into_iter().map(entry).collect())
}
