//! The gradient of the weight of a depthwise convolution: for every channel and tap, a sum over all points, band by band of a
//! [`Canvas`], or block by block of a plane of a single row.
//!
//! Threads take channels, or where these are few, some bands or blocks of one, of any image. Then every piece has sums of its own, which
//! are added up: how they are rounded depends on the number of threads. There are fewer than sixteen pieces for every thread, and of each its
//! sums, one per tap, are held until all are done.
use super::{
    canvas::{Band, BandSize, Canvas},
    depthwise::{Room, with_room},
    geometry::{Phase, Planes, Run},
    rows::{round, widen},
};
use crate::backend::cpu::{
    CpuElement, accumulators_of, is_wide,
    parallel::{self, Job, Work, vectorized},
    plan::{Division, Items},
    product::{PairedRun, add_dots},
    sums::add_each,
};
use core::ops::Range;
use num_traits::Zero;
use std::sync::Arc;

/// The gradient of the weight, with an element per channel and tap.
pub(super) fn weight_gradient<E: CpuElement>(
    signal: Planes<'_, E>,
    dy: Planes<'_, E>,
    phase: &Phase,
) -> Vec<E> {
    let (channels, taps) = (signal.channels, phase.taps.len());
    let work = Work::of([dy.values.len(), taps]);
    let sizes = [dy.batch(), channels, signal.plane, dy.plane];
    let (_, division, lines) = gradient_division(sizes, phase, is_wide::<E>(), work, parallel::threads());
    let (lines, mut gradient) = (&lines, vec![E::zero(); channels * taps]);
    let steps = dy.batch() * lines.count;
    match division {
        Division::Whole(task) => {
            parallel::chunks_mut(&mut gradient, task * taps, work, |index, gradient| {
                let mut correlate = Correlate::new(signal, dy, lines);
                for (channel, gradient) in (index * task..).zip(gradient.chunks_mut(taps)) {
                    round(gradient, vectorized(correlate.of_steps(channel, 0..steps)));
                }
            });
        }
        Division::Cut(of_piece) => {
            let pieces = steps.div_ceil(of_piece);
            let sums = parallel::map_ranges(channels * pieces, 1, |piece| {
                let (channel, first) = (piece.start / pieces, piece.start % pieces * of_piece);
                let mut correlate = Correlate::new(signal, dy, lines);
                vectorized(correlate.of_steps(channel, first..(first + of_piece).min(steps)));
                correlate.sums
            });
            for (gradient, sums) in gradient.chunks_mut(taps).zip(sums.chunks(pieces)) {
                let (first, others) = sums.split_first().expect("a channel has a piece");
                let mut total = first.clone();
                for sums in others {
                    add_each(&mut total, sums);
                }
                round(gradient, &total);
            }
        }
    }
    gradient
}

/// The loop over channels, whose images are cut between bands or blocks, and its division. The sizes: images, channels, and elements of a plane
/// of the signal and of `dy`.
fn gradient_division(
    [images, channels, plane_in, plane]: [usize; 4],
    phase: &Phase,
    is_wide: bool,
    work: Work,
    threads: usize,
) -> (Items, Division, Lines) {
    with_room(threads, |room| {
        let lines = Lines::of(phase, room);
        let (held, of_channel) = (lines.held(is_wide), images * (plane_in + plane));
        let may_hold = room.may_hold(channels * of_channel, threads);
        let items = Items {
            least: parallel::items_to_hold_of(channels, held, may_hold, threads),
            steps: images * lines.count,
            held,
            may_hold,
            ..Items::of([channels, of_channel], work)
        };
        let task = parallel::items_per_job_of(channels, work, threads);
        (items, items.division_from(task.max(items.least), threads), lines)
    })
}

/// A band, and the lines of points that read it.
struct BandOfLines {
    /// The rows of the canvas.
    rows: Range<usize>,
    /// Which elements of a plane of the result the lines are.
    results: Range<usize>,
    /// Where each line begins among these elements, and where in the band.
    runs: Vec<PairedRun>,
}

/// How the lines of points of an image are read.
struct Lines {
    /// Bands of a canvas, or the first block of a row and the last one, if that is smaller.
    bands: Vec<(Arc<Canvas>, BandOfLines)>,
    /// How many bands or blocks there are.
    count: usize,
    /// Points of a block.
    block: Option<usize>,
}

impl Lines {
    fn of(phase: &Phase, room: Room) -> Self {
        let (points, block) = (phase.points(), room.block(phase.stride(), phase.reach()));
        if !phase.is_one_row() || points <= block {
            let bands = Self::bands(phase, room.band);
            return Self { count: bands.len(), bands, block: None };
        }
        let mut bands = Self::bands(&phase.cut(0..block), room.band);
        if points % block > 0 {
            bands.extend(Self::bands(&phase.cut(points - points % block..points), room.band));
        }
        Self { bands, count: points.div_ceil(block), block: Some(block) }
    }

