//! A small model learns from a large one, of which a layer at a time is in memory.
//!
//! Distillation has three costs in memory: the weights of the teacher, what its forward pass keeps, and the logits of both
//! models, rows times vocabulary each. Loaded by [`lazy`](crate::lazy), the teacher's weights stay in their file until a layer
//! runs; frozen, and with an input that is not tracked, it keeps nothing. [`linear_kl_div`](crate::functional::linear_kl_div)
//! and [`linear_jsd`](crate::functional::linear_jsd) take the hidden states and the heads of both models, and make the logits
//! in chunks: the two large tensors never exist. The head of the teacher is read for the loss, and is in memory as long as that
//! runs.
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
//! layers().save_file(&path)?; // here: a teacher that was trained
//!
//! let options = LazyOptions::new().with_min_bytes(0);
//! let (teacher, report) = layers().lazy_load(&WeightFile::open(&path)?, &options)?;
//! assert_eq!(report.resident_bytes(), 0);
//! let student = linear(16, CLASSES); // its head
//!
//! let loss = |x: Tensor<2>| {
//!     let tokens = Tensor::<2>::ones([ROWS, 32], &device);
//!     let teacher = Teacher { x: teacher[0].forward(tokens), weight: teacher[1].weight.val(), bias: None };
//!     let options = DistillationOptions { temperature: 2.0, chunk_bytes: Some(1 << 20), ..Default::default() };
//!     F::linear_kl_div(x, student.weight.val(), None, teacher, KlDirection::Forward, options)
//! };
//! // The hidden states of the student, which come from its other layers.
//! let x = || Tensor::<2>::random([ROWS, 16], Distribution::Default, &device).require_grad();
//! // Threads that begin to work take memory, too: the least of four steps counts.
//! let step = (0..4).map(|_| measure_layer(x, loss)).min_by_key(|step| (step.peak, step.kept)).unwrap();
//! let of_logits = (ROWS * CLASSES * 4) as u64; // of one model
//! assert!(step.peak.unwrap() < of_logits); // with the head of the teacher, while it is in memory
//! assert!(step.kept.unwrap() < of_logits / 8); // gradients of x and of the student's head
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # What it saves
//!
//! `cargo test --test memory divergences` asserts what both losses keep, exactly, and that their peak is below the logits of
//! one model, of which other code has two, and their softmaxes. What a lazy model needs is measured by
//! `cargo run --release --example infer_lazy`: 26.62 MiB in the place of 1631.41 (two cores; the table is in
//! [deployment](super::deployment)).
//!
//! # What it costs
//!
//! The forward pass of the teacher in every step, with its weights read each time they do not fit the budget. Where the data is
//! read more than once, write the hidden states of the teacher to files instead, and read those.
//!
//! # When
//!
//! For a student that is trained on the teacher's probabilities; `linear_jsd`, or the reverse direction, if the student writes
//! the text. For a teacher that is the student without its adapters, [`without_adapters`](crate::lora::without_adapters) needs
//! no second model at all: [adapters](super::adapters).
//!
//! # In PyTorch
//!
//! `F.kl_div` on whole logits; Liger-Kernel's `LigerFusedLinearJSD`. `trl`'s `GKDTrainer` has the same losses.
