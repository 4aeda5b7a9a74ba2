//! Features are what Python's `transformers` computes: from every layer, alone or with others, whatever is in memory.
#![recursion_limit = "256"]
use burn::module::{Module, ModuleVisitor, Param};
use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use burn_memsave::lazy::{LazyOptions, LazyReport, WeightFile};
use burn_memsave_models::{
    Encoder, EncoderSize, FeatureEncoder, FeatureError, FeatureOptions, Generate, GenerateOptions, Pooling,
    VitSize, WhisperSize, features, generate, memsave, stock,
};
use images::Images;
use inputs::Inputs;
use output::Output;
use pixels::{Preprocessor, Rgb};
use serde::Deserialize;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::error::Error;
use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};
use write::{Run, Settings, write_features};

// Of the example.
#[path = "../examples/features/images.rs"]
mod images;
#[path = "../examples/features/inputs.rs"]
mod inputs;
#[path = "../examples/features/output.rs"]
mod output;
#[path = "../examples/features/pixels.rs"]
mod pixels;
mod python;
#[path = "../examples/features/write.rs"]
mod write;

/// Inputs, and the states of their tokens after some of the layers, or the last one.
#[derive(Deserialize)]
struct Expected {
    inputs: Vec<Value>,
    states: BTreeMap<String, Vec<Vec<f32>>>,
}

impl Expected {
    fn read(path: &Path) -> Self {
        serde_json::from_slice(&fs::read(path.join("expected.json")).unwrap()).unwrap()
    }

    fn texts(&self) -> Vec<Vec<u32>> {
        self.inputs.iter().map(|text| serde_json::from_value(text.clone()).unwrap()).collect()
    }

    /// Features of inputs, from every layer, each input for itself, and all at once.
    fn compare<E: FeatureEncoder>(&self, encoder: &E, batch: impl Fn(Range<usize>) -> E::Batch) {
        for (layer, states) in &self.states {
            let width = 24;
            let means: Vec<f32> = states.iter().flat_map(|state| mean(state, width)).collect();
            let first: Vec<f32> = states.iter().flat_map(|state| state[..width].to_vec()).collect();
            for (pooling, expected) in
                [(Pooling::All, &states.concat()), (Pooling::Mean, &means), (Pooling::First, &first)]
            {
                let options = FeatureOptions::new(pooling);
                let options = layer.parse().map_or(options, |layer| options.with_layer(layer));
                let count = self.inputs.len();
                for at_once in [1, count] {
                    let batches = (0..count).step_by(at_once).map(|first| batch(first..first + at_once));
                    let rows = features(encoder, batches, options);
                    let rows: Vec<f32> = rows
                        .flat_map(|rows| rows.unwrap().into_data().iter::<f32>().collect::<Vec<_>>())
                        .collect();
                    assert_near(&rows, expected, &format!("layer {layer}, {pooling:?}"));
                }
            }
        }
    }
}

/// In half precision, a few rounding errors, and features in f32.
fn compare_rounded<E: FeatureEncoder>(
    expected: &Expected,
    load: impl Fn(LazyOptions) -> E,
    batch: impl Fn(Range<usize>) -> E::Batch,
) {
    let means: Vec<f32> = expected.states["last"].iter().flat_map(|state| mean(state, 24)).collect();
    for (dtype, rounding) in [(DType::BF16, 0.1), (DType::F16, 0.02)] {
        let encoder = load(LazyOptions::new().with_min_bytes(0).with_dtype(dtype));
        let all = batch(0..expected.inputs.len());
        let rows = features(&encoder, [all], FeatureOptions::new(Pooling::Mean)).next().unwrap().unwrap();
        assert_eq!(rows.dtype(), DType::F32);
        let rows: Vec<f32> = rows.into_data().iter::<f32>().collect();
        assert_within(rounding, &rows, &means, &format!("{dtype:?}"));
    }
}

fn mean(states: &[f32], width: usize) -> Vec<f32> {
    let tokens = states.len() / width;
    (0..width)
        .map(|feature| states.iter().skip(feature).step_by(width).sum::<f32>() / tokens as f32)
        .collect()
}

