//! Reads the headers of weight files of all formats: which tensors there are, and where. No tensor is read.
use super::archive::{self, Archive, Placed};
use super::open_file::{OpenFile, Opener, Span};
use super::packed::{self, Float8, Packing};
use super::source::{Entry, Origin, countable};
use super::tensors::{Tensors, Unreadable};
use super::{LazyError, gguf, quantized};
use crate::burn_next::{StoreTensor, packed};
use burn::tensor::{BoolStore, DType, Shape};
use burn_store::bridge::data_len;
use burn_store::pytorch::{PickleError, PytorchError, PytorchStoreError};
use burn_store::{ModuleStore, PytorchStore, burn_pack};
use safetensors::{Dtype, tensor::Metadata};
use serde::Deserialize;
use std::collections::{BTreeMap, HashMap};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Component, Path};
use std::sync::Arc;

/// The largest header that the format allows.
const SAFETENSORS_HEADER: u64 = 100_000_000;
/// The largest index of shards that is read, far larger than any real one.
const INDEX_BYTES: u64 = 1 << 28;
/// Bytes of the length in front of a safetensors header.
const LENGTH: u64 = size_of::<u64>() as u64;

/// The tensors of a file, of the shards that an index names, or of what is in a directory.
pub(super) fn open(path: &Path, opener: Opener<'_>) -> Result<Tensors, LazyError> {
    let mut tensors = open_path(path, opener)?;
    packed::join(&mut tensors);
    Ok(tensors)
}

fn open_path(path: &Path, opener: Opener<'_>) -> Result<Tensors, LazyError> {
    if path.is_dir() {
        return open_directory(path, opener);
    }
    let file = Arc::new(opener(path.to_path_buf())?);
    match file.head(LENGTH + 1)?[..] {
        [b'G', b'G', b'U', b'F', ..] => gguf::open(file, opener), // its ninth byte may be any
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
        _ => Err(file.malformed(
            "neither safetensors nor burnpack nor GGUF nor a PyTorch checkpoint nor an index of shards",
        )),
    }
}

/// The names that a model has in a directory of Hugging Face, in the order in which `transformers` and `diffusers` look for them.
const USUAL: [&str; 6] = [
    "model.safetensors",
    "model.safetensors.index.json",
    "diffusion_pytorch_model.safetensors",
    "diffusion_pytorch_model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
];

/// What trainers write beside a model.
const NO_MODELS: [&str; 6] =
    ["training_args", "optimizer", "scheduler", "scaler", "rng_state", "adapter_model"];

