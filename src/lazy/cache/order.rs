//! Learns the order in which weights are used. Passes over a model repeat: what followed a pair of weights the last time is expected to
//! follow it again.
use std::collections::HashSet;

/// The least number of uses that are remembered. A period (a forward pass, or a forward and a backward pass) must be shorter than this to
/// be learned.
const REMEMBERED: usize = 1 << 16;

/// The uses so far, and the place in them from which they are expected to repeat.
#[derive(Debug)]
pub(super) struct Order {
    /// Begins with the order of the parameters in the module, as if a pass had been made in that order.
    uses: Vec<usize>,
    /// The index in `uses` of what is expected next.
    expected: usize,
    /// The number of predictions that came true in a row.
    right: usize,
}

/// The number of predictions in a row that must come true before the next ones are trusted.
const TRUSTED: usize = 2;

impl Order {
    /// For this number of weights, which are first expected in the order of their indices.
    pub fn new(weights: usize) -> Self {
        Self { uses: (0..weights).collect(), expected: 0, right: TRUSTED }
    }

    /// Records the use of a weight.
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
            self.expected = again.map_or(uses.len(), |at| at + 1);
            self.right = 0;
        }
        self.uses.push(weight);
        if self.uses.len() > 2 * REMEMBERED {
            self.uses.drain(..REMEMBERED);
            self.expected = self.expected.saturating_sub(REMEMBERED);
        }
    }

    /// Whether the latest predictions came true.
    pub fn is_trusted(&self) -> bool {
        self.right >= TRUSTED
    }

    /// The weights in the order in which they are expected, each once.
    pub fn upcoming(&self) -> impl Iterator<Item = usize> + '_ {
        let mut seen = HashSet::new();
        self.uses[self.expected..].iter().copied().filter(move |weight| seen.insert(*weight))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn next(order: &Order, count: usize) -> Vec<usize> {
        order.upcoming().take(count).collect()
    }

    #[test]
    fn passes_over_a_module_repeat() {
        let mut order = Order::new(4);
        assert_eq!(next(&order, 9), [0, 1, 2, 3]);
        for pass in 0..3 {
            for weight in 0..4 {
                order.record(weight);
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
        pass.iter().for_each(|&weight| order.record(weight));
        order.record(2);
        order.record(0);
        assert_eq!(next(&order, 4), [3, 1, 2, 0]);
    }

    #[test]
    fn what_is_long_ago_is_forgotten() {
        let mut order = Order::new(3);
        for _ in 0..REMEMBERED {
            (0..3).for_each(|weight| order.record(weight));
        }
        assert!(order.uses.len() <= 2 * REMEMBERED);
        order.record(0);
        order.record(1);
        order.record(2);
        assert_eq!(next(&order, 3), [0, 1, 2]);
    }

    #[test]
    fn a_backward_pass_is_learned() {
        let mut order = Order::new(3);
        let step = [0, 1, 2, 2, 1, 0];
        for _ in 0..3 {
            step.iter().for_each(|&weight| order.record(weight));
        }
        order.record(0);
        order.record(1);
        assert_eq!(order.uses[order.expected..][..4], [2, 2, 1, 0]);
        order.record(2);
        order.record(2);
        assert!(order.is_trusted());
        assert_eq!(next(&order, 2), [1, 0]);
    }
}
