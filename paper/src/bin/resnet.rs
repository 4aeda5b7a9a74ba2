//! Memory of one training step of a residual network, Burn's layers beside burn-memsave's.
//!
//! ```sh
//! cargo run --release -p burn-memsave-paper --bin resnet -- --depth 18
//! ```
#![recursion_limit = "256"]
use burn::tensor::{Device, Distribution, Tensor};
use burn_memsave::measure::{Measurement, TrackingAllocator, measure_step, mib};
use burn_memsave_paper::{Case, Depth, ResNet, memsave, stock};
use clap::Parser;
use comfy_table::{Table, presets};
use std::{error::Error, fs, path::PathBuf};

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
        18 => Depth::D18,
        101 => Depth::D101,
        other => return Err(format!("--depth {other}: 18 or 101").into()),
    };
    let mut table = Table::new();
    table.load_preset(presets::ASCII_MARKDOWN).set_header([
        "case",
        "Burn kept (MiB)",
        "ours kept (MiB)",
        "Burn peak (MiB)",
        "ours peak (MiB)",
        "Burn step (s)",
        "ours step (s)",
    ]);
    let mut results = Vec::new();
    for case in Case::ALL {
        let [burn, ours] = [
            measure::<stock::resnet::Net>(depth, case, &args),
            measure::<memsave::resnet::Net>(depth, case, &args),
        ];
        let size = |bytes: Option<u64>| bytes.map_or_else(|| "unknown".into(), mib);
        let time =
            |step: &Measurement| format!("{:.2}", (step.forward_time + step.backward_time).as_secs_f64());
        table.add_row([
            case.name().into(),
            size(burn.kept),
            size(ours.kept),
            size(burn.peak),
            size(ours.peak),
            time(&burn),
            time(&ours),
        ]);
        results.push(serde_json::json!({ "case": case.name(), "burn": burn, "ours": ours }));
    }
    println!("ResNet-{}, batch {}, {size}x{size}\n{table}", args.depth, args.batch_size, size = args.size);
    if let Some(path) = &args.json {
        let text = serde_json::to_string_pretty(&results)?;
        fs::write(path, text).map_err(|error| format!("{}: {error}", path.display()))?;
    }
    Ok(())
}

fn measure<M: ResNet>(depth: Depth, case: Case, args: &Args) -> Measurement {
    let device = Device::flex().autodiff();
    device.seed(0);
    let model = case.prepare(M::new(depth, &device));
    let shape = [args.batch_size, 3, args.size, args.size];
    let images = Tensor::<4>::random(shape, Distribution::Normal(0.0, 1.0), &device);
    let images = if case.tracks_input() { images.require_grad() } else { images };
    let step = || measure_step(&model, images.clone(), |model, images| model.forward(images).sum());
    step(); // the first run also initializes the parameters
    step()
}
