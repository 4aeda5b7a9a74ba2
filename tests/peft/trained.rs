//! Tests what is trained beside adapters: whole modules, heads of tasks, biases, and values that a configuration does not name.
use crate::{Shake, alone, assert_refused, with_config};
use burn::module::{Lora, Module, Param, ParamGroup, Quantizer};
use burn::nn::LinearLayout;
use burn::tensor::quantization::{Calibration, QuantValue};
use burn::tensor::{Device, Tensor, TensorData, Tolerance};
use burn_memsave::lazy::{LazyLoad, LazyOptions, WeightFile};
use burn_memsave::nn::{BatchNorm, BatchNormConfig, InstanceNorm, InstanceNormConfig, Linear, LinearConfig};
use burn_memsave::peft::{PeftBias, PeftConfig, load, save};
use burn_store::{ModuleSnapshot, SafetensorsStore};
use serde_json::json;
use std::path::Path;
use tempfile::TempDir;

#[derive(Module, Debug)]
struct Model {
    body: Linear,
    batch: BatchNorm,
    instance: InstanceNorm,
    /// Called `lm_head` in Python.
    head: Linear,
    /// Called `score` there.
    columns: Linear,
}

const WIDTH: usize = 4;
const LABELS: usize = 3;

impl Model {
    fn new(seed: u64, device: &Device) -> Self {
        device.seed(seed);
        let linear = || LinearConfig::new(WIDTH, WIDTH);
        let model = Self {
            body: linear().init(device),
            batch: BatchNormConfig::new(WIDTH).init(device),
            instance: InstanceNormConfig::new(WIDTH).init(device),
            head: linear().init(device),
            columns: LinearConfig::new(WIDTH, LABELS).with_layout(LinearLayout::Col).init(device),
        };
        model.map(&mut Shake)
    }

    fn values(&self) -> Vec<TensorData> {
        let bias = |layer: &Linear| layer.bias.as_ref().unwrap().val().into_data();
        let vector = |param: &Option<Param<Tensor<1>>>| param.as_ref().unwrap().val().into_data();
        vec![
            self.head.weight.val().into_data(),
            bias(&self.head),
            self.columns.weight.val().into_data(),
            self.batch.gamma.val().into_data(),
            vector(&self.instance.gamma),
            vector(&self.instance.beta),
        ]
    }
}

fn names(path: &str) -> String {
    path.replace("head", "lm_head").replace("columns", "score")
}

fn on_body() -> Lora {
    Lora::new(2, 4.0).set_param_group(ParamGroup::from_regex(r"^body\.weight$").unwrap())
}

/// A model whose adapter and all else was trained, and a directory with the adapter and what `config` says.
fn saved(config: PeftConfig) -> (Model, TempDir) {
    let model = Model::new(1, &Device::flex().autodiff()).apply_lora(on_body()).map(&mut Shake);
    let directory = tempfile::tempdir().unwrap();
    save(&model, config, directory.path(), names).unwrap();
    (model, directory)
}

fn written(directory: &Path) -> Vec<String> {
    let file = WeightFile::open(directory.join("adapter_model.safetensors")).unwrap();
    file.tensors().map(|tensor| tensor.name.trim_start_matches("base_model.model.").to_owned()).collect()
}

#[test]
fn entries_are_ends_of_names() {
    let _alone = alone();
    let config = PeftConfig::from(&on_body()).with_modules_to_save(["head", "score", "instance", "batch"]);
    let (model, directory) = saved(config);
    let found = written(directory.path());
    for name in
        ["lm_head.weight", "score.weight", "instance.weight", "instance.bias", "batch.num_batches_tracked"]
    {
        assert!(found.iter().any(|found| found == name), "{name}: {found:?}");
    }
    let file = WeightFile::open(directory.path().join("adapter_model.safetensors")).unwrap();
    let weight = file.read("base_model.model.score.weight").unwrap();
    assert_eq!(weight, model.columns.weight.val().transpose().into_data(), "in PyTorch's layout");
    for device in [Device::flex().autodiff(), Device::flex()] {
        let (loaded, _) = load(Model::new(2, &device), directory.path(), names).unwrap();
        assert_eq!(loaded.values(), model.values(), "columnar and square weights, too");
        let trained = if device.is_autodiff() { loaded } else { loaded.train() };
        assert!(trained.head.weight.is_require_grad() && trained.batch.gamma.is_require_grad());
        assert!(trained.head.bias.as_ref().unwrap().is_require_grad());
        assert!(!trained.body.bias.as_ref().unwrap().is_require_grad());
    }
}

