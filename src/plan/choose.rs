//! [`Chooser`]: what to do with each block of a chain, so that a step takes the least time within a budget of memory.
//!
//! A chain of blocks runs forward and then backward. Before each block, some bytes are alive: the input of the block, and what the blocks
//! before it keep. A [`Way`] to run the block says how many more bytes are alive after it, and how many more are alive at most while it
//! runs, forward or backward. When the backward pass comes to the block, what the blocks before it keep is alive as before, and of the
//! blocks after it only gradients are. So a chain fits into a budget if every block fits together with what the blocks before it keep.
//! These bytes are the state of a dynamic program ([rotor](https://arxiv.org/abs/1911.13214), but with other ways to run a block, and
//! without nested segments).

/// A way to run a block.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Way {
    /// Bytes alive after the block beyond those before it, for each way to run the block before, since one block may keep a tensor that the
    /// other would free. Negative if the block keeps less than the bytes of its input.
    pub(super) grows: Vec<i64>,
    /// The most bytes alive while it runs, forward or backward, beyond those before it, for each way to run the block before.
    pub(super) most: Vec<i64>,
    /// The time in nanoseconds.
    pub(super) cost: u64,
}

/// What a choice of ways needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Needs {
    /// The most bytes alive at one time.
    pub(super) peak: i64,
    pub(super) cost: u64,
}

/// What a chain needs if each block runs in the way with that number.
pub(super) fn needs(blocks: &[Vec<Way>], choice: &[usize]) -> Needs {
    let (mut live, mut before, mut needs) = (0, 0, Needs { peak: 0, cost: 0 });
    for (ways, &number) in blocks.iter().zip(choice) {
        let way = &ways[number];
        needs.peak = needs.peak.max(live + way.most[before]);
        needs.cost += way.cost;
        live += way.grows[before];
        before = number;
    }
    needs
}

/// Into how many granules the range from the fewest to the most bytes that can be alive is divided.
const STEPS: i64 = 16_384;

/// Chooses ways for the blocks of a chain.
///
/// Bytes are rounded up to granules, and costs are exact. So a larger budget never gives a higher cost or a lower peak than a smaller one.
pub(super) struct Chooser {
    /// With bytes in granules.
    blocks: Vec<Vec<Way>>,
    granule: i64,
    /// The fewest granules that can be alive; negative.
    lowest: i64,
    /// How many different numbers of granules can be alive.
    width: usize,
    /// The most ways that a block has.
    ways: usize,
    /// The cheapest way of each block, and their peak in bytes: a budget of exactly that many bytes is enough, though in granules it would
    /// not be.
    cheapest: (Vec<usize>, i64),
}

/// The value of a state that cannot be reached.
const NEVER: u64 = u64::MAX;

impl Chooser {
    pub(super) fn new(blocks: &[Vec<Way>]) -> Self {
        let cheapest = |ways: &Vec<Way>| (0..ways.len()).min_by_key(|&way| ways[way].cost).unwrap_or(0);
        let cheapest: Vec<usize> = blocks.iter().map(cheapest).collect();
        let cheapest_peak = needs(blocks, &cheapest).peak;
        let (lowest, highest) = range(blocks);
        let granule = ((highest - lowest) / STEPS).max(1);
        let round = |bytes: i64| bytes.div_euclid(granule) + i64::from(bytes.rem_euclid(granule) > 0);
        let rounded = |way: &Way| Way {
            grows: way.grows.iter().map(|&bytes| round(bytes)).collect(),
            most: way.most.iter().map(|&bytes| round(bytes)).collect(),
            cost: way.cost,
        };
        let blocks: Vec<Vec<Way>> = blocks.iter().map(|ways| ways.iter().map(rounded).collect()).collect();
        let (lowest, highest) = range(&blocks);
        let ways = blocks.iter().map(Vec::len).max().unwrap_or(0);
        let width = (highest - lowest + 1) as usize;
        Self { blocks, granule, lowest, width, ways, cheapest: (cheapest, cheapest_peak) }
    }

