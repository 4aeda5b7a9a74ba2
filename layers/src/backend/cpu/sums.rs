//! Sums of slices, in several lanes.
use super::CpuElement;
use num_traits::Zero;

/// Partial sums per loop: enough to fill the vector registers, and to keep the error of long sums low.
pub(super) const LANES: usize = 16;

/// Zero in every lane.
pub(super) fn zeros<A: CpuElement>() -> [A; LANES] {
    [<A as Zero>::zero(); LANES]
}

/// The sum over the lanes.
pub(super) fn total<A: CpuElement>(lanes: [A; LANES]) -> f64 {
    lanes.into_iter().map(CpuElement::into_f64).sum()
}

/// The sum of `f` over all values.
#[inline(always)]
pub(super) fn sum<E: CpuElement>(values: &[E], f: impl Fn(E) -> E::Acc) -> f64 {
    let mut sums = zeros::<E::Acc>();
    let (chunks, rest) = values.as_chunks::<LANES>();
    for chunk in chunks {
        for (sum, &value) in sums.iter_mut().zip(chunk) {
            *sum = *sum + f(value);
        }
    }
    total(sums) + rest.iter().map(|&value| f(value).into_f64()).sum::<f64>()
}

/// `sum(dy)` and `sum(dy * (x - mean))`.
#[inline(always)]
pub(super) fn moments<E: CpuElement>(x: &[E], dy: &[E], mean: E::Acc) -> [f64; 2] {
    let (mut sum, mut product) = (zeros::<E::Acc>(), zeros::<E::Acc>());
    let mut add = |lane: usize, x: E, dy: E| {
        let dy = dy.widen();
        sum[lane] = sum[lane] + dy;
        product[lane] = product[lane] + dy * (x.widen() - mean);
    };
    let (x, x_rest) = x.as_chunks::<LANES>();
    let (dy, dy_rest) = dy.as_chunks::<LANES>();
    x.iter().zip(dy).for_each(|(x, dy)| (0..LANES).for_each(|lane| add(lane, x[lane], dy[lane])));
    x_rest.iter().zip(dy_rest).for_each(|(&x, &dy)| add(0, x, dy));
    [total(sum), total(product)]
}
