//! Fine-tuning with weights that stay in their file: adapters that Python's `peft` trains on, and that come back.
#![recursion_limit = "256"]
use burn::module::{Lora, Module, ModuleMapper, Param, ParamGroup};
use burn::optim::{GradientsParams, SgdConfig};
use burn::tensor::activation::log_softmax;
use burn::tensor::{DType, Device, Distribution, Int, Tensor, Tolerance};
use burn_memsave::lazy::{LazyLoad, LazyOptions, WeightFile};
use burn_memsave::lora::Dora;
use burn_memsave::peft::PeftConfig;
use burn_memsave_models::fused::decoder::Llama;
use burn_memsave_models::hugging_face::{self, HuggingFace, load_adapters, save_adapters, save_merged};
use burn_memsave_models::memsave::{gpt2::Gpt2, gptj::GptJ};
use burn_memsave_models::{
    Biases, Decoder, DecoderSize, EncoderDecoder, Experts, Gpt2Size, GptJSize, T5Size, fused, memsave,
};
use std::fs;
use std::path::Path;

mod python;

const STEPS: usize = 4;
/// Two texts, of which the second ends with padding, and begins with a question that is not learned.
const TOKENS: [[i64; 9]; 2] = [[1, 17, 4, 29, 33, 8, 2, 45, 6], [1, 9, 30, 7, 21, 2, 0, 0, 0]];
const COUNTS: [[f32; 8]; 2] = [[1.0; 8], [0.0, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0]];

/// The loss before every step, and after the last one.
fn train<M: Decoder>(mut model: M, learning_rate: f64, device: &Device) -> (M, Vec<f32>) {
    let mut optimizer = SgdConfig::new().init();
    let tokens = Tensor::<2, Int>::from_data(TOKENS, device);
    let [now, next] = [0, 1].map(|first| tokens.clone().narrow(1, first, 8));
    let counts = Tensor::<2>::from_data(COUNTS, device);
    let loss = |model: &M| model.loss_of_some(now.clone(), next.clone(), counts.clone());
    let mut losses = vec![];
    for _ in 0..STEPS {
        let loss = loss(&model);
        losses.push(loss.clone().into_scalar());
        let gradients = GradientsParams::from_grads(loss.backward(), &model);
        model = optimizer.step(learning_rate, model, gradients);
    }
    losses.push(loss(&model).into_scalar());
    (model, losses)
}

#[test]
fn adapters_are_trained_on_in_python_and_come_back() {
    let options = || LazyOptions::new().with_min_bytes(0).with_budget(1 << 14);
    let file = |path: &Path| WeightFile::open(path).unwrap();
    let of_attention = r"^blocks\..*(query|value)\.weight$";
    travels("llama", r"^blocks\..*(query|value|down)\.weight$", 0.5, |path, device| {
        let size = DecoderSize::from_directory(path).unwrap();
        Llama::from_file(&size, file(path), &options(), device).unwrap().0
    });
    travels("gpt2", r"^blocks\..*(qkv|output|inner|outer)\.weight$", 0.05, |path, device| {
        let size = Gpt2Size::from_directory(path).unwrap();
        fused::gpt2::Gpt2::from_file(&size, file(path), &options(), device).unwrap().0
    });
    for family in ["gptj", "phi"] {
        travels(family, of_attention, 0.2, |path, device| {
            let size = GptJSize::from_directory(path).unwrap();
            fused::gptj::GptJ::from_file(&size, file(path), &options(), device).unwrap().0
        });
    }
}

