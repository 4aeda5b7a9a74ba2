//! The weights in memory: as many as the budget allows, the ones that are used next read ahead.
use super::LazyError;
use super::order::Order;
use super::source::{Entry, words_for};
use burn::tensor::DType;
use serde::Serialize;
use std::collections::HashMap;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

/// A weight of the cache.
#[derive(Debug)]
pub(super) struct Weight {
    /// Path of the parameter.
    pub path: String,
    pub entry: Entry,
    /// As which it is read.
    pub dtype: DType,
    /// Only rows of it are read, as far as is known.
    pub by_rows: bool,
}

impl Weight {
    pub fn len(&self) -> usize {
        self.entry.len_as(self.dtype)
    }

    /// The memory that it takes, in whole words.
    pub fn footprint(&self) -> usize {
        self.len().next_multiple_of(size_of::<u64>())
    }
}

/// What the cache did so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Statistics {
    /// Uses that found their weight in memory.
    pub hits: u64,
    /// Uses that had to wait for it.
    pub stalls: u64,
    /// How long they waited.
    pub stalled: Duration,
    /// Weights that were read, or parts of them.
    pub reads: u64,
    /// Those that were read before anybody asked.
    pub read_ahead: u64,
    /// Bytes that were read, as they are in memory.
    pub bytes_read: u64,
    /// How long that took; threads added up.
    pub reading: Duration,
}

impl fmt::Display for Statistics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { hits, stalls, stalled, reads, read_ahead, bytes_read, reading } = self;
        let mebibytes = *bytes_read as f64 / f64::from(1 << 20);
        let speed = mebibytes / reading.as_secs_f64().max(1e-9);
        write!(
            f,
            "{hits} hits, {stalls} stalls ({:.0} ms), {reads} reads, {read_ahead} of them ahead, {mebibytes:.0} MiB at \
             {speed:.0} MiB/s",
            stalled.as_secs_f64() * 1e3
        )
    }
}

/// How far the first pass has come.
#[derive(Clone, Copy, Debug)]
pub struct Progress<'a> {
    /// Path of the parameter that was read.
    pub parameter: &'a str,
    /// Lazy parameters that were read at least once.
    pub parameters: usize,
    /// All lazy parameters.
    pub of: usize,
    /// Bytes read so far.
    pub bytes: u64,
}

/// Is told of every parameter when it is read for the first time.
pub(super) type OnProgress = Arc<dyn Fn(Progress<'_>) + Send + Sync>;

/// How the cache works.
pub(super) struct Settings {
    pub budget: usize,
    /// So many weights are read ahead.
    pub prefetch: usize,
    pub on_progress: Option<OnProgress>,
}

/// Memory of weights, all of which counts, whoever holds it.
#[derive(Debug)]
struct Pool {
    budget: usize,
    memory: Mutex<Memory>,
}

#[derive(Debug, Default)]
struct Memory {
    /// Of all buffers and mapped parts, idle ones included.
    bytes: usize,
    /// Buffers that nobody holds.
    idle: Vec<Vec<u64>>,
}

impl Memory {
    fn idle_bytes(&self) -> usize {
        self.idle.iter().map(|buffer| size_of_val(&buffer[..])).sum()
    }

    /// Drops idle buffers until so many bytes fit, as far as there are any.
    fn make_room(&mut self, len: usize, budget: usize) {
        while self.bytes + len > budget
            && let Some(buffer) = self.idle.pop()
        {
            self.bytes -= size_of_val(&buffer[..]);
        }
    }
}

impl Pool {
    fn lock(&self) -> MutexGuard<'_, Memory> {
        self.memory.lock().unwrap_or_else(PoisonError::into_inner) // whole after every statement
    }

    /// What is held by somebody.
    fn held(&self) -> usize {
        let memory = self.lock();
        memory.bytes - memory.idle_bytes()
    }

    /// A buffer of at least so many bytes: an idle one, or a new one.
    fn take(&self, len: usize) -> Vec<u64> {
        let words = len.div_ceil(size_of::<u64>());
        let len = words * size_of::<u64>();
        let mut memory = self.lock();
        let fits = memory.bytes + len <= self.budget;
        let usable =
            |buffer: &Vec<u64>| buffer.len() >= words && (!fits || buffer.len() <= words + words / 4);
        let best =
            (0..memory.idle.len()).filter(|&i| usable(&memory.idle[i])).min_by_key(|&i| memory.idle[i].len());
        if let Some(best) = best {
            return memory.idle.swap_remove(best);
        }
        memory.make_room(len, self.budget);
        memory.bytes += len;
        drop(memory);
        vec![0; words]
    }

    /// Counts so many bytes of a mapped file, in the place of idle buffers.
    fn map(&self, len: usize) {
        let mut memory = self.lock();
        memory.make_room(len, self.budget);
        memory.bytes += len;
    }

    fn give(&self, buffer: Vec<u64>) {
        let mut memory = self.lock();
        match memory.bytes > self.budget {
            true => memory.bytes -= size_of_val(&buffer[..]),
            false => memory.idle.push(buffer),
        }
    }
}

