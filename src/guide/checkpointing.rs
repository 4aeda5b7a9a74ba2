//! Segments of a network that are recomputed in the backward pass, chosen by hand or by a plan.
//!
//! [`checkpoint`](crate::checkpoint::checkpoint) keeps only the inputs of a part of the network, a *segment*, and runs the
//! segment again when the backward pass reaches it. [`checkpoint_sequential`](crate::checkpoint::checkpoint_sequential) does
//! this for groups of a list of blocks, and [`tiled`](crate::checkpoint::tiled) for one layer over parts of a long axis.
//! Dropout drops the same elements both times, frozen parameters stay frozen, and on CPU backends gradients are the same to the
//! last bit.
//!
//! If only a little memory is missing, you need not recompute everything. Mark the blocks with
//! [`plan::block`](crate::plan::block). [`auto_checkpoint`](crate::plan::auto_checkpoint) then measures what each block takes,
//! and recomputes those that meet a budget of bytes in the least extra time. Use the [`Plan`](crate::plan::Plan) that it
//! returns in every step.
//!
//! Burn has its own strategy, `Device::autodiff().gradient_checkpointing()`. It recomputes single elementwise operations, but
//! not where a parent is frozen. Segments work with that strategy and without it.
//!
//! # What it saves
//!
//! Memory is in MiB (two cores). Times are relative to the same step without recomputation. The first two rows are by
//! `cargo run --release -p burn-memsave-paper --bin llama`, the third by `--bin tiled`:
//!
//! | what is recomputed | kept: without, with | peak: without, with | time |
//! | --- | --- | --- | --- |
//! | every block, as a segment | 753.22, 80.35 | 789.47, 200.77 | 1.24 |
//! | the same, segment inputs kept with [`SavedPolicy::Int8`](crate::saved::SavedPolicy::Int8) | 753.22, 32.85 | 789.47, 165.14 | 1.26 |
//! | a feed-forward block, 16,384 tokens in tiles of 2,048 | | 779, 260 | 1.14 |
//!
//! `cargo test --test plan` runs an encoder, ResNet-101 and a language model with LoRA at 21 budgets each. It asserts that no
//! step needs more than its budget, that peaks are within 3 % of the prediction (for ResNet-101, 3 % and 512 KiB), and that
//! more memory never makes a plan slower.
//!
//! # What it costs
//!
//! The forward pass of every recomputed segment runs twice. This adds 14 to 26 % to the steps in the table above, and 9 to 17 %
//! to those of an encoder in segments (`cargo run --release -p burn-memsave-paper -- toolbox`). A language model with LoRA
//! takes 7 to 37 % longer, depending on rank, length, heads and vocabulary (`-- language`).
//!
//! If a block ends with a matrix product and a residual sum, that product need not run again. Leave the sum outside the
//! segment, and return the product as [`Unread`](crate::checkpoint::Unread). In a block of a language model, the last product
//! has a fifth of the weights.
//!
//! A plan costs some measured steps, once, before training. Its peak holds for the shapes with which it was measured.
//!
//! # When to use it
//!
//! After the [swap](super::swap_and_freeze), if activations are still most of the peak; [profile](super::profiling) first.
//! Choose segments that keep much but compute little. Use tiles if one layer on a long sequence makes the peak.
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
