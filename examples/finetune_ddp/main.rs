//! Fine-tunes a language model with LoRA on several machines: each computes the gradients of its part of a batch.
//!
//! Without addresses, it starts two Burn compute servers on this machine. A step sends only the factors of the adapters and their
//! gradients; the frozen weights are sent once. `--compare` also computes the gradients of every step on one device with the whole
//! batch, and fails if they differ. `--shard` also divides frozen weights, or gradients and the optimizer's state: then a step also sends the
//! frozen weights that it uses.
//!
//! `--model resnet` trains a residual network instead, whose batch norms have the statistics of the whole batch. `--timeout` bounds how long
//! a step waits for a server. If one is lost, `--resume` goes on after the last checkpoint, with as many servers as there are. (Servers that
//! are left do not find one that was restarted at its old address: restart all of them, or use another address.)
//! `--limit` bounds the memory of each server on this machine.
//!
//! ```sh
//! cargo run --release --features remote-server --example finetune_ddp -- --steps 20 --compare
//! cargo run --release --features remote-server --example finetune_ddp -- --shard frozen,optimizer --local 4 --compare
//! cargo run --release --features remote-server --example finetune_ddp -- --model resnet --timeout 60 --compare
//! cargo run --release --features remote-server --example finetune_ddp -- --serve 3000   # on every machine, then on one:
//! cargo run --release --features remote-server --example finetune_ddp -- --servers ws://first:3000 ws://second:3000
//! ```
//!
//! WebSocket is not encrypted, so use it only in your own network. (Burn's servers also speak Iroh, which is encrypted.)
#![recursion_limit = "256"]
use burn::module::{Module, ParamGroup};
use burn::optim::AdamConfig;
use burn::remote::RemoteHost;
use burn::tensor::Device;
use burn_memsave::measure::human_bytes;
use burn_memsave::parallel::{
    DeviceFailure, FrozenOptions, ParallelError, ReplicaOptions, Replicas, estimate_replicas, shard_frozen,
};
use burn_memsave::plan::OptimizerState;
use checkpoint::Checkpoint;
use clap::{Parser, ValueEnum};
use compare::{Comparison, trainable_bytes};
use indicatif::{ProgressBar, ProgressStyle};
use server::{LocalServer, serve};
use std::error::Error;
use std::path::PathBuf;
use std::time::Duration;
use tasks::{Digits, HEADS, Language, Task};

mod checkpoint;
mod compare;
mod server;
mod tasks;

/// Fine-tunes a language model with low-rank adapters on several machines.
#[derive(Parser)]
struct Args {
    /// Addresses of compute servers, such as `ws://gpu:3000`.
    #[arg(long, num_args = 1.., conflicts_with = "local")]
    servers: Vec<String>,
    /// Servers to start on this machine, if there are no addresses.
    #[arg(long, default_value_t = 2)]
    local: usize,
    /// Only serves this machine's device on a port (0: any, for this machine only), until it is stopped.
    #[arg(long, value_name = "PORT", conflicts_with_all = ["servers", "resume", "compare"])]
    serve: Option<u16>,
    /// What is trained.
    #[arg(long, value_enum, default_value_t = Model::Language)]
    model: Model,
    #[arg(long, default_value_t = 40)]
    steps: usize,
    /// Passages or images per step, divided among the servers.
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
    /// Saves what is trained and the optimizer's state in this folder.
    #[arg(long)]
    checkpoint: Option<PathBuf>,
    /// Steps from one checkpoint to the next.
    #[arg(long, default_value_t = 10)]
    every: usize,
    /// Continues from the last checkpoint.
    #[arg(long, requires = "checkpoint")]
    resume: bool,
    /// Compares the gradients of every step with those of one device with the whole batch.
    #[arg(long)]
    compare: bool,
    /// What is divided among the servers, besides the batch.
    #[arg(long, value_enum, value_delimiter = ',')]
    shard: Vec<Shard>,
    /// The most MiB of other servers' frozen weights that stay on each server.
    #[arg(long, default_value_t = 0, value_name = "MIB")]
    budget: u64,
    /// The most MiB of frozen weights that are on their way to each server. Without a bound, servers keep what they send for longer.
    #[arg(long, value_name = "MIB")]
    read_ahead: Option<u64>,
    /// How long a step waits for servers, in seconds. Without, until each answers or is gone.
    #[arg(long, value_name = "SECONDS")]
    timeout: Option<u64>,
    /// The most MiB of address space that each server on this machine may have, as `ulimit -v` bounds it.
    #[arg(long, value_name = "MIB", conflicts_with = "servers")]
    limit: Option<u64>,
}

