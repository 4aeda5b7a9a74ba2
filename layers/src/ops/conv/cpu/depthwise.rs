//! Convolutions whose groups have one channel, which are no products: plane by plane with its padding, so that no loop asks
//! where it ends.
use super::{
    canvas::Canvas,
    geometry::{Phase, Planes, Run, Weighted},
    rows::round,
};
use crate::backend::cpu::{
    CpuElement,
    parallel::{self, Job, vectorized},
    product::MOST_LANES as LANES,
};
use num_traits::Zero;

/// The result `[batch, channels, ...]` of the convolution that phases with their weights describe: one element per channel and
/// tap.
pub(super) fn convolve<E: CpuElement>(
    input: Planes<'_, E>,
    phases: &[Weighted<'_, E::Acc>],
    bias: Option<&[E]>,
) -> Vec<E> {
    let plane = phases[0].0.output_plane();
    let planes = input.values.len() / input.plane;
    let products: usize = phases.iter().map(|(phase, _)| phase.points() * phase.taps.len()).sum();
    let task = parallel::items_per_task(planes, plane);
    let laid_out: Vec<(Canvas, Vec<Run>)> =
        phases.iter().map(|(phase, _)| (Canvas::new(phase, LANES), phase.lines())).collect();
    parallel::filled(planes * plane, E::zero(), task * plane, planes * products, |index, results| {
        let first = index * task;
        vectorized(Convolve { input, phases, laid_out: &laid_out, bias, first, results });
    })
}

/// Computes the results of some planes.
struct Convolve<'a, E: CpuElement> {
    input: Planes<'a, E>,
    phases: &'a [Weighted<'a, E::Acc>],
    laid_out: &'a [(Canvas, Vec<Run>)],
    bias: Option<&'a [E]>,
    /// The first plane.
    first: usize,
    results: &'a mut [E],
}

impl<E: CpuElement> Job for Convolve<'_, E> {
    type Result = ();

    #[inline(always)]
    fn run(self) {
        let Self { input, phases, laid_out, bias, first, results } = self;
        let plane = phases[0].0.output_plane();
        let mut padded = vec![Vec::new(); phases.len()];
        for (number, result) in (first..).zip(results.chunks_mut(plane)) {
            let channel = number % input.channels;
            let input = &input.values[number * input.plane..][..input.plane];
            let bias = bias.map_or(E::Acc::zero(), |bias| bias[channel].widen());
            for (((phase, weight), (canvas, lines)), padded) in phases.iter().zip(laid_out).zip(&mut padded) {
                let weight = &weight[channel * phase.taps.len()..];
                canvas.paint(input, padded);
                for run in lines {
                    let (origin, step) = (canvas.origin(run), phase.step());
                    for first in (0..run.len).step_by(LANES) {
                        let mut sums = [bias; LANES];
                        for (offset, &weight) in canvas.taps().iter().zip(weight) {
                            let values = &padded[origin + first + offset..][..LANES];
                            for lane in 0..LANES {
                                sums[lane] = sums[lane] + weight * values[lane];
                            }
                        }
                        let results = &mut result[phase.target(run) + first * step..];
                        let sums = &sums[..(run.len - first).min(LANES)];
                        match step {
                            1 => round(&mut results[..sums.len()], sums),
                            step => round(results.iter_mut().step_by(step), sums),
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
    let work = dy.values.len() * taps;
    let task = parallel::items_per_job(channels, work);
    let (canvas, lines) = (Canvas::new(phase, LANES), phase.lines());
    parallel::chunks_mut(&mut gradient, task * taps, work, |index, gradient| {
        let first = index * task;
        vectorized(Correlate { signal, dy, phase, canvas: &canvas, lines: &lines, first, gradient });
    });
    gradient
}

/// Computes the gradients of some channels.
struct Correlate<'a, E> {
    signal: Planes<'a, E>,
    dy: Planes<'a, E>,
    phase: &'a Phase,
    canvas: &'a Canvas,
    lines: &'a [Run],
    /// The first channel.
    first: usize,
    gradient: &'a mut [E],
}

impl<E: CpuElement> Job for Correlate<'_, E> {
    type Result = ();

    #[inline(always)]
    fn run(self) {
        let Self { signal, dy, phase, canvas, lines, first, gradient } = self;
        let taps = phase.taps.len();
        let (mut padded, mut blocks) = (Vec::new(), Vec::new());
        let mut sums = vec![[E::Acc::zero(); LANES]; taps];
        for (channel, gradient) in (first..).zip(gradient.chunks_mut(taps)) {
            sums.fill([E::Acc::zero(); LANES]);
            let signals = signal.values[channel * signal.plane..].chunks(signal.channels * signal.plane);
            let dys = dy.values[channel * dy.plane..].chunks(dy.channels * dy.plane);
            for (signal, dy) in signals.zip(dys) {
                canvas.paint(&signal[..canvas.plane()], &mut padded);
                blocks.clear();
                for run in lines {
                    let dy = &dy[phase.target(run)..][..run.len];
                    let places = (canvas.origin(run)..).step_by(LANES);
                    blocks.extend(dy.chunks(LANES).zip(places).map(|(dy, place)| {
                        let mut block = [E::Acc::zero(); LANES];
                        block.iter_mut().zip(dy).for_each(|(lane, dy)| *lane = dy.widen());
                        (block, place, dy.len())
                    }));
                }
                for (sums, offset) in sums.iter_mut().zip(canvas.taps()) {
                    add_products(sums, &blocks, &padded[*offset..]);
                }
            }
            for (gradient, sums) in gradient.iter_mut().zip(&sums) {
                *gradient = E::narrow(sums.iter().fold(E::Acc::zero(), |sum, &lane| sum + lane));
            }
        }
    }
}

/// Neighbouring elements of `dy`, where their points lie, and how many there are.
type Block<A> = ([A; LANES], usize, usize);

/// Adds products of blocks with what their points read.
#[inline(always)]
fn add_products<A: CpuElement<Acc = A>>(sums: &mut [A; LANES], blocks: &[Block<A>], padded: &[A]) {
    let mut totals = *sums;
    for (dy, place, len) in blocks {
        let values = &padded[*place..][..LANES];
        for lane in 0..LANES {
            // What lies beyond the line may be infinite.
            let value = if lane < *len { values[lane] } else { A::zero() };
            totals[lane] = totals[lane] + dy[lane] * value;
        }
    }
    *sums = totals;
}
