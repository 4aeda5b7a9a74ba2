//! Loops over chunks, on all cores where that pays.
use rayon::prelude::*;

/// Below this many elements a loop stays on the calling thread: waking another one costs more.
const WORTH_IT: usize = 1 << 17;

/// Calls `f(index, chunk)` for every chunk of `size` elements.
pub(super) fn chunks_mut<T: Send>(values: &mut [T], size: usize, f: impl Fn(usize, &mut [T]) + Send + Sync) {
    if values.is_empty() {
        return;
    }
    if values.len() < WORTH_IT {
        values.chunks_mut(size).enumerate().for_each(|(index, chunk)| f(index, chunk));
    } else {
        values.par_chunks_mut(size).enumerate().for_each(|(index, chunk)| f(index, chunk));
    }
}

/// Calls `f(index, a, b)` for every pair of chunks, of `sizes[0]` elements of `a` and `sizes[1]` of `b`.
pub(super) fn zip_chunks_mut<T: Send, U: Send>(
    a: &mut [T],
    b: &mut [U],
    sizes: [usize; 2],
    f: impl Fn(usize, &mut [T], &mut [U]) + Send + Sync,
) {
    if a.is_empty() || b.is_empty() {
        return;
    }
    if a.len().max(b.len()) < WORTH_IT {
        let pairs = a.chunks_mut(sizes[0]).zip(b.chunks_mut(sizes[1]));
        pairs.enumerate().for_each(|(index, (a, b))| f(index, a, b));
    } else {
        let pairs = a.par_chunks_mut(sizes[0]).zip(b.par_chunks_mut(sizes[1]));
        pairs.enumerate().for_each(|(index, (a, b))| f(index, a, b));
    }
}

/// `f(start..end)` for consecutive ranges that cover `0..len`, in order; `work` is the number of elements read in all.
pub(super) fn map_ranges<R: Send>(
    len: usize,
    work: usize,
    f: impl Fn(core::ops::Range<usize>) -> R + Send + Sync,
) -> Vec<R> {
    let jobs = if work < WORTH_IT { 1 } else { (4 * rayon::current_num_threads()).min(len.max(1)) };
    let size = len.div_ceil(jobs).max(1);
    let range = |job: usize| (job * size).min(len)..((job + 1) * size).min(len);
    if jobs == 1 { vec![f(0..len)] } else { (0..jobs).into_par_iter().map(|job| f(range(job))).collect() }
}

/// The number of items of `item` elements that one task should take.
pub(super) fn items_per_task(items: usize, item: usize) -> usize {
    let per_thread = items.div_ceil(4 * rayon::current_num_threads());
    per_thread.max((1 << 12) / item.max(1)).max(1)
}
