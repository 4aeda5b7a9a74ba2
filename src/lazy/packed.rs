//! Tensors whose elements are packed in a file, in fewer bits than a float has. They are tensors of f32 that are unpacked whenever they are
//! read, by the parts that are read.
//!
//! | what wrote it | elements | scales |
//! | --- | --- | --- |
//! | `ggml` (GGUF) | blocks of 32 or 256, 2 to 8 bits | in the blocks |
//! | bitsandbytes | 4 bits: indices of a table of 16 numbers (`nf4`, `fp4`) | `absmax`, one for 64 elements; themselves indices of a table of 256, if scales are packed, too |
//! | float8 checkpoints | `float8_e4m3fn` | `weight_scale_inv` for blocks of 128 x 128 (DeepSeek, Qwen3), or `weight_scale` for each row or for all |
use super::open_file::Span;
use super::source::{AT_ONCE, Entry, Origin, Unpack, countable};
use super::tensors::{Tensors, Unreadable};
use burn::tensor::{DType, Shape};
use burn_memsave_layers::frozen::{
    BlockFormat, FLOAT8_E4M3, PackedElements, ScaledMatrix, unpack_float8, unpack_nibbles,
};
use serde::Deserialize;
use std::any::Any;
use std::borrow::Cow;
use std::io;
use std::sync::Arc;

/// How the elements of a tensor are packed, and where.
#[derive(Debug)]
#[allow(clippy::large_enum_variant, reason = "one for each weight, behind a counter")]
pub(super) enum Packing {
    Blocks(Blocks),
    Nibbles(Nibbles),
    Float8(Float8),
    /// Consecutive elements of another tensor, from this one on, with so many bytes.
    Part {
        whole: Arc<dyn Unpack>,
        first: usize,
        bytes: usize,
    },
}

impl Unpack for Packing {
    fn name(&self) -> &str {
        match self {
            Self::Blocks(blocks) => &blocks.name,
            Self::Nibbles(nibbles) => nibbles.name,
            Self::Float8(_) => "float8_e4m3fn",
            Self::Part { whole, .. } => whole.name(),
        }
    }

    fn bytes(&self) -> usize {
        match self {
            Self::Blocks(Blocks { span, .. })
            | Self::Nibbles(Nibbles { span, .. })
            | Self::Float8(Float8 { span, .. }) => span.len,
            Self::Part { bytes, .. } => *bytes,
        }
    }

    fn read(&self, first: usize, count: usize) -> io::Result<Box<dyn PackedElements + '_>> {
        let unit = match self {
            Self::Blocks(blocks) => blocks.format.elements(),
            Self::Nibbles(nibbles) => nibbles.block,
            Self::Float8(_) => 1,
            Self::Part { whole, first: of_part, .. } => return whole.read(of_part + first, count),
        };
        let before = first % unit;
        let (first, count) = (first - before, before + count);
        let units = match self {
            Self::Blocks(blocks) => blocks.read(first, count)?,
            Self::Nibbles(nibbles) => nibbles.read(first, count)?,
            Self::Float8(float8) => float8.read(first, count)?,
            Self::Part { .. } => unreachable!("the whole has read it"),
        };
        Ok(Box::new(Elements { unit, before, units }))
    }

    fn check_unchanged(&self) -> io::Result<()> {
        match self {
            Self::Blocks(Blocks { span, .. }) => span.file.check_unchanged(),
            Self::Nibbles(Nibbles { span, scales, .. }) => {
                span.file.check_unchanged().and_then(|()| scales.check_unchanged())
            }
            Self::Float8(Float8 { span, scales, .. }) => {
                span.file.check_unchanged()?;
                scales.as_ref().map_or(Ok(()), |scales| check_unchanged(&scales.entry))
            }
            Self::Part { whole, .. } => whole.check_unchanged(),
        }
    }
}

/// Elements that have been read.
struct Elements<'a> {
    /// The elements that have a scale in common.
    unit: usize,
    /// Elements of the first unit that were not asked for.
    before: usize,
    units: Units<'a>,
}

