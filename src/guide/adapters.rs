//! Low-rank adapters on a frozen model: LoRA and its variants.
//!
//! Burn attaches them: [`Module::apply_lora`](burn::module::Module::apply_lora) freezes a model and puts two small trainable
//! factors, `a` and `b`, beside each matrix. The layer then multiplies with the effective weight, `weight + scale a b`. In every
//! step, Burn's layers compute this weight, keep it, and compute its whole gradient. Ours compute with the factors instead, and
//! keep nothing of the size of the weight.
//!
//! [`lora`](crate::lora) has the variants:
//!
//! - [`Dora`](crate::lora::Dora): with magnitudes.
//! - [`rank_stabilized`](crate::lora::rank_stabilized): rsLoRA.
//! - [`lora_plus`](crate::lora::lora_plus): LoRA+, a higher learning rate for `b`.
//! - [`ConvLora`](crate::lora::ConvLora): for convolutions.
//! - [`a_factors`](crate::lora::a_factors): the group of parameters to freeze for LoRA-FA, which trains only `b`.
//!
//! [`peft`](crate::peft) reads and writes the files of Python's `peft`.
//!
//! [`without_adapters`](crate::lora::without_adapters) returns the original model without copying its weights. Use it as the
//! reference model of the preference losses [`dpo_loss`](crate::functional::dpo_loss) and
//! [`kto_loss`](crate::functional::kto_loss). Otherwise the reference would be a second model in memory.
//! [`orpo_loss`](crate::functional::orpo_loss) and [`simpo_loss`](crate::functional::simpo_loss) need no reference. All four
//! compare log probabilities. Compute those with [`linear_log_prob`](crate::functional::linear_log_prob), which never holds all
//! logits.
//!
//! # What it saves
//!
//! Adapters save the gradients, the optimizer state and the records of all parameters but the factors.
//! `cargo bench --bench memory -- linear` measures a `Linear(1024, 1024)` with LoRA of rank 8 on 64x128x1024.
//! `cargo run --release --example finetune_lm` measures a small language model, which has equal losses with Burn's layers and
//! with ours (MiB, two cores):
//!
//! | | kept: Burn, ours | peak: Burn, ours |
//! | --- | --- | --- |
//! | `Linear` | 36.01, 32.00 | 576.01, 64.32 |
//! | language model | 71.30, 24.17 | 74.91, 26.47 |
//!
//! If only `b` is trained and the input is not tracked, our `Linear` keeps 0.25 MiB.
//!
//! # What it costs
//!
//! An adapted model can be worse than one that was trained in full, and you have to tune rank and learning rate. In the forward
//! pass, each layer computes two additional narrow matrix products, unless you merge the adapters
//! ([deployment](super::deployment)). In every step, DoRA also computes the column norms of the effective weight. If the input
//! has many rows, DoRA repeats the product with the weight in the backward pass.
//!
//! # When to use it
//!
//! Use adapters to fine-tune a large model for a task. Use LoRA-FA if kept inputs are most of the remaining memory.
//!
//! # Example
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
//! let least = (0..4).map(|_| step().peak.unwrap()).min(); // starting threads allocate, too
//! assert!(least < Some(weight_bytes / 4)); // no effective weight, and no gradient of its size
//! assert_eq!(step().gradients, 4 * (512 * 4 + 4 * 512));
//!
//! // LoRA+: the factors `b` have 16 times the learning rate.
//! let (mut optimizer, mut rates) = (AdamConfig::new().init(), lora::lora_plus(1e-3, 16.0));
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
//! # In PyTorch
//!
//! `peft`: `get_peft_model(model, LoraConfig(...))`, `use_dora`, `use_rslora`, `create_loraplus_optimizer`. The reference is
//! `model.disable_adapter()`, as in `trl`.
