//! Runs a BERT-like encoder of 1.6 GiB, with its weights in memory and with its weights in their file under several budgets.
//!
//! The file has random weights. It is written once, without ever being in memory as a whole. Every run is a process of its own with one
//! computing thread. Its memory is counted above that of the process before the model is made.
//!
//! ```sh
//! cargo run --release --example infer_lazy                      # the comparison
//! (ulimit -v 900000; cargo run --release --example infer_lazy -- --only "16 MiB")    # in less memory than the model has
//! cargo run --release --example infer_lazy -- --file DIR        # a checkpoint: DIR/config.json and safetensors
//! ```
#![recursion_limit = "256"]
use bert::{BertConfig, of_hugging_face};
use burn::tensor::{DType, Device, Int, Tensor};
use burn_memsave::lazy::{LazyLoad, LazyOptions, ReadMode, WeightFile};
use burn_memsave::measure::{ResidentMemory, TrackingAllocator, mib};
use clap::Parser;
use comfy_table::{CellAlignment, Table, presets};
use serde::{Deserialize, Serialize};
use std::error::Error;
use std::path::{Path, PathBuf};
use std::time::Instant;

mod bert;
mod process;

#[global_allocator]
static ALLOCATOR: TrackingAllocator = TrackingAllocator::new();

/// Runs an encoder whose weights stay in their file: memory and speed under several budgets.
#[derive(Parser)]
struct Args {
    /// A directory with a BERT checkpoint (`config.json`, safetensors) to print embeddings of.
    #[arg(long)]
    file: Option<PathBuf>,
    /// The tokens to embed with --file.
    #[arg(long, value_delimiter = ',', default_values_t = [101, 7592, 2088, 102])]
    tokens: Vec<i64>,
    /// The budget of lazy weights with --file, in MiB.
    #[arg(long, default_value_t = 64)]
    budget: u64,
    /// Only the runs whose name contains this.
    #[arg(long)]
    only: Option<String>,
    /// Timed batches of every run, after one that is not timed; the fastest counts.
    #[arg(long, default_value_t = 7)]
    batches: usize,
    /// Sequences of a batch.
    #[arg(long, default_value_t = 1)]
    batch_size: usize,
    /// Tokens of a sequence.
    #[arg(long, default_value_t = 128)]
    length: usize,
    /// The file of random weights, which is written if it is missing.
    #[arg(long, default_value = "target/infer_lazy.bpk")]
    weights: PathBuf,
    /// The layers of the random model.
    #[arg(long, default_value_t = 24)]
    layers: usize,
    /// Does one run, by its number, in this process.
    #[arg(long, hide = true)]
    run: Option<usize>,
}

/// A way to run the model.
struct Run {
    name: &'static str,
    mode: ReadMode,
    options: LazyOptions,
}

fn runs() -> Vec<Run> {
    let eager = |name| Run { name, mode: ReadMode::Copy, options: LazyOptions::new().exclude("*") };
    let lazy = |name, mode, mib: u64, ahead| {
        let options = LazyOptions::new().with_budget(mib << 20).with_prefetch(ahead);
        Run { name, mode, options }
    };
    vec![
        eager("eager"),
        lazy("lazy, 16 MiB", ReadMode::Copy, 16, 1), // the largest weight
        lazy("lazy, 24 MiB", ReadMode::Copy, 24, 1),
        lazy("lazy, 188 MiB", ReadMode::Copy, 188, 4),
        lazy("lazy, 2 GiB", ReadMode::Copy, 2048, 4),
        lazy("mapped, 16 MiB", ReadMode::Map, 16, 1),
        eager("eager, again"), // how much times vary
    ]
}

/// What a run measured, in bytes above those of the idle process.
#[derive(Serialize, Deserialize)]
struct Outcome {
    building: Option<u64>,
    heap: u64,
    resident: Option<u64>,
    seconds_per_batch: f64,
    check: f32,
    statistics: String,
}

fn main() -> Result<(), Box<dyn Error>> {
    let args = Args::parse();
    match (&args.file, args.run) {
        (Some(directory), _) => embed(&args, directory),
        (None, Some(run)) => {
            let outcome = measure(&args, runs().swap_remove(run))?;
            println!("{}", serde_json::to_string(&outcome)?);
            Ok(())
        }
        (None, None) => compare(&args),
    }
}

fn config(args: &Args) -> BertConfig {
    BertConfig { num_hidden_layers: args.layers, ..BertConfig::large() }
}

