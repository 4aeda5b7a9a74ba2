//! Fine-tunes a language model with LoRA on several machines: each computes the gradients of its part of a batch.
//!
//! Without addresses, it starts two Burn compute servers on this machine. A step sends only the factors of the adapters and their
//! gradients; the frozen weights are sent once. `--compare` also trains the same model on one device with the whole batch, and fails
//! if gradients differ. `--shard` also divides frozen weights, or gradients and the optimizer's state: then a step also sends the
//! frozen weights that it uses.
//!
//! ```sh
//! cargo run --release --features remote-server --example finetune_ddp -- --steps 20 --compare
//! cargo run --release --features remote-server --example finetune_ddp -- --shard frozen,optimizer --local 4 --compare
//! cargo run --release --features remote-server --example finetune_ddp -- --serve 3000   # on every machine, then on one:
//! cargo run --release --features remote-server --example finetune_ddp -- --servers ws://first:3000 ws://second:3000
//! ```
//!
//! WebSocket is not encrypted, so use it only in your own network. (Burn's servers also speak Iroh, which is encrypted.)
#![recursion_limit = "256"]
use burn::module::{Lora, Module, ModuleVisitor, Param, ParamGroup};
use burn::optim::{AdamConfig, GradientsParams};
use burn::remote::RemoteHost;
use burn::server::{RemoteServer, WebSocketTransport};
use burn::tensor::{Device, FloatDType, Tensor};
use burn_memsave::measure::human_bytes;
use burn_memsave::parallel::{
    DeviceFailure, FrozenOptions, ParallelError, ReplicaOptions, Replicas, estimate_replicas, shard_frozen,
};
use burn_memsave::plan::OptimizerState;
use checkpoint::Checkpoint;
use clap::{Parser, ValueEnum};
use indicatif::{ProgressBar, ProgressStyle};
use llama::{LanguageModel, Size, memsave::Llama};
use server::LocalServer;
use std::error::Error;
use std::net::TcpListener;
use std::path::PathBuf;
use text::{Batch, FINETUNE, Passages, Vocabulary};

mod checkpoint;
#[path = "../finetune_lm/llama.rs"]
#[allow(dead_code, reason = "the other example generates text, and has the model of Burn's layers, too")]
mod llama;
mod server;
#[path = "../finetune_lm/text.rs"]
#[allow(dead_code, reason = "the other example generates text, too")]
mod text;

/// Fine-tunes a language model with low-rank adapters on several machines.
#[derive(Parser)]
struct Args {
    /// Addresses of compute servers, such as `ws://gpu:3000`.
    #[arg(long, num_args = 1.., conflicts_with = "local")]
    servers: Vec<String>,
    /// Servers to start on this machine, if there are no addresses.
    #[arg(long, default_value_t = 2)]
    local: usize,
    /// Only serves this machine's device on a port (0: any), until it is stopped.
    #[arg(long, value_name = "PORT", conflicts_with_all = ["servers", "resume", "compare"])]
    serve: Option<u16>,
    #[arg(long, default_value_t = 40)]
    steps: usize,
    /// Passages per step, divided among the servers.
    #[arg(long, default_value_t = 8)]
    batch_size: usize,
    /// Characters of a passage.
    #[arg(long, default_value_t = 64)]
    length: usize,
    /// Features.
    #[arg(long, default_value_t = 64)]
    width: usize,
    /// Blocks of attention and feed-forward layers.
    #[arg(long, default_value_t = 2)]
    blocks: usize,
    /// The rank of the adapters.
    #[arg(long, default_value_t = 8)]
    rank: usize,
    #[arg(long, default_value_t = 5e-3)]
    learning_rate: f64,
    /// The seed of weights, adapters and passages.
    #[arg(long, default_value_t = 42)]
    seed: u64,
    /// Saves the adapters and the optimizer's state in this folder.
    #[arg(long)]
    checkpoint: Option<PathBuf>,
    /// Steps from one checkpoint to the next.
    #[arg(long, default_value_t = 10)]
    every: usize,
    /// Continues from the last checkpoint.
    #[arg(long, requires = "checkpoint")]
    resume: bool,
    /// Also trains on one device with whole batches, and compares the gradients.
    #[arg(long)]
    compare: bool,
    /// What is divided among the servers, besides the batch.
    #[arg(long, value_enum, value_delimiter = ',')]
    shard: Vec<Shard>,
    /// The most MiB of other servers' frozen weights that stay on each server.
    #[arg(long, default_value_t = 0, value_name = "MIB")]
    budget: u64,
}

