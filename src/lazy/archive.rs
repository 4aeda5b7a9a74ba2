//! Where the tensors of a PyTorch checkpoint lie. Since PyTorch 1.6, a checkpoint is a zip archive: a pickle names the tensors, and the
//! elements of each are part of an entry, which `torch.save` does not compress.
//!
//! burn-store reads the same archives, but does not tell the places. What this file does not understand, it leaves to burn-store.
use super::LazyError;
use super::open_file::{OpenFile, Span};
use burn::tensor::DType;
use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::io::{BufReader, Read};
use std::ops::Range;
use std::sync::Arc;
use zip::{CompressionMethod, ZipArchive, ZipReadOptions};

/// The largest pickle that is read, the limit of burn-store, too.
const PICKLE_BYTES: u64 = 100 << 20;

/// The longest paths of all tensors together. A dictionary that is nested very deeply would have paths far longer than its pickle.
const PATH_BYTES: usize = 1 << 26;

/// The tensors of an archive, by name, as far as this file understands it.
#[derive(Default)]
pub(super) struct Archive {
    /// The contiguous ones whose bytes lie in the file as they are.
    pub placed: HashMap<String, Placed>,
    /// The others, and why they are not among these.
    pub others: HashMap<String, String>,
}

type Zip = ZipArchive<BufReader<File>>;

fn zip(file: &OpenFile) -> Result<Zip, LazyError> {
    let reader = file.reader().map_err(|error| file.malformed(error))?;
    ZipArchive::new(BufReader::new(reader)).map_err(|error| file.malformed(error))
}

/// Whether `torch.jit.save` wrote it: it has code beside the tensors.
pub(super) fn is_torch_script(file: &OpenFile) -> bool {
    zip(file).is_ok_and(|archive| archive.file_names().flatten().any(|name| name.ends_with("/constants.pkl")))
}

pub(super) fn open(file: &Arc<OpenFile>) -> Result<Archive, LazyError> {
    let malformed = |error: &dyn ToString| file.malformed(error.to_string());
    let mut archive = zip(file)?;
    let names = archive.file_names().collect::<Result<Vec<_>, _>>().map_err(|error| malformed(&error))?;
    let roots = names.iter().filter_map(|name| name.strip_suffix("data.pkl"));
    let root = roots.filter(|root| root.is_empty() || root.ends_with('/')).min_by_key(|root| root.len());
    let Some(root) = root.map(str::to_owned) else { return Ok(Archive::default()) };

    let mut pickle = vec![];
    let index = archive.index_for_name(&format!("{root}data.pkl")).ok_or_else(|| malformed(&"no pickle"))?;
    // Some writers leave the checksum out.
    let unchecked = archive.by_index_raw(index).map_err(|error| malformed(&error))?.crc32() == 0;
    let options = ZipReadOptions::new().ignore_crc32(unchecked);
    let entry = archive.by_index_with_options(index, options).map_err(|error| malformed(&error))?;
    entry.take(PICKLE_BYTES).read_to_end(&mut pickle).map_err(|error| malformed(&error))?;
    let Some(Views { views, mut others }) = views(&pickle) else { return Ok(Archive::default()) };

    let mut storages: HashMap<&str, Option<Range<u64>>> = HashMap::new();
    let mut placed = HashMap::new();
    for (name, View { key, dtype, offset, shape }) in views {
        if !storages.contains_key(key) {
            let storage = storage(&mut archive, &format!("{root}data/{key}"), file)?;
            storages.insert(key, storage);
        }
        let Some(storage) = &storages[key] else {
            others.insert(name, "its bytes are compressed".into());
            continue;
        };
        let beyond = || file.malformed(format!("tensor {name} reaches beyond its storage"));
        let bytes = |count: u64| count.checked_mul(dtype.size() as u64).ok_or_else(beyond);
        let count = shape.iter().try_fold(1u64, |count, &axis| count.checked_mul(axis as u64));
        let (before, len) = (bytes(offset)?, bytes(count.ok_or_else(beyond)?)?);
        if before.checked_add(len).is_none_or(|end| end > storage.end - storage.start) {
            return Err(beyond());
        }
        let len = usize::try_from(len).map_err(|_| beyond())?;
        let span = Span { file: file.clone(), offset: storage.start + before, len };
        placed.insert(name, Placed { dtype, shape, span });
    }
    let mut ranges: Vec<_> = storages.into_values().flatten().collect();
    ranges.sort_by_key(|range| (range.start, range.end));
    match ranges.windows(2).any(|pair| pair[1].start < pair[0].end) {
        true => Err(file.malformed("entries of the archive overlap")),
        false => Ok(Archive { placed, others }),
    }
}