    fn bands(phase: &Phase, size: BandSize) -> Vec<(Arc<Canvas>, BandOfLines)> {
        let (canvas, lines) = (Arc::new(Canvas::new(phase)), phase.lines());
        let of_line = |run: &Run| (phase.target(run), canvas.origin(run));
        let places = lines.iter().map(|run| of_line(run).1..of_line(run).1 + run.len);
        let of_band = |band: Band| {
            let lines = &lines[band.items];
            let (last, start) = (&lines[lines.len() - 1], of_line(&lines[0]).0);
            let first = band.rows.start * canvas.row();
            let paired = |run: &Run| {
                let (target, origin) = of_line(run);
                PairedRun { starts: [target - start, origin - first], len: run.len }
            };
            let results = start..of_line(last).0 + last.len;
            let runs = lines.iter().map(paired).collect();
            (canvas.clone(), BandOfLines { rows: band.rows, results, runs })
        };
        canvas.bands(places, size).into_iter().map(of_band).collect()
    }

    /// A band or block, and how many points further along the last axis it lies.
    #[inline(always)]
    fn at(&self, number: usize) -> (&Canvas, &BandOfLines, usize) {
        let ((canvas, band), shift) = match self.block {
            None => (&self.bands[number], 0),
            Some(_) if number + 1 == self.count && self.bands.len() > 1 => (&self.bands[1], 0),
            Some(block) => (&self.bands[0], number * block),
        };
        (canvas, band, shift)
    }

    /// How many elements a thread holds. Half precision is widened.
    fn held(&self, is_wide: bool) -> usize {
        let of_band = |(canvas, band): &(Arc<Canvas>, BandOfLines)| {
            band.rows.len() * canvas.row() + if is_wide { 0 } else { band.results.len() }
        };
        self.bands.iter().map(of_band).max().unwrap_or(0)
    }
}

/// Makes the sums of a channel, for every tap.
struct Correlate<'a, E: CpuElement> {
    signal: Planes<'a, E>,
    dy: Planes<'a, E>,
    lines: &'a Lines,
    padded: Vec<E::Acc>,
    wide: Vec<E::Acc>,
    sums: Vec<E::Acc>,
}

impl<'a, E: CpuElement> Correlate<'a, E> {
    fn new(signal: Planes<'a, E>, dy: Planes<'a, E>, lines: &'a Lines) -> Self {
        let taps = lines.bands.first().map_or(0, |(canvas, _)| canvas.taps().len());
        Self { signal, dy, lines, padded: vec![], wide: vec![], sums: vec![E::Acc::zero(); taps] }
    }

    /// The sums over some steps: bands or blocks, counted from the first one of the first image.
    fn of_steps(&mut self, channel: usize, steps: Range<usize>) -> CorrelateSteps<'_, 'a, E> {
        CorrelateSteps { correlate: self, channel, steps }
    }
}

struct CorrelateSteps<'b, 'a, E: CpuElement> {
    correlate: &'b mut Correlate<'a, E>,
    channel: usize,
    steps: Range<usize>,
}

impl<'b, E: CpuElement> Job for CorrelateSteps<'b, '_, E> {
    type Result = &'b [E::Acc];

    #[inline(always)]
    fn run(self) -> &'b [E::Acc] {
        let Self { correlate: Correlate { signal, dy, lines, padded, wide, sums }, channel, steps } = self;
        sums.fill(E::Acc::zero());
        for step in steps {
            let plane = step / lines.count * signal.channels + channel;
            let (canvas, band, shift) = lines.at(step % lines.count);
            canvas.paint(
                &signal.values[plane * signal.plane..][..canvas.plane()],
                band.rows.clone(),
                shift,
                padded,
            );
            let results = band.results.start + shift..band.results.end + shift;
            let dys = &dy.values[plane * dy.plane..][results];
            let dys = match accumulators_of(dys) {
                Some(dys) => dys,
                None => {
                    wide.resize(dys.len(), E::Acc::zero());
                    widen(wide, dys);
                    &*wide
                }
            };
            add_dots(dys, &*padded, &band.runs, canvas.taps(), sums);
        }
        sums
    }
}

#[cfg(test)]
pub(crate) mod counting {
    use super::super::depthwise::counting::{phase, work};
    use super::*;

    /// How the gradient of the weight is divided.
    pub(crate) fn division(
        [batch, channels]: [usize; 2],
        sides: &[usize],
        [kernel, stride]: [usize; 2],
        threads: usize,
    ) -> (Items, Division) {
        let phase = phase(sides, kernel, stride);
        let sizes = [batch, channels, sides.iter().product(), phase.output_plane()];
        let (items, division, _) =
            gradient_division(sizes, &phase, true, work(batch * channels, &phase), threads);
        (items, division)
    }
}
