//! The kernels of sums by columns: see [`division`](super::division).
use super::division::Cubes;
use super::reduce::{Sums, sum_of_vector, sum_over_column};
use burn_cubecl::cubecl::{
    self,
    ir::ElemType,
    prelude::*,
    std::tensor::layout::linear::{LinearView, LinearViewMut},
};

/// Columns of vectors, whose terms are added up in parts.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct ColumnsShape {
    columns: usize,
    terms: usize,
    /// Terms of a part.
    length: usize,
    /// Terms of a column that lie side by side.
    plane: usize,
}

/// What a kernel is compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct ColumnsVariant {
    pub cubes: Cubes,
    /// Whether the elements of a vector are of neighboring channels, and vectors of neighboring columns lie side by side. Otherwise, a
    /// column is a channel, and its terms lie side by side.
    pub near: bool,
    /// Whether a column has several planes.
    pub several: bool,
}

/// What a unit adds up.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct Share {
    pub part: usize,
    /// There may be more units than columns: the others take the last one.
    column: usize,
    /// See [`sum_over_column`].
    pub slot: usize,
    /// The first term of the unit, and the end of its part.
    pub first: usize,
    pub end: usize,
    /// The part and the column have sums that this unit writes, if this is 0.
    idle: usize,
}

#[cube]
impl Share {
    pub fn of_unit(shape: &ColumnsShape, #[comptime] variant: ColumnsVariant) -> Share {
        let across = comptime!(variant.cubes.across);
        let along = comptime!(variant.cubes.along);
        let blocks = (shape.columns + comptime!(across - 1)) / across;
        let (part, block) = (CUBE_POS / blocks, CUBE_POS % blocks);
        let unit = UNIT_POS as usize;
        let mut lane = unit % across;
        let mut number = unit / across;
        if comptime!(!variant.near) {
            lane = unit / along;
            number = unit % along;
        }
        let column = block * across + lane;
        let last = shape.columns - 1;
        let start = part * shape.length;
        Share {
            part,
            column: min(column, last),
            slot: number * across + lane,
            first: start + number,
            end: min(start + shape.length, shape.terms),
            idle: number + max(column, last) - last,
        }
    }

    /// The channel of the column, or the first one of its vectors.
    pub fn channel(&self, #[comptime] size: usize, #[comptime] near: bool) -> usize {
        if comptime!(near) { self.column * size } else { self.column }
    }

    /// Where a term lies in the tensor, counted in vectors.
    pub fn position(&self, shape: &ColumnsShape, term: usize, #[comptime] variant: ColumnsVariant) -> usize {
        if comptime!(variant.near) {
            term * shape.columns + self.column
        } else if comptime!(variant.several) {
            (term / shape.plane * shape.columns + self.column) * shape.plane + term % shape.plane
        } else {
            self.column * shape.plane + term
        }
    }

    /// Writes the two results of the column or of each of its channels to `[parts, 2, channels]`.
    pub fn write<W: Float, N: Size>(
        &self,
        parts: &mut LinearViewMut<'_, W>,
        of_column: Sums<W, N>,
        shape: &ColumnsShape,
        #[comptime] near: bool,
    ) {
        if self.idle == 0 {
            let size = N::value().comptime();
            let written = if comptime!(near) { size } else { comptime!(1) };
            let channel = self.channel(size, near);
            let channels = shape.columns * written;
            #[unroll]
            for lane in 0..written {
                parts.write(2 * self.part * channels + channel + lane, of_column.a.extract(lane));
                parts.write((2 * self.part + 1) * channels + channel + lane, of_column.b.extract(lane));
            }
        }
    }
}

/// The sum of a column of vectors, of which each element is a channel or all of them are one.
#[cube]
pub(crate) fn of_channels<W: Float, N: Size>(sum: Vector<W, N>, #[comptime] near: bool) -> Vector<W, N> {
    if comptime!(near) { sum } else { Vector::new(sum_of_vector::<W, N>(sum)) }
}

