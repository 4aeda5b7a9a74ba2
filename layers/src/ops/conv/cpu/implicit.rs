//! Convolutions as products with a matrix that never exists: tiles of it are made in the cache.
//!
//! The matrix has a row per input channel and tap, and a column per point. A tile of it has [`COLUMNS`] points and about
//! [`DEPTH`] rows. Sums are made in the type of sums, whatever the dtype, and rounded once.
//!
//! Beside its results, a thread has a tile of the matrix and the sums of one to some tiles ([`SUMS`]): all threads together have 4 MiB of
//! those, or one tile each, and for every group no more jobs than hold a quarter of input and result, as much as the weight, or 256 KiB
//! together ([`HELD`]). The gradient of a weight has sums of its own size, and a copy for every further part of the points ([`PARTS`]); a
//! transposed convolution, its weight in another order; half precision, its weight in f32. How a gradient of a weight is rounded depends on the number of threads.
use super::{
    Finish,
    geometry::{Phase, Piece, Planes, Span, Tap, Tile, Weighted},
    reader::Reader,
    rows::transpose,
};
use crate::backend::cpu::{
    CpuElement,
    parallel::{self, Job, Work, vectorized},
    product::{COLUMNS, Lanes, MOST_LANES, Rows, Sums, Workspace, add_product, starts},
};
use core::{marker::PhantomData, mem::MaybeUninit, ops::Range, slice};
use std::borrow::Cow;

/// Rows of a tile: 32 KiB of f32, about a first-level cache.
const DEPTH: usize = 128;

/// Sums of tiles that the same rows of a weight are multiplied for: as many as stay in a second-level cache.
const SUMS: usize = 1 << 17;

/// The same of all threads together: 4 MiB of f32.
const SUMS_OF_ALL: usize = 1 << 20;

/// Elements that all threads together may hold of any convolution, however small: 256 KiB of f32.
const HELD: usize = 1 << 16;

/// What is noted of where a column comes from and goes to takes as much as so many sums at most: where lines are of one point.
const RECORDS: usize = 24;

/// Rows of sums that are made before they are written: 6 KiB of f32.
const ROWS_OF_SUMS: usize = 24;

/// At most so many points contribute to the gradient of a weight at once: their columns take up to 40 KiB of f32.
const POINTS: usize = 160;

/// The same, where a thread has few of them: a quarter of its points at once, if these are not fewer.
const FEWEST_POINTS: usize = 32;

/// Rows that are multiplied with one block of columns before the next block is.
const ROWS: usize = 256;

/// Rows of a weight that are rearranged at once: their elements next to one another are on the same pages.
const ROWS_OF_WEIGHT: usize = 32;

/// Multiplications that take as long as reading an element does elsewhere.
const MULTIPLICATIONS: usize = 8;

/// Bytes of gradients of one weight that may be summed beside each other.
const PARTS: usize = 4 << 20;

/// The points of a range of the units of a batch, `per_image` units of each image.
fn pieces(phase: &Phase, units: &Range<usize>, per_image: usize) -> impl Iterator<Item = Piece> {
    let Range { start, end } = *units;
    (start / per_image..end.div_ceil(per_image)).map(move |image| {
        let first = image * per_image;
        let points = |unit: usize| phase.points_of(unit.clamp(first, first + per_image) - first);
        Piece { image, points: points(start)..points(end) }
    })
}

/// `0..units` in ranges of so many.
fn ranges(units: usize, size: usize) -> impl Iterator<Item = Range<usize>> + Clone {
    (0..units).step_by(size).map(move |start| start..(start + size).min(units))
}

/// A part of the result of a convolution: of the channels of a group some units of the batch.
struct Part {
    group: usize,
    units: Range<usize>,
}

/// A result `[batch, channels, plane]` that is not written yet. A reference per image, channel and part would take more than a
/// result of small planes.
struct Unwritten<'a, E> {
    start: *mut MaybeUninit<E>,
    len: usize,
    channels: usize,
    plane: usize,
    result: PhantomData<&'a mut [MaybeUninit<E>]>,
}

// SAFETY: threads only write, each the elements of its own parts.
unsafe impl<E: Send> Sync for Unwritten<'_, E> {}

impl<'a, E> Unwritten<'a, E> {
    fn new(result: &'a mut [MaybeUninit<E>], channels: usize, plane: usize) -> Self {
        Self { start: result.as_mut_ptr(), len: result.len(), channels, plane, result: PhantomData }
    }

