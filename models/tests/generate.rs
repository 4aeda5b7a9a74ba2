//! What is generated is what Python's `transformers` generates: with a cache, several prompts at once, and prompts in parts.
#![recursion_limit = "256"]
use burn::module::{Module, ModuleMapper, Param};
use burn::tensor::{DType, Device, Distribution, Int, Tensor, Tolerance};
use burn_memsave::lazy::{LazyLoad, LazyOptions, WeightFile};
use burn_memsave_models::memsave::{decoder::Llama, gpt2::Gpt2, gptj::GptJ};
use burn_memsave_models::{
    Biases, Decoder, DecoderSize, Experts, Gemma, Generate, GenerateError, GenerateOptions, Gpt2Size,
    GptJSize, Sampling, Window, generate, hugging_face, stock,
};
use serde::Deserialize;
use std::fs;
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};

mod python;

/// A prompt, and what follows.
#[derive(Deserialize)]
struct Text {
    prompt: Vec<u32>,
    text: Vec<u32>,
    margin: f64,
    last_logits: Vec<f32>,
}

const NEW: usize = 64;

/// Weights that stay in the file.
fn options() -> LazyOptions {
    LazyOptions::new().with_min_bytes(0)
}

#[test]
fn texts_are_those_of_transformers() {
    let Some(python) = python::with(&["torch", "transformers", "safetensors"]) else { return };
    let directory = tempfile::tempdir().unwrap();
    python::run(&python, "generate.py", &[], directory.path());
    for entry in fs::read_dir(directory.path()).unwrap() {
        let (path, device) = (entry.unwrap().path(), Device::flex());
        println!("{}", path.display());
        match path.file_name().unwrap().to_str().unwrap() {
            "gpt2_head" => {
                let error = Gpt2::from_directory(&path, &options(), &device).unwrap_err();
                assert!(error.to_string().contains("lm_head.weight"), "{error}");
            }
            gpt2 if gpt2.starts_with("gpt2") => {
                compare(&path, &Gpt2::from_directory(&path, &options(), &device).unwrap().0, 1e-5)
            }
            "gptj" | "phi" => {
                compare(&path, &GptJ::from_directory(&path, &options(), &device).unwrap().0, 1e-5);
                let size = GptJSize::from_directory(&path).unwrap();
                let model = hugging_face::load(GptJ::new(&size, &device), &path).unwrap();
                compare_last_logits(&expected(&path), &model, 1e-5);
            }
            "phi3_long" => {
                let size = DecoderSize::from_directory(&path).unwrap();
                assert_eq!(size.length, 1);
                let model = Llama::load(&size.with_length(128), &path, &options(), &device).unwrap().0;
                compare(&path, &model, 1e-5);
            }
            name => {
                compare(&path, &Llama::from_directory(&path, &options(), &device).unwrap().0, 1e-5);
                // Weights in memory, with heads in Burn's order. (Files that have a tied head all the same are for `from_directory`.)
                if !["llama_twice", "llama_head"].contains(&name) {
                    let size = DecoderSize::from_directory(&path).unwrap();
                    let model = hugging_face::load(Llama::new(&size, &device), &path).unwrap();
                    compare_last_logits(&expected(&path), &model, 1e-5);
                }
            }
        }
    }
}

/// GGUF, four bits of bitsandbytes, float8.
#[test]
fn texts_of_packed_weights_are_those_of_transformers() {
    let packages = ["torch", "transformers", "accelerate", "safetensors", "gguf", "bitsandbytes"];
    let Some(python) = python::with(&packages) else { return };
    let directory = tempfile::tempdir().unwrap();
    python::run(&python, "packed.py", &[], directory.path());
    let families =
        ["llama", "llama3", "qwen2", "qwen3", "gemma2", "gemma3"].map(|name| format!("{name}_gguf"));
    for name in families.iter().map(String::as_str).chain(["nf4", "nf4_twice", "float8"]) {
        println!("{name}");
        let (path, device) = (directory.path().join(name), Device::flex());
        let (model, report) = match name.ends_with("gguf") {
            true => Llama::from_gguf(path.join("model.gguf"), &options(), &device).unwrap(),
            false => Llama::from_directory(&path, &options(), &device).unwrap(),
        };
        let packed = report.lazy.iter().filter(|parameter| parameter.packing.is_some()).count();
        assert!(packed >= 2 * 7, "{report}");
        compare(&path, &model, 5e-5); // they are wider than the others
    }
}