#[derive(Clone, Copy, PartialEq, ValueEnum)]
enum Shard {
    /// Each frozen weight is on one server. The others copy it when its layer runs.
    Frozen,
    /// Each server sums some of the gradients, and keeps the optimizer's state for them.
    Optimizer,
}

const HEADS: usize = 4;
/// How far gradients may differ, relative to the largest: sums are rounded differently.
const TOLERANCE: f32 = 1e-5;

fn main() -> Result<(), Box<dyn Error>> {
    let args = Args::parse();
    match args.serve {
        Some(port) => serve(port),
        None => train(&args),
    }
}

/// Serves this machine's device; the first line of its output is its address on this machine.
fn serve(port: u16) -> Result<(), Box<dyn Error>> {
    // A port that the user did not choose can be reached only from this machine.
    let interface = if port == 0 { "127.0.0.1" } else { "0.0.0.0" };
    let listener = TcpListener::bind((interface, port))?;
    println!("ws://127.0.0.1:{}", listener.local_addr()?.port());
    ignore_closed_connections();
    #[cfg(feature = "cuda")]
    let device = Device::cuda(0);
    #[cfg(all(feature = "wgpu", not(feature = "cuda")))]
    let device = Device::wgpu(burn::tensor::DeviceKind::DefaultDevice);
    #[cfg(not(any(feature = "wgpu", feature = "cuda")))]
    let device = Device::flex();
    // The second one gives other servers its frozen weights while the first one computes.
    let devices = [device.clone(), device];
    Ok(RemoteServer::new(devices).serve(WebSocketTransport::from_listener(listener))?)
}

/// Burn's server panics in the thread of a connection whose other end has gone, as it does when the run is over. Other panics are reported.
fn ignore_closed_connections() {
    let report = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        let message = panic.payload_as_str().unwrap_or_default();
        if !message.contains("ResetWithoutClosingHandshake") {
            report(panic);
        }
    }));
}

