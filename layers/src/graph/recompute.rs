//! Offered outputs: they are recomputed in the backward pass, so that the next layer need not keep them.
//!
//! A normalization or an activation whose input is kept anyway offers its output: `norm -> linear` and
//! `conv -> batch norm -> relu -> conv` then keep one tensor. The condition is that the input is [available]: kept by a step
//! that is still alive, or itself recomputed. Otherwise the next layer keeps the output.
//!
//! **The table of available tensors here affects memory only, never gradients.** Whatever it says, Burn's checkpointer has or recomputes
//! every tensor that a backward pass asks for. A wrong entry would cost bytes or time, but change no result.
//!
//! This is Burn's own mechanism for `Balanced` checkpointing. Here it is used per operation, whatever the strategy of the device, and
//! extended to untracked inputs.
//!
//! [available]: is_available
use super::inputs::Inputs;
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

/// How many guards a node has, and whether its tensor is offered.
#[derive(Debug, Default)]
struct Guards {
    count: usize,
    offered: bool,
}

static AVAILABLE: LazyLock<Mutex<HashMap<NodeId, Guards>>> = LazyLock::new(Mutex::default);

fn available_nodes() -> MutexGuard<'static, HashMap<NodeId, Guards>> {
    AVAILABLE.lock().unwrap_or_else(PoisonError::into_inner) // a count is right after every statement
}

/// Says, while it is alive, that the backward pass can have the tensor of a node without keeping another byte for it. It is
/// part of the state of the step that keeps or recomputes the tensor, and is dropped with it.
#[derive(Debug)]
pub(crate) struct RecomputeGuard(NodeId);

impl RecomputeGuard {
    pub(crate) fn new(node: NodeId) -> Self {
        available_nodes().entry(node).or_default().count += 1;
        Self(node)
    }

    /// For an offered output.
    fn offered(node: NodeId) -> Self {
        let guard = Self::new(node);
        available_nodes().entry(node).or_default().offered = true;
        guard
    }
}

impl Drop for RecomputeGuard {
    fn drop(&mut self) {
        let mut nodes = available_nodes();
        if let Some(guards) = nodes.get_mut(&self.0) {
            guards.count -= 1;
            if guards.count == 0 {
                nodes.remove(&self.0);
            }
        }
    }
}

/// The guard of a step's output, if the output is offered. It is part of the step's state. Since the state is made before the node
/// of the output, the guard is empty at first.
#[derive(Clone, Debug)]
pub(crate) struct Offered(Option<Arc<OnceLock<RecomputeGuard>>>);

impl Offered {
    pub(crate) fn new(offered: bool) -> Self {
        Self(offered.then(Arc::default))
    }

    /// Fills in the guard, once the output has a node.
    pub(crate) fn promise(&self, output: NodeId) {
        if let Some(guard) = &self.0 {
            let _ = guard.set(RecomputeGuard::offered(output)); // a step has one output
        }
    }
}

/// Whether the backward pass can have the tensor without keeping another byte for it. `recomputes`: whether the device's
/// strategy [recomputes].
pub(crate) fn is_available<B: Backend>(x: &FloatTensor<Autodiff<B>>, recomputes: bool) -> bool {
    x.is_tracked() && (available_nodes().contains_key(&x.id()) || recomputes && is_recomputed::<B>(x))
}

/// Whether a step of this library recomputes the tensor of a node when the backward pass asks for it.
pub(crate) fn is_offered(node: NodeId) -> bool {
    available_nodes().get(&node).is_some_and(|guards| guards.offered)
}

/// Where a recomputation finds an input.
enum Source<B: Backend> {
    /// A node of the graph. Every tracked input must be asked for exactly once, since Burn counts the requests.
    Node(NodeId),
    /// An untracked tensor, which is not in the graph.
    Held(FloatTensor<B>),
}

/// The function that recomputes an output. The graph gets this before the output is computed, and the function is filled in after.
pub(crate) struct Again<F>(Arc<Mutex<Option<F>>>);

impl<F> Again<F> {
    /// Fills in the function.
    pub(crate) fn by(self, forward: F) {
        *self.lock() = Some(forward);
    }

    fn lock(&self) -> MutexGuard<'_, Option<F>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner) // the function changes nothing
    }
}

impl<F> Default for Again<F> {
    fn default() -> Self {
        Self(Arc::default())
    }
}

impl<F> Clone for Again<F> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

/// Recomputes an output.
struct Recompute<B: Backend, F, const N: usize> {
    inputs: [Option<Source<B>>; N],
    forward: Again<F>,
}

impl<B: Backend, F, const N: usize> core::fmt::Debug for Recompute<B, F, N> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "Recompute({N} inputs)")
    }
}

impl<B, F, const N: usize> RetroForward for Recompute<B, F, N>
where
    B: Backend,
    F: Fn(Inputs<B, N>) -> FloatTensor<B> + Send + 'static,
{
    fn forward(&self, states: &mut BackwardStates, output: NodeId) {
        let inputs = self.inputs.each_ref().map(|input| {
            Some(match input.as_ref()? {
                Source::Node(node) => states.get_state::<FloatTensor<B>>(node),
                Source::Held(tensor) => tensor.clone(),
            })
        });
        let forward = self.forward.lock();
        let forward = forward.as_ref().expect("the output was computed once");
        states.save(output, forward(inputs));
    }
}

/// Offers the output of an operation with a tracked input: `forward` recomputes it from `inputs`. All but small inputs must be
/// [available](is_available) or kept by the operation itself. The graph takes no handle of an input that is itself recomputed.
pub(crate) fn offer<BO, B, S, F, const N: usize>(
    prep: OpsPrep<BO, B, S, BalancedCheckpointing, N, Init>,
    inputs: &Inputs<Autodiff<B>, N>,
    forward: Again<F>,
) -> OpsPrep<BO, B, S, BalancedCheckpointing, N, ComputePropertyDone>
where
    B: Backend,
    BO: Backward<B, N, State = S>,
    F: Fn(Inputs<B, N>) -> FloatTensor<B> + Send + 'static,
{
    let sources = inputs.each_ref().map(|input| {
        let input = input.as_ref()?;
        Some(match input.is_tracked() {
            true => Source::Node(input.id()),
            false => Source::Held(input.primitive().clone()),
        })
    });
    let recompute = Recompute::<B, F, N> { inputs: sources, forward };
    // Burn takes handles of all tracked inputs, in case nothing else asks for them.
    let tracked = inputs.iter().flatten().filter(|input| input.is_tracked());
    prep.memory_bound().retro_forward(recompute).parents(tracked)
}

/// Whether the device's strategy recomputes some outputs instead of keeping them.
pub(crate) fn recomputes<C: CheckpointStrategy>() -> bool {
    TypeId::of::<C>() == TypeId::of::<BalancedCheckpointing>()
}

/// Whether a strategy that [recomputes] does so for this tensor when the backward pass asks for it.
pub(crate) fn is_recomputed<B: Backend>(x: &FloatTensor<Autodiff<B>>) -> bool {
    x.is_tracked() && is_recomputed_by_strategy::<B, BalancedCheckpointing>(x)
}
