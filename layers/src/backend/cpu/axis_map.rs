//! Linear maps along spatial axes, and their adjoints, on a CPU, one axis after the other.
//!
//! Where planes are few, they are cut between indices of the first axis.
//!
//! Besides its results, a thread has two buffers. Each holds 16 KiB of f32, or less if threads are many, or what belongs to one output of the
//! first axis if that is more. In half precision it also holds the adjoint of one plane. Of an adjoint, all threads together hold no more than a quarter of what
//! they read and write, or 128 KiB.
use super::{
    CpuBackend, CpuElement, accumulators, is_wide,
    parallel::{self, Work},
    pieces,
    plan::Items,
    sums, with_element,
};
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

    /// Whether there is one input, and the output equals it.
    fn is_nothing(&self) -> bool {
        let weight = |window: &Window| match window.weights {
            Weights::Equal(weight) => weight,
            Weights::From(first) => self.weights[first],
        };
        self.size == 1 && matches!(&self.windows[..], [window] if window.len == 1 && weight(window) == 1.0)
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
        let (size_in, size_out) = (self.size * inner, outputs.len() * inner);
        for (dy, dx) in dy.chunks_exact(size_out).zip(dx.chunks_exact_mut(size_in)) {
            self.adjoint_of_inputs::<A, false>(outputs.clone(), 0..self.size, dy, dx, inner);
        }
    }

    /// The same for the inputs in a range, whose `dx` are `[inputs, inner]`; `outer` is 1. Only if it is `CUT`, there are other inputs.
    #[inline(always)]
    fn adjoint_of_inputs<A: CpuElement, const CUT: bool>(
        &self,
        outputs: Range<usize>,
        inputs: Range<usize>,
        dy: &[A],
        dx: &mut [A],
        inner: usize,
    ) {
        for (window, dy) in self.windows[outputs].iter().zip(dy.chunks_exact(inner)) {
            let mut read = window.start..window.start + window.len;
            if CUT {
                read = read.start.max(inputs.start)..read.end.min(inputs.end);
                if read.is_empty() {
                    continue;
                }
            }
            let first = |of_window: usize| of_window + (read.start - window.start);
            let dx = &mut dx[(read.start - inputs.start) * inner..(read.end - inputs.start) * inner];
            match (window.weights, dy) {
                (Weights::Equal(weight), &[dy]) => {
                    let dy = A::from_f64(weight) * dy;
                    dx.iter_mut().for_each(|dx| *dx = *dx + dy);
                }
                (Weights::Equal(weight), dy) => {
                    dx.chunks_exact_mut(inner).for_each(|dx| add_scaled(dx, A::from_f64(weight), dy));
                }
                (Weights::From(of_window), &[dy]) => {
                    let pairs = dx.iter_mut().zip(&self.weights[first(of_window)..]);
                    pairs.for_each(|(dx, &weight)| *dx = *dx + A::from_f64(weight) * dy);
                }
                (Weights::From(of_window), dy) => {
                    let rows = dx.chunks_exact_mut(inner).zip(&self.weights[first(of_window)..]);
                    rows.for_each(|(dx, &weight)| add_scaled(dx, A::from_f64(weight), dy));
                }
            }
        }
    }

    /// Whether windows begin and end in the order of their outputs.
    fn is_ordered(&self) -> bool {
        let starts = self.windows.iter().map(|window| window.start);
        starts.is_sorted() && self.windows.iter().map(|window| window.start + window.len).is_sorted()
    }

    /// The outputs that read one of the inputs in a range, if windows are [ordered](Self::is_ordered).
    fn outputs_of(&self, inputs: &Range<usize>) -> Range<usize> {
        let first = self.windows.partition_point(|window| window.start + window.len <= inputs.start);
        first..self.windows.partition_point(|window| window.start < inputs.end).max(first)
    }

    /// The most outputs that read two neighboring inputs both, if windows are [ordered](Self::is_ordered).
    fn shared(&self) -> usize {
        // The first window that begins too late to share two inputs with the one at hand.
        let mut after = 0;
        let shared = self.windows.iter().enumerate().map(|(at, window)| {
            let later = &self.windows[after..];
            after += later.iter().take_while(|later| later.start + 1 < window.start + window.len).count();
            after.saturating_sub(at)
        });
        shared.max().unwrap_or(0)
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
            with_element!(x.dtype(), "pool", E => B::from_vec(image_of_planes(axes, B::as_slice::<E>(&x)), shape))
        })
    }

    fn axis_adjoint(x: Shape, dy: FloatTensor<B>, axes: Vec<AxisMap>) -> FloatTensor<B> {
        let (dy, planes) = (B::contiguous(dy), x[..2].iter().product());
        with_element!(dy.dtype(), "pool", E => {
            B::from_vec(adjoint_of_planes(axes, planes, B::as_slice::<E>(&dy)), x)
        })
    }
}

