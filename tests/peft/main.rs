//! Adapters in the files of Python's `peft`: there and back, what is refused, and `peft` itself where it is installed.
#![cfg(feature = "flex")]

mod merged;
mod trained;

use burn::module::{Lora, LoraAdapter, Module, ModuleMapper, Param, ParamGroup};
use burn::tensor::{Device, Distribution, Int, Tensor, TensorData};
use burn_memsave::lazy::{LazyLoad, LazyOptions, RowOrder, RowOrders, WeightFile};
use burn_memsave::lora::{ConvLora, Dora, DoraAdapter};
use burn_memsave::nn::conv::{Conv2d, Conv2dConfig, ConvTranspose2d, ConvTranspose2dConfig};
use burn_memsave::nn::{Embedding, EmbeddingConfig, LayerNorm, LayerNormConfig, Linear, LinearConfig};
use burn_memsave::peft::{ModuleNames, PeftBias, PeftConfig, PeftError, load, save};
use serde_json::{Value, json};
use std::fs;
use std::io::{self, Write};
use std::path::Path;
use std::process::Command;
use std::sync::{Mutex, MutexGuard, PoisonError};

#[derive(Module, Debug)]
struct Model {
    embedding: Embedding,
    blocks: Vec<Linear>,
    conv: Conv2d,
}

impl Model {
    fn new(device: &Device) -> Self {
        device.seed(3);
        let linear = |[from, to]: [usize; 2]| LinearConfig::new(from, to).init(device);
        let model = Self {
            embedding: EmbeddingConfig::new(9, 6).init(device),
            blocks: [[6, 5], [5, 8]].map(linear).into(),
            conv: Conv2dConfig::new([1, 4], [3, 2]).init(device),
        };
        drop(model.forward()); // initializes the parameters
        model
    }

    fn forward(&self) -> TensorData {
        let tokens = Tensor::<1, Int>::arange(0..9, &self.conv.weight.device()).reshape([1, 9]);
        let x = self.blocks.iter().fold(self.embedding.forward(tokens), |x, block| block.forward(x).tanh());
        self.conv.forward(x.unsqueeze_dim(1)).into_data()
    }
}

/// Numbers are drawn from one generator.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The error says this.
fn assert_refused<T>(result: Result<T, PeftError>, part: &str) {
    let error = result.err().expect(part).to_string();
    assert!(error.contains(part), "{error}, not {part}");
}

fn names(path: &str) -> String {
    path.replace("blocks.", "layers.").replace("embedding", "embed_tokens")
}

/// Second factors are zero at first.
struct Shake;

impl ModuleMapper for Shake {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        match param.is_require_grad() {
            true => param.map(|value| {
                let shaken = value.clone().inner().random_like(Distribution::Normal(0.0, 1.0));
                shaken.autodiff().require_grad()
            }),
            false => param,
        }
    }
}

/// With DoRA on the dense layers.
fn with_dora(device: &Device, lora: &Lora) -> Model {
    let lora = lora.clone().set_param_group(ParamGroup::from_regex(r"^blocks\.\d\.weight$").unwrap());
    Model::new(device).apply_reparameterization(Dora::new(lora)).map(&mut Shake)
}

fn adapted(device: &Device, lora: &Lora) -> Model {
    let model = Model::new(device).apply_reparameterization(ConvLora::new(lora.clone()));
    model.map(&mut Shake)
}

fn adapters(model: &Model) -> [&LoraAdapter; 4] {
    let block = |index: usize| model.blocks[index].weight.adapter().unwrap();
    let [embedding, conv] =
        [model.embedding.weight.adapter(), model.conv.weight.adapter()].map(Option::unwrap);
    [embedding, block(0), block(1), conv]
}

