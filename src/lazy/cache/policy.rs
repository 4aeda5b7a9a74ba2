//! Decides which weights stay in memory, and which one is read next. Weights are used in cycles (pass after pass over a model), so the one
//! used most recently is needed last. The best weight to evict is the one whose next use is farthest away (Belady's algorithm), in the
//! order that was [learned](super::order).
//!
//! When a weight is used, the order says when it is used again. That time stays as it is until the next use, also where the order turns out
//! to be another one, so a use changes the place of one weight only. A weight whose time has passed is less and less likely to be used: it
//! is as far away as its time is, ahead or past.
use super::order::Expected;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

/// How full the memory is.
#[derive(Clone, Copy, Debug)]
pub(super) struct Room {
    pub budget: usize,
    /// Bytes that are held, by the cache or by anybody else.
    pub held: usize,
}

impl Room {
    pub fn fits(self, len: usize) -> bool {
        self.missing(len) == 0
    }

    /// The bytes that must become free before `len` bytes fit.
    pub fn missing(self, len: usize) -> usize {
        self.held.saturating_add(len).saturating_sub(self.budget)
    }
}

/// The weights that nobody but the cache holds, and the bytes that evicting them frees. In each method, weights that are expected at the
/// `protected` times stay.
#[derive(Debug, Default)]
pub(super) struct Idle {
    weights: BTreeMap<Expected, usize>,
    bytes: usize,
}

impl Idle {
    pub fn insert(&mut self, weight: Expected, bytes: usize) {
        self.bytes += bytes;
        self.weights.insert(weight, bytes);
    }

    /// Removes a weight, and returns its bytes, if it is here.
    pub fn remove(&mut self, weight: Expected) -> Option<usize> {
        let bytes = self.weights.remove(&weight)?;
        self.bytes -= bytes;
        Some(bytes)
    }

    /// The weight to evict: the one whose expected use is farthest from `now`.
    pub fn farthest(&self, now: u64, protected: &Range<u64>) -> Option<Expected> {
        let [first, last] = [self.weights.first_key_value(), self.weights.last_key_value()];
        let ends = [first, last].into_iter().flatten().map(|(weight, _)| *weight);
        ends.filter(|end| !protected.contains(&end.time)).max_by_key(|end| now.abs_diff(end.time))
    }

    /// Whether this many bytes are free once what may be evicted is evicted. Where one weight is not enough, this looks at all that stay, a
    /// few per protected use.
    pub fn can_free(&self, bytes: usize, now: u64, protected: &Range<u64>) -> bool {
        let farthest = || self.farthest(now, protected).and_then(|farthest| self.weights.get(&farthest));
        bytes == 0
            || farthest().is_some_and(|&first| {
                first >= bytes || self.bytes - self.staying(protected).sum::<usize>() >= bytes
            })
    }

    fn staying(&self, protected: &Range<u64>) -> impl Iterator<Item = usize> + '_ {
        let at = |time| Expected { time, weight: 0 };
        let end = protected.end.max(protected.start);
        self.weights.range(at(protected.start)..at(end)).map(|(_, bytes)| *bytes)
    }
}

/// Where a weight is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Residence {
    Absent,
    /// A thread is reading it.
    Reading,
    Present,
    /// Of this table only rows are read.
    ByRows,
}

/// What is known of the next uses.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Ahead {
    /// The weights that are present, in the order of their uses, until the one to read.
    pub present: Vec<Expected>,
    /// The weight to read.
    pub read: Option<Expected>,
}

/// The most uses that are looked at to find what to read ahead, unless more weights are read ahead.
const LOOKED_AT: usize = 256;

/// Finds the weight to read ahead: the first of the next `prefetch` ones that is absent, but none while an earlier one is still being read.
pub(super) fn to_read_ahead(
    upcoming: impl Iterator<Item = Expected>,
    prefetch: usize,
    residence: impl Fn(usize) -> Residence,
) -> Ahead {
    let (mut ahead, mut seen) = (Ahead::default(), BTreeSet::new());
    for next in upcoming.take(LOOKED_AT.max(prefetch)) {
        if seen.len() == prefetch {
            break;
        }
        match residence(next.weight) {
            Residence::ByRows => (),
            Residence::Reading => break,
            Residence::Present if !seen.insert(next.weight) => (),
            Residence::Present => ahead.present.push(next),
            Residence::Absent => {
                ahead.read = Some(next);
                break;
            }
        }
    }
    ahead
}

