//! How the result of a convolution is divided among threads: a function of its sizes and the number of threads.
//!
//! A share is some slabs, in some channels of a group. Every share reads the rows of the weight of its channels, and makes the tiles of its
//! slabs: with fewer slabs per share, the weight is read more often, and with fewer channels, more tiles are made. So channels are divided
//! only where slabs alone leave threads idle. The gradient of a weight is divided into partial sums over some slabs, which are added up, and
//! into blocks of channels.
//!
//! What a pass needs besides its result:
//!
//! - A job holds a tile of the matrix and the sums of one or more tiles ([`SUMS`]). The sums of all threads together take at most 4 MiB,
//!   or one tile each. Only so many jobs run at a time, and with more than four threads make the sums of so many tiles, that together
//!   they hold no more elements than the weight and a quarter of input and result (an eighth with several groups), or 256 KiB ([`HELD`]).
//! - The gradient of a weight has sums of its own size, and as many again for every further partial sum ([`PARTIAL_BYTES`]). How it is
//!   rounded depends on the number of threads.
use crate::backend::cpu::{
    parallel::Work,
    product::{COLUMNS, MOST_LANES},
};
use core::ops::Range;

/// Rows of a tile that exist at a time: 32 KiB of f32, about a first-level cache.
pub(super) const DEPTH: usize = 128;

/// Sums, of several tiles, that are made with the same rows of a weight: as many as stay in a second-level cache.
const SUMS: usize = 1 << 17;

/// The same for all threads together: 4 MiB of f32.
const SUMS_OF_ALL: usize = 1 << 20;

/// Threads that may hold the sums of several tiles of any convolution, however small.
const FEW: usize = 4;

/// Elements that all threads together may hold of any convolution, however small: 256 KiB of f32.
const HELD: usize = 1 << 16;

/// The runs and spans of a column take at most as much memory as this many sums, which is so if lines have a single point.
const RECORDS: usize = 24;

/// Rows of sums that are made before they are written: 6 KiB of f32.
const ROWS_OF_SUMS: usize = 24;

/// Channels of a share, at least, where channels are divided.
const FEWEST_CHANNELS: usize = 32;

/// Multiplications that take as long as reading an element in other loops.
const MULTIPLICATIONS: usize = 8;

/// Shares per thread, where there are enough slabs: a thread that ends early takes more of them.
const JOBS_PER_THREAD: usize = 4;

/// Dividing channels must promise to take at most this part of the time: what it costs is known roughly.
const WORTH_DIVIDING: f64 = 0.8;

/// Points that contribute to the gradient of a weight at once, at most: their columns take up to 40 KiB of f32. With fewer, more jobs hold
/// theirs in the same memory.
const POINTS: [usize; 5] = [160, 128, 96, 64, FEWEST_POINTS];

/// The same for a job that has few points: a quarter of its points contribute at once, but no fewer than this.
pub(super) const FEWEST_POINTS: usize = 32;

/// So many jobs may compute the gradient of a weight even where that holds more than [`elements_to_hold`] says.
const FEWEST_JOBS: usize = 4;

/// Rows of a tile that are multiplied with one block of columns before the next block.
pub(super) const ROWS: usize = 256;

/// Bytes of partial sums of one gradient of a weight that may exist at a time.
const PARTIAL_BYTES: usize = 4 << 20;

/// A share: what a job computes of a result, that is, some slabs of the batch, in some channels of a group.
pub(super) struct Share {
    pub(super) group: usize,
    pub(super) channels: Range<usize>,
    pub(super) slabs: Range<usize>,
}

/// The sizes of a convolution.
pub(super) struct Extent {
    pub(super) groups: usize,
    /// Slabs of all images.
    pub(super) slabs: usize,
    /// Of every phase, the points of a slab and the taps.
    pub(super) phases: Vec<[usize; 2]>,
    /// Channels of a group of the input.
    pub(super) input: usize,
    /// Channels of a group of the result.
    pub(super) channels: usize,
    /// Elements of input and result.
    pub(super) elements: usize,
    /// Elements of all weights.
    pub(super) weights: usize,
}

/// The sizes of a share, and how many shares are computed at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Division {
    channels: usize,
    slabs: usize,
    /// Tiles whose sums are made with the same rows of a weight, at most.
    pub(super) tiles: usize,
    pub(super) at_once: usize,
}

