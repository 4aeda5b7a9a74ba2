//! Kernels for devices: the function, and the gradient, in one pass, where the composition has up to fifteen. The formulas are the `cube`
//! ones of `functions.rs`.
//!
//! Only where operations are not fused: fusion makes one kernel of the composition, and of what is around it.
use super::functions::{constants::*, smooth_functions};
use super::{Smooth, SmoothKernels};
use crate::backend::cube::{Grid, Output, in_memory_order, launch, log_1p_exp, number, sigmoid, vector_size};
use burn::backend::{Cube, tensor::FloatTensor};
use burn_cubecl::cubecl::{
    self,
    ir::ElemType,
    prelude::{Tanh as _, *}, // named, because a formula hides its name
    std::tensor::layout::linear::{LinearView, LinearViewMut},
};

impl SmoothKernels for Cube {
    fn smooth(x: FloatTensor<Self>, f: Smooth) -> FloatTensor<Self> {
        let [y] = in_memory_order([x], |[x]| {
            let y = Output::replacing(&x, 0);
            let size = vector_size(&[&x, &y.tensor], usize::MAX);
            if let Some(grid) = Grid::of_units(x.meta.num_elements() / size, &[&x]) {
                let (kind, parameters) = kind(f);
                let [p, q] = parameters.map(|parameter| grid.scalar(parameter));
                let x = x.into_linear_view();
                // SAFETY: the kernel compares every position with the shapes.
                unsafe { launch!(value_kernel, grid, size, x, y.view(), p, q, kind, grid.dtypes) };
            }
            [y.tensor]
        });
        y
    }

    fn smooth_backward(read: FloatTensor<Self>, f: Smooth, dy: FloatTensor<Self>) -> FloatTensor<Self> {
        let [dx] = in_memory_order([dy, read], |[dy, read]| {
            let dx = Output::replacing(&dy, 0);
            let size = vector_size(&[&dy, &read, &dx.tensor], usize::MAX);
            if let Some(grid) = Grid::of_units(dy.meta.num_elements() / size, &[&dy, &read]) {
                let (kind, parameters) = kind(f);
                let [p, q] = parameters.map(|parameter| grid.scalar(parameter));
                let (dy, read) = (dy.into_linear_view(), read.into_linear_view());
                // SAFETY: the kernel compares every position with the shapes.
                unsafe { launch!(slope_kernel, grid, size, dy, read, dx.view(), p, q, kind, grid.dtypes) };
            }
            [dx.tensor]
        });
        dx
    }
}

// The attribute of a formula comes with it: what `#[cube]` makes of a function has the hygiene of the attribute.
macro_rules! formulas {
    ($(
        $(#[$doc:meta])*
        $variant:ident $({
            $(#[$of_p:meta])* $p:ident = $tested_p:literal,
            $($(#[$of_q:meta])* $q:ident = $tested_q:literal,)?
        })?, $name:literal, slope from $read:ident:
            cpu $cpu:tt
            $hash:tt $cube:tt {
                value($x:ident) $value:tt
                slope($y:ident) $slope:tt
            }
            composed $composed:tt
    )+) => {
        /// The function without its numbers, for which a kernel is compiled.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum Kind {
            $($variant,)+
        }

        /// The kind of a function and its two numbers.
        pub fn kind(f: Smooth) -> (Kind, [f64; 2]) {
            match f {
                $(Smooth::$variant $({ $p $(, $q)? })? => (Kind::$variant, two(&[$($p $(, $q)?)?])),)+
            }
        }

        /// The function.
        #[cube]
        pub fn value<W: Float, N: Size>(x: Vector<W, N>, p: W, q: W, #[comptime] kind: Kind) -> Vector<W, N> {
            let (p, q) = (Vector::<W, N>::new(p), Vector::<W, N>::new(q));
            match comptime!(kind) {$(
                Kind::$variant => {
                    $(let $p = p; $(let $q = q;)?)?
                    $variant::value::<W, N>(x $(, $p $(, $q)?)?)
                }
            )+}
        }

        /// The slope, from the input or the [output](Smooth::reads_output).
        #[cube]
        pub fn slope<W: Float, N: Size>(x: Vector<W, N>, p: W, q: W, #[comptime] kind: Kind) -> Vector<W, N> {
            let (p, q) = (Vector::<W, N>::new(p), Vector::<W, N>::new(q));
            match comptime!(kind) {$(
                Kind::$variant => {
                    $(let $p = p; $(let $q = q;)?)?
                    $variant::slope::<W, N>(x $(, $p $(, $q)?)?)
                }
            )+}
        }

        $(
            struct $variant;

            $hash $cube
            impl $variant {
                fn value<W: Float, N: Size>(
                    $x: Vector<W, N> $(, $p: Vector<W, N> $(, $q: Vector<W, N>)?)?
                ) -> Vector<W, N> $value

                fn slope<W: Float, N: Size>(
                    $y: Vector<W, N> $(, $p: Vector<W, N> $(, $q: Vector<W, N>)?)?
                ) -> Vector<W, N> $slope
            }
        )+
    };
}
smooth_functions!(formulas);

/// The numbers of a function, and 0 in the place of those that it does not have.
fn two(numbers: &[f64]) -> [f64; 2] {
    [0, 1].map(|at| numbers.get(at).copied().unwrap_or_default())
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
    let two = number::<W, N>(2.0);
    let e = x.min(number::<W, N>(SOFTPLUS_THRESHOLD)).exp();
    let n = e * (e + two);
    n / (n + two)
}

/// `x`, and below zero `alpha (e^(x / width) - 1)`.
#[cube]
fn exp_branch<W: Float, N: Size>(x: Vector<W, N>, alpha: Vector<W, N>, width: Vector<W, N>) -> Vector<W, N> {
    let below = alpha * ((x / width).exp() - number::<W, N>(1.0));
    select_many(x.greater_than(&number::<W, N>(0.0)), x, below)
}

/// Of HardSwish.
#[cube]
fn hard_gate<W: Float, N: Size>(x: Vector<W, N>) -> Vector<W, N> {
    x * number::<W, N>(1.0 / 6.0) + number::<W, N>(0.5)
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
