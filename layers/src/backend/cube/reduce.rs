//! Reductions of rows, each by one unit or by the units of a cube.
use burn_cubecl::cubecl::{self, prelude::*};

/// The most units of a cube that reduces a row: every device has as many.
const MOST_UNITS: usize = 256;
/// Each unit has about so many elements of a row: shorter rows have fewer units.
const ELEMENTS: usize = 16;

/// The fewest units of a cube that reduces a row.
pub(crate) const FEWEST_UNITS: usize = 8;
/// One unit reduces a row of up to so many elements: most units of a cube would have nothing to do, and all wait for each other.
const SHORT: usize = 64;

/// How many units reduce a row of so many elements, a power of two: one unit, or those of a cube.
pub(crate) fn units_of_row(elements: usize) -> usize {
    match elements {
        0..=SHORT => 1,
        _ => elements.div_ceil(ELEMENTS).next_power_of_two().clamp(FEWEST_UNITS, MOST_UNITS),
    }
}

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
