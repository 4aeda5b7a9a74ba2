//! Linear maps along spatial axes, and their adjoints, on a CPU, one axis after the other.
//!
//! Besides its results, a thread has two buffers. Each holds 16 KiB of f32, or what belongs to one output of the first axis if that is
//! more. In half precision it also holds the adjoint of one plane. Of an adjoint, all threads together hold no more than a quarter of what
//! they read and write, or 128 KiB.
use super::{CpuBackend, CpuElement, accumulators, is_wide, parallel, sums, with_element};
use crate::backend::axis_map::{AxisMap, AxisMaps, Resized, Shift, Weights, Window};
use crate::backend::wide;
use crate::burn_next::on_input;
use burn::backend::{TensorMetadata, tensor::FloatTensor};
use burn::tensor::{DType, Shape, bf16, f16};
use core::ops::Range;

impl AxisMap {
    /// Whether every output equals one of the inputs.
    fn selects(&self) -> bool {
        self.windows
            .iter()
            .all(|window| matches!(window, Window { len: 1, weights: Weights::Equal(1.0), .. }))
    }

    /// This axis and the next one as a single axis, if its windows have equal weights, too: where the next axis has one output, the mean or
    /// sum of all of its inputs.
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

    /// `y[.., o, ..] = sum_i weight[o, i] x[.., i, ..]` for the outputs in a range; `x` is `[outer, axis, inner]`.
    fn image<E: CpuElement>(&self, outputs: Range<usize>, x: &[E], inner: usize) -> Vec<E::Acc> {
        let (outer, windows) = (x.chunks_exact(self.size * inner), &self.windows[outputs]);
        let mut y = vec![<E::Acc as num_traits::Zero>::zero(); outer.len() * windows.len() * inner];
        for (x, y) in outer.zip(y.chunks_exact_mut(windows.len() * inner)) {
            for (window, y) in windows.iter().zip(y.chunks_exact_mut(inner)) {
                let x = &x[window.start * inner..(window.start + window.len) * inner];
                match (window.weights, y) {
                    (Weights::Equal(weight), [y]) => {
                        *y = E::Acc::from_f64(weight * sums::sum(x, E::widen));
                    }
                    (weights, y) => {
                        for (input, x) in x.chunks_exact(inner).enumerate() {
                            let weight = match weights {
                                Weights::Equal(weight) => weight,
                                Weights::From(first) => self.weights[first + input],
                            };
                            let weight = E::Acc::from_f64(weight);
                            y.iter_mut().zip(x).for_each(|(y, x)| *y = *y + weight * x.widen());
                        }
                    }
                }
            }
        }
        y
    }

