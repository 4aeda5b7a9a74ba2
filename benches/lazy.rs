//! Measures lazy layers beside the same layers in memory: a pass over them, and the peak of the heap.
//!
//! - A tower of eight layers of 16 MiB, for budgets of all weights, half of them and one, from a safetensors file in PyTorch's layout and from a
//!   burnpack in Burn's; and mapped, where a budget of one weight copies nothing.
//! - The encoder with adapters of the README, by its code.
//! - PyTorch, in memory and offloaded to disk by `accelerate`, where `$PYTHON` (or `python3`) can import both.
//!
//! The files are in the page cache.
//!
//! ```sh
//! cargo bench --bench lazy
//! ```
#![recursion_limit = "256"]
use burn::module::{Lora, Module};
use burn::tensor::{Device, Distribution, Tensor};
use burn_memsave::lazy::{LazyLoad, LazyOptions, WeightFile};
use burn_memsave::measure::{Scope, TrackingAllocator, mib};
use burn_memsave::nn::transformer::{TransformerEncoder, TransformerEncoderConfig, TransformerEncoderInput};
use burn_memsave::nn::{Linear, LinearConfig};
use burn_store::{BurnToPyTorchAdapter, ModuleSnapshot, SafetensorsStore};
use comfy_table::{Table, presets};
use std::error::Error;
use std::path::Path;
use std::process::Command;
use std::time::Instant;

#[global_allocator]
static ALLOCATOR: TrackingAllocator = TrackingAllocator::new();

const LAYERS: usize = 8;
const WIDTH: usize = 2048;
const WEIGHT: u64 = (WIDTH * WIDTH * 4) as u64;
/// Passes, of which the fastest counts.
const PASSES: usize = 9;

#[derive(Module, Debug)]
struct Tower {
    layers: Vec<Linear>,
}

impl Tower {
    fn new(device: &Device) -> Self {
        let layer = LinearConfig::new(WIDTH, WIDTH);
        Self { layers: (0..LAYERS).map(|_| layer.init(device)).collect() }
    }

    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        self.layers.iter().fold(x, |x, layer| layer.forward(x))
    }
}

/// The milliseconds of the fastest pass of each, after one that is not timed. They pass in turns, so that a machine whose speed drifts is fair
/// to both.
fn milliseconds(passes: [&dyn Fn(); 2]) -> [f64; 2] {
    let mut fastest = [f64::INFINITY; 2];
    for index in 0..=PASSES {
        for (pass, fastest) in passes.into_iter().zip(&mut fastest) {
            let begin = Instant::now();
            pass();
            if index > 0 {
                *fastest = fastest.min(begin.elapsed().as_secs_f64() * 1e3);
            }
        }
    }
    fastest
}

fn open(path: &Path, mapped: bool) -> Result<WeightFile, Box<dyn Error>> {
    let file = match mapped {
        // SAFETY: nobody writes to a file in the directory of this bench any more.
        true => unsafe { WeightFile::open_mapped(path)? },
        false => WeightFile::open(path)?,
    };
    let of_pytorch = path.extension().is_some_and(|extension| extension == "safetensors");
    Ok(if of_pytorch { file.with_pytorch_adapter() } else { file })
}

fn table(header: &[&str]) -> Table {
    let mut table = Table::new();
    table.load_preset(presets::ASCII_MARKDOWN);
    table.set_header(header);
    table
}

fn tower(device: &Device, directory: &Path) -> Result<(), Box<dyn Error>> {
    let paths = ["model.safetensors", "model.bpk"].map(|name| directory.join(name));
    let eager = Tower::new(device);
    let mut store = SafetensorsStore::from_file(&paths[0]).with_to_adapter(BurnToPyTorchAdapter);
    eager.save_into(&mut store)?;
    eager.clone().save_file(&paths[1])?;
    drop(store);

    let mut table =
        table(&["rows", "file", "budget (weights)", "eager (ms)", "lazy (ms)", "of eager", "heap (MiB)"]);
    for rows in [1, 16, 256] {
        let x = Tensor::<2>::random([rows, WIDTH], Distribution::Normal(0.0, 1.0), device);
        for path in &paths {
            for (budget, mapped) in [(LAYERS, false), (LAYERS / 2, false), (1, false), (1, true)] {
                let options = LazyOptions::new().with_budget(budget as u64 * WEIGHT);
                let scope = Scope::start();
                let (lazy, _) = Tower::new(device).lazy_load(&open(path, mapped)?, &options)?;
                let pass = |tower: &Tower| drop(tower.forward(x.clone()).into_data());
                let [in_memory, of_lazy] = milliseconds([&|| pass(&eager), &|| pass(&lazy)]);
                table.add_row([
                    rows.to_string(),
                    path.extension().unwrap_or_default().to_string_lossy().into_owned()
                        + if mapped { ", mapped" } else { "" },
                    budget.to_string(),
                    format!("{in_memory:.1}"),
                    format!("{of_lazy:.1}"),
                    format!("{:.2}", in_memory / of_lazy),
                    mib(scope.peak()),
                ]);
            }
        }
    }
    println!("{table}");
    Ok(())
}

