//! Generates text with a model of Hugging Face whose weights stay in their file.
//!
//! ```sh
//! cargo run --release -p burn-memsave-models --features text --example generate -- \
//!     --model Qwen2.5-0.5B-Instruct --chat --prompt "What is a tensor?" --budget 512MiB
//! ```
//!
//! The budget is that of weights and of keys and values together. What a layer computes in comes on top.
#![recursion_limit = "256"]
use burn::tensor::DType;
use burn_memsave::lazy::{LazyOptions, LazyReport, WeightFile};
use burn_memsave::measure::{ResidentMemory, RunMemory, TrackingAllocator, mib};
use burn_memsave::peft::PeftError;
use burn_memsave_models::hugging_face::{HuggingFace, load_adapters};
use burn_memsave_models::memsave::{decoder::Llama, gpt2::Gpt2, gptj::GptJ};
use burn_memsave_models::{Generate, GenerateOptions, Sampling, generate};
use bytesize::ByteSize;
use clap::Parser;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use size::Size;
use std::error::Error;
use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::Instant;
use text::{ChatTemplate, Message, device, ends, tokenizer};

#[path = "text/size.rs"]
mod size;
mod text;

#[global_allocator]
static ALLOCATOR: TrackingAllocator = TrackingAllocator::new();

/// Generates text with a model of Hugging Face whose weights stay in their file.
#[derive(Parser)]
struct Args {
    /// The directory of the model: config.json, tokenizer.json, and safetensors. Or a GGUF file.
    #[arg(long)]
    model: PathBuf,
    /// The directory of the tokenizer, if it is not that of the model or in the GGUF file.
    #[arg(long)]
    tokenizer: Option<PathBuf>,
    /// The directory of an adapter that Python's `peft` or the example `finetune_model` wrote.
    #[arg(long)]
    adapter: Option<PathBuf>,
    /// What the text begins with. Several prompts are continued at once, each weight being read once for all of them.
    #[arg(long, required = true)]
    prompt: Vec<String>,
    /// The prompt is what a user says, in the form that the model was trained with.
    #[arg(long)]
    chat: bool,
    /// The most bytes of weights, and of keys and values, that are in memory.
    #[arg(long, default_value = "2GiB")]
    budget: ByteSize,
    /// The most bytes of weights that stay on a device, if it is not the CPU: build with `--features text,wgpu` or `text,cuda`. Keys and values
    /// are there, too.
    #[arg(long, default_value = "0B")]
    device_budget: ByteSize,
    /// The most tokens to generate.
    #[arg(long, default_value_t = 100)]
    tokens: usize,
    /// Draws tokens, with logits divided by this. Without it, and without the next two, the most probable token is taken.
    #[arg(long)]
    temperature: Option<f64>,
    /// Draws from so many tokens only, the most probable ones.
    #[arg(long)]
    top_k: Option<usize>,
    /// Draws from the fewest tokens that have this probability together.
    #[arg(long)]
    top_p: Option<f64>,
    /// Draws the same tokens again.
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Uses weights where they lie in the file, without copies, if `--dtype` is that of the file. No process may write to the file meanwhile.
    #[arg(long)]
    mapped: bool,
    /// The numbers that the model computes with. Those of the file are fastest, and f32 for packed weights.
    #[arg(long, default_value = "f32", value_parser = dtypes(["f32", "f16", "bf16"]))]
    dtype: DType,
    /// The numbers in which keys and values are stored, if not those that the model computes with. i8 has a scale for each token and head.
    #[arg(long, value_parser = dtypes(["f32", "f16", "bf16", "i8"]))]
    cache: Option<DType>,
    /// Tokens of a prompt that are computed at a time.
    #[arg(long, default_value_t = 512)]
    at_once: usize,
    /// A picture of the memory over the run (SVG).
    #[arg(long)]
    plot: Option<PathBuf>,
}

