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
        let lanes = ACROSS.min(columns.next_power_of_two());
        let along = parts.div_ceil(2).next_power_of_two().min(UNITS / lanes);
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
/// Cubes are larger where their units would have more elements of a row.
const MANY_ELEMENTS: usize = 256;

/// How many units reduce a row of so many elements, a power of two: one unit, or those of a cube, `most` of a very long row.
pub(crate) fn units_of_row(elements: usize, most: usize) -> usize {
    let with = |elements_of_unit: usize| elements.div_ceil(elements_of_unit).next_power_of_two();
    match elements {
        0..=SHORT => 1,
        _ => with(ELEMENTS).clamp(FEWEST_UNITS_OF_ROW, UNITS).max(with(MANY_ELEMENTS)).min(most),
    }
}

/// Whether so many rows are divided among several cubes each, since they are too long for a cube, whose units would take so many vectors
/// each, or too few for a device.
pub(crate) fn are_rows_divided(rows: usize, turns: usize, multiprocessors: usize) -> bool {
    /// As many as take longer than two further kernels.
    const LONG: usize = 64;
    turns > MOST_TURNS || turns >= LONG && rows < multiprocessors
}

/// How many units gather one of `inputs` elements from so many outputs: one, or those of a cube if a device has too few inputs to be busy.
pub(crate) fn units_of_input(inputs: usize, outputs: usize, multiprocessors: usize) -> usize {
    const MANY: usize = 128;
    const MOST: usize = 4096;
    let leaves_idle = inputs < CUBES * UNITS * multiprocessors;
    match outputs > MOST || outputs >= MANY && leaves_idle {
        true => outputs.div_ceil(ELEMENTS).next_power_of_two().clamp(32, UNITS),
        false => 1,
    }
}

