//! The kernels of recurrent steps, with one unit for every element of a state.
use burn_cubecl::cubecl::{
    self,
    ir::ElemType,
    prelude::*,
    std::{FastDivmod, tensor::layout::linear::LinearView},
};

/// The rows of a step in the tensors of the gates.
#[derive(CubeType, CubeLaunch)]
pub(super) struct StepRows {
    /// The first element.
    first: usize,
    /// From one row to the next.
    stride: usize,
    hidden: FastDivmod<usize>,
    /// Elements of the state.
    elements: usize,
}

/// The position in the tensors of the gates of an element of the state.
#[cube]
fn in_gates(rows: &StepRows, at: usize) -> usize {
    let (row, feature) = rows.hidden.div_mod(at);
    rows.first + row * rows.stride + feature
}

/// An element of a tensor, or 0 without the tensor.
#[cube]
fn or_zero<T: Float, W: Float>(of: &ComptimeOption<&[T]>, at: usize) -> W {
    let value: ComptimeOption<T> = of.as_ref().map(|of| of[at]);
    W::cast_from(value.unwrap_or(T::new(0.0)))
}

/// The same of a product of matrices, whose rows may have gaps between them (CUDA).
#[cube]
fn of_product<T: Float, W: Float>(of: &ComptimeOption<LinearView<'_, T>>, at: usize) -> W {
    let value: ComptimeOption<T> = of.as_ref().map(|of| of.read(at));
    W::cast_from(value.unwrap_or(T::new(0.0)))
}

/// The gradient before clipping: 0 if `raw` was clipped.
#[cube]
fn clip_gradient<W: Float>(raw: W, dy: W, clip: &InputScalar, #[comptime] is_clipped: bool) -> W {
    let mut gradient = dy;
    if comptime!(is_clipped) {
        gradient = select(raw.abs() > clip.get::<W>(), W::new(0.0), dy);
    }
    gradient
}

#[cube]
fn clipped<W: Float>(x: W, clip: &InputScalar, #[comptime] is_clipped: bool) -> W {
    let mut value = x;
    if comptime!(is_clipped) {
        let clip = clip.get::<W>();
        value = clamp(x, -clip, clip);
    }
    value
}

#[cube]
fn sigmoid_slope<W: Float>(x: W) -> W {
    x * (W::new(1.0) - x)
}

#[cube]
fn tanh_slope<W: Float>(x: W) -> W {
    W::new(1.0) - x * x
}

/// Turns the product with the input into the gate, in place.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(super) fn gate_kernel<T: Float, W: Float>(
    gate: &mut [T],
    product: ComptimeOption<LinearView<'_, T>>,
    input_bias: ComptimeOption<&[T]>,
    hidden_bias: ComptimeOption<&[T]>,
    reset: ComptimeOption<&[T]>,
    rows: StepRows,
    #[comptime] is_sigmoid: bool,
    #[define(T, W)] _dtypes: [ElemType; 2],
) {
    if ABSOLUTE_POS >= rows.elements {
        terminate!();
    }
    let (_, feature) = rows.hidden.div_mod(ABSOLUTE_POS);
    let at = in_gates(&rows, ABSOLUTE_POS);
    let factor: ComptimeOption<T> = reset.as_ref().map(|reset| reset[at]);
    let factor = W::cast_from(factor.unwrap_or(T::new(1.0)));
    let of_input = W::cast_from(gate[at]) + or_zero::<T, W>(&input_bias, feature);
    let of_state = of_product::<T, W>(&product, ABSOLUTE_POS) + or_zero::<T, W>(&hidden_bias, feature);
    let x = of_input + factor * of_state;
    let value = match comptime!(is_sigmoid) {
        true => W::new(1.0) / (W::new(1.0) + (-x).exp()),
        false => x.tanh(),
    };
    gate[at] = T::cast_from(value);
}

/// How the hidden state comes from the gates.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Update {
    /// `a`
    Gate,
    /// `a h`
    Reset,
    /// `(1 - a) b + a h`
    Mix,
}

