//! How a loop over items, such as planes or rows, is divided among threads: a function of sizes and of the number of threads.
//!
//! A task takes whole items, as many as are worth a task. Where this would leave threads idle for long, it takes fewer; and where even
//! single items would, each item is cut into pieces of some steps, such as rows of a plane.
use super::work::Work;

/// Work that is never divided further: 10 microseconds, in which a sleeping thread wakes.
const SMALLEST: f64 = (1 << 14) as f64;

/// The longest time that a division may take, in parts of the time of the best one that can be thought of. (Longer is no matter if a task
/// takes as little time as it takes to wake a thread.)
pub(crate) const EVEN: f64 = 1.25;

/// Tasks per thread, at most, where tasks are smaller than they would be for many items.
const TASKS: usize = 8;

/// A loop over items.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Items {
    /// How many there are.
    pub(crate) count: usize,
    /// Elements of an item.
    pub(crate) item: usize,
    /// What all of them take.
    pub(crate) work: Work,
    /// A task takes so many whole items at least.
    pub(crate) least: usize,
    /// Steps of an item; an item can be cut between them.
    pub(crate) steps: usize,
    /// Steps that a piece of an item takes besides its own, because neighboring pieces share them.
    pub(crate) again: usize,
    /// What all items take if they are cut, without what is taken [again](Self::again).
    pub(crate) work_if_cut: Work,
    /// Elements that a piece holds beside results.
    pub(crate) held: usize,
    /// Elements that all pieces that run at the same time may hold.
    pub(crate) may_hold: usize,
}

/// What a task takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Division {
    /// So many items.
    Whole(usize),
    /// So many steps of one item.
    Cut(usize),
}

/// Lengths of the chunks into which a slice is divided: into items, which are divided into pieces. Equal if items are not divided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Chunks {
    pub(crate) item: usize,
    pub(crate) piece: usize,
}

impl Division {
    /// Of a slice that has `item` elements per item and `step` per step.
    pub(crate) fn chunks(self, item: usize, step: usize) -> Chunks {
        match self {
            Self::Whole(items) => Chunks { item: items * item, piece: items * item },
            Self::Cut(steps) => Chunks { item, piece: steps * step },
        }
    }
}

impl Items {
    /// Items that are not cut, and for which nothing is held.
    pub(crate) fn of([count, item]: [usize; 2], work: Work) -> Self {
        let (least, steps, again, held, may_hold) = (1, 1, 0, 0, usize::MAX);
        Self { count, item, work, least, steps, again, work_if_cut: work, held, may_hold }
    }

    /// The division for so many threads.
    pub(crate) fn division(&self, threads: usize) -> Division {
        self.division_from(items_per_task([self.count, self.item], threads).max(self.least), threads)
    }

    /// [`division`](Self::division), where a task takes `whole` items unless it leaves threads idle.
    pub(crate) fn division_from(&self, whole: usize, threads: usize) -> Division {
        let division = Division::Whole(whole);
        if self.is_even(division, threads) {
            return division;
        }
        let time = |division: &Division| self.time(*division, threads);
        let least = self.smaller(whole, threads).min_by(|a, b| time(a).total_cmp(&time(b)));
        least.filter(|least| time(least) < time(&division)).unwrap_or(division)
    }

    /// Divisions into smaller tasks, of which the best is among these.
    fn smaller(&self, whole: usize, threads: usize) -> impl Iterator<Item = Division> {
        let least = self.least.max((SMALLEST / self.of_item(self.work)).ceil() as usize);
        let in_turns = (1..=TASKS).map(move |turns| self.count.div_ceil(turns * threads).max(least));
        let fewer = (1..=TASKS).map(move |parts| whole.div_ceil(parts)).chain(in_turns);
        let fewer = fewer.filter(move |items| (least..=whole).contains(items)).map(Division::Whole);
        fewer.chain(self.cuts(threads).map(Division::Cut))
    }

    /// Steps of a piece: for every number of turns that threads may take, the fewest steps with which they take no more.
    fn cuts(&self, threads: usize) -> impl Iterator<Item = usize> {
        let (count, steps) = (self.count.max(1), self.steps);
        let running = self.may_hold / self.held.max(1);
        let (tasks, turns) = match running < threads {
            true => (running, 1..=1), // pieces that wait for a thread would hold too much when they run
            false => {
                let most = (TASKS * threads).div_ceil(count);
                (threads, (2 * count).div_ceil(threads)..=(most * count).div_ceil(threads))
            }
        };
        let least = (SMALLEST / self.of_item(self.work) * steps as f64).ceil() as usize;
        let least = least.saturating_sub(self.again).max(1);
        let pieces = turns.map(move |turns| turns * tasks / count).filter(|&pieces| pieces > 1);
        pieces.map(move |pieces| steps.div_ceil(pieces).max(least)).filter(move |&of_piece| of_piece < steps)
    }

