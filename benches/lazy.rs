//! Measures eight lazy layers of 16 MiB each beside the same layers in memory: a pass over them, and the peak of the heap, for budgets of all
//! weights, half of them and one, from a safetensors file in PyTorch's layout and from a burnpack in Burn's; and mapped, where a budget of one
//! weight copies nothing. The files are in the page cache.
//!
//! ```sh
//! cargo bench --bench lazy
//! ```
#![recursion_limit = "256"]
use burn::module::Module;
use burn::tensor::{Device, Distribution, Tensor};
use burn_memsave::lazy::{LazyLoad, LazyOptions, WeightFile};
use burn_memsave::measure::{Scope, TrackingAllocator, mib};
use burn_memsave::nn::{Linear, LinearConfig};
use burn_store::{BurnToPyTorchAdapter, ModuleSnapshot, SafetensorsStore};
use comfy_table::{Table, presets};
use std::error::Error;
use std::path::Path;
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
fn milliseconds(towers: [&Tower; 2], x: &Tensor<2>) -> [f64; 2] {
    let mut fastest = [f64::INFINITY; 2];
    for pass in 0..=PASSES {
        for (tower, fastest) in towers.into_iter().zip(&mut fastest) {
            let begin = Instant::now();
            tower.forward(x.clone()).into_data();
            if pass > 0 {
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

fn main() -> Result<(), Box<dyn Error>> {
    let device = Device::flex();
    let directory = tempfile::tempdir()?;
    let paths = ["model.safetensors", "model.bpk"].map(|name| directory.path().join(name));
    let eager = Tower::new(&device);
    let mut store = SafetensorsStore::from_file(&paths[0]).with_to_adapter(BurnToPyTorchAdapter);
    eager.save_into(&mut store)?;
    eager.clone().save_file(&paths[1])?;
    drop(store);

    let mut table = Table::new();
    table.load_preset(presets::ASCII_MARKDOWN);
    table.set_header([
        "rows",
        "file",
        "budget (weights)",
        "eager (ms)",
        "lazy (ms)",
        "of eager",
        "heap (MiB)",
    ]);
    for rows in [1, 16, 256] {
        let x = Tensor::<2>::random([rows, WIDTH], Distribution::Normal(0.0, 1.0), &device);
        for path in &paths {
            for (budget, mapped) in [(LAYERS, false), (LAYERS / 2, false), (1, false), (1, true)] {
                let options = LazyOptions::new().with_budget(budget as u64 * WEIGHT);
                let scope = Scope::start();
                let (lazy, _) = Tower::new(&device).lazy_load(&open(path, mapped)?, &options)?;
                let [in_memory, of_lazy] = milliseconds([&eager, &lazy], &x);
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