    /// The ways with the least cost whose peak is within a budget, and among those the ways with the lowest peak; `None` if nothing fits.
    pub(super) fn choose(&self, budget: i64) -> Option<Vec<usize>> {
        if self.cheapest.1 <= budget {
            return Some(self.cheapest.0.clone());
        }
        let within =
            |most: i64| self.best(move |cost, reached, way| (reached <= most).then_some(cost + way.cost));
        let (mut best, cost) = within(budget.div_euclid(self.granule))?;
        while let Some((choice, same)) = within(self.peak(&best) - 1)
            && same == cost
        {
            best = choice;
        }
        Some(best)
    }

    /// The lowest peak of all choices.
    pub(super) fn least(&self) -> i64 {
        let least = self.best(|peak, reached, _| Some(peak.max(reached.max(0) as u64)));
        (least.map_or(0, |(_, peak)| peak as i64) * self.granule).min(self.cheapest.1)
    }

    /// In granules.
    fn peak(&self, choice: &[usize]) -> i64 {
        needs(&self.blocks, choice).peak
    }

    /// The choice with the least value. `after` returns the value after a block, given the value before it, the most granules alive
    /// meanwhile and the way; `None` if the block may not run in that way.
    fn best(&self, after: impl Fn(u64, i64, &Way) -> Option<u64>) -> Option<(Vec<usize>, u64)> {
        // A state is the way of the block before, and the granules alive.
        let state = |before: usize, live: i64| before * self.width + (live - self.lowest) as usize;
        let states = self.ways * self.width;
        let mut values = vec![NEVER; states];
        *values.get_mut(state(0, 0))? = 0;
        // For every block, the state before each state.
        let mut from: Vec<Vec<u32>> = vec![];
        for ways in &self.blocks {
            let mut next = vec![NEVER; states];
            let mut back = vec![0; states];
            for (index, &value) in values.iter().enumerate().filter(|&(_, &value)| value != NEVER) {
                let (before, live) = (index / self.width, (index % self.width) as i64 + self.lowest);
                for (number, way) in ways.iter().enumerate() {
                    #[cfg(test)]
                    tests::TRIED.set(tests::TRIED.get() + 1);
                    let Some(value) = after(value, live + way.most[before], way) else { continue };
                    let reached = state(number, live + way.grows[before]);
                    if value < next[reached] {
                        next[reached] = value;
                        back[reached] = index as u32;
                    }
                }
            }
            values = next;
            from.push(back);
        }
        let (mut index, &value) = values.iter().enumerate().min_by_key(|&(_, &value)| value)?;
        if value == NEVER {
            return None;
        }
        let mut choice: Vec<usize> = from
            .iter()
            .rev()
            .map(|back| {
                let way = index / self.width;
                index = back[index] as usize;
                way
            })
            .collect();
        choice.reverse();
        Some((choice, value))
    }
}

