//! One step of a recurrent layer, element by element.
use super::exp::sigmoid;
use super::{CpuBackend, CpuElement, parallel};
use crate::backend::{Cell, RecurrentState, RecurrentStep, Stage};
use burn::backend::tensor::FloatTensor;
use burn::tensor::Shape;
use num_traits::{One, Zero};

/// How much longer an exponential takes than reading an element, in loops for vectors.
const COST: usize = 4;

/// `1 - x`
#[inline(always)]
fn rest<A: CpuElement>(x: A) -> A {
    <A as One>::one() - x
}

/// The bounds of a state.
#[derive(Clone, Copy)]
struct Clip<A>(A);

impl<A: CpuElement> Clip<A> {
    fn new(clip: Option<f64>) -> Self {
        Self(clip.map_or(A::infinity(), <A as CpuElement>::from_f64))
    }

    #[inline(always)]
    fn apply(self, x: A) -> A {
        let x = if x > self.0 { self.0 } else { x };
        if x < -self.0 { -self.0 } else { x }
    }

    /// The gradient of a value that was clipped.
    #[inline(always)]
    fn gradient(self, x: A, dy: A) -> A {
        if x > self.0 || x < -self.0 { <A as Zero>::zero() } else { dy }
    }
}

/// Functions of elements that make up a stage of `G` gates.
trait Elements<A, const G: usize>: Copy + Send + Sync {
    /// Whether there is a cell state. Where there is none, it is read as zero and not written.
    const CELL: bool = false;
    /// Whether there is an `extra`.
    const EXTRA: bool = false;

    /// The gates, from the products with the input and with the hidden state.
    fn activate(self, input: [A; G], hidden: [A; G]) -> [A; G];
    /// The next state, `[h, c]`.
    fn update(self, gates: [A; G], state: [A; 2]) -> [A; 2];
    /// Gradients of what goes into the gates, and of the state; `extra` and its gradient where there is one.
    fn gradients(self, gates: [A; G], extra: A, state: [A; 2], grads: [A; 2]) -> ([A; G], A, [A; 2]);
}

#[derive(Clone, Copy)]
struct Rnn<A>(Clip<A>);

impl<A: CpuElement<Acc = A>> Elements<A, 1> for Rnn<A> {
    #[inline(always)]
    fn activate(self, [x]: [A; 1], [h]: [A; 1]) -> [A; 1] {
        [(x + h).fast_tanh()]
    }
    #[inline(always)]
    fn update(self, [value]: [A; 1], [_, c]: [A; 2]) -> [A; 2] {
        [self.0.apply(value), c]
    }
    #[inline(always)]
    fn gradients(self, [value]: [A; 1], extra: A, _: [A; 2], [dh, dc]: [A; 2]) -> ([A; 1], A, [A; 2]) {
        let da = self.0.gradient(value, dh) * rest(value * value);
        ([da], extra, [<A as Zero>::zero(), dc])
    }
}

/// `(1 - z) n + z h`
#[inline(always)]
fn mix<A: CpuElement>(z: A, n: A, h: A) -> A {
    n * rest(z) + z * h
}

#[derive(Clone, Copy)]
struct Gru<A>(Clip<A>);

impl<A: CpuElement<Acc = A>> Elements<A, 3> for Gru<A> {
    const EXTRA: bool = true;

    #[inline(always)]
    fn activate(self, [xr, xz, xn]: [A; 3], [hr, hz, hn]: [A; 3]) -> [A; 3] {
        let r = sigmoid(xr + hr);
        [r, sigmoid(xz + hz), (xn + r * hn).fast_tanh()]
    }
    #[inline(always)]
    fn update(self, [_, z, n]: [A; 3], [h, c]: [A; 2]) -> [A; 2] {
        [self.0.apply(mix(z, n, h)), c]
    }
    /// `extra` is the product that r gates.
    #[inline(always)]
    fn gradients(self, [r, z, n]: [A; 3], extra: A, [h, _]: [A; 2], [dh, dc]: [A; 2]) -> ([A; 3], A, [A; 2]) {
        let dh = self.0.gradient(mix(z, n, h), dh);
        let dn = dh * rest(z) * rest(n * n);
        let dz = dh * (h - n) * z * rest(z);
        ([dn * extra * r * rest(r), dz, dn], dn * r, [dh * z, dc])
    }
}

#[derive(Clone, Copy)]
struct Reset;