/// A tensor that lies in the file as it is.
pub(super) struct Placed {
    pub dtype: DType,
    pub shape: Vec<usize>,
    pub span: Span,
}

/// Where an entry lies in the file; `None` if its bytes are not there as they are.
fn storage(archive: &mut Zip, name: &str, file: &OpenFile) -> Result<Option<Range<u64>>, LazyError> {
    let malformed = |reason: &dyn ToString| file.malformed(format!("entry {name}: {}", reason.to_string()));
    let index = archive.index_for_name(name).ok_or_else(|| malformed(&"not in the archive"))?;
    // Reads the local header, too.
    let entry = archive.by_index_raw(index).map_err(|error| malformed(&error))?;
    if entry.compression() != CompressionMethod::Stored || entry.encrypted() {
        return Ok(None);
    }
    let start = entry.data_start().ok_or_else(|| malformed(&"it has no place"))?;
    let end = start.checked_add(entry.size()).filter(|&end| end <= file.len);
    match end {
        Some(end) if entry.compressed_size() == entry.size() => Ok(Some(start..end)),
        Some(_) => Err(malformed(&"it has two lengths")),
        None => Err(malformed(&"it reaches beyond the end of the file")),
    }
}

/// A contiguous part of a storage.
#[derive(Clone, Debug, PartialEq)]
struct View<'a> {
    /// The name of the storage.
    key: &'a str,
    dtype: DType,
    /// Elements before it.
    offset: u64,
    shape: Vec<usize>,
}

/// What the machine of a pickle works on. Tuples, dictionaries and tensors are in lists of their own, so that nothing is nested here.
#[derive(Clone, Copy, Debug)]
enum Value<'a> {
    Int(i64),
    Text(&'a str),
    /// A function or class, by module and name.
    Global(&'a str, &'a str),
    Tuple(usize),
    Dict(usize),
    Storage(&'a str, DType),
    Tensor(usize),
    /// A tensor that this function makes, by module and name, of what is not known here.
    Unknown(&'a str, &'a str),
    List,
    /// What has no part in a tensor.
    Other,
}

/// The tensors of a pickle, by their paths through its dictionaries.
#[derive(Debug, PartialEq)]
struct Views<'a> {
    /// The contiguous ones.
    views: HashMap<String, View<'a>>,
    /// The others, and what they are.
    others: HashMap<String, String>,
}

/// The tensors of a pickle as `torch.save` writes it. `None` if there is an instruction in it that is not known here.
fn views(pickle: &[u8]) -> Option<Views<'_>> {
    let mut machine = Machine { rest: pickle, ..Machine::default() };
    let Value::Dict(root) = machine.run()? else { return None };
    let (mut found, mut others) = (HashMap::new(), HashMap::new());
    // Paths that have a value already, and those of lists, below which burn-store may find other tensors.
    let (mut paths, mut twice, mut lists) = (HashSet::new(), HashSet::new(), HashSet::new());
    // Every dictionary once: a pickle may refer to one again and again.
    let (mut seen, mut next) = (HashSet::from([root]), vec![(String::new(), root)]);
    let mut left = PATH_BYTES;
    while let Some((above, dict)) = next.pop() {
        for &(key, value) in &machine.dicts[dict] {
            let path = if above.is_empty() { key.to_owned() } else { format!("{above}.{key}") };
            left = left.checked_sub(path.len())?;
            if !paths.insert(path.clone()) {
                twice.insert(path.clone());
            }
            match value {
                Value::Dict(dict) if seen.insert(dict) => next.push((path, dict)),
                Value::Tensor(tensor) => match &machine.tensors[tensor] {
                    Some(view) => drop(found.insert(path, view.clone())),
                    None => drop(others.insert(path, "its elements are not in row-major order".into())),
                },
                Value::Unknown(module, name) => {
                    let reason = format!("it is of a kind that is not known here, made by {module}.{name}");
                    others.insert(path, reason);
                }
                Value::List => drop(lists.insert(path)),
                _ => (),
            }
        }
    }
    let is_in_list = |path: &str| {
        let mut above = path.match_indices('.').map(|(dot, _)| &path[..dot]);
        !lists.is_empty()
            && (above.by_ref().take(64).any(|path| lists.contains(path)) || above.next().is_some())
    };
    let is_one = |path: &str| !twice.contains(path) && !is_in_list(path);
    let ambiguous: Vec<_> = found.keys().filter(|path: &&String| !is_one(path)).cloned().collect();
    for path in ambiguous {
        found.remove(&path);
        others.insert(path, "there are two of this name".into());
    }
    Some(Views { views: found, others })
}

