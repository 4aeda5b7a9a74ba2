//! Functions of vectors that the kernels of several operations compute.
use crate::burn_next::Constant;
use burn_cubecl::cubecl::{self, prelude::*};

/// A constant.
#[allow(clippy::useless_conversion)] // not useless with the next CubeCL
#[cube]
pub(crate) fn constant<W: Float>(#[comptime] value: f32) -> W {
    W::new(comptime!(Constant::from(value)))
}

/// A vector of the same constant.
#[cube]
pub(crate) fn number<W: Float, N: Size>(#[comptime] value: f64) -> Vector<W, N> {
    // In two parts, for f64.
    let high = comptime!(value as f32);
    let low = comptime!((value - value as f32 as f64) as f32);
    Vector::new(constant::<W>(high) + constant::<W>(low))
}

/// `1 / (1 + e^-x)`
#[cube]
pub(crate) fn sigmoid<W: Float, N: Size>(x: Vector<W, N>) -> Vector<W, N> {
    let one = number::<W, N>(1.0);
    one / (one + (-x).exp())
}

/// `log(1 + e^x)`
#[cube]
pub(crate) fn log_1p_exp<W: Float, N: Size>(x: Vector<W, N>) -> Vector<W, N> {
    // With the larger of 0 and x before the logarithm, nothing overflows and no digits are lost.
    let falling = (-x.abs()).exp();
    x.max(number::<W, N>(0.0)) + falling.log1p()
}
