//! Sums over the channels of `[batch, channels, ...]`, and loops that change them.
//!
//! Both divide the elements of a channel, too: a single image of few channels keeps all threads busy.
use super::{
    CpuElement,
    elementwise::Update,
    parallel::{self, Job, vectorized},
    sums::{Sum, SumOfNear},
};
use burn::tensor::Shape;
use core::ops::Range;

/// The most elements of a channel whose sum is a part of its own. Parts follow from the shape only, so that sums do not depend on the
/// number of threads.
const PART: usize = 1 << 15;

/// The same where a channel has one element per item: the moments of a further part are 5 % of its elements at most.
const PART_OF_ROWS: usize = 1 << 9;

/// Elements of a channel in a block, at least, if there are as many.
const FEWEST_OF_BLOCK: usize = 64;

/// A tensor `[batch, channels, inner]`.
pub(crate) struct Channels<'a, E> {
    pub(crate) values: &'a [E],
    pub(crate) channels: usize,
    pub(crate) inner: usize,
}

/// What is summed over the elements of a channel.
pub(crate) trait Terms<const N: usize>: Sync {
    /// The sums over consecutive elements of a channel.
    fn of_plane(&self, channel: usize, elements: Range<usize>) -> [f64; N];

    /// Adds the terms of consecutive elements to `sums`, where they belong to consecutive channels, from the first one given on.
    fn add_row(&self, first: usize, elements: Range<usize>, sums: &mut [[f64; N]]);
}

/// The elements.
struct Values<'a, E>(&'a [E]);

impl<E: CpuElement> Terms<1> for Values<'_, E> {
    fn of_plane(&self, _: usize, elements: Range<usize>) -> [f64; 1] {
        [vectorized(Sum { values: &self.0[elements], f: |x: E| x.widen() })]
    }

    #[inline(always)]
    fn add_row(&self, _: usize, elements: Range<usize>, sums: &mut [[f64; 1]]) {
        for ([sum], x) in sums.iter_mut().zip(&self.0[elements]) {
            *sum += x.widen().into_f64();
        }
    }
}

/// The elements, nearly the same in a channel: see [`SumOfNear`].
struct Near<'a, E>(&'a [E]);

impl<E: CpuElement> Terms<1> for Near<'_, E> {
    fn of_plane(&self, _: usize, elements: Range<usize>) -> [f64; 1] {
        [vectorized(SumOfNear(&self.0[elements]))]
    }

    #[inline(always)]
    fn add_row(&self, first: usize, elements: Range<usize>, sums: &mut [[f64; 1]]) {
        Values(self.0).add_row(first, elements, sums);
    }
}

/// `(x - mean)^2`, with the means of the channels from the `first` on.
struct Squares<'a, E: CpuElement> {
    values: &'a [E],
    means: &'a [E::Acc],
    first: usize,
}

impl<E: CpuElement> Terms<1> for Squares<'_, E> {
    fn of_plane(&self, channel: usize, elements: Range<usize>) -> [f64; 1] {
        let mean = self.means[channel - self.first];
        let f = |x: E| (x.widen() - mean) * (x.widen() - mean);
        [vectorized(Sum { values: &self.values[elements], f })]
    }

    #[inline(always)]
    fn add_row(&self, first: usize, elements: Range<usize>, sums: &mut [[f64; 1]]) {
        let means = &self.means[first - self.first..];
        for (([sum], x), &mean) in sums.iter_mut().zip(&self.values[elements]).zip(means) {
            *sum += ((x.widen() - mean) * (x.widen() - mean)).into_f64();
        }
    }
}

impl<'a, E: CpuElement> Channels<'a, E> {
    pub(crate) fn of(values: &'a [E], shape: &Shape) -> Self {
        Self { values, channels: shape[1], inner: shape[2..].iter().product() }
    }

    pub(crate) fn shape(&self) -> Shape {
        Shape::new([self.count() / self.inner.max(1), self.channels, self.inner])
    }

