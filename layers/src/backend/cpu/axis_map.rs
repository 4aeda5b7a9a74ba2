//! Linear maps along spatial axes with fixed weights, and their adjoints: average pools and interpolations.
//!
//! `y[o] = sum_i weight[o, i] x[i]` per axis, and the product of that over the axes. A window of non-zero weights per
//! output is all there is to know; the adjoint `dx[i] = sum_o weight[o, i] dy[o]` needs no input.
use super::{CpuBackend, CpuElement, accumulators, parallel, with_element};
use burn::backend::{TensorMetadata, tensor::FloatTensor};
use burn::tensor::{DType, Shape, bf16, f16};

/// The weights of one axis.
#[derive(Clone, Debug)]
pub(crate) struct AxisMap {
    size: usize,
    windows: Vec<Window>,
    weights: Vec<f64>,
}

/// The inputs of one output.
#[derive(Clone, Copy, Debug)]
struct Window {
    /// The first input.
    start: usize,
    /// How many they are.
    len: usize,
    weights: Weights,
}

#[derive(Clone, Copy, Debug)]
enum Weights {
    /// The same for every input.
    Equal(f64),
    /// One per input, from here on in the weights of the axis.
    From(usize),
}

impl AxisMap {
    /// Windows of equal weights, from `(first input, how many, weight)` for every output.
    fn equal(size: usize, outputs: impl Iterator<Item = (usize, usize, f64)>) -> Self {
        let window = |(start, len, weight)| Window { start, len, weights: Weights::Equal(weight) };
        Self { size, windows: outputs.map(window).collect(), weights: vec![] }
    }

    /// From `(input, weight)` for every output, in any order, inputs repeated or not.
    fn from_taps(size: usize, outputs: impl Iterator<Item = Vec<(usize, f64)>>) -> Self {
        let mut weights = vec![];
        let window = |taps: Vec<(usize, f64)>| {
            let start = taps.iter().map(|tap| tap.0).min().unwrap_or(0);
            let end = taps.iter().map(|tap| tap.0 + 1).max().unwrap_or(0);
            let first = weights.len();
            weights.resize(first + end - start, 0.0);
            taps.into_iter().for_each(|(input, weight)| weights[first + input - start] += weight);
            Window { start, len: end - start, weights: Weights::From(first) }
        };
        let windows = outputs.map(window).collect();
        Self { size, windows, weights }
    }

    /// Windows of an average pool.
    pub(crate) fn mean_windows(
        size: usize,
        out: usize,
        kernel: usize,
        stride: usize,
        (begin, end): (usize, usize),
        count_include_pad: bool,
    ) -> Self {
        Self::equal(
            size,
            (0..out).map(|window| {
                let padded = window * stride..(window * stride + kernel).min(size + begin + end);
                let valid = padded.start.max(begin)..padded.end.min(size + begin);
                let count = if count_include_pad { padded.len() } else { valid.len() };
                (valid.start.min(size + begin) - begin, valid.len(), 1.0 / count.max(1) as f64)
            }),
        )
    }

    /// Windows of an adaptive average pool.
    pub(crate) fn adaptive_mean(size: usize, out: usize) -> Self {
        Self::equal(
            size,
            (0..out).map(|window| {
                let start = window * size / out;
                let len = ((window + 1) * size).div_ceil(out) - start;
                (start, len, 1.0 / len as f64)
            }),
        )
    }

    /// The input at `floor(o * size / out)`.
    pub(crate) fn nearest(size: usize, out: usize) -> Self {
        let ratio = size as f64 / out as f64;
        let index = |o: usize| ((o as f64 * ratio).floor() as usize).min(size - 1);
        Self::equal(size, (0..out).map(|o| (index(o), 1, 1.0)))
    }

    /// The input at `floor((o + 1/2) * size / out)`.
    pub(crate) fn nearest_exact(size: usize, out: usize) -> Self {
        let ratio = size as f64 / out as f64;
        let index = |o: usize| (((o as f64 + 0.5) * ratio).floor() as usize).min(size - 1);
        Self::equal(size, (0..out).map(|o| (index(o), 1, 1.0)))
    }