impl<A: CpuElement<Acc = A>> Elements<A, 2> for Reset {
    #[inline(always)]
    fn activate(self, [xr, xz]: [A; 2], [hr, hz]: [A; 2]) -> [A; 2] {
        [sigmoid(xr + hr), sigmoid(xz + hz)]
    }
    #[inline(always)]
    fn update(self, [r, _]: [A; 2], [h, c]: [A; 2]) -> [A; 2] {
        [r * h, c]
    }
    fn gradients(self, _: [A; 2], _: A, _: [A; 2], _: [A; 2]) -> ([A; 2], A, [A; 2]) {
        unreachable!("z has its gradient from the next stage")
    }
}

impl<A: CpuElement<Acc = A>> Elements<A, 1> for Reset {
    fn activate(self, _: [A; 1], _: [A; 1]) -> [A; 1] {
        unreachable!("r and z are computed together")
    }
    fn update(self, _: [A; 1], _: [A; 2]) -> [A; 2] {
        unreachable!("r and z are computed together")
    }
    /// `dh` is the gradient of `r h`.
    #[inline(always)]
    fn gradients(self, [r]: [A; 1], extra: A, [h, _]: [A; 2], [dh, dc]: [A; 2]) -> ([A; 1], A, [A; 2]) {
        ([dh * h * r * rest(r)], extra, [dh * r, dc])
    }
}

#[derive(Clone, Copy)]
struct New<A>(Clip<A>);

impl<A: CpuElement<Acc = A>> Elements<A, 2> for New<A> {
    /// z is there already.
    #[inline(always)]
    fn activate(self, [z, xn]: [A; 2], [_, hn]: [A; 2]) -> [A; 2] {
        [z, (xn + hn).fast_tanh()]
    }
    #[inline(always)]
    fn update(self, [z, n]: [A; 2], [h, c]: [A; 2]) -> [A; 2] {
        [self.0.apply(mix(z, n, h)), c]
    }
    #[inline(always)]
    fn gradients(self, [z, n]: [A; 2], extra: A, [h, _]: [A; 2], [dh, dc]: [A; 2]) -> ([A; 2], A, [A; 2]) {
        let dh = self.0.gradient(mix(z, n, h), dh);
        let dn = dh * rest(z) * rest(n * n);
        ([dh * (h - n) * z * rest(z), dn], extra, [dh * z, dc])
    }
}

#[derive(Clone, Copy)]
struct Lstm<A>(Clip<A>);

impl<A: CpuElement<Acc = A>> Lstm<A> {
    /// Gradients of the inputs of i, o and g, of f and of the cell state.
    #[inline(always)]
    fn common(self, [i, o, g, f]: [A; 4], c: A, [dh, dc]: [A; 2]) -> ([A; 4], A) {
        let raw = f * c + i * g;
        let tanh = self.0.apply(raw).fast_tanh();
        let dc = self.0.gradient(raw, dc + dh * o * rest(tanh * tanh));
        ([dc * g, dh * tanh * o * rest(o), dc * i * rest(g * g), dc * c], dc)
    }

    #[inline(always)]
    fn next(self, [i, o, g, f]: [A; 4], c: A) -> [A; 2] {
        let c = self.0.apply(f * c + i * g);
        [o * c.fast_tanh(), c]
    }
}

impl<A: CpuElement<Acc = A>> Elements<A, 4> for Lstm<A> {
    const CELL: bool = true;

    #[inline(always)]
    fn activate(self, x: [A; 4], h: [A; 4]) -> [A; 4] {
        [sigmoid(x[0] + h[0]), sigmoid(x[1] + h[1]), (x[2] + h[2]).fast_tanh(), sigmoid(x[3] + h[3])]
    }
    #[inline(always)]
    fn update(self, gates: [A; 4], [_, c]: [A; 2]) -> [A; 2] {
        self.next(gates, c)
    }
    #[inline(always)]
    fn gradients(self, gates: [A; 4], extra: A, [_, c]: [A; 2], grads: [A; 2]) -> ([A; 4], A, [A; 2]) {
        let [i, _, _, f] = gates;
        let ([di, o, g, df], dc) = self.common(gates, c, grads);
        ([di * i * rest(i), o, g, df * f * rest(f)], extra, [<A as Zero>::zero(), dc * f])
    }
}

impl<A: CpuElement<Acc = A>> Elements<A, 3> for Lstm<A> {
    const CELL: bool = true;