fn assert_near(found: &[f32], expected: &[f32], what: &str) {
    assert_within(1e-5, found, expected, what);
}

/// Numbers may be off by a share of the largest.
fn assert_within(rounding: f32, found: &[f32], expected: &[f32], what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}");
    let largest = expected.iter().fold(0.0f32, |largest, x| largest.max(x.abs()));
    let off = found.iter().zip(expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    assert!(off <= rounding * largest, "{what}: off by {off}, the largest is {largest}");
}

/// Weights that stay in their file: with no budget, one of a few weights, and one of all.
fn budgets() -> impl Iterator<Item = LazyOptions> {
    [0, 8 << 10, 1 << 20].into_iter().map(|budget| LazyOptions::new().with_min_bytes(0).with_budget(budget))
}

/// All weights in memory.
fn eager() -> LazyOptions {
    LazyOptions::new().exclude("*")
}

/// The directories of a directory.
fn entries(directory: &Path) -> impl Iterator<Item = (String, PathBuf)> {
    let entries = fs::read_dir(directory).unwrap().map(|entry| entry.unwrap());
    entries
        .filter(|entry| entry.path().is_dir())
        .map(|entry| (entry.file_name().to_string_lossy().into_owned(), entry.path()))
}

#[test]
fn features_are_those_of_transformers() {
    let Some(python) = python::with(&["torch", "transformers", "safetensors"]) else { return };
    let directory = tempfile::tempdir().unwrap();
    python::run(&python, "features.py", &[], directory.path());
    let device = Device::flex();
    resized_images(directory.path());
    for (name, path) in entries(directory.path()) {
        println!("{name}");
        let expected = Expected::read(&path);
        match name.split('_').next() {
            Some("vit") => compare_images(&path, &expected),
            Some("whisper") => compare_sounds(&path, &expected),
            Some("t5") => {
                let load = |options| memsave::t5::T5::from_directory(&path, &options, &device).unwrap();
                texts(&expected, &stock::t5::T5::from_directory(&path, &eager(), &device).unwrap().0, load);
                let (encoder, _) = memsave::t5::T5Encoder::from_directory(&path, &eager(), &device).unwrap();
                expected.compare(&encoder, |range| expected.texts()[range].to_vec());
                answers_to_texts(&path);
            }
            Some("encoder") => {
                let load =
                    |options| memsave::t5::T5Encoder::from_directory(&path, &options, &device).unwrap();
                let stock = stock::t5::T5Encoder::from_directory(&path, &eager(), &device).unwrap().0;
                texts(&expected, &stock, load);
                let error = memsave::t5::T5::from_directory(&path, &eager(), &device).unwrap_err();
                assert!(error.to_string().contains("no tensor for the parameters [decoder."), "{error}");
            }
            _ => {
                let load = |options| memsave::bert::Bert::from_directory(&path, &options, &device).unwrap();
                texts(
                    &expected,
                    &stock::bert::Bert::from_directory(&path, &eager(), &device).unwrap().0,
                    load,
                );
            }
        }
    }
}

