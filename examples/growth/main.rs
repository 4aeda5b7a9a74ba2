//! Trains the language model of <https://github.com/tracel-ai/burn/issues/5212> with Burn's layers and with ours, each in a process of
//! its own, and shows how device memory grows: the bytes in use after each step, and those that the pool has reserved.
//!
//! ```sh
//! cargo run --release --no-default-features --features wgpu --example growth -- --plot growth.svg
//! cargo run --release --no-default-features --features cuda --example growth -- --size 50m --steps 300
//! ```
//!
//! With `--varying`, steps differ in length, as sentences do. With `--loaders n`, short-lived threads make the batches, as in Burn's
//! data loader: CubeCL gives every thread a stream with memory pools of its own.
#![recursion_limit = "256"]
use burn::module::Module;
use burn::optim::{AdamConfig, GradientsParams};
use burn::tensor::{Device, Int, Tensor};
use burn_memsave::measure::{TrackingAllocator, bytes_in_use, mib, peak_bytes};
use clap::{Parser, ValueEnum};
use comfy_table::{CellAlignment, Table, presets};
use indicatif::{ProgressBar, ProgressStyle};
use plotters::prelude::*;
use rand::{RngExt, SeedableRng, rngs::StdRng};
use serde::{Deserialize, Serialize};
use std::error::Error;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;
use text::{Batch, PRETRAIN, Passages, Vocabulary};

#[path = "../finetune_lm/text.rs"]
#[allow(dead_code, reason = "the other example generates text, too")]
mod text;

#[global_allocator]
static ALLOCATOR: TrackingAllocator = TrackingAllocator::new();

