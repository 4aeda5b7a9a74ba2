//! Optimizers with little state, and updates in the middle of the backward pass.
//!
//! AdamW keeps two numbers for each parameter, 8 bytes in f32, as much as the parameter and its gradient together.
//! [`AdamW8bit`](crate::optim::AdamW8bit) keeps 2.03 bytes, and [`Muon8bit`](crate::optim::Muon8bit) 1.02 where Muon keeps 4.
//! Both are optimizers of Burn's: records, groups of parameters and schedulers work as before. Weights in half precision are
//! rounded at random, so that they need no master in f32 (not on remote devices).
//!
//! [`step_in_backward`](crate::optim::step_in_backward) takes any optimizer and changes each parameter as soon as its gradient
//! is complete, then drops the gradient: one exists at a time. On CPU backends the result is, to the last bit, that of a
//! backward pass and a step.
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
//! // The state that a first step leaves, in bytes.
//! let state = |mut optimizer: ModuleOptimizer| {
//!     let mut layers = layers();
//!     drop(loss(&layers).backward()); // parameters begin to be
//!     let before = TrackingAllocator::live();
//!     layers = step(layers, &mut optimizer);
//!     let bytes = TrackingAllocator::live() - before;
//!     drop(layers);
//!     bytes
//! };
//! let parameters = layers().num_params() as u64;
//! assert!(state(AdamWConfig::new().init()) >= 8 * parameters);
//! assert!(state(AdamW8bitConfig::new().init()) < 3 * parameters); // vectors keep f32, by default
//!
//! // The peak of a step, when the state is there.
//! let mut optimizer = AdamW8bitConfig::new().init();
//! let trained = step(layers(), &mut optimizer);
//! let scope = Scope::start();
//! let trained = step(trained, &mut optimizer);
//! let after = scope.peak();
//! drop(scope);
//! let scope = Scope::start();
//! let (_, _) = step_in_backward(trained, &mut optimizer, 1e-3, loss)?;
//! assert!(scope.peak() + 4 * 512 * 512 * 4 < after); // one gradient of six at a time, and what computes it
//! # Ok::<(), burn_memsave::optim::InBackwardError>(())
//! ```
//!
//! # What it saves
//!
//! Of every trainable parameter 5.97 bytes of AdamW's 8, or 2.98 of Muon's 4, and all gradients but the largest.
//! `cargo test --test optim bytes` asserts the peak of a step, with the gradients and in the backward pass, to the bytes of the
//! graph's records. In the snippet, whose gradients are 6.01 MiB, the peaks are 6.02 and 1.04 MiB (two cores).
//! `cargo run --release --example finetune_lm -- --optimizer adamw8bit --in-backward` trains with both.
//!
//! # What it costs
//!
//! 8 bits: states are rounded, in blocks of 256 with a scale each; embeddings should keep f32 (`init_for` sees to that). AdamW's second
//! moments are rounded at random, so that they follow the gradients. After 1,000 steps of `finetune_lm -- --pretrain-steps 1000` from
//! scratch, on a text that is learned by heart, the loss is 0.225 with `--optimizer adamw` and 0.226 with `adamw8bit` (means of seeds 1
//! to 4; one run differs by up to 3 %, either way); with `--width 64 --blocks 2` 0.651 and 0.651 (seeds 1 to 3; 0.665 to nearest, as
//! bitsandbytes rounds).
//! `cargo bench --bench optim` times a step beside Burn's; ours is one pass over memory. In the backward pass: nothing that
//! needs all gradients at once: no accumulation, no clipping by their common norm, no loss scaling (a loss that a
//! [`LossScaler`](crate::mixed::LossScaler) scaled is an error).
//!
//! # When
//!
//! If all parameters are trained. With [adapters](super::adapters), or where most is frozen, state and gradients are small, and
//! Burn's AdamW does.
//!
//! # In PyTorch
//!
//! `bitsandbytes.optim.AdamW8bit`, `torchao.optim.AdamW8bit`; updates in the backward pass by
//! `Tensor.register_post_accumulate_grad_hook`, and LOMO.