fn expected(directory: &Path) -> Vec<Text> {
    serde_json::from_slice(&fs::read(directory.join("expected.json")).unwrap()).unwrap()
}

/// Logits may be off by `rounding` of the largest.
fn compare(directory: &Path, model: &(impl Generate + Decoder), rounding: f32) {
    let expected = expected(directory);
    let margin = expected.iter().map(|text| text.margin).fold(f64::INFINITY, f64::min);
    assert!(margin > 1e-5, "rounding may choose another token");
    let prompts: Vec<_> = expected.iter().map(|text| text.prompt.clone()).collect();
    let texts: Vec<_> = expected.iter().map(|text| text.text.clone()).collect();
    for tokens_at_once in [512, 4, 1] {
        let options = GenerateOptions::new(NEW).with_tokens_at_once(tokens_at_once);
        let mut seen = vec![vec![]; prompts.len()];
        let generated =
            generate(model, &prompts, &options, |prompt, token| seen[prompt].push(token)).unwrap();
        assert_eq!((&generated.texts, &seen), (&texts, &texts));
        for (prompt, text) in prompts.iter().zip(&texts) {
            let alone = generate(model, std::slice::from_ref(prompt), &options, |_, _| ()).unwrap();
            assert_eq!(alone.texts, std::slice::from_ref(text));
        }
    }
    compare_last_logits(&expected, model, rounding);
}

/// Without a cache: the next token of all that there is.
fn compare_last_logits(expected: &[Text], model: &impl Decoder, rounding: f32) {
    for Text { prompt, text, last_logits, .. } in expected {
        let all: Vec<i64> = prompt.iter().chain(&text[..NEW - 1]).map(|&token| i64::from(token)).collect();
        let tokens = Tensor::<1, Int>::from_ints(&all[..], &Device::flex()).unsqueeze::<2>();
        let logits = model.logits(tokens).into_data();
        let logits: Vec<f32> = logits.iter::<f32>().skip((all.len() - 1) * last_logits.len()).collect();
        let largest = last_logits.iter().fold(0.0f32, |largest, x| largest.max(x.abs()));
        let off = logits.iter().zip(last_logits).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        println!("off by {:.1e} of the largest", off / largest);
        assert!(logits.len() == last_logits.len() && off <= rounding * largest, "off by {off}");
    }
}

/// All weights are drawn from one generator.
fn generator() -> MutexGuard<'static, ()> {
    static GENERATOR: Mutex<()> = Mutex::new(());
    GENERATOR.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Draws all weights at once, so that norms and biases are not 1 or 0 either.
struct Shake;

impl ModuleMapper for Shake {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        param.map(|value| value.clone() + value.random_like(Distribution::Normal(0.0, 0.2)))
    }
}

/// Small decoders of all kinds, the same in every run.
fn decoders() -> Vec<Llama> {
    let _generator = generator();
    Device::flex().seed(7);
    sizes().into_iter().map(|size| Llama::new(&size, &Device::flex()).map(&mut Shake)).collect()
}

fn sizes() -> Vec<DecoderSize> {
    let llama = DecoderSize::LLAMA_3_2_1B.tiny().with_length(128);
    let biases = Biases { inputs: true, output: true, feed_forward: true };
    let inputs = Biases { inputs: true, ..Biases::NONE };
    let experts = DecoderSize::MIXTRAL_8X7B.tiny().experts.unwrap();
    let with_a_shared_one = Experts { shared: Some(20), normalized: false, every: 2, ..experts };
    vec![
        llama,
        DecoderSize { window: Some(Window::new(5)), tied: false, ..llama },
        DecoderSize { head: Some(6), biases, normalizes_heads: true, ..llama },
        DecoderSize {
            window: Some(Window { tokens: 5, full_every: Some(2), theta: Some(50.0) }),
            normalizes_heads: true,
            gemma: Some(Gemma {
                normalizes_outputs: true,
                attention_scale: Some(0.7),
                attention_softcap: Some(2.0),
                logit_softcap: Some(3.0),
            }),
            ..llama
        },
        DecoderSize { experts: Some(experts), ..llama },
        DecoderSize { experts: Some(with_a_shared_one), biases: inputs, ..llama },
        DecoderSize { rotated: Some(2), joined: true, ..llama },
    ]
}

