//! Fine-tunes a model of Hugging Face whose weights stay in their file, with LoRA or DoRA, and writes the adapter for Python's `peft`.
//!
//! ```sh
//! cargo run --release -p burn-memsave-models --features text --example finetune_model -- \
//!     --model Qwen2.5-0.5B --data texts.jsonl --budget 512MiB --step-budget 512MiB --output adapter
//! ```
//!
//! `AutoPeftModelForCausalLM.from_pretrained("adapter")` then loads it. The text is checkpointed as far as the budget of a step asks for it, the
//! logits are never there as a whole, and the optimizer keeps 8 bits. A run that was stopped goes on with `--resume`, to the bit.
#![recursion_limit = "256"]
use burn::module::{Lora, Module, ParamGroup};
use burn::optim::ModuleOptimizer;
use burn::tensor::{DType, Device};
use burn_memsave::lazy::LazyOptions;
use burn_memsave::lora::Dora;
use burn_memsave::measure::{ResidentMemory, RunMemory, TrackingAllocator, mib};
use burn_memsave::optim::AdamW8bitConfig;
use burn_memsave::peft::PeftConfig;
use burn_memsave::plan::{ProfileOptions, auto_checkpoint, micro_batched};
use burn_memsave_models::{DecoderSize, fused::decoder::Llama, hugging_face};
use bytesize::ByteSize;
use checkpoint::Checkpoint;
use clap::Parser;
use indicatif::{ProgressBar, ProgressStyle};
use std::error::Error;
use std::fs;
use std::path::PathBuf;
use std::time::Instant;
use texts::{Part, Texts};

#[path = "../../../examples/finetune_ddp/checkpoint.rs"]
mod checkpoint;
mod texts;

#[global_allocator]
static ALLOCATOR: TrackingAllocator = TrackingAllocator::new();

/// Fine-tunes a model of Hugging Face whose weights stay in their file, and writes the adapter for Python's `peft`.
#[derive(Parser)]
struct Args {
    /// The directory of the model: config.json, tokenizer.json, and safetensors.
    #[arg(long)]
    model: PathBuf,
    /// A line of JSON per text: {"text": ...}, or {"prompt": ..., "completion": ...}, of which only the completion is learned.
    #[arg(long)]
    data: PathBuf,
    /// The directory of the adapter, and of what a run needs to go on.
    #[arg(long)]
    output: PathBuf,
    /// The rank of the adapters.
    #[arg(long, default_value_t = 16)]
    lora: usize,
    /// The product of the factors is multiplied by alpha / rank. Twice the rank by default.
    #[arg(long)]
    alpha: Option<f64>,
    /// DoRA: the adapters have magnitudes, too.
    #[arg(long)]
    dora: bool,
    /// The layers of a block that get adapters, a regular expression.
    #[arg(long, default_value = r"attention\.(query|key|value|output)|gate\.linear_(inner|outer)|down")]
    targets: String,
    /// The most bytes of weights that are in memory.
    #[arg(long, default_value = "2GiB")]
    budget: ByteSize,
    /// The most bytes that a step may need beside the weights. Blocks are recomputed as far as that is necessary.
    #[arg(long, default_value = "1GiB")]
    step_budget: ByteSize,
    /// Tokens after which a text is cut.
    #[arg(long, default_value_t = 512)]
    length: usize,
    /// Texts of a step.
    #[arg(long, default_value_t = 8)]
    batch_size: usize,
    /// Texts of a step that are computed at once.
    #[arg(long, default_value_t = 1)]
    at_once: usize,
    /// Passes over all texts.
    #[arg(long, default_value_t = 1)]
    epochs: usize,
    /// Stops after this many steps.
    #[arg(long)]
    steps: Option<usize>,
    /// The learning rate, which falls linearly to 0.
    #[arg(long, default_value_t = 2e-4)]
    learning_rate: f64,
    /// The seed of the adapters and of the order of texts.
    #[arg(long, default_value_t = 42)]
    seed: u64,
    /// Steps after which what a run needs to go on is saved.
    #[arg(long, default_value_t = 50)]
    save_every: usize,
    /// Goes on where the last run was saved.
    #[arg(long)]
    resume: bool,
    /// A picture of the memory over the run (SVG).
    #[arg(long)]
    plot: Option<PathBuf>,
}

