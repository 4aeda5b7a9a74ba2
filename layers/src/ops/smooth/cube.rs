//! Kernels for devices: the function, and the gradient, in one pass, where the composition has up to fifteen.
//!
//! Only where operations are not fused: fusion makes one kernel of the composition, and of what is around it.
use super::{GELU_CUBE, SELU_ALPHA, SELU_SCALE, SOFTPLUS_THRESHOLD, SQRT_2_OVER_PI, Smooth, SmoothKernels};
use crate::backend::cube::{
    Output, address_type, in_memory_order, log_1p_exp, number, sigmoid, types, units, vector_size,
};
use burn::backend::{Cube, tensor::FloatTensor};
use burn_cubecl::cubecl::{
    self,
    ir::ElemType,
    prelude::*,
    std::tensor::layout::linear::{LinearView, LinearViewMut},
};

impl SmoothKernels for Cube {
    fn smooth(x: FloatTensor<Self>, f: Smooth) -> FloatTensor<Self> {
        let [y] = in_memory_order([x], |[x]| {
            let (kind, parameters) = kind(f);
            let y = Output::replacing(&x, 0);
            let len = x.meta.num_elements();
            if len > 0 {
                let size = vector_size(&[&x, &y.tensor], usize::MAX);
                let (count, dim) = units(&x.client, len / size);
                let (client, at, dtypes) = (x.client.clone(), address_type(&[&x]), types(x.dtype));
                let [p, q] = parameters.map(|parameter| InputScalar::new(parameter, dtypes[1]));
                // SAFETY: the kernel compares every position with the shapes.
                unsafe {
                    value_kernel::launch_unchecked(
                        &client,
                        count,
                        dim,
                        at,
                        size,
                        x.into_linear_view(),
                        y.view(),
                        p,
                        q,
                        kind,
                        dtypes,
                    );
                }
            }
            [y.tensor]
        });
        y
    }

    fn smooth_backward(read: FloatTensor<Self>, f: Smooth, dy: FloatTensor<Self>) -> FloatTensor<Self> {
        let [dx] = in_memory_order([dy, read], |[dy, read]| {
            let (kind, parameters) = kind(f);
            let dx = Output::replacing(&dy, 0);
            let len = dy.meta.num_elements();
            if len > 0 {
                let size = vector_size(&[&dy, &read, &dx.tensor], usize::MAX);
                let (count, dim) = units(&dy.client, len / size);
                let (client, at, dtypes) = (dy.client.clone(), address_type(&[&dy, &read]), types(dy.dtype));
                let [p, q] = parameters.map(|parameter| InputScalar::new(parameter, dtypes[1]));
                let (dy, read) = (dy.into_linear_view(), read.into_linear_view());
                // SAFETY: the kernel compares every position with the shapes.
                unsafe {
                    slope_kernel::launch_unchecked(
                        &client,
                        count,
                        dim,
                        at,
                        size,
                        dy,
                        read,
                        dx.view(),
                        p,
                        q,
                        kind,
                        dtypes,
                    );
                }
            }
            [dx.tensor]
        });
        dx
    }
}

/// The function without its numbers, for which a kernel is compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    Gelu,
    GeluApproximate,
    Silu,
    Mish,
    Softplus,
    Softsign,
    /// Also CELU.
    Elu,
    Selu,
    LogSigmoid,
    HardSwish,
    Tanhshrink,
    Sigmoid,
    Tanh,
}

