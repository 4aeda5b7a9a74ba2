//! Tests the preparation of files for lazy loading.
use crate::{Saved, all, load, open};
use burn::module::Module;
use burn::tensor::{DType, Device, FloatDType, Tensor, TensorData, Tolerance};
use burn_memsave::lazy::{LazyError, PrepareOptions, PrepareSource, WeightFile, prepare};
use burn_memsave::nn::{Embedding, EmbeddingConfig, LayerNorm, LayerNormConfig, Linear, LinearConfig};
use burn_store::{BurnToPyTorchAdapter, ModuleSnapshot, SafetensorsStore};
use std::sync::{Arc, Mutex};

#[derive(Module, Debug)]
struct Model {
    embedding: Embedding,
    layers: Vec<Linear>,
    norm: LayerNorm,
}

impl Model {
    fn new(device: &Device) -> Self {
        Self {
            embedding: EmbeddingConfig::new(50, 64).init(device),
            layers: (0..12).map(|_| LinearConfig::new(64, 64).init(device)).collect(),
            norm: LayerNormConfig::new(64).init(device),
        }
    }

    fn forward(&self) -> TensorData {
        let x = self.embedding.forward(Tensor::from_ints([[1, 49, 3], [0, 1, 2]], &Device::flex()));
        let x = self.layers.iter().fold(x, |x, layer| layer.forward(x));
        self.norm.forward(x).into_data()
    }
}

fn names(file: &WeightFile) -> Vec<String> {
    file.tensors().map(|tensor| tensor.name.to_owned()).collect()
}

#[test]
fn from_files_and_modules_in_every_dtype() {
    let device = Device::flex();
    let eager = Model::new(&device);
    let saved = Saved::new(&eager);
    let of_module = PrepareSource::of_module(&eager);
    let of_file = PrepareSource::try_from(saved.safetensors()).unwrap();
    let for_module = PrepareSource::for_module(&saved.safetensors(), &Model::new(&device)).unwrap();
    for (name, source) in [("module", of_module), ("file", of_file), ("for_module", for_module)] {
        let path = saved.path(name);
        let prepared = prepare(source, &path, &PrepareOptions::new()).unwrap();
        assert_eq!(prepared.tensors, 27);
        let (lazy, report) = load(Model::new(&device), &open(&path), &all());
        assert_eq!(prepared.bytes, report.lazy_bytes() + report.resident_bytes());
        assert_eq!(lazy.forward(), eager.forward(), "{name}");
        // Burn reads it, too.
        assert_eq!(Model::new(&device).try_load_file(&path).unwrap().forward(), eager.forward(), "{name}");
    }
    for dtype in [DType::F64, DType::F32, DType::BF16, DType::F16] {
        let path = saved.path(dtype.name());
        let source = &*saved.path("model.safetensors").to_string_lossy().into_owned();
        prepare(source, &path, &PrepareOptions::new().with_dtype(dtype)).unwrap();
        let (lazy, report) = load(Model::new(&device), &open(&path), &all().with_dtype(DType::F32));
        assert!(report.lazy.iter().all(|parameter| parameter.stored == dtype));
        assert!(report.resident.iter().all(|parameter| parameter.stored == DType::F32));
        let mut rounded = eager.clone();
        let round = |param: burn::module::Param<Tensor<2>>| {
            param.map(|x| x.cast(FloatDType::from(dtype)).cast(FloatDType::F32))
        };
        rounded.embedding.weight = round(rounded.embedding.weight);
        rounded.layers = rounded
            .layers
            .into_iter()
            .map(|mut layer| {
                layer.weight = round(layer.weight);
                layer
            })
            .collect();
        assert_eq!(lazy.forward(), rounded.forward(), "{dtype:?}");
    }
}

#[test]
fn eight_bits_are_near() {
    let device = Device::flex();
    let eager = Model::new(&device);
    let saved = Saved::new(&eager);
    let path = saved.path("int8.bpk");
    let prepared =
        prepare(saved.safetensors(), &path, &PrepareOptions::new().with_approximate_int8()).unwrap();
    let matrices = 50 * 64 + 12 * 64 * 64;
    assert_eq!(prepared.bytes, matrices + matrices / 32 * 4 + 14 * 64 * 4);
    let (lazy, report) = load(Model::new(&device), &open(&path), &all());
    assert_eq!(report.lazy.len(), 13);
    let weights = |model: &Model| model.layers[3].weight.val().into_data().try_to_vec::<f32>().unwrap();
    let (near, exact) = (weights(&lazy), weights(&eager));
    for (near, exact) in near.chunks(32).zip(exact.chunks(32)) {
        let largest = exact.iter().fold(0.0f32, |largest, x| largest.max(x.abs()));
        let most = largest / 254.0 * 1.001;
        assert!(near.iter().zip(exact).all(|(near, exact)| (near - exact).abs() <= most));
    }
    lazy.forward().assert_approx_eq::<f32>(&eager.forward(), Tolerance::absolute(0.1));
    // Burn reads it, and means the same.
    let packed = Model::new(&device).try_load_file(&path).unwrap();
    let dequantized = packed.layers[3].weight.val().dequantize().into_data();
    dequantized.assert_approx_eq::<f32>(&lazy.layers[3].weight.val().into_data(), Tolerance::default());
}

