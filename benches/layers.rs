//! Times every layer beside its stock twin: in inference, and forward and backward in training, both trainable and frozen, on the shapes
//! of the README's table and on small ones. It also times many rows of a few elements, forward and backward.
//!
//! ```sh
//! cargo bench --bench layers -- conv2d
//! cargo bench --bench layers -- small
//! cargo bench --bench layers -- short
//! ```
//!
//! At the end it prints a table of ratios, ours to Burn's; a ratio above 1 is a bug.
//!
//! To compare two builds, keep glibc from returning pages between calls, because the resulting page faults slow down both sides:
//! `MALLOC_MMAP_THRESHOLD_=4294967296 MALLOC_TRIM_THRESHOLD_=17179869184`.
#![recursion_limit = "256"]
use burn::module::Module;
use burn::tensor::{Device, Distribution, Tensor};
use burn_memsave::lazy::{LazyLoad, LazyOptions, WeightFile};
use burn_memsave::nn::LinearConfig;
use comfy_table::{Table, presets};
use criterion::Criterion;
use std::error::Error;
use std::fmt::Display;
use std::hint::black_box;
use std::time::{Duration, Instant};
use table::{
    Check, Row, Visitor,
    run::{initialize, variants},
};

#[path = "devices/short.rs"]
mod short;
#[path = "../tests/table/mod.rs"]
mod table;

const SIDES: [&str; 2] = ["burn", "memsave"];

struct Timing {
    device: Device,
    criterion: Criterion,
    /// Whether shapes are small. The names of the groups then begin with that.
    small: bool,
    /// The times of both sides in every turn, by group.
    turns: Vec<(String, Vec<[Duration; 2]>)>,
}

impl Visitor for Timing {
    fn row<const D: usize, const O: usize, S, M>(&mut self, row: Row<'_, D, O, S, M>)
    where
        S: Module + Display + From<M>,
        M: Module + Display + From<S>,
    {
        if row.notes.leaves_out(Check::Time, &row.name) {
            return;
        }
        let (of_stock, of_ours) = (&row.stock.forward, &row.ours.forward);
        let shape = if self.small { row.shapes.small } else { row.shapes.usual };
        let x = Tensor::<D>::random(shape, Distribution::Normal(0.0, 1.0), &self.device);
        let stock = (row.stock.init)(&self.device, shape);
        initialize(shape, &self.device, |x| of_stock(&stock, x));
        let name = format!("{}{}", self.prefix(), row.name);
        let (valid, ours) = (stock.valid(), M::from(stock.valid()));
        let sides: [&dyn Fn(Tensor<D>) -> Tensor<O>; 2] = [&|x| of_stock(&valid, x), &|x| of_ours(&ours, x)];
        self.time(format!("{name}, inference"), sides, &x.clone().inner());
        for (parameters, stock) in variants(stock) {
            let ours = M::from(stock.clone());
            let sides: [&dyn Fn(Tensor<D>) -> Tensor<O>; 2] =
                [&|x| of_stock(&stock, x), &|x| of_ours(&ours, x)];
            self.time(format!("{name}, {parameters}, forward and backward"), sides, &x);
        }
    }
}

impl Timing {
    fn prefix(&self) -> &'static str {
        if self.small { "small " } else { "" }
    }

    /// A dense layer whose weight is lazy, in a cache that has room for it, beside Burn's with the weight in memory.
    fn lazy(&mut self, [rows, width]: [usize; 2]) -> Result<(), Box<dyn Error>> {
        let directory = tempfile::tempdir()?;
        let path = directory.path().join("linear.bpk");
        let stock = burn::nn::LinearConfig::new(width, width).init(&self.device).freeze();
        stock.clone().save_file(&path)?;
        let options = LazyOptions::new().with_min_bytes(0).with_budget(u64::MAX);
        let ours = LinearConfig::new(width, width).init(&self.device);
        let (ours, _) = ours.lazy_load(&WeightFile::open(&path)?, &options)?;
        let ours = ours.freeze();
        let x = Tensor::<2>::random([rows, width], Distribution::Normal(0.0, 1.0), &self.device);

        let name = format!("{}lazy Linear, cached", self.prefix());
        let (valid_stock, valid) = (stock.valid(), ours.valid());
        let sides: [&dyn Fn(Tensor<2>) -> Tensor<2>; 2] =
            [&|x| valid_stock.forward(x), &|x| valid.forward(x)];
        self.time(format!("{name}, inference"), sides, &x.clone().inner());
        let sides: [&dyn Fn(Tensor<2>) -> Tensor<2>; 2] = [&|x| stock.forward(x), &|x| ours.forward(x)];
        self.time(format!("{name}, frozen, forward and backward"), sides, &x);
        Ok(())
    }

