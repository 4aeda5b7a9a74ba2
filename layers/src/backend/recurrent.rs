//! Recurrent layers over a whole sequence: the loops over its steps, for any backend.
//!
//! The products with the input are one matrix product per gate, of all steps at once; the products with the hidden state are
//! made step by step, and what is left of a step is one function of the backend.
use super::{MemBackend, zeros};
use burn::backend::{Backend, TensorMetadata, tensor::FloatTensor};
use burn::tensor::{FloatDType, Shape, Slice};

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
        /// Whether `f = 1 - i`, a gate that is not there.
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

/// A recurrent layer with its options.
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
    /// After how many steps a state is kept, instead of the gates; 1 at least.
    pub checkpoint: Option<usize>,
}

/// What is computed in one step, element by element.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Stage {
    /// All of it, of any cell but a GRU that resets before the product.
    Whole(Cell),
    /// The gates r and z of such a GRU; the new state is `r h`.
    Reset,
    /// Its gate n beside its gate z.
    New,
}

/// One step of a sequence.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RecurrentStep {
    /// What to compute.
    pub stage: Stage,
    /// As in [`Recurrence`].
    pub clip: Option<f64>,
    /// As in [`Recurrence`].
    pub batch_first: bool,
    /// The size of the batch.
    pub batch: usize,
    /// The number of steps in the tensors of the gates.
    pub steps: usize,
    /// The size of the hidden state.
    pub hidden: usize,
    /// Which of the steps.
    pub at: usize,
}

/// Hidden and cell state, `[batch, hidden]`, or their gradients; zeros if they are not there.
pub struct RecurrentState<B: Backend> {
    /// The hidden state.
    pub h: Option<FloatTensor<B>>,
    /// The cell state, which only an LSTM has.
    pub c: Option<FloatTensor<B>>,
}

impl<B: Backend> Clone for RecurrentState<B> {
    fn clone(&self) -> Self {
        Self { h: self.h.clone(), c: self.c.clone() }
    }
}

/// The parameters of a gate, or their gradients.
pub struct Gate<B: Backend> {
    /// `[d_input, hidden]`
    pub input: Option<FloatTensor<B>>,
    /// `[hidden]`
    pub input_bias: Option<FloatTensor<B>>,
    /// `[hidden, hidden]`
    pub hidden: Option<FloatTensor<B>>,
    /// `[hidden]`
    pub hidden_bias: Option<FloatTensor<B>>,
}

impl<B: Backend> Gate<B> {
    /// The sum of gradients, of those that both have.
    fn plus(self, other: Self) -> Self {
        let plus = |a: Option<FloatTensor<B>>, b| a.zip(b).map(|(a, b)| B::float_add(a, b));
        Self {
            input: plus(self.input, other.input),
            input_bias: plus(self.input_bias, other.input_bias),
            hidden: plus(self.hidden, other.hidden),
            hidden_bias: plus(self.hidden_bias, other.hidden_bias),
        }
    }

    /// Gradients of another type.
    fn cast(self, dtype: FloatDType) -> Self {
        let cast = |grad: Option<FloatTensor<B>>| grad.map(|grad| B::float_cast(grad, dtype));
        Self {
            input: cast(self.input),
            input_bias: cast(self.input_bias),
            hidden: cast(self.hidden),
            hidden_bias: cast(self.hidden_bias),
        }
    }
}

/// What a forward pass keeps of the steps for a backward pass.
#[derive(Clone, Copy)]
pub(crate) enum Keep {
    Nothing,
    /// All gates.
    Gates,
    /// The state after so many steps, and so on.
    States(usize),
}

/// What a forward pass gives.
pub(crate) struct Forward<B: Backend> {
    /// The hidden state after every step.
    pub(crate) y: FloatTensor<B>,
    /// The gates of the last chunk of steps.
    pub(crate) gates: Vec<FloatTensor<B>>,
    /// The state after the last step.
    pub(crate) state: RecurrentState<B>,
    /// The states at checkpoints.
    pub(crate) checkpoints: Vec<RecurrentState<B>>,
}

/// What a backward pass gives.
pub(crate) struct RecurrentGrads<B: Backend> {
    pub(crate) x: Option<FloatTensor<B>>,
    pub(crate) state: RecurrentState<B>,
    pub(crate) gates: Vec<Gate<B>>,
}

