//! Softmaxes along an axis that is not the last: all columns of some rows at once.
//!
//! Threads take strips of columns, or where these are few, parts of strips. The rows of a part are summed by themselves, whoever sums them,
//! and parts follow from the shape only. So results do not depend on the number of threads.
use super::{COPIED, Softmax, SoftmaxAxis, finish, shift, work};
use crate::backend::cpu::{
    CpuElement,
    parallel::{self, Job, vectorized},
    plan::{Division, EVEN, Items},
    strips::{Grid, Strip, strips_in_tasks},
    sums,
};
use core::ops::Range;
use num_traits::{Float, Zero};

/// Elements of a strip, which stay in a second-level cache.
const STRIP: usize = 1 << 16;

/// The most and the fewest columns of a strip. The most bound what a thread holds besides the tensors. With fewer than the fewest, memory
/// would be read only a few cache lines at a time.
const WIDEST: usize = 1 << 10;
const NARROWEST: usize = 1 << 6;

/// The columns of a strip, at least, that is not cut into parts although it does not stay in the cache: narrower ones would read memory in
/// too short rows.
const WIDE: usize = 1 << 8;

/// Strips that are not even are made narrower, so that threads take up to so many turns more.
const MORE_TURNS: usize = 4;

/// The least rows of a part: its sums are 1/128 of it in f32, 1/64 in half precision.
const LEAST_ROWS: usize = 1 << 8;

/// The least elements of a part of a strip, about.
const LEAST_OF_PART: usize = 1 << 14;

/// The most columns of all parts together, whose sums take 1 MiB.
const COLUMNS_OF_PARTS: usize = 1 << 17;

/// `[blocks, length, inner]`, with an inner axis.
#[derive(Clone, Copy, Debug)]
struct Blocks {
    axis: SoftmaxAxis,
    /// How many there are.
    count: usize,
}

impl Blocks {
    fn of(axis: SoftmaxAxis, elements: usize) -> Self {
        Self { axis, count: elements / axis.block().max(1) }
    }

    /// Rows of a part.
    fn part(self) -> usize {
        let SoftmaxAxis { length, inner } = self.axis;
        let most = (COLUMNS_OF_PARTS / (self.count * inner).max(1)).max(1);
        let least = (LEAST_OF_PART / inner.clamp(1, NARROWEST)).max(LEAST_ROWS).max(length.div_ceil(most));
        length.div_ceil((length / least).max(1)).max(1)
    }

    /// Columns of a strip, for so many threads.
    fn width(self, threads: usize) -> usize {
        let cached = STRIP / self.axis.length.max(1);
        if cached >= NARROWEST {
            return self.width_of(4, cached, 1, threads);
        }
        // Nothing stays in the cache until it is read again. If whole strips were narrow, wide ones are cut into parts.
        let whole = self.width_of(1, WIDEST, 1, threads);
        let strips = self.count * self.axis.inner.div_ceil(whole);
        let together = (strips.div_ceil(threads) * threads * whole) as f64;
        let is_even = together <= EVEN * (self.count * self.axis.inner) as f64;
        match whole >= WIDE && is_even {
            true => whole,
            false => self.width_of(1, WIDEST, self.axis.length.div_ceil(self.part()), threads),
        }
    }

    /// Columns of a strip, `most` at most, if a thread takes `each` strips or more, in so many parts.
    fn width_of(self, each: usize, most: usize, parts: usize, threads: usize) -> usize {
        let inner = self.axis.inner;
        let count = (self.count * parts).max(1);
        let width = most.min(inner.div_ceil((each * threads).div_ceil(count)));
        let width = width.next_multiple_of(NARROWEST).min(WIDEST);
        // Strips of equal width, as many as threads do in whole turns if they are not too narrow.
        let most = (inner / NARROWEST).max(1);
        let strips = inner.div_ceil(width).min(most);
        let turns = |strips: usize| (count * strips).div_ceil(threads);
        let time = |strips: usize| turns(strips) as f64 / strips as f64;
        let is_even = |strips: usize| time(strips) * threads as f64 <= EVEN * count as f64;
        let of_turns = |turns: usize| (turns * threads / count).clamp(strips, most);
        let more = (turns(strips)..turns(strips) + MORE_TURNS).map(of_turns);
        let better = |best: usize, strips: usize| match is_even(best) || time(best) <= time(strips) {
            true => best,
            false => strips,
        };
        let even = more.fold(strips, better);
        inner.div_ceil(even).max(1)
    }

