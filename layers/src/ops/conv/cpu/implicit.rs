//! Convolutions as products with a matrix that never exists as a whole: tiles of it are made in the cache.
//!
//! The matrix has a row per input channel and tap, and a column per point. A tile has up to [`COLUMNS`] points and, at a time, about
//! [`DEPTH`](super::division::DEPTH) rows. Sums are made in f32 at least, and rounded once.
//!
//! What a pass holds besides its result, and how it is divided, is in [`division`](super::division). A transposed convolution also has its
//! weight in another order; half precision, its weight in f32.
use super::{
    Finish,
    division::{Extent, FEWEST_POINTS, GradientExtent, ROWS, Share, at_once},
    geometry::{Phase, Piece, Planes, Span, Tap, Tile, Weighted},
    reader::Reader,
};
use crate::backend::cpu::{
    CpuElement,
    parallel::{self, Job, vectorized},
    product::{COLUMNS, Lanes, MOST_LANES, RowsAt, SumRows, Workspace, add_product, starts},
    sums::add_each,
    transpose::transpose,
};
use core::{marker::PhantomData, mem::MaybeUninit, ops::Range, slice};
use std::borrow::Cow;

/// Rows of a weight that are rearranged at once, since their elements lie on the same pages of memory: fewer where threads would have none,
/// but no fewer than [`FEWEST_ROWS_OF_WEIGHT`].
const ROWS_OF_WEIGHT: usize = 32;

/// With a kernel of 1x1, the elements of so many rows share a line of the cache.
const FEWEST_ROWS_OF_WEIGHT: usize = 8;

/// The points of some slabs of a batch, which has `per_image` slabs in every image.
fn pieces(phase: &Phase, slabs: &Range<usize>, per_image: usize) -> impl Iterator<Item = Piece> {
    let Range { start, end } = *slabs;
    (start / per_image..end.div_ceil(per_image)).map(move |image| {
        let first = image * per_image;
        let points = |slab: usize| phase.points_of(slab.clamp(first, first + per_image) - first);
        Piece { image, points: points(start)..points(end) }
    })
}

/// A result `[batch, channels, plane]` that is not written yet, for all jobs. (References per image, channel and share would take more
/// memory than a result with small planes.)
struct Unwritten<'a, E> {
    start: *mut MaybeUninit<E>,
    len: usize,
    channels: usize,
    plane: usize,
    result: PhantomData<&'a mut [MaybeUninit<E>]>,
}

// SAFETY: jobs only write, each the elements of its own share.
unsafe impl<E: Send> Sync for Unwritten<'_, E> {}

impl<'a, E> Unwritten<'a, E> {
    fn new(result: &'a mut [MaybeUninit<E>], channels: usize, plane: usize) -> Self {
        Self { start: result.as_mut_ptr(), len: result.len(), channels, plane, result: PhantomData }
    }

    /// `len` elements of the plane of a channel of an image, from `start` on.
    ///
    /// # Safety
    ///
    /// Nobody else may read or write them meanwhile.
    #[allow(clippy::mut_from_ref, reason = "see above")]
    #[inline(always)]
    unsafe fn row(&self, image: usize, channel: usize, start: usize, len: usize) -> &mut [MaybeUninit<E>] {
        let first = (image * self.channels + channel) * self.plane + start;
        assert!(start + len <= self.plane && first + len <= self.len, "within the plane");
        // SAFETY: within the result, which is borrowed as long as this is, and as the caller says.
        unsafe { slice::from_raw_parts_mut(self.start.add(first), len) }
    }
}

