//! Tests which files can be opened: formats, shards, and the names, layouts and dtypes of other frameworks.
use crate::{Saved, all, cast, devices, load, open};
use burn::module::Module;
use burn::tensor::{DType, Device, Tensor, TensorData, Tolerance};
use burn_memsave::burn_next::{StoreTensor, handed, packed};
use burn_memsave::lazy::{LazyError, LazyLoad, LazyOptions, WeightFile};
use burn_memsave::nn;
use burn_store::{
    BurnToPyTorchAdapter, HalfPrecisionAdapter, ModuleAdapter, ModuleContext, ModuleSnapshot,
    SafetensorsStore, burn_pack,
};
use safetensors::{SafeTensors, tensor::TensorView};
use std::collections::BTreeMap;
use std::path::Path;

#[derive(Module, Debug)]
struct Model {
    embedding: nn::Embedding,
    first: nn::Linear,
    norm: nn::LayerNorm,
    second: nn::Linear,
}

impl Model {
    fn new(device: &Device) -> Self {
        Self {
            embedding: nn::EmbeddingConfig::new(11, 6).init(device),
            first: nn::LinearConfig::new(6, 6).init(device),
            norm: nn::LayerNormConfig::new(6).init(device),
            second: nn::LinearConfig::new(6, 4).init(device),
        }
    }

    fn forward(&self, device: &Device) -> Tensor<3> {
        let x = self.embedding.forward(Tensor::from_ints([[1, 10, 3], [0, 1, 2]], device));
        self.second.forward(self.norm.forward(self.first.forward(x)))
    }
}

/// Splits a safetensors file into two shards and their index.
fn split(saved: &Saved) {
    let bytes = std::fs::read(saved.path("model.safetensors")).unwrap();
    let all = SafeTensors::deserialize(&bytes).unwrap();
    let mut weight_map = BTreeMap::new();
    let directory = saved.path("shards");
    std::fs::create_dir(&directory).unwrap();
    for (shard, name) in ["model-1.safetensors", "model-2.safetensors"].iter().enumerate() {
        let part: Vec<(String, TensorView)> =
            all.tensors().into_iter().filter(|(tensor, _)| tensor.starts_with("s") == (shard == 1)).collect();
        weight_map.extend(part.iter().map(|(tensor, _)| (tensor.clone(), (*name).to_string())));
        safetensors::serialize_to_file(part, None, &directory.join(name)).unwrap();
    }
    let index = serde_json::json!({ "metadata": { "total_size": bytes.len() }, "weight_map": weight_map });
    std::fs::write(directory.join("model.safetensors.index.json"), index.to_string()).unwrap();
}

#[test]
fn shards_are_one_file() {
    let device = Device::flex();
    let eager = Model::new(&device);
    let saved = Saved::new(&eager);
    split(&saved);
    let index = saved.path("shards").join("model.safetensors.index.json");
    for path in [saved.path("shards"), index.clone()] {
        let (lazy, report) = load(Model::new(&device), &open(&path), &all());
        assert_eq!(report.lazy.len(), 3);
        assert_eq!(lazy.forward(&device).into_data(), eager.forward(&device).into_data());
    }
    std::fs::remove_file(index).unwrap();
    assert_eq!(open(&saved.path("shards")).tensors().len(), 7, "without an index");
}

#[test]
fn names_and_layouts_of_pytorch() {
    for device in devices() {
        let eager = Model::new(&device);
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("pytorch.safetensors");
        // Transposed weights, norms with a weight and a bias, another prefix.
        let mut store = SafetensorsStore::from_file(&path)
            .with_to_adapter(BurnToPyTorchAdapter)
            .with_key_remapping("^", "bert.");
        eager.save_into(&mut store).unwrap();
        let file = open(&path).with_key_remapping(r"^bert\.", "").unwrap().with_pytorch_adapter();
        let (lazy, report) = load(Model::new(&device), &file, &all());
        assert_eq!((report.lazy.len(), report.unused.len()), (3, 0), "{report}");
        assert_eq!(lazy.first.weight.val().into_data(), eager.first.weight.val().into_data());
        // A product with a transposed view may sum in another order.
        let (y, expected) = (lazy.forward(&device).into_data(), eager.forward(&device).into_data());
        y.assert_approx_eq::<f32>(&expected, Tolerance::default());
    }
}

