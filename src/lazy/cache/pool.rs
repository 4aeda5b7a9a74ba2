//! The memory that weights are read into. It is counted until it is freed, whoever holds it.
use crate::lazy::source::Entry;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Buffers for weights. One that is given back is used again for the next weight that fits, as long as the budget allows it.
#[derive(Debug)]
pub(super) struct Pool(Mutex<Memory>);

#[derive(Debug)]
struct Memory {
    budget: usize,
    /// Bytes of all buffers and mapped parts of files, idle buffers included.
    bytes: usize,
    /// Buffers that nobody holds, by their words.
    idle: BTreeMap<usize, Vec<Vec<u64>>>,
    /// The bytes of these.
    idle_bytes: usize,
}

impl Memory {
    /// Frees idle buffers until `len` bytes fit, or there are none left. The largest ones are freed first.
    fn make_room(&mut self, len: usize) {
        while self.bytes + len > self.budget
            && let Some(&words) = self.idle.keys().next_back()
        {
            self.bytes -= size_of_val(&self.take_idle(words)[..]);
        }
    }

    /// An idle buffer of this many words, which there is.
    fn take_idle(&mut self, words: usize) -> Vec<u64> {
        let buffers = self.idle.get_mut(&words).expect("there is one");
        let buffer = buffers.pop().expect("no entry is empty");
        if buffers.is_empty() {
            self.idle.remove(&words);
        }
        self.idle_bytes -= size_of_val(&buffer[..]);
        buffer
    }

    fn add_idle(&mut self, buffer: Vec<u64>) {
        self.idle_bytes += size_of_val(&buffer[..]);
        self.idle.entry(buffer.len()).or_default().push(buffer);
    }
}

impl Pool {
    pub fn new(budget: usize) -> Arc<Self> {
        Arc::new(Self(Mutex::new(Memory { budget, bytes: 0, idle: BTreeMap::new(), idle_bytes: 0 })))
    }

    fn lock(&self) -> MutexGuard<'_, Memory> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner) // consistent after every statement
    }

    /// Bytes that are held, and those of idle buffers.
    pub fn bytes(&self) -> usize {
        self.lock().bytes
    }

    /// Bytes that are held.
    pub fn held(&self) -> usize {
        let memory = self.lock();
        memory.bytes - memory.idle_bytes
    }

    /// Frees what is idle, and from now on everything that is given back.
    pub fn close(&self) {
        let mut memory = self.lock();
        memory.budget = 0;
        memory.make_room(0);
    }

    /// A buffer for `len` bytes, whose contents are left over from its last use, or zero.
    pub fn buffer(self: &Arc<Self>, len: usize) -> WeightBytes {
        WeightBytes { storage: Storage::Buffer { words: self.take(len), len }, pool: self.clone() }
    }

    /// Part of a mapped file, which takes the place of idle buffers.
    pub fn mapped(self: &Arc<Self>, bytes: bytes::Bytes, entry: Entry) -> WeightBytes {
        let mut memory = self.lock();
        memory.make_room(bytes.len());
        memory.bytes += bytes.len();
        WeightBytes { storage: Storage::Mapped { bytes, entry: Box::new(entry) }, pool: self.clone() }
    }

    /// An idle buffer of at least `len` bytes, or a new one. While there is room for a new one, an idle buffer is used only if it is at
    /// most a quarter too large.
    fn take(&self, len: usize) -> Vec<u64> {
        let words = len.div_ceil(size_of::<u64>());
        let len = words * size_of::<u64>();
        let mut memory = self.lock();
        let fits = memory.bytes + len <= memory.budget;
        let most = if fits { words + words / 4 } else { usize::MAX };
        let smallest = memory.idle.range(words..=most).next().map(|(&words, _)| words);
        if let Some(words) = smallest {
            return memory.take_idle(words);
        }
        memory.make_room(len);
        memory.bytes += len;
        drop(memory);
        vec![0; words]
    }

    fn give_back(&self, buffer: Vec<u64>) {
        let mut memory = self.lock();
        match memory.bytes > memory.budget {
            true => memory.bytes -= size_of_val(&buffer[..]),
            false => memory.add_idle(buffer),
        }
    }
}

/// The bytes of a weight, counted by the pool until they are dropped.
pub(super) struct WeightBytes {
    storage: Storage,
    pool: Arc<Pool>,
}

enum Storage {
    Buffer { words: Vec<u64>, len: usize },
    Mapped { bytes: bytes::Bytes, entry: Box<Entry> },
}

impl WeightBytes {
    /// Brings the weight into memory: `read` fills a buffer, and a mapped part of a file is paged in.
    pub fn fill<E>(&mut self, read: impl FnOnce(&mut [u8]) -> Result<(), E>) -> Result<(), E> {
        match &mut self.storage {
            Storage::Buffer { words, len } => read(&mut bytemuck::cast_slice_mut(words)[..*len]),
            Storage::Mapped { entry, .. } => {
                entry.read_ahead();
                Ok(())
            }
        }
    }

    pub fn bytes(&self) -> &[u8] {
        match &self.storage {
            Storage::Buffer { words, len } => &bytemuck::cast_slice(words)[..*len],
            Storage::Mapped { bytes, .. } => bytes,
        }
    }

    /// The memory that it takes: a buffer may be larger than its weight.
    pub fn footprint(&self) -> usize {
        match &self.storage {
            Storage::Buffer { words, .. } => size_of_val(&words[..]),
            Storage::Mapped { bytes, .. } => bytes.len(),
        }
    }
}

impl fmt::Debug for WeightBytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "WeightBytes({} bytes)", self.footprint())
    }
}

impl Drop for WeightBytes {
    fn drop(&mut self) {
        match &mut self.storage {
            Storage::Buffer { words, .. } => self.pool.give_back(std::mem::take(words)),
            Storage::Mapped { bytes, entry } => {
                entry.forget();
                self.pool.lock().bytes -= bytes.len();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_are_used_again_within_the_budget() {
        let pool = Pool::new(64);
        let (first, second) = (pool.buffer(30), pool.buffer(32));
        assert_eq!((pool.bytes(), pool.held()), (64, 64), "in whole words");
        drop(first);
        assert_eq!((pool.bytes(), pool.held()), (64, 32));
        assert_eq!(pool.buffer(32).footprint(), 32);
        assert_eq!(pool.bytes(), 64, "the idle one was used");
        let large = pool.buffer(40);
        assert_eq!((pool.bytes(), pool.held()), (72, 72), "the idle one was too small, and freed");
        drop(second);
        assert_eq!((pool.bytes(), pool.held()), (40, 40), "what is above the budget does not stay");
        drop(large);
        assert_eq!((pool.bytes(), pool.held()), (40, 0));
    }

    #[test]
    fn an_idle_buffer_that_is_much_too_large_is_left_while_there_is_room() {
        let pool = Pool::new(100);
        drop(pool.buffer(80));
        assert_eq!(pool.buffer(16).footprint(), 16);
        assert_eq!(pool.bytes(), 96);
        let (_small, large) = (pool.buffer(16), pool.buffer(16));
        assert_eq!(large.footprint(), 80, "no room for a new one");
    }

    #[test]
    fn a_closed_pool_keeps_nothing() {
        let pool = Pool::new(64);
        let used = pool.buffer(32);
        drop(pool.buffer(32));
        pool.close();
        assert_eq!((pool.bytes(), pool.held()), (32, 32));
        drop(used);
        assert_eq!(pool.bytes(), 0);
    }
}
