//! Fine-tunes a partly frozen residual CNN on real handwritten digits, once with Burn's layers and once with ours, and compares accuracy,
//! memory and time.
//!
//! The network is briefly pretrained on the digits 0 to 4, then fine-tuned to all ten. Both runs start from the same
//! weights and see the same batches; their accuracy must be equal, unless `--saved` makes ours keep rounded inputs.
//!
//! ```sh
//! cargo run --release --example finetune -- --train norm --json result.json
//! ```
#![recursion_limit = "256"]
use burn::module::{Module, ParamGroup};
use burn::nn::loss::CrossEntropyLossConfig;
use burn::optim::{AdamConfig, GradientsParams};
use burn::store::ModuleRecord;
use burn::tensor::{Device, Tensor};
use burn_memsave::measure::{Measurement, TrackingAllocator, ledger, measure_step, mib};
use burn_memsave::saved::SavedPolicy;
use clap::{Parser, ValueEnum};
use comfy_table::{CellAlignment, Table, presets};
use digits::{Batch, Digit};
use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;
use std::{error::Error, fs, path::PathBuf, time::Instant};

mod digits;

/// The network of Burn's layers.
mod stock {
    use burn::nn;
    include!("model.rs");
}

/// The same file with the one line changed.
mod memsave {
    use burn_memsave::nn;
    include!("model.rs");
}

#[global_allocator]
static ALLOCATOR: TrackingAllocator = TrackingAllocator::new();

/// An image classifier.
trait Classifier: Module {
    fn new(device: &Device) -> Self;
    /// Logits `[batch, 10]` of images `[batch, 1, 8, 8]`.
    fn forward(&self, images: Tensor<4>) -> Tensor<2>;
}

/// How a network is trained.
struct Training<'a> {
    title: &'static str,
    epochs: usize,
    learning_rate: f64,
    saved: SavedPolicy,
    args: &'a Args,
    device: &'a Device,
}

/// Fine-tunes a partly frozen residual CNN on handwritten digits: Burn's layers beside burn-memsave's.
#[derive(Parser)]
struct Args {
    /// What is trained in the fine-tuning; the head always is.
    #[arg(long, value_enum, default_value_t = Part::Norm)]
    train: Part,
    /// Passes over the digits 0 to 4 before the fine-tuning.
    #[arg(long, default_value_t = 2)]
    pretrain_epochs: usize,
    /// Passes over all digits in the fine-tuning.
    #[arg(long, default_value_t = 12)]
    epochs: usize,
    /// The learning rate of the fine-tuning.
    #[arg(long, default_value_t = 3e-3)]
    learning_rate: f64,
    /// Images per step.
    #[arg(long, default_value_t = 64)]
    batch_size: usize,
    /// How our layers keep their inputs for the backward pass in the fine-tuning.
    #[arg(long, value_enum, default_value_t = Saved::Keep)]
    saved: Saved,
    /// The seed of the weights and of the order of images.
    #[arg(long, default_value_t = 42)]
    seed: u64,
    /// Also writes the result to this file.
    #[arg(long)]
    json: Option<PathBuf>,
    /// Also prints what each layer keeps for the backward pass, and why.
    #[arg(long)]
    ledger: bool,
}

#[derive(Clone, Copy, ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
enum Part {
    /// Everything.
    All,
    /// Norm layers.
    Norm,
    /// Only the head.
    Head,
    /// The stem and the first of the four residual blocks.
    FirstQuarter,
}

impl Part {
    /// Freezes all but this part; a frozen batch norm uses its running statistics.
    fn freeze<M: Module>(self, model: M) -> Result<M, Box<dyn Error>> {
        let trained = match self {
            Self::All => return Ok(model),
            Self::Norm => "norm|^head",
            Self::Head => "^head",
            Self::FirstQuarter => r"^stem|^stage1\.0|^head",
        };
        let trained = ParamGroup::from_regex(trained).map_err(|error| format!("{error:?}"))?;
        Ok(model.freeze().unfreeze_group(trained))
    }
}

#[derive(Clone, Copy, ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
enum Saved {
    /// As they are.
    Keep,
    /// In half as many bits.
    Half,
    /// In half as many bits, as f16.
    HalfF16,
    /// In 8 bits.
    Int8,
}

impl Saved {
    fn policy(self) -> SavedPolicy {
        match self {
            Self::Keep => SavedPolicy::Keep,
            Self::Half => SavedPolicy::Half,
            Self::HalfF16 => SavedPolicy::HalfF16,
            Self::Int8 => SavedPolicy::Int8,
        }
    }
}

#[derive(Serialize)]
struct Outcome {
    layers: &'static str,
    accuracy: f64,
    step_seconds: f64,
    memory: Measurement,
}

