//! The kernels of norms of rows on devices.
use super::walk::Walk;
use crate::backend::cube::{Pair, constant, row_of_unit, sum_of_vector, sum_over_units, unit_of_row};
use burn_cubecl::cubecl::{
    self,
    ir::ElemType,
    prelude::*,
    std::tensor::layout::linear::{LinearView, LinearViewMut},
};

/// Rows, and which elements share a parameter: see [`RowNorm`](crate::ops::row_norm::RowNorm).
#[derive(CubeType, CubeLaunch)]
pub(super) struct RowShape {
    rows: usize,
    row: usize,
    groups: usize,
    channels: usize,
    inner: usize,
}

/// See [`ParameterParts`](super::ParameterParts).
#[derive(CubeType, CubeLaunch)]
pub(super) struct ParameterPartsShape {
    length: usize,
    stretch: usize,
    stretches: usize,
}

/// The statistics of one row.
#[derive(CubeType, Clone, Copy)]
struct Statistics<W: Float> {
    mean: W,
    inverse_std: W,
}

/// The statistics of the row of this unit.
#[cube]
fn statistics<T: Float, W: Float, N: Size>(
    x: &LinearView<'_, Vector<T, N>>,
    row: usize,
    epsilon: W,
    #[comptime] centered: bool,
    #[comptime] units: usize,
) -> Statistics<W> {
    let size = N::value().comptime();
    let vectors = row / size;
    let (start, unit) = (row_of_unit(units) * vectors, unit_of_row(units));
    let zero = W::new(0.0);
    let mut mean = zero;
    if comptime!(centered) {
        let mut sum = Vector::<W, N>::new(zero);
        let mut at = unit;
        while at < vectors {
            sum += Vector::cast_from(x.read(start + at));
            at += units;
        }
        let of_unit = Pair::<W> { a: sum_of_vector::<W, N>(sum), b: zero };
        mean = sum_over_units::<W>(of_unit, units).a / W::cast_from(row);
    }
    let mut squares = Vector::<W, N>::new(zero);
    let mut at = unit;
    while at < vectors {
        let x = Vector::<W, N>::cast_from(x.read(start + at)) - Vector::new(mean);
        squares += x * x;
        at += units;
    }
    let of_unit = Pair::<W> { a: sum_of_vector::<W, N>(squares), b: zero };
    let variance = sum_over_units::<W>(of_unit, units).a / W::cast_from(row);
    Statistics::<W> { mean, inverse_std: W::new(1.0) / (variance + epsilon).sqrt() }
}

/// The parameters of the vector that begins at this element of the unit's row; `missing` without parameters.
#[cube]
fn read_parameters<T: Float, W: Float, N: Size>(
    parameters: &ComptimeOption<&[T]>,
    element: usize,
    shape: &RowShape,
    #[comptime] walk: Walk,
    #[comptime] units: usize,
    #[comptime] missing: f32,
) -> Vector<W, N> {
    let size = N::value().comptime();
    let group = row_of_unit(units) % shape.groups * shape.channels;
    let mut read = Vector::<W, N>::new(W::new(0.0));
    #[unroll]
    for i in 0..size {
        let mut channel = element + i;
        if comptime!(walk == Walk::Inner) {
            channel /= shape.inner;
        }
        if comptime!(walk == Walk::Channels) {
            channel %= shape.channels;
        }
        let parameter: ComptimeOption<T> = parameters.as_ref().map(|parameters| parameters[group + channel]);
        read.insert(i, W::cast_from(parameter.unwrap_or(constant::<T>(missing))));
    }
    read
}

#[cube(launch_unchecked, address_type = "dynamic")]
pub(super) fn forward_kernel<T: Float, W: Float, N: Size>(
    x: LinearView<'_, Vector<T, N>>,
    mut y: LinearViewMut<'_, Vector<T, N>>,
    gamma: ComptimeOption<&[T]>,
    beta: ComptimeOption<&[T]>,
    shape: RowShape,
    epsilon: InputScalar,
    #[comptime] centered: bool,
    #[comptime] walk: Walk,
    #[comptime] units: usize,
    #[define(T, W)] _dtypes: [ElemType; 2],
) {
    let (row, unit) = (row_of_unit(units), unit_of_row(units));
    if row >= shape.rows {
        terminate!();
    }
    let statistics = statistics::<T, W, N>(&x, shape.row, epsilon.get::<W>(), centered, units);
    let size = N::value().comptime();
    let vectors = shape.row / size;
    let start = row * vectors;
    let mut at = unit;
    while at < vectors {
        let x = Vector::<W, N>::cast_from(x.read(start + at));
        let mut normalized = (x - Vector::new(statistics.mean)) * Vector::new(statistics.inverse_std);
        normalized *= read_parameters::<T, W, N>(&gamma, at * size, &shape, walk, units, 1.0);
        normalized += read_parameters::<T, W, N>(&beta, at * size, &shape, walk, units, 0.0);
        y.write(start + at, Vector::cast_from(normalized));
        at += units;
    }
}