#[cfg(test)]
mod tests {
    use super::super::order::{Order, tests::Plain};
    use super::*;
    use proptest::prelude::*;
    use std::cell::Cell;
    use std::collections::HashMap;

    /// Weights of ten bytes, and when they are expected.
    fn idle(weights: &[(usize, u64)]) -> Idle {
        let mut idle = Idle::default();
        weights.iter().for_each(|&(weight, time)| idle.insert(Expected { time, weight }, 10));
        idle
    }

    /// What is evicted one after the other.
    fn evicted(mut idle: Idle, now: u64, protected: Range<u64>) -> Vec<usize> {
        let mut evicted = vec![];
        while let Some(farthest) = idle.farthest(now, &protected) {
            assert_eq!(idle.remove(farthest), Some(10));
            evicted.push(farthest.weight);
        }
        evicted
    }

    #[test]
    fn what_is_used_last_is_evicted_first() {
        assert_eq!(evicted(idle(&[(0, 11), (1, 13), (2, 10), (3, 12)]), 10, 0..0), [1, 3, 0, 2]);
        assert_eq!(
            evicted(idle(&[(0, 11), (7, u64::MAX)]), 10, 0..0),
            [7, 0],
            "what nobody expects before all"
        );
        assert_eq!(
            evicted(idle(&[(0, 4), (1, 13), (2, 8)]), 10, 0..0),
            [0, 1, 2],
            "what was expected long ago"
        );
    }

    #[test]
    fn reading_ahead_evicts_nothing_that_is_used_before() {
        let weights = || idle(&[(0, 11), (1, 13), (2, 10), (3, 12), (4, 8)]);
        assert_eq!(evicted(weights(), 10, 10..12), [1, 3, 4]);
        assert_eq!(evicted(weights(), 10, 8..13), [1], "what was expected before may still be used");
        for protected in (7..12).flat_map(|start| (start..15).map(move |end| start..end)) {
            let evictable = 10 * evicted(weights(), 10, protected.clone()).len();
            for bytes in 0..60 {
                let can_free = weights().can_free(bytes, 10, &protected);
                assert_eq!(can_free, bytes <= evictable, "{bytes}, {protected:?}");
            }
        }
        let room = Room { budget: 50, held: 45 };
        assert_eq!(
            [5, 6, 50].map(|len| (room.fits(len), room.missing(len))),
            [(true, 0), (false, 1), (false, 45)]
        );
    }

    #[test]
    fn the_first_absent_weight_is_read_ahead() {
        use Residence::{Absent, ByRows, Present, Reading};
        let at = |weight: usize| Expected { time: 10 + weight as u64, weight };
        let next = |residences: &[Residence], prefetch| {
            to_read_ahead((0..residences.len()).map(at), prefetch, |index| residences[index]).read
        };
        assert_eq!(next(&[Present, Absent, Absent], 3), Some(at(1)));
        assert_eq!(next(&[Present, Absent, Absent], 1), None, "too far ahead");
        assert_eq!(next(&[Present, Reading, Absent], 3), None, "one after the other");
        assert_eq!(next(&[ByRows, Present, Absent], 2), Some(at(2)), "rows do not count");
        assert_eq!(next(&[Present, Present], 9), None);
        assert_eq!(next(&[Absent], 0), None);
        let repeated = [0, 0, 1, 0, 2].map(at).into_iter();
        let ahead = to_read_ahead(repeated, 3, |index| if index == 2 { Absent } else { Present });
        assert_eq!(
            ahead,
            Ahead { present: vec![at(0), at(1)], read: Some(at(2)) },
            "each weight counts once"
        );
    }

    #[test]
    fn what_is_looked_at_is_bounded() {
        let looked_at = Cell::new(0);
        let forever = (0..).map(|time| Expected { time, weight: 0 });
        to_read_ahead(forever, 2, |_| {
            looked_at.set(looked_at.get() + 1);
            Residence::Present
        });
        assert_eq!(looked_at.get(), LOOKED_AT);
    }

    /// A cache of weights of one byte, which evicts one at a time.
    struct Simulated {
        order: Order,
        next_use: Vec<u64>,
        idle: Idle,
        reads: usize,
        /// The most weights that were looked at to find what may be evicted.
        looked_at: usize,
    }

