//! Decides which weights stay in memory, and which one is read next. Weights are used in cycles (pass after pass over a model), so the one
//! used most recently is needed last. The best weight to evict is the one whose next use is farthest away (Belady's algorithm), in the
//! order that was [learned](super::order).
use std::collections::HashMap;

/// How full the memory is.
#[derive(Clone, Copy, Debug)]
pub(super) struct Room {
    pub budget: usize,
    /// Bytes that are held, by the cache or by anybody else.
    pub held: usize,
}

impl Room {
    pub fn fits(self, len: usize) -> bool {
        self.held.saturating_add(len) <= self.budget
    }
}

/// A weight that nobody but the cache holds.
#[derive(Clone, Copy, Debug)]
pub(super) struct Idle {
    pub index: usize,
    /// Bytes that evicting it frees.
    pub bytes: usize,
}

/// The weights to evict so that `len` bytes fit, and no more than necessary. The one whose next use is farthest away comes first, and none
/// of the next `protected` uses is evicted. This may not free enough: see [`would_fit`].
pub(super) fn to_evict(
    mut room: Room,
    len: usize,
    mut idle: Vec<Idle>,
    expected: impl Iterator<Item = usize>,
    protected: usize,
) -> Vec<usize> {
    if room.fits(len) {
        return vec![];
    }
    let next_use: HashMap<usize, usize> = expected.enumerate().map(|(at, index)| (index, at)).collect();
    let next_use = |weight: &Idle| next_use.get(&weight.index).copied().unwrap_or(usize::MAX);
    idle.sort_by_key(next_use);
    let mut evicted = vec![];
    while !room.fits(len)
        && let Some(weight) = idle.pop_if(|weight| next_use(weight) >= protected)
    {
        room.held -= weight.bytes;
        evicted.push(weight.index);
    }
    evicted
}

/// Whether `len` bytes fit once every idle weight is evicted that is not among the next `protected` uses.
pub(super) fn would_fit(
    room: Room,
    len: usize,
    idle: &[Idle],
    expected: impl Iterator<Item = usize>,
    protected: usize,
) -> bool {
    let soon: Vec<usize> = expected.take(protected).collect();
    let evictable = idle.iter().filter(|weight| !soon.contains(&weight.index)).map(|weight| weight.bytes);
    Room { held: room.held.saturating_sub(evictable.sum()), ..room }.fits(len)
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

/// How many weights are used before the one to read ahead, and that weight: the first of the next `prefetch` ones that is absent. `None`
/// while an earlier one is still being read.
pub(super) fn to_read_ahead(
    expected: impl Iterator<Item = usize>,
    prefetch: usize,
    residence: impl Fn(usize) -> Residence,
) -> Option<(usize, usize)> {
    let whole = expected.enumerate().map(|(at, index)| (at, index, residence(index)));
    let mut whole = whole.filter(|(.., residence)| *residence != Residence::ByRows).take(prefetch);
    let (at, index, residence) = whole.find(|(.., residence)| *residence != Residence::Present)?;
    (residence == Residence::Absent).then_some((at, index))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Weights of ten bytes.
    fn idle(weights: &[usize]) -> Vec<Idle> {
        weights.iter().map(|&index| Idle { index, bytes: 10 }).collect()
    }

    fn full(weights: usize) -> Room {
        Room { budget: 10 * weights, held: 10 * weights }
    }

    #[test]
    fn nothing_is_evicted_while_there_is_room() {
        let room = Room { budget: 30, held: 20 };
        assert!(to_evict(room, 10, idle(&[0, 1]), [0, 1].into_iter(), 0).is_empty());
        assert_eq!(to_evict(room, 11, idle(&[0, 1]), [0, 1].into_iter(), 0), [1]);
    }

    #[test]
    fn what_is_used_last_is_evicted_first() {
        let expected = || [2, 0, 3, 1].into_iter();
        assert_eq!(to_evict(full(4), 10, idle(&[0, 1, 2, 3]), expected(), 0), [1]);
        assert_eq!(to_evict(full(4), 25, idle(&[0, 1, 2, 3]), expected(), 0), [1, 3, 0]);
        assert_eq!(to_evict(full(4), 10, idle(&[0, 2]), expected(), 0), [0], "only what is idle");
        assert_eq!(
            to_evict(full(4), 10, idle(&[0, 1, 7]), expected(), 0),
            [7],
            "what nobody expects before all"
        );
    }

    #[test]
    fn reading_ahead_evicts_nothing_that_is_used_before() {
        let expected = || [2, 0, 3, 1].into_iter();
        assert_eq!(to_evict(full(4), 30, idle(&[0, 1, 2, 3]), expected(), 2), [1, 3]);
        for (protected, len, fits) in [(2, 20, true), (2, 21, false), (0, 40, true), (4, 1, false)] {
            assert_eq!(would_fit(full(4), len, &idle(&[0, 1, 2, 3]), expected(), protected), fits);
        }
    }

    /// What [`would_fit`] says is true after [`to_evict`].
    #[test]
    fn both_rules_agree() {
        for (held, len, protected) in
            (0..5).flat_map(|h| (0..50).flat_map(move |l| (0..4).map(move |p| (h, l, p))))
        {
            let (room, idle) = (Room { budget: 35, held: 10 * held }, idle(&(0..held).collect::<Vec<_>>()));
            let expected = || [1, 3, 0, 2].into_iter();
            let evicted = to_evict(room, len, idle.clone(), expected(), protected).len();
            let after = Room { held: room.held - 10 * evicted, ..room };
            assert_eq!(would_fit(room, len, &idle, expected(), protected), after.fits(len));
        }
    }

    #[test]
    fn the_first_absent_weight_is_read_ahead() {
        use Residence::{Absent, ByRows, Present, Reading};
        let next = |residences: &[Residence], prefetch| {
            to_read_ahead(0..residences.len(), prefetch, |index| residences[index])
        };
        assert_eq!(next(&[Present, Absent, Absent], 3), Some((1, 1)));
        assert_eq!(next(&[Present, Absent, Absent], 1), None, "too far ahead");
        assert_eq!(next(&[Present, Reading, Absent], 3), None, "one after the other");
        assert_eq!(next(&[ByRows, Present, Absent], 2), Some((2, 2)), "rows do not count");
        assert_eq!(next(&[Present, Present], 9), None);
        assert_eq!(next(&[Absent], 0), None);
    }
}