fn main() -> Result<(), Box<dyn Error>> {
    let args = Args::parse();
    if [args.lora, args.length, args.batch_size, args.at_once, args.save_every].contains(&0) {
        return Err(
            "the rank, the length, numbers of texts and the steps between saves must be at least 1".into()
        );
    }
    let (idle, idle_heap) = (ResidentMemory::of_process(), TrackingAllocator::live());
    let device = Device::flex().autodiff();
    let size = DecoderSize::from_directory(&args.model)?;
    let texts = Texts::read(&args.model, &args.data, args.length.min(size.length))?;
    println!("{} texts, {} tokens to learn", texts.len(), texts.learned());

    let options =
        LazyOptions::new().with_budget(args.budget.as_u64()).with_dtype(DType::F32).with_prefetch(2);
    let size = size.with_length(texts.longest());
    let (model, report) = Llama::load(&size, &args.model, &options, &device)?;
    let alpha = args.alpha.unwrap_or(2.0 * args.lora as f64);
    let mut model = adapted(model, &args, alpha, &device)?;
    let mut optimizer = AdamW8bitConfig::new().init_for(&model);
    let parts_of = |step: usize| texts.parts(step, args.batch_size, args.at_once, args.seed, &device);
    let steps = (args.epochs * texts.len().div_ceil(args.batch_size)).min(args.steps.unwrap_or(usize::MAX));

    let checkpoint = Checkpoint::new(args.output.join("state"), run(&args, alpha));
    let mut done = 0;
    if args.resume {
        (model, optimizer, done) = checkpoint.load(model, optimizer)?;
    }
    let loss = |model: &Llama, (tokens, (next, learned)): Part| model.loss_of_some(tokens, next, learned);
    let longest = texts.longest_part(args.at_once, &device);
    let plan = auto_checkpoint(&model, longest, args.step_budget.as_u64(), &ProfileOptions::new(), loss)?;
    let recomputed = plan.blocks().filter(|(_, treatment)| treatment.recompute).count();
    println!("{recomputed} of {} blocks are recomputed in the backward pass", plan.blocks().count());

    let mut memory = args.plot.is_some().then(|| RunMemory::start(&device));
    let bar = ProgressBar::new(steps as u64)
        .with_style(ProgressStyle::with_template(
            "{bar:30} {pos}/{len}, {elapsed} of {duration}, loss {msg}",
        )?)
        .with_position(done as u64);
    let begin = Instant::now();
    let begun = done;
    while done < steps {
        let parts = parts_of(done);
        let (mean, gradients) = micro_batched(&model, parts, |model, part| plan.scope(|| loss(model, part)))?;
        let learning_rate = args.learning_rate * (1.0 - done as f64 / steps as f64);
        model = optimizer.step(learning_rate, model, gradients);
        done += 1;
        memory.iter_mut().for_each(RunMemory::step);
        let mean = mean.into_scalar::<f32>();
        bar.set_message(format!("{mean:.4}"));
        bar.inc(1);
        if bar.is_hidden() {
            println!("step {done} of {steps}: loss {mean:.6}");
        }
        if done.is_multiple_of(args.save_every) || done == steps {
            save(&model, &optimizer, &checkpoint, done, &args, alpha)?;
        }
    }
    bar.finish();

    let seconds = begin.elapsed().as_secs_f64() / (done - begun).max(1) as f64;
    let resident =
        ResidentMemory::of_process().zip(idle).map(|(now, idle)| now.peak.saturating_sub(idle.live));
    println!(
        "{seconds:.2} s per step, heap peak {} MiB, RSS peak {}\nweights: {}\nthe adapter is in {}",
        mib(TrackingAllocator::peak() - idle_heap),
        resident.map_or_else(|| "unknown".into(), |bytes| format!("{} MiB", mib(bytes))),
        report.cache.statistics(),
        args.output.display(),
    );
    if let (Some(path), Some(memory)) = (&args.plot, memory) {
        fs::write(path, memory.to_svg())?;
    }
    Ok(())
}

/// The model with adapters on the layers that were asked for. Everything else is frozen.
fn adapted(model: Llama, args: &Args, alpha: f64, device: &Device) -> Result<Llama, Box<dyn Error>> {
    let layers = format!(r"^blocks\.\d+\.({})\.weight$", args.targets);
    let group = ParamGroup::from_regex(&layers).map_err(|error| format!("{error:?}"))?;
    let lora = Lora::new(args.lora, alpha).set_param_group(group);
    device.seed(args.seed);
    let model = match args.dora {
        true => model.apply_reparameterization(Dora::new(lora)),
        false => model.apply_lora(lora),
    };
    Ok(model)
}

/// What determines the steps of a run.
fn run(args: &Args, alpha: f64) -> String {
    let Args {
        model,
        data,
        lora,
        dora,
        targets,
        length,
        batch_size,
        at_once,
        epochs,
        steps,
        learning_rate,
        seed,
        ..
    } = args;
    format!(
        "{model:?}, {data:?}, rank {lora}, alpha {alpha}, DoRA {dora}, {targets}, {length} tokens, {batch_size} texts, {at_once} at once, \
         {epochs} epochs, {steps:?} steps, learning rate {learning_rate}, seed {seed}"
    )
}

/// Saves the adapter, and what the run needs to go on.
fn save(
    model: &Llama,
    optimizer: &ModuleOptimizer,
    checkpoint: &Checkpoint,
    steps: usize,
    args: &Args,
    alpha: f64,
) -> Result<(), Box<dyn Error>> {
    fs::create_dir_all(&args.output)?;
    checkpoint.save(model, optimizer, steps)?;
    let base = fs::canonicalize(&args.model)?;
    let config =
        PeftConfig::new(args.lora, alpha).with_base_model(base.to_string_lossy()).with_task_type("CAUSAL_LM");
    Ok(hugging_face::save_adapters(model, config, &args.output)?)
}
