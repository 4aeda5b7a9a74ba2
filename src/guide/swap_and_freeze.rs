//! Layers that keep only what the backward pass reads, and a frozen backbone.
//!
//! Autodiff keeps tensors for the backward pass. The backward pass reads a tensor only if a wanted gradient depends on it: the
//! gradient of a convolution's weight depends on the input, but the gradient of the input does not. Burn's layers keep the
//! input in both cases. When the layers of [`burn_memsave::nn`](crate::nn) run, they check which tensors are tracked, and keep
//! only what is needed.
//!
//! To swap, write `use burn_memsave::nn;` in place of `use burn::nn;`. Records, optimizer states and results stay the same. Swap
//! functions, too: `burn::tensor::activation::relu` keeps what Burn's layer keeps, and [`burn_memsave::tensor`](crate::tensor)
//! has our version at the same path. [`burn_memsave::prelude`](crate::prelude) is Burn's prelude with our `nn`. A nested import
//! such as `use burn::{module::Module, nn::{Linear, Relu}}` must be split: move `nn` and `tensor::activation` into a `use` of
//! their own.
//!
//! Freezing is Burn's own: [`Module::freeze`](burn::module::Module::freeze) freezes a whole module, and
//! [`freeze_group`](burn::module::Module::freeze_group) freezes parameters by path. With Burn's layers this saves gradients and
//! optimizer state. With ours it also saves the tensors that only the gradients of parameters need. A frozen batch norm uses its
//! running statistics and keeps nothing.
//!
//! # What it saves
//!
//! `cargo bench --bench memory` prints the bytes of every layer beside Burn's, trainable and frozen; `paper/RESULTS.md` has the
//! table. The next table shows whole models, in MiB (f32, Flex, two cores). Its numbers come from
//! `cargo run --release -p burn-memsave-paper --bin ...` and `cargo run --release --example finetune`:
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
//! Results do not change: only `ApproxGelu` and `ApproxSilu` approximate, as their names say. Most steps are faster than with
//! Burn's layers; `paper/RESULTS.md` shows the rows that are slower. The library works with one exact version of Burn, because
//! it reads a few things that Burn keeps private.
//!
//! Besides the swap, one change makes networks of convolutions faster on CPUs: where a batch norm is followed by an activation, write
//! `norm.forward_activated(x, Smooth::Silu)` in place of `silu.forward(norm.forward(x))`
//! ([`BatchNorm::forward_activated`](crate::nn::BatchNorm::forward_activated)). With the statistics of the batch, both then take the same
//! passes over the elements. For a frozen batch norm and a ReLU after a convolution, write `conv.forward_norm_relu(x, &norm)`. The rows
//! "norms activate" of `cargo bench --bench peers` are such networks, beside the same ones without this change, stock Burn and PyTorch.
//!
//! # When to use it
//!
//! Always make the swap, and make it first: it changes nothing else. Freeze everything that the task does not need to train.
//!
//! # Example
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
//!     // The smallest of four runs: the first one initializes parameters, and starting threads allocate, too.
//!     (0..4).map(|_| measure_layer(x, forward).kept.unwrap()).min().unwrap()
//! };
//! let of_input = 4 * 16 * 32 * 32 * 4;
//! assert!(kept(&|x| stock.forward(x)) >= of_input);
//! assert!(kept(&|x| ours.forward(x)) < of_input / 16); // no tensor, only the graph's bookkeeping
//! ```
//!
//! # In PyTorch
//!
//! `parameter.requires_grad_(False)`. Like ours, PyTorch's layers decide by `requires_grad` what they save.