    /// Elements per channel.
    pub(crate) fn count(&self) -> usize {
        self.values.len() / self.channels.max(1)
    }

    /// The sum of every channel.
    pub(crate) fn sums(&self) -> Vec<f64> {
        self.reduce(&Values(self.values)).into_iter().map(|[sum]| sum).collect()
    }

    /// For every channel, the sums of `terms` over its elements.
    pub(crate) fn reduce<const N: usize>(&self, terms: &impl Terms<N>) -> Vec<[f64; N]> {
        let of_part = |part: &Part, first, sums: &mut [[f64; N]]| self.add_part(part, first, terms, sums);
        self.by_parts([0.0; N], of_part, add)
    }

    /// The moments of every channel.
    pub(crate) fn moments(&self) -> Vec<ChannelMoments> {
        let of_part =
            |part: &Part, first, moments: &mut [ChannelMoments]| self.add_moments(part, first, moments);
        self.by_parts(ChannelMoments::default(), of_part, ChannelMoments::merge)
    }

    /// For every channel, the sum by `merge` of what `add_part(part, first, sums)` adds of each of its parts; it is called with sums of
    /// consecutive channels from the `first` on, which are `zero` at first.
    fn by_parts<S: Copy + Send + Sync>(
        &self,
        zero: S,
        add_part: impl Fn(&Part, usize, &mut [S]) + Send + Sync,
        merge: impl Fn(&mut S, S),
    ) -> Vec<S> {
        if self.values.is_empty() {
            return vec![zero; self.channels];
        }
        let parts = Parts::of(self);
        // Part by part, so that consecutive sums are of consecutive channels.
        let count = parts.count * self.channels;
        let size = parallel::items_per_job(count, self.values.len());
        let jobs = parallel::map_ranges(count, size, |range| {
            let mut sums = vec![zero; range.len()];
            for part in range.start / self.channels..range.end.div_ceil(self.channels) {
                let first = part * self.channels;
                let of_part = range.start.max(first)..range.end.min(first + self.channels);
                let sums = &mut sums[of_part.start - range.start..of_part.end - range.start];
                add_part(&parts.part(part), of_part.start - first, sums);
            }
            sums
        });
        let mut sums = jobs.into_iter().flatten();
        let mut totals: Vec<_> = sums.by_ref().take(self.channels).collect();
        for (index, part) in sums.enumerate() {
            merge(&mut totals[index % self.channels], part);
        }
        totals
    }

    /// Adds a part of the elements of consecutive channels, from the `first` on.
    #[inline(always)]
    fn add_part<const N: usize>(
        &self,
        Part { items, elements }: &Part,
        first: usize,
        terms: &impl Terms<N>,
        sums: &mut [[f64; N]],
    ) {
        if self.inner == 1 {
            let starts = items.clone().map(|item| item * self.channels + first);
            return vectorized(AddRows { starts, first, terms, sums });
        }
        for item in items.clone() {
            let start = (item * self.channels + first) * self.inner;
            for (channel, sums) in sums.iter_mut().enumerate() {
                let start = start + channel * self.inner;
                add(sums, terms.of_plane(first + channel, start + elements.start..start + elements.end));
            }
        }
    }

    /// Adds the moments of a part of consecutive channels, from the `first` on. It reads every element twice, but the second time from the
    /// cache.
    fn add_moments(&self, part: &Part, first: usize, moments: &mut [ChannelMoments]) {
        let (mut sums, mut squares, mut means) = (Vec::new(), Vec::new(), Vec::new());
        for (part, channels) in self.blocks(part, moments.len()) {
            let (first, moments) = (first + channels.start, &mut moments[channels]);
            let count = (part.items.len() * part.elements.len()) as f64;
            for sums in [&mut sums, &mut squares] {
                sums.clear();
                sums.resize(moments.len(), [0.0]);
            }
            self.add_part(&part, first, &Near(self.values), &mut sums);
            means.clear();
            means.extend(sums.iter().map(|[sum]| <E::Acc as CpuElement>::from_f64(sum / count)));
            self.add_part(&part, first, &Squares { values: self.values, means: &means, first }, &mut squares);
            for ((moments, &[sum]), &[squares]) in moments.iter_mut().zip(&sums).zip(&squares) {
                moments.merge(ChannelMoments { count, sum, squares });
            }
        }
    }

