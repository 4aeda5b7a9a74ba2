//! A canvas: a plane of the input with its padding around it. Depthwise convolutions read it, and need not ask where the plane ends.
use super::{
    geometry::{AXES, Phase, Run},
    rows::{lay_out, split},
};
use crate::backend::cpu::{CpuElement, product::MOST_LANES};
use core::ops::Range;
use num_traits::Zero;

/// How much of a canvas is laid out at a time: so many elements, or so many times the reach of the kernel, whichever is more.
#[derive(Clone, Copy, Debug)]
pub(super) struct BandSize {
    pub(super) elements: usize,
    pub(super) reaches: usize,
}

impl BandSize {
    /// 16 KiB of f32.
    pub(super) const USUAL: Self = Self { elements: 1 << 12, reaches: 4 };
}

/// A band: rows of a canvas that are laid out at a time, and the numbers of the items, such as lines of points, that read only these.
#[derive(Clone, Debug)]
pub(super) struct Band {
    pub(super) items: Range<usize>,
    pub(super) rows: Range<usize>,
}

/// How a plane is laid out for a phase. What a tap reads lies at the same offset from every point, in the padding, too; and what
/// neighboring points read lies side by side, whatever the stride.
#[derive(Clone, Debug)]
pub(super) struct Canvas {
    /// The sizes of the plane.
    input: [usize; AXES],
    /// The indices that are read along every axis but the last, in the padding, too.
    read: [Range<isize>; AXES - 1],
    /// Distances between neighboring points along every axis.
    strides: [usize; AXES],
    /// The first index that is read along the last axis, divided by the stride.
    first: isize,
    /// How many elements of a row have indices with the same remainder modulo the stride.
    pitch: usize,
    /// Offsets of what the taps read from where the point lies.
    taps: Vec<usize>,
}

impl Canvas {
    pub(super) fn new(phase: &Phase) -> Self {
        let axes = [0, 1, 2].map(|axis| {
            let shifts = || phase.taps.iter().map(move |tap| tap.shifts[axis]);
            let (lowest, highest) = (shifts().min().unwrap_or(0), shifts().max().unwrap_or(0));
            let [input, count, stride] = phase.sizes(axis);
            (input, count, stride, lowest, highest)
        });
        let read = [0, 1].map(|axis| {
            let (_, count, stride, lowest, highest) = axes[axis];
            lowest..(stride * count.saturating_sub(1)) as isize + highest + 1
        });
        let (_, count, stride, lowest, highest) = axes[AXES - 1];
        let [first, last] = [lowest, highest].map(|shift| split(shift, stride).0);
        let pitch = count + (last - first) as usize;
        let row = pitch * stride;
        let offset = |shifts: [isize; AXES]| {
            let [outer, inner] = [0, 1].map(|axis| (shifts[axis] - read[axis].start) as usize);
            let (place, remainder) = split(shifts[AXES - 1], stride);
            (outer * read[1].len() + inner) * row + remainder * pitch + (place - first) as usize
        };
        let taps = phase.taps.iter().map(|tap| offset(tap.shifts)).collect();
        Self { input: axes.map(|axis| axis.0), strides: axes.map(|axis| axis.2), read, first, pitch, taps }
    }

    /// Where the first point of a run lies.
    pub(super) fn origin(&self, run: &Run) -> usize {
        let [outer, inner, last] = run.point;
        let row = outer * self.strides[0] * self.read[1].len() + inner * self.strides[1];
        row * self.pitch * self.strides[AXES - 1] + last
    }

    /// The number of elements of the plane.
    pub(super) fn plane(&self) -> usize {
        self.input.iter().product()
    }

    /// Offsets of what the taps read from where the point lies.
    pub(super) fn taps(&self) -> &[usize] {
        &self.taps
    }

    /// The number of elements of a row.
    pub(super) fn row(&self) -> usize {
        self.pitch * self.strides[AXES - 1]
    }

    /// Elements from what the first tap of a point reads to what the last one does.
    fn reach(&self) -> usize {
        self.taps.iter().max().map_or(0, |last| last + 1)
    }

