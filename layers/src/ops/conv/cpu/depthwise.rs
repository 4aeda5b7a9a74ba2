//! Depthwise convolutions, whose groups have one channel: plane by plane, on a [`Canvas`].
//!
//! Besides its results, a thread holds a band of rows of the canvas: 16 KiB of f32, four times the reach of the kernel, or one row,
//! whichever is largest; but all threads together, no more than a 32nd of input and result, or
//! 128 KiB. With many threads, bands are smaller for that. Where planes are few, they are cut between rows; then a thread may hold 16 KiB.
use super::{
    Finish,
    canvas::{Band, BandSize, Canvas},
    geometry::{Phase, Planes, Run, Weighted},
    rows::{round, widen},
};
use crate::backend::cpu::{
    CpuElement, accumulators_of, is_wide,
    parallel::{self, Job, Work, vectorized},
    pieces,
    plan::{Division, Items},
    product::{MOST_LANES, PairedRun, RowsAt, SumRows, Workspace, add_dots, add_product},
};
use core::{mem::MaybeUninit, ops::Range};
use num_traits::Zero;

/// What is in the cache at a time.
#[derive(Clone, Copy, Debug)]
struct Room {
    band: BandSize,
    /// Columns that are summed at once at most.
    stretch: usize,
    /// About how long a convolution takes, in parts of the shortest time: rows that two bands read are laid out twice.
    time: f64,
    /// What every thread may hold in any case.
    of_thread: usize,
}

/// The usual one has sums of 8 KiB of f32. The others are for more threads than could hold so much.
const ROOMS: [Room; 3] = [
    Room { band: BandSize::USUAL, stretch: 1 << 11, time: 1.0, of_thread: 0 },
    Room { band: BandSize { elements: 1 << 10, reaches: 2 }, stretch: 1 << 9, time: 1.1, of_thread: 0 },
    Room { band: BandSize { elements: 0, reaches: 1 }, stretch: 1 << 7, time: 1.25, of_thread: OF_THREAD },
];

/// All threads together hold at most one part in this many of input and result: Burn's kernel holds as little.
const PART: usize = 32;

/// Elements that every thread may hold where not all of them could hold a few rows otherwise: 16 KiB of f32.
const OF_THREAD: usize = 1 << 12;