/// The model in a directory: under its usual name, or the only index, or all safetensors, or the only file of another format.
fn open_directory(path: &Path, opener: Opener<'_>) -> Result<Tensors, LazyError> {
    let error = |source| LazyError::Io { file: path.to_path_buf(), source };
    let files = std::fs::read_dir(path).and_then(Iterator::collect::<Result<Vec<_>, _>>).map_err(error)?;
    let mut names: Vec<String> =
        files.into_iter().map(|file| file.file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    if let Some(usual) = USUAL.into_iter().find(|usual| names.iter().any(|name| name == usual)) {
        return open_path(&path.join(usual), opener);
    }
    let is_model = |name: &&String| !NO_MODELS.iter().any(|other| name.starts_with(other));
    let ending = |ending: &str| -> Vec<&String> {
        names.iter().filter(|name| name.ends_with(ending)).filter(is_model).collect()
    };
    let ambiguous = |found: &[&String]| {
        let found = found.iter().map(|name| &name[..]).collect::<Vec<_>>().join(", ");
        let reason = format!("a directory with several files that could be meant, open one of them: {found}");
        LazyError::Malformed { file: path.to_path_buf(), reason }
    };
    for kind in [".index.json", ".safetensors", ".bpk", ".bin", ".pt", ".pth", ".gguf"] {
        let found = ending(kind);
        match found[..] {
            [] => continue,
            [file] => return open_path(&path.join(file), opener),
            _ if kind != ".safetensors" => return Err(ambiguous(&found)),
            _ => (),
        }
        // Shards without an index; or several models, which have tensors of the same names.
        let mut tensors = Tensors::default();
        for file in &found {
            let mut shard = open_path(&path.join(file), opener)?;
            tensors.has_part(&shard);
            for name in shard.names().cloned().collect::<Vec<_>>() {
                if tensors.file_of(&name).is_some() {
                    return Err(ambiguous(&found));
                }
                shard.give(&name, &mut tensors);
            }
        }
        return Ok(tensors);
    }
    let found = names.join(", ");
    let reason = format!(
        "a directory without weights (an index, safetensors, .bpk, .bin, .pt, .pth or .gguf); it has {found}"
    );
    Err(LazyError::Malformed { file: path.to_path_buf(), reason })
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
    let Index { weight_map } = serde_json::from_slice(&file.head(file.len)?)
        .map_err(|error| file.malformed(format!("JSON, but no index of shards: {error}")))?;
    let directory = file.path.parent().unwrap_or(Path::new(""));
    let mut shards = HashMap::new();
    let mut tensors = Tensors::default();
    for (name, shard) in weight_map {
        let plain = Path::new(&shard).components().all(|part| matches!(part, Component::Normal(_)));
        if !plain {
            return Err(file.malformed(format!("tensor {name} is said to be in {shard:?}")));
        }
        if !shards.contains_key(&shard) {
            let opened = open_tensors(Arc::new(opener(directory.join(&shard))?))?;
            tensors.has_part(&opened);
            shards.insert(shard.clone(), opened);
        }
        let found = shards.get_mut(&shard).is_some_and(|shard| shard.give(&name, &mut tensors));
        if !found {
            return Err(file.malformed(format!("{shard} does not have the tensor {name}")));
        }
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
    let of_pytorch =
        metadata.metadata().as_ref().is_some_and(|of| of.get("format").is_some_and(|format| format == "pt"));
    let mut tensors = Tensors { of_pytorch, ..Tensors::default() };
    for (name, info) in metadata.tensors() {
        let (start, end) = info.data_offsets;
        let span = Span { file: file.clone(), offset: data + start as u64, len: end - start };
        let shape = Shape::from(info.shape.clone());
        match dtype_of(info.dtype) {
            Some(dtype) => {
                tensors.entries.insert(name.clone(), Entry::of_span(name, dtype, shape, span));
            }
            None if info.dtype == Dtype::F8_E4M3 && countable(&shape).is_some() => {
                let packing = Arc::new(Packing::Float8(Float8::new(&shape, span)));
                let entry = Entry::of_packing(name.clone(), shape, file.path.clone(), packing);
                tensors.entries.insert(name, entry);
            }
            None => {
                let reason = format!("it is of the dtype {}, which Burn does not have", info.dtype);
                tensors.unreadable.insert(name, Unreadable { file: file.path.clone(), reason });
            }
        }
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
    let mut tensors = Tensors::default();
    for tensor in reader.into_tensors().map_err(|error| malformed(&error))? {
        check_packed(&tensor).map_err(|reason| malformed(&reason))?;
        let place = places.get(&tensor.name).filter(|place| data + place.data_offsets.1 <= file.len);
        let offset = data + place.ok_or_else(|| malformed(&"the file changed"))?.data_offsets.0;
        let span = Span { file: file.clone(), offset, len: tensor.byte_len() };
        let mut entry = Entry::of_span(tensor.name.clone(), tensor.dtype, tensor.shape, span);
        entry.tensor.param_id = tensor.param_id;
        tensors.entries.insert(tensor.name, entry);
    }
    file.check_not_replaced().map_err(|error| malformed(&error))?;
    Ok(tensors)
}

/// Checks the length of a quantized tensor. (Burn checks those of all others.)
fn check_packed(tensor: &burn_pack::Tensor) -> Result<(), String> {
    let DType::QFloat(scheme) = tensor.dtype else { return Ok(()) };
    let fits = countable(&tensor.shape).is_some(); // dequantized, too
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
    let read = catch_unwind(AssertUnwindSafe(read)).map_err(|_| file.malformed("a damaged checkpoint"))?;
    let is_archive = file.head(2)?[..] == *b"PK";
    let archive = || match &read {
        Err(error) if !is_unsupported(error) => Err(not_read(&file, error)),
        _ if is_archive => archive::open(&file),
        _ => Ok(Archive::default()),
    };
    let Archive { mut placed, others } =
        catch_unwind(AssertUnwindSafe(archive)).map_err(|_| file.malformed("a damaged archive"))??;
    file.check_not_replaced().map_err(|error| file.malformed(error))?;

    let of_span = |name: String, place: Placed| {
        let entry = Entry::of_span(name.clone(), place.dtype, Shape::from(place.shape), place.span);
        (name, entry)
    };
    let mut tensors = Tensors { of_pytorch: true, ..Tensors::default() };
    match read {
        Ok(found) => {
            let entry = |(name, tensor): (String, StoreTensor)| {
                let tensor = packed(tensor);
                let place = placed.remove(&name);
                let same =
                    |place: &Placed| (place.dtype, &place.shape[..]) == (tensor.dtype, &tensor.shape[..]);
                match place.filter(same) {
                    Some(place) => of_span(name, place),
                    None => (name, of_store(&file, tensor)),
                }
            };
            tensors.entries = found.into_iter().map(entry).collect();
        }
        // A kind of tensor that burn-store does not know, which need not be one that is used.
        Err(error) if placed.is_empty() => return Err(not_read(&file, &error)),
        Err(error) => {
            let unreadable = others.into_iter().map(|(name, reason)| {
                let reason = format!("{reason}; and the checkpoint as a whole cannot be read: {error}");
                (name, Unreadable { file: file.path.clone(), reason })
            });
            tensors.unreadable = unreadable.collect();
            tensors.entries = placed.into_iter().map(|(name, place)| of_span(name, place)).collect();
            tensors.incomplete = Some(error.to_string());
        }
    }
    match tensors.entries.is_empty() {
        true => Err(file.malformed("a pickle without tensors")),
        false => Ok(tensors),
    }
}

/// Whether a checkpoint has a kind of tensor that burn-store does not read.
fn is_unsupported(error: &PytorchStoreError) -> bool {
    matches!(error, PytorchStoreError::Reader(PytorchError::Pickle(PickleError::UnsupportedType(_))))
}

fn not_read(file: &OpenFile, error: &PytorchStoreError) -> LazyError {
    match archive::is_torch_script(file) {
        true => file.malformed(
            "a TorchScript archive; save its tensors by torch.save(torch.jit.load(path).state_dict(), other_path)",
        ),
        false => file.malformed(error),
    }
}

/// A tensor that burn-store reads.
fn of_store(file: &Arc<OpenFile>, tensor: burn_pack::Tensor) -> Entry {
    let burn_pack::Tensor { name, dtype, shape, param_id, .. } = tensor.clone();
    let (len, source) = (tensor.byte_len(), file.clone());
    let read = move || {
        let bytes = tensor.to_bytes()?;
        let unchanged = source.check_not_replaced();
        unchanged.map_err(|error| burn_pack::Error::IoError(error.to_string())).map(|()| bytes)
    };
    let tensor = burn_pack::Tensor::deferred(name, dtype, shape, param_id, len, read);
    Entry { tensor, file: file.path.clone(), origin: Origin::Whole, transposed: false }
}
