//! The backward pass of recurrent layers, for any backend: the loop back through the steps.
use super::sequence::{ForBackward, GateParameters, Sizes, matrix, weight, with_some};
use super::{Cell, Recurrence, RecurrentKernels, RecurrentState, Stage};
use crate::backend::{widen, zeros};
use burn::backend::{Backend, TensorMetadata, tensor::FloatTensor};
use burn::tensor::Shape;

/// Consecutive steps that the backward pass goes back through: all steps, or with checkpoints, those between two of them.
pub(super) struct Interval<B: Backend> {
    /// The input, if it is read.
    pub x: Option<FloatTensor<B>>,
    /// The state before the first step.
    pub start: RecurrentState<B>,
    /// The gradient of the hidden state after every step, as far as it comes from the output.
    pub dy: FloatTensor<B>,
    /// The gradient of the state after the last step, as far as it comes from elsewhere.
    pub dlast: RecurrentState<B>,
}

/// The result of the backward pass.
pub(super) struct Gradients<B: Backend> {
    pub x: Option<FloatTensor<B>>,
    /// The gradient of the state before the first step.
    pub start: RecurrentState<B>,
    pub gates: Vec<GateParameters<B>>,
}

/// Which gradients are wanted.
#[derive(Clone)]
pub(super) struct Wanted {
    pub x: bool,
    /// Whether that of the initial hidden state is.
    pub h: bool,
    /// Per gate, in the order of the fields of [`GateParameters`].
    pub gates: Vec<[bool; 4]>,
}

impl Recurrence {
    /// The gradients, by intervals of `every` steps, from the state before each. The gates of one interval at a time are recomputed.
    /// Gradients of parameters are summed in f32 at least, and narrowed once.
    pub(super) fn backward_by_intervals<B: RecurrentKernels>(
        &self,
        every: usize,
        whole: Interval<B>,
        checkpoints: Vec<RecurrentState<B>>,
        parameters: &[GateParameters<B>],
        wanted: &Wanted,
    ) -> Gradients<B> {
        let Interval { x, start, dy, mut dlast } = whole;
        let x = x.expect("the input of what is computed again is kept");
        let (steps, dtype) = (x.shape()[self.axis()], x.dtype());
        let is_sum = !checkpoints.is_empty();
        let starts: Vec<_> = core::iter::once(start).chain(checkpoints).collect();
        let (mut dx, mut totals) = (vec![], Vec::<GateParameters<B>>::new());
        for (interval, start) in starts.into_iter().enumerate().rev() {
            let (first, last) = (interval * every, steps.min((interval + 1) * every));
            let steps = if self.reverse { steps - last..steps - first } else { first..last };
            let x = self.slice::<B>(x.clone(), steps.start, steps.end);
            let dy = self.slice::<B>(dy.clone(), steps.start, steps.end);
            let gates = self.forward::<B>(x.clone(), parameters, start.clone(), ForBackward::Gates).gates;
            let wanted = Wanted { h: wanted.h || interval > 0, ..wanted.clone() };
            let interval = Interval { x: Some(x), start, dy, dlast };
            let grads = self.backward_part::<B>(interval, gates, parameters, &wanted, is_sum);
            dx.extend(grads.x);
            dlast = grads.start;
            totals = match totals.is_empty() {
                true => grads.gates,
                false => totals.into_iter().zip(grads.gates).map(|(a, b)| a.plus(b)).collect(),
            };
        }
        if !self.reverse {
            dx.reverse();
        }
        let dx = wanted.x.then(|| B::float_cat(dx, self.axis()));
        let narrow = |total: GateParameters<B>| total.map(|grad| B::float_cast(grad, dtype.into()));
        let gates = if is_sum { totals.into_iter().map(narrow).collect() } else { totals };
        Gradients { x: dx, start: dlast, gates }
    }

    /// The gradients, from the gates of all steps, which are overwritten.
    pub(super) fn backward<B: RecurrentKernels>(
        &self,
        whole: Interval<B>,
        gates: Vec<FloatTensor<B>>,
        parameters: &[GateParameters<B>],
        wanted: &Wanted,
    ) -> Gradients<B> {
        self.backward_part::<B>(whole, gates, parameters, wanted, false)
    }

