//! Finds the largest language model that 1, 2 and 4 compute servers with a given memory fine-tune with LoRA. Frozen weights, gradients and
//! the state of the optimizer are divided among the servers. The memory is that of `ulimit -v`, which covers everything in a process.
//!
//! Each attempt starts new servers on this machine and trains two steps, whose losses must equal those of one device. The program itself
//! needs memory for twice the model. Only Linux limits the memory of a process.
//!
//! ```sh
//! cargo bench --features remote-server --bench servers -- --csv paper/recorded/servers.csv
//! cargo bench --features remote-server --bench servers -- --servers 4 --limit 1024 --blocks 256   # one attempt
//! ```
#![recursion_limit = "256"]
use burn::module::{Lora, Module, ParamGroup};
use burn::optim::{AdamConfig, GradientsParams};
use burn::remote::RemoteHost;
use burn::tensor::{Device, Int, Tensor};
use burn_memsave::measure::mib;
use burn_memsave::parallel::{FrozenOptions, ReplicaOptions, Replicas, shard_frozen};
use burn_memsave_paper::text::llama::{LanguageModel, Size, memsave::Llama};
use clap::Parser;
use comfy_table::{Table, presets};
use serde::{Deserialize, Serialize};
use server::{LocalServer, serve};
use std::error::Error;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

mod recorded;
#[path = "../examples/finetune_ddp/server.rs"]
mod server;

/// The largest model that servers with a given memory fine-tune.
#[derive(Parser)]
struct Args {
    /// Also writes the table to this file.
    #[arg(long)]
    csv: Option<PathBuf>,
    /// The memory of each server, in MiB.
    #[arg(long, default_value_t = 256, value_parser = clap::value_parser!(u64).range(1..1 << 30))]
    limit: u64,
    /// The numbers of servers, at most one per passage of the batch.
    #[arg(long, value_delimiter = ',', default_values_t = [1, 2, 4])]
    servers: Vec<usize>,
    /// Given by cargo.
    #[arg(long, hide = true)]
    bench: bool,
    /// Serves this machine's device, in a process of its own.
    #[arg(long, hide = true)]
    serve: Option<u16>,
    /// Only trains a model of so many blocks, and prints the peak of the largest server and the seconds of a step.
    #[arg(long)]
    blocks: Option<usize>,
}

/// Passages in a batch, and tokens in a passage.
const BATCH: [usize; 2] = [4, 8];
const STEPS: usize = 2;

/// Bounds the wait for servers that have no memory left to send something, and live on.
fn timeout(blocks: usize) -> Duration {
    Duration::from_secs(60 + 2 * blocks as u64)
}

fn size(blocks: usize) -> Size {
    Size { vocabulary: 64, width: 512, heads: 8, hidden: 1376, blocks, length: BATCH[1] }
}

/// The bytes of the frozen weights of a block.
fn block_bytes() -> u64 {
    let Size { width, hidden, .. } = size(1);
    4 * (4 * width * width + 3 * width * hidden) as u64
}

#[derive(Serialize)]
struct Row {
    servers: usize,
    limit_of_each_bytes: u64,
    largest_blocks: usize,
    frozen_bytes: u64,
    frozen_to_limit: f64,
    resident_peak_bytes: u64,
    step_milliseconds: f64,
}

/// What an attempt reports.
#[derive(Serialize, Deserialize)]
struct Outcome {
    /// The largest of the servers.
    resident_peak: u64,
    /// The last step.
    seconds: f64,
}

fn main() -> Result<(), Box<dyn Error>> {
    let args = Args::parse();
    if let Some(port) = args.serve {
        return serve(port);
    }
    if args.servers.iter().any(|count| !(1..=BATCH[0]).contains(count)) {
        return Err(format!("--servers: 1 to {} each", BATCH[0]).into());
    }
    if !cfg!(target_os = "linux") {
        return Err("only Linux limits the memory of a process".into());
    }
    if let Some(blocks) = args.blocks {
        let &[servers] = args.servers.as_slice() else {
            return Err("--blocks: one number of servers".into());
        };
        println!("{}", serde_json::to_string(&train(blocks, servers, args.limit)?)?);
        return Ok(());
    }
    let rows = args.servers.iter().map(|&servers| largest(servers, args.limit));
    let rows = rows.collect::<Result<Vec<Row>, Box<dyn Error>>>()?;
    let mut table = Table::new();
    let header =
        ["servers", "limit (MiB)", "blocks", "frozen (MiB)", "frozen / limit", "resident (MiB)", "step (s)"];
    table.load_preset(presets::ASCII_MARKDOWN).set_header(header);
    for row in &rows {
        table.add_row([
            row.servers.to_string(),
            mib(row.limit_of_each_bytes),
            row.largest_blocks.to_string(),
            mib(row.frozen_bytes),
            format!("{:.2}", row.frozen_to_limit),
            mib(row.resident_peak_bytes),
            format!("{:.2}", row.step_milliseconds / 1e3),
        ]);
    }
    println!("{table}");
    if let Some(path) = args.csv {
        let command = "cargo bench --features remote-server --bench servers";
        recorded::write(&path, command, "flex", &rows)?;
    }
    Ok(())
}

