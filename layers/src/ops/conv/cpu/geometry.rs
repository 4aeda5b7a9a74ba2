//! Which elements of the input the results of a convolution read, and how results are divided into shares, tiles and runs, which
//! [the head of this folder](super) draws. There are always three axes: a convolution over fewer has leading axes of size 1.
//!
//! Along an axis, result `first + step t` reads input `stride t + shift` through every tap of the kernel, each with its own
//! `shift`. A convolution is one such [`Phase`]. A transposed convolution of stride `s` is `s` of them per axis: results whose
//! index leaves the same remainder modulo `s` read neighboring inputs through the same taps.
use core::ops::Range;
use std::borrow::Cow;

/// The number of axes.
pub(super) const AXES: usize = 3;

/// One axis of a convolution: result `t` reads input `stride t + dilation tap - padding`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Axis {
    pub(super) input: usize,
    pub(super) output: usize,
    pub(super) kernel: usize,
    pub(super) stride: usize,
    pub(super) dilation: usize,
    pub(super) padding: usize,
}

/// Three axes of a convolution.
#[derive(Clone, Debug)]
pub(super) struct Axes([Axis; AXES]);

impl Axes {
    /// From at most three axes. If every result reads only the input at its own place, all axes become one.
    pub(super) fn new(given: &[Axis]) -> Self {
        let none = Axis { input: 1, output: 1, kernel: 1, stride: 1, dilation: 1, padding: 0 };
        let mut axes = [none; AXES];
        let pointwise =
            |axis: &Axis| axis.kernel * axis.stride == 1 && axis.input == axis.output && axis.padding == 0;
        if given.iter().all(pointwise) {
            let size = given.iter().map(|axis| axis.input).product();
            axes[AXES - 1] = Axis { input: size, output: size, ..none };
        } else {
            // Axes of size 1 are left out, so that the last axis is one with neighboring points.
            let long: Vec<Axis> =
                given.iter().copied().filter(|axis| !(pointwise(axis) && axis.input == 1)).collect();
            axes[AXES - long.len()..].copy_from_slice(&long);
        }
        Self(axes)
    }

    /// The convolution.
    pub(super) fn convolution(&self) -> Phase {
        let shift = |axis: &Axis, tap| (axis.dilation * tap) as isize - axis.padding as isize;
        let taps = |axis: &Axis| (0..axis.kernel).map(|tap| (tap, shift(axis, tap))).collect();
        let of_axis = |axis: &Axis| PhaseAxis {
            input: axis.input,
            output: axis.output,
            first: 0,
            step: 1,
            count: axis.output,
            stride: axis.stride,
            taps: taps(axis),
        };
        self.phase([0, 1, 2].map(|axis| of_axis(&self.0[axis])))
    }

    /// The transpose of the convolution: it reads what has the size of the output, and makes what has the size of the input.
    pub(super) fn transposed(&self) -> Vec<Phase> {
        let [first, second, third] = [0, 1, 2].map(|axis| PhaseAxis::transposed(&self.0[axis]));
        let pairs = first.iter().flat_map(|first| second.iter().map(move |second| (first, second)));
        let triples = pairs.flat_map(|(first, second)| third.iter().map(move |third| [first, second, third]));
        triples.map(|axes| self.phase(axes.map(PhaseAxis::clone))).collect()
    }

    fn phase(&self, axes: [PhaseAxis; AXES]) -> Phase {
        let mut taps = vec![Tap { index: 0, shifts: [0; AXES] }];
        for (number, (axis, of_kernel)) in axes.iter().zip(&self.0).enumerate() {
            let with = |tap: &Tap, &(index, shift): &(usize, isize)| {
                let mut shifts = tap.shifts;
                shifts[number] = shift;
                Tap { index: tap.index * of_kernel.kernel + index, shifts }
            };
            taps = taps.iter().flat_map(|tap| axis.taps.iter().map(move |along| with(tap, along))).collect();
        }
        Phase { axes, taps }
    }
}

/// One axis of a phase.
#[derive(Clone, Debug)]
struct PhaseAxis {
    input: usize,
    output: usize,
    first: usize,
    step: usize,
    count: usize,
    stride: usize,
    /// The index of every tap in the kernel, and its shift.
    taps: Vec<(usize, isize)>,
}

