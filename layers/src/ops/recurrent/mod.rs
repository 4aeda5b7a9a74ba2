//! Recurrent layers over a whole sequence: RNN, GRU and LSTM.
//!
//! | | |
//! | --- | --- |
//! | computes | RNN: `h = tanh(a)` |
//! | | GRU: `r = sigmoid(a_r)`, `z = sigmoid(a_z)`, `n = tanh(x W_n + b_n + r * (h U_n + d_n))`, `h = (1 - z) n + z h`; |
//! | | or, if it resets before the product, `n = tanh(x W_n + b_n + (r h) U_n + d_n)` |
//! | | LSTM: `i, o, f = sigmoid(a_i, a_o, a_f)`, `g = tanh(a_g)`, `c = f c + i g`, `h = o tanh(c)`; coupled: `f = 1 - i` |
//! | | where `a = x W + b + h U + d` per gate, step by step; the state (`c` of an LSTM, else `h`) is clipped if asked for |
//! | keeps | the activated gates (the gate of an RNN that does not clip is its output); handles of the initial state, of every `U`, |
//! | | of every `W` if `x` is tracked, and of `x` if a `W` is tracked |
//! | | with checkpoints every `k` steps: instead of the gates, the state after every `k`-th step; handles of `x`, the initial |
//! | | state and all parameters |
//! | backward | from the last step on: `da` of every gate in place of the gate, `dh += sum(da U^T)`; then `dW = x^T da`, |
//! | | `dU = h^T da`, `db = dd = sum(da)`, `dx = sum(da W^T)`, each one matrix product over all steps |
//! | | with checkpoints: the same for one interval between checkpoints after the other, whose gates are recomputed |
//!
//! The states between the steps are recomputed from the gates: `c` and `h` are only a few products away, and `h U_n + d_n` is one
//! matrix product. The products with `x` are one matrix product per gate, for all steps at once. Stock Burn records some forty
//! operations per step, which keep ten or more tensors of the size of the state.
//!
//! The last state is the output of small steps on `y`, which only hand its gradient to the step of the layer.
//!
//! Sums over steps and intervals are made in f32 at least.
use crate::backend::optional::OptionalTensors;
use crate::graph::{BackwardPass, Inputs, KeepPlan, Operation, Recorder, Run, Tracking, extension, given};
use burn::backend::{Backend, ExtensionType, TensorMetadata, tensor::FloatTensor};
use burn::tensor::Shape;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

mod backward;
#[cfg(any(feature = "flex", feature = "ndarray"))]
pub(super) mod cpu;
#[cfg(any(feature = "wgpu", feature = "cuda"))]
mod cube;
mod kernels;
mod sequence;

use backward::{Interval, Wanted};
pub use kernels::{RecurrentKernels, RecurrentState, RecurrentStep, Stage};
use sequence::{ForBackward, ForwardResult, GateParameters};

/// The kind of a recurrent layer, and so its gates, in this order.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Cell {
    /// `h = tanh(a)`
    Rnn,
    /// Gates r, z and n: `h = (1 - z) n + z h`.
    Gru {
        /// Whether r gates the product of the hidden state with the weight of n, and not the state itself.
        reset_after: bool,
    },
    /// Gates i, o, g and f: `c = f c + i g`, `h = o tanh(c)`.
    Lstm {
        /// Whether `f = 1 - i`, without a gate of its own.
        coupled: bool,
    },
}

impl Cell {
    /// The number of gates.
    pub fn gates(self) -> usize {
        match self {
            Self::Rnn => 1,
            Self::Gru { .. } | Self::Lstm { coupled: true } => 3,
            Self::Lstm { coupled: false } => 4,
        }
    }
}

/// The options of a recurrent layer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Recurrence {
    /// Its kind.
    pub cell: Cell,
    /// The largest magnitude of an element of the state: of c in an LSTM, else of h.
    pub clip: Option<f64>,
    /// Whether sequences are `[batch, steps, ...]`, else `[steps, batch, ...]`.
    pub batch_first: bool,
    /// Whether the last step comes first.
    pub reverse: bool,
    /// Keep a state after every so many steps (at least 1), instead of the gates.
    pub checkpoint: Option<usize>,
}

