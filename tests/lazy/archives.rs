//! Tests PyTorch checkpoints that are zip archives: tensors are read where they lie, or by burn-store where they do not lie in order.
use crate::{all, load, open, open_mapped};
use burn::tensor::{Bytes, DType, Device, Shape, Tensor, TensorData};
use burn_memsave::lazy::{LazyError, WeightFile};
use burn_memsave::nn;
use proptest::prelude::*;
use std::io::Write;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

/// A tensor of an archive: part of a storage.
pub(crate) struct View<'a> {
    pub name: &'a str,
    pub storage: usize,
    pub offset: usize,
    pub shape: Vec<usize>,
    pub strides: Vec<usize>,
}

impl<'a> View<'a> {
    /// All of a storage, in row-major order.
    pub(crate) fn whole(name: &'a str, storage: usize, shape: &[usize]) -> Self {
        let strides = (1..=shape.len()).map(|axis| shape[axis..].iter().product()).collect();
        Self { name, storage, offset: 0, shape: shape.to_vec(), strides }
    }
}

/// The pickle of a state dictionary, as `torch.save` writes it.
fn pickle(views: &[View<'_>], storages: &[TensorData]) -> Vec<u8> {
    let text = |text: &str| [&b"X"[..], &(text.len() as u32).to_le_bytes(), text.as_bytes()].concat();
    let int = |value: usize| [&b"J"[..], &(value as i32).to_le_bytes()].concat();
    let tuple = |values: &[usize]| {
        [vec![b'('], values.iter().flat_map(|&value| int(value)).collect(), vec![b't']].concat()
    };
    let mut pickle = b"\x80\x02ccollections\nOrderedDict\nq\x00)Rq\x01(".to_vec();
    for View { name, storage, offset, shape, strides } in views {
        let class = match storages[*storage].dtype() {
            DType::F64 => "Double",
            DType::F32 => "Float",
            DType::F16 => "Half",
            DType::BF16 => "BFloat16",
            dtype => panic!("{dtype:?}"),
        };
        pickle.extend(text(name));
        pickle.extend(b"ctorch._utils\n_rebuild_tensor_v2\n((");
        pickle.extend(text("storage"));
        pickle.extend(format!("ctorch\n{class}Storage\n").bytes());
        pickle.extend(text(&storage.to_string()));
        pickle.extend(text("cpu"));
        pickle.extend(int(storages[*storage].num_elements()));
        pickle.extend(b"tQ");
        pickle.extend([int(*offset), tuple(shape), tuple(strides)].concat());
        pickle.extend(b"\x89h\x00)RtR");
    }
    pickle.extend(b"u.");
    pickle
}

/// An entry of an archive. What its headers say can be changed.
struct Entry {
    name: String,
    method: u16,
    bytes: Vec<u8>,
    len: u32,
    /// Where the directory says that it is, if not where it is.
    offset: Option<u32>,
}

/// A zip archive without checksums.
fn zip(entries: &[Entry]) -> Vec<u8> {
    let (mut file, mut directory) = (vec![], vec![]);
    for Entry { name, method, bytes, len, offset } in entries {
        let mut header = vec![];
        header.extend([20u16, 0, *method, 0, 0x21].map(u16::to_le_bytes).concat()); // version, flags, method, time
        header.extend([0, bytes.len() as u32, *len].map(u32::to_le_bytes).concat()); // checksum, sizes
        header.extend((name.len() as u16).to_le_bytes());
        directory.extend([&b"PK\x01\x02\x14\x00"[..], &header, &[0; 12]].concat());
        directory.extend(offset.unwrap_or(file.len() as u32).to_le_bytes());
        directory.extend(name.bytes());
        // The elements begin at a multiple of 64 bytes, as those of PyTorch do.
        let extra = (64 - (file.len() + 30 + name.len() + 4) % 64) % 64 + 4;
        file.extend([&b"PK\x03\x04"[..], &header, &(extra as u16).to_le_bytes(), name.as_bytes()].concat());
        file.extend(
            [b"FB".to_vec(), ((extra - 4) as u16).to_le_bytes().to_vec(), vec![b'Z'; extra - 4]].concat(),
        );
        file.extend(bytes);
    }
    let (count, at) = (entries.len() as u16, file.len() as u32);
    file.extend(&directory);
    file.extend([&b"PK\x05\x06"[..], &[0; 4], &[count.to_le_bytes(); 2].concat()].concat());
    file.extend([directory.len() as u32, at].map(u32::to_le_bytes).concat());
    file.extend([0; 2]);
    file
}

fn entries(views: &[View<'_>], storages: &[TensorData]) -> Vec<Entry> {
    let stored = |name: String, bytes: Vec<u8>| {
        let len = bytes.len() as u32;
        Entry { name: format!("archive/{name}"), method: 0, bytes, len, offset: None }
    };
    let mut entries = vec![stored("data.pkl".into(), pickle(views, storages))];
    let storages = storages.iter().enumerate();
    entries.extend(storages.map(|(index, data)| stored(format!("data/{index}"), data.as_bytes().to_vec())));
    entries.push(stored("version".into(), b"3\n".to_vec()));
    entries
}

/// Compresses an entry.
fn deflate(entry: &mut Entry) {
    let mut writer = flate2::write::DeflateEncoder::new(vec![], flate2::Compression::default());
    writer.write_all(&entry.bytes).unwrap();
    (entry.bytes, entry.method) = (writer.finish().unwrap(), 8);
}

/// Writes a checkpoint.
pub(crate) fn write(path: &Path, views: &[View<'_>], storages: &[TensorData]) {
    std::fs::write(path, zip(&entries(views, storages))).unwrap();
}

/// Writes a checkpoint with dictionaries within dictionaries, all under long keys, and with a tensor in each.
pub(crate) fn write_deep(path: &Path, depth: usize) {
    let key = [&b"X"[..], &1000u32.to_le_bytes(), &[b'k'; 1000]].concat();
    let mut pickle = b"\x80\x02ccollections\nOrderedDict\nq\x00]".to_vec();
    let plain = self::pickle(&[View::whole("t", 0, &[1])], &[TensorData::new(vec![0f32], [1])]);
    let tensor =
        &plain[plain.windows(7).position(|bytes| bytes == b"ctorch.").expect("a tensor")..plain.len() - 2];
    pickle.extend([tensor, b"r\xff\xff\xff\x7fa}r\x01\0\0\0a"].concat());
    for level in 1..=depth as u32 {
        pickle.extend(
            [&b"j"[..], &level.to_le_bytes(), &key, b"}r", &(level + 1).to_le_bytes(), b"s"].concat(),
        );
        pickle.extend(b"X\x01\0\0\0tj\xff\xff\xff\x7fs");
    }
    pickle.extend(b"j\x01\0\0\0.");
    let len = pickle.len() as u32;
    let mut entries = entries(&[], &[TensorData::new(vec![0f32], [1])]);
    (entries[0].bytes, entries[0].len) = (pickle, len);
    std::fs::write(path, zip(&entries)).expect("a checkpoint");
}

/// `0, 1, 2, ...`
fn counting(dtype: DType, count: usize) -> TensorData {
    TensorData::new((0..count).map(|value| value as f32).collect(), [count]).convert_dtype(dtype)
}

const ROWS: usize = 9;
const WIDTH: usize = 4;

/// Rows of a table, and a resident weight, from archives that hold them in all ways.
#[test]
fn rows_are_those_of_the_table_however_it_is_stored() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("table.pt");
    let device = Device::flex();
    let config = nn::EmbeddingConfig::new(ROWS, WIDTH);
    let view = |offset, strides: [usize; 2]| View {
        name: "weight",
        storage: 0,
        offset,
        shape: vec![ROWS, WIDTH],
        strides: strides.to_vec(),
    };
    // The view, whether its entry is compressed, whether it can be mapped, and its elements.
    type Element = fn(usize, usize) -> f32;
    let ways: [(View<'_>, bool, bool, Element); 5] = [
        (view(0, [WIDTH, 1]), false, true, |row, column| (row * WIDTH + column) as f32),
        (view(8, [WIDTH, 1]), false, true, |row, column| (8 + row * WIDTH + column) as f32),
        (view(0, [WIDTH, 1]), true, false, |row, column| (row * WIDTH + column) as f32),
        (view(0, [1, ROWS]), false, false, |row, column| (row + column * ROWS) as f32),
        (view(3, [WIDTH + 1, 1]), false, false, |row, column| (3 + row * (WIDTH + 1) + column) as f32),
    ];
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        for (view, compressed, mappable, element) in &ways {
            let storages = [counting(dtype, 60)];
            let mut entries = entries(std::slice::from_ref(view), &storages);
            if *compressed {
                deflate(&mut entries[1]);
            }
            std::fs::write(&path, zip(&entries)).unwrap();
            for (file, mapped) in [(open(&path), false), (open_mapped(&path), true)] {
                for budget in [0, 1 << 20] {
                    let options = all().with_budget(budget).with_prefetch(0);
                    let (table, report) = load(config.init(&device), &file, &options);
                    assert_eq!(report.lazy[0].mapped, mapped && *mappable, "{dtype:?}");
                    let rows = table.forward(Tensor::from_ints([[0, 8, 3, 3]], &device)).into_data();
                    let expected = [0, 8, 3, 3]
                        .iter()
                        .flat_map(|&row| (0..WIDTH).map(move |column| element(row, column)));
                    let expected = TensorData::new(expected.collect::<Vec<f32>>(), [1, 4, WIDTH]);
                    assert_eq!(rows.convert_dtype(DType::F32), expected, "{dtype:?}");
                }
                let (resident, _) = load(config.init(&device), &file, &all().exclude("*"));
                let whole: Vec<f32> = (0..ROWS * WIDTH).map(|at| element(at / WIDTH, at % WIDTH)).collect();
                let expected = TensorData::new(whole, [ROWS, WIDTH]);
                assert_eq!(resident.weight.val().into_data().convert_dtype(DType::F32), expected);
            }
        }
    }
}

/// Parameters, tied weights, nested dictionaries, and a checkpoint that was written to meanwhile.
#[test]
fn storages_are_shared_and_may_change() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("tied.pt");
    let storages = [counting(DType::F32, ROWS * WIDTH)];
    write(&path, &[View::whole("a.weight", 0, &[ROWS, WIDTH]), View::whole("b", 0, &[WIDTH])], &storages);
    let file = open(&path).with_key_remapping(r"^a\.", "").unwrap();
    assert_eq!(file.tensors().map(|tensor| tensor.name).collect::<Vec<_>>(), ["b", "weight"]);
    let device = Device::flex();
    let (table, _) = load(
        nn::EmbeddingConfig::new(ROWS, WIDTH).init(&device),
        &file,
        &all().with_budget(0).with_prefetch(0),
    );
    // Another file with this name: the open one is still read.
    std::fs::rename(&path, directory.path().join("renamed.pt")).unwrap();
    let rows = |table: &nn::Embedding| table.forward(Tensor::from_ints([[1]], &device)).into_data();
    assert_eq!(rows(&table), TensorData::from([[[4.0f32, 5.0, 6.0, 7.0]]]));
    std::fs::write(directory.path().join("renamed.pt"), b"other").unwrap();
    let failed = catch_unwind(AssertUnwindSafe(|| rows(&table))).unwrap_err().downcast::<String>().unwrap();
    assert!(failed.contains("weight cannot be read"), "{failed}");
}

/// What is wrong with an archive, and what the error says.
#[test]
fn every_hostile_archive_is_an_error_that_names_it() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("hostile.pt");
    let views = [View::whole("first", 0, &[6, 4]), View::whole("second", 1, &[4])];
    let storages = [counting(DType::F32, 24), counting(DType::F32, 4)];
    type Change = fn(&mut Vec<Entry>);
    /// Where the entry of the first storage begins.
    const FIRST: u32 = 1024;
    let ways: [(&str, Change, &str); 8] = [
        ("nothing", |_| (), ""),
        ("a storage that is missing", |entries| drop(entries.remove(2)), "not in the archive"),
        (
            "a storage cut off",
            |entries| (entries[1].bytes.truncate(95), entries[1].len = 95).1,
            "beyond its storage",
        ),
        ("two lengths", |entries| entries[1].len = 1 << 20, "hostile.pt"),
        ("another local header", |entries| entries[2].offset = Some(7), "hostile.pt"),
        ("an offset beyond the file", |entries| entries[2].offset = Some(1 << 30), "hostile.pt"),
        ("an entry in the place of another", |entries| entries[2].offset = Some(FIRST), "overlap"),
        ("no pickle", |entries| drop(entries.remove(0)), "hostile.pt"),
    ];
    for (what, change, says) in ways {
        let mut entries = entries(&views, &storages);
        entries[0].bytes.resize(1024 - 64, b'.');
        entries[0].len = 1024 - 64;
        change(&mut entries);
        std::fs::write(&path, zip(&entries)).unwrap();
        let opened = catch_unwind(|| WeightFile::open(&path)).unwrap_or_else(|_| panic!("{what}: a panic"));
        match opened {
            Ok(file) => assert!(says.is_empty() && file.tensors().len() == 2, "{what}"),
            Err(error) => {
                let error = error.to_string();
                assert!(
                    !says.is_empty() && error.contains(says) && error.contains("hostile.pt"),
                    "{what}: {error}"
                );
            }
        }
    }
}

