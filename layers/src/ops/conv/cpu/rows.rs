//! Copies of rows into another type, layout or order.
use crate::backend::cpu::{CpuElement, accumulators_of};
use num_traits::Zero;

/// A shift divided by the stride, and the remainder: the place in a row of [`lay_out`], and the number of the row.
pub(super) fn split(shift: isize, stride: usize) -> (isize, usize) {
    let stride = stride as isize;
    (shift.div_euclid(stride), shift.rem_euclid(stride) as usize)
}

/// Lays a line out in `stride` rows: the first `places` of row `r` hold the elements `stride (first + place) + r`, and zeros beyond
/// the ends of the line, or everywhere if there is no line.
#[inline(always)]
pub(super) fn lay_out<E: CpuElement>(
    line: Option<&[E]>,
    first: isize,
    stride: usize,
    places: usize,
    rows: &mut [E::Acc],
) {
    let before = ((-first).max(0) as usize).min(places);
    let pitch = rows.len() / stride;
    for (remainder, row) in rows.chunks_mut(pitch).enumerate() {
        let row = &mut row[..places];
        let start = first.max(0) as usize * stride + remainder;
        let values = line.and_then(|line| line.get(start..)).unwrap_or(&[]);
        let end = (before + values.len().div_ceil(stride)).min(places);
        row[..before].fill(E::Acc::zero());
        row[end..].fill(E::Acc::zero());
        copy(&mut row[before..end], values, stride);
    }
}

/// Copies every `stride`-th value.
#[inline(always)]
pub(super) fn copy<E: CpuElement>(row: &mut [E::Acc], values: &[E], stride: usize) {
    match (accumulators_of(values), stride) {
        (Some(values), 1) => row.copy_from_slice(&values[..row.len()]),
        (_, 1) => widen(row, values),
        (_, 2) => {
            // Pairs are read in vectors. The last pair may be incomplete.
            let (pairs, _) = values.as_chunks::<2>();
            widen(row, pairs.iter().map(|[value, _]| value));
            if let (Some(last), Some(value)) =
                (row.len().checked_sub(1), values.get(2 * row.len().max(1) - 2))
            {
                row[last] = value.widen();
            }
        }
        _ => widen(row, values.iter().step_by(stride)),
    }
}

/// Copies values into the type of sums.
#[inline(always)]
pub(super) fn widen<'a, E: CpuElement>(row: &mut [E::Acc], values: impl IntoIterator<Item = &'a E>) {
    row.iter_mut().zip(values).for_each(|(element, value)| *element = value.widen());
}

/// Copies sums into the dtype of a tensor.
#[inline(always)]
pub(super) fn round<'a, E: CpuElement>(results: impl IntoIterator<Item = &'a mut E>, sums: &[E::Acc]) {
    results.into_iter().zip(sums).for_each(|(result, &sum)| *result = E::narrow(sum));
}
