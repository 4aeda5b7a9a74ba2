//! Runs a BERT-like encoder of 1.6 GiB with its weights in memory, and with its weights in their file under several budgets.
//!
//! The file, of random weights, is written once, without ever being in memory. Every run is a process of its own, of one
//! computing thread; its memory is counted above that of the process before the model is made.
//!
//! ```sh
//! cargo run --release --example infer_lazy                      # the comparison
//! (ulimit -v 900000; cargo run --release --example infer_lazy -- --only "32 MiB")    # in less memory than the model has
//! cargo run --release --example infer_lazy -- --file DIR        # a checkpoint: DIR/config.json and safetensors
//! ```
#![recursion_limit = "256"]
use bert::{BertConfig, of_hugging_face};
use burn::module::{Module, ModuleVisitor, Param};
use burn::tensor::{Bytes, DType, Device, Int, Tensor};
use burn_memsave::lazy::{LazyLoad, LazyOptions, ReadMode, WeightFile};
use burn_memsave::measure::{TrackingAllocator, mib};
use burn_store::burn_pack;
use clap::Parser;
use comfy_table::{CellAlignment, Table, presets};
use indicatif::{ProgressBar, ProgressStyle};
use serde::{Deserialize, Serialize};
use std::error::Error;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

mod bert;

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
    /// Timed batches of every run.
    #[arg(long, default_value_t = 4)]
    batches: usize,
    /// Sequences of a batch.
    #[arg(long, default_value_t = 1)]
    batch_size: usize,
    /// Tokens of a sequence.
    #[arg(long, default_value_t = 128)]
    length: usize,
    /// Where the file of random weights is, or is written.
    #[arg(long, default_value = "target/infer_lazy.bpk")]
    weights: PathBuf,
    /// The layers of the random model.
    #[arg(long, default_value_t = 24)]
    layers: usize,
    /// One run, by its number, in this process.
    #[arg(long, hide = true)]
    run: Option<usize>,
}

/// A way to run the model.
struct Run {
    name: &'static str,
    options: LazyOptions,
}

fn runs() -> Vec<Run> {
    let lazy = |mib: u64, ahead| LazyOptions::new().with_budget(mib << 20).with_prefetch(ahead);
    vec![
        Run { name: "eager", options: LazyOptions::new().exclude("*") },
        Run { name: "lazy, 32 MiB", options: lazy(32, 1) },
        Run { name: "lazy, 200 MiB", options: lazy(200, 4) },
        Run { name: "lazy, 2 GiB", options: lazy(2048, 4) },
        Run { name: "mapped, 32 MiB", options: lazy(32, 1).with_read_mode(ReadMode::Map) },
        Run { name: "mapped, 2 GiB", options: lazy(2048, 4).with_read_mode(ReadMode::Map) },
    ]
}

