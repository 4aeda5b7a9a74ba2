//! Results in the place of an input if that is the only handle of its tensor, else in a new tensor.
use super::{
    CpuBackend, CpuElement,
    parallel::{self, Work},
    pieces,
    plan::Chunks,
};
use burn::backend::{TensorMetadata, tensor::FloatTensor};

/// What `change` makes of the elements of a [contiguous](CpuBackend::contiguous) `x`, if it is the only handle of its tensor; else what
/// `make` returns for them.
pub(crate) fn in_place_or_new<B: CpuBackend, E: CpuElement>(
    mut x: FloatTensor<B>,
    change: impl FnOnce(&mut [E]),
    make: impl FnOnce(&[E]) -> Vec<E>,
) -> FloatTensor<B> {
    if x.can_mut() {
        change(B::as_slice_mut(&mut x));
        x
    } else {
        B::from_vec(make(B::as_slice(&x)), x.shape())
    }
}

/// A [contiguous](CpuBackend::contiguous) `x` after `f(index, chunk)` for every chunk of `size` elements. Where `x` is shared, every
/// chunk is copied by the thread that goes on to work on it, while it is in the cache.
pub(crate) fn in_place_or_copied<B: CpuBackend, E: CpuElement>(
    x: FloatTensor<B>,
    size: usize,
    work: impl Into<Work>,
    f: impl Fn(usize, &mut [E]) + Send + Sync,
) -> FloatTensor<B> {
    let (f, work) = (&f, work.into());
    let change = |x: &mut [E]| parallel::chunks_mut(x, size, work, f);
    in_place_or_new::<B, E>(x, change, |x| parallel::copied(x, size, work, f))
}

/// [`in_place_or_copied`], after `f(start, chunk)` for every chunk, which begins with the element at `start`.
pub(crate) fn in_place_or_copied_in_pieces<B: CpuBackend, E: CpuElement>(
    x: FloatTensor<B>,
    chunks: Chunks,
    work: impl Into<Work>,
    f: impl Fn(usize, &mut [E]) + Send + Sync,
) -> FloatTensor<B> {
    let (f, work) = (&f, work.into());
    let change = |x: &mut [E]| pieces::pieces_mut(x, chunks, work, f);
    in_place_or_new::<B, E>(x, change, |x| pieces::copied_in_pieces(x, chunks, work, f))
}
