//! Tests tensors that are packed in their file, against what the libraries that pack them make of them (`data/packed.py`).
use crate::{all, devices, load, open, open_mapped};
use burn::module::Module;
use burn::tensor::{DType, Device, Int, Tensor, TensorData, Tolerance};
use burn_memsave::lazy::{LazyError, PrepareOptions, PrepareSource, WeightFile, prepare};
use burn_memsave::nn::{Embedding, EmbeddingConfig, Linear, LinearConfig};
use proptest::prelude::*;
use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};

fn data(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/lazy/data").join(name)
}

const FILES: [&str; 3] = ["packed.gguf", "split-00001-of-00002.gguf", "packed.safetensors"];

fn floats(data: TensorData) -> Vec<f32> {
    data.convert::<f32>().try_into_vec().expect("floats")
}

/// A tensor of one of the files.
fn tensor(file: &str, name: &str) -> Tensor<2> {
    Tensor::from_data(open(&data(file)).read(name).unwrap(), &Device::flex())
}

/// A layer with a tensor as its weight.
fn layer<M: Module>(module: M, file: &str, tensor: &str, map: bool, dtype: DType) -> M {
    let file = if map { open_mapped(&data(file)) } else { open(&data(file)) };
    let file = file.with_key_remapping(&format!("^{tensor}$"), "the_layer.weight").unwrap();
    let file = file.with_key("the_layer").unwrap().with_pytorch_adapter();
    load(module, &file, &all().with_dtype(dtype)).0
}

#[test]
fn elements_are_those_of_the_libraries() {
    let unpacked = open(&data("unpacked.safetensors"));
    let mut compared = 0;
    for name in FILES {
        for file in [open(&data(name)), open_mapped(&data(name))] {
            for tensor in file.tensors() {
                let (found, expected) = (floats(file.read(tensor.name).unwrap()), unpacked.read(tensor.name));
                let expected = floats(expected.unwrap_or_else(|error| panic!("{error}")));
                let some: Vec<f32> = found.into_iter().step_by(11).collect();
                assert_eq!(some, expected, "{}", tensor.name);
                compared += 1;
            }
        }
    }
    assert_eq!(compared, 2 * unpacked.tensors().len());
}

#[test]
fn packed_tensors_say_so() {
    let file = open(&data("packed.gguf"));
    let tensors: BTreeMap<_, _> = file.tensors().map(|tensor| (tensor.name, tensor)).collect();
    let tensor = tensors["Q4_K"];
    assert_eq!((tensor.packing, tensor.dtype, tensor.bytes), (Some("Q4_K"), DType::F32, 3 * 2 * 144));
    assert_eq!(tensor.shape[..], [3, 512]);
    assert_eq!((tensors["F16"].packing, tensors["F16"].dtype), (None, DType::F16));
    let metadata = file.metadata().unwrap();
    assert_eq!(metadata["general.architecture"], "llama");
    assert!(open(&data("packed.safetensors")).metadata().is_none());
    let with_lists = file.read_metadata().unwrap().unwrap();
    assert!(metadata.iter().all(|(key, value)| with_lists[key] == *value));
    assert!(open(&data("packed.safetensors")).read_metadata().unwrap().is_none());

    let file = open(&data("packed.safetensors"));
    let packings: BTreeMap<_, _> = file.tensors().map(|tensor| (tensor.name, tensor.packing)).collect();
    assert_eq!(packings.len(), 8, "{packings:?}"); // scales are no tensors of their own
    assert_eq!((packings["nf4_twice"], packings["blocks.weight"]), (Some("nf4"), Some("float8_e4m3fn")));

    let config = EmbeddingConfig::new(3, 512);
    let file = open(&data("packed.gguf")).with_key_remapping("^Q6_K$", "weight").unwrap();
    let (_, report) = load(config.init(&Device::flex()), &file, &all());
    assert_eq!(report.lazy[0].packing.as_deref(), Some("Q6_K"));
    assert!(report.to_string().contains("Q6_K"), "{report}");
}