    impl Simulated {
        fn new(weights: usize) -> Self {
            let (order, next_use) = (Order::new(weights), vec![u64::MAX; weights]);
            Self { order, next_use, idle: Idle::default(), reads: 0, looked_at: 0 }
        }

        /// Uses a weight. Returns what is evicted for it.
        fn use_weight(&mut self, weight: usize, budget: usize) -> Option<usize> {
            let now = self.order.now();
            let before = self.idle.remove(Expected { time: self.next_use[weight], weight });
            self.next_use[weight] = self.order.record(weight).unwrap_or(u64::MAX);
            let evicted = if before.is_none() && self.idle.bytes == budget {
                self.looked_at = self.looked_at.max(self.idle.staying(&(now..now + 8)).count());
                self.idle.farthest(self.order.now(), &(0..0))
            } else {
                None
            };
            evicted.and_then(|evicted| self.idle.remove(evicted));
            self.reads += usize::from(before.is_none());
            self.idle.insert(Expected { time: self.next_use[weight], weight }, 1);
            evicted.map(|evicted| evicted.weight)
        }
    }

    /// The idle weight whose next use is farthest away, by a search through all expected uses.
    fn farthest_of_all(idle: &[usize], expected: &[usize]) -> Option<usize> {
        let next_use: HashMap<usize, usize> =
            expected.iter().enumerate().map(|(at, &weight)| (weight, at)).collect();
        idle.iter().copied().max_by_key(|weight| next_use.get(weight).copied().unwrap_or(usize::MAX))
    }

    /// Compares what is evicted with a search, whenever all weights in memory were used since the predictions are right. Returns how often.
    fn compare(uses: &[usize], weights: usize, budget: usize) -> usize {
        let (mut cache, mut plain) = (Simulated::new(weights), Plain::new(usize::MAX, weights));
        let (mut last_use, mut compared) = (vec![0; weights], 0);
        for (time, &weight) in uses.iter().enumerate() {
            let idle: Vec<usize> = cache.idle.weights.keys().map(|idle| idle.weight).collect();
            let evicted = cache.use_weight(weight, budget);
            plain.record(weight);
            let right = plain.right().min(time + 1);
            let fresh = |weight: &usize| last_use[*weight] + right > time;
            if evicted.is_some() && idle.iter().all(fresh) {
                assert_eq!(evicted, farthest_of_all(&idle, &plain.upcoming()), "use {time}");
                compared += 1;
            }
            last_use[weight] = time;
        }
        compared
    }

    #[test]
    fn passes_evict_what_a_search_finds() {
        let forward: Vec<usize> = (0..10).collect();
        let step: Vec<usize> = (0..10).chain((0..10).rev()).collect();
        for (pass, evictions) in [(forward, 70), (step, 100)] {
            for budget in 1..9 {
                let compared = compare(&pass.repeat(10), 10, budget);
                assert!(compared > evictions / budget, "budget {budget}: {compared}");
            }
        }
    }

    proptest! {
        #[test]
        fn what_repeats_evicts_what_a_search_finds(
            pass in prop::collection::vec(0usize..12, 1..30),
            budget in 1usize..12,
        ) {
            compare(&pass.repeat(8), 12, budget);
        }
    }

    /// All weights stay but those that do not fit, and sometimes the one that has to make room for them.
    #[test]
    fn a_pass_reads_what_does_not_fit() {
        let mut cache = Simulated::new(20);
        for pass in 0..40 {
            let before = cache.reads;
            (0..20).for_each(|weight| _ = cache.use_weight(weight, 8));
            let reads = cache.reads - before;
            assert!(if pass == 0 { reads == 20 } else { (12..=13).contains(&reads) }, "pass {pass}: {reads}");
        }
    }

    /// Experts that are chosen at random: the order never repeats, and what is looked at does not grow.
    #[test]
    fn random_experts_are_looked_at_a_few_at_a_time() {
        let (layers, experts, chosen, budget) = (16, 32, 4, 64);
        let mut cache = Simulated::new(layers * experts);
        let mut random = 1u64;
        for use_number in 0..1000 * layers * chosen {
            random = random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            let layer = use_number / chosen % layers;
            cache.use_weight(layer * experts + (random >> 33) as usize % experts, budget);
        }
        assert_eq!(cache.idle.bytes, budget);
        assert!(cache.looked_at <= 8, "{}", cache.looked_at);
    }
}
