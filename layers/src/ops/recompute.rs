//! Outputs that are computed again in the backward pass, instead of being kept by the layer behind.
//!
//! A normalization or an activation whose input is kept anyway offers its output for recomputation: `norm -> linear` and
//! `conv -> batch norm -> relu -> conv` then keep one tensor. The condition is exact, an input that is [free]: kept by a step
//! that lives, or itself computed again. Otherwise the output is as it would be without.
//!
//! This is Burn's own machinery of `Balanced` checkpointing, used operation by operation whatever the strategy of the device,
//! and with untracked inputs, which Burn's does not have.
//!
//! [free]: is_free
use crate::burn_internals::is_recomputed_by_strategy;
use burn::backend::{
    Backend,
    autodiff::{
        Autodiff, NodeId,
        checkpoint::{
            retro_forward::RetroForward,
            state::BackwardStates,
            strategy::{BalancedCheckpointing, CheckpointStrategy},
        },
        ops::{Backward, ComputePropertyDone, Init, OpsPrep},
    },
    tensor::FloatTensor,
};
use core::any::TypeId;
use std::collections::HashMap;
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, OnceLock, PoisonError};

/// How many promises there are for a node, and whether its step offers to compute its tensor again.
#[derive(Debug, Default)]
struct Promises {
    count: usize,
    offered: bool,
}

static FREE: LazyLock<Mutex<HashMap<NodeId, Promises>>> = LazyLock::new(Mutex::default);

fn free_nodes() -> MutexGuard<'static, HashMap<NodeId, Promises>> {
    FREE.lock().unwrap_or_else(PoisonError::into_inner) // a count is right after every statement
}

/// A promise that the tensor of a node can be had in the backward pass without keeping a byte for it. It is part of the state
/// of the step that makes it, and ends with the step.
#[derive(Debug)]
pub(crate) struct Free(NodeId);

impl Free {
    pub(crate) fn new(node: NodeId) -> Self {
        free_nodes().entry(node).or_default().count += 1;
        Self(node)
    }

    /// For the output of a step that offers to compute it again.
    fn offered(node: NodeId) -> Self {
        let free = Self::new(node);
        free_nodes().entry(node).or_default().offered = true;
        free
    }
}

impl Drop for Free {
    fn drop(&mut self) {
        let mut nodes = free_nodes();
        if let Some(promises) = nodes.get_mut(&self.0) {
            promises.count -= 1;
            if promises.count == 0 {
                nodes.remove(&self.0);
            }
        }
    }
}

/// The promise for the output of a step, if it is offered. It is part of the state of the step, which is made before the node
/// of the output.
#[derive(Clone, Debug)]
pub(crate) struct Offered(Option<Arc<OnceLock<Free>>>);

impl Offered {
    pub(crate) fn new(offered: bool) -> Self {
        Self(offered.then(Arc::default))
    }

    /// Promises the output of the step that has this in its state.
    pub(crate) fn promise(&self, output: NodeId) {
        if let Some(promise) = &self.0 {
            let _ = promise.set(Free::offered(output)); // a step has one output
        }
    }
}

/// Whether the tensor can be had in the backward pass without keeping a byte for it.
pub(crate) fn is_free<B: Backend, C: CheckpointStrategy>(x: &FloatTensor<Autodiff<B, C>>) -> bool {
    x.is_tracked() && (free_nodes().contains_key(&x.id()) || is_recomputed::<B, C>(x))
}

/// Whether a step of this library computes the tensor of a node again when the backward pass asks for it.
pub(crate) fn is_offered(node: NodeId) -> bool {
    free_nodes().get(&node).is_some_and(|promises| promises.offered)
}

/// Where a recomputation finds an input.
enum Source<B: Backend> {
    /// In the graph. Every tracked input is asked for exactly once: so Burn counts.
    Node(NodeId),
    /// Untracked, so not in the graph.
    Held(FloatTensor<B>),
}

/// Computes an output again.
struct Again<B: Backend, F> {
    inputs: Vec<Source<B>>,
    forward: F,
}

impl<B: Backend, F> core::fmt::Debug for Again<B, F> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "Again({} inputs)", self.inputs.len())
    }
}

impl<B, F> RetroForward for Again<B, F>
where
    B: Backend,
    F: Fn(Vec<FloatTensor<B>>) -> FloatTensor<B> + Send + 'static,
{
    fn forward(&self, states: &mut BackwardStates, output: NodeId) {
        let inputs = self.inputs.iter().map(|input| match input {
            Source::Node(node) => states.get_state::<FloatTensor<B>>(node),
            Source::Held(tensor) => tensor.clone(),
        });
        let inputs = inputs.collect();
        states.save(output, (self.forward)(inputs));
    }
}

/// If `offered`, and an input is tracked, offers the output of an operation for recomputation by `forward` of `inputs`, all of
/// which must be [free](is_free) or kept by the operation itself; small tensors apart.
pub(crate) fn offer<BO, B, S, C, F, const N: usize>(
    prep: OpsPrep<BO, B, S, BalancedCheckpointing, N, Init>,
    offered: bool,
    inputs: &[&FloatTensor<Autodiff<B, C>>],
    forward: F,
) -> OpsPrep<BO, B, S, BalancedCheckpointing, N, ComputePropertyDone>
where
    B: Backend,
    C: CheckpointStrategy,
    BO: Backward<B, N, State = S>,
    F: Fn(Vec<FloatTensor<B>>) -> FloatTensor<B> + Send + 'static,
{
    if !offered || !inputs.iter().any(|input| input.is_tracked()) {
        return prep.compute_bound();
    }
    let source = |input: &&FloatTensor<Autodiff<B, C>>| match input.is_tracked() {
        true => Source::Node(input.id()),
        false => Source::Held(input.primitive().clone()),
    };
    let again = Again::<B, F> { inputs: inputs.iter().map(source).collect(), forward };
    // A handle of every tracked input, should nobody else ask for it.
    let tracked = inputs.iter().copied().filter(|input| input.is_tracked());
    prep.memory_bound().retro_forward(again).parents(tracked)
}

/// Whether the device's strategy computes some outputs again instead of keeping them.
pub(crate) fn recomputes<C: CheckpointStrategy>() -> bool {
    TypeId::of::<C>() == TypeId::of::<BalancedCheckpointing>()
}

/// Whether the device's strategy computes this tensor again when it is asked for in the backward pass.
pub(crate) fn is_recomputed<B: Backend, C: CheckpointStrategy>(x: &FloatTensor<Autodiff<B, C>>) -> bool {
    recomputes::<C>() && x.is_tracked() && is_recomputed_by_strategy::<B, C>(x)
}