    /// The division for so many threads, and the loop over strips that it divides.
    fn division(self, threads: usize) -> (Grid, Items, Division) {
        let SoftmaxAxis { length, inner } = self.axis;
        let (width, part) = (self.width(threads), self.part());
        let grid = Grid { rows: length, columns: inner, width, part, steps: 1 };
        let strips = self.count * inner.div_ceil(width);
        let all = work(self.count * self.axis.block());
        let items = Items { steps: grid.parts(), ..Items::of([strips, length * width], all) };
        let division = match all.is_worth_it() {
            true => items.division(threads),
            false => Division::Whole(strips),
        };
        (grid.with(division), items, division)
    }
}

/// `f(x)` of blocks that are so small that the thread that works on them copies them first, while they are in the cache.
pub(super) fn forward_small<E: CpuElement>(x: &[E], f: Softmax, axis: SoftmaxAxis) -> Option<Vec<E>> {
    (axis.block() <= COPIED).then(|| {
        let task = axis.block() * parallel::items_per_task(x.len() / axis.block().max(1), axis.block());
        let (part, width) = (Blocks::of(axis, x.len()).part(), axis.inner.min(WIDEST));
        parallel::copied(x, task.max(1), work(x.len()), |_, y| {
            strips_in_tasks(y, [axis.length, axis.inner], width, usize::MAX, |_, strip| {
                forward_strip(strip, f, axis.length, part);
            });
        })
    })
}

/// Replaces every `x` by `f(x)`.
pub(super) fn forward_in_place<E: CpuElement>(x: &mut [E], f: Softmax, axis: SoftmaxAxis) {
    if x.is_empty() {
        return;
    }
    let (grid, _, division) = Blocks::of(axis, x.len()).division(parallel::threads());
    match division {
        Division::Whole(task) => {
            strips_in_tasks(x, [axis.length, axis.inner], grid.width, task, |_, strip| {
                forward_strip(strip, f, axis.length, grid.part);
            });
        }
        Division::Cut(_) => forward_in_parts(x, f, &grid),
    }
}

/// All columns of a strip.
fn forward_strip<E: CpuElement>(mut strip: Strip<'_, E>, f: Softmax, length: usize, part: usize) {
    let mut shifts = vec![E::Acc::neg_infinity(); strip.width()];
    vectorized(Maxima { rows: strip.rows(), f, maxima: &mut shifts });
    shifts.iter_mut().for_each(|max| *max = shift(*max, f));
    let mut sums = Columns::<E::Acc>::new(strip.width());
    for part in parts(length, part) {
        vectorized(Exponentials { rows: strip.rows_in(part), shifts: &shifts, f, sums: &mut sums });
    }
    let sums = sums.finish();
    let finished = finish_columns(sums, &shifts, f);
    vectorized(Finish { rows: strip.rows(), finished: &finished, shifts: &shifts, f });
}

/// The rows of every part.
fn parts(length: usize, part: usize) -> impl Iterator<Item = Range<usize>> {
    (0..length).step_by(part).map(move |start| start..(start + part).min(length))
}

/// All columns, part by part.
fn forward_in_parts<E: CpuElement>(x: &mut [E], f: Softmax, grid: &Grid) {
    let maxima = grid.map_mut(x, E::Acc::neg_infinity(), |_, _, mut strip, maxima| {
        vectorized(Maxima { rows: strip.rows(), f, maxima });
    });
    let mut shifts = grid.merged(&maxima, sums::larger);
    drop(maxima);
    shifts.iter_mut().for_each(|max| *max = shift(*max, f));
    let sums = grid.map_mut(x, 0.0, |_, column, mut strip, of_part| {
        let (mut sums, shifts) = (Columns::<E::Acc>::new(strip.width()), &shifts[column..][..strip.width()]);
        vectorized(Exponentials { rows: strip.rows(), shifts, f, sums: &mut sums });
        of_part.copy_from_slice(&sums.finish());
    });
    let finished = finish_columns(grid.merged(&sums, |sum, part| sum + part), &shifts, f);
    drop(sums);
    grid.map_mut(x, (), |_, column, mut strip, _| {
        let [finished, shifts] = [&finished, &shifts].map(|values| &values[column..][..strip.width()]);
        vectorized(Finish { rows: strip.rows(), finished, shifts, f });
    });
}

/// Raises `maxima` to those of all columns. Before, the elements change their sign if `f` is a softmin.
struct Maxima<'a, R, A> {
    rows: R,
    f: Softmax,
    maxima: &'a mut [A],
}