/// The bytes of a weight, for as long as somebody has a handle.
struct Held {
    place: Place,
    pool: Arc<Pool>,
}

/// A handle of the bytes of a weight.
struct Handle(Arc<Held>);

impl AsRef<[u8]> for Handle {
    fn as_ref(&self) -> &[u8] {
        self.0.bytes()
    }
}

fn handle(held: &Arc<Held>) -> bytes::Bytes {
    bytes::Bytes::from_owner(Handle(held.clone()))
}

enum Place {
    Buffer { words: Vec<u64>, len: usize },
    File { mapped: bytes::Bytes, entry: Entry },
}

impl Held {
    fn bytes(&self) -> &[u8] {
        match &self.place {
            Place::Buffer { words, len } => &bytemuck::cast_slice(words)[..*len],
            Place::File { mapped, .. } => mapped,
        }
    }

    /// What it takes: a buffer may be larger than its weight.
    fn footprint(&self) -> usize {
        match &self.place {
            Place::Buffer { words, .. } => size_of_val(&words[..]),
            Place::File { mapped, .. } => mapped.len(),
        }
    }
}

impl fmt::Debug for Held {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Held({} bytes)", self.footprint())
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        match &mut self.place {
            Place::Buffer { words, .. } => self.pool.give(std::mem::take(words)),
            Place::File { mapped, entry } => {
                entry.forget();
                self.pool.lock().bytes -= mapped.len();
            }
        }
    }
}

#[derive(Debug)]
enum Slot {
    Absent,
    /// Somebody reads it.
    Reading,
    Present(Arc<Held>),
}

#[derive(Debug)]
struct State {
    slots: Vec<Slot>,
    /// What was read last, as long as somebody holds it.
    last: Vec<Weak<Held>>,
    by_rows: Vec<bool>,
    seen: Vec<bool>,
    order: Order,
    statistics: Statistics,
    /// Nobody uses the cache any more, or a read failed, which the next use will report.
    stopped: bool,
}

impl State {
    /// A weight that the cache or somebody else has.
    fn present(&self, index: usize) -> Option<Arc<Held>> {
        match &self.slots[index] {
            Slot::Present(held) => Some(held.clone()),
            _ => self.last[index].upgrade(),
        }
    }

    /// Whether nobody beside the cache holds the weight.
    fn is_idle(&self, index: usize) -> bool {
        matches!(&self.slots[index], Slot::Present(held) if Arc::strong_count(held) == 1)
    }
}

/// Weights of a module.
pub(super) struct Cache(Arc<Shared>);

struct Shared {
    weights: Vec<Weight>,
    settings: Settings,
    pool: Arc<Pool>,
    state: Mutex<State>,
    changed: Condvar,
}

impl Cache {
    pub fn new(weights: Vec<Weight>, settings: Settings) -> Self {
        let state = State {
            slots: weights.iter().map(|_| Slot::Absent).collect(),
            last: weights.iter().map(|_| Weak::new()).collect(),
            by_rows: weights.iter().map(|weight| weight.by_rows).collect(),
            seen: vec![false; weights.len()],
            order: Order::new(weights.len()),
            statistics: Statistics::default(),
            stopped: false,
        };
        let pool = Arc::new(Pool { budget: settings.budget, memory: Mutex::default() });
        let ahead = settings.prefetch > 0 && weights.len() > 1;
        let shared = Shared { weights, settings, pool, state: Mutex::new(state), changed: Condvar::new() };
        let shared = Arc::new(shared);
        if ahead {
            let reader = shared.clone();
            let thread = std::thread::Builder::new().name("burn-memsave weights".into());
            // Without a thread every weight is read when it is asked for.
            let _ = thread.spawn(move || reader.read_ahead());
        }
        Self(shared)
    }