/// The result `[batch, channels, ...]` of the convolution that phases with their weights describe. A weight has an element per channel
/// and tap.
pub(super) fn convolve<E: CpuElement>(
    input: Planes<'_, E>,
    phases: &[Weighted<'_, E::Acc>],
    finish: Finish<'_, E>,
) -> Vec<E> {
    let plane = phases[0].0.output_plane();
    let planes = input.values.len() / input.plane;
    let of_phase = |(phase, _): &Weighted<'_, E::Acc>| Work::of([planes, phase.points(), phase.taps.len()]);
    let work = phases.iter().map(of_phase).sum::<Work>();
    let points = phases.iter().map(|(phase, _)| phase.points()).sum::<usize>();
    assert_eq!(points, plane, "a phase for every result");
    let row = phases[0].0.output_row().max(1);
    let laid_out = |rows: Range<usize>, room| {
        phases.iter().map(|(phase, _)| LaidOut::new(phase, rows.clone(), room)).collect::<Vec<_>>()
    };
    let sizes = Sizes { planes, plane_in: input.plane, plane, row };
    let (division, room, of_plane) = sizes.division(laid_out, work, parallel::threads());
    // The rows of a piece of a plane, and how every piece is laid out.
    let (rows, pieces) = match division {
        Division::Whole(_) => (plane / row, vec![of_plane]),
        Division::Cut(rows) => {
            drop(of_plane);
            let pieces = (0..plane / row).step_by(rows);
            (rows, pieces.map(|first| laid_out(first..(first + rows).min(plane / row), room)).collect())
        }
    };
    // SAFETY: every element of a plane is a point of one phase, all of whose lines are written.
    unsafe {
        pieces::written_in_pieces(planes * plane, division.chunks(plane, row), work, |start, results| {
            let laid_out = &pieces[start % plane / (rows * row)];
            vectorized(Convolve { input, phases, laid_out, finish, start, results });
        })
    }
}

/// Elements of a convolution: how many planes there are, and the sizes of a plane of the input, and of a plane and a row of the result.
struct Sizes {
    planes: usize,
    plane_in: usize,
    plane: usize,
    row: usize,
}

impl Sizes {
    /// The loop over planes, if a task holds so many elements, and one of a piece of a plane so many.
    fn items(&self, [held, by_piece]: [usize; 2], room: Room, work: Work, threads: usize) -> Items {
        let &Self { planes, plane_in, plane, row } = self;
        let may_hold = parallel::elements_to_hold(planes * (plane_in + plane), PART);
        let may_hold = may_hold.max(threads * room.of_thread);
        Items {
            least: parallel::items_to_hold_of(planes, held, may_hold, threads),
            steps: plane / row,
            again: 1, // rows that two pieces read only have to be laid out
            held: [by_piece, 0],
            may_hold,
            ..Items::of([planes, plane], work)
        }
    }

    /// How planes are divided among threads, given how rows of the result are laid out: that, what a thread has room for, and how a whole
    /// plane is laid out.
    fn division(
        &self,
        laid_out: impl Fn(Range<usize>, Room) -> Vec<LaidOut>,
        work: Work,
        threads: usize,
    ) -> (Division, Room, Vec<LaidOut>) {
        let of_room = |room: Room| {
            let of_plane = laid_out(0..self.plane / self.row, room);
            let held = of_plane.iter().map(LaidOut::held).max().unwrap_or(0);
            let by_piece = of_plane.iter().map(|laid_out| laid_out.held_by_piece(room)).max().unwrap_or(0);
            let items = self.items([held, by_piece], room, work, threads);
            let division = items.division(threads);
            let time = room.time * items.time(division, threads);
            (items.is_even(division, threads), time, (division, room, of_plane))
        };
        let (mut is_even, mut least, mut best) = of_room(ROOMS[0]);
        for room in &ROOMS[1..] {
            if is_even {
                break;
            }
            let (even, time, division) = of_room(*room);
            if time < least {
                (is_even, least, best) = (even, time, division);
            }
        }
        best
    }
}

/// How the points of a phase lie on a canvas.
struct LaidOut {
    canvas: Canvas,
    stretches: Vec<Stretch>,
    /// Of every run: where it begins in its stretch, where in the plane of the result, and how many points it has.
    runs: Vec<[usize; 3]>,
    bands: Vec<Band>,
}

/// A stretch: runs of points that lie close together on a canvas. The vector loop takes them as one, with what lies between them.
struct Stretch {
    origin: usize,
    width: usize,
    /// Which of all runs.
    runs: Range<usize>,
}

impl LaidOut {
    /// Of the points in some rows of the result.
    fn new(phase: &Phase, rows: Range<usize>, Room { band, stretch: most, .. }: Room) -> Self {
        let canvas = Canvas::new(phase);
        let (mut stretches, mut runs): (Vec<Stretch>, Vec<[usize; 3]>) = (Vec::new(), Vec::new());
        for line in phase.lines_in(rows) {
            for first in (0..line.len).step_by(most) {
                let len = (line.len - first).min(most);
                let origin = canvas.origin(&line) + first;
                let target = phase.target(&line) + first * phase.step();
                match stretches.last_mut() {
                    Some(Stretch { origin: start, width, runs: of_stretch })
                        if 4 * (origin - *start - *width) <= len && origin - *start + len <= most =>
                    {
                        *width = origin - *start + len;
                        of_stretch.end += 1;
                        runs.push([origin - *start, target, len]);
                    }
                    _ => {
                        stretches.push(Stretch { origin, width: len, runs: runs.len()..runs.len() + 1 });
                        runs.push([0, target, len]);
                    }
                }
            }
        }
        let places = stretches.iter().map(|stretch| stretch.origin..stretch.origin + stretch.width);
        let bands = canvas.bands(places, band);
        Self { canvas, stretches, runs, bands }
    }

    /// How many elements a thread holds.
    fn held(&self) -> usize {
        let rows = self.bands.iter().map(|band| band.rows.len()).max().unwrap_or(0);
        rows * self.canvas.row() + MOST_LANES + self.sums()
    }

    /// How many elements a thread holds at most if this, of a whole plane, is cut.
    fn held_by_piece(&self, room: Room) -> usize {
        self.held().max(self.canvas.largest(room.band) + MOST_LANES + self.sums())
    }

    /// How many sums the widest stretch needs.
    fn sums(&self) -> usize {
        self.stretches.iter().map(|stretch| stretch.width.next_multiple_of(MOST_LANES)).max().unwrap_or(0)
    }
}

/// Computes the results of some planes, or of some rows of one.
struct Convolve<'a, E: CpuElement> {
    input: Planes<'a, E>,
    phases: &'a [Weighted<'a, E::Acc>],
    laid_out: &'a [LaidOut],
    finish: Finish<'a, E>,
    /// The number of the first result.
    start: usize,
    results: &'a mut [MaybeUninit<E>],
}