/// The result `[batch, channels, ...]` of the convolution that phases with their weights describe.
pub(super) fn convolve<E: CpuElement>(
    input: Planes<'_, E>,
    channels: usize,
    phases: &[Weighted<'_, E::Acc>],
    finish: Finish<'_, E>,
) -> Vec<E> {
    let plane = phases[0].0.output_plane();
    assert_eq!(
        phases.iter().map(|(phase, _)| phase.points()).sum::<usize>(),
        plane,
        "a phase for every result"
    );
    let len = input.batch() * channels * plane;
    let mut result = Vec::with_capacity(len);
    let unwritten = Unwritten::new(&mut result.spare_capacity_mut()[..len], channels, plane);
    let extent = Extent {
        groups: input.groups,
        slabs: input.batch() * phases[0].0.slabs(),
        phases: phases.iter().map(|(phase, _)| [phase.points_of(1), phase.taps.len()]).collect(),
        input: input.size(),
        channels: channels / input.groups,
        elements: input.values.len() + len,
        weights: phases.iter().map(|(_, weight)| weight.len()).sum(),
    };
    let division = extent.division(parallel::threads());
    let shares = extent.shares(division).collect();
    parallel::each_of(shares, division.at_once, extent.work(), |share| {
        vectorized(Convolve { share, tiles: division.tiles, input, phases, finish, unwritten: &unwritten });
    });
    // SAFETY: the shares are the whole result, and every element of a share is a point of one phase, in a run that is written.
    unsafe { result.set_len(len) };
    result
}

/// Computes a share of the result.
struct Convolve<'a, E: CpuElement> {
    share: Share,
    /// Tiles whose sums are made with the same rows of a weight, at most.
    tiles: usize,
    input: Planes<'a, E>,
    phases: &'a [Weighted<'a, E::Acc>],
    finish: Finish<'a, E>,
    unwritten: &'a Unwritten<'a, E>,
}

impl<E: CpuElement> Job for Convolve<'_, E> {
    type Result = ();

    #[inline(always)]
    fn run(self) {
        for phase in self.phases {
            self.write_phase(phase);
        }
    }
}

impl<E: CpuElement> Convolve<'_, E> {
    /// Writes the results of a phase.
    #[inline(always)]
    fn write_phase(&self, (phase, weight): &Weighted<'_, E::Acc>) {
        let Share { group, channels: ref of_share, ref slabs } = self.share;
        let (channels, taps) = (self.input.size(), phase.taps.len());
        let (size, first_of_share) =
            (of_share.len(), group * (self.unwritten.channels / self.input.groups) + of_share.start);
        let weight = &weight[first_of_share * channels * taps..];
        let [per_tile, some] = at_once(taps, channels, size);
        let row_starts = starts(size, channels * taps);
        let pieces = || pieces(phase, slabs, phase.slabs());
        let points: usize = pieces().map(|piece| piece.points.len()).sum();
        let tiles_at_once = match per_tile == channels {
            true => 1,
            false => self.tiles.min(points.div_ceil(COLUMNS)).max(1),
        };
        let width = points.next_multiple_of(MOST_LANES).min(COLUMNS);
        let mut reader = Reader::new(phase, width, per_tile, size);
        let mut all_tiles = phase.tiles(pieces(), COLUMNS, reader.takes_one_run());
        let mut sums = Workspace::new(tiles_at_once * some * COLUMNS);
        loop {
            let tiles: Vec<Tile> = all_tiles.by_ref().take(tiles_at_once).collect();
            if tiles.is_empty() {
                return;
            }
            let places: Vec<Vec<Span>> = tiles.iter().map(|tile| phase.targets(&tile.runs)).collect();
            for first in (0..size).step_by(some) {
                let row_starts = &row_starts[first..(first + some).min(size)];
                for start in (0..channels).step_by(per_tile) {
                    let block = start..(start + per_tile).min(channels);
                    let rows = RowsAt { values: &weight[start * taps..], starts: row_starts };
                    for (tile, sums) in tiles.iter().zip(sums.chunks_exact_mut(some * COLUMNS)) {
                        if first == 0 {
                            reader.read(self.input, group, block.clone(), phase, &tile.runs);
                        }
                        let sums = SumRows { values: sums, pitch: COLUMNS, first: start == 0 };
                        add_product(rows, reader.rows(block.len() * taps), tile.width, sums);
                    }
                }
                for (places, sums) in places.iter().zip(sums.chunks_exact_mut(some * COLUMNS)) {
                    let sums = &mut sums[..row_starts.len() * COLUMNS];
                    self.write(phase.step(), places, first_of_share + first, sums);
                }
            }
        }
    }

    /// Writes the results of a tile from their sums: a row per channel, from channel `first` on.
    #[inline(always)]
    fn write(&self, step: usize, places: &[Span], first: usize, sums: &mut [E::Acc]) {
        for (channel, sums) in (first..).zip(sums.as_chunks_mut::<COLUMNS>().0) {
            self.finish.apply(channel, sums);
            let values = sums.map(|sum| MaybeUninit::new(E::narrow(sum)));
            for Span { image, start, columns } in places {
                let values = &values[columns.clone()];
                let len = (values.len() - 1) * step + 1;
                // SAFETY: the points of a span lie on one line, or, if the step is 1, on consecutive lines. All of them, and the results
                // of other phases between them, belong to this share.
                let results = unsafe { self.unwritten.row(*image, channel, *start, len) };
                match step {
                    1 => results.copy_from_slice(values),
                    step => results.iter_mut().step_by(step).zip(values).for_each(|(y, value)| *y = *value),
                }
            }
        }
    }
}