/// Whole units of elements, the last of which may be cut.
enum Units<'a> {
    Blocks {
        format: BlockFormat,
        blocks: Cow<'a, [u8]>,
    },
    Nibbles {
        codes: Cow<'a, [u8]>,
        table: &'a [f32; 16],
        scales: Vec<f32>,
        block: usize,
    },
    /// The first element is `first` of the matrix, counted from the first row of the first block whose scale is there.
    Float8 {
        codes: Cow<'a, [u8]>,
        columns: usize,
        block: [usize; 2],
        scales: Vec<f32>,
        first: usize,
    },
}

impl PackedElements for Elements<'_> {
    fn unpack(&self, first: usize, out: &mut [f32]) {
        let first = self.before + first;
        let before = first % self.unit;
        let within = if before == 0 { 0 } else { (self.unit - before).min(out.len()) };
        let (head, rest) = out.split_at_mut(within);
        if !head.is_empty() {
            let mut unit = vec![0.0; before + head.len()];
            self.units.unpack(first - before, &mut unit);
            head.copy_from_slice(&unit[before..]);
        }
        self.units.unpack(first + within, rest);
    }
}

impl Units<'_> {
    /// Unpacks elements, beginning with the first one of a unit.
    fn unpack(&self, first: usize, out: &mut [f32]) {
        match self {
            _ if out.is_empty() => {}
            Self::Blocks { format, blocks } => {
                let (elements, bytes) = (format.elements(), format.bytes());
                let (whole, rest) = out.split_at_mut(out.len() / elements * elements);
                let (of_whole, of_rest) =
                    blocks[first / elements * bytes..].split_at(whole.len() / elements * bytes);
                format.unpack(of_whole, whole);
                if !rest.is_empty() {
                    let mut last = vec![0.0; elements];
                    format.unpack(&of_rest[..bytes], &mut last);
                    rest.copy_from_slice(&last[..rest.len()]);
                }
            }
            Self::Nibbles { codes, table, scales, block } => {
                let codes = &codes[first / 2..][..out.len().div_ceil(2)];
                let scales = &scales[first / block..][..out.len().div_ceil(*block)];
                unpack_nibbles(codes, table, scales, *block, out);
            }
            Self::Float8 { codes, columns, block, scales, first: of_codes } => {
                let matrix =
                    ScaledMatrix { columns: *columns, block: *block, scales, first: of_codes + first };
                unpack_float8(&codes[first..][..out.len()], &FLOAT8_E4M3, matrix, out);
            }
        }
    }
}

fn check_unchanged(entry: &Entry) -> io::Result<()> {
    match &entry.origin {
        Origin::Span(span) => span.file.check_unchanged(),
        Origin::Packed(packing) => packing.check_unchanged(),
        Origin::Whole => Ok(()), // checked whenever it is read
    }
}

/// Consecutive elements of a tensor of scales, as floats. Whoever has read enough calls [`Unpack::check_unchanged`].
fn floats(entry: &Entry, first: usize, count: usize) -> io::Result<Vec<f32>> {
    let mut floats = vec![0.0f32; count];
    let bytes = bytemuck::cast_slice_mut(&mut floats);
    entry.read_range_unchecked(DType::F32, first, bytes)?;
    Ok(floats)
}

/// Blocks of GGUF, which have their scales in them.
#[derive(Debug)]
pub(super) struct Blocks {
    name: String,
    format: BlockFormat,
    span: Span,
}

impl Blocks {
    pub fn new(format: BlockFormat, span: Span) -> Self {
        Self { name: format!("{format:?}"), format, span }
    }

    fn read(&self, first: usize, count: usize) -> io::Result<Units<'_>> {
        let (format, elements, bytes) = (self.format, self.format.elements(), self.format.bytes());
        let blocks = self.span.bytes_at(first / elements * bytes, count.div_ceil(elements) * bytes)?;
        Ok(Units::Blocks { format, blocks })
    }
}

/// Indices of four bits of a table, two in a byte, scaled by blocks.
#[derive(Debug)]
pub(super) struct Nibbles {
    name: &'static str,
    span: Span,
    table: [f32; 16],
    block: usize,
    scales: PackedScales,
}