/// How many cubes of [`UNITS`] add up so many vectors.
pub(crate) fn parts_of_sum(vectors: usize, multiprocessors: usize) -> usize {
    Columns::of(1, vectors, false, multiprocessors).parts.max(1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fmt::Debug;

    /// Numbers of multiprocessors; a device in software counts as two.
    fn multiprocessors() -> impl Iterator<Item = usize> {
        1..=160
    }

    /// The largest count of a kernel, and the shape that has it.
    struct Worst {
        kernel: &'static str,
        turns: (usize, String),
    }

    impl Worst {
        fn of(kernel: &'static str) -> Self {
            Self { kernel, turns: (0, String::new()) }
        }

        fn count(&mut self, turns: usize, case: impl Debug) {
            if turns > self.turns.0 {
                self.turns = (turns, format!("{case:?}"));
            }
        }

        /// No unit takes more turns in all its loops. Mesa's llvmpipe silently leaves its loops after 65,535.
        fn assert_at_most(self, most: usize) {
            let Self { kernel, turns: (turns, case) } = self;
            println!("{kernel}: at most {turns} turns of a unit ({case})");
            assert!(turns <= most, "{kernel}: {turns} turns of a unit, {case}");
        }
    }

    /// The longest vectors into which an axis is divided.
    fn vector(axis: usize) -> usize {
        [4, 2].into_iter().find(|&size| axis.is_multiple_of(size)).unwrap_or(1)
    }

    /// Batches, channels, and planes of so many elements.
    fn planes() -> impl Iterator<Item = [usize; 3]> {
        const SIDES: [usize; 11] = [1, 2, 7, 14, 28, 56, 112, 255, 512, 1023, 1024];
        let batches = [1, 2, 7, 64, 10_000].into_iter();
        let images = batches.flat_map(|batch| [1, 2, 3, 16, 33, 64, 100, 512, 2048].map(|of| [batch, of]));
        let planes = images.flat_map(|[batch, of]| SIDES.map(|side| [batch, of, side * side]));
        planes.filter(|[batch, of, plane]| batch * of * plane <= 1 << 33)
    }

    /// Sums by channels of both layouts: statistics and gradients of batch norm, biases of convolutions, gradients of the parameters of
    /// group and instance norm. Every term is in one part, and is read once.
    #[test]
    fn sums_by_channels_keep_a_device_busy() {
        let (mut sums, mut merges) = (Worst::of("sums by channels"), Worst::of("merges"));
        for [batch, channels, plane] in planes() {
            for near in [false, true] {
                let size = if near { vector(channels) } else { vector(plane) };
                let (columns, terms) = match near {
                    true => (channels / size, batch * plane),
                    false => (channels, batch * plane / size),
                };
                for multiprocessors in multiprocessors() {
                    let of = Columns::of(columns, terms, near, multiprocessors);
                    let Columns { cubes: Cubes { across, along }, parts, length } = of;
                    let case = ([batch, channels, plane], near, multiprocessors, of);
                    assert!(across * along <= UNITS && along.is_power_of_two(), "{case:?}");
                    assert!((parts - 1) * length < terms && terms <= parts * length, "{case:?}");

                    // All multiprocessors have several cubes, or no unit has enough to do that dividing it would be worth a part.
                    let (cubes, turns) = (of.count(columns), length.div_ceil(along));
                    assert!(cubes >= CUBES / 2 * multiprocessors || turns <= 2 * FEWEST_TURNS, "{case:?}");
                    // Units without a column are few.
                    let idle = columns.next_multiple_of(across) - columns;
                    assert!(idle <= columns.max(8), "{case:?}");
                    // What is written between the stages, two numbers in f32 for each part, is a fraction of what is read.
                    let written = if parts > 1 { 2 * parts * channels } else { 0 };
                    assert!(32 * written <= batch * channels * plane, "{case:?}");
                    sums.count(turns + along.ilog2() as usize, case);

                    let of = Columns::merging(channels, parts);
                    let Cubes { across, along } = of.cubes;
                    assert!(across * along <= UNITS && along.is_power_of_two(), "{case:?}");
                    merges.count(parts.div_ceil(along) + along.ilog2() as usize, case);
                }
            }
        }
        sums.assert_at_most(MOST_TURNS + 8);
        merges.assert_at_most(4096);
    }

    /// Norms over rows, forward and backward: four loops over a row, unless rows are divided, when a device is busy.
    #[test]
    fn rows_keep_a_device_busy() {
        let (mut whole, mut divided) = (Worst::of("row norms by cubes"), Worst::of("row norms by parts"));
        let lengths = (0..=24).flat_map(|log| [1 << log, (1 << log) + 1, 3 << log]);
        for row in lengths {
            for rows in [1, 2, 3, 8, 64, 1000, 1 << 16] {
                let size = vector(row);
                for (most, multiprocessors) in
                    [256, 512].iter().flat_map(|m| multiprocessors().map(|of| (*m, of)))
                {
                    let units = units_of_row(row, most);
                    let (turns, case) = (row.div_ceil(size * units), (rows, row, multiprocessors, units));
                    if are_rows_divided(rows, turns, multiprocessors) {
                        let of = Columns::of(rows, row / size, false, multiprocessors);
                        let turns = of.length.div_ceil(of.cubes.along);
                        assert!(
                            of.count(rows) >= CUBES / 2 * multiprocessors || turns <= 2 * FEWEST_TURNS,
                            "{case:?}"
                        );
                        divided.count(turns, case);
                    } else {
                        assert!(rows >= multiprocessors || turns < 64, "{case:?}");
                        whole.count(4 * turns, case);
                    }
                }
            }
        }
        whole.assert_at_most(4 * MOST_TURNS);
        divided.assert_at_most(MOST_TURNS);
    }

    /// Cross entropies, which read a row twice with smoothing, and weights of attention: one cube for each row.
    #[test]
    fn long_rows_of_classes_take_few_turns() {
        for (most, bound) in [(256, 8192), (512, 4096)] {
            let mut worst = Worst::of("rows of classes");
            for row in (0..=20).flat_map(|log| [1usize << log, (1 << log) - 1]) {
                let units = units_of_row(row, most);
                assert!(units <= most && units.is_power_of_two(), "{row}: {units}");
                worst.count(2 * row.div_ceil(vector(row) * units), (row, units));
            }
            worst.assert_at_most(bound);
        }
    }

    /// Gradients of pools and of resizing: from one output of an input to a plane of them.
    #[test]
    fn inputs_gather_their_outputs_together() {
        let mut worst = Worst::of("outputs of an input");
        for (inputs, outputs) in
            (0..=24).flat_map(|log| (0..=20).map(move |of| (1 << log, (1usize << of) + 1)))
        {
            for multiprocessors in multiprocessors() {
                let units = units_of_input(inputs, outputs, multiprocessors);
                let (turns, case) = (outputs.div_ceil(units), (inputs, outputs, multiprocessors, units));
                assert!(units <= UNITS && units.is_power_of_two(), "{case:?}");
                assert!(
                    inputs * units >= UNITS * multiprocessors || turns <= 128 || units == UNITS,
                    "{case:?}"
                );
                worst.count(turns, case);
            }
        }
        worst.assert_at_most(4097);
    }

    /// Losses: a part for each cube, and one cube for all parts.
    #[test]
    fn sums_of_losses_keep_a_device_busy() {
        let mut worst = Worst::of("losses");
        for vectors in (0..=31).map(|log| 1usize << log) {
            for multiprocessors in multiprocessors() {
                let parts = parts_of_sum(vectors, multiprocessors);
                let (turns, case) = (vectors.div_ceil(parts * UNITS), (vectors, multiprocessors, parts));
                assert!(parts >= CUBES / 2 * multiprocessors || turns <= 2 * FEWEST_TURNS, "{case:?}");
                worst.count(turns.max(parts.div_ceil(UNITS)), case);
            }
        }
        worst.assert_at_most(MOST_TURNS);
    }
}