/// Adapters of these layers are trained here, in Python, and here again.
fn travels<M: HuggingFace + Decoder>(
    family: &str,
    layers: &str,
    learning_rate: f64,
    load: impl Fn(&Path, &Device) -> M,
) {
    let Some(python) = python::with(&["torch", "transformers", "peft"]) else { return };
    for dora in [false, true] {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path();
        python::run(&python, "training.py", &["make", family], path);
        let device = Device::flex().autodiff();
        let base = || load(&path.join("base"), &device);
        device.seed(3);
        let group = ParamGroup::from_regex(layers).unwrap();
        let lora = Lora::new(3, 6.0).set_param_group(group);
        let adapted = match dora {
            true => base().apply_reparameterization(Dora::new(lora)),
            false => base().apply_lora(lora),
        };
        let (model, before) = train(adapted, learning_rate, &device);
        assert!(before[STEPS] < before[0] - 0.01, "{before:?}");
        let config = PeftConfig::new(3, 6.0)
            .with_base_model(path.join("base").to_string_lossy())
            .with_task_type("CAUSAL_LM");
        save_adapters(&model, config, path.join("ours")).unwrap();
        save_merged(&model, PeftConfig::new(3, 6.0), path.join("merged"), DType::F32).unwrap();
        fs::copy(path.join("base/config.json"), path.join("merged/config.json")).unwrap();
        let run = serde_json::json!({
            "tokens": TOKENS, "counts": COUNTS, "steps": STEPS, "learning_rate": learning_rate,
        });
        fs::write(path.join("run.json"), run.to_string()).unwrap();
        python::run(&python, "training.py", &["continue"], path);
        let theirs: Vec<f32> = serde_json::from_slice(&fs::read(path.join("losses.json")).unwrap()).unwrap();

        // The same steps here, and one more pass with the adapters that Python wrote.
        let (_, ours) = train(model, learning_rate, &device);
        let (again, _) = load_adapters(base(), path.join("theirs")).unwrap();
        let (_, after) = train(again, learning_rate, &device);
        assert_eq!(theirs.len(), ours.len());
        for (ours, theirs) in ours.iter().zip(&theirs).chain([(&after[0], &theirs[STEPS])]) {
            println!("{ours} {theirs}");
            assert!((ours - theirs).abs() < 1e-4, "{ours}, not {theirs}");
        }
        assert!((theirs[STEPS] - theirs[0]).abs() > 1e-3, "{theirs:?}");
    }
}

/// The examples' data: what is not counted has no effect, and what is learned does not depend on how texts are padded.
#[test]
fn padding_and_questions_are_not_learned() {
    fn check<M: Decoder>(size: &M::Size) {
        let device = Device::flex().autodiff();
        let model = M::new(size, &device);
        let tensor = |tokens: &[i64]| Tensor::<1, Int>::from_data(tokens, &device).unsqueeze::<2>();
        let loss = |now: &[i64], next: &[i64], counts: &[f32]| {
            let counts = Tensor::<1>::from_data(counts, &device).unsqueeze::<2>();
            model.loss_of_some(tensor(now), tensor(next), counts)
        };
        let value = |loss: &Tensor<1>| loss.clone().into_scalar::<f32>();
        let whole = loss(&[3, 4, 5], &[4, 5, 6], &[0.0, 1.0, 1.0]);
        let padded = loss(&[3, 4, 5, 0, 0], &[9, 5, 6, 0, 0], &[0.0, 1.0, 1.0, 0.0, 0.0]);
        assert!((value(&whole) - value(&padded)).abs() < 1e-6);
        let logs = log_softmax(model.logits(tensor(&[3, 4, 5])), 2);
        let chosen = logs.gather(2, tensor(&[4, 5, 6]).unsqueeze_dim(2)).slice([0..1, 1..3]);
        assert!((value(&whole) + chosen.mean().into_scalar::<f32>()).abs() < 1e-5);
        assert!(!GradientsParams::from_grads(padded.backward(), &model).is_empty());
    }
    check::<Llama>(&DecoderSize::LLAMA_3_2_1B.tiny());
    check::<memsave::decoder::Llama>(&DecoderSize::LLAMA_3_2_1B.tiny());
    check::<fused::gpt2::Gpt2>(&Gpt2Size::TINY);
    check::<Gpt2>(&Gpt2Size::TINY);
    check::<fused::gptj::GptJ>(&GptJSize::GPT_J_6B.tiny());
    check::<GptJ>(&GptJSize::PHI_2.tiny());
}