/// The same models of Burn's layers compute the same.
#[test]
fn layers_of_burn_compute_the_same() {
    for (size, model) in sizes().iter().zip(decoders()) {
        println!("{size:?}");
        compute_the_same(&model, stock::decoder::Llama::new(size, &Device::flex()));
    }
    for (size, model) in parallel_decoders() {
        println!("{size:?}");
        compute_the_same(&model, stock::gptj::GptJ::new(&size, &Device::flex()));
    }
}

fn compute_the_same(ours: &impl Decoder, theirs: impl Decoder) {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("model.bpk");
    ours.clone().save_file(&path).unwrap();
    let in_memory = LazyOptions::new().exclude("*");
    let (theirs, _) = theirs.lazy_load(&WeightFile::open(&path).unwrap(), &in_memory).unwrap();
    let tokens = || Tensor::<1, Int>::arange(3..14, &Device::flex()).unsqueeze::<2>();
    let (ours, theirs) = (ours.logits(tokens()).into_data(), theirs.logits(tokens()).into_data());
    ours.assert_approx_eq::<f32>(&theirs, Tolerance::rel_abs(1e-4, 1e-4));
}

/// Nothing of them is allocated.
#[test]
fn published_sizes_have_the_parameters_that_are_published() {
    let device = Device::flex();
    for (size, parameters) in [
        (DecoderSize::MIXTRAL_8X7B, 46_702_792_704),
        (DecoderSize::QWEN3_30B_A3B, 30_532_122_624),
        (DecoderSize::PHI_3_MINI_4K, 3_821_079_552),
    ] {
        assert_eq!(Llama::new(&size.with_length(8), &device).num_params(), parameters);
    }
    for (size, parameters) in [(GptJSize::GPT_J_6B, 6_050_882_784), (GptJSize::PHI_2, 2_779_683_840)] {
        assert_eq!(GptJ::new(&size.with_length(8), &device).num_params(), parameters);
    }
}

/// With a cache or without, alone or with others, at once or in parts.
#[test]
fn a_cache_changes_nothing() {
    decoders().iter().for_each(cache_changes_nothing);
    let generator = generator();
    Device::flex().seed(7);
    let gpt2 = Gpt2::new(&Gpt2Size { length: 30, ..Gpt2Size::TINY }, &Device::flex()).map(&mut Shake);
    drop(generator);
    cache_changes_nothing(&gpt2);
    parallel_decoders().iter().for_each(|(_, model)| cache_changes_nothing(model));
}

/// A GPT-J and a Phi.
fn parallel_decoders() -> [(GptJSize, GptJ); 2] {
    let _generator = generator();
    Device::flex().seed(7);
    let phi = GptJSize { key_heads: 1, ..GptJSize::PHI_2.tiny() };
    [GptJSize::GPT_J_6B.tiny(), phi].map(|size| {
        let size = size.with_length(30);
        (size, GptJ::new(&size, &Device::flex()).map(&mut Shake))
    })
}

fn cache_changes_nothing(model: &(impl Generate + Decoder)) {
    const MORE: usize = 20;
    let device = Device::flex();
    let tokens = |values: &[i64]| Tensor::<1, Int>::from_ints(values, &device).unsqueeze::<2>();
    let text = |first: i64, length: i64| (0..length).map(|at| (first + 7 * at * at) % 50).collect::<Vec<_>>();
    let texts = [text(3, 30), text(27, 21), text(18, 24)];
    let padding: Vec<usize> = texts.iter().map(|text| texts[0].len() - text.len()).collect();
    let whole = texts.each_ref().map(|text| model.logits(tokens(text)).squeeze_dim::<2>(0));
    let largest = whole[0].clone().abs().max().into_scalar::<f32>();
    for tokens_at_once in [100, 3, 1] {
        let mut cache = model.cache(None).with_padding(padding.clone());
        let (mut start, mut end) = (0, texts[0].len() - MORE);
        while start < texts[0].len() {
            let rows = texts.iter().zip(&padding).map(|(text, &padding)| {
                let padded: Vec<i64> = std::iter::repeat_n(0, padding).chain(text.iter().copied()).collect();
                tokens(&padded[start..end])
            });
            let logits = model.next_logits(Tensor::cat(rows.collect(), 0), tokens_at_once, &mut cache);
            for (row, (whole, padding)) in whole.iter().zip(&padding).enumerate() {
                let expected = whole.clone().narrow(0, end - 1 - padding, 1);
                let off = (logits.clone().narrow(0, row, 1) - expected).abs().max().into_scalar::<f32>();
                assert!(off <= 1e-5 * largest, "token {end} of text {row}: {off} of {largest}");
            }
            (start, end) = (end, end + 1);
        }
        assert_eq!(cache.tokens(), texts[0].len());
    }
}