    /// Elements of a band of several items, at most.
    pub(super) fn largest(&self, size: BandSize) -> usize {
        size.elements.max(size.reaches * self.reach())
    }

    /// Bands of few rows each, for items that lie at these places of the canvas, in ascending order.
    pub(super) fn bands(&self, places: impl Iterator<Item = Range<usize>>, size: BandSize) -> Vec<Band> {
        let (row, reach, largest) = (self.row(), self.reach(), self.largest(size));
        let mut bands: Vec<Band> = Vec::new();
        for (number, place) in places.enumerate() {
            let rows = place.start / row..(place.end + reach - 1).div_ceil(row);
            match bands.last_mut() {
                // Rows that are laid out anyway cost nothing.
                Some(band) if rows.end <= band.rows.end || (rows.end - band.rows.start) * row <= largest => {
                    band.items.end = number + 1;
                    band.rows.end = band.rows.end.max(rows.end);
                }
                _ => bands.push(Band { items: number..number + 1, rows }),
            }
        }
        bands
    }

    /// Lays out some rows in `padded`, in place of what it holds, for points that are `shift` points further along the last axis.
    #[inline(always)]
    pub(super) fn paint<E: CpuElement>(
        &self,
        plane: &[E],
        rows: Range<usize>,
        shift: usize,
        padded: &mut Vec<E::Acc>,
    ) {
        let first = self.first + shift as isize;
        let (row, stride, width) = (self.row(), self.strides[AXES - 1], self.input[AXES - 1]);
        // The last vector that is read may reach beyond the last point.
        padded.resize(rows.len() * row + MOST_LANES, E::Acc::zero());
        let inside = |axis: usize, index: usize| {
            let index = usize::try_from(index as isize + self.read[axis].start).ok()?;
            (index < self.input[axis]).then_some(index)
        };
        for (number, target) in rows.zip(padded.chunks_exact_mut(row)) {
            let (outer, inner) = (number / self.read[1].len(), number % self.read[1].len());
            let line = inside(0, outer).zip(inside(1, inner));
            let source =
                line.map(|(outer, inner)| &plane[(outer * self.input[1] + inner) * width..][..width]);
            lay_out(source, first, stride, self.pitch, target);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::geometry::{Axes, Axis};
    use super::*;

    /// A line that is longer than a band is laid out once, and rows are laid out twice only if two bands read them.
    #[test]
    fn few_rows_are_laid_out_twice() {
        let axis = |size| Axis { input: size, output: size, kernel: 3, stride: 1, dilation: 1, padding: 1 };
        for sizes in [vec![1 << 16], vec![300, 300], vec![5, 40_000], vec![9, 30, 30]] {
            let axes: Vec<Axis> = sizes.iter().map(|&size| axis(size)).collect();
            let canvas = Canvas::new(&Axes::new(&axes).convolution());
            // In stretches of 2048 points, as in depthwise convolutions.
            let points: usize = sizes.iter().product();
            let last = sizes[sizes.len() - 1];
            let places = (0..points / last).flat_map(|line| {
                let inner = if sizes.len() == 3 { [line / sizes[1], line % sizes[1]] } else { [0, line] };
                let start =
                    canvas.origin(&Run { image: 0, point: [inner[0], inner[1], 0], len: last, column: 0 });
                (0..last).step_by(2048).map(move |at| start + at..start + (at + 2048).min(last))
            });
            let (count, bands) = (places.clone().count(), canvas.bands(places, BandSize::USUAL));
            assert_eq!(bands.iter().map(|band| band.items.len()).sum::<usize>(), count);
            let painted: usize = bands.iter().map(|band| band.rows.len()).sum();
            let all: usize = sizes[..sizes.len() - 1].iter().map(|size| size + 2).product();
            // Two bands share as many rows as the kernel reaches.
            let shared = if sizes.len() == 3 { 3 * (sizes[1] + 2) } else { 3 };
            assert!(
                painted <= all + shared * (bands.len() - 1),
                "{sizes:?}: {painted} of {all}, {} bands",
                bands.len()
            );
        }
    }
}
