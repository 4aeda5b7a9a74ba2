//! Networks for text with the weights of checkpoints of Hugging Face compute what Python's `transformers` computes, and load what it
//! writes or say why not.
#![recursion_limit = "256"]
use burn::module::{Lora, Module, ModuleMapper, ModuleVisitor, Param, ParamGroup};
use burn::tensor::{DType, Device, Distribution, Int, Tensor, TensorData};
use burn_memsave::lazy::{LazyOptions, WeightFile};
use burn_memsave::nn as memsave_nn;
use burn_memsave::peft::PeftConfig;
use burn_memsave_models::hugging_face::{
    HuggingFace, LoadError, check_adapters, lazy_load, load, load_adapters, save_adapters, save_merged,
};
use burn_memsave_models::{
    Decoder, DecoderSize, Encoder, EncoderDecoder, EncoderSize, Experts, Gpt2Size, RotaryStretch, T5Size,
    memsave, stock,
};
use serde_json::Value;
use std::fs;
use std::path::Path;

mod python;

/// Of one checkpoint, and what is to come out.
struct Expected {
    device: Device,
    values: Value,
}

impl Expected {
    fn read(path: &Path) -> Self {
        let values = std::fs::read(path.join("expected.json")).unwrap();
        Self { device: Device::flex().autodiff(), values: serde_json::from_slice(&values).unwrap() }
    }

    fn tokens(&self, name: &str) -> Tensor<2, Int> {
        let rows: Vec<Vec<i64>> = serde_json::from_value(self.values[name].clone()).unwrap();
        let shape = [rows.len(), rows[0].len()];
        Tensor::from_data(TensorData::new(rows.concat(), shape), &self.device)
    }