fn main() -> Result<(), Box<dyn Error>> {
    let args = Args::parse();
    let device = Device::flex().autodiff();
    device.seed(args.seed);
    let (train, test) = digits::load()?;

    let low: Vec<Digit> = train.iter().filter(|digit| digit.label < 5).cloned().collect();
    let (args, device) = (&args, &device);
    let (epochs, learning_rate) = (args.epochs, args.learning_rate);
    let training =
        |title, saved: Saved| Training { title, epochs, learning_rate, saved: saved.policy(), args, device };
    let pretraining =
        Training { epochs: args.pretrain_epochs, learning_rate: 1e-2, ..training("pretrain", Saved::Keep) };
    let (model, _) = pretraining.fit(stock::Net::new(device), &low)?;
    let weights = model.into_record().into_bytes()?;

    let outcomes = [
        training("Burn", Saved::Keep).fine_tune::<stock::Net>(weights.clone(), &train, &test)?,
        training("burn-memsave", args.saved).fine_tune::<memsave::Net>(weights, &train, &test)?,
    ];
    println!("{}", table(&outcomes));
    if let Some(path) = &args.json {
        let result = serde_json::json!({ "train": args.train, "saved": args.saved, "seed": args.seed, "outcomes": outcomes });
        let text = serde_json::to_string_pretty(&result)?;
        fs::write(path, text).map_err(|error| format!("{}: {error}", path.display()))?;
    }
    Ok(())
}

impl Training<'_> {
    /// Loads the pretrained weights, freezes, trains, tests and measures.
    fn fine_tune<M: Classifier>(
        &self,
        weights: burn::tensor::Bytes,
        train: &[Digit],
        test: &[Digit],
    ) -> Result<Outcome, Box<dyn Error>> {
        let &Self { title, args, device, .. } = self;
        let model = M::new(device).load_record(ModuleRecord::from_bytes(weights)?);
        let model = args.train.freeze(model)?;
        let first = digits::batch(&train[..args.batch_size.min(train.len())], device);
        let memory = measure_step(&model, first.clone(), |model, batch| self.loss(model, batch));
        if args.ledger {
            let (_, ledger) = ledger(&model, first.clone(), |model, batch| self.loss(model, batch));
            println!("{title}\n{ledger}");
        }
        let (model, step_seconds) = self.fit(model, train)?;
        Ok(Outcome { layers: title, accuracy: accuracy(&model, test, device), step_seconds, memory })
    }

    fn loss<M: Classifier>(&self, model: &M, (images, labels): Batch) -> Tensor<1> {
        let loss = CrossEntropyLossConfig::new().init(self.device);
        self.saved.scope(|| loss.forward(model.forward(images), labels))
    }

    /// Trains with Adam, and returns the model and the mean time of a step.
    fn fit<M: Classifier>(&self, mut model: M, digits: &[Digit]) -> Result<(M, f64), Box<dyn Error>> {
        let &Self { title, epochs, learning_rate, args, device, .. } = self;
        let mut optimizer = AdamConfig::new().init();
        let steps = epochs * digits.len().div_ceil(args.batch_size);
        let style = ProgressStyle::with_template("{msg:12} {bar:40} {pos}/{len} steps, {elapsed}")?;
        let progress = ProgressBar::new(steps as u64).with_style(style).with_message(title);
        let start = Instant::now();
        for epoch in 0..epochs {
            for digits in digits::shuffled(digits, args.seed + epoch as u64).chunks(args.batch_size) {
                let gradients = self.loss(&model, digits::batch(digits, device)).backward();
                let gradients = GradientsParams::from_grads(gradients, &model);
                model = optimizer.step(learning_rate, model, gradients);
                progress.inc(1);
            }
        }
        progress.finish();
        Ok((model, start.elapsed().as_secs_f64() / steps.max(1) as f64))
    }
}

/// The share of digits that the model recognizes.
fn accuracy<M: Classifier>(model: &M, digits: &[Digit], device: &Device) -> f64 {
    let (images, labels) = digits::batch(digits, &device.clone().inner());
    let found = model.valid().forward(images).argmax(1).squeeze_dim::<1>(1);
    let right = found.equal(labels).int().sum().into_scalar::<i64>();
    right as f64 / digits.len() as f64
}

fn table(outcomes: &[Outcome; 2]) -> Table {
    let mut table = Table::new();
    table.load_preset(presets::ASCII_MARKDOWN);
    table.set_header([
        "layers",
        "test accuracy",
        "kept after forward (MiB)",
        "peak of a step (MiB)",
        "time per step (ms)",
    ]);
    let size = |bytes: Option<u64>| bytes.map_or_else(|| "unknown".into(), mib);
    for outcome in outcomes {
        table.add_row([
            outcome.layers.into(),
            format!("{:.1} %", 100.0 * outcome.accuracy),
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
