//! Depthwise convolutions, whose groups have one channel: plane by plane, on a [`Canvas`].
//!
//! Besides its results, a thread holds a band of rows of the canvas: 16 KiB of f32, four times the reach of the kernel, or one row,
//! whichever is largest; but all threads together, no more than a 32nd of input and result, or
//! 128 KiB. With many threads, bands are smaller for that. Where planes are few, they are cut between rows; then a thread may hold 16 KiB.
//!
//! A plane of a single row, as that of a signal, is computed in blocks, which lie on their canvas in the same way, and is cut between them.
use super::{
    Finish,
    canvas::{Band, BandSize, Canvas},
    geometry::{Phase, Planes, Run, Weighted},
};
use crate::backend::cpu::{
    CpuElement,
    parallel::{self, Job, Work, vectorized},
    pieces,
    plan::{Division, Items},
    product::{MOST_LANES, RowsAt, SumRows, Workspace, add_product},
};
use core::{mem::MaybeUninit, ops::Range};

/// What is in the cache at a time.
#[derive(Clone, Copy, Debug)]
pub(super) struct Room {
    pub(super) band: BandSize,
    /// Columns that are summed at once at most.
    stretch: usize,
    /// About how long a convolution takes, in parts of the shortest time: rows that two bands read are laid out twice.
    time: f64,
    /// What every thread may hold in any case.
    of_thread: usize,
}

/// The usual one has sums of 8 KiB of f32. The others are for more threads than could hold so much.
const ROOMS: [Room; 3] = [
    Room { band: BandSize::USUAL, stretch: 1 << 11, time: 1.0, of_thread: 0 },
    Room { band: BandSize { elements: 1 << 10, reaches: 2 }, stretch: 1 << 9, time: 1.1, of_thread: 0 },
    Room { band: BandSize { elements: 0, reaches: 1 }, stretch: 1 << 7, time: 1.25, of_thread: OF_THREAD },
];

/// All threads together hold at most one part in this many of input and result: Burn's kernel holds as little.
const PART: usize = 32;

/// Elements that every thread may hold where not all of them could hold a few rows otherwise: 16 KiB of f32.
const OF_THREAD: usize = 1 << 12;

