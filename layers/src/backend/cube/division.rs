//! How devices divide reductions among units: pure functions of sizes and of the number of multiprocessors.
//!
//! Every sum is made in two stages. First, each cube adds up a part of the terms of one or several columns: every unit adds up a few, and
//! the units of a cube add up theirs as a tree. Then, further cubes merge the parts in the same way. So sums of sums have few terms each,
//! and their error does not grow with the number of terms.

/// The most units of a cube: every device has as many.
pub(super) const UNITS: usize = 256;
/// Cubes with fewer units leave lanes of a multiprocessor idle.
const FEWEST_UNITS: usize = 64;
/// Cubes that keep a multiprocessor busy while some of them wait for memory.
const CUBES: usize = 8;
/// A unit adds up at most so many vectors one after another. The sum of so many equal numbers in f32 is exact to 1e-5.
const MOST_TURNS: usize = 256;
/// With fewer vectors for each unit, a part is not worth the two numbers that it makes.
const FEWEST_TURNS: usize = 16;

/// How a cube divides columns and their terms among its units. A kernel is compiled for each.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Cubes {
    /// Units with a column each.
    pub across: usize,
    /// Units that share a column, a power of two.
    pub along: usize,
}

/// How the sums of the columns of a matrix, whose rows are their terms, are divided among cubes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Columns {
    pub cubes: Cubes,
    /// Cubes that share a column.
    pub parts: usize,
    /// Terms of a part; the last one may have fewer.
    pub length: usize,
}

impl Columns {
    /// `near`: whether columns lie side by side in memory, rather than the terms of a column.
    pub fn of(columns: usize, terms: usize, near: bool, multiprocessors: usize) -> Self {
        let lanes = if near { lanes(columns) } else { 1 };
        let along = terms.div_ceil(FEWEST_TURNS / 2).next_power_of_two().min(UNITS / lanes);
        let across = lanes.max((FEWEST_UNITS / along).min(columns.next_power_of_two()));
        let busy = (CUBES * multiprocessors).div_ceil(columns.div_ceil(across).max(1));
        let parts = busy.min(terms / (FEWEST_TURNS * along)).max(terms.div_ceil(MOST_TURNS * along));
        let length = terms.div_ceil(parts.max(1)).max(1);
        Self { cubes: Cubes { across, along }, parts: terms.div_ceil(length), length }
    }

    /// For the second stage, in which one cube merges all parts of its columns.
    pub fn merging(columns: usize, parts: usize) -> Self {
        /// Columns of a cube, if there are many parts.
        const ACROSS: usize = 4;
        let along = parts.div_ceil(2).next_power_of_two().min(UNITS / ACROSS);
        let across = (FEWEST_UNITS / along).max(ACROSS).min(columns.next_power_of_two());
        Self { cubes: Cubes { across, along }, parts: 1, length: parts.max(1) }
    }

    /// The cubes of all columns and parts.
    pub fn count(&self, columns: usize) -> usize {
        self.parts * columns.div_ceil(self.cubes.across)
    }
}

/// How many units of a cube take neighboring columns: as many as read whole lines of memory, where few of them have none.
fn lanes(columns: usize) -> usize {
    let few_idle = |lanes: &usize| columns.next_multiple_of(*lanes) * 4 <= columns * 5;
    [32, 16].into_iter().find(few_idle).unwrap_or(8).min(columns.next_power_of_two())
}

/// Each unit has about so many elements of a row: shorter rows have fewer units.
const ELEMENTS: usize = 16;
/// The fewest units of a cube that reduces a row.
const FEWEST_UNITS_OF_ROW: usize = 8;
/// One unit reduces a row of up to so many elements: most units of a cube would have nothing to do, and all wait for each other.
const SHORT: usize = 64;

/// How many units reduce a row of so many elements, a power of two: one unit, or those of a cube.
pub(crate) fn units_of_row(elements: usize) -> usize {
    match elements {
        0..=SHORT => 1,
        _ => elements.div_ceil(ELEMENTS).next_power_of_two().clamp(FEWEST_UNITS_OF_ROW, UNITS),
    }
}

/// Whether so many rows of so many vectors are divided among several cubes each: they are too long for a cube, or too few for a device.
pub(crate) fn are_rows_divided(rows: usize, vectors: usize, multiprocessors: usize) -> bool {
    /// As many as take longer than two further kernels.
    const LONG: usize = 64;
    let turns = vectors.div_ceil(UNITS);
    turns > MOST_TURNS || turns >= LONG && rows < multiprocessors
}