/// The gradient of the weight of a convolution: a row per channel of `dy`, with an element per channel of the signal's group and tap.
pub(super) fn weight_gradient<E: CpuElement>(
    signal: Planes<'_, E>,
    dy: Planes<'_, E>,
    phase: &Phase,
) -> Vec<E> {
    // Where the two can be exchanged, the one with fewer channels is transposed.
    let exchanged = phase.is_pointwise() && signal.size() < dy.size();
    let (signal, dy) = if exchanged { (dy, signal) } else { (signal, dy) };
    let (groups, taps) = (signal.groups, phase.taps.len());
    let (rows, columns) = (signal.size() * taps, dy.size());
    let extent = GradientExtent {
        groups,
        slabs: signal.batch() * phase.slabs(),
        points: signal.batch() * phase.points(),
        channels: signal.size(),
        taps,
        columns,
        elements: signal.values.len() + dy.values.len(),
        bytes: size_of::<E::Acc>(),
    };
    let division = extent.division(parallel::threads());
    let partial =
        |Share { group, channels, slabs }| PartialSum { group, channels, slabs, sums: Workspace::new(0) };
    let mut partials: Vec<_> = extent.shares(division).map(partial).collect();
    parallel::each_of(partials.iter_mut().collect(), division.at_once, extent.work(), |partial| {
        vectorized(Correlate { partial, points: division.points, signal, dy, phase });
    });

    let (per_group, pitch) = (partials.len() / groups, panel(columns));
    let len = groups * rows * columns;
    let mut gradient = Vec::with_capacity(len);
    let unwritten = &mut gradient.spare_capacity_mut()[..len];
    let by_group = partials.chunks(per_group).zip(unwritten.chunks_mut(rows * columns));
    let narrow = |sum| MaybeUninit::new(E::narrow(sum));
    let width = |panel: usize| (columns - panel * pitch).min(pitch);
    if exchanged {
        let (mut jobs, at_once) = (Vec::new(), parallel::items_per_task(rows, columns));
        for (of_group, mut gradient) in by_group {
            for addends in blocks(of_group) {
                let (of_block, others) = gradient.split_at_mut(addends[0].channels.len() * columns);
                gradient = others;
                let chunks = of_block.chunks_mut(at_once * columns).enumerate();
                jobs.extend(chunks.map(|(index, gradient)| (addends, index * at_once, gradient)));
            }
        }
        parallel::each(jobs, len, |(addends, first, gradient)| {
            let (count, here) = (addends[0].channels.len(), gradient.len() / columns);
            for panel in 0..columns.div_ceil(pitch) {
                let start = (panel * count + first) * pitch;
                let sums = total(addends, start..start + here * pitch);
                for (sums, row) in sums.chunks(pitch).zip(gradient.chunks_mut(columns)) {
                    let row = &mut row[panel * pitch..][..width(panel)];
                    row.iter_mut().zip(sums).for_each(|(element, &sum)| *element = narrow(sum));
                }
            }
        });
    } else {
        let mut jobs = Vec::new();
        for (of_group, gradient) in by_group {
            // A panel is some whole rows of the gradient.
            let panels = gradient.chunks_mut(rows * pitch).enumerate();
            jobs.extend(panels.map(|(panel, gradient)| (of_group, panel, gradient)));
        }
        parallel::each(jobs, len, |(of_group, panel, gradient)| {
            for addends in blocks(of_group) {
                let (first, count) = (addends[0].channels.start * taps, addends[0].channels.len() * taps);
                let sums = total(addends, panel * count * pitch..(panel + 1) * count * pitch);
                transpose(&sums, pitch, [count, width(panel)], &mut gradient[first..], rows, narrow);
            }
        });
    }
    // SAFETY: the panels are the whole gradient, and the channels of the partial sums are all rows of a panel; where rows and columns are
    // exchanged, these channels are the rows of the gradient.
    unsafe { gradient.set_len(len) };
    gradient
}