/// Of Burn's layers, and of ours, in memory and in the file.
fn texts<S, M>(expected: &Expected, stock: &S, load: impl Fn(LazyOptions) -> (M, LazyReport))
where
    S: FeatureEncoder<Batch = Vec<Vec<u32>>>,
    M: FeatureEncoder<Batch = Vec<Vec<u32>>>,
{
    let texts = expected.texts();
    let batch = |range: Range<usize>| texts[range].to_vec();
    let rows = |model: &M| {
        let options = FeatureOptions::new(Pooling::All);
        let rows = features(model, [texts.clone()], options).next();
        rows.unwrap().unwrap().into_data()
    };
    expected.compare(stock, batch);
    compare_rounded(expected, |options| load(options).0, batch);
    let (in_memory, _) = load(eager());
    expected.compare(&in_memory, batch);
    for options in budgets() {
        let (lazy, report) = load(options);
        assert!(report.lazy.len() > 12 && report.missing.is_empty());
        expected.compare(&lazy, batch);
        assert_eq!(rows(&lazy), rows(&in_memory));
        assert!(report.cache.cached_bytes() <= report.cache.budget());
    }
    let (lazy, report) = load(LazyOptions::new().with_min_bytes(0));
    let listed = Listed(texts.clone(), texts.iter().map(Vec::len).collect());
    let states = &expected.states["last"];
    let means: Vec<f32> = states.iter().flat_map(|state| mean(state, 24)).collect();
    assert_near(&written(&lazy, &listed, Pooling::Mean, &report), &means, "written means");
    assert_near(&written(&lazy, &listed, Pooling::All, &report), &states.concat(), "all written");
    // Layers that are not needed are not read, but for what may be read ahead.
    let options = LazyOptions::new().with_min_bytes(0).with_budget(1 << 20).with_prefetch(0);
    let (lazy, report) = load(options);
    let options = FeatureOptions::new(Pooling::First).with_layer(1);
    features(&lazy, [texts.clone()], options).next().unwrap().unwrap();
    let cached = report.cache.cached();
    let is_cached = |part: &str| cached.iter().any(|path| path.contains(part));
    assert!(is_cached("s.0.") && !is_cached("s.1.") && !is_cached("decoder"), "{cached:?}");
}

/// A text or a sound, and what is generated from it.
#[derive(Deserialize)]
struct Answer {
    question: Value,
    prompt: Vec<u32>,
    answer: Vec<u32>,
    margin: f64,
    last_logits: Vec<f32>,
}

impl Answer {
    fn read(path: &Path) -> Vec<Self> {
        let answers: Vec<Self> =
            serde_json::from_slice(&fs::read(path.join("answers.json")).unwrap()).unwrap();
        assert!(answers.iter().all(|answer| answer.margin > 1e-5), "rounding may choose another token");
        answers
    }

    /// The prompt, and the beginning of the answer.
    fn begun(&self, tokens: usize) -> Vec<u32> {
        [&self.prompt, &self.answer[..tokens]].concat()
    }
}

/// Answers to all questions at once are those of `transformers` to each of them.
fn compare_answers(model: &impl Generate, expected: &[Answer]) {
    let prompts: Vec<_> = expected.iter().map(|answer| answer.prompt.clone()).collect();
    let options = GenerateOptions::new(expected[0].answer.len());
    let generated = generate(model, &prompts, &options, |_, _| ()).unwrap();
    for (found, expected) in generated.texts.iter().zip(expected) {
        assert_eq!(found, &expected.answer);
    }
    // Begun answers, in parts, with padding before all but the longest.
    let begun = [20, 7, 1];
    let prompts: Vec<_> = expected.iter().zip(begun).map(|(of, tokens)| of.begun(tokens)).collect();
    let options = GenerateOptions::new(30).with_tokens_at_once(6);
    let generated = generate(model, &prompts, &options, |_, _| ()).unwrap();
    for ((found, expected), begun) in generated.texts.iter().zip(expected).zip(begun) {
        assert_eq!(found, &expected.answer[begun..][..30]);
    }
}

/// The logits of the last token of one answer.
fn compare_logits(model: &impl Generate, expected: &Answer) {
    let tokens: Vec<i64> = expected.begun(expected.answer.len() - 1).into_iter().map(i64::from).collect();
    let tokens = Tensor::<1, Int>::from_ints(&tokens[..], &Device::flex()).unsqueeze::<2>();
    let logits = model.next_logits(tokens, 10, &mut model.cache(None)).into_data();
    assert_near(&logits.iter::<f32>().collect::<Vec<_>>(), &expected.last_logits, "logits");
}

