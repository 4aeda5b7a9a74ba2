//! Measures generation by a model whose weights stay in their files: tokens per second, the peak of the heap, and bytes that are read per
//! token, for several budgets. Beside it, the same model with its weights in memory, and `transformers`, in memory and offloaded to disk by
//! `accelerate`, where `$PYTHON` (or `python3`) can import both. Where it has `gguf`, too, models of the same size in GGUF, whose weights are
//! unpacked for every token, and `llama.cpp` with the same files, where it has `xllamacpp`.
//!
//! A token needs all weights but the embedding once. What is not in memory is copied from the page cache, at a speed that the bench measures, by
//! one thread, or is used there (mapped). Weights that are read when the model is loaded have Burn's layout, lazy ones have PyTorch's.
//!
//! ```sh
//! cargo bench -p burn-memsave-models --bench generate -- --model DIRECTORY   # or a random model of 1.6 GiB, which Python makes
//! ```
#![recursion_limit = "256"]
use burn::tensor::{DType, Device};
use burn_memsave::lazy::{LazyOptions, TensorInfo, WeightFile};
use burn_memsave::measure::{Scope, TrackingAllocator, mib};
use burn_memsave_models::{DecoderSize, GenerateOptions, generate, memsave::decoder::Llama};
use clap::Parser;
use comfy_table::{Table, presets};
use std::error::Error;
use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

#[global_allocator]
static ALLOCATOR: TrackingAllocator = TrackingAllocator::new();

/// Tokens per second of a model whose weights stay in their files.
#[derive(Parser)]
struct Args {
    /// The directory of a model of the Llama family: config.json and safetensors.
    #[arg(long)]
    model: Option<PathBuf>,
    /// The tokens that are generated, and timed, after the first one.
    #[arg(long, default_value_t = 16)]
    tokens: usize,
    /// The tokens of the prompt.
    #[arg(long, default_value_t = 32)]
    prompt: u32,
    /// Given by cargo.
    #[arg(long, hide = true)]
    bench: bool,
}

/// The formats of the models in GGUF.
const PACKED: [&str; 4] = ["Q8_0", "Q4_0", "Q4_K", "Q6_K"];

/// How a model is loaded.
struct Case {
    name: &'static str,
    dtype: DType,
    /// The share of the weights that may be in memory. All are read at once if it is `None`.
    budget: Option<f64>,
    mapped: bool,
}

impl Case {
    const fn new(name: &'static str, dtype: DType, budget: Option<f64>, mapped: bool) -> Self {
        Self { name, dtype, budget, mapped }
    }
}

const CASES: [Case; 9] = [
    Case::new("read at once", DType::BF16, None, false),
    Case::new("all fit", DType::BF16, Some(1.0), false),
    Case::new("half fit", DType::BF16, Some(0.5), false),
    Case::new("a quarter fits", DType::BF16, Some(0.25), false),
    Case::new("a quarter fits, mapped", DType::BF16, Some(0.25), true),
    Case::new("a 16th fits, mapped", DType::BF16, Some(1.0 / 16.0), true),
    Case::new("read at once", DType::F32, None, false),
    Case::new("half fit", DType::F32, Some(0.5), false),
    Case::new("a quarter fits", DType::F32, Some(0.25), false),
];

fn main() -> Result<(), Box<dyn Error>> {
    let args = Args::parse();
    let (temporary, python) = (tempfile::tempdir()?, Python::find());
    let directory = match (&args.model, &python) {
        (Some(model), _) => model,
        (None, Some(python)) => {
            python.run(&["make".as_ref(), temporary.path()])?;
            temporary.path()
        }
        (None, None) => return Err("without Python, a model must be given by --model".into()),
    };
    let (bytes, seconds) = read_all(directory)?;
    let bandwidth = bytes as f64 / seconds / 1e9;
    println!("{} MiB of files, which are read from the page cache at {bandwidth:.1} GB/s", mib(bytes));

    let [threads, prompt, tokens] =
        [rayon::current_num_threads(), args.prompt as usize, args.tokens].map(|number| number.to_string());
    let numbers = [&threads, &prompt, &tokens].map(Path::new);
    let mut table = Table::new();
    table.load_preset(presets::ASCII_MARKDOWN);
    table.set_header([
        "weights",
        "numbers",
        "prompt (s)",
        "tokens/s",
        "weights used (GB/s)",
        "heap (MiB)",
        "read per token (MiB)",
    ]);
    for case in CASES {
        let measured = measure(&case, &args, directory)?;
        table.add_row(measured.row(case.name, &format!("{:?}", case.dtype)));
    }
    if let Some(python) = python.as_ref().filter(|python| python.has("gguf")) {
        let packed = temporary.path().join("packed.gguf");
        let has_llama_cpp = python.has("xllamacpp");
        for kind in PACKED {
            python.run(&["pack".as_ref(), directory, &packed, kind.as_ref()])?;
            for (name, mapped) in [("nothing fits", false), ("nothing fits, mapped", true)] {
                let case = Case::new(name, DType::F32, Some(0.0), mapped);
                table.add_row(measure(&case, &args, &packed)?.row(name, kind));
            }
            if has_llama_cpp {
                let output =
                    python.run(&[&["llama_cpp".as_ref(), packed.as_path()][..], &numbers].concat())?;
                println!("llama.cpp, {kind}: {}", output.trim_end());
            }
        }
    }
    println!("{table}");
    let Some(python) = python else { return Ok(()) };
    let output = python.run(&[&["time".as_ref(), directory][..], &numbers].concat())?;
    println!("transformers, bf16\n{output}");
    Ok(())
}