/// The result of a recurrent layer.
#[derive(ExtensionType)]
pub struct RecurrentOutput<B: Backend> {
    /// The hidden state after every step.
    pub y: FloatTensor<B>,
    /// The hidden state after the last step.
    pub h: FloatTensor<B>,
    /// The cell state after the last step; if there is none, the hidden state again.
    pub c: FloatTensor<B>,
}

extension! {
    /// Recurrent layers.
    pub trait RecurrentOps(RecurrentKernels) {
        /// Runs a layer over a sequence. `operands`: h and c before the first step; then for every gate the weight and the bias for
        /// the input, and the weight and the bias for the hidden state.
        fn memsave_recurrent(
            x: FloatTensor<Self>,
            #[extension_type] operands: OptionalTensors<Self>,
            recurrence: Recurrence,
        ) -> RecurrentOutput<Self> {
            let steps = x.shape()[recurrence.axis()];
            let side = SideChannel::default();
            let mut inputs = core::iter::once(Some(x)).chain(operands.0);
            let inputs = core::array::from_fn(|_| inputs.next().flatten());
            let y = Self::run(Recurrent { recurrence, steps, side: side.clone() }, inputs);
            let [h, c] = side.take();
            let last = |index, value| Self::run(LastState { index, value, side: side.clone() }, [Some(y.clone())]);
            let h = last(0, given(h));
            let c = c.map_or_else(|| h.clone(), |c| last(1, c));
            RecurrentOutput { y, h, c }
        }
    }
}

/// The input, the initial state, and the [parameters](GateParameters) of every gate (at most four).
const INPUTS: usize = GATES + 4 * PER_GATE;
const X: usize = 0;
const H: usize = 1;
const C: usize = 2;
const GATES: usize = 3;
const PER_GATE: usize = 4;

/// The places, among the inputs, of the parameters of a gate: weight and bias for the input, weight and bias for the hidden state.
fn places(gate: usize) -> [usize; PER_GATE] {
    core::array::from_fn(|parameter| GATES + gate * PER_GATE + parameter)
}

/// A recurrent layer over a sequence.
#[derive(Clone)]
struct Recurrent<B: Backend> {
    recurrence: Recurrence,
    /// The number of steps.
    steps: usize,
    /// Carries the last state out of the forward pass.
    side: SideChannel<B>,
}

impl<B: RecurrentKernels> Recurrent<B> {
    fn over(&self, inputs: Inputs<B, INPUTS>, keep: ForBackward) -> ForwardResult<B> {
        let mut inputs = inputs.into_iter();
        let mut next = || inputs.next().flatten();
        let x = given(next());
        let state = RecurrentState { h: next(), c: next() };
        let gates = (0..self.recurrence.cell.gates()).map(|_| GateParameters {
            input: next(),
            input_bias: next(),
            hidden: next(),
            hidden_bias: next(),
        });
        let gates: Vec<_> = gates.collect();
        let result = self.recurrence.forward::<B>(x, &gates, state, keep);
        let RecurrentState { h, c } = result.state.clone();
        self.side.put([h, c]);
        result
    }
}

