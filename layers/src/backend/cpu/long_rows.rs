//! Few rows that are so long that threads take parts of them: what is computed of every part, and what follows for every row.
//!
//! Parts are those in which [`sums`](super::sums) of rows are made, whoever makes them. So the results are those of a single thread, to the
//! last bit.
use super::{
    CpuElement,
    parallel::{self, Work},
    pieces,
    plan::{Division, Items},
    sums::Parts,
};
use core::ops::Range;

/// A loop over so many rows of some elements, which can be cut into parts.
pub(crate) fn items([rows, length]: [usize; 2], work: impl Into<Work>) -> Items {
    Items { steps: Parts::of(length).count(), ..Items::of([rows, length], work.into()) }
}

/// Rows that are computed part by part.
#[derive(Clone, Copy)]
pub(crate) struct LongRows {
    /// Elements of a row.
    length: usize,
    parts: Parts,
    /// Parts that a task takes.
    steps: usize,
    /// What a pass over all rows takes.
    work: Work,
}

impl LongRows {
    /// Rows of `length` elements, of which a task takes `steps` parts.
    pub(crate) fn new(length: usize, steps: usize, work: impl Into<Work>) -> Self {
        Self { length, parts: Parts::of(length), steps, work: work.into() }
    }

    /// What `f(row, elements)` returns for every part of so many rows. `elements` are those of the part, counted from the first of all rows.
    pub(crate) fn map<R: Copy + Default + Send + Sync>(
        &self,
        rows: usize,
        f: impl Fn(usize, Range<usize>) -> R + Send + Sync,
    ) -> Vec<R> {
        let count = self.parts.count();
        parallel::filled(rows * count, R::default(), self.steps, self.work, |index, results| {
            for (at, result) in (index * self.steps..).zip(results) {
                let Range { start, end } = self.parts.range(at % count);
                let row = at / count;
                *result = f(row, row * self.length + start..row * self.length + end);
            }
        })
    }

    /// [`map`](Self::map) of all rows in `values`, with the elements themselves.
    pub(crate) fn map_mut<E: Send, R: Copy + Default + Send>(
        &self,
        values: &mut [E],
        f: impl Fn(usize, Range<usize>, &mut [E]) -> R + Send + Sync,
    ) -> Vec<R> {
        let (count, division) = (self.parts.count(), Division::Cut(self.steps.min(self.parts.count())));
        let mut results = vec![R::default(); values.len() / self.length.max(1) * count];
        let chunks = [division.chunks(self.length, self.parts.size), division.chunks(count, 1)];
        pieces::zip_pieces_mut(values, &mut results, chunks, self.work, |start, values, results| {
            let starts = (start..).step_by(self.parts.size);
            for ((start, values), result) in starts.zip(values.chunks_mut(self.parts.size)).zip(results) {
                *result = f(start / self.length, start..start + values.len(), values);
            }
        });
        results
    }

    /// For every row, what `merge` makes of its parts, from the first to the last.
    pub(crate) fn merged<R: Copy>(&self, of_parts: &[R], merge: impl Fn(R, R) -> R) -> Vec<R> {
        let merged = |row: &[R]| row[1..].iter().fold(row[0], |merged, &part| merge(merged, part));
        of_parts.chunks_exact(self.parts.count()).map(merged).collect()
    }

    /// The sums of `f` over every row.
    pub(crate) fn sums(&self, rows: usize, f: impl Fn(usize, Range<usize>) -> f64 + Send + Sync) -> Vec<f64> {
        self.merged(&self.map(rows, f), |sum, part| sum + part)
    }

    /// The largest numbers of all rows.
    pub(crate) fn maxima<E: CpuElement>(&self, values: &[E]) -> Vec<E::Acc> {
        let maxima = self.map(values.len() / self.length.max(1), |_, part| {
            parallel::vectorized(super::sums::Max { values: &values[part] })
        });
        let maxima = self.merged(&maxima, super::sums::larger);
        maxima.into_iter().map(E::Acc::from_f64).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::cpu::sums::LONG;

    #[test]
    fn every_part_is_visited_once() {
        for [rows, length] in [[1, 3 * LONG + 17], [3, LONG + 1], [5, 100], [2, LONG]] {
            let parts = Parts::of(length).count();
            for steps in [1, 2, parts, parts + 1] {
                let of_rows = LongRows::new(length, steps, Work::of([4, rows * length]));
                let mut values: Vec<usize> = (0..rows * length).collect();
                let elements = of_rows.map_mut(&mut values, |row, part, values| {
                    assert!(row == part.start / length && row == (part.end - 1) / length);
                    assert!(part.clone().eq(values.iter().copied()));
                    values.iter_mut().for_each(|value| *value = usize::MAX);
                    values.len()
                });
                assert!(values.iter().all(|&value| value == usize::MAX));
                assert_eq!(elements, of_rows.map(rows, |_, part| part.len()));
                assert_eq!(of_rows.merged(&elements, |a, b| a + b), vec![length; rows]);
                assert_eq!(of_rows.sums(rows, |row, _| row as f64 / parts as f64).len(), rows);
            }
        }
    }
}