/// What a run measured; bytes above those of the idle process.
#[derive(Serialize, Deserialize)]
struct Outcome {
    building: u64,
    heap: u64,
    resident: u64,
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

/// Runs everything, each in its own process.
fn compare(args: &Args) -> Result<(), Box<dyn Error>> {
    if !args.weights.exists() {
        write_weights(&config(args), &args.weights)?;
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
    (1..6)
        .filter_map(|column| table.column_mut(column).map(|c| c.set_cell_alignment(CellAlignment::Right)))
        .count();
    let mut eager: Option<Outcome> = None;
    for (index, run) in runs().into_iter().enumerate() {
        if args.only.as_ref().is_some_and(|only| !run.name.contains(only)) {
            continue;
        }
        let arguments = std::env::args_os().skip(1);
        let child = Command::new(std::env::current_exe()?)
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
            mib(outcome.resident),
            mib(outcome.building),
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

/// One run.
fn measure(args: &Args, run: Run) -> Result<Outcome, Box<dyn Error>> {
    let device = Device::flex();
    let (idle, idle_heap) = (memory("VmRSS")?, TrackingAllocator::live());
    let file = WeightFile::open(&args.weights)?;
    let (model, report) = config(args).init(&device).lazy_load(&file, &run.options)?;
    let building = memory("VmHWM")?.saturating_sub(idle);
    let tokens = |batch: usize| {
        let token = |index: usize| ((batch * 7919 + index * 104_729) % 100_000) as i64;
        let tokens: Vec<i64> = (0..args.batch_size * args.length).map(token).collect();
        Tensor::<1, Int>::from_ints(&tokens[..], &device).reshape([args.batch_size, args.length])
    };
    let mut check = model.forward(tokens(0)).abs().mean().into_scalar::<f32>();
    let begin = Instant::now();
    for batch in 1..=args.batches {
        check += model.forward(tokens(batch)).abs().mean().into_scalar::<f32>();
    }
    Ok(Outcome {
        building,
        heap: TrackingAllocator::peak() - idle_heap,
        resident: memory("VmHWM")?.saturating_sub(idle),
        seconds_per_batch: begin.elapsed().as_secs_f64() / args.batches as f64,
        check,
        statistics: report.statistics().to_string(),
    })
}

/// A line of this process's status, in bytes.
fn memory(line: &str) -> Result<u64, Box<dyn Error>> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find(|found| found.starts_with(line)).ok_or("no such line in the status")?;
    let kibibytes: u64 = line.split_whitespace().nth(1).ok_or("no number")?.parse()?;
    Ok(kibibytes << 10)
}

/// Prints embeddings by a real checkpoint.
fn embed(args: &Args, directory: &Path) -> Result<(), Box<dyn Error>> {
    let config: BertConfig = serde_json::from_str(&std::fs::read_to_string(directory.join("config.json"))?)?;
    let file = of_hugging_face(WeightFile::open(directory)?)?;
    let device = Device::flex();
    let options = LazyOptions::new().with_budget(args.budget << 20).with_dtype(DType::F32);
    let (model, report) = config.init(&device).lazy_load(&file, &options)?;
    let tokens = Tensor::<1, Int>::from_ints(&args.tokens[..], &device).unsqueeze::<2>();
    println!("{}", model.forward(tokens));
    println!("{}", report.statistics());
    Ok(())
}

/// Writes random weights, one tensor after the other.
fn write_weights(config: &BertConfig, path: &Path) -> Result<(), Box<dyn Error>> {
    #[derive(Default)]
    struct Tensors {
        path: Vec<String>,
        tensors: Vec<burn_pack::Tensor>,
        bytes: u64,
    }
    impl ModuleVisitor for Tensors {
        fn enter_module(&mut self, name: &str, _container_type: &str) {
            self.path.push(name.into());
        }
        fn exit_module(&mut self, _name: &str, _container_type: &str) {
            self.path.pop();
        }
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            let (name, shape) = (self.path.join("."), param.lazy_shape());
            let (count, seed, gamma) =
                (shape.num_elements(), self.tensors.len() as u64, name.ends_with("gamma"));
            let data = move || {
                let random = |index: u64| {
                    let mixed = (index ^ (seed << 40)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
                    (mixed >> 40) as f32 / (1 << 24) as f32 * 0.06 - 0.03 + f32::from(u8::from(gamma))
                };
                Ok(Bytes::from_elems((0..count as u64).map(random).collect::<Vec<f32>>()))
            };
            self.bytes += 4 * count as u64;
            self.tensors.push(burn_pack::Tensor::deferred(name, DType::F32, shape, None, 4 * count, data));
        }
    }
    let mut tensors = Tensors::default();
    config.init(&Device::flex()).visit(&mut tensors);
    let bar = ProgressBar::new_spinner();
    bar.set_style(ProgressStyle::with_template("{spinner} {msg}")?);
    bar.set_message(format!("writing {} MiB of random weights to {}", mib(tensors.bytes), path.display()));
    bar.enable_steady_tick(std::time::Duration::from_millis(200));
    if let Some(directory) = path.parent() {
        std::fs::create_dir_all(directory)?;
    }
    burn_pack::Writer::new(tensors.tensors).write_to_file(path)?;
    bar.finish_and_clear();
    Ok(())
}
