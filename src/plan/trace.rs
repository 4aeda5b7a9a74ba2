//! Steps of the whole model, followed.
use super::PlanError;
use super::block::{Running, Treatment, with};
use crate::checkpoint::Tensors;
use crate::checkpoint::parents::token;
use crate::measure::{Lap, Laps, StepInput, bytes_in_use};
use burn::module::{Module, ModuleVisitor, Param, ParamId};
use burn::tensor::Tensor;
use std::any::type_name;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use web_time::Instant;

/// A step in which blocks are treated so.
pub(super) struct Trace {
    /// The number of the treatment of each block.
    pub(super) treatments: Vec<usize>,
    pub(super) blocks: Vec<Block>,
    /// In their order.
    events: Vec<(Event, Lap, Instant)>,
    at: HashMap<Event, usize>,
}

/// A block that ran.
#[derive(Clone, PartialEq)]
pub(super) struct Block {
    /// The type.
    pub(super) name: &'static str,
    /// Its first parameter, and the path of that in it.
    pub(super) parameter: Option<(ParamId, Vec<String>)>,
}

/// A block in a step, and what runs after it up to the next one; bytes beyond those before it.
pub(super) struct Part {
    /// Alive after it.
    pub(super) grows: i64,
    /// The most, forward or backward.
    pub(super) most: i64,
    pub(super) forward_time: Duration,
    /// With what is computed again.
    pub(super) backward_time: Duration,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Event {
    /// The step begins.
    Start,
    /// A block begins.
    Enter(usize),
    Leave(usize),
    /// A block begins to be computed again.
    Replay(usize),
    Replayed(usize),
    /// The backward pass ends.
    End,
}

/// What steps are followed with.
pub(super) struct Tracer<'a, M, I, F> {
    pub(super) model: &'a M,
    pub(super) input: &'a I,
    pub(super) loss: F,
    pub(super) treatments: &'a [Treatment],
}

impl<M: Module, I: StepInput, F: Fn(&M, I) -> Tensor<1>> Tracer<'_, M, I, F> {
    /// Follows a step in which blocks are treated so; `of` says how by their number.
    pub(super) fn trace(&self, of: impl Fn(usize) -> usize + 'static) -> Result<Trace, PlanError> {
        let device = self.input.device();
        // Burn frees graphs whose tensors are gone in the next backward pass.
        drop(token(&device.clone().autodiff()).require_grad().backward());
        let before = bytes_in_use(&device).ok_or(PlanError::NotCounted)?;
        let input = self.input.copy();
        let start = (before + input.bytes()) as i64;
        let log = Log { laps: Laps::start(&device), start, events: vec![] };
        let log = Arc::new(Mutex::new(log));
        lock(&log).record(Event::Start);
        let tracing = Tracing {
            log: log.clone(),
            all: self.treatments.to_vec(),
            of: Box::new(of),
            treatments: vec![],
            blocks: vec![],
        };
        let (loss, running) = with(Running::Tracing(tracing), || (self.loss)(self.model, input));
        let Running::Tracing(Tracing { treatments, blocks, .. }) = running else {
            unreachable!("as it began")
        };
        if blocks.is_empty() {
            return Err(PlanError::NoBlocks);
        }
        if !loss.is_tracked() {
            return Err(PlanError::NoGradient);
        }
        drop(loss.backward());
        lock(&log).record(Event::End);
        let events = std::mem::take(&mut lock(&log).events);
        let at = events.iter().enumerate().map(|(index, (event, ..))| (*event, index)).collect();
        Ok(Trace { treatments, blocks, events, at })
    }
}

impl Trace {
    /// The most bytes of the step.
    pub(super) fn peak(&self) -> i64 {
        self.most(0, self.events.len() - 1)
    }

    /// Whether a block was computed again, which it is if anything in it is tracked.
    pub(super) fn was_replayed(&self, number: usize) -> bool {
        self.at.contains_key(&Event::Replayed(number))
    }

    /// What runs before the first block: bytes alive after it, and the most.
    pub(super) fn stem(&self) -> (i64, i64) {
        let (enter, end) = (self.at[&Event::Enter(0)], self.events.len() - 1);
        // The backward pass, after the first block is done with.
        let back = (0..self.blocks.len()).find_map(|block| self.at.get(&Event::Replayed(block)));
        let back = back.map_or(0, |&replayed| self.most(replayed, end));
        (self.live(enter), self.most(0, enter).max(back))
    }

    /// Its backward pass is that between those of its neighbours, if they are computed again.
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

    /// What a block keeps if it is not computed again is not more than this.
    pub(super) fn keeps_at_most(&self, number: usize) -> i64 {
        let [enter, leave] = [Event::Enter(number), Event::Leave(number)].map(|event| self.at[&event]);
        self.most(enter, leave) - self.live(enter)
    }

    fn live(&self, event: usize) -> i64 {
        self.events[event].1.live
    }

    /// From an event to another.
    fn most(&self, from: usize, to: usize) -> i64 {
        self.events[from + 1..=to].iter().map(|(_, lap, _)| lap.most).max().unwrap_or(0)
    }
}

/// What happens in a step.
struct Log {
    laps: Option<Laps>,
    /// Bytes alive with the input.
    start: i64,
    events: Vec<(Event, Lap, Instant)>,
}

impl Log {
    fn record(&mut self, event: Event) {
        let Some(laps) = &mut self.laps else { return };
        let Lap { live, most } = laps.lap();
        self.events.push((event, Lap { live: live - self.start, most: most - self.start }, Instant::now()));
    }
}

fn lock(log: &Mutex<Log>) -> MutexGuard<'_, Log> {
    log.lock().unwrap_or_else(PoisonError::into_inner) // every statement leaves it whole
}

/// Follows the blocks of a step.
pub(super) struct Tracing {
    log: Arc<Mutex<Log>>,
    all: Vec<Treatment>,
    of: Box<dyn Fn(usize) -> usize>,
    /// The numbers of those so far.
    treatments: Vec<usize>,
    blocks: Vec<Block>,
}

impl Tracing {
    pub(super) fn block<M, I, O, F>(&mut self, module: &M, input: I, forward: F) -> O
    where
        M: Module + 'static,
        I: Tensors,
        O: Tensors,
        F: Fn(&M, I) -> O + Copy + Send + Sync + 'static,
    {
        let number = self.blocks.len();
        let treatment = (self.of)(number);
        self.treatments.push(treatment);
        let mut first = First::default();
        module.visit(&mut first);
        self.blocks.push(Block { name: type_name::<M>(), parameter: first.parameter });

        lock(&self.log).record(Event::Enter(number));
        let log = self.log.clone();
        let output = self.all[treatment].run(module, input, forward, move |replay| {
            lock(&log).record(Event::Replay(number));
            replay();
            lock(&log).record(Event::Replayed(number));
        });
        lock(&self.log).record(Event::Leave(number));
        output
    }
}

/// Finds the first parameter.
#[derive(Default)]
struct First {
    path: Vec<String>,
    parameter: Option<(ParamId, Vec<String>)>,
}

impl ModuleVisitor for First {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.path.push(name.into());
    }
    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.pop();
    }
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.parameter.get_or_insert_with(|| (param.id, self.path.clone()));
    }
}