/// Takes one of these names.
fn dtypes<const N: usize>(names: [&'static str; N]) -> impl TypedValueParser<Value = DType> {
    PossibleValuesParser::new(names).map(|name| match &name[..] {
        "f16" => DType::F16,
        "bf16" => DType::BF16,
        "i8" => DType::I8,
        _ => DType::F32,
    })
}

impl Size {
    fn cache_bytes(&self, texts: usize, length: usize, [stored, computed]: [DType; 2]) -> u64 {
        match self {
            Self::Decoder(size) => size.cache_bytes(texts, length, stored, computed),
            Self::Gpt2(size) => size.cache_bytes(texts, length, stored, computed),
            Self::GptJ(size) => size.cache_bytes(texts, length, stored, computed),
        }
    }

    /// The model, for texts of this length.
    fn load(
        &self,
        length: usize,
        file: WeightFile,
        options: &LazyOptions,
        adapter: Option<&Path>,
    ) -> Result<(Box<dyn Generate>, LazyReport), Box<dyn Error>> {
        let device = device();
        Ok(match self {
            Self::Decoder(size) => {
                let (model, report) = Llama::from_file(&size.with_length(length), file, options, &device)?;
                (Box::new(with_adapter(model, adapter)?), report)
            }
            Self::Gpt2(size) => {
                let (model, report) = Gpt2::from_file(size, file, options, &device)?;
                (Box::new(with_adapter(model, adapter)?), report)
            }
            Self::GptJ(size) => {
                let (model, report) = GptJ::from_file(&size.with_length(length), file, options, &device)?;
                (Box::new(with_adapter(model, adapter)?), report)
            }
        })
    }
}

fn with_adapter<M: HuggingFace>(model: M, adapter: Option<&Path>) -> Result<M, PeftError> {
    match adapter {
        Some(adapter) => Ok(load_adapters(model, adapter)?.0),
        None => Ok(model),
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let args = Args::parse();
    let (idle, idle_heap) = (ResidentMemory::of_process(), TrackingAllocator::live());
    let directory = args.tokenizer.as_ref().unwrap_or(&args.model);
    let tokenizer = tokenizer(directory)?;
    let template = args.chat.then(|| ChatTemplate::read(directory)).transpose()?;
    let prompts = args.prompt.iter().map(|prompt| -> Result<Vec<u32>, Box<dyn Error>> {
        let text = match &template {
            Some(template) => template.apply(&[Message::of_user(prompt)], true)?,
            None => prompt.clone(),
        };
        // A template has the special tokens itself.
        let encoding = tokenizer.encode(text, !args.chat).map_err(|error| error.to_string())?;
        Ok(encoding.get_ids().to_vec())
    });
    let prompts: Vec<_> = prompts.collect::<Result<_, _>>()?;

    let longest = prompts.iter().map(Vec::len).max().unwrap_or(0).saturating_add(args.tokens);
    let (computed, stored) = (args.dtype, args.cache.unwrap_or(args.dtype));
    let size = Size::read(&args.model)?;
    if longest > size.length() {
        return Err(format!("{longest} tokens, and the longest text has {}", size.length()).into());
    }
    let of_cache = size.cache_bytes(prompts.len(), longest, [stored, computed]);
    let of_weights = args.budget.as_u64().checked_sub(of_cache).ok_or_else(|| {
        format!("keys and values of {longest} tokens take {} MiB, more than the budget", mib(of_cache))
    })?;
    let options = LazyOptions::new()
        .with_budget(of_weights)
        .with_device_budget(args.device_budget.as_u64())
        .with_dtype(computed);
    let file = match args.mapped {
        // SAFETY: whoever gives `--mapped` promises that no process writes to the file.
        true => unsafe { WeightFile::open_mapped(&args.model)? },
        false => WeightFile::open(&args.model)?,
    };
    let (model, report) = size.load(longest, file, &options, args.adapter.as_deref())?;

    let mut generation = GenerateOptions::new(args.tokens)
        .with_ends(ends(directory)?)
        .with_tokens_at_once(args.at_once)
        .with_cache_dtype(stored);
    let Args { temperature, top_k, top_p, seed, .. } = args;
    if temperature.is_some() || top_k.is_some() || top_p.is_some() {
        let temperature = temperature.unwrap_or(1.0);
        generation = generation.with_sampling(Sampling { temperature, top_k, top_p, seed });
    }
    let mut memory = args.plot.is_some().then(|| RunMemory::start(&device()));
    let mut words = tokenizer.decode_stream(true);
    let begin = Instant::now();
    let (mut first, mut undecoded) = (None, None);
    let generated = generate(&*model, &prompts, &generation, |prompt, token| {
        first.get_or_insert_with(|| begin.elapsed());
        // One text as it comes; several when they are complete.
        if prompts.len() == 1 {
            match words.step(token) {
                Ok(text) => print!("{}", text.unwrap_or_default()),
                Err(error) => undecoded = Some(error.to_string()),
            }
            let _ = io::stdout().flush();
        }
        if prompt == 0 {
            memory.iter_mut().for_each(RunMemory::step);
        }
    })?;
    if let Some(error) = undecoded {
        return Err(error.into());
    }
    let elapsed = begin.elapsed();
    println!();
    if prompts.len() > 1 {
        for (prompt, text) in args.prompt.iter().zip(&generated.texts) {
            let text = tokenizer.decode(text, true).map_err(|error| error.to_string())?;
            println!("\n> {prompt}\n{text}");
        }
    }

    // Before the peak is asked for: meanwhile that is the peak of a step.
    if let (Some(path), Some(memory)) = (&args.plot, memory.take()) {
        fs::write(path, memory.to_svg())?;
    }
    let steps = generated.texts.iter().map(Vec::len).max().unwrap_or(0).max(1);
    let first = first.unwrap_or(elapsed);
    let rest = (elapsed - first).as_secs_f64();
    let statistics = report.cache.statistics();
    let resident =
        ResidentMemory::of_process().zip(idle).map(|(now, idle)| now.peak.saturating_sub(idle.live));
    eprintln!(
        "\n{} tokens of the prompts in {:.2} s, then {:.2} tokens/s for each of {} texts\n\
         heap peak {} MiB (keys and values {} MiB), RSS peak {}, {} MiB read per token\n\
         weights: {statistics}",
        prompts.iter().map(Vec::len).sum::<usize>(),
        first.as_secs_f64(),
        (steps - 1) as f64 / rest.max(1e-9),
        prompts.len(),
        mib(TrackingAllocator::peak() - idle_heap),
        mib(generated.cache_bytes),
        resident.map_or_else(|| "unknown".into(), |bytes| format!("{} MiB", mib(bytes))),
        mib((statistics.bytes_read + statistics.bytes_unpacked) / steps as u64),
    );
    Ok(())
}
