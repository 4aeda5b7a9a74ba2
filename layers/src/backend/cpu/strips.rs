//! Loops over columns of matrices: over strips of neighboring columns, or over parts of strips, of some rows each.
use super::{
    parallel::{self, Work},
    plan::Division,
};
use core::{marker::PhantomData, ops::Range, slice};

/// Some rows of some neighboring columns of a matrix.
pub(crate) struct Strip<'a, T> {
    first: *mut T,
    rows: usize,
    /// Distance between rows.
    pitch: usize,
    width: usize,
    matrix: PhantomData<&'a mut [T]>,
}

impl<T> Strip<'_, T> {
    /// The part of each row that is in these columns.
    #[inline(always)]
    pub(crate) fn rows(&mut self) -> impl Iterator<Item = &mut [T]> {
        self.rows_in(0..self.rows)
    }

    /// [`rows`](Self::rows) in a range.
    #[inline(always)]
    pub(crate) fn rows_in(&mut self, rows: Range<usize>) -> impl Iterator<Item = &mut [T]> {
        assert!(rows.end <= self.rows, "rows of the strip");
        rows.map(|row| {
            // SAFETY: within the matrix, as those who make strips ensure. No other strip has these elements, and no other row of this one.
            unsafe { slice::from_raw_parts_mut(self.first.add(row * self.pitch), self.width) }
        })
    }

    /// The number of columns.
    pub(crate) fn width(&self) -> usize {
        self.width
    }
}