#[test]
fn heads_of_tasks_are_trained() {
    let _alone = alone();
    let (_, directory) = saved(PeftConfig::from(&on_body()).with_task_type("SEQ_CLS"));
    assert!(written(directory.path()).contains(&"score.weight".to_owned()));
    let (loaded, config) = load(Model::new(2, &Device::flex().autodiff()), directory.path(), names).unwrap();
    assert!(loaded.columns.weight.is_require_grad() && !loaded.head.weight.is_require_grad());
    assert!(config.modules_to_save().is_empty());
}

/// As older versions of `peft` write heads, and all write a resized embedding.
#[test]
fn values_that_no_configuration_names_are_loaded_and_written_again() {
    let _alone = alone();
    let (model, directory) = saved(PeftConfig::from(&on_body()).with_modules_to_save(["lm_head"]));
    with_config(directory.path(), |config| config["modules_to_save"] = json!(null));
    let device = Device::flex().autodiff();
    let (loaded, config) = load(Model::new(2, &device), directory.path(), names).unwrap();
    assert_eq!(loaded.head.weight.val().into_data(), model.head.weight.val().into_data());
    assert!(!loaded.head.weight.is_require_grad() && !loaded.head.bias.as_ref().unwrap().is_require_grad());
    assert_eq!(config.modules_to_save(), ["lm_head"]);
    let again = tempfile::tempdir().unwrap();
    save(&loaded, &config, again.path(), names).unwrap();
    assert_eq!(written(again.path()), written(directory.path()));

    let base = directory.path().join("base.bpk");
    Model::new(2, &device).save_file(&base).unwrap();
    let file = WeightFile::open(&base).unwrap();
    let lazy = || Model::new(3, &device).lazy_load(&file, &LazyOptions::new().with_min_bytes(0)).unwrap().0;
    assert_refused(load(lazy(), directory.path(), names), "has values of its own, but head.weight is lazy");
    let lazy = lazy().apply_lora(on_body());
    let config = PeftConfig::from(&on_body()).with_modules_to_save(["lm_head"]);
    assert_refused(save(&lazy, config, again.path(), names), "it is lazy, so it was not trained");
}

/// A layer scale is called `gamma` in Python, too, and `beta` need not be a bias.
#[test]
fn names_of_norms_are_those_of_norms_only() {
    #[derive(Module, Debug)]
    struct Scaled {
        body: Linear,
        scale: LayerScale,
    }
    #[derive(Module, Debug)]
    struct LayerScale {
        gamma: Param<Tensor<1>>,
        beta: Param<Tensor<1>>,
    }
    let _alone = alone();
    let device = Device::flex().autodiff();
    let vector = |value: f32| Param::from_tensor(Tensor::full([WIDTH], value, &device));
    let new = |value: f32| Scaled {
        body: LinearConfig::new(WIDTH, WIDTH).init(&device),
        scale: LayerScale { gamma: vector(value), beta: vector(value) },
    };
    let directory = tempfile::tempdir().unwrap();
    let model = new(2.0).apply_lora(on_body());
    save(&model, PeftConfig::from(&on_body()).with_bias(PeftBias::All), directory.path(), names).unwrap();
    assert!(!written(directory.path()).iter().any(|name| name.starts_with("scale")));
    let config = PeftConfig::from(&on_body()).with_modules_to_save(["scale"]);
    save(&model, config, directory.path(), names).unwrap();
    assert_eq!(written(directory.path())[2..], ["scale.beta", "scale.gamma"]);
    let (loaded, _) = load(new(1.0), directory.path(), names).unwrap();
    assert_eq!(loaded.scale.gamma.val().into_data(), model.scale.gamma.val().into_data());
}

