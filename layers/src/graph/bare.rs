//! Steps that are no operation: they pass gradients on, and have Burn run something at their place in the graph.
use super::watch;
use burn::backend::{
    Backend,
    autodiff::{
        Autodiff,
        checkpoint::strategy::BalancedCheckpointing,
        ops::{Backward, NodeGuard, OpsKind},
    },
    tensor::FloatTensor,
};

/// A tensor as the output of a step, which is recorded if a parent is tracked.
pub(super) fn recorded<B: Backend, S: Backward<B, N>, const N: usize>(
    step: S,
    parents: [NodeGuard; N],
    state: S::State,
    output: FloatTensor<B>,
) -> FloatTensor<Autodiff<B>> {
    let output = match step.prepare::<BalancedCheckpointing>(parents).compute_bound().stateful() {
        OpsKind::Tracked(prep) => prep.finish(state, output),
        OpsKind::UnTracked(prep) => prep.finish(output),
    };
    watch::made(output.id());
    output
}
