//! The kernels of batch normalization on devices.
use crate::backend::cube::channels::{ChannelsShape, VectorsOfPart, read_channels};
use crate::backend::cube::{Pair, sum_of_vector, sum_over_units};
use burn_cubecl::cubecl::{
    self,
    ir::ElemType,
    prelude::*,
    std::tensor::layout::linear::{LinearView, LinearViewMut},
};

/// For every part and channel, the mean and the sum of squared distances from it: one cube each.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(super) fn moments_of_cubes<T: Float, W: Float, N: Size>(
    x: LinearView<'_, Vector<T, N>>,
    mut parts: LinearViewMut<'_, W>,
    shape: ChannelsShape,
    #[comptime] units: usize,
    #[comptime] several: bool,
    #[define(T, W)] _dtypes: [ElemType; 2],
) {
    let (part, channel) = (CUBE_POS / shape.channels, CUBE_POS % shape.channels);
    if part * shape.length >= shape.repeats {
        terminate!();
    }
    let size = N::value().comptime();
    let vectors = VectorsOfPart::new(&shape, part, channel, size, several);
    let zero = W::new(0.0);
    let mut sum = Vector::<W, N>::new(zero);
    let mut at = UNIT_POS as usize;
    while at < vectors.count {
        sum += Vector::cast_from(x.read(vectors.position(at)));
        at += units;
    }
    let of_unit = Pair::<W> { a: sum_of_vector::<W, N>(sum), b: zero };
    let mean = sum_over_units::<W>(of_unit, units).a / W::cast_from(vectors.count * size);
    let mut squares = Vector::<W, N>::new(zero);
    let mut at = UNIT_POS as usize;
    while at < vectors.count {
        let distance = Vector::<W, N>::cast_from(x.read(vectors.position(at))) - Vector::new(mean);
        squares += distance * distance;
        at += units;
    }
    let of_unit = Pair::<W> { a: sum_of_vector::<W, N>(squares), b: zero };
    let squares = sum_over_units::<W>(of_unit, units).a;
    if UNIT_POS == 0 {
        parts.write(2 * part * shape.channels + channel, mean);
        parts.write((2 * part + 1) * shape.channels + channel, squares);
    }
}

/// The same for every part and channel: one unit for each vector of channels. Welford, Note on a method for calculating corrected sums
/// of squares and products (Technometrics 1962).
#[cube(launch_unchecked, address_type = "dynamic")]
pub(super) fn moments_of_units<T: Float, W: Float, N: Size>(
    x: LinearView<'_, Vector<T, N>>,
    mut parts: LinearViewMut<'_, Vector<W, N>>,
    shape: ChannelsShape,
    #[define(T, W)] _dtypes: [ElemType; 2],
) {
    let size = N::value().comptime();
    let vectors = shape.channels / size;
    let (part, vector) = (ABSOLUTE_POS / vectors, ABSOLUTE_POS % vectors);
    if part * shape.length >= shape.repeats {
        terminate!();
    }
    let mut mean = Vector::<W, N>::new(W::new(0.0));
    let mut squares = Vector::<W, N>::new(W::new(0.0));
    let mut count = W::new(0.0);
    for repeat in part * shape.length..min((part + 1) * shape.length, shape.repeats) {
        let x = Vector::<W, N>::cast_from(x.read(repeat * vectors + vector));
        count += W::new(1.0);
        let distance = x - mean;
        mean += distance * Vector::new(W::new(1.0) / count);
        squares += distance * (x - mean);
    }
    parts.write(2 * part * vectors + vector, mean);
    parts.write((2 * part + 1) * vectors + vector, squares);
}

/// The mean and variance of all parts together. All but the last part have the same number of elements. Chan, Golub and LeVeque,
/// Updating formulae and a pairwise algorithm for computing sample variances (1979).
#[cube(launch_unchecked, address_type = "dynamic")]
pub(super) fn merge_moments<W: Float>(
    parts: LinearView<'_, W>,
    mut mean: LinearViewMut<'_, W>,
    mut variance: LinearViewMut<'_, W>,
    number: usize,
    channels: usize,
    length: usize,
    total: usize,
    #[define(W)] _dtype: ElemType,
) {
    let channel = ABSOLUTE_POS;
    if channel >= channels {
        terminate!();
    }
    let mut merged = W::new(0.0);
    let mut squares = W::new(0.0);
    for part in 0..number {
        let before = W::cast_from(part * length);
        let of_part = W::cast_from(min(length, total - part * length));
        let distance = parts.read(2 * part * channels + channel) - merged;
        let share = of_part / (before + of_part);
        merged += distance * share;
        squares += parts.read((2 * part + 1) * channels + channel) + distance * before * distance * share;
    }
    mean.write(channel, merged);
    variance.write(channel, squares / W::cast_from(total));
}