/// The encoder of the README, whose weights are in PyTorch's layout: inference, and steps of training.
fn encoder(directory: &Path) -> Result<(), Box<dyn Error>> {
    let path = directory.join("encoder.safetensors");
    let device = Device::flex().autodiff();
    let config = TransformerEncoderConfig::new(1024, 4096, 16, 24);
    let eager = config.init(&device);
    let mut store = SafetensorsStore::from_file(&path).with_to_adapter(BurnToPyTorchAdapter);
    eager.save_into(&mut store)?;
    drop(store);
    let eager = eager.apply_lora(Lora::new(8, 16.0));
    let forward = |encoder: &TransformerEncoder, device: &Device| {
        encoder.forward(TransformerEncoderInput::new(Tensor::ones([1, 128, 1024], device)))
    };
    let infer = |encoder: &TransformerEncoder| drop(forward(encoder, &Device::flex()).into_data());
    let train = |encoder: &TransformerEncoder| drop(forward(encoder, &device).sum().backward());

    let mut table =
        table(&["encoder", "weights", "budget (MiB)", "eager (ms)", "lazy (ms)", "of eager", "heap (MiB)"]);
    for (budget, mapped) in [(16, false), (64, false), (512, false), (64, true)] {
        for is_training in [false, true] {
            let scope = Scope::start();
            let file = open(&path, mapped)?;
            let options = LazyOptions::new().with_budget(budget << 20).with_prefetch(2);
            let (lazy, _) = config.init(&device).lazy_load(&file, &options)?;
            let lazy = lazy.apply_lora(Lora::new(8, 16.0));
            let [in_memory, of_lazy] = match is_training {
                true => milliseconds([&|| train(&eager), &|| train(&lazy)]),
                false => {
                    let [eager, lazy] = [&eager, &lazy].map(Module::valid);
                    milliseconds([&|| infer(&eager), &|| infer(&lazy)])
                }
            };
            table.add_row([
                if is_training { "training" } else { "inference" }.to_owned(),
                if mapped { "mapped" } else { "copied" }.to_owned(),
                budget.to_string(),
                format!("{in_memory:.0}"),
                format!("{of_lazy:.0}"),
                format!("{:.2}", in_memory / of_lazy),
                mib(scope.peak()),
            ]);
        }
    }
    println!("{table}");
    Ok(())
}

/// The same in PyTorch, or why not.
fn python() -> Result<(), Box<dyn Error>> {
    let python = std::env::var("PYTHON").unwrap_or_else(|_| "python3".into());
    let imports = Command::new(&python).args(["-c", "import torch, accelerate"]).output();
    if !imports.is_ok_and(|output| output.status.success()) {
        println!("skipped: {python} cannot import torch and accelerate");
        return Ok(());
    }
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/benches/lazy.py");
    let output = Command::new(python).args([script, &rayon::current_num_threads().to_string()]).output()?;
    if !output.status.success() {
        return Err(String::from_utf8_lossy(&output.stderr).into());
    }
    let mut table = table(&["PyTorch", "rows", "eager (ms)", "disk_offload (ms)", "of eager"]);
    for line in String::from_utf8(output.stdout)?.lines() {
        let [name, rows, in_memory, offloaded] = line.split(',').collect::<Vec<_>>()[..] else {
            return Err(format!("{line:?} is no row").into());
        };
        let [in_memory, offloaded] = [in_memory.parse::<f64>()?, offloaded.parse()?];
        let ratio = format!("{:.2}", in_memory / offloaded);
        table.add_row([name, rows, &format!("{in_memory:.1}"), &format!("{offloaded:.1}"), &ratio]);
    }
    println!("{table}");
    Ok(())
}

fn main() -> Result<(), Box<dyn Error>> {
    let directory = tempfile::tempdir()?;
    tower(&Device::flex(), directory.path())?;
    encoder(directory.path())?;
    python()
}