impl<E: CpuElement> Job for Convolve<'_, E> {
    type Result = ();

    #[inline(always)]
    fn run(self) {
        let Self { input, phases, laid_out, finish, start, results } = self;
        let plane = phases[0].0.output_plane();
        let (first, offset) = (start / plane, start % plane);
        let mut padded = Vec::new();
        let mut sums = Workspace::new(laid_out.iter().map(LaidOut::sums).max().unwrap_or(0));
        for (number, result) in (first..).zip(results.chunks_mut(plane)) {
            let channel = number % input.channels;
            let input = &input.values[number * input.plane..][..input.plane];
            for ((phase, weight), LaidOut { canvas, stretches, runs, bands }) in phases.iter().zip(laid_out) {
                let rows = RowsAt { values: &weight[channel * phase.taps.len()..], starts: &[0] };
                for band in bands {
                    let start = band.rows.start * canvas.row();
                    canvas.paint(input, band.rows.clone(), &mut padded);
                    for Stretch { origin, width, runs: numbers } in &stretches[band.items.clone()] {
                        let columns = RowsAt { values: &padded[origin - start..], starts: canvas.taps() };
                        let of_stretch = SumRows { values: &mut sums, pitch: *width, first: true };
                        add_product(rows, columns, *width, of_stretch);
                        finish.apply(channel, &mut sums[..*width]);
                        for &[place, target, len] in &runs[numbers.clone()] {
                            let target = target - offset;
                            let sums =
                                sums[place..][..len].iter().map(|&sum| MaybeUninit::new(E::narrow(sum)));
                            match phase.step() {
                                1 => result[target..].iter_mut().zip(sums).for_each(|(y, sum)| *y = sum),
                                step => {
                                    let results = result[target..].iter_mut().step_by(step);
                                    results.zip(sums).for_each(|(y, sum)| *y = sum);
                                }
                            }
                        }
                    }
                }
            }
        }
    }
}

