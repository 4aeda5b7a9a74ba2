//! Where the bytes of a tensor are in a file, and how they are read: checked for changes of the file, converted and dequantized.
use super::open_file::{Mapped, Span};
use super::words::{into_bytes, words_for};
use super::{LazyError, quantized};
use burn::tensor::{Bytes, DType, Shape, TensorData};
use burn_memsave_layers::frozen::PackedElements;
use burn_store::{bridge::data_len, burn_pack};
use std::any::Any;
use std::fmt::Debug;
use std::io;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;

/// The elements of a tensor of this shape, if its bytes can be counted, whatever its dtype becomes.
pub(super) fn countable(shape: &[usize]) -> Option<usize> {
    let elements = shape.iter().try_fold(1usize, |count, axis| count.checked_mul(*axis))?;
    elements.checked_mul(size_of::<f64>()).map(|_| elements)
}

/// A tensor of a file.
#[derive(Clone, Debug)]
pub(super) struct Entry {
    /// Its name in the file, its dtype and shape, and its bytes on demand.
    pub tensor: burn_pack::Tensor,
    /// The file it is in.
    pub file: PathBuf,
    /// Where its elements come from.
    pub origin: Origin,
    /// Whether it is a matrix that its parameter holds transposed, as PyTorch stores the weights of linear layers.
    pub transposed: bool,
}

/// Elements that are read and unpacked at a time: at least a block.
pub(super) const AT_ONCE: usize = 1 << 20;

/// Elements that are packed in a file, in fewer bits than a float has.
pub(super) trait Unpack: Any + Debug + Send + Sync {
    /// The name of the format.
    fn name(&self) -> &str;
    /// The bytes of the elements in the file, without those of scales that are elsewhere.
    fn bytes(&self) -> usize;
    /// Reads `count` elements, beginning with `first`.
    fn read(&self, first: usize, count: usize) -> io::Result<Box<dyn PackedElements + '_>>;
    /// Reads and unpacks elements, beginning with `first`, until `out` is full.
    fn unpack(&self, first: usize, out: &mut [f32]) -> io::Result<()> {
        for (out, first) in out.chunks_mut(AT_ONCE).zip((first..).step_by(AT_ONCE)) {
            self.read(first, out.len())?.unpack(0, out);
        }
        Ok(())
    }
    /// Checks that the files are as they were when they were opened.
    fn check_unchanged(&self) -> io::Result<()>;
}

/// Where the elements of a tensor come from.
#[derive(Clone, Debug)]
pub(super) enum Origin {
    /// They are in a file as they are.
    Span(Span),
    /// They are packed in a file. The tensor is one of f32.
    Packed(Arc<dyn Unpack>),
    /// They are there only when the tensor is read as a whole.
    Whole,
}

/// Where elements are read from.
enum Source<'a> {
    File(&'a Span),
    Packed(&'a dyn Unpack),
    Memory(Bytes),
}

impl Source<'_> {
    fn read_at(&self, out: &mut [u8], at: usize) -> io::Result<()> {
        match self {
            Self::File(span) => span.read_at(out, at),
            Self::Packed(packing) => {
                let first = at / size_of::<f32>();
                match bytemuck::try_cast_slice_mut(out) {
                    Ok(out) => packing.unpack(first, out),
                    Err(_) => {
                        let mut aligned = vec![0.0f32; out.len() / size_of::<f32>()];
                        packing.unpack(first, &mut aligned)?;
                        out.copy_from_slice(bytemuck::cast_slice(&aligned));
                        Ok(())
                    }
                }
            }
            Self::Memory(bytes) => {
                let part = bytes.get(at..at + out.len()).ok_or(io::ErrorKind::UnexpectedEof)?;
                out.copy_from_slice(part);
                Ok(())
            }
        }
    }

    fn check_unchanged(&self) -> io::Result<()> {
        match self {
            Self::File(span) => span.file.check_unchanged(),
            Self::Packed(packing) => packing.check_unchanged(),
            Self::Memory(_) => Ok(()),
        }
    }
}

/// Bytes that are converted at a time.
const CHUNK: usize = 1 << 16;

/// Bytes of unpacked elements that are converted at a time.
const PACKED_CHUNK: usize = 1 << 22;

/// Bytes of rows that are transposed at a time. They stay in the cache of a core while they become columns.
const STRIPE: usize = 1 << 18;