fn train(args: &Args) -> Result<(), Box<dyn Error>> {
    if args.rank == 0 || args.length == 0 || args.batch_size == 0 || args.every == 0 {
        return Err("rank, length, batch size and steps between checkpoints must be at least 1".into());
    }
    if args.width == 0 || !args.width.is_multiple_of(2 * HEADS) {
        return Err(format!("the width must be a multiple of {}", 2 * HEADS).into());
    }
    let mut local = vec![];
    let addresses = match args.servers.is_empty() {
        false => args.servers.clone(),
        true => {
            for _ in 0..args.local {
                local.push(LocalServer::start()?);
            }
            local.iter().map(|server| server.address().to_string()).collect()
        }
    };
    let of_servers = |index: usize| {
        let devices = addresses.iter().map(|address| {
            let options = Device::remote_options(&RemoteHost::websocket(address)).device_index(index);
            options.init().map(Device::autodiff).map_err(|error| format!("{address}: {error}"))
        });
        devices.collect::<Result<Vec<Device>, String>>()
    };
    let devices = of_servers(0)?;
    let idle: Vec<Option<u64>> = local.iter().map(LocalServer::peak).collect();
    if args.batch_size < devices.len() {
        return Err(format!("{} servers for {} passages in a batch", devices.len(), args.batch_size).into());
    }

    let host = Device::flex().autodiff();
    host.seed(args.seed);
    let vocabulary = Vocabulary::new();
    let size = Size {
        vocabulary: vocabulary.len(),
        width: args.width,
        heads: HEADS,
        hidden: (args.width * 8 / 3).next_multiple_of(32),
        blocks: args.blocks,
        length: args.length,
    };
    let group = ParamGroup::from_regex(r"^blocks\..*\.weight$").map_err(|error| format!("{error:?}"))?;
    let lora = Lora::new(args.rank, 16.0).set_param_group(group);
    let in_memory = Llama::new(&size, &host);
    let model = match args.shard.contains(&Shard::Frozen) {
        false => in_memory.clone().apply_lora(lora.clone()),
        true => {
            let options = FrozenOptions::new().with_min_bytes(0).with_budget(args.budget << 20);
            let options = options.with_owners(of_servers(1)?);
            shard_frozen(in_memory.clone().freeze(), &devices, &options)?.apply_lora(lora.clone())
        }
    };
    let mut options = ReplicaOptions::new();
    if args.shard.contains(&Shard::Optimizer) {
        options = options.with_sharded_optimizer();
    }
    let mut passages = Passages::new(vocabulary.tokens(FINETUNE), [args.batch_size, args.length], args.seed)?;

    let Args { seed, width, blocks, length, rank, batch_size, learning_rate, .. } = *args;
    let run = format!(
        "seed {seed}, width {width}, {blocks} blocks, length {length}, rank {rank}, batch size {batch_size}, rate {learning_rate}"
    );
    let checkpoints = args.checkpoint.as_ref().map(|folder| Checkpoint::new(folder.clone(), run));
    if let Some(steps) = checkpoints.as_ref().and_then(Checkpoint::last).filter(|_| !args.resume) {
        return Err(format!("the folder has a checkpoint of {steps} steps: --resume goes on after it").into());
    }
    let (model, mut optimizer, done) = match (&checkpoints, args.resume) {
        (Some(checkpoints), true) => checkpoints.load(model, AdamConfig::new().init())?,
        _ => (model, AdamConfig::new().init(), 0),
    };
    if done >= args.steps {
        return Err(format!("the checkpoint has {done} steps already").into());
    }
    for _ in 0..done {
        passages.next(&host); // skips those of earlier steps
    }

    let mut one =
        args.compare.then(|| (with_adapters_of(in_memory.apply_lora(lora), &model), optimizer.clone()));
    println!(
        "{} of {} are trained",
        human_bytes(trainable_bytes(&model)),
        human_bytes(4 * model.num_params() as u64)
    );
    let needed = estimate_replicas(&model, &devices, &options, OptimizerState::Two)?;
    for (address, needed) in addresses.iter().zip(&needed.devices) {
        println!(
            "{address}: {} trained, {} of gradients, {} of Adam's state",
            human_bytes(needed.trained),
            human_bytes(needed.gradients),
            human_bytes(needed.optimizer)
        );
    }
    let mut replicas = Replicas::with_options(&model, devices, &options)?;
    drop(model);
    let style = ProgressStyle::with_template("{bar:40} {pos}/{len} steps, {elapsed}, loss {msg}")?;
    let progress = ProgressBar::new(args.steps as u64).with_style(style).with_position(done as u64);
    let (mut last_loss, mut largest_difference) = (f32::NAN, 0f32);
    for step in done..args.steps {
        let batch = passages.next(&host);
        let parts = divide(&batch, replicas.devices());
        let lost = |error: ParallelError| {
            let reason = match &error {
                ParallelError::Devices { failed } => {
                    // Those that only own weights come after those of the replicas.
                    let of = |failure: &DeviceFailure| match addresses.get(failure.index) {
                        Some(address) => format!("\n{address}: {}", failure.error),
                        None => format!("\n{:?}: {}", failure.device, failure.error),
                    };
                    format!("the connection is lost to{}", failed.iter().map(of).collect::<String>())
                }
                _ => error.to_string(),
            };
            let go_on = match checkpoints.as_ref().and_then(Checkpoint::last) {
                Some(saved) => format!("\n--resume goes on after the {saved} steps of the last checkpoint"),
                None => String::new(),
            };
            format!("step {}: {reason}{go_on}", step + 1)
        };
        let (loss, gradients) = replicas.backward(parts, |model, (tokens, next)| model.loss(tokens, next))?;
        // If a server is gone, this fails before the parameters change.
        replicas.sync().map_err(lost)?;
        let loss = loss.try_into_data()?.iter::<f32>().next().unwrap_or(f32::NAN);

        if let Some((model, optimizer)) = one.take() {
            let (tokens, next) = batch;
            let whole = GradientsParams::from_grads(model.loss(tokens, next).backward(), &model);
            largest_difference = worse(largest_difference, difference(&model, &gradients, &whole));
            let mut optimizer = optimizer;
            let model = optimizer.step(args.learning_rate, model, whole);
            one = Some((model, optimizer));
        }
        replicas.update(|model| optimizer.step(args.learning_rate, model, gradients));
        if let Some(checkpoints) = &checkpoints
            && ((step + 1).is_multiple_of(args.every) || step + 1 == args.steps)
        {
            replicas.sync().map_err(lost)?;
            checkpoints.save(replicas.module(), &optimizer, step + 1)?;
        }
        progress.set_message(format!("{loss:.4}"));
        progress.inc(1);
        last_loss = loss;
    }
    replicas.sync()?; // before servers on this machine end
    progress.finish_and_clear();
    println!("loss of step {}: {last_loss:.6}", args.steps);
    let (sent, steps) = (replicas.traffic(), (args.steps - done) as u64);
    println!(
        "sent per step: {} of gradients, {} of values, {} of frozen weights",
        human_bytes(sent.gradients / steps),
        human_bytes(sent.values / steps),
        human_bytes(sent.frozen / steps)
    );
    for (server, idle) in local.iter().zip(&idle) {
        if let Some((peak, idle)) = server.peak().zip(*idle) {
            println!(
                "{}: at most {} more than idle",
                server.address(),
                human_bytes(peak.saturating_sub(idle))
            );
        }
    }
    if args.compare {
        println!(
            "largest difference to the gradients of one device: {largest_difference:.1e} of the largest"
        );
        if largest_difference.is_nan() || largest_difference > TOLERANCE {
            return Err(format!("gradients differ by {largest_difference}").into());
        }
    }
    Ok(())
}