impl Nibbles {
    fn read(&self, first: usize, count: usize) -> io::Result<Units<'_>> {
        let codes = self.span.bytes_at(first / 2, count.div_ceil(2))?;
        let scales = self.scales.read(first / self.block, count.div_ceil(self.block))?;
        Ok(Units::Nibbles { codes, table: &self.table, scales, block: self.block })
    }
}

/// The scales of [`Nibbles`].
#[derive(Debug)]
struct PackedScales {
    /// The scales, or their indices in the table.
    scales: Entry,
    packed: Option<PackedAgain>,
}

/// Scales are `table[index] scale + offset`, with one scale for a block of scales.
#[derive(Debug)]
struct PackedAgain {
    table: Vec<f32>,
    scales: Entry,
    block: usize,
    offset: f32,
}

impl PackedScales {
    fn read(&self, first: usize, count: usize) -> io::Result<Vec<f32>> {
        let mut scales = floats(&self.scales, first, count)?;
        if let Some(PackedAgain { table, scales: of_blocks, block, offset }) = &self.packed {
            let first_block = first / block;
            let of_blocks = floats(of_blocks, first_block, (first + count).div_ceil(*block) - first_block)?;
            for (at, scale) in (first..).zip(&mut scales) {
                // An index is an integer below 256, as many as there are entries.
                *scale = table[*scale as usize] * of_blocks[at / block - first_block] + offset;
            }
        }
        Ok(scales)
    }

    fn check_unchanged(&self) -> io::Result<()> {
        check_unchanged(&self.scales)?;
        self.packed.as_ref().map_or(Ok(()), |packed| check_unchanged(&packed.scales))
    }
}

/// Numbers of eight bits.
#[derive(Clone, Debug)]
pub(super) struct Float8 {
    span: Span,
    columns: usize,
    scales: Option<BlockScales>,
}

/// Scales of blocks of a matrix.
#[derive(Clone, Debug)]
struct BlockScales {
    entry: Entry,
    block: [usize; 2],
}

impl Float8 {
    /// Numbers without scales.
    pub fn new(shape: &Shape, span: Span) -> Self {
        Self { span, columns: shape.last().copied().unwrap_or(1).max(1), scales: None }
    }

    fn read(&self, first: usize, count: usize) -> io::Result<Units<'_>> {
        let (codes, columns) = (self.span.bytes_at(first, count)?, self.columns);
        let Some(BlockScales { entry, block }) = &self.scales else {
            let block = [usize::MAX, columns];
            return Ok(Units::Float8 { codes, columns, block, scales: vec![1.0], first });
        };
        let across = columns.div_ceil(block[1]);
        let first_block = first / columns / block[0];
        let blocks = (first + count).div_ceil(columns).div_ceil(block[0]).saturating_sub(first_block);
        let scales = floats(entry, first_block * across, blocks * across)?;
        let before = first_block.saturating_mul(block[0]).saturating_mul(columns);
        Ok(Units::Float8 { codes, columns, block: *block, scales, first: first - before })
    }
}

impl Span {
    /// Some of its bytes: where they lie, if the file is mapped.
    fn bytes_at(&self, within: usize, count: usize) -> io::Result<Cow<'_, [u8]>> {
        let mapped = self.mapped().and_then(|bytes| bytes.get(within..within.checked_add(count)?));
        if let Some(bytes) = mapped {
            return Ok(Cow::Borrowed(bytes));
        }
        let mut bytes = vec![0; count];
        self.read_at(&mut bytes, within)?;
        Ok(Cow::Owned(bytes))
    }
}

