//! Profiling: how much memory a step needs, which layer keeps what, and why.
//!
//! - [`measure_step`](crate::measure::measure_step) says how much memory a step needs. It runs the step twice. For the second
//!   run, it reports the bytes kept after the forward pass, and the peak beyond parameters and input.
//! - [`ledger`](crate::measure::ledger) says which layer keeps what. It lists every tensor that an operation of this library
//!   keeps, with the path of its module and the reason ("weight is trainable").
//! - [`profile`](crate::plan::profile) says when the memory is needed. It measures the bytes and times of each block in the
//!   forward and in the backward pass, once if the block is kept and once if it is recomputed.
//! - [`explain`](crate::measure::explain) says what to do. For each row of the ledger, it suggests what would remove it:
//!   freezing, recomputing a block, or fusing the output layer with the loss. Suggestions that cost time are ranked by bytes per
//!   millisecond.
//! - [`timeline`](crate::measure::timeline) follows one step, operation by operation, with the categories of PyTorch's memory
//!   profiler. It writes CSV, JSON, a Chrome trace or a plot.
//! - [`RunMemory`](crate::measure::RunMemory) follows a whole run, step by step, and shows what grows.
//!   [`watch_graphs`](crate::measure::watch_graphs) finds graphs that stay alive after their backward pass, for example because
//!   you stored a loss.
//!
//! On CPU devices, [`TrackingAllocator`](crate::measure::TrackingAllocator) counts exactly, if it is the program's global
//! allocator. Without it, the answer is `None`, never 0. On CUDA and wgpu, the same functions read the device's memory pools at
//! every kernel launch, and count launches.
//!
//! # Is the swap complete?
//!
//! `explain` has one row for everything that Burn's own operations keep: the measured bytes minus the bytes in the ledger. It
//! names the modules whose parameters these operations use, so you see which layers are not swapped yet. It also finds
//! attention, ReLU6 and SiLU that are [written by hand](crate::measure::Pattern) in a model. To add this row to a ledger, call
//! [`with_unlisted`](crate::measure::Ledger::with_unlisted).
//!
//! Burn's graph does not show the bytes of its operations. It shows the names of only some, and only on a device with gradient
//! checkpointing. So you see what a swap saves only when you make it: convert a layer by `from_nn_*`, or change a `use` line,
//! and run `measure_step` again.
//!
//! # What it saves
//!
//! Profiling saves nothing by itself: it shows where the bytes are. `--ledger` prints the ledger of the examples:
//! `cargo run --release --example finetune -- --ledger`, and `--example finetune_lm -- --ledger`. `cargo bench --bench memory`
//! measures layers, `cargo bench --bench devices` does so on a device.
//!
//! # What it costs
//!
//! The allocator adds one or two relaxed atomic operations per allocation, so you can leave it installed. `measure_step` runs
//! two steps, and `profile` several. A `Gate` (see below) runs each case three times (four on a device), Criterion at least ten
//! times. On devices, the pools are read at every launch of a measured step.
//!
//! # When to use it
//!
//! Profile before and after you use any other technique of this guide. If the ledger's total is well below `kept`, Burn's own
//! operations keep the rest: look for layers that are not swapped, and for elementwise arithmetic between layers.
//!
//! # Example
//!
//! ```
//! use burn::tensor::{Device, Tensor};
//! use burn_memsave::measure::{TrackingAllocator, ledger, measure_step};
//! use burn_memsave::nn::transformer::{PositionWiseFeedForward, PositionWiseFeedForwardConfig};
//! use burn_memsave::plan::{ProfileOptions, block, profile};
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
//! let blocks: Blocks = (0..2).map(|_| config.init(&device)).collect();
//! let x = Tensor::<3>::ones([64, 128, 32], &device);
//!
//! let step = measure_step(&blocks, x.clone(), loss);
//! println!("{step}");
//! assert!(step.peak > step.kept);
//!
//! let (_, ledger) = ledger(&blocks, x.clone(), loss);
//! println!("{ledger}"); // also as CSV and JSON
//! let first = ledger.rows.iter().filter(|row| row.module.starts_with("0") && row.counts());
//! let of_first: u64 = first.filter_map(|row| row.bytes).sum();
//! assert_eq!(of_first, 4 * 64 * 128 * (32 + 128)); // inputs of the block's first layer and of its activation
//! assert!(ledger.fallbacks().next().is_none()); // no operation of Burn ran in place of ours
//! assert!(ledger.total() <= step.kept.unwrap());
//!
//! let profile = profile(&blocks, x, &ProfileOptions::new(), loss)?;
//! let [first, _] = &profile.blocks[..] else { panic!("two blocks") };
//! let [kept, recomputed] = &first.costs[..] else { panic!("two ways to treat it") };
//! assert!(recomputed.kept < kept.kept);
//! # Ok::<(), burn_memsave::plan::PlanError>(())
//! ```
//!
//! # In tests and benches
//!
//! [`Gate`](crate::measure::Gate) compares measurements with those recorded in a file. It fails if a step needs more, and names
//! the layers that grew. Set `MEMSAVE_BLESS=1` to update the file. Here the second run has a batch of twice the size:
//!
//! ```
//! use burn::module::Module;
//! use burn::tensor::{Device, Tensor};
//! use burn_memsave::measure::{Gate, GateError, TrackingAllocator};
//! use burn_memsave::nn::LinearConfig;
//!
//! #[global_allocator]
//! static ALLOCATOR: TrackingAllocator = TrackingAllocator::new();
//!
//! fn memory(mut gate: Gate, batch: usize) -> Result<(), GateError> {
//!     let device = Device::flex().autodiff();
//!     let model = vec![LinearConfig::new(64, 64).init(&device), LinearConfig::new(64, 64).init(&device).freeze()];
//!     let x = Tensor::<2>::ones([batch, 64], &device);
//!     gate.step("trained first layer", &model, x, |model, x| model[1].forward(model[0].forward(x)).mean());
//!     gate.finish()
//! }
//!
//! let directory = tempfile::tempdir().unwrap();
//! let path = directory.path().join("memory.csv"); // in your own test: a file next to it
//! memory(Gate::open(&path)?.with_bless(true), 512)?; // as with `MEMSAVE_BLESS=1`
//! let error = memory(Gate::open(&path)?, 1024).unwrap_err();
//! assert!(error.to_string().contains("0, linear: keeps 262144 bytes (recorded: 131072)")); // batch x 64 x 4
//! # Ok::<(), GateError>(())
//! ```
//!
//! With the feature `criterion`, `measure::criterion` has measurements for Criterion: `cargo bench` prints and plots the bytes
//! of a step, and compares them with those of the last run. `examples/step_bytes` does so for batches of several sizes. All of
//! this works on devices, too.
//!
//! # In PyTorch
//!
//! `torch.cuda.max_memory_allocated`, `torch.cuda.memory._snapshot`, `torch.profiler.profile(profile_memory=True)`.
