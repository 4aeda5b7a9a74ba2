//! Sums over the units of a cube.
use burn_cubecl::cubecl::{self, prelude::*};

/// The most units of a cube that reduces a row: every device has as many.
const MOST_UNITS: usize = 256;
/// Vectors of a row for each unit, below which there are fewer units.
const VECTORS: usize = 4;

/// Units of a cube that reduces a row of so many vectors; a power of two.
pub(crate) fn units_of_row(vectors: usize) -> usize {
    vectors.div_ceil(VECTORS).next_power_of_two().clamp(8, MOST_UNITS)
}

/// As many cubes, in a grid that every device takes. There may be more: [`CUBE_POS`] must be compared.
pub(crate) fn cubes(count: usize) -> CubeCount {
    const ROW: usize = 1 << 15;
    CubeCount::new_2d(count.min(ROW) as u32, count.div_ceil(ROW) as u32)
}

/// Two numbers.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct Pair<W: Float> {
    pub a: W,
    pub b: W,
}

/// The sums over all units, for every unit.
#[cube]
pub(crate) fn sum_over_cube<W: Float>(of_unit: Pair<W>, #[comptime] units: usize) -> Pair<W> {
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

/// The largest number of all units, for every unit.
#[cube]
pub(crate) fn max_over_cube<W: Numeric>(of_unit: W, #[comptime] units: usize) -> W {
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