#[test]
fn adapters_come_back() {
    let _alone = alone();
    let device = Device::flex().autodiff();
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("new").join("adapter");
    let lora = Lora::new(3, 5.0);
    let model = adapted(&device, &lora);
    save(&model, &lora, &path, names).unwrap();
    let (loaded, _) = load(Model::new(&device), &path, names).unwrap();
    assert_ne!(loaded.forward(), Model::new(&device).forward());
    assert_eq!(loaded.forward(), model.forward());
    for (loaded, model) in adapters(&loaded).into_iter().zip(adapters(&model)) {
        assert_eq!(loaded.scale, model.scale);
        assert!(loaded.a.is_require_grad() && loaded.b.is_require_grad());
        for (loaded, model) in [(&loaded.a, &model.a), (&loaded.b, &model.b)] {
            assert_eq!(loaded.val().into_data(), model.val().into_data());
        }
    }
    assert!(!loaded.blocks[0].weight.is_require_grad());
    // A base of another precision has factors of it.
    let (inference, _) = load(Model::new(&Device::flex()), &path, names).unwrap();
    assert_eq!(inference.forward(), model.forward());
}

#[test]
fn adapters_with_magnitudes_come_back() {
    let _alone = alone();
    let device = Device::flex().autodiff();
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path();
    let lora = Lora::new(3, 5.0);
    let model = with_dora(&device, &lora);
    save(&model, &lora, path, names).unwrap();
    let (loaded, _) = load(Model::new(&device), path, names).unwrap();
    assert_eq!(loaded.forward(), model.forward());
    for (loaded, model) in loaded.blocks.iter().zip(&model.blocks) {
        let [loaded, model] =
            [loaded, model].map(|block| block.weight.reparameterization::<DoraAdapter>().unwrap());
        assert_eq!(loaded.magnitude.val().into_data(), model.magnitude.val().into_data());
        assert!(loaded.magnitude.is_require_grad() && loaded.lora.a.is_require_grad());
    }
    let refused = |part: &str| assert_refused(load(Model::new(&device), path, names), part);
    let file = path.join("adapter_model.safetensors");
    let whole = fs::read(&file).unwrap();
    let text = String::from_utf8_lossy(&whole).into_owned();
    let at = text.find("0.lora_magnitude").expect("it is there");
    let mut bytes = whole.clone();
    bytes[at] = b'7';
    fs::write(&file, bytes).unwrap();
    refused("the adapter of layers.0 is DoRA without base_model.model.layers.0.lora_magnitude_vector");
    fs::write(&file, whole).unwrap();
    with_config(path, |config| config["use_dora"] = json!(false));
    refused("no module for base_model.model.layers.0.lora_magnitude_vector");
    // Of some layers only, and of an embedding.
    let mixed = Model { conv: adapted(&device, &lora).conv, ..with_dora(&device, &lora) };
    assert_refused(save(&mixed, &lora, path, names), "the adapter of conv: it is LoRA, but others are DoRA");
    let all = Model::new(&device).apply_reparameterization(Dora::new(lora.clone()));
    assert_refused(save(&all, &lora, path, names), "for a Embedding with DoRA");
}

/// Magnitudes come from the directory, not from the weight.
#[test]
fn lazy_weights_take_magnitudes() {
    let _alone = alone();
    let device = Device::flex().autodiff();
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("model.bpk");
    Model::new(&device).save_file(&file).unwrap();
    let lora = Lora::new(3, 5.0);
    let model = with_dora(&device, &lora);
    save(&model, &lora, directory.path().join("adapter"), names).unwrap();
    let weights = WeightFile::open(&file).unwrap();
    let options = LazyOptions::default().with_min_bytes(0);
    let (lazy, report) = Model::new(&device).lazy_load(&weights, &options).unwrap();
    let (lazy, _) = load(lazy, directory.path().join("adapter"), names).unwrap();
    assert_eq!(report.cache.statistics().reads, 0, "the factors need no weight");
    assert_eq!(lazy.forward(), model.forward());
    save(&lazy, &lora, directory.path().join("again"), names).unwrap();
    let [first, again] = ["adapter", "again"]
        .map(|name| fs::read(directory.path().join(name).join("adapter_model.safetensors")).unwrap());
    assert!(first == again);

    // The factors that a model without its adapters has are 0, of rank 1.
    let lora = Lora::new(1, 5.0);
    let reference = burn_memsave::lora::without_adapters(&lazy);
    assert_refused(save(&reference, &lora, directory.path().join("reference"), names), "it has no magnitude");
}

