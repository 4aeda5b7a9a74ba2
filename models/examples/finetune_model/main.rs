//! Fine-tunes a model of Hugging Face whose weights stay in their file, with LoRA or DoRA, and writes the adapter for Python's `peft`.
//!
//! ```sh
//! cargo run --release -p burn-memsave-models --features text --example finetune_model -- \
//!     --model Qwen2.5-0.5B --data texts.jsonl --budget 512MiB --step-budget 512MiB --output adapter
//! ```
//!
//! `AutoPeftModelForCausalLM.from_pretrained("adapter")` then loads it. As many blocks are recomputed as the budget of a step requires. Logits
//! are computed in chunks. The optimizer keeps 8 bits. A run that was stopped goes on with `--resume`, to the bit.
//!
//! An adapter that Python's `peft` could not load is refused before the first step: those of experts and of other feed-forward layers beside
//! them, and of Phi-3 those of queries, keys, values and gates, which are parts of layers there.
#![recursion_limit = "256"]
use burn::module::{Lora, Module, ModuleVisitor, Param, ParamGroup};
use burn::tensor::{DType, Device, Tensor};
use burn_memsave::lazy::{LazyOptions, LazyReport, WeightFile};
use burn_memsave::lora::Dora;
use burn_memsave::measure::{ResidentMemory, RunMemory, TrackingAllocator, mib};
use burn_memsave::optim::AdamW8bitConfig;
use burn_memsave::peft::PeftConfig;
use burn_memsave::plan::{ProfileOptions, auto_checkpoint, micro_batched};
use burn_memsave_models::hugging_face::{self, HuggingFace};
use burn_memsave_models::{
    Decoder,
    fused::{decoder::Llama, gpt2::Gpt2, gptj::GptJ},
};
use bytesize::ByteSize;
use checkpoint::{ADAPTERS, Checkpoint};
use clap::Parser;
use family::Family;
use indicatif::{ProgressBar, ProgressStyle};
use serde_json::{Map, Value};
use size::Size;
use std::error::Error;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Instant;
use text::device;
use texts::{Part, Texts};

#[path = "../../../examples/finetune_ddp/checkpoint.rs"]
mod checkpoint;
mod family;
#[path = "../text/size.rs"]
mod size;
#[path = "../text/mod.rs"]
mod text;
mod texts;

#[global_allocator]
static ALLOCATOR: TrackingAllocator = TrackingAllocator::new();

/// Fine-tunes a model of Hugging Face whose weights stay in their file, and writes the adapter for Python's `peft`.
#[derive(Parser)]
struct Args {
    /// The directory of the model: config.json, tokenizer.json, and safetensors. Or a GGUF file.
    #[arg(long)]
    model: PathBuf,
    /// For a GGUF file: the directory of the same model in Python, with its tokenizer, which the adapter names as its base.
    #[arg(long)]
    tokenizer: Option<PathBuf>,
    /// A line of JSON per text: {"text": ...}; {"prompt": ..., "completion": ...}, of which only the completion is learned; or {"messages":
    /// [{"role": ..., "content": ...}, ...]}, of which only the last message is, in the form that the model was trained with.
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
    /// The layers of a block that get adapters, a regular expression. Python's names (q_proj, ...) are understood, too. By default, these are all
    /// dense layers for which Python has adapters: in models with mixtures of experts those of attentions, of Phi-3 o_proj and down_proj.
    #[arg(long)]
    targets: Option<String>,
    /// The most bytes of weights that are in memory. If the head is larger than that, or is the embedding, the loss reads it block by block,
    /// once for each part of a step.
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
    /// Texts of a step that are computed at once. Each such part of a step reads all weights twice.
    #[arg(long, default_value_t = 1)]
    at_once: usize,
    /// Passes over all texts.
    #[arg(long, default_value_t = 1)]
    epochs: usize,
    /// Ends after this many steps, over which the learning rate falls, if they are fewer than those of all passes.
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
    /// Writes the model with its adapter merged into it to this directory, in bf16, with what `transformers` needs beside it.
    #[arg(long)]
    export: Option<PathBuf>,
    /// A picture of the memory over the run (SVG).
    #[arg(long)]
    plot: Option<PathBuf>,
}