    #[inline(always)]
    fn activate(self, x: [A; 3], h: [A; 3]) -> [A; 3] {
        [sigmoid(x[0] + h[0]), sigmoid(x[1] + h[1]), (x[2] + h[2]).fast_tanh()]
    }
    #[inline(always)]
    fn update(self, [i, o, g]: [A; 3], [_, c]: [A; 2]) -> [A; 2] {
        self.next([i, o, g, rest(i)], c)
    }
    #[inline(always)]
    fn gradients(self, [i, o, g]: [A; 3], extra: A, [_, c]: [A; 2], grads: [A; 2]) -> ([A; 3], A, [A; 2]) {
        let ([di, o, g, df], dc) = self.common([i, o, g, rest(i)], c, grads);
        ([(di - df) * i * rest(i), o, g], extra, [<A as Zero>::zero(), dc * rest(i)])
    }
}

/// Does something with the functions of a stage.
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

    /// Where the rows of this step begin, and how far one is from the next.
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

    fn shape(&self) -> Shape {
        Shape::new([self.batch, self.hidden])
    }

    fn has_cell(&self) -> bool {
        matches!(self.stage, Stage::Whole(Cell::Lstm { .. }))
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
        let tensor = |values| B::from_vec(values, self.shape());
        RecurrentState { h: Some(tensor(h)), c: self.has_cell().then(|| tensor(c)) }
    }

    /// Rows of a state, which has none if it is not there.
    fn rows_of<'a, E>(&self, state: &'a mut [E]) -> impl FnMut() -> &'a mut [E] {
        let mut rows = state.chunks_exact_mut(self.hidden);
        move || rows.next().unwrap_or_default()
    }

    /// Calls `f` for every row, on all threads where that pays.
    fn for_rows<T: Send>(&self, mut rows: Vec<T>, gates: usize, f: impl Fn(&mut T) + Send + Sync) {
        let work = COST * gates * self.batch * self.hidden;
        let task = parallel::items_per_thread(self.batch, work);
        // One copy of the loops for all ways to call them: there are many cells.
        let f: &(dyn Fn(&mut T) + Send + Sync) = &|row| parallel::vectorized(|| f(row));
        parallel::chunks_mut(&mut rows, task, work, |_, rows| rows.iter_mut().for_each(f));
    }
}

/// The elements of tensors that are there, and zeros for those that are not.
struct Slices<B: CpuBackend, E> {
    tensors: Vec<Option<FloatTensor<B>>>,
    zeros: Vec<E>,
}

impl<B: CpuBackend, E: CpuElement> Slices<B, E> {
    /// Of tensors of `len` elements.
    fn new(tensors: impl IntoIterator<Item = Option<FloatTensor<B>>>, len: usize) -> Self {
        let tensors: Vec<_> = tensors.into_iter().map(|tensor| tensor.map(B::contiguous)).collect();
        let zeros = if tensors.iter().all(Option::is_some) { vec![] } else { vec![E::zero(); len] };
        Self { tensors, zeros }
    }

    /// Row number `row` of `len` elements, if there are so many.
    fn row(&self, row: usize, len: usize) -> &[E] {
        self.get(0).get(row * len..(row + 1) * len).unwrap_or_default()
    }

    fn get(&self, index: usize) -> &[E] {
        self.tensors[index].as_ref().map_or(&self.zeros, |tensor| B::as_slice(tensor))
    }
}

/// See [`MemBackend::recurrent_forward`](crate::backend::MemBackend::recurrent_forward).
pub(super) fn forward<B: CpuBackend, E: CpuElement>(
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

/// See [`MemBackend::recurrent_replay`](crate::backend::MemBackend::recurrent_replay).
pub(super) fn replay<B: CpuBackend, E: CpuElement>(
    step: &RecurrentStep,
    gates: &[FloatTensor<B>],
    state: RecurrentState<B>,
) -> RecurrentState<B> {
    let state = step.state_slices(state);
    step.with(false, Replay::<B, E> { step, gates, state })
}

struct Replay<'a, B: CpuBackend, E> {
    step: &'a RecurrentStep,
    gates: &'a [FloatTensor<B>],
    state: [Slices<B, E>; 2],
}

impl<B: CpuBackend, E: CpuElement> Visitor<E::Acc, RecurrentState<B>> for Replay<'_, B, E> {
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

/// See [`MemBackend::recurrent_backward`](crate::backend::MemBackend::recurrent_backward).
pub(super) fn backward<B: CpuBackend, E: CpuElement>(
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