    /// Whether no thread waits long for others: the rule of this file.
    pub(crate) fn is_even(&self, division: Division, threads: usize) -> bool {
        let turns = self.tasks(division).div_ceil(threads) as f64;
        let together = turns * self.largest(division) * threads as f64;
        self.largest(division) <= Work::WORTH_IT as f64 || together <= EVEN * self.work.units()
    }

    /// The number of tasks.
    fn tasks(&self, division: Division) -> usize {
        match division {
            Division::Whole(items) => self.count.div_ceil(items.max(1)),
            Division::Cut(steps) => self.count * self.steps.div_ceil(steps),
        }
    }

    /// The work of the largest task, in units of [`Work`].
    fn largest(&self, division: Division) -> f64 {
        match division {
            Division::Whole(items) => self.of_item(self.work) * items.min(self.count) as f64,
            Division::Cut(steps) => self.of_cut(self.work, steps),
        }
    }

    /// How long all tasks take.
    pub(crate) fn time(&self, division: Division, threads: usize) -> f64 {
        let largest = match division {
            Division::Whole(_) => self.largest(division),
            Division::Cut(steps) => self.of_cut(self.work_if_cut, steps),
        };
        self.tasks(division).div_ceil(threads) as f64 * largest
    }

    fn of_item(&self, work: Work) -> f64 {
        work.units() / self.count.max(1) as f64
    }

    fn of_cut(&self, work: Work, steps: usize) -> f64 {
        self.of_item(work) * ((steps + self.again) as f64 / self.steps as f64)
    }
}

/// Items of `item` elements each that one task takes, if they are many: enough to be worth a task, and few enough that its elements stay
/// in the cache.
pub(super) fn items_per_task([items, item]: [usize; 2], threads: usize) -> usize {
    let of = |elements: usize| (elements / item.max(1)).max(1);
    items.div_ceil(4 * threads).clamp(of(1 << 12), of(1 << 16))
}

#[cfg(test)]
pub(crate) mod counting {
    use super::*;

    /// What is counted of a division.
    #[derive(Clone, Copy, Debug)]
    pub(crate) struct Counted {
        pub(crate) tasks: usize,
        /// Units of work of the largest task.
        pub(crate) largest: f64,
        /// How long all tasks take on as many threads, in parts of the least time that is possible.
        pub(crate) imbalance: f64,
        /// Elements that all running tasks hold, if items are cut.
        pub(crate) held: usize,
    }

    impl Items {
        pub(crate) fn counted(&self, division: Division, threads: usize) -> Counted {
            let (tasks, largest) = (self.tasks(division), self.largest(division));
            let imbalance = tasks.div_ceil(threads) as f64 * largest * threads as f64 / self.work.units();
            let held = tasks.min(threads).saturating_mul(self.held);
            Counted { tasks, largest, imbalance, held }
        }

        /// Asserts the rule of this file, and [that nothing is missing](Self::assert_whole).
        pub(crate) fn assert_even(&self, division: Division, threads: usize, case: &str) {
            let counted = self.assert_whole(division, threads, case);
            let is_even = counted.largest <= Work::WORTH_IT as f64 || counted.imbalance <= EVEN;
            assert!(is_even, "{case}, {threads} threads: {counted:?}");
        }

