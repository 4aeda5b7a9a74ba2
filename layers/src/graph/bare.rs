//! Steps that are not operations: they pass gradients or tokens on, and do something when Burn runs them.
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

/// Records a step if a parent is tracked, and returns its output.
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