/// Weights that stay in their file have adapters, too.
#[test]
fn adapters_of_lazy_weights() {
    let _alone = alone();
    let device = Device::flex().autodiff();
    let directory = tempfile::tempdir().unwrap();
    let lora = Lora::new(3, 5.0);
    let model = adapted(&device, &lora);
    save(&model, &lora, directory.path().join("adapter"), names).unwrap();
    let file = directory.path().join("model.bpk");
    let base = Model::new(&device);
    let expected = load(base.clone(), directory.path().join("adapter"), names).unwrap().0.forward();
    base.save_file(&file).unwrap();
    let weights = WeightFile::open(&file).unwrap();
    let (lazy, _) = Model::new(&device).lazy_load(&weights, &LazyOptions::default()).unwrap();
    let (lazy, _) = load(lazy, directory.path().join("adapter"), names).unwrap();
    for (found, expected) in lazy.forward().iter::<f32>().zip(expected.iter::<f32>()) {
        assert!((found - expected).abs() < 1e-5, "{found}, {expected}");
    }
    save(&lazy, &lora, directory.path().join("again"), names).unwrap();
    let [first, again] = ["adapter", "again"]
        .map(|name| fs::read(directory.path().join(name).join("adapter_model.safetensors")).unwrap());
    assert!(first == again);
}

/// A directory with adapters, and changes to its configuration.
fn with_config(path: &Path, change: impl FnOnce(&mut Value)) {
    let file = path.join("adapter_config.json");
    let mut config: Value = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
    change(&mut config);
    fs::write(file, config.to_string()).unwrap();
}

#[test]
fn scales_of_configurations() {
    let _alone = alone();
    let device = Device::flex().autodiff();
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path();
    let lora = Lora::new(4, 6.0);
    save(&adapted(&device, &lora), &lora, path, names).unwrap();
    let scales = || {
        let (model, _) = load(Model::new(&device), path, names).unwrap();
        adapters(&model).map(|adapter| adapter.scale)
    };
    assert_eq!(scales(), [1.5; 4]);
    with_config(path, |config| config["use_rslora"] = json!(true));
    assert_eq!(scales(), [3.0; 4]);
    with_config(path, |config| config["alpha_pattern"] = json!({ r"layers\.\d": 8.0, "onv": 1.0 }));
    assert_eq!(scales(), [3.0, 4.0, 4.0, 3.0]);
    // Ranks may differ, but must be those of the tensors.
    with_config(path, |config| config["r"] = json!(7));
    with_config(path, |config| config["rank_pattern"] = json!({ ".*": 4 }));
    assert_eq!(scales(), [3.0, 4.0, 4.0, 3.0]);
    with_config(path, |config| config["rank_pattern"] = json!({ "conv": 4 }));
    assert_refused(
        load(Model::new(&device), path, names),
        "the adapter of embed_tokens: it has the rank 4, but its configuration says 7",
    );
}

