//! Half and mixed precision: a whole step in bf16 or f16, or only the kept tensors in fewer bits.
//!
//! **Mixed precision.** [`mixed::Precision`](crate::mixed::Precision) makes a copy of the model for one step, with parameters in
//! half precision. Activations, and everything that is kept, are then in half precision, too. The casts are operations of the
//! graph, so gradients arrive at the model's own parameters. These parameters stay in f32, and Burn's optimizers update them.
//! Our layers compute sums in f32 internally. f16 needs a [`LossScaler`](crate::mixed::LossScaler) and bf16 does not, so only
//! bf16 works with [updates in the backward pass](super::optimizers).
//! [`Precision::narrow_frozen`](crate::mixed::Precision::narrow_frozen) casts frozen parameters once, for good: since nothing
//! updates them, no copy in f32 is needed.
//!
//! **Kept tensors only.** A `SavedPolicy` leaves the step in f32, and rounds only the tensors that wait for the backward pass.
//! [`SavedPolicy::Half`](crate::saved::SavedPolicy::Half) rounds them to bf16, [`HalfF16`](crate::saved::SavedPolicy::HalfF16)
//! to f16, and [`SavedPolicy::Int8`](crate::saved::SavedPolicy::Int8) to 8 bits. f16 has three more bits of precision than
//! bf16, but values above 65504 become infinite. Outputs and losses stay exact; gradients do not. To keep tensors elsewhere
//! instead of in fewer bits, see [offload](super::offload).
//!
//! # What it saves
//!
//! Mixed precision halves the bytes of all kept tensors. If you narrow frozen parameters, it also halves theirs.
//! `cargo test --test mixed bytes` asserts both, for bf16 and f16, with and without Burn's gradient checkpointing. Frozen
//! weights that were cast once are not copied again.
//!
//! `cargo run --release -p burn-memsave-paper --bin llama` measures `SavedPolicy` on a language model with LoRA (MiB; two
//! cores):
//!
//! | policy | kept | peak | time, relative to no policy |
//! | --- | --- | --- | --- |
//! | none | 753.22 | 789.47 | 1.00 |
//! | `Half` | 381.30 | 443.56 | 0.98 |
//! | `Int8` | 201.12 | 275.96 | 1.06 |
//!
//! # What it costs
//!
//! The half-precision copy for a step takes two bytes per trainable parameter. Mixed precision also rounds: bf16 has two to
//! three decimal digits. Compare the loss with that of a run in f32.
//!
//! `SavedPolicy` costs some accuracy. `cargo run --release --example finetune -- --train all --saved half` (or `int8`)
//! recognized 98.9 % of the images with `Half`, 99.0 % with `Int8`, and 99.1 % without a policy (means of five seeds).
//!
//! # When to use it
//!
//! - Mixed precision: on devices that compute in bf16 (ask [`Precision::check`](crate::mixed::Precision::check)), and for
//!   frozen weights anywhere.
//! - `Half`: if activations are most of the peak and the step has to stay in f32.
//! - f16: only where there is no bf16.
//!
//! # Example
//!
//! ```
//! use burn::optim::GradientsParams;
//! use burn::tensor::{DType, Device, Distribution, Tensor};
//! use burn_memsave::measure::ledger;
//! use burn_memsave::mixed::Precision;
//! use burn_memsave::nn::{Linear, LinearConfig, activation::Gelu};
//! use burn_memsave::saved::SavedPolicy;
//!
//! let device = Device::flex().autodiff();
//! let model = LinearConfig::new(64, 64).init(&device);
//! let x = Tensor::<2>::random([256, 64], Distribution::Default, &device);
//! let forward = |model: &Linear, x| Gelu::new().forward(model.forward(x));
//!
//! let precision = Precision::bf16();
//! let half = precision.half_copy(&model)?; // a new one for every step
//! let (_, wide) = ledger(&model, x.clone(), forward);
//! let (y, narrow) = ledger(&half, x.clone().cast(precision.dtype()), forward);
//! assert_eq!(2 * narrow.total(), wide.total()); // the inputs of both layers
//!
//! let gradients = GradientsParams::from_grads(y.mean().backward(), &model);
//! assert_eq!(gradients.get::<2>(model.weight.id).unwrap().dtype(), DType::F32);
//!
//! // A step in f32 that keeps its tensors in bf16: the output is the same.
//! let rounded = SavedPolicy::Half.scope(|| forward(&model, x.clone()));
//! rounded.into_data().assert_eq(&forward(&model, x).into_data(), true);
//! # Ok::<(), burn_memsave::mixed::MixedError>(())
//! ```
//!
//! # In PyTorch
//!
//! `torch.autocast` and `torch.amp.GradScaler`; `model.to(torch.bfloat16)` for frozen weights. `SavedPolicy` corresponds to a
//! ready-made pair of `torch.autograd.graph.saved_tensors_hooks`.
