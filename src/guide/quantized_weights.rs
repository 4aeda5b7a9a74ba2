//! QLoRA: frozen weights in 8 bits or fewer, with trainable adapters on top.
//!
//! Burn quantizes: [`Module::quantize_weights`](burn::module::Module::quantize_weights) packs the weights of a module, and
//! [`Module::apply_qlora`](burn::module::Module::apply_qlora) packs them and attaches [adapters](super::adapters). At every use,
//! Burn's layers dequantize the whole weight and add the product of the adapter's factors; the graph keeps the sum. Our layers
//! keep the weight only in packed form, and apply the factors to the activations. They dequantize the weight in the forward pass
//! and again in the backward pass. On CPU backends they do so in blocks of at most a mebibyte or an eighth of the result,
//! whichever is larger.
//!
//! Files whose weights are packed already (4-bit checkpoints of bitsandbytes, GGUF, float8) need no quantizer: [`lazy`](crate::lazy) weights
//! stay packed in the file, and are unpacked whenever they are read. See [hugging_face](super::hugging_face).
//!
//! # What it saves
//!
//! 8 bits save three quarters of the bytes of frozen f32 weights, and half of those of bf16 weights.
//! `cargo bench --bench memory -- linear` measures a step of a `Linear(1024, 1024)` with QLoRA on 64x128x1024 (two cores).
//! Burn's layer keeps 36.01 MiB and peaks at 576.01 MiB; ours keeps 32.00 and peaks at 68.32 MiB.
//! `cargo run --release --example finetune_lm -- --quantize` compares whole fine-tuning runs. In the example below, a weight of
//! 1 MiB takes 0.29 MiB together with its adapter.
//!
//! # What it costs
//!
//! Every weight is dequantized twice per step. In `cargo bench --bench layers`, a dense layer with QLoRA nevertheless takes 0.54x
//! Burn's time, and one with LoRA 0.50x. Rounding adds an error that the adapters have to learn to compensate, so compare the
//! losses of several schemes (bits, block size). The quantized weight itself cannot be trained.
//!
//! # When to use it
//!
//! Use it if frozen weights take most of the memory. If they do not fit even when packed, leave them in their file:
//! [offload](super::offload).
//!
//! # Example
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
//! assert_eq!(kept.total(), 16 * 512 * 4); // only the input, which the factors need; no dense weight
//! ```
//!
//! # In PyTorch
//!
//! `bitsandbytes` (`load_in_8bit`, `load_in_4bit`) or `torchao` with `peft`'s `prepare_model_for_kbit_training`.
