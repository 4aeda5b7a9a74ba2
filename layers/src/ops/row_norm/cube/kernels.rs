//! The kernels of norms of rows on devices.
use super::Takers;
use super::walk::Walk;
use crate::backend::cube::columns::read_channels;
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

/// The vectors of a unit: every `step`th one of a row.
#[derive(CubeType, Clone, Copy)]
struct Share {
    row: usize,
    /// Vectors of the row.
    vectors: usize,
    first: usize,
    step: usize,
}

#[cube]
impl Share {
    fn of_unit(shape: &RowShape, #[comptime] size: usize, #[comptime] takers: Takers) -> Share {
        let vectors = shape.row / size;
        if comptime!(takers == Takers::Grid) {
            Share { row: ABSOLUTE_POS / vectors, vectors, first: ABSOLUTE_POS % vectors, step: vectors }
        } else {
            let units = comptime!(takers.units());
            Share { row: row_of_unit(units), vectors, first: unit_of_row(units), step: units.runtime() }
        }
    }
}

/// The sums over all units of a row, for each of them.
#[cube]
fn sum_over_row<W: Float, N: Size>(a: Vector<W, N>, b: Vector<W, N>, #[comptime] takers: Takers) -> Pair<W> {
    let of_unit = Pair::<W> { a: sum_of_vector::<W, N>(a), b: sum_of_vector::<W, N>(b) };
    sum_over_units::<W>(of_unit, comptime!(takers.units()))
}

/// The statistics of a row.
#[derive(CubeType, Clone, Copy)]
struct Statistics<W: Float, N: Size> {
    mean: Vector<W, N>,
    inverse_std: Vector<W, N>,
}

/// The statistics of the row of this unit, which all its units compute.
#[cube]
fn statistics<T: Float, W: Float, N: Size>(
    x: &LinearView<'_, Vector<T, N>>,
    share: &Share,
    row: usize,
    epsilon: W,
    #[comptime] centered: bool,
    #[comptime] takers: Takers,
) -> Statistics<W, N> {
    let start = share.row * share.vectors;
    let zero = Vector::<W, N>::new(W::new(0.0));
    let mut mean = zero;
    if comptime!(centered) {
        let mut sum = zero;
        let mut at = share.first;
        while at < share.vectors {
            sum += Vector::cast_from(x.read(start + at));
            at += share.step;
        }
        mean = Vector::new(sum_over_row::<W, N>(sum, zero, takers).a / W::cast_from(row));
    }
    let mut squares = zero;
    let mut at = share.first;
    while at < share.vectors {
        let x = Vector::<W, N>::cast_from(x.read(start + at)) - mean;
        squares += x * x;
        at += share.step;
    }
    let variance = sum_over_row::<W, N>(squares, zero, takers).a / W::cast_from(row);
    Statistics::<W, N> { mean, inverse_std: Vector::new(W::new(1.0) / (variance + epsilon).sqrt()) }
}

/// The parameters of the vector that begins at this element of a row; `missing` without parameters.
#[cube]
fn read_parameters<T: Float, W: Float, N: Size>(
    parameters: &ComptimeOption<&[T]>,
    row: usize,
    element: usize,
    shape: &RowShape,
    #[comptime] walk: Walk,
    #[comptime] missing: f32,
) -> Vector<W, N> {
    let size = N::value().comptime();
    let group = row % shape.groups * shape.channels;
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

/// With [`Takers::Grid`], the mean and the inverse standard deviation of every row are given.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(super) fn forward_kernel<T: Float, W: Float, N: Size>(
    x: LinearView<'_, Vector<T, N>>,
    mut y: LinearViewMut<'_, Vector<T, N>>,
    gamma: ComptimeOption<&[T]>,
    beta: ComptimeOption<&[T]>,
    mean: ComptimeOption<&[W]>,
    inverse_std: ComptimeOption<&[W]>,
    shape: RowShape,
    epsilon: InputScalar,
    #[comptime] centered: bool,
    #[comptime] walk: Walk,
    #[comptime] takers: Takers,
    #[define(T, W)] _dtypes: [ElemType; 2],
) {
    let size = N::value().comptime();
    let share = Share::of_unit(&shape, size, takers);
    if share.row >= shape.rows {
        terminate!();
    }
    let row = share.row;
    let mut mean = read_channels::<W, W, N>(&mean, row, true);
    let mut inverse_std = read_channels::<W, W, N>(&inverse_std, row, true);
    if comptime!(takers != Takers::Grid) {
        let of_row = statistics::<T, W, N>(&x, &share, shape.row, epsilon.get::<W>(), centered, takers);
        mean = of_row.mean;
        inverse_std = of_row.inverse_std;
    }
    let start = row * share.vectors;
    let mut at = share.first;
    while at < share.vectors {
        let x = Vector::<W, N>::cast_from(x.read(start + at));
        let mut normalized = (x - mean) * inverse_std;
        normalized *= read_parameters::<T, W, N>(&gamma, row, at * size, &shape, walk, 1.0);
        normalized += read_parameters::<T, W, N>(&beta, row, at * size, &shape, walk, 0.0);
        y.write(start + at, Vector::cast_from(normalized));
        at += share.step;
    }
}