impl PhaseAxis {
    /// The points whose results have indices below this one.
    fn points_before(&self, index: usize) -> usize {
        index.saturating_sub(self.first).div_ceil(self.step).min(self.count)
    }

    /// Whether a point has the result with this index.
    fn has_point_at(&self, index: usize) -> bool {
        self.points_before(index) < self.points_before(index + 1)
    }

    /// One per remainder modulo the stride.
    fn transposed(axis: &Axis) -> Vec<Self> {
        let stride = axis.stride as isize;
        let of_remainder = |first: usize| {
            let reached = |tap: usize| (first + axis.padding) as isize - (axis.dilation * tap) as isize;
            let taps = (0..axis.kernel).filter(|&tap| reached(tap).rem_euclid(stride) == 0);
            Self {
                input: axis.output,
                output: axis.input,
                first,
                step: axis.stride,
                count: (axis.input - first).div_ceil(axis.stride),
                stride: 1,
                taps: taps.map(|tap| (tap, reached(tap).div_euclid(stride))).collect(),
            }
        };
        (0..axis.stride.min(axis.input)).map(of_remainder).collect()
    }
}

/// A tap of the kernel: its index there, and its shift along every axis.
#[derive(Clone, Debug)]
pub(super) struct Tap {
    pub(super) index: usize,
    pub(super) shifts: [isize; AXES],
}

/// Results that read the input through the same taps: a lattice, whose points are numbered in row-major order.
#[derive(Clone, Debug)]
pub(super) struct Phase {
    axes: [PhaseAxis; AXES],
    pub(super) taps: Vec<Tap>,
}

/// A run: neighboring points of one line, in consecutive columns of a tile.
#[derive(Clone, Copy, Debug)]
pub(super) struct Run {
    pub(super) image: usize,
    /// The first point, by axis.
    pub(super) point: [usize; AXES],
    /// The number of points.
    pub(super) len: usize,
    /// The column of the first point in the tile.
    pub(super) column: usize,
}

/// A span: columns of a tile whose inputs, or results, lie in the plane of an image at equal distances, from `start` on.
#[derive(Clone, Debug)]
pub(super) struct Span {
    pub(super) image: usize,
    pub(super) start: usize,
    pub(super) columns: Range<usize>,
}

/// What the points of a tile read through a tap.
#[derive(Clone, Debug, Default)]
pub(super) struct Sources {
    /// The columns that read the input. A span may go on over the padding between two lines.
    pub(super) spans: Vec<Span>,
    /// The columns that read padding, which are written after the spans.
    pub(super) padding: Vec<Range<usize>>,
}

impl Span {
    /// Adds the span to others: it becomes a part of the last one if it continues that.
    fn add_to(self, spans: &mut Vec<Self>, step: usize) {
        match spans.last_mut() {
            Some(last)
                if step == 1
                    && last.image == self.image
                    && last.start + self.columns.start == self.start + last.columns.start =>
            {
                last.columns.end = self.columns.end;
            }
            _ => spans.push(self),
        }
    }
}

/// A tile: consecutive points of a share, one per column.
#[derive(Clone, Debug, Default)]
pub(super) struct Tile {
    pub(super) runs: Vec<Run>,
    pub(super) width: usize,
}

/// A piece: the points of a share that are in one image.
#[derive(Clone, Debug)]
pub(super) struct Piece {
    pub(super) image: usize,
    pub(super) points: Range<usize>,
}

impl Phase {
    /// Elements of a plane of the result, of all phases.
    pub(super) fn output_plane(&self) -> usize {
        self.axes.iter().map(|axis| axis.output).product()
    }

    /// Elements of a row of the result, of all phases.
    pub(super) fn output_row(&self) -> usize {
        self.axes[AXES - 1].output
    }

    /// Whether there is a single row of results.
    pub(super) fn is_one_row(&self) -> bool {
        self.output_plane() == self.output_row()
    }

