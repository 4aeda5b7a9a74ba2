//! [`Tracer`]: follows steps of the whole model, and logs the bytes and times of their blocks.
use super::PlanError;
use super::block::{Block, Follower, Running, Treatment, with};
use crate::measure::{Lap, Laps, StepInput, bytes_in_use, warm_up};
use crate::strategy::sweep;
use burn::module::Module;
use burn::tensor::Tensor;
use std::collections::HashMap;
use std::mem::take;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use web_time::Instant;

/// A step that was followed.
pub(super) struct Trace {
    /// The number of the treatment of each block.
    pub(super) treatments: Vec<usize>,
    pub(super) blocks: Vec<Block>,
    /// In order.
    events: Vec<(Event, Lap, Instant)>,
    at: HashMap<Event, usize>,
}

/// A block in a step, together with what runs after it up to the next block. Bytes are those beyond the bytes before it.
pub(super) struct Part {
    /// Bytes alive after it.
    pub(super) grows: i64,
    /// The most bytes, forward or backward.
    pub(super) most: i64,
    pub(super) forward_time: Duration,
    /// With recomputation.
    pub(super) backward_time: Duration,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Event {
    /// The step begins.
    Start,
    /// A block begins.
    Enter(usize),
    Leave(usize),
    /// The recomputation of a block begins.
    Replay(usize),
    Replayed(usize),
    /// The backward pass ends.
    End,
}

/// Runs steps and follows them.
pub(super) struct Tracer<'a, M, I, F> {
    pub(super) model: &'a M,
    pub(super) input: &'a I,
    pub(super) loss: F,
    pub(super) treatments: &'a [Treatment],
}

impl<M: Module, I: StepInput, F: Fn(&M, I) -> Tensor<1>> Tracer<'_, M, I, F> {
    /// Follows a step. `of` gives the number of a block's treatment by the number of the block.
    pub(super) fn trace(
        &self,
        of: impl Fn(usize) -> usize + Send + Sync + 'static,
    ) -> Result<Trace, PlanError> {
        let device = self.input.device();
        sweep(&device);
        warm_up();
        let before = bytes_in_use(&device).ok_or(PlanError::NotCounted)?;
        let input = self.input.copy();
        let start = (before + input.bytes()) as i64;
        let laps = Laps::start(&device);
        let log = Mutex::new(Log { laps, start, events: vec![], blocks: vec![], treatments: vec![] });
        let logger = Arc::new(Logger { log, treatments: self.treatments.to_vec(), of: Box::new(of) });
        logger.log().record(Event::Start);
        let (loss, _) = with(Running::Followed(logger.clone()), || (self.loss)(self.model, input));
        if logger.log().blocks.is_empty() {
            return Err(PlanError::NoBlocks);
        }
        if !loss.is_tracked() {
            return Err(PlanError::NoGradient);
        }
        drop(loss.backward());
        let mut log = logger.log();
        log.record(Event::End);
        let Log { events, treatments, blocks, .. } = &mut *log;
        let (events, treatments, blocks) = (take(events), take(treatments), take(blocks));
        let at = events.iter().enumerate().map(|(index, (event, ..))| (*event, index)).collect();
        Ok(Trace { treatments, blocks, events, at })
    }
}

impl Trace {
    /// The most bytes of the step.
    pub(super) fn peak(&self) -> i64 {
        self.most(0, self.events.len() - 1)
    }

    /// Whether a block was recomputed, which it is if anything in it is tracked.
    pub(super) fn was_replayed(&self, number: usize) -> bool {
        self.at.contains_key(&Event::Replayed(number))
    }

    /// What runs before the first block: bytes alive after it, and the most.
    pub(super) fn stem(&self) -> (i64, i64) {
        let (enter, end) = (self.at[&Event::Enter(0)], self.events.len() - 1);
        // The backward pass after that of the first block.
        let back = (0..self.blocks.len()).find_map(|block| self.at.get(&Event::Replayed(block)));
        let back = back.map_or(0, |&replayed| self.most(replayed, end));
        (self.live(enter), self.most(0, enter).max(back))
    }