/// The kind of a function and its two numbers.
pub fn kind(f: Smooth) -> (Kind, [f64; 2]) {
    match f {
        Smooth::Gelu => (Kind::Gelu, [0.0; 2]),
        Smooth::GeluApproximate => (Kind::GeluApproximate, [0.0; 2]),
        Smooth::Silu => (Kind::Silu, [0.0; 2]),
        Smooth::Mish => (Kind::Mish, [0.0; 2]),
        Smooth::Softplus { beta, threshold } => (Kind::Softplus, [beta, threshold]),
        Smooth::Softsign => (Kind::Softsign, [0.0; 2]),
        Smooth::Elu { alpha } => (Kind::Elu, [alpha, 1.0]),
        Smooth::Celu { alpha } => (Kind::Elu, [alpha, alpha]),
        Smooth::Selu => (Kind::Selu, [SELU_ALPHA, 1.0]),
        Smooth::LogSigmoid => (Kind::LogSigmoid, [0.0; 2]),
        Smooth::HardSwish => (Kind::HardSwish, [0.0; 2]),
        Smooth::Tanhshrink => (Kind::Tanhshrink, [0.0; 2]),
        Smooth::Sigmoid => (Kind::Sigmoid, [0.0; 2]),
        Smooth::Tanh => (Kind::Tanh, [0.0; 2]),
    }
}

/// The distribution function of the normal distribution.
#[cube]
fn normal<W: Float, N: Size>(x: Vector<W, N>) -> Vector<W, N> {
    let erf = (x * number::<W, N>(core::f64::consts::FRAC_1_SQRT_2)).erf();
    number::<W, N>(0.5) * (number::<W, N>(1.0) + erf)
}

/// `tanh` of the cubic of the approximate GELU.
#[cube]
fn gelu_tanh<W: Float, N: Size>(x: Vector<W, N>) -> Vector<W, N> {
    let cubic = number::<W, N>(1.0) + number::<W, N>(GELU_CUBE) * x * x;
    (number::<W, N>(SQRT_2_OVER_PI) * x * cubic).tanh()
}

/// `tanh(log(1 + e^x))`
#[cube]
fn mish_tanh<W: Float, N: Size>(x: Vector<W, N>) -> Vector<W, N> {
    // With e = exp(x) and n = e (e + 2) it is n / (n + 2).
    let two = number::<W, N>(2.0);
    let e = x.min(number::<W, N>(SOFTPLUS_THRESHOLD)).exp();
    let n = e * (e + two);
    n / (n + two)
}

/// Of HardSwish.
#[cube]
fn hard_gate<W: Float, N: Size>(x: Vector<W, N>) -> Vector<W, N> {
    x * number::<W, N>(1.0 / 6.0) + number::<W, N>(0.5)
}

/// The function.
#[cube]
pub fn value<W: Float, N: Size>(x: Vector<W, N>, p: W, q: W, #[comptime] kind: Kind) -> Vector<W, N> {
    let (p, q) = (Vector::<W, N>::new(p), Vector::<W, N>::new(q));
    let (zero, one) = (number::<W, N>(0.0), number::<W, N>(1.0));
    match comptime!(kind) {
        Kind::Gelu => x * normal::<W, N>(x),
        Kind::GeluApproximate => number::<W, N>(0.5) * x * (one + gelu_tanh::<W, N>(x)),
        Kind::Silu => x * sigmoid::<W, N>(x),
        Kind::Mish => x * mish_tanh::<W, N>(x),
        Kind::Softplus => {
            let scaled = x * p;
            select_many(scaled.greater_than(&q), x, log_1p_exp::<W, N>(scaled) / p)
        }
        Kind::Softsign => x / (one + x.abs()),
        Kind::Elu => select_many(x.greater_than(&zero), x, p * ((x / q).exp() - one)),
        Kind::Selu => number::<W, N>(SELU_SCALE) * select_many(x.greater_than(&zero), x, p * (x.exp() - one)),
        Kind::LogSigmoid => -log_1p_exp::<W, N>(-x),
        Kind::HardSwish => x * hard_gate::<W, N>(x).max(zero).min(one),
        Kind::Tanhshrink => x - x.tanh(),
        Kind::Sigmoid => sigmoid::<W, N>(x),
        Kind::Tanh => x.tanh(),
    }
}