    /// Of a single row, the points whose results are in a range.
    pub(super) fn cut(&self, results: Range<usize>) -> Self {
        let mut cut = self.clone();
        let last = &mut cut.axes[AXES - 1];
        let [start, end] = [results.start, results.end].map(|index| last.points_before(index));
        (last.first, last.count) = (last.first + last.step * start, end - start);
        let shift = (last.stride * start) as isize;
        last.taps.iter_mut().for_each(|(_, of_tap)| *of_tap += shift);
        cut.taps.iter_mut().for_each(|tap| tap.shifts[AXES - 1] += shift);
        cut
    }

    /// How many points lie between one that reads an element of a row through the first tap, and one that does through the last.
    pub(super) fn reach(&self) -> usize {
        let shifts = || self.taps.iter().map(|tap| tap.shifts[AXES - 1]);
        let reach = shifts().max().unwrap_or(0) - shifts().min().unwrap_or(0);
        (reach as usize).div_ceil(self.stride())
    }

    /// The number of points.
    pub(super) fn points(&self) -> usize {
        self.axes.iter().map(|axis| axis.count).product()
    }

    /// Distance along the last axis between the inputs of neighboring points.
    pub(super) fn stride(&self) -> usize {
        self.axes[AXES - 1].stride
    }

    /// Distance along the last axis between the results of neighboring points.
    pub(super) fn step(&self) -> usize {
        self.axes[AXES - 1].step
    }

    /// Whether every point reads one input, the one at its own place.
    pub(super) fn is_pointwise(&self) -> bool {
        let alike = |axis: &PhaseAxis| axis.stride * axis.step == 1 && axis.input == axis.output;
        self.axes.iter().all(alike) && matches!(&self.taps[..], [Tap { shifts: [0, 0, 0], .. }])
    }

    /// The axis across which images are cut into slabs: the first along which there is more than one result.
    fn split_axis(&self) -> usize {
        self.axes.iter().position(|axis| axis.output > 1).unwrap_or(AXES - 1)
    }

    /// The number of slabs of an image, the same for all phases of a transposed convolution.
    pub(super) fn slabs(&self) -> usize {
        let axis = &self.axes[self.split_axis()];
        axis.output.div_ceil(axis.step)
    }

    /// The number of points in the first `slabs` slabs of an image.
    pub(super) fn points_of(&self, slabs: usize) -> usize {
        let split = self.split_axis();
        let inner: usize = self.axes[split + 1..].iter().map(|axis| axis.count).product();
        self.axes[split].count.min(slabs) * inner
    }

    /// Which line of the input the points of a run read, with these shifts along all axes but the last: where it begins in the plane.
    /// `None` in the padding.
    pub(super) fn line(&self, run: &Run, shifts: [isize; AXES - 1]) -> Option<usize> {
        let mut offset = 0;
        for (axis, shift) in shifts.into_iter().enumerate() {
            let PhaseAxis { input, stride, .. } = self.axes[axis];
            let index = (stride * run.point[axis]) as isize + shift;
            let index = usize::try_from(index).ok().filter(|&index| index < input)?;
            offset = offset * input + index;
        }
        Some(offset * self.axes[AXES - 1].input)
    }

    /// The points of `pieces` in tiles of at most `size` columns, each of a single run if `one_run`.
    pub(super) fn tiles(
        &self,
        pieces: impl Iterator<Item = Piece>,
        size: usize,
        one_run: bool,
    ) -> impl Iterator<Item = Tile> {
        let [_, second, third] = [0, 1, 2].map(|axis| self.axes[axis].count);
        let mut pieces = pieces.filter(|piece| !piece.points.is_empty()).peekable();
        core::iter::from_fn(move || {
            let mut tile = Tile::default();
            while tile.width < size
                && !(one_run && tile.width > 0)
                && let Some(Piece { image, points }) = pieces.peek_mut()
            {
                let next = points.start;
                let last = next % third;
                let point = [next / third / second, next / third % second, last];
                let len = (third - last).min(points.len()).min(size - tile.width);
                tile.runs.push(Run { image: *image, point, len, column: tile.width });
                tile.width += len;
                points.start += len;
                if points.start == points.end {
                    pieces.next();
                }
            }
            (tile.width > 0).then_some(tile)
        })
    }