/// The fewest and the most bytes that can be alive between blocks.
fn range(blocks: &[Vec<Way>]) -> (i64, i64) {
    let (mut lowest, mut highest, mut sums) = (0, 0, (0, 0));
    for ways in blocks {
        let grows = ways.iter().flat_map(|way| way.grows.iter().copied());
        sums.0 += grows.clone().min().unwrap_or(0);
        sums.1 += grows.max().unwrap_or(0);
        lowest = lowest.min(sums.0);
        highest = highest.max(sums.1);
    }
    (lowest, highest)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::cell::Cell;

    thread_local! {
        /// How often a way was tried after a state.
        pub(super) static TRIED: Cell<u64> = const { Cell::new(0) };
    }

    /// Chains of blocks with two or three ways. The bytes of a way depend on the way of the block before.
    fn chains(blocks: impl Into<prop::collection::SizeRange>) -> impl Strategy<Value = Vec<Vec<Way>>> {
        let block =
            prop::collection::vec((-2000..50_000i64, 0..20_000i64, 0..40_000i64, 1..9_000_000u64), 2..=3);
        prop::collection::vec(block, blocks).prop_map(|blocks| {
            let mut before = 1;
            let ways = |ways: Vec<(i64, i64, i64, u64)>| {
                let count = std::mem::replace(&mut before, ways.len());
                let way = |(grows, joined, more, cost): (i64, i64, i64, u64)| Way {
                    grows: (0..count as i64).map(|before| grows - joined * before / 2).collect(),
                    most: (0..count as i64).map(|before| grows.max(0) + more - joined * before / 3).collect(),
                    cost,
                };
                ways.into_iter().map(way).collect()
            };
            blocks.into_iter().map(ways).collect()
        })
    }

    /// The least cost of all choices within a budget, by trying all.
    fn best(blocks: &[Vec<Way>], budget: i64) -> Option<u64> {
        let mut choice = vec![0; blocks.len()];
        let mut best: Option<u64> = None;
        loop {
            let needs = needs(blocks, &choice);
            if needs.peak <= budget {
                best = Some(best.map_or(needs.cost, |best| best.min(needs.cost)));
            }
            let Some(next) = (0..choice.len()).find(|&at| choice[at] + 1 < blocks[at].len()) else {
                return best;
            };
            choice[next] += 1;
            choice[..next].fill(0);
        }
    }

    fn budgets(blocks: &[Vec<Way>]) -> Vec<i64> {
        let least = Chooser::new(blocks).least();
        let most = needs(blocks, &vec![0; blocks.len()]).peak.max(least);
        (0..=20).map(|number| least + (most - least) * number / 20).collect()
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(8))]
        #[test]
        fn nothing_is_better(blocks in chains(1..=9)) {
            let chooser = Chooser::new(&blocks);
            for budget in budgets(&blocks) {
                let chosen = needs(&blocks, &chooser.choose(budget).expect("the least fits"));
                prop_assert!(chosen.peak <= budget);
                // Each block may be a granule off.
                let spare = chooser.granule * (blocks.len() as i64 + 2);
                if chooser.granule == 1 || best(&blocks, budget - spare) == best(&blocks, budget) {
                    prop_assert_eq!(Some(chosen.cost), best(&blocks, budget));
                }
                prop_assert!(best(&blocks, budget - spare).is_none_or(|best| chosen.cost <= best));
            }
            prop_assert!(chooser.choose(chooser.least() - chooser.granule).is_none());
            prop_assert!(best(&blocks, chooser.least() - chooser.granule * (blocks.len() as i64 + 2)).is_none());
        }

        #[test]
        fn more_never_costs_more(blocks in chains(20)) {
            let chooser = Chooser::new(&blocks);
            let chosen = |budget| needs(&chooser.blocks, &chooser.choose(budget).expect("the least fits"));
            for pair in budgets(&blocks).windows(2) {
                let [small, large] = [chosen(pair[0]), chosen(pair[1])];
                prop_assert!(large.cost <= small.cost && large.peak >= small.peak);
            }
        }
    }

    /// Blocks that differ, each of which can be computed again.
    fn different(count: i64) -> Vec<Vec<Way>> {
        let way = |keeps: i64, most: i64, cost: u64| Way { grows: vec![keeps; 2], most: vec![most; 2], cost };
        let block = |number: i64| {
            let (keeps, time) =
                (1_000_000 + 77_777 * (number * 37 % 11), 1000 + 313 * (number as u64 * 17 % 13));
            vec![way(keeps, keeps + 500_000, 0), way(200_000, keeps + 700_000, time * 1000)]
        };
        (0..count).map(block).collect()
    }

    /// Within 5 % of the best of all choices.
    #[test]
    fn twelve_blocks() {
        let blocks = different(12);
        let chooser = Chooser::new(&blocks);
        for budget in budgets(&blocks) {
            let chosen = needs(&blocks, &chooser.choose(budget).expect("the least fits"));
            let best = best(&blocks, budget).expect("so does the best");
            assert!(chosen.cost as f64 <= 1.05 * best as f64, "{chosen:?}, best {best}");
        }
    }

    /// A choice takes well under a second. Trying a way after a state takes a few nanoseconds, and how often this happens is the same on
    /// every machine.
    #[test]
    fn a_hundred_blocks() {
        let blocks = different(100);
        let chooser = Chooser::new(&blocks);
        for budget in budgets(&blocks) {
            TRIED.set(0);
            chooser.choose(budget).expect("the least fits");
            assert!(TRIED.get() < 10_000_000, "{} times", TRIED.get());
        }
    }
}