    /// So many elements from one on, of the plane of a channel of an image.
    ///
    /// # Safety
    ///
    /// Nobody else reads or writes them meanwhile.
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
    let of_phase =
        |(phase, weight): &Weighted<'_, E::Acc>| Work::of([input.batch(), phase.points(), weight.len()]);
    let work = phases.iter().map(of_phase).sum::<Work>() / MULTIPLICATIONS;
    let plane = phases[0].0.output_plane();
    assert_eq!(
        phases.iter().map(|(phase, _)| phase.points()).sum::<usize>(),
        plane,
        "a phase for every result"
    );
    let len = input.batch() * channels * plane;
    let mut result = Vec::with_capacity(len);
    let unwritten = Unwritten::new(&mut result.spare_capacity_mut()[..len], channels, plane);
    let weights = phases.iter().map(|(_, weight)| weight.len()).sum::<usize>();
    let rows = if phases.iter().all(|(phase, _)| input.size() * phase.taps.len() <= DEPTH) {
        ROWS_OF_SUMS
    } else {
        channels / input.groups
    };
    let most = jobs_to_hold(input.values.len() + len, weights, (DEPTH + rows) * COLUMNS);
    parallel::each(parts(input, &phases[0].0, work, most), work, |part| {
        vectorized(Convolve { part, input, phases, finish, unwritten: &unwritten });
    });
    // SAFETY: the parts are all of the result, and every element of a part is a point of one phase, whose run writes it.
    unsafe { result.set_len(len) };
    result
}

/// How many jobs may hold so many elements each: together a quarter of those of the tensors, and as many as the weight has, or [`HELD`].
fn jobs_to_hold(elements: usize, weights: usize, held: usize) -> usize {
    ((elements / 4 + weights).max(HELD) / held).max(1)
}

/// The result in parts that threads can work on, `most` of them at once.
fn parts<E>(input: Planes<'_, E>, phase: &Phase, work: Work, most: usize) -> Vec<Part> {
    let units = input.batch() * phase.units();
    // Enough tiles to read the weight seldom, but something to do for every thread.
    let smallest = (4 * COLUMNS).div_ceil(phase.points_of(1).max(1));
    let largest = parallel::items_per_thread(units, work);
    let size = parallel::items_per_job(units * input.groups, work).max(smallest).min(largest);
    let size =
        if parallel::threads() > most { size.max((units * input.groups).div_ceil(most)) } else { size };
    let of_group = |group| ranges(units, size).map(move |units| Part { group, units });
    (0..input.groups).flat_map(of_group).collect()
}

/// Computes a part of the result.
struct Convolve<'a, E: CpuElement> {
    part: Part,
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
        let Part { group, ref units } = self.part;
        let (channels, taps) = (self.input.size(), phase.taps.len());
        let size = self.unwritten.channels / self.input.groups;
        let weight = &weight[group * size * channels * taps..];
        let per_tile = (DEPTH / taps.max(1)).clamp(1, channels);
        let row_starts = starts(size, channels * taps);
        let pieces = || pieces(phase, units, phase.units());
        let points: usize = pieces().map(|piece| piece.points.len()).sum();
        // Sums to which no other channels add are written while they are in the first-level cache, some rows after the others.
        let (at_once, some) = match channels <= per_tile {
            true => (1, ROWS_OF_SUMS.min(size)),
            false => {
                let (sums, tile) = (SUMS.min(SUMS_OF_ALL / parallel::threads()), (size + RECORDS) * COLUMNS);
                ((sums / tile).min(points.div_ceil(COLUMNS)).max(1), size)
            }
        };
        let width = points.next_multiple_of(MOST_LANES).min(COLUMNS);
        let mut reader = Reader::new(phase, width, per_tile, size);
        let mut all_tiles = phase.tiles(pieces(), COLUMNS, reader.takes_one_run());
        let mut sums = Workspace::new(at_once * some * COLUMNS);
        loop {
            let tiles: Vec<Tile> = all_tiles.by_ref().take(at_once).collect();
            if tiles.is_empty() {
                return;
            }
            let places: Vec<Vec<Span>> = tiles.iter().map(|tile| phase.targets(&tile.runs)).collect();
            for first in (0..size).step_by(some) {
                let row_starts = &row_starts[first..(first + some).min(size)];
                for start in (0..channels).step_by(per_tile) {
                    let block = start..(start + per_tile).min(channels);
                    let rows = Rows { values: &weight[start * taps..], starts: row_starts };
                    for (tile, sums) in tiles.iter().zip(sums.chunks_exact_mut(some * COLUMNS)) {
                        if first == 0 {
                            reader.read(self.input, group, block.clone(), phase, &tile.runs);
                        }
                        let sums = Sums { values: sums, pitch: COLUMNS, first: start == 0 };
                        add_product(rows, reader.rows(block.len() * taps), tile.width, sums);
                    }
                }
                for (places, sums) in places.iter().zip(sums.chunks_exact_mut(some * COLUMNS)) {
                    let sums = &mut sums[..row_starts.len() * COLUMNS];
                    self.write(phase.step(), places, group * size + first, sums);
                }
            }
        }
    }

    /// Writes the results of a tile from their sums, a row per channel from one on.
    #[inline(always)]
    fn write(&self, step: usize, places: &[Span], first: usize, sums: &mut [E::Acc]) {
        for (channel, sums) in (first..).zip(sums.as_chunks_mut::<COLUMNS>().0) {
            self.finish.apply(channel, sums);
            let values = sums.map(|sum| MaybeUninit::new(E::narrow(sum)));
            for Span { image, start, columns } in places {
                let values = &values[columns.clone()];
                let len = (values.len() - 1) * step + 1;
                // SAFETY: the points of a span lie on one line, or, without steps, on lines one after the other: all of them, and the
                // results of other phases between them, are of this part.
                let results = unsafe { self.unwritten.row(*image, channel, *start, len) };
                match step {
                    1 => results.copy_from_slice(values),
                    step => results.iter_mut().step_by(step).zip(values).for_each(|(y, value)| *y = *value),
                }
            }
        }
    }
}