#[derive(Clone, Copy, PartialEq, ValueEnum)]
enum Model {
    /// A language model with low-rank adapters.
    Language,
    /// A residual network, of which everything is trained, with synchronized batch norms.
    Resnet,
}

#[derive(Clone, Copy, PartialEq, ValueEnum)]
enum Shard {
    /// Each frozen weight is on one server. The others copy it when its layer runs.
    Frozen,
    /// Each server sums some of the gradients, and keeps the optimizer's state for them.
    Optimizer,
}

fn main() -> Result<(), Box<dyn Error>> {
    let args = Args::parse();
    match args.serve {
        Some(port) => serve(port),
        None => match args.model {
            Model::Language => train::<Language>(&args),
            Model::Resnet => train::<Digits>(&args),
        },
    }
}

fn train<T: Task>(args: &Args) -> Result<(), Box<dyn Error>> {
    check(args)?;
    let local = match args.servers.is_empty() {
        false => vec![],
        true => (0..args.local).map(|_| LocalServer::start(args.limit)).collect::<Result<Vec<_>, _>>()?,
    };
    let addresses = match local.is_empty() {
        true => args.servers.clone(),
        false => local.iter().map(|server| server.address().to_string()).collect(),
    };
    let of_servers = |index: usize| {
        let devices = addresses.iter().map(|address| {
            let options = Device::remote_options(&RemoteHost::websocket(address)).device_index(index);
            options.init().map(Device::autodiff).map_err(|error| format!("{address}: {error}"))
        });
        devices.collect::<Result<Vec<Device>, String>>()
    };
    let devices = of_servers(0)?;
    let mut names: Vec<(Device, String)> = devices.iter().cloned().zip(addresses.iter().cloned()).collect();
    let idle: Vec<Option<u64>> = local.iter().map(LocalServer::peak).collect();
    if args.batch_size < devices.len() {
        return Err(format!("{} servers for {} items in a batch", devices.len(), args.batch_size).into());
    }

    let host = Device::flex().autodiff();
    host.seed(args.seed);
    let mut task = T::new(args)?;
    let in_memory = task.model(&host);
    let model = match args.shard.contains(&Shard::Frozen) {
        false => task.adapted(in_memory.clone()),
        true => {
            let mut options = FrozenOptions::new().with_min_bytes(0).with_budget(bytes(args.budget));
            if let Some(mib) = args.read_ahead {
                options = options.with_read_ahead(bytes(mib));
            }
            let owners = of_servers(1)?;
            names.extend(owners.iter().cloned().zip(addresses.iter().cloned()));
            let options = options.with_owners(owners);
            task.adapted(shard_frozen(in_memory.clone(), &devices, &options)?)
        }
    };
    let options = replica_options(args);

    let checkpoints =
        args.checkpoint.as_ref().map(|folder| Checkpoint::new(folder.clone(), T::settings(args), T::SAVED));
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
        task.next(&host); // skips those of earlier steps
    }

    let mut one = match args.compare {
        false => None,
        true => {
            let saved = ParamGroup::from_regex(T::SAVED.paths).map_err(|error| format!("{error:?}"))?;
            Some(Comparison::<T>::new(task.adapted(in_memory), saved))
        }
    };
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
    let mut last_loss = f32::NAN;
    for step in done..args.steps {
        let lost = |error| lost(error, step, &names, checkpoints.as_ref());
        let batch = task.next(&host);
        let parts = divide::<T>(&batch, args.batch_size, replicas.devices());
        let (loss, gradients) = replicas.backward(parts, T::loss).map_err(lost)?;
        // If a server is gone, this fails before the parameters change.
        replicas.sync().map_err(lost)?;
        let loss = loss.try_into_data()?.iter::<f32>().next().unwrap_or(f32::NAN);
        if let Some(one) = &mut one {
            one.step(batch, &gradients, replicas.module());
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
    // Before servers on this machine end.
    replicas.sync().map_err(|error| lost(error, args.steps - 1, &names, checkpoints.as_ref()))?;
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
                "{}: at most {}, {} more than idle",
                server.address(),
                human_bytes(peak),
                human_bytes(peak.saturating_sub(idle))
            );
        }
    }
    one.map_or(Ok(()), |one| one.finish())
}