impl<'a, E: CpuElement, R: Iterator<Item = &'a mut [E]>> Job for Maxima<'_, R, E::Acc> {
    type Result = ();

    #[inline(always)]
    fn run(self) {
        for row in self.rows {
            if self.f == Softmax::Softmin {
                for x in &mut *row {
                    *x = -*x;
                }
            }
            for (max, x) in self.maxima.iter_mut().zip(row) {
                *max = sums::larger(*max, x.widen());
            }
        }
    }
}

/// Sums `exp(x - shift)` over all columns of a part. Every `x` is replaced by its exponential, unless `f` is a
/// log-softmax.
struct Exponentials<'a, R, A> {
    rows: R,
    shifts: &'a [A],
    f: Softmax,
    sums: &'a mut Columns<A>,
}

impl<'a, E: CpuElement, R: Iterator<Item = &'a mut [E]>> Job for Exponentials<'_, R, E::Acc> {
    type Result = ();

    #[inline(always)]
    fn run(self) {
        let Self { rows, shifts, f, sums } = self;
        sums.begin_part();
        for row in rows {
            for ((x, &shift), sum) in row.iter_mut().zip(shifts).zip(sums.next()) {
                let exp = (x.widen() - shift).fast_exp();
                *sum = *sum + exp;
                *x = if f == Softmax::LogSoftmax { *x } else { E::narrow(exp) };
            }
        }
        sums.flush();
    }
}

/// [`finish`] of every column.
pub(super) fn finish_columns<A: CpuElement<Acc = A>>(sums: Vec<f64>, shifts: &[A], f: Softmax) -> Vec<A> {
    sums.into_iter().zip(shifts).map(|(sum, &shift)| finish(sum, shift, f)).collect()
}

/// Completes what [`Exponentials`] began.
struct Finish<'a, R, A> {
    rows: R,
    finished: &'a [A],
    shifts: &'a [A],
    f: Softmax,
}

impl<'a, E: CpuElement, R: Iterator<Item = &'a mut [E]>> Job for Finish<'_, R, E::Acc> {
    type Result = ();

    #[inline(always)]
    fn run(self) {
        let Self { rows, finished, shifts, f } = self;
        for row in rows {
            if f == Softmax::LogSoftmax {
                for ((x, &log), &shift) in row.iter_mut().zip(finished).zip(shifts) {
                    *x = E::narrow(x.widen() - shift - log);
                }
            } else {
                for (x, &scale) in row.iter_mut().zip(finished) {
                    *x = E::narrow(x.widen() * scale);
                }
            }
        }
    }
}

/// One sum per column. The sums of a few rows are made in the type of the elements, which is faster, and added up in f64, because over many
/// rows that type would lose precision. Those of several parts are added up, too.
struct Columns<A> {
    few: Vec<A>,
    /// Rows in `few`.
    rows: usize,
    part: Vec<f64>,
    /// The sums of the parts before, if there are any.
    before: Option<Vec<f64>>,
    has_begun: bool,
}

impl<A: CpuElement<Acc = A>> Columns<A> {
    /// Rows that are added up in the type of the elements.
    const FEW: usize = 32;

    fn new(width: usize) -> Self {
        let (few, part) = (vec![<A as Zero>::zero(); width], vec![0.0; width]);
        Self { few, rows: 0, part, before: None, has_begun: false }
    }

    fn begin_part(&mut self) {
        if self.has_begun {
            let before = self.before.get_or_insert_with(|| vec![0.0; self.part.len()]);
            sums::add_each(before, &self.part);
            self.part.fill(0.0);
        }
        self.has_begun = true;
    }

    /// The sums to which the next row is to be added.
    #[inline(always)]
    fn next(&mut self) -> &mut [A] {
        if self.rows == Self::FEW {
            self.flush();
        }
        self.rows += 1;
        &mut self.few
    }

    #[inline(always)]
    fn flush(&mut self) {
        sums::move_each(&mut self.few, &mut self.part);
        self.rows = 0;
    }

    fn finish(self) -> Vec<f64> {
        let Self { part, before, .. } = self;
        match before {
            None => part,
            Some(mut sums) => {
                sums::add_each(&mut sums, &part);
                sums
            }
        }
    }
}