    /// Its backward pass is what is between those of its neighbors, if they are recomputed.
    pub(super) fn part(&self, number: usize) -> Part {
        let [enter, leave] = [Event::Enter(number), Event::Leave(number)].map(|event| self.at[&event]);
        let turn = self.at[&Event::Leave(self.blocks.len() - 1)];
        let next = self.at.get(&Event::Enter(number + 1)).copied().unwrap_or(turn);
        let [from, to, to_next] = self.backward(number, turn);
        Part {
            grows: self.live(next) - self.live(enter),
            most: self.most(enter, next).max(self.most(from, to)) - self.live(enter),
            forward_time: self.events[leave].2 - self.events[enter].2,
            backward_time: self.events[to_next].2 - self.events[from].2,
        }
    }

    /// Where the backward pass of a block begins and ends, and where that of the block before begins.
    fn backward(&self, number: usize, turn: usize) -> [usize; 3] {
        let later = (number + 1..self.blocks.len()).find_map(|block| self.at.get(&Event::Replayed(block)));
        let earlier = (0..number).rev().find_map(|block| self.at.get(&Event::Replay(block)));
        let earlier = earlier.copied().unwrap_or(self.events.len() - 1);
        let replayed = self.at.get(&Event::Replayed(number)).copied().unwrap_or(earlier);
        [later.copied().unwrap_or(turn), replayed, earlier]
    }

    /// An upper bound of the bytes that a block keeps if it is not recomputed.
    pub(super) fn keeps_at_most(&self, number: usize) -> i64 {
        let [enter, leave] = [Event::Enter(number), Event::Leave(number)].map(|event| self.at[&event]);
        self.most(enter, leave) - self.live(enter)
    }

    fn live(&self, event: usize) -> i64 {
        self.events[event].1.live
    }

    /// The most bytes from one event to another.
    fn most(&self, from: usize, to: usize) -> i64 {
        self.events[from + 1..=to].iter().map(|(_, lap, _)| lap.most).max().unwrap_or(0)
    }
}

/// What happens in a step.
struct Log {
    laps: Option<Laps>,
    /// Bytes alive before the step, with the input.
    start: i64,
    events: Vec<(Event, Lap, Instant)>,
    /// The blocks that ran, and the numbers of their treatments.
    blocks: Vec<Block>,
    treatments: Vec<usize>,
}

impl Log {
    fn record(&mut self, event: Event) {
        let Some(laps) = &mut self.laps else { return };
        let Lap { live, most } = laps.lap();
        self.events.push((event, Lap { live: live - self.start, most: most - self.start }, Instant::now()));
    }
}

/// Treats the blocks of a step, and logs what happens.
struct Logger {
    log: Mutex<Log>,
    treatments: Vec<Treatment>,
    /// The number of a block's treatment by the number of the block.
    of: Box<dyn Fn(usize) -> usize + Send + Sync>,
}

impl Logger {
    fn log(&self) -> MutexGuard<'_, Log> {
        self.log.lock().unwrap_or_else(PoisonError::into_inner) // every statement leaves it whole
    }
}

impl Follower for Logger {
    fn enter(&self, block: Block) -> (usize, Treatment) {
        let mut log = self.log();
        let number = log.blocks.len();
        let treatment = (self.of)(number);
        log.treatments.push(treatment);
        log.blocks.push(block);
        log.record(Event::Enter(number));
        (number, self.treatments[treatment].clone())
    }

    fn leave(&self, number: usize) {
        self.log().record(Event::Leave(number));
    }

    fn replay(&self, number: usize) {
        self.log().record(Event::Replay(number));
    }

    fn replayed(&self, number: usize) {
        self.log().record(Event::Replayed(number));
    }
}