impl Extent {
    /// What all shares multiply.
    pub(super) fn work(&self) -> Work {
        let of_phase = |&[points, taps]: &[usize; 2]| {
            Work::of([self.groups, self.slabs, points, taps, self.input, self.channels])
        };
        self.phases.iter().map(of_phase).sum::<Work>() / MULTIPLICATIONS
    }

    /// The division for so many threads.
    pub(super) fn division(&self, threads: usize) -> Division {
        let whole = self.by_slabs(self.channels, threads);
        if threads == 1 || !self.work().is_worth_it() {
            return whole;
        }
        let parts = (1..)
            .map(|doublings| 1 << doublings)
            .take_while(|parts| parts * FEWEST_CHANNELS <= self.channels);
        let time = |division: &Division| self.time(division, threads);
        let divided = parts.map(|parts| self.by_slabs(self.channels.div_ceil(parts), threads));
        let least = divided.min_by(|a, b| time(a).total_cmp(&time(b)));
        least.filter(|least| time(least) <= WORTH_DIVIDING * time(&whole)).unwrap_or(whole)
    }

    /// The division into shares of so many channels.
    fn by_slabs(&self, channels: usize, threads: usize) -> Division {
        let apart = self.groups * self.channels.div_ceil(channels);
        let (threads, jobs) =
            if self.work().is_worth_it() { (threads, JOBS_PER_THREAD * threads) } else { (1, 1) };
        // Enough tiles to read the weight seldom, but something to do for every thread.
        let smallest = (4 * COLUMNS).div_ceil(self.phases[0][0].max(1));
        let largest = (apart / self.groups * self.slabs).div_ceil(threads);
        let slabs = (apart * self.slabs).div_ceil(jobs).max(smallest).min(largest).clamp(1, self.slabs);
        // As many as threads do in whole turns, if that takes less time.
        let turns = apart * self.slabs.div_ceil(slabs) / threads;
        let even = self.slabs.div_ceil((turns * threads / apart).max(1));
        let [division, even] = [slabs, even].map(|slabs| self.holding_little([channels, slabs], threads));
        if self.time(&even, threads) < self.time(&division, threads) { even } else { division }
    }

    /// The division into shares of so many channels and slabs, or of more slabs where fewer shares can be computed at a time than there are
    /// threads: smaller ones would only read the weight more often.
    fn holding_little(&self, [channels, mut slabs]: [usize; 2], threads: usize) -> Division {
        let allowed = elements_to_hold(self.elements, self.groups, self.weights);
        let apart = self.groups * self.channels.div_ceil(channels);
        loop {
            let held = self.held([channels, slabs]);
            let most = (allowed / held).max(1);
            let larger = self.slabs.div_ceil((most / apart).max(1));
            if threads > most && larger > slabs {
                slabs = larger;
                continue;
            }
            let running = threads.min(most).min(apart * self.slabs.div_ceil(slabs));
            let (sums, tile) = (SUMS.min(SUMS_OF_ALL / threads), (channels + RECORDS) * COLUMNS);
            let spare = if threads <= FEW { sums } else { (allowed / running).saturating_sub(held) };
            let tiles = (sums / tile).min(1 + spare / tile).max(1);
            return Division { channels, slabs, tiles, at_once: most };
        }
    }

    /// The elements that a share holds: rows of a tile, and the sums of one.
    fn held(&self, [channels, slabs]: [usize; 2]) -> usize {
        let of_phase = |&[points, taps]: &[usize; 2]| {
            let [per_tile, sums] = at_once(taps, self.input, channels);
            let width = (slabs * points).next_multiple_of(MOST_LANES).min(COLUMNS);
            per_tile * taps * width + (sums + RECORDS) * COLUMNS
        };
        self.phases.iter().map(of_phase).max().unwrap_or(1)
    }

    /// About how long all shares take, in the time to read an element.
    fn time(
        &self,
        &Division { channels, slabs, tiles: most_tiles, at_once: most }: &Division,
        threads: usize,
    ) -> f64 {
        let jobs = self.groups * self.channels.div_ceil(channels) * self.slabs.div_ceil(slabs);
        let of_phase = |&[points, taps]: &[usize; 2]| {
            let points = slabs * points;
            let tiles = points.div_ceil(COLUMNS);
            let in_vectors = points / COLUMNS * COLUMNS + (points % COLUMNS).next_multiple_of(MOST_LANES);
            let passes = match at_once(taps, self.input, channels) {
                [per_tile, _] if per_tile == self.input => tiles,
                _ => tiles.div_ceil(most_tiles),
            };
            (self.input * taps) as f64 * (channels * (in_vectors / MULTIPLICATIONS + passes) + points) as f64
        };
        jobs.div_ceil(most.min(threads)) as f64 * self.phases.iter().map(of_phase).sum::<f64>()
    }

