//! The largest batch that fits, and larger batches in parts.
//!
//! [`largest_batch`](crate::plan::largest_batch) finds the largest number of items with which a step fits a budget of bytes.
//! You give it a closure that takes a number of items and returns the peak of a step with them. `largest_batch` calls the
//! closure with one item and with two. Then it extrapolates the line through the last two peaks to the budget, but never tries
//! more than twice the number that has fitted. If memory grows linearly with the batch, the search barely exceeds the budget.
//! So if the budget is below the device's memory, no step of the search runs out of memory.
//!
//! [`estimate`](crate::plan::estimate) reports what does not depend on the batch: the bytes of parameters, gradients and
//! optimizer state, before anything is allocated. On wgpu and CUDA, [`estimate_step`](crate::plan::estimate_step) also reports
//! the bytes that the forward pass keeps, and the peak of a step. It works even if model and batch do not fit into memory,
//! because it runs in a [`dry_run`](crate::plan::dry_run), which launches no kernel and only counts the memory. Within a dry
//! run, `largest_batch` finds the batch that will fit.
//!
//! [`micro_batched`](crate::plan::micro_batched) computes the gradients of a batch from its parts, one after the other. Up to
//! rounding, they equal the gradients of the whole batch. This takes the memory of one part, plus a second gradient of every
//! parameter. Gradients are summed in f32 or wider. Parts may differ in size: each is weighted by its number of items.
//!
//! If the loss is a mean over something other than items, weight each part by the divisor of that mean instead, as an `f64`:
//! the number of tokens that are not padding, or the sum of class weights. Otherwise the result is the mean of the parts'
//! means, which is not the mean of the batch ([`PartWeight`](crate::plan::PartWeight)). A batch norm in training mode is an
//! error, because it would use the statistics of a part. So is any other module with running statistics.
//!
//! [`micro_batched_within`](crate::plan::micro_batched_within) does both for your first batch: it finds the largest parts that
//! fit a budget, and computes the gradients in parts of that size. Use the size it returns for all later batches. (Burn's own
//! `GradientsAccumulator` adds gradients up, but leaves the mean over parts to you.)
//!
//! # What it saves
//!
//! A step peaks at the memory of one part, not of the whole batch. How much that saves depends on your model: print the peaks
//! of the example. `cargo test --test plan batches` asserts that the largest batch for a budget and a step in parts both stay
//! within the budget. It also asserts how many steps the search measures.
//!
//! # What it costs
//!
//! Every trainable parameter has one more gradient in memory, which is little with [adapters](super::adapters). Small parts also
//! use a device less well than large ones, because they need more kernel launches. The search runs some measured steps, once.
//!
//! # When to use it
//!
//! Use parts if training prescribes a batch size that does not fit. Try this before you [checkpoint](super::checkpointing),
//! because parts cost no recomputation. If even one item does not fit, checkpoint, too.
//!
//! # Example
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
//!     step().min(step()) // starting threads allocate, too
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
//! # In PyTorch
//!
//! Gradient accumulation by hand, or `accelerate`'s `accumulate`. For the search: Lightning's `BatchSizeFinder` and
//! `accelerate`'s `find_executable_batch_size`, which try sizes until one fails.
