//! Convolutions whose groups have one channel, which are no products: plane by plane with its padding, so that no loop asks
//! where it ends.
use super::{
    Finish,
    canvas::Canvas,
    geometry::{Phase, Planes, Run, Weighted},
    rows::{round, widen},
};
use crate::backend::cpu::{
    CpuElement, accumulators_of,
    parallel::{self, Job, Work, vectorized},
    product::{MOST_LANES, Rows, Segment, Sums, Workspace, add_dots, add_product},
};
use core::mem::MaybeUninit;
use num_traits::Zero;

/// Columns that are summed at once, at most: 8 KiB of f32.
const STRETCH: usize = 1 << 11;

/// The result `[batch, channels, ...]` of the convolution that phases with their weights describe: one element per channel and
/// tap.
pub(super) fn convolve<E: CpuElement>(
    input: Planes<'_, E>,
    phases: &[Weighted<'_, E::Acc>],
    finish: Finish<'_, E>,
) -> Vec<E> {
    let plane = phases[0].0.output_plane();
    let planes = input.values.len() / input.plane;
    let of_phase = |(phase, _): &Weighted<'_, E::Acc>| Work::of([planes, phase.points(), phase.taps.len()]);
    let work = phases.iter().map(of_phase).sum::<Work>();
    let task = parallel::items_per_task(planes, plane);
    let laid_out: Vec<LaidOut> = phases.iter().map(|(phase, _)| LaidOut::new(phase)).collect();
    let points = phases.iter().map(|(phase, _)| phase.points()).sum::<usize>();
    assert_eq!(points, plane, "a phase for every result");
    // SAFETY: every element of a plane is a point of one phase, whose lines are written.
    unsafe {
        parallel::written(planes * plane, task * plane, work, |index, results| {
            let first = index * task;
            vectorized(Convolve { input, phases, laid_out: &laid_out, finish, first, results });
        })
    }
}

/// A phase, laid out.
struct LaidOut {
    canvas: Canvas,
    stretches: Vec<Stretch>,
}

/// Lines of points, or parts of one, that lie close to one another on a canvas, and are computed as one, with what lies between
/// them.
struct Stretch {
    origin: usize,
    width: usize,
    /// Where in the stretch a line begins, where in the plane of the result, and how many points it has.
    lines: Vec<[usize; 3]>,
}

impl LaidOut {
    fn new(phase: &Phase) -> Self {
        let canvas = Canvas::new(phase);
        let mut stretches: Vec<Stretch> = Vec::new();
        for run in phase.lines() {
            for first in (0..run.len).step_by(STRETCH) {
                let len = (run.len - first).min(STRETCH);
                let origin = canvas.origin(&run) + first;
                let target = phase.target(&run) + first * phase.step();
                match stretches.last_mut() {
                    Some(Stretch { origin: start, width, lines })
                        if 4 * (origin - *start - *width) <= len && origin - *start + len <= STRETCH =>
                    {
                        *width = origin - *start + len;
                        lines.push([origin - *start, target, len]);
                    }
                    _ => stretches.push(Stretch { origin, width: len, lines: vec![[0, target, len]] }),
                }
            }
        }
        Self { canvas, stretches }
    }

    /// As many sums as a stretch needs.
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
        let mut padded = vec![Vec::new(); phases.len()];
        let mut sums = Workspace::new(laid_out.iter().map(LaidOut::sums).max().unwrap_or(0));
        for (number, result) in (first..).zip(results.chunks_mut(plane)) {
            let channel = number % input.channels;
            let input = &input.values[number * input.plane..][..input.plane];
            for (((phase, weight), laid_out), padded) in phases.iter().zip(laid_out).zip(&mut padded) {
                let LaidOut { canvas, stretches } = laid_out;
                canvas.paint(input, padded);
                let rows = Rows { values: &weight[channel * phase.taps.len()..], starts: &[0] };
                for Stretch { origin, width, lines } in stretches {
                    let columns = Rows { values: &padded[*origin..], starts: canvas.taps() };
                    add_product(
                        rows,
                        columns,
                        *width,
                        Sums { values: &mut sums, pitch: *width, first: true },
                    );
                    finish.apply(channel, &mut sums[..*width]);
                    for &[place, target, len] in lines {
                        let sums = sums[place..][..len].iter().map(|&sum| MaybeUninit::new(E::narrow(sum)));
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

/// The gradient of the weight: an element per channel and tap.
pub(super) fn weight_gradient<E: CpuElement>(
    signal: Planes<'_, E>,
    dy: Planes<'_, E>,
    phase: &Phase,
) -> Vec<E> {
    let (channels, taps) = (signal.channels, phase.taps.len());
    let mut gradient = vec![E::zero(); channels * taps];
    let work = Work::of([dy.values.len(), taps]);
    let task = parallel::items_per_job(channels, work);
    let canvas = Canvas::new(phase);
    let segment = |run: &Run| Segment { starts: [phase.target(run), canvas.origin(run)], len: run.len };
    let segments: Vec<Segment> = phase.lines().iter().map(segment).collect();
    parallel::chunks_mut(&mut gradient, task * taps, work, |index, gradient| {
        let first = index * task;
        vectorized(Correlate { signal, dy, canvas: &canvas, segments: &segments, first, gradient });
    });
    gradient
}

/// Computes the gradients of some channels.
struct Correlate<'a, E> {
    signal: Planes<'a, E>,
    dy: Planes<'a, E>,
    canvas: &'a Canvas,
    segments: &'a [Segment],
    /// The first channel.
    first: usize,
    gradient: &'a mut [E],
}

impl<E: CpuElement> Job for Correlate<'_, E> {
    type Result = ();

    #[inline(always)]
    fn run(self) {
        let Self { signal, dy, canvas, segments, first, gradient } = self;
        let taps = canvas.taps();
        let (mut padded, mut wide) = (Vec::new(), Vec::new());
        let mut sums = vec![E::Acc::zero(); taps.len()];
        for (channel, gradient) in (first..).zip(gradient.chunks_mut(taps.len())) {
            sums.fill(E::Acc::zero());
            let signals = signal.values[channel * signal.plane..].chunks(signal.channels * signal.plane);
            let dys = dy.values[channel * dy.plane..].chunks(dy.channels * dy.plane);
            for (signal, dys) in signals.zip(dys) {
                canvas.paint(&signal[..canvas.plane()], &mut padded);
                let dys = &dys[..dy.plane];
                let dys = match accumulators_of(dys) {
                    Some(dys) => dys,
                    None => {
                        wide.resize(dy.plane, E::Acc::zero());
                        widen(&mut wide, dys);
                        &wide
                    }
                };
                add_dots(dys, &padded, segments, taps, &mut sums);
            }
            round(gradient, &sums);
        }
    }
}
