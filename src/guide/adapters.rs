//! Adapters of low rank on a frozen model: LoRA and its kin.
//!
//! Burn attaches them: [`Module::apply_lora`](burn::module::Module::apply_lora) freezes a model and puts two small trainable
//! factors beside each matrix. With Burn's layers every step computes the effective weight, keeps it, and computes its gradient
//! in full. Ours compute with the factors, and keep nothing of the size of the weight. [`lora`](crate::lora) has the
//! rest: [`Dora`](crate::lora::Dora) (with magnitudes), [`rank_stabilized`](crate::lora::rank_stabilized) (rsLoRA),
//! [`plus`](crate::lora::plus) (LoRA+: a higher learning rate for `b`), [`ConvLora`](crate::lora::ConvLora), and
//! [`first_factors`](crate::lora::first_factors), to freeze them (LoRA-FA). [`peft`](crate::peft) reads and writes the files of
//! Python's `peft`.
//!
//! [`without_adapters`](crate::lora::without_adapters) gives the model as it was, without a copy of its weights: the reference
//! of [`dpo_loss`](crate::functional::dpo_loss) and [`kto_loss`](crate::functional::kto_loss), which otherwise is a second
//! model in memory. [`orpo_loss`](crate::functional::orpo_loss) and [`simpo_loss`](crate::functional::simpo_loss) need none.
//! The log probabilities that all of them compare come from [`linear_log_prob`](crate::functional::linear_log_prob), which
//! never has all logits.
//!
//! ```
//! use burn::module::{Lora, Module};
//! use burn::optim::{AdamConfig, GradientsParams};
//! use burn::tensor::{Device, Tensor};
//! use burn_memsave::measure::{TrackingAllocator, measure_step};
//! use burn_memsave::{lora, nn::LinearConfig};
//!
//! #[global_allocator]
//! static ALLOCATOR: TrackingAllocator = TrackingAllocator::new();
//!
//! let device = Device::flex().autodiff();
//! let mut model = LinearConfig::new(512, 512).with_bias(false).init(&device).apply_lora(Lora::new(4, 8.0));
//! let x = Tensor::<2>::ones([16, 512], &device);
//! let weight_bytes = 512 * 512 * 4;
//! let step = || measure_step(&model, x.clone(), |model, x| model.forward(x).powf_scalar(2.0).mean());
//! let least = (0..4).map(|_| step().peak.unwrap()).min(); // threads that begin to work take memory, too
//! assert!(least < Some(weight_bytes / 4)); // no effective weight, and no gradient of its size
//! assert_eq!(step().gradients, 4 * (512 * 4 + 4 * 512));
//!
//! // LoRA+: the factors `b` learn 16 times as fast.
//! let (mut optimizer, mut rates) = (AdamConfig::new().init(), lora::plus(1e-3, 16.0));
//! let gradients = model.forward(x.clone()).powf_scalar(2.0).mean().backward();
//! let gradients = GradientsParams::from_grads(gradients, &model);
//! model = optimizer.step(rates.step(), model, gradients);
//!
//! let before = TrackingAllocator::live();
//! let reference = lora::without_adapters(&model.valid());
//! assert!(TrackingAllocator::live() - before < weight_bytes / 16); // the weight is shared
//! let (x, trained) = (x.clone().inner(), model.valid().forward(x.inner()));
//! assert_ne!(reference.forward(x).into_data(), trained.into_data());
//! ```
//!
//! # What it saves
//!
//! Gradients, optimizer state and records of all but the factors. In MiB (two cores): a `Linear(1024, 1024)` with LoRA of rank
//! 8 on 64x128x1024, by `cargo bench --bench memory -- linear`: kept 36.01 with Burn's layer, 32.00 with ours; peak 576.01 and
//! 64.32. With only `b` trained and an input that is not tracked, 0.25 are kept. A small language model, by
//! `cargo run --release --example finetune_lm`: kept 71.30 and 24.17, peak 74.91 and 26.47, the losses the same.
//!
//! # What it costs
//!
//! An adapted model can be less good than one that was trained in full; rank and learning rate have to be tuned. Two narrow
//! products per layer, forward; with merged weights ([deployment](super::deployment)) none. DoRA has to compute the norms of
//! the columns of the effective weight in every step, and for many rows the product with it once more, in the backward pass.
//!
//! # When
//!
//! Fine-tuning a large model for a task. LoRA-FA if inputs that are kept are most of the rest.
//!
//! # In PyTorch
//!
//! `peft`: `get_peft_model(model, LoraConfig(...))`, `use_dora`, `use_rslora`, `create_loraplus_optimizer`. The reference is
//! `model.disable_adapter()`, as in `trl`.