/// Replaces `dy` by `dx(y, dy, sum(term(y, dy)))`, with the sum of its column.
#[inline(always)]
pub(super) fn backward_by<E: CpuElement>(
    y: &[E],
    axis: SoftmaxAxis,
    dy: &mut [E],
    term: impl Fn(E::Acc, E::Acc) -> E::Acc + Copy + Send + Sync,
    dx: impl Fn(E::Acc, E::Acc, E::Acc) -> E::Acc + Copy + Send + Sync,
) {
    if y.is_empty() {
        return;
    }
    let (grid, _, division) = Blocks::of(axis, y.len()).division(parallel::threads());
    let of_y = |start: usize| y[start..].chunks(axis.inner);
    match division {
        Division::Whole(task) => {
            strips_in_tasks(dy, [axis.length, axis.inner], grid.width, task, |start, mut strip| {
                let mut sums = Columns::<E::Acc>::new(strip.width());
                for part in parts(axis.length, grid.part) {
                    let rows = of_y(start + part.start * axis.inner).zip(strip.rows_in(part));
                    vectorized(Terms { rows, term, sums: &mut sums });
                }
                let sums: Vec<_> = sums.finish().into_iter().map(E::Acc::from_f64).collect();
                vectorized(Gradients { rows: of_y(start).zip(strip.rows()), dx, sums: &sums });
            });
        }
        Division::Cut(_) => {
            let sums = grid.map_mut(dy, 0.0, |start, _, mut strip, of_part| {
                let mut sums = Columns::<E::Acc>::new(strip.width());
                vectorized(Terms { rows: of_y(start).zip(strip.rows()), term, sums: &mut sums });
                of_part.copy_from_slice(&sums.finish());
            });
            let merged = grid.merged(&sums, |sum, part| sum + part);
            drop(sums);
            let sums: Vec<_> = merged.into_iter().map(E::Acc::from_f64).collect();
            grid.map_mut(dy, (), |start, column, mut strip, _| {
                let sums = &sums[column..][..strip.width()];
                vectorized(Gradients { rows: of_y(start).zip(strip.rows()), dx, sums });
            });
        }
    }
}

/// Sums `term(y, dy)` over all columns of a part.
struct Terms<'a, R, F, A> {
    rows: R,
    term: F,
    sums: &'a mut Columns<A>,
}

impl<'a, E, R, F> Job for Terms<'_, R, F, E::Acc>
where
    E: CpuElement,
    R: Iterator<Item = (&'a [E], &'a mut [E])>,
    F: Fn(E::Acc, E::Acc) -> E::Acc,
{
    type Result = ();

    #[inline(always)]
    fn run(self) {
        let Self { rows, term, sums } = self;
        sums.begin_part();
        for (y, dy) in rows {
            for ((y, dy), sum) in y.iter().zip(dy).zip(sums.next()) {
                *sum = *sum + term(y.widen(), dy.widen());
            }
        }
        sums.flush();
    }
}

/// Replaces `dy` by `dx(y, dy, sum)`, with the sum of its column.
struct Gradients<'a, R, F, A> {
    rows: R,
    dx: F,
    sums: &'a [A],
}

impl<'a, E, R, F> Job for Gradients<'_, R, F, E::Acc>
where
    E: CpuElement,
    R: Iterator<Item = (&'a [E], &'a mut [E])>,
    F: Fn(E::Acc, E::Acc, E::Acc) -> E::Acc,
{
    type Result = ();

    #[inline(always)]
    fn run(self) {
        let Self { rows, dx, sums } = self;
        for (y, dy) in rows {
            for ((dy, y), &sum) in dy.iter_mut().zip(y).zip(sums) {
                *dy = E::narrow(dx(y.widen(), dy.widen(), sum));
            }
        }
    }
}

#[cfg(test)]
pub(crate) mod counting {
    use super::*;

    /// The loop over strips of `[blocks, length, inner]`, and its division among so many threads.
    pub(crate) fn division([count, length, inner]: [usize; 3], threads: usize) -> (Items, Division) {
        let blocks = Blocks { axis: SoftmaxAxis { length, inner }, count };
        let (grid, items, division) = blocks.division(threads);
        let (elements, columns) = (count * length * inner, count * grid.parts() * inner);
        assert!(grid.parts() == 1 || 128 * columns <= elements.min(128 * COLUMNS_OF_PARTS), "{blocks:?}");
        (items, division)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The last strip is almost as wide as the others.
    #[test]
    fn strips_are_of_equal_width() {
        for inner in [1, 2, 63, 64, 65, 100, 127, 128, 130, 1000, 2047, 4096, 50_000] {
            for length in [1, 100, 1000, 100_000] {
                for (count, threads) in [(1, 1), (1, 2), (1, 16), (3, 64), (100, 64), (1, 256)] {
                    let blocks = Blocks { axis: SoftmaxAxis { length, inner }, count };
                    let width = blocks.width(threads);
                    assert!(width <= WIDEST && width >= inner.min(NARROWEST), "{blocks:?}: {width}");
                    let widest = width * inner.div_ceil(width);
                    assert!(20 * widest <= 21 * inner, "{blocks:?}, {threads} threads: {width}");
                }
            }
        }
    }
}