/// In half precision the cache is half as large, and its logits are off by its rounding. Integers are still smaller.
#[test]
fn caches_may_be_rounded() {
    let model = &decoders()[0];
    let prompt: Vec<i64> = (0..100).map(|token| token % 50).collect();
    let tokens = Tensor::<1, Int>::from_ints(&prompt[..], &Device::flex()).unsqueeze::<2>();
    let stored = [None, Some(DType::BF16), Some(DType::I8)];
    let [(exact, bytes), bf16, integers] = stored.map(|dtype| {
        let mut cache = model.cache(dtype);
        model.next_logits(tokens.clone(), 7, &mut cache);
        let last = Tensor::<2, Int>::from_ints([[3]], &Device::flex());
        (model.next_logits(last, 1, &mut cache), cache.bytes())
    });
    // 64 of the 101 tokens are in whole pages; two layers, two heads of keys and values, of four features, and a scale.
    let (token, tail) = (2 * 2 * 2 * 4, 4 * 37);
    assert_eq!(bytes, 4 * 101 * token);
    let size = DecoderSize::LLAMA_3_2_1B.tiny();
    let largest = exact.clone().abs().max().into_scalar::<f32>();
    for ((logits, bytes), dtype, of_feature) in [(bf16, DType::BF16, 2), (integers, DType::I8, 1 + 1)] {
        let off = (exact.clone() - logits).abs().max().into_scalar::<f32>();
        assert!(off > 0.0 && off < 0.02 * largest, "{dtype:?}: {off} of {largest}");
        assert_eq!(bytes, (of_feature * 64 + tail) * token);
        assert_eq!(size.cache_bytes(1, 101, dtype, DType::F32), bytes);
    }
    assert_eq!(size.cache_bytes(1, 101, DType::F32, DType::F32), bytes);
}

/// The same for texts of different lengths, so long that pages are dropped.
#[test]
fn windows_of_padded_texts() {
    let model = &decoders()[1];
    let text = |first: i64, length: i64| (0..length).map(|at| (first + 7 * at * at) % 50).collect::<Vec<_>>();
    let texts = [text(3, 120), text(27, 40), text(18, 95)];
    let padding = texts.each_ref().map(|text| 120 - text.len());
    let device = Device::flex();
    let tokens = |text: &[i64]| Tensor::<1, Int>::from_ints(text, &device).unsqueeze::<2>();
    let whole = texts.each_ref().map(|text| model.logits(tokens(text)).squeeze_dim::<2>(0));
    let largest = whole[0].clone().abs().max().into_scalar::<f32>();
    for at_once in [120, 7] {
        let mut cache = model.cache(None).with_padding(padding.to_vec());
        let mut start = 0;
        for end in [110, 111, 120] {
            let rows = texts.iter().zip(padding).map(|(text, padding)| {
                let padded: Vec<i64> = std::iter::repeat_n(0, padding).chain(text.iter().copied()).collect();
                tokens(&padded[start..end])
            });
            let logits = model.next_logits(Tensor::cat(rows.collect(), 0), at_once, &mut cache);
            for (row, (whole, padding)) in whole.iter().zip(padding).enumerate() {
                let expected = whole.clone().narrow(0, end - 1 - padding, 1);
                let off = (logits.clone().narrow(0, row, 1) - expected).abs().max().into_scalar::<f32>();
                assert!(off <= 1e-5 * largest, "token {end} of text {row}: {off} of {largest}");
            }
            start = end;
        }
        assert_eq!(cache.bytes(), 3 * 2 * 2 * 2 * 4 * 4 * (120 - 64));
    }
}

