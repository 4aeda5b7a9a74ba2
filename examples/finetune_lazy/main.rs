//! Fine-tunes a language model of 3 GiB with LoRA, in 600 MiB of memory and with all weights in memory, and checks that losses are equal.
//!
//! The weights are random and are written once. Each run is a process of its own. The one with lazy weights may not have more address
//! space than the limit (`ulimit -v`). Both begin with the same adapters, which are saved and loaded alone.
//!
//! ```sh
//! cargo run --release --example finetune_lazy
//! ```
#![recursion_limit = "256"]
use burn::module::{Lora, Module, ParamGroup};
use burn::optim::{AdamConfig, GradientsParams};
use burn::store::ModuleRecord;
use burn::tensor::{Device, Int, Tensor};
use burn_memsave::lazy::{LazyLoad, LazyOptions, WeightFile};
use burn_memsave::measure::{ResidentMemory, TrackingAllocator, mib};
use clap::Parser;
use comfy_table::{CellAlignment, Table, presets};
use llama::{LanguageModel, Size, memsave::Llama};
use serde::{Deserialize, Serialize};
use std::error::Error;
use std::path::PathBuf;
use std::time::Instant;

#[allow(dead_code)] // the twin of Burn's layers, and the logits
#[path = "../finetune_lm/llama.rs"]
mod llama;
#[path = "../infer_lazy/process.rs"]
mod process;

#[global_allocator]
static ALLOCATOR: TrackingAllocator = TrackingAllocator::new();

/// Fine-tunes a language model that is larger than the memory it may have.
#[derive(Parser)]
struct Args {
    /// The address space of the run with lazy weights, in MiB.
    #[arg(long, default_value_t = 600)]
    limit: u64,
    /// The budget of lazy weights, in MiB.
    #[arg(long, default_value_t = 132)]
    budget: u64,
    /// Steps of the fine-tuning.
    #[arg(long, default_value_t = 3)]
    steps: usize,
    /// Blocks of the model: 15 have 3 GiB.
    #[arg(long, default_value_t = 15)]
    blocks: usize,
    /// Tokens of the sequence.
    #[arg(long, default_value_t = 64)]
    length: usize,
    /// The directory of the weights, which are written if they are missing, and of the adapters.
    #[arg(long, default_value = "target")]
    directory: PathBuf,
    /// Does one run, in this process.
    #[arg(long, hide = true)]
    lazy: Option<bool>,
}

/// What a run measured, in bytes above those of the idle process.
#[derive(Serialize, Deserialize)]
struct Outcome {
    losses: Vec<f32>,
    heap: u64,
    resident: Option<u64>,
    seconds: f64,
    statistics: String,
}

impl Args {
    fn size(&self) -> Size {
        let (width, hidden, heads) = (2048, 5632, 16);
        Size { vocabulary: 8000, width, heads, hidden, blocks: self.blocks, length: self.length }
    }

    fn weights(&self) -> PathBuf {
        self.directory.join(format!("finetune_lazy-{}.bpk", self.blocks))
    }

    fn adapters(&self) -> PathBuf {
        self.directory.join("finetune_lazy-adapters.bpk")
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let args = Args::parse();
    if let Some(lazy) = args.lazy {
        println!("{}", serde_json::to_string(&fine_tune(&args, lazy)?)?);
        return Ok(());
    }
    if !args.weights().exists() {
        process::write_random_weights(&Llama::new(&args.size(), &Device::flex()), &args.weights())?;
    }
    let mut table = Table::new();
    table.load_preset(presets::ASCII_MARKDOWN);
    table.set_header(["weights", "losses", "heap peak (MiB)", "RSS peak", "seconds per step", "reads"]);
    for column in 2..5 {
        if let Some(column) = table.column_mut(column) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    let mut losses = vec![];
    let (name, limit) = match process::CAN_LIMIT {
        true => ("lazy", Some(args.limit << 20)),
        false => ("lazy, without a limit", None), // no other system has one
    };
    for (name, lazy, limit) in [("in memory", false, None), (name, true, limit)] {
        let child = process::again(limit)?
            .args(std::env::args_os().skip(1))
            .args(["--lazy", &lazy.to_string()])
            .output()?;
        let output = String::from_utf8_lossy(&child.stdout);
        let Ok(outcome) = serde_json::from_str::<Outcome>(output.trim()) else {
            return Err(format!("{name}: {}", String::from_utf8_lossy(&child.stderr)).into());
        };
        table.add_row([
            name.to_owned(),
            outcome.losses.iter().map(|loss| format!("{loss:.6}")).collect::<Vec<_>>().join(", "),
            mib(outcome.heap),
            process::mib_or_unknown(outcome.resident),
            format!("{:.2}", outcome.seconds / args.steps as f64),
            outcome.statistics,
        ]);
        losses.push(outcome.losses);
    }
    println!("{table}");
    match losses[0] == losses[1] {
        true => Ok(()),
        false => Err("the losses differ".into()),
    }
}

fn fine_tune(args: &Args, lazy: bool) -> Result<Outcome, Box<dyn Error>> {
    let device = Device::flex().autodiff();
    let (idle, idle_heap) = (ResidentMemory::of_process(), TrackingAllocator::live());
    let options = match lazy {
        true => LazyOptions::new().with_budget(args.budget << 20).with_prefetch(2),
        false => LazyOptions::new().exclude("*"),
    };
    let file = WeightFile::open(args.weights())?;
    let (model, report) = Llama::new(&args.size(), &device).lazy_load(&file, &options)?;
    let projections = ParamGroup::from_predicate("blocks");
    let mut model = model.apply_lora(Lora::new(8, 16.0).set_param_group(projections));
    // The adapters alone.
    match lazy {
        false => {
            let adapters = ParamGroup::from_regex(r"\.lora\.[ab]$").map_err(|error| format!("{error:?}"))?;
            model.clone().into_record_group(adapters).save(args.adapters())?;
        }
        true => model = model.load_record(ModuleRecord::load(args.adapters())?.allow_partial(true)),
    }
    let mut optimizer = AdamConfig::new().init();
    let begin = Instant::now();
    let mut losses = vec![];
    for step in 0..args.steps {
        let token = |index: usize| ((step * 31 + index * 17) % 97) as i64;
        let tokens: Vec<i64> = (0..=args.length).map(token).collect();
        let tokens = Tensor::<1, Int>::from_ints(&tokens[..], &device).unsqueeze::<2>();
        let (now, next) =
            (tokens.clone().slice([0..1, 0..args.length]), tokens.slice([0..1, 1..args.length + 1]));
        let loss = model.loss(now, next);
        losses.push(loss.clone().into_scalar::<f32>());
        let gradients = GradientsParams::from_grads(loss.backward(), &model);
        model = optimizer.step(1e-4, model, gradients);
    }
    Ok(Outcome {
        losses,
        heap: TrackingAllocator::peak() - idle_heap,
        resident: process::peak_above(idle),
        seconds: begin.elapsed().as_secs_f64(),
        statistics: report.cache.statistics().to_string(),
    })
}
