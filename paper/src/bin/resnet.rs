//! Measures the memory of one training step of a residual network, with Burn's layers and with burn-memsave's.
//!
//! ```sh
//! cargo run --release -p burn-memsave-paper --bin resnet -- --depth 18
//! ```
#![recursion_limit = "256"]
use burn::tensor::{Device, Distribution, Tensor};
use burn_memsave::measure::{Measurement, TrackingAllocator, measure_step};
use burn_memsave_paper::vision::{Classifier, ResNet, memsave, stock};
use burn_memsave_paper::{Case, report::Report};
use clap::Parser;
use std::{error::Error, path::PathBuf};

#[global_allocator]
static ALLOCATOR: TrackingAllocator = TrackingAllocator::new();

/// Memory of one training step of a residual network.
#[derive(Parser)]
struct Args {
    /// 18 or 101.
    #[arg(long, default_value_t = 18)]
    depth: usize,
    /// Images per step.
    #[arg(long, default_value_t = 8)]
    batch_size: usize,
    /// Height and width of an image.
    #[arg(long, default_value_t = 224)]
    size: usize,
    /// Also writes the result to this file.
    #[arg(long)]
    json: Option<PathBuf>,
}

fn main() -> Result<(), Box<dyn Error>> {
    let args = Args::parse();
    let depth = match args.depth {
        18 => ResNet::D18,
        101 => ResNet::D101,
        other => return Err(format!("--depth {other}: 18 or 101").into()),
    };
    let mut report = Report::default();
    for case in Case::all() {
        let stock = measure::<stock::resnet::Net>(depth, case, &args);
        let ours = measure::<memsave::resnet::Net>(depth, case, &args);
        report.add(case.name(), [stock, ours]);
    }
    let Args { batch_size, size, .. } = args;
    println!("ResNet-{}, batch {batch_size}, {size}x{size}\n{}", args.depth, report.table());
    if let Some(path) = &args.json {
        report.write(path)?;
    }
    Ok(())
}

fn measure<M: Classifier<Variant = ResNet>>(depth: ResNet, case: Case, args: &Args) -> Measurement {
    let device = Device::flex().autodiff();
    device.seed(0);
    let model = case.prepare(M::new(depth, &device));
    let shape = [args.batch_size, 3, args.size, args.size];
    let images = Tensor::<4>::random(shape, Distribution::Normal(0.0, 1.0), &device);
    let images = if case.tracks_input() { images.require_grad() } else { images };
    measure_step(&model, images, |model, images| model.forward(images).sum())
}