#[cube(launch_unchecked, address_type = "dynamic")]
pub(super) fn state_kernel<T: Float, W: Float>(
    a: &[T],
    b: ComptimeOption<&[T]>,
    h: ComptimeOption<&[T]>,
    next: &mut [T],
    rows: StepRows,
    clip: InputScalar,
    #[comptime] is_clipped: bool,
    #[comptime] update: Update,
    #[define(T, W)] _dtypes: [ElemType; 2],
) {
    if ABSOLUTE_POS >= rows.elements {
        terminate!();
    }
    let at = in_gates(&rows, ABSOLUTE_POS);
    let a = W::cast_from(a[at]);
    let value = match comptime!(update) {
        Update::Gate => a,
        Update::Reset => a * or_zero::<T, W>(&h, ABSOLUTE_POS),
        Update::Mix => (W::new(1.0) - a) * or_zero::<T, W>(&b, at) + a * or_zero::<T, W>(&h, ABSOLUTE_POS),
    };
    next[ABSOLUTE_POS] = T::cast_from(clipped::<W>(value, &clip, is_clipped));
}

#[cube(launch_unchecked, address_type = "dynamic")]
pub(super) fn lstm_state_kernel<T: Float, W: Float>(
    i: &[T],
    o: &[T],
    g: &[T],
    f: ComptimeOption<&[T]>,
    c: ComptimeOption<&[T]>,
    next_h: &mut [T],
    next_c: &mut [T],
    rows: StepRows,
    clip: InputScalar,
    #[comptime] is_clipped: bool,
    #[define(T, W)] _dtypes: [ElemType; 2],
) {
    if ABSOLUTE_POS >= rows.elements {
        terminate!();
    }
    let at = in_gates(&rows, ABSOLUTE_POS);
    let i = W::cast_from(i[at]);
    let f: ComptimeOption<W> = f.as_ref().map(|f| W::cast_from(f[at]));
    let f = f.unwrap_or(W::new(1.0) - i);
    let c = f * or_zero::<T, W>(&c, ABSOLUTE_POS) + i * W::cast_from(g[at]);
    // The hidden state is computed from `c` as it is kept.
    let c = T::cast_from(clipped::<W>(c, &clip, is_clipped));
    next_c[ABSOLUTE_POS] = c;
    next_h[ABSOLUTE_POS] = T::cast_from(W::cast_from(o[at]) * W::cast_from(c).tanh());
}

#[cube(launch_unchecked, address_type = "dynamic")]
pub(super) fn rnn_backward_kernel<T: Float, W: Float>(
    gate: &mut [T],
    dh: ComptimeOption<LinearView<'_, T>>,
    rows: StepRows,
    clip: InputScalar,
    #[comptime] is_clipped: bool,
    #[define(T, W)] _dtypes: [ElemType; 2],
) {
    if ABSOLUTE_POS >= rows.elements {
        terminate!();
    }
    let at = in_gates(&rows, ABSOLUTE_POS);
    let h = W::cast_from(gate[at]);
    let dh = clip_gradient::<W>(h, of_product::<T, W>(&dh, ABSOLUTE_POS), &clip, is_clipped);
    gate[at] = T::cast_from(dh * tanh_slope::<W>(h));
}

#[cube(launch_unchecked, address_type = "dynamic")]
pub(super) fn reset_backward_kernel<T: Float, W: Float>(
    r: &mut [T],
    h: ComptimeOption<&[T]>,
    dh: ComptimeOption<LinearView<'_, T>>,
    before: &mut [T],
    rows: StepRows,
    #[define(T, W)] _dtypes: [ElemType; 2],
) {
    if ABSOLUTE_POS >= rows.elements {
        terminate!();
    }
    let at = in_gates(&rows, ABSOLUTE_POS);
    let value = W::cast_from(r[at]);
    let dh = of_product::<T, W>(&dh, ABSOLUTE_POS);
    r[at] = T::cast_from(dh * or_zero::<T, W>(&h, ABSOLUTE_POS) * sigmoid_slope::<W>(value));
    before[ABSOLUTE_POS] = T::cast_from(dh * value);
}

