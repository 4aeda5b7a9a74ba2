//! Measures the memory of one LoRA fine-tuning step of a Llama-style language model, with Burn's layers and with burn-memsave's. The base
//! is frozen. Burn's `apply_lora` attaches the adapters, to all projections of the blocks.
//!
//! The first row compares models with `silu(gate) * up` and the loss of all logits written out, which differ only in their `use` lines.
//! The second compares models with `SwiGlu`, and for burn-memsave with `FusedLinearCrossEntropy`. The others compare the latter with
//! itself keeping less: in fewer bits, with blocks that are recomputed in the backward pass, and with both.
//!
//! ```sh
//! cargo run --release -p burn-memsave-paper --bin llama -- --blocks 2
//! ```
#![recursion_limit = "256"]
use burn::module::{Lora, ParamGroup};
use burn::tensor::{Device, Int, Tensor};
use burn_memsave::measure::{Measurement, TrackingAllocator, measure_step};
use burn_memsave::saved::SavedPolicy;
use burn_memsave_paper::report::Report;
use burn_memsave_paper::text::llama::{
    LanguageModel, Size, checkpointed, memsave, stock, swapped, written_out,
};
use clap::Parser;
use std::{error::Error, path::PathBuf};

#[global_allocator]
static ALLOCATOR: TrackingAllocator = TrackingAllocator::new();

/// Memory of one step of fine-tuning a language model with LoRA.
#[derive(Parser)]
struct Args {
    /// Sequences per step.
    #[arg(long, default_value_t = 4)]
    batch_size: usize,
    /// Tokens of a sequence.
    #[arg(long, default_value_t = 512)]
    length: usize,
    /// Features.
    #[arg(long, default_value_t = 1024)]
    width: usize,
    /// Features between the two layers of a feed-forward block.
    #[arg(long, default_value_t = 2816)]
    hidden: usize,
    /// Heads of attention.
    #[arg(long, default_value_t = 16)]
    heads: usize,
    /// Blocks of attention and feed-forward layers.
    #[arg(long, default_value_t = 8)]
    blocks: usize,
    /// The number of different tokens.
    #[arg(long, default_value_t = 32_000)]
    vocabulary: usize,
    /// The rank of the adapters.
    #[arg(long, default_value_t = 16)]
    rank: usize,
    /// Also writes the result to this file.
    #[arg(long)]
    json: Option<PathBuf>,
}

fn main() -> Result<(), Box<dyn Error>> {
    let args = Args::parse();
    let &Args { batch_size, length, width, hidden, heads, blocks, vocabulary, rank, .. } = &args;
    if [batch_size, length, heads, vocabulary, rank].contains(&0) || !width.is_multiple_of(2 * heads.max(1)) {
        return Err(
            "batch size, length, heads, vocabulary and rank: at least 1; width: a multiple of 2 heads".into(),
        );
    }
    let size = Size { vocabulary, width, heads, hidden, blocks, length };
    let [keep, half, int8] = [SavedPolicy::Keep, SavedPolicy::Half, SavedPolicy::Int8];
    let written_out = |keep| measure::<written_out::Llama>(&size, &args, keep);
    let swapped = |keep| measure::<swapped::Llama>(&size, &args, keep);
    let stock = |keep| measure::<stock::Llama>(&size, &args, keep);
    let ours = |policy| measure::<memsave::Llama>(&size, &args, policy);
    let checkpointed = |policy| measure::<checkpointed::Llama>(&size, &args, policy);
    let mut report = Report::default();
    report.add("the swap alone", [written_out(&keep)?, swapped(&keep)?]);
    report.add("with SwiGlu and FusedLinearCrossEntropy", [stock(&keep)?, ours(&keep)?]);
    report.add("ours beside ours kept in half as many bits", [ours(&keep)?, ours(&half)?]);
    report.add("ours beside ours kept in 8 bits", [ours(&keep)?, ours(&int8)?]);
    report.add("ours beside ours with every block checkpointed", [ours(&keep)?, checkpointed(&keep)?]);
    report.add("ours beside both, 8 bits and every block checkpointed", [ours(&keep)?, checkpointed(&int8)?]);
    println!("{size:?}, batch {batch_size}, LoRA of rank {rank}\n{}", report.table());
    if let Some(path) = &args.json {
        report.write(path)?;
    }
    Ok(())
}

fn measure<M: LanguageModel>(
    size: &Size,
    args: &Args,
    policy: &SavedPolicy,
) -> Result<Measurement, Box<dyn Error>> {
    let device = Device::flex().autodiff();
    device.seed(0);
    let projections =
        ParamGroup::from_regex(r"^blocks\..*\.weight$").map_err(|error| format!("{error:?}"))?;
    let lora = Lora::new(args.rank, 2.0 * args.rank as f64).set_param_group(projections);
    let model = M::new(size, &device).apply_lora(lora);
    let tokens = Tensor::<1, Int>::arange(0..(args.batch_size * args.length) as i64, &device);
    let tokens = tokens.mul_scalar(7919).remainder_scalar(args.vocabulary as i64);
    let tokens = tokens.reshape([args.batch_size, args.length]);
    let next = tokens.clone().add_scalar(1).remainder_scalar(args.vocabulary as i64);
    Ok(measure_step(&model, (tokens, next), |model, (tokens, next)| {
        policy.scope(|| model.loss(tokens, next))
    }))
}
