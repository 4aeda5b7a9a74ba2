//! The cache of lazy weights. It holds as many weights as the budget allows, preferably those that are used next.
//!
//! [`pool`] is the memory that weights are read into, [`order`] learns the order in which they are used, and [`policy`]
//! decides what is evicted and what is read ahead. This file has the state that all threads share, and the reading.
mod handle;
mod order;
mod policy;
mod pool;
mod statistics;

pub use handle::LazyCache;
pub use statistics::{Progress, Statistics};

use super::LazyError;
use super::source::{Entry, words_for};
use burn::tensor::DType;
use burn_memsave_layers::frozen::{DeviceBudget, Resident};
use order::Order;
use policy::{Idle, Residence, Room};
use pool::{Pool, WeightBytes};
pub(super) use statistics::OnProgress;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

/// A weight of the cache.
#[derive(Debug)]
pub(super) struct CachedWeight {
    /// Path of the parameter.
    pub path: String,
    pub entry: Entry,
    /// The dtype that it is read as.
    pub dtype: DType,
    /// Whether only rows of it are read, as far as is known.
    pub by_rows: bool,
    /// Its copies that stay on devices.
    pub resident: Resident,
}

impl CachedWeight {
    pub fn len(&self) -> usize {
        self.entry.len_as(self.dtype)
    }

    /// The memory that it takes, in whole words.
    pub fn footprint(&self) -> usize {
        self.len().next_multiple_of(size_of::<u64>())
    }
}

/// How the cache works.
pub(super) struct Settings {
    pub budget: usize,
    pub device_budget: Arc<DeviceBudget>,
    /// The number of weights that are read ahead.
    pub prefetch: usize,
    pub on_progress: Option<OnProgress>,
}

/// The weights of a module. All its lazy parameters share this cache, which frees its weights when the last of them is
/// dropped.
pub(super) struct Cache(Arc<Shared>);

impl Cache {
    pub fn new(weights: Vec<CachedWeight>, settings: Settings) -> Self {
        let ahead = settings.prefetch > 0 && weights.len() > 1;
        let state = Mutex::new(State::new(&weights));
        let (pool, changed) = (Pool::new(settings.budget), Condvar::new());
        let shared = Arc::new(Shared { weights, settings, pool, state, changed });
        if ahead {
            let reader = shared.clone();
            let thread = std::thread::Builder::new().name("burn-memsave weights".into());
            // If there can be no thread, every weight is read when it is used.
            let _ = thread.spawn(move || reader.read_ahead());
        }
        Self(shared)
    }

    pub fn weight(&self, index: usize) -> &CachedWeight {
        &self.0.weights[index]
    }

    /// A weight, read if it is not in memory.
    pub fn get(&self, index: usize) -> Result<bytes::Bytes, LazyError> {
        self.0.get(index)
    }

    /// Rows of a weight.
    pub fn rows(&self, index: usize, rows: &[usize]) -> Result<Vec<u64>, LazyError> {
        self.0.rows(index, rows)
    }

    pub fn handle(&self) -> LazyCache {
        LazyCache(self.0.clone())
    }
}

impl Drop for Cache {
    fn drop(&mut self) {
        let mut state = self.0.lock();
        state.stopped = true;
        state.slots.fill_with(|| Slot::Absent);
        self.0.pool.close();
        self.0.weights.iter().for_each(|weight| weight.resident.clear());
        self.0.changed.notify_all();
    }
}

impl fmt::Debug for Cache {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Cache({} weights)", self.0.weights.len())
    }
}

/// What the users of the cache, the thread that reads ahead and the handles share.
struct Shared {
    weights: Vec<CachedWeight>,
    settings: Settings,
    pool: Arc<Pool>,
    /// Where both are locked, this is locked before the pool.
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug)]
enum Slot {
    Absent,
    /// A thread is reading it.
    Reading,
    Present(Arc<WeightBytes>),
}