impl<B: RecurrentKernels> Operation<B, INPUTS> for Recurrent<B> {
    const INPUTS: [&'static str; INPUTS] = {
        let mut names = [""; INPUTS];
        (names[X], names[H], names[C]) = ("x", "h", "c");
        let mut gate = GATES;
        while gate < INPUTS {
            (names[gate], names[gate + 1]) = ("input weight", "input bias");
            (names[gate + 2], names[gate + 3]) = ("hidden weight", "hidden bias");
            gate += PER_GATE;
        }
        names
    };
    const PARAMETERS: &'static [usize] = {
        const PARAMETERS: [usize; INPUTS - GATES] = {
            let mut parameters = [0; INPUTS - GATES];
            let mut parameter = GATES;
            while parameter < INPUTS {
                parameters[parameter - GATES] = parameter;
                parameter += 1;
            }
            parameters
        };
        &PARAMETERS
    };
    type Saved = SavedRecurrent<B>;

    fn name(&self) -> &'static str {
        match self.recurrence.cell {
            Cell::Rnn => "rnn",
            Cell::Gru { .. } => "gru",
            Cell::Lstm { .. } => "lstm",
        }
    }

    fn plan(&self, inputs: &Tracking<B, INPUTS>) -> KeepPlan<INPUTS> {
        let Recurrence { cell, checkpoint, .. } = self.recurrence;
        let recomputes = checkpoint.is_some();
        let is_gru = matches!(cell, Cell::Gru { .. });
        let any = |parameter: usize| (0..cell.gates()).any(|gate| inputs.tracked(places(gate)[parameter]));
        let [input_weights, _, hidden_weights, _] = core::array::from_fn(any);
        let plan = KeepPlan::nothing()
            .keep_if(recomputes || input_weights, X, "read by gradients of input weights, or by gates")
            .keep_if(recomputes || is_gru || hidden_weights, H, "the states are computed again")
            .keep_if(true, C, "the states are computed again");
        (0..cell.gates()).fold(plan, |plan, gate| {
            let [input, input_bias, hidden, hidden_bias] = places(gate);
            let is_new = is_gru && gate == 2;
            let goes_back = self.steps > 1 || inputs.tracked(H) || is_new;
            let reads_bias = is_new && cell == (Cell::Gru { reset_after: true });
            plan.keep_if(recomputes || inputs.tracked(X), input, "x is tracked")
                .keep_if(recomputes, input_bias, "the gates are computed again")
                .keep_if(recomputes || goes_back, hidden, "gradients go back through the steps")
                .keep_if(recomputes || reads_bias, hidden_bias, "the product that r gates is computed again")
        })
    }

    fn forward(&self, inputs: Inputs<B, INPUTS>) -> FloatTensor<B> {
        self.over(inputs, ForBackward::Nothing).y
    }

    fn forward_saving(
        &self,
        inputs: Inputs<B, INPUTS>,
        recorder: &Recorder<INPUTS>,
    ) -> (FloatTensor<B>, SavedRecurrent<B>) {
        let recurrence = self.recurrence;
        let result = self.over(inputs, recurrence.checkpoint.map_or(ForBackward::Gates, ForBackward::States));
        let gates = match recurrence {
            Recurrence { checkpoint: Some(_), .. } => vec![],
            Recurrence { cell: Cell::Rnn, clip: None, .. } => {
                vec![B::float_reshape(result.y.clone(), result.gates[0].shape())]
            }
            _ => result.gates,
        };
        let report = recorder.report();
        let gates = gates.into_iter().map(|gate| report.tensor("gate", gate, "read by all gradients"));
        let keep = |state: FloatTensor<B>| report.tensor("state", state, "the gates are computed again");
        let checkpoints = result.checkpoints.into_iter();
        let checkpoints = checkpoints.map(|RecurrentState { h, c }| [h.map(keep), c.map(keep)]);
        let (gates, checkpoints) = (gates.collect(), checkpoints.collect());
        (result.y, SavedRecurrent { recurrence, gates, checkpoints, side: self.side.clone() })
    }

    fn backward(saved: SavedRecurrent<B>, dy: FloatTensor<B>, pass: &mut BackwardPass<B, INPUTS>) {
        let SavedRecurrent { recurrence, gates, checkpoints, side } = saved;
        let mut take = |input| pass.take(input);
        let (x, start) = (take(X), RecurrentState { h: take(H), c: take(C) });
        let parameters: Vec<_> = (0..recurrence.cell.gates())
            .map(|gate| {
                let [input, input_bias, hidden, hidden_bias] = places(gate).map(&mut take);
                GateParameters { input, input_bias, hidden, hidden_bias }
            })
            .collect();
        let wanted = Wanted {
            x: pass.wants(X),
            h: pass.wants(H),
            gates: (0..parameters.len())
                .map(|gate| places(gate).map(|parameter| pass.wants(parameter)))
                .collect(),
        };
        let [h, c] = side.take();
        let whole = Interval { x, start, dy, dlast: RecurrentState { h, c } };
        let grads = match recurrence.checkpoint {
            Some(every) => {
                let checkpoints = checkpoints.into_iter().map(|[h, c]| RecurrentState { h, c });
                recurrence.backward_by_intervals::<B>(
                    every,
                    whole,
                    checkpoints.collect(),
                    &parameters,
                    &wanted,
                )
            }
            None => recurrence.backward::<B>(whole, gates, &parameters, &wanted),
        };
        let mut give = |input, gradient| {
            if let Some(gradient) = gradient {
                pass.give(input, gradient);
            }
        };
        give(X, grads.x);
        give(H, grads.start.h);
        give(C, grads.start.c);
        for (index, gate) in grads.gates.into_iter().enumerate() {
            let GateParameters { input, input_bias, hidden, hidden_bias } = gate;
            let gradients = [input, input_bias, hidden, hidden_bias];
            places(index).into_iter().zip(gradients).for_each(|(place, gradient)| give(place, gradient));
        }
    }
}

