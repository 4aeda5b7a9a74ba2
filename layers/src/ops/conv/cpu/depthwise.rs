//! Depthwise convolutions, whose groups have one channel: plane by plane, on a [`Canvas`].
//!
//! Besides its results, a thread holds a band of rows of the canvas: 16 KiB of f32, four times the reach of the kernel, or one row,
//! whichever is largest; but all threads together, no more than a 32nd of input and result, or
//! 128 KiB.
use super::{
    Finish,
    canvas::{Band, Canvas},
    geometry::{Phase, Planes, Run, Weighted},
    rows::{round, widen},
};
use crate::backend::cpu::{
    CpuElement, accumulators_of, is_wide,
    parallel::{self, Job, Work, vectorized},
    product::{MOST_LANES, PairedRun, RowsAt, SumRows, Workspace, add_dots, add_product},
};
use core::{mem::MaybeUninit, ops::Range};
use num_traits::Zero;

/// Columns that are summed at once at most: 8 KiB of f32.
const STRETCH: usize = 1 << 11;

/// All threads together hold at most one part in this many of input and result: Burn's kernel holds as little.
const PART: usize = 32;

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
    let laid_out: Vec<LaidOut> = phases.iter().map(|(phase, _)| LaidOut::new(phase)).collect();
    let held = laid_out.iter().map(LaidOut::held).max().unwrap_or(0);
    let least = parallel::items_to_hold([planes, input.plane + plane], held, PART);
    let task = parallel::items_per_task(planes, plane).max(least);
    let points = phases.iter().map(|(phase, _)| phase.points()).sum::<usize>();
    assert_eq!(points, plane, "a phase for every result");
    // SAFETY: every element of a plane is a point of one phase, all of whose lines are written.
    unsafe {
        parallel::written(planes * plane, task * plane, work, |index, results| {
            let first = index * task;
            vectorized(Convolve { input, phases, laid_out: &laid_out, finish, first, results });
        })
    }
}

/// How the points of a phase lie on a canvas.
struct LaidOut {
    canvas: Canvas,
    stretches: Vec<Stretch>,
    bands: Vec<Band>,
}

/// A stretch: runs of points that lie close together on a canvas. The vector loop takes them as one, with what lies between them.
struct Stretch {
    origin: usize,
    width: usize,
    /// Of every run: where it begins in the stretch, where in the plane of the result, and how many points it has.
    runs: Vec<[usize; 3]>,
}

impl LaidOut {
    fn new(phase: &Phase) -> Self {
        let canvas = Canvas::new(phase);
        let mut stretches: Vec<Stretch> = Vec::new();
        for line in phase.lines() {
            for first in (0..line.len).step_by(STRETCH) {
                let len = (line.len - first).min(STRETCH);
                let origin = canvas.origin(&line) + first;
                let target = phase.target(&line) + first * phase.step();
                match stretches.last_mut() {
                    Some(Stretch { origin: start, width, runs })
                        if 4 * (origin - *start - *width) <= len && origin - *start + len <= STRETCH =>
                    {
                        *width = origin - *start + len;
                        runs.push([origin - *start, target, len]);
                    }
                    _ => stretches.push(Stretch { origin, width: len, runs: vec![[0, target, len]] }),
                }
            }
        }
        let places = stretches.iter().map(|stretch| stretch.origin..stretch.origin + stretch.width);
        let bands = canvas.bands(places);
        Self { canvas, stretches, bands }
    }

    /// How many elements a thread holds.
    fn held(&self) -> usize {
        let rows = self.bands.iter().map(|band| band.rows.len()).max().unwrap_or(0);
        rows * self.canvas.row() + MOST_LANES + self.sums()
    }

    /// How many sums the widest stretch needs.
    fn sums(&self) -> usize {
        self.stretches.iter().map(|stretch| stretch.width.next_multiple_of(MOST_LANES)).max().unwrap_or(0)
    }
}

/// Computes the results of some planes.
struct Convolve<'a, E: CpuElement> {
    input: Planes<'a, E>,
    phases: &'a [Weighted<'a, E::Acc>],
    laid_out: &'a [LaidOut],
    finish: Finish<'a, E>,
    /// The first plane.
    first: usize,
    results: &'a mut [MaybeUninit<E>],
}

impl<E: CpuElement> Job for Convolve<'_, E> {
    type Result = ();

    #[inline(always)]
    fn run(self) {
        let Self { input, phases, laid_out, finish, first, results } = self;
        let plane = phases[0].0.output_plane();
        let mut padded = Vec::new();
        let mut sums = Workspace::new(laid_out.iter().map(LaidOut::sums).max().unwrap_or(0));
        for (number, result) in (first..).zip(results.chunks_mut(plane)) {
            let channel = number % input.channels;
            let input = &input.values[number * input.plane..][..input.plane];
            for ((phase, weight), LaidOut { canvas, stretches, bands }) in phases.iter().zip(laid_out) {
                let rows = RowsAt { values: &weight[channel * phase.taps.len()..], starts: &[0] };
                for band in bands {
                    let start = band.rows.start * canvas.row();
                    canvas.paint(input, band.rows.clone(), &mut padded);
                    for Stretch { origin, width, runs } in &stretches[band.items.clone()] {
                        let columns = RowsAt { values: &padded[origin - start..], starts: canvas.taps() };
                        let of_stretch = SumRows { values: &mut sums, pitch: *width, first: true };
                        add_product(rows, columns, *width, of_stretch);
                        finish.apply(channel, &mut sums[..*width]);
                        for &[place, target, len] in runs {
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
    let bands: Vec<BandOfLines> = canvas.bands(places).into_iter().map(of_band).collect();
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
