//! Recurrent layers over a whole sequence: RNN, GRU and LSTM.
//!
//! | | |
//! | --- | --- |
//! | computes | RNN: `h = tanh(a)` |
//! | | GRU: `r = sigmoid(a_r)`, `z = sigmoid(a_z)`, `n = tanh(x W_n + b_n + r * (h U_n + d_n))`, `h = (1 - z) n + z h`; or `n = tanh(x W_n + b_n + (r h) U_n + d_n)` |
//! | | LSTM: `i, o, f = sigmoid(a_i, a_o, a_f)`, `g = tanh(a_g)`, `c = f c + i g`, `h = o tanh(c)`; coupled: `f = 1 - i` |
//! | | where `a = x W + b + h U + d` per gate, step by step; the state (`c` of an LSTM, else `h`) is clipped if asked for |
//! | keeps | the gates after their activation, once (the gate of an RNN that does not clip is its output); the initial state and the weights (handles); `x` (a handle) if a `W` is tracked |
//! | | with checkpoints every `k` steps: not the gates but the state after every `k`-th step; `x`, the initial state and all parameters (handles) |
//! | backward | (with checkpoints, for one segment after the other, whose gates are computed again) from the last step: `da` of every gate in the place of the gate, `dh += sum(da U^T)`; then `dW = x^T da`, `dU = h^T da`, `db = dd = sum(da)`, `dx = sum(da W^T)`, each one matrix product over all steps |
//!
//! The states between the steps are computed again from the gates: `c` and `h` are no more than a few products away. So is
//! `h U_n + d_n`, by one matrix product. Products with `x` are one per gate for all steps at once. Stock Burn records some
//! forty operations per step, which keep ten tensors and more of the size of the state.
//!
//! The final state comes from small operations on the output that only hand their gradient over.
use super::{
    bilinear::no_node,
    kept::{Keeper, Kept},
};
use crate::backend::{Cell, Gate, Keep, MemBackend, Recurrence, RecurrentState, Wanted, plain_backends};
use burn::backend::{
    AutodiffBackend, Backend, BackendTensor, DispatchAutodiffContext, DispatchTensor, DispatchTensorKind,
    ExtensionType, TensorMetadata,
    autodiff::{
        Autodiff,
        checkpoint::{base::Checkpointer, strategy::CheckpointStrategy},
        grads::Gradients,
        ops::{Backward, NodeGuard, Ops, OpsKind},
    },
    backend_extension,
    tensor::FloatTensor,
};
use burn::tensor::Shape;
use std::sync::{Arc, Mutex, PoisonError};

/// Tensors, some of which may not be there.
pub struct Slots<B: Backend>(pub Vec<Option<FloatTensor<B>>>);

impl<B: Backend> ExtensionType<B> for Slots<B> {
    type Target = Slots<burn::backend::Dispatch>;

    fn map_to_dispatch<F>(self, map_kind: F, autodiff: DispatchAutodiffContext) -> Self::Target
    where
        F: Fn(BackendTensor<B>) -> DispatchTensorKind,
    {
        let wrap = |tensor| DispatchTensor { kind: map_kind(BackendTensor::Float(tensor)), autodiff };
        Slots(self.0.into_iter().map(|tensor| tensor.map(wrap)).collect())
    }

    fn map_from_dispatch<F>(target: Self::Target, unwrap_kind: F) -> Self
    where
        F: Fn(DispatchTensor) -> BackendTensor<B>,
    {
        let unwrap = |tensor| unwrap_kind(tensor).float();
        Slots(target.0.into_iter().map(|tensor| tensor.map(unwrap)).collect())
    }

    fn routing_tensor(target: &Self::Target) -> Option<&DispatchTensor> {
        target.0.iter().flatten().next()
    }

    fn routing_float_tensor(target: &Self::Target) -> Option<&DispatchTensor> {
        Self::routing_tensor(target)
    }

    fn autodiff_context(target: &Self::Target) -> DispatchAutodiffContext {
        let contexts = target.0.iter().flatten().map(|tensor| tensor.autodiff);
        contexts.fold(DispatchAutodiffContext::Disabled, |context, other| context.merge(other))
    }
}