/// The slope, from the input or the [output](Smooth::reads_output).
#[cube]
pub fn slope<W: Float, N: Size>(x: Vector<W, N>, p: W, q: W, #[comptime] kind: Kind) -> Vector<W, N> {
    let (p, q) = (Vector::<W, N>::new(p), Vector::<W, N>::new(q));
    let (zero, one) = (number::<W, N>(0.0), number::<W, N>(1.0));
    match comptime!(kind) {
        Kind::Gelu => {
            let density = number::<W, N>(SQRT_2_OVER_PI * 0.5) * (number::<W, N>(-0.5) * x * x).exp();
            normal::<W, N>(x) + x * density
        }
        Kind::GeluApproximate => {
            let (half, t) = (number::<W, N>(0.5), gelu_tanh::<W, N>(x));
            let inner = number::<W, N>(SQRT_2_OVER_PI) * (one + number::<W, N>(3.0 * GELU_CUBE) * x * x);
            half * (one + t) + half * x * (one - t * t) * inner
        }
        Kind::Silu => {
            let s = sigmoid::<W, N>(x);
            s * (one + x * (one - s))
        }
        Kind::Mish => {
            let t = mish_tanh::<W, N>(x);
            t + x * (one - t * t) * sigmoid::<W, N>(x)
        }
        Kind::Softplus => {
            let scaled = x * p;
            select_many(scaled.greater_than(&q), one, sigmoid::<W, N>(scaled))
        }
        Kind::Softsign => {
            let inverse = one / (one + x.abs());
            inverse * inverse
        }
        Kind::Elu => select_many(x.greater_than(&zero), one, (x / q).exp() * (p / q)),
        Kind::Selu => number::<W, N>(SELU_SCALE) * select_many(x.greater_equal(&zero), one, p * x.exp()),
        Kind::LogSigmoid => sigmoid::<W, N>(-x),
        Kind::HardSwish => {
            let gate = hard_gate::<W, N>(x);
            let inside = gate + x * number::<W, N>(1.0 / 6.0);
            let inside = select_many(gate.greater_than(&one), one, inside);
            select_many(gate.less_than(&zero), zero, inside)
        }
        Kind::Tanhshrink => {
            let t = x.tanh();
            t * t
        }
        Kind::Sigmoid => x * (one - x),
        Kind::Tanh => one - x * x,
    }
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn value_kernel<T: Float, W: Float, N: Size>(
    x: LinearView<'_, Vector<T, N>>,
    mut y: LinearViewMut<'_, Vector<T, N>>,
    p: InputScalar,
    q: InputScalar,
    #[comptime] kind: Kind,
    #[define(T, W)] _dtypes: [ElemType; 2],
) {
    if !y.is_in_bounds(ABSOLUTE_POS) {
        terminate!();
    }
    let x = Vector::<W, N>::cast_from(x.read(ABSOLUTE_POS));
    y.write(ABSOLUTE_POS, Vector::cast_from(value::<W, N>(x, p.get::<W>(), q.get::<W>(), kind)));
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn slope_kernel<T: Float, W: Float, N: Size>(
    dy: LinearView<'_, Vector<T, N>>,
    read: LinearView<'_, Vector<T, N>>,
    mut dx: LinearViewMut<'_, Vector<T, N>>,
    p: InputScalar,
    q: InputScalar,
    #[comptime] kind: Kind,
    #[define(T, W)] _dtypes: [ElemType; 2],
) {
    if !dx.is_in_bounds(ABSOLUTE_POS) {
        terminate!();
    }
    let read = Vector::<W, N>::cast_from(read.read(ABSOLUTE_POS));
    let dy = Vector::<W, N>::cast_from(dy.read(ABSOLUTE_POS));
    let slope = slope::<W, N>(read, p.get::<W>(), q.get::<W>(), kind);
    dx.write(ABSOLUTE_POS, Vector::cast_from(dy * slope));
}
