//! The ledger: a record of what each operation keeps for the backward pass, and why, and of operations that were replaced by others.
//!
//! While off, it costs one thread-local read per operation. `burn_memsave::measure::ledger` switches it on for one forward pass
//! and prints it as a table.
use super::aside::Aside;
use burn_autodiff::NodeId;
use core::cell::RefCell;

/// One tensor (or mask, or index) that an operation keeps, or one operation that does not accept its arguments, so that Burn's own
/// operation, or others of this library, take its place.
#[derive(Clone, Debug, PartialEq)]
pub struct Entry {
    /// The operation.
    pub operation: &'static str,
    /// What is kept: `x`, `weight`, `mask`, ...; or what takes the operation's place: `Burn's operation`, or the names of others
    /// of this library.
    pub tensor: &'static str,
    /// How many bytes are kept. `None` if others take the operation's place: what Burn's operation keeps is unknown, and those of this
    /// library have their own entries.
    pub bytes: Option<usize>,
    /// Why it is kept, or why others take the operation's place.
    pub reason: &'static str,
    /// The node of the kept tensor, if it is in the graph. Entries with the same node share its memory.
    pub node: Option<NodeId>,
    /// The node of the operation's weight, by which its module is found.
    pub weight: Option<NodeId>,
}

thread_local! {
    static ENTRIES: RefCell<Option<Vec<Entry>>> = const { RefCell::new(None) };
}

/// See [`apart`](crate::apart()).
pub(crate) fn set_aside() -> impl Sized {
    Aside::new(&ENTRIES)
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
    let _outer = set_aside();
    ENTRIES.set(Some(Vec::new()));
    let result = f();
    (result, ENTRIES.take().unwrap_or_default())
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