    /// A part of consecutive channels in blocks that fit into the cache: items whose rows are as long as the whole, and where these are
    /// long, some channels of them. An item's planes lie side by side, so that blocks are read in order; but every block has 64 elements
    /// of a channel at least, because its moments have to be merged. Items follow from the shape only.
    fn blocks(&self, part: &Part, channels: usize) -> impl Iterator<Item = (Part, Range<usize>)> {
        let Part { items, elements } = part.clone();
        let most_items = (PART / (self.channels * self.inner)).max(FEWEST_OF_BLOCK.div_ceil(self.inner));
        let most_channels = match self.inner {
            1 => channels,
            _ => (PART / (most_items.min(items.len()) * elements.len())).max(1),
        };
        chunks(items, most_items).flat_map(move |items| {
            let part = Part { items, elements: elements.clone() };
            chunks(0..channels, most_channels).map(move |channels| (part.clone(), channels))
        })
    }
}

/// The parts of a range, of `size` each.
fn chunks(range: Range<usize>, size: usize) -> impl Iterator<Item = Range<usize>> {
    range.clone().step_by(size).map(move |start| start..range.end.min(start + size))
}

/// Adds the terms of rows, which begin at `starts`.
struct AddRows<'a, S, T, const N: usize> {
    starts: S,
    first: usize,
    terms: &'a T,
    sums: &'a mut [[f64; N]],
}

impl<S: Iterator<Item = usize>, T: Terms<N>, const N: usize> Job for AddRows<'_, S, T, N> {
    type Result = ();

    #[inline(always)]
    fn run(self) {
        let Self { starts, first, terms, sums } = self;
        for start in starts {
            terms.add_row(first, start..start + sums.len(), sums);
        }
    }
}

/// What mean and variance follow from.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct ChannelMoments {
    count: f64,
    sum: f64,
    /// The sum of squared distances from the mean.
    squares: f64,
}

impl ChannelMoments {
    pub(crate) fn mean(&self) -> f64 {
        self.sum / self.count
    }

    /// Biased.
    pub(crate) fn variance(&self) -> f64 {
        self.squares / self.count
    }

    /// The moments of both, by the formula of Chan, Golub and LeVeque, which loses no digits where the mean is large.
    fn merge(&mut self, other: Self) {
        if self.count == 0.0 {
            *self = other;
            return;
        }
        let count = self.count + other.count;
        let distance = self.mean() - other.mean();
        let between = distance * distance * self.count * (other.count / count);
        *self = Self { count, sum: self.sum + other.sum, squares: self.squares + other.squares + between };
    }
}

pub(crate) fn add<const N: usize>(sums: &mut [f64; N], terms: [f64; N]) {
    sums.iter_mut().zip(terms).for_each(|(sum, term)| *sum += term);
}

/// How the elements of each channel are divided: into planes of some items, or where planes are large, into pieces of planes.
struct Parts {
    batch: usize,
    inner: usize,
    /// Items of a part.
    items: usize,
    /// Elements of a part in a plane.
    elements: usize,
    count: usize,
}

#[derive(Clone)]
struct Part {
    items: Range<usize>,
    /// Those in the plane of each item.
    elements: Range<usize>,
}

impl Parts {
    fn of<E: CpuElement>(Channels { values, channels, inner }: &Channels<E>) -> Self {
        let (channels, inner) = (*channels, *inner);
        let batch = values.len() / (channels * inner);
        // Of even sizes.
        let even = |len: usize, most: usize| len.div_ceil(len.div_ceil(most));
        let items = even(batch, if inner == 1 { PART_OF_ROWS } else { PART.div_ceil(inner) });
        let elements = even(inner, PART);
        Self { batch, inner, items, elements, count: batch.div_ceil(items) * inner.div_ceil(elements) }
    }

