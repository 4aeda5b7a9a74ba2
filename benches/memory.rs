//! Measures the bytes that every layer keeps after the forward pass, and the peak of forward and backward, beside its stock twin. Layers
//! are trainable or frozen on an input that requires a gradient, and trainable on one that does not, as in a first layer. Kept bytes
//! include the input where it is kept. The peak never includes the input, so it may be the smaller number.
//!
//! ```sh
//! cargo bench --bench memory -- --csv memory.csv conv
//! ```
#![recursion_limit = "256"]
use burn::tensor::Device;
use burn_memsave::measure::{TrackingAllocator, mib};
use bytes::{Bytes, Row};
use clap::Parser;
use comfy_table::{Table, presets};
use serde::Serialize;
use std::{error::Error, path::PathBuf};

mod bytes;
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
struct Line<'a> {
    layer: &'a str,
    parameters: &'static str,
    input: &'static str,
    burn_kept: Option<u64>,
    ours_kept: Option<u64>,
    burn_peak: Option<u64>,
    ours_peak: Option<u64>,
}

impl<'a> From<&'a Row> for Line<'a> {
    fn from(row: &'a Row) -> Self {
        Self {
            layer: &row.layer,
            parameters: row.parameters,
            input: row.input,
            burn_kept: row.burn.kept,
            ours_kept: row.ours.kept,
            burn_peak: row.burn.peak,
            ours_peak: row.ours.peak,
        }
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let args = Args::parse();
    let device = Device::flex().autodiff();
    let mut bytes = Bytes { device: &device, filter: &args.filter, smaller: false, rows: vec![] };
    table::visit(&mut bytes);
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
    let lines: Vec<Line> = bytes.rows.iter().map(Line::from).collect();
    for line in &lines {
        table.add_row([
            line.layer.into(),
            line.parameters.into(),
            line.input.into(),
            size(line.burn_kept),
            size(line.ours_kept),
            size(line.burn_peak),
            size(line.ours_peak),
        ]);
    }
    println!("{table}");
    if let Some(path) = args.csv {
        let mut writer =
            csv::Writer::from_path(&path).map_err(|error| format!("{}: {error}", path.display()))?;
        lines.iter().try_for_each(|line| writer.serialize(line))?;
        writer.flush()?;
    }
    Ok(())
}
