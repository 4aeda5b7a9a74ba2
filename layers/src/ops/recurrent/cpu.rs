//! The kernels of recurrent layers on a CPU: one fused loop over the rows of a step.
use super::{Cell, RecurrentKernels, RecurrentState, RecurrentStep, Stage};
use crate::backend::cpu::{CpuBackend, CpuElement, exp::COST, parallel};
use burn::backend::{TensorMetadata, tensor::FloatTensor};
use burn::tensor::DType;
use num_traits::Zero;

mod cells;
mod half;

use cells::{Clip, Elements, Gru, Lstm, New, Reset, Rnn};

impl<B: CpuBackend> RecurrentKernels for B {
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

    /// The rows of this step in the tensor of a gate.
    fn rows<'a, E>(&self, values: &'a [E]) -> impl Iterator<Item = &'a [E]> {
        let ([start, stride], hidden) = (self.layout(), self.hidden);
        values[start..].chunks(stride).take(self.batch).map(move |row| &row[..hidden])
    }

    fn rows_mut<'a, E>(&self, values: &'a mut [E]) -> impl Iterator<Item = &'a mut [E]> {
        let ([start, stride], hidden) = (self.layout(), self.hidden);
        values[start..].chunks_mut(stride).take(self.batch).map(move |row| &mut row[..hidden])
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

    /// Rows of a state; empty ones if there is no state.
    fn rows_of<'a, E>(&self, state: &'a mut [E]) -> impl FnMut() -> &'a mut [E] {
        let mut rows = state.chunks_exact_mut(self.hidden);
        move || rows.next().unwrap_or_default()
    }

    /// Calls `f` for every row, on several threads if that pays.
    fn for_rows<T: Send>(&self, mut rows: Vec<T>, gates: usize, f: impl Fn(&mut T) + Send + Sync) {
        let work = parallel::Work::of([COST, gates, self.batch, self.hidden]);
        let task = parallel::items_per_thread(self.batch, work);
        // Behind a reference, the loops of each of the many cells are compiled once, not once per place that calls them.
        let f: &(dyn Fn(&mut T) + Send + Sync) = &|row| parallel::vectorized(|| f(row));
        parallel::chunks_mut(&mut rows, task, work, |_, rows| rows.iter_mut().for_each(f));
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

    /// Row number `row`, of `len` elements; empty if there are not that many rows.
    fn row(&self, row: usize, len: usize) -> &[E] {
        self.get(0).get(row * len..(row + 1) * len).unwrap_or_default()
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
        let hidden = step.hidden;
        let mut next = step.zero_states();
        let [mut h, mut c] = next.each_mut().map(|state| step.rows_of(state));
        let mut values: Vec<_> =
            gates.iter_mut().map(|gate| step.rows_mut(B::as_slice_mut::<E>(gate))).collect();
        let rows: Vec<_> = (0..step.batch)
            .map(|row| {
                let gates: [&mut [E]; G] =
                    core::array::from_fn(|gate| values[gate].next().expect("a row per batch item"));
                (row, gates, h(), c())
            })
            .collect();
        drop((h, c));
        let products: [&[E]; G] = core::array::from_fn(|gate| products.get(gate));
        let biases: [[&[E]; 2]; G] =
            core::array::from_fn(|gate| [0, 1].map(|side| biases.get(2 * gate + side)));
        step.for_rows(rows, G, |(row, gates, h, c)| {
            let products = products.map(|products| &products[*row * hidden..(*row + 1) * hidden]);
            let state = state.each_ref().map(|state| state.row(*row, hidden));
            advance(elements, gates, products, biases, state, [h, c]);
        });
        step.state(next)
    }
}

/// One row of a step.
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
        let hidden = step.hidden;
        let mut next = step.zero_states();
        let [mut h, mut c] = next.each_mut().map(|state| step.rows_of(state));
        let mut values: Vec<_> = gates.iter().map(|gate| step.rows(B::as_slice::<E>(gate))).collect();
        let rows: Vec<_> = (0..step.batch)
            .map(|row| {
                let gates: [&[E]; G] =
                    core::array::from_fn(|gate| values[gate].next().expect("a row per batch item"));
                (row, gates, h(), c())
            })
            .collect();
        drop((h, c));
        let has = [true, elements_have_cell(elements)];
        step.for_rows(rows, 1, |(row, gates, h, c)| {
            let state = state.each_ref().map(|state| state.row(*row, hidden));
            let gates = gates.map(|gate| &gate[..hidden]);
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
        let hidden = step.hidden;
        let mut before = grads.map(|grads| grads.get(0).to_vec());
        let [mut dh, mut dc] = before.each_mut().map(|grads| step.rows_of(grads));
        let mut values: Vec<_> =
            gates.iter_mut().map(|gate| step.rows_mut(B::as_slice_mut::<E>(gate))).collect();
        let mut extra = extra.map(|extra| step.rows_mut(B::as_slice_mut::<E>(extra)));
        let rows: Vec<_> = (0..step.batch)
            .map(|row| {
                let gates: [&mut [E]; G] =
                    core::array::from_fn(|gate| values[gate].next().expect("a row per batch item"));
                let extra = extra.as_mut().and_then(Iterator::next).unwrap_or_default();
                (row, gates, extra, dh(), dc())
            })
            .collect();
        drop((dh, dc));
        step.for_rows(rows, G, |(row, gates, extra, dh, dc)| {
            let state = state.each_ref().map(|state| state.row(*row, hidden));
            retreat(elements, gates, extra, state, [dh, dc]);
        });
        step.state(before)
    }
}

/// One row of a step back.
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