fn answers_to_texts(path: &Path) {
    let expected = Answer::read(path);
    let questions: Vec<Vec<u32>> =
        expected.iter().map(|answer| serde_json::from_value(answer.question.clone()).unwrap()).collect();
    for options in budgets().take(1).chain([eager()]) {
        let (model, _) = memsave::t5::T5::from_directory(path, &options, &Device::flex()).unwrap();
        let reader = model.reader(&questions).unwrap();
        // Keys and values of the padded texts, for both blocks of the decoder.
        assert_eq!(reader.bytes(), 2 * 2 * 3 * 30 * 4 * 8 * 4);
        compare_answers(&reader, &expected);
        compare_logits(&model.reader(&questions[..1]).unwrap(), &expected[0]);
    }
}

/// Features and texts.
fn compare_sounds(path: &Path, expected: &Expected) {
    let device = Device::flex();
    let batch = |range: Range<usize>| {
        let sounds = expected.inputs[range].iter().map(|sound| {
            let rows: Vec<Vec<f32>> = serde_json::from_value(sound.clone()).unwrap();
            Tensor::<2>::from_data(TensorData::new(rows.concat(), [6, 20]), &device)
        });
        Tensor::stack::<3>(sounds.collect(), 0)
    };
    let load = |options| memsave::whisper::Whisper::from_directory(path, &options, &device).unwrap().0;
    compare_rounded(expected, load, batch);
    let (stock, _) = stock::whisper::Whisper::from_directory(path, &eager(), &device).unwrap();
    expected.compare(&stock, batch);
    // Positions are waves at first, and never trained.
    let tracked = device.clone().autodiff();
    let size = WhisperSize::from_directory(path).unwrap();
    let new = memsave::whisper::Whisper::new(&size, &tracked);
    let (trained, _) = memsave::whisper::Whisper::from_directory(path, &eager(), &tracked).unwrap();
    let expected_waves: Vec<f32> =
        serde_json::from_slice(&fs::read(path.join("sinusoids.json")).unwrap()).unwrap();
    let Waves { found, .. } = Waves::of(&new);
    assert_near(&found, &expected_waves, "positions");
    assert_ne!(Waves::of(&trained).found, found);
    let answers = Answer::read(path);
    for options in budgets().chain([eager()]) {
        let (model, _) = memsave::whisper::Whisper::from_directory(path, &options, &device).unwrap();
        expected.compare(&model, batch);
        let listener = model.listener(batch(0..3)).unwrap();
        assert_eq!(listener.bytes(), 3 * 2 * 3 * 10 * 24 * 4);
        compare_answers(&listener, &answers);
        compare_logits(&model.listener(batch(0..1)).unwrap(), &answers[0]);
        let tokens: Vec<i64> = answers[0].begun(63).into_iter().map(i64::from).collect();
        let tokens = Tensor::<1, Int>::from_ints(&tokens[..], &device).unsqueeze::<2>();
        for logits in [model.logits(batch(0..1), tokens.clone()), stock.logits(batch(0..1), tokens)] {
            let [_, length, _] = logits.dims();
            let last: Vec<f32> = logits.narrow(1, length - 1, 1).into_data().iter::<f32>().collect();
            assert_near(&last, &answers[0].last_logits, "all logits");
        }
    }
}

/// The positions of the encoder of a Whisper that is trained.
#[derive(Default)]
struct Waves {
    path: Vec<String>,
    found: Vec<f32>,
}

impl Waves {
    fn of(model: &memsave::whisper::Whisper) -> Self {
        let mut waves = Self::default();
        model.visit(&mut waves);
        waves
    }
}

impl ModuleVisitor for Waves {
    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.path.push(name.into());
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let is_waves = self.path == ["positions", "weight"];
        assert_eq!(param.is_require_grad(), !is_waves, "{:?}", self.path);
        if is_waves {
            assert!(!param.val().is_require_grad());
            self.found = param.val().into_data().iter::<f32>().collect();
        }
    }
}

#[test]
#[should_panic(expected = "mels and frames of the sound")]
fn sounds_that_are_too_short_panic() {
    let model = small_whisper();
    model.logits(Tensor::ones([1, 80, 2998], &Device::flex()), Tensor::zeros([1, 3], &Device::flex()));
}