#[test]
fn what_is_refused() {
    let _alone = alone();
    let device = Device::flex().autodiff();
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path();
    let lora = Lora::new(4, 6.0);
    let model = adapted(&device, &lora);
    let refused = |part: &str| assert_refused(load(Model::new(&device), path, names), part);
    refused("adapter_config.json");
    let write = || save(&model, &lora, path, names).unwrap();
    write();
    for (key, value, part) in [
        (
            "use_dora",
            json!(true),
            "the adapter of embed_tokens is DoRA, which is supported for dense layers only",
        ),
        ("peft_type", json!("IA3"), "peft_type IA3"),
        ("bias", json!("some"), "unknown variant `some`"),
        ("lora_bias", json!(true), "lora_bias is not supported"),
        ("trainable_token_indices", json!({ "embed_tokens": [1] }), "trainable_token_indices"),
        ("init_lora_weights", json!("lora_ga"), "init_lora_weights lora_ga, which changes the base, is"),
        ("r", json!("many"), "adapter_config.json"),
        ("r", json!(5), "but its configuration says 5"),
        ("rank_pattern", json!({ "(": 4 }), "the pattern ("),
        ("init_lora_weights", json!("pissa_niter_4"), "init_lora_weights pissa"),
        ("alora_invocation_tokens", json!([1, 2]), "alora_invocation_tokens"),
    ] {
        write();
        with_config(path, |config| config[key] = value);
        refused(part);
    }
    write();
    let file = path.join("adapter_model.safetensors");
    let whole = fs::read(&file).unwrap();
    for damaged in [&b""[..], b"{}", &whole[..whole.len() / 2], &[255; 64]] {
        fs::write(&file, damaged).unwrap();
        refused("adapter_model.safetensors");
    }
    let replaced = |from: &str, to: &str| {
        let text = String::from_utf8_lossy(&whole[8..]);
        let at = 8 + text.find(from).expect("it is there");
        let mut bytes = whole.clone();
        bytes[at..at + from.len()].copy_from_slice(to.as_bytes());
        fs::write(&file, bytes).unwrap();
    };
    replaced("[4,6]", "[]   ");
    refused("adapter_model.safetensors");
    replaced("layers.0.lora_A", "layers.7.lora_A");
    refused("layers.0 has only one of");
    replaced("[4,6]", "[6,4]");
    refused("the adapter of layers.0: it has the rank 6, but its configuration says 4");
    replaced("[5,4]", "[4,5]");
    refused(
        "the adapter of layers.0 has the shapes [4, 6] and [4, 5], but the weight of blocks.0 needs [4, 6] and [5, 4]",
    );
    replaced("F32", "I32");
    refused("no float");
    write();
    let fewer = |_: &str| "elsewhere".to_string();
    assert_refused(load(Model::new(&device), path, fewer), "no module for base_model.model.");
    let one = |_: &str| "conv".to_string();
    assert_refused(load(Model::new(&device), path, one), "adapter");
    assert_refused(load(adapted(&device, &lora), path, names), "it is there already");
    #[derive(Module, Debug)]
    struct Positions {
        positions: Param<Tensor<2>>,
    }
    let positions = Positions { positions: Param::from_tensor(Tensor::ones([4, 4], &device)) };
    assert_refused(
        save(&positions.apply_lora(lora.clone()), &lora, path, names),
        "positions: it is not of a weight",
    );
    let transposed = ConvTranspose2dConfig::new([2, 3], [2, 2]).init(&device);
    let transposed: ConvTranspose2d = transposed.apply_reparameterization(ConvLora::new(lora.clone()));
    assert_refused(save(&transposed, &lora, path, names), "ConvTranspose2d");
    assert_refused(save(&model, &lora, path, fewer), "elsewhere is there twice");
    assert_refused(
        save(&model, &Lora::new(5, 1.0), path, names),
        "it has the rank 4, but its configuration says 5",
    );
    assert_refused(save(&Model::new(&device), &lora, path, names), "no adapter");
    assert_refused(save(&model, &lora, file.join("below"), names), "below");
}

/// The same adapter gives the same in Python, and one that was made there does here.
#[test]
fn adapters_travel_to_python_and_back() {
    let python = std::env::var("PYTHON").unwrap_or_else(|_| "python3".into());
    let has_peft = Command::new(&python).args(["-c", "import peft, safetensors.torch"]).output();
    if !has_peft.is_ok_and(|output| output.status.success()) {
        // Not by a macro: what those print is captured, and not shown of a test that passes.
        let why = format!("skipped: {python} has no `peft` (`pip install peft`)\n");
        io::stderr().write_all(why.as_bytes()).unwrap();
        return;
    }
    let _alone = alone();
    let device = Device::flex().autodiff();
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path();
    let lora = Lora::new(3, 5.0);
    let model = adapted(&device, &lora);
    save(&model, &lora, path.join("ours"), names).unwrap();
    let dora = with_dora(&device, &lora);
    save(&dora, &lora, path.join("ours_dora"), names).unwrap();
    let floats = |data: TensorData| data.iter::<f32>().collect::<Vec<_>>();
    let weight = |data: TensorData, shape: &[usize]| json!({ "values": floats(data), "shape": shape });
    let [first, second] = [0, 1].map(|index: usize| &model.blocks[index]);
    let linear = |linear: &Linear| {
        let base = linear.weight.base();
        let [from, to] = base.dims();
        let bias = linear.bias.as_ref().expect("a bias").val();
        [weight(base.transpose().into_data(), &[to, from]), weight(bias.into_data(), &[to])]
    };
    let base = json!({
        "embedding": weight(model.embedding.weight.base().into_data(), &[9, 6]),
        "linear": [linear(first), linear(second)],
        "conv": [
            weight(model.conv.weight.base().into_data(), &[4, 1, 3, 2]),
            weight(model.conv.bias.as_ref().expect("a bias").val().into_data(), &[4]),
        ],
        "output": floats(model.forward()),
        "output_dora": floats(dora.forward()),
    });
    fs::write(path.join("base.json"), base.to_string()).unwrap();
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/peft/travel.py");
    let output = Command::new(&python).arg(script).arg(path).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    for theirs in ["theirs", "theirs_dora"] {
        let (loaded, _) = load(Model::new(&device), path.join(theirs), names).unwrap();
        let expected = fs::read(path.join(format!("{theirs}.json"))).unwrap();
        let expected: Vec<f32> = serde_json::from_slice(&expected).unwrap();
        for (found, expected) in floats(loaded.forward()).into_iter().zip(expected) {
            assert!((found - expected).abs() < 1e-4, "{theirs}: {found}, {expected}");
        }
    }
}