/// Does all runs, each in a process of its own.
fn compare(args: &Args) -> Result<(), Box<dyn Error>> {
    if !args.weights.exists() {
        process::write_random_weights(&config(args).init(&Device::flex()), &args.weights)?;
    }
    let mut table = Table::new();
    table.load_preset(presets::ASCII_MARKDOWN);
    table.set_header([
        "weights",
        "heap peak (MiB)",
        "RSS peak",
        "RSS while building",
        "sequences/s",
        "of eager",
        "reads",
    ]);
    for column in 1..6 {
        if let Some(column) = table.column_mut(column) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    let mut eager: Option<Outcome> = None;
    for (index, run) in runs().into_iter().enumerate() {
        if args.only.as_ref().is_some_and(|only| !run.name.contains(only)) {
            continue;
        }
        let arguments = std::env::args_os().skip(1);
        let child = process::again(None)?
            .args(arguments)
            .args(["--run", &index.to_string()])
            .env("RAYON_NUM_THREADS", "1")
            .output()?;
        let output = String::from_utf8_lossy(&child.stdout);
        let Ok(outcome) = serde_json::from_str::<Outcome>(output.trim()) else {
            let error = String::from_utf8_lossy(&child.stderr);
            table.add_row([run.name, "failed:", error.lines().last().unwrap_or("killed")]);
            continue;
        };
        let rate = args.batch_size as f64 / outcome.seconds_per_batch;
        let share = eager.as_ref().map(|eager| eager.seconds_per_batch / outcome.seconds_per_batch);
        if let Some(eager) = &eager
            && eager.check != outcome.check
        {
            return Err(format!("{}: another result than eager", run.name).into());
        }
        table.add_row([
            run.name.to_owned(),
            mib(outcome.heap),
            process::mib_or_unknown(outcome.resident),
            process::mib_or_unknown(outcome.building),
            format!("{rate:.2}"),
            share.map_or_else(String::new, |share| format!("{share:.2}")),
            outcome.statistics.clone(),
        ]);
        if run.name == "eager" {
            eager = Some(outcome);
        }
    }
    println!("{table}");
    Ok(())
}

/// Does one run.
fn measure(args: &Args, run: Run) -> Result<Outcome, Box<dyn Error>> {
    let device = Device::flex();
    let (idle, idle_heap) = (ResidentMemory::of_process(), TrackingAllocator::live());
    let file = match run.mode {
        ReadMode::Copy => WeightFile::open(&args.weights)?,
        // SAFETY: this program writes the file before it starts the processes that read it, and not again.
        ReadMode::Map => unsafe { WeightFile::open_mapped(&args.weights)? },
    };
    let (model, report) = config(args).init(&device).lazy_load(&file, &run.options)?;
    let building = process::peak_above(idle);
    let tokens = |batch: usize| {
        let token = |index: usize| ((batch * 7919 + index * 104_729) % 100_000) as i64;
        let tokens: Vec<i64> = (0..args.batch_size * args.length).map(token).collect();
        Tensor::<1, Int>::from_ints(&tokens[..], &device).reshape([args.batch_size, args.length])
    };
    let mut check = model.forward(tokens(0)).abs().mean().into_scalar::<f32>();
    let mut seconds: Vec<f64> = vec![];
    for batch in 1..=args.batches.max(1) {
        let begin = Instant::now();
        check += model.forward(tokens(batch)).abs().mean().into_scalar::<f32>();
        seconds.push(begin.elapsed().as_secs_f64());
    }
    seconds.sort_by(f64::total_cmp);
    Ok(Outcome {
        building,
        heap: TrackingAllocator::peak() - idle_heap,
        resident: process::peak_above(idle),
        seconds_per_batch: seconds[0],
        check,
        statistics: report.cache.statistics().to_string(),
    })
}

/// Prints embeddings of a real checkpoint.
fn embed(args: &Args, directory: &Path) -> Result<(), Box<dyn Error>> {
    let config: BertConfig = serde_json::from_str(&std::fs::read_to_string(directory.join("config.json"))?)?;
    let file = of_hugging_face(WeightFile::open(directory)?)?;
    let device = Device::flex();
    let options = LazyOptions::new().with_budget(args.budget << 20).with_dtype(DType::F32);
    let (model, report) = config.init(&device).lazy_load(&file, &options)?;
    let tokens = Tensor::<1, Int>::from_ints(&args.tokens[..], &device).unsqueeze::<2>();
    println!("{}", model.forward(tokens));
    println!("{}", report.cache.statistics());
    Ok(())
}