/// Which gradients are wanted.
#[derive(Clone)]
pub(crate) struct Wanted {
    pub(crate) x: bool,
    /// That of the initial hidden state.
    pub(crate) h: bool,
    /// Per gate, in the order of the fields of [`Gate`].
    pub(crate) gates: Vec<[bool; 4]>,
}

/// Sizes of a sequence.
#[derive(Clone, Copy)]
struct Sizes {
    batch: usize,
    steps: usize,
    hidden: usize,
}

impl Recurrence {
    /// Steps whose products with the input are made at once where none are kept: they fill a tile of a matrix product, and
    /// take no more memory than one step of a large batch.
    fn chunk(batch: usize) -> usize {
        const ROWS: usize = 32;
        (ROWS / batch.max(1)).max(1)
    }

    fn sizes(&self, sequence: &Shape, hidden: usize) -> Sizes {
        let [first, second] = [sequence[0], sequence[1]];
        let (batch, steps) = if self.batch_first { (first, second) } else { (second, first) };
        Sizes { batch, steps, hidden }
    }

    /// The axis of the steps.
    fn axis(&self) -> usize {
        usize::from(self.batch_first)
    }

    /// Steps `start..end` of a sequence.
    fn slice<B: Backend>(&self, x: FloatTensor<B>, start: usize, end: usize) -> FloatTensor<B> {
        if start == 0 && end == x.shape()[self.axis()] {
            return x;
        }
        let mut slices: Vec<Slice> = x.shape().iter().map(|&size| Slice::from(0..size)).collect();
        slices[self.axis()] = Slice::from(start..end);
        B::float_slice(x, &slices)
    }

    fn at<B: Backend>(&self, x: &FloatTensor<B>, step: usize) -> FloatTensor<B> {
        let batch = x.shape()[1 - self.axis()];
        let rows = self.slice::<B>(x.clone(), step, step + 1);
        let features = rows.shape()[2];
        B::float_reshape(rows, Shape::new([batch, features]))
    }

    /// States `[batch, hidden]`, in the order of their steps, as one sequence.
    fn sequence<B: Backend>(&self, states: Vec<FloatTensor<B>>) -> FloatTensor<B> {
        let unsqueezed = states.into_iter().map(|state| {
            let [batch, hidden] = state.shape().dims();
            let mut shape = vec![batch, hidden];
            shape.insert(self.axis(), 1);
            B::float_reshape(state, Shape::from(shape))
        });
        B::float_cat(unsqueezed.collect(), self.axis())
    }

    /// In the order of the computation.
    fn order(&self, steps: core::ops::Range<usize>) -> Vec<usize> {
        let mut order: Vec<usize> = steps.collect();
        if self.reverse {
            order.reverse();
        }
        order
    }

    fn step(&self, stage: Stage, sizes: Sizes, at: usize) -> RecurrentStep {
        let Sizes { batch, steps, hidden } = sizes;
        RecurrentStep { stage, clip: self.clip, batch_first: self.batch_first, batch, steps, hidden, at }
    }

    /// Runs over a sequence.
    pub(crate) fn forward<B: MemBackend>(
        &self,
        x: FloatTensor<B>,
        gates: &[Gate<B>],
        mut state: RecurrentState<B>,
        keep: Keep,
    ) -> Forward<B> {
        let hidden = weight(&gates[0].hidden).shape()[0];
        let Sizes { batch, steps, .. } = self.sizes(&x.shape(), hidden);
        let chunk = if matches!(keep, Keep::Gates) { steps } else { Self::chunk(batch) };
        let biases: Vec<_> = gates.iter().map(|g| [g.input_bias.clone(), g.hidden_bias.clone()]).collect();
        let mut states = vec![None; steps];
        let (mut kept, mut checkpoints) = (vec![], vec![]);
        let is_checkpoint =
            |made: usize| matches!(keep, Keep::States(every) if made > 0 && made.is_multiple_of(every));
        let mut done = 0;
        while done < steps {
            let count = chunk.min(steps - done);
            let start = if self.reverse { steps - done - count } else { done };
            let rows = matrix::<B>(self.slice::<B>(x.clone(), start, start + count));
            let mut values: Vec<_> =
                gates.iter().map(|g| B::float_matmul(rows.clone(), weight(&g.input).clone())).collect();
            drop(rows);
            let sizes = Sizes { batch, steps: count, hidden };
            for (index, at) in self.order(0..count).into_iter().enumerate() {
                if is_checkpoint(done + index) {
                    checkpoints.push(state.clone());
                }
                state = self.advance::<B>(sizes, at, &mut values, gates, &biases, state);
                states[start + at] = state.h.clone();
            }
            done += count;
            kept = values;
        }
        let states = states.into_iter().map(|state| state.expect("every step has been made")).collect();
        Forward { y: self.sequence::<B>(states), gates: kept, state, checkpoints }
    }

