//! The backward pass in several passes, for rows that are few and long, or where threads may not hold sums of their own.
//!
//! First come the statistics of rows, then the sums of rows and those of parameters, by parts of rows, columns and planes. All are added up
//! in an order that follows from the shape only.
use super::{
    Line, ParameterGrads, RowNorm, Visit,
    products::{plus, sums_of_row},
    rows_per_thread, statistics_in_parts,
};
use crate::backend::cpu::{
    CpuElement,
    long_rows::LongRows,
    parallel::{self, Job, Work, vectorized},
    plan::{Division, Items},
    sums::{LANES, Moments, Parts, move_each},
};
use core::ops::Range;
use num_traits::Zero;

/// Elements of a channel in a row, at least, if there are two sums for every such channel.
const LEAST_PLANE: usize = 64;

/// How many parts of rows a task takes if the backward pass runs in several passes; `None` if every thread takes rows of its own.
pub(super) fn parts_per_task(
    norm: &RowNorm,
    elements: usize,
    wanted: [bool; 2],
    threads: usize,
) -> Option<usize> {
    let size = norm.row().max(1);
    let by_rows = Items::of([elements / size, size], elements.into());
    let rows = Division::Whole(rows_per_thread(norm, elements, wanted, threads));
    let can_be_cut = norm.has_rows_of_parameters() || norm.inner >= LEAST_PLANE;
    if !can_be_cut || by_rows.is_even(rows, threads) {
        return None;
    }
    match in_passes(norm, elements).division_from(1, threads) {
        parts @ Division::Cut(steps) => {
            let time = in_passes(norm, elements).time(parts, threads);
            (time < by_rows.time(rows, threads)).then_some(steps)
        }
        Division::Whole(_) => None,
    }
}

/// The backward pass in several passes, each of which is divided at parts of rows. They read everything about half as often again.
pub(super) fn in_passes(norm: &RowNorm, elements: usize) -> Items {
    let size = norm.row().max(1);
    let steps = elements / size * Parts::of(size).count();
    let work_if_cut = Work::of([3, elements]) / 2;
    Items { steps, work_if_cut, ..Items::of([1, elements], elements.into()) }
}

/// The gradients of the parameters, and if `wants_x`, what the `dx` of every row is computed from, in several passes.
pub(super) fn gradients<E: CpuElement>(
    x: &[E],
    norm: &RowNorm,
    gamma: &[E::Acc],
    dy: &[E],
    (wants_x, wanted): (bool, [bool; 2]),
    of_rows: &LongRows,
) -> (Vec<Line<E::Acc>>, ParameterGrads) {
    let statistics = statistics_in_parts(x, norm, of_rows);
    let (sums, grads) = if norm.has_rows_of_parameters() {
        let size = norm.row();
        let sum = |row: usize, part: Range<usize>| {
            let gamma = &gamma[part.start - row * size..part.end - row * size];
            let (x, dy) = (&x[part.clone()], &dy[part]);
            vectorized(RowProducts { x, dy, gamma, statistics: statistics[row] })
        };
        let sums = wants_x.then(|| of_rows.merged(&of_rows.map(statistics.len(), sum), plus));
        (sums.unwrap_or_default(), grads_by_columns(x, &statistics, dy, wanted))
    } else {
        grads_by_planes(x, norm, gamma, &statistics, dy, wanted)
    };
    let line = |(&statistics, sums): (&[E::Acc; 2], [f64; 2])| Line::new(norm, statistics, sums);
    (statistics.iter().zip(sums).map(line).collect(), grads)
}