/// Slots of the initial state: h and c.
const STATE: usize = 2;
/// Slots of a gate: its weight and bias for the input, and for the hidden state.
const OF_GATE: usize = 4;
/// The input, the state and four gates.
const PARENTS: usize = 1 + STATE + 4 * OF_GATE;

/// Recurrent layers.
#[backend_extension(
    Flex: cfg(feature = "flex"),
    NdArray: cfg(feature = "ndarray"),
    Cube: cfg(any(feature = "wgpu", feature = "cuda")),
    Remote: cfg(feature = "remote"),
    Autodiff
)]
pub trait RecurrentOps: Backend {
    /// The hidden state after every step, and hidden and cell state after the last (the hidden one twice where there is no
    /// other). `operands`: h and c before the first step; then of every gate the weight and the bias for the input, and the
    /// weight and the bias for the hidden state.
    fn memsave_recurrent(
        x: FloatTensor<Self>,
        #[extension_type] operands: Slots<Self>,
        recurrence: Recurrence,
    ) -> (FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>);
}
plain_backends!(RecurrentOps {
    fn memsave_recurrent(
        x: FloatTensor<Self>,
        operands: Slots<Self>,
        recurrence: Recurrence,
    ) -> (FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>) {
        let (state, gates) = split::<Self>(operands.0);
        let result = recurrence.forward::<Self>(x, &gates, state, Keep::Nothing);
        let (h, c) = last(result.state);
        (result.y, h, c)
    }
});

/// State and gates in their slots.
fn split<B: Backend>(operands: Vec<Option<FloatTensor<B>>>) -> (RecurrentState<B>, Vec<Gate<B>>) {
    let mut operands = operands.into_iter();
    let mut next = || operands.next().flatten();
    let state = RecurrentState { h: next(), c: next() };
    let mut gates = vec![];
    while let Some(input) = next() {
        gates.push(Gate { input: Some(input), input_bias: next(), hidden: next(), hidden_bias: next() });
    }
    (state, gates)
}

/// Hidden and cell state after the last step.
fn last<B: Backend>(state: RecurrentState<B>) -> (FloatTensor<B>, FloatTensor<B>) {
    let h = state.h.expect("the state after a step");
    let c = state.c.unwrap_or_else(|| h.clone());
    (h, c)
}