/// The result `[batch, channels, ...]` of the convolution that phases with their weights describe. A weight has an element per channel
/// and tap.
pub(super) fn convolve<E: CpuElement>(
    input: Planes<'_, E>,
    phases: &[Weighted<'_, E::Acc>],
    finish: Finish<'_, E>,
) -> Vec<E> {
    let plane = phases[0].0.output_plane();
    let planes = input.values.len() / input.plane;
    let of_phase = |(phase, _): &Weighted<'_, E::Acc>| Work::of([planes, phase.points(), phase.taps.len()]);
    let work = phases.iter().map(of_phase).sum::<Work>();
    let points = phases.iter().map(|(phase, _)| phase.points()).sum::<usize>();
    assert_eq!(points, plane, "a phase for every result");
    let laid_out = |results: Range<usize>, room| {
        phases.iter().map(|(phase, _)| LaidOut::new(phase, results.clone(), room)).collect::<Vec<_>>()
    };
    let sizes = Sizes::of(planes, input.plane, phases.iter().map(|(phase, _)| phase));
    let (_, division, (room, first)) = sizes.division(laid_out, work, parallel::threads());
    let step = sizes.step(room);
    let size = match (sizes.block, division) {
        (Some(_), _) => step,
        (None, Division::Whole(_)) => plane,
        (None, Division::Cut(rows)) => (rows * step).min(plane),
    };
    let mut layouts = vec![first];
    match sizes.block {
        Some(_) if plane % step > 0 => layouts.push(laid_out(plane - plane % step..plane, room)),
        None if size < plane => {
            layouts.clear(); // a piece holds less than a plane
            let starts = (0..plane).step_by(size);
            layouts.extend(starts.map(|start| laid_out(start..(start + size).min(plane), room)));
        }
        _ => {}
    }
    let parts = Parts { plane, size, layouts, block: sizes.block.map(|[step, ..]| step) };
    // SAFETY: every element of a plane is a point of one phase, all of whose lines are written.
    unsafe {
        pieces::written_in_pieces(planes * plane, division.chunks(plane, step), work, |start, results| {
            vectorized(Convolve { input, phases, parts: &parts, finish, start, results });
        })
    }
}

/// The parts in which a plane is computed: all of it, pieces of some rows, or if it is a single row, blocks.
struct Parts {
    plane: usize,
    /// Results of a part.
    size: usize,
    /// How every part is laid out, or the first block and the last one, if that is smaller.
    layouts: Vec<Vec<LaidOut>>,
    /// Of blocks: the distance between the results of neighboring points.
    block: Option<usize>,
}

impl Parts {
    /// How the part is laid out that begins with this result, and how many points further along the last axis.
    #[inline(always)]
    fn at(&self, result: usize) -> (&[LaidOut], usize) {
        match self.block {
            None => (&self.layouts[result / self.size], 0),
            Some(step) if result + self.size <= self.plane => (&self.layouts[0], result / step),
            Some(_) => (&self.layouts[1], 0),
        }
    }

    /// How many sums the widest stretch needs.
    fn sums(&self) -> usize {
        self.layouts.iter().flatten().map(LaidOut::sums).max().unwrap_or(0)
    }
}

/// Elements of a convolution: how many planes there are, and the sizes of a plane of the input, and of a plane and a row of the result.
struct Sizes {
    planes: usize,
    plane_in: usize,
    plane: usize,
    row: usize,
    /// If there is a single row: the distances between the results and between the inputs of neighboring points, and the
    /// [reach](Phase::reach) in points.
    block: Option<[usize; 3]>,
}

impl Sizes {
    fn of<'a>(planes: usize, plane_in: usize, phases: impl Iterator<Item = &'a Phase> + Clone) -> Self {
        let first = phases.clone().next().expect("a convolution has a phase");
        let reach = phases.map(Phase::reach).max().unwrap_or(0);
        let block = first.is_one_row().then_some([first.step(), first.stride(), reach]);
        Self { planes, plane_in, plane: first.output_plane(), row: first.output_row().max(1), block }
    }

    /// Results of a step, between which planes are cut: a row, or a block of a single row.
    fn step(&self, room: Room) -> usize {
        self.block
            .map_or(self.row, |[step, stride, reach]| (step * room.block(stride, reach)).min(self.plane))
    }

    /// The loop over planes, if a task holds so many elements, and one of a piece of a plane so many.
    fn items(&self, [held, by_piece]: [usize; 2], room: Room, work: Work, threads: usize) -> Items {
        let &Self { planes, plane_in, plane, .. } = self;
        let may_hold = room.may_hold(planes * (plane_in + plane), threads);
        Items {
            least: parallel::items_to_hold_of(planes, held, may_hold, threads),
            steps: plane.div_ceil(self.step(room)),
            again: usize::from(self.block.is_none()), // rows that two pieces read only have to be laid out; blocks share none
            held: by_piece,
            may_hold,
            ..Items::of([planes, plane], work)
        }
    }

    /// How planes are divided among threads, given how results are laid out: that, what a thread has room for, and how a whole plane or the
    /// first block is laid out.
    fn division(
        &self,
        laid_out: impl Fn(Range<usize>, Room) -> Vec<LaidOut>,
        work: Work,
        threads: usize,
    ) -> (Items, Division, (Room, Vec<LaidOut>)) {
        with_room(threads, |room| {
            let first = if self.block.is_some() { self.step(room) } else { self.plane };
            let laid_out = laid_out(0..first, room);
            let held = laid_out.iter().map(LaidOut::held).max().unwrap_or(0);
            let by_piece = match self.block {
                Some(_) => held,
                None => laid_out.iter().map(|laid_out| laid_out.held_by_piece(room)).max().unwrap_or(0),
            };
            let items = self.items([held, by_piece], room, work, threads);
            (items, items.division(threads), (room, laid_out))
        })
    }
}

