//! A record of what each operation keeps for the backward pass, and why; and of the operations that Burn ran instead.
//!
//! Off, it costs one thread-local read per operation. `burn_memsave::measure::ledger` switches it on for one forward pass
//! and prints it as a table.
use burn_autodiff::NodeId;
use core::cell::RefCell;

/// One tensor (or mask, or index) that an operation keeps; or an operation whose arguments do not fit the one of this library,
/// so that Burn records its own.
#[derive(Clone, Debug, PartialEq)]
pub struct Entry {
    /// The operation.
    pub operation: &'static str,
    /// What is kept: `x`, `weight`, `mask`, ...; `Burn's operation` where Burn records its own, or others of this library that
    /// take its place.
    pub tensor: &'static str,
    /// How many bytes. `None` where others take its place: of Burn's it is not known, those of this library have entries.
    pub bytes: Option<usize>,
    /// Why.
    pub reason: &'static str,
    /// The node whose output is kept, for a tensor of the graph: two entries of one node share its memory.
    pub node: Option<NodeId>,
    /// The node of the operation's weight, by which its module is found.
    pub weight: Option<NodeId>,
}

thread_local! {
    static ENTRIES: RefCell<Option<Vec<Entry>>> = const { RefCell::new(None) };
}

/// Records what operations on this thread keep while `f` runs.
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use burn_memsave_layers::{functional, ledger};
///
/// let x = Tensor::<1>::ones([640], &Device::flex().autodiff()).require_grad();
/// let (y, entries) = ledger::record(|| functional::relu(x.clone()));
/// assert_eq!(y.dims(), [640]);
/// assert_eq!((entries[0].operation, entries[0].tensor, entries[0].bytes), ("relu", "mask", Some(80)));
/// ```
pub fn record<R>(f: impl FnOnce() -> R) -> (R, Vec<Entry>) {
    /// Restores the outer record, also when `f` panics.
    struct Outer(Option<Vec<Entry>>);
    impl Drop for Outer {
        fn drop(&mut self) {
            ENTRIES.set(self.0.take());
        }
    }
    let outer = Outer(ENTRIES.replace(Some(Vec::new())));
    let result = f();
    let entries = ENTRIES.take().unwrap_or_default();
    drop(outer);
    (result, entries)
}

/// Whether recording is on.
pub(crate) fn is_recording() -> bool {
    ENTRIES.with_borrow(Option::is_some)
}

/// Adds an entry if recording is on.
pub(crate) fn report(entry: impl FnOnce() -> Entry) {
    ENTRIES.with_borrow_mut(|entries| {
        if let Some(entries) = entries {
            entries.push(entry());
        }
    });
}
