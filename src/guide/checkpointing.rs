//! Segments of a network that are recomputed in the backward pass, chosen by hand or by a plan.
//!
//! [`checkpoint`](crate::checkpoint::checkpoint) keeps only the inputs of a part of the network, a *segment*, and runs the
//! segment again when the backward pass reaches it. [`checkpoint_sequential`](crate::checkpoint::checkpoint_sequential) divides a
//! list of blocks into such segments. [`checkpoint_tiled`](crate::checkpoint::checkpoint_tiled) runs one layer over parts of a
//! long axis (tiles), each of them a segment. Dropout drops the same elements both times, frozen parameters stay frozen, and on
//! CPU backends gradients are the same to the last bit.
//!
//! If only a little memory is missing, you need not recompute everything. Mark the blocks with
//! [`plan::block`](crate::plan::block). [`auto_checkpoint`](crate::plan::auto_checkpoint) then measures the bytes and the time of
//! each block, and chooses which blocks to recompute so that a step fits a budget of bytes with the least extra time. It returns
//! a [`Plan`](crate::plan::Plan): run every step within its `scope`.
//!
//! Burn has its own strategy, `Device::autodiff().gradient_checkpointing()`. It recomputes single elementwise operations, but
//! not where an input of the operation is frozen. Segments work with that strategy and without it.
//!
//! # What it saves
//!
//! Memory is in MiB (two cores). Times are relative to the same step without recomputation. The first two rows come from
//! `cargo run --release -p burn-memsave-paper --bin llama`, the third from `--bin tiled`:
//!
//! | what is recomputed | kept: without, with | peak: without, with | time |
//! | --- | --- | --- | --- |
//! | every block, as a segment | 753.22, 80.35 | 789.47, 200.77 | 1.24 |
//! | the same, segment inputs kept with [`SavedPolicy::Int8`](crate::saved::SavedPolicy::Int8) | 753.22, 32.85 | 789.47, 165.14 | 1.26 |
//! | a feed-forward block, 16,384 tokens in tiles of 2,048 | | 779, 260 | 1.14 |
//!
//! `cargo test --test plan` runs an encoder, ResNet-101 and a language model with LoRA at 21 budgets each. It asserts that no
//! step needs more than its budget, that peaks are within 3 % of the prediction (for ResNet-101, within 3 % plus 512 KiB), and
//! that more memory never makes a plan slower.
//!
//! # What it costs
//!
//! The forward pass of every recomputed segment runs twice. This adds 14 to 26 % to the steps in the table above, and 9 to 17 %
//! to those of an encoder in segments (`cargo run --release -p burn-memsave-paper -- toolbox`). A language model with LoRA
//! takes 7 to 37 % longer, depending on rank, length, heads and vocabulary (`-- language`).
//!
//! If a block ends with a matrix product and a residual sum, that product need not run again. Leave the sum outside the segment,
//! and return the product as [`EarlyStop`](crate::checkpoint::EarlyStop). In a block of a language model, the last product has a
//! fifth of the weights.
//!
//! A plan costs a few measured steps before training. It holds only for the input shapes with which it was measured.
//!
//! # When to use it
//!
//! Use it if activations are still most of the peak after the [swap](super::swap_and_freeze); [profile](super::profiling) first.
//! Choose segments that keep much but compute little. Use tiles if one layer on a long sequence causes the peak.
//!
//! # Example
//!
//! ```
//! use burn::tensor::{Device, Distribution, Tensor};
//! use burn_memsave::measure::{TrackingAllocator, measure_step};
//! use burn_memsave::nn::transformer::{PositionWiseFeedForward, PositionWiseFeedForwardConfig};
//! use burn_memsave::plan::{ProfileOptions, auto_checkpoint, block};
//!
//! #[global_allocator]
//! static ALLOCATOR: TrackingAllocator = TrackingAllocator::new();
//!
//! type Blocks = Vec<PositionWiseFeedForward>;
//! fn loss(blocks: &Blocks, x: Tensor<3>) -> Tensor<1> {
//!     blocks.iter().fold(x, |x, ff| block(ff, x, |ff, x: Tensor<3>| ff.forward(x))).mean()
//! }
//!
//! let device = Device::flex().autodiff();
//! let config = PositionWiseFeedForwardConfig::new(32, 128).with_dropout(0.0);
//! let blocks: Blocks = (0..8).map(|_| config.init(&device)).collect();
//! let x = Tensor::random([64, 128, 32], Distribution::Default, &device);
//!
//! let whole = measure_step(&blocks, x.clone(), loss).peak.unwrap(); // without a plan, `block` just calls the closure
//! let budget = whole * 6 / 10;
//! let plan = auto_checkpoint(&blocks, x.clone(), budget, &ProfileOptions::new(), loss)?;
//! println!("{plan}"); // the treatment of each block; predicted and measured peak
//! assert!(plan.measured.unwrap() <= budget);
//! assert!(plan.blocks().any(|(_, treatment)| treatment.recompute));
//!
//! let weight = &blocks[0].linear_inner.weight;
//! let planned = weight.grad(&plan.scope(|| loss(&blocks, x.clone())).backward()).unwrap();
//! let kept = weight.grad(&loss(&blocks, x).backward()).unwrap();
//! assert_eq!(planned.into_data(), kept.into_data());
//! # Ok::<(), burn_memsave::plan::PlanError>(())
//! ```
//!
//! # In PyTorch
//!
//! `torch.utils.checkpoint.checkpoint` and `checkpoint_sequential`. `torch.compile` plans within a budget with
//! `torch._functorch.config.activation_memory_budget`.