    fn advance<B: MemBackend>(
        &self,
        sizes: Sizes,
        at: usize,
        values: &mut [FloatTensor<B>],
        gates: &[Gate<B>],
        biases: &[[Option<FloatTensor<B>>; 2]],
        state: RecurrentState<B>,
    ) -> RecurrentState<B> {
        let product = |h: &Option<FloatTensor<B>>, gate: &Gate<B>| {
            h.as_ref().map(|h| B::float_matmul(h.clone(), weight(&gate.hidden).clone()))
        };
        if self.cell != (Cell::Gru { reset_after: false }) {
            let products = gates.iter().map(|gate| product(&state.h, gate)).collect();
            let step = self.step(Stage::Whole(self.cell), sizes, at);
            return B::recurrent_forward(&step, values, products, biases, state);
        }
        let products = gates[..2].iter().map(|gate| product(&state.h, gate)).collect();
        let step = self.step(Stage::Reset, sizes, at);
        let reset = B::recurrent_forward(&step, &mut values[..2], products, &biases[..2], state.clone());
        let products = vec![None, product(&state.h.is_some().then_some(reset.h).flatten(), &gates[2])];
        let step = self.step(Stage::New, sizes, at);
        B::recurrent_forward(&step, &mut values[1..], products, &[[None, None], biases[2].clone()], state)
    }

    /// The gradients of segments of `every` steps, from the states before them: the gates of one segment at a time are computed
    /// again.
    #[allow(clippy::too_many_arguments)] // as many as the forward pass has inputs and outputs
    pub(crate) fn backward_by_segments<B: MemBackend>(
        &self,
        every: usize,
        x: FloatTensor<B>,
        parameters: &[Gate<B>],
        starts: Vec<RecurrentState<B>>,
        dy: FloatTensor<B>,
        mut dstate: RecurrentState<B>,
        wanted: &Wanted,
    ) -> RecurrentGrads<B> {
        let steps = x.shape()[self.axis()];
        let dtype = FloatDType::from(x.dtype());
        let sums = if starts.len() > 1 { wide(dtype) } else { dtype };
        let (mut dx, mut totals) = (vec![], Vec::<Gate<B>>::new());
        for (segment, start) in starts.into_iter().enumerate().rev() {
            let (first, last) = (segment * every, steps.min((segment + 1) * every));
            let steps = if self.reverse { steps - last..steps - first } else { first..last };
            let x = self.slice::<B>(x.clone(), steps.start, steps.end);
            let dy = self.slice::<B>(dy.clone(), steps.start, steps.end);
            let values = self.forward::<B>(x.clone(), parameters, start.clone(), Keep::Gates).gates;
            let wanted = Wanted { h: wanted.h || segment > 0, ..wanted.clone() };
            let grads = self.backward::<B>(Some(x), parameters, values, start, dy, dstate, &wanted, sums);
            dx.extend(grads.x);
            dstate = grads.state;
            totals = match totals.is_empty() {
                true => grads.gates,
                false => totals.into_iter().zip(grads.gates).map(|(a, b)| a.plus(b)).collect(),
            };
        }
        if !self.reverse {
            dx.reverse();
        }
        let dx = wanted.x.then(|| B::float_cat(dx, self.axis()));
        let gates = totals.into_iter().map(|gate| gate.cast(dtype)).collect();
        RecurrentGrads { x: dx, state: dstate, gates }
    }