    /// All lines of points of an image.
    pub(super) fn lines(&self) -> Vec<Run> {
        self.runs(0..self.points())
    }

    /// The lines of points of an image whose results are in these rows.
    pub(super) fn lines_in(&self, rows: Range<usize>) -> Vec<Run> {
        let [outer, inner, last] = &self.axes;
        // The lines whose results are in rows before this one.
        let before = |row: usize| {
            let [of_outer, of_inner] = [row / inner.output, row % inner.output];
            let in_part = if outer.has_point_at(of_outer) { inner.points_before(of_inner) } else { 0 };
            outer.points_before(of_outer) * inner.count + in_part
        };
        self.runs(before(rows.start) * last.count..before(rows.end) * last.count)
    }

    /// Points of an image, line by line.
    fn runs(&self, points: Range<usize>) -> Vec<Run> {
        let image = Piece { image: 0, points };
        self.tiles(core::iter::once(image), usize::MAX, false).flat_map(|tile| tile.runs).collect()
    }

    /// Along an axis: the size of the input, the number of points, and the distance between the inputs of neighboring points.
    pub(super) fn sizes(&self, axis: usize) -> [usize; 3] {
        let PhaseAxis { input, count, stride, .. } = self.axes[axis];
        [input, count, stride]
    }

    /// What runs read through a tap.
    pub(super) fn sources(&self, runs: &[Run], tap: &Tap, sources: &mut Sources) {
        let Sources { spans, padding } = sources;
        spans.clear();
        padding.clear();
        let PhaseAxis { input, stride, .. } = self.axes[AXES - 1];
        let [outer, inner, shift] = tap.shifts;
        for run in runs {
            let columns = run.column..run.column + run.len;
            let Some(line) = self.line(run, [outer, inner]) else {
                padding.push(columns);
                continue;
            };
            let first = (stride * run.point[AXES - 1]) as isize + shift;
            let reaching = |index: isize| {
                let points = (index - first).max(0) as usize;
                columns.start + points.div_ceil(stride).min(run.len)
            };
            let inside = reaching(0)..reaching(input as isize);
            padding.extend([columns.start..inside.start, inside.end..columns.end]);
            let index = first + (stride * (inside.start - columns.start)) as isize;
            if !inside.is_empty() {
                let span = Span { image: run.image, start: line + index as usize, columns: inside };
                span.add_to(spans, stride);
            }
        }
        padding.retain(|columns| !columns.is_empty());
    }

    /// Where the results of runs belong in the planes of the result.
    pub(super) fn targets(&self, runs: &[Run]) -> Vec<Span> {
        let mut spans = Vec::new();
        for run in runs {
            let columns = run.column..run.column + run.len;
            Span { image: run.image, start: self.target(run), columns }.add_to(&mut spans, self.step());
        }
        spans
    }

    /// Where the result of a run's first point belongs in the plane of the result.
    pub(super) fn target(&self, run: &Run) -> usize {
        let lie = |offset, (axis, point): (&PhaseAxis, usize)| {
            offset * axis.output + axis.first + axis.step * point
        };
        self.axes.iter().zip(run.point).fold(0, lie)
    }
}

/// A tensor `[batch, channels, plane]`, the channels in groups.
#[derive(Clone, Copy)]
pub(super) struct Planes<'a, E> {
    pub(super) values: &'a [E],
    pub(super) channels: usize,
    pub(super) groups: usize,
    pub(super) plane: usize,
}

impl<'a, E> Planes<'a, E> {
    pub(super) fn batch(&self) -> usize {
        self.values.len() / (self.channels * self.plane)
    }

    /// Channels of a group.
    pub(super) fn size(&self) -> usize {
        self.channels / self.groups
    }

    /// The planes from a channel of a group on.
    pub(super) fn from(&self, image: usize, group: usize, channel: usize) -> &'a [E] {
        &self.values[(image * self.channels + group * self.size() + channel) * self.plane..]
    }
}

/// A phase and its weight, which has a row per channel of the result, with an element per input channel of the group and tap.
pub(super) type Weighted<'a, A> = (Phase, Cow<'a, [A]>);
