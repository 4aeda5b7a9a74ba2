//! Measures the memory and the time of one step of a feed-forward block on a long sequence: as a whole, and in tiles that are recomputed
//! in the backward pass.
//!
//! ```sh
//! cargo run --release -p burn-memsave-paper --bin tiled -- --tokens 16384
//! ```
use burn::module::Module;
use burn::tensor::{Device, Distribution, Tensor};
use burn_memsave::checkpoint::{EarlyStop, checkpoint_tiled};
use burn_memsave::measure::{TrackingAllocator, measure_step, mib};
use burn_memsave::nn::activation::{SwiGlu, SwiGluConfig};
use burn_memsave::nn::{Linear, LinearConfig, RmsNorm, RmsNormConfig};
use clap::Parser;
use comfy_table::{Table, presets};
use std::error::Error;

#[global_allocator]
static ALLOCATOR: TrackingAllocator = TrackingAllocator::new();

/// Memory and time of a feed-forward block on a long sequence, whole and in tiles.
#[derive(Parser)]
struct Args {
    /// Tokens of the sequence.
    #[arg(long, default_value_t = 16_384)]
    tokens: usize,
    /// Features.
    #[arg(long, default_value_t = 1024)]
    width: usize,
    /// Features between the layers of the block.
    #[arg(long, default_value_t = 2816)]
    hidden: usize,
    /// Tokens of a tile; may be given more than once.
    #[arg(long = "tile", default_values_t = [512, 2048])]
    tiles: Vec<usize>,
}

/// `down(swiglu(norm(x)))`. `x` is added outside the tiles, so that a tile ends with a product.
#[derive(Module, Debug)]
struct FeedForward {
    norm: RmsNorm,
    gate: SwiGlu,
    down: Linear,
}

impl FeedForward {
    fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        self.down.forward(self.gate.forward(self.norm.forward(x)))
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let Args { tokens, width, hidden, tiles } = Args::parse();
    if [tokens, width, hidden].contains(&0) || tiles.contains(&0) {
        return Err("tokens, width, hidden and tiles: at least 1".into());
    }
    let device = Device::flex().autodiff();
    let block = FeedForward {
        norm: RmsNormConfig::new(width).init(&device),
        gate: SwiGluConfig::new(width, hidden).with_bias(false).init(&device),
        down: LinearConfig::new(hidden, width).with_bias(false).init(&device),
    };
    let x = Tensor::<3>::random([1, tokens, width], Distribution::Normal(0.0, 1.0), &device).require_grad();
    let mut table = Table::new();
    table.load_preset(presets::ASCII_MARKDOWN).set_header(["", "kept (MiB)", "peak (MiB)", "step (s)"]);
    for tile in [None].into_iter().chain(tiles.into_iter().map(Some)) {
        let step = measure_step(&block, x.clone(), |block, x| {
            let y = match tile {
                Some(tile) => {
                    checkpoint_tiled(block, x.clone(), 1, tile, |block, x| EarlyStop(block.forward(x)))
                }
                None => block.forward(x.clone()),
            };
            (x + y).powf_scalar(2.0).mean()
        });
        let size = |bytes: Option<u64>| bytes.map_or_else(|| "unknown".into(), mib);
        table.add_row([
            tile.map_or_else(|| "whole".into(), |tile| format!("tiles of {tile}")),
            size(step.kept),
            size(step.peak),
            format!("{:.2}", (step.forward_time + step.backward_time).as_secs_f64()),
        ]);
    }
    println!("{tokens} tokens, {width} features, {hidden} in the block\n{table}");
    Ok(())
}
