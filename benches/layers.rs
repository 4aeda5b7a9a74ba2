//! Time of every layer beside its stock twin: forward, and forward with backward; trainable and frozen.
//!
//! ```sh
//! cargo bench --bench layers -- conv2d
//! ```
//!
//! At the end comes a table of ratios, ours to Burn's: above 1 is a bug.
#![recursion_limit = "256"]
use burn::module::Module;
use burn::tensor::{Device, Distribution, Tensor};
use cases::{Forward, Visitor, initialize, variants, visit_layers};
use comfy_table::{Table, presets};
use criterion::{BatchSize, Criterion};
use std::{path::PathBuf, time::Duration};

mod cases;

const SIDES: [&str; 2] = ["burn", "memsave"];
const PASSES: [&str; 2] = ["forward", "forward and backward"];

struct Timing {
    device: Device,
    criterion: Criterion,
    groups: Vec<String>,
}

impl Visitor for Timing {
    fn layer<const D: usize, const O: usize, S: Module, M: Module + From<S>>(
        &mut self,
        name: &str,
        shape: [usize; D],
        stock: S,
        (forward_stock, forward_ours): (Forward<S, D, O>, Forward<M, D, O>),
    ) {
        let x = Tensor::<D>::random(shape, Distribution::Normal(0.0, 1.0), &self.device);
        initialize(shape, &self.device, |x| forward_stock(&stock, x));
        for (parameters, stock) in variants(stock) {
            let ours = M::from(stock.clone());
            for pass in PASSES {
                let group = format!("{name}, {parameters}, {pass}");
                self.time(&group, SIDES[0], &x, pass == PASSES[1], |x| forward_stock(&stock, x));
                self.time(&group, SIDES[1], &x, pass == PASSES[1], |x| forward_ours(&ours, x));
                self.groups.push(group);
            }
        }
    }
}

impl Timing {
    fn time<const D: usize, const O: usize>(
        &mut self,
        group: &str,
        side: &str,
        x: &Tensor<D>,
        backward: bool,
        forward: impl Fn(Tensor<D>) -> Tensor<O>,
    ) {
        let mut group = self.criterion.benchmark_group(group);
        group
            .sample_size(10)
            .warm_up_time(Duration::from_millis(200))
            .measurement_time(Duration::from_secs(1));
        // A leaf of its own for every run, that nobody else holds: a layer may work in place.
        let data = x.to_data();
        let input = || Tensor::<D>::from_data(data.clone(), &x.device()).require_grad();
        group.bench_function(side, |bencher| {
            let run = |x: Tensor<D>| {
                let y = forward(x);
                if backward { (None, Some(y.sum().backward())) } else { (Some(y), None) }
            };
            bencher.iter_batched(input, run, BatchSize::PerIteration);
        });
    }

    /// The ratio of the medians that Criterion wrote down, for the groups that ran.
    fn ratios(&self) -> Table {
        let mut table = Table::new();
        table.load_preset(presets::ASCII_MARKDOWN).set_header(["layer", "Burn (ms)", "ours (ms)", "ratio"]);
        let mut logarithms = Vec::new();
        for group in &self.groups {
            let [Some(stock), Some(ours)] = SIDES.map(|side| median(group, side)) else { continue };
            logarithms.push((ours / stock).ln());
            let milliseconds = |nanoseconds: f64| format!("{:.2}", nanoseconds / 1e6);
            table.add_row([
                group.clone(),
                milliseconds(stock),
                milliseconds(ours),
                format!("{:.2}", ours / stock),
            ]);
        }
        let mean = (logarithms.iter().sum::<f64>() / logarithms.len().max(1) as f64).exp();
        table.add_row(["geometric mean".into(), String::new(), String::new(), format!("{mean:.2}")]);
        table
    }
}

/// The median time in nanoseconds.
fn median(group: &str, side: &str) -> Option<f64> {
    let home = std::env::var_os("CRITERION_HOME").map(PathBuf::from).or_else(|| {
        let target = std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| "target".into(), PathBuf::from);
        Some(target.join("criterion"))
    })?;
    let path = home.join(group).join(side).join("new/estimates.json");
    let estimates: serde_json::Value = serde_json::from_slice(&std::fs::read(path).ok()?).ok()?;
    estimates["median"]["point_estimate"].as_f64()
}

fn main() {
    let device = Device::flex().autodiff();
    let criterion = Criterion::default().configure_from_args();
    let mut timing = Timing { device: device.clone(), criterion, groups: Vec::new() };
    visit_layers(&mut timing, &device);
    timing.criterion.final_summary();
    println!("{}", timing.ratios());
}