/// Puts together what belongs together: packed elements and their scales, which are tensors of their own in a file.
pub(super) fn join(tensors: &mut Tensors) {
    let states: Vec<(String, &'static str)> = tensors
        .entries
        .keys()
        .filter_map(|name| {
            let (weight, kind) = name.rsplit_once(".quant_state.bitsandbytes__")?;
            let kind = ["nf4", "fp4"].into_iter().find(|known| *known == kind)?;
            Some((weight.to_owned(), kind))
        })
        .collect();
    for (name, kind) in states {
        let Some(codes) = tensors.entries.remove(&name) else { continue };
        let joined = four_bits(&name, kind, &codes, tensors);
        tensors.insert(name, codes, joined);
    }
    let without_scales = |entry: &Entry| float8_of(entry).is_some_and(|numbers| numbers.scales.is_none());
    let float8 = tensors.entries.iter().filter(|(_, entry)| without_scales(entry));
    // What belongs together, before anything is taken out.
    let pairs = float8.filter_map(|(name, _)| {
        let [inverse, plain] = ["_scale_inv", "_scale"].map(|end| format!("{name}{end}"));
        let known = [inverse, plain].into_iter().find(|name| tensors.has(name));
        let other = || tensors.names().find(|other| is_scale_of(other, name)).cloned();
        let is_known = known.is_some();
        Some((name.clone(), known.or_else(other)?, is_known))
    });
    for (name, of_scales, is_known) in pairs.collect::<Vec<_>>() {
        let Some(codes) = tensors.entries.remove(&name) else { continue };
        let joined = match tensors.unreadable.get(&of_scales) {
            _ if !is_known => Err(format!("{of_scales} seems to scale it, in a way that is not supported")),
            Some(scales) => Err(format!("its scales, {of_scales}, cannot be read: {}", scales.reason)),
            None => match tensors.entries.remove(&of_scales) {
                Some(scales) => scaled(&codes, scales),
                None => Err(format!("its scales, {of_scales}, are those of another tensor")),
            },
        };
        tensors.insert(name, codes, joined);
    }
}

/// The numbers of a tensor of float8.
fn float8_of(entry: &Entry) -> Option<&Float8> {
    let packing: &dyn Any = entry.packing()?;
    match packing.downcast_ref()? {
        Packing::Float8(numbers) => Some(numbers),
        _ => None,
    }
}

/// Whether a tensor seems to scale another one: they are in one module, and it is called so.
fn is_scale_of(name: &str, weight: &str) -> bool {
    let (module, of_weight) = weight.rsplit_once('.').unwrap_or(("", weight));
    let (other, name) = name.rsplit_once('.').unwrap_or(("", name));
    module == other
        && name != of_weight
        && name.contains("scale")
        && !["input_scale", "activation_scale"].contains(&name)
}

impl Tensors {
    /// A tensor that was put together, or why that is not possible.
    fn insert(&mut self, name: String, codes: Entry, joined: Result<Entry, String>) {
        match joined {
            Ok(entry) => drop(self.entries.insert(name, entry)),
            Err(reason) => drop(self.unreadable.insert(name, Unreadable { file: codes.file, reason })),
        }
    }
}

/// What bitsandbytes says of a tensor, as JSON.
#[derive(Deserialize)]
struct State {
    blocksize: usize,
    shape: Vec<usize>,
    nested_blocksize: Option<usize>,
    nested_offset: Option<f32>,
}

/// The longest such text that is read, far longer than any real one.
const STATE_BYTES: usize = 1 << 16;

/// A tensor of bitsandbytes: its codes, and what belongs to them under longer names.
fn four_bits(name: &str, kind: &'static str, codes: &Entry, tensors: &mut Tensors) -> Result<Entry, String> {
    let mut part = |part: &str| tensors.entries.remove(&format!("{name}.{part}"));
    let missing = |part: &str| format!("there is no {name}.{part}");
    let state = format!("quant_state.bitsandbytes__{kind}");
    let state = part(&state).ok_or_else(|| missing(&state))?;
    let [table, scales] = ["quant_map", "absmax"].map(|name| part(name).ok_or_else(|| missing(name)));
    let (table, scales) = (table?, scales?);
    let nested = [part("nested_quant_map"), part("nested_absmax")];
    if state.tensor.byte_len() > STATE_BYTES || state.tensor.dtype != DType::U8 {
        return Err(format!("{} is not the text that bitsandbytes writes", state.tensor.name));
    }
    let read = |entry: &Entry| entry.read(entry.tensor.dtype).map_err(|error| error.to_string());
    let state: State = serde_json::from_slice(&read(&state)?)
        .map_err(|error| format!("{} is malformed: {error}", state.tensor.name))?;

    let Origin::Span(span) = &codes.origin else { return Err("it is not stored as it is".into()) };
    let count = countable(&state.shape).ok_or_else(|| format!("the shape {:?} is too large", state.shape))?;
    let has = |entry: &Entry, count: usize, dtypes: &[DType]| match dtypes.contains(&entry.tensor.dtype)
        && entry.tensor.shape.num_elements() == count
    {
        true => Ok(()),
        false => {
            let (tensor, found) = (&entry.tensor.name, &entry.tensor.shape[..]);
            Err(format!("{tensor} has the shape {found:?} of {:?}, not {count} elements", entry.tensor.dtype))
        }
    };
    // Their dtype is of no matter: some are stored as if two of them were one number in half precision.
    if span.len != count.div_ceil(2) {
        return Err(format!(
            "it has {} bytes, and the shape {:?} two elements for each",
            span.len, state.shape
        ));
    }
    let block = state.blocksize;
    if block == 0 || !block.is_multiple_of(2) || block > AT_ONCE {
        return Err(format!("blocks of {block} elements"));
    }
    let values = |entry: &Entry, count: usize| -> Result<Vec<f32>, String> {
        has(entry, count, &[DType::F32])?;
        floats(entry, 0, count).map_err(|error| error.to_string())
    };
    let table = values(&table, 16)?.try_into().map_err(|_| "a table of 16 numbers")?;
    let scale_count = count.div_ceil(block);
    let packed = match nested {
        [None, None] => None,
        [Some(table), Some(of_blocks)] => {
            let (block, offset) = (state.nested_blocksize, state.nested_offset);
            let block = block.filter(|block| *block > 0).ok_or("there is no nested_blocksize")?;
            has(&of_blocks, scale_count.div_ceil(block), &[DType::F32])?;
            let (table, offset) = (values(&table, 256)?, offset.unwrap_or(0.0));
            Some(PackedAgain { table, scales: of_blocks, block, offset })
        }
        [Some(_), None] => return Err(missing("nested_absmax")),
        [None, Some(_)] => return Err(missing("nested_quant_map")),
    };
    has(&scales, scale_count, if packed.is_some() { &[DType::U8] } else { &[DType::F32] })?;
    let scales = PackedScales { scales, packed };
    let packing = Packing::Nibbles(Nibbles { name: kind, span: span.clone(), table, block, scales });
    let (name, shape) = (codes.tensor.name.clone(), Shape::from(state.shape));
    Ok(Entry::of_packing(name, shape, codes.file.clone(), Arc::new(packing)))
}

/// The blocks of DeepSeek and Qwen3, whose files do not say how large they are.
const FLOAT8_BLOCK: usize = 128;

/// Numbers of eight bits with their scales.
fn scaled(codes: &Entry, scales: Entry) -> Result<Entry, String> {
    let Some(numbers) = float8_of(codes) else {
        return Err("it has no numbers of eight bits".into());
    };
    let (shape, of_scales) = (&codes.tensor.shape, scales.tensor.shape.to_vec());
    let columns = numbers.columns;
    let rows = shape.num_elements() / columns;
    let blocks = |size: usize| size.div_ceil(FLOAT8_BLOCK);
    let block = match of_scales[..] {
        _ if !scales.tensor.dtype.is_float() => None,
        [] | [1] => Some([usize::MAX, columns]),
        [count] | [count, 1] if count == rows && shape.num_dims() == 2 => Some([1, columns]),
        [down, across] if shape.num_dims() == 2 && [down, across] == [blocks(rows), blocks(columns)] => {
            Some([FLOAT8_BLOCK; 2])
        }
        _ => None,
    };
    let (tensor, dtype) = (&scales.tensor.name, scales.tensor.dtype);
    let block = block.ok_or_else(|| {
        format!("{tensor} {of_scales:?} of {dtype:?} has not one scale for all, for each row, or for {FLOAT8_BLOCK} x {FLOAT8_BLOCK}")
    })?;
    let packing = Float8 { scales: Some(BlockScales { entry: scales, block }), ..numbers.clone() };
    let (name, shape) = (codes.tensor.name.clone(), shape.clone());
    Ok(Entry::of_packing(name, shape, codes.file.clone(), Arc::new(Packing::Float8(packing))))
}
