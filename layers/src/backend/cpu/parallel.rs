//! Loops over chunks, on all cores where that pays.
//!
//! The body of a loop is passed to rayon behind a reference. So rayon's code is compiled once per type of elements instead of once per
//! body, which saves most of the time to compile this crate. The indirect call costs nothing beside the work of a chunk.
use super::plan;
pub(crate) use super::work::Work;
#[cfg(feature = "rayon")]
use rayon::{current_num_threads, prelude::*};
#[cfg(not(feature = "rayon"))]
use sequential::*;
use std::mem::MaybeUninit;

/// Work that [`vectorized`] compiles for several widths of vectors, because its `run` is `#[inline(always)]`. A closure is a job, too, but
/// it is inlined only if it is small: a large one runs in the narrow vectors that every machine has. So do closures that a job passes to
/// `for_each` and `fold` of an iterator; a `for` loop stays in the job.
pub(crate) trait Job {
    /// What the job returns.
    type Result;
    /// Does the work.
    fn run(self) -> Self::Result;
}

impl<R, F: FnOnce() -> R> Job for F {
    type Result = R;

    #[inline(always)]
    fn run(self) -> R {
        self()
    }
}

/// Runs a job, compiled for wider vectors where the machine has them.
#[inline(always)]
pub(crate) fn vectorized<J: Job>(job: J) -> J::Result {
    #[cfg(all(target_arch = "x86_64", not(memsave_portable)))]
    {
        #[target_feature(enable = "avx2")]
        fn avx2<J: Job>(job: J) -> J::Result {
            job.run()
        }
        if std::arch::is_x86_feature_detected!("avx2") {
            // SAFETY: the machine has AVX2.
            return unsafe { avx2(job) };
        }
    }
    job.run()
}

/// Calls `f(index, chunk)` for every chunk of `size` elements.
pub(crate) fn chunks_mut<T: Send>(
    values: &mut [T],
    size: usize,
    work: impl Into<Work>,
    f: impl Fn(usize, &mut [T]) + Send + Sync,
) {
    each_chunk(values, size, work.into(), &|index, chunk| vectorized(|| f(index, chunk)));
}

pub(super) fn each_chunk<T: Send>(
    values: &mut [T],
    size: usize,
    work: Work,
    f: &(dyn Fn(usize, &mut [T]) + Sync),
) {
    if values.is_empty() {
        return;
    }
    if !work.is_worth_it() {
        values.chunks_mut(size).enumerate().for_each(|(index, chunk)| f(index, chunk));
    } else {
        let most = together(values.len(), size);
        let chunks = values.par_chunks_mut(size).with_max_len(most);
        chunks.enumerate().for_each(|(index, chunk)| f(index, chunk));
    }
}

/// The number of chunks of `size` elements that a thread takes at once: few enough that idle threads still find some.
fn together(len: usize, size: usize) -> usize {
    (len.div_ceil(size) / (8 * current_num_threads())).max(1)
}

/// Calls `f(index, a, b)` for every pair of chunks, of `sizes[0]` elements of `a` and `sizes[1]` of `b`.
pub(crate) fn zip_chunks_mut<T: Send, U: Send>(
    a: &mut [T],
    b: &mut [U],
    sizes: [usize; 2],
    work: impl Into<Work>,
    f: impl Fn(usize, &mut [T], &mut [U]) + Send + Sync,
) {
    each_pair(a, b, sizes, work.into(), &|index, a, b| vectorized(|| f(index, a, b)));
}

/// The body of a loop over pairs of chunks.
pub(super) type PairBody<'a, T, U> = dyn Fn(usize, &mut [T], &mut [U]) + Sync + 'a;

pub(super) fn each_pair<T: Send, U: Send>(
    a: &mut [T],
    b: &mut [U],
    sizes: [usize; 2],
    work: Work,
    f: &PairBody<T, U>,
) {
    if a.is_empty() || b.is_empty() {
        return;
    }
    if !work.is_worth_it() {
        let pairs = a.chunks_mut(sizes[0]).zip(b.chunks_mut(sizes[1]));
        pairs.enumerate().for_each(|(index, (a, b))| f(index, a, b));
    } else {
        let most = together(a.len(), sizes[0]);
        let pairs = a.par_chunks_mut(sizes[0]).zip(b.par_chunks_mut(sizes[1])).with_max_len(most);
        pairs.enumerate().for_each(|(index, (a, b))| f(index, a, b));
    }
}

