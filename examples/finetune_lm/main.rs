//! Fine-tunes a small Llama-style language model with LoRA or QLoRA, once with Burn's layers and once with ours, and compares memory and
//! time.
//!
//! The model reads characters. It is briefly pretrained on the documents of this repository, then fine-tuned to the text of its
//! license. Both runs start from the same weights and adapters and see the same passages; their losses must be equal.
//!
//! ```sh
//! cargo run --release --example finetune_lm -- --quantize --json result.json
//! ```
#![recursion_limit = "256"]
use burn::module::{Lora, Module, ParamGroup, QLora, Quantizer};
use burn::optim::{AdamConfig, AdamWConfig, GradientsParams, ModuleOptimizer};
use burn::store::ModuleRecord;
use burn::tensor::{
    Bytes, Device, Int, Tensor,
    quantization::{Calibration, QuantValue},
};
use burn_memsave::lora;
use burn_memsave::measure::{Measurement, TrackingAllocator, ledger, measure_step, mib};
use burn_memsave::optim::{AdamW8bitConfig, step_in_backward};
use clap::{Parser, ValueEnum};
use comfy_table::{CellAlignment, Table, presets};
use indicatif::{ProgressBar, ProgressStyle};
use llama::{LanguageModel, Size, memsave, stock};
use rand::{SeedableRng, rngs::StdRng};
use serde::Serialize;
use std::{error::Error, fs, path::PathBuf, time::Instant};
use text::{Passages, Vocabulary};

mod llama;
#[path = "../picture/mod.rs"]
mod picture;
mod text;

#[global_allocator]
static ALLOCATOR: TrackingAllocator = TrackingAllocator::new();

/// Fine-tunes a small language model with low-rank adapters: Burn's layers beside burn-memsave's.
#[derive(Parser)]
struct Args {
    /// QLoRA: quantizes the frozen weights of the blocks to 8 bits.
    #[arg(long)]
    quantize: bool,
    /// LoRA-FA: trains only the second factor of every adapter.
    #[arg(long)]
    freeze_first_factors: bool,
    /// The rank of the adapters.
    #[arg(long, default_value_t = 8)]
    rank: usize,
    /// The alpha of the adapters, which are scaled by alpha / rank.
    #[arg(long, default_value_t = 16.0)]
    alpha: f64,
    /// Features.
    #[arg(long, default_value_t = 128)]
    width: usize,
    /// Blocks of attention and feed-forward layers.
    #[arg(long, default_value_t = 4)]
    blocks: usize,
    /// Characters of a passage.
    #[arg(long, default_value_t = 128)]
    length: usize,
    /// Passages per step.
    #[arg(long, default_value_t = 8)]
    batch_size: usize,
    /// Steps of the pretraining.
    #[arg(long, default_value_t = 200)]
    pretrain_steps: usize,
    /// Steps of each fine-tuning.
    #[arg(long, default_value_t = 100)]
    steps: usize,
    /// The learning rate of the fine-tuning.
    #[arg(long, default_value_t = 5e-3)]
    learning_rate: f64,
    /// The optimizer of pretraining and fine-tuning.
    #[arg(long, value_enum, default_value_t = OptimizerKind::Adam)]
    optimizer: OptimizerKind,
    /// Updates every parameter in the backward pass, as soon as its gradient is complete.
    #[arg(long)]
    in_backward: bool,
    /// Characters to generate.
    #[arg(long, default_value_t = 160)]
    generate: usize,
    /// The seed of weights, adapters, passages and generated text.
    #[arg(long, default_value_t = 42)]
    seed: u64,
    /// Also writes the result to this file.
    #[arg(long)]
    json: Option<PathBuf>,
    /// Also draws the memory over one step of both fine-tunings, as SVG.
    #[arg(long)]
    plot: Option<PathBuf>,
    /// Also prints what each layer keeps for the backward pass, and why.
    #[arg(long)]
    ledger: bool,
}

/// Burn's Adam or AdamW, or AdamW with moments of 8 bits.
#[derive(Clone, Copy, Debug, ValueEnum)]
enum OptimizerKind {
    Adam,
    Adamw,
    Adamw8bit,
}

impl OptimizerKind {
    fn init<M: Module>(self, model: &M) -> ModuleOptimizer {
        match self {
            Self::Adam => AdamConfig::new().init(),
            Self::Adamw => AdamWConfig::new().init(),
            Self::Adamw8bit => AdamW8bitConfig::new().init_for(model),
        }
    }
}

#[derive(Serialize)]
struct Outcome {
    layers: &'static str,
    /// The loss of every step.
    losses: Vec<f32>,
    step_seconds: f64,
    memory: Measurement,
    /// What the model writes in the end.
    sample: String,
    /// The memory over a step, if it is to be drawn.
    #[serde(skip)]
    memory_over_step: Vec<picture::Sample>,
}

