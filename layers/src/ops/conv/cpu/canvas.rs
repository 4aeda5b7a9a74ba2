//! A plane with its padding around it.
use super::{
    geometry::{AXES, Phase, Run},
    rows::{lay_out, split},
};
use crate::backend::cpu::{CpuElement, product::MOST_LANES};
use core::ops::Range;
use num_traits::Zero;

/// How a plane is laid out so that every point of a phase finds what a tap reads at one offset from where the point itself
/// lies, padding or not; neighbouring points next to one another, whatever the stride.
#[derive(Clone, Debug)]
pub(super) struct Canvas {
    /// Of the plane.
    input: [usize; AXES],
    /// What is read along every axis but the last, padding included.
    read: [Range<isize>; AXES - 1],
    /// Distance between neighbouring points along every axis.
    strides: [usize; AXES],
    /// What the first point reads along the last axis, in steps of the stride.
    first: isize,
    /// Elements of a row that leave the same remainder modulo the stride.
    pitch: usize,
    /// Offsets from a point of what its taps read.
    taps: Vec<usize>,
}

impl Canvas {
    /// For a phase.
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

    /// Elements of the plane.
    pub(super) fn plane(&self) -> usize {
        self.input.iter().product()
    }

    /// Offsets from a point of what its taps read.
    pub(super) fn taps(&self) -> &[usize] {
        &self.taps
    }

    /// Lays a plane out; `padded` is empty, or another plane laid out alike.
    #[inline(always)]
    pub(super) fn paint<E: CpuElement>(&self, plane: &[E], padded: &mut Vec<E::Acc>) {
        let stride = self.strides[AXES - 1];
        let row = self.pitch * stride;
        // With room for reading a vector beyond the last point.
        padded.resize(self.read[0].len() * self.read[1].len() * row + MOST_LANES, E::Acc::zero());
        let inside = |axis: usize| {
            let end = (self.input[axis] as isize).min(self.read[axis].end);
            self.read[axis].start.max(0)..end
        };
        let width = self.input[AXES - 1];
        for outer in inside(0) {
            for inner in inside(1) {
                let source = &plane[(outer as usize * self.input[1] + inner as usize) * width..][..width];
                let [outer, inner] =
                    [outer - self.read[0].start, inner - self.read[1].start].map(|index| index as usize);
                let rows = &mut padded[(outer * self.read[1].len() + inner) * row..][..row];
                lay_out(Some(source), self.first, stride, self.pitch, rows);
            }
        }
    }
}
