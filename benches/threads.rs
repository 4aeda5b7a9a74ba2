//! Times layers, forward and backward, in pools of 1, 2, 4, 16 and 64 threads, in milliseconds.
//!
//! ```sh
//! cargo bench --bench threads
//! cargo bench --bench threads -- softmax
//! ```
//!
//! Kernels divide their work among threads, but do not have more of it. So more threads than the machine has cores should take at most 5 %
//! longer than as many as it has. The first row is rayon alone: where that takes longer, threads wake, look for work that others have, and sleep.
#![recursion_limit = "256"]
use burn::tensor::{
    Device, Distribution, Tensor,
    ops::{AttentionModuleOptions, ConvOptions, MaxPoolOptions},
};
use burn_memsave::{functional as F, nn::LstmConfig};
use comfy_table::{Table, presets};
use rayon::{ThreadPool, ThreadPoolBuilder, prelude::*};
use std::{
    error::Error,
    hint::black_box,
    time::{Duration, Instant},
};

const POOLS: [usize; 5] = [1, 2, 4, 16, 64];

/// Jobs of a loop of rayon.
const JOBS: u32 = 256;

/// Every pool runs so often, one after the other. The shortest times count, because other programs can only make them longer.
const TURNS: usize = 9;

struct Timing {
    pools: Vec<ThreadPool>,
    /// What names must contain.
    filter: String,
    table: Table,
}

impl Timing {
    fn new() -> Result<Self, Box<dyn Error>> {
        let pools = POOLS.map(|threads| ThreadPoolBuilder::new().num_threads(threads).build());
        let filter = std::env::args().skip(1).find(|argument| !argument.starts_with('-')).unwrap_or_default();
        let mut table = Table::new();
        table.load_preset(presets::ASCII_MARKDOWN);
        table.set_header(core::iter::once(String::new()).chain(POOLS.map(|threads| threads.to_string())));
        Ok(Self { pools: pools.into_iter().collect::<Result<_, _>>()?, filter, table })
    }

    /// Times `f(x)` and its gradients.
    fn time<const D: usize, const O: usize>(
        &mut self,
        name: &str,
        shape: [usize; D],
        f: impl Fn(Tensor<D>) -> Tensor<O> + Sync,
    ) {
        let x = random(shape);
        self.add(format!("{name} of {shape:?}"), &|| {
            black_box(f(x.clone().require_grad()).sum().backward());
        });
    }

    /// Times loops of rayon over [`JOBS`] jobs of so many additions, each loop after a sixteenth of its work on one thread.
    fn time_rayon(&mut self, loops: u32, additions: u64) {
        let job = |_| {
            black_box((0..additions).fold(0, |sum, at| black_box(sum + at)));
        };
        self.add(format!("{loops} loops of rayon alone"), &|| {
            for _ in 0..loops {
                (0..JOBS / 16).for_each(job);
                (0..JOBS).into_par_iter().with_max_len(1).for_each(job);
            }
        });
    }

    /// Adds the row of a step, if its name is wanted.
    fn add(&mut self, name: String, step: &(dyn Fn() + Sync)) {
        if !name.contains(&self.filter) {
            return;
        }
        let mut shortest = [Duration::MAX; POOLS.len()];
        for _ in 0..TURNS {
            for (pool, shortest) in self.pools.iter().zip(&mut shortest) {
                pool.install(|| {
                    let start = Instant::now();
                    step();
                    *shortest = start.elapsed().min(*shortest);
                });
            }
        }
        let times = shortest.map(|time| format!("{:.2}", 1e3 * time.as_secs_f64()));
        self.table.add_row(core::iter::once(name).chain(times));
    }
}

fn random<const D: usize>(shape: [usize; D]) -> Tensor<D> {
    Tensor::random(shape, Distribution::Normal(0.0, 1.0), &Device::flex().autodiff())
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut timing = Timing::new()?;
    timing.time_rayon(48, 1 << 11);
    timing.time("softmax along axis 1", [4, 2048, 256], |x| F::softmax(x, 1));
    timing.time("softmax along axis 1", [1, 1 << 17, 16], |x| F::softmax(x, 1));
    timing.time("softmax", [3, 1 << 19], |x| F::softmax(x, 1));
    let lstm = LstmConfig::new(256, 1024, true).init(&Device::flex().autodiff());
    timing.time("lstm", [1, 8, 256], |x| lstm.forward(x, None).0);
    for [batch, channels, size] in [[1, 1, 1 << 20], [2, 8, 1 << 16]] {
        let weight = random([channels, 1, 9]).require_grad();
        timing.time("depthwise conv1d", [batch, channels, size], move |x| {
            F::conv1d(x, weight.clone(), None, ConvOptions::new([1], [4], [1], channels))
        });
    }
    let weight = random([3, 1, 3, 3]).require_grad();
    timing.time("depthwise conv2d", [8, 3, 224, 224], move |x| {
        F::conv2d(x, weight.clone(), None, ConvOptions::new([1; 2], [1; 2], [1; 2], 3))
    });
    let weight = random([64, 64, 3, 3]).require_grad();
    timing.time("conv2d", [1, 64, 56, 56], move |x| {
        F::conv2d(x, weight.clone(), None, ConvOptions::new([1; 2], [1; 2], [1; 2], 1))
    });
    timing
        .time("max_pool1d", [1, 1, 1 << 20], |x| F::max_pool1d(x, MaxPoolOptions::new([3]).with_stride([2])));
    timing.time("attention", [1, 8, 1024, 64], |x| {
        F::attention(x.clone(), x.clone(), x, None, None, AttentionModuleOptions::default())
    });
    let weight = random([64, 64]).require_grad();
    timing.time("linear", [1 << 16, 64], move |x| F::linear(x, weight.clone(), None));
    println!("{}", timing.table);
    Ok(())
}
