//! The forward pass of recurrent layers over a whole sequence, for any backend: the loop over the steps.
//!
//! The products with the input are one matrix product per gate, for all steps at once. The products with the hidden state are made step
//! by step. All else of a step is [one function of the backend](RecurrentKernels).
use super::{Cell, Recurrence, RecurrentKernels, RecurrentState, RecurrentStep, Stage};
use burn::backend::{Backend, TensorMetadata, tensor::FloatTensor};
use burn::tensor::{Shape, Slice};
use core::ops::Range;

/// The parameters of a gate, or their gradients.
pub(super) struct GateParameters<B: Backend> {
    /// `[d_input, hidden]`
    pub input: Option<FloatTensor<B>>,
    /// `[hidden]`
    pub input_bias: Option<FloatTensor<B>>,
    /// `[hidden, hidden]`
    pub hidden: Option<FloatTensor<B>>,
    /// `[hidden]`
    pub hidden_bias: Option<FloatTensor<B>>,
}

impl<B: Backend> GateParameters<B> {
    pub(super) fn map(self, f: impl Fn(FloatTensor<B>) -> FloatTensor<B>) -> Self {
        let Self { input, input_bias, hidden, hidden_bias } = self;
        Self {
            input: input.map(&f),
            input_bias: input_bias.map(&f),
            hidden: hidden.map(&f),
            hidden_bias: hidden_bias.map(&f),
        }
    }

    /// The sum of each gradient that both have.
    pub(super) fn plus(self, other: Self) -> Self {
        let plus = |a: Option<FloatTensor<B>>, b| a.zip(b).map(|(a, b)| B::float_add(a, b));
        Self {
            input: plus(self.input, other.input),
            input_bias: plus(self.input_bias, other.input_bias),
            hidden: plus(self.hidden, other.hidden),
            hidden_bias: plus(self.hidden_bias, other.hidden_bias),
        }
    }
}

/// What the forward pass keeps of the steps for the backward pass.
#[derive(Clone, Copy)]
pub(super) enum ForBackward {
    Nothing,
    /// The gates of all steps.
    Gates,
    /// Checkpoints: the state after every so many steps.
    States(usize),
}

/// The result of the forward pass.
pub(super) struct ForwardResult<B: Backend> {
    /// The hidden state after every step.
    pub y: FloatTensor<B>,
    /// The gates of the last chunk of steps, which is all steps if gates are kept.
    pub gates: Vec<FloatTensor<B>>,
    /// The state after the last step.
    pub state: RecurrentState<B>,
    /// The states at checkpoints.
    pub checkpoints: Vec<RecurrentState<B>>,
}

/// Sizes of a sequence.
#[derive(Clone, Copy)]
pub(super) struct Sizes {
    pub batch: usize,
    pub steps: usize,
    pub hidden: usize,
}

impl Recurrence {
    /// If gates are not kept: for how many steps the products with the input are made at once. They fill a tile of a matrix product, and
    /// take no more memory than one step of a large batch.
    fn chunk(batch: usize) -> usize {
        const ROWS: usize = 32;
        (ROWS / batch.max(1)).max(1)
    }

    pub(super) fn sizes(&self, sequence: &Shape, hidden: usize) -> Sizes {
        let [first, second] = [sequence[0], sequence[1]];
        let (batch, steps) = if self.batch_first { (first, second) } else { (second, first) };
        Sizes { batch, steps, hidden }
    }

    /// The axis of the steps.
    pub(super) fn axis(&self) -> usize {
        usize::from(self.batch_first)
    }

    /// Steps `start..end` of a sequence.
    pub(super) fn slice<B: Backend>(&self, x: FloatTensor<B>, start: usize, end: usize) -> FloatTensor<B> {
        if start == 0 && end == x.shape()[self.axis()] {
            return x;
        }
        let mut slices: Vec<Slice> = x.shape().iter().map(|&size| Slice::from(0..size)).collect();
        slices[self.axis()] = Slice::from(start..end);
        B::float_slice(x, &slices)
    }

    pub(super) fn at<B: Backend>(&self, x: &FloatTensor<B>, step: usize) -> FloatTensor<B> {
        let batch = x.shape()[1 - self.axis()];
        let rows = self.slice::<B>(x.clone(), step, step + 1);
        let features = rows.shape()[2];
        B::float_reshape(rows, Shape::new([batch, features]))
    }

    /// States `[batch, hidden]`, in the order of their steps, as one sequence.
    pub(super) fn sequence<B: Backend>(&self, states: Vec<FloatTensor<B>>) -> FloatTensor<B> {
        let unsqueezed = states.into_iter().map(|state| {
            let [batch, hidden] = state.shape().dims();
            let mut shape = vec![batch, hidden];
            shape.insert(self.axis(), 1);
            B::float_reshape(state, Shape::from(shape))
        });
        B::float_cat(unsqueezed.collect(), self.axis())
    }

    /// Steps in the order in which they are computed.
    pub(super) fn order(&self, steps: Range<usize>) -> Vec<usize> {
        let mut order: Vec<usize> = steps.collect();
        if self.reverse {
            order.reverse();
        }
        order
    }

