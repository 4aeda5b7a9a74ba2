//! Reductions of rows, each by one unit or by the units of a cube.
use super::division::Cubes;
use burn_cubecl::cubecl::{self, prelude::*};

/// The row of this unit; there may be more units than rows.
#[cube]
pub(crate) fn row_of_unit(#[comptime] units: usize) -> usize {
    if comptime!(units == 1) { ABSOLUTE_POS } else { CUBE_POS }
}

/// The number of this unit among those of its row.
#[cube]
pub(crate) fn unit_of_row(#[comptime] units: usize) -> usize {
    if comptime!(units == 1) { 0usize.runtime() } else { UNIT_POS as usize }
}

/// Two numbers.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct Pair<W: Float> {
    pub a: W,
    pub b: W,
}

/// The sums over all units of a row, for each of them.
#[cube]
pub(crate) fn sum_over_units<W: Float>(of_unit: Pair<W>, #[comptime] units: usize) -> Pair<W> {
    if comptime!(units == 1) { of_unit } else { sum_of_units::<W>(of_unit, units) }
}

#[cube]
fn sum_of_units<W: Float>(of_unit: Pair<W>, #[comptime] units: usize) -> Pair<W> {
    let mut sums = Shared::<[W]>::new_slice(comptime!(2 * units));
    let unit = UNIT_POS as usize;
    sums[unit] = of_unit.a;
    sums[units + unit] = of_unit.b;
    sync_cube();
    let steps = comptime!(units.ilog2() as usize);
    #[unroll]
    for step in 0..steps {
        let half = comptime!(units >> (step + 1));
        if unit < half {
            sums[unit] = sums[unit] + sums[unit + half];
            sums[units + unit] = sums[units + unit] + sums[units + unit + half];
        }
        sync_cube();
    }
    let total = Pair::<W> { a: sums[0], b: sums[units] };
    // The next sum may take the same memory.
    sync_cube();
    total
}

/// The largest number of all units of a row, for each of them.
#[cube]
pub(crate) fn max_over_units<W: Numeric>(of_unit: W, #[comptime] units: usize) -> W {
    if comptime!(units == 1) { of_unit } else { max_of_units::<W>(of_unit, units) }
}

#[cube]
fn max_of_units<W: Numeric>(of_unit: W, #[comptime] units: usize) -> W {
    let mut largest = Shared::<[W]>::new_slice(units);
    let unit = UNIT_POS as usize;
    largest[unit] = of_unit;
    sync_cube();
    let steps = comptime!(units.ilog2() as usize);
    #[unroll]
    for step in 0..steps {
        let half = comptime!(units >> (step + 1));
        if unit < half {
            largest[unit] = max(largest[unit], largest[unit + half]);
        }
        sync_cube();
    }
    let largest_of_all = largest[0];
    // The next reduction may take the same memory.
    sync_cube();
    largest_of_all
}

/// The largest element of a vector.
#[cube]
pub(crate) fn max_of_vector<W: Float, N: Size>(vector: Vector<W, N>) -> W {
    let mut largest = vector.extract(0usize);
    let size = N::value().comptime();
    #[unroll]
    for i in 1..size {
        largest = max(largest, vector.extract(i));
    }
    largest
}

/// The sum of the elements of a vector.
#[cube]
pub(crate) fn sum_of_vector<W: Float, N: Size>(vector: Vector<W, N>) -> W {
    let mut sum = vector.extract(0usize);
    let size = N::value().comptime();
    #[unroll]
    for i in 1..size {
        sum += vector.extract(i);
    }
    sum
}

/// Two sums for every element of a vector.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct Sums<W: Float, N: Size> {
    pub a: Vector<W, N>,
    pub b: Vector<W, N>,
}

/// The sums over all units of a cube that share a column, for each of them. `slot`: the place of this unit, ordered by its number among
/// those of its column, then by columns.
#[cube]
pub(crate) fn sum_over_column<W: Float, N: Size>(
    of_unit: Sums<W, N>,
    slot: usize,
    #[comptime] cubes: Cubes,
) -> Sums<W, N> {
    if comptime!(cubes.along == 1) { of_unit } else { sum_of_column::<W, N>(of_unit, slot, cubes) }
}

#[cube]
fn sum_of_column<W: Float, N: Size>(
    of_unit: Sums<W, N>,
    slot: usize,
    #[comptime] cubes: Cubes,
) -> Sums<W, N> {
    let units = comptime!(cubes.across * cubes.along);
    let mut a = Shared::<[Vector<W, N>]>::new_slice(units);
    let mut b = Shared::<[Vector<W, N>]>::new_slice(units);
    a[slot] = of_unit.a;
    b[slot] = of_unit.b;
    sync_cube();
    let steps = comptime!(cubes.along.ilog2() as usize);
    #[unroll]
    for step in 0..steps {
        let half = comptime!(units >> (step + 1));
        if slot < half {
            a[slot] = a[slot] + a[slot + half];
            b[slot] = b[slot] + b[slot + half];
        }
        sync_cube();
    }
    let column = slot % comptime!(cubes.across);
    let total = Sums::<W, N> { a: a[column], b: b[column] };
    // The next sum may take the same memory.
    sync_cube();
    total
}
