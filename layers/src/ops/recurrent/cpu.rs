//! The kernels of recurrent layers on a CPU: one fused loop over the rows of a step, which are cut where they are few and long.
use super::kernels::product_by_burn;
use super::{Cell, RecurrentKernels, RecurrentState, RecurrentStep, Stage};
use crate::backend::cpu::{
    CpuBackend, CpuElement,
    exp::COST,
    parallel,
    plan::{Division, Items},
};
use crate::ops::linear::LinearKernels;
use burn::backend::{TensorMetadata, tensor::FloatTensor};
use burn::tensor::DType;
use core::ops::Range;
use num_traits::Zero;

mod cells;
mod half;

use cells::{Clip, Elements, Gru, Lstm, New, Reset, Rnn};

impl<B: CpuBackend> RecurrentKernels for B {
    /// Burn's product of a single row stays on one thread.
    fn hidden_product(x: FloatTensor<B>, weight: FloatTensor<B>, transposed: bool) -> FloatTensor<B> {
        match (x.shape()[0], transposed) {
            (1, false) => B::dense(x, weight, None),
            (1, true) => B::dense_x_backward(weight, x),
            _ => product_by_burn::<B>(x, weight, transposed),
        }
    }

    fn recurrent_forward(
        step: &RecurrentStep,
        gates: &mut Vec<FloatTensor<B>>,
        products: Vec<Option<FloatTensor<B>>>,
        biases: &[[Option<FloatTensor<B>>; 2]],
        state: RecurrentState<B>,
    ) -> RecurrentState<B> {
        match gates[0].dtype() {
            DType::F32 => forward::<B, f32>(step, gates, products, biases, state),
            DType::F64 => forward::<B, f64>(step, gates, products, biases, state),
            _ => half::forward::<B>(step, gates, products, biases, state),
        }
    }

    fn recurrent_next_state(
        step: &RecurrentStep,
        gates: &[FloatTensor<B>],
        state: RecurrentState<B>,
    ) -> RecurrentState<B> {
        match gates[0].dtype() {
            DType::F32 => next_state::<B, f32>(step, gates, state),
            DType::F64 => next_state::<B, f64>(step, gates, state),
            _ => half::next_state::<B>(step, gates, state),
        }
    }

    fn recurrent_backward(
        step: &RecurrentStep,
        gates: &mut Vec<FloatTensor<B>>,
        reset_product: &mut Option<FloatTensor<B>>,
        state: RecurrentState<B>,
        grads: RecurrentState<B>,
    ) -> RecurrentState<B> {
        match gates[0].dtype() {
            DType::F32 => backward::<B, f32>(step, gates, reset_product.as_mut(), state, grads),
            DType::F64 => backward::<B, f64>(step, gates, reset_product.as_mut(), state, grads),
            _ => half::backward::<B>(step, gates, reset_product.as_mut(), state, grads),
        }
    }
}

/// A loop over the rows of a step, for the cell of any stage.
trait Visitor<A, R> {
    fn visit<const G: usize>(self, elements: impl Elements<A, G>) -> R;
}

impl RecurrentStep {
    fn with<A: CpuElement<Acc = A>, R>(&self, backward: bool, visitor: impl Visitor<A, R>) -> R {
        let clip = Clip::new(self.clip);
        match self.stage {
            Stage::Whole(Cell::Rnn) => visitor.visit::<1>(Rnn(clip)),
            Stage::Whole(Cell::Gru { .. }) => visitor.visit::<3>(Gru(clip)),
            Stage::Whole(Cell::Lstm { coupled: false }) => visitor.visit::<4>(Lstm(clip)),
            Stage::Whole(Cell::Lstm { coupled: true }) => visitor.visit::<3>(Lstm(clip)),
            Stage::Reset if backward => visitor.visit::<1>(Reset),
            Stage::Reset => visitor.visit::<2>(Reset),
            Stage::New => visitor.visit::<2>(New(clip)),
        }
    }