impl Entry {
    pub fn of_span(name: String, dtype: DType, shape: Shape, span: Span) -> Self {
        let (file, len, source) = (span.file.path.clone(), span.len, span.clone());
        let read = move || source.read().map_err(|error| burn_pack::Error::IoError(error.to_string()));
        let tensor = burn_pack::Tensor::deferred(name, dtype, shape, None, len, read);
        Self { tensor, file, origin: Origin::Span(span), transposed: false }
    }

    /// A tensor of f32 that is packed in a file.
    pub fn of_packing(name: String, shape: Shape, file: PathBuf, packing: Arc<dyn Unpack>) -> Self {
        let (count, packed) = (shape.num_elements(), packing.clone());
        let read = move || {
            let mut out = vec![0.0f32; count];
            let read = packed.unpack(0, &mut out).and_then(|()| packed.check_unchanged());
            read.map_err(|error| burn_pack::Error::IoError(error.to_string()))?;
            Ok(Bytes::from_elems(out))
        };
        let len = data_len(DType::F32, &shape);
        let tensor = burn_pack::Tensor::deferred(name, DType::F32, shape, None, len, read);
        Self { tensor, file, origin: Origin::Packed(packing), transposed: false }
    }

    /// Whether a part of it can be read without the others.
    pub fn has_parts(&self) -> bool {
        !matches!(self.origin, Origin::Whole)
    }

    /// How it is packed.
    pub fn packing(&self) -> Option<&dyn Unpack> {
        match &self.origin {
            Origin::Packed(packing) => Some(&**packing),
            _ => None,
        }
    }

    /// The shape of its parameter.
    pub fn shape(&self) -> Shape {
        let mut shape = self.tensor.shape.clone();
        if self.transposed {
            shape.swap(0, 1);
        }
        shape
    }

    /// Its float dtype in memory by default; `None` if it is not a float, or is quantized with another scheme than ours.
    pub fn float(&self) -> Option<DType> {
        match self.tensor.dtype {
            dtype if dtype.is_float() => Some(dtype),
            DType::QFloat(scheme) if scheme == quantized::scheme() && quantized::fits(&self.tensor.shape) => {
                Some(DType::F32)
            }
            _ => None,
        }
    }

    /// Its tensor, dequantized if it has our scheme.
    pub fn as_floats(&self) -> burn_pack::Tensor {
        let (DType::QFloat(_), Some(dtype)) = (self.tensor.dtype, self.float()) else {
            return self.tensor.clone();
        };
        let burn_pack::Tensor { name, shape, param_id, .. } = self.tensor.clone();
        let (entry, len) = (self.clone(), self.len_as(dtype));
        let read = move || entry.read(dtype).map_err(|error| burn_pack::Error::IoError(error.to_string()));
        burn_pack::Tensor::deferred(name, dtype, shape, param_id, len, read)
    }

    /// Its length in bytes as `dtype`.
    pub fn len_as(&self, dtype: DType) -> usize {
        match dtype == self.tensor.dtype {
            true => self.tensor.byte_len(),
            false => data_len(dtype, &self.shape()),
        }
    }

    pub fn error(&self, reason: impl ToString) -> LazyError {
        let (file, tensor) = (self.file.clone(), self.tensor.name.clone());
        LazyError::Tensor { file, tensor, reason: reason.to_string() }
    }

    /// Reads it as `dtype`, in the order in which it is stored, into `out`, which has the [length for that](Self::len_as).
    pub fn read_as(&self, dtype: DType, out: &mut [u8]) -> Result<(), LazyError> {
        self.read_range_as(dtype, 0, out)
    }

    /// Reads it as `dtype`, in the order of its parameter.
    pub fn read(&self, dtype: DType) -> Result<Bytes, LazyError> {
        if !self.has_parts() && dtype == self.tensor.dtype && !self.transposed {
            return self.bytes();
        }
        let len = self.len_as(dtype);
        let mut words = words_for(len);
        let out = &mut bytemuck::cast_slice_mut(&mut words)[..len];
        match self.transposed {
            true => self.read_transposing(dtype, out)?,
            false => self.read_as(dtype, out)?,
        }
        Ok(into_bytes(words, len))
    }

    /// Its values as `dtype`.
    pub fn values(&self, dtype: DType) -> Result<TensorData, LazyError> {
        Ok(TensorData::from_bytes(self.read(dtype)?, self.shape(), dtype))
    }

