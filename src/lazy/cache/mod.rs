//! The cache of lazy weights. It holds as many weights as the budget allows, preferably those that are used next.
//!
//! [`pool`] is the memory that weights are read into, [`order`] learns the order in which they are used, and [`policy`]
//! decides what is evicted and what is read ahead. [`state`] says where each weight is. This file has what all threads share, and the
//! reading.
//!
//! A use takes a time that grows with the logarithm of what there is, of weights and of remembered uses: nothing that runs at every use goes
//! through all of them. So the cache has to know which weights are idle, and whoever holds a weight tells it when they no longer do: see
//! [`Lease`].
mod handle;
mod order;
mod policy;
mod pool;
mod state;
mod statistics;

pub use handle::LazyCache;
pub use statistics::{Progress, Statistics};

use super::LazyError;
use super::source::Entry;
use super::words::{Words, words_for};
use burn::tensor::DType;
use burn_memsave_layers::frozen::{DeviceBudget, Resident};
use order::Expected;
use policy::{Idle, Room};
use pool::{Pool, WeightBytes};
use state::{Slot, State};
pub(super) use statistics::OnProgress;
use std::fmt;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
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

    /// The length of a row (an entry of the first axis) as it is stored, in bytes.
    fn row_len(&self) -> usize {
        let shape = &self.entry.tensor.shape;
        shape.num_elements() / shape[0].max(1) * self.dtype.size()
    }

    /// The names in its path.
    fn names(&self) -> impl Iterator<Item = &str> {
        self.path.split('.')
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
        // In 64 bits, since all weights together may exceed the address space of a 32-bit machine.
        let bytes: u64 = weights.iter().map(|weight| weight.footprint() as u64).sum();
        let all_fit = bytes <= settings.budget as u64;
        let mut by_path: Vec<usize> = (0..weights.len()).collect();
        by_path.sort_unstable_by(|&a, &b| weights[a].names().cmp(weights[b].names()));
        let shared = Arc::new(Shared { weights, all_fit, by_path, settings, pool, state, changed });
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

    /// Consecutive rows of a weight as it is stored, without a copy if it is in memory.
    pub fn row_range(&self, index: usize, rows: Range<usize>) -> Result<bytes::Bytes, LazyError> {
        self.0.row_range(index, rows)
    }

    /// Counts a use of a weight that is unpacked past the cache.
    pub fn count_unpacked(&self, index: usize) {
        self.0.count_unpacked(index);
    }

    /// The most bytes that it may hold.
    pub fn budget(&self) -> usize {
        self.0.settings.budget
    }

    /// Whether weights may stay on devices.
    pub fn keeps_on_devices(&self) -> bool {
        self.0.settings.device_budget.bytes() > 0
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
        state.absent = state.slots.len();
        state.idle = Idle::default();
        state.announced.clear();
        self.0.pool.close();
        // A device may have to finish what it does before it drops a tensor, and give back leases on a thread of its own.
        drop(state);
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
    /// Whether all weights together are within the budget.
    all_fit: bool,
    /// The weights in the order of the names in their paths, so that those of a module are next to each other.
    by_path: Vec<usize>,
    settings: Settings,
    pool: Arc<Pool>,
    /// Where both are locked, this is locked before the pool.
    state: Mutex<State>,
    changed: Condvar,
}

/// Bytes of a weight that somebody outside the cache holds. The cache is told when they are dropped.
struct Lease {
    shared: Arc<Shared>,
    index: usize,
    /// `None` only when it is dropped.
    bytes: Option<Arc<WeightBytes>>,
}

impl AsRef<[u8]> for Lease {
    fn as_ref(&self) -> &[u8] {
        self.bytes.as_ref().map_or(&[], |bytes| bytes.bytes())
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        if let Some(bytes) = self.bytes.take() {
            let mut state = self.shared.lock();
            let not_cached = state.give_back(self.index, bytes);
            drop(state);
            drop(not_cached);
            if std::mem::take(&mut self.shared.lock().awaits_room) {
                self.shared.changed.notify_all();
            }
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner) // consistent after every statement
    }

    fn room(&self) -> Room {
        Room { budget: self.settings.budget, held: self.pool.held() }
    }

    fn lease(self: &Arc<Self>, index: usize, bytes: Arc<WeightBytes>) -> bytes::Bytes {
        bytes::Bytes::from_owner(Lease { shared: self.clone(), index, bytes: Some(bytes) })
    }

    /// The weights of the parameter or module with this path, in the order of the module.
    fn at_path(&self, path: &str) -> Vec<usize> {
        let begin = self.by_path.partition_point(|&index| self.weights[index].names().lt(path.split('.')));
        let is_within = |&&index: &&usize| {
            let rest = self.weights[index].path.strip_prefix(path);
            rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
        };
        let mut found: Vec<usize> = self.by_path[begin..].iter().take_while(is_within).copied().collect();
        found.sort_unstable();
        found
    }

    fn get(self: &Arc<Self>, index: usize) -> Result<bytes::Bytes, LazyError> {
        let mut state = self.lock();
        state.by_rows[index] = false;
        state.record(index);
        if self.settings.prefetch > 0 && state.absent > 0 {
            self.changed.notify_all();
        }
        if let Some(bytes) = state.present(index) {
            state.statistics.hits += 1;
            drop(state);
            return Ok(self.lease(index, bytes));
        }
        let waiting = Instant::now();
        state.awaited[index] += 1;
        while matches!(state.slots[index], Slot::Reading) {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.awaited[index] -= 1;
        let result = match state.present(index) {
            Some(bytes) => {
                drop(state);
                Ok(self.lease(index, bytes))
            }
            None => self.read(state, index, None, |bytes| self.lease(index, bytes)),
        };
        let mut state = self.lock();
        state.statistics.stalls += 1;
        state.statistics.stalled += waiting.elapsed();
        result
    }

    /// Reads a weight, and evicts idle ones to make room. With `ahead` it is read ahead, and weights that are expected at these times stay.
    /// Unless `take` keeps the bytes alive, only the cache holds them once the lock is
    /// released.
    fn read<R>(
        &self,
        mut state: MutexGuard<'_, State>,
        index: usize,
        ahead: Option<Range<u64>>,
        take: impl FnOnce(Arc<WeightBytes>) -> R,
    ) -> Result<R, LazyError> {
        let (len, is_ahead) = (self.weights[index].footprint(), ahead.is_some());
        let protected = ahead.unwrap_or_default();
        while !self.room().fits(len) && state.evict(&protected) {}
        let place = self.place(index); // in the room that was just made
        state.replace(index, Slot::Reading);
        drop(state);
        let begin = Instant::now();
        // A panic must not leave those who wait for this weight waiting forever.
        let result = catch_unwind(AssertUnwindSafe(|| self.fill(place, index)))
            .unwrap_or_else(|_| Err(self.weights[index].entry.error("reading it panicked")));
        let reading = begin.elapsed();

        let mut state = self.lock();
        let slot = match &result {
            Ok(bytes) if self.room().fits(0) && !(state.stopped && is_ahead) => Slot::Present(bytes.clone()),
            _ => Slot::Absent,
        };
        state.replace(index, slot);
        self.changed.notify_all();
        let bytes = result?;
        state.last_read[index] = Arc::downgrade(&bytes);
        let (len, taken) = (bytes.bytes().len(), take(bytes));
        state.note_idle(index);
        state.statistics.read_ahead += u64::from(is_ahead);
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
        state.seen_count += usize::from(first);
        if first && let Some(on_progress) = &self.settings.on_progress {
            let (parameters, of, bytes) = (state.seen_count, state.seen.len(), state.statistics.bytes_read);
            drop(state);
            on_progress(Progress { parameter: &self.weights[index].path, parameters, of, bytes });
        }
    }

    /// Reads what is expected next, until the cache is dropped.
    fn read_ahead(&self) {
        let mut state = self.lock();
        while !state.stopped {
            match self.to_read_ahead(&mut state) {
                Some(next) => {
                    state.expect(next);
                    let protected = state.protected(next);
                    let failed = self.read(state, next.weight, Some(protected), drop).is_err();
                    state = self.lock();
                    state.stopped |= failed;
                }
                None => state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
            }
        }
    }

    /// The weight to read ahead, if there is room. What was announced comes before what was learned.
    fn to_read_ahead(&self, state: &mut State) -> Option<Expected> {
        if let Some(next) = state.first_announced()
            && self.has_room(state, next)
        {
            state.announced.pop_front();
            return Some(next);
        }
        let next = state.first_learned(self.settings.prefetch)?;
        self.has_room(state, next).then_some(next)
    }

    /// Whether a weight that is read ahead fits once what may be evicted for it is evicted.
    fn has_room(&self, state: &mut State, next: Expected) -> bool {
        let missing = self.room().missing(self.weights[next.weight].footprint());
        let has_room = state.idle.can_free(missing, state.order.now(), &state.protected(next));
        state.awaits_room |= !has_room;
        has_room
    }

    fn rows(self: &Arc<Self>, index: usize, rows: &[usize]) -> Result<Vec<u64>, LazyError> {
        self.weights[index].entry.check_rows(rows)?;
        let Some(table) = self.table(index)? else {
            return self
                .read_past(index, rows.len(), |entry, dtype, out| entry.read_rows_as(dtype, rows, out));
        };
        let width = self.weights[index].row_len();
        let mut words = words_for(rows.len() * width);
        let out = bytemuck::cast_slice_mut::<u64, u8>(&mut words);
        for (row, out) in rows.iter().zip(out.chunks_exact_mut(width.max(1))) {
            out.copy_from_slice(&table[row * width..][..width]);
        }
        Ok(words)
    }

    fn row_range(self: &Arc<Self>, index: usize, rows: Range<usize>) -> Result<bytes::Bytes, LazyError> {
        let (weight, len) = (&self.weights[index], rows.len() * self.weights[index].row_len());
        weight.entry.check_rows(&rows.clone().last().into_iter().collect::<Vec<_>>())?;
        if let Some(table) = self.table(index)? {
            let first = rows.start * weight.row_len();
            return Ok(table.slice(first..first + len));
        }
        let first = rows.start * (weight.row_len() / weight.dtype.size());
        let words =
            self.read_past(index, rows.len(), |entry, dtype, out| entry.read_range_as(dtype, first, out))?;
        Ok(bytes::Bytes::from_owner(Words { words, len }))
    }

    /// A weight of which rows are used: as a whole if it is in memory, or if all weights will be.
    fn table(self: &Arc<Self>, index: usize) -> Result<Option<bytes::Bytes>, LazyError> {
        let mut state = self.lock();
        match state.present(index) {
            Some(bytes) => {
                state.record(index);
                state.statistics.hits += 1;
                drop(state);
                Ok(Some(self.lease(index, bytes)))
            }
            None => {
                drop(state);
                self.all_fit.then(|| self.get(index)).transpose()
            }
        }
    }

    fn count_unpacked(&self, index: usize) {
        let mut state = self.lock();
        state.by_rows[index] = true; // it need not be read ahead
        let bytes = self.weights[index].entry.packing().map_or(0, |packing| packing.bytes());
        state.statistics.bytes_unpacked += bytes as u64;
    }

    /// Reads so many rows past the cache.
    fn read_past(
        &self,
        index: usize,
        rows: usize,
        read: impl FnOnce(&Entry, DType, &mut [u8]) -> Result<(), LazyError>,
    ) -> Result<Vec<u64>, LazyError> {
        let weight = &self.weights[index];
        let len = rows * weight.row_len();
        let mut words = words_for(len);
        let mut state = self.lock();
        state.record(index);
        state.by_rows[index] = true;
        drop(state);
        let begin = Instant::now();
        read(&weight.entry, weight.dtype, &mut bytemuck::cast_slice_mut(&mut words)[..len])?;
        let mut state = self.lock();
        state.statistics.stalls += 1;
        state.statistics.stalled += begin.elapsed();
        self.count(state, index, len, begin.elapsed());
        Ok(words)
    }
}