/// Older versions wrote the bias of an adapted layer as that of any other.
#[test]
fn biases_of_adapted_layers_by_their_old_names() {
    let _alone = alone();
    let (_, directory) = saved(PeftConfig::from(&on_body()).with_bias(PeftBias::LoraOnly));
    let path = directory.path().join("adapter_model.safetensors");
    let bytes = std::fs::read(&path).unwrap();
    let tensors = safetensors::SafeTensors::deserialize(&bytes).unwrap().tensors();
    let renamed = tensors.into_iter().map(|(name, view)| (name.replace(".base_layer.", "."), view));
    std::fs::write(&path, safetensors::serialize(renamed, None).unwrap()).unwrap();
    let device = Device::flex().autodiff();
    let (loaded, config) = load(Model::new(2, &device), directory.path(), names).unwrap();
    assert!(loaded.body.bias.as_ref().unwrap().is_require_grad());
    assert!(config.modules_to_save().is_empty());
    save(&loaded, &config, directory.path(), names).unwrap();
}

#[test]
fn biases_of_both_copies_of_a_module_are_ignored() {
    let _alone = alone();
    let config = PeftConfig::from(&on_body()).with_modules_to_save(["lm_head"]).with_bias(PeftBias::All);
    let (model, directory) = saved(config);
    let path = directory.path().join("adapter_model.safetensors");
    let bytes = std::fs::read(&path).unwrap();
    let tensors = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let bias = tensors.tensor("base_model.model.lm_head.bias").unwrap();
    let copies =
        ["original_module", "modules_to_save"].map(|copy| format!("base_model.model.lm_head.{copy}.bias"));
    let all = tensors.tensors().into_iter().chain(copies.map(|name| (name, bias.clone())));
    let bytes = safetensors::serialize(all, None).unwrap();
    std::fs::write(&path, bytes).unwrap();
    let device = Device::flex().autodiff();
    let (loaded, _) = load(Model::new(2, &device), directory.path(), names).unwrap();
    assert_eq!(loaded.values()[1], model.values()[1]);
    // A copy alone is that of a module which was not loaded.
    let bytes = std::fs::read(&path).unwrap();
    let tensors = safetensors::SafeTensors::deserialize(&bytes).unwrap().tensors();
    let renamed = tensors
        .into_iter()
        .map(|(name, view)| (name.replace("lm_head.weight", "lm_head.modules_to_save.weight"), view));
    std::fs::write(&path, safetensors::serialize(renamed, None).unwrap()).unwrap();
    assert_refused(
        load(Model::new(2, &device), directory.path(), names),
        "no module for base_model.model.lm_head.modules_to_save.weight",
    );
}

#[test]
fn what_python_could_not_load_is_refused() {
    let _alone = alone();
    let device = Device::flex().autodiff();
    let model = Model::new(1, &device).apply_lora(on_body());
    let directory = tempfile::tempdir().unwrap();
    let config = PeftConfig::from(&on_body()).with_modules_to_save(["body"]);
    assert_refused(
        save(&model, config, directory.path(), names),
        "it has an adapter, and is one of the modules to save",
    );

    let (_, directory) = saved(PeftConfig::from(&on_body()));
    for (field, value) in [("ensure_weight_tying", json!(true)), ("of_the_future", json!(3))] {
        with_config(directory.path(), |config| config[field] = value);
        assert_refused(
            load(Model::new(2, &device), directory.path(), names),
            &format!("{field} is not supported"),
        );
        with_config(directory.path(), |config| config[field] = json!(null));
    }
    load(Model::new(2, &device), directory.path(), names).unwrap();
    let empty = safetensors::serialize::<&str, safetensors::tensor::TensorView<'_>, _>([], None).unwrap();
    std::fs::write(directory.path().join("adapter_model.safetensors"), empty).unwrap();
    assert_refused(load(Model::new(2, &device), directory.path(), names), "it has no tensors");
}