fn main() -> Result<(), Box<dyn Error>> {
    let args = Args::parse();
    let numbers = [
        args.lora,
        args.length,
        args.batch_size,
        args.at_once,
        args.epochs,
        args.save_every,
        args.steps.unwrap_or(1),
    ];
    if numbers.contains(&0) {
        return Err(
            "a rank, a length, and numbers of texts, of steps and of passes must be at least 1".into()
        );
    }
    let (idle, idle_heap) = (ResidentMemory::of_process(), TrackingAllocator::live());
    let device = device().autodiff();
    let size = Size::read(&args.model)?;
    let family = Family::of(&size);
    if args.export.is_some() && family.joined {
        let reason = "Python has one layer for queries, keys and values, and one for both halves of a gate";
        return Err(format!("--export cannot write this model: {reason}").into());
    }
    if args.model.is_file() && args.tokenizer.is_none() {
        return Err("a GGUF file needs --tokenizer, the directory of the same model in Python".into());
    }
    let tokenizer = args.tokenizer.as_ref().unwrap_or(&args.model);
    if let Some(directory) = &args.export {
        fs::create_dir_all(directory)?;
        if fs::canonicalize(directory)? == fs::canonicalize(tokenizer)? {
            return Err("the merged model would replace the model that it is made of".into());
        }
        fs::metadata(tokenizer.join("config.json"))
            .map_err(|error| format!("{}: config.json: {error}", tokenizer.display()))?;
    }
    let longest = args.length.min(family.length);
    let (texts, dropped) = Texts::read(tokenizer, &args.data, family.vocabulary, longest)?;
    println!("{} texts, {} tokens to learn", texts.len(), texts.learned());
    if dropped > 0 {
        println!("{dropped} texts are left out: after {} tokens nothing is left to learn", args.length);
    }

    let options =
        LazyOptions::new().with_budget(args.budget.as_u64()).with_dtype(DType::F32).with_prefetch(2);
    let (file, length) = (WeightFile::open(&args.model)?, texts.longest());
    let run =
        Run { family, texts, tokenizer: tokenizer.clone(), device: device.clone(), idle, idle_heap, args };
    match size {
        Size::Decoder(size) => {
            run.train(Llama::from_file(&size.with_length(length), file, &options, &device)?)
        }
        Size::Gpt2(size) => run.train(Gpt2::from_file(&size, file, &options, &device)?),
        Size::GptJ(size) => run.train(GptJ::from_file(&size.with_length(length), file, &options, &device)?),
    }
}

/// A run, but for its model.
struct Run {
    args: Args,
    family: Family,
    texts: Texts,
    /// The directory of the tokenizer.
    tokenizer: PathBuf,
    device: Device,
    /// The memory before anything was read.
    idle: Option<ResidentMemory>,
    idle_heap: u64,
}

impl Run {
    fn train<M: HuggingFace + Decoder>(self, (model, report): (M, LazyReport)) -> Result<(), Box<dyn Error>> {
        let Self { args, family, texts, tokenizer, device, idle, idle_heap } = self;
        let targets = args.targets.as_deref().unwrap_or(family.targets);
        let alpha = args.alpha.unwrap_or(2.0 * args.lora as f64);
        let mut model = adapted(model, &family.named_here(targets), &args, alpha, &device)?;
        let trained = trained_bytes(&model);
        if trained == 0 {
            return Err(format!("no layer has the name {targets}: there are {}", family.targets).into());
        }
        let base = fs::canonicalize(&tokenizer)?;
        let config = PeftConfig::new(args.lora, alpha)
            .with_base_model(base.to_string_lossy())
            .with_task_type("CAUSAL_LM");
        hugging_face::check_adapters(&model, &config)?;
        let mut optimizer = AdamW8bitConfig::new().init_for(&model);
        let at_once = args.at_once.min(args.batch_size).min(texts.len());
        let steps =
            (args.epochs * texts.len().div_ceil(args.batch_size)).min(args.steps.unwrap_or(usize::MAX));

        let checkpoint =
            Checkpoint::new(args.output.join("state"), settings(&args, targets, &texts, alpha), ADAPTERS);
        let mut done = 0;
        match (args.resume, checkpoint.last()) {
            (true, _) => (model, optimizer, done) = checkpoint.load(model, optimizer)?,
            (false, Some(_)) => {
                return Err(
                    format!("{} has a run already: --resume goes on with it", args.output.display()).into()
                );
            }
            (false, None) => (),
        }
        let loss = |model: &M, (tokens, (next, learned)): Part| model.loss_of_some(tokens, next, learned);
        let longest = texts.longest_part(at_once, &device);
        // The sums of all gradients, and what the optimizer makes of the largest, come on top of a part.
        let of_part = args.step_budget.as_u64().saturating_sub(2 * trained);
        let plan = auto_checkpoint(&model, longest, of_part, &ProfileOptions::new(), loss)?;
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
            let parts = texts.parts(done, args.batch_size, at_once, args.seed, &device);
            device.seed(args.seed.wrapping_add(done as u64)); // what is dropped in a step follows from its number
            let (mean, gradients) =
                micro_batched(&model, parts, |model, part| plan.scope(|| loss(model, part)))?;
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
                fs::create_dir_all(&args.output)?;
                checkpoint.save(&model, &optimizer, done)?;
            }
        }
        bar.finish();
        hugging_face::save_adapters(&model, &config, &args.output)?;
        // Before the peak is asked for: meanwhile that is the peak of a step.
        if let (Some(path), Some(memory)) = (&args.plot, memory.take()) {
            fs::write(path, memory.to_svg())?;
        }

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
        if let Some(directory) = &args.export {
            export(&model, &config, family.vocabulary, &tokenizer, directory)?;
            println!("the merged model is in {}", directory.display());
        }
        Ok(())
    }
}