#[cube(launch_unchecked, address_type = "dynamic")]
pub(super) fn mix_backward_kernel<T: Float, W: Float>(
    z: &mut [T],
    n: &mut [T],
    h: ComptimeOption<&[T]>,
    dh: ComptimeOption<LinearView<'_, T>>,
    before: &mut [T],
    rows: StepRows,
    clip: InputScalar,
    #[comptime] is_clipped: bool,
    #[define(T, W)] _dtypes: [ElemType; 2],
) {
    if ABSOLUTE_POS >= rows.elements {
        terminate!();
    }
    let at = in_gates(&rows, ABSOLUTE_POS);
    let (of_z, of_n) = (W::cast_from(z[at]), W::cast_from(n[at]));
    let h = or_zero::<T, W>(&h, ABSOLUTE_POS);
    let raw = (W::new(1.0) - of_z) * of_n + of_z * h;
    let dh = clip_gradient::<W>(raw, of_product::<T, W>(&dh, ABSOLUTE_POS), &clip, is_clipped);
    n[at] = T::cast_from(dh * (W::new(1.0) - of_z) * tanh_slope::<W>(of_n));
    z[at] = T::cast_from(dh * sigmoid_slope::<W>(of_z) * (h - of_n));
    before[ABSOLUTE_POS] = T::cast_from(dh * of_z);
}

/// The gradients of r and of the product that it gates, from the gradient of n.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(super) fn gated_backward_kernel<T: Float, W: Float>(
    r: &mut [T],
    product: &mut [T],
    dn: &[T],
    rows: StepRows,
    #[define(T, W)] _dtypes: [ElemType; 2],
) {
    if ABSOLUTE_POS >= rows.elements {
        terminate!();
    }
    let at = in_gates(&rows, ABSOLUTE_POS);
    let (of_r, dn) = (W::cast_from(r[at]), W::cast_from(dn[at]));
    r[at] = T::cast_from(dn * W::cast_from(product[at]) * sigmoid_slope::<W>(of_r));
    product[at] = T::cast_from(dn * of_r);
}

/// Without `f`, it is `1 - i`.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(super) fn lstm_backward_kernel<T: Float, W: Float>(
    i: &mut [T],
    o: &mut [T],
    g: &mut [T],
    f: ComptimeOption<&mut [T]>,
    c: ComptimeOption<&[T]>,
    dh: ComptimeOption<LinearView<'_, T>>,
    dc: ComptimeOption<&[T]>,
    before: &mut [T],
    rows: StepRows,
    clip: InputScalar,
    #[comptime] is_clipped: bool,
    #[define(T, W)] _dtypes: [ElemType; 2],
) {
    if ABSOLUTE_POS >= rows.elements {
        terminate!();
    }
    let at = in_gates(&rows, ABSOLUTE_POS);
    let (of_i, of_o, of_g) = (W::cast_from(i[at]), W::cast_from(o[at]), W::cast_from(g[at]));
    let of_f: ComptimeOption<W> = f.as_ref().map(|f| W::cast_from(f[at]));
    let of_f = of_f.unwrap_or(W::new(1.0) - of_i);
    let c = or_zero::<T, W>(&c, ABSOLUTE_POS);
    let (dh, dc) = (of_product::<T, W>(&dh, ABSOLUTE_POS), or_zero::<T, W>(&dc, ABSOLUTE_POS));
    let raw = of_f * c + of_i * of_g;
    let tanh = clipped::<W>(raw, &clip, is_clipped).tanh();
    let through_h = dh * of_o * tanh_slope::<W>(tanh);
    let dc = clip_gradient::<W>(raw, dc + through_h, &clip, is_clipped);
    o[at] = T::cast_from(dh * tanh * sigmoid_slope::<W>(of_o));
    g[at] = T::cast_from(dc * of_i * tanh_slope::<W>(of_g));
    before[ABSOLUTE_POS] = T::cast_from(dc * of_f);
    let slope = sigmoid_slope::<W>(of_i);
    #[comptime]
    match f {
        ComptimeOption::Some(f) => {
            i[at] = T::cast_from(dc * of_g * slope);
            f[at] = T::cast_from(dc * c * sigmoid_slope::<W>(of_f));
        }
        ComptimeOption::None => i[at] = T::cast_from(dc * (of_g - c) * slope),
    }
}
