//! Loops over the pieces of items, which a [`Division`](super::plan::Division) makes, on all cores where that pays.
use super::{
    parallel::{PairBody, Work, copy, each_chunk, each_pair, fill, vectorized},
    plan::Chunks,
};
use core::mem::MaybeUninit;

/// Calls `f(start, chunk)` for every chunk, which begins with the element at `start`.
pub(crate) fn pieces_mut<T: Send>(
    values: &mut [T],
    chunks: Chunks,
    work: impl Into<Work>,
    f: impl Fn(usize, &mut [T]) + Send + Sync,
) {
    each_piece(values, chunks, work.into(), &|start, chunk| vectorized(|| f(start, chunk)));
}

fn each_piece<T: Send>(
    values: &mut [T],
    Chunks { item, piece }: Chunks,
    work: Work,
    f: &(dyn Fn(usize, &mut [T]) + Sync),
) {
    each_chunk(values, item, work, &|index, chunk| match piece == item {
        true => f(index * item, chunk),
        false => each_chunk(chunk, piece, work, &|at, chunk| f(index * item + at * piece, chunk)),
    });
}

/// Calls `f(start, a, b)` for every pair of chunks, the first of which begins with the element at `start` of `a`. Both slices must have the
/// same numbers of chunks.
pub(crate) fn zip_pieces_mut<T: Send, U: Send>(
    a: &mut [T],
    b: &mut [U],
    chunks: [Chunks; 2],
    work: impl Into<Work>,
    f: impl Fn(usize, &mut [T], &mut [U]) + Send + Sync,
) {
    each_pair_of_pieces(a, b, chunks, work.into(), &|start, a, b| vectorized(|| f(start, a, b)));
}

fn each_pair_of_pieces<T: Send, U: Send>(
    a: &mut [T],
    b: &mut [U],
    [of_a, of_b]: [Chunks; 2],
    work: Work,
    f: &PairBody<T, U>,
) {
    each_pair(a, b, [of_a.item, of_b.item], work, &|index, a, b| match of_a.piece == of_a.item {
        true => f(index * of_a.item, a, b),
        false => each_pair(a, b, [of_a.piece, of_b.piece], work, &|at, a, b| {
            f(index * of_a.item + at * of_a.piece, a, b)
        }),
    });
}

/// A vector of `len` elements, of which `f(start, chunk)` writes the chunk that begins with the element at `start`.
///
/// # Safety
///
/// `f` writes every element of its chunk.
pub(crate) unsafe fn written_in_pieces<T: Send>(
    len: usize,
    chunks: Chunks,
    work: impl Into<Work>,
    f: impl Fn(usize, &mut [MaybeUninit<T>]) + Send + Sync,
) -> Vec<T> {
    let mut values = Vec::with_capacity(len);
    pieces_mut(&mut values.spare_capacity_mut()[..len], chunks, work, f);
    // SAFETY: `pieces_mut` visits every chunk, and `f` writes all of it.
    unsafe { values.set_len(len) };
    values
}

/// A vector filled with `value`, after `f(start, chunk)` for every chunk, which begins with the element at `start`.
pub(crate) fn filled_in_pieces<T: Copy + Send + Sync>(
    len: usize,
    value: T,
    chunks: Chunks,
    work: impl Into<Work>,
    f: impl Fn(usize, &mut [T]) + Send + Sync,
) -> Vec<T> {
    // SAFETY: `fill` writes all of the chunk.
    unsafe { written_in_pieces(len, chunks, work, |start, chunk| f(start, fill(chunk, value))) }
}

/// [`filled_in_pieces`] with a copy of `source` instead of one value.
pub(crate) fn copied_in_pieces<T: Copy + Send + Sync>(
    source: &[T],
    chunks: Chunks,
    work: impl Into<Work>,
    f: impl Fn(usize, &mut [T]) + Send + Sync,
) -> Vec<T> {
    // SAFETY: `copy` writes all of the chunk.
    unsafe {
        written_in_pieces(source.len(), chunks, work, |start, chunk| f(start, copy(chunk, &source[start..])))
    }
}

/// [`filled_in_pieces`], with the chunks of another slice of the same length beside.
pub(crate) fn zip_filled_in_pieces<T: Copy + Send + Sync, U: Send>(
    value: T,
    other: &mut [U],
    chunks: Chunks,
    work: impl Into<Work>,
    f: impl Fn(usize, &mut [T], &mut [U]) + Send + Sync,
) -> Vec<T> {
    let len = other.len();
    let mut values = Vec::with_capacity(len);
    let unwritten = &mut values.spare_capacity_mut()[..len];
    zip_pieces_mut(unwritten, other, [chunks; 2], work, |start, chunk, other| {
        f(start, fill(chunk, value), other);
    });
    // SAFETY: both slices have the same chunks, so every one of the vector is visited, and `fill` writes all of it.
    unsafe { values.set_len(len) };
    values
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_element_is_in_one_piece() {
        let len = 2 * Work::WORTH_IT as usize;
        for (item, piece) in [(1 << 14, 1 << 14), (1 << 16, 1000), (len, 1 << 12), (1 << 10, 1)] {
            let chunks = Chunks { item, piece };
            let add = |start: usize, chunk: &mut [usize]| {
                assert!(
                    (start % item).is_multiple_of(piece)
                        && chunk.len() <= piece
                        && start % item + chunk.len() <= item
                );
                (start..).zip(chunk).for_each(|(at, value)| *value += at);
            };
            let expected: Vec<usize> = (0..len).map(|at| 7 + at).collect();
            assert_eq!(filled_in_pieces(len, 7, chunks, len, add), expected);
            assert_eq!(copied_in_pieces(&vec![7; len], chunks, len, add), expected);
            let mut others = vec![1; len];
            let zipped = zip_filled_in_pieces(7, &mut others, chunks, len, |start, chunk, others| {
                add(start, chunk);
                (start..).zip(others).for_each(|(at, other)| *other += at);
            });
            assert!((0..len).all(|at| (zipped[at], others[at]) == (7 + at, 1 + at)));
            let mut sums = vec![0; len / item * item.div_ceil(piece)];
            let of_sums = Chunks { item: item.div_ceil(piece), piece: 1 };
            let of_sums = if item == piece { Chunks { item: 1, ..of_sums } } else { of_sums };
            zip_pieces_mut(&mut others, &mut sums, [chunks, of_sums], len, |_, others, sums| {
                sums[0] += others.len();
            });
            assert!(sums.iter().all(|&sum| sum > 0) && sums.iter().sum::<usize>() == len);
        }
    }
}