/// Which statistics [`sums_kernel`] normalizes with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Statistics {
    /// A mean and a variance for each channel.
    Variances,
    /// A mean and an inverse standard deviation for each channel.
    Channels,
    /// The same for each row: see [`RowsShape`].
    Rows,
    /// The same, if every term of a column is of another row.
    Terms,
}

/// Rows whose channels are divided into groups. With statistics by rows, `inner` terms of a column are of one row; with a factor, `inner`
/// elements of a column, which is a row, have the same one.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct RowsShape {
    pub groups: usize,
    pub channels: usize,
    pub inner: usize,
}

#[cube(launch_unchecked, address_type = "dynamic")]
pub(super) fn sums_kernel<T: Float, W: Float, S: Float, N: Size>(
    dy: LinearView<'_, Vector<T, N>>,
    x: ComptimeOption<LinearView<'_, Vector<T, N>>>,
    mean: ComptimeOption<&[S]>,
    spread: ComptimeOption<&[S]>,
    factor: ComptimeOption<&[T]>,
    mut parts: LinearViewMut<'_, W>,
    shape: ColumnsShape,
    rows: RowsShape,
    epsilon: InputScalar,
    #[comptime] variant: ColumnsVariant,
    #[comptime] statistics: Statistics,
    #[comptime] weighted: bool,
    #[define(T, W)] _dtypes: [ElemType; 2],
    #[define(S)] _of_statistics: ElemType,
) {
    let share = Share::of_unit(&shape, variant);
    if share.part * shape.length >= shape.terms {
        terminate!();
    }
    let size = N::value().comptime();
    let near = comptime!(variant.near);
    let channel = share.channel(size, near);
    let zero = Vector::<W, N>::new(W::new(0.0));
    let (mut center, mut inverse_std) = (zero, zero);
    if comptime!(matches!(statistics, Statistics::Variances | Statistics::Channels)) {
        center = read_channels::<S, W, N>(&mean, channel, comptime!(!near));
        inverse_std = read_channels::<S, W, N>(&spread, channel, comptime!(!near));
    }
    if comptime!(statistics == Statistics::Variances) {
        inverse_std = Vector::new(W::new(1.0)) / (inverse_std + Vector::new(epsilon.get::<W>())).sqrt();
    }
    let (mut sum, mut product) = (zero, zero);
    let mut term = share.first;
    while term < share.end {
        if comptime!(matches!(statistics, Statistics::Rows | Statistics::Terms)) {
            let mut repeat = term;
            if comptime!(statistics == Statistics::Rows) {
                repeat /= rows.inner;
            }
            let row = repeat * rows.groups + channel / rows.channels;
            center = read_channels::<S, W, N>(&mean, row, true);
            inverse_std = read_channels::<S, W, N>(&spread, row, true);
        }
        let at = share.position(&shape, term, variant);
        let mut dy = Vector::<W, N>::cast_from(dy.read(at));
        if comptime!(weighted) {
            dy *= factors::<T, W, N>(&factor, channel, term * size, &rows);
        }
        let x: ComptimeOption<Vector<T, N>> = x.as_ref().map(|x| x.read(at));
        let x = Vector::<W, N>::cast_from(x.unwrap_or(Vector::new(T::new(0.0))));
        sum += dy;
        product += dy * ((x - center) * inverse_std);
        term += comptime!(variant.cubes.along);
    }
    let of_unit = Sums::<W, N> { a: sum, b: product };
    let total = sum_over_column::<W, N>(of_unit, share.slot, comptime!(variant.cubes));
    let of_column =
        Sums::<W, N> { a: of_channels::<W, N>(total.a, near), b: of_channels::<W, N>(total.b, near) };
    share.write::<W, N>(&mut parts, of_column, &shape, near);
}

