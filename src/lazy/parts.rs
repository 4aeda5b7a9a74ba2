//! Tensors that are made of those of a file: rows of one, rows of several, copies, and weights of weight normalization.
use super::names::Replacement;
use super::open_file::Span;
use super::packed::Packing;
use super::source::{Entry, Origin};
use super::tensors::Tensors;
use super::words::{into_bytes, words_for};
use super::{LazyError, WeightFile};
use burn::tensor::{Bytes, DType, Shape, TensorData};
use burn_store::burn_pack;
use std::ops::Range;
use std::slice;
use std::sync::Arc;

impl WeightFile {
    /// Splits tensors into equal parts of their rows (entries of the first axis): a tensor whose name the regular expression `from` matches
    /// is replaced by one tensor for each of `to`, in the order of the rows. What matches is replaced in the name by `to`, which may refer to
    /// groups of `from` as `$1`, as in [`with_key_remapping`](Self::with_key_remapping). Parts are read where they lie in the file, each by
    /// itself.
    ///
    /// ```
    /// # use burn::tensor::{Device, Tensor};
    /// # use burn::module::{Module, Param};
    /// use burn_memsave::lazy::WeightFile;
    ///
    /// # #[derive(Module, Debug)] struct Fused { in_proj_weight: Param<Tensor<2>> }
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("model.bpk");
    /// # let in_proj_weight = Param::from_tensor(Tensor::ones([12, 4], &Device::flex()));
    /// # Fused { in_proj_weight }.save_file(&path)?;
    /// let file = WeightFile::open(&path)?
    ///     .with_equal_rows("^in_proj_weight$", &["query.weight", "key.weight", "value.weight"])?;
    /// let shapes: Vec<_> = file.tensors().map(|tensor| (tensor.name, tensor.shape.to_vec())).collect();
    /// assert_eq!(shapes[0], ("key.weight", vec![4, 4]));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    ///
    /// Returns the errors of [`with_key_remapping`](Self::with_key_remapping), and an error if the rows cannot be divided.
    pub fn with_equal_rows(self, from: &str, to: &[&str]) -> Result<Self, LazyError> {
        let (to, file) = (replacements(from, to)?, self.clone());
        self.with_derived(from, |name, tensors| {
            let entry = taken(&file, tensors, name)?;
            split_equally(&entry, to.iter().filter_map(|to| to.apply(name)).collect())
        })
    }

    /// Splits tensors as [`with_equal_rows`](Self::with_equal_rows) does, into these rows for these names. A name that occurs several times
    /// gets all of its rows, one range after the other, and is read whole. Rows may be left out, and be used twice.
    ///
    /// # Errors
    ///
    /// Returns the errors of [`with_key_remapping`](Self::with_key_remapping), and an error if a tensor does not have these rows.
    pub fn with_rows(self, from: &str, to: &[(&str, Range<usize>)]) -> Result<Self, LazyError> {
        let names = replacements(from, &to.iter().map(|(name, _)| *name).collect::<Vec<_>>())?;
        let file = self.clone();
        self.with_derived(from, |name, tensors| {
            let entry = taken(&file, tensors, name)?;
            let mut parts: Vec<(String, Vec<Range<usize>>)> = vec![];
            for (to, (_, rows)) in names.iter().zip(to) {
                let Some(name) = to.apply(name) else { continue };
                match parts.iter_mut().find(|(other, _)| *other == name) {
                    Some((_, ranges)) => ranges.push(rows.clone()),
                    None => parts.push((name, vec![rows.clone()])),
                }
            }
            parts.into_iter().map(|(name, ranges)| Ok((name, rows_of(&entry, &ranges)?))).collect()
        })
    }