    /// Where the rows of this step begin, and their distance.
    fn layout(&self) -> [usize; 2] {
        match self.batch_first {
            true => [self.at * self.hidden, self.steps * self.hidden],
            false => [self.at * self.batch * self.hidden, self.hidden],
        }
    }

    /// The pieces of the rows of this step in the tensor of a gate.
    fn rows<'a, E>(&self, values: &'a [E], pieces: Pieces) -> impl Iterator<Item = &'a [E]> {
        let ([start, stride], hidden) = (self.layout(), self.hidden);
        let rows = values[start..].chunks(stride).take(self.batch);
        rows.flat_map(move |row| row[..hidden].chunks(pieces.width))
    }

    fn rows_mut<'a, E>(&self, values: &'a mut [E], pieces: Pieces) -> impl Iterator<Item = &'a mut [E]> {
        let ([start, stride], hidden) = (self.layout(), self.hidden);
        let rows = values[start..].chunks_mut(stride).take(self.batch);
        rows.flat_map(move |row| row[..hidden].chunks_mut(pieces.width))
    }

    /// Hidden and cell state.
    fn state_slices<B: CpuBackend, E: CpuElement>(&self, state: RecurrentState<B>) -> [Slices<B, E>; 2] {
        let len = self.batch * self.hidden;
        [Slices::new([state.h], len), Slices::new([state.c], if self.has_cell() { len } else { 0 })]
    }

    /// Zeros for hidden and cell state.
    fn zero_states<E: CpuElement>(&self) -> [Vec<E>; 2] {
        [true, self.has_cell()].map(|there| vec![E::zero(); if there { self.batch * self.hidden } else { 0 }])
    }

    fn state<B: CpuBackend, E: CpuElement>(&self, [h, c]: [Vec<E>; 2]) -> RecurrentState<B> {
        let tensor = |values| B::from_vec(values, self.state_shape());
        RecurrentState { h: Some(tensor(h)), c: self.has_cell().then(|| tensor(c)) }
    }

    /// Pieces of the rows of a state; empty ones if there is no state.
    fn rows_of<'a, E>(&self, state: &'a mut [E], pieces: Pieces) -> impl FnMut() -> &'a mut [E] {
        let rows = state.chunks_exact_mut(self.hidden);
        let mut pieces = rows.flat_map(move |row| row.chunks_mut(pieces.width));
        move || pieces.next().unwrap_or_default()
    }

    /// The first element of every piece, counted from the first one of a state.
    fn starts(&self, pieces: Pieces) -> impl Iterator<Item = usize> {
        let hidden = self.hidden;
        let of_row = move |row: usize| (0..hidden).step_by(pieces.width).map(move |at| row * hidden + at);
        (0..self.batch).flat_map(of_row)
    }

    /// The loop over rows, which are cut between some elements, and how it is divided among so many threads.
    fn division(&self, gates: usize, threads: usize) -> (Items, Division) {
        let work = parallel::Work::of([COST, gates, self.batch, self.hidden]);
        let steps = self.hidden.div_ceil(STEP).max(1);
        let items = Items { steps, ..Items::of([self.batch, self.hidden], work) };
        let rows = if work.is_worth_it() { self.batch.div_ceil(threads) } else { self.batch };
        (items, items.division_from(rows.max(1), threads))
    }

    /// How the rows are divided among threads.
    fn pieces(&self, gates: usize) -> Pieces {
        let (items, division) = self.division(gates, parallel::threads());
        let (width, task) = match division {
            Division::Whole(rows) => (self.hidden, rows),
            Division::Cut(steps) => (steps * STEP, 1),
        };
        Pieces { width: width.max(1), task, work: items.work }
    }
}

/// Elements of a row between which it can be cut: enough for the vectors of several gates.
const STEP: usize = 64;

/// How the rows of a step are divided.
#[derive(Clone, Copy)]
struct Pieces {
    /// Elements of a piece of a row.
    width: usize,
    /// Pieces of a task.
    task: usize,
    work: parallel::Work,
}