/// The gradient of the weight of a convolution, a row per channel of `dy`; in it for every channel of the signal's group an
/// element per tap.
pub(super) fn weight_gradient<E: CpuElement>(
    signal: Planes<'_, E>,
    dy: Planes<'_, E>,
    phase: &Phase,
) -> Vec<E> {
    // What is transposed should be little beside what is computed with it.
    let exchanged = phase.is_pointwise() && signal.size() < dy.size();
    let (signal, dy) = if exchanged { (dy, signal) } else { (signal, dy) };
    let (batch, units, groups, taps) = (signal.batch(), phase.units(), signal.groups, phase.taps.len());
    let (rows, columns) = (signal.size() * taps, dy.size());
    let work = Work::of([batch, phase.points(), groups, rows, columns]) / MULTIPLICATIONS;
    let jobs = (batch * units).div_ceil(parallel::items_per_thread(batch * units, work));
    let held = (columns.next_multiple_of(MOST_LANES) + rows.min(ROWS)) * COLUMNS;
    let jobs = jobs.min(jobs_to_hold(signal.values.len() + dy.values.len(), groups * rows * columns, held));
    // The sums of all parts are a quarter of what they are made of at most, and there are no more of them than give every job one.
    let sums = groups * rows * columns.next_multiple_of(MOST_LANES);
    let elements = batch * phase.points() * groups * (signal.size() + dy.size());
    let parts = (PARTS / (sums * size_of::<E::Acc>())).min(elements / (4 * sums));
    let parts = parts.clamp(1, jobs.div_ceil(groups));
    let per_block = signal.size().div_ceil(jobs.div_ceil(parts * groups));

    let mut partials = Vec::new();
    for group in 0..groups {
        for start in (0..signal.size()).step_by(per_block) {
            let channels = start..(start + per_block).min(signal.size());
            let of_part =
                |units| Partial { group, channels: channels.clone(), units, sums: Workspace::new(0) };
            partials.extend(ranges(batch * units, (batch * units).div_ceil(parts)).map(of_part));
        }
    }
    parallel::each(partials.iter_mut().collect(), work, |partial| {
        vectorized(Correlate { partial, signal, dy, phase });
    });

    let (per_group, pitch) = (partials.len() / groups, panel(columns));
    let len = groups * rows * columns;
    let mut gradient = Vec::with_capacity(len);
    let mut jobs = Vec::new();
    let unwritten = &mut gradient.spare_capacity_mut()[..len];
    for (of_group, gradient) in partials.chunks(per_group).zip(unwritten.chunks_mut(rows * columns)) {
        // A panel is some whole rows of the gradient, unless rows and columns are exchanged.
        let size = if exchanged { rows * columns } else { rows * pitch };
        let panels = gradient.chunks_mut(size).enumerate();
        jobs.extend(panels.map(|(panel, gradient)| (of_group, panel, gradient)));
    }
    let narrow = |sum| MaybeUninit::new(E::narrow(sum));
    let assemble = |(of_group, panel, gradient): Panel<'_, E>| {
        for parts in of_group.chunk_by(|a, b| a.channels == b.channels) {
            let (first, count) = (parts[0].channels.start * taps, parts[0].channels.len() * taps);
            let sums = |panel: usize| total(parts, panel * count * pitch..(panel + 1) * count * pitch);
            let width = |panel: usize| (columns - panel * pitch).min(pitch);
            if !exchanged {
                let sizes = [count, width(panel)];
                transpose(&sums(panel), pitch, sizes, &mut gradient[first..], rows, narrow);
                continue;
            }
            for panel in 0..columns.div_ceil(pitch) {
                let gradient_rows = gradient[first * columns..].chunks_mut(columns);
                for (sums, row) in sums(panel).chunks(pitch).zip(gradient_rows) {
                    let row = &mut row[panel * pitch..][..width(panel)];
                    row.iter_mut().zip(sums).for_each(|(element, &sum)| *element = narrow(sum));
                }
            }
        }
    };
    parallel::each(jobs, len, assemble);
    // SAFETY: the panels are all of the gradient, and the channels of the parts all rows of a panel.
    unsafe { gradient.set_len(len) };
    gradient
}

