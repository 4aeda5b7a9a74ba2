//! Linear maps along spatial axes with fixed weights, and their adjoints: average pools and interpolations.
//!
//! `y[o] = sum_i weight[o, i] x[i]` per axis, and the product of that over the axes. A window of non-zero weights per
//! output is all there is to know; the adjoint `dx[i] = sum_o weight[o, i] dy[o]` needs no input.
use super::{CpuElement, parallel};
use burn::tensor::Element;

/// The weights of one axis.
#[derive(Clone, Debug)]
pub(super) struct AxisMap {
    size: usize,
    windows: Vec<Window>,
    weights: Vec<f64>,
}

/// The non-zero weights of one output.
#[derive(Clone, Copy, Debug)]
struct Window {
    /// The first input.
    start: usize,
    /// Where its weights begin, and how many they are.
    weights: usize,
    len: usize,
}

impl AxisMap {
    /// From `(first input, weights)` for every output.
    fn new(size: usize, outputs: impl Iterator<Item = (usize, Vec<f64>)>) -> Self {
        let mut map = Self { size, windows: vec![], weights: vec![] };
        for (start, weights) in outputs {
            map.windows.push(Window { start, weights: map.weights.len(), len: weights.len() });
            map.weights.extend(weights);
        }
        map
    }

    /// From `(input, weight)` for every output, in any order, inputs repeated or not.
    fn from_taps(size: usize, outputs: impl Iterator<Item = Vec<(usize, f64)>>) -> Self {
        Self::new(
            size,
            outputs.map(|taps| {
                let start = taps.iter().map(|tap| tap.0).min().unwrap_or(0);
                let end = taps.iter().map(|tap| tap.0 + 1).max().unwrap_or(0);
                let mut weights = vec![0.0; end - start];
                taps.into_iter().for_each(|(input, weight)| weights[input - start] += weight);
                (start, weights)
            }),
        )
    }

    /// Windows of an average pool.
    pub(super) fn mean_windows(
        size: usize,
        out: usize,
        kernel: usize,
        stride: usize,
        (begin, end): (usize, usize),
        count_include_pad: bool,
    ) -> Self {
        Self::new(
            size,
            (0..out).map(|window| {
                let padded = window * stride..(window * stride + kernel).min(size + begin + end);
                let valid = padded.start.max(begin)..padded.end.min(size + begin);
                let count = if count_include_pad { padded.len() } else { valid.len() };
                (valid.start.min(size + begin) - begin, vec![1.0 / count.max(1) as f64; valid.len()])
            }),
        )
    }

    /// Windows of an adaptive average pool.
    pub(super) fn adaptive_mean(size: usize, out: usize) -> Self {
        Self::new(
            size,
            (0..out).map(|window| {
                let start = window * size / out;
                let len = ((window + 1) * size).div_ceil(out) - start;
                (start, vec![1.0 / len as f64; len])
            }),
        )
    }

    /// The input at `floor(o * size / out)`.
    pub(super) fn nearest(size: usize, out: usize) -> Self {
        let ratio = size as f64 / out as f64;
        let index = |o: usize| ((o as f64 * ratio).floor() as usize).min(size - 1);
        Self::new(size, (0..out).map(|o| (index(o), vec![1.0])))
    }

    /// The input at `floor((o + 1/2) * size / out)`.
    pub(super) fn nearest_exact(size: usize, out: usize) -> Self {
        let ratio = size as f64 / out as f64;
        let index = |o: usize| (((o as f64 + 0.5) * ratio).floor() as usize).min(size - 1);
        Self::new(size, (0..out).map(|o| (index(o), vec![1.0])))
    }

    /// Linear interpolation between the two inputs around.
    pub(super) fn linear(size: usize, out: usize, align_corners: bool) -> Self {
        Self::from_taps(
            size,
            (0..out).map(|o| {
                let at = coordinate(o, size, out, align_corners).clamp(0.0, size as f64 - 1.0);
                let low = at.floor() as usize;
                vec![(low, 1.0 - (at - low as f64)), ((low + 1).min(size - 1), at - low as f64)]
            }),
        )
    }

    /// Cubic convolution (Keys, a = -0.75) of the four inputs around; the border is repeated.
    pub(super) fn cubic(size: usize, out: usize, align_corners: bool) -> Self {
        const A: f64 = -0.75;
        let weight = |t: f64| match t.abs() {
            t if t < 1.0 => ((A + 2.0) * t - (A + 3.0)) * t * t + 1.0,
            t if t < 2.0 => ((A * t - 5.0 * A) * t + 8.0 * A) * t - 4.0 * A,
            _ => 0.0,
        };
        Self::from_taps(
            size,
            (0..out).map(|o| {
                let at = coordinate(o, size, out, align_corners);
                let base = at.floor();
                let tap = |offset: i64| {
                    let input = (base as i64 + offset).clamp(0, size as i64 - 1) as usize;
                    (input, weight(at - base - offset as f64))
                };
                (-1..=2).map(tap).collect()
            }),
        )
    }

