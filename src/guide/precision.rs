//! Half and mixed precision: a step in bf16 or f16, or only what is kept in fewer bits.
//!
//! [`mixed::Precision`](crate::mixed::Precision) casts the parameters for one step by operations of the graph. Activations are
//! in half precision, and so is everything that is kept; gradients arrive at the parameters of the module, which stay in f32,
//! and Burn's optimizers update those. Layers of this library sum in f32 inside. f16 needs a
//! [`LossScaler`](crate::mixed::LossScaler), bf16 does not, so that only bf16 goes with
//! [updates in the backward pass](super::optimizers).
//! [`Precision::narrow_frozen`](crate::mixed::Precision::narrow_frozen) casts frozen parameters once, for good: they need no
//! master.
//!
//! If the step is to stay in f32, [`SavedPolicy::Half`](crate::saved::SavedPolicy::Half) rounds only what waits for the
//! backward pass, to half as many bits (bf16; [`HalfF16`](crate::saved::SavedPolicy::HalfF16): f16, with three bits more, but infinite
//! above 65504), and [`SavedPolicy::Int8`](crate::saved::SavedPolicy::Int8) to 8. Outputs and losses are
//! exact then, gradients are not. Where the tensors are kept instead of how is the subject of [offload](super::offload).
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
//! let half = precision.half(&model)?; // a new one for every step
//! let (_, wide) = ledger(&model, x.clone(), forward);
//! let (y, narrow) = ledger(&half, x.clone().cast(precision.dtype()), forward);
//! assert_eq!(2 * narrow.total(), wide.total()); // the inputs of both layers
//!
//! let gradients = GradientsParams::from_grads(y.mean().backward(), &model);
//! assert_eq!(gradients.get::<2>(model.weight.id).unwrap().dtype(), DType::F32);
//!
//! // The step in f32, what is kept in bf16: the same output.
//! let rounded = SavedPolicy::Half.scope(|| forward(&model, x.clone()));
//! rounded.into_data().assert_eq(&forward(&model, x).into_data(), true);
//! # Ok::<(), burn_memsave::mixed::MixedError>(())
//! ```
//!
//! # What it saves
//!
//! Mixed precision: half of the bytes of everything that is kept, and of frozen parameters, if they are narrowed.
//! `cargo test --test mixed bytes` asserts both, in bytes: half for bf16 and f16, with either of Burn's strategies, and no copy
//! of frozen weights that were cast once.
//!
//! `SavedPolicy`, by `cargo run --release -p burn-memsave-paper --bin llama` (a language model with LoRA; MiB; two cores):
//!
//! | kept | kept | peak | time |
//! | --- | --- | --- | --- |
//! | as it is | 753.22 | 789.47 | 1.00 |
//! | `Half` | 381.30 | 443.56 | 0.98 |
//! | `Int8` | 201.12 | 275.96 | 1.06 |
//!
//! # What it costs
//!
//! Mixed precision: two bytes per trainable parameter for the copy of a step, and digits: bf16 has two to three. Compare the
//! loss with that of a run in f32. With `SavedPolicy` the digits of
//! `cargo run --release --example finetune -- --train all --saved half` (or `int8`), mean of five seeds, were recognized at
//! 98.9 % (`Half`) and 99.0 % (`Int8`), and at 99.1 % with all as it is.
//!
//! # When
//!
//! Mixed precision: on devices that compute in bf16 ([`Precision::check`](crate::mixed::Precision::check) asks), and for frozen
//! weights anywhere. `Half`: if activations are most of the peak and the step has to stay in f32. f16 only where there is no
//! bf16.
//!
//! # In PyTorch
//!
//! `torch.autocast` and `torch.amp.GradScaler`; `model.to(torch.bfloat16)` for frozen weights. `SavedPolicy` is a ready pair of
//! `torch.autograd.graph.saved_tensors_hooks`.
