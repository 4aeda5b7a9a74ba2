//! Bytes kept after the forward pass and at the peak of forward and backward, of every layer beside its stock twin:
//! trainable and frozen on an input that requires a gradient, and trainable on one that does not, as in a first layer.
//!
//! ```sh
//! cargo bench --bench memory -- --csv memory.csv conv
//! ```
#![recursion_limit = "256"]
use burn::module::Module;
use burn::tensor::{Device, Distribution, Tensor};
use burn_memsave::measure::{LayerMeasurement, TrackingAllocator, measure_layer, mib};
use clap::Parser;
use comfy_table::{Table, presets};
use serde::Serialize;
use std::fmt::Display;
use std::{error::Error, path::PathBuf};
use table::{
    Check, Row as TableRow, Visitor,
    run::{initialize, variants},
};

#[path = "../tests/table/mod.rs"]
mod table;

#[global_allocator]
static ALLOCATOR: TrackingAllocator = TrackingAllocator::new();

/// Memory of every layer beside its stock twin.
#[derive(Parser)]
struct Args {
    /// Also writes the table to this file.
    #[arg(long)]
    csv: Option<PathBuf>,
    /// Only layers whose name contains this.
    #[arg(default_value = "")]
    filter: String,
    /// Given by cargo.
    #[arg(long, hide = true)]
    bench: bool,
}

#[derive(Serialize)]
struct Row {
    layer: String,
    parameters: &'static str,
    input: &'static str,
    burn_kept: Option<u64>,
    ours_kept: Option<u64>,
    burn_peak: Option<u64>,
    ours_peak: Option<u64>,
}

struct Memory {
    device: Device,
    filter: String,
    rows: Vec<Row>,
}

impl Visitor for Memory {
    fn row<const D: usize, const O: usize, S, M>(&mut self, row: TableRow<'_, D, O, S, M>)
    where
        S: Module + Display + From<M>,
        M: Module + Display + From<S>,
    {
        if !row.name.contains(&self.filter) || row.notes.leaves_out(Check::Time, &row.name) {
            return;
        }
        let (name, shape) = (row.name, row.shapes.usual);
        let (forward_stock, forward_ours) = (&row.stock.forward, &row.ours.forward);
        let stock = (row.stock.init)(&self.device, shape);
        initialize(shape, &self.device, |x| forward_stock(&stock, x));
        for (parameters, stock) in variants(stock) {
            let ours = M::from(stock.clone());
            // Of an input that requires no gradient only parameters make a graph.
            let inputs = if parameters == "trainable" { &["tracked", "untracked"][..] } else { &["tracked"] };
            for &input in inputs {
                let tracked = input == "tracked";
                let burn = self.measure(shape, tracked, |x| forward_stock(&stock, x));
                let ours = self.measure(shape, tracked, |x| forward_ours(&ours, x));
                self.rows.push(Row {
                    layer: name.clone(),
                    parameters,
                    input,
                    burn_kept: burn.kept,
                    ours_kept: ours.kept,
                    burn_peak: burn.peak,
                    ours_peak: ours.peak,
                });
            }
        }
    }
}

impl Memory {
    fn measure<const D: usize, const O: usize>(
        &self,
        shape: [usize; D],
        tracked: bool,
        forward: impl Fn(Tensor<D>) -> Tensor<O>,
    ) -> LayerMeasurement {
        let normal = Distribution::Normal(0.0, 1.0);
        let input = || Tensor::random(shape, normal, &self.device).set_require_grad(tracked);
        let run = || measure_layer(input, &forward);
        run(); // the first run also initializes parameters
        run()
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let args = Args::parse();
    let device = Device::flex().autodiff();
    let mut memory = Memory { device, filter: args.filter, rows: Vec::new() };
    table::visit(&mut memory);
    let mut table = Table::new();
    table.load_preset(presets::ASCII_MARKDOWN).set_header([
        "layer",
        "parameters",
        "input",
        "Burn kept (MiB)",
        "ours kept (MiB)",
        "Burn peak (MiB)",
        "ours peak (MiB)",
    ]);
    let size = |bytes: Option<u64>| bytes.map_or_else(|| "unknown".into(), mib);
    for row in &memory.rows {
        table.add_row([
            row.layer.clone(),
            row.parameters.into(),
            row.input.into(),
            size(row.burn_kept),
            size(row.ours_kept),
            size(row.burn_peak),
            size(row.ours_peak),
        ]);
    }
    println!("{table}");
    if let Some(path) = args.csv {
        let mut writer =
            csv::Writer::from_path(&path).map_err(|error| format!("{}: {error}", path.display()))?;
        memory.rows.iter().try_for_each(|row| writer.serialize(row))?;
        writer.flush()?;
    }
    Ok(())
}