/// The image under the product of the maps, plane by plane, from the first axis to the last.
fn image_of_planes<E: CpuElement>(axes: Vec<AxisMap>, x: &[E]) -> Vec<E> {
    let plane_out: usize = axes.iter().map(|axis| axis.windows.len()).product();
    let plane_in: usize = axes.iter().map(|axis| axis.size).product();
    if plane_in * plane_out == 0 {
        return vec![];
    }
    let axes = merged(axes);
    let (first, others) = axes.split_first().expect("a map has an axis");
    let outputs = first.windows.len();
    let items = image_items(outputs, [x.len() / plane_in, plane_in]);
    let chunks = items.division(parallel::threads()).chunks(plane_out, plane_out / outputs);
    pieces::filled_in_pieces(items.count * plane_out, E::zero(), chunks, items.work, |start, y| {
        // One output of the first axis at a time, so that no copy of a plane is made.
        let first_output = start / (plane_out / outputs);
        for (output, y) in (first_output..).zip(y.chunks_exact_mut(plane_out / outputs)) {
            let (plane, output) = (output / outputs, output % outputs);
            let x = &x[plane * plane_in..(plane + 1) * plane_in];
            let mut inner = plane_in / first.size;
            let mut image = first.image(output..output + 1, x, inner);
            for axis in others {
                inner /= axis.size;
                image = axis.image(0..axis.windows.len(), &image, inner);
            }
            y.iter_mut().zip(image).for_each(|(y, image)| *y = E::narrow(image));
        }
    })
}

/// The loop over planes, which are cut between outputs of the first axis.
fn image_items(outputs: usize, [planes, plane_in]: [usize; 2]) -> Items {
    Items { steps: outputs, ..Items::of([planes, plane_in], Work::of([4, planes, plane_in])) }
}

/// Elements of a plane that are computed at once, unless one output of the first axis has more.
const ADJOINT: usize = 1 << 12;

/// The adjoint of the product of the maps, from the last axis to the first.
fn adjoint_of_planes<E: CpuElement>(axes: Vec<AxisMap>, planes: usize, dy: &[E]) -> Vec<E> {
    let plane_out: usize = axes.iter().map(|axis| axis.windows.len()).product();
    let plane_in: usize = axes.iter().map(|axis| axis.size).product();
    if plane_in * plane_out == 0 {
        return vec![E::zero(); planes * plane_in];
    }
    let axes = merged(axes);
    let threads = parallel::threads();
    let (adjoint, items) = Adjoint::new(&axes, [planes, plane_in, plane_out], is_wide::<E>(), threads);
    let chunks = items.division(threads).chunks(plane_in, adjoint.inner);
    pieces::filled_in_pieces(planes * plane_in, E::zero(), chunks, items.work, |start, dx| {
        let mut buffers = Buffers::default();
        let strip = if dx.len() < plane_in { adjoint.strip * adjoint.inner } else { plane_in };
        for (start, dx) in (start..).step_by(strip).zip(dx.chunks_mut(strip)) {
            let (plane, first) = (start / plane_in, start % plane_in / adjoint.inner);
            let dy = &dy[plane * plane_out..(plane + 1) * plane_out];
            adjoint.add_to(dx, first..first + dx.len() / adjoint.inner, dy, &mut buffers);
        }
    })
}