    /// Puts the rows (entries of the first axis) of several tensors into one: of that whose name the regular expression `from` matches, and
    /// then of those whose names have each of `others` in place of the match. The new name has `to` there. The new tensor is read whole.
    ///
    /// # Errors
    ///
    /// Returns the errors of [`with_key_remapping`](Self::with_key_remapping), and an error if one of the others is missing, or if dtypes or
    /// other axes differ.
    pub fn with_joined_rows(self, from: &str, others: &[&str], to: &str) -> Result<Self, LazyError> {
        let (others, to, file) = (replacements(from, others)?, Replacement::new(from, to)?, self.clone());
        self.with_derived(from, |name, tensors| {
            let names = others.iter().filter_map(|other| other.apply(name));
            let parts = [name.to_owned()].into_iter().chain(names).map(|name| taken(&file, tensors, &name));
            let whole = joined(parts.collect::<Result<_, _>>()?)?;
            Ok(to.apply(name).map(|name| (name, whole)).into_iter().collect())
        })
    }

    /// Gives tensors a second name, for a module with two parameters where the file has one tensor: a tensor whose name `from` matches is
    /// there under the name `to` as well, unless the file has a tensor of this name. Names are as in
    /// [`with_key_remapping`](Self::with_key_remapping).
    ///
    /// Each of the two parameters has values of its own. If they are to stay the same in training, or to be in memory once, the module must
    /// have one parameter, as with [`Embedding::logits`](crate::nn::Embedding).
    ///
    /// # Errors
    ///
    /// Returns the errors of `with_key_remapping`.
    pub fn with_copies(self, from: &str, to: &str) -> Result<Self, LazyError> {
        let to = Replacement::new(from, to)?;
        self.with_derived(from, |name, tensors| {
            let copy = to.apply(name).filter(|copy| !tensors.entries.contains_key(copy));
            let Some((copy, entry)) = copy.zip(tensors.entries.get(name)) else { return Ok(vec![]) };
            let mut entry = entry.clone();
            entry.tensor.param_id = None; // another parameter
            Ok(vec![(copy, entry)])
        })
    }

    /// Computes the weights of layers with PyTorch's weight normalization, `weight = g v / |v|`, from `weight_g` and `weight_v` (or
    /// `parametrizations.weight.original0` and `original1`, as newer versions write). The norm is over all axes on which `g` has one entry.
    /// A lazy weight is computed whenever it is read.
    ///
    /// # Errors
    ///
    /// Returns an error if there are no such tensors, or if shapes do not fit.
    pub fn with_weight_norm(self) -> Result<Self, LazyError> {
        let ends = [
            ("weight_g", "weight_v"),
            ("parametrizations.weight.original0", "parametrizations.weight.original1"),
        ];
        let has = |end: &str| self.contents().entries.keys().any(|name| name.ends_with(end));
        let present = ends.into_iter().filter(|(g, _)| has(g)).collect::<Vec<_>>();
        let ends = if present.is_empty() { &ends[..1] } else { &present };
        ends.iter().try_fold(self, |file, (g, v)| {
            let from = format!(r"^(|.*\.){}$", regex::escape(g));
            let (v, to) =
                (Replacement::new(&from, &format!("${{1}}{v}"))?, Replacement::new(&from, "${1}weight")?);
            let names = file.clone();
            file.with_derived(&from, |name, tensors| {
                let g = taken(&names, tensors, name)?;
                let v = taken(&names, tensors, &v.apply(name).unwrap_or_default())?;
                let weight = normalized(g, v)?;
                Ok(to.apply(name).map(|name| (name, weight)).into_iter().collect())
            })
        })
    }

    /// Replaces the tensors whose names a pattern matches by those that are made of them.
    pub(super) fn with_derived(
        self,
        from: &str,
        derive: impl Fn(&str, &mut Tensors) -> Result<Vec<(String, Entry)>, LazyError>,
    ) -> Result<Self, LazyError> {
        let pattern = Replacement::new(from, "")?;
        let mut tensors = self.contents().clone();
        let names: Vec<String> =
            tensors.entries.keys().filter(|name| pattern.matches(name)).cloned().collect();
        if names.is_empty() {
            let unreadable = tensors.unreadable.keys().find(|name| pattern.matches(name));
            unreadable.map_or(Ok(()), |name| self.get(name).map(drop))?;
            return Err(pattern.matches_none(tensors.names()));
        }
        for name in &names {
            for (to, entry) in derive(name, &mut tensors)? {
                if tensors.entries.contains_key(&to) || tensors.unreadable.contains_key(&to) {
                    return Err(pattern.error(format!("what is made of {name} would be a second {to}")));
                }
                tensors.entries.insert(to, entry);
            }
        }
        Ok(self.with_tensors(tensors))
    }
}