/// The factors of the elements of a row from this one on.
#[cube]
fn factors<T: Float, W: Float, N: Size>(
    factor: &ComptimeOption<&[T]>,
    row: usize,
    element: usize,
    rows: &RowsShape,
) -> Vector<W, N> {
    let size = N::value().comptime();
    let mut factors = Vector::<W, N>::new(W::new(0.0));
    let group = row % rows.groups * rows.channels;
    #[unroll]
    for lane in 0..size {
        let channel = group + (element + lane) / rows.inner % rows.channels;
        let of_element: ComptimeOption<T> = factor.as_ref().map(|factor| factor[channel]);
        factors.insert(lane, W::cast_from(of_element.unwrap_or(T::new(1.0))));
    }
    factors
}

/// The values of the channels from this one on; with `one`, the value of this channel. Zeros without values.
#[cube]
pub(crate) fn read_channels<T: Float, W: Float, N: Size>(
    values: &ComptimeOption<&[T]>,
    channel: usize,
    #[comptime] one: bool,
) -> Vector<W, N> {
    let size = N::value().comptime();
    let mut read = Vector::<W, N>::new(W::new(0.0));
    #[unroll]
    for i in 0..size {
        let mut of = channel;
        if comptime!(!one) {
            of += i;
        }
        let value: ComptimeOption<T> = values.as_ref().map(|values| values[of]);
        read.insert(i, W::cast_from(value.unwrap_or(T::new(0.0))));
    }
    read
}

/// The sums over all parts, `[parts, 2, channels]`.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(super) fn merge_sums<T: Float, W: Float, N: Size>(
    parts: LinearView<'_, Vector<W, N>>,
    mut a: LinearViewMut<'_, Vector<T, N>>,
    mut b: LinearViewMut<'_, Vector<T, N>>,
    mut both: LinearViewMut<'_, W>,
    shape: ColumnsShape,
    #[comptime] variant: ColumnsVariant,
    #[define(T, W)] _dtypes: [ElemType; 2],
) {
    let share = Share::of_unit(&shape, variant);
    if share.part > 0 {
        terminate!();
    }
    let zero = Vector::<W, N>::new(W::new(0.0));
    let (mut sum, mut product) = (zero, zero);
    let mut part = share.first;
    while part < share.end {
        sum += parts.read(2 * part * shape.columns + share.column);
        product += parts.read((2 * part + 1) * shape.columns + share.column);
        part += comptime!(variant.cubes.along);
    }
    let of_unit = Sums::<W, N> { a: sum, b: product };
    let total = sum_over_column::<W, N>(of_unit, share.slot, comptime!(variant.cubes));
    if share.idle == 0 {
        a.write(share.column, Vector::cast_from(total.a));
        b.write(share.column, Vector::cast_from(total.b));
    }
    share.write::<W, N>(&mut both, total, &shape, true);
}

/// For every part and channel, the mean and the sum of squared distances from it. Units take the terms one by one: Welford, Note on a method
/// for calculating corrected sums of squares and products (Technometrics 1962).
#[cube(launch_unchecked, address_type = "dynamic")]
pub(super) fn moments_kernel<T: Float, W: Float, N: Size>(
    x: LinearView<'_, Vector<T, N>>,
    mut parts: LinearViewMut<'_, W>,
    shape: ColumnsShape,
    #[comptime] variant: ColumnsVariant,
    #[define(T, W)] _dtypes: [ElemType; 2],
) {
    let share = Share::of_unit(&shape, variant);
    if share.part * shape.length >= shape.terms {
        terminate!();
    }
    let size = N::value().comptime();
    let near = comptime!(variant.near);
    let zero = Vector::<W, N>::new(W::new(0.0));
    let (mut mean, mut squares) = (zero, zero);
    let mut count = W::new(0.0);
    let mut term = share.first;
    while term < share.end {
        let x = Vector::<W, N>::cast_from(x.read(share.position(&shape, term, variant)));
        count += W::new(1.0);
        let distance = x - mean;
        mean += distance * Vector::new(W::new(1.0) / count);
        squares += distance * (x - mean);
        term += comptime!(variant.cubes.along);
    }
    let mut of_channel = share.end - share.part * shape.length;
    if comptime!(!near) {
        of_channel *= size;
    }
    let of_unit = Moments::<W, N> { mean, squares, count };
    let of_part = merged_moments::<W, N>(of_unit, W::cast_from(of_channel), share.slot, variant);
    share.write::<W, N>(&mut parts, of_part, &shape, near);
}