/// Rows of a table, and parts of rows.
#[test]
fn parts_are_read_by_themselves() {
    for (file, name) in [
        ("packed.gguf", "Q3_K"),
        ("packed.safetensors", "nf4_twice"),
        ("packed.safetensors", "blocks.weight"),
    ] {
        let whole = tensor(file, name);
        let [rows, columns] = whole.dims();
        for map in [false, true] {
            let table = layer::<Embedding>(
                EmbeddingConfig::new(rows, columns).init(&Device::flex()),
                file,
                name,
                map,
                DType::F32,
            );
            let indices = [rows as i64 - 1, 0, 1, 2, 0];
            let indices = Tensor::<1, Int>::from_data(TensorData::from(indices), &Device::flex());
            let found = table.forward(indices.clone().unsqueeze::<2>()).squeeze_dim::<2>(0);
            found.into_data().assert_eq(&whole.clone().select(0, indices).into_data(), true);
        }
        let parts = [("first", 1..3), ("second", 0..1), ("first", rows - 1..rows)];
        let file = open(&data(file)).with_rows(&format!("^{name}$"), &parts).unwrap();
        let expected =
            Tensor::cat(vec![whole.clone().narrow(0, 1, 2), whole.clone().narrow(0, rows - 1, 1)], 0);
        file.read("first").unwrap().assert_eq(&expected.into_data(), true);
        file.read("second").unwrap().assert_eq(&whole.narrow(0, 0, 1).into_data(), true);
    }
}

/// Forward and backward, against a layer with the unpacked weight.
#[test]
fn layers_run_on_packed_weights() {
    for device in devices() {
        let device = device.autodiff();
        for (file, name) in FILES.into_iter().flat_map(|name| {
            open(&data(name)).tensors().map(|tensor| (name, tensor.name.to_owned())).collect::<Vec<_>>()
        }) {
            let whole = tensor(file, &name);
            let [outputs, inputs] = whole.dims();
            let config = LinearConfig::new(inputs, outputs).with_bias(false);
            let x = || Tensor::<2>::random([5, inputs], burn::tensor::Distribution::Default, &device);
            for (map, dtype) in [(false, DType::F32), (true, DType::F32), (false, DType::F64)] {
                let lazy = layer::<Linear>(config.init(&device), file, &name, map, dtype);
                let weight = Tensor::<2>::from_data(whole.to_data(), (&device, dtype)).transpose();
                let x = x().cast(dtype);
                let (of_lazy, of_weight) = (x.clone().detach().require_grad(), x.detach().require_grad());
                let (found, expected) = (lazy.forward(of_lazy.clone()), of_weight.clone().matmul(weight));
                let tolerance = Tolerance::<f32>::rel_abs(1e-4, 1e-3);
                found
                    .to_data()
                    .convert::<f32>()
                    .assert_approx_eq(&expected.to_data().convert::<f32>(), tolerance);
                let gradient = |x: &Tensor<2>, y: Tensor<2>| {
                    let dx = x.grad(&y.powi_scalar(2).sum().backward()).unwrap();
                    dx.into_data().convert::<f32>()
                };
                let tolerance = Tolerance::<f32>::rel_abs(1e-3, 1e-1);
                gradient(&of_lazy, found).assert_approx_eq(&gradient(&of_weight, expected), tolerance);
            }
            if device.clone().without_autodiff() != Device::flex() {
                continue; // NdArray has no half precision
            }
            // Rounded as Burn rounds.
            let lazy = layer::<Linear>(config.init(&device), file, &name, false, DType::BF16);
            let rounded = whole.into_data().convert_dtype(DType::BF16).convert_dtype(DType::F32);
            let found = lazy.weight.val().transpose().into_data();
            assert_eq!(found.dtype(), DType::BF16);
            found.convert_dtype(DType::F32).assert_eq(&rounded, true);
        }
    }
}