impl Room {
    /// Points of a block of a single row, which read every `stride`-th element: a stretch, unless its inputs are many.
    pub(super) fn block(self, stride: usize, reach: usize) -> usize {
        let least = (self.stretch / 32).max(MOST_LANES);
        (2 * self.stretch / stride.max(2)).max(least).max(self.band.reaches * reach)
    }

    /// Elements that so many threads may hold of a convolution of so many elements.
    pub(super) fn may_hold(self, elements: usize, threads: usize) -> usize {
        parallel::elements_to_hold(elements, PART).max(threads * self.of_thread)
    }
}

/// What `of_room` makes of the room with which all threads take the least time. If no thread waits long for others with the best room so far,
/// smaller ones are not compared.
pub(super) fn with_room<T>(
    threads: usize,
    of_room: impl Fn(Room) -> (Items, Division, T),
) -> (Items, Division, T) {
    let time =
        |room: Room, (items, division, _): &(Items, Division, T)| room.time * items.time(*division, threads);
    let mut best = of_room(ROOMS[0]);
    let mut least = time(ROOMS[0], &best);
    for room in &ROOMS[1..] {
        if best.0.is_even(best.1, threads) {
            break;
        }
        let other = of_room(*room);
        if time(*room, &other) < least {
            (least, best) = (time(*room, &other), other);
        }
    }
    best
}

/// How the points of a phase lie on a canvas.
struct LaidOut {
    canvas: Canvas,
    stretches: Vec<Stretch>,
    /// Of every run: where it begins in its stretch, where in the plane of the result, and how many points it has.
    runs: Vec<[usize; 3]>,
    bands: Vec<Band>,
}

/// A stretch: runs of points that lie close together on a canvas. The vector loop takes them as one, with what lies between them.
struct Stretch {
    origin: usize,
    width: usize,
    /// Which of all runs.
    runs: Range<usize>,
}

impl LaidOut {
    /// Of the points of some results: of rows, or of a part of a single row.
    fn new(phase: &Phase, results: Range<usize>, room: Room) -> Self {
        match (phase.is_one_row(), phase.output_row().max(1)) {
            (true, _) => {
                let phase = phase.cut(results);
                Self::of_lines(&phase, phase.lines(), room)
            }
            (false, row) => {
                Self::of_lines(phase, phase.lines_in(results.start / row..results.end / row), room)
            }
        }
    }

    fn of_lines(phase: &Phase, lines: Vec<Run>, Room { band, stretch: most, .. }: Room) -> Self {
        let canvas = Canvas::new(phase);
        let (mut stretches, mut runs): (Vec<Stretch>, Vec<[usize; 3]>) = (Vec::new(), Vec::new());
        for line in lines {
            for first in (0..line.len).step_by(most) {
                let len = (line.len - first).min(most);
                let origin = canvas.origin(&line) + first;
                let target = phase.target(&line) + first * phase.step();
                match stretches.last_mut() {
                    Some(Stretch { origin: start, width, runs: of_stretch })
                        if 4 * (origin - *start - *width) <= len && origin - *start + len <= most =>
                    {
                        *width = origin - *start + len;
                        of_stretch.end += 1;
                        runs.push([origin - *start, target, len]);
                    }
                    _ => {
                        stretches.push(Stretch { origin, width: len, runs: runs.len()..runs.len() + 1 });
                        runs.push([0, target, len]);
                    }
                }
            }
        }
        let places = stretches.iter().map(|stretch| stretch.origin..stretch.origin + stretch.width);
        let bands = canvas.bands(places, band);
        Self { canvas, stretches, runs, bands }
    }

    /// How many elements a thread holds.
    fn held(&self) -> usize {
        let rows = self.bands.iter().map(|band| band.rows.len()).max().unwrap_or(0);
        rows * self.canvas.row() + MOST_LANES + self.sums()
    }

    /// How many elements a thread holds at most if this, of a whole plane, is cut.
    fn held_by_piece(&self, room: Room) -> usize {
        self.held().max(self.canvas.largest(room.band) + MOST_LANES + self.sums())
    }

