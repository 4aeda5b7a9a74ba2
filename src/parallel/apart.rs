//! Steps of a pool of threads, each by itself.
use crate::mixed::watch_scaling;
use crate::plan;

/// Runs a task of a thread pool apart from whatever else its thread is within.
///
/// Scopes of a [`SavedPolicy`](crate::saved::SavedPolicy) and of a [`Plan`](crate::plan::Plan), checkpointed segments, ledgers and updates in
/// the backward pass hold for the thread that entered them. A thread of rayon's that waits for others, as it does in the kernels of CPU
/// backends, runs another task of its pool meanwhile: without this, that task would run within the scope or the segment of the first one.
/// So if several steps run in one pool at the same time, and one of them uses any of these, run each within `apart`. On threads of your own,
/// and with one step at a time, nothing of it is needed.
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