/// A cache with a window drops what no token sees, and nothing changes by that.
#[test]
fn windows_let_go_of_tokens() {
    let model = &decoders()[1];
    let text: Vec<i64> = (0..120).map(|token| (token * token + 3) % 50).collect();
    let tokens = |text: &[i64]| Tensor::<1, Int>::from_ints(text, &Device::flex()).unsqueeze::<2>();
    let whole = model.logits(tokens(&text)).squeeze_dim::<2>(0);
    let largest = whole.clone().abs().max().into_scalar::<f32>();
    for at_once in [1, 50] {
        let mut cache = model.cache(None);
        for end in [70, 71, 110, 120] {
            let logits = model.next_logits(tokens(&text[cache.tokens()..end]), at_once, &mut cache);
            let off = (logits - whole.clone().narrow(0, end - 1, 1)).abs().max().into_scalar::<f32>();
            assert!(off <= 1e-5 * largest, "token {end}: {off} of {largest}");
        }
        // A page of 64 tokens is gone.
        assert_eq!(cache.bytes(), 2 * 2 * 2 * 4 * 4 * (120 - 64));
    }
}

#[test]
fn texts_end_where_they_are_told_to() {
    let model = &decoders()[0];
    let prompts = [vec![3, 14, 15], vec![27]];
    let long = generate(model, &prompts, &GenerateOptions::new(30), |_, _| ()).unwrap();
    let end = long.texts[0][3];
    let ended = generate(model, &prompts, &GenerateOptions::new(30).with_ends([end]), |_, _| ()).unwrap();
    for (ended, long) in ended.texts.iter().zip(&long.texts) {
        let count = long.iter().position(|&token| token == end).map_or(30, |at| at + 1);
        assert_eq!(ended, &long[..count]);
    }
    let nothing = generate(model, &prompts, &GenerateOptions::new(0), |_, _| ()).unwrap();
    assert!(nothing.texts.len() == 2 && nothing.texts.iter().all(Vec::is_empty));
    // The same seed, the same tokens.
    let draw = |seed| {
        let options = GenerateOptions::new(30).with_sampling(Sampling { seed, ..Sampling::default() });
        generate(model, &prompts, &options, |_, _| ()).unwrap().texts
    };
    assert!(draw(1) == draw(1) && draw(1) != draw(2));
}

#[test]
fn what_cannot_be_generated() {
    let model = &decoders()[0];
    let refused = |prompts: &[Vec<u32>], options: GenerateOptions| {
        generate(model, prompts, &options, |_, _| ()).unwrap_err().to_string()
    };
    assert_eq!(refused(&[vec![1], vec![]], GenerateOptions::new(1)), "prompt 1 has no tokens");
    assert!(refused(&[vec![1], vec![3, 50]], GenerateOptions::new(1)).contains("prompt 1 has the token 50"));
    assert!(refused(&[vec![1]], GenerateOptions::new(usize::MAX)).contains("too long"));
    assert!(refused(&[vec![1]], GenerateOptions::new(1).with_cache_dtype(DType::I32)).contains("I32"));
    let long = [vec![1; 100]];
    assert!(refused(&long, GenerateOptions::new(30)).contains("100 tokens and 30 more"));
    assert!(generate(model, &long, &GenerateOptions::new(29), |_, _| ()).is_ok());
    for (sampling, expected) in [
        (Sampling { temperature: 0.0, ..Sampling::default() }, "sampling with temperature 0"),
        (Sampling { top_k: Some(0), ..Sampling::default() }, "sampling with top_k 0"),
        (Sampling { top_p: Some(1.5), ..Sampling::default() }, "sampling with top_p 1.5"),
    ] {
        assert_eq!(refused(&[vec![1]], GenerateOptions::new(1).with_sampling(sampling)), expected);
    }
    let _generator = generator();
    let tracked = Llama::new(&DecoderSize::LLAMA_3_2_1B.tiny(), &Device::flex().autodiff());
    let result = generate(&tracked, &[vec![1]], &GenerateOptions::new(1), |_, _| ());
    assert!(matches!(result, Err(GenerateError::Tracked)));
    assert!(generate(&tracked.valid(), &[vec![1]], &GenerateOptions::new(1), |_, _| ()).is_ok());
}