    pub fn weights(&self) -> &[Weight] {
        &self.0.weights
    }

    pub fn statistics(&self) -> Statistics {
        self.0.lock().statistics
    }

    /// Bytes of weights in memory, in use or not.
    pub fn resident(&self) -> usize {
        self.0.pool.lock().bytes
    }

    /// The weights that the cache has.
    pub fn cached(&self) -> Vec<usize> {
        let state = self.0.lock();
        let present = |index: &usize| matches!(state.slots[*index], Slot::Present(_));
        (0..state.slots.len()).filter(present).collect()
    }

    /// The weights that somebody beside the cache has.
    pub fn held(&self) -> Vec<usize> {
        let state = self.0.lock();
        let others = |index: &usize| {
            let cached = matches!(state.slots[*index], Slot::Present(_));
            state.last[*index].strong_count() > usize::from(cached)
        };
        (0..state.slots.len()).filter(others).collect()
    }

    /// A weight.
    pub fn get(&self, index: usize) -> Result<bytes::Bytes, LazyError> {
        self.0.get(index)
    }

    /// Rows of a weight.
    pub fn rows(&self, index: usize, rows: &[usize]) -> Result<Vec<u64>, LazyError> {
        self.0.rows(index, rows)
    }
}

impl Drop for Cache {
    fn drop(&mut self) {
        self.0.lock().stopped = true;
        self.0.changed.notify_all();
    }
}