impl Pieces {
    /// Calls `f` for every piece, on several threads if that pays.
    fn each<T: Send>(self, mut pieces: Vec<T>, f: impl Fn(&mut T) + Send + Sync) {
        // Behind a reference, the loops of each of the many cells are compiled once, not once per place that calls them.
        let f: &(dyn Fn(&mut T) + Send + Sync) = &|piece| parallel::vectorized(|| f(piece));
        parallel::chunks_mut(&mut pieces, self.task, self.work, |_, pieces| pieces.iter_mut().for_each(f));
    }
}

/// Tensors as slices; those that are not given are zeros.
struct Slices<B: CpuBackend, E> {
    tensors: Vec<Option<FloatTensor<B>>>,
    zeros: Vec<E>,
}

impl<B: CpuBackend, E: CpuElement> Slices<B, E> {
    /// Tensors of `len` elements.
    fn new(tensors: impl IntoIterator<Item = Option<FloatTensor<B>>>, len: usize) -> Self {
        let tensors: Vec<_> = tensors.into_iter().map(|tensor| tensor.map(B::contiguous)).collect();
        let zeros = if tensors.iter().all(Option::is_some) { vec![] } else { vec![E::zero(); len] };
        Self { tensors, zeros }
    }

    /// Some elements of a state; none if there is no state.
    fn piece(&self, elements: Range<usize>) -> &[E] {
        self.get(0).get(elements).unwrap_or_default()
    }

    fn get(&self, index: usize) -> &[E] {
        self.tensors[index].as_ref().map_or(&self.zeros, |tensor| B::as_slice(tensor))
    }
}

fn forward<B: CpuBackend, E: CpuElement>(
    step: &RecurrentStep,
    gates: &mut [FloatTensor<B>],
    products: Vec<Option<FloatTensor<B>>>,
    biases: &[[Option<FloatTensor<B>>; 2]],
    state: RecurrentState<B>,
) -> RecurrentState<B> {
    let biases = biases.iter().flatten().cloned();
    step.with(
        false,
        Forward::<B, E> {
            step,
            gates,
            products: Slices::new(products, step.batch * step.hidden),
            biases: Slices::new(biases, step.hidden),
            state: step.state_slices(state),
        },
    )
}

struct Forward<'a, B: CpuBackend, E> {
    step: &'a RecurrentStep,
    gates: &'a mut [FloatTensor<B>],
    products: Slices<B, E>,
    biases: Slices<B, E>,
    state: [Slices<B, E>; 2],
}

impl<B: CpuBackend, E: CpuElement> Visitor<E::Acc, RecurrentState<B>> for Forward<'_, B, E> {
    fn visit<const G: usize>(self, elements: impl Elements<E::Acc, G>) -> RecurrentState<B> {
        let Self { step, gates, products, biases, state } = self;
        let pieces = step.pieces(G);
        let mut next = step.zero_states();
        let [mut h, mut c] = next.each_mut().map(|state| step.rows_of(state, pieces));
        let mut values: Vec<_> =
            gates.iter_mut().map(|gate| step.rows_mut(B::as_slice_mut::<E>(gate), pieces)).collect();
        let rows: Vec<_> = step
            .starts(pieces)
            .map(|start| {
                let gates: [&mut [E]; G] =
                    core::array::from_fn(|gate| values[gate].next().expect("a row per batch item"));
                (start, gates, h(), c())
            })
            .collect();
        drop((h, c));
        let products: [&[E]; G] = core::array::from_fn(|gate| products.get(gate));
        let biases: [[&[E]; 2]; G] =
            core::array::from_fn(|gate| [0, 1].map(|side| biases.get(2 * gate + side)));
        pieces.each(rows, |(start, gates, h, c)| {
            let (first, elements_of) = (*start % step.hidden, *start..*start + h.len());
            let products = products.map(|products| &products[elements_of.clone()]);
            let biases = biases.map(|sides| sides.map(|bias| &bias[first..]));
            let state = state.each_ref().map(|state| state.piece(elements_of.clone()));
            advance(elements, gates, products, biases, state, [h, c]);
        });
        step.state(next)
    }
}

