//! The cells of recurrent layers, as functions of single elements.
use crate::backend::cpu::{CpuElement, exp::sigmoid};
use num_traits::{One, Zero};

/// `1 - x`
#[inline(always)]
fn one_minus<A: CpuElement>(x: A) -> A {
    <A as One>::one() - x
}

/// The bounds of a state.
#[derive(Clone, Copy)]
pub(super) struct Clip<A>(A);

impl<A: CpuElement> Clip<A> {
    pub(super) fn new(clip: Option<f64>) -> Self {
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

/// The functions of a stage of `G` gates.
pub(super) trait Elements<A, const G: usize>: Copy + Send + Sync {
    /// Whether there is a cell state. Where there is none, it is read as zero and not written.
    const CELL: bool = false;
    /// Whether there is an `extra`.
    const EXTRA: bool = false;

    /// The gates, from the products with the input and with the hidden state.
    fn activate(self, input: [A; G], hidden: [A; G]) -> [A; G];
    /// The next state, `[h, c]`.
    fn update(self, gates: [A; G], state: [A; 2]) -> [A; 2];
    /// Gradients of what goes into the gates, of `extra` if there is one, and of the state.
    fn gradients(self, gates: [A; G], extra: A, state: [A; 2], grads: [A; 2]) -> ([A; G], A, [A; 2]);
}

#[derive(Clone, Copy)]
pub(super) struct Rnn<A>(pub(super) Clip<A>);

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
        let da = self.0.gradient(value, dh) * one_minus(value * value);
        ([da], extra, [<A as Zero>::zero(), dc])
    }
}

/// `(1 - z) n + z h`
#[inline(always)]
fn mix<A: CpuElement>(z: A, n: A, h: A) -> A {
    n * one_minus(z) + z * h
}

#[derive(Clone, Copy)]
pub(super) struct Gru<A>(pub(super) Clip<A>);

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
        let dn = dh * one_minus(z) * one_minus(n * n);
        let dz = dh * (h - n) * z * one_minus(z);
        ([dn * extra * r * one_minus(r), dz, dn], dn * r, [dh * z, dc])
    }
}

#[derive(Clone, Copy)]
pub(super) struct Reset;

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
        ([dh * h * r * one_minus(r)], extra, [dh * r, dc])
    }
}

#[derive(Clone, Copy)]
pub(super) struct New<A>(pub(super) Clip<A>);

impl<A: CpuElement<Acc = A>> Elements<A, 2> for New<A> {
    /// z is already there.
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
        let dn = dh * one_minus(z) * one_minus(n * n);
        ([dh * (h - n) * z * one_minus(z), dn], extra, [dh * z, dc])
    }
}

#[derive(Clone, Copy)]
pub(super) struct Lstm<A>(pub(super) Clip<A>);

impl<A: CpuElement<Acc = A>> Lstm<A> {
    /// Gradients of the inputs of i, o and g, of f and of the cell state.
    #[inline(always)]
    fn common(self, [i, o, g, f]: [A; 4], c: A, [dh, dc]: [A; 2]) -> ([A; 4], A) {
        let raw = f * c + i * g;
        let tanh = self.0.apply(raw).fast_tanh();
        let dc = self.0.gradient(raw, dc + dh * o * one_minus(tanh * tanh));
        ([dc * g, dh * tanh * o * one_minus(o), dc * i * one_minus(g * g), dc * c], dc)
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
        ([di * i * one_minus(i), o, g, df * f * one_minus(f)], extra, [<A as Zero>::zero(), dc * f])
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
        self.next([i, o, g, one_minus(i)], c)
    }
    #[inline(always)]
    fn gradients(self, [i, o, g]: [A; 3], extra: A, [_, c]: [A; 2], grads: [A; 2]) -> ([A; 3], A, [A; 2]) {
        let ([di, o, g, df], dc) = self.common([i, o, g, one_minus(i)], c, grads);
        ([(di - df) * i * one_minus(i), o, g], extra, [<A as Zero>::zero(), dc * one_minus(i)])
    }
}