    pub(super) fn step(&self, stage: Stage, sizes: Sizes, at: usize) -> RecurrentStep {
        let Sizes { batch, steps, hidden } = sizes;
        RecurrentStep { stage, clip: self.clip, batch_first: self.batch_first, batch, steps, hidden, at }
    }

    /// Runs over a sequence.
    pub(super) fn forward<B: RecurrentKernels>(
        &self,
        x: FloatTensor<B>,
        parameters: &[GateParameters<B>],
        mut state: RecurrentState<B>,
        keep: ForBackward,
    ) -> ForwardResult<B> {
        let hidden = weight(&parameters[0].hidden).shape()[0];
        let Sizes { batch, steps, .. } = self.sizes(&x.shape(), hidden);
        let chunk = if matches!(keep, ForBackward::Gates) { steps } else { Self::chunk(batch) };
        let biases: Vec<_> =
            parameters.iter().map(|gate| [gate.input_bias.clone(), gate.hidden_bias.clone()]).collect();
        // If the gate is the state, the gates of all steps are the output.
        let is_output = self.cell == Cell::Rnn && self.clip.is_none() && (1..=chunk).contains(&steps);
        let mut states = vec![None; steps];
        let (mut last_gates, mut checkpoints) = (vec![], vec![]);
        let is_checkpoint = |made: usize| match keep {
            ForBackward::States(every) => made > 0 && made.is_multiple_of(every),
            ForBackward::Nothing | ForBackward::Gates => false,
        };
        let mut done = 0;
        while done < steps {
            let count = chunk.min(steps - done);
            let start = if self.reverse { steps - done - count } else { done };
            let rows = matrix::<B>(self.slice::<B>(x.clone(), start, start + count));
            let product =
                |gate: &GateParameters<B>| B::float_matmul(rows.clone(), weight(&gate.input).clone());
            let mut gates: Vec<_> = parameters.iter().map(product).collect();
            drop(rows);
            let sizes = Sizes { batch, steps: count, hidden };
            for (index, at) in self.order(0..count).into_iter().enumerate() {
                if is_checkpoint(done + index) {
                    checkpoints.push(state.clone());
                }
                state = self.step_forward::<B>(sizes, at, &mut gates, parameters, &biases, state);
                states[start + at] = state.h.clone().filter(|_| !is_output);
            }
            done += count;
            last_gates = gates;
        }
        let y = match is_output {
            true => {
                let [first, second, _] = x.shape().dims();
                B::float_reshape(last_gates[0].clone(), Shape::new([first, second, hidden]))
            }
            false => self.sequence::<B>(states.into_iter().flatten().collect()),
        };
        ForwardResult { y, gates: last_gates, state, checkpoints }
    }

    fn step_forward<B: RecurrentKernels>(
        &self,
        sizes: Sizes,
        at: usize,
        gates: &mut Vec<FloatTensor<B>>,
        parameters: &[GateParameters<B>],
        biases: &[[Option<FloatTensor<B>>; 2]],
        state: RecurrentState<B>,
    ) -> RecurrentState<B> {
        let product = |h: &Option<FloatTensor<B>>, gate: &GateParameters<B>| {
            h.as_ref().map(|h| B::hidden_product(h.clone(), weight(&gate.hidden).clone(), false))
        };
        if self.cell != (Cell::Gru { reset_after: false }) {
            let products = parameters.iter().map(|gate| product(&state.h, gate)).collect();
            let step = self.step(Stage::Whole(self.cell), sizes, at);
            return B::recurrent_forward(&step, gates, products, biases, state);
        }
        let products = parameters[..2].iter().map(|gate| product(&state.h, gate)).collect();
        let step = self.step(Stage::Reset, sizes, at);
        let reset = with_some(gates, 0..2, |gates| {
            B::recurrent_forward(&step, gates, products, &biases[..2], state.clone())
        });
        let products = vec![None, product(&reset.h.filter(|_| state.h.is_some()), &parameters[2])];
        let step = self.step(Stage::New, sizes, at);
        let biases = [[None, None], biases[2].clone()];
        with_some(gates, 1..3, |gates| B::recurrent_forward(&step, gates, products, &biases, state))
    }
}

/// Calls `f` with some of the gates, which it may replace.
pub(super) fn with_some<T, R>(gates: &mut Vec<T>, some: Range<usize>, f: impl FnOnce(&mut Vec<T>) -> R) -> R {
    let start = some.start;
    let mut taken = gates.drain(some).collect();
    let result = f(&mut taken);
    gates.splice(start..start, taken);
    result
}

/// A weight that was kept because it is read.
pub(super) fn weight<T>(weight: &Option<T>) -> &T {
    weight.as_ref().expect("a weight that is read is kept")
}

/// A sequence as a matrix of features, with a row per step and batch item.
pub(super) fn matrix<B: Backend>(x: FloatTensor<B>) -> FloatTensor<B> {
    let shape = x.shape();
    B::float_reshape(x, Shape::new([shape[0] * shape[1], shape[2]]))
}