    fn compare(&self, outputs: Tensor<3>) {
        let expected: Vec<f32> = serde_json::from_value(self.values["outputs"].clone()).unwrap();
        let every = self.values["every"].as_u64().unwrap() as usize;
        let outputs: Vec<f32> = outputs.into_data().iter::<f32>().step_by(every).collect();
        assert_eq!(outputs.len(), expected.len());
        let largest = expected.iter().fold(0.0f32, |largest, x| largest.max(x.abs()));
        let off = outputs.iter().zip(&expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        println!("off by {:.1e} of the largest", off / largest);
        assert!(off <= 1e-5 * largest, "off by {off}, the largest is {largest}");
    }
}

fn encoder<M: Encoder + HuggingFace>(path: &Path, size: EncoderSize) {
    let expected = Expected::read(path);
    let model = load(M::new(&size, &expected.device), path).unwrap();
    expected.compare(model.forward(expected.tokens("input_ids")));
}

fn decoder<M: Decoder + HuggingFace>(path: &Path, size: M::Size) {
    let expected = Expected::read(path);
    let model = load(M::new(&size, &expected.device), path).unwrap();
    expected.compare(model.logits(expected.tokens("input_ids")));
    // Weights that stay in the file.
    let lazy = LazyOptions::new().with_min_bytes(0);
    let (model, report) = lazy_load(M::new(&size, &expected.device), path, &lazy).unwrap();
    assert!(report.lazy.len() > 4);
    expected.compare(model.logits(expected.tokens("input_ids")));
}

fn encoder_decoder<M: EncoderDecoder + HuggingFace>(path: &Path) {
    let expected = Expected::read(path);
    let model = load(M::new(&T5Size::TINY, &expected.device), path).unwrap();
    let [source, tokens] = ["input_ids", "decoder_input_ids"].map(|name| expected.tokens(name));
    expected.compare(model.logits(source, tokens));
}

/// Files that `transformers` wrote are committed.
#[test]
fn networks_compute_what_transformers_did() {
    networks_compute_what_is_expected(&Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/checkpoints"));
}

/// The `transformers` that is installed writes files that are read, and computes the same.
#[test]
fn networks_compute_what_transformers_does() {
    let Some(python) = python::with(&["torch", "transformers", "safetensors"]) else { return };
    let directory = tempfile::tempdir().unwrap();
    python::run(&python, "hugging_face.py", &[], directory.path());
    networks_compute_what_is_expected(directory.path());
}

/// Adapters that `peft` made on networks of `transformers` compute the same here, and those that are saved here the same there.
#[test]
fn adapters_of_peft_travel_both_ways() {
    let Some(python) = python::with(&["torch", "transformers", "safetensors", "peft"]) else { return };
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path();
    python::run(&python, "adapters.py", &["theirs"], path);
    let logits =
        |model: &memsave::gpt2::Gpt2, expected: &Expected| model.logits(expected.tokens("input_ids"));
    travel(
        &path.join("gpt2"),
        "CAUSAL_LM",
        |device| memsave::gpt2::Gpt2::new(&Gpt2Size::TINY, device),
        logits,
    );
    let bert = EncoderSize::BERT_BASE.tiny();
    let features =
        |model: &memsave::bert::Bert, expected: &Expected| model.forward(expected.tokens("input_ids"));
    travel(
        &path.join("bert"),
        "FEATURE_EXTRACTION",
        |device| memsave::bert::Bert::new(&bert, device),
        features,
    );
    let llama = DecoderSize { width: 48, length: 64, ..DecoderSize::MISTRAL_7B.tiny() };
    let logits =
        |model: &memsave::decoder::Llama, expected: &Expected| model.logits(expected.tokens("input_ids"));
    travel(&path.join("llama"), "CAUSAL_LM", |device| memsave::decoder::Llama::new(&llama, device), logits);
    let experts = DecoderSize::MIXTRAL_8X7B.tiny().experts;
    let mixtral = DecoderSize { experts: experts.map(|experts| Experts { hidden: 40, ..experts }), ..llama };
    travel(
        &path.join("mixtral"),
        "CAUSAL_LM",
        |device| memsave::decoder::Llama::new(&mixtral, device),
        logits,
    );
    let logits = |model: &memsave::t5::T5, expected: &Expected| {
        model.logits(expected.tokens("input_ids"), expected.tokens("decoder_input_ids"))
    };
    travel(&path.join("t5"), "SEQ_2_SEQ_LM", |device| memsave::t5::T5::new(&T5Size::TINY, device), logits);
    python::run(&python, "adapters.py", &["ours"], path);
}

/// Loads all adapters of a network in `path`, compares what they compute, and saves them again beside one of our own.
fn travel<M: HuggingFace>(
    path: &Path,
    task: &str,
    new: impl Fn(&Device) -> M,
    outputs: impl Fn(&M, &Expected) -> Tensor<3>,
) {
    let base_path = path.join("base");
    let expected = Expected::read(&base_path);
    let base = load(new(&expected.device), &base_path).unwrap();
    expected.compare(outputs(&base, &expected));
    let entries = fs::read_dir(path).unwrap().map(|entry| entry.unwrap().path());
    let adapters: Vec<_> = entries.filter(|entry| *entry != base_path).collect();
    assert!(adapters.len() > 1);
    for adapter in adapters {
        println!("{}", adapter.display());
        let expected = Expected::read(&adapter);
        let (adapted, config) = load_adapters(base.clone(), &adapter).unwrap();
        expected.compare(outputs(&adapted, &expected));
        let name = format!("ours_{}", adapter.file_name().unwrap().to_string_lossy());
        save_adapters(&adapted, &config, path.join(&name)).unwrap();
        fs::copy(adapter.join("expected.json"), path.join(&name).join("expected.json")).unwrap();
        // On weights that stay in their file, where none of them was trained.
        let lazy = LazyOptions::new().with_min_bytes(0);
        let (lazy, _) = lazy_load(new(&expected.device), &base_path, &lazy).unwrap();
        match load_adapters(lazy, &adapter) {
            Ok((lazy, _)) => expected.compare(outputs(&lazy, &expected)),
            Err(error) => {
                assert!(error.to_string().contains("is lazy"), "{error}");
                assert_eq!(name, "ours_saved");
            }
        }
    }

    let lora = Lora::new(3, 5.0).set_param_group(ParamGroup::from_regex(r"attention|mha").unwrap());
    let config = PeftConfig::from(&lora).with_task_type(task);
    let config = config.with_base_model(base_path.to_string_lossy());
    expected.device.seed(7);
    let ours = base.apply_lora(lora).map(&mut Shake);
    let theirs = path.join("ours");
    save_adapters(&ours, &config, &theirs).unwrap();
    let mut values = expected.values.clone();
    let every = values["every"].as_u64().unwrap() as usize;
    let found: Vec<f32> = outputs(&ours, &expected).into_data().iter::<f32>().step_by(every).collect();
    values["outputs"] = serde_json::to_value(found).unwrap();
    fs::write(theirs.join("expected.json"), values.to_string()).unwrap();
}

/// Second factors are zero at first.
struct Shake;

impl ModuleMapper for Shake {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        match param.is_require_grad() {
            true => param.map(|value| {
                let shaken = value.inner().random_like(Distribution::Normal(0.0, 0.2));
                shaken.autodiff().require_grad()
            }),
            false => param,
        }
    }
}

/// In Python, the head of a tied model stays as it was when its embedding is trained.
#[test]
fn adapters_of_embeddings_that_are_heads_are_refused() {
    let directory = tempfile::tempdir().unwrap();
    let save = |size: DecoderSize, config: PeftConfig, of: &str| {
        let lora = Lora::new(2, 2.0).set_param_group(ParamGroup::from_regex(of).unwrap());
        let model = memsave::decoder::Llama::new(&size, &Device::flex().autodiff()).apply_lora(lora);
        save_adapters(&model, config, directory.path()).map_err(|error| error.to_string())
    };
    let (config, words) = (|| PeftConfig::new(2, 2.0), r"^words\.weight$|query\.weight$");
    let tied = DecoderSize::LLAMA_3_2_1B.tiny();
    let refused = |saved: Result<(), String>| assert!(saved.unwrap_err().contains("have the same weight"));
    refused(save(tied, config(), words));
    refused(save(tied, config().with_modules_to_save(["embed_tokens"]), r"query\.weight$"));
    save(tied, config(), r"query\.weight$").unwrap();
    save(DecoderSize { tied: false, ..tied }, config(), words).unwrap();

    // In T5s, the table of the encoder is that of the decoder, with any head.
    let device = Device::flex().autodiff();
    let lora = |of: &str| Lora::new(2, 2.0).set_param_group(ParamGroup::from_regex(of).unwrap());
    for size in [T5Size::TINY, T5Size { tied: false, ..T5Size::TINY }] {
        let check = |of: &str, config: PeftConfig| {
            let model = memsave::t5::T5::new(&size, &device).apply_lora(lora(of));
            check_adapters(&model, config).map_err(|error| error.to_string())
        };
        refused(check(words, config()));
        refused(check(r"query\.weight$", config().with_modules_to_save(["shared"])));
        check(r"query\.weight$|bias\.weight$", config()).unwrap();
        let encoder = memsave::t5::T5Encoder::new(&size, &device).apply_lora(lora(words));
        refused(check_adapters(&encoder, config()).map_err(|error| error.to_string()));
    }
}

/// With version 5 of `transformers`, `peft` takes feed-forward layers for parts of joined experts, and drops their adapters.
#[test]
fn adapters_of_experts_are_refused() {
    let directory = tempfile::tempdir().unwrap();
    let (path, device) = (directory.path(), Device::flex().autodiff());
    let qwen3 = DecoderSize::QWEN3_30B_A3B.tiny();
    let experts = qwen3.experts.unwrap();
    let qwen2 = Experts { shared: Some(20), every: 2, ..experts };
    let sizes = [
        DecoderSize::MIXTRAL_8X7B.tiny(),
        qwen3,
        DecoderSize { experts: Some(qwen2), normalizes_heads: false, ..qwen3 },
    ];
    let adapted = |size: DecoderSize, of: &str| {
        let lora = Lora::new(2, 2.0).set_param_group(ParamGroup::from_regex(of).unwrap());
        memsave::decoder::Llama::new(&size, &device).apply_lora(lora)
    };
    let config = || PeftConfig::new(2, 2.0);
    for size in sizes {
        let attention = adapted(size, r"attention\..*\.weight$");
        check_adapters(&attention, config()).unwrap();
        save_adapters(&attention, config(), path).unwrap();
        let mut layers = vec!["1.mixture.experts.3.down", "1.mixture.router"];
        if size.experts == Some(qwen2) {
            // One that is for all tokens, and one in a block without experts.
            layers.extend(["1.mixture.shared.gate.linear_inner", "0.gate.linear_inner"]);
        }
        for layer in layers {
            let model = adapted(size, &format!(r"^blocks\.{layer}\.weight$"));
            let error = check_adapters(&model, config()).unwrap_err().to_string();
            assert!(error.starts_with(&format!("the adapter of blocks.{layer}: ")), "{error}");
            assert!(error.contains("no adapters of feed-forward layers"), "{error}");
            assert_eq!(save_adapters(&model, config(), path).unwrap_err().to_string(), error);
            save_merged(&model, config(), path, DType::F32).unwrap();
        }
    }
}

/// Some files of T5 have the table of words under other names, which must have the same numbers.
#[test]
fn tables_of_words_of_t5() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/checkpoints/t5");
    let expected = Expected::read(&path);
    let open = || WeightFile::open(&path).unwrap();
    let load = |size: &T5Size, file: WeightFile| {
        memsave::t5::T5::from_file(size, file, &LazyOptions::new(), &expected.device)
    };
    let renamed = open().with_key_remapping(r"^shared\.", "encoder.embed_tokens.").unwrap();
    let (model, _) = load(&T5Size::TINY, renamed.clone()).unwrap();
    expected.compare(model.logits(expected.tokens("input_ids"), expected.tokens("decoder_input_ids")));
    let encoder = |size: &T5Size, file: WeightFile| {
        memsave::t5::T5Encoder::from_file(size, file, &LazyOptions::new(), &expected.device)
    };
    encoder(&T5Size::TINY, renamed).unwrap();