    fn part(&self, part: usize) -> Part {
        let of_plane = self.inner.div_ceil(self.elements);
        let range = |index: usize, size: usize, len: usize| index * size..((index + 1) * size).min(len);
        Part {
            items: range(part / of_plane, self.items, self.batch),
            elements: range(part % of_plane, self.elements, self.inner),
        }
    }
}

/// Replaces every element of a channel by `f(parameters, element)`, rounded once.
pub(crate) fn map_channels<E: CpuElement, P: Sync>(
    values: &mut [E],
    shape: &Shape,
    parameters: &[P],
    f: impl Fn(&P, E::Acc) -> E::Acc + Copy + Send + Sync,
) {
    let runs = Runs::of(shape);
    runs.each_mut(values, |_, channel, x| map_run(x, runs, channel, parameters, f));
}

/// The same of a run, which begins with a channel.
#[inline(always)]
pub(crate) fn map_run<E: CpuElement, P>(
    x: &mut [E],
    runs: Runs,
    channel: usize,
    parameters: &[P],
    f: impl Fn(&P, E::Acc) -> E::Acc,
) {
    if runs.inner == 1 {
        let each = x.iter_mut().zip(&parameters[channel..]);
        each.for_each(|(x, parameters)| *x = E::narrow(f(parameters, x.widen())));
    } else {
        let parameters = &parameters[channel];
        vectorized(Update { x, f: |x| f(parameters, x) });
    }
}

/// Divides a tensor `[batch, channels, inner]` into runs: a plane or a piece of one, or if `inner` is 1, consecutive channels of one item.
#[derive(Clone, Copy)]
pub(crate) struct Runs {
    channels: usize,
    pub(crate) inner: usize,
}

impl Runs {
    /// Of `[batch, channels, ...]`.
    pub(crate) fn of(shape: &Shape) -> Self {
        Self { channels: shape[1], inner: shape[2..].iter().product() }
    }

    /// Elements of a run that is not cut.
    fn len(self) -> usize {
        if self.inner == 1 { self.channels } else { self.inner }
    }

    /// How many of `len` elements a task should take. Runs are cut only where they are larger.
    pub(crate) fn per_task(self, len: usize) -> usize {
        self.per_chunk(parallel::items_per_task(len, 1))
    }

    /// How many elements a chunk of at most `most` elements should have.
    pub(crate) fn per_chunk(self, most: usize) -> usize {
        let run = self.len();
        if run == 0 || run > most { most } else { most - most % run }
    }

    /// Calls `f(start, channel, run)` for every run, `start` being the position of its first element, and `channel` the channel.
    pub(crate) fn each_mut<E: Send>(
        self,
        values: &mut [E],
        f: impl Fn(usize, usize, &mut [E]) + Send + Sync,
    ) {
        let (len, task) = (values.len(), self.per_task(values.len()));
        parallel::chunks_mut(values, task, len, |index, chunk| self.each_of(index * task, chunk, &f));
    }

    /// [`each_mut`](Self::each_mut) of a chunk that begins at `start`.
    #[inline(always)]
    pub(crate) fn each_of<E>(self, start: usize, chunk: &mut [E], mut f: impl FnMut(usize, usize, &mut [E])) {
        let run = self.len();
        let (mut at, mut rest) = (start, chunk);
        let mut channel = if self.inner == 1 { at % self.channels } else { at / self.inner % self.channels };
        let mut next = (run - at % run).min(rest.len());
        while !rest.is_empty() {
            let (values, after) = rest.split_at_mut(next);
            f(at, channel, values);
            channel = if self.inner == 1 || channel + 1 == self.channels { 0 } else { channel + 1 };
            (at, next, rest) = (at + next, run.min(after.len()), after);
        }
    }
}

#[cfg(all(test, feature = "rayon"))]
mod tests {
    use super::*;