fn replacements(from: &str, to: &[&str]) -> Result<Vec<Replacement>, LazyError> {
    to.iter().map(|to| Replacement::new(from, to)).collect()
}

/// Takes a tensor out of those of the file.
pub(super) fn taken(file: &WeightFile, tensors: &mut Tensors, name: &str) -> Result<Entry, LazyError> {
    tensors.entries.remove(name).ok_or_else(|| file.missing(name, &[]))
}

/// Equal parts of the rows of a tensor, in their order, with these names.
pub(super) fn split_equally(entry: &Entry, names: Vec<String>) -> Result<Vec<(String, Entry)>, LazyError> {
    let (rows, count) = (entry.tensor.shape.first().copied().unwrap_or(0), names.len());
    let part = rows / count.max(1);
    if part * count != rows {
        return Err(entry.error(format!("its {rows} rows cannot be divided into {count} equal parts")));
    }
    let rows = |at: usize| at * part..(at + 1) * part;
    (0..).zip(names).map(|(at, name)| Ok((name, rows_of(entry, slice::from_ref(&rows(at)))?))).collect()
}

/// Rows of a tensor, one range after the other: where they lie, or of a tensor that is made or read as a whole, of one reading.
fn rows_of(entry: &Entry, ranges: &[Range<usize>]) -> Result<Entry, LazyError> {
    let (dtype, mut shape) = (entry.dense()?, entry.tensor.shape.clone());
    let count = shape.first().copied().ok_or_else(|| entry.error("it has no rows"))?;
    if let Some(rows) = ranges.iter().find(|rows| rows.start > rows.end || rows.end > count) {
        return Err(entry.error(format!("it has {count} rows, and not {rows:?}")));
    }
    let width = shape.num_elements() / count.max(1) * dtype.size();
    let bytes = ranges.iter().map(|rows| rows.start * width..rows.end * width);
    let part = |(rows, bytes): (&Range<usize>, Range<usize>)| {
        let (mut shape, name) = (shape.clone(), entry.tensor.name.clone());
        shape[0] = rows.len();
        match &entry.origin {
            Origin::Span(span) => {
                let (file, offset) = (span.file.clone(), span.offset + bytes.start as u64);
                Some(Entry::of_span(name, dtype, shape, Span { file, offset, len: bytes.len() }))
            }
            Origin::Packed(whole) => {
                let (whole, first) = (whole.clone(), bytes.start / dtype.size());
                let packing =
                    Packing::Part { first, bytes: whole.bytes() / count.max(1) * rows.len(), whole };
                Some(Entry::of_packing(name, shape, entry.file.clone(), Arc::new(packing)))
            }
            Origin::Whole => None,
        }
    };
    if entry.has_parts() {
        return joined(ranges.iter().zip(bytes).filter_map(part).collect());
    }
    let (bytes, whole): (Vec<_>, _) = (bytes.collect(), entry.clone());
    shape[0] = ranges.iter().map(Range::len).fold(0, usize::saturating_add);
    let len = bytes.iter().map(Range::len).fold(0, usize::saturating_add);
    Ok(entry.made(dtype, shape, len, move |out| {
        let (data, mut rest) = (whole.read(dtype)?, out);
        for bytes in &bytes {
            let (part, others) = rest.split_at_mut(bytes.len());
            part.copy_from_slice(&data[bytes.clone()]);
            rest = others;
        }
        Ok(())
    }))
}

