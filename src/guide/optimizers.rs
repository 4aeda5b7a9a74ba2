//! Optimizers with little state, and updates during the backward pass.
//!
//! AdamW keeps two numbers for each parameter: 8 bytes in f32, as much as the parameter and its gradient together.
//! [`AdamW8bit`](crate::optim::AdamW8bit) keeps 2.03 bytes. [`Muon8bit`](crate::optim::Muon8bit) keeps 1.02 bytes instead of
//! Muon's 4. Both are ordinary Burn optimizers: records, parameter groups and schedulers work as before. Weights in half
//! precision need no copy in f32 (no master weights), because the optimizers use stochastic rounding: they round each element
//! up or down at random, so that the mean is right. Remote devices cannot do that: train in f32 there, or turn off
//! `stochastic_rounding` in the config.
//!
//! [`step_in_backward`](crate::optim::step_in_backward) works with any optimizer. It updates each parameter as soon as its
//! gradient is complete, then drops the gradient, so that only one exists at a time. On CPU backends the result equals that of
//! a backward pass followed by a step, to the last bit.
//!
//! # What it saves
//!
//! Every trainable parameter saves 5.97 of AdamW's 8 bytes or 2.98 of Muon's 4. Updates in the backward pass save all gradients
//! but the largest. `cargo test --test optim bytes` asserts two peaks: that of a step after the backward pass, and that of a
//! step within it. It does not assert the bytes of the graph's bookkeeping. In the example, the gradients take 6.01 MiB, and
//! the two peaks are 6.02 and 1.04 MiB (two cores).
//! `cargo run --release --example finetune_lm -- --optimizer adamw8bit --in-backward` trains with both
//! techniques.
//!
//! # What it costs
//!
//! 8-bit states are rounded, in blocks of 256 elements with one scale each. Embeddings should keep their state in f32: create the
//! optimizer with `init_for(&model)`, which sees to that. AdamW's second moments use stochastic rounding, so that they follow the
//! gradients. The table shows mean losses after 1,000 steps of `finetune_lm -- --pretrain-steps 1000`, which trains from scratch
//! on a text that the model learns by heart. Single runs differ by up to 3 % in either direction.
//!
//! | | `--optimizer adamw` | `adamw8bit` | `adamw8bit`, rounded to nearest as in bitsandbytes |
//! | --- | --- | --- | --- |
//! | seeds 1 to 4 | 0.225 | 0.226 | |
//! | `--width 64 --blocks 2`, seeds 1 to 3 | 0.651 | 0.651 | 0.665 |
//!
//! A step is one pass over memory; `cargo bench --bench optim` times it beside Burn's.
//!
//! Updates in the backward pass exclude everything that needs all gradients at once: accumulation, clipping by the norm of all
//! gradients, and loss scaling. (A loss that a [`LossScaler`](crate::mixed::LossScaler) has scaled is an error.)
//!
//! # When to use it
//!
//! Use them if you train all parameters. With [adapters](super::adapters), or if most of the model is frozen, state and
//! gradients are small, and Burn's AdamW is enough.
//!
//! # Example
//!
//! ```
//! use burn::module::Module;
//! use burn::optim::{AdamWConfig, GradientsParams, ModuleOptimizer};
//! use burn::tensor::{Device, Tensor};
//! use burn_memsave::measure::{Scope, TrackingAllocator};
//! use burn_memsave::nn::{Linear, LinearConfig};
//! use burn_memsave::optim::{AdamW8bitConfig, step_in_backward};
//!
//! #[global_allocator]
//! static ALLOCATOR: TrackingAllocator = TrackingAllocator::new();
//!
//! let device = Device::flex().autodiff();
//! let x = Tensor::<2>::ones([1, 512], &device);
//! let loss = |layers: &Vec<Linear>| layers.iter().fold(x.clone(), |x, layer| layer.forward(x)).powf_scalar(2.0).mean();
//! let layers = || -> Vec<Linear> { (0..6).map(|_| LinearConfig::new(512, 512).init(&device)).collect() };
//! let step = |layers: Vec<Linear>, optimizer: &mut ModuleOptimizer| {
//!     let gradients = GradientsParams::from_grads(loss(&layers).backward(), &layers);
//!     optimizer.step(1e-3, layers, gradients)
//! };
//!
//! // The bytes of state that a first step leaves.
//! let state = |mut optimizer: ModuleOptimizer| {
//!     let mut layers = layers();
//!     drop(loss(&layers).backward()); // initializes the parameters
//!     let before = TrackingAllocator::live();
//!     layers = step(layers, &mut optimizer);
//!     let bytes = TrackingAllocator::live() - before;
//!     drop(layers);
//!     bytes
//! };
//! let parameters = layers().num_params() as u64;
//! assert!(state(AdamWConfig::new().init()) >= 8 * parameters);
//! assert!(state(AdamW8bitConfig::new().init()) < 3 * parameters); // by default, the state of vectors stays in f32
//!
//! // The peak of a second step, whose state exists already.
//! let mut optimizer = AdamW8bitConfig::new().init();
//! let trained = step(layers(), &mut optimizer);
//! let scope = Scope::start();
//! let trained = step(trained, &mut optimizer);
//! let after = scope.peak();
//! drop(scope);
//! let scope = Scope::start();
//! let (_, _) = step_in_backward(trained, &mut optimizer, 1e-3, loss)?;
//! assert!(scope.peak() + 4 * 512 * 512 * 4 < after); // one of six gradients at a time, and temporaries
//! # Ok::<(), burn_memsave::optim::InBackwardError>(())
//! ```
//!
//! # In PyTorch
//!
//! `bitsandbytes.optim.AdamW8bit`, `torchao.optim.AdamW8bit`; for updates in the backward pass,
//! `Tensor.register_post_accumulate_grad_hook` and LOMO.