/// A vector of `len` elements, of which `f(index, chunk)` writes every chunk of `size` elements.
///
/// # Safety
///
/// `f` writes every element of its chunk.
pub(crate) unsafe fn written<T: Send>(
    len: usize,
    size: usize,
    work: impl Into<Work>,
    f: impl Fn(usize, &mut [MaybeUninit<T>]) + Send + Sync,
) -> Vec<T> {
    let mut values = Vec::with_capacity(len);
    chunks_mut(&mut values.spare_capacity_mut()[..len], size, work, f);
    // SAFETY: `chunks_mut` visits every chunk, and `f` writes all of it.
    unsafe { values.set_len(len) };
    values
}

/// A vector filled with `value`, after `f(index, chunk)` for every chunk of `size` elements. The thread that fills a chunk also works on
/// it, while it is in the cache.
pub(crate) fn filled<T: Copy + Send + Sync>(
    len: usize,
    value: T,
    size: usize,
    work: impl Into<Work>,
    f: impl Fn(usize, &mut [T]) + Send + Sync,
) -> Vec<T> {
    // SAFETY: `fill` writes all of the chunk.
    unsafe { written(len, size, work, |index, chunk| f(index, fill(chunk, value))) }
}

/// [`filled`] with a copy of `source` instead of one value.
pub(crate) fn copied<T: Copy + Send + Sync>(
    source: &[T],
    size: usize,
    work: impl Into<Work>,
    f: impl Fn(usize, &mut [T]) + Send + Sync,
) -> Vec<T> {
    // SAFETY: `copy` writes all of the chunk.
    unsafe {
        written(source.len(), size, work, |index, chunk| f(index, copy(chunk, &source[index * size..])))
    }
}

/// [`filled`], with the chunks of another slice beside. Both must have the same number of chunks.
pub(crate) fn zip_filled<T: Copy + Send + Sync, U: Send>(
    (len, value): (usize, T),
    other: &mut [U],
    sizes: [usize; 2],
    work: impl Into<Work>,
    f: impl Fn(usize, &mut [T], &mut [U]) + Send + Sync,
) -> Vec<T> {
    // SAFETY: `fill` writes all of the chunk.
    unsafe { zip_written(len, other, sizes, work, |index, chunk, other| f(index, fill(chunk, value), other)) }
}

/// [`written`], with the chunks of another slice beside. Both must have the same number of chunks.
///
/// # Safety
///
/// `f` writes every element of its first chunk.
pub(crate) unsafe fn zip_written<T: Send, U: Send>(
    len: usize,
    other: &mut [U],
    sizes: [usize; 2],
    work: impl Into<Work>,
    f: impl Fn(usize, &mut [MaybeUninit<T>], &mut [U]) + Send + Sync,
) -> Vec<T> {
    assert_eq!(len.div_ceil(sizes[0]), other.len().div_ceil(sizes[1]), "as many chunks on both sides");
    let mut values = Vec::with_capacity(len);
    zip_chunks_mut(&mut values.spare_capacity_mut()[..len], other, sizes, work, f);
    // SAFETY: both sides have the same number of chunks, so `zip_chunks_mut` visits every one, and `f` writes all of it.
    unsafe { values.set_len(len) };
    values
}

/// Initializes a chunk with the beginning of `source`.
pub(super) fn copy<'a, T: Copy>(chunk: &'a mut [MaybeUninit<T>], source: &[T]) -> &'a mut [T] {
    chunk.write_copy_of_slice(&source[..chunk.len()])
}

/// Initializes a chunk.
pub(super) fn fill<T: Copy>(chunk: &mut [MaybeUninit<T>], value: T) -> &mut [T] {
    chunk.iter_mut().for_each(|element| {
        element.write(value);
    });
    // SAFETY: every element has just been written.
    unsafe { chunk.assume_init_mut() }
}