#[cube(launch_unchecked, address_type = "dynamic")]
pub(super) fn x_backward_kernel<T: Float, W: Float, N: Size>(
    dy: LinearView<'_, Vector<T, N>>,
    x: LinearView<'_, Vector<T, N>>,
    mut dx: LinearViewMut<'_, Vector<T, N>>,
    gamma: ComptimeOption<&[T]>,
    shape: RowShape,
    epsilon: InputScalar,
    #[comptime] centered: bool,
    #[comptime] walk: Walk,
    #[comptime] units: usize,
    #[define(T, W)] _dtypes: [ElemType; 2],
) {
    let (row, unit) = (row_of_unit(units), unit_of_row(units));
    if row >= shape.rows {
        terminate!();
    }
    let statistics = statistics::<T, W, N>(&x, shape.row, epsilon.get::<W>(), centered, units);
    let size = N::value().comptime();
    let vectors = shape.row / size;
    let start = row * vectors;
    let (mean, inverse_std) =
        (Vector::<W, N>::new(statistics.mean), Vector::<W, N>::new(statistics.inverse_std));
    let mut sum = Vector::<W, N>::new(W::new(0.0));
    let mut products = Vector::<W, N>::new(W::new(0.0));
    let mut at = unit;
    while at < vectors {
        let mut g = Vector::<W, N>::cast_from(dy.read(start + at));
        g *= read_parameters::<T, W, N>(&gamma, at * size, &shape, walk, units, 1.0);
        sum += g;
        products += g * ((Vector::cast_from(x.read(start + at)) - mean) * inverse_std);
        at += units;
    }
    let of_unit = Pair::<W> { a: sum_of_vector::<W, N>(sum), b: sum_of_vector::<W, N>(products) };
    let total = sum_over_units::<W>(of_unit, units);
    let length = W::cast_from(shape.row);
    let mut mean_g = W::new(0.0);
    if comptime!(centered) {
        mean_g = total.a / length;
    }
    let mean_product = total.b / length;
    let mut at = unit;
    while at < vectors {
        let mut g = Vector::<W, N>::cast_from(dy.read(start + at));
        g *= read_parameters::<T, W, N>(&gamma, at * size, &shape, walk, units, 1.0);
        let normalized = (Vector::cast_from(x.read(start + at)) - mean) * inverse_std;
        let gradient = (g - Vector::new(mean_g) - normalized * Vector::new(mean_product)) * inverse_std;
        dx.write(start + at, Vector::cast_from(gradient));
        at += units;
    }
}

/// The mean and inverse standard deviation of every row.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(super) fn statistics_kernel<T: Float, W: Float, N: Size>(
    x: LinearView<'_, Vector<T, N>>,
    mut of_rows: LinearViewMut<'_, W>,
    shape: RowShape,
    epsilon: InputScalar,
    #[comptime] centered: bool,
    #[comptime] units: usize,
    #[define(T, W)] _dtypes: [ElemType; 2],
) {
    let (row, unit) = (row_of_unit(units), unit_of_row(units));
    if row >= shape.rows {
        terminate!();
    }
    let statistics = statistics::<T, W, N>(&x, shape.row, epsilon.get::<W>(), centered, units);
    if unit == 0 {
        of_rows.write(2 * row, statistics.mean);
        of_rows.write(2 * row + 1, statistics.inverse_std);
    }
}

/// Sums over the repeats of a part, and over its stretch of `inner`: one unit for each part and vector of parameters.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(super) fn parameters_kernel<T: Float, W: Float, N: Size>(
    x: LinearView<'_, Vector<T, N>>,
    dy: LinearView<'_, Vector<T, N>>,
    of_rows: LinearView<'_, W>,
    mut parts: LinearViewMut<'_, Vector<W, N>>,
    shape: RowShape,
    parameters: usize,
    by: ParameterPartsShape,
    #[comptime] walk: Walk,
    #[define(T, W)] _dtypes: [ElemType; 2],
) {
    let size = N::value().comptime();
    let vectors = parameters / size;
    let part = ABSOLUTE_POS / vectors;
    let vector = ABSOLUTE_POS % vectors;
    let repeats = shape.rows / shape.groups;
    let first = part / by.stretches * by.length;
    if first >= repeats {
        terminate!();
    }
    let zero = Vector::<W, N>::new(W::new(0.0));
    let (mut gamma, mut beta) = (zero, zero);
    let group = vector * size / shape.channels;
    let begin = part % by.stretches * by.stretch;
    let end = min(begin + by.stretch, shape.inner);
    for repeat in first..min(first + by.length, repeats) {
        let row = repeat * shape.groups + group;
        let mean = Vector::<W, N>::new(of_rows.read(2 * row));
        let inverse_std = Vector::<W, N>::new(of_rows.read(2 * row + 1));
        // Each row has sums of its own, so that a part of many elements is as exact as one of few.
        let (mut gamma_of_row, mut beta_of_row) = (zero, zero);
        let mut at = (repeat * vectors + vector) * shape.inner;
        let mut step = 1usize.runtime();
        if comptime!(walk == Walk::Channels) {
            step = shape.channels / size;
            at = row * shape.inner * step + vector % step;
        }
        at += begin * step;
        for _ in begin..end {
            let dy = Vector::<W, N>::cast_from(dy.read(at));
            beta_of_row += dy;
            gamma_of_row += dy * ((Vector::cast_from(x.read(at)) - mean) * inverse_std);
            at += step;
        }
        gamma += gamma_of_row;
        beta += beta_of_row;
    }
    parts.write(2 * part * vectors + vector, gamma);
    parts.write((2 * part + 1) * vectors + vector, beta);
}
