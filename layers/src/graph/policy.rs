//! Which [policy](crate::saved) a thread keeps tensors by: that of its innermost scope, or that of all threads.
use super::aside::Aside;
use crate::saved::SavedPolicy;
use core::cell::RefCell;
use std::sync::{
    PoisonError, RwLock,
    atomic::{AtomicBool, Ordering},
};

struct Scope {
    policy: SavedPolicy,
    /// Whether it is a segment, or within one. The graph of a segment does not live long: its tensors stay as they are.
    in_segment: bool,
}

thread_local! {
    /// From the outermost scope to the innermost.
    static SCOPES: RefCell<Vec<Scope>> = const { RefCell::new(vec![]) };
}

/// See [`apart`](crate::apart()).
pub(super) fn set_aside() -> impl Sized {
    Aside::new(&SCOPES)
}

/// Enters a scope of a policy.
pub(super) fn enter(policy: SavedPolicy) {
    SCOPES.with_borrow_mut(|scopes| {
        let in_segment = scopes.last().is_some_and(|scope| scope.in_segment);
        let policy = if in_segment { SavedPolicy::Keep } else { policy };
        scopes.push(Scope { policy, in_segment });
    });
}

/// Enters the forward pass of a segment.
pub(super) fn enter_segment() {
    SCOPES.with_borrow_mut(|scopes| scopes.push(Scope { policy: SavedPolicy::Keep, in_segment: true }));
}

/// Leaves the innermost scope; returns whether this thread has no policy now.
pub(super) fn leave() -> bool {
    let is_outermost = SCOPES.with_borrow_mut(|scopes| {
        scopes.pop();
        scopes.is_empty()
    });
    is_outermost && !IS_GLOBAL.load(Ordering::Acquire)
}

static GLOBAL: RwLock<SavedPolicy> = RwLock::new(SavedPolicy::Keep);
/// Whether the global policy is another than [`SavedPolicy::Keep`].
static IS_GLOBAL: AtomicBool = AtomicBool::new(false);

impl SavedPolicy {
    /// Holds for all threads from now on, outside of scopes.
    ///
    /// ```
    /// use burn_memsave_layers::saved::SavedPolicy;
    ///
    /// SavedPolicy::Half.set_global();
    /// SavedPolicy::Keep.set_global();
    /// ```
    pub fn set_global(self) {
        let mut global = GLOBAL.write().unwrap_or_else(PoisonError::into_inner);
        IS_GLOBAL.store(self != Self::Keep, Ordering::Release);
        *global = self;
    }
}

/// The policy of this thread, if it is another than [`SavedPolicy::Keep`].
pub(super) fn current() -> Option<SavedPolicy> {
    let scoped = SCOPES.with_borrow(|scopes| scopes.last().map(|scope| scope.policy.clone()));
    let policy = scoped.or_else(|| {
        let global = || GLOBAL.read().unwrap_or_else(PoisonError::into_inner).clone();
        IS_GLOBAL.load(Ordering::Acquire).then(global)
    })?;
    (policy != SavedPolicy::Keep).then_some(policy)
}

/// Whether a tensor was ever kept rounded.
static HAS_ROUNDED: AtomicBool = AtomicBool::new(false);

/// Notes that a tensor is kept by a policy.
pub(super) fn note(policy: &SavedPolicy) {
    if policy.rounds() {
        HAS_ROUNDED.store(true, Ordering::Relaxed);
    }
}

/// Whether all tensors come back as they were, so that what is computed again from them is the same.
pub fn is_exact() -> bool {
    !HAS_ROUNDED.load(Ordering::Relaxed) && !is_rounding()
}

/// Whether the policy of this thread rounds what is kept.
pub(crate) fn is_rounding() -> bool {
    current().is_some_and(|policy| policy.rounds())
}