/// What Python writes that changes nothing: null for a default, the layout of the base, an empty list.
#[test]
fn what_changes_nothing_is_read() {
    let _alone = alone();
    let device = Device::flex().autodiff();
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path();
    let lora = Lora::new(4, 6.0);
    let model = adapted(&device, &lora);
    save(&model, &lora, path, names).unwrap();
    with_config(path, |config| {
        for (key, value) in [
            ("use_rslora", json!(null)),
            ("use_dora", json!(null)),
            ("fan_in_fan_out", json!(true)),
            ("modules_to_save", json!([])),
            ("rank_pattern", json!(null)),
            ("bias", json!(null)),
            ("trainable_token_indices", json!({})),
            ("alora_invocation_tokens", json!([])),
            ("lora_dropout", json!(0.25)),
            ("task_type", json!("CAUSAL_LM")),
            ("peft_version", json!("0.21.2")),
        ] {
            config[key] = value;
        }
    });
    let (loaded, config) = load(Model::new(&device), path, names).unwrap();
    assert_eq!(loaded.forward(), model.forward());
    assert_eq!((config.rank(), config.alpha(), config.dropout()), (4, 6.0, 0.25));
    assert_eq!((config.task_type(), config.base_model()), (Some("CAUSAL_LM"), None));
    // All of it goes back.
    save(&loaded, config.with_base_model("somebody/something"), path.join("again"), names).unwrap();
    let again: Value =
        serde_json::from_slice(&fs::read(path.join("again/adapter_config.json")).unwrap()).unwrap();
    assert_eq!(again["peft_version"], "0.21.2");
    assert_eq!(again["base_model_name_or_path"], "somebody/something");
    assert_eq!((&again["lora_dropout"], &again["fan_in_fan_out"]), (&json!(0.25), &json!(true)));
}