/// The moments of as many numbers, for every element of a vector.
#[derive(CubeType, Clone, Copy)]
struct Moments<W: Float, N: Size> {
    mean: Vector<W, N>,
    /// The sum of squared distances from the mean.
    squares: Vector<W, N>,
    count: W,
}

/// The mean of all units of a column, and the sum of squared distances from it. Chan, Golub and LeVeque, Updating formulae and a pairwise
/// algorithm for computing sample variances (1979).
#[cube]
fn merged_moments<W: Float, N: Size>(
    of_unit: Moments<W, N>,
    total: W,
    slot: usize,
    #[comptime] variant: ColumnsVariant,
) -> Sums<W, N> {
    let cubes = comptime!(variant.cubes);
    let near = comptime!(variant.near);
    let zero = Vector::<W, N>::new(W::new(0.0));
    let count = Vector::<W, N>::new(of_unit.count);
    let sums = sum_over_column::<W, N>(Sums::<W, N> { a: of_unit.mean * count, b: zero }, slot, cubes);
    let mean = of_channels::<W, N>(sums.a, near) / Vector::new(total);
    // A unit without elements has no mean, and the square of a large distance is no number times zero.
    let distance = select(of_unit.count == W::new(0.0), zero, of_unit.mean - mean);
    let squares = of_unit.squares + distance * distance * count;
    let sums = sum_over_column::<W, N>(Sums::<W, N> { a: squares, b: zero }, slot, cubes);
    Sums::<W, N> { a: mean, b: of_channels::<W, N>(sums.a, near) }
}

/// What [`merge_moments`] writes beside the mean.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Spread {
    Variance,
    /// One by the standard deviation, or by the root of the mean square if not `centered`; the mean is 0 then.
    Inverse {
        centered: bool,
    },
}

/// The moments of all parts together, all but the last of which have as many elements.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(super) fn merge_moments<W: Float, N: Size>(
    parts: LinearView<'_, Vector<W, N>>,
    mut mean: LinearViewMut<'_, Vector<W, N>>,
    mut spread: LinearViewMut<'_, Vector<W, N>>,
    shape: ColumnsShape,
    length: usize,
    total: usize,
    epsilon: InputScalar,
    #[comptime] variant: ColumnsVariant,
    #[comptime] written: Spread,
    #[define(W)] _dtype: ElemType,
) {
    let share = Share::of_unit(&shape, variant);
    if share.part > 0 {
        terminate!();
    }
    let zero = Vector::<W, N>::new(W::new(0.0));
    let (mut merged, mut squares) = (zero, zero);
    let mut count = W::new(0.0);
    let mut part = share.first;
    while part < share.end {
        let of_part = W::cast_from(min(length, total - part * length));
        let distance = parts.read(2 * part * shape.columns + share.column) - merged;
        let before = Vector::<W, N>::new(count);
        count += of_part;
        let weight = Vector::<W, N>::new(of_part / count);
        merged += distance * weight;
        squares +=
            parts.read((2 * part + 1) * shape.columns + share.column) + distance * before * distance * weight;
        part += comptime!(variant.cubes.along);
    }
    let of_unit = Moments::<W, N> { mean: merged, squares, count };
    let total = W::cast_from(total);
    let of_all = merged_moments::<W, N>(of_unit, total, share.slot, variant);
    if share.idle == 0 {
        let mut center = of_all.a;
        let mut square = of_all.b / Vector::new(total);
        if comptime!(written == Spread::Inverse { centered: false }) {
            square += center * center;
            center = zero;
        }
        if comptime!(written != Spread::Variance) {
            square = Vector::new(W::new(1.0)) / (square + Vector::new(epsilon.get::<W>())).sqrt();
        }
        mean.write(share.column, center);
        spread.write(share.column, square);
    }
}