/// With [`Takers::Grid`], the statistics of every row are given, and the sums of its `gamma dy` and `gamma dy x_hat`, `[2, rows]`.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(super) fn x_backward_kernel<T: Float, W: Float, N: Size>(
    dy: LinearView<'_, Vector<T, N>>,
    x: LinearView<'_, Vector<T, N>>,
    mut dx: LinearViewMut<'_, Vector<T, N>>,
    gamma: ComptimeOption<&[T]>,
    mean: ComptimeOption<&[W]>,
    inverse_std: ComptimeOption<&[W]>,
    sums: ComptimeOption<&[W]>,
    shape: RowShape,
    epsilon: InputScalar,
    #[comptime] centered: bool,
    #[comptime] walk: Walk,
    #[comptime] takers: Takers,
    #[define(T, W)] _dtypes: [ElemType; 2],
) {
    let size = N::value().comptime();
    let share = Share::of_unit(&shape, size, takers);
    if share.row >= shape.rows {
        terminate!();
    }
    let row = share.row;
    let start = row * share.vectors;
    let mut mean = read_channels::<W, W, N>(&mean, row, true);
    let mut inverse_std = read_channels::<W, W, N>(&inverse_std, row, true);
    let mut sum = read_channels::<W, W, N>(&sums, row, true);
    let mut products = read_channels::<W, W, N>(&sums, shape.rows + row, true);
    if comptime!(takers != Takers::Grid) {
        let of_row = statistics::<T, W, N>(&x, &share, shape.row, epsilon.get::<W>(), centered, takers);
        mean = of_row.mean;
        inverse_std = of_row.inverse_std;
        let mut at = share.first;
        while at < share.vectors {
            let mut g = Vector::<W, N>::cast_from(dy.read(start + at));
            g *= read_parameters::<T, W, N>(&gamma, row, at * size, &shape, walk, 1.0);
            sum += g;
            products += g * ((Vector::cast_from(x.read(start + at)) - mean) * inverse_std);
            at += share.step;
        }
        let total = sum_over_row::<W, N>(sum, products, takers);
        sum = Vector::new(total.a);
        products = Vector::new(total.b);
    }
    let length = Vector::<W, N>::new(W::cast_from(shape.row));
    let mut mean_g = Vector::<W, N>::new(W::new(0.0));
    if comptime!(centered) {
        mean_g = sum / length;
    }
    let mean_product = products / length;
    let mut at = share.first;
    while at < share.vectors {
        let mut g = Vector::<W, N>::cast_from(dy.read(start + at));
        g *= read_parameters::<T, W, N>(&gamma, row, at * size, &shape, walk, 1.0);
        let normalized = (Vector::cast_from(x.read(start + at)) - mean) * inverse_std;
        let gradient = (g - mean_g - normalized * mean_product) * inverse_std;
        dx.write(start + at, Vector::cast_from(gradient));
        at += share.step;
    }
}

/// The mean and inverse standard deviation of every row.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(super) fn statistics_kernel<T: Float, W: Float, N: Size>(
    x: LinearView<'_, Vector<T, N>>,
    mut mean: LinearViewMut<'_, W>,
    mut inverse_std: LinearViewMut<'_, W>,
    shape: RowShape,
    epsilon: InputScalar,
    #[comptime] centered: bool,
    #[comptime] takers: Takers,
    #[define(T, W)] _dtypes: [ElemType; 2],
) {
    let share = Share::of_unit(&shape, N::value().comptime(), takers);
    if share.row >= shape.rows {
        terminate!();
    }
    let of_row = statistics::<T, W, N>(&x, &share, shape.row, epsilon.get::<W>(), centered, takers);
    if share.first == 0 {
        mean.write(share.row, of_row.mean.extract(0usize));
        inverse_std.write(share.row, of_row.inverse_std.extract(0usize));
    }
}