#[test]
#[should_panic(expected = "449 tokens, and the longest text of the model has 448")]
fn texts_that_are_too_long_panic() {
    let model = small_whisper();
    model.logits(Tensor::ones([1, 80, 3000], &Device::flex()), Tensor::zeros([1, 449], &Device::flex()));
}

fn small_whisper() -> memsave::whisper::Whisper {
    let size = WhisperSize {
        vocabulary: 50,
        width: 24,
        heads: 3,
        decoder_heads: 3,
        ..WhisperSize::TINY_MULTILINGUAL
    };
    memsave::whisper::Whisper::new(&size, &Device::flex())
}

fn compare_images(path: &Path, expected: &Expected) {
    let file = path.join("images.safetensors");
    if file.exists() {
        let size = VitSize::from_directory(path).unwrap();
        let (model, report) =
            memsave::vit::Vit::from_directory(path, &budgets().next().unwrap(), &Device::flex()).unwrap();
        let images = Images::open(path, &file, size.tokens()).unwrap();
        let means: Vec<f32> = expected.states["last"].iter().flat_map(|state| mean(state, 24)).collect();
        assert_near(&written(&model, &images, Pooling::Mean, &report), &means, "written means");
        assert!(Images::open(path, &path.join("model.safetensors"), 1).is_err());
        assert!(Images::open(path, path, 1).is_err_and(|error| error.to_string().contains("`images`")));
    }

    let device = Device::flex();
    let size = VitSize::from_directory(path).unwrap();
    let shape = [size.channels, size.image[0], size.image[1]];
    let batch = |range: Range<usize>| {
        let images = expected.inputs[range].iter().map(|image| {
            let rows: Vec<Vec<Vec<f32>>> = serde_json::from_value(image.clone()).unwrap();
            Tensor::<3>::from_data(TensorData::new(rows.concat().concat(), shape), &device)
        });
        Tensor::stack::<4>(images.collect(), 0)
    };
    let load = |options| memsave::vit::Vit::from_directory(path, &options, &device).unwrap().0;
    compare_rounded(expected, load, batch);
    let (stock, _) = stock::vit::Vit::from_directory(path, &eager(), &device).unwrap();
    expected.compare(&stock, batch);
    for options in budgets().chain([eager()]) {
        let (model, _) = memsave::vit::Vit::from_directory(path, &options, &device).unwrap();
        expected.compare(&model, batch);
    }
}

/// With gradients or without, a text with padding is the text.
#[test]
fn padding_changes_nothing() {
    for size in [EncoderSize::BERT_BASE.tiny(), EncoderSize::ROBERTA_BASE.tiny()] {
        for device in [Device::flex(), Device::flex().autodiff()] {
            let model = memsave::bert::Bert::new(&size, &device);
            let tokens = Tensor::<2, Int>::from_ints([[3, 14, 15, 9, 2], [7, 8, 0, 0, 0]], &device);
            let padded = model.forward_padded(tokens.clone(), &[5, 2]);
            for (text, length) in [(0, 5), (1, 2)] {
                let alone = model.forward(tokens.clone().narrow(0, text, 1).narrow(1, 0, length));
                let with_others = padded.clone().narrow(0, text, 1).narrow(1, 0, length);
                let [alone, with_others]: [Vec<f32>; 2] =
                    [alone, with_others].map(|x| x.into_data().iter::<f32>().collect());
                assert_near(&with_others, &alone, &format!("text {text}"));
            }
        }
    }
}