/// The weights of GPT-2 have the inputs first in Python, too.
#[test]
fn weights_with_the_inputs_first() {
    let _alone = alone();
    let names = |path: &str| path.replace("head", "h.0.attn.c_proj").replace("columns", "score");
    let config = PeftConfig::from(&on_body()).with_modules_to_save(["c_proj", "score"]);
    let device = Device::flex().autodiff();
    let model = Model::new(1, &device).apply_lora(on_body()).map(&mut Shake);
    let directory = tempfile::tempdir().unwrap();
    let read = |name: &str| {
        WeightFile::open(directory.path().join("adapter_model.safetensors")).unwrap().read(name).unwrap()
    };
    let weight = "base_model.model.h.0.attn.c_proj.weight";
    save(&model, &config, directory.path(), names).unwrap();
    let head = model.head.weight.val();
    assert_eq!(read(weight), head.clone().transpose().into_data(), "a dense layer");

    let directory_config = directory.path().join("adapter_config.json");
    let text = std::fs::read_to_string(&directory_config).unwrap();
    std::fs::write(&directory_config, text.replace("\"fan_in_fan_out\": false", "\"fan_in_fan_out\": true"))
        .unwrap();
    let (swapped, config) = load(Model::new(2, &device), directory.path(), names).unwrap();
    assert_eq!(swapped.head.weight.val().into_data(), head.transpose().into_data(), "as it is stored");
    assert_eq!(swapped.columns.weight.val().into_data(), model.columns.weight.val().into_data());
    save(&swapped, &config, directory.path(), names).unwrap();
    assert_eq!(read(weight), swapped.head.weight.val().into_data());
}

/// A base in eight bits: factors and heads have the dtype of activations.
#[test]
fn a_quantized_base() {
    let _alone = alone();
    let (model, directory) = saved(PeftConfig::from(&on_body()).with_modules_to_save(["lm_head"]));
    let scheme = Device::flex().settings().quantization.scheme.with_value(QuantValue::Q8S);
    let mut quantizer = Quantizer::new(Calibration::MinMax, scheme);
    quantizer.set_param_group(ParamGroup::from_regex("(body|head).weight$").unwrap());
    let base = Model::new(2, &Device::flex()).quantize_weights(&mut quantizer);
    let (loaded, _) = load(base, directory.path(), names).unwrap();
    assert_eq!(loaded.head.weight.val().into_data(), model.head.weight.val().into_data());
    let x = Tensor::<2>::ones([2, WIDTH], &Device::flex());
    let adapter = loaded.body.weight.adapter().unwrap();
    let expected = x.clone().matmul(loaded.body.weight.base().dequantize())
        + loaded.body.bias.as_ref().unwrap().val().unsqueeze()
        + x.clone().matmul(adapter.a.val()).matmul(adapter.b.val()) * adapter.scale;
    loaded.body.forward(x).into_data().assert_approx_eq::<f32>(&expected.into_data(), Tolerance::default());
}

#[test]
fn the_values_of_a_file_are_those_of_its_module() {
    let _alone = alone();
    let (model, directory) = saved(PeftConfig::from(&on_body()).with_modules_to_save(["lm_head"]));
    // The same values by Burn's own store.
    let path = directory.path().join("whole.safetensors");
    let mut store = SafetensorsStore::from_file(&path).with_to_adapter(burn_store::BurnToPyTorchAdapter);
    model.head.clone().save_into(&mut store).unwrap();
    let of_burn = WeightFile::open(&path).unwrap().read("weight").unwrap();
    let file = WeightFile::open(directory.path().join("adapter_model.safetensors")).unwrap();
    assert_eq!(file.read("base_model.model.lm_head.weight").unwrap(), of_burn);
}