/// Of the partial sums of a group, those of the same channels.
fn blocks<A>(of_group: &[PartialSum<A>]) -> impl Iterator<Item = &[PartialSum<A>]> {
    of_group.chunk_by(|a, b| a.channels == b.channels)
}

/// A range of the elements of partial sums, added up.
fn total<A: CpuElement<Acc = A> + Lanes>(addends: &[PartialSum<A>], range: Range<usize>) -> Cow<'_, [A]> {
    let mut sums = Cow::Borrowed(&addends[0].sums[range.clone()]);
    for addend in &addends[1..] {
        add_each(sums.to_mut(), &addend.sums[range.clone()]);
    }
    sums
}

/// The width of the panels into which so many columns are divided.
fn panel(columns: usize) -> usize {
    columns.next_multiple_of(MOST_LANES).min(COLUMNS)
}

/// A partial sum of the gradient of a weight: over some slabs of the batch, for some channels of the signal.
struct PartialSum<A> {
    group: usize,
    channels: Range<usize>,
    slabs: Range<usize>,
    /// For every panel of channels of `dy`, a row per channel and tap.
    sums: Workspace<A>,
}

/// Computes a partial sum of the gradient.
struct Correlate<'a, E: CpuElement> {
    partial: &'a mut PartialSum<E::Acc>,
    /// Points that contribute at once, at most.
    points: usize,
    signal: Planes<'a, E>,
    dy: Planes<'a, E>,
    phase: &'a Phase,
}

impl<E: CpuElement> Job for Correlate<'_, E> {
    type Result = ();

    #[inline(always)]
    fn run(self) {
        self.partial.sum(self.points, self.signal, self.dy, self.phase);
    }
}

