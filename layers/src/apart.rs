//! What a thread has entered, set aside for a task that has nothing to do with it.
use crate::{ledger, ops, saved, watch};
use core::cell::RefCell;
use std::thread::LocalKey;

/// What a thread-local holds; put back when this is dropped, also after a panic.
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

/// Runs a task apart from the scopes of policies, segments, ledgers, watches and updates that its thread is within:
/// [`parallel::apart`](https://docs.rs/burn-memsave/latest/burn_memsave/parallel/fn.apart.html), which sets aside plans, too.
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
        let seen = || {
            (replay::is_within(), saved::current().is_some(), ledger::is_recording(), watch::is_watching())
        };
        let nothing = (false, false, false, false);
        let ((), entries) = ledger::record(|| {
            watch::Watch::default().during(|| {
                SavedPolicy::Half.scope(|| {
                    assert_eq!(seen(), (false, true, true, true));
                    assert_eq!(apart(seen), nothing);
                    assert!(catch_unwind(|| apart(|| panic!("of the task"))).is_err());
                    assert_eq!(seen(), (false, true, true, true));
                });
                replay::record(|| {
                    assert!(replay::is_within());
                    assert_eq!(apart(seen), nothing);
                    assert!(replay::is_within());
                });
            });
        });
        assert!(entries.is_empty());
    }
}