    /// The gradients of an interval. `of_sum`: those of parameters are part of a sum, and left in f32.
    fn backward_part<B: RecurrentKernels>(
        &self,
        interval: Interval<B>,
        gates: Vec<FloatTensor<B>>,
        parameters: &[GateParameters<B>],
        wanted: &Wanted,
        of_sum: bool,
    ) -> Gradients<B> {
        let Interval { x, start, dy, dlast } = interval;
        let shape = dy.shape();
        let sizes = self.sizes(&shape, shape[2]);
        let order = self.order(0..sizes.steps);
        let reads_hidden = wanted.gates.iter().any(|[_, _, hidden, _]| *hidden);
        let (states, mut cells) = self.states_before::<B>(sizes, &order, &gates, start, &dy, reads_hidden);
        let gated = self.gated::<B>(&gates, states.as_ref(), parameters);
        let mut pass = Pass { recurrence: *self, sizes, parameters, gates, gated };

        let RecurrentState { h: mut dh, c: mut dc } = dlast;
        for &at in order.iter().rev() {
            let dy = self.at::<B>(&dy, at);
            let total = match dh.take() {
                Some(dh) => B::float_add(dh, dy),
                None => dy,
            };
            let h = states.as_ref().map(|states| self.at::<B>(states, at));
            let before = RecurrentState { h, c: cells.pop().flatten() };
            let grads = RecurrentState { h: Some(total), c: dc.take() };
            let unwanted = at == order[0] && !wanted.h;
            RecurrentState { h: dh, c: dc } = pass.step_back(at, before, grads, unwanted);
        }
        drop(dy);
        let (dx, gates) = pass.gradients(x, states, wanted, of_sum);
        let sequence = |dx: FloatTensor<B>| {
            let features = dx.shape()[1];
            B::float_reshape(dx, Shape::new([shape[0], shape[1], features]))
        };
        Gradients { x: dx.map(sequence), start: RecurrentState { h: dh, c: dc }, gates }
    }

    /// The states before every step, recomputed from the gates: the hidden states as a sequence, if a GRU or the gradient of a weight
    /// reads them; the cell states in the order in which steps are computed.
    fn states_before<B: RecurrentKernels>(
        &self,
        sizes: Sizes,
        order: &[usize],
        gates: &[FloatTensor<B>],
        start: RecurrentState<B>,
        like: &FloatTensor<B>,
        reads_hidden: bool,
    ) -> (Option<FloatTensor<B>>, Vec<Option<FloatTensor<B>>>) {
        let reads_hidden = reads_hidden || matches!(self.cell, Cell::Gru { .. });
        if !reads_hidden && self.cell == Cell::Rnn {
            return (None, vec![]);
        }
        let mut states = vec![None; sizes.steps];
        let mut cells = vec![];
        let mut current = start;
        for (index, &at) in order.iter().enumerate() {
            let step = self.step(Stage::Whole(self.cell), sizes, at);
            let next = match index + 1 == sizes.steps {
                true => RecurrentState { h: None, c: None },
                false => B::recurrent_next_state(&step, gates, current.clone()),
            };
            let nothing = || zeros::<B>(Shape::new([sizes.batch, sizes.hidden]), like);
            states[at] = reads_hidden.then(|| current.h.unwrap_or_else(nothing));
            cells.push(current.c);
            current = next;
        }
        let states: Option<Vec<_>> = states.into_iter().collect();
        (states.map(|states| self.sequence::<B>(states)), cells)
    }

    /// In a GRU that resets after the product, what r gates: `h U_n + d_n`; in one that resets before it, what is multiplied with U_n:
    /// `r h`.
    fn gated<B: Backend>(
        &self,
        gates: &[FloatTensor<B>],
        states: Option<&FloatTensor<B>>,
        parameters: &[GateParameters<B>],
    ) -> Option<FloatTensor<B>> {
        let (Cell::Gru { reset_after }, Some(states)) = (self.cell, states) else { return None };
        let states = matrix::<B>(states.clone());
        if !reset_after {
            return Some(B::float_mul(gates[0].clone(), states));
        }
        let new = &parameters[2];
        let product = B::float_matmul(states, weight(&new.hidden).clone());
        Some(match &new.hidden_bias {
            Some(bias) => {
                let row = Shape::new([1, product.shape()[1]]);
                B::float_add(product, B::float_reshape(bias.clone(), row))
            }
            None => product,
        })
    }
}

/// A backward pass over the steps, in which every gate becomes the gradient of what goes into it.
struct Pass<'a, B: Backend> {
    recurrence: Recurrence,
    sizes: Sizes,
    parameters: &'a [GateParameters<B>],
    gates: Vec<FloatTensor<B>>,
    /// See [`Recurrence::gated`]; a product becomes its gradient.
    gated: Option<FloatTensor<B>>,
}

