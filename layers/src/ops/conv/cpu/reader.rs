//! Tiles of the matrix that a convolution multiplies with: what the points of a tile read of the input.
use super::{
    geometry::{AXES, Phase, Planes, Run, Sources, Span, Tap},
    rows::{copy, lay_out, split},
};
use crate::backend::cpu::{
    CpuElement,
    product::{Lanes, MOST_LANES, RowsAt, Workspace, starts},
};
use core::ops::Range;
use num_traits::Zero;

/// How many products take as long as copying an element.
const COPY: f64 = 8.0;

/// The rows of a tile: one per channel and tap, with what every point reads of that channel through that tap.
pub(super) struct Reader<A> {
    layout: Layout,
    values: Workspace<A>,
    /// Where the rows begin.
    starts: Vec<usize>,
}

enum Layout {
    /// Every row is a copy.
    Gathered(Gather),
    /// Every element is copied once, and the rows overlap. Only for tiles of one run.
    Strip(Strip),
}

impl<A: CpuElement<Acc = A> + Lanes> Reader<A> {
    /// For tiles of at most so many points, and at most so many channels at once. `products`: how many products read each element of
    /// a row.
    pub(super) fn new(phase: &Phase, points: usize, channels: usize, products: usize) -> Self {
        let strip = Strip::new(phase, points);
        if strip.pays(phase, products) {
            let size = strip.size();
            let of_channel = |channel: usize| strip.taps.iter().map(move |tap| channel * size + tap);
            let starts = (0..channels).flat_map(of_channel).collect();
            let values = Workspace::new(channels * strip.size());
            return Self { layout: Layout::Strip(strip), values, starts };
        }
        let rows = channels * phase.taps.len();
        let values = Workspace::new(rows * points);
        let gather = Gather { pitch: points, sources: Sources::default() };
        Self { layout: Layout::Gathered(gather), values, starts: starts(rows, points) }
    }

    /// Whether tiles must be of one run.
    pub(super) fn takes_one_run(&self) -> bool {
        matches!(self.layout, Layout::Strip(_))
    }

    /// Reads some channels of a group.
    #[inline(always)]
    pub(super) fn read<E: CpuElement<Acc = A>>(
        &mut self,
        input: Planes<'_, E>,
        group: usize,
        channels: Range<usize>,
        phase: &Phase,
        runs: &[Run],
    ) {
        let values = &mut self.values;
        match &mut self.layout {
            Layout::Strip(strip) => strip.paint(input, group, channels, phase, &runs[0], values),
            Layout::Gathered(gather) => gather.copy(input, group, channels, phase, runs, values),
        }
    }

    /// The first `count` rows of what has been read.
    pub(super) fn rows(&self, count: usize) -> RowsAt<'_, A> {
        RowsAt { values: &self.values, starts: &self.starts[..count] }
    }
}

/// Copies what the points of a tile read, span by span.
struct Gather {
    /// Distance between rows.
    pitch: usize,
    /// What the points read through the tap whose rows are copied.
    sources: Sources,
}

impl Gather {
    /// Copies a row per channel and tap.
    #[inline(always)]
    fn copy<E: CpuElement>(
        &mut self,
        input: Planes<'_, E>,
        group: usize,
        channels: Range<usize>,
        phase: &Phase,
        runs: &[Run],
        tile: &mut [E::Acc],
    ) {
        let per_channel = phase.taps.len() * self.pitch;
        for (number, tap) in phase.taps.iter().enumerate() {
            phase.sources(runs, tap, &mut self.sources);
            let Sources { spans, padding } = &self.sources;
            let rows = tile[number * self.pitch..].chunks_mut(per_channel);
            for (row, channel) in rows.zip(channels.clone()) {
                for Span { image, start, columns } in spans {
                    let plane = &input.from(*image, group, channel)[..input.plane];
                    copy(&mut row[columns.clone()], &plane[*start..], phase.stride());
                }
                for columns in padding {
                    row[columns.clone()].fill(E::Acc::zero());
                }
            }
        }
    }
}

/// Copies the lines of the input that a run reads, with their padding. A line is `stride` rows, so that what neighboring points read
/// through a tap lies side by side.
struct Strip {
    /// Shifts of the lines along all axes but the last.
    lines: Vec<[isize; AXES - 1]>,
    /// The place in a row of what the first point reads through the first tap.
    first: isize,
    /// How many elements of a row one point reads.
    reach: usize,
    stride: usize,
    /// Distance between rows.
    pitch: usize,
    /// Where, among the elements of a channel, lies what the first point reads through every tap.
    taps: Vec<usize>,
}

impl Strip {
    fn new(phase: &Phase, points: usize) -> Self {
        let stride = phase.stride();
        let places = || phase.taps.iter().map(|tap| split(tap.shifts[AXES - 1], stride).0);
        let (first, last) = (places().min().unwrap_or(0), places().max().unwrap_or(0));
        let reach = (last - first) as usize + 1;
        let pitch = points + reach + MOST_LANES;
        let mut lines: Vec<[isize; AXES - 1]> = Vec::new();
        let mut start = |tap: &Tap| {
            let [outer, inner, shift] = tap.shifts;
            let line = lines.iter().position(|&line| line == [outer, inner]).unwrap_or_else(|| {
                lines.push([outer, inner]);
                lines.len() - 1
            });
            let (place, remainder) = split(shift, stride);
            (line * stride + remainder) * pitch + (place - first) as usize
        };
        let taps = phase.taps.iter().map(&mut start).collect();
        Self { lines, first, reach, stride, pitch, taps }
    }

    /// Whether copying every element only once saves more than incomplete vectors at the ends of lines cost.
    fn pays(&self, phase: &Phase, products: usize) -> bool {
        let [_, count, _] = phase.sizes(AXES - 1);
        if self.taps.is_empty() {
            return false;
        }
        let points = self.pitch - self.reach - MOST_LANES;
        let copied = self.lines.len() * self.stride * (points + self.reach - 1);
        let copies = copied as f64 / (self.taps.len() * points) as f64;
        let wasted = count.next_multiple_of(MOST_LANES) as f64 / count as f64 - 1.0;
        COPY * (1.0 - copies) > wasted * products as f64
    }

    /// The number of elements per channel.
    fn size(&self) -> usize {
        self.lines.len() * self.stride * self.pitch
    }

    /// Lays out what a run reads of some channels of a group.
    #[inline(always)]
    fn paint<E: CpuElement>(
        &self,
        input: Planes<'_, E>,
        group: usize,
        channels: Range<usize>,
        phase: &Phase,
        run: &Run,
        strip: &mut [E::Acc],
    ) {
        let [width, ..] = phase.sizes(AXES - 1);
        let first = self.first + run.point[AXES - 1] as isize;
        let places = run.len + self.reach - 1;
        let planes = input.from(run.image, group, channels.start).chunks(input.plane);
        let of_channels = strip.chunks_mut(self.size()).take(channels.len());
        for (of_channel, plane) in of_channels.zip(planes) {
            for (rows, line) in of_channel.chunks_mut(self.stride * self.pitch).zip(&self.lines) {
                let source = phase.line(run, *line).map(|start| &plane[start..][..width]);
                lay_out(source, first, self.stride, places, rows);
            }
        }
    }
}
