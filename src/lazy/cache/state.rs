//! [`State`]: where each weight of the cache is, and when it is expected to be used.
use super::order::{Expected, Order};
use super::policy::{self, Ahead, Idle, Residence};
use super::pool::WeightBytes;
use super::{CachedWeight, Statistics};
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::{Arc, Weak};

#[derive(Debug)]
pub(super) enum Slot {
    Absent,
    /// A thread is reading it.
    Reading,
    Present(Arc<WeightBytes>),
}

/// Where each weight is. Every vector has one entry per weight.
#[derive(Debug)]
pub(super) struct State {
    pub slots: Vec<Slot>,
    /// How many slots are absent.
    pub absent: usize,
    /// The bytes that were read last, which something may still hold after they were evicted.
    pub last_read: Vec<Weak<WeightBytes>>,
    /// How many threads wait until another one has read it.
    pub awaited: Vec<u32>,
    pub by_rows: Vec<bool>,
    /// Whether it was read at all.
    pub seen: Vec<bool>,
    pub seen_count: usize,
    /// When it is expected to be used.
    pub next_use: Vec<u64>,
    pub idle: Idle,
    pub order: Order,
    /// What [`LazyCache::expect`] was told, as far as it was neither read nor used since.
    pub announced: VecDeque<Expected>,
    /// The times for which it was told of weights.
    pub announced_times: Range<u64>,
    pub statistics: Statistics,
    /// Whether a weight would be read ahead if there were room, so that whoever gives bytes back wakes the thread that reads ahead.
    pub awaits_room: bool,
    /// Whether reading ahead has stopped: the cache was dropped, or a read failed, which the next use of that weight
    /// will report.
    pub stopped: bool,
}

impl State {
    pub fn new(weights: &[CachedWeight]) -> Self {
        Self {
            slots: weights.iter().map(|_| Slot::Absent).collect(),
            absent: weights.len(),
            last_read: weights.iter().map(|_| Weak::new()).collect(),
            awaited: vec![0; weights.len()],
            by_rows: weights.iter().map(|weight| weight.by_rows).collect(),
            seen: vec![false; weights.len()],
            seen_count: 0,
            next_use: vec![u64::MAX; weights.len()],
            idle: Idle::default(),
            order: Order::new(weights.len()),
            announced: VecDeque::new(),
            announced_times: 0..0,
            statistics: Statistics::default(),
            awaits_room: false,
            stopped: false,
        }
    }

    pub fn replace(&mut self, index: usize, slot: Slot) {
        let is_absent = |slot: &Slot| usize::from(matches!(slot, Slot::Absent));
        self.absent += is_absent(&slot);
        self.absent -= is_absent(&std::mem::replace(&mut self.slots[index], slot));
    }

    /// Records a use.
    pub fn record(&mut self, index: usize) {
        let time = self.order.record(index).unwrap_or(u64::MAX);
        self.expect(Expected { time, weight: index });
    }

    /// Changes when a weight is expected to be used.
    pub fn expect(&mut self, next: Expected) {
        let before = std::mem::replace(&mut self.next_use[next.weight], next.time);
        if let Some(bytes) = self.idle.remove(Expected { time: before, ..next }) {
            self.idle.insert(next, bytes);
        }
    }

    /// The bytes of a weight, if the cache or somebody else has them. The weight is in use until they are
    /// [given back](Self::give_back).
    pub fn present(&mut self, index: usize) -> Option<Arc<WeightBytes>> {
        match &self.slots[index] {
            Slot::Present(bytes) => {
                self.idle.remove(Expected { time: self.next_use[index], weight: index });
                Some(bytes.clone())
            }
            _ => self.last_read[index].upgrade(),
        }
    }

    /// Takes back bytes that were in use, and returns them if the cache does not have them.
    pub fn give_back(&mut self, index: usize, bytes: Arc<WeightBytes>) -> Option<Arc<WeightBytes>> {
        let cached = matches!(&self.slots[index], Slot::Present(cached) if Arc::ptr_eq(cached, &bytes));
        if !cached {
            return Some(bytes);
        }
        drop(bytes);
        self.note_idle(index);
        None
    }

    /// Adds a weight to the idle ones if only the cache holds it, and nobody is about to.
    pub fn note_idle(&mut self, index: usize) {
        if let Slot::Present(bytes) = &self.slots[index]
            && self.awaited[index] == 0
            && Arc::strong_count(bytes) == 1
        {
            self.idle.insert(Expected { time: self.next_use[index], weight: index }, bytes.footprint());
        }
    }

    /// Evicts the idle weight whose expected use is farthest away, but none that is expected at the `protected` times. Whether there was one.
    pub fn evict(&mut self, protected: &Range<u64>) -> bool {
        let Some(farthest) = self.idle.farthest(self.order.now(), protected) else { return false };
        self.idle.remove(farthest);
        self.replace(farthest.weight, Slot::Absent);
        true
    }

    /// The times that are protected when a weight is read ahead: those before its own, and all that were announced, whose weights may come
    /// in another order.
    pub fn protected(&self, next: Expected) -> Range<u64> {
        let (now, Range { start, end }) = (self.order.now(), self.announced_times.clone());
        match now < end {
            true => start..end.max(next.time),
            false => now..next.time,
        }
    }

    fn residence(&self, index: usize) -> Residence {
        match &self.slots[index] {
            _ if self.by_rows[index] => Residence::ByRows,
            Slot::Present(_) => Residence::Present,
            _ if self.last_read[index].strong_count() > 0 => Residence::Present,
            Slot::Reading => Residence::Reading,
            Slot::Absent => Residence::Absent,
        }
    }

    /// Expects these weights next, in this order.
    pub fn announce(&mut self, weights: Vec<usize>) {
        let now = self.order.now();
        self.announced_times = now..now + weights.len() as u64;
        self.announced = (now..).zip(weights).map(|(time, weight)| Expected { time, weight }).collect();
        // The first use of a weight counts, so it is set last.
        for at in (0..self.announced.len()).rev() {
            self.expect(self.announced[at]);
        }
    }

    /// The first weight that was announced, and was neither read nor used since.
    pub fn first_announced(&mut self) -> Option<Expected> {
        while let Some(&next) = self.announced.front() {
            let used = self.order.used_since(next.weight, self.announced_times.start);
            if !used && self.residence(next.weight) == Residence::Absent {
                return Some(next);
            }
            self.announced.pop_front();
        }
        None
    }

    /// The weight that is expected first, of those to read ahead.
    pub fn first_learned(&mut self, prefetch: usize) -> Option<Expected> {
        // Before the first use it is not known whether the module will be used at all.
        if !self.order.is_trusted() || self.seen_count == 0 {
            return None;
        }
        let Ahead { present, read } =
            policy::to_read_ahead(self.order.upcoming(), prefetch, |index| self.residence(index));
        // What was announced is known better.
        for next in present {
            if !self.is_announced(next.weight) {
                self.expect(next);
            }
        }
        read
    }

    /// Whether a weight was announced, and was not used since.
    fn is_announced(&self, weight: usize) -> bool {
        let times = &self.announced_times;
        times.contains(&self.next_use[weight]) && !self.order.used_since(weight, times.start)
    }
}