    /// Reads a matrix that is stored transposed, some rows at a time, which become columns.
    fn read_transposing(&self, dtype: DType, out: &mut [u8]) -> Result<(), LazyError> {
        let ([rows, columns], size) = (self.tensor.shape.dims(), dtype.size());
        if out.is_empty() {
            return Ok(());
        }
        let row = columns * size;
        let of_stripe = (STRIPE / row.max(1)).clamp(1, rows.max(1));
        let mut stripe = words_for(of_stripe * row);
        let source = self.source()?;
        for first in (0..rows).step_by(of_stripe) {
            let count = of_stripe.min(rows - first);
            let stripe = &mut bytemuck::cast_slice_mut(&mut stripe)[..count * row];
            self.read_from(&source, dtype, first * columns, stripe).map_err(|error| self.error(error))?;
            match size {
                1 => into_columns::<u8>(stripe, columns, out, rows, first),
                2 => into_columns::<u16>(stripe, columns, out, rows, first),
                4 => into_columns::<u32>(stripe, columns, out, rows, first),
                _ => into_columns::<u64>(stripe, columns, out, rows, first),
            }
        }
        source.check_unchanged().map_err(|error| self.error(error))
    }

    /// Returns an error if it does not have one of these rows.
    pub fn check_rows(&self, rows: &[usize]) -> Result<(), LazyError> {
        let count = self.tensor.shape[0];
        match rows.iter().find(|&&row| row >= count) {
            Some(row) => Err(self.error(format!("it has {count} rows, and not a row {row}"))),
            None => Ok(()),
        }
    }

    /// Reads rows (entries of the first axis) into `out`, one after the other.
    pub fn read_rows_as(&self, dtype: DType, rows: &[usize], out: &mut [u8]) -> Result<(), LazyError> {
        self.check_rows(rows)?;
        let width = self.tensor.shape.num_elements() / self.tensor.shape[0].max(1);
        let source = self.source()?;
        // Consecutive rows are read at once.
        let mut out = out;
        let mut done = 0;
        while done < rows.len() {
            let first = rows[done];
            let follow = (1..).zip(&rows[done + 1..]).take_while(|(next, row)| **row == first + next);
            let run = 1 + follow.count();
            let part = out.split_off_mut(..run * width * dtype.size()).expect("as long as its rows");
            self.read_from(&source, dtype, first * width, part).map_err(|error| self.error(error))?;
            done += run;
        }
        source.check_unchanged().map_err(|error| self.error(error))
    }

    /// Reads elements, beginning with `first`, until `out` is full.
    pub fn read_range_as(&self, dtype: DType, first: usize, out: &mut [u8]) -> Result<(), LazyError> {
        let source = self.source()?;
        let read = self.read_from(&source, dtype, first, out);
        read.and_then(|()| source.check_unchanged()).map_err(|error| self.error(error))
    }

    /// [`read_range_as`](Self::read_range_as) that does not check whether the file changed.
    pub fn read_range_unchecked(&self, dtype: DType, first: usize, out: &mut [u8]) -> io::Result<()> {
        self.read_from(&self.source().map_err(io::Error::other)?, dtype, first, out)
    }

