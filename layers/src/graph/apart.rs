//! [`apart`]: runs a task outside of the scopes that its thread is in.
use super::{exchange, held, ledger, policy, tape, update, watch};
use crate::backend::remote;

/// Runs a task outside of the scopes of policies, segments, ledgers, watches, updates, exchanges and steps on servers that its thread is in.
/// [`parallel::apart`](https://docs.rs/burn-memsave/latest/burn_memsave/parallel/fn.apart.html) does so for plans, too.
pub fn apart<R>(task: impl FnOnce() -> R) -> R {
    let _segments = tape::set_aside();
    let _scopes = policy::set_aside();
    let _held = held::set_aside();
    let _ledger = ledger::set_aside();
    let _watch = watch::set_aside();
    let _updates = update::set_aside();
    let _exchange = exchange::set_aside();
    let _step = remote::set_aside();
    task()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::saved::SavedPolicy;
    use std::panic::catch_unwind;

    /// Also after a panic.
    #[test]
    fn a_task_sees_nothing_and_leaves_everything() {
        let seen =
            || (tape::is_within(), policy::current().is_some(), ledger::is_recording(), watch::is_watching());
        let nothing = (false, false, false, false);
        let ((), entries) = ledger::record(|| {
            watch::Watch::default().during(|| {
                SavedPolicy::Half.scope(|| {
                    assert_eq!(seen(), (false, true, true, true));
                    assert_eq!(apart(seen), nothing);
                    assert!(catch_unwind(|| apart(|| panic!("of the task"))).is_err());
                    assert_eq!(seen(), (false, true, true, true));
                });
                tape::record(|| {
                    assert!(tape::is_within());
                    assert_eq!(apart(seen), nothing);
                    assert!(tape::is_within());
                });
            });
        });
        assert!(entries.is_empty());
    }
}