    let size = T5Size { vocabulary: 40, ..T5Size::TINY };
    let with = |name: &str, first: usize| {
        let tables = [("shared.", 0..40), (name, first..first + 40)];
        open().with_rows(r"^shared\.", &tables).unwrap()
    };
    for name in ["encoder.embed_tokens.", "decoder.embed_tokens."] {
        load(&size, with(name, 0)).unwrap();
        encoder(&size, with(name, 0)).unwrap();
        let unused = format!("{name}weight");
        refused(load(&size, with(name, 10)), &[], &[&unused[..]]);
    }
    refused(encoder(&size, with("encoder.embed_tokens.", 10)), &[], &["encoder.embed_tokens.weight"]);
    // It reads no weight of the decoder.
    encoder(&size, with("decoder.embed_tokens.", 10)).unwrap();
    // Another head is used.
    let (model, _) = load(&size, with("lm_head.", 10)).unwrap();
    let tokens = Tensor::<2, Int>::from_ints([[1, 2, 3]], &expected.device);
    assert_eq!(model.logits(tokens.clone(), tokens).dims(), [1, 3, 40]);
}

/// Phi-3 has one layer where there are three here.
#[test]
fn adapters_of_parts_of_layers_are_refused() {
    let directory = tempfile::tempdir().unwrap();
    let (path, device) = (directory.path(), Device::flex().autodiff());
    let adapted = |size: DecoderSize, of: &str| {
        let lora = Lora::new(2, 2.0).set_param_group(ParamGroup::from_regex(of).unwrap());
        (memsave::decoder::Llama::new(&size, &device).apply_lora(lora), PeftConfig::new(2, 2.0))
    };
    let phi3 = DecoderSize::PHI_3_MINI_4K.tiny();
    for (of, whole) in [(r"query\.weight$", "`qkv_proj`"), (r"linear_outer\.weight$", "`gate_up_proj`")] {
        let (model, config) = adapted(phi3, of);
        let error = save_adapters(&model, config, path).unwrap_err().to_string();
        assert!(error.contains(whole), "{error}");
    }
    let of = r"output\.weight$";
    let (model, config) = adapted(phi3, of);
    save_adapters(&model, config.clone(), path).unwrap();
    assert!(save_merged(&model, config, path, DType::F32).unwrap_err().to_string().contains("`qkv_proj`"));
    let (model, config) = adapted(DecoderSize { joined: false, ..phi3 }, of);
    save_merged(&model, config, path, DType::F32).unwrap();
}