impl<B: RecurrentKernels> Pass<'_, B> {
    /// The rows of a step.
    fn rows(&self, values: &FloatTensor<B>, at: usize) -> FloatTensor<B> {
        let Sizes { batch, steps, hidden } = self.sizes;
        let shape = if self.recurrence.batch_first { [batch, steps, hidden] } else { [steps, batch, hidden] };
        self.recurrence.at::<B>(&B::float_reshape(values.clone(), Shape::new(shape)), at)
    }

    /// The gradient of the product of the hidden state with the weight of a gate.
    fn product_gradient(&self, gate: usize) -> &FloatTensor<B> {
        match (self.recurrence.cell, gate, &self.gated) {
            (Cell::Gru { reset_after: true }, 2, Some(product)) => product,
            _ => &self.gates[gate],
        }
    }

    /// `dh` plus the gradient of the hidden state through its product with the weight of a gate.
    fn through_product(&self, dh: Option<FloatTensor<B>>, gate: usize, at: usize) -> Option<FloatTensor<B>> {
        let gradient = self.rows(self.product_gradient(gate), at);
        let weight = weight(&self.parameters[gate].hidden).clone();
        let through = B::hidden_product(gradient, weight, true);
        Some(match dh {
            Some(dh) => B::float_add(through, dh),
            None => through,
        })
    }

    /// One step back: the gradient of the state before it, without the part through the products if it is `unwanted`.
    fn step_back(
        &mut self,
        at: usize,
        before: RecurrentState<B>,
        grads: RecurrentState<B>,
        unwanted: bool,
    ) -> RecurrentState<B> {
        let recurrence = self.recurrence;
        let step = |stage| recurrence.step(stage, self.sizes, at);
        if recurrence.cell == (Cell::Gru { reset_after: false }) {
            let (new, reset) = (step(Stage::New), step(Stage::Reset));
            let direct = with_some(&mut self.gates, 1..3, |gates| {
                B::recurrent_backward(&new, gates, &mut None, before.clone(), grads)
            });
            let grads = RecurrentState { h: self.through_product(None, 2, at), c: None };
            let grads = with_some(&mut self.gates, 0..1, |gates| {
                B::recurrent_backward(&reset, gates, &mut None, before, grads)
            });
            if unwanted {
                return RecurrentState { h: None, c: None };
            }
            let dh = grads.h.zip(direct.h).map(|(dh, direct)| B::float_add(dh, direct));
            let dh = [0, 1].into_iter().fold(dh, |dh, gate| self.through_product(dh, gate, at));
            return RecurrentState { h: dh, c: None };
        }
        let step = step(Stage::Whole(recurrence.cell));
        let grads = B::recurrent_backward(&step, &mut self.gates, &mut self.gated, before, grads);
        let dh = match unwanted {
            true => None,
            false => (0..self.gates.len()).fold(grads.h, |dh, gate| self.through_product(dh, gate, at)),
        };
        RecurrentState { h: dh, c: grads.c }
    }

    /// The gradients of the input and of the parameters, from those of what goes into the gates.
    fn gradients(
        self,
        x: Option<FloatTensor<B>>,
        states: Option<FloatTensor<B>>,
        wanted: &Wanted,
        of_sum: bool,
    ) -> (Option<FloatTensor<B>>, Vec<GateParameters<B>>) {
        let summand = |values: FloatTensor<B>| if of_sum { widen::<B>(values) } else { values };
        let product = |left: &FloatTensor<B>, right: &FloatTensor<B>| {
            B::float_matmul(B::float_swap_dims(summand(left.clone()), 0, 1), summand(right.clone()))
        };
        let sum = |values: &FloatTensor<B>| {
            let sum = B::float_sum_dim(summand(values.clone()), 0);
            B::float_reshape(sum, Shape::new([self.sizes.hidden]))
        };
        let x = x.filter(|_| wanted.gates.iter().any(|[input, ..]| *input));
        let x = x.map(|x| summand(matrix::<B>(x)));
        let states = states.map(|states| summand(matrix::<B>(states)));
        let mut dx = None;
        let gates =
            wanted.gates.iter().enumerate().map(|(gate, &[input, input_bias, hidden, hidden_bias])| {
                let gradient = &self.gates[gate];
                let of_product = self.product_gradient(gate);
                let factor = match (self.recurrence.cell, gate, &self.gated) {
                    (Cell::Gru { reset_after: false }, 2, Some(reset_state)) => Some(reset_state),
                    _ => states.as_ref(),
                };
                if wanted.x {
                    let weight = weight(&self.parameters[gate].input).clone();
                    let through = B::float_matmul(gradient.clone(), B::float_swap_dims(weight, 0, 1));
                    dx = Some(match dx.take() {
                        Some(dx) => B::float_add(dx, through),
                        None => through,
                    });
                }
                GateParameters {
                    input: x.as_ref().filter(|_| input).map(|x| product(x, gradient)),
                    input_bias: input_bias.then(|| sum(gradient)),
                    hidden: factor.filter(|_| hidden).map(|factor| product(factor, of_product)),
                    hidden_bias: hidden_bias.then(|| sum(of_product)),
                }
            });
        let gates = gates.collect();
        (dx, gates)
    }
}