/// Its names, layouts and orders are those of Hugging Face: it is loaded as any checkpoint, and computes the same.
#[test]
fn merged_models_are_checkpoints() {
    let device = Device::flex();
    let tokens = || Tensor::<2, Int>::from_data([[3, 17, 4, 29, 33]], &device);
    let group = ParamGroup::from_regex(r"^blocks\..*weight$").unwrap();
    let lora = Lora::new(2, 4.0).set_param_group(group);
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path();

    fn shaken<M: Module>(model: M) -> M {
        model.map(&mut Shake)
    }
    let compare = |expected: Tensor<3>, found: Tensor<3>| {
        found.into_data().assert_approx_eq::<f32>(&expected.into_data(), Tolerance::rel_abs(1e-3, 1e-3));
    };
    let llama = DecoderSize::LLAMA_3_2_1B.tiny();
    let experts = DecoderSize::MIXTRAL_8X7B.tiny().experts.unwrap();
    let sizes = [
        llama,
        DecoderSize { normalizes_heads: true, ..llama },
        DecoderSize {
            tied: false,
            biases: Biases { inputs: true, output: true, feed_forward: true },
            ..llama
        },
        // One as of Mixtral, Qwen2 and Qwen3 each.
        DecoderSize { experts: Some(experts), ..llama },
        DecoderSize { experts: Some(Experts { shared: Some(20), every: 2, ..experts }), ..llama },
        DecoderSize { experts: Some(experts), normalizes_heads: true, ..llama },
    ];
    for size in sizes {
        let model = shaken(Llama::new(&size, &device).apply_lora(lora.clone()));
        hugging_face::save_merged(&model, &lora, path, DType::F32).unwrap();
        // Heads in the order of Hugging Face, and in Burn's.
        let (lazy, _) = Llama::load(&size, path, &LazyOptions::new(), &device).unwrap();
        let eager = hugging_face::load(Llama::new(&size, &device), path).unwrap();
        compare(model.logits(tokens()), lazy.logits(tokens()));
        compare(model.logits(tokens()), eager.logits(tokens()));
        // The same of a model whose weights stay in the file, in half precision: rounded once.
        hugging_face::save_merged(&lazy, &lora, path.join("half"), DType::BF16).unwrap();
        let file = WeightFile::open(path.join("half")).unwrap();
        assert!(file.tensors().all(|tensor| tensor.dtype == DType::BF16));
        let whole = WeightFile::open(path).unwrap();
        let name = "model.layers.1.self_attn.q_proj.weight";
        let rounded = whole.read(name).unwrap().convert_dtype(DType::BF16);
        file.read(name).unwrap().assert_eq(&rounded, true);
    }
    let gpt2 = shaken(Gpt2::new(&Gpt2Size::TINY, &device).apply_lora(lora.clone()));
    hugging_face::save_merged(&gpt2, &lora, path, DType::F32).unwrap();
    let loaded = hugging_face::load(Gpt2::new(&Gpt2Size::TINY, &device), path).unwrap();
    compare(gpt2.logits(tokens()), loaded.logits(tokens()));
    for size in [GptJSize::GPT_J_6B.tiny(), GptJSize::PHI_2.tiny()] {
        let model = shaken(GptJ::new(&size, &device).apply_lora(lora.clone()));
        hugging_face::save_merged(&model, &lora, path, DType::F32).unwrap();
        let file = || WeightFile::open(path).unwrap();
        let lazy = LazyOptions::new().with_min_bytes(0);
        let (lazy, report) = GptJ::from_file(&size, file(), &lazy, &device).unwrap();
        assert!(report.lazy.len() > 2 * 6);
        compare(model.logits(tokens()), lazy.logits(tokens()));
        let fused = hugging_face::load(fused::gptj::GptJ::new(&size, &device), path).unwrap();
        let next = || Tensor::<2, Int>::from_data([[17, 4, 29, 33, 8]], &device);
        let [expected, found] = [model.loss(tokens(), next()), fused.loss(tokens(), next())];
        found.into_data().assert_approx_eq::<f32>(&expected.into_data(), Tolerance::rel_abs(1e-3, 1e-3));
    }
}

/// With the head of the configuration: the embedding, or one of its own.
#[test]
fn losses_of_t5_are_those_of_its_logits() {
    let device = Device::flex();
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("model.bpk");
    let flan = T5Size { tied: false, scales_outputs: false, gated: true, ..T5Size::TINY };
    for size in [T5Size::TINY, flan, T5Size { decoder_layers: Some(1), layers: 3, ..flan }] {
        let model = memsave::t5::T5::new(&size, &device).map(&mut Shake);
        model.clone().save_file(&path).unwrap();
        let all_now = LazyOptions::new().exclude("*");
        let fused = fused::t5::T5::new(&size, &device);
        let (fused, _) = fused.lazy_load(&WeightFile::open(&path).unwrap(), &all_now).unwrap();
        let tensor = |tokens: [[i64; 5]; 2]| Tensor::<2, Int>::from_data(tokens, &device);
        let source = || tensor([[3, 17, 4, 29, 33], [9, 8, 7, 6, 5]]);
        let [tokens, next] = [[[0, 12, 30, 2, 45], [0, 7, 7, 31, 1]], [[12, 30, 2, 45, 1], [7, 7, 31, 1, 0]]];
        let logits = model.logits(source(), tensor(tokens));
        let expected = -log_softmax(logits, 2).gather(2, tensor(next).unsqueeze_dim(2)).mean();
        let of_memsave = model.loss(source(), tensor(tokens), tensor(next));
        let of_fused = fused.loss(source(), tensor(tokens), tensor(next));
        for loss in [of_memsave, of_fused] {
            loss.into_data().assert_approx_eq::<f32>(&expected.clone().into_data(), Tolerance::default());
        }
    }
}

/// Moves all weights, so that norms and factors are neither 1 nor 0.
struct Shake;

impl ModuleMapper for Shake {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        param.map(|value| value.clone() + value.random_like(Distribution::Normal(0.0, 0.2)))
    }
}