/// The gradient of the weight, with an element per channel and tap.
pub(super) fn weight_gradient<E: CpuElement>(
    signal: Planes<'_, E>,
    dy: Planes<'_, E>,
    phase: &Phase,
) -> Vec<E> {
    let (channels, taps) = (signal.channels, phase.taps.len());
    let mut gradient = vec![E::zero(); channels * taps];
    let work = Work::of([dy.values.len(), taps]);
    let canvas = Canvas::new(phase);
    let lines = phase.lines();
    let of_line = |run: &Run| (phase.target(run), canvas.origin(run));
    let places =
        lines.iter().map(|run| of_line(run).1).zip(&lines).map(|(origin, run)| origin..origin + run.len);
    let of_band = |band: Band| {
        let lines = &lines[band.items];
        let (last, start) = (&lines[lines.len() - 1], of_line(&lines[0]).0);
        let first = band.rows.start * canvas.row();
        let paired = |run: &Run| {
            let (target, origin) = of_line(run);
            PairedRun { starts: [target - start, origin - first], len: run.len }
        };
        let results = start..of_line(last).0 + last.len;
        BandOfLines { rows: band.rows, results, runs: lines.iter().map(paired).collect() }
    };
    let bands: Vec<BandOfLines> = canvas.bands(places, BandSize::USUAL).into_iter().map(of_band).collect();
    // Half precision is widened.
    let widened = |band: &BandOfLines| if is_wide::<E>() { 0 } else { band.results.len() };
    let held = bands.iter().map(|band| band.rows.len() * canvas.row() + widened(band)).max().unwrap_or(0);
    let of_channel = (signal.values.len() + dy.values.len()) / channels;
    let least = parallel::items_to_hold([channels, of_channel], held, PART);
    let task = parallel::items_per_job(channels, work).max(least);
    parallel::chunks_mut(&mut gradient, task * taps, work, |index, gradient| {
        let first = index * task;
        vectorized(Correlate { signal, dy, canvas: &canvas, bands: &bands, first, gradient });
    });
    gradient
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

/// Computes the gradients of some channels.
struct Correlate<'a, E> {
    signal: Planes<'a, E>,
    dy: Planes<'a, E>,
    canvas: &'a Canvas,
    bands: &'a [BandOfLines],
    /// The first channel.
    first: usize,
    gradient: &'a mut [E],
}

impl<E: CpuElement> Job for Correlate<'_, E> {
    type Result = ();

    #[inline(always)]
    fn run(self) {
        let Self { signal, dy, canvas, bands, first, gradient } = self;
        let taps = canvas.taps();
        let (mut padded, mut wide) = (Vec::new(), Vec::new());
        let mut sums = vec![E::Acc::zero(); taps.len()];
        for (channel, gradient) in (first..).zip(gradient.chunks_mut(taps.len())) {
            sums.fill(E::Acc::zero());
            let signals = signal.values[channel * signal.plane..].chunks(signal.channels * signal.plane);
            let dys = dy.values[channel * dy.plane..].chunks(dy.channels * dy.plane);
            for (signal, dys) in signals.zip(dys) {
                for BandOfLines { rows, results, runs } in bands {
                    canvas.paint(&signal[..canvas.plane()], rows.clone(), &mut padded);
                    let dys = &dys[results.clone()];
                    let dys = match accumulators_of(dys) {
                        Some(dys) => dys,
                        None => {
                            wide.resize(dys.len(), E::Acc::zero());
                            widen(&mut wide, dys);
                            &wide
                        }
                    };
                    add_dots(dys, &padded, runs, taps, &mut sums);
                }
            }
            round(gradient, &sums);
        }
    }
}

#[cfg(test)]
pub(crate) mod counting {
    use super::super::geometry::{Axes, Axis};
    use super::*;

    /// How square planes are divided.
    pub(crate) fn division(
        [batch, channels, side]: [usize; 3],
        kernel: usize,
        stride: usize,
        threads: usize,
    ) -> (Items, Division) {
        let output = (side + kernel / 2 * 2 - kernel) / stride + 1;
        let axis = Axis { input: side, output, kernel, stride, dilation: 1, padding: kernel / 2 };
        let phase = Axes::new(&[axis, axis]).convolution();
        let (planes, plane, row) = (batch * channels, phase.output_plane(), phase.output_row());
        let work = Work::of([planes, phase.points(), phase.taps.len()]);
        let laid_out = |rows, room| vec![LaidOut::new(&phase, rows, room)];
        let sizes = Sizes { planes, plane_in: side * side, plane, row };
        let (division, room, of_plane) = sizes.division(laid_out, work, threads);
        let held = match division {
            Division::Whole(_) => of_plane[0].held(),
            Division::Cut(rows) => LaidOut::new(&phase, 0..rows, room).held(),
        };
        (sizes.items([held; 2], room, work, threads), division)
    }
}
