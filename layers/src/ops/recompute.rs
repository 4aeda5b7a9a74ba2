//! What the device's checkpointing strategy computes again instead of keeping.
use burn::backend::{
    Backend,
    autodiff::{
        Autodiff,
        checkpoint::strategy::{BalancedCheckpointing, CheckpointStrategy},
    },
    tensor::FloatTensor,
};
use core::any::TypeId;
use core::fmt::Write;

/// Whether the device's strategy computes some outputs again instead of keeping them.
pub(crate) fn recomputes<C: CheckpointStrategy>() -> bool {
    TypeId::of::<C>() == TypeId::of::<BalancedCheckpointing>()
}

/// Whether asking for this tensor in the backward pass computes it again, so that keeping it costs nothing.
///
/// Burn has no accessor for it. The public hook of the strategy is run on a throw-away builder, whose `Debug` form names
/// the action it would take (burn-autodiff 0.22); a form that names neither counts as "kept".
pub(crate) fn is_recomputed<B: Backend, C: CheckpointStrategy>(x: &FloatTensor<Autodiff<B, C>>) -> bool {
    /// Finds the first of the two words; stops the formatting there.
    struct Scan(bool);
    impl Write for Scan {
        fn write_str(&mut self, text: &str) -> core::fmt::Result {
            match text {
                "Recompute" => self.0 = true,
                "Computed" => {}
                _ => return Ok(()),
            }
            Err(core::fmt::Error)
        }
    }
    if !recomputes::<C>() || !x.is_tracked() {
        return false;
    }
    let mut builder = Default::default();
    if C::checkpoint_parents([x], &mut builder).is_err() {
        return false;
    }
    let mut scan = Scan(false);
    let _ = write!(scan, "{builder:?}"); // the error is how the scan stops
    scan.0
}