/// `data/pytorch.py` wrote these, and what PyTorch makes of them.
#[test]
fn checkpoints_of_pytorch() {
    let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/lazy/data");
    let output = std::fs::read(data.join("output.json")).unwrap();
    let output = TensorData::new(serde_json::from_slice::<Vec<f32>>(&output).unwrap(), [2, 3, 4]);
    for (name, tolerance) in
        [("model.pt", 1e-5), ("legacy.pt", 1e-5), ("checkpoint.pth", 1e-5), ("half.pt", 1e-2)]
    {
        let file = open(&data.join(name));
        let file = if name == "checkpoint.pth" { file.with_key("model").unwrap() } else { file };
        let file = file.with_pytorch_adapter();
        let stored = if name == "half.pt" { DType::F16 } else { DType::F32 };
        assert!(file.tensors().all(|tensor| tensor.dtype == stored), "{name}");
        for device in devices() {
            let (lazy, report) = load(Model::new(&device), &file, &all().with_dtype(DType::F32));
            assert_eq!(
                (report.lazy.len(), report.resident.len(), report.unused.len()),
                (3, 4, 0),
                "{name}: {report}"
            );
            lazy.forward(&device)
                .into_data()
                .assert_approx_eq::<f32>(&output, Tolerance::absolute(tolerance));
        }
    }
}

/// Burn's stores go by the names of modules, and ours have those of their twins: a square weight that is not transposed would
/// be no error but a wrong result.
#[test]
fn stores_of_burn_know_our_modules() {
    let device = Device::flex();
    let eager = Model::new(&device);
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("pytorch.safetensors");
    let mut store = SafetensorsStore::from_file(&path).with_to_adapter(BurnToPyTorchAdapter);
    eager.save_into(&mut store).unwrap();
    let bytes = std::fs::read(&path).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    assert_eq!(tensors.tensor("second.weight").unwrap().shape(), [4, 6]);
    assert!(tensors.tensor("norm.weight").is_ok());

    let mut loaded = Model::new(&device);
    let mut store = SafetensorsStore::from_file(&path).with_from_adapter(burn_store::PyTorchToBurnAdapter);
    loaded.load_from(&mut store).unwrap();
    assert_eq!(loaded.forward(&device).into_data(), eager.forward(&device).into_data());
}

#[test]
fn dtypes_are_converted() {
    let device = Device::flex();
    for stored in [DType::F16, DType::BF16, DType::F32, DType::F64] {
        let eager = cast(Model::new(&device), stored);
        let saved = Saved::new(&eager);
        for wanted in [DType::F32, DType::F64] {
            let options = all().with_dtype(wanted);
            let (lazy, report) = load(Model::new(&device), &saved.safetensors(), &options);
            assert!(
                report.lazy.iter().all(|parameter| (parameter.stored, parameter.dtype) == (stored, wanted))
            );
            let cast = cast(eager.clone(), wanted);
            let expected = cast.forward(&device).into_data();
            assert_eq!(lazy.forward(&device).into_data(), expected, "{stored:?} as {wanted:?}");
            assert_eq!(expected.dtype(), wanted);
        }
    }
}

#[test]
fn half_precision_runs_as_it_is() {
    let device = Device::flex();
    for dtype in [DType::F16, DType::BF16] {
        let eager = cast(Model::new(&device), dtype);
        let saved = Saved::new(&eager);
        for path in ["model.safetensors", "model.bpk"] {
            let (lazy, report) = load(Model::new(&device), &open(&saved.path(path)), &all());
            assert!(report.lazy.iter().chain(&report.resident).all(|parameter| parameter.dtype == dtype));
            let y = lazy.forward(&device).into_data();
            assert_eq!((y.dtype(), &y), (dtype, &eager.forward(&device).into_data()));
        }
    }
}

#[test]
fn adapters_of_burn_store_apply() {
    let device = Device::flex();
    let eager = cast(Model::new(&device), DType::F16);
    let saved = Saved::new(&eager);
    let file = saved.safetensors().with_adapter(HalfPrecisionAdapter::new());
    let (lazy, report) = load(Model::new(&device), &file, &all());
    assert!(report.lazy.iter().all(|parameter| parameter.stored == DType::F32));
    assert_eq!(lazy.forward(&device).into_data(), cast(eager, DType::F32).forward(&device).into_data());
}