/// The results of `f(start..end)` for consecutive ranges of `size` that cover `0..len`, in order.
pub(crate) fn map_ranges<R: Send>(
    len: usize,
    size: usize,
    f: impl Fn(core::ops::Range<usize>) -> R + Send + Sync,
) -> Vec<R> {
    let job = |index: usize| vectorized(|| f(index * size..((index + 1) * size).min(len)));
    match len <= size {
        true => vec![job(0)],
        false => map_indices(len.div_ceil(size), &job),
    }
}

fn map_indices<R: Send>(len: usize, f: &(dyn Fn(usize) -> R + Sync)) -> Vec<R> {
    (0..len).into_par_iter().with_max_len(1).map(f).collect()
}

/// Whether `f` holds for all values. It does not stop at the first that fails, so that it is vectorized.
pub(crate) fn all<T: Sync>(values: &[T], f: impl Fn(&T) -> bool + Send + Sync) -> bool {
    let of_range =
        |range: core::ops::Range<usize>| values[range].iter().fold(true, |all, value| all & f(value));
    map_ranges(values.len(), Work::WORTH_IT as usize, of_range).into_iter().all(|all| all)
}

/// The results of `f(index, chunk)` for every chunk of `size` elements, in order.
pub(crate) fn map_chunks_mut<T: Send, R: Send>(
    values: &mut [T],
    size: usize,
    f: impl Fn(usize, &mut [T]) -> R + Send + Sync,
) -> Vec<R> {
    let job = |index: usize, chunk: &mut [T]| vectorized(|| f(index, chunk));
    match values.len() <= size {
        true => vec![job(0, values)],
        false => map_each_chunk(values, size, &job),
    }
}

fn map_each_chunk<T: Send, R: Send>(
    values: &mut [T],
    size: usize,
    f: &(dyn Fn(usize, &mut [T]) -> R + Sync),
) -> Vec<R> {
    let chunks = values.par_chunks_mut(size).with_max_len(1);
    chunks.enumerate().map(|(index, chunk)| f(index, chunk)).collect()
}

/// Calls `f` with every job.
pub(crate) fn each<J: Send>(jobs: Vec<J>, work: impl Into<Work>, f: impl Fn(J) + Send + Sync) {
    each_job(jobs, work.into(), &|job| vectorized(|| f(job)));
}

fn each_job<J: Send>(jobs: Vec<J>, work: Work, f: &(dyn Fn(J) + Sync)) {
    if !work.is_worth_it() {
        jobs.into_iter().for_each(f);
    } else {
        // One by one, because idle threads could not take single jobs from those that rayon has grouped.
        jobs.into_par_iter().with_max_len(1).for_each(f);
    }
}

/// [`each`], with `most` jobs at a time.
pub(crate) fn each_of<J: Send>(
    jobs: Vec<J>,
    most: usize,
    work: impl Into<Work>,
    f: impl Fn(J) + Send + Sync,
) {
    if threads().min(jobs.len()) <= most {
        return each(jobs, work, f);
    }
    let size = jobs.len().div_ceil(most);
    let mut jobs = jobs.into_iter();
    let lanes = (0..most).map(|_| jobs.by_ref().take(size).collect::<Vec<_>>()).collect();
    each(lanes, work, |lane| lane.into_iter().for_each(&f));
}

/// The number of threads that work on a loop.
pub(crate) fn threads() -> usize {
    current_num_threads()
}

/// The number of items that a job should take if every job has a result of its own: all items, if the work is not worth waking threads.
pub(crate) fn items_per_job(items: usize, work: impl Into<Work>) -> usize {
    items_per_job_of(items, work.into(), current_num_threads())
}

/// [`items_per_job`] for so many threads.
pub(crate) fn items_per_job_of(items: usize, work: Work, threads: usize) -> usize {
    let jobs = if work.is_worth_it() { 4 * threads } else { 1 };
    items.div_ceil(jobs).max(1)
}

/// The least number of items, of `item` elements each, that a part should take if it holds `held` elements of its own. All parts together
/// then hold at most a quarter as many elements as there are, however many threads there are.
pub(crate) fn items_per_part(item: usize, held: usize) -> usize {
    (4 * held).div_ceil(item.max(1)).max(1)
}

/// Elements that all threads together may hold beside any tensor: 128 KiB of f32.
const HELD: usize = 1 << 15;