#[test]
fn what_eight_bits_cannot_hold_is_refused() {
    for value in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let mut model = Model::new(&Device::flex());
        model.layers[3].weight = model.layers[3].weight.clone().map(|weight| {
            let at = weight.dims().map(|len| len - 1..len);
            weight.slice_fill(at, value)
        });
        let saved = Saved::new(&model);
        let options = PrepareOptions::new().with_approximate_int8();
        let error = prepare(saved.safetensors(), saved.path("int8.bpk"), &options).unwrap_err().to_string();
        let what = format!("element {} is {value}", 64 * 64 - 1);
        assert!(error.contains("layers.3.weight") && error.contains(&what), "{error}");
        assert!(!saved.path("int8.bpk").exists());
        // In the dtype that it has it is a weight as any other.
        prepare(saved.safetensors(), saved.path("f32.bpk"), &PrepareOptions::new()).unwrap();
    }
}

#[test]
fn layouts_of_pytorch_are_prepared_once() {
    let device = Device::flex();
    let eager = Model::new(&device);
    let saved = Saved::new(&eager);
    let path = saved.path("pytorch.safetensors");
    let mut store = SafetensorsStore::from_file(&path).with_to_adapter(BurnToPyTorchAdapter);
    eager.save_into(&mut store).unwrap();
    let file = open(&path).with_pytorch_adapter();
    // Without the module nobody knows which tensors to transpose.
    let error = prepare(&file, saved.path("prepared.bpk"), &PrepareOptions::new()).unwrap_err();
    assert!(matches!(&error, LazyError::Adapter { .. }), "{error}");
    // But they may be packed before.
    prepare(open(&path), saved.path("packed.bpk"), &PrepareOptions::new().with_approximate_int8()).unwrap();
    let (lazy, _) =
        load(Model::new(&device), &open(&saved.path("packed.bpk")).with_pytorch_adapter(), &all());
    lazy.forward().assert_approx_eq::<f32>(&eager.forward(), Tolerance::absolute(0.1));

    for (options, exact) in
        [(PrepareOptions::new(), true), (PrepareOptions::new().with_approximate_int8(), false)]
    {
        let source = PrepareSource::for_module(&file, &Model::new(&device)).unwrap();
        prepare(source, saved.path("prepared.bpk"), &options).unwrap();
        let prepared = open(&saved.path("prepared.bpk"));
        assert_eq!(names(&prepared), names(&open(&saved.path("model.bpk"))));
        let (lazy, _) = load(Model::new(&device), &prepared, &all());
        match exact {
            true => assert_eq!(lazy.forward(), eager.forward()),
            false => lazy.forward().assert_approx_eq::<f32>(&eager.forward(), Tolerance::absolute(0.1)),
        }
    }
}

#[test]
fn numbers_in_names_are_numbers() {
    let saved = Saved::new(&Model::new(&Device::flex()));
    let told = Arc::new(Mutex::new(vec![]));
    let tell = told.clone();
    let options = PrepareOptions::new().with_progress(move |progress| {
        tell.lock().unwrap().push((progress.tensor.to_owned(), progress.bytes, progress.of));
    });
    let prepared = prepare(saved.safetensors(), saved.path("ordered.bpk"), &options).unwrap();
    let told = told.lock().unwrap();
    let order: Vec<_> = told
        .iter()
        .map(|(name, ..)| &name[..])
        .filter(|name| name.ends_with("s.weight") || name.contains("weight"))
        .collect();
    let expected: Vec<_> = std::iter::once("embedding.weight".into())
        .chain((0..12).map(|index| format!("layers.{index}.weight")))
        .collect();
    assert_eq!(order, expected);
    assert!(told.iter().all(|(_, bytes, of)| bytes < of && *of == prepared.bytes));
}

#[test]
fn failures_leave_nothing() {
    let saved = Saved::new(&Model::new(&Device::flex()));
    let file = saved.safetensors();
    let whole = std::fs::metadata(saved.path("model.safetensors")).unwrap().len();
    let shrink = std::fs::OpenOptions::new().write(true).open(saved.path("model.safetensors")).unwrap();
    shrink.set_len(whole / 2).unwrap();
    let destination = saved.path("prepared.bpk");
    let error = prepare(&file, &destination, &PrepareOptions::new()).unwrap_err();
    assert!(matches!(&error, LazyError::Prepare { reason, .. } if reason.contains("tensor ")), "{error}");
    assert!(!destination.exists());
    let rest = std::fs::read_dir(saved.path("")).unwrap().count();
    assert_eq!(rest, 2, "no scratch files");
    let nowhere = prepare(&file, saved.path("no/such/directory.bpk"), &PrepareOptions::new());
    assert!(matches!(nowhere, Err(LazyError::Prepare { .. })));
    assert!(matches!(prepare("/nowhere", destination, &PrepareOptions::new()), Err(LazyError::Io { .. })));
}