#[test]
fn an_adapter_may_change_values_only() {
    #[derive(Clone)]
    struct Doubled;
    impl ModuleAdapter for Doubled {
        fn adapt(&self, tensor: StoreTensor, _module: ModuleContext<'_>) -> StoreTensor {
            let tensor = packed(tensor);
            if !tensor.name.ends_with("weight") {
                return handed(tensor);
            }
            let (name, dtype, shape) = (tensor.name.clone(), tensor.dtype, tensor.shape.clone());
            let (id, len) = (tensor.param_id, tensor.byte_len());
            let doubled = move || {
                let bytes = tensor.to_bytes()?;
                let doubled: Vec<f32> =
                    bytemuck::pod_collect_to_vec::<u8, f32>(&bytes).iter().map(|x| 2.0 * x).collect();
                Ok(burn::tensor::Bytes::from_elems(doubled))
            };
            handed(burn_pack::Tensor::deferred(name, dtype, shape, id, len, doubled))
        }
        fn clone_box(&self) -> Box<dyn ModuleAdapter> {
            Box::new(self.clone())
        }
    }
    let device = Device::flex();
    let eager = nn::LinearConfig::new(6, 6).init(&device);
    let saved = Saved::new(&eager);
    let config = nn::LinearConfig::new(6, 6);
    let (lazy, _) = load(config.init(&device), &saved.safetensors().with_adapter(Doubled), &all());
    assert_eq!(lazy.weight.val().into_data(), (eager.weight.val() * 2.0).into_data());
    assert_eq!(lazy.bias.unwrap().val().into_data(), eager.bias.unwrap().val().into_data());
}

#[test]
fn patterns_types_and_sizes_choose() {
    let device = Device::flex();
    let saved = Saved::new(&Model::new(&device));
    let file = saved.safetensors();
    let lazy = |options: LazyOptions| -> Vec<String> {
        let (_, report) = load(Model::new(&device), &file, &options);
        report.lazy.into_iter().map(|parameter| parameter.path).collect()
    };
    assert_eq!(lazy(all()), ["embedding.weight", "first.weight", "second.weight"]);
    assert_eq!(lazy(all().include("*first")), ["first.weight"]);
    assert_eq!(lazy(all().include("*.weight").exclude("e*")), ["first.weight", "second.weight"]);
    assert_eq!(lazy(all().include_type("Embedding")), ["embedding.weight"]);
    assert_eq!(lazy(all().exclude_type("Embedding").exclude("second")), ["first.weight"]);
    assert_eq!(lazy(all().with_min_bytes(6 * 6 * 4)), ["embedding.weight", "first.weight"]);
    assert!(lazy(LazyOptions::new()).is_empty());
}

#[test]
fn what_does_not_fit_is_an_error_that_names_it() {
    let device = Device::flex();
    let saved = Saved::new(&Model::new(&device));
    let file = saved.safetensors();

    let error = |module: Model, options: &LazyOptions| module.lazy_load(&file, options).unwrap_err();
    let mut larger = Model::new(&device);
    larger.second = nn::LinearConfig::new(6, 5).init(&device);
    match error(larger, &all()) {
        LazyError::Shape { tensor, parameter, expected, found, .. } => {
            assert_eq!((&tensor[..], &parameter[..]), ("second.weight", "second.weight"));
            assert_eq!((&expected[..], &found[..]), (&[6, 5][..], &[6, 4][..]));
        }
        other => panic!("{other}"),
    }
    let renamed = saved.safetensors().with_key_remapping("^second", "third").unwrap();
    let missing = Model::new(&device).lazy_load(&renamed, &all()).unwrap_err();
    assert!(
        matches!(&missing, LazyError::Missing { parameter, .. } if parameter == "second.weight"),
        "{missing}"
    );
    let (_, report) = load(Model::new(&device), &renamed, &all().with_allow_partial(true));
    assert_eq!(report.missing, ["second.weight", "second.bias"]);
    assert_eq!(report.unused, ["third.bias", "third.weight"]);

    let clash = saved.safetensors().with_key_remapping("first|second", "same").unwrap_err();
    assert!(matches!(clash, LazyError::Pattern { .. }), "{clash}");
    assert!(matches!(error(Model::new(&device), &all().include("[")), LazyError::Pattern { .. }));
    assert!(matches!(saved.safetensors().with_key_remapping("(", ""), Err(LazyError::Pattern { .. })));

    let (lazy, _) = load(Model::new(&device), &file, &all());
    let again = error(lazy, &all());
    assert!(
        matches!(&again, LazyError::Reparameterized { parameter } if parameter == "embedding.weight"),
        "{again}"
    );
    assert!(matches!(WeightFile::open("/nowhere"), Err(LazyError::Io { .. })));
}