    /// The shares of a division.
    pub(super) fn shares(&self, Division { channels, slabs, .. }: Division) -> impl Iterator<Item = Share> {
        shares(self.groups, [self.channels, channels], [self.slabs, slabs])
    }
}

/// The sizes of the gradient of a weight: for every channel of the signal and tap, a row of sums over all points.
pub(super) struct GradientExtent {
    pub(super) groups: usize,
    /// Slabs of all images.
    pub(super) slabs: usize,
    /// Points of all images.
    pub(super) points: usize,
    /// Channels of a group of the signal.
    pub(super) channels: usize,
    pub(super) taps: usize,
    /// Sums of a row.
    pub(super) columns: usize,
    /// Elements of both tensors.
    pub(super) elements: usize,
    /// Bytes of a sum.
    pub(super) bytes: usize,
}

/// How the gradient of a weight is divided: into partial sums over some slabs, as many as may be held, and each into blocks of channels of the
/// signal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct GradientDivision {
    channels: usize,
    slabs: usize,
    /// Points that contribute to a sum at once, at most.
    pub(super) points: usize,
    pub(super) at_once: usize,
}

impl GradientExtent {
    /// What all shares multiply.
    pub(super) fn work(&self) -> Work {
        Work::of([self.points, self.groups, self.channels * self.taps, self.columns]) / MULTIPLICATIONS
    }

    /// The division for so many threads.
    pub(super) fn division(&self, threads: usize) -> GradientDivision {
        let rows = self.channels * self.taps;
        let jobs = if self.work().is_worth_it() { threads } else { 1 };
        let at_once = |points: usize| {
            let held = (self.columns.next_multiple_of(MOST_LANES) + rows.min(ROWS) + RECORDS) * points;
            (elements_to_hold(self.elements, self.groups, self.groups * rows * self.columns) / held)
                .max(FEWEST_JOBS)
        };
        let points = POINTS.into_iter().find(|&points| at_once(points) >= jobs).unwrap_or(FEWEST_POINTS);
        let at_once = at_once(points);
        let jobs = jobs.min(at_once);
        // All partial sums together are at most a quarter of what they are made of, and no more of them are added up than give every job
        // one.
        let sums = self.groups * rows * self.columns.next_multiple_of(MOST_LANES);
        let elements = self.points * self.groups * (self.channels + self.columns);
        let addends = (PARTIAL_BYTES / (sums * self.bytes)).min(elements / (4 * sums));
        let addends = addends.clamp(1, jobs.div_ceil(self.groups)).min(self.slabs.max(1));
        // A block for every job that is left, unless a few blocks more would take another turn.
        let of_block = addends * self.groups;
        let time = |blocks: usize| (blocks * of_block).div_ceil(jobs) as f64 / blocks as f64;
        let [more, fewer] = [jobs.div_ceil(of_block), (jobs / of_block).max(1)];
        let blocks = if time(fewer) <= time(more) { fewer } else { more };
        let [channels, slabs] = [self.channels.div_ceil(blocks), self.slabs.div_ceil(addends)];
        GradientDivision { channels, slabs, points, at_once }
    }

    /// The shares of a division, those of the same channels one after the other.
    pub(super) fn shares(
        &self,
        GradientDivision { channels, slabs, .. }: GradientDivision,
    ) -> impl Iterator<Item = Share> {
        shares(self.groups, [self.channels, channels], [self.slabs, slabs])
    }
}

/// Shares of so many of all channels of a group and of all slabs.
fn shares(
    groups: usize,
    [all_channels, channels]: [usize; 2],
    [all_slabs, slabs]: [usize; 2],
) -> impl Iterator<Item = Share> {
    let of_channels = move |group, channels: Range<usize>| {
        ranges(all_slabs, slabs).map(move |slabs| Share { group, channels: channels.clone(), slabs })
    };
    (0..groups).flat_map(move |group| {
        ranges(all_channels, channels).flat_map(move |channels| of_channels(group, channels))
    })
}