    /// For every sample of either side, both run in turns, so that a machine whose speed drifts is fair to both.
    fn time<const D: usize, const O: usize>(
        &mut self,
        name: String,
        sides: [&dyn Fn(Tensor<D>) -> Tensor<O>; 2],
        x: &Tensor<D>,
    ) {
        // Every run has a tensor that nothing else holds, so that a layer may work in place.
        let data = x.to_data();
        let run = |side: usize| {
            let x = Tensor::<D>::from_data(data.clone(), &x.device());
            let x = if x.device().is_autodiff() { x.require_grad() } else { x };
            let start = Instant::now();
            let y = black_box(sides[side](x));
            // In inference, and for a frozen embedding, there is no graph.
            if y.is_tracked() {
                drop(black_box(y.sum().backward())); // also frees the graph, which counts
            }
            start.elapsed()
        };
        let mut turns = Vec::new();
        let mut turn = || {
            let mut times = [Duration::ZERO; 2];
            let first = turns.len() % 2;
            for side in [first, 1 - first] {
                times[side] = run(side);
            }
            turns.push(times);
            times
        };
        let mut group = self.criterion.benchmark_group(&name);
        group
            .sample_size(10)
            .warm_up_time(Duration::from_millis(200))
            .measurement_time(Duration::from_secs(1));
        for (side, of) in SIDES.into_iter().enumerate() {
            group.bench_function(of, |bencher| {
                bencher.iter_custom(|iterations| (0..iterations).map(|_| turn()[side]).sum())
            });
        }
        group.finish();
        if !turns.is_empty() {
            self.turns.push((name, turns));
        }
    }

    /// Medians over all turns: of either side's time, and of the ratio of one turn.
    fn ratios(&self) -> Table {
        let mut table = Table::new();
        table.load_preset(presets::ASCII_MARKDOWN).set_header(["layer", "Burn (ms)", "ours (ms)", "ratio"]);
        let mut logarithms = Vec::new();
        for (name, turns) in &self.turns {
            let [stock, ours] =
                [0, 1].map(|side| median(turns.iter().map(|times| times[side].as_secs_f64() * 1e3)));
            let ratio = median(turns.iter().map(|[stock, ours]| ours.as_secs_f64() / stock.as_secs_f64()));
            logarithms.push(ratio.ln());
            table.add_row([name.clone(), format!("{stock:.4}"), format!("{ours:.4}"), format!("{ratio:.2}")]);
        }
        let mean = (logarithms.iter().sum::<f64>() / logarithms.len().max(1) as f64).exp();
        table.add_row(["geometric mean".into(), String::new(), String::new(), format!("{mean:.2}")]);
        table
    }
}

impl short::Bench for Timing {
    fn device(&self) -> Device {
        self.device.clone()
    }

    fn measure<const D: usize, const O: usize>(
        &mut self,
        name: &str,
        parameters: &str,
        (shape, _): ([usize; D], bool),
        sides: [&dyn Fn(Tensor<D>) -> Tensor<O>; 2],
    ) {
        let x = Tensor::random(shape, Distribution::Normal(0.0, 1.0), &self.device);
        self.time(format!("short {name}, {parameters}, forward and backward"), sides, &x);
    }
}

fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn main() -> Result<(), Box<dyn Error>> {
    let device = Device::flex().autodiff();
    let criterion = Criterion::default().configure_from_args();
    let mut timing = Timing { device, criterion, small: false, turns: Vec::new() };
    for (small, of_lazy) in [(false, [64, 512]), (true, [4, 32])] {
        timing.small = small;
        table::visit(&mut timing);
        timing.lazy(of_lazy)?;
    }
    short::rows(&mut timing);
    timing.criterion.final_summary();
    println!("{}", timing.ratios());
    Ok(())
}