        /// Asserts that every step is in one task, and that no more is held than allowed.
        pub(crate) fn assert_whole(&self, division: Division, threads: usize, case: &str) -> Counted {
            let counted = self.counted(division, threads);
            let case = format!("{case}, {threads} threads: {division:?}, {counted:?}");
            assert!(matches!(division, Division::Whole(_)) || counted.held <= self.may_hold, "{case}");
            let all = self.count * self.steps;
            let Chunks { item, piece } = division.chunks(self.steps, 1);
            assert!(item >= piece && piece >= 1, "{case}");
            let chunks = |len: usize, size: usize| (0..len).step_by(size).map(move |at| size.min(len - at));
            let (mut steps, mut tasks) = (0, 0);
            for of_item in chunks(all, item).flat_map(|item| chunks(item, piece)) {
                (steps, tasks) = (steps + of_item, tasks + 1);
            }
            assert_eq!((steps, tasks), (all, counted.tasks), "{case}");
            counted
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SIZES: [usize; 10] = [1, 2, 3, 5, 16, 33, 64, 100, 257, 1030];

    /// Items whose steps are small can be divided evenly among any number of threads.
    #[test]
    fn no_thread_waits_long_for_others() {
        for count in SIZES {
            for (steps, step) in [(512, 1 << 9), (1 << 12, 49), (56, 1 << 13), (1 << 15, 4)] {
                let items =
                    Items { steps, ..Items::of([count, steps * step], Work::of([4, count, steps, step])) };
                for threads in 1..=256 {
                    items.assert_even(
                        items.division(threads),
                        threads,
                        &format!("{count} x {steps} x {step}"),
                    );
                }
            }
        }
    }

    /// Items of few elements may be much work.
    #[test]
    fn tasks_of_few_elements_are_even() {
        for count in SIZES {
            for work in [1 << 12, 1 << 16, 1 << 20] {
                let items = Items::of([count, 7], Work::of([count, work]));
                for threads in [2, 6, 16, 64, 256].into_iter().filter(|threads| 8 * threads <= count) {
                    items.assert_even(items.division(threads), threads, &format!("{count} of {work}"));
                }
            }
        }
    }

    /// One thread, little work, and many items are divided as they are without this file.
    #[test]
    fn items_are_cut_only_where_threads_would_be_idle() {
        for (count, item, threads) in [(3, 1 << 18, 1), (3, 1 << 10, 64), (64, 1 << 18, 64), (8, 1 << 18, 2)]
        {
            let items = Items { steps: 512, ..Items::of([count, item], Work::of([count, item])) };
            let whole = items_per_task([count, item], threads);
            assert_eq!(
                items.division(threads),
                Division::Whole(whole),
                "{count} x {item}, {threads} threads"
            );
        }
        let items = Items { steps: 512, ..Items::of([3, 1 << 18], Work::of([4, 3, 1 << 18])) };
        let counted = items.counted(items.division(64), 64);
        assert!(counted.imbalance <= 1.05, "{counted:?}");
    }

    #[test]
    fn what_pieces_share_and_hold_is_counted() {
        let shared = Items { steps: 512, again: 500, ..Items::of([1, 1 << 22], Work::of([1 << 22])) };
        assert_eq!(shared.division(2), Division::Whole(1), "both pieces would take almost everything");
        let plain = Items { steps: 512, ..Items::of([1, 1 << 22], Work::of([1 << 22])) };
        let holding = Items { held: 100, may_hold: 3000, ..plain };
        for threads in 2..=256 {
            let counted = holding.counted(holding.division(threads), threads);
            assert!(counted.tasks == 1 || counted.held <= 3000, "{threads} threads: {counted:?}");
        }
        let costly = Items { work_if_cut: Work::of([3, 1 << 22]), ..plain };
        assert_eq!(costly.division(2), Division::Whole(1));
        assert!(matches!(costly.division(16), Division::Cut(_)));
        let least = Items { least: 5, steps: 1, ..Items::of([9, 1 << 20], Work::of([9, 1 << 20])) };
        assert_eq!(least.division(64), Division::Whole(5));
    }

    /// Few divisions are compared, and none that is left out takes less time.
    #[test]
    fn the_best_division_is_among_few() {
        for count in SIZES {
            for (steps, again) in [(2, 0), (56, 1), (97, 12), (512, 3), (1 << 12, 0)] {
                for (held, may_hold) in [(0, usize::MAX), (100, 3000), (100, 20_000)] {
                    let items = Items {
                        steps,
                        again,
                        held,
                        may_hold,
                        ..Items::of([count, 1 << 18], Work::of([count, 1 << 22]))
                    };
                    for threads in [2, 3, 7, 16, 60, 64, 100, 256] {
                        let smaller: Vec<_> = items.smaller(1, threads).collect();
                        assert!(
                            smaller.len() <= 4 * TASKS,
                            "{count} x {steps}, {threads}: {}",
                            smaller.len()
                        );
                        let best = items.time(items.division_from(1, threads), threads);
                        let most = (TASKS * threads).div_ceil(count).min(steps);
                        for cut in (2..=most).map(|pieces| Division::Cut(steps.div_ceil(pieces))) {
                            let fits = items.counted(cut, threads).held <= may_hold;
                            let is_large = items.largest(cut) >= SMALLEST;
                            let is_needed = !items.is_even(Division::Whole(1), threads);
                            assert!(
                                !(fits && is_large && is_needed) || items.time(cut, threads) >= best,
                                "{count} x {steps}, {threads} threads: {cut:?}"
                            );
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn chunks_are_whole_items_or_steps_of_one() {
        assert_eq!(Division::Whole(3).chunks(10, 2), Chunks { item: 30, piece: 30 });
        assert_eq!(Division::Cut(3).chunks(10, 2), Chunks { item: 10, piece: 6 });
    }
}