    /// Sinc of width 3 of the six inputs around, normalized; inputs outside are left out.
    pub(super) fn lanczos3(size: usize, out: usize, align_corners: bool) -> Self {
        let weight = |t: f64| {
            let pi_t = core::f64::consts::PI * t;
            if t == 0.0 {
                1.0
            } else if t.abs() >= 3.0 {
                0.0
            } else {
                3.0 * pi_t.sin() * (pi_t / 3.0).sin() / (pi_t * pi_t)
            }
        };
        Self::from_taps(
            size,
            (0..out).map(|o| {
                let at = coordinate(o, size, out, align_corners);
                let base = at.floor();
                let inputs =
                    (-2..=3).map(|offset| base as i64 + offset).filter(|i| (0..size as i64).contains(i));
                let taps: Vec<_> = inputs.map(|input| (input as usize, weight(at - input as f64))).collect();
                let sum: f64 = taps.iter().map(|tap| tap.1).sum();
                let sum = if sum == 0.0 { 1.0 } else { sum };
                taps.into_iter().map(|(input, weight)| (input, weight / sum)).collect()
            }),
        )
    }

    /// Adds `weight[o, i] * dy[.., o, ..]` to `dx[.., i, ..]`; both are `[outer, axis, inner]`.
    fn adjoint<A: CpuElement>(&self, dy: &[A], dx: &mut [A], inner: usize) {
        let (size_in, size_out) = (self.size * inner, self.windows.len() * inner);
        for (dy, dx) in dy.chunks_exact(size_out).zip(dx.chunks_exact_mut(size_in)) {
            for (window, dy) in self.windows.iter().zip(dy.chunks_exact(inner)) {
                let weights = &self.weights[window.weights..window.weights + window.len];
                let dx = &mut dx[window.start * inner..(window.start + window.len) * inner];
                if let (&[dy], [dx], &[weight]) = (dy, &mut *dx, weights) {
                    *dx = *dx + A::from_f64(weight) * dy;
                } else if let &[dy] = dy {
                    for (dx, &weight) in dx.iter_mut().zip(weights) {
                        *dx = *dx + A::from_f64(weight) * dy;
                    }
                } else {
                    for (dx, &weight) in dx.chunks_exact_mut(inner).zip(weights) {
                        let weight = A::from_f64(weight);
                        dx.iter_mut().zip(dy).for_each(|(dx, &dy)| *dx = *dx + weight * dy);
                    }
                }
            }
        }
    }
}

/// Where output `o` lies on the axis of the input.
fn coordinate(o: usize, size: usize, out: usize, align_corners: bool) -> f64 {
    if align_corners {
        o as f64 * ((size as f64 - 1.0) / (out.max(2) - 1) as f64)
    } else {
        (o as f64 + 0.5) * (size as f64 / out as f64) - 0.5
    }
}

/// The adjoint of the product of the maps, plane by plane; from the last axis to the first.
pub(super) fn adjoint<E: CpuElement>(axes: &[AxisMap], planes: usize, dy: &[E]) -> Vec<E> {
    let plane_out: usize = axes.iter().map(|axis| axis.windows.len()).product();
    let plane_in: usize = axes.iter().map(|axis| axis.size).product();
    if plane_in * plane_out == 0 {
        return vec![E::zero(); planes * plane_in];
    }
    let task = parallel::items_per_task(planes, plane_in);
    let (first, others) = axes.split_first().expect("a map has an axis");
    parallel::filled(planes * plane_in, E::zero(), task * plane_in, |index, dx| {
        let (mut source, mut target) = (Vec::new(), Vec::new());
        for (plane, dx) in (index * task..).zip(dx.chunks_exact_mut(plane_in)) {
            let dy = &dy[plane * plane_out..(plane + 1) * plane_out];
            source.clear();
            source.extend(dy.iter().map(|dy| dy.widen()));
            let mut inner = 1;
            for axis in others.iter().rev() {
                zeros(&mut target, source.len() / axis.windows.len() * axis.size);
                axis.adjoint(&source, &mut target, inner);
                inner *= axis.size;
                core::mem::swap(&mut source, &mut target);
            }
            if let Some(dx) = accumulators(dx) {
                first.adjoint(&source, dx, inner);
            } else {
                zeros(&mut target, plane_in);
                first.adjoint(&source, &mut target, inner);
                dx.iter_mut().zip(&target).for_each(|(dx, &value)| *dx = E::narrow(value));
            }
        }
    })
}

/// `len` zeros in place of what is there.
fn zeros<A: CpuElement>(values: &mut Vec<A>, len: usize) {
    values.clear();
    values.resize(len, A::zero());
}

/// The values themselves, where sums are made in their own type.
fn accumulators<E: CpuElement>(values: &mut [E]) -> Option<&mut [E::Acc]> {
    (E::dtype() == <E::Acc as Element>::dtype()).then(|| bytemuck::cast_slice_mut(values))
}