#[test]
fn damaged_archives_are_errors_or_other_weights() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("damaged.pt");
    let storages = [counting(DType::F32, 24), counting(DType::F32, 4)];
    write(&path, &[View::whole("weight", 0, &[6, 4]), View::whole("bias", 1, &[4])], &storages);
    let whole = std::fs::read(&path).unwrap();
    let survives = |bytes: &[u8]| {
        std::fs::write(&path, bytes).unwrap();
        let device = Device::flex();
        let Ok(file) = WeightFile::open(&path) else { return };
        let loaded: Result<(nn::Linear, _), LazyError> = burn_memsave::lazy::LazyLoad::lazy_load(
            nn::LinearConfig::new(6, 4).init(&device),
            &file,
            &all().with_prefetch(0),
        );
        if let Ok((linear, _)) = loaded {
            // What burn-store reads may turn out to be damaged when it is read.
            let run = || linear.forward(Tensor::<2>::ones([1, 6], &device)).into_data();
            if let Err(panic) = catch_unwind(AssertUnwindSafe(run)) {
                let error = panic.downcast::<String>().expect("a message");
                assert!(error.contains("damaged.pt"), "{error}");
            }
        }
    };
    for len in (0..whole.len()).step_by(3) {
        survives(&whole[..len]);
    }
    let config = ProptestConfig { cases: 1000, failure_persistence: None, ..ProptestConfig::default() };
    proptest!(config, |(damage in prop::collection::vec((0..whole.len(), any::<u8>()), 1..4))| {
        let mut damaged = whole.clone();
        damage.iter().for_each(|&(at, byte)| damaged[at] = byte);
        survives(&damaged);
    });
}

/// Bytes of a tensor as a storage.
pub(crate) fn storage<const D: usize>(tensor: Tensor<D>) -> TensorData {
    let data = tensor.into_data();
    let (dtype, count) = (data.dtype(), data.num_elements());
    TensorData::from_bytes(Bytes::from_bytes_vec(data.as_bytes().to_vec()), Shape::new([count]), dtype)
}