/// The parts of a batch, each on its device, with the number of its passages.
fn divide((tokens, next): &Batch, devices: &[Device]) -> Vec<(Batch, usize)> {
    let [batch, _] = tokens.dims();
    let part = |(index, device): (usize, &Device)| {
        let rows = batch * index / devices.len()..batch * (index + 1) / devices.len();
        let of = |tensor: &Tensor<2, burn::tensor::Int>| tensor.clone().slice(rows.clone()).to_device(device);
        let items = rows.len();
        ((of(tokens), of(next)), items)
    };
    devices.iter().enumerate().map(part).collect()
}

/// The model with the adapters of another one.
fn with_adapters_of<M: Module>(model: M, other: &M) -> M {
    let adapters = ParamGroup::from_regex(r"(^|\.)lora\.").expect("a regular expression");
    model.load_record(other.clone().into_record_group(adapters).allow_partial(true))
}

fn trainable_bytes(model: &impl Module) -> u64 {
    struct Bytes(u64);
    impl ModuleVisitor for Bytes {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            if param.is_require_grad() {
                self.0 += (param.shape().num_elements() * param.val().dtype().size()) as u64;
            }
        }
    }
    let mut bytes = Bytes(0);
    model.visit(&mut bytes);
    bytes.0
}

/// The larger number, or NaN if one is.
fn worse(a: f32, b: f32) -> f32 {
    if a.is_nan() || a > b { a } else { b }
}

/// The largest difference of gradients, relative to the largest gradient. Infinite if they belong to different parameters.
fn difference(model: &impl Module, ours: &GradientsParams, whole: &GradientsParams) -> f32 {
    struct Compare<'a> {
        ours: &'a GradientsParams,
        whole: &'a GradientsParams,
        largest: f32,
        difference: f32,
    }
    impl ModuleVisitor for Compare<'_> {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            match (self.ours.get::<D>(param.id), self.whole.get::<D>(param.id)) {
                (Some(ours), Some(whole)) => {
                    let (ours, whole) = (ours.to_device(&whole.device()), whole.cast(FloatDType::F32));
                    let max = |tensor: Tensor<D>| tensor.abs().max().into_scalar::<f32>();
                    self.largest = worse(self.largest, max(whole.clone()));
                    self.difference = worse(self.difference, max(ours - whole));
                }
                (None, None) => {}
                _ => self.difference = f32::INFINITY,
            }
        }
    }
    let mut compare = Compare { ours, whole, largest: 0.0, difference: 0.0 };
    model.visit(&mut compare);
    compare.difference / compare.largest
}
