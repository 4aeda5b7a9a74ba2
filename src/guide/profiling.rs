//! What a step needs, which layer keeps what, and why.
//!
//! Three questions, three functions. How much: [`measure_step`](crate::measure::measure_step) runs a step twice and says what
//! the second kept after the forward pass, and what it needed at its peak, beyond parameters and input. Which layer:
//! [`ledger`](crate::measure::ledger) lists every tensor that an operation of this library keeps, with the path of its module
//! and the reason ("weight is trainable"). When: a [`profile`](crate::plan::profile) has the bytes and times of each block,
//! forward and backward, kept and recomputed.
//!
//! And what to do about it: [`explain`](crate::measure::explain) adds to the ledger what would remove a row (to freeze it, to
//! compute a block again, head and loss in one), by bytes per millisecond. What operations of Burn keep that were not swapped has one
//! row, what is measured less what is listed, and the modules whose parameters they use are named: this is how to see whether a swap is
//! whole. Attention, ReLU6 and SiLU that a model [writes by hand](crate::measure::Pattern) are named, too. Burn's graph shows neither the
//! bytes of its operations nor (but for some of a device with gradient checkpointing) their names, so what a swap gives is measured
//! by swapping: convert a layer by `from_nn_*`, or exchange a `use` line, and run `measure_step` again. The ledger alone has that row by
//! [`with_unlisted`](crate::measure::Ledger::with_unlisted). [`timeline`](crate::measure::timeline) follows one step,
//! operation by operation, in PyTorch's categories, as CSV, JSON, a Chrome trace or a plot.
//! [`RunMemory`](crate::measure::RunMemory) follows a whole run, step by step: what grows is seen there, and
//! [`watch_graphs`](crate::measure::watch_graphs) finds graphs that stay alive after their backward pass, which a loss that is kept for
//! later does.
//!
//! On CPU devices [`TrackingAllocator`](crate::measure::TrackingAllocator) counts, exactly, and without it the answer is
//! `None`, never 0. On CUDA and wgpu the same functions read the device's memory pools at every launch of a kernel, and count
//! launches.
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
//! assert_eq!(of_first, 4 * 64 * 128 * (32 + 128)); // the inputs of its first layer and of its activation
//! assert!(ledger.fallbacks().next().is_none()); // no operation of Burn ran in the place of one of ours
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
//! [`Gate`](crate::measure::Gate) holds what was measured in a file, and fails when a step needs more: it names the layers that grew.
//! `MEMSAVE_BLESS=1` records. Here a batch of twice the size:
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
//! let path = directory.path().join("memory.csv"); // in a test of yours a file beside it
//! memory(Gate::open(&path)?.with_bless(true), 512)?; // as with `MEMSAVE_BLESS=1`
//! let error = memory(Gate::open(&path)?, 1024).unwrap_err();
//! assert!(error.to_string().contains("0, linear: keeps 262144 bytes (recorded: 131072)")); // batch x 64 x 4
//! # Ok::<(), GateError>(())
//! ```
//!
//! With the feature `criterion`, `measure::criterion` has measurements for Criterion: `cargo bench` prints and plots the bytes of a step, and
//! compares them with those of the last run. `examples/step_bytes` does, for batches of several sizes. All of it runs on devices, too.
//!
//! # What it saves
//!
//! Nothing by itself: it says where the bytes are. `--ledger` prints the ledger of the examples:
//! `cargo run --release --example finetune -- --ledger`, and `--example finetune_lm -- --ledger`. `cargo bench --bench memory`
//! measures layers, `cargo bench --bench devices` on a device.
//!
//! # What it costs
//!
//! A gate runs each case three times, Criterion ten times and more. The allocator: one or two relaxed atomic operations per allocation, so it may stay installed. `measure_step` is two steps; a
//! profile is several. On devices the pools are read at every launch of a measured step.
//!
//! # When
//!
//! Before every other page of this guide, and after. The ledger sees operations of this library only; if its total is well
//! below `kept`, Burn's own operations keep the rest: look for layers that were not swapped, and for elementwise arithmetic
//! between them.
//!
//! # In PyTorch
//!
//! `torch.cuda.max_memory_allocated`, `torch.cuda.memory._snapshot`, `torch.profiler.profile(profile_memory=True)`.