/// The stack machine of pickles (<https://docs.python.org/3/library/pickletools.html>), as far as state dictionaries need it.
#[derive(Default)]
struct Machine<'a> {
    rest: &'a [u8],
    stack: Vec<Value<'a>>,
    /// Where the stack was as long as this.
    marks: Vec<usize>,
    memo: HashMap<u32, Value<'a>>,
    tuples: Vec<Vec<Value<'a>>>,
    dicts: Vec<Vec<(&'a str, Value<'a>)>>,
    /// `None` if it is not contiguous.
    tensors: Vec<Option<View<'a>>>,
}

impl<'a> Machine<'a> {
    fn bytes(&mut self, count: usize) -> Option<&'a [u8]> {
        let (bytes, rest) = self.rest.split_at_checked(count)?;
        self.rest = rest;
        Some(bytes)
    }

    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        self.bytes(N)?.try_into().ok()
    }

    fn line(&mut self) -> Option<&'a str> {
        let end = self.rest.iter().position(|&byte| byte == b'\n')?;
        let line = self.bytes(end + 1)?;
        std::str::from_utf8(&line[..end]).ok()
    }

    /// What is above the last mark.
    fn marked(&mut self) -> Option<Vec<Value<'a>>> {
        let mark = self.marks.pop().filter(|&mark| mark <= self.stack.len())?;
        Some(self.stack.split_off(mark))
    }

    fn tuple(&mut self, values: Vec<Value<'a>>) -> Value<'a> {
        self.tuples.push(values);
        Value::Tuple(self.tuples.len() - 1)
    }

    fn dict(&mut self) -> Value<'a> {
        self.dicts.push(vec![]);
        Value::Dict(self.dicts.len() - 1)
    }

    fn run(&mut self) -> Option<Value<'a>> {
        loop {
            let [code] = self.array()?;
            let value = match code {
                b'.' => return self.stack.pop(),
                b'(' => {
                    self.marks.push(self.stack.len());
                    continue;
                }
                0x80 => {
                    self.array::<1>()?; // the version
                    continue;
                }
                b'q' | b'r' => {
                    let index = self.index(code == b'q')?;
                    self.memo.insert(index, *self.stack.last()?);
                    continue;
                }
                b's' | b'u' => {
                    let items = match code {
                        b's' => self.stack.split_off(self.stack.len().checked_sub(2)?),
                        _ => self.marked()?,
                    };
                    let Some(Value::Dict(dict)) = self.stack.last() else { return None };
                    for pair in items.chunks(2) {
                        if let [Value::Text(key), value] = *pair {
                            self.dicts[*dict].push((key, value));
                        }
                    }
                    continue;
                }
                b'a' | b'e' => {
                    let _items = if code == b'a' { vec![self.stack.pop()?] } else { self.marked()? };
                    continue;
                }
                b'b' => {
                    self.stack.pop()?; // attributes
                    continue;
                }
                b'h' | b'j' => {
                    let index = self.index(code == b'h')?;
                    *self.memo.get(&index)?
                }
                b'J' => Value::Int(i32::from_le_bytes(self.array()?).into()),
                b'K' => Value::Int(u8::from_le_bytes(self.array()?).into()),
                b'M' => Value::Int(u16::from_le_bytes(self.array()?).into()),
                0x8a => {
                    let [len] = self.array()?;
                    let bytes = self.bytes(len.into())?;
                    let sign = if bytes.last().is_some_and(|&byte| byte >= 0x80) { 0xff } else { 0 };
                    let mut whole = [sign; 8];
                    whole.get_mut(..bytes.len())?.copy_from_slice(bytes);
                    Value::Int(i64::from_le_bytes(whole))
                }
                b'X' => {
                    let len = u32::from_le_bytes(self.array()?);
                    Value::Text(std::str::from_utf8(self.bytes(len as usize)?).ok()?)
                }
                b'G' => {
                    self.bytes(8)?;
                    Value::Other
                }
                b']' => Value::List,
                b'N' | 0x88 | 0x89 => Value::Other,
                b'c' => Value::Global(self.line()?, self.line()?),
                b'}' => self.dict(),
                b')' => self.tuple(vec![]),
                0x85..=0x87 => {
                    let count = usize::from(code - 0x84);
                    let values = self.stack.split_off(self.stack.len().checked_sub(count)?);
                    self.tuple(values)
                }
                b't' => {
                    let values = self.marked()?;
                    self.tuple(values)
                }
                b'Q' => {
                    let id = self.stack.pop()?;
                    self.storage(id)?
                }
                b'R' => {
                    let (arguments, function) = (self.stack.pop()?, self.stack.pop()?);
                    self.call(function, arguments)?
                }
                _ => return None,
            };
            self.stack.push(value);
        }
    }

    /// An index of the memo.
    fn index(&mut self, short: bool) -> Option<u32> {
        match short {
            true => self.array().map(u8::from_le_bytes).map(u32::from),
            false => self.array().map(u32::from_le_bytes),
        }
    }

    /// A persistent identifier: `("storage", class, key, location, length)`.
    fn storage(&self, id: Value<'a>) -> Option<Value<'a>> {
        let Value::Tuple(id) = id else { return None };
        let &[Value::Text("storage"), Value::Global(module, class), Value::Text(key), _, Value::Int(_)] =
            &self.tuples[id][..]
        else {
            return None;
        };
        if module != "torch" {
            return Some(Value::Other); // untyped
        }
        let dtype = match class {
            "DoubleStorage" => DType::F64,
            "FloatStorage" => DType::F32,
            "HalfStorage" => DType::F16,
            "BFloat16Storage" => DType::BF16,
            "LongStorage" => DType::I64,
            "IntStorage" => DType::I32,
            "ShortStorage" => DType::I16,
            "CharStorage" => DType::I8,
            "ByteStorage" => DType::U8,
            // Also bools: their bytes may be any, and burn-store makes them 0 and 1.
            _ => return Some(Value::Other),
        };
        Some(Value::Storage(key, dtype))
    }

    fn call(&mut self, function: Value<'a>, arguments: Value<'a>) -> Option<Value<'a>> {
        let Value::Tuple(arguments) = arguments else { return None };
        let arguments = &self.tuples[arguments][..];
        match (function, arguments) {
            (Value::Global("collections", "OrderedDict"), []) => Some(self.dict()),
            (Value::Global("torch._utils", "_rebuild_parameter"), [data, ..]) => Some(*data),
            (
                Value::Global("torch._utils", "_rebuild_tensor_v2"),
                &[Value::Storage(key, dtype), Value::Int(offset), shape, strides, _, _, ..],
            ) => {
                let (shape, strides) = (self.sizes(shape)?, self.sizes(strides)?);
                let offset = u64::try_from(offset).ok()?;
                let view = is_contiguous(&shape, &strides).then_some(View { key, dtype, offset, shape });
                self.tensors.push(view);
                Some(Value::Tensor(self.tensors.len() - 1))
            }
            (Value::Global(module, name), _) if name.starts_with("_rebuild") => {
                Some(Value::Unknown(module, name))
            }
            _ => Some(Value::Other),
        }
    }

    fn sizes(&self, tuple: Value<'a>) -> Option<Vec<usize>> {
        let Value::Tuple(tuple) = tuple else { return None };
        let size = |value: &Value<'a>| match value {
            Value::Int(size) => usize::try_from(*size).ok(),
            _ => None,
        };
        self.tuples[tuple].iter().map(size).collect()
    }
}

/// Whether elements follow each other in row-major order. The stride of an axis with one element says nothing.
fn is_contiguous(shape: &[usize], strides: &[usize]) -> bool {
    let mut next = Some(1usize);
    shape.len() == strides.len()
        && shape.iter().zip(strides).rev().all(|(&size, &stride)| {
            let follows = size == 1 || next == Some(stride);
            next = next.and_then(|next| next.checked_mul(size));
            follows
        })
}