    /// The gradients, of the gates and the initial state; `values` are overwritten. `dstate` is the gradient of the last state.
    /// Those of parameters are `sums`: a caller who adds them up narrows the total once.
    #[allow(clippy::too_many_arguments)] // as many as the forward pass has inputs and outputs
    pub(crate) fn backward<B: MemBackend>(
        &self,
        x: Option<FloatTensor<B>>,
        parameters: &[Gate<B>],
        mut values: Vec<FloatTensor<B>>,
        state: RecurrentState<B>,
        dy: FloatTensor<B>,
        dstate: RecurrentState<B>,
        wanted: &Wanted,
        sums: FloatDType,
    ) -> RecurrentGrads<B> {
        let shape = dy.shape();
        let sizes = self.sizes(&shape, shape[2]);
        let order = self.order(0..sizes.steps);

        // The states before every step, from the gates.
        let mut before: Vec<_> = (0..sizes.steps).map(|_| None).collect();
        let mut cells = vec![];
        let mut current = state;
        for &at in &order {
            let step = self.step(Stage::Whole(self.cell), sizes, at);
            let next = match at == order[sizes.steps - 1] {
                true => RecurrentState { h: None, c: None },
                false => B::recurrent_replay(&step, &values, current.clone()),
            };
            before[at] =
                Some(current.h.unwrap_or_else(|| zeros::<B>(Shape::new([sizes.batch, sizes.hidden]), &dy)));
            cells.push(current.c);
            current = next;
        }
        let before = self.sequence::<B>(before.into_iter().map(|h| h.expect("every step")).collect());
        // What the weight of the last gate of a GRU is multiplied with, or that product.
        let mut extra = match self.cell {
            Cell::Gru { reset_after: true } => {
                let product =
                    B::float_matmul(matrix::<B>(before.clone()), weight(&parameters[2].hidden).clone());
                let product = match &parameters[2].hidden_bias {
                    Some(bias) => {
                        B::float_add(product, B::float_reshape(bias.clone(), Shape::new([1, sizes.hidden])))
                    }
                    None => product,
                };
                Some(product)
            }
            Cell::Gru { reset_after: false } => {
                Some(B::float_mul(values[0].clone(), matrix::<B>(before.clone())))
            }
            _ => None,
        };

        let RecurrentState { h: mut dh, c: mut dc } = dstate;
        for &at in order.iter().rev() {
            let dy = self.at::<B>(&dy, at);
            let total = match dh.take() {
                Some(dh) => B::float_add(dh, dy),
                None => dy,
            };
            let previous = RecurrentState { h: Some(self.at::<B>(&before, at)), c: cells.pop().flatten() };
            let grads = RecurrentState { h: Some(total), c: dc.take() };
            let first = at == order[0] && !wanted.h;
            let grads =
                self.retreat::<B>(sizes, at, &mut values, &mut extra, parameters, previous, grads, first);
            (dh, dc) = (grads.h, grads.c);
        }
        drop(dy);

        let widen = |values: &FloatTensor<B>| match FloatDType::from(values.dtype()) == sums {
            true => values.clone(),
            false => B::float_cast(values.clone(), sums),
        };
        let left = widen(&matrix::<B>(before));
        let x_rows = x.filter(|_| wanted.gates.iter().any(|[input, ..]| *input));
        let x_rows = x_rows.map(|x| widen(&matrix::<B>(x)));
        let mut dx = None;
        let mut grads = vec![];
        for (index, (parameters, wanted_of)) in parameters.iter().zip(&wanted.gates).enumerate() {
            let of_input = &values[index];
            let (left, of_hidden) = match (self.cell, index, &extra) {
                (Cell::Gru { reset_after: true }, 2, Some(extra)) => (&left, extra),
                (Cell::Gru { reset_after: false }, 2, Some(extra)) => (extra, of_input),
                _ => (&left, of_input),
            };
            if wanted.x {
                let of_gate = B::float_matmul(
                    of_input.clone(),
                    B::float_swap_dims(weight(&parameters.input).clone(), 0, 1),
                );
                dx = Some(match dx {
                    Some(dx) => B::float_add(dx, of_gate),
                    None => of_gate,
                });
            }
            let product = |left: &FloatTensor<B>, right: &FloatTensor<B>| {
                B::float_matmul(B::float_swap_dims(widen(left), 0, 1), widen(right))
            };
            let sum = |values: &FloatTensor<B>| {
                B::float_reshape(B::float_sum_dim(widen(values), 0), Shape::new([sizes.hidden]))
            };
            let [input, input_bias, hidden, hidden_bias] = *wanted_of;
            grads.push(Gate {
                input: x_rows.as_ref().filter(|_| input).map(|x| product(x, of_input)),
                input_bias: input_bias.then(|| sum(of_input)),
                hidden: hidden.then(|| product(left, of_hidden)),
                hidden_bias: hidden_bias.then(|| sum(of_hidden)),
            });
        }
        let sequence = |dx: FloatTensor<B>| {
            let features = dx.shape()[1];
            B::float_reshape(dx, Shape::new([shape[0], shape[1], features]))
        };
        RecurrentGrads { x: dx.map(sequence), state: RecurrentState { h: dh, c: dc }, gates: grads }
    }

