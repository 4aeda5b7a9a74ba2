//! Tensors in a file. A separate thread writes and reads it.
use super::{on_stream, zeros};
use burn::tensor::{Bytes, DType, Shape, StreamId, TensorData};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, Receiver, SyncSender};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::thread;

/// How many tensors may be queued, besides the one that is being written.
const AHEAD: usize = 2;

/// An unnamed file for tensors that wait for the backward pass. Clones refer to the same file, which disappears with the last of them.
#[derive(Clone, Debug)]
pub struct SavedFile(Arc<Shared>);

impl PartialEq for SavedFile {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for SavedFile {}

#[derive(Debug)]
struct Shared {
    directory: PathBuf,
    jobs: SyncSender<Job>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// The occupied ranges: lengths by their starts.
    taken: BTreeMap<u64, u64>,
    /// The tensor that was stored last.
    last: Weak<Slot>,
    /// The tensor that is read ahead of its use.
    ahead: Option<(Weak<Slot>, Reading)>,
}

impl State {
    /// Occupies the first free range of `len` bytes.
    fn take(&mut self, len: u64) -> u64 {
        let mut free = 0;
        for (&start, &len_of_taken) in &self.taken {
            if start - free >= len {
                break;
            }
            free = start + len_of_taken;
        }
        self.taken.insert(free, len);
        free
    }
}

type Reading = Receiver<io::Result<Bytes>>;

enum Job {
    Write { start: u64, bytes: Bytes, stream: StreamId },
    Read { start: u64, bytes: Bytes, reply: SyncSender<io::Result<Bytes>> },
}

impl SavedFile {
    /// Creates an unnamed file in this directory.
    pub(super) fn new(directory: &Path) -> io::Result<Self> {
        let file = tempfile::tempfile_in(directory)
            .map_err(|error| io::Error::new(error.kind(), format!("{}: {error}", directory.display())))?;
        let (jobs, todo) = mpsc::sync_channel(AHEAD);
        thread::Builder::new().name("saved tensors".into()).spawn(move || serve(file, todo))?;
        Ok(Self(Arc::new(Shared { directory: directory.into(), jobs, state: Mutex::default() })))
    }

    /// Has a tensor written. Blocks while too many are queued.
    pub(crate) fn put(&self, data: TensorData) -> OnFile {
        let (bytes, shape, dtype) = data.into_parts();
        let mut state = self.0.lock();
        let start = state.take(bytes.len() as u64);
        let slot = Arc::new(Slot {
            file: self.0.clone(),
            start,
            len: bytes.len(),
            width: dtype.size(),
            before: state.last.clone(),
        });
        drop(state);
        self.0.send(Job::Write { start, bytes, stream: StreamId::current() });
        // Only now that the write is queued, since others may then have it read.
        self.0.lock().last = Arc::downgrade(&slot);
        OnFile { slot, shape, dtype }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner) // every statement leaves it whole
    }

    fn send(&self, job: Job) {
        self.jobs.send(job).expect("the thread serves as long as there are jobs");
    }
}

/// A tensor in a file.
#[derive(Debug)]
pub(crate) struct OnFile {
    slot: Arc<Slot>,
    shape: Shape,
    dtype: DType,
}

impl OnFile {
    /// Restores the tensor. Begins to read the one that was stored before it.
    ///
    /// # Panics
    ///
    /// Panics if the file could not be written or read.
    pub(crate) fn load(&self) -> TensorData {
        let file = &self.slot.file;
        let ahead = file.lock().ahead.take().filter(|(slot, _)| slot.as_ptr() == Arc::as_ptr(&self.slot));
        let reading = ahead.map_or_else(|| self.slot.read(), |(_, reading)| reading);
        if let Some(before) = self.slot.before.upgrade() {
            let ahead = (Arc::downgrade(&before), before.read());
            file.lock().ahead = Some(ahead);
        }
        let directory = file.directory.display();
        let result = reading.recv().expect("the thread replies to every job");
        let bytes = result.unwrap_or_else(|error| panic!("saved tensors in {directory}: {error}"));
        TensorData::from_bytes(bytes, self.shape.clone(), self.dtype)
    }
}

/// The part of a file that one tensor occupies.
#[derive(Debug)]
struct Slot {
    file: Arc<Shared>,
    start: u64,
    len: usize,
    /// Bytes of an element.
    width: usize,
    /// The tensor that was stored before.
    before: Weak<Slot>,
}

impl Slot {
    /// Has the part read.
    fn read(&self) -> Reading {
        let (reply, reading) = mpsc::sync_channel(1);
        let bytes = zeros(self.len, self.width);
        self.file.send(Job::Read { start: self.start, bytes, reply });
        reading
    }
}

impl Drop for Slot {
    /// Frees the range. The next tensor in it is written only after this one was read, since jobs run in order.
    fn drop(&mut self) {
        self.file.lock().taken.remove(&self.start);
    }
}

