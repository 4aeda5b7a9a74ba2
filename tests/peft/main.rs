//! Adapters in the files of Python's `peft`: there and back, what is refused, and `peft` itself where it is installed.
#![cfg(feature = "flex")]
use burn::module::{Lora, LoraAdapter, Module, ModuleMapper, Param, ParamGroup};
use burn::tensor::{Device, Distribution, Int, Tensor, TensorData};
use burn_memsave::lazy::{LazyLoad, LazyOptions, WeightFile};
use burn_memsave::lora::{ConvLora, Dora, DoraAdapter};
use burn_memsave::nn::conv::{Conv2d, Conv2dConfig, ConvTranspose2d, ConvTranspose2dConfig};
use burn_memsave::nn::{Embedding, EmbeddingConfig, Linear, LinearConfig};
use burn_memsave::peft::{load, save};
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
    let loaded = load(Model::new(&device), &path, names).unwrap();
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
    let inference = load(Model::new(&Device::flex()), &path, names).unwrap();
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
    let loaded = load(Model::new(&device), path, names).unwrap();
    assert_eq!(loaded.forward(), model.forward());
    for (loaded, model) in loaded.blocks.iter().zip(&model.blocks) {
        let [loaded, model] =
            [loaded, model].map(|block| block.weight.reparameterization::<DoraAdapter>().unwrap());
        assert_eq!(loaded.magnitude.val().into_data(), model.magnitude.val().into_data());
        assert!(loaded.magnitude.is_require_grad() && loaded.lora.a.is_require_grad());
    }
    let refused = |part: &str| {
        let error = load(Model::new(&device), path, names).expect_err(part).to_string();
        assert!(error.contains(part), "{error}, not {part}");
    };
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
    let error = save(&mixed, &lora, path, names).expect_err("both").to_string();
    assert!(error.contains("the adapter of conv: it is LoRA, but others are DoRA"), "{error}");
    let all = Model::new(&device).apply_reparameterization(Dora::new(lora.clone()));
    let error = save(&all, &lora, path, names).expect_err("an embedding").to_string();
    assert!(error.contains("for a Embedding with DoRA"), "{error}");
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
    let lazy = load(lazy, directory.path().join("adapter"), names).unwrap();
    assert_eq!(report.cache.statistics().reads, 0, "the factors need no weight");
    assert_eq!(lazy.forward(), model.forward());
    save(&lazy, &lora, directory.path().join("again"), names).unwrap();
    let [first, again] = ["adapter", "again"]
        .map(|name| fs::read(directory.path().join(name).join("adapter_model.safetensors")).unwrap());
    assert!(first == again);

    // The factors that a model without its adapters has are 0, of rank 1.
    let lora = Lora::new(1, 5.0);
    let reference = burn_memsave::lora::without_adapters(&lazy);
    let error = save(&reference, &lora, directory.path().join("reference"), names).expect_err("no magnitude");
    assert!(error.to_string().contains("it has no magnitude"), "{error}");
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
    let expected = load(base.clone(), directory.path().join("adapter"), names).unwrap().forward();
    base.save_file(&file).unwrap();
    let weights = WeightFile::open(&file).unwrap();
    let (lazy, _) = Model::new(&device).lazy_load(&weights, &LazyOptions::default()).unwrap();
    let lazy = load(lazy, directory.path().join("adapter"), names).unwrap();
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
        let model = load(Model::new(&device), path, names).unwrap();
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
    let error = load(Model::new(&device), path, names).expect_err("the rank is another").to_string();
    assert!(
        error.contains("the adapter of embed_tokens has the rank 4, its configuration says 7"),
        "{error}"
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
    let refused = |part: &str| {
        let error = load(Model::new(&device), path, names).expect_err(part).to_string();
        assert!(error.contains(part), "{error}, not {part}");
    };
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
        ("bias", json!("all"), "a trained bias"),
        ("fan_in_fan_out", json!(true), "fan_in_fan_out"),
        ("modules_to_save", json!(["head"]), "modules_to_save"),
        ("r", json!("many"), "adapter_config.json"),
        ("r", json!(5), "its configuration says 5"),
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
    refused("the adapter of layers.0 has the rank 6, its configuration says 4");
    replaced("[5,4]", "[4,5]");
    refused(
        "the adapter of layers.0 has the shapes [4, 6] and [4, 5], but the weight of blocks.0 needs [4, 6] and [5, 4]",
    );
    replaced("F32", "I32");
    refused("no float");
    write();
    let fewer = |_: &str| "elsewhere".to_string();
    let error = load(Model::new(&device), path, fewer).expect_err("no such module").to_string();
    assert!(error.contains("no module for base_model.model."), "{error}");
    let one = |_: &str| "conv".to_string();
    let error = load(Model::new(&device), path, one).expect_err("one name").to_string();
    assert!(error.contains("adapter"), "{error}");
    let error = load(adapted(&device, &lora), path, names).expect_err("it has some").to_string();
    assert!(error.contains("it is there already"), "{error}");
    #[derive(Module, Debug)]
    struct Positions {
        positions: Param<Tensor<2>>,
    }
    let positions = Positions { positions: Param::from_tensor(Tensor::ones([4, 4], &device)) };
    let error =
        save(&positions.apply_lora(lora.clone()), &lora, path, names).expect_err("no weight").to_string();
    assert!(error.contains("positions: it is not of a weight"), "{error}");
    let transposed = ConvTranspose2dConfig::new([2, 3], [2, 2]).init(&device);
    let transposed: ConvTranspose2d = transposed.apply_reparameterization(ConvLora::new(lora.clone()));
    let error = save(&transposed, &lora, path, names).expect_err("peft has none").to_string();
    assert!(error.contains("ConvTranspose2d"), "{error}");
    let error = save(&model, &lora, path, fewer).expect_err("one name").to_string();
    assert!(error.contains("elsewhere is there twice"), "{error}");
    let error = save(&model, &Lora::new(5, 1.0), path, names).expect_err("another rank").to_string();
    assert!(error.contains("it has the rank 4, but 5 is given"), "{error}");
    let error = save(&Model::new(&device), &lora, path, names).expect_err("no adapter").to_string();
    assert!(error.contains("no adapter"), "{error}");
    let error = save(&model, &lora, file.join("below"), names).expect_err("a file").to_string();
    assert!(error.contains("below"), "{error}");
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
        let loaded = load(Model::new(&device), path.join(theirs), names).unwrap();
        let expected = fs::read(path.join(format!("{theirs}.json"))).unwrap();
        let expected: Vec<f32> = serde_json::from_slice(&expected).unwrap();
        for (found, expected) in floats(loaded.forward()).into_iter().zip(expected) {
            assert!((found - expected).abs() < 1e-4, "{theirs}: {found}, {expected}");
        }
    }
}