/// What is measured of a case.
struct Measured {
    /// Seconds of the prompt.
    prompt: f64,
    /// Tokens per second after it.
    per_second: f64,
    /// Bytes of the weights that a token needs, packed or in the dtype of the case.
    used: u64,
    /// The peak of the heap.
    heap: u64,
    /// Bytes that are read per token.
    read: u64,
}

impl Measured {
    /// A row of the table.
    fn row(&self, name: &str, numbers: &str) -> [String; 7] {
        let Self { prompt, per_second, used, heap, read } = *self;
        [
            name.to_owned(),
            numbers.to_owned(),
            format!("{prompt:.2}"),
            format!("{per_second:.2}"),
            format!("{:.1}", per_second * used as f64 / 1e9),
            mib(heap),
            mib(read),
        ]
    }
}

/// The faster of two generations, after one of a token that fills the cache.
fn measure(case: &Case, args: &Args, model: &Path) -> Result<Measured, Box<dyn Error>> {
    let scope = Scope::start();
    let file = match case.mapped {
        // SAFETY: nobody writes to the model while this bench runs.
        true => unsafe { WeightFile::open_mapped(model)? },
        false => WeightFile::open(model)?,
    };
    let is_used = |name: &str| !["embed_tokens", "token_embd"].iter().any(|table| name.contains(table));
    let in_file = |tensor: TensorInfo<'_>| match tensor.packing {
        Some(_) => tensor.bytes as u64,
        None => tensor.shape.num_elements() as u64 * case.dtype.size() as u64,
    };
    let all: u64 = file.tensors().map(in_file).sum();
    let used = file.tensors().filter(|tensor| is_used(tensor.name)).map(in_file).sum();
    let options = LazyOptions::new().with_dtype(case.dtype);
    let options = match case.budget {
        Some(share) => options.with_budget((share * all as f64) as u64),
        None => options.exclude("*"),
    };
    let size = match model.is_file() {
        true => DecoderSize::from_gguf(model)?,
        false => DecoderSize::from_directory(model)?,
    };
    let size = size.with_length(args.prompt as usize + args.tokens + 1);
    let (model, report) = Llama::from_file(&size, file, &options, &Device::flex())?;
    let prompt: Vec<u32> = (0..args.prompt).map(|at| 10 + at * 37 % 1000).collect();
    let run = |tokens: usize| -> Result<Measured, Box<dyn Error>> {
        let (begin, mut first, mut read_before) = (Instant::now(), None, 0);
        let read_bytes = || {
            let statistics = report.cache.statistics();
            statistics.bytes_read + statistics.bytes_unpacked
        };
        generate(&model, std::slice::from_ref(&prompt), &GenerateOptions::new(1 + tokens), |_, _| {
            first.get_or_insert_with(|| {
                read_before = read_bytes();
                Instant::now()
            });
        })?;
        let first = first.ok_or("no token")?;
        let read = (read_bytes() - read_before) / tokens.max(1) as u64;
        let per_second = tokens as f64 / first.elapsed().as_secs_f64();
        Ok(Measured { prompt: (first - begin).as_secs_f64(), per_second, used, heap: scope.peak(), read })
    };
    run(0)?;
    let (first, second) = (run(args.tokens)?, run(args.tokens)?);
    Ok(if second.per_second > first.per_second { second } else { first })
}

/// The bytes of all weights, and the seconds that a second reading of them takes.
fn read_all(directory: &Path) -> Result<(u64, f64), Box<dyn Error>> {
    let mut buffer = vec![0; 1 << 20];
    let mut bytes = 0;
    let mut seconds = f64::INFINITY;
    for _ in 0..3 {
        let begin = Instant::now();
        bytes = 0;
        for entry in fs::read_dir(directory)? {
            let path = entry?.path();
            if path.extension().is_none_or(|extension| extension != "safetensors") {
                continue;
            }
            let mut file = File::open(path)?;
            loop {
                match file.read(&mut buffer)? {
                    0 => break,
                    count => bytes += count as u64,
                }
            }
        }
        seconds = seconds.min(begin.elapsed().as_secs_f64());
    }
    Ok((bytes, seconds))
}

/// A Python that has the libraries.
struct Python(String);

impl Python {
    fn find() -> Option<Self> {
        let python = std::env::var("PYTHON").unwrap_or_else(|_| "python3".into());
        let found = Self(python);
        if found.has("torch, transformers, accelerate") {
            return Some(found);
        }
        println!("skipped: {} cannot import torch, transformers and accelerate", found.0);
        None
    }

    /// Whether it can import these modules.
    fn has(&self, modules: &str) -> bool {
        let imports = Command::new(&self.0).args(["-c", &format!("import {modules}")]).output();
        imports.is_ok_and(|output| output.status.success())
    }

    /// What `generate.py` prints.
    fn run(&self, arguments: &[&Path]) -> Result<String, Box<dyn Error>> {
        let script = concat!(env!("CARGO_MANIFEST_DIR"), "/benches/generate.py");
        let output = Command::new(&self.0).arg(script).args(arguments).output()?;
        if !output.status.success() {
            return Err(String::from_utf8_lossy(&output.stderr).into());
        }
        Ok(String::from_utf8(output.stdout)?)
    }
}
