//! The command that runs the experiments behind `paper/README.md` and `paper/RESULTS.md` and makes their tables and figures.
//!
//! ```sh
//! cargo run --release -p burn-memsave-paper -- all          # everything, at the usual sizes
//! cargo run --release -p burn-memsave-paper -- layers       # one experiment
//! cargo run --release -p burn-memsave-paper -- all --quick  # everything, small, into target/paper-quick
//! cargo run --release -p burn-memsave-paper -- render       # tables, figures and texts from existing results
//! ```
#![recursion_limit = "256"]
use burn_memsave::measure::TrackingAllocator;
use clap::Parser;
use std::{error::Error, path::PathBuf};

mod experiments;
mod figures;
mod runner;
#[path = "../../tests/table/mod.rs"]
mod table;

#[global_allocator]
static ALLOCATOR: TrackingAllocator = TrackingAllocator::new();

/// Runs the experiments of the paper and makes its tables and figures.
#[derive(Parser)]
#[command(name = "burn-memsave-paper")]
struct Args {
    /// Experiments to run (--list names them), or `all`; `render` only makes tables and figures from existing results.
    #[arg(required_unless_present_any = ["list", "child"])]
    names: Vec<String>,
    /// Small sizes, to check that everything runs; their times mean nothing. Writes to target/paper-quick.
    #[arg(long, conflicts_with = "full")]
    quick: bool,
    /// More and larger models.
    #[arg(long)]
    full: bool,
    /// The device of the tensors.
    #[arg(long, value_enum, default_value_t)]
    device: experiments::DeviceName,
    /// Also runs what already has results.
    #[arg(long)]
    again: bool,
    /// Lists the experiments, each with a description.
    #[arg(long)]
    list: bool,
    /// The directory of `README.md`, `RESULTS.md`, `results` and `figures`.
    #[arg(long)]
    output: Option<PathBuf>,
    /// Runs one measurement, given as JSON, in this process.
    #[arg(long, hide = true)]
    child: Option<String>,
}

fn main() -> Result<(), Box<dyn Error>> {
    let args = Args::parse();
    if let Some(child) = &args.child {
        println!("{}", experiments::child::in_child(child)?);
        return Ok(());
    }
    if args.list {
        experiments::ALL
            .iter()
            .for_each(|experiment| println!("{:12} {}", experiment.name, experiment.about));
        return Ok(());
    }
    let paper = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    let output = args.output.unwrap_or_else(|| match args.quick {
        true => paper.join("../target/paper-quick"),
        false => paper.clone(),
    });
    let size = match (args.quick, args.full) {
        (true, _) => experiments::Size::Quick,
        (_, true) => experiments::Size::Full,
        _ => experiments::Size::Usual,
    };
    let settings = experiments::Settings { size, device: args.device };
    if args.names != ["render"] {
        runner::run(&args.names, &settings, args.again, &output)?;
    }
    runner::render(&paper, &output)
}