    fn source(&self) -> Result<Source<'_>, LazyError> {
        match &self.origin {
            Origin::Span(span) => Ok(Source::File(span)),
            Origin::Packed(packing) => Ok(Source::Packed(&**packing)),
            Origin::Whole => self.bytes().map(Source::Memory),
        }
    }

    fn read_from(&self, source: &Source<'_>, dtype: DType, first: usize, out: &mut [u8]) -> io::Result<()> {
        let stored = self.tensor.dtype;
        if stored == dtype {
            // (Elements of a quantized tensor have no size of their own, but such a tensor is read whole.)
            return source.read_at(out, first * stored.size());
        }
        if let DType::QFloat(_) = stored {
            return self.dequantize(source, dtype, first, out);
        }
        // What is unpacked is unpacked by many threads.
        let bytes = if self.packing().is_some() { PACKED_CHUNK } else { CHUNK };
        let mut chunk = words_for(bytes.min(out.len() / dtype.size() * stored.size()));
        let per_chunk = bytes / stored.size();
        for (index, out) in out.chunks_mut(per_chunk * dtype.size()).enumerate() {
            let count = out.len() / dtype.size();
            let chunk = &mut bytemuck::cast_slice_mut(&mut chunk)[..count * stored.size()];
            source.read_at(chunk, (first + index * per_chunk) * stored.size())?;
            convert(chunk, stored, out, dtype);
        }
        Ok(())
    }

    fn dequantize(&self, source: &Source<'_>, dtype: DType, first: usize, out: &mut [u8]) -> io::Result<()> {
        const COUNT: usize = CHUNK / size_of::<f32>();
        let scales_at = self.tensor.shape.num_elements();
        let (mut values, mut scales) = (vec![0i8; COUNT], vec![0.0f32; COUNT / quantized::BLOCK + 1]);
        let mut floats = vec![0.0f32; COUNT];
        for (index, out) in out.chunks_mut(COUNT * dtype.size()).enumerate() {
            let (first, count) = (first + index * COUNT, out.len() / dtype.size());
            let blocks = first / quantized::BLOCK..(first + count).div_ceil(quantized::BLOCK);
            let (values, scales) = (&mut values[..count], &mut scales[..blocks.len()]);
            source.read_at(bytemuck::cast_slice_mut(values), first)?;
            source.read_at(bytemuck::cast_slice_mut(scales), scales_at + blocks.start * size_of::<f32>())?;
            quantized::dequantize(values, scales, first, &mut floats[..count]);
            convert(bytemuck::cast_slice(&floats[..count]), DType::F32, out, dtype);
        }
        Ok(())
    }

    /// The bytes of a tensor that are not in a file as they are.
    fn bytes(&self) -> Result<Bytes, LazyError> {
        // Burn's readers of checkpoints may panic at damaged data.
        let read = std::panic::AssertUnwindSafe(|| self.tensor.to_bytes());
        match std::panic::catch_unwind(read) {
            Ok(bytes) => bytes.map_err(|error| self.error(error)),
            Err(_) => Err(self.error("its data are damaged")),
        }
    }

    /// The bytes in the mapped file, if it is mapped and they need not be converted or aligned.
    pub fn map(&self, dtype: DType) -> Option<bytes::Bytes> {
        let (map, range) = self.mapped().filter(|_| dtype == self.tensor.dtype)?;
        let aligned = map.as_ref()[range.start..].as_ptr().addr().is_multiple_of(dtype.size());
        aligned.then(|| bytes::Bytes::from_owner(map.clone()).slice(range))
    }

    /// Brings its part of a mapped file into memory.
    pub fn read_ahead(&self) {
        if let Origin::Span(span) = &self.origin {
            span.read_ahead();
        }
    }

    /// Gives the memory of its part of a mapped file back to the system.
    pub fn forget(&self) {
        if let Origin::Span(span) = &self.origin {
            span.forget();
        }
    }

    /// Its file, if it is mapped, and where it is in there.
    fn mapped(&self) -> Option<(&Mapped, Range<usize>)> {
        match &self.origin {
            Origin::Span(span) => span.map(),
            _ => None,
        }
    }
}

/// Makes rows of `columns` elements the columns from `first` on of the matrix `out`, which has `width` columns.
fn into_columns<E: bytemuck::Pod>(rows: &[u8], columns: usize, out: &mut [u8], width: usize, first: usize) {
    let (rows, out) = (bytemuck::cast_slice::<u8, E>(rows), bytemuck::cast_slice_mut::<u8, E>(out));
    for (column, out) in out.chunks_exact_mut(width).enumerate() {
        let elements = rows[column..].iter().step_by(columns);
        out[first..].iter_mut().zip(elements).for_each(|(out, element)| *out = *element);
    }
}

/// Converts elements as Burn does.
fn convert(from: &[u8], from_dtype: DType, to: &mut [u8], to_dtype: DType) {
    use half::slice::HalfFloatSliceExt;
    let same_alignment = bytemuck::try_cast_slice_mut::<u8, f32>(to);
    match (from_dtype, to_dtype, same_alignment) {
        (DType::F16, DType::F32, Ok(to)) => {
            bytemuck::cast_slice::<u8, half::f16>(from).convert_to_f32_slice(to);
        }
        (DType::BF16, DType::F32, Ok(to)) => {
            bytemuck::cast_slice::<u8, half::bf16>(from).convert_to_f32_slice(to);
        }
        (DType::F32, DType::F16, _) => {
            bytemuck::cast_slice_mut::<u8, half::f16>(to).convert_from_f32_slice(bytemuck::cast_slice(from));
        }
        (DType::F32, DType::BF16, _) => {
            bytemuck::cast_slice_mut::<u8, half::bf16>(to).convert_from_f32_slice(bytemuck::cast_slice(from));
        }
        _ if from_dtype == to_dtype => to.copy_from_slice(from),
        _ => {
            let count = from.len() / from_dtype.size();
            let data = TensorData::from_bytes_vec(from.to_vec(), [count], from_dtype);
            to.copy_from_slice(data.convert_dtype(to_dtype).as_bytes());
        }
    }
}