/// Runs jobs in order, until every sender is gone. Reading a tensor that could not be written is an error.
fn serve(mut file: File, jobs: Receiver<Job>) {
    let mut failed = BTreeMap::new();
    for job in jobs {
        match job {
            Job::Write { start, bytes, stream } => {
                let written = file.seek(SeekFrom::Start(start)).and_then(|_| {
                    on_stream(stream, || file.write_all(&bytes))
                        .unwrap_or_else(|message| Err(io::Error::other(message)))
                });
                match written {
                    Ok(()) => drop(failed.remove(&start)),
                    Err(error) => drop(failed.insert(start, error)),
                }
            }
            Job::Read { start, mut bytes, reply } => {
                let read = match failed.get(&start) {
                    Some(error) => Err(io::Error::new(error.kind(), format!("cannot be written: {error}"))),
                    None => file.seek(SeekFrom::Start(start)).and_then(|_| file.read_exact(&mut bytes)),
                };
                let _ = reply.send(read.map(|()| bytes)); // whoever asked may be gone
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn data(len: usize, seed: usize) -> TensorData {
        TensorData::new((0..len).map(|at| (at * 7 + seed) as f32).collect::<Vec<_>>(), [len])
    }

    fn end(file: &SavedFile) -> u64 {
        file.0.lock().taken.last_key_value().map_or(0, |(start, len)| start + len)
    }

    /// In any order, while ranges are freed in between.
    #[test]
    fn tensors_come_back() {
        let file = SavedFile::new(&std::env::temp_dir()).expect("a directory for files that are temporary");
        let mut slots: Vec<(usize, OnFile)> =
            (1..40).map(|seed| (seed, file.put(data(100 * seed, seed)))).collect();
        for seed in [40, 41, 42] {
            let (seed_of_other, other) = slots.swap_remove(seed % slots.len());
            assert_eq!(other.load(), data(100 * seed_of_other, seed_of_other));
            assert_eq!(other.load(), data(100 * seed_of_other, seed_of_other)); // again
            drop(other);
            slots.push((seed, file.put(data(100 * seed, seed))));
        }
        while let Some((seed, slot)) = slots.pop() {
            assert_eq!(slot.load(), data(100 * seed, seed));
        }
        assert_eq!(end(&file), 0);
        // When tensors are read in reverse, the file does not grow.
        for _ in 0..3 {
            let slots: Vec<_> = (0..5).map(|seed| file.put(data(1000, seed))).collect();
            assert_eq!(end(&file), 5 * 4000);
            slots.into_iter().rev().for_each(|slot| drop(slot.load()));
        }
    }

    /// Training steps that begin before the backward pass of the last one: the file does not keep growing, whatever the sizes.
    #[test]
    fn overlapping_steps() {
        let file = SavedFile::new(&std::env::temp_dir()).expect("a directory for files that are temporary");
        let step = |seed: usize| -> Vec<(usize, OnFile)> {
            let sizes = [300, 7000, 1000, 20, 5000].into_iter().cycle().skip(seed % 5).take(5);
            sizes.enumerate().map(|(at, len)| (len, file.put(data(len, seed + at)))).collect()
        };
        let bytes_of_step = 4 * (300 + 7000 + 1000 + 20 + 5000);
        let mut before = step(0);
        for seed in 1..100 {
            let next = step(seed);
            for (at, (len, slot)) in before.drain(..).enumerate().rev() {
                assert_eq!(slot.load(), data(len, seed - 1 + at));
            }
            // A step may leave holes that the next one does not fit into.
            assert!(end(&file) <= 3 * bytes_of_step, "{} after {seed} steps", end(&file));
            before = next;
        }
    }

    #[test]
    fn threads_that_share_a_file() {
        let file = SavedFile::new(&std::env::temp_dir()).expect("a directory for files that are temporary");
        thread::scope(|scope| {
            for thread in 0..4 {
                let file = file.clone();
                scope.spawn(move || {
                    for seed in (0..300).map(|seed| thread * 100_000 + seed) {
                        let slots = [seed, seed + 50_000].map(|seed| (seed, file.put(data(3000, seed))));
                        for (seed, slot) in slots.iter().rev() {
                            assert_eq!(slot.load(), data(3000, *seed));
                        }
                    }
                });
            }
        });
    }

    /// If the thread cannot read the bytes of one tensor, it still serves the others.
    #[test]
    fn bytes_that_cannot_be_read() {
        let file = SavedFile::new(&std::env::temp_dir()).expect("a directory for files that are temporary");
        let missing = TensorData::from_bytes(Bytes::from_file("/no/such/file", 400, 0), [100], DType::F32);
        let [missing, next] = [missing, data(100, 3)].map(|data| file.put(data));
        assert_eq!(next.load(), data(100, 3));
        let panic = thread::spawn(move || missing.load()).join().expect_err("there is nothing to load");
        let message = super::super::message(panic);
        assert!(message.contains("cannot be written: "), "{message}");
        assert_eq!(next.load(), data(100, 3));
    }

    #[test]
    fn a_directory_that_is_not_there() {
        let error = SavedFile::new(Path::new("/no/such/directory")).expect_err("it is not there").to_string();
        assert!(error.contains("/no/such/directory"), "{error}");
    }

    #[test]
    #[cfg(target_os = "linux")]
    #[should_panic(expected = "saved tensors in /dev/full: cannot be written: No space left on device")]
    fn a_disk_that_is_full() {
        let file = File::options().read(true).write(true).open("/dev/full").expect("a device of Linux");
        let (jobs, todo) = mpsc::sync_channel(AHEAD);
        thread::spawn(move || serve(file, todo));
        let file =
            SavedFile(Arc::new(Shared { directory: "/dev/full".into(), jobs, state: Mutex::default() }));
        file.put(data(100, 0)).load();
    }
}
