//! Tests malformed files. Each must be an error that names the file, and never a panic.
use crate::{Saved, all, devices};
use burn::module::{Module, Param, ParamId};
use burn::tensor::{Bool, Bytes, DType, Device, Tensor};
use burn_memsave::lazy::{LazyError, LazyLoad, WeightFile};
use burn_memsave::nn::{Linear, LinearConfig};
use burn_store::burn_pack;
use proptest::prelude::*;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

/// A safetensors file: the length of the header, the header, and `data` bytes of data.
fn safetensors(header: &str, data: usize) -> Vec<u8> {
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header.as_bytes());
    file.resize(file.len() + data, 0);
    file
}

fn open(directory: &Path, name: &str, bytes: &[u8]) -> Result<WeightFile, LazyError> {
    let path = directory.join(name);
    std::fs::write(&path, bytes).unwrap();
    WeightFile::open(&path)
}

/// What the file is, its name, its bytes, and what the error says beside the name.
fn table() -> Vec<(&'static str, &'static str, Vec<u8>, &'static str)> {
    let of = |header: &str, data| safetensors(header, data);
    let two = |first: &str, second: &str| {
        of(
            &format!(
                r#"{{"a":{{"dtype":"F32","shape":[2],"data_offsets":[{first}]}},"b":{{"dtype":"F32","shape":[2],"data_offsets":[{second}]}}}}"#
            ),
            16,
        )
    };
    let nested = |open: &str, depth: usize| of(&format!("{{\"a\":{}", open.repeat(depth)), 0);
    let index = |map: &str| format!(r#"{{"weight_map":{map}}}"#).into_bytes();
    let burnpack = |version: u16, size: u32, rest: &[u8]| {
        let mut file = 0x4255_524eu32.to_le_bytes().to_vec();
        file.extend(version.to_le_bytes());
        file.extend(size.to_le_bytes());
        file.extend(rest);
        file
    };
    let mut huge = of("{", 0);
    huge[..8].copy_from_slice(&u64::MAX.to_le_bytes());
    let mut longer = of("{}", 0);
    longer[0] = 200;
    vec![
        ("nothing", "a.safetensors", vec![], "neither safetensors nor"),
        ("a text", "a.txt", b"not weights at all".to_vec(), "neither safetensors nor"),
        ("a header of 2^64 bytes", "a.safetensors", huge, "a header of 18446744073709551615 bytes"),
        ("a header longer than the file", "a.safetensors", longer, "a header of 200 bytes in a file of 10"),
        ("a header that is not JSON", "a.safetensors", of("{\"a\":]", 0), "expected value"),
        ("a header that is not UTF-8", "a.safetensors", of("{\"\u{e9}\"", 0)[..11].to_vec(), "a header of"),
        ("a header nested too deeply", "a.safetensors", nested("[", 100_000), "recursion limit exceeded"),
        (
            "an unknown dtype",
            "a.safetensors",
            of(r#"{"a":{"dtype":"F7","shape":[1],"data_offsets":[0,4]}}"#, 4),
            "unknown variant `F7`",
        ),
        ("overlapping tensors", "a.safetensors", two("0,8", "4,12"), "invalid offset for tensor `b`"),
        ("a gap between tensors", "a.safetensors", two("0,8", "12,20"), "invalid offset for tensor `b`"),
        ("an end before its begin", "a.safetensors", two("8,0", "0,8"), "invalid offset for tensor `a`"),
        ("a tensor cut off", "a.safetensors", two("0,8", "8,16")[..110].to_vec(), "a header of"),
        (
            "data cut off",
            "a.safetensors",
            {
                let mut file = two("0,8", "8,16");
                file.pop();
                file
            },
            "16 bytes of tensors in the header, 15 in the file",
        ),
        (
            "data after the last tensor",
            "a.safetensors",
            {
                let mut file = two("0,8", "8,16");
                file.push(0);
                file
            },
            "16 bytes of tensors in the header, 17 in the file",
        ),
        (
            "a shape of other bytes",
            "a.safetensors",
            of(r#"{"a":{"dtype":"F32","shape":[3],"data_offsets":[0,8]}}"#, 8),
            "invalid shape, data type, or offset",
        ),
        (
            "a shape beyond all numbers",
            "a.safetensors",
            of(r#"{"a":{"dtype":"F32","shape":[4294967296,4294967296,4294967296],"data_offsets":[0,8]}}"#, 8),
            "overflow computing buffer size",
        ),
        (
            "a negative shape",
            "a.safetensors",
            of(r#"{"a":{"dtype":"F32","shape":[-1],"data_offsets":[0,8]}}"#, 8),
            "invalid value",
        ),
        ("an index without a map", "a.index.json", b"{}".to_vec(), "missing field `weight_map`"),
        (
            "an index that leaves its directory",
            "a.index.json",
            index(r#"{"a":"../secret.safetensors"}"#),
            "tensor a is said to be in",
        ),
        (
            "an index of an absolute path",
            "a.index.json",
            index(r#"{"a":"/etc/passwd"}"#),
            "tensor a is said to be in",
        ),
        ("an index of itself", "a.index.json", index(r#"{"a":"a.index.json"}"#), "neither safetensors nor"),
        ("an index of itself, in disguise", "a.bin", index(r#"{"a":"a.bin"}"#), "neither safetensors nor"),
        (
            "an index of a shard that is not there",
            "a.index.json",
            index(r#"{"a":"gone.safetensors"}"#),
            "gone.safetensors",
        ),
        (
            "an index of a tensor that is not there",
            "a.index.json",
            index(r#"{"a":"good.safetensors"}"#),
            "does not have the tensor a",
        ),
        ("a burnpack of the future", "a.bpk", burnpack(u16::MAX, 0, &[]), "ersion"),
        ("a burnpack cut off", "a.bpk", burnpack(1, 1000, &[]), "fill whole buffer"),
        ("a burnpack of 4 GiB of metadata", "a.bpk", burnpack(1, u32::MAX, &[]), "exceeds maximum"),
        ("a burnpack of noise", "a.bpk", burnpack(1, 8, &[0x9f; 300]), "a.bpk"),
        ("a zip of noise", "a.pt", b"PK\x03\x04 and then nothing of the kind".to_vec(), "a.pt"),
        (
            "a pickle of noise",
            "a.pt",
            b"\x80\x02}q\x00(X\x01\x00\x00\x00aq\x01cos\nsystem\n".to_vec(),
            "a.pt",
        ),
    ]
}

#[test]
fn every_hostile_file_is_an_error_that_names_it() {
    let directory = tempfile::tempdir().unwrap();
    let good = safetensors(r#"{"b":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}"#, 4);
    std::fs::write(directory.path().join("good.safetensors"), good).unwrap();
    for (what, name, bytes, says) in table() {
        let error = catch_unwind(AssertUnwindSafe(|| open(directory.path(), name, &bytes)));
        let error = error.unwrap_or_else(|_| panic!("{what}: a panic")).expect_err(what).to_string();
        let names = error.contains(name) || error.contains("gone.safetensors");
        assert!(names && error.contains(says), "{what}: {error}");
    }
}

/// Opens and, if that works, loads and runs: errors, but for reads of a forward pass no panic.
fn survives(directory: &Path, name: &str, bytes: &[u8]) {
    let Ok(file) = open(directory, name, bytes) else { return };
    // SAFETY: the file is not written again before the end of this function.
    let mapped = unsafe { WeightFile::open_mapped(directory.join(name)) }.expect("it was opened before");
    let device = Device::flex();
    for file in [file, mapped] {
        let loaded: Result<(Linear, _), _> =
            LinearConfig::new(6, 4).init(&device).lazy_load(&file, &all().with_prefetch(0));
        if let Ok((linear, _)) = loaded {
            linear.forward(Tensor::<2>::ones([1, 6], &device)).into_data();
        }
    }
}

#[test]
fn damaged_files_are_errors_or_other_weights() {
    let saved = Saved::new(&LinearConfig::new(6, 4).init(&Device::flex()));
    let directory = tempfile::tempdir().unwrap();
    for name in ["model.safetensors", "model.bpk"] {
        let whole = std::fs::read(saved.path(name)).unwrap();
        for len in 0..whole.len() {
            survives(directory.path(), name, &whole[..len]);
        }
        let head = 400.min(whole.len());
        let config = ProptestConfig { cases: 2000, failure_persistence: None, ..ProptestConfig::default() };
        proptest!(config, |(damage in prop::collection::vec((0..head, any::<u8>()), 1..4))| {
            let mut damaged = whole.clone();
            damage.iter().for_each(|&(at, byte)| damaged[at] = byte);
            survives(directory.path(), name, &damaged);
        });
    }
}

/// What the fuzz target begins with, and what it found.
#[test]
fn files_of_the_corpus() {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fuzz/corpus");
    let mut loaded = vec![];
    for path in std::fs::read_dir(corpus).unwrap().map(|file| file.unwrap().path()) {
        let Ok(file) = WeightFile::open(&path) else { continue };
        for min_bytes in [0, usize::MAX] {
            let options = all().with_min_bytes(min_bytes).with_dtype(DType::F32);
            let linear: Result<(Linear, _), _> =
                LinearConfig::new(2, 32).init(&Device::flex()).lazy_load(&file, &options);
            if let Ok((linear, _)) = linear {
                linear.forward(Tensor::<2>::ones([1, 2], &Device::flex())).into_data();
                loaded.push(path.file_name().unwrap().to_string_lossy().into_owned());
            }
        }
    }
    loaded.sort();
    loaded.dedup();
    let whole = [
        "linear-bf16.bpk",
        "linear-half.safetensors",
        "linear-int8.bpk",
        "linear-legacy.pt",
        "linear.bpk",
        "linear.pt",
        "linear.safetensors",
    ];
    assert_eq!(loaded, whole);
}

/// A bool that is neither true nor false must not come to be.
#[test]
fn bools_are_zero_or_one() {
    #[derive(Module, Debug)]
    struct Mask {
        mask: Param<Tensor<1, Bool>>,
    }
    let directory = tempfile::tempdir().unwrap();
    let header = r#"{"mask":{"dtype":"BOOL","shape":[3],"data_offsets":[0,3]}}"#;
    for device in devices() {
        for (byte, works) in [(1, true), (2, false), (255, false)] {
            let mut bytes = safetensors(header, 3);
            *bytes.last_mut().unwrap() = byte;
            let file = open(directory.path(), "mask.safetensors", &bytes).unwrap();
            let mask = Mask { mask: Param::initialized(ParamId::new(), Tensor::full([3], false, &device)) };
            match mask.lazy_load(&file, &all()) {
                Ok((mask, _)) => assert_eq!(
                    mask.mask.val().into_data().iter::<bool>().collect::<Vec<_>>(),
                    [false, false, true]
                ),
                Err(error) => assert!(!works && error.to_string().contains("is not a bool"), "{error}"),
            }
        }
    }
}

/// Packed tensors whose bytes are not those of their shape.
#[test]
fn packed_tensors_have_the_bytes_of_their_shape() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("packed.bpk");
    let packed = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fuzz/corpus/linear-int8.bpk");
    let packed = WeightFile::open(packed).unwrap();
    let dtype = packed.tensors().find(|tensor| tensor.name == "weight").unwrap().dtype;
    let whole = 2 * 32 + 2 * 4;
    for (shape, bytes, works) in [
        ([2, 32], whole, true),
        ([2, 32], whole - 1, false),
        ([2, 32], 0, false),
        ([1 << 40, 32], 0, false),
        ([usize::MAX, 32], 0, false),
        ([usize::MAX, usize::MAX], 0, false),
    ] {
        let bytes = Bytes::from_bytes_vec(vec![0; bytes]);
        let tensor = burn_pack::Tensor::new("weight".into(), dtype, shape, None, bytes);
        burn_pack::Writer::new(vec![tensor]).write_to_file(&path).unwrap();
        let opened = WeightFile::open(&path);
        assert_eq!(opened.is_ok(), works, "{shape:?}: {:?}", opened.err());
    }
}
