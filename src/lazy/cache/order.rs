//! Learns the order in which weights are used. Passes over a model repeat: what followed a pair of weights the last time is expected to
//! follow it again.
//!
//! Uses are numbered, and the number of a use is its time. To record one takes a few look-ups in maps, however many are remembered and
//! whether or not they repeat.
use std::collections::{BTreeMap, VecDeque};

/// A use of a weight that is expected.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Expected {
    pub time: u64,
    pub weight: usize,
}

/// The least number of uses that are remembered. A period (a forward pass, or a forward and a backward pass) must be shorter than this to
/// be learned.
const REMEMBERED: usize = 1 << 16;

/// The number of predictions in a row that must come true before the next ones are trusted.
const TRUSTED: usize = 2;

/// A use of a weight.
#[derive(Debug)]
struct Use {
    weight: u32,
    /// After how many uses the weight was used again, or 0 if it was not.
    again: u32,
}

/// The latest uses, and the one among them from which they are expected to repeat.
#[derive(Debug)]
pub(super) struct Order {
    /// Begins with the order of the parameters in the module, as if a pass had been made in that order.
    uses: VecDeque<Use>,
    /// The time of the first of them.
    first: u64,
    /// How many are remembered at most.
    remembered: usize,
    /// When each weight was used last.
    last: Vec<Option<u64>>,
    /// When a weight was last used right after another one, by that one and the weight.
    pairs: BTreeMap<[u32; 2], u64>,
    /// The time of the use that the next one is expected to repeat.
    expected: u64,
    /// The number of predictions that came true in a row.
    right: usize,
}

impl Order {
    /// For this number of weights, which are first expected in the order of their indices.
    pub fn new(weights: usize) -> Self {
        Self::remembering(REMEMBERED.max(2 * weights), weights)
    }

    fn remembering(remembered: usize, weights: usize) -> Self {
        let mut order = Self {
            uses: VecDeque::new(),
            first: 0,
            remembered,
            last: vec![None; weights],
            pairs: BTreeMap::new(),
            expected: 0,
            right: TRUSTED,
        };
        (0..weights).for_each(|weight| order.push(weight));
        order
    }

    /// The time of the next use.
    pub fn now(&self) -> u64 {
        self.first + self.uses.len() as u64
    }

    /// Records the use of a weight. Returns when the weight is expected to be used again, if something like this use is remembered: after as
    /// many uses as then.
    pub fn record(&mut self, weight: usize) -> Option<u64> {
        let came_true =
            self.uses.get(self.place(self.expected)).is_some_and(|next| next.weight as usize == weight);
        let repeated = if came_true { Some(self.expected) } else { self.last_like(weight) };
        self.right = if came_true { self.right + 1 } else { 0 };
        self.push(weight);
        self.expected = repeated.map_or(self.now(), |at| at + 1);
        let again = repeated.map(|at| self.uses[self.place(at)].again);
        if self.uses.len() > self.remembered {
            self.forget_first();
        }
        again.map(|after| self.now() - 1 + u64::from(after))
    }

    /// Whether the latest predictions came true.
    pub fn is_trusted(&self) -> bool {
        self.right >= TRUSTED
    }