/// A piece of a row of a step.
#[inline(always)]
fn advance<E: CpuElement, const G: usize>(
    elements: impl Elements<E::Acc, G>,
    gates: &mut [&mut [E]; G],
    products: [&[E]; G],
    biases: [[&[E]; 2]; G],
    state: [&[E]; 2],
    next: [&mut [E]; 2],
) {
    let len = next[0].len();
    let [next_h, next_c] = next;
    let mut gates = gates.each_mut().map(|gate| &mut gate[..len]);
    let products = products.map(|p| &p[..len]);
    let biases = biases.map(|sides| sides.map(|bias| &bias[..len]));
    let has = [true, elements_have_cell(elements)];
    for at in 0..len {
        let input = core::array::from_fn(|g| gates[g][at].widen() + biases[g][0][at].widen());
        let hidden = core::array::from_fn(|g| products[g][at].widen() + biases[g][1][at].widen());
        // Rounded, as the backward pass will read them.
        let values = elements.activate(input, hidden).map(E::narrow);
        let [h, c] = elements.update(values.map(E::widen), read(state, has, at));
        (0..G).for_each(|g| gates[g][at] = values[g]);
        next_h[at] = E::narrow(h);
        if has[1] {
            next_c[at] = E::narrow(c);
        }
    }
}

fn elements_have_cell<A, const G: usize, T: Elements<A, G>>(_: T) -> bool {
    T::CELL
}

fn elements_have_extra<A, const G: usize, T: Elements<A, G>>(_: T) -> bool {
    T::EXTRA
}

/// Hidden and cell state of an element.
#[inline(always)]
fn read<E: CpuElement>(state: [&[E]; 2], has: [bool; 2], at: usize) -> [E::Acc; 2] {
    let [h, c] = state;
    let c = if has[1] { c[at].widen() } else { <E::Acc as Zero>::zero() };
    [h[at].widen(), c]
}

fn next_state<B: CpuBackend, E: CpuElement>(
    step: &RecurrentStep,
    gates: &[FloatTensor<B>],
    state: RecurrentState<B>,
) -> RecurrentState<B> {
    let state = step.state_slices(state);
    step.with(false, NextState::<B, E> { step, gates, state })
}

struct NextState<'a, B: CpuBackend, E> {
    step: &'a RecurrentStep,
    gates: &'a [FloatTensor<B>],
    state: [Slices<B, E>; 2],
}

impl<B: CpuBackend, E: CpuElement> Visitor<E::Acc, RecurrentState<B>> for NextState<'_, B, E> {
    fn visit<const G: usize>(self, elements: impl Elements<E::Acc, G>) -> RecurrentState<B> {
        let Self { step, gates, state } = self;
        let pieces = step.pieces(1);
        let mut next = step.zero_states();
        let [mut h, mut c] = next.each_mut().map(|state| step.rows_of(state, pieces));
        let mut values: Vec<_> = gates.iter().map(|gate| step.rows(B::as_slice::<E>(gate), pieces)).collect();
        let rows: Vec<_> = step
            .starts(pieces)
            .map(|start| {
                let gates: [&[E]; G] =
                    core::array::from_fn(|gate| values[gate].next().expect("a row per batch item"));
                (start, gates, h(), c())
            })
            .collect();
        drop((h, c));
        let has = [true, elements_have_cell(elements)];
        pieces.each(rows, |(start, gates, h, c)| {
            let state = state.each_ref().map(|state| state.piece(*start..*start + h.len()));
            let gates = gates.map(|gate| &gate[..h.len()]);
            for (at, next_h) in h.iter_mut().enumerate() {
                let next = elements.update(gates.map(|gate| gate[at].widen()), read(state, has, at));
                let [h, next_c] = next.map(E::narrow);
                *next_h = h;
                if has[1] {
                    c[at] = next_c;
                }
            }
        });
        step.state(next)
    }
}