/// The adjoint of the product of maps along the axes of a plane.
struct Adjoint<'a> {
    first: &'a AxisMap,
    others: &'a [AxisMap],
    /// See [`selection`]; only if no sums are needed.
    selection: Option<(Vec<usize>, Vec<usize>)>,
    /// Elements of a plane per input of the first axis.
    inner: usize,
    /// Outputs of a plane per output of the first axis.
    of_output: usize,
    /// Outputs of the first axis that are computed at once, so that no copy of a plane is made.
    step: usize,
    /// Inputs of the first axis whose sums are made at once where a plane is cut.
    strip: usize,
}

/// What a thread works in.
struct Buffers<A> {
    source: Vec<A>,
    target: Vec<A>,
    sums: Vec<A>,
}

impl<A> Default for Buffers<A> {
    fn default() -> Self {
        Self { source: vec![], target: vec![], sums: vec![] }
    }
}

impl<'a> Adjoint<'a> {
    /// Of [`merged`] axes, for so many planes and threads, and the loop over the planes.
    fn new(
        axes: &'a [AxisMap],
        [planes, plane_in, plane_out]: [usize; 3],
        is_wide: bool,
        threads: usize,
    ) -> (Self, Items) {
        let (first, others) = axes.split_first().expect("a map has an axis");
        // Sums in half precision need buffers, in which there may as well be sums of products.
        let selection = selection(axes).filter(|_| is_wide);
        let (inner, outputs) = (plane_in / first.size, first.windows.len());
        let of_output = plane_out / outputs;
        let widest = of_output.max(inner);
        let buffers = if selection.is_some() { 0 } else { 1 + others.len().min(1) };
        let may_hold = parallel::elements_to_hold(planes * (plane_in + plane_out), 4);
        // Fewer outputs at once where so many threads could not hold their buffers.
        let of_sums = if is_wide { 0 } else { 1 };
        let step = may_hold / (threads * (buffers + of_sums) * widest).max(1);
        let step = step.clamp(1, (ADJOINT / widest).max(1));
        let of_part = buffers * step.min(outputs) * widest;
        // Elements are summed in their own place, or in a buffer for a plane or for a strip of one: as many inputs as threads may hold.
        let of_input = if is_wide { 0 } else { inner };
        let most = (may_hold / threads.max(1)).saturating_sub(of_part).checked_div(of_input);
        let strip = most.map_or(first.size, |most| most.max(step * widest / inner).clamp(1, first.size));
        // Outputs that are read by two strips or pieces are computed by both.
        let again = (first.shared() * widest).div_ceil(inner);
        let (held, cost) = (of_part + first.size * of_input, if selection.is_some() { 1 } else { 4 });
        let work = Work::of([cost, planes, plane_in + plane_out]); // rows are short
        let items = Items {
            least: parallel::items_to_hold_of(planes, held, may_hold, threads),
            steps: if first.is_ordered() { first.size } else { 1 },
            again,
            work_if_cut: if is_wide { work } else { work.times((strip + again) as f64 / strip as f64) },
            held: of_part + strip * of_input,
            may_hold,
            ..Items::of([planes, plane_in], work)
        };
        (Self { first, others, selection, inner, of_output, step, strip }, items)
    }