const PROMPT: &str = "This ";
const HEADS: usize = 4;
/// The losses of the two runs may drift apart by this much in a hundred steps, because their sums are rounded differently.
const TOLERANCE: f32 = 1e-2;
/// Passages differ, so the loss of the pretrained model is the mean of this many last steps.
const LAST: usize = 50;

fn main() -> Result<(), Box<dyn Error>> {
    let args = Args::parse();
    if args.rank == 0 || args.length == 0 || args.batch_size == 0 || args.steps == 0 {
        return Err("rank, length, batch size and steps must be at least 1".into());
    }
    if args.width == 0 || !args.width.is_multiple_of(2 * HEADS) {
        return Err(format!("the width must be a multiple of {}", 2 * HEADS).into());
    }
    let device = Device::flex().autodiff();
    device.seed(args.seed);
    let vocabulary = Vocabulary::new();
    let size = Size {
        vocabulary: vocabulary.len(),
        width: args.width,
        heads: HEADS,
        hidden: (args.width * 8 / 3).next_multiple_of(32),
        blocks: args.blocks,
        length: args.length,
    };

    let passages = passages(text::PRETRAIN, &vocabulary, &args)?;
    let model = memsave::Llama::new(&size, &device);
    let (optimizer, in_backward) = (args.optimizer, args.in_backward);
    let run =
        Run { title: "pretrain", steps: args.pretrain_steps, learning_rate: 3e-3, optimizer, in_backward };
    let (model, losses, _) = fit(model, passages, &run, &device)?;
    println!(
        "pretrained to a loss of {:.3}, the mean of the last {LAST} steps; writes:\n",
        mean_of_last(&losses, LAST)
    );
    println!("{}\n", sample(&model, &vocabulary, &size, &args, &device));
    let weights = model.into_record().into_bytes()?;

    let outcomes = [
        fine_tune::<stock::Llama>("Burn", weights.clone(), &vocabulary, &size, &args, &device)?,
        fine_tune::<memsave::Llama>("burn-memsave", weights, &vocabulary, &size, &args, &device)?,
    ];
    println!("fine-tuned; writes:\n\n{}\n", outcomes[1].sample);
    println!("{}", table(&outcomes));
    let [stock, ours] = &outcomes;
    let difference = stock.losses.iter().zip(&ours.losses).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    println!("largest difference of the losses of a step: {difference:.1e}");
    if let Some(path) = &args.json {
        let result = serde_json::json!({
            "quantized": args.quantize, "rank": args.rank, "seed": args.seed, "outcomes": outcomes,
        });
        let text = serde_json::to_string_pretty(&result)?;
        fs::write(path, text).map_err(|error| format!("{}: {error}", path.display()))?;
    }
    if let Some(path) = &args.plot {
        let title = "Memory over one step of fine-tuning a language model with LoRA";
        let steps = [stock, ours].map(|outcome| (outcome.layers, &outcome.memory_over_step[..]));
        picture::draw(path, title, None, steps)?;
    }
    match difference < TOLERANCE {
        true => Ok(()),
        false => Err(format!("the losses differ by {difference}").into()),
    }
}

fn passages(text: &str, vocabulary: &Vocabulary, args: &Args) -> Result<Passages, String> {
    Passages::new(vocabulary.tokens(text), [args.batch_size, args.length], args.seed)
}

/// Attaches adapters to the matrices of the blocks. Everything else is frozen.
fn adapt<M: Module>(model: M, args: &Args, device: &Device) -> Result<M, Box<dyn Error>> {
    let group = || ParamGroup::from_regex(r"^blocks\..*\.weight$").map_err(|error| format!("{error:?}"));
    let lora = Lora::new(args.rank, args.alpha).set_param_group(group()?);
    device.seed(args.seed);
    let model = match args.quantize {
        false => model.apply_lora(lora),
        true => {
            let scheme = device.settings().quantization.scheme.with_value(QuantValue::Q8S);
            let mut quantizer = Quantizer::new(Calibration::MinMax, scheme);
            quantizer.set_param_group(group()?);
            model.apply_qlora(QLora::new(lora, quantizer))
        }
    };
    Ok(match args.freeze_first_factors {
        false => model,
        true => model.freeze_group(lora::a_factors()),
    })
}

/// Loads the pretrained weights, attaches adapters, measures, trains and writes.
fn fine_tune<M: LanguageModel>(
    layers: &'static str,
    weights: Bytes,
    vocabulary: &Vocabulary,
    size: &Size,
    args: &Args,
    device: &Device,
) -> Result<Outcome, Box<dyn Error>> {
    let model = M::new(size, device).load_record(ModuleRecord::from_bytes(weights)?);
    let model = adapt(model, args, device)?;
    let first = passages(text::FINETUNE, vocabulary, args)?.next(device);
    let loss = |model: &M, (tokens, next): text::Batch| model.loss(tokens, next);
    let memory = measure_step(&model, first.clone(), loss);
    let memory_over_step = if args.plot.is_some() { picture::sample(&model, &first, loss) } else { vec![] };
    if args.ledger {
        let (_, ledger) = ledger(&model, first.clone(), loss);
        println!("{layers}\n{ledger}");
    }
    let Args { steps, learning_rate, optimizer, in_backward, .. } = *args;
    let run = Run { title: layers, steps, learning_rate, optimizer, in_backward };
    let (model, losses, step_seconds) =
        fit(model, passages(text::FINETUNE, vocabulary, args)?, &run, device)?;
    let sample = sample(&model, vocabulary, size, args, device);
    Ok(Outcome { layers, losses, step_seconds, memory, sample, memory_over_step })
}