#[test]
fn packed_tensors_are_prepared_unpacked() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("model.bpk");
    let source = PrepareSource::try_from(open(&data("packed.gguf"))).unwrap();
    prepare(source, &path, &PrepareOptions::new()).unwrap();
    let (packed, prepared) = (open(&data("packed.gguf")), open(&path));
    assert_eq!(packed.tensors().len(), prepared.tensors().len());
    for tensor in packed.tensors() {
        packed.read(tensor.name).unwrap().assert_eq(&prepared.read(tensor.name).unwrap(), true);
    }
    // In eight bits again, in parts.
    let source = PrepareSource::try_from(packed).unwrap();
    prepare(source, &path, &PrepareOptions::new().with_approximate_int8()).unwrap();
    assert!(matches!(open(&path).tensors().last().unwrap().dtype, DType::QFloat(_)));
}

/// What belongs to a packed tensor, or what it says, is not right: an error of the tensor, not of the file.
#[test]
fn what_does_not_fit_is_an_error_of_its_tensor() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("model.safetensors");
    let bytes = std::fs::read(data("packed.safetensors")).unwrap();
    let tensors = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let changed = |name: &str, change: &dyn Fn(Vec<u8>) -> Option<Vec<u8>>| {
        let all = tensors.tensors().into_iter().filter_map(|(tensor, view)| {
            let (dtype, shape, bytes) = (view.dtype(), view.shape().to_vec(), view.data().to_vec());
            match tensor == name {
                false => Some((tensor, dtype, shape, bytes)),
                true => {
                    let bytes = change(bytes)?;
                    let shape = vec![bytes.len() * 8 / dtype.bitsize()];
                    Some((tensor, dtype, shape, bytes))
                }
            }
        });
        let all: Vec<_> = all.collect();
        let views = all.iter().map(|(name, dtype, shape, bytes)| {
            (name, safetensors::tensor::TensorView::new(*dtype, shape.clone(), bytes).unwrap())
        });
        safetensors::serialize_to_file(views, None, &path).unwrap();
        open(&path)
    };
    let text = |from: &'static str, to: &'static str| {
        move |bytes: Vec<u8>| Some(String::from_utf8(bytes).unwrap().replace(from, to).into_bytes())
    };
    let gone = |_| None;
    let shorter = |mut bytes: Vec<u8>| {
        bytes.truncate(bytes.len() - 4);
        Some(bytes)
    };
    let state = "nf4_twice.quant_state.bitsandbytes__nf4";
    type Change<'a> = &'a dyn Fn(Vec<u8>) -> Option<Vec<u8>>;
    let cases: [(&str, Change<'_>, &str, &str); 14] = [
        ("nf4.absmax", &gone, "nf4", "there is no nf4.absmax"),
        ("nf4.quant_map", &gone, "nf4", "there is no nf4.quant_map"),
        ("nf4.quant_map", &shorter, "nf4", "nf4.quant_map has the shape [15]"),
        ("nf4.absmax", &shorter, "nf4", "nf4.absmax has the shape [11]"),
        ("nf4", &shorter, "nf4", "it has 350 bytes"),
        ("nf4_twice.nested_absmax", &gone, "nf4_twice", "there is no nf4_twice.nested_absmax"),
        ("nf4_twice.nested_quant_map", &gone, "nf4_twice", "there is no nf4_twice.nested_quant_map"),
        ("nf4_twice.nested_quant_map", &shorter, "nf4_twice", "nested_quant_map has the shape [255]"),
        (state, &text("\"blocksize\": 64", "\"blocksize\": 0"), "nf4_twice", "blocks of 0 elements"),
        (
            state,
            &text("\"nested_blocksize\": 256", "\"nested_blocksize\": 0"),
            "nf4_twice",
            "no nested_blocksize",
        ),
        (state, &text("{", "["), "nf4_twice", "malformed"),
        (state, &text("500", "99999999999999999999"), "nf4_twice", "malformed"),
        (state, &text("500", "9999999999999999999"), "nf4_twice", "is too large"),
        ("blocks.weight_scale_inv", &shorter, "blocks.weight", "has not one scale for all"),
    ];
    for (name, change, tensor, says) in cases {
        let file = changed(name, change);
        let error = file.read(tensor).expect_err(says).to_string();
        assert!(error.contains(says) && error.contains(tensor), "{name}: {error}");
        file.read("fp4").unwrap();
    }
    // Scales of another kind.
    let one = safetensors::tensor::TensorView::new(safetensors::Dtype::F8_E4M3, vec![2, 2], &[1; 4]).unwrap();
    let scale = safetensors::tensor::TensorView::new(safetensors::Dtype::F32, vec![1], &[0; 4]).unwrap();
    safetensors::serialize_to_file(
        [("a.weight", &one), ("a.scale_weight", &scale), ("b.weight", &one)],
        None,
        &path,
    )
    .unwrap();
    let error = open(&path).read("a.weight").unwrap_err().to_string();
    assert!(error.contains("a.scale_weight seems to scale it"), "{error}");
    open(&path).read("b.weight").unwrap();
    // Without its state it is a tensor of bytes, and its scales are tensors of floats, which no module takes for its weight.
    let file = changed("nf4.quant_state.bitsandbytes__nf4", &gone);
    assert_eq!(file.read("nf4").unwrap().dtype(), DType::U8);
}

