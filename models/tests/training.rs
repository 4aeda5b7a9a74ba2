//! Fine-tuning with weights that stay in their file: adapters that Python's `peft` trains on, and that come back.
#![recursion_limit = "256"]
use burn::module::{Lora, Module, ParamGroup};
use burn::optim::{GradientsParams, SgdConfig};
use burn::tensor::{Device, Int, Tensor};
use burn_memsave::lazy::LazyOptions;
use burn_memsave::lora::Dora;
use burn_memsave::peft::PeftConfig;
use burn_memsave_models::fused::decoder::Llama;
use burn_memsave_models::hugging_face::{load_adapters, save_adapters};
use burn_memsave_models::{Decoder, DecoderSize};
use std::fs;

mod python;

const STEPS: usize = 4;
const LEARNING_RATE: f64 = 0.5;
/// Two texts, of which the second ends with padding, and begins with a question that is not learned.
const TOKENS: [[i64; 9]; 2] = [[1, 17, 4, 29, 33, 8, 2, 45, 6], [1, 9, 30, 7, 21, 2, 0, 0, 0]];
const COUNTS: [[f32; 8]; 2] = [[1.0; 8], [0.0, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0]];

/// The loss before every step, and after the last one.
fn train(mut model: Llama, device: &Device) -> (Llama, Vec<f32>) {
    let mut optimizer = SgdConfig::new().init();
    let tokens = Tensor::<2, Int>::from_data(TOKENS, device);
    let [now, next] = [0, 1].map(|first| tokens.clone().narrow(1, first, 8));
    let counts = Tensor::<2>::from_data(COUNTS, device);
    let loss = |model: &Llama| model.loss_of_some(now.clone(), next.clone(), counts.clone());
    let mut losses = vec![];
    for _ in 0..STEPS {
        let loss = loss(&model);
        losses.push(loss.clone().into_scalar());
        let gradients = GradientsParams::from_grads(loss.backward(), &model);
        model = optimizer.step(LEARNING_RATE, model, gradients);
    }
    losses.push(loss(&model).into_scalar());
    (model, losses)
}

#[test]
fn adapters_are_trained_on_in_python_and_come_back() {
    let Some(python) = python::with(&["torch", "transformers", "peft"]) else { return };
    for dora in [false, true] {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path();
        python::run(&python, "training.py", &["make"], path);
        let device = Device::flex().autodiff();
        let base = || {
            let size = DecoderSize::from_directory(path.join("base")).unwrap();
            let options = LazyOptions::new().with_min_bytes(0).with_budget(1 << 14);
            Llama::load(&size, path.join("base"), &options, &device).unwrap().0
        };
        device.seed(3);
        let group = ParamGroup::from_regex(r"^blocks\..*(query|value|down)\.weight$").unwrap();
        let lora = Lora::new(3, 6.0).set_param_group(group);
        let adapted = match dora {
            true => base().apply_reparameterization(Dora::new(lora)),
            false => base().apply_lora(lora),
        };
        let (model, before) = train(adapted, &device);
        assert!(before[STEPS] < before[0] - 0.01, "{before:?}");
        let config = PeftConfig::new(3, 6.0)
            .with_base_model(path.join("base").to_string_lossy())
            .with_task_type("CAUSAL_LM");
        save_adapters(&model, config, path.join("ours")).unwrap();
        let run = serde_json::json!({
            "tokens": TOKENS, "counts": COUNTS, "steps": STEPS, "learning_rate": LEARNING_RATE,
        });
        fs::write(path.join("run.json"), run.to_string()).unwrap();
        python::run(&python, "training.py", &["continue"], path);
        let theirs: Vec<f32> = serde_json::from_slice(&fs::read(path.join("losses.json")).unwrap()).unwrap();

        // The same steps here, and one more pass with the adapters that Python wrote.
        let (_, ours) = train(model, &device);
        let (again, _) = load_adapters(base(), path.join("theirs")).unwrap();
        let (_, after) = train(again, &device);
        assert_eq!(theirs.len(), ours.len());
        for (ours, theirs) in ours.iter().zip(&theirs).chain([(&after[0], &theirs[STEPS])]) {
            println!("{ours} {theirs}");
            assert!((ours - theirs).abs() < 1e-4, "{ours}, not {theirs}");
        }
        assert!(theirs[STEPS] < theirs[0] - 0.01);
    }
}

/// The examples' data: what is not counted has no effect, and what is learned does not depend on how texts are padded.
#[test]
fn padding_and_questions_are_not_learned() {
    let device = Device::flex().autodiff();
    let model = Llama::new(&DecoderSize::LLAMA_3_2_1B.tiny(), &device);
    let tensor = |tokens: &[i64]| Tensor::<1, Int>::from_data(tokens, &device).unsqueeze::<2>();
    let gradient = |model: &Llama, now: &[i64], next: &[i64], counts: &[f32]| {
        let counts = Tensor::<1>::from_data(counts, &device).unsqueeze::<2>();
        let loss = model.loss_of_some(tensor(now), tensor(next), counts);
        let gradients = GradientsParams::from_grads(loss.clone().backward(), model);
        (loss.into_scalar::<f32>(), gradients.len())
    };
    let (whole, _) = gradient(&model, &[3, 4, 5], &[4, 5, 6], &[0.0, 1.0, 1.0]);
    let (padded, count) = gradient(&model, &[3, 4, 5, 0, 0], &[9, 5, 6, 0, 0], &[0.0, 1.0, 1.0, 0.0, 0.0]);
    assert!((whole - padded).abs() < 1e-6 && count > 0, "{whole}, {padded}");
}