/// The largest model, to within a 16th of its blocks.
fn largest(servers: usize, limit: u64) -> Result<Row, Box<dyn Error>> {
    let attempt = |blocks: usize| -> Result<Option<Outcome>, Box<dyn Error>> {
        let mut again = Command::new(std::env::current_exe()?);
        again.args(["--blocks", &blocks.to_string(), "--servers", &servers.to_string()]);
        let output = again.args(["--limit", &limit.to_string()]).stderr(Stdio::piped()).output()?;
        let outcome = serde_json::from_slice(&output.stdout).ok();
        let said = String::from_utf8_lossy(&output.stderr);
        let ended = if outcome.is_some() {
            "trained"
        } else {
            said.lines().find(|line| !line.is_empty()).unwrap_or("failed")
        };
        eprintln!("{servers} servers, {blocks} blocks: {ended}");
        Ok(outcome)
    };
    // The weights of `above` blocks do not fit, even without anything else.
    let (mut fits, mut above) = (0, servers * ((limit << 20) / block_bytes()) as usize + 1);
    let mut best = None;
    while above - fits > 1.max(fits / 16) {
        let blocks = fits + (above - fits) / 2;
        match attempt(blocks)? {
            Some(outcome) => (fits, best) = (blocks, Some(outcome)),
            None => above = blocks,
        }
    }
    let best = best.ok_or("not even one block is trained")?;
    let (limit, frozen) = (limit << 20, fits as u64 * block_bytes());
    Ok(Row {
        servers,
        limit_of_each_bytes: limit,
        largest_blocks: fits,
        frozen_bytes: frozen,
        frozen_to_limit: frozen as f64 / limit as f64,
        resident_peak_bytes: best.resident_peak,
        step_milliseconds: 1e3 * best.seconds,
    })
}

/// Trains a model on new servers, each with `limit` MiB.
fn train(blocks: usize, servers: usize, limit: u64) -> Result<Outcome, Box<dyn Error>> {
    let servers = (0..servers).map(|_| LocalServer::start(Some(limit))).collect::<Result<Vec<_>, _>>()?;
    let of_servers = |index: usize| {
        let device = |server: &LocalServer| {
            Device::remote_options(&RemoteHost::websocket(server.address())).device_index(index).init()
        };
        servers.iter().map(device).collect::<Result<Vec<Device>, _>>()
    };
    let devices: Vec<Device> = of_servers(0)?.into_iter().map(Device::autodiff).collect();
    let host = Device::flex().autodiff();
    host.seed(0);
    let model = Llama::new(&size(blocks), &host).freeze();
    let divided = match devices.len() {
        1 => model.clone(),
        _ => {
            let options = FrozenOptions::new().with_owners(of_servers(1)?).with_read_ahead(8 << 20);
            shard_frozen(model.clone(), &devices, &options)?
        }
    };
    let projections =
        ParamGroup::from_regex(r"^blocks\..*\.weight$").map_err(|error| format!("{error:?}"))?;
    let lora = Lora::new(2, 4.0).set_param_group(projections);
    let divided = divided.apply_lora(lora.clone());
    // Both begin with the same adapters.
    let adapters = ParamGroup::from_regex(r"(^|\.)lora\.").map_err(|error| format!("{error:?}"))?;
    let adapters = divided.clone().into_record_group(adapters).allow_partial(true);
    let mut one = model.apply_lora(lora).load_record(adapters);
    let options = ReplicaOptions::new().with_sharded_optimizer().with_timeout(timeout(blocks));
    let mut replicas = Replicas::with_options(&divided, devices, &options)?;
    drop(divided);
    let (mut optimizer, mut of_one) = (AdamConfig::new().init(), AdamConfig::new().init());
    let mut seconds = 0.0;
    for step in 0..STEPS {
        let batch = batch(step, &host);
        let start = Instant::now();
        let parts = parts(&batch, replicas.devices());
        let (loss, gradients) = replicas.backward(parts, |model, (tokens, next)| model.loss(tokens, next))?;
        replicas.sync()?;
        let loss: f32 = loss.try_into_scalar()?;
        replicas.update(|model| optimizer.step(1e-3, model, gradients));
        replicas.sync()?;
        seconds = start.elapsed().as_secs_f64();
        let (tokens, next) = batch;
        let of_whole = one.loss(tokens, next);
        let gradients = GradientsParams::from_grads(of_whole.backward(), &one);
        one = of_one.step(1e-3, one, gradients);
        let whole: f32 = of_whole.into_scalar();
        if (loss - whole).abs() > 1e-5 * whole.abs() {
            return Err(format!("step {step}: a loss of {loss}, on one device {whole}").into());
        }
    }
    let resident_peak = servers.iter().filter_map(LocalServer::peak).max().ok_or("the peak is unknown")?;
    Ok(Outcome { resident_peak, seconds })
}

type Batch = (Tensor<2, Int>, Tensor<2, Int>);

/// Tokens, and those that follow.
fn batch(step: usize, device: &Device) -> Batch {
    let of = |first: usize| {
        let tokens: Vec<i64> = (0..BATCH[0] * BATCH[1]).map(|at| ((first + at * 7) % 64) as i64).collect();
        Tensor::<1, Int>::from_data(tokens.as_slice(), device).reshape(BATCH)
    };
    (of(step), of(step + 7))
}

/// The parts of a batch, each on its device, with the number of its passages.
fn parts((tokens, next): &Batch, devices: &[Device]) -> Vec<(Batch, usize)> {
    let [items, count] = [BATCH[0], devices.len()];
    let part = |(index, device): (usize, &Device)| {
        let rows = items * index / count..items * (index + 1) / count;
        let of = |tensor: &Tensor<2, Int>| tensor.clone().slice(rows.clone()).to_device(device);
        ((of(tokens), of(next)), rows.len())
    };
    devices.iter().enumerate().map(part).collect()
}