impl<B: RecurrentOps + MemBackend, C: CheckpointStrategy> RecurrentOps for Autodiff<B, C> {
    fn memsave_recurrent(
        x: FloatTensor<Self>,
        operands: Slots<Self>,
        recurrence: Recurrence,
    ) -> (FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>) {
        let Slots(operands) = operands;
        let node = |slot: usize| match operands.get(slot).and_then(Option::as_ref) {
            Some(tensor) => tensor.node(),
            None => no_node::<B, C>(&x),
        };
        let nodes: [NodeGuard; PARENTS] =
            core::array::from_fn(|parent| if parent == 0 { x.node() } else { node(parent - 1) });
        let plain = |operands: Vec<Option<FloatTensor<Self>>>| {
            let tensors = operands.into_iter().map(|tensor| tensor.map(|tensor| tensor.into_primitive()));
            split::<B>(tensors.collect())
        };
        match Step(recurrence).prepare::<C>(nodes).compute_bound().stateful() {
            OpsKind::UnTracked(prep) => {
                let (state, gates) = plain(operands);
                let result = recurrence.forward::<B>(x.into_primitive(), &gates, state, Keep::Nothing);
                let y = prep.finish(result.y);
                let (h, c) = last(result.state);
                let untracked = <Self as AutodiffBackend>::from_inner;
                (y, untracked(h), untracked(c))
            }
            OpsKind::Tracked(mut prep) => {
                let cell = recurrence.cell;
                let weight = operands[STATE].as_ref().map(|weight| weight.id());
                let keeper = Keeper::new(name(cell), weight);
                let tracked = |slot: usize| operands[slot].as_ref().is_some_and(|t| t.is_tracked());
                let steps = x.shape()[usize::from(recurrence.batch_first)];
                let gates = || (0..cell.gates()).map(|gate| STATE + gate * OF_GATE);
                let is_gru = matches!(cell, Cell::Gru { .. });
                let reads_states = is_gru || gates().any(|gate| tracked(gate + 2));
                let again = recurrence.checkpoint.is_some();
                let keep_of_steps = recurrence.checkpoint.map_or(Keep::Gates, Keep::States);
                let mut keep = |slot: usize, name, read: bool, reason| {
                    let tensor = operands[slot].as_ref().filter(|_| read || again)?;
                    Some(keeper.keep(&mut prep, name, tensor, reason))
                };
                let state = [
                    keep(0, "h", reads_states, "the states are computed again"),
                    keep(1, "c", true, "the states are computed again"),
                ];
                let kept = gates().enumerate().map(|(index, gate)| {
                    let of_new = is_gru && index == 2;
                    let goes_back = steps > 1 || tracked(0) || of_new;
                    let after = of_new && cell == (Cell::Gru { reset_after: true });
                    [
                        keep(gate, "input weight", x.is_tracked(), "x is tracked"),
                        keep(gate + 1, "input bias", false, "the gates are computed again"),
                        keep(gate + 2, "hidden weight", goes_back, "gradients go back through the steps"),
                        keep(gate + 3, "hidden bias", after, "the product that r gates is computed again"),
                    ]
                });
                let kept = kept.collect();
                let x_is_read = again || gates().any(tracked);
                let kept_x = x_is_read.then(|| {
                    keeper.keep(&mut prep, "x", &x, "read by gradients of input weights, or by gates")
                });

                let (initial, gates) = plain(operands);
                let result = recurrence.forward::<B>(x.into_primitive(), &gates, initial, keep_of_steps);
                let values = match (cell, recurrence.clip) {
                    _ if again => vec![],
                    (Cell::Rnn, None) => {
                        let [rows, hidden] = result.gates[0].shape().dims();
                        vec![B::float_reshape(result.y.clone(), Shape::new([rows, hidden]))]
                    }
                    _ => result.gates,
                };
                let values =
                    values.into_iter().map(|gate| keeper.keep_tensor("gate", gate, "read by all gradients"));
                let keep_state = |state: RecurrentState<B>| {
                    [state.h, state.c]
                        .map(|t| t.map(|t| keeper.keep_tensor("state", t, "the gates are computed again")))
                };
                let checkpoints = result.checkpoints.into_iter().map(keep_state).collect();
                let handed_over = HandedOver::default();
                let saved = Saved {
                    x: kept_x,
                    state,
                    gates: kept,
                    values: values.collect(),
                    checkpoints,
                    handed_over: handed_over.clone(),
                };
                let y = prep.finish(saved, result.y);
                let final_state = |value: FloatTensor<B>, index| {
                    let step = Final { index, handed_over: handed_over.clone(), shape: y.shape() };
                    match HandOver.prepare::<C>([y.node()]).compute_bound().stateful() {
                        OpsKind::Tracked(prep) => prep.finish(step, value),
                        OpsKind::UnTracked(prep) => prep.finish(value),
                    }
                };
                let (h, c) = last(result.state);
                let (h, c) =
                    (final_state(h, 0), final_state(c, usize::from(matches!(cell, Cell::Lstm { .. }))));
                (y, h, c)
            }
        }
    }
}

fn name(cell: Cell) -> &'static str {
    match cell {
        Cell::Rnn => "rnn",
        Cell::Gru { .. } => "gru",
        Cell::Lstm { .. } => "lstm",
    }
}

/// Gradients of the final state, h and c, on their way to the step of the layer.
#[derive(Debug)]
struct HandedOver<T>(Arc<Mutex<[Option<T>; 2]>>);

impl<T> Default for HandedOver<T> {
    fn default() -> Self {
        Self(Arc::new(Mutex::new([None, None])))
    }
}

