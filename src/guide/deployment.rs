//! A frozen model in production: merged, small on disk, and no larger in memory than its budget.
//!
//! [`Module::valid`](burn::module::Module::valid) returns the model without autodiff. That model keeps nothing for a backward
//! pass. [`Module::materialize`](burn::module::Module::materialize) merges adapters into the weights, so that a layer takes no
//! more time than before the fine-tuning. [`lazy::prepare`](crate::lazy::prepare) writes the result into one file, and can round the
//! weights to bf16 or to 8 bits. It holds one tensor in memory at a time. The program `memsave-prepare` (feature `cli`)
//! does the same with any safetensors, burnpack or PyTorch file.
//!
//! [`LazyLoad::lazy_load`](crate::lazy::LazyLoad::lazy_load) then runs the model from that file. It reads a weight when its
//! layer runs, and a cache keeps as many weights as its budget allows. Loading such a file reads only the header.
//! [`WeightFile::open_mapped`](crate::lazy::WeightFile::open_mapped) maps the file into memory instead, so that several
//! processes share its pages.
//!
//! # What it saves
//!
//! `cargo run --release --example infer_lazy` runs a BERT-like encoder of 1626 MiB in f32, on Flex with one computing thread
//! (two cores). Memory is in MiB above the idle process:
//!
//! | weights | heap peak | RSS peak | speed, relative to weights in memory |
//! | --- | --- | --- | --- |
//! | in memory | 1631.41 | 1636.79 | 1 |
//! | lazy, budget of 16 MiB | 26.62 | 32.79 | 0.97 |
//! | lazy, 188 MiB, read ahead | 198.62 | 203.74 | 1.08 |
//! | mapped, 16 MiB | 10.62 | 34.02 | 1.04 |
//!
//! # What it costs
//!
//! If the file is not in the page cache, a pass is only as fast as the disk. bf16 and 8 bits cost precision: compare outputs
//! before you ship. Materializing a quantized model makes its weights dense again, so quantize afterwards, or let `prepare`
//! quantize.
//!
//! # When to use it
//!
//! Use it if many models take turns on one machine, or if the model is larger than memory. A model that fits and runs all the
//! time is best kept in memory: `valid().materialize()`, and nothing else.
//!
//! # Example
//!
//! ```
//! use burn::module::{Lora, Module};
//! use burn::tensor::{DType, Device, Tensor, Tolerance};
//! use burn_memsave::lazy::{LazyLoad, LazyOptions, PrepareOptions, PrepareSource, WeightFile, prepare};
//! use burn_memsave::measure::{Scope, TrackingAllocator};
//! use burn_memsave::nn::{Linear, LinearConfig};
//!
//! #[global_allocator]
//! static ALLOCATOR: TrackingAllocator = TrackingAllocator::new();
//!
//! # let directory = tempfile::tempdir()?;
//! # let path = directory.path().join("model.bpk");
//! let device = Device::flex();
//! let config = LinearConfig::new(512, 512);
//! let trained: Vec<Linear> = (0..8).map(|_| config.init(&device.clone().autodiff())).collect();
//! let trained = trained.apply_lora(Lora::new(4, 8.0)); // then train the adapters
//!
//! let merged = trained.valid().materialize();
//! let options = PrepareOptions::new().with_dtype(DType::BF16);
//! let prepared = prepare(PrepareSource::of_module(&merged), &path, &options)?;
//! assert_eq!(prepared.bytes, 8 * (512 * 512 * 2 + 512 * 4)); // biases stay in f32
//! let run = |model: &Vec<Linear>| {
//!     model.iter().fold(Tensor::<2>::ones([1, 512], &device), |x, layer| layer.forward(x)).into_data()
//! };
//! let expected = run(&merged);
//! drop((trained, merged));
//!
//! let scope = Scope::start();
//! let one = 512 * 512 * 4; // one weight in f32
//! let options = LazyOptions::new().with_dtype(DType::F32).with_budget(one).with_prefetch(0);
//! let file = WeightFile::open(&path)?;
//! let model: Vec<Linear> = (0..8).map(|_| config.init(&device)).collect();
//! let (model, _report) = model.lazy_load(&file, &options)?;
//! run(&model).assert_approx_eq::<f32>(&expected, Tolerance::rel_abs(0.05, 0.02)); // rounded to bf16
//! assert!(scope.peak() < 4 * one); // not all eight weights
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # In PyTorch
//!
//! `model.eval()` with `torch.inference_mode()`, `peft`'s `merge_and_unload()`, `safetensors`, `accelerate`'s `disk_offload`,
//! and `torch.load(mmap=True)`.
