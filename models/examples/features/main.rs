//! Computes features of texts or images with an encoder of Hugging Face whose weights stay in their file.
//!
//! ```sh
//! cargo run --release -p burn-memsave-models --features text --example features -- \
//!     --model multilingual-e5-large --data texts.txt --pool mean --budget 512MiB --output features.safetensors
//! ```
//!
//! Texts are in lines; of a file that ends in `.jsonl`, in lines of JSON, as `{"text": ...}`. Each gets the special tokens of `tokenizer.json`. Texts of
//! similar lengths are computed together, and their features are written to their places, so that the output has the order of the input.
//!
//! For a vision transformer, the data are images: the tensor `images` of a safetensors file, `[count, channels, height, width]`, which is ready
//! for it, or, with the feature `images`, the PNG and JPEG files of a folder in the order of their names, which are resized and normalized as
//! `preprocessor_config.json` says.
//!
//! The output has the tensor `features`, `[count, width]` in f32. With `--pool all`, it is `[tokens, width]`, all tokens of the first text before those of
//! the second, and the tensor `lengths` says how many each text has.
//!
//! In memory are at most the weights of the budget, a batch and its features, and all texts as tokens.
#![recursion_limit = "256"]
use burn::tensor::{DType, Device};
use burn_memsave::lazy::{LazyOptions, WeightFile};
use burn_memsave::measure::{ResidentMemory, TrackingAllocator, mib};
use burn_memsave_models::memsave::{bert::Bert, t5::T5Encoder, vit::Vit};
use burn_memsave_models::{ConfigError, EncoderSize, Pooling, T5Size, VitSize};
use bytesize::ByteSize;
use clap::{Parser, ValueEnum};
use images::Images;
use std::error::Error;
use std::path::{Path, PathBuf};
use texts::Texts;
use write::{Run, Settings, write_features};

mod images;
mod inputs;
mod output;
#[cfg(feature = "images")]
mod pixels;
#[allow(dead_code)] // conversations
#[path = "../text/mod.rs"]
mod text;
mod texts;
mod write;

#[global_allocator]
static ALLOCATOR: TrackingAllocator = TrackingAllocator::new();

/// Computes features of texts or images with an encoder of Hugging Face whose weights stay in their file.
#[derive(Parser)]
struct Args {
    /// The directory of the model: config.json, safetensors, and for texts tokenizer.json.
    #[arg(long)]
    model: PathBuf,
    /// Texts in lines, or in lines of JSON (.jsonl), {"text": ...}; or a safetensors file with a tensor `images`, or a folder of images.
    #[arg(long)]
    data: PathBuf,
    /// The file of the features.
    #[arg(long)]
    output: PathBuf,
    /// Features of all tokens, of the first one, or the mean.
    #[arg(long, value_enum, default_value_t = Pool::Mean)]
    pool: Pool,
    /// Features after so many layers; of the last one by default.
    #[arg(long)]
    layer: Option<usize>,
    /// The most bytes of weights that are in memory.
    #[arg(long, default_value = "2GiB")]
    budget: ByteSize,
    /// Tokens of a batch, with padding. A longer text is a batch of its own.
    #[arg(long, default_value_t = 4096)]
    at_once: usize,
    /// Cuts texts that are too long for the model, or longer than this, special tokens included. Without it, they are refused.
    #[arg(long)]
    truncate: Option<usize>,
    /// Uses weights where they lie in the file, without copies, if `--dtype` is that of the file. No process may write to the file meanwhile.
    #[arg(long)]
    mapped: bool,
    /// The numbers that the model computes with. Those of the file are fastest.
    #[arg(long, value_enum, default_value_t = Numbers::F32)]
    dtype: Numbers,
}

#[derive(Clone, Copy, ValueEnum)]
enum Pool {
    All,
    First,
    Mean,
}

impl Pool {
    fn pooling(self) -> Pooling {
        match self {
            Self::All => Pooling::All,
            Self::First => Pooling::First,
            Self::Mean => Pooling::Mean,
        }
    }
}

#[derive(Clone, Copy, ValueEnum)]
enum Numbers {
    F32,
    F16,
    Bf16,
}

impl Numbers {
    fn dtype(self) -> DType {
        match self {
            Self::F32 => DType::F32,
            Self::F16 => DType::F16,
            Self::Bf16 => DType::BF16,
        }
    }
}

/// The size of an encoder.
enum Size {
    Text(EncoderSize),
    T5(T5Size),
    Image(VitSize),
}

impl Size {
    fn read(directory: &Path) -> Result<Self, ConfigError> {
        match EncoderSize::from_directory(directory) {
            Err(ConfigError::Unsupported { field, value, .. }) if field == "model_type" && value == "t5" => {
                Ok(Self::T5(T5Size::from_directory(directory)?))
            }
            Err(ConfigError::Unsupported { field, value, .. }) if field == "model_type" && value == "vit" => {
                Ok(Self::Image(VitSize::from_directory(directory)?))
            }
            size => Ok(Self::Text(size?)),
        }
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let args = Args::parse();
    let size = Size::read(&args.model)?;
    let (device, idle, idle_heap) = (Device::flex(), ResidentMemory::of_process(), TrackingAllocator::live());
    let options = LazyOptions::new().with_budget(args.budget.as_u64()).with_dtype(args.dtype.dtype());
    let file = match args.mapped {
        // SAFETY: whoever gives `--mapped` promises that no process writes to the file.
        true => unsafe { WeightFile::open_mapped(&args.model)? },
        false => WeightFile::open(&args.model)?,
    };
    let Args { layer, at_once, .. } = args;
    let settings = Settings { output: &args.output, pooling: args.pool.pooling(), layer, at_once };
    let (report, run) = match size {
        Size::Text(size) => {
            let texts = Texts::read(&args.model, &args.data, Some(size.length), args.truncate)?;
            let (model, report) = Bert::from_file(&size, file, &options, &device)?;
            let run = write_features(&model, &texts, &settings, &report.cache)?;
            (report, run)
        }
        Size::T5(size) => {
            let texts = Texts::read(&args.model, &args.data, None, args.truncate)?;
            let (model, report) = T5Encoder::from_file(&size, file, &options, &device)?;
            let run = write_features(&model, &texts, &settings, &report.cache)?;
            (report, run)
        }
        Size::Image(size) => {
            let images = Images::open(&args.model, &args.data, size.tokens())?;
            let (model, report) = Vit::from_file(&size, file, &options, &device)?;
            let run = write_features(&model, &images, &settings, &report.cache)?;
            (report, run)
        }
    };

    let Run { inputs, tokens, batches, seconds, read } = run;
    let resident =
        ResidentMemory::of_process().zip(idle).map(|(now, idle)| now.peak.saturating_sub(idle.live));
    println!(
        "{inputs} inputs ({tokens} tokens) in {batches} batches and {seconds:.2} s: {:.2} inputs/s\n\
         heap peak {} MiB, RSS peak {}, {} MiB read per batch\nweights: {}",
        inputs as f64 / seconds.max(1e-9),
        mib(TrackingAllocator::peak().saturating_sub(idle_heap)),
        resident.map_or_else(|| "unknown".into(), |bytes| format!("{} MiB", mib(bytes))),
        mib(read / batches as u64),
        report.cache.statistics(),
    );
    Ok(())
}