/// Calls `f(start, strip)` for every strip of `width` columns; the last strip of a matrix may be narrower. `values` holds matrices
/// `[rows, columns]` one after the other, and `values[start]` is the first element of the strip.
pub(crate) fn strips_mut<T: Send>(
    values: &mut [T],
    [rows, columns]: [usize; 2],
    width: usize,
    work: impl Into<Work>,
    f: impl Fn(usize, Strip<'_, T>) + Send + Sync,
) {
    let count = values.len() / (rows * columns).max(1) * columns.div_ceil(width);
    let task = if work.into().is_worth_it() { parallel::items_per_task(count, rows * width) } else { count };
    strips_in_tasks(values, [rows, columns], width, task, f);
}

/// [`strips_mut`], with so many strips per task.
pub(crate) fn strips_in_tasks<T: Send>(
    values: &mut [T],
    [rows, columns]: [usize; 2],
    width: usize,
    task: usize,
    f: impl Fn(usize, Strip<'_, T>) + Send + Sync,
) {
    let (matrix, per_matrix) = (rows * columns, columns.div_ceil(width));
    if values.is_empty() {
        return;
    }
    assert!(values.len().is_multiple_of(matrix), "whole matrices");
    let count = values.len() / matrix * per_matrix;
    let first = Shared(values.as_mut_ptr());
    parallel::map_ranges(count, task, |strips| {
        let first = &first;
        for strip in strips {
            let column = strip % per_matrix * width;
            let start = strip / per_matrix * matrix + column;
            let width = width.min(columns - column);
            // SAFETY: within `values`, which is borrowed until all strips are done.
            let first = unsafe { first.0.add(start) };
            f(start, Strip { first, rows, pitch: columns, width, matrix: PhantomData });
        }
    });
}

/// The beginning of a slice of which several threads write different elements.
struct Shared<T>(*mut T);

// SAFETY: no two threads write the same elements.
unsafe impl<T: Send> Sync for Shared<T> {}

/// Matrices `[rows, columns]` whose strips are cut into parts. What is computed of a part does not depend on who takes it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Grid {
    pub(crate) rows: usize,
    pub(crate) columns: usize,
    /// Columns of a strip; the last may have fewer.
    pub(crate) width: usize,
    /// Rows of a part; the last may have fewer.
    pub(crate) part: usize,
    /// Parts that a task takes.
    pub(crate) steps: usize,
}

impl Grid {
    /// The parts of a strip.
    pub(crate) fn parts(&self) -> usize {
        self.rows.div_ceil(self.part)
    }

    /// `initial` for every part of every column of the matrices in `values`, after `f(start, column, part, results)` for every part of every
    /// strip. `values[start]` is the first element of the part, and `column` its first column among those of all matrices. The results are
    /// `[matrices, parts, columns]`.
    pub(crate) fn map_mut<T: Send, R: Copy + Send>(
        &self,
        values: &mut [T],
        initial: R,
        f: impl Fn(usize, usize, Strip<'_, T>, &mut [R]) + Send + Sync,
    ) -> Vec<R> {
        let &Self { rows, columns, width, part, steps } = self;
        let (matrix, parts, strips) = (rows * columns, self.parts(), columns.div_ceil(width));
        assert!(matrix > 0 && values.len().is_multiple_of(matrix), "whole matrices");
        let count = values.len() / matrix;
        let mut results = vec![initial; count * parts * columns];
        let (first, of_parts) = (Shared(values.as_mut_ptr()), Shared(results.as_mut_ptr()));
        let tasks = parts.div_ceil(steps);
        parallel::map_ranges(count * strips * tasks, 1, |task| {
            let (first, of_parts) = (&first, &of_parts);
            let (strip, task) = (task.start / tasks, task.start % tasks);
            let (number, column) = (strip / strips, strip % strips * width);
            let width = width.min(columns - column);
            for at in task * steps..((task + 1) * steps).min(parts) {
                let start = number * matrix + at * part * columns + column;
                // SAFETY: within `values`, which is borrowed until all parts are done.
                let first = unsafe { first.0.add(start) };
                let rows = part.min(rows - at * part);
                // SAFETY: the results of this part, which no other task has.
                let results = unsafe {
                    let first = of_parts.0.add((number * parts + at) * columns + column);
                    slice::from_raw_parts_mut(first, width)
                };
                let strip = Strip { first, rows, pitch: columns, width, matrix: PhantomData };
                f(start, number * columns + column, strip, results);
            }
        });
        results
    }

    /// For every column of every matrix, what `merge` makes of its parts, from the first to the last.
    pub(crate) fn merged<R: Copy>(&self, of_parts: &[R], merge: impl Fn(R, R) -> R) -> Vec<R> {
        let columns = self.columns;
        let mut merged = Vec::with_capacity(of_parts.len() / self.parts());
        for of_matrix in of_parts.chunks_exact(self.parts() * columns) {
            let (first, others) = of_matrix.split_at(columns);
            let start = merged.len();
            merged.extend_from_slice(first);
            for part in others.chunks_exact(columns) {
                for (merged, &part) in merged[start..].iter_mut().zip(part) {
                    *merged = merge(*merged, part);
                }
            }
        }
        merged
    }

    /// The parts that a task takes in a division of strips.
    pub(crate) fn with(self, division: Division) -> Self {
        match division {
            Division::Whole(_) => Self { steps: self.parts(), ..self },
            Division::Cut(steps) => Self { steps, ..self },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_element_is_in_one_strip() {
        for ([rows, columns], matrices) in [([3, 5], 2), ([1, 1], 7), ([40, 700], 9), ([2, 1000], 300)] {
            for width in [1, 2, 64, columns] {
                let len = matrices * rows * columns;
                let mut values: Vec<usize> = (0..len).collect();
                strips_mut(&mut values, [rows, columns], width, len, |start, mut strip| {
                    for (row, values) in strip.rows().enumerate() {
                        let first = start + row * columns;
                        values.iter_mut().enumerate().for_each(|(at, value)| *value += first + at);
                    }
                });
                assert!(values.iter().enumerate().all(|(at, &value)| value == 2 * at));
            }
        }
    }

    #[test]
    fn every_element_is_in_one_part() {
        for ([rows, columns], matrices) in [([3, 5], 2), ([1, 1], 7), ([100, 130], 3), ([257, 3], 1)] {
            for (width, part, steps) in [(1, 1, 1), (64, 32, 2), (columns, rows, 1), (3, 10, 4)] {
                let grid = Grid { rows, columns, width, part, steps };
                let mut values: Vec<usize> = (0..matrices * rows * columns).collect();
                let sums = grid.map_mut(&mut values, 0, |start, column, mut strip, sums| {
                    assert_eq!(column, start / (rows * columns) * columns + start % columns);
                    assert_eq!(strip.width(), sums.len());
                    for (row, values) in strip.rows().enumerate() {
                        for (at, (value, sum)) in values.iter_mut().zip(&mut *sums).enumerate() {
                            assert_eq!(*value, start + row * columns + at);
                            *sum += *value;
                            *value = usize::MAX;
                        }
                    }
                });
                assert!(values.iter().all(|&value| value == usize::MAX));
                let of_columns = grid.merged(&sums, |a, b| a + b);
                for (number, sum) in of_columns.into_iter().enumerate() {
                    let first = number / columns * rows * columns + number % columns;
                    assert_eq!(sum, (0..rows).map(|row| first + row * columns).sum::<usize>());
                }
            }
        }
    }
}