fn backward<B: CpuBackend, E: CpuElement>(
    step: &RecurrentStep,
    gates: &mut [FloatTensor<B>],
    extra: Option<&mut FloatTensor<B>>,
    state: RecurrentState<B>,
    grads: RecurrentState<B>,
) -> RecurrentState<B> {
    let (state, grads) = (step.state_slices(state), step.state_slices(grads));
    step.with(true, Backward::<B, E> { step, gates, extra, state, grads })
}

struct Backward<'a, B: CpuBackend, E> {
    step: &'a RecurrentStep,
    gates: &'a mut [FloatTensor<B>],
    extra: Option<&'a mut FloatTensor<B>>,
    state: [Slices<B, E>; 2],
    grads: [Slices<B, E>; 2],
}

impl<B: CpuBackend, E: CpuElement> Visitor<E::Acc, RecurrentState<B>> for Backward<'_, B, E> {
    fn visit<const G: usize>(self, elements: impl Elements<E::Acc, G>) -> RecurrentState<B> {
        let Self { step, gates, extra, state, grads } = self;
        let pieces = step.pieces(G);
        let mut before = grads.map(|grads| grads.get(0).to_vec());
        let [mut dh, mut dc] = before.each_mut().map(|grads| step.rows_of(grads, pieces));
        let mut values: Vec<_> =
            gates.iter_mut().map(|gate| step.rows_mut(B::as_slice_mut::<E>(gate), pieces)).collect();
        let mut extra = extra.map(|extra| step.rows_mut(B::as_slice_mut::<E>(extra), pieces));
        let rows: Vec<_> = step
            .starts(pieces)
            .map(|start| {
                let gates: [&mut [E]; G] =
                    core::array::from_fn(|gate| values[gate].next().expect("a row per batch item"));
                let extra = extra.as_mut().and_then(Iterator::next).unwrap_or_default();
                (start, gates, extra, dh(), dc())
            })
            .collect();
        drop((dh, dc));
        pieces.each(rows, |(start, gates, extra, dh, dc)| {
            let state = state.each_ref().map(|state| state.piece(*start..*start + dh.len()));
            retreat(elements, gates, extra, state, [dh, dc]);
        });
        step.state(before)
    }
}

/// A piece of a row of a step back.
#[inline(always)]
fn retreat<E: CpuElement, const G: usize>(
    elements: impl Elements<E::Acc, G>,
    gates: &mut [&mut [E]; G],
    extra: &mut [E],
    state: [&[E]; 2],
    grads: [&mut [E]; 2],
) {
    let [dh, dc] = grads;
    let len = dh.len();
    let mut gates = gates.each_mut().map(|gate| &mut gate[..len]);
    let has = [true, elements_have_cell(elements)];
    let has_extra = elements_have_extra(elements);
    for at in 0..len {
        let values = core::array::from_fn(|g| gates[g][at].widen());
        let of_state = read([dh, dc], has, at);
        let of_product = if has_extra { extra[at].widen() } else { <E::Acc as Zero>::zero() };
        let (of_gates, of_product, [h, c]) =
            elements.gradients(values, of_product, read(state, has, at), of_state);
        (0..G).for_each(|g| gates[g][at] = E::narrow(of_gates[g]));
        if has_extra {
            extra[at] = E::narrow(of_product);
        }
        dh[at] = E::narrow(h);
        if has[1] {
            dc[at] = E::narrow(c);
        }
    }
}

#[cfg(test)]
pub(crate) mod counting {
    use super::*;

    /// The loop over the rows of a step of an LSTM, for so many threads.
    pub(crate) fn division([batch, hidden]: [usize; 2], threads: usize) -> (Items, Division) {
        let stage = Stage::Whole(Cell::Lstm { coupled: false });
        let step = RecurrentStep { stage, clip: None, batch_first: true, batch, steps: 1, hidden, at: 0 };
        step.division(4, threads)
    }
}
