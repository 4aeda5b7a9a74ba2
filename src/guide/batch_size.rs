//! The largest batch that fits, and larger ones in parts.
//!
//! [`largest_batch`](crate::plan::largest_batch) asks for the peak of a step of one item, of two, and then of as many as the
//! line through the last two says, until it has the most items within a budget of bytes. It never tries more than twice of what
//! has fitted, and where memory grows along a line hardly more than the budget, so that with a budget below the memory of a
//! device nothing has to fail to find out.
//!
//! What does not depend on the batch, parameters, gradients and the state of the optimizer, [`estimate`](crate::plan::estimate) says of a
//! model none of whose parameters are there yet. On wgpu and CUDA, [`estimate_step`](crate::plan::estimate_step) adds what the forward pass
//! keeps and the peak of a step, also of a model and a batch for which there is no memory: in a [`dry_run`](crate::plan::dry_run), which
//! launches no kernel and counts the memory that it would take, and within which `largest_batch` finds the batch that will fit.
//!
//! [`micro_batched`](crate::plan::micro_batched) computes the gradients of a batch from its parts, one after the other: those
//! of the whole batch, to rounding, with the memory of one part and a second gradient of every parameter. Sums are made in f32
//! at least, and parts may differ in size: each counts as many items as it has. Where the loss is a mean over something else, over
//! tokens that are no padding or over class weights, give the part that number instead, as an `f64`: the mean of the means of
//! parts is not the mean of the batch ([`PartWeight`](crate::plan::PartWeight)). A batch norm in training mode is an error,
//! since its statistics would be those of a part, and so is any other module with running statistics. [`micro_batched_within`](crate::plan::micro_batched_within) looks for the largest
//! parts within a budget and runs the step in them: both of the above in one, for the first batch. (Burn's own
//! `GradientsAccumulator` adds gradients up; the mean over parts is left to you.)
//!
//! ```
//! use burn::module::Module;
//! use burn::tensor::{Device, Distribution, Tensor, Tolerance};
//! use burn_memsave::measure::{TrackingAllocator, measure_step};
//! use burn_memsave::nn::transformer::{PositionWiseFeedForward, PositionWiseFeedForwardConfig};
//! use burn_memsave::plan::{largest_batch, micro_batched};
//!
//! #[global_allocator]
//! static ALLOCATOR: TrackingAllocator = TrackingAllocator::new();
//!
//! fn loss(model: &PositionWiseFeedForward, x: Tensor<3>) -> Tensor<1> {
//!     model.forward(x).powf_scalar(2.0).mean()
//! }
//!
//! let device = Device::flex().autodiff();
//! let model = PositionWiseFeedForwardConfig::new(32, 128).with_dropout(0.0).init(&device);
//! let peak = |items: usize| {
//!     let step = || measure_step(&model, Tensor::<3>::ones([items, 16, 32], &device), loss).peak.unwrap();
//!     step().min(step()) // threads that begin to work take memory, too
//! };
//! let budget = 4 << 20;
//! let items = largest_batch(budget, 4096, peak).expect("one item fits");
//! assert!(peak(2 * items) > budget);
//!
//! let batch = Tensor::<3>::random([2 * items + 1, 16, 32], Distribution::Default, &device);
//! let parts = batch.clone().split(items, 0).into_iter().map(|part| (part.clone(), part.dims()[0]));
//! let (mean, gradients) = micro_batched(&model, parts, loss)?;
//! let whole = loss(&model, batch);
//! mean.into_data().assert_approx_eq::<f32>(&whole.to_data(), Tolerance::default());
//! let weight = &model.linear_inner.weight;
//! let expected = weight.grad(&whole.backward()).unwrap().into_data();
//! gradients.get::<2>(weight.id).unwrap().into_data().assert_approx_eq::<f32>(&expected, Tolerance::default());
//! # Ok::<(), burn_memsave::plan::PlanError>(())
//! ```
//!
//! # What it saves
//!
//! The peak of a part in the place of that of the batch. `cargo test --test plan batches` asserts that the largest batch of a
//! budget needs no more than that, and how often it asks, and that a step in parts within a budget stays within it. The peaks of
//! the snippet are yours to print: they are those of your model.
//!
//! # What it costs
//!
//! One gradient more of every trainable parameter (with [adapters](super::adapters) that is little), and launches: small parts
//! use a device less well than large ones. The search runs some measured steps, once.
//!
//! # When
//!
//! If the batch size is given by the training and does not fit, and before you [checkpoint](super::checkpointing): parts cost
//! no recomputation. The floor is one item; below it, checkpoint, too.
//!
//! # In PyTorch
//!
//! Gradient accumulation by hand, or `accelerate`'s `accumulate`. The search: Lightning's `BatchSizeFinder`, `accelerate`'s
//! `find_executable_batch_size`, which try until an error.