#[test]
fn parts_of_a_split_file_are_one_file() {
    let names = |file: &WeightFile| file.tensors().map(|tensor| tensor.name.to_owned()).collect::<Vec<_>>();
    let file = open(&data("split-00001-of-00002.gguf"));
    assert_eq!(names(&file), ["first.F16", "first.Q8_0", "second.F16", "second.Q4_0"]);
    let error = WeightFile::open(data("split-00002-of-00002.gguf")).unwrap_err().to_string();
    assert!(error.contains("open the first, which ends with -00001-of-00002.gguf"), "{error}");

    let directory = tempfile::tempdir().unwrap();
    let first = directory.path().join("model-00001-of-00002.gguf");
    std::fs::copy(data("split-00001-of-00002.gguf"), &first).unwrap();
    let error = WeightFile::open(&first).unwrap_err();
    assert!(
        matches!(&error, LazyError::Io { file, .. } if file.ends_with("model-00002-of-00002.gguf")),
        "{error}"
    );
    std::fs::copy(&first, directory.path().join("model-00002-of-00002.gguf")).unwrap();
    let error = WeightFile::open(&first).unwrap_err().to_string();
    assert!(error.contains("a second tensor"), "{error}");
}

#[test]
fn a_packed_file_that_changes_is_an_error() {
    let directory = tempfile::tempdir().unwrap();
    for (name, tensor) in [("packed.gguf", "Q5_K"), ("packed.safetensors", "nf4_twice")] {
        let path = directory.path().join(name);
        std::fs::copy(data(name), &path).unwrap();
        let file = open(&path);
        file.read(tensor).unwrap();
        let mut bytes = std::fs::read(&path).unwrap();
        bytes.push(0);
        std::fs::write(&path, bytes).unwrap();
        let error = file.read(tensor).unwrap_err().to_string();
        assert!(error.contains("the file was changed after it was opened"), "{error}");
    }
}

/// An error, or other numbers, but no panic.
#[test]
fn damaged_packed_files_are_errors_or_other_weights() {
    let directory = tempfile::tempdir().unwrap();
    for name in ["packed.gguf", "packed.safetensors"] {
        let whole = std::fs::read(data(name)).unwrap();
        let path = directory.path().join(name);
        let survives = |bytes: &[u8]| {
            std::fs::write(&path, bytes).unwrap();
            let read = catch_unwind(AssertUnwindSafe(|| {
                let Ok(file) = WeightFile::open(&path) else { return };
                for tensor in file.tensors() {
                    let _ = file.read(tensor.name);
                }
            }));
            assert!(read.is_ok(), "a panic");
        };
        let head = whole.len().min(4000);
        (0..head).step_by(7).for_each(|len| survives(&whole[..len]));
        // Lengths and the texts of states, too.
        let config = ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() };
        proptest!(config, |(damage in prop::collection::vec((0..whole.len(), any::<u8>()), 1..6), early in 0..head, byte: u8)| {
            let mut damaged = whole.clone();
            damage.iter().for_each(|&(at, byte)| damaged[at] = byte);
            damaged[early] = byte;
            survives(&damaged);
        });
    }
}
