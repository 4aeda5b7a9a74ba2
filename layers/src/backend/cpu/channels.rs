//! Channels of `[batch, channels, ...]`.
use super::{
    CpuElement,
    parallel::{self, vectorized},
    sums::Sum,
};
use burn::tensor::Shape;
use core::ops::Range;

/// A tensor `[batch, channels, inner]`.
pub(crate) struct Channels<'a, E> {
    pub(crate) values: &'a [E],
    pub(crate) channels: usize,
    pub(crate) inner: usize,
}

impl<'a, E: CpuElement> Channels<'a, E> {
    pub(crate) fn of(values: &'a [E], shape: &Shape) -> Self {
        Self { values, channels: shape[1], inner: shape[2..].iter().product() }
    }

    /// Elements per channel.
    pub(crate) fn count(&self) -> usize {
        self.values.len() / self.channels.max(1)
    }

    /// The sum of every channel.
    pub(crate) fn sums(&self) -> Vec<f64> {
        self.reduce([0.0], |_, range| [vectorized(Sum { values: &self.values[range], f: |x: E| x.widen() })])
            .into_iter()
            .map(|[sum]| sum)
            .collect()
    }

    /// Adds up `f(channel, elements)` over all runs of elements of a channel.
    pub(crate) fn reduce<const N: usize>(
        &self,
        zero: [f64; N],
        f: impl Fn(usize, Range<usize>) -> [f64; N] + Send + Sync,
    ) -> Vec<[f64; N]> {
        let row = self.channels * self.inner;
        let size = parallel::items_per_job(self.channels, self.values.len());
        let per_range = parallel::map_ranges(self.channels, size, |channels| {
            let mut sums = vec![zero; channels.len()];
            for start in (0..self.values.len()).step_by(row.max(1)) {
                for (sums, channel) in sums.iter_mut().zip(channels.clone()) {
                    let start = start + channel * self.inner;
                    let part = f(channel, start..start + self.inner);
                    sums.iter_mut().zip(part).for_each(|(sum, part)| *sum += part);
                }
            }
            sums
        });
        per_range.into_iter().flatten().collect()
    }
}