/// A joined layer with more rows than the parts that are taken from it.
#[test]
fn joined_layers_have_the_rows_of_their_parts() {
    #[derive(Module, Debug)]
    struct Joined {
        layers: Vec<Block>,
    }
    #[derive(Module, Debug)]
    struct Block {
        self_attn: Attention,
    }
    #[derive(Module, Debug)]
    struct Attention {
        qkv_proj: memsave_nn::Linear,
    }
    let directory = tempfile::tempdir().unwrap();
    let (path, device) = (directory.path().join("model.bpk"), Device::flex());
    let size = DecoderSize::PHI_3_MINI_4K.tiny();
    for (rows, refused) in [(6 * 4 + 2 * 2 * 4, false), (6 * 4 + 3 * 2 * 4, true), (6 * 4, true)] {
        let qkv_proj = memsave_nn::LinearConfig::new(rows, 24).with_bias(false).init(&device);
        Joined { layers: vec![Block { self_attn: Attention { qkv_proj } }] }.save_file(&path).unwrap();
        let error = load(memsave::decoder::Llama::new(&size, &device), &path).unwrap_err().to_string();
        // If it can be split, others are missing.
        assert_eq!(error.contains("attention.query, attention.key"), refused, "{error}");
    }
}

/// What is in the directories of a directory.
fn networks_compute_what_is_expected(directory: &Path) {
    let at = |name: &str| directory.join(name);

    for name in ["bert", "bert_old"] {
        encoder::<stock::bert::Bert>(&at(name), EncoderSize::BERT_BASE.tiny());
        encoder::<memsave::bert::Bert>(&at(name), EncoderSize::BERT_BASE.tiny());
    }
    encoder::<stock::bert::Bert>(&at("roberta"), EncoderSize::ROBERTA_BASE.tiny());
    encoder::<memsave::bert::Bert>(&at("roberta"), EncoderSize::ROBERTA_BASE.tiny());
    for name in ["gpt2", "gpt2_old"] {
        decoder::<stock::gpt2::Gpt2>(&at(name), Gpt2Size::TINY);
        decoder::<memsave::gpt2::Gpt2>(&at(name), Gpt2Size::TINY);
    }
    for name in ["t5", "t5_old"] {
        encoder_decoder::<stock::t5::T5>(&at(name));
        encoder_decoder::<memsave::t5::T5>(&at(name));
    }
    let stretch = RotaryStretch::Llama3 { factor: 4.0, low: 1.0, high: 4.0, original_length: 64.0 };
    let [llama, mistral] = [DecoderSize::LLAMA_3_2_1B, DecoderSize::MISTRAL_7B].map(|size| DecoderSize {
        width: 48,
        length: 64,
        ..size.tiny()
    });
    let llama = DecoderSize { theta: 100.0, stretch: Some(stretch), ..llama };
    decoder::<stock::decoder::Llama>(&at("llama"), llama);
    decoder::<memsave::decoder::Llama>(&at("llama"), llama);
    for name in ["mistral", "llama_old"] {
        decoder::<stock::decoder::Llama>(&at(name), mistral);
        decoder::<memsave::decoder::Llama>(&at(name), mistral);
    }

    // A head that is not there, and one that is not expected.
    let device = Device::flex();
    let new = |size| memsave::decoder::Llama::new(&size, &device);
    refused(load(new(DecoderSize { tied: false, ..llama }), at("llama")), &["head.weight"], &[]);
    refused(load(new(DecoderSize { tied: true, ..mistral }), at("mistral")), &[], &["head.weight"]);
}