/// `0..len` in ranges of `size`.
fn ranges(len: usize, size: usize) -> impl Iterator<Item = Range<usize>> {
    (0..len).step_by(size).map(move |start| start..(start + size).min(len))
}

/// Elements that all jobs together may hold: a quarter of those of the tensors and all of the weight, or [`HELD`]. With several groups, an
/// eighth: Burn computes one group after the other, and holds little.
fn elements_to_hold(elements: usize, groups: usize, weights: usize) -> usize {
    let part = if groups == 1 { 4 } else { 8 };
    (elements / part + weights).max(HELD)
}

/// Channels whose rows of a tile exist at a time, and rows of sums that are made before they are written: for a phase with so many taps that
/// reads `channels` per group and makes `size`.
pub(super) fn at_once(taps: usize, channels: usize, size: usize) -> [usize; 2] {
    let per_tile = (DEPTH / taps.max(1)).clamp(1, channels);
    // Sums to which no further channels add are written while they are in the first-level cache, some rows at a time.
    [per_tile, if per_tile == channels { ROWS_OF_SUMS.min(size) } else { size }]
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A convolution of one phase over a square plane, with a kernel of `kernel x kernel`.
    fn extent(
        batch: usize,
        [input, channels]: [usize; 2],
        kernel: usize,
        side: usize,
        groups: usize,
    ) -> Extent {
        let pointwise = kernel == 1;
        let plane = side * side;
        Extent {
            groups,
            slabs: batch * if pointwise { plane } else { side },
            phases: vec![[if pointwise { 1 } else { side }, kernel * kernel]],
            input: input / groups,
            channels: channels / groups,
            elements: batch * plane * (input + channels),
            weights: channels * input / groups * kernel * kernel,
        }
    }

    /// Every channel of every group has every slab in one share.
    fn assert_whole([groups, channels, slabs]: [usize; 3], shares: impl Iterator<Item = Share>, case: &str) {
        let mut seen = vec![0; groups * channels * slabs];
        for share in shares {
            for channel in share.channels {
                let row = (share.group * channels + channel) * slabs;
                seen[row..][share.slabs.clone()].iter_mut().for_each(|seen| *seen += 1);
            }
        }
        assert!(seen.into_iter().all(|times| times == 1), "{case}");
    }

    #[test]
    fn few_shares_wait_for_others() {
        for side in [7, 14, 16, 28, 32, 56] {
            for (batch, kernel) in [(1, 1), (1, 3), (2, 1), (4, 3), (16, 3)] {
                for channels in [[64, 64], [64, 256], [128, 128], [512, 512]] {
                    for threads in [2, 4, 8, 16, 32, 64] {
                        let extent = extent(batch, channels, kernel, side, 1);
                        let division = extent.division(threads);
                        let (shares, at_once) = (extent.shares(division).count(), division.at_once);
                        let case = format!(
                            "{batch} x {channels:?}, {side} x {side}, {threads} threads: {division:?}"
                        );
                        let alone = division.slabs == extent.slabs;
                        assert!(at_once >= threads || shares <= at_once || alone, "{case}: {shares} shares");
                        let of_share = extent.held([division.channels, division.slabs])
                            + (division.tiles - 1) * (division.channels + RECORDS) * COLUMNS;
                        let held = of_share * shares.min(at_once).min(threads);
                        let allowed = elements_to_hold(extent.elements, 1, extent.weights);
                        let few = threads <= FEW || shares.min(at_once) == 1;
                        assert!(held <= allowed || few, "{case}: {held} of {allowed}");
                    }
                }
            }
        }
    }

    #[test]
    fn shares_are_the_whole_result_once() {
        for (channels, groups) in
            [([3, 64], 1), ([64, 100], 1), ([512, 512], 1), ([128, 256], 4), ([8, 8], 8)]
        {
            for (batch, side) in [(1, 1), (1, 14), (3, 7), (16, 30)] {
                for threads in [1, 2, 4, 16, 64, 256] {
                    let extent = extent(batch, channels, 3, side, groups);
                    let shares = extent.shares(extent.division(threads));
                    let case = format!("{channels:?}, {threads} threads");
                    assert_whole([extent.groups, extent.channels, extent.slabs], shares, &case);
                }
            }
        }
    }

    /// How much longer so many threads take than if each had an equal part of all channels and slabs; a share has so many of them.
    fn imbalance(all: usize, of_share: usize, shares: usize, at_once: usize, threads: usize) -> f64 {
        (shares.div_ceil(at_once.min(threads)) * of_share * threads) as f64 / all as f64
    }

    /// Small planes of many channels, as in the last layers of networks: images alone would leave most threads idle.
    #[test]
    fn few_points_of_many_channels_keep_all_threads_busy() {
        for (batch, channels, kernel, side) in
            [(2, [512, 512], 3, 7), (32, [512, 512], 3, 7), (1, [1024, 1024], 1, 14), (1, [512, 2048], 1, 10)]
        {
            for threads in [1, 2, 4, 8, 16, 32, 64] {
                let extent = extent(batch, channels, kernel, side, 1);
                let division = extent.division(threads);
                let [alone, divided] = [extent.by_slabs(extent.channels, threads), division].map(|of| {
                    let (all, of_share) = (extent.channels * extent.slabs, of.channels * of.slabs);
                    imbalance(all, of_share, extent.shares(of).count(), of.at_once, threads)
                });
                let case =
                    format!("{batch} x {channels:?}, {side} x {side}, {threads} threads: {division:?}");
                assert!(divided <= 1.25, "{case}: {divided}");
                assert!(divided <= alone, "{case}: {divided}, without dividing channels {alone}");
            }
        }
    }

    /// The gradient of the weight of a convolution as [`extent`] makes it.
    fn gradient(
        batch: usize,
        [input, columns]: [usize; 2],
        kernel: usize,
        side: usize,
        groups: usize,
    ) -> GradientExtent {
        let Extent { slabs, elements, input: channels, .. } =
            extent(batch, [input, columns], kernel, side, groups);
        let (points, columns) = (batch * side * side, columns / groups);
        GradientExtent { groups, slabs, points, channels, taps: kernel * kernel, columns, elements, bytes: 4 }
    }

    #[test]
    fn partial_sums_are_over_every_slab_and_channel_once() {
        for (channels, groups) in [([3, 64], 1), ([512, 512], 1), ([128, 256], 4), ([96, 96], 32)] {
            for (batch, side) in [(1, 1), (1, 14), (3, 7), (16, 30)] {
                for threads in [1, 2, 4, 16, 64, 256] {
                    let extent = gradient(batch, channels, 3, side, groups);
                    let division = extent.division(threads);
                    let case = format!("{channels:?}, {threads} threads: {division:?}");
                    assert_whole([groups, extent.channels, extent.slabs], extent.shares(division), &case);
                }
            }
        }
    }

    /// With 64 threads, before blocks were divided as finely as this: 16, 4.6, 6.4, 12.8 and 6.
    #[test]
    fn gradients_of_weights_keep_threads_busy() {
        for (batch, channels, kernel, side, groups, bounds) in [
            (1, [64, 64], 3, 56, 1, [1.0, 1.4, 5.5]),
            (2, [512, 512], 3, 7, 1, [1.0, 1.0, 1.0]),
            (8, [2048, 512], 1, 7, 1, [1.0, 1.0, 1.3]),
            (4, [1024, 256], 1, 14, 1, [1.0, 1.0, 2.3]),
            (8, [96, 96], 3, 28, 32, [1.0, 1.0, 1.0]),
        ] {
            for (threads, bound) in [4, 16, 64].into_iter().zip(bounds) {
                let extent = gradient(batch, channels, kernel, side, groups);
                let division = extent.division(threads);
                let (all, of_share) =
                    (groups * extent.channels * extent.slabs, division.channels * division.slabs);
                let shares = extent.shares(division).count();
                let imbalance = imbalance(all, of_share, shares, division.at_once, threads);
                assert!(
                    imbalance <= bound,
                    "{channels:?}, {side} x {side}, {threads} threads: {imbalance}, {division:?}"
                );
            }
        }
    }

    /// Nothing is divided that need not be: two threads have enough slabs, and little work stays on one thread.
    #[test]
    fn channels_stay_together_where_slabs_are_enough() {
        for (batch, channels, kernel, side, threads) in [
            (8, [64, 64], 3, 56, 2),
            (1, [256, 256], 3, 14, 2),
            (32, [64, 64], 3, 56, 64),
            (1, [64, 64], 1, 8, 64),
            (1, [1024, 1024], 1, 14, 1),
        ] {
            let extent = extent(batch, channels, kernel, side, 1);
            assert_eq!(
                extent.division(threads).channels,
                channels[1],
                "{channels:?}, {side} x {side}, {threads} threads"
            );
        }
    }
}