    /// Adds to the `dx` of some inputs of the first axis, which are zeros.
    fn add_to<E: CpuElement>(
        &self,
        dx: &mut [E],
        inputs: Range<usize>,
        dy: &[E],
        Buffers { source, target, sums }: &mut Buffers<E::Acc>,
    ) {
        if let (Some((rows, places)), Some(dx)) = (&self.selection, accumulators(dx)) {
            if self.others.is_empty() {
                let place_of = |input: usize| match input {
                    0 => 0,
                    input if input == self.first.size => places.len(),
                    input => places.partition_point(|&place| place < input),
                };
                let [start, end] = [inputs.start, inputs.end].map(place_of);
                let places = places[start..end].iter().map(|place| place - inputs.start);
                places.zip(&dy[start..]).for_each(|(place, dy)| dx[place] = dx[place] + dy.widen());
                return;
            }
            let width = self.others[self.others.len() - 1].size;
            let first_row = inputs.start * self.inner / width;
            for (&row, dy) in rows.iter().zip(dy.chunks_exact(places.len())) {
                let start = row.wrapping_sub(first_row).wrapping_mul(width);
                let Some(dx) = dx.get_mut(start..).and_then(|dx| dx.get_mut(..width)) else { continue };
                places.iter().zip(dy).for_each(|(&place, dy)| dx[place] = dx[place] + dy.widen());
            }
            return;
        }
        let (is_cut, all) = (inputs.len() < self.first.size, 0..self.first.windows.len());
        let outputs = if is_cut { self.first.outputs_of(&inputs) } else { all };
        let mut add = |dx: &mut [E::Acc]| {
            for start in outputs.clone().step_by(self.step) {
                let outputs = start..(start + self.step).min(outputs.end);
                let dy = &dy[outputs.start * self.of_output..outputs.end * self.of_output];
                source.clear();
                source.extend(dy.iter().map(|dy| dy.widen()));
                let mut inner = 1;
                for axis in self.others.iter().rev() {
                    zeros(target, source.len() / axis.windows.len() * axis.size);
                    axis.adjoint(0..axis.windows.len(), source, target, inner);
                    inner *= axis.size;
                    core::mem::swap(source, target);
                }
                match is_cut {
                    true => {
                        let inputs = inputs.clone();
                        self.first.adjoint_of_inputs::<_, true>(outputs, inputs, source, dx, inner);
                    }
                    false => self.first.adjoint(outputs, source, dx, inner),
                }
            }
        };
        if let Some(dx) = accumulators(dx) {
            add(dx);
        } else {
            zeros(sums, dx.len());
            add(sums);
            dx.iter_mut().zip(&*sums).for_each(|(dx, &value)| *dx = E::narrow(value));
        }
    }
}

/// The same map, over as few axes as possible.
fn merged(mut axes: Vec<AxisMap>) -> Vec<AxisMap> {
    let first = axes[..axes.len() - 1].iter().take_while(|axis| axis.is_nothing()).count();
    axes.drain(..first);
    for axis in (1..axes.len()).rev() {
        if let Some(both) = axes[axis - 1].merged(&axes[axis]) {
            axes[axis - 1] = both;
            axes.remove(axis);
        }
    }
    axes
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
pub(crate) mod counting {
    use super::*;
    use crate::backend::cpu::plan::Division;

    fn mean(side: usize, kernel: usize, stride: usize) -> AxisMap {
        AxisMap::mean_windows(side, (side - kernel) / stride + 1, kernel, stride, (0, 0), false)
    }

    fn adjoint(axes: [AxisMap; 2], planes: usize, is_wide: bool, threads: usize) -> (Items, Division) {
        let sizes: [fn(&AxisMap) -> usize; 2] = [|axis| axis.size, |axis| axis.windows.len()];
        let [plane_in, plane_out] = sizes.map(|size| axes.iter().map(size).product());
        let (_, items) = Adjoint::new(&merged(axes.into()), [planes, plane_in, plane_out], is_wide, threads);
        (items, items.division(threads))
    }

    /// The adjoint of average pools of square planes.
    pub(crate) fn mean_adjoint(
        [planes, side]: [usize; 2],
        kernel: usize,
        stride: usize,
        (is_wide, threads): (bool, usize),
    ) -> (Items, Division) {
        adjoint([mean(side, kernel, stride), mean(side, kernel, stride)], planes, is_wide, threads)
    }

    /// The adjoint of resizing square planes to the nearest inputs.
    pub(crate) fn nearest_adjoint(
        [planes, side]: [usize; 2],
        out: usize,
        threads: usize,
    ) -> (Items, Division) {
        let nearest = || AxisMap::equal(side, (0..out).map(|output| (output * side / out, 1, 1.0)));
        adjoint([nearest(), nearest()], planes, true, threads)
    }

    /// Average pools of square planes in half precision.
    pub(crate) fn mean_image([planes, side]: [usize; 2], kernel: usize, stride: usize) -> Items {
        image_items(mean(side, kernel, stride).windows.len(), [planes, side * side])
    }
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
            let image = product(&image_of_planes(axes.clone(), &x), &dy);
            let adjoint = product(&x, &adjoint_of_planes(axes, PLANES, &dy));
            assert!((image - adjoint).abs() <= 1e-9 * image.abs().max(1.0), "{image}, {adjoint}");
        }
    }
}