/// What the backward pass reads besides inputs.
#[derive(Clone, Debug)]
struct SavedRecurrent<B: Backend> {
    recurrence: Recurrence,
    /// The gates of all steps.
    gates: Vec<FloatTensor<B>>,
    /// Or the states, h and c, at checkpoints.
    checkpoints: Vec<[Option<FloatTensor<B>>; 2]>,
    /// Carries the gradients of the last state into the backward pass.
    side: SideChannel<B>,
}

/// Carries the last state, h and c, out of the forward pass, beside the graph, since a step has only one output; and later its gradients
/// into the backward pass of the layer.
#[derive(Clone, Debug)]
struct SideChannel<B: Backend>(Arc<Mutex<[Option<FloatTensor<B>>; 2]>>);

impl<B: Backend> Default for SideChannel<B> {
    fn default() -> Self {
        Self(Arc::new(Mutex::new([None, None])))
    }
}

impl<B: Backend> SideChannel<B> {
    fn lock(&self) -> MutexGuard<'_, [Option<FloatTensor<B>>; 2]> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn put(&self, state: [Option<FloatTensor<B>>; 2]) {
        *self.lock() = state;
    }

    fn take(&self) -> [Option<FloatTensor<B>>; 2] {
        core::mem::take(&mut *self.lock())
    }
}

/// The last hidden or cell state, as a step on the output. Its backward pass runs before that of the layer, and leaves the gradient in
/// the side channel.
#[derive(Clone)]
struct LastState<B: Backend> {
    /// 0 for h, 1 for c.
    index: usize,
    value: FloatTensor<B>,
    side: SideChannel<B>,
}

impl<B: Backend> Operation<B, 1> for LastState<B> {
    const INPUTS: [&'static str; 1] = ["y"];
    const SHAPES: &'static [usize] = &[0];
    type Saved = (usize, SideChannel<B>);

    fn name(&self) -> &'static str {
        "last state"
    }

    fn plan(&self, _: &Tracking<B, 1>) -> KeepPlan<1> {
        KeepPlan::nothing()
    }

    fn forward(&self, _: Inputs<B, 1>) -> FloatTensor<B> {
        self.value.clone()
    }

    fn forward_saving(&self, inputs: Inputs<B, 1>, _: &Recorder<1>) -> (FloatTensor<B>, Self::Saved) {
        (self.forward(inputs), (self.index, self.side.clone()))
    }

    fn backward((index, side): Self::Saved, gradient: FloatTensor<B>, pass: &mut BackwardPass<B, 1>) {
        // Gives zeros, so that the step of the layer runs even if it gets no other gradient.
        let zero = B::float_zeros(Shape::new([1; 3]), &gradient.device(), gradient.dtype().into());
        pass.give(0, B::float_expand(zero, pass.shape(0)));
        side.lock()[index] = Some(gradient);
    }
}
