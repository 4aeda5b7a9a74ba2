//! Overwriting tensors in place, and dropping them before the peak.
//!
//! Burn has no in-place operations to call. Instead, you *move* a tensor into an operation. If nothing else holds the tensor,
//! the operation overwrites it where the backend can. A `clone` is a handle, not a copy, and costs nothing by itself. But as
//! long as it lives, the operation has to allocate a new tensor. So move a tensor into its last use, and clone it only for
//! earlier uses. Under autodiff, the graph holds tensors, too: what it keeps cannot be overwritten.
//!
//! Our layers also overwrite tensors in the backward pass. For example, [`CrossEntropyLoss`](crate::nn::loss::CrossEntropyLoss)
//! writes the gradient of the logits into the memory of the logits if nothing else holds them. If you clone the logits to compute
//! the accuracy, and the clone lives until after `backward`, that costs a tensor of the size of the logits. So compute metrics
//! before `backward`, and drop the clone.
//!
//! A loss holds its whole graph, and `backward` consumes the graph. A loss that you collect without calling `backward`
//! (`losses.push(loss)` in an evaluation) keeps the activations of its step alive. Collect `loss.inner()` or the number
//! instead. If you drop a loss without `backward`, Burn frees its graph only at the next backward pass. So evaluate with
//! [`Module::valid`](burn::module::Module::valid), which records no graph.
//!
//! # What it saves
//!
//! You save one tensor for each place that you fix, if that tensor is alive at the peak. [Profiling](super::profiling) shows
//! which tensors are. `cargo bench --bench memory -- entropy` prints the peaks of the losses beside Burn's.
//!
//! # What it costs
//!
//! It costs nothing, except that you have to watch who holds which tensor.
//!
//! # When to use it
//!
//! Look for clones of the largest tensors: logits, attention inputs, the batch itself. After a step, none of its tensors should
//! be alive, only numbers such as the loss. Check this with [`Scope`](crate::measure::Scope), as in the example.
//!
//! # Example
//!
//! ```
//! use burn::module::Module;
//! use burn::tensor::{Device, Int, Tensor};
//! use burn_memsave::functional;
//! use burn_memsave::measure::{Scope, TrackingAllocator};
//!
//! #[global_allocator]
//! static ALLOCATOR: TrackingAllocator = TrackingAllocator::new();
//!
//! let device = Device::flex();
//! let bytes = 4000 * 256 * 4;
//! let x = Tensor::<2>::ones([4000, 256], &device);
//! let scope = Scope::start();
//! let y = x.exp(); // moved: overwrites x
//! assert!(scope.peak() < bytes / 8);
//! let z = y.clone().exp(); // y is used again
//! assert!(scope.peak() >= bytes);
//! drop((y, z, scope));
//!
//! // The peak of a step with logits that something else still holds, and with logits that nothing else holds.
//! let autodiff = device.autodiff();
//! let targets = Tensor::<1, Int>::zeros([4000], &autodiff);
//! let weight = Tensor::<2>::ones([8, 256], &autodiff).require_grad();
//! let step = |is_held: bool| {
//!     let scope = Scope::start();
//!     let logits = functional::linear(Tensor::ones([4000, 8], &autodiff), weight.clone(), None);
//!     let held = is_held.then(|| logits.clone());
//!     let loss = functional::cross_entropy(logits, targets.clone(), None, None).mean();
//!     drop(loss.backward());
//!     drop(held);
//!     scope.peak()
//! };
//! let least = |is_held| (0..4).map(|_| step(is_held)).min().unwrap(); // starting threads allocate, too
//! assert!(least(false) + bytes / 2 < least(true));
//! ```
//!
//! # In PyTorch
//!
//! `x.exp_()`, `del logits`, `loss.item()`, `with torch.no_grad()`, `optimizer.zero_grad(set_to_none=True)` (Burn has no
//! gradients to zero: a step consumes them).