/// The first pattern of the file counts, not the first of the alphabet; and it is the first one again after it was saved.
#[test]
fn patterns_have_the_order_of_the_file() {
    let _alone = alone();
    let device = Device::flex().autodiff();
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path();
    let lora = Lora::new(4, 6.0);
    save(&adapted(&device, &lora), &lora, path, names).unwrap();
    let file = path.join("adapter_config.json");
    let text = fs::read_to_string(&file).unwrap();
    let patterns = r#""alpha_pattern": { "layers\\.1": 8, ".*": 2, "conv": 1 }"#;
    fs::write(&file, text.replace(r#""alpha_pattern": {}"#, patterns)).unwrap();
    let (loaded, config) = load(Model::new(&device), path, names).unwrap();
    let scales = adapters(&loaded).map(|adapter| adapter.scale);
    assert_eq!(scales, [0.5, 0.5, 2.0, 0.5]);
    save(&loaded, &config, path, names).unwrap();
    let (again, _) = load(Model::new(&device), path, names).unwrap();
    assert_eq!(adapters(&again).map(|adapter| adapter.scale), scales);
}

/// A stabilized scale comes back by the configuration that it came with, and several ranks by patterns.
#[test]
fn scales_and_ranks_go_back() {
    let _alone = alone();
    let device = Device::flex().autodiff();
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path();
    let lora = Lora::new(4, 6.0);
    save(&adapted(&device, &lora), PeftConfig::from(&lora).with_rank_stabilized(true), path, names).unwrap();
    let (loaded, config) = load(Model::new(&device), path, names).unwrap();
    assert_eq!(adapters(&loaded).map(|adapter| adapter.scale), [3.0; 4]);
    save(&loaded, &config, path, names).unwrap();
    let (again, _) = load(Model::new(&device), path, names).unwrap();
    assert_eq!(again.forward(), loaded.forward());

    let second = Lora::new(2, 1.0);
    let group = |pattern: &str| ParamGroup::from_regex(pattern).unwrap();
    let first_only = lora.clone().set_param_group(group(r"^blocks\.0\.weight$"));
    let both = Model::new(&device).apply_lora(first_only);
    let both = Model {
        blocks: vec![
            both.blocks[0].clone(),
            Model::new(&device).blocks[1].clone().apply_lora(second.clone()).map(&mut Shake),
        ],
        ..both
    };
    assert_refused(
        save(&both, &lora, path, names),
        "the adapter of blocks.1: it has the rank 2, but its configuration says 4",
    );
    save(&both, PeftConfig::from(&lora).with_lora(r"layers\.1", &second), path, names).unwrap();
    let (loaded, _) = load(Model::new(&device), path, names).unwrap();
    let scale = |index: usize| loaded.blocks[index].weight.adapter().unwrap().scale;
    assert_eq!([scale(0), scale(1)], [1.5, 0.5]);
}

/// A head, norms and biases that were trained beside adapters travel with them, and stay trainable.
#[test]
fn what_was_trained_beside_adapters_comes_back() {
    #[derive(Module, Debug)]
    struct Classifier {
        body: Linear,
        norm: LayerNorm,
        head: Linear,
        other: Linear,
    }
    let _alone = alone();
    let device = Device::flex().autodiff();
    let new = |seed: u64| {
        device.seed(seed);
        let linear = |outputs: usize| LinearConfig::new(6, outputs).init(&device);
        let model = Classifier {
            body: linear(6),
            norm: LayerNormConfig::new(6).init(&device),
            head: linear(3),
            other: linear(2),
        };
        model.map(&mut Shake) // norms begin with ones
    };
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path();
    let lora = Lora::new(2, 4.0).set_param_group(ParamGroup::from_regex(r"^body\.weight$").unwrap());
    let trained = new(1).apply_lora(lora.clone()).map(&mut Shake);
    let config = PeftConfig::from(&lora).with_modules_to_save(["head", "norm"]).with_bias(PeftBias::LoraOnly);
    let names = |path: &str| format!("model.{path}");
    save(&trained, &config, path, names).unwrap();
    let file = WeightFile::open(path.join("adapter_model.safetensors")).unwrap();
    let found: Vec<_> =
        file.tensors().map(|t| t.name.trim_start_matches("base_model.model.model.")).collect();
    let factors = ["body.lora_A.weight", "body.lora_B.weight"];
    let expected = ["body.base_layer.bias", factors[0], factors[1], "head.bias", "head.weight"];
    assert_eq!(found[..5], expected);
    assert_eq!(found[5..], ["norm.bias", "norm.weight"]);
    // PyTorch's layout.
    assert_eq!(file.read("base_model.model.model.head.weight").unwrap().shape()[..], [3, 6]);

    let (loaded, config) = load(new(2), path, names).unwrap();
    assert_eq!(config.modules_to_save(), ["head", "norm"]);
    let values = |param: &Param<Tensor<1>>| param.val().into_data();
    let bias = |layer: &Linear| values(layer.bias.as_ref().unwrap());
    assert_eq!(bias(&loaded.body), bias(&trained.body));
    assert_eq!(bias(&loaded.head), bias(&trained.head));
    assert_eq!(loaded.head.weight.val().into_data(), trained.head.weight.val().into_data());
    assert_eq!(values(&loaded.norm.gamma), values(&trained.norm.gamma));
    assert_ne!(bias(&loaded.other), bias(&trained.other));
    assert!(loaded.head.weight.is_require_grad() && loaded.norm.gamma.is_require_grad());
    assert!(loaded.body.bias.as_ref().unwrap().is_require_grad());
    assert!(!loaded.other.weight.is_require_grad() && !loaded.body.weight.base().is_require_grad());

    // Of a base that stays in its file, what was trained must be left out.
    let base = path.join("base.bpk");
    new(2).save_file(&base).unwrap();
    let lazy = |options: LazyOptions| {
        new(2).lazy_load(&WeightFile::open(&base).unwrap(), &options.with_min_bytes(0)).unwrap().0
    };
    assert_refused(
        load(lazy(LazyOptions::new()), path, names),
        "head.weight has values of its own, but head.weight is lazy",
    );
    let (lazy, _) = load(lazy(LazyOptions::new().exclude("head")), path, names).unwrap();
    assert_eq!(lazy.head.weight.val().into_data(), trained.head.weight.val().into_data());
}

/// Rows of a weight that were reordered when it was loaded: so are those of factors, magnitudes and biases, and back in the file.
#[test]
fn rows_are_reordered_as_those_of_the_weight() {
    #[derive(Module, Debug)]
    struct Attention {
        query: Linear,
        value: Linear,
    }
    let _alone = alone();
    let device = Device::flex().autodiff();
    let new = || {
        device.seed(1);
        let linear = || LinearConfig::new(6, 8).init(&device);
        Attention { query: linear(), value: linear() }
    };
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path();
    let pairs = RowOrder::rotary_pairs(4);
    let names = |path: &str| path.to_string();
    let reordered = || names.with_row_orders(RowOrders::new().with("^query$", pairs).unwrap());
    // Columns of Burn's layout are rows of PyTorch's: in a head of 4, column 1 here is row 2 there.
    let there = |data: TensorData| {
        let [values, columns] = [data.iter::<f32>().collect::<Vec<_>>(), vec![0.0; 8]];
        let rows = values.chunks_exact(8).flat_map(|row| {
            let mut columns = columns.clone();
            for (at, value) in row.iter().enumerate() {
                columns[at / 4 * 4 + [0, 2, 1, 3][at % 4]] = *value;
            }
            columns
        });
        rows.collect::<Vec<_>>()
    };
    let floats = |data: TensorData| data.iter::<f32>().collect::<Vec<_>>();
    let lora = Lora::new(2, 4.0);
    let config = PeftConfig::from(&lora).with_bias(PeftBias::All);
    for model in [
        new().apply_lora(lora.clone()).map(&mut Shake),
        new().apply_reparameterization(Dora::new(lora.clone())).map(&mut Shake),
    ] {
        save(&model, &config, path, reordered()).unwrap();
        let (back, _) = load(new(), path, reordered()).unwrap();
        let (as_there, _) = load(new(), path, names).unwrap();
        let of = |linear: &Linear| {
            let dora = linear.weight.reparameterization::<DoraAdapter>();
            let magnitude = dora.map(|dora| dora.magnitude.val().into_data());
            let lora = dora.map(|dora| &dora.lora).or(linear.weight.adapter()).unwrap();
            [Some(lora.b.val().into_data()), magnitude, Some(linear.bias.as_ref().unwrap().val().into_data())]
        };
        assert_eq!(of(&back.query), of(&model.query));
        assert_eq!(of(&back.value), of(&model.value));
        assert_eq!(of(&as_there.value), of(&model.value));
        for (found, here) in of(&as_there.query).into_iter().zip(of(&model.query)) {
            assert_eq!(found.map(floats), here.map(there));
        }
    }
    let odd = names.with_row_orders(RowOrders::new().with("query", RowOrder::rotary_pairs(6)).unwrap());
    assert_refused(load(new(), path, odd), "the adapter of query: 8 outputs are no heads of 6 features");
}

/// Older versions of `peft` write a pickle; a directory may have several adapters in folders.
#[test]
fn directories_as_people_have_them() {
    let _alone = alone();
    let device = Device::flex().autodiff();
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path();
    let lora = Lora::new(3, 5.0);
    for name in ["first", "second"] {
        save(&adapted(&device, &lora), &lora, path.join(name), names).unwrap();
    }
    assert_refused(load(Model::new(&device), path, names), "there is none, but in the folders first, second");
    fs::remove_file(path.join("first/adapter_model.safetensors")).unwrap();
    assert_refused(load(Model::new(&device), path.join("first"), names), "adapter_model.safetensors");
    // Another kind has other fields.
    let other = json!({ "peft_type": "IA3", "target_modules": ["q"] });
    fs::write(path.join("second/adapter_config.json"), other.to_string()).unwrap();
    assert_refused(
        load(Model::new(&device), path.join("second"), names),
        "peft_type IA3 is not supported: only LORA is",
    );
}
