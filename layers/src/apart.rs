//! What a thread has entered, set aside for a task that has nothing to do with it.
use crate::{ledger, ops, saved, watch};
use core::cell::RefCell;
use std::thread::LocalKey;

/// What a thread-local holds; put back when this is dropped.
pub(crate) struct Aside<T: Default + 'static> {
    of: &'static LocalKey<RefCell<T>>,
    held: T,
}

impl<T: Default> Aside<T> {
    pub(crate) fn new(of: &'static LocalKey<RefCell<T>>) -> Self {
        Self { of, held: of.take() }
    }
}

impl<T: Default> Drop for Aside<T> {
    fn drop(&mut self) {
        self.of.set(core::mem::take(&mut self.held));
    }
}

/// Runs a task of a thread pool apart from whatever else its thread is within.
///
/// Scopes of a [`SavedPolicy`](crate::saved::SavedPolicy), checkpointed segments, ledgers and updates in the backward pass hold for the
/// thread that entered them. A thread of rayon's that waits for others, as it does in the kernels of CPU backends, runs another task of
/// its pool meanwhile: without this, that task would run within the scope or the segment of the first one. So if several steps run in one
/// pool at the same time, and one of them uses any of these, run each within `apart`. On threads of your own, and with one step at a time,
/// nothing of it is needed.
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use burn_memsave_layers::{apart, functional, saved::SavedPolicy};
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
    let _segments = ops::replay::set_aside();
    let _scopes = saved::set_aside();
    let _held = ops::held::set_aside();
    let _ledger = ledger::set_aside();
    let _watch = watch::set_aside();
    let _updates = ops::update::set_aside();
    task()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::replay;
    use crate::saved::SavedPolicy;
    use std::panic::catch_unwind;

    /// Also after a panic.
    #[test]
    fn a_task_sees_nothing_and_leaves_everything() {
        let seen = || (replay::is_within(), saved::current().is_some(), ledger::is_recording());
        let ((), entries) = ledger::record(|| {
            SavedPolicy::Half.scope(|| {
                assert_eq!(seen(), (false, true, true));
                assert_eq!(apart(seen), (false, false, false));
                assert!(catch_unwind(|| apart(|| panic!("of the task"))).is_err());
                assert_eq!(seen(), (false, true, true));
            });
            replay::record(|| {
                assert!(replay::is_within());
                assert_eq!(apart(seen), (false, false, false));
                assert!(replay::is_within());
            });
        });
        assert!(entries.is_empty());
    }
}