/// A panel of the gradient of a group: the parts of all its panels, its number, and where it is to be written.
type Panel<'a, E> = (&'a [Partial<<E as CpuElement>::Acc>], usize, &'a mut [MaybeUninit<E>]);

/// A range of the sums of all parts.
fn total<A: CpuElement<Acc = A> + Lanes>(parts: &[Partial<A>], range: Range<usize>) -> Cow<'_, [A]> {
    let mut sums = Cow::Borrowed(&parts[0].sums[range.clone()]);
    for part in &parts[1..] {
        let pairs = sums.to_mut().iter_mut().zip(&part.sums[range.clone()]);
        pairs.for_each(|(sum, &part)| *sum = *sum + part);
    }
    sums
}

/// The width of the panels that so many columns are divided into.
fn panel(columns: usize) -> usize {
    columns.next_multiple_of(MOST_LANES).min(COLUMNS)
}

/// A part of the gradient of a weight: from some channels of the signal and some units.
struct Partial<A> {
    group: usize,
    channels: Range<usize>,
    units: Range<usize>,
    /// Per panel of channels of `dy` a row per channel and tap.
    sums: Workspace<A>,
}

/// Computes a part of the gradient.
struct Correlate<'a, E: CpuElement> {
    partial: &'a mut Partial<E::Acc>,
    signal: Planes<'a, E>,
    dy: Planes<'a, E>,
    phase: &'a Phase,
}

impl<E: CpuElement> Job for Correlate<'_, E> {
    type Result = ();

    #[inline(always)]
    fn run(self) {
        self.partial.sum(self.signal, self.dy, self.phase);
    }
}

impl<A: CpuElement<Acc = A> + Lanes> Partial<A> {
    #[inline(always)]
    fn sum<E: CpuElement<Acc = A>>(&mut self, signal: Planes<'_, E>, dy: Planes<'_, E>, phase: &Phase) {
        let (taps, pitch) = (phase.taps.len(), panel(dy.size()));
        let (panels, of_panel) = (dy.size().div_ceil(pitch), self.channels.len() * taps * pitch);
        let width = |panel: usize| (dy.size() - panel * pitch).min(pitch);
        let pieces = || pieces(phase, &self.units, phase.units());
        let total: usize = pieces().map(|piece| piece.points.len()).sum();
        let most = (total / 4).clamp(FEWEST_POINTS, POINTS);
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
                    let sums = Sums { values: &mut sums[first..], pitch, first: false };
                    let columns = Rows { values, starts: &column_starts[..points] };
                    add_product(rows, columns, width(panel), sums);
                }
            }
        }
    }
}

/// The weight `[groups * o, i, kernel]` as a transposed convolution reads it through some taps: `[groups, i, o, taps]`.
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
    // SAFETY: every row is written, for all of its channels and taps.
    unsafe {
        parallel::written(len, ROWS_OF_WEIGHT * row.max(1), len, |index, rows| {
            let first = index * ROWS_OF_WEIGHT;
            vectorized(TransposeWeight { weight, sizes, taps, first, rows });
        })
    }
}

/// Rearranges some rows of a weight.
struct TransposeWeight<'a, E: CpuElement> {
    weight: &'a [E],
    /// Channels of a group, of the rows, and elements of the kernel.
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
                    // A kernel of 3x3, at once.
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