/// Writes the model, and copies what belongs to it from its directory.
fn export<M: HuggingFace + Decoder>(
    model: &M,
    config: &PeftConfig,
    vocabulary: usize,
    from: &Path,
    to: &Path,
) -> Result<(), Box<dyn Error>> {
    hugging_face::save_merged(model, config, to, DType::BF16)?;
    for file in fs::read_dir(from)? {
        let path = file?.path();
        let Some(name) = path.file_name() else { continue };
        let belongs =
            path.extension().is_some_and(|end| ["jinja", "json", "model", "txt"].iter().any(|of| end == *of));
        // An index names the shards of other weights.
        let is_other = name.to_string_lossy().ends_with(".index.json") || name == "adapter_config.json";
        if path.is_file() && belongs && !is_other && name != "config.json" {
            fs::copy(&path, to.join(name))?;
        }
    }
    let mut config: Map<String, Value> = serde_json::from_slice(&fs::read(from.join("config.json"))?)?;
    config.remove("quantization_config");
    config.remove("torch_dtype");
    config.insert("dtype".into(), "bfloat16".into());
    // Those of a GGUF file may be others.
    config.insert("tie_word_embeddings".into(), model.tied_table().is_some().into());
    config.insert("vocab_size".into(), vocabulary.into());
    fs::write(to.join("config.json"), serde_json::to_string_pretty(&config)?)?;
    Ok(())
}

/// The model with adapters on the layers that were asked for. Everything else is frozen.
fn adapted<M: Module>(
    model: M,
    targets: &str,
    args: &Args,
    alpha: f64,
    device: &Device,
) -> Result<M, Box<dyn Error>> {
    let layers = format!(r"^blocks\.\d+\.({targets})\.weight$");
    let group = ParamGroup::from_regex(&layers).map_err(|error| format!("{error:?}"))?;
    let lora = Lora::new(args.lora, alpha).set_param_group(group);
    device.seed(args.seed);
    let model = match args.dora {
        true => model.apply_reparameterization(Dora::new(lora)),
        false => model.apply_lora(lora),
    };
    Ok(model)
}

/// The bytes of all parameters that are trained.
fn trained_bytes(model: &impl Module) -> u64 {
    struct Trained(u64);
    impl ModuleVisitor for Trained {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            if param.is_require_grad() {
                self.0 += (param.lazy_shape().num_elements() * size_of::<f32>()) as u64;
            }
        }
    }
    let mut trained = Trained(0);
    model.visit(&mut trained);
    trained.0
}

/// What determines the steps of a run.
fn settings(args: &Args, targets: &str, texts: &Texts, alpha: f64) -> String {
    let Args {
        model, data, lora, dora, length, batch_size, at_once, epochs, steps, learning_rate, seed, ..
    } = args;
    format!(
        "{model:?}, {data:?} of {} texts and {} tokens, rank {lora}, alpha {alpha}, DoRA {dora}, {targets}, {length} tokens, {batch_size} texts, {at_once} at once, \
         {epochs} epochs, {steps:?} steps, learning rate {learning_rate}, seed {seed}",
        texts.len(),
        texts.learned(),
    )
}
