//! `memsave-prepare`: rewrites a checkpoint as one file that is fast to read lazily. See `burn_memsave::lazy::prepare`.
use burn::tensor::DType;
use burn_memsave::lazy::{PrepareOptions, WeightFile, prepare};
use burn_memsave::measure::human_bytes;
use clap::{Parser, ValueEnum};
use indicatif::{ProgressBar, ProgressStyle};
use std::error::Error;
use std::path::PathBuf;
use std::process::ExitCode;

/// Rewrites a checkpoint (safetensors, sharded or not; burnpack; PyTorch) as one burnpack: aligned, converted as asked, and sorted by name,
/// with numbers by value. One tensor is in memory at a time. The destination appears when it is complete.
#[derive(Parser)]
#[command(version)]
struct Args {
    /// A file, the index of a sharded one, or a directory with one of these.
    source: PathBuf,
    /// The file to write.
    destination: PathBuf,
    /// The dtype of float tensors with two or more axes. Default: that of the source.
    #[arg(long, value_enum)]
    dtype: Option<Stored>,
    /// Writes only the tensors under this key, such as state_dict, and without it: not those of the state of an optimizer, for example.
    #[arg(long)]
    key: Option<String>,
    /// Renames tensors: replaces matches of the regular expression FROM by TO, which may refer to groups as $1. Can be repeated.
    #[arg(long, num_args = 2, value_names = ["FROM", "TO"])]
    rename: Vec<String>,
}

#[derive(Clone, Copy, ValueEnum)]
enum Stored {
    F64,
    F32,
    F16,
    Bf16,
    /// Approximate: eight bits per weight, one scale for every 32.
    Int8,
}

fn main() -> ExitCode {
    match run(&Args::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

fn run(args: &Args) -> Result<(), Box<dyn Error>> {
    let file = WeightFile::open(&args.source)?;
    let file = match &args.key {
        Some(key) => file.with_key(key)?,
        None => file,
    };
    let file = args.rename.chunks_exact(2).try_fold(file, |file, rename| {
        let [from, to] = rename else { unreachable!("clap takes two values") };
        file.with_key_remapping(from, to)
    })?;
    let bar = ProgressBar::new(0);
    bar.set_style(ProgressStyle::with_template("{bar:40} {bytes} of {total_bytes} ({bytes_per_sec}) {msg}")?);
    let progress = bar.clone();
    let options = PrepareOptions::new().with_progress(move |done| {
        progress.set_length(done.of);
        progress.set_position(done.bytes);
        progress.set_message(done.tensor.to_owned());
    });
    let options = match args.dtype {
        None => options,
        Some(Stored::F64) => options.with_dtype(DType::F64),
        Some(Stored::F32) => options.with_dtype(DType::F32),
        Some(Stored::F16) => options.with_dtype(DType::F16),
        Some(Stored::Bf16) => options.with_dtype(DType::BF16),
        Some(Stored::Int8) => options.with_approximate_int8(),
    };
    let prepared = prepare(&file, &args.destination, &options)?;
    bar.finish_and_clear();
    println!("{}: {} tensors, {}", args.destination.display(), prepared.tensors, human_bytes(prepared.bytes));
    Ok(())
}
