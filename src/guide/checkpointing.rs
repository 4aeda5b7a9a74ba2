//! Parts of a network that are computed again in the backward pass, by hand or as a plan says.
//!
//! [`checkpoint`](crate::checkpoint::checkpoint) keeps only the inputs of a part of the network and runs it once more when its
//! gradients are due. [`checkpoint_sequential`](crate::checkpoint::checkpoint_sequential) does it to groups of a list of
//! blocks, [`tiled`](crate::checkpoint::tiled) to one layer over parts of a long axis. Dropout drops the same elements the
//! second time, frozen parameters stay frozen, and on CPU backends gradients are the same to the last bit.
//!
//! Recomputing everything is more than is needed if memory is short only by a little. [`plan::block`](crate::plan::block) marks
//! the blocks, [`auto_checkpoint`](crate::plan::auto_checkpoint) measures what each takes, and picks those whose recomputation
//! costs least time within a budget of bytes. A [`Plan`](crate::plan::Plan) is then used in every step.
//!
//! Burn has a strategy of its own, `Device::autodiff().gradient_checkpointing()`: it recomputes single elementwise operations,
//! and not where a parent is frozen. Segments work with it and without.
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
//! let whole = measure_step(&blocks, x.clone(), loss).peak.unwrap(); // outside of a plan a block is just itself
//! let budget = whole * 6 / 10;
//! let plan = auto_checkpoint(&blocks, x.clone(), budget, &ProfileOptions::new(), loss)?;
//! println!("{plan}"); // what is done with each block, and the peak, predicted and measured
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
//! # What it saves
//!
//! In MiB, two cores; the first two rows by `cargo run --release -p burn-memsave-paper --bin llama`, the third by
//! `--bin tiled`:
//!
//! | what | kept: without, with | peak: without, with | time |
//! | --- | --- | --- | --- |
//! | every block a segment | 753.22, 80.35 | 789.47, 200.77 | 1.24 |
//! | the same, their inputs as [`SavedPolicy::Int8`](crate::saved::SavedPolicy::Int8) | 753.22, 32.85 | 789.47, 165.14 | 1.26 |
//! | a feed-forward block, 16,384 tokens in tiles of 2,048 | | 779, 260 | 1.14 |
//!
//! `cargo test --test plan` asserts for an encoder, ResNet-101 and a language model with LoRA that the steps of 21 budgets each
//! need no more than the budget, within 3 % of what was predicted, and that more memory never makes a plan slower.
//!
//! # What it costs
//!
//! A second forward pass of what is recomputed: in the table above 14 to 26 % of a step; of a language model with LoRA 8 to 37 %, by
//! rank, length, heads and vocabulary (`cargo run --release -p burn-memsave-paper -- language`); of an encoder in segments 9 to 17 %
//! (`-- toolbox`). A block that returns what it adds at its end, and the last product as [`Unread`](crate::checkpoint::Unread), does
//! not compute that product again: a fifth of the weights of a block of a language model. A plan costs some measured steps once,
//! before the training; its peak is that of the shapes that it was measured with.
//!
//! # When
//!
//! After the [swap](super::swap_and_freeze), if activations still are most of the peak; [profile](super::profiling) first. Make
//! a segment of what computes little for what it keeps, and tiles where one layer on a long sequence makes the peak.
//!
//! # In PyTorch
//!
//! `torch.utils.checkpoint.checkpoint` and `checkpoint_sequential`. A plan within a budget is what `torch.compile` does with
//! `torch._functorch.config.activation_memory_budget`.
