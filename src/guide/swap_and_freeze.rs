//! Layers that keep only what the backward pass reads, and a backbone that is frozen.
//!
//! Autodiff keeps tensors so that the backward pass can read them. Which of them it will read depends on what requires a
//! gradient: the weight gradient of a convolution needs the input, the input gradient does not. Burn's layers keep the input in
//! both cases; those of [`burn_memsave::nn`](crate::nn) look at what is tracked when they run, and keep only what is needed.
//! The swap is the `use` line: `use burn_memsave::nn;` in the place of `use burn::nn;`. Records, optimizer states and results
//! are the same. Functions count, too: `burn::tensor::activation::relu` keeps what Burn's keeps, and
//! [`burn_memsave::tensor`](crate::tensor) has ours at the same path; [`burn_memsave::prelude`](crate::prelude) is Burn's with our
//! `nn`. In imports that nest, `use burn::{module::Module, nn::{Linear, Relu}}`, take `nn`, and `tensor::activation`, out.
//!
//! Freezing is Burn's own: [`Module::freeze`](burn::module::Module::freeze) for a whole module,
//! [`freeze_group`](burn::module::Module::freeze_group) for parameters by their path. With Burn's layers it saves the gradients
//! and the state of the optimizer; with ours also what a trainable layer would keep. A frozen batch norm uses its running
//! statistics, and keeps nothing.
//!
//! ```
//! use burn::module::Module;
//! use burn::tensor::{Device, Tensor};
//! use burn_memsave::layers::MemSaveConv2d;
//! use burn_memsave::measure::{TrackingAllocator, measure_layer};
//!
//! #[global_allocator]
//! static ALLOCATOR: TrackingAllocator = TrackingAllocator::new();
//!
//! let device = Device::flex().autodiff();
//! let stock = burn::nn::conv::Conv2dConfig::new([16, 16], [3, 3]).init(&device).freeze();
//! let ours = MemSaveConv2d::from_nn_conv2d(stock.clone()); // the same parameters
//!
//! // A gradient flows through to a layer before this one, so the input is tracked.
//! let x = || Tensor::<4>::ones([4, 16, 32, 32], &device).require_grad();
//! let kept = |forward: &dyn Fn(Tensor<4>) -> Tensor<4>| {
//!     // The least of some runs: the first initializes, and threads that begin to work take memory, too.
//!     (0..4).map(|_| measure_layer(x, forward).kept.unwrap()).min().unwrap()
//! };
//! let of_input = 4 * 16 * 32 * 32 * 4;
//! assert!(kept(&|x| stock.forward(x)) >= of_input);
//! assert!(kept(&|x| ours.forward(x)) < of_input / 16); // no tensor: the records of the graph
//! ```
//!
//! # What it saves
//!
//! `cargo bench --bench memory` has the bytes of every layer beside Burn's, trainable and frozen, and `paper/RESULTS.md` has the table.
//! Whole models, in MiB (f32, Flex, two cores), by `cargo run --release -p burn-memsave-paper --bin ...` and
//! `cargo run --release --example finetune`:
//!
//! | command | gradients of | kept: Burn, ours | peak: Burn, ours |
//! | --- | --- | --- | --- |
//! | `--bin resnet -- --depth 101` | all parameters | 1412.92, 793.16 | 1481.72, 847.01 |
//! | the same | the norm layers | 1408.26, 512.86 | 1409.84, 519.04 |
//! | the same | the input, batch norm on running statistics | 917.26, 16.09 | 917.67, 63.01 |
//! | `--bin llama` | adapters | 3563.33, 1171.24 | 4063.38, 1187.23 |
//! | `--example finetune` | norm layers and head | 5.91, 2.12 | 6.14, 2.66 |
//!
//! # What it costs
//!
//! Nothing in results: no layer approximates (but `ApproxGelu` and `ApproxSilu`, which say so). The time of a step is mostly
//! lower than with Burn's layers; the rows that are slower are in `paper/RESULTS.md`. Burn is pinned to one version, since a few things
//! that it keeps private are read.
//!
//! # When
//!
//! Always first: it changes nothing else. Freeze what the task does not need to train.
//!
//! # In PyTorch
//!
//! `parameter.requires_grad_(False)`. PyTorch's layers decide by `requires_grad` what they save, as ours do.