/// The channel of the vector at this position, or the first of its channels.
#[cube]
fn channel_here(shape: &ChannelsShape, #[comptime] size: usize) -> usize {
    ABSOLUTE_POS * size / shape.inner % shape.channels
}

#[cube(launch_unchecked, address_type = "dynamic")]
pub(super) fn normalize_kernel<T: Float, W: Float, S: Float, N: Size>(
    x: LinearView<'_, Vector<T, N>>,
    mut y: LinearViewMut<'_, Vector<T, N>>,
    mean: ComptimeOption<&[S]>,
    variance: ComptimeOption<&[S]>,
    gamma: ComptimeOption<&[T]>,
    beta: ComptimeOption<&[T]>,
    shape: ChannelsShape,
    epsilon: InputScalar,
    #[comptime] one: bool,
    #[define(T, W)] _dtypes: [ElemType; 2],
    #[define(S)] _of_statistics: ElemType,
) {
    if !y.is_in_bounds(ABSOLUTE_POS) {
        terminate!();
    }
    let channel = channel_here(&shape, N::value().comptime());
    let std = (read_channels::<S, W, N>(&variance, channel, one) + Vector::new(epsilon.get::<W>())).sqrt();
    let distance =
        Vector::<W, N>::cast_from(x.read(ABSOLUTE_POS)) - read_channels::<S, W, N>(&mean, channel, one);
    let scaled = distance * (read_channels::<T, W, N>(&gamma, channel, one) / std);
    y.write(ABSOLUTE_POS, Vector::cast_from(scaled + read_channels::<T, W, N>(&beta, channel, one)));
}

#[cfg(not(feature = "fusion"))]
#[cube(launch_unchecked, address_type = "dynamic")]
pub(super) fn scale_kernel<T: Float, W: Float, N: Size>(
    dy: LinearView<'_, Vector<T, N>>,
    mut dx: LinearViewMut<'_, Vector<T, N>>,
    variance: ComptimeOption<&[T]>,
    gamma: ComptimeOption<&[T]>,
    shape: ChannelsShape,
    epsilon: InputScalar,
    #[comptime] one: bool,
    #[define(T, W)] _dtypes: [ElemType; 2],
) {
    if !dx.is_in_bounds(ABSOLUTE_POS) {
        terminate!();
    }
    let channel = channel_here(&shape, N::value().comptime());
    let std = (read_channels::<T, W, N>(&variance, channel, one) + Vector::new(epsilon.get::<W>())).sqrt();
    let scale = read_channels::<T, W, N>(&gamma, channel, one) / std;
    dx.write(ABSOLUTE_POS, Vector::cast_from(Vector::<W, N>::cast_from(dy.read(ABSOLUTE_POS)) * scale));
}

/// `sums` are those of `dy` and of its products with the normalized `x`, `[2, channels]`.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(super) fn x_backward_kernel<T: Float, W: Float, S: Float, N: Size>(
    dy: LinearView<'_, Vector<T, N>>,
    x: LinearView<'_, Vector<T, N>>,
    mut dx: LinearViewMut<'_, Vector<T, N>>,
    mean: ComptimeOption<&[S]>,
    variance: ComptimeOption<&[S]>,
    gamma: ComptimeOption<&[T]>,
    sums: ComptimeOption<&[W]>,
    shape: ChannelsShape,
    epsilon: InputScalar,
    #[comptime] one: bool,
    #[define(T, W)] _dtypes: [ElemType; 2],
    #[define(S)] _of_statistics: ElemType,
) {
    if !dx.is_in_bounds(ABSOLUTE_POS) {
        terminate!();
    }
    let channel = channel_here(&shape, N::value().comptime());
    let variance = read_channels::<S, W, N>(&variance, channel, one);
    let inverse_std = Vector::new(W::new(1.0)) / (variance + Vector::new(epsilon.get::<W>())).sqrt();
    let distance =
        Vector::<W, N>::cast_from(x.read(ABSOLUTE_POS)) - read_channels::<S, W, N>(&mean, channel, one);
    let share = Vector::<W, N>::new(W::new(1.0) / W::cast_from(shape.repeats * shape.inner));
    let mean_of_dy = read_channels::<W, W, N>(&sums, channel, one) * share;
    let mean_of_products = read_channels::<W, W, N>(&sums, shape.channels + channel, one) * share;
    let normalized = distance * inverse_std;
    let centered =
        Vector::<W, N>::cast_from(dy.read(ABSOLUTE_POS)) - mean_of_dy - normalized * mean_of_products;
    let scale = read_channels::<T, W, N>(&gamma, channel, one) * inverse_std;
    dx.write(ABSOLUTE_POS, Vector::cast_from(centered * scale));
}