/// The gradients of the parameters, of which every element of a row has its own: column by column.
fn grads_by_columns<E: CpuElement>(
    x: &[E],
    statistics: &[[E::Acc; 2]],
    dy: &[E],
    wanted: [bool; 2],
) -> ParameterGrads {
    if wanted == [false; 2] {
        return ParameterGrads { gamma: vec![], beta: vec![] };
    }
    let columns = x.len() / statistics.len().max(1);
    let [mut gamma, mut beta] = [(); 2].map(|()| vec![0.0; columns]);
    let width = columns.div_ceil(4 * parallel::threads()).next_multiple_of(LANES);
    parallel::zip_chunks_mut(&mut gamma, &mut beta, [width; 2], x.len(), |index, gamma, beta| {
        vectorized(Columns { x, dy, statistics, first: index * width, columns, gamma, beta });
    });
    let [gamma, beta] =
        [(gamma, wanted[0]), (beta, wanted[1])].map(|(grad, wanted)| if wanted { grad } else { vec![] });
    ParameterGrads { gamma, beta }
}

/// Adds the elements of some columns to the gradients of their parameters, from the first row to the last.
struct Columns<'a, E: CpuElement> {
    x: &'a [E],
    dy: &'a [E],
    /// Of every row.
    statistics: &'a [[E::Acc; 2]],
    first: usize,
    /// Of a row.
    columns: usize,
    gamma: &'a mut [f64],
    beta: &'a mut [f64],
}

impl<E: CpuElement> Job for Columns<'_, E> {
    type Result = ();

    #[inline(always)]
    fn run(self) {
        let Self { x, dy, statistics, first, columns, gamma, beta } = self;
        let zeros = || vec![<E::Acc as Zero>::zero(); gamma.len()];
        let (mut few_gamma, mut few_beta) = (zeros(), zeros());
        for (rows, statistics) in statistics.chunks(Visit::<E>::FEW).enumerate() {
            for (row, &[mean, inv_std]) in statistics.iter().enumerate() {
                let start = (rows * Visit::<E>::FEW + row) * columns + first;
                let elements = x[start..].iter().zip(&dy[start..]);
                for ((to_gamma, to_beta), (x, dy)) in few_gamma.iter_mut().zip(&mut few_beta).zip(elements) {
                    let (x_hat, dy) = ((x.widen() - mean) * inv_std, dy.widen());
                    *to_gamma = *to_gamma + dy * x_hat;
                    *to_beta = *to_beta + dy;
                }
            }
            move_each(&mut few_gamma, gamma);
            move_each(&mut few_beta, beta);
        }
    }
}

/// For every row, the sums of `gamma * dy` and of `gamma * dy * x_hat`; and the gradients of the parameters, one per plane of a row.
fn grads_by_planes<E: CpuElement>(
    x: &[E],
    norm: &RowNorm,
    gamma: &[E::Acc],
    statistics: &[[E::Acc; 2]],
    dy: &[E],
    wanted: [bool; 2],
) -> (Vec<[f64; 2]>, ParameterGrads) {
    let parts = Parts::of(norm.inner);
    let planes = statistics.len() * norm.channels;
    let task = parallel::items_per_task(planes * parts.count(), parts.size);
    let of_planes = LongRows::new(norm.inner, task, x.len());
    let moments = of_planes.map(planes, |plane, part| {
        let [mean, _] = statistics[plane / norm.channels];
        vectorized(Moments { x: &x[part.clone()], dy: &dy[part], mean })
    });
    let moments = of_planes.merged(&moments, plus);
    let mut grads = ParameterGrads::new(norm, wanted);
    let of_rows = moments.chunks_exact(norm.channels).zip(statistics).enumerate();
    let sums = of_rows.map(|(at, (moments, &[_, inv_std]))| {
        let start = at % norm.groups * norm.channels;
        grads.add_planes(start, moments.iter().copied(), gamma, inv_std)
    });
    (sums.collect(), grads)
}

/// [`sums_of_row`] as a job.
struct RowProducts<'a, E: CpuElement> {
    x: &'a [E],
    dy: &'a [E],
    gamma: &'a [E::Acc],
    statistics: [E::Acc; 2],
}

impl<E: CpuElement> Job for RowProducts<'_, E> {
    type Result = [f64; 2];

    #[inline(always)]
    fn run(self) -> [f64; 2] {
        sums_of_row(self.x, self.dy, self.gamma, self.statistics)
    }
}
