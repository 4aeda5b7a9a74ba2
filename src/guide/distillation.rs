//! Distillation: a small model learns from a large one, while only one layer of the large one is in memory at a time.
//!
//! Distillation needs memory for three things: the teacher's weights, what its forward pass keeps, and the logits of both
//! models (rows times vocabulary each).
//!
//! - Weights: if you load the teacher with [`lazy`](crate::lazy), they stay in their file until a layer runs.
//! - Kept tensors: a frozen teacher whose input is not tracked keeps nothing.
//! - Logits: [`linear_kl_div`](crate::functional::linear_kl_div) and [`linear_jsd`](crate::functional::linear_jsd) take the last
//!   hidden states and the output layers (heads) of both models. They compute the logits in chunks, so that the two large tensors
//!   never exist. The teacher's head is in memory while the loss runs.
//!
//! # What it saves
//!
//! `cargo test --test memory divergences` asserts the exact bytes that both losses keep, and that their peak is below the size of
//! one model's logits. Ordinary code holds the logits of both models, and their softmaxes.
//! `cargo run --release --example infer_lazy` measures a lazy model: 26.62 MiB in place of 1631.41 (two cores; the table is in
//! [deployment](super::deployment)).
//!
//! # What it costs
//!
//! Every step runs the teacher's forward pass. If its weights do not fit the budget, they are also read in every step. If you
//! use the data more than once, write the teacher's hidden states to files instead, and read those.
//!
//! # When to use it
//!
//! Use it to train a student on the teacher's probabilities. If the student generates the text, use `linear_jsd`, or
//! `linear_kl_div` with [`KlDirection::Reverse`](crate::functional::KlDirection::Reverse). If the student is the teacher plus
//! [adapters](super::adapters), [`without_adapters`](crate::lora::without_adapters) returns the teacher, and no second model is
//! needed.
//!
//! # Example
//!
//! ```
//! use burn::module::Module;
//! use burn::tensor::{Device, Distribution, Tensor};
//! use burn_memsave::functional::{self as F, DistillationOptions, KlDirection, Teacher};
//! use burn_memsave::lazy::{LazyLoad, LazyOptions, WeightFile};
//! use burn_memsave::measure::{TrackingAllocator, measure_layer};
//! use burn_memsave::nn::{Linear, LinearConfig};
//!
//! #[global_allocator]
//! static ALLOCATOR: TrackingAllocator = TrackingAllocator::new();
//!
//! const ROWS: usize = 512;
//! const CLASSES: usize = 4000;
//! let device = Device::flex().autodiff();
//! let linear = |d_input, d_output| LinearConfig::new(d_input, d_output).with_bias(false).init(&device);
//! # let directory = tempfile::tempdir()?;
//! # let path = directory.path().join("teacher.bpk");
//! let layers = || -> Vec<Linear> { vec![linear(32, 128), linear(128, CLASSES)] };
//! layers().save_file(&path)?; // in practice: a trained teacher
//!
//! let options = LazyOptions::new().with_min_bytes(0);
//! let (teacher, report) = layers().lazy_load(&WeightFile::open(&path)?, &options)?;
//! assert_eq!(report.resident_bytes(), 0);
//! let student = linear(16, CLASSES); // its output head
//!
//! let loss = |x: Tensor<2>| {
//!     let tokens = Tensor::<2>::ones([ROWS, 32], &device);
//!     let teacher = Teacher { x: teacher[0].forward(tokens), weight: teacher[1].weight.val(), bias: None };
//!     let options = DistillationOptions { temperature: 2.0, chunk_bytes: Some(1 << 20), ..Default::default() };
//!     F::linear_kl_div(x, student.weight.val(), None, teacher, KlDirection::Forward, options)
//! };
//! // The student's hidden states; in practice, its other layers compute them.
//! let x = || Tensor::<2>::random([ROWS, 16], Distribution::Default, &device).require_grad();
//! // The smallest of four steps, as starting threads allocate, too.
//! let step = (0..4).map(|_| measure_layer(x, loss)).min_by_key(|step| (step.peak, step.kept)).unwrap();
//! let of_logits = (ROWS * CLASSES * 4) as u64; // of one model's logits
//! assert!(step.peak.unwrap() < of_logits); // including the teacher's head while it is in memory
//! assert!(step.kept.unwrap() < of_logits / 8); // gradients of x and of the student's head
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # In PyTorch
//!
//! `F.kl_div` on whole logits; Liger-Kernel's `LigerFusedLinearJSD`. `trl`'s `GKDTrainer` has the same losses.