    /// Adds `weight[o, i] * dy[.., o, ..]` to `dx[.., i, ..]` for the outputs in a range; both are `[outer, axis, inner]`.
    fn adjoint<A: CpuElement>(&self, outputs: Range<usize>, dy: &[A], dx: &mut [A], inner: usize) {
        let windows = &self.windows[outputs];
        let (size_in, size_out) = (self.size * inner, windows.len() * inner);
        for (dy, dx) in dy.chunks_exact(size_out).zip(dx.chunks_exact_mut(size_in)) {
            for (window, dy) in windows.iter().zip(dy.chunks_exact(inner)) {
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

impl<B: CpuBackend> AxisMaps for B {
    fn nearest_input(output: usize, shift: Shift, resized: Resized) -> usize {
        let shift = match shift {
            Shift::None => 0.0,
            Shift::Half => 0.5,
        };
        on_input(output as f64 + shift, resized).floor() as usize
    }

    fn image_of_half(x: &FloatTensor<B>, axes: impl FnOnce() -> Vec<AxisMap>) -> Option<FloatTensor<B>> {
        (wide(x.dtype()) != x.dtype() && x.shape().num_elements() > 0).then(|| {
            let (x, axes) = (B::contiguous(x.clone()), axes());
            let mut shape = x.shape();
            (0..axes.len()).for_each(|axis| shape[axis + 2] = axes[axis].windows.len());
            with_element!(x.dtype(), "pool", E => B::from_vec(image_of_planes(&axes, B::as_slice::<E>(&x)), shape))
        })
    }

    fn axis_adjoint(x: Shape, dy: FloatTensor<B>, axes: Vec<AxisMap>) -> FloatTensor<B> {
        let (dy, planes) = (B::contiguous(dy), x[..2].iter().product());
        with_element!(dy.dtype(), "pool", E => {
            B::from_vec(adjoint_of_planes(&axes, planes, B::as_slice::<E>(&dy)), x)
        })
    }
}

/// The image under the product of the maps, plane by plane, from the first axis to the last.
fn image_of_planes<E: CpuElement>(axes: &[AxisMap], x: &[E]) -> Vec<E> {
    let plane_out: usize = axes.iter().map(|axis| axis.windows.len()).product();
    let plane_in: usize = axes.iter().map(|axis| axis.size).product();
    if plane_in * plane_out == 0 {
        return vec![];
    }
    let axes = merged(axes);
    let (first, others) = axes.split_first().expect("a map has an axis");
    let planes = x.len() / plane_in;
    let task = parallel::items_per_task(planes, plane_in);
    parallel::filled(
        planes * plane_out,
        E::zero(),
        task * plane_out,
        parallel::Work::of([4, x.len()]),
        |index, y| {
            for (plane, y) in (index * task..).zip(y.chunks_exact_mut(plane_out)) {
                let x = &x[plane * plane_in..(plane + 1) * plane_in];
                // One output of the first axis at a time, so that no copy of a plane is made.
                let outputs = first.windows.len();
                for (output, y) in y.chunks_exact_mut(plane_out / outputs).enumerate() {
                    let mut inner = plane_in / first.size;
                    let mut image = first.image(output..output + 1, x, inner);
                    for axis in others {
                        inner /= axis.size;
                        image = axis.image(0..axis.windows.len(), &image, inner);
                    }
                    y.iter_mut().zip(image).for_each(|(y, image)| *y = E::narrow(image));
                }
            }
        },
    )
}

/// Elements of a plane that are computed at once, unless one output of the first axis has more.
const ADJOINT: usize = 1 << 12;

/// The adjoint of the product of the maps, plane by plane, from the last axis to the first.
fn adjoint_of_planes<E: CpuElement>(axes: &[AxisMap], planes: usize, dy: &[E]) -> Vec<E> {
    let plane_out: usize = axes.iter().map(|axis| axis.windows.len()).product();
    let plane_in: usize = axes.iter().map(|axis| axis.size).product();
    if plane_in * plane_out == 0 {
        return vec![E::zero(); planes * plane_in];
    }
    let axes = merged(axes);
    let (first, others) = axes.split_first().expect("a map has an axis");
    let width = axes[axes.len() - 1].size;
    // Sums in half precision need buffers, in which there may as well be sums of products.
    let selection = selection(&axes).filter(|_| is_wide::<E>());
    // Some outputs of the first axis at a time, so that no copy of a plane is made.
    let outputs = first.windows.len();
    let (of_output, inner) = (plane_out / outputs, plane_in / first.size);
    let step = (ADJOINT / of_output.max(inner)).max(1);
    let of_part = step.min(outputs) * of_output.max(inner);
    let buffers = if selection.is_some() { 0 } else { 1 + others.len().min(1) };
    let held = buffers * of_part + if is_wide::<E>() { 0 } else { plane_in };
    let least = parallel::items_to_hold([planes, plane_in + plane_out], held, 4);
    let task = parallel::items_per_task(planes, plane_in).max(least);
    let work = parallel::Work::of([if selection.is_some() { 1 } else { 4 }, planes, plane_in + plane_out]); // rows are short
    parallel::filled(planes * plane_in, E::zero(), task * plane_in, work, |index, dx| {
        let (mut source, mut target, mut sums) = (Vec::new(), Vec::new(), Vec::new());
        for (plane, dx) in (index * task..).zip(dx.chunks_exact_mut(plane_in)) {
            let dy = &dy[plane * plane_out..(plane + 1) * plane_out];
            if let (Some((rows, places)), Some(dx)) = (&selection, accumulators(dx)) {
                for (&row, dy) in rows.iter().zip(dy.chunks_exact(places.len())) {
                    let dx = &mut dx[row * width..(row + 1) * width];
                    places.iter().zip(dy).for_each(|(&place, dy)| dx[place] = dx[place] + dy.widen());
                }
                continue;
            }
            let mut add = |dx: &mut [E::Acc]| {
                for (part, dy) in dy.chunks(step * of_output).enumerate() {
                    source.clear();
                    source.extend(dy.iter().map(|dy| dy.widen()));
                    let mut inner = 1;
                    for axis in others.iter().rev() {
                        zeros(&mut target, source.len() / axis.windows.len() * axis.size);
                        axis.adjoint(0..axis.windows.len(), &source, &mut target, inner);
                        inner *= axis.size;
                        core::mem::swap(&mut source, &mut target);
                    }
                    first.adjoint(part * step..((part + 1) * step).min(outputs), &source, dx, inner);
                }
            };
            if let Some(dx) = accumulators(dx) {
                add(dx);
            } else {
                zeros(&mut sums, plane_in);
                add(&mut sums);
                dx.iter_mut().zip(&sums).for_each(|(dx, &value)| *dx = E::narrow(value));
            }
        }
    })
}

/// The same map, over as few axes as possible.
fn merged(axes: &[AxisMap]) -> Vec<AxisMap> {
    axes.iter().fold(vec![], |mut merged: Vec<AxisMap>, axis| {
        match merged.last().and_then(|last| last.merged(axis)) {
            Some(both) => *merged.last_mut().expect("it has just been read") = both,
            None => merged.push(axis.clone()),
        }
        merged
    })
}

/// If every output equals one of the inputs, the place of that input in its plane: for every row of outputs along the last axis, the row
/// of its inputs, and for every output in a row, the place in that row.
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

/// Replaces the values by `len` zeros.
fn zeros<A: CpuElement>(values: &mut Vec<A>, len: usize) {
    values.clear();
    values.resize(len, A::zero());
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `<image(x), dy> = <x, adjoint(dy)>`, with equal weights and with others, in one axis and in several.
    #[test]
    fn the_adjoint_is_that_of_the_image() {
        let numbers = |len: usize| (0..len).map(|at| ((at * 7 % 11) as f64) - 5.0).collect::<Vec<_>>();
        let product = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
        let mean = || AxisMap::mean_windows(7, 4, 3, 2, (1, 1), false);
        let resized = |size, out, align_corners| Resized { size, out, factor: None, align_corners };
        for axes in [
            vec![mean()],
            vec![AxisMap::linear(resized(5, 8, false)), mean()],
            vec![mean(), AxisMap::cubic(resized(6, 4, true))],
            vec![mean(), AxisMap::adaptive_mean(5, 2), AxisMap::linear(resized(4, 6, true))],
            // Planes of which only some outputs of the first axis are computed at once.
            vec![AxisMap::linear(resized(9, 14, false)), AxisMap::cubic(resized(900, 600, false))],
        ] {
            const PLANES: usize = 3;
            let size = |of: fn(&AxisMap) -> usize| PLANES * axes.iter().map(of).product::<usize>();
            let (x, dy) = (numbers(size(|axis| axis.size)), numbers(size(|axis| axis.windows.len())));
            let image = product(&image_of_planes(&axes, &x), &dy);
            let adjoint = product(&x, &adjoint_of_planes(&axes, PLANES, &dy));
            assert!((image - adjoint).abs() <= 1e-9 * image.abs().max(1.0), "{image}, {adjoint}");
        }
    }
}
