//! The [policy](crate::saved) of a thread: that of its innermost scope, or else the global one.
use super::aside::Aside;
use crate::saved::SavedPolicy;
use core::cell::RefCell;
use std::sync::{
    PoisonError, RwLock,
    atomic::{AtomicBool, Ordering},
};

struct Scope {
    policy: SavedPolicy,
    /// Whether it is a segment, or within one. No policy applies there, since the graph of a segment is dropped soon.
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
    /// Applies this policy to all threads from now on, outside of scopes.
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

/// Whether a policy that rounds was ever used for a tensor.
static HAS_ROUNDED: AtomicBool = AtomicBool::new(false);

/// Notes that a tensor is held under a policy.
pub(super) fn note(policy: &SavedPolicy) {
    if policy.rounds() {
        HAS_ROUNDED.store(true, Ordering::Relaxed);
    }
}

/// Whether all held tensors come back as they were, so that recomputing from them gives the same.
pub fn is_exact() -> bool {
    !HAS_ROUNDED.load(Ordering::Relaxed) && !is_rounding()
}

/// Whether the policy of this thread rounds what is kept.
pub(crate) fn is_rounding() -> bool {
    current().is_some_and(|policy| policy.rounds())
}
