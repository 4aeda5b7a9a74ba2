//! Sums over the channels of `[batch, channels, ...]`, and loops that change them.
use super::{
    CpuElement,
    elementwise::Update,
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

    /// For every channel, the sum of `f(channel, range)` over its ranges of consecutive elements, one per item of the batch.
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

/// Replaces every element of a channel by `f(parameters, element)`, rounded once.
pub(crate) fn map_channels<E: CpuElement, P: Sync>(
    values: &mut [E],
    shape: &Shape,
    parameters: &[P],
    f: impl Fn(&P, E::Acc) -> E::Acc + Copy + Send + Sync,
) {
    let inner = shape[2..].iter().product::<usize>();
    items_mut(values, shape[1] * inner, |_, item| {
        if inner == 1 {
            let each = item.iter_mut().zip(parameters);
            each.for_each(|(value, parameters)| *value = E::narrow(f(parameters, value.widen())));
        } else {
            let planes = item.chunks_mut(inner).zip(parameters);
            planes.for_each(|(x, p)| vectorized(Update { x, f: |x| f(p, x) }));
        }
    });
}

/// Calls `f(start, item)` for every item of a batch, of `size` elements each, `start` being the position of the first one.
pub(crate) fn items_mut<E: Send>(values: &mut [E], size: usize, f: impl Fn(usize, &mut [E]) + Send + Sync) {
    if size == 0 {
        return;
    }
    let (len, task) = (values.len(), size * parallel::items_per_task(values.len() / size, size));
    parallel::chunks_mut(values, task, len, |index, chunk| each_item(index * task, chunk, size, &f));
}

/// [`items_mut`] of a chunk that begins at `start`.
pub(crate) fn each_item<E>(start: usize, chunk: &mut [E], size: usize, f: impl Fn(usize, &mut [E])) {
    chunk.chunks_mut(size).enumerate().for_each(|(item, values)| f(start + item * size, values));
}