/// Trains a language model with Burn's layers and with ours, and shows how device memory grows.
#[derive(Parser)]
struct Args {
    /// The size of the model.
    #[arg(long, value_enum, default_value_t = ModelSize::Small)]
    size: ModelSize,
    /// Steps of each training.
    #[arg(long, default_value_t = 60)]
    steps: usize,
    /// Passages per step; the default depends on the size.
    #[arg(long)]
    batch_size: Option<usize>,
    /// Tokens of a passage; the default depends on the size.
    #[arg(long)]
    length: Option<usize>,
    /// Draws the length of passages anew for every step, from half the length on.
    #[arg(long)]
    varying: bool,
    /// Makes batches on this many threads, which are new for every eight steps; 0 uses the main thread.
    #[arg(long, default_value_t = 0)]
    loaders: usize,
    /// The seed of weights and passages.
    #[arg(long, default_value_t = 42)]
    seed: u64,
    /// Writes a picture of the memory over the steps to this file (SVG).
    #[arg(long)]
    plot: Option<PathBuf>,
    /// Writes all steps to this file.
    #[arg(long)]
    csv: Option<PathBuf>,
    /// Trains only this side and prints its steps; the program starts itself with this.
    #[arg(long, value_enum, hide = true)]
    side: Option<Side>,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum ModelSize {
    /// 2 blocks of 128 features, batches of 4 x 128.
    Small,
    /// The model of the issue: 6 blocks of 384 features, batches of 6 x 512.
    #[value(name = "50m")]
    M50,
    /// The larger one: 24 blocks.
    #[value(name = "80m")]
    M80,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Side {
    Burn,
    Ours,
}

/// The size of a model.
struct Size {
    vocabulary: usize,
    width: usize,
    hidden: usize,
    heads: usize,
    blocks: usize,
    length: usize,
}

/// A model that predicts the next token.
trait LanguageModel: Module {
    fn new(size: &Size, device: &Device) -> Self;
    /// The mean cross entropy of the tokens that follow.
    fn loss(&self, tokens: Tensor<2, Int>, next: Tensor<2, Int>) -> Tensor<1>;
}

/// The model of Burn's layers.
mod stock {
    use burn::nn::{self, loss::CrossEntropyLossConfig};
    include!("model.rs");

    fn next_token_loss(head: &Linear, x: Tensor<3>, next: Tensor<2, Int>) -> Tensor<1> {
        let logits = head.forward(x).flatten(0, 1);
        CrossEntropyLossConfig::new().init(&logits.device()).forward(logits, next.flatten(0, 1))
    }
}

/// The same file with these lines changed.
mod memsave {
    use burn_memsave::nn::{self, loss::FusedLinearCrossEntropyConfig};
    include!("model.rs");

    fn next_token_loss(head: &Linear, x: Tensor<3>, next: Tensor<2, Int>) -> Tensor<1> {
        FusedLinearCrossEntropyConfig::new().init(&x.device()).forward(head, x, next)
    }
}

/// What is measured after a step.
#[derive(Clone, Serialize, Deserialize)]
struct Step {
    side: Side,
    step: usize,
    loss: f32,
    in_use: u64,
    reserved: u64,
    seconds: f64,
}

fn main() -> Result<(), Box<dyn Error>> {
    let args = Args::parse();
    if args.steps == 0 {
        return Err("at least one step".into());
    }
    match args.side {
        Some(Side::Burn) => train::<stock::Model>(&args, Side::Burn),
        Some(Side::Ours) => train::<memsave::Model>(&args, Side::Ours),
        None => compare(&args),
    }
}

/// Runs both sides, and reports.
fn compare(args: &Args) -> Result<(), Box<dyn Error>> {
    let burn = side(Side::Burn, args.steps)?;
    let ours = side(Side::Ours, args.steps)?;
    let mut table = Table::new();
    table.load_preset(presets::ASCII_MARKDOWN).set_header([
        "layers",
        "in use after step 8, MiB",
        "at the end",
        "reserved after step 8, MiB",
        "at the end",
        "first loss",
        "last loss",
        "ms per step",
    ]);
    for steps in [&burn, &ours] {
        let (first, early, last) =
            (&steps[0], &steps[7.min(steps.len() - 1)], steps.last().expect("at least one step"));
        let mut seconds: Vec<f64> = steps.iter().map(|step| step.seconds).collect();
        seconds.sort_by(f64::total_cmp);
        table.add_row([
            format!("{:?}", first.side),
            mib(early.in_use),
            mib(last.in_use),
            mib(early.reserved),
            mib(last.reserved),
            format!("{:.4}", first.loss),
            format!("{:.4}", last.loss),
            format!("{:.1}", seconds[seconds.len() / 2] * 1e3),
        ]);
    }
    table.column_iter_mut().skip(1).for_each(|column| column.set_cell_alignment(CellAlignment::Right));
    println!("{table}");
    let all: Vec<Step> = burn.into_iter().chain(ours).collect();
    if let Some(path) = &args.csv {
        let mut writer = csv::Writer::from_path(path).map_err(|error| named(path, error))?;
        all.iter().try_for_each(|step| writer.serialize(step))?;
        writer.flush()?;
    }
    if let Some(path) = &args.plot {
        plot(path, &all).map_err(|error| named(path, error))?;
        println!("{}", path.display());
    }
    Ok(())
}

fn named(path: &Path, error: impl std::fmt::Display) -> String {
    format!("{}: {error}", path.display())
}

/// The steps of one side, trained by this program in a process of its own, because a process keeps what its pool has reserved.
fn side(side: Side, steps: usize) -> Result<Vec<Step>, Box<dyn Error>> {
    let name = format!("{side:?}").to_lowercase();
    let mut child = Command::new(std::env::current_exe()?)
        .args(std::env::args_os().skip(1))
        .args(["--side", &name])
        .stdout(Stdio::piped())
        .spawn()?;
    let output = child.stdout.take().ok_or("no output")?;
    let style = ProgressStyle::with_template("{msg:5} {bar:40} {pos}/{len} steps, {elapsed}")?;
    let progress = ProgressBar::new(steps as u64).with_style(style).with_message(name);
    let mut trained = vec![];
    for step in csv::Reader::from_reader(output).deserialize() {
        trained.push(step?);
        progress.inc(1);
    }
    progress.finish();
    let status = child.wait()?;
    if !status.success() || trained.is_empty() {
        return Err(format!(
            "the training with the layers of {side:?} ended after {} steps: {status}",
            trained.len()
        )
        .into());
    }
    Ok(trained)
}

/// Trains, and prints the steps as CSV.
fn train<M: LanguageModel>(args: &Args, side: Side) -> Result<(), Box<dyn Error>> {
    let device = Device::default().autodiff();
    device.seed(args.seed);
    let vocabulary = Vocabulary::new();
    let (width, blocks, batch, length) = match args.size {
        ModelSize::Small => (128, 2, 4, 128),
        ModelSize::M50 => (384, 6, 6, 512),
        ModelSize::M80 => (384, 24, 6, 512),
    };
    let (batch, length) = (args.batch_size.unwrap_or(batch), args.length.unwrap_or(length));
    let size =
        Size { vocabulary: vocabulary.len(), width, hidden: 4 * width, heads: width / 32, blocks, length };
    let mut batches = Batches {
        tokens: vocabulary.tokens(PRETRAIN),
        batch,
        length,
        varying: args.varying,
        rng: StdRng::seed_from_u64(args.seed),
    };
    let mut model = M::new(&size, &device);
    let mut optimizer = AdamConfig::new().init();
    let mut output = csv::Writer::from_writer(std::io::stdout());
    let mut ready: Vec<Batch> = vec![];
    for step in 0..args.steps {
        if ready.is_empty() {
            ready = batches.load(args.loaders, &device)?;
        }
        let (tokens, next) = ready.pop().ok_or("no batch")?;
        let start = Instant::now();
        let loss = model.loss(tokens, next);
        let gradients = GradientsParams::from_grads(loss.backward(), &model);
        model = optimizer.step(3e-4, model, gradients);
        let loss = loss.into_scalar::<f32>();
        device.sync()?;
        let bytes = |bytes: Option<u64>| bytes.ok_or("the memory of this device is not counted");
        output.serialize(Step {
            side,
            step,
            loss,
            in_use: bytes(bytes_in_use(&device))?,
            reserved: bytes(peak_bytes(&device))?,
            seconds: start.elapsed().as_secs_f64(),
        })?;
        output.flush()?;
    }
    Ok(())
}

/// What the model is trained with: the documents of this repository.
struct Batches {
    tokens: Vec<i64>,
    batch: usize,
    length: usize,
    varying: bool,
    rng: StdRng,
}

impl Batches {
    /// Some batches, the last one first.
    fn load(&mut self, loaders: usize, device: &Device) -> Result<Vec<Batch>, Box<dyn Error>> {
        let mut passages = || {
            let length =
                if self.varying { self.rng.random_range(self.length / 2..=self.length) } else { self.length };
            Passages::new(self.tokens.clone(), [self.batch, length.max(1)], self.rng.random())
        };
        if loaders == 0 {
            return Ok(vec![passages()?.next(device)]);
        }
        let mut threads = vec![];
        for _ in 0..loaders {
            let (device, mut passages) = (
                device.clone(),
                (0..8usize.div_ceil(loaders)).map(|_| passages()).collect::<Result<Vec<_>, _>>()?,
            );
            threads.push(std::thread::spawn(move || {
                passages.iter_mut().map(|passages| passages.next(&device)).collect::<Vec<_>>()
            }));
        }
        let batches: Result<Vec<_>, _> = threads.into_iter().map(|thread| thread.join()).collect();
        Ok(batches.map_err(|_| "a thread that makes batches panicked")?.into_iter().flatten().collect())
    }
}

/// A picture of the memory over the steps.
fn plot(path: &Path, steps: &[Step]) -> Result<(), Box<dyn Error>> {
    let to_mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
    let last = steps.iter().map(|step| step.step).max().unwrap_or(0);
    let most = steps.iter().map(|step| to_mib(step.reserved.max(step.in_use))).fold(1.0, f64::max);
    let root = SVGBackend::new(path, (900, 500)).into_drawing_area();
    root.fill(&WHITE)?;
    let mut chart = ChartBuilder::on(&root)
        .margin(16)
        .caption("Memory of the device while a language model is trained", ("sans-serif", 20))
        .x_label_area_size(44)
        .y_label_area_size(70)
        .build_cartesian_2d(0..last.max(1), 0.0..most * 1.1)?;
    chart.configure_mesh().x_desc("step").y_desc("MiB").label_style(("sans-serif", 14)).draw()?;
    // These colors also differ in grayscale.
    let (burn, ours) = (RGBColor(213, 94, 0), RGBColor(0, 60, 120));
    type Line = (Side, fn(&Step) -> u64, &'static str, RGBColor, u32);
    let lines: [Line; 4] = [
        (Side::Burn, |step| step.reserved, "Burn, reserved", burn, 3),
        (Side::Burn, |step| step.in_use, "Burn, in use", burn, 1),
        (Side::Ours, |step| step.reserved, "ours, reserved", ours, 3),
        (Side::Ours, |step| step.in_use, "ours, in use", ours, 1),
    ];
    for (side, bytes, name, colour, width) in lines {
        let points =
            steps.iter().filter(|step| step.side == side).map(|step| (step.step, to_mib(bytes(step))));
        let style = colour.stroke_width(width);
        chart
            .draw_series(LineSeries::new(points, style))?
            .label(name)
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 24, y)], style));
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::MiddleRight)
        .background_style(WHITE.mix(0.8))
        .border_style(BLACK)
        .label_font(("sans-serif", 14))
        .draw()?;
    root.present()?;
    Ok(())
}