/// Where each weight is. Every vector has one entry per weight.
#[derive(Debug)]
struct State {
    slots: Vec<Slot>,
    /// The bytes that were read last, which something may still hold after they were evicted.
    last_read: Vec<Weak<WeightBytes>>,
    by_rows: Vec<bool>,
    /// Whether it was read at all.
    seen: Vec<bool>,
    order: Order,
    statistics: Statistics,
    /// Whether reading ahead has stopped: the cache was dropped, or a read failed, which the next use of that weight
    /// will report.
    stopped: bool,
}

impl State {
    fn new(weights: &[CachedWeight]) -> Self {
        Self {
            slots: weights.iter().map(|_| Slot::Absent).collect(),
            last_read: weights.iter().map(|_| Weak::new()).collect(),
            by_rows: weights.iter().map(|weight| weight.by_rows).collect(),
            seen: vec![false; weights.len()],
            order: Order::new(weights.len()),
            statistics: Statistics::default(),
            stopped: false,
        }
    }

    /// The bytes of a weight, if the cache or somebody else has them.
    fn present(&self, index: usize) -> Option<Arc<WeightBytes>> {
        match &self.slots[index] {
            Slot::Present(bytes) => Some(bytes.clone()),
            _ => self.last_read[index].upgrade(),
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

    /// The weights that nobody but the cache holds.
    fn idle(&self) -> Vec<Idle> {
        let idle = self.slots.iter().enumerate().filter_map(|(index, slot)| match slot {
            Slot::Present(bytes) if Arc::strong_count(bytes) == 1 => {
                Some(Idle { index, bytes: bytes.footprint() })
            }
            _ => None,
        });
        idle.collect()
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner) // consistent after every statement
    }

    fn room(&self) -> Room {
        Room { budget: self.settings.budget, held: self.pool.held() }
    }

    fn get(&self, index: usize) -> Result<bytes::Bytes, LazyError> {
        let mut state = self.lock();
        state.by_rows[index] = false;
        state.order.record(index);
        if self.settings.prefetch > 0 && state.slots.iter().any(|slot| matches!(slot, Slot::Absent)) {
            self.changed.notify_all();
        }
        if let Some(bytes) = state.present(index) {
            state.statistics.hits += 1;
            return Ok(bytes.share());
        }
        let waiting = Instant::now();
        while matches!(state.slots[index], Slot::Reading) {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        let result = match state.present(index) {
            Some(bytes) => {
                drop(state);
                Ok(bytes.share())
            }
            None => self.read(state, index, None, WeightBytes::share),
        };
        let mut state = self.lock();
        state.statistics.stalls += 1;
        state.statistics.stalled += waiting.elapsed();
        result
    }

    /// Reads a weight, and evicts idle ones to make room. With `ahead` it is read ahead, and weights among the next
    /// `ahead` uses are not evicted. Unless `take` keeps the bytes alive, only the cache holds them once the lock is
    /// released.
    fn read<R>(
        &self,
        mut state: MutexGuard<'_, State>,
        index: usize,
        ahead: Option<usize>,
        take: impl FnOnce(&Arc<WeightBytes>) -> R,
    ) -> Result<R, LazyError> {
        state.slots[index] = Slot::Reading;
        self.evict(&mut state, self.weights[index].footprint(), ahead.unwrap_or(0));
        let place = self.place(index); // in the room that was just made
        drop(state);
        let begin = Instant::now();
        // A panic must not leave those who wait for this weight waiting forever.
        let result = catch_unwind(AssertUnwindSafe(|| self.fill(place, index)))
            .unwrap_or_else(|_| Err(self.weights[index].entry.error("reading it panicked")));
        let reading = begin.elapsed();

        let mut state = self.lock();
        state.slots[index] = match &result {
            Ok(bytes) if self.room().fits(0) && !(state.stopped && ahead.is_some()) => {
                Slot::Present(bytes.clone())
            }
            _ => Slot::Absent,
        };
        self.changed.notify_all();
        let bytes = result?;
        state.last_read[index] = Arc::downgrade(&bytes);
        let (taken, len) = (take(&bytes), bytes.bytes().len());
        drop(bytes);
        state.statistics.read_ahead += u64::from(ahead.is_some());
        self.count(state, index, len, reading);
        Ok(taken)
    }

    /// The memory for a weight, or its part of a mapped file.
    fn place(&self, index: usize) -> WeightBytes {
        let weight = &self.weights[index];
        match weight.entry.map(weight.dtype) {
            Some(mapped) => self.pool.mapped(mapped, weight.entry.clone()),
            None => self.pool.buffer(weight.len()),
        }
    }

    fn fill(&self, mut place: WeightBytes, index: usize) -> Result<Arc<WeightBytes>, LazyError> {
        let CachedWeight { entry, dtype, .. } = &self.weights[index];
        place.fill(|buffer| entry.read_as(*dtype, buffer))?;
        Ok(Arc::new(place))
    }

    /// Counts a read, and reports the progress.
    fn count(&self, mut state: MutexGuard<'_, State>, index: usize, bytes: usize, reading: Duration) {
        state.statistics.reads += 1;
        state.statistics.bytes_read += bytes as u64;
        state.statistics.reading += reading;
        let first = !std::mem::replace(&mut state.seen[index], true);
        if first && let Some(on_progress) = &self.settings.on_progress {
            let parameters = state.seen.iter().filter(|seen| **seen).count();
            let (of, bytes) = (state.seen.len(), state.statistics.bytes_read);
            drop(state);
            on_progress(Progress { parameter: &self.weights[index].path, parameters, of, bytes });
        }
    }

    fn evict(&self, state: &mut State, len: usize, protected: usize) {
        let evicted = policy::to_evict(self.room(), len, state.idle(), state.order.upcoming(), protected);
        for index in evicted {
            state.slots[index] = Slot::Absent;
        }
    }

    /// Reads what is expected next, until the cache is dropped.
    fn read_ahead(&self) {
        let mut state = self.lock();
        while !state.stopped {
            match self.to_read_ahead(&state) {
                Some((ahead, index)) => {
                    let failed = self.read(state, index, Some(ahead), |_| ()).is_err();
                    state = self.lock();
                    state.stopped |= failed;
                }
                None => state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
            }
        }
    }

    /// The weight to read ahead, if there is room, and how many are used before it.
    fn to_read_ahead(&self, state: &State) -> Option<(usize, usize)> {
        // Before the first use it is not known whether the module will be used at all.
        if !state.order.is_trusted() || state.seen.iter().all(|seen| !seen) {
            return None;
        }
        let residence = |index| state.residence(index);
        let found = policy::to_read_ahead(state.order.upcoming(), self.settings.prefetch, residence);
        found.filter(|&(ahead, index)| {
            let len = self.weights[index].footprint();
            policy::would_fit(self.room(), len, &state.idle(), state.order.upcoming(), ahead)
        })
    }

    fn rows(&self, index: usize, rows: &[usize]) -> Result<Vec<u64>, LazyError> {
        let CachedWeight { entry, dtype, .. } = &self.weights[index];
        let width = entry.tensor.shape.num_elements() / entry.tensor.shape[0].max(1) * dtype.size();
        entry.check_rows(rows)?;
        let len = rows.len() * width;
        let mut words = words_for(len);
        let out = &mut bytemuck::cast_slice_mut::<u64, u8>(&mut words)[..len];
        // In 64 bits, since all weights together may exceed the address space of a 32-bit machine.
        let bytes = || self.weights.iter().map(|weight| weight.footprint() as u64).sum::<u64>();
        let all_fit = || bytes() <= self.settings.budget as u64;
        let mut state = self.lock();
        let table = match state.present(index) {
            Some(bytes) => {
                state.order.record(index);
                state.statistics.hits += 1;
                drop(state);
                Some(bytes.share())
            }
            None => {
                drop(state);
                all_fit().then(|| self.get(index)).transpose()?
            }
        };
        match table {
            Some(table) => {
                for (row, out) in rows.iter().zip(out.chunks_exact_mut(width.max(1))) {
                    out.copy_from_slice(&table[row * width..][..width]);
                }
            }
            None => {
                self.lock().order.record(index);
                let begin = Instant::now();
                entry.read_rows_as(*dtype, rows, out)?;
                let mut state = self.lock();
                state.statistics.stalls += 1;
                state.statistics.stalled += begin.elapsed();
                self.count(state, index, len, begin.elapsed());
            }
        }
        Ok(words)
    }
}
