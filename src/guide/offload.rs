//! Weights that wait in their file, and activations that wait on the host or in a file.
//!
//! What is not needed now can be elsewhere. **Frozen weights** never change: [`lazy`](crate::lazy) leaves them in their file
//! until a layer runs, in the forward and again in the backward pass; a cache keeps what a budget allows, and reads the next
//! ones ahead. On a device, [`with_device_budget`](crate::lazy::LazyOptions::with_device_budget) says how many bytes of them
//! may stay there.
//!
//! **What is kept for the backward pass** is read once, and late. Within a scope of
//! [`SavedPolicy::Host`](crate::saved::SavedPolicy::Host) the inputs that layers of this library keep go from the device to the
//! host's memory while the program goes on, and with [`SavedPolicy::disk`](crate::saved::SavedPolicy::disk) into a file without
//! a name, and come back when they are due: exactly. A tensor that somebody else holds stays where it is, and so do masks,
//! statistics, kept outputs, and what Burn's own operations keep. Fewer bits, which are not exact, are the subject of
//! [precision](super::precision).
//!
//! ```
//! use burn::tensor::{Device, Distribution, Tensor};
//! use burn_memsave::measure::{TrackingAllocator, measure_step};
//! use burn_memsave::nn::transformer::{PositionWiseFeedForward, PositionWiseFeedForwardConfig};
//! use burn_memsave::saved::SavedPolicy;
//!
//! #[global_allocator]
//! static ALLOCATOR: TrackingAllocator = TrackingAllocator::new();
//!
//! type Blocks = Vec<PositionWiseFeedForward>;
//! fn loss(blocks: &Blocks, x: Tensor<3>) -> Tensor<1> {
//!     blocks.iter().fold(x, |x, block| block.forward(x)).mean()
//! }
//!
//! let device = Device::flex().autodiff();
//! let config = PositionWiseFeedForwardConfig::new(64, 256).with_dropout(0.0);
//! let blocks: Blocks = (0..4).map(|_| config.init(&device)).collect();
//! let x = Tensor::random([16, 128, 64], Distribution::Default, &device);
//!
//! let disk = SavedPolicy::disk(std::env::temp_dir())?;
//! let kept = |policy: &SavedPolicy| {
//!     let step = || measure_step(&blocks, x.clone(), |blocks, x| policy.scope(|| loss(blocks, x)));
//!     (0..4).map(|_| step().kept.unwrap()).min().unwrap() // threads that begin to work take memory, too
//! };
//! assert!(kept(&disk) < kept(&SavedPolicy::Keep) / 2);
//!
//! let weight = &blocks[0].linear_inner.weight;
//! let exact = weight.grad(&loss(&blocks, x.clone()).backward()).unwrap();
//! let read_back = weight.grad(&disk.scope(|| loss(&blocks, x)).backward()).unwrap();
//! assert_eq!(exact.into_data(), read_back.into_data());
//! # Ok::<(), std::io::Error>(())
//! ```
//!
//! # What it saves
//!
//! Weights: `cargo run --release --example finetune_lazy` fine-tunes a language model of 3 GiB with LoRA below `ulimit -v` of
//! 600 MiB; two cores, with equal losses:
//!
//! | weights | heap peak (MiB) | RSS peak (MiB) | seconds per step |
//! | --- | --- | --- | --- |
//! | in memory | 3218.44 | 3233.82 | 4.25 |
//! | lazy, budget of 132 MiB | 276.14 | 293.27 | 5.23 |
//!
//! Activations: `cargo test --test saved` asserts the bytes that each policy leaves in memory. The snippet keeps 10.02 MiB
//! without a policy and 0.02 with the file; its peak is 12.34 and 5.22 MiB (two cores). `Host` saves nothing on a CPU, where
//! tensors are in its memory already.
//!
//! # What it costs
//!
//! Time to move: of weights twice per step if they do not fit the budget, of activations once each way. The program waits for
//! no copy as long as few are on their way, and the disk is read and written beside the computation; a device does its copies
//! between its operations, on CUDA through the pinned buffers that the runtime has. A step that computes little for each byte
//! waits for the bus or the disk. In the backward pass `Host` has one tensor ahead, which takes its bytes on the device.
//!
//! # When
//!
//! Lazy weights: fine-tuning with [adapters](super::adapters), or inference, of what does not fit. Activations: after
//! [checkpointing](super::checkpointing), for the inputs of segments, which are few and large; within segments nothing waits.
//!
//! # In PyTorch
//!
//! Activations: `torch.autograd.graph.save_on_cpu`. Weights: `accelerate`'s `cpu_offload` and `disk_offload`, ZeRO-Infinity of
//! DeepSpeed.