    const SHAPES: [[usize; 3]; 8] = [
        [1, 3, 2 * PART + 5],
        [2, 1, PART + 1],
        [70, 3, 1000],
        [3, 5, 7],
        [2 * PART_OF_ROWS + 3, 70, 1],
        [1, PART + 7, 1],
        [0, 3, 4],
        [2, 3, 0],
    ];

    fn values(shape: [usize; 3]) -> Vec<f32> {
        (0..shape.iter().product()).map(|at| ((at * 7919) % 1021) as f32 - 500.0).collect()
    }

    #[test]
    fn sums_are_those_of_the_channels_whatever_the_number_of_threads() {
        for shape in SHAPES {
            let [_, channels, inner] = shape;
            let values = values(shape);
            // These are integers, so that sums in any order are exact.
            let mut expected = vec![0.0; channels];
            values.iter().enumerate().for_each(|(at, &x)| expected[at / inner % channels] += f64::from(x));
            let thirds: Vec<f32> = values.iter().map(|x| x / 3.0).collect();
            let sums = |values: &[f32], threads| {
                parallel::pool(threads).install(|| Channels::of(values, &Shape::new(shape)).sums())
            };
            let of_thirds = sums(&thirds, 1);
            for threads in [1, 2, 4, 16, 64] {
                assert_eq!(sums(&values, threads), expected, "{shape:?}, {threads} threads");
                assert_eq!(sums(&thirds, threads), of_thirds, "{shape:?}, {threads} threads");
            }
        }
    }

    #[test]
    fn moments_are_those_of_the_channels_whatever_the_number_of_threads() {
        for shape in SHAPES.into_iter().chain([[300, 70, 4], [64, 5, 49], [900, 3, 1]]) {
            let [_, channels, inner] = shape;
            let values: Vec<f32> = values(shape).iter().map(|x| x / 3.0 + 1e3).collect();
            let moments = |threads| {
                let moments =
                    parallel::pool(threads).install(|| Channels::of(&values, &Shape::new(shape)).moments());
                moments.iter().flat_map(|of| [of.mean(), of.variance()]).map(f64::to_bits).collect::<Vec<_>>()
            };
            let found = moments(1);
            for threads in [2, 4, 16, 64] {
                assert_eq!(moments(threads), found, "{shape:?}, {threads} threads");
            }
            let of_channels = |f: &dyn Fn(usize, f64) -> f64| {
                let mut sums = vec![0.0; channels];
                for (at, &x) in values.iter().enumerate() {
                    let channel = at / inner % channels;
                    sums[channel] += f(channel, f64::from(x));
                }
                let count = (values.len() / channels) as f64;
                sums.into_iter().map(|sum| sum / count).collect::<Vec<f64>>()
            };
            let means = of_channels(&|_, x| x);
            let variances = of_channels(&|channel, x| (x - means[channel]).powi(2));
            let exact = means.iter().zip(&variances).flat_map(|(&mean, &variance)| [mean, variance]);
            for (found, exact) in found.iter().map(|&bits| f64::from_bits(bits)).zip(exact) {
                let near = (found - exact).abs() <= 1e-5 * exact;
                assert!(near || values.is_empty(), "{shape:?}: {found} instead of {exact}");
            }
        }
    }

    #[test]
    fn every_element_is_in_one_run_of_its_channel() {
        for shape in SHAPES {
            let [_, channels, inner] = shape;
            let len = shape.iter().product::<usize>();
            for threads in [1, 3, 64] {
                let mut seen = vec![usize::MAX; len];
                parallel::pool(threads).install(|| {
                    Runs::of(&Shape::new(shape)).each_mut(&mut seen, |start, channel, run| {
                        for (at, seen) in run.iter_mut().enumerate() {
                            let channel = if inner == 1 { channel + at } else { channel };
                            assert_eq!(((start + at) / inner % channels, *seen), (channel, usize::MAX));
                            *seen = start + at;
                        }
                    });
                });
                assert!(seen.into_iter().eq(0..len), "{shape:?}, {threads} threads");
            }
        }
    }
}