#[test]
fn what_has_no_features() {
    let device = Device::flex();
    let size = EncoderSize::ROBERTA_BASE.tiny();
    let model = memsave::bert::Bert::new(&size, &device);
    let mean = FeatureOptions::new(Pooling::Mean);
    let refused = |texts: Vec<Vec<u32>>, options| {
        features(&model, [texts], options).next().unwrap().unwrap_err().to_string()
    };
    assert_eq!(refused(vec![vec![2], vec![]], mean), "text 1 of the batch has no tokens");
    assert_eq!(refused(vec![], mean), "the batch is empty");
    assert!(refused(vec![vec![50]], mean).contains("the token 50, and the model has 50"));
    assert!(refused(vec![vec![2; 13]], mean).contains("13 tokens, and the longest text of the model has 12"));
    assert_eq!(refused(vec![vec![2]], mean.with_layer(3)), "there is no layer 3: the model has 2");
    let rows = features(&model, [vec![vec![2; 13]], vec![vec![2; 12]]], mean).map(|rows| rows.is_ok());
    assert_eq!(rows.collect::<Vec<_>>(), [false, true]);

    let tracked = memsave::bert::Bert::new(&size, &Device::flex().autodiff());
    let result = features(&tracked, [vec![vec![2]]], mean).next().unwrap();
    assert!(matches!(result, Err(FeatureError::Tracked)));

    let vit = memsave::vit::Vit::new(&VitSize::TINY, &device);
    let images = Tensor::<4>::ones([2, 3, 12, 16], &device);
    let error = features(&vit, [images.clone()], mean).next().unwrap().unwrap_err();
    assert!(error.to_string().contains("images of [3, 12, 16]"), "{error}");
    let error = features(&small_whisper(), [Tensor::<3>::ones([1, 80, 2999], &device)], mean).next().unwrap();
    assert!(error.unwrap_err().to_string().contains("sounds of [80, 2999]"));
    let images = images.narrow(3, 0, 12);
    let rows = features(&vit, [images.clone().cast(DType::F16)], mean).next().unwrap().unwrap();
    assert_eq!((rows.dims(), rows.dtype()), ([2, 24], DType::F32));
    let error = features(&vit, [images * f32::INFINITY], mean).next().unwrap().unwrap_err();
    assert!(matches!(error, FeatureError::NotFinite { batch: 0 }), "{error}");
}

/// The example writes features to their places, in batches of similar lengths.
#[test]
fn the_order_of_the_output_is_that_of_the_input() {
    let lengths = [2, 5, 1, 4, 4];
    let batches = inputs::batches(&lengths, 8);
    assert_eq!(batches, [vec![1], vec![3, 4], vec![0, 2]]);
    assert_eq!(inputs::batches(&lengths, 0).len(), 5);
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("features.safetensors");
    for (rows, has_lengths) in [(lengths, true), ([1; 5], false)] {
        let mut output = Output::create(&path, &rows, 3, has_lengths).unwrap();
        for batch in &batches {
            // Each number says of which text it is.
            let numbers = batch.iter().flat_map(|&text| vec![text as f32; 3 * rows[text]]);
            let numbers: Vec<f32> = numbers.collect();
            output.write(batch, TensorData::new(numbers.clone(), [numbers.len() / 3, 3])).unwrap();
        }
        output.finish().unwrap();
        let file = WeightFile::open(&path).unwrap();
        let expected: Vec<f32> = (0..5).flat_map(|text| vec![text as f32; 3 * rows[text]]).collect();
        let features = file.read("features").unwrap();
        assert_eq!((&features.shape()[..], file.has("lengths")), (&[expected.len() / 3, 3][..], has_lengths));
        assert_eq!(features.iter::<f32>().collect::<Vec<_>>(), expected);
        if has_lengths {
            let lengths: Vec<i64> = file.read("lengths").unwrap().iter::<i64>().collect();
            assert_eq!(lengths, rows.map(|rows| rows as i64));
        }
    }
}

/// Texts of the example, without a tokenizer.
struct Listed(Vec<Vec<u32>>, Vec<usize>);

impl Inputs for Listed {
    type Batch = Vec<Vec<u32>>;

    fn tokens(&self) -> &[usize] {
        &self.1
    }

    fn batch(&self, numbers: &[usize]) -> Result<Self::Batch, Box<dyn Error>> {
        Ok(numbers.iter().map(|&text| self.0[text].clone()).collect())
    }

    fn names(&self, numbers: &[usize]) -> String {
        format!("the texts {numbers:?}")
    }
}