struct Run {
    title: &'static str,
    steps: usize,
    learning_rate: f64,
    optimizer: OptimizerKind,
    in_backward: bool,
}

/// Trains, and returns the model, the losses, and the mean time of a step.
fn fit<M: LanguageModel>(
    mut model: M,
    mut passages: Passages,
    run: &Run,
    device: &Device,
) -> Result<(M, Vec<f32>, f64), Box<dyn Error>> {
    let mut optimizer = run.optimizer.init(&model);
    let style = ProgressStyle::with_template("{msg:12} {bar:40} {pos}/{len} steps, {elapsed}")?;
    let progress = ProgressBar::new(run.steps as u64).with_style(style).with_message(run.title);
    let mut losses = Vec::new();
    let start = Instant::now();
    for _ in 0..run.steps {
        let (tokens, next) = passages.next(device);
        let loss = |model: &M| model.loss(tokens.clone(), next.clone());
        if run.in_backward {
            let (updated, loss) = step_in_backward(model, &mut optimizer, run.learning_rate, loss)
                .map_err(|refused| refused.error)?;
            model = updated;
            losses.push(loss.into_scalar::<f32>());
        } else {
            let loss = loss(&model);
            losses.push(loss.clone().into_scalar::<f32>());
            let gradients = GradientsParams::from_grads(loss.backward(), &model);
            model = optimizer.step(run.learning_rate, model, gradients);
        }
        progress.inc(1);
    }
    progress.finish();
    Ok((model, losses, start.elapsed().as_secs_f64() / run.steps.max(1) as f64))
}

/// What the model writes after the prompt. Adapters are merged first.
fn sample<M: LanguageModel>(
    model: &M,
    vocabulary: &Vocabulary,
    size: &Size,
    args: &Args,
    device: &Device,
) -> String {
    let model = model.valid().materialize();
    let (device, mut rng) = (device.clone().inner(), StdRng::seed_from_u64(args.seed));
    let mut tokens = vocabulary.tokens(PROMPT);
    for _ in 0..args.generate {
        let context = &tokens[tokens.len().saturating_sub(size.length)..];
        let input = Tensor::<1, Int>::from_data(context, &device).unsqueeze();
        let last = model.logits(input).slice([0..1, context.len() - 1..context.len()]);
        let logits: Vec<f32> = last.into_data().iter::<f32>().collect();
        tokens.push(text::draw(&logits, 0.5, &mut rng) as i64);
    }
    vocabulary.text(&tokens)
}

fn mean_of_last(losses: &[f32], count: usize) -> f32 {
    let last = &losses[losses.len().saturating_sub(count)..];
    last.iter().sum::<f32>() / last.len() as f32
}

fn table(outcomes: &[Outcome; 2]) -> Table {
    let mut table = Table::new();
    table.load_preset(presets::ASCII_MARKDOWN);
    table.set_header([
        "layers",
        "loss, first and last steps",
        "kept after forward (MiB)",
        "peak of a step (MiB)",
        "time per step (ms)",
    ]);
    let size = |bytes: Option<u64>| bytes.map_or_else(|| "unknown".into(), mib);
    for outcome in outcomes {
        let losses = &outcome.losses;
        let first = &losses[..losses.len().min(10)];
        table.add_row([
            outcome.layers.into(),
            format!("{:.3}, {:.3}", mean_of_last(first, 10), mean_of_last(losses, 10)),
            size(outcome.memory.kept),
            size(outcome.memory.peak),
            format!("{:.1}", 1e3 * outcome.step_seconds),
        ]);
    }
    let [stock, ours] = outcomes;
    let ratio = |stock: f64, ours: f64| format!("{:.2}", ours / stock);
    let bytes = |of: fn(&Measurement) -> Option<u64>| match (of(&stock.memory), of(&ours.memory)) {
        (Some(stock), Some(ours)) => ratio(stock as f64, ours as f64),
        _ => "unknown".into(),
    };
    table.add_row([
        "ratio".into(),
        String::new(),
        bytes(|memory| memory.kept),
        bytes(|memory| memory.peak),
        ratio(stock.step_seconds, ours.step_seconds),
    ]);
    for column in 1..5 {
        if let Some(column) = table.column_mut(column) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    table
}