    /// One step back: gates become gradients of what goes into them. The gradient of the state before, without that of its
    /// products if the step is the `first` one and nobody wants it.
    #[allow(clippy::too_many_arguments)]
    fn retreat<B: MemBackend>(
        &self,
        sizes: Sizes,
        at: usize,
        values: &mut [FloatTensor<B>],
        extra: &mut Option<FloatTensor<B>>,
        parameters: &[Gate<B>],
        previous: RecurrentState<B>,
        grads: RecurrentState<B>,
        first: bool,
    ) -> RecurrentState<B> {
        let product = |dh: Option<FloatTensor<B>>, of_gate: FloatTensor<B>, gate: &Gate<B>| {
            let dh_of_gate = B::float_matmul(of_gate, B::float_swap_dims(weight(&gate.hidden).clone(), 0, 1));
            Some(match dh {
                Some(dh) => B::float_add(dh_of_gate, dh),
                None => dh_of_gate,
            })
        };
        let rows = |values: &FloatTensor<B>| {
            let shape = match self.batch_first {
                true => [sizes.batch, sizes.steps, sizes.hidden],
                false => [sizes.steps, sizes.batch, sizes.hidden],
            };
            self.at::<B>(&B::float_reshape(values.clone(), Shape::new(shape)), at)
        };
        if self.cell == (Cell::Gru { reset_after: false }) {
            let step = self.step(Stage::New, sizes, at);
            let partial = B::recurrent_backward(&step, &mut values[1..], None, previous.clone(), grads);
            let reset = product(None, rows(&values[2]), &parameters[2]);
            let step = self.step(Stage::Reset, sizes, at);
            let grads = RecurrentState { h: reset, c: None };
            let mut grads = B::recurrent_backward(&step, &mut values[..1], None, previous, grads);
            if first {
                return RecurrentState { h: None, c: None };
            }
            grads.h = grads.h.zip(partial.h).map(|(h, partial)| B::float_add(h, partial));
            for index in [0, 1] {
                grads.h = product(grads.h, rows(&values[index]), &parameters[index]);
            }
            return grads;
        }
        let step = self.step(Stage::Whole(self.cell), sizes, at);
        let mut grads = B::recurrent_backward(&step, values, extra.as_mut(), previous, grads);
        if first {
            return RecurrentState { h: None, c: grads.c };
        }
        for (index, gate) in parameters.iter().enumerate() {
            let of_gate = match (index, &*extra) {
                (2, Some(extra)) => extra,
                _ => &values[index],
            };
            grads.h = product(grads.h, rows(of_gate), gate);
        }
        grads
    }
}

/// The type that many numbers are added up in.
fn wide(dtype: FloatDType) -> FloatDType {
    match dtype {
        FloatDType::F16 | FloatDType::BF16 => FloatDType::F32,
        wide => wide,
    }
}

/// A weight that the caller has kept, as it is read.
fn weight<T>(weight: &Option<T>) -> &T {
    weight.as_ref().expect("a weight that is read is kept")
}

/// A sequence as rows of features.
fn matrix<B: Backend>(x: FloatTensor<B>) -> FloatTensor<B> {
    let shape = x.shape();
    B::float_reshape(x, Shape::new([shape[0] * shape[1], shape[2]]))
}