/// What the example writes.
fn written<I: Inputs>(
    model: &impl FeatureEncoder<Batch = I::Batch>,
    inputs: &I,
    pooling: Pooling,
    report: &LazyReport,
) -> Vec<f32> {
    let directory = tempfile::tempdir().unwrap();
    let output = &directory.path().join("features.safetensors");
    let settings = Settings { output, pooling, layer: None, at_once: 26 };
    let Run { inputs: count, tokens, batches, seconds, read } =
        write_features(model, inputs, &settings, &report.cache).unwrap();
    assert_eq!((count, tokens), (inputs.tokens().len(), inputs.tokens().iter().sum()));
    assert!(batches > 1 && batches < count && read > 0 && seconds > 0.0);
    let file = WeightFile::open(output).unwrap();
    assert_eq!(file.has("lengths"), pooling == Pooling::All);
    file.read("features").unwrap().iter::<f32>().collect()
}

/// The example's images are those of `torch`, which `transformers` resizes with, but for rounding to whole numbers.
fn resized_images(directory: &Path) {
    let images: Value = serde_json::from_slice(&fs::read(directory.join("resized.json")).unwrap()).unwrap();
    let bytes = |value: &Value| serde_json::from_value::<Vec<u8>>(value.clone()).unwrap();
    let size = |value: &Value| serde_json::from_value::<[usize; 2]>(value.clone()).unwrap();
    for image in images.as_array().unwrap() {
        let rgb = Rgb { size: size(&image["from"]), bytes: bytes(&image["image"]) };
        let (resized, expected) = (pixels::resized(rgb, size(&image["to"])), bytes(&image["resized"]));
        assert_eq!((resized.size, resized.bytes.len()), (size(&image["to"]), expected.len()));
        let off = resized.bytes.iter().zip(&expected).map(|(a, b)| a.abs_diff(*b)).max();
        assert!(off <= Some(1), "{:?}: off by {off:?}", resized.size);
    }
}

#[test]
fn images_are_prepared_as_the_configuration_says() {
    let directory = tempfile::tempdir().unwrap();
    let read = |config: Value| {
        fs::write(directory.path().join("preprocessor_config.json"), config.to_string()).unwrap();
        Preprocessor::read(directory.path()).map_err(|error| error.to_string())
    };
    let image = || Rgb { size: [1, 2], bytes: vec![0, 51, 102, 255, 204, 153] };
    let usual = json!({"size": {"height": 1, "width": 2}, "image_processor_type": "ViTImageProcessor", "resample": 2});
    let (numbers, size) = read(usual).unwrap().apply(image());
    assert_eq!(size, [1, 2]);
    assert_near(&numbers, &[-1.0, 1.0, -0.6, 0.6, -0.2, 0.2], "as usual");
    let other = json!({"do_resize": false, "image_mean": [0.0, 0.2, 0.4], "image_std": [1.0, 0.5, 0.1], "resample": 3});
    let (numbers, _) = read(other).unwrap().apply(image());
    assert_near(&numbers, &[0.0, 1.0, 0.0, 1.2, 0.0, 2.0], "with other means");
    let (numbers, _) =
        read(json!({"size": 1, "do_rescale": false, "do_normalize": false})).unwrap().apply(image());
    assert_eq!(numbers, [128.0, 128.0, 128.0]);
    for (config, expected) in [
        (json!({"resample": 3}), "resample is 3, which is not supported"),
        (json!({"size": {"shortest_edge": 4}}), r#"size is {"shortest_edge":4}, which is not supported"#),
        (json!({"size": 0}), "size is [0, 0], which is not supported"),
        (json!({"do_center_crop": true}), "do_center_crop is true, which is not supported"),
        (
            json!({"image_processor_type": "CLIPImageProcessor"}),
            "image_processor_type is CLIPImageProcessor, which is not supported",
        ),
        (
            json!({"feature_extractor_type": "BeitFeatureExtractor"}),
            "feature_extractor_type is BeitFeatureExtractor, which is not supported",
        ),
    ] {
        assert!(read(config).unwrap_err().ends_with(expected), "{expected}");
    }
}
