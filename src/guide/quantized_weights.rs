//! Frozen weights in 8 bits or fewer, with adapters on top: QLoRA.
//!
//! Burn quantizes: [`Module::quantize_weights`](burn::module::Module::quantize_weights) packs the weights of a module, and
//! [`Module::apply_qlora`](burn::module::Module::apply_qlora) packs them and attaches [adapters](super::adapters). With Burn's
//! layers the weight is made dense at every use, the product of the factors is added to it, and the graph keeps the sum. Ours
//! keep the packed weight: it is dequantized in the forward pass and once more in the backward pass, on CPU backends in blocks
//! of at most a mebibyte or an eighth of the result, and the factors are applied to activations.
//!
//! ```
//! use burn::module::{Lora, Module, ParamGroup, QLora, Quantizer};
//! use burn::tensor::quantization::{Calibration, QuantValue};
//! use burn::tensor::{Device, Tensor};
//! use burn_memsave::measure::{TrackingAllocator, ledger};
//! use burn_memsave::nn::LinearConfig;
//!
//! #[global_allocator]
//! static ALLOCATOR: TrackingAllocator = TrackingAllocator::new();
//!
//! let device = Device::flex().autodiff();
//! let dense_bytes = 512 * 512 * 4;
//! let scheme = device.settings().quantization.scheme.with_value(QuantValue::Q8S);
//! let group = || ParamGroup::from_regex("weight$").expect("a regular expression");
//! let mut quantizer = Quantizer::new(Calibration::MinMax, scheme);
//! quantizer.set_param_group(group());
//! let lora = Lora::new(4, 8.0).set_param_group(group());
//!
//! let before = TrackingAllocator::live();
//! let model = LinearConfig::new(512, 512).init(&device).apply_qlora(QLora::new(lora, quantizer));
//! assert!(TrackingAllocator::live() - before < dense_bytes / 3); // 8 bits per weight, and the adapter
//! let (_y, kept) = ledger(&model, Tensor::<2>::ones([16, 512], &device), |model, x| model.forward(x));
//! assert_eq!(kept.total(), 16 * 512 * 4); // the input, for the factors; no dense weight
//! ```
//!
//! # What it saves
//!
//! Three quarters of the frozen weights in f32, half of them in bf16. A step, in MiB: a `Linear(1024, 1024)` with QLoRA on
//! 64x128x1024, by `cargo bench --bench memory -- linear` (two cores): kept 36.01 with Burn's layer, 32.00 with ours; peak
//! 576.01 and 68.32. `cargo run --release --example finetune_lm -- --quantize` compares whole fine-tunings. The snippet's
//! weight of 1 MiB takes 0.29 with its adapter.
//!
//! # What it costs
//!
//! Two dequantizations per step and weight; `cargo bench --bench layers`: a dense layer with QLoRA takes 0.54 of Burn's time,
//! one with LoRA 0.50. And the error of rounding, which the adapters have to learn around: choose the scheme (bits, block size)
//! by the loss. A quantized weight is not trained.
//!
//! # When
//!
//! If frozen weights are most of what is in memory. If even packed they do not fit, leave them in their file:
//! [offload](super::offload).
//!
//! # In PyTorch
//!
//! `bitsandbytes` (`load_in_8bit`, `load_in_4bit`) or `torchao` with `peft`'s `prepare_model_for_kbit_training`.