impl fmt::Debug for Cache {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Cache({} weights)", self.0.weights.len())
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner) // whole after every statement
    }

    fn get(&self, index: usize) -> Result<bytes::Bytes, LazyError> {
        let mut state = self.lock();
        state.by_rows[index] = false;
        state.order.record(index);
        if self.settings.prefetch > 0 && state.slots.iter().any(|slot| matches!(slot, Slot::Absent)) {
            self.changed.notify_all();
        }
        if let Some(held) = state.present(index) {
            state.statistics.hits += 1;
            return Ok(handle(&held));
        }
        let waiting = Instant::now();
        while matches!(state.slots[index], Slot::Reading) {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        let result = match state.present(index) {
            Some(held) => {
                drop(state);
                Ok(handle(&held))
            }
            None => self.read(state, index, None, handle),
        };
        let mut state = self.lock();
        state.statistics.stalls += 1;
        state.statistics.stalled += waiting.elapsed();
        result
    }

    /// Reads a weight, in the place of such as are used later than it; `ahead`, of such only. What is not taken of it nobody holds
    /// when the lock is free again.
    fn read<R>(
        &self,
        mut state: MutexGuard<'_, State>,
        index: usize,
        ahead: Option<usize>,
        take: impl FnOnce(&Arc<Held>) -> R,
    ) -> Result<R, LazyError> {
        state.slots[index] = Slot::Reading;
        self.make_room(&mut state, self.weights[index].footprint(), ahead);
        let held = self.acquire(index); // while nobody else makes room
        drop(state);
        let begin = Instant::now();
        // Whoever waits for the weight must not wait for ever.
        let result = catch_unwind(AssertUnwindSafe(|| self.fill(held, index)))
            .unwrap_or_else(|_| Err(self.weights[index].entry.error("reading it panicked")));
        let reading = begin.elapsed();

        let mut state = self.lock();
        state.slots[index] = match &result {
            Ok(held) if self.pool.held() <= self.settings.budget => Slot::Present(held.clone()),
            _ => Slot::Absent,
        };
        self.changed.notify_all();
        let held = result?;
        state.last[index] = Arc::downgrade(&held);
        let (taken, len) = (take(&held), held.bytes().len());
        drop(held);
        state.statistics.read_ahead += u64::from(ahead.is_some());
        self.count(state, index, len, reading);
        Ok(taken)
    }

    /// Counts a read, and tells who wants to know.
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

    /// The place of a weight.
    fn acquire(&self, index: usize) -> Held {
        let Weight { entry, dtype, .. } = &self.weights[index];
        let place = match entry.map(*dtype) {
            Some(mapped) => {
                self.pool.map(mapped.len());
                Place::File { mapped, entry: entry.clone() }
            }
            None => {
                let len = self.weights[index].len();
                Place::Buffer { words: self.pool.take(len), len }
            }
        };
        Held { place, pool: self.pool.clone() }
    }

    /// Reads a weight into its place.
    fn fill(&self, mut held: Held, index: usize) -> Result<Arc<Held>, LazyError> {
        let Weight { entry, dtype, .. } = &self.weights[index];
        match &mut held.place {
            Place::Buffer { words, len } => {
                entry.read_as(*dtype, &mut bytemuck::cast_slice_mut(words)[..*len])?;
            }
            Place::File { .. } => entry.read_ahead(),
        }
        Ok(Arc::new(held))
    }

    /// Takes weights out that nobody uses, until so many bytes fit: those first whose next use is the farthest, and none that
    /// is used before the `ahead`-th next.
    fn make_room(&self, state: &mut State, len: usize, ahead: Option<usize>) {
        let mut held = self.pool.held();
        if held + len <= self.settings.budget {
            return;
        }
        let next_use: HashMap<usize, usize> =
            state.order.next().enumerate().map(|(at, of)| (of, at)).collect();
        let next_use = |index: usize| next_use.get(&index).copied().unwrap_or(usize::MAX);
        let mut idle: Vec<usize> = (0..state.slots.len()).filter(|&index| state.is_idle(index)).collect();
        idle.sort_by_key(|&index| next_use(index));
        while held + len > self.settings.budget
            && let Some(index) = idle.pop_if(|index| next_use(*index) >= ahead.unwrap_or(0))
        {
            if let Slot::Present(weight) = std::mem::replace(&mut state.slots[index], Slot::Absent) {
                held -= weight.footprint();
            }
        }
    }

    /// Whether a weight that is used as the `ahead`-th next would fit beside those that are used before.
    fn has_room(&self, state: &State, len: usize, ahead: usize) -> bool {
        let soon: Vec<usize> = state.order.next().take(ahead).collect();
        let later = |index: usize| match &state.slots[index] {
            Slot::Present(held) if state.is_idle(index) && !soon.contains(&index) => held.footprint(),
            _ => 0,
        };
        let later: usize = (0..state.slots.len()).map(later).sum();
        self.pool.held().saturating_sub(later) + len <= self.settings.budget
    }

    /// Reads what is expected next, until the cache is dropped.
    fn read_ahead(&self) {
        let mut state = self.lock();
        while !state.stopped {
            match self.wanted_ahead(&state) {
                Some((ahead, index)) => {
                    let failed = self.read(state, index, Some(ahead), |_| ()).is_err();
                    state = self.lock();
                    state.stopped |= failed;
                }
                None => state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
            }
        }
    }

    /// The first weight of the expected ones that is not there, and how many are used before.
    fn wanted_ahead(&self, state: &State) -> Option<(usize, usize)> {
        // Before the first use nobody knows whether the module will be used at all.
        if !state.order.is_trusted() || state.seen.iter().all(|seen| !seen) {
            return None;
        }
        let whole = state.order.next().enumerate().filter(|&(_, index)| !state.by_rows[index]);
        let (ahead, index) =
            whole.take(self.settings.prefetch).find(|&(_, index)| state.present(index).is_none())?;
        let absent = matches!(state.slots[index], Slot::Absent);
        (absent && self.has_room(state, self.weights[index].footprint(), ahead)).then_some((ahead, index))
    }

    fn rows(&self, index: usize, rows: &[usize]) -> Result<Vec<u64>, LazyError> {
        let Weight { entry, dtype, .. } = &self.weights[index];
        let width = entry.tensor.shape.num_elements() / entry.tensor.shape[0].max(1) * dtype.size();
        entry.check_rows(rows)?;
        let len = rows.len() * width;
        let mut words = words_for(len);
        let out = &mut bytemuck::cast_slice_mut::<u64, u8>(&mut words)[..len];
        let all_fit = || self.weights.iter().map(Weight::footprint).sum::<usize>() <= self.settings.budget;
        let mut state = self.lock();
        let table = match state.present(index) {
            Some(held) => {
                state.order.record(index);
                state.statistics.hits += 1;
                drop(state);
                Some(handle(&held))
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