fn refused<M>(loaded: Result<M, LoadError>, expected_missing: &[&str], expected_unused: &[&str]) {
    match loaded {
        Err(LoadError::Names { missing, unused, .. }) => {
            assert_eq!(
                (&missing[..], &unused[..]),
                (&owned(expected_missing)[..], &owned(expected_unused)[..])
            );
        }
        Err(other) => panic!("{other}"),
        Ok(_) => panic!("loaded"),
    }
}

fn owned(names: &[&str]) -> Vec<String> {
    names.iter().map(|name| name.to_string()).collect()
}

/// Networks are trained from the weights of a checkpoint on.
struct Trained;

impl ModuleVisitor for Trained {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        assert!(param.is_require_grad() && param.val().is_require_grad());
    }
}

/// What the file has must be what the network has.
#[test]
fn what_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("model.bpk");
    let device = Device::flex().autodiff();
    let new = |size| memsave::gpt2::Gpt2::new(&size, &device);
    let model = new(Gpt2Size::TINY);
    model.clone().save_file(&path).unwrap();
    let loaded = load(new(Gpt2Size::TINY), &path).unwrap();
    let tokens = Tensor::<1, Int>::arange(0..12, &device).reshape([1, 12]);
    assert_eq!(loaded.logits(tokens.clone()).into_data(), model.logits(tokens).into_data());
    loaded.visit(&mut Trained);

    let block = |number: usize| -> Vec<String> {
        ["attention.output", "attention.qkv", "inner", "norm_1", "norm_2", "outer"]
            .into_iter()
            .flat_map(|layer| match layer.starts_with("norm") {
                true => ["beta", "gamma"].map(|name| format!("blocks.{number}.{layer}.{name}")),
                false => ["bias", "weight"].map(|name| format!("blocks.{number}.{layer}.{name}")),
            })
            .collect()
    };
    let names = |loaded: Result<_, LoadError>| match loaded {
        Err(LoadError::Names { mut missing, mut unused, .. }) => {
            missing.sort();
            unused.sort();
            (missing, unused)
        }
        Err(other) => panic!("{other}"),
        Ok(_) => panic!("loaded"),
    };
    let deeper = load(new(Gpt2Size { layers: 3, ..Gpt2Size::TINY }), &path);
    assert!(deeper.as_ref().is_err_and(|error| error.to_string().contains("blocks.2.norm_1.gamma")));
    assert_eq!(names(deeper), (block(2), vec![]));
    let flatter = load(new(Gpt2Size { layers: 1, ..Gpt2Size::TINY }), &path);
    assert!(flatter.as_ref().is_err_and(|error| error.to_string().contains("blocks.1.norm_1.gamma")));
    assert_eq!(names(flatter), (vec![], block(1)));
    let wider = load(new(Gpt2Size { width: 48, ..Gpt2Size::TINY }), &path);
    assert!(wider.is_err_and(|error| error.to_string().contains("[50, 24]")));
    let nothing = load(new(Gpt2Size::TINY), directory.path().join("nothing"));
    assert!(nothing.is_err_and(|error| error.to_string().contains("nothing")));
}