fn check(args: &Args) -> Result<(), Box<dyn Error>> {
    if [args.steps, args.rank, args.length, args.batch_size, args.every].contains(&0) {
        return Err("steps, rank, length, batch size and steps between checkpoints must be at least 1".into());
    }
    if args.width == 0 || !args.width.is_multiple_of(2 * HEADS) {
        return Err(format!("the width must be a multiple of {}", 2 * HEADS).into());
    }
    if args.model == Model::Resnet && args.shard.contains(&Shard::Frozen) {
        return Err("the residual network has no frozen weights".into());
    }
    Ok(())
}

fn replica_options(args: &Args) -> ReplicaOptions {
    let mut options = ReplicaOptions::new();
    if args.shard.contains(&Shard::Optimizer) {
        options = options.with_sharded_optimizer();
    }
    if args.model == Model::Resnet {
        options = options.with_synchronized_batch_norm();
    }
    match args.timeout {
        Some(seconds) => options.with_timeout(Duration::from_secs(seconds)),
        None => options,
    }
}

/// What to tell the user when servers are lost in a step.
fn lost(
    error: ParallelError,
    step: usize,
    names: &[(Device, String)],
    checkpoints: Option<&Checkpoint>,
) -> String {
    let name = |device: &Device| match names.iter().find(|(named, _)| named == device) {
        Some((_, address)) => address.clone(),
        None => format!("{device:?}"),
    };
    let reason = match &error {
        ParallelError::Devices { failed } => {
            let of = |failure: &DeviceFailure| format!("\n{}: {}", name(&failure.device), failure.error);
            format!("the connection is lost to{}", failed.iter().map(of).collect::<String>())
        }
        ParallelError::TimedOut { devices, after } => {
            let of = |(_, device): &(usize, Device)| format!("\n{}", name(device));
            format!("no answer within {after:?} from{}", devices.iter().map(of).collect::<String>())
        }
        _ => error.to_string(),
    };
    let go_on = match checkpoints.and_then(Checkpoint::last) {
        Some(saved) => format!("\n--resume goes on after the {saved} steps of the last checkpoint"),
        None => String::new(),
    };
    format!("step {}: {reason}{go_on}", step + 1)
}

/// So many MiB.
fn bytes(mib: u64) -> u64 {
    mib.saturating_mul(1 << 20)
}

/// The parts of a batch, each on its device, with the number of its items.
fn divide<T: Task>(batch: &T::Batch, items: usize, devices: &[Device]) -> Vec<(T::Batch, usize)> {
    let part = |(index, device): (usize, &Device)| {
        let rows = items * index / devices.len()..items * (index + 1) / devices.len();
        let count = rows.len();
        (T::part(batch, rows, device), count)
    };
    devices.iter().enumerate().map(part).collect()
}