/// Elements that all threads together may hold: one `part`-th of all elements, or [`HELD`].
pub(crate) fn elements_to_hold(elements: usize, part: usize) -> usize {
    (elements / part).max(HELD)
}

/// The least number of items that each of so many threads should take if a task holds `held` elements, and all together may hold `most`.
pub(crate) fn items_to_hold_of(items: usize, held: usize, most: usize, threads: usize) -> usize {
    let most = (most / held.max(1)).max(1);
    if threads <= most { 1 } else { items.div_ceil(most) }
}

/// The number of items of `item` elements that one task should take: enough to be worth a task, and few enough that its chunk stays in
/// the cache. Where items may be few and long, [`plan::Items`] also cuts them.
pub(crate) fn items_per_task(items: usize, item: usize) -> usize {
    plan::items_per_task([items, item], current_num_threads())
}

/// So many threads, for tests.
#[cfg(all(test, feature = "rayon"))]
pub(crate) fn pool(threads: usize) -> rayon::ThreadPool {
    rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("so many threads")
}

/// The parts of rayon that are used above, on one thread.
#[cfg(not(feature = "rayon"))]
mod sequential {
    use core::slice::ChunksMut;

    pub(super) fn current_num_threads() -> usize {
        1
    }

    pub(super) trait IntoParallelIterator: IntoIterator + Sized {
        fn into_par_iter(self) -> Self::IntoIter {
            self.into_iter()
        }
    }
    impl<I: IntoIterator> IntoParallelIterator for I {}

    pub(super) trait ParallelIterator: Iterator + Sized {
        fn with_max_len(self, _most: usize) -> Self {
            self
        }
    }
    impl<I: Iterator> ParallelIterator for I {}

    pub(super) trait ParallelSliceMut<T> {
        fn par_chunks_mut(&mut self, size: usize) -> ChunksMut<'_, T>;
    }
    impl<T> ParallelSliceMut<T> for [T] {
        fn par_chunks_mut(&mut self, size: usize) -> ChunksMut<'_, T> {
            self.chunks_mut(size)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_element_is_filled_and_visited_once() {
        for (len, size) in [(0, 3), (1, 3), (7, 3), (9, 3), (Work::WORTH_IT as usize + 5, 1000)] {
            let expected: Vec<usize> = (0..len).map(|at| 7 + at / size).collect();
            let add = |index: usize, chunk: &mut [usize]| chunk.iter_mut().for_each(|value| *value += index);
            assert_eq!(filled(len, 7, size, len, add), expected);
            let source: Vec<usize> = (0..len).map(|at| 3 * at).collect();
            let expected_copy: Vec<usize> = (0..len).map(|at| 3 * at + at / size).collect();
            assert_eq!(copied(&source, size, len, add), expected_copy);
            let mut others = vec![0; 2 * len.div_ceil(size)];
            let zipped = zip_filled((len, 7), &mut others, [size, 2], len, |index, chunk, others| {
                add(index, chunk);
                others.iter_mut().for_each(|other| *other += chunk.len());
            });
            assert_eq!(zipped, expected);
            assert_eq!(others.iter().sum::<usize>(), 2 * len);
        }
    }

    #[test]
    fn every_job_runs_once_and_few_at_a_time() {
        use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
        for (count, most) in [(0, 1), (1, 3), (7, 1), (64, 3), (9, 8), (10, 20)] {
            let (running, highest) = (AtomicUsize::new(0), AtomicUsize::new(0));
            let mut runs = vec![0; count];
            let job = |runs: &mut usize| {
                highest.fetch_max(running.fetch_add(1, Relaxed) + 1, Relaxed);
                *runs += 1;
                std::thread::yield_now();
                running.fetch_sub(1, Relaxed);
            };
            each_of(runs.iter_mut().collect(), most, Work::of([Work::WORTH_IT as usize]), job);
            assert_eq!(runs, vec![1; count]);
            assert!(highest.into_inner() <= most);
        }
    }

    #[test]
    #[should_panic = "as many chunks"]
    fn chunks_without_a_partner_are_refused() {
        zip_filled((5, 0), &mut [0u8; 2], [1, 1], 5, |_, _, _| ());
    }
}