    /// Linear interpolation between the two inputs around.
    pub(crate) fn linear(size: usize, out: usize, align_corners: bool) -> Self {
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
    pub(crate) fn cubic(size: usize, out: usize, align_corners: bool) -> Self {
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
    pub(crate) fn lanczos3(size: usize, out: usize, align_corners: bool) -> Self {
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

    /// Whether every output is one of the inputs.
    fn selects(&self) -> bool {
        self.windows
            .iter()
            .all(|window| matches!(window, Window { len: 1, weights: Weights::Equal(1.0), .. }))
    }

    /// This axis and the next one as a single axis, if windows of equal weights stay such: where the next one has one output,
    /// made of all of its inputs.
    fn merged(&self, next: &Self) -> Option<Self> {
        let [Window { start: 0, len, weights: Weights::Equal(weight) }] = next.windows[..] else {
            return None;
        };
        let merged = |window: &Window| match window.weights {
            Weights::Equal(w) if len == next.size => Some((window.start * len, window.len * len, w * weight)),
            _ => None,
        };
        let windows: Option<Vec<_>> = self.windows.iter().map(merged).collect();
        Some(Self::equal(self.size * len, windows?.into_iter()))
    }

    /// Adds `weight[o, i] * dy[.., o, ..]` to `dx[.., i, ..]`; both are `[outer, axis, inner]`.
    fn adjoint<A: CpuElement>(&self, dy: &[A], dx: &mut [A], inner: usize) {
        let (size_in, size_out) = (self.size * inner, self.windows.len() * inner);
        for (dy, dx) in dy.chunks_exact(size_out).zip(dx.chunks_exact_mut(size_in)) {
            for (window, dy) in self.windows.iter().zip(dy.chunks_exact(inner)) {
                let dx = &mut dx[window.start * inner..(window.start + window.len) * inner];
                match (window.weights, dy) {
                    (Weights::Equal(weight), &[dy]) => {
                        let dy = A::from_f64(weight) * dy;
                        dx.iter_mut().for_each(|dx| *dx = *dx + dy);
                    }
                    (Weights::Equal(weight), dy) => {
                        dx.chunks_exact_mut(inner).for_each(|dx| add_scaled(dx, A::from_f64(weight), dy));
                    }
                    (Weights::From(first), &[dy]) => {
                        let pairs = dx.iter_mut().zip(&self.weights[first..]);
                        pairs.for_each(|(dx, &weight)| *dx = *dx + A::from_f64(weight) * dy);
                    }
                    (Weights::From(first), dy) => {
                        let rows = dx.chunks_exact_mut(inner).zip(&self.weights[first..]);
                        rows.for_each(|(dx, &weight)| add_scaled(dx, A::from_f64(weight), dy));
                    }
                }
            }
        }
    }
}

/// Adds `weight * dy` to `dx`.
#[inline(always)]
fn add_scaled<A: CpuElement>(dx: &mut [A], weight: A, dy: &[A]) {
    dx.iter_mut().zip(dy).for_each(|(dx, &dy)| *dx = *dx + weight * dy);
}

/// Where output `o` lies on the axis of the input.
fn coordinate(o: usize, size: usize, out: usize, align_corners: bool) -> f64 {
    if align_corners {
        o as f64 * ((size as f64 - 1.0) / (out.max(2) - 1) as f64)
    } else {
        (o as f64 + 0.5) * (size as f64 / out as f64) - 0.5
    }
}

/// `dx` of shape `x`, `[batch, channels, ...]`, from `dy`, one map per spatial axis.
pub(crate) fn adjoint<B: CpuBackend>(x: Shape, dy: FloatTensor<B>, axes: &[AxisMap]) -> FloatTensor<B> {
    let (dy, planes) = (B::contiguous(dy), x[..2].iter().product());
    with_element!(dy.dtype(), "pool", E => {
        B::from_vec(adjoint_of_planes(axes, planes, B::as_slice::<E>(&dy)), x)
    })
}

/// The adjoint of the product of the maps, plane by plane; from the last axis to the first.
fn adjoint_of_planes<E: CpuElement>(axes: &[AxisMap], planes: usize, dy: &[E]) -> Vec<E> {
    let plane_out: usize = axes.iter().map(|axis| axis.windows.len()).product();
    let plane_in: usize = axes.iter().map(|axis| axis.size).product();
    if plane_in * plane_out == 0 {
        return vec![E::zero(); planes * plane_in];
    }
    let axes = merged(axes);
    let task = parallel::items_per_task(planes, plane_in);
    let (first, others) = axes.split_first().expect("a map has an axis");
    let width = axes[axes.len() - 1].size;
    let selection = selection(&axes);
    let work = if selection.is_some() { 1 } else { 4 } * planes * (plane_in + plane_out); // rows are short
    parallel::filled(planes * plane_in, E::zero(), task * plane_in, work, |index, dx| {
        let (mut source, mut target) = (Vec::new(), Vec::new());
        for (plane, dx) in (index * task..).zip(dx.chunks_exact_mut(plane_in)) {
            let dy = &dy[plane * plane_out..(plane + 1) * plane_out];
            if let (Some((rows, places)), Some(dx)) = (&selection, accumulators(dx)) {
                for (&row, dy) in rows.iter().zip(dy.chunks_exact(places.len())) {
                    let dx = &mut dx[row * width..(row + 1) * width];
                    places.iter().zip(dy).for_each(|(&place, dy)| dx[place] = dx[place] + dy.widen());
                }
                continue;
            }
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

/// The same map over as few axes as possible.
fn merged(axes: &[AxisMap]) -> Vec<AxisMap> {
    axes.iter().fold(vec![], |mut merged: Vec<AxisMap>, axis| {
        match merged.last().and_then(|last| last.merged(axis)) {
            Some(both) => *merged.last_mut().expect("it has just been read") = both,
            None => merged.push(axis.clone()),
        }
        merged
    })
}

/// Where the inputs of outputs lie in a plane of the given axes, if every output is one of the inputs: the rows of inputs along
/// the last axis, one per row of outputs, and the places in a row.
fn selection(axes: &[AxisMap]) -> Option<(Vec<usize>, Vec<usize>)> {
    if !axes.iter().all(AxisMap::selects) {
        return None;
    }
    let starts = |axis: &AxisMap| axis.windows.iter().map(|window| window.start).collect::<Vec<_>>();
    let (last, others) = axes.split_last()?;
    let rows = others.iter().fold(vec![0], |rows, axis| {
        let starts = starts(axis);
        rows.iter().flat_map(|row| starts.iter().map(move |start| row * axis.size + start)).collect()
    });
    Some((rows, starts(last)))
}

/// `len` zeros in place of what is there.
fn zeros<A: CpuElement>(values: &mut Vec<A>, len: usize) {
    values.clear();
    values.resize(len, A::zero());
}