impl<A: CpuElement<Acc = A> + Lanes> PartialSum<A> {
    #[inline(always)]
    fn sum<E: CpuElement<Acc = A>>(
        &mut self,
        points: usize,
        signal: Planes<'_, E>,
        dy: Planes<'_, E>,
        phase: &Phase,
    ) {
        let (taps, pitch) = (phase.taps.len(), panel(dy.size()));
        let (panels, of_panel) = (dy.size().div_ceil(pitch), self.channels.len() * taps * pitch);
        let width = |panel: usize| (dy.size() - panel * pitch).min(pitch);
        let pieces = || pieces(phase, &self.slabs, phase.slabs());
        let total: usize = pieces().map(|piece| piece.points.len()).sum();
        let most = (total / 4).clamp(FEWEST_POINTS, points);
        let size = total.div_ceil(total.div_ceil(most));
        let per_tile = ROWS.div_ceil(taps).min(self.channels.len());
        let mut reader = Reader::new(phase, size, per_tile, dy.size());
        let mut columns = Workspace::new(panels * size * pitch);
        let column_starts = starts(size, pitch);
        self.sums = Workspace::new(panels * of_panel);
        for Tile { runs, width: points } in phase.tiles(pieces(), size, reader.takes_one_run()) {
            let spans = phase.targets(&runs);
            for (panel, columns) in columns.chunks_exact_mut(size * pitch).enumerate() {
                for span in &spans {
                    let values = &dy.from(span.image, self.group, panel * pitch)[span.start..];
                    let columns = &mut columns[span.columns.start * pitch..];
                    transpose(values, dy.plane, [width(panel), span.columns.len()], columns, pitch, E::widen);
                }
            }
            for start in self.channels.clone().step_by(per_tile) {
                let channels = start..(start + per_tile).min(self.channels.end);
                let count = channels.len() * taps;
                reader.read(signal, self.group, channels, phase, &runs);
                let rows = reader.rows(count);
                let first = (start - self.channels.start) * taps * pitch;
                let of_panels = self.sums.chunks_exact_mut(of_panel).zip(columns.chunks_exact(size * pitch));
                for (panel, (sums, values)) in of_panels.enumerate() {
                    let sums = SumRows { values: &mut sums[first..], pitch, first: false };
                    let columns = RowsAt { values, starts: &column_starts[..points] };
                    add_product(rows, columns, width(panel), sums);
                }
            }
        }
    }
}

/// The weight `[groups * o, i, kernel]` in the order in which a transposed convolution reads it: `[groups, i, o, taps]`.
pub(super) fn transposed_weight<E: CpuElement>(
    weight: &[E],
    [channels, size, kernel]: [usize; 3],
    groups: usize,
    taps: &[Tap],
) -> Vec<E::Acc> {
    let of_group = channels / groups;
    let row = of_group * taps.len();
    let len = groups * size * row;
    let sizes = [of_group, size, kernel];
    let at_once = (groups * size).div_ceil(parallel::threads()).clamp(FEWEST_ROWS_OF_WEIGHT, ROWS_OF_WEIGHT);
    // SAFETY: every row is written, for all of its channels and taps.
    unsafe {
        parallel::written(len, at_once * row.max(1), len, |index, rows| {
            let first = index * at_once;
            vectorized(TransposeWeight { weight, sizes, taps, first, rows });
        })
    }
}

/// Rearranges some rows of a weight.
struct TransposeWeight<'a, E: CpuElement> {
    weight: &'a [E],
    /// `o`, `i` and the elements of the kernel, as [`transposed_weight`] names them.
    sizes: [usize; 3],
    taps: &'a [Tap],
    /// The first row.
    first: usize,
    rows: &'a mut [MaybeUninit<E::Acc>],
}

impl<E: CpuElement> Job for TransposeWeight<'_, E> {
    type Result = ();

    #[inline(always)]
    fn run(self) {
        let Self { weight, sizes: [of_group, size, kernel], taps, first, rows } = self;
        let wide = |element: E| MaybeUninit::new(element.widen());
        let pitch = of_group * taps.len();
        let count = rows.len() / pitch.max(1);
        let (group, i) = (first / size, first % size);
        if kernel == 1 && taps.len() == 1 && i + count <= size {
            let weight = &weight[group * of_group * size + i..];
            return transpose(weight, size, [of_group, count], rows, pitch, wide);
        }
        for o in 0..of_group {
            for (number, row) in (first..).zip(rows.chunks_mut(pitch)) {
                let (group, i) = (number / size, number % size);
                let elements = &weight[((group * of_group + o) * size + i) * kernel..][..kernel];
                let row = &mut row[o * taps.len()..][..taps.len()];
                match (elements.as_array::<9>(), row.as_mut_array::<9>()) {
                    // A 3x3 kernel, as a whole.
                    (Some(elements), Some(row)) => *row = elements.map(wide),
                    _ => {
                        let places = row.iter_mut().zip(taps);
                        places.for_each(|(place, tap)| *place = wide(elements[tap.index]));
                    }
                }
            }
        }
    }
}
