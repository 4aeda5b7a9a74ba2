//! [`apart`]: isolates steps that run in one thread pool at the same time.
use crate::mixed::watch_scaling;
use crate::plan;

/// Runs a task of a thread pool outside of the scopes that its thread is in.
///
/// Scopes of a [`SavedPolicy`](crate::saved::SavedPolicy) and of a [`Plan`](crate::plan::Plan), checkpointed segments, ledgers and updates
/// in the backward pass apply to the thread that entered them. While a thread of rayon's waits for others, as in the kernels of CPU
/// backends, it runs another task of its pool. Without `apart`, that task would run within the scope or the segment of the first one. So if
/// several steps run in one pool at the same time, and one of them uses any of these, run each within `apart`. Steps on threads of your
/// own, and steps one at a time, do not need it.
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use burn_memsave::{functional, parallel::apart, saved::SavedPolicy};
///
/// let step = |policy: SavedPolicy| {
///     let weight = Tensor::<2>::ones([64, 64], &Device::flex().autodiff()).require_grad();
///     let loss = policy.scope(|| functional::linear(weight.clone(), weight.clone(), None).sum());
///     weight.grad(&loss.backward()).unwrap().sum().into_scalar::<f32>()
/// };
/// let sums = rayon::join(|| apart(|| step(SavedPolicy::Half)), || apart(|| step(SavedPolicy::Keep)));
/// assert_eq!(sums, (2.0 * 64f32.powi(3), 2.0 * 64f32.powi(3)));
/// ```
pub fn apart<R>(task: impl FnOnce() -> R) -> R {
    let _plan = plan::set_aside();
    let (result, _) = watch_scaling(|| burn_memsave_layers::apart(task));
    result
}
