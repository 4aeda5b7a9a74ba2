//! A frozen model in production: merged, small on disk, and no larger in memory than its budget.
//!
//! [`Module::valid`](burn::module::Module::valid) gives the model without autodiff: nothing is kept.
//! [`Module::materialize`](burn::module::Module::materialize) folds adapters into the weights, so that a layer costs what it
//! did before the fine-tuning. [`lazy::prepare`](crate::lazy::prepare) writes the result into one file, in bf16 or,
//! approximately, in 8 bits, with one tensor in memory at a time; the program `memsave-prepare` (feature `cli`) does so with
//! any safetensors, burnpack or PyTorch file.
//!
//! [`LazyLoad::lazy_load`](crate::lazy::LazyLoad::lazy_load) then runs it from that file: a weight is read when its layer runs,
//! and a cache keeps as many as its budget allows. [`WeightFile::open_mapped`](crate::lazy::WeightFile::open_mapped) uses the
//! pages of the file where they are, so that several processes share them. Nothing but the header is read when such a file is
//! loaded.
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
//! let trained = trained.apply_lora(Lora::new(4, 8.0)); // and trained
//!
//! let merged = trained.valid().materialize();
//! let options = PrepareOptions::new().with_dtype(DType::BF16);
//! let prepared = prepare(PrepareSource::of_module(&merged), &path, &options)?;
//! assert_eq!(prepared.bytes, 8 * (512 * 512 * 2 + 512 * 4)); // biases stay as they are
//! let run = |model: &Vec<Linear>| {
//!     model.iter().fold(Tensor::<2>::ones([1, 512], &device), |x, layer| layer.forward(x)).into_data()
//! };
//! let expected = run(&merged);
//! drop((trained, merged));
//!
//! let scope = Scope::start();
//! let one = 512 * 512 * 4; // computed in f32
//! let options = LazyOptions::new().with_dtype(DType::F32).with_budget(one).with_prefetch(0);
//! let file = WeightFile::open(&path)?;
//! let model: Vec<Linear> = (0..8).map(|_| config.init(&device)).collect();
//! let (model, _report) = model.lazy_load(&file, &options)?;
//! run(&model).assert_approx_eq::<f32>(&expected, Tolerance::rel_abs(0.05, 0.02)); // rounded to bf16
//! assert!(scope.peak() < 4 * one); // of eight
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # What it saves
//!
//! `cargo run --release --example infer_lazy`: a BERT-like encoder of 1626 MiB in f32, on Flex with one computing thread (two
//! cores); MiB above the idle process:
//!
//! | weights | heap peak | RSS peak | speed, of eager |
//! | --- | --- | --- | --- |
//! | in memory | 1631.41 | 1636.79 | 1 |
//! | lazy, budget of 16 MiB | 26.62 | 32.79 | 0.97 |
//! | lazy, 188 MiB, read ahead | 198.62 | 203.74 | 1.08 |
//! | mapped, 16 MiB | 10.62 | 34.02 | 1.04 |
//!
//! # What it costs
//!
//! Time, if the file is not in the page cache: then a pass is as fast as the disk. Digits, in bf16 or 8 bits: compare outputs
//! before you ship. Materializing a quantized model makes it dense again; quantize after it, or let `prepare` do so.
//!
//! # When
//!
//! If many models share a machine and are used in turns, or the model is larger than memory. A model that fits, and runs all
//! the time, is best in memory: `valid().materialize()`, and nothing else.
//!
//! # In PyTorch
//!
//! `model.eval()` with `torch.inference_mode()`, `peft`'s `merge_and_unload()`, `safetensors`, `accelerate`'s `disk_offload`,
//! and `torch.load(mmap=True)`.
