//! Tensors that are overwritten, and tensors that are gone before the peak.
//!
//! Burn has no operations in place to call: a tensor that is *moved* into an operation, and that nobody else holds, is
//! overwritten where the backend can. A `clone` is a handle, not a copy, and costs nothing by itself, but while it lives the
//! operation has to make a new tensor. So give tensors away when you use them for the last time, and clone before the other
//! uses only. Under autodiff the graph is one of those who hold: what it keeps cannot be overwritten.
//!
//! The layers here do the same in the backward pass. [`CrossEntropyLoss`](crate::nn::loss::CrossEntropyLoss), for example,
//! makes the gradient of the logits in the memory of the logits, if nobody else holds them: a `logits.clone()` for the accuracy
//! that lives until after `backward` costs a tensor of that size. Compute metrics from it before, and drop it.
//!
//! A loss holds the whole graph. `backward` consumes it; a loss that is collected without one (`losses.push(loss)` in an
//! evaluation) keeps the activations of its step alive. Collect `loss.inner()` or the number. Of a graph whose loss is dropped
//! without `backward`, Burn frees the memory in the next backward pass only: evaluate with
//! [`Module::valid`](burn::module::Module::valid), which records none.
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
//! let y = x.exp(); // moved: written where x was
//! assert!(scope.peak() < bytes / 8);
//! let z = y.clone().exp(); // y is used again
//! assert!(scope.peak() >= bytes);
//! drop((y, z, scope));
//!
//! // Backward from logits that something else still holds, and from logits that nobody holds.
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
//! let least = |is_held| (0..4).map(|_| step(is_held)).min().unwrap(); // threads that begin to work take memory, too
//! assert!(least(false) + bytes / 2 < least(true));
//! ```
//!
//! # What it saves
//!
//! A tensor per place, at the peak; which one it is shows [profiling](super::profiling).
//! `cargo bench --bench memory -- entropy` has the peaks of the losses beside Burn's.
//!
//! # What it costs
//!
//! Nothing but attention to who holds what.
//!
//! # When
//!
//! Look for clones around the largest tensors: logits, attention inputs, the batch itself. Between steps nothing of a step
//! should be alive but numbers: check it with [`Scope`](crate::measure::Scope), as above.
//!
//! # In PyTorch
//!
//! `x.exp_()`, `del logits`, `loss.item()`, `with torch.no_grad()`, `optimizer.zero_grad(set_to_none=True)` (Burn has no
//! gradients to zero: a step consumes them).
