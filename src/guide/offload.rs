//! Offloading: weights that stay in their file, and activations that wait on the host or in a file.
//!
//! **Frozen weights** never change. [`lazy`](crate::lazy) leaves them in their file until a layer runs, in the forward pass and
//! again in the backward pass. A cache keeps as many as a budget allows, and reads the next ones ahead. On a device,
//! [`with_device_budget`](crate::lazy::LazyOptions::with_device_budget) sets how many bytes of them may stay there.
//!
//! **Kept tensors** are read once, late in the step. Within a scope of [`SavedPolicy::Host`](crate::saved::SavedPolicy::Host),
//! our layers move the inputs that they keep from the device to host memory, while the program continues. With
//! [`SavedPolicy::disk`](crate::saved::SavedPolicy::disk), they move them into an unnamed temporary file. The inputs come back
//! unchanged when the backward pass needs them. Some tensors stay where they are: masks, statistics, kept outputs, tensors that
//! something else also holds, and everything that Burn's own operations keep. To keep tensors in fewer bits, which is not
//! exact, see [precision](super::precision).
//!
//! # What it saves
//!
//! Weights: `cargo run --release --example finetune_lazy` fine-tunes a language model of 3 GiB with LoRA under a `ulimit -v` of
//! 600 MiB. The losses in both rows are equal (two cores):
//!
//! | weights | heap peak (MiB) | RSS peak (MiB) | seconds per step |
//! | --- | --- | --- | --- |
//! | in memory | 3218.44 | 3233.82 | 4.25 |
//! | lazy, budget of 132 MiB | 276.14 | 293.27 | 5.23 |
//!
//! Activations: `cargo test --test saved` asserts the bytes that each policy leaves in memory. The example below keeps 10.02
//! MiB without a policy and 0.02 MiB with the file; its peaks are 12.34 and 5.22 MiB (two cores). On a CPU, `Host` saves
//! nothing, as tensors are in host memory already.
//!
//! # What it costs
//!
//! Moving the bytes takes time. Weights that exceed the budget are read twice per step; activations move once in each direction.
//! The program waits only if more than a few copies are pending, and the disk is read and written in parallel with the
//! computation. A device runs copies between its operations; on CUDA they go through the runtime's pinned buffers. A step that
//! computes little per byte waits for the bus or the disk. In the backward pass, `Host` fetches one tensor ahead, and that tensor
//! takes memory on the device.
//!
//! # When to use it
//!
//! Use lazy weights for fine-tuning with [adapters](super::adapters), or for inference, if the model does not fit. Use
//! [checkpointing](super::checkpointing) before you offload activations: the graph then keeps the inputs of segments, which are
//! few and large. Tensors within a segment are not offloaded.
//!
//! # Example
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
//!     (0..4).map(|_| step().kept.unwrap()).min().unwrap() // starting threads allocate, too
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
//! # In PyTorch
//!
//! Activations: `torch.autograd.graph.save_on_cpu`. Weights: `cpu_offload` and `disk_offload` of `accelerate`, and
//! ZeRO-Infinity of DeepSpeed.