    /// How many sums the widest stretch needs.
    fn sums(&self) -> usize {
        self.stretches.iter().map(|stretch| stretch.width.next_multiple_of(MOST_LANES)).max().unwrap_or(0)
    }
}

/// Computes the results of some planes, or of a piece of one.
struct Convolve<'a, E: CpuElement> {
    input: Planes<'a, E>,
    phases: &'a [Weighted<'a, E::Acc>],
    parts: &'a Parts,
    finish: Finish<'a, E>,
    /// The number of the first result.
    start: usize,
    results: &'a mut [MaybeUninit<E>],
}

impl<E: CpuElement> Job for Convolve<'_, E> {
    type Result = ();

    #[inline(always)]
    fn run(self) {
        let Self { input, phases, parts, finish, start, results } = self;
        let mut padded = Vec::new();
        let mut sums = Workspace::new(parts.sums());
        let of_planes = results.chunks_mut(parts.plane).flat_map(|results| results.chunks_mut(parts.size));
        let mut next = start;
        for result in of_planes {
            let (number, first) = (next / parts.plane, next % parts.plane);
            next += result.len();
            let (laid_out, shift) = parts.at(first);
            let channel = number % input.channels;
            let input = &input.values[number * input.plane..][..input.plane];
            for ((phase, weight), LaidOut { canvas, stretches, runs, bands }) in phases.iter().zip(laid_out) {
                let offset = first - shift * phase.step();
                let rows = RowsAt { values: &weight[channel * phase.taps.len()..], starts: &[0] };
                for band in bands {
                    let start = band.rows.start * canvas.row();
                    canvas.paint(input, band.rows.clone(), shift, &mut padded);
                    for Stretch { origin, width, runs: numbers } in &stretches[band.items.clone()] {
                        let columns = RowsAt { values: &padded[origin - start..], starts: canvas.taps() };
                        let of_stretch = SumRows { values: &mut sums, pitch: *width, first: true };
                        add_product(rows, columns, *width, of_stretch);
                        finish.apply(channel, &mut sums[..*width]);
                        for &[place, target, len] in &runs[numbers.clone()] {
                            let target = target - offset;
                            let sums =
                                sums[place..][..len].iter().map(|&sum| MaybeUninit::new(E::narrow(sum)));
                            match phase.step() {
                                1 => result[target..].iter_mut().zip(sums).for_each(|(y, sum)| *y = sum),
                                step => {
                                    let results = result[target..].iter_mut().step_by(step);
                                    results.zip(sums).for_each(|(y, sum)| *y = sum);
                                }
                            }
                        }
                    }
                }
            }
        }
    }
}

#[cfg(test)]
pub(crate) mod counting {
    use super::super::geometry::{Axes, Axis};
    use super::*;

    pub(in super::super) fn phase(sides: &[usize], kernel: usize, stride: usize) -> Phase {
        let axis = |&side: &usize| {
            let output = (side + kernel / 2 * 2 - kernel) / stride + 1;
            Axis { input: side, output, kernel, stride, dilation: 1, padding: kernel / 2 }
        };
        Axes::new(&sides.iter().map(axis).collect::<Vec<_>>()).convolution()
    }

    pub(in super::super) fn work(planes: usize, phase: &Phase) -> Work {
        Work::of([planes, phase.points(), phase.taps.len()])
    }

    /// How so many planes of these sizes are divided.
    pub(crate) fn division(
        planes: usize,
        sides: &[usize],
        [kernel, stride]: [usize; 2],
        threads: usize,
    ) -> (Items, Division) {
        let phase = phase(sides, kernel, stride);
        let laid_out = |results, room| vec![LaidOut::new(&phase, results, room)];
        let (work, sizes) =
            (work(planes, &phase), Sizes::of(planes, sides.iter().product(), [&phase].into_iter()));
        let (items, division, (room, first)) = sizes.division(laid_out, work, threads);
        let held = match (sizes.block, division) {
            (None, Division::Cut(rows)) => {
                LaidOut::new(&phase, 0..(rows * sizes.step(room)).min(sizes.plane), room).held()
            }
            _ => first[0].held(),
        };
        (Items { held, ..items }, division)
    }
}