    /// The uses that are expected, one after the other.
    pub fn upcoming(&self) -> impl Iterator<Item = Expected> + '_ {
        let uses = self.uses.range(self.place(self.expected)..);
        (self.now()..).zip(uses).map(|(time, next)| Expected { time, weight: next.weight as usize })
    }

    /// Whether a weight was used at this time or later.
    pub fn used_since(&self, weight: usize, time: u64) -> bool {
        self.last[weight].is_some_and(|last| last >= time)
    }

    /// The last use of a weight after the same one as now, or else its last use.
    fn last_like(&self, weight: usize) -> Option<u64> {
        let after = |previous: &Use| self.pairs.get(&[previous.weight, weight as u32]);
        self.uses.back().and_then(after).copied().or(self.last[weight])
    }

    /// The index in `uses` of the use at a time.
    fn place(&self, time: u64) -> usize {
        (time - self.first) as usize
    }

    fn push(&mut self, weight: usize) {
        let now = self.now();
        if let Some(last) = self.last[weight].replace(now) {
            let place = self.place(last);
            self.uses[place].again = (now - last) as u32;
        }
        if let Some(previous) = self.uses.back() {
            self.pairs.insert([previous.weight, weight as u32], now);
        }
        self.uses.push_back(Use { weight: weight as u32, again: 0 });
    }

    fn forget_first(&mut self) {
        let (at, Some(forgotten)) = (self.first, self.uses.pop_front()) else { return };
        self.first += 1;
        if self.last[forgotten.weight as usize] == Some(at) {
            self.last[forgotten.weight as usize] = None;
        }
        // The weight after it is now one that nothing is known to precede.
        if let Some(next) = self.uses.front() {
            let pair = [forgotten.weight, next.weight];
            if self.pairs.get(&pair) == Some(&self.first) {
                self.pairs.remove(&pair);
            }
        }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The same as [`Order`], by a search through all uses.
    #[derive(Debug)]
    pub struct Plain {
        uses: Vec<usize>,
        expected: usize,
        right: usize,
        remembered: usize,
    }

    impl Plain {
        pub fn new(remembered: usize, weights: usize) -> Self {
            Self { uses: (0..weights).collect(), expected: 0, right: TRUSTED, remembered }
        }

        pub fn record(&mut self, weight: usize) {
            let previous = self.uses.last().copied();
            if self.uses.get(self.expected) == Some(&weight) {
                self.expected += 1;
                self.right += 1;
            } else {
                let uses = &self.uses;
                let followed = |at: &usize| uses[*at] == weight && *at > 0 && Some(uses[at - 1]) == previous;
                let again = (0..uses.len()).rev().find(followed);
                let again = again.or_else(|| uses.iter().rposition(|&used| used == weight));
                self.expected = again.map_or(uses.len() + 1, |at| at + 1);
                self.right = 0;
            }
            self.uses.push(weight);
            if self.uses.len() > self.remembered {
                self.uses.remove(0);
                self.expected -= 1;
            }
        }

        /// The weights in the order in which they are expected, each once.
        pub fn upcoming(&self) -> Vec<usize> {
            once(self.uses[self.expected..].iter().copied())
        }

        pub fn right(&self) -> usize {
            self.right
        }
    }

    fn once(weights: impl Iterator<Item = usize>) -> Vec<usize> {
        let mut seen = std::collections::HashSet::new();
        weights.filter(|weight| seen.insert(*weight)).collect()
    }

    fn next(order: &Order, count: usize) -> Vec<usize> {
        once(order.upcoming().map(|next| next.weight)).into_iter().take(count).collect()
    }

    #[test]
    fn passes_over_a_module_repeat() {
        let mut order = Order::new(4);
        assert_eq!(next(&order, 9), [0, 1, 2, 3]);
        for pass in 0..3 {
            for weight in 0..4 {
                let now = order.now();
                assert_eq!(order.record(weight), Some(now + 4));
                let following: Vec<_> = (weight + 1..4).chain(0..=weight).collect();
                assert_eq!(next(&order, 9), following, "after {weight} in pass {pass}");
                assert!(order.is_trusted());
            }
        }
    }

    #[test]
    fn an_order_unlike_the_modules_is_learned_in_one_pass() {
        let mut order = Order::new(4);
        let pass = [2, 0, 3, 1];
        pass.iter().for_each(|&weight| _ = order.record(weight));
        order.record(2);
        order.record(0);
        assert_eq!(next(&order, 4), [3, 1, 2, 0]);
    }

    #[test]
    fn what_is_long_ago_is_forgotten() {
        let mut order = Order::new(4);
        for _ in 0..REMEMBERED {
            (0..3).for_each(|weight| _ = order.record(weight));
        }
        assert_eq!((order.uses.len(), order.pairs.len()), (REMEMBERED, 3));
        assert_eq!(next(&order, 3), [0, 1, 2]);
        assert_eq!(order.record(3), None, "as if it had never been used");
        assert_eq!(next(&order, 3), [0; 0]);
        (0..3).for_each(|weight| _ = order.record(weight));
        assert_eq!(next(&order, 4), [3, 0, 1, 2]);
    }

    #[test]
    fn a_backward_pass_is_learned() {
        let mut order = Order::new(3);
        let step = [0, 1, 2, 2, 1, 0];
        for _ in 0..3 {
            step.iter().for_each(|&weight| _ = order.record(weight));
        }
        order.record(0);
        order.record(1);
        let upcoming = |order: &Order| order.upcoming().map(|next| next.weight).take(4).collect::<Vec<_>>();
        assert_eq!(upcoming(&order), [2, 2, 1, 0]);
        order.record(2);
        assert_eq!(order.record(2), Some(order.now() + 4), "five uses after the one before");
        assert!(order.is_trusted());
        assert_eq!(next(&order, 2), [1, 0]);
    }

    proptest! {
        #[test]
        fn predictions_are_those_of_a_search_through_all_uses(
            remembered in 8usize..40,
            uses in prop::collection::vec(0usize..8, 0..200),
        ) {
            let (mut order, mut plain) = (Order::remembering(remembered, 8), Plain::new(remembered, 8));
            for weight in uses {
                let again = order.record(weight);
                plain.record(weight);
                prop_assert_eq!((next(&order, 8), order.right), (plain.upcoming(), plain.right));
                let expected = order.upcoming().find(|next| next.weight == weight);
                prop_assert_eq!(again, expected.map(|next| next.time));
            }
        }
    }
}