impl<T> Clone for HandedOver<T> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<T> HandedOver<T> {
    fn put(&self, index: usize, grad: T) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)[index] = Some(grad);
    }

    fn take(&self) -> [Option<T>; 2] {
        core::mem::take(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// The final state, whose gradient the step of the layer takes. It runs before that step, as its output is the parent.
#[derive(Debug)]
struct HandOver;

#[derive(Clone, Debug)]
struct Final<T> {
    index: usize,
    handed_over: HandedOver<T>,
    /// Of the output.
    shape: Shape,
}

impl<B: Backend> Backward<B, 1> for HandOver {
    type State = Final<FloatTensor<B>>;

    fn backward(self, ops: Ops<Self::State, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
        let grad = grads.consume::<B>(&ops.node);
        let Final { index, handed_over, shape } = ops.state;
        if let [Some(output)] = ops.parents {
            // Zeros, so that the step of the layer runs if nothing else asks for it.
            let one = B::float_zeros(Shape::new([1; 3]), &grad.device(), grad.dtype().into());
            grads.register::<B>(output.id, B::float_expand(one, shape));
        }
        handed_over.put(index, grad);
    }
}

#[derive(Debug)]
struct Step(Recurrence);

/// What the backward pass reads.
#[derive(Clone, Debug)]
struct Saved<T> {
    /// The input, if an input weight is tracked or there are checkpoints.
    x: Option<Kept>,
    /// The initial state, where it is given.
    state: [Option<Kept>; 2],
    /// Of every gate: the input weight if `x` is tracked; the hidden weight if it is read; the hidden bias if it is. With
    /// checkpoints all, and the input bias.
    gates: Vec<[Option<Kept>; OF_GATE]>,
    /// The gates of all steps.
    values: Vec<T>,
    /// Or the states, h and c, at checkpoints.
    checkpoints: Vec<[Option<T>; 2]>,
    /// The gradients of the final state.
    handed_over: HandedOver<T>,
}

impl<B: MemBackend> Backward<B, PARENTS> for Step {
    type State = Saved<FloatTensor<B>>;

    fn backward(
        self,
        ops: Ops<Self::State, PARENTS>,
        grads: &mut Gradients,
        checkpointer: &mut Checkpointer,
    ) {
        let Self(recurrence) = self;
        let dy = grads.consume::<B>(&ops.node);
        let Saved { x, state, gates, values, checkpoints, handed_over } = ops.state;
        let mut get = |kept: Option<Kept>| kept.map(|kept| kept.get::<B>(checkpointer));
        let x = get(x);
        let [h, c] = state.map(&mut get);
        let gates: Vec<_> = gates
            .into_iter()
            .map(|kept| {
                let [input, input_bias, hidden, hidden_bias] = kept.map(&mut get);
                Gate { input, input_bias, hidden, hidden_bias }
            })
            .collect();
        let [dh, dc] = handed_over.take();
        let slot = |gate: usize| 1 + STATE + gate * OF_GATE;
        let wanted = Wanted {
            x: ops.parents[0].is_some(),
            h: ops.parents[1].is_some(),
            gates: (0..gates.len())
                .map(|gate| core::array::from_fn(|of| ops.parents[slot(gate) + of].is_some()))
                .collect(),
        };
        let state = RecurrentState { h, c };
        let dstate = RecurrentState { h: dh, c: dc };
        let result = match (recurrence.checkpoint, x) {
            (Some(every), Some(x)) => {
                let checkpoints = checkpoints.into_iter().map(|[h, c]| RecurrentState { h, c });
                let starts = core::iter::once(state).chain(checkpoints).collect();
                recurrence.backward_by_segments::<B>(every, x, &gates, starts, dy, dstate, &wanted)
            }
            (_, x) => {
                let sums = dy.dtype().into();
                recurrence.backward::<B>(x, &gates, values, state, dy, dstate, &wanted, sums)
            }
        };
        let of_gates = result
            .gates
            .into_iter()
            .flat_map(|gate| [gate.input, gate.input_bias, gate.hidden, gate.hidden_bias]);
        let results = [result.x, result.state.h, result.state.c].into_iter().chain(of_gates);
        for (parent, grad) in ops.parents.into_iter().zip(results) {
            if let (Some(node), Some(grad)) = (parent, grad) {
                grads.register::<B>(node.id, grad);
            }
        }
    }
}
