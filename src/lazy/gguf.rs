//! Reads the headers of GGUF files, by `gguf-rs-lib`: the tensors, and what is said of the model.
use super::LazyError;
use super::open_file::{OpenFile, Opener, Span};
use super::packed::{Blocks, Packing};
use super::source::{Entry, countable};
use super::tensors::{Tensors, Unreadable};
use burn::tensor::{DType, Shape};
use burn_memsave_layers::frozen::BlockFormat;
use gguf_rs_lib::format::{GGUFTensorType, MetadataValue};
use gguf_rs_lib::reader::GGUFFileReader;
use serde_json::{Map, Value};
use std::fs::File;
use std::io::{BufReader, Seek};
use std::sync::Arc;

/// What a file says of its model, with the lists, which are large if they have the tokens.
pub(super) fn all_metadata(file: &OpenFile) -> Result<Map<String, Value>, LazyError> {
    let reader = reader(file)?;
    Ok(reader.metadata().iter().map(|(key, value)| (key.clone(), json(value))).collect())
}

fn json(value: &MetadataValue) -> Value {
    match value {
        MetadataValue::U8(number) => (*number).into(),
        MetadataValue::I8(number) => (*number).into(),
        MetadataValue::U16(number) => (*number).into(),
        MetadataValue::I16(number) => (*number).into(),
        MetadataValue::U32(number) => (*number).into(),
        MetadataValue::I32(number) => (*number).into(),
        MetadataValue::U64(number) => (*number).into(),
        MetadataValue::I64(number) => (*number).into(),
        MetadataValue::F32(number) => (*number).into(),
        MetadataValue::F64(number) => (*number).into(),
        MetadataValue::Bool(is) => (*is).into(),
        MetadataValue::String(text) => text.clone().into(),
        MetadataValue::Array(list) => list.values.iter().map(json).collect(),
    }
}

fn reader(file: &OpenFile) -> Result<GGUFFileReader<BufReader<File>>, LazyError> {
    let io = |source| LazyError::Io { file: file.path.clone(), source };
    let mut reader = file.reader().map_err(io)?;
    reader.rewind().map_err(io)?;
    GGUFFileReader::new(BufReader::new(reader)).map_err(|error| file.malformed(error))
}

/// The tensors of a file, and of the others that it was split into.
pub(super) fn open(file: Arc<OpenFile>, opener: Opener<'_>) -> Result<Tensors, LazyError> {
    let (mut tensors, parts) = open_one(file.clone())?;
    if parts < 2 {
        return Ok(tensors);
    }
    let name = file.path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    let end = format!("-00001-of-{parts:05}.gguf");
    let Some(stem) = name.strip_suffix(&end) else {
        return Err(
            file.malformed(format!("it is one of {parts} parts; open the first, which ends with {end}"))
        );
    };
    for part in 2..=parts {
        let path = file.path.with_file_name(format!("{stem}-{part:05}-of-{parts:05}.gguf"));
        let (others, _) = open_one(Arc::new(opener(path.clone())?))?;
        if let Some(name) = others.names().find(|name| tensors.has(name)) {
            return Err(LazyError::Malformed { file: path, reason: format!("a second tensor {name}") });
        }
        tensors.entries.extend(others.entries);
        tensors.unreadable.extend(others.unreadable);
    }
    Ok(tensors)
}

/// The tensors of one file, and the number of files that all tensors are in.
fn open_one(file: Arc<OpenFile>) -> Result<(Tensors, u64), LazyError> {
    let reader = reader(&file)?; // it checks sizes, and that all of them lie within the file
    let parts = reader.metadata().get_u64("split.count").unwrap_or(1);
    let metadata = reader.metadata().iter().filter(|(_, value)| !matches!(value, MetadataValue::Array(_)));
    let metadata =
        Some(Arc::new(metadata.map(|(key, value)| (key.clone(), json(value))).collect::<Map<_, _>>()));
    let mut tensors = Tensors { of_pytorch: true, metadata, ..Tensors::default() };
    for info in reader.tensor_infos() {
        let name = info.name().to_owned();
        let refused = |reason: &str| file.malformed(format!("tensor {name} {reason}"));
        let size = |size: u64| usize::try_from(size).map_err(|_| refused("is too large for this machine"));
        // The first size is that of the axis whose elements are next to each other.
        let shape =
            info.shape().dims().iter().rev().map(|&axis| size(axis)).collect::<Result<Vec<_>, _>>()?;
        let elements = countable(&shape).ok_or_else(|| refused("is too large for this machine"))?;
        let shape = Shape::from(shape);
        let len = info.checked_expected_data_size().map_err(|error| file.malformed(error))?;
        let offset = reader.tensor_data_offset().saturating_add(info.data_offset());
        let span = Span { file: file.clone(), offset, len: size(len)? };
        let entry = match kind(info.tensor_type()) {
            Some(Kind::Plain(dtype)) if elements * dtype.size() == span.len => {
                Entry::of_span(name.clone(), dtype, shape, span)
            }
            Some(Kind::Blocks(format)) if elements / format.elements() * format.bytes() == span.len => {
                let packing = Packing::Blocks(Blocks::new(format, span));
                Entry::of_packing(name.clone(), shape, file.path.clone(), Arc::new(packing))
            }
            Some(_) => return Err(refused("has another length than its shape says")),
            None => {
                let reason =
                    format!("it is of the type {}, which is not supported", info.tensor_type().name());
                tensors.unreadable.insert(name, Unreadable { file: file.path.clone(), reason });
                continue;
            }
        };
        tensors.entries.insert(name, entry);
    }
    Ok((tensors, parts))
}

enum Kind {
    Plain(DType),
    Blocks(BlockFormat),
}

fn kind(of: GGUFTensorType) -> Option<Kind> {
    Some(match of {
        GGUFTensorType::F64 => Kind::Plain(DType::F64),
        GGUFTensorType::F32 => Kind::Plain(DType::F32),
        GGUFTensorType::F16 => Kind::Plain(DType::F16),
        GGUFTensorType::BF16 => Kind::Plain(DType::BF16),
        GGUFTensorType::I64 => Kind::Plain(DType::I64),
        GGUFTensorType::I32 => Kind::Plain(DType::I32),
        GGUFTensorType::I16 => Kind::Plain(DType::I16),
        GGUFTensorType::I8 => Kind::Plain(DType::I8),
        GGUFTensorType::Q4_0 => Kind::Blocks(BlockFormat::Q4_0),
        GGUFTensorType::Q4_1 => Kind::Blocks(BlockFormat::Q4_1),
        GGUFTensorType::Q5_0 => Kind::Blocks(BlockFormat::Q5_0),
        GGUFTensorType::Q5_1 => Kind::Blocks(BlockFormat::Q5_1),
        GGUFTensorType::Q8_0 => Kind::Blocks(BlockFormat::Q8_0),
        GGUFTensorType::Q2_K => Kind::Blocks(BlockFormat::Q2_K),
        GGUFTensorType::Q3_K => Kind::Blocks(BlockFormat::Q3_K),
        GGUFTensorType::Q4_K => Kind::Blocks(BlockFormat::Q4_K),
        GGUFTensorType::Q5_K => Kind::Blocks(BlockFormat::Q5_K),
        GGUFTensorType::Q6_K => Kind::Blocks(BlockFormat::Q6_K),
        GGUFTensorType::IQ4_NL => Kind::Blocks(BlockFormat::IQ4_NL),
        GGUFTensorType::IQ4_XS => Kind::Blocks(BlockFormat::IQ4_XS),
        _ => return None,
    })
}