/// The rows of several tensors.
fn joined(parts: Vec<Entry>) -> Result<Entry, LazyError> {
    let [first, others @ ..] = &parts[..] else { unreachable!("there is a part") };
    if others.is_empty() {
        return Ok(first.clone());
    }
    let (dtype, mut shape) = (first.dense()?, first.tensor.shape.clone());
    if shape.num_dims() == 0 {
        return Err(first.error("it has no rows"));
    }
    for other in others {
        let of = &other.tensor;
        if other.dense()? != dtype || of.shape.num_dims() != shape.num_dims() || of.shape[1..] != shape[1..] {
            let (tensor, kind) = (&first.tensor.name, (dtype, shape.to_vec()));
            return Err(other.error(format!("its rows cannot be joined to those of {tensor}, {kind:?}")));
        }
        shape[0] = shape[0].saturating_add(of.shape[0]); // no more than there are bytes, or rows are empty
    }
    let len = parts.iter().map(|part| part.len_as(dtype)).sum();
    Ok(parts[0].clone().made(dtype, shape, len, move |out| {
        let mut rest = out;
        for part in &parts {
            let (part_out, others) = rest.split_at_mut(part.len_as(dtype));
            part.read_as(dtype, part_out)?;
            rest = others;
        }
        Ok(())
    }))
}

/// `g v / |v|`, where the norm is over all axes on which `g` has one entry.
fn normalized(g: Entry, v: Entry) -> Result<Entry, LazyError> {
    g.dense()?;
    let (dtype, shape) = (v.dense()?, v.tensor.shape.clone());
    let ones = |axes: &[usize]| axes.iter().all(|&size| size == 1);
    let of_g = &g.tensor.shape[..];
    // The axis that keeps its norms.
    let axis = (0..of_g.len()).find(|&axis| of_g[axis] != 1);
    let fits = match axis {
        None => true,
        Some(axis) => of_g.len() == shape.num_dims() && of_g[axis] == shape[axis] && ones(&of_g[axis + 1..]),
    };
    if !fits {
        return Err(g.error(format!("its shape {of_g:?} is not that of norms of {:?}", &shape[..])));
    }
    let (count, inner) = match axis {
        Some(axis) => {
            (shape[axis], shape[axis + 1..].iter().fold(1, |inner: usize, size| inner.saturating_mul(*size)))
        }
        None => (1, shape.num_elements()),
    };
    let len = v.len_as(dtype);
    Ok(v.clone().made(dtype, shape, len, move |out| {
        let floats = |entry: &Entry| -> Result<Vec<f64>, LazyError> {
            entry.values(DType::F64)?.try_into_vec().map_err(|error| entry.error(format!("{error:?}")))
        };
        let (g, mut v) = (floats(&g)?, floats(&v)?);
        let row = |at: usize| at / inner.max(1) % count;
        let mut squares = vec![0.0; count];
        v.iter().enumerate().for_each(|(at, v)| squares[row(at)] += v * v);
        v.iter_mut().enumerate().for_each(|(at, v)| *v *= g[row(at)] / squares[row(at)].sqrt());
        let count = v.len();
        out.copy_from_slice(TensorData::new(v, [count]).convert_dtype(dtype).as_bytes());
        Ok(())
    }))
}

impl Entry {
    /// Its dtype, if its elements can be told apart.
    fn dense(&self) -> Result<DType, LazyError> {
        match self.tensor.dtype {
            DType::QFloat(_) => Err(self.error("quantized tensors are used as they are only")),
            dtype => Ok(dtype),
        }
    }

    /// A tensor of the same name that is made when it is read.
    fn made(
        &self,
        dtype: DType,
        shape: Shape,
        len: usize,
        make: impl Fn(&mut [u8]) -> Result<(), LazyError> + Send + Sync + 'static,
    ) -> Self {
        let read = move || -> Result<Bytes, burn_pack::Error> {
            let mut words = words_for(len);
            make(&mut bytemuck::cast_slice_mut(&mut words)[..len])
                .map_err(|error| burn_pack::Error::IoError(error.to_string()))?;
            Ok(into_bytes(words, len))
        };
        let tensor = burn_pack::Tensor::deferred(self.tensor.name.clone(), dtype, shape, None, len, read);
        Self { tensor, file: self.file.clone(), origin: Origin::Whole, transposed: false }
    }
}
