//! Batch normalization of `[batch, channels, ...]`.
use super::{CpuElement, parallel, sums};
use burn::tensor::Shape;
use core::ops::Range;

/// A tensor `[batch, channels, inner]`.
pub(crate) struct Channels<'a, E> {
    values: &'a [E],
    channels: usize,
    inner: usize,
}

/// `sum(dy)` and `sum(dy * x_hat)` per channel.
pub(crate) struct GradientSums(Vec<[f64; 2]>);

impl GradientSums {
    pub(crate) fn beta<E: CpuElement>(&self) -> Vec<E> {
        self.0.iter().map(|sums| E::from_f64(sums[0])).collect()
    }

    pub(crate) fn gamma<E: CpuElement>(&self) -> Vec<E> {
        self.0.iter().map(|sums| E::from_f64(sums[1])).collect()
    }
}

impl<'a, E: CpuElement> Channels<'a, E> {
    pub(crate) fn of(values: &'a [E], shape: &Shape) -> Self {
        Self { values, channels: shape[1], inner: shape[2..].iter().product() }
    }

    /// Elements per channel.
    fn count(&self) -> usize {
        self.values.len() / self.channels.max(1)
    }

    /// The sum of every channel.
    pub(crate) fn sums(&self) -> Vec<f64> {
        self.reduce([0.0], |_, range| [sums::sum(&self.values[range], |x| x.widen())])
            .into_iter()
            .map(|[sum]| sum)
            .collect()
    }

    /// The mean and the biased variance of every channel, in two passes, so that a large mean costs no digits.
    pub(crate) fn statistics(&self) -> (Vec<E>, Vec<E>) {
        let count = self.count() as f64;
        let mean: Vec<f64> = self.sums().into_iter().map(|sum| sum / count).collect();
        let squares = self.reduce([0.0], |channel, range| {
            let mean = <E::Acc as CpuElement>::from_f64(mean[channel]);
            [sums::sum(&self.values[range], |x| (x.widen() - mean) * (x.widen() - mean))]
        });
        let variance = squares.into_iter().map(|[sum]| E::from_f64(sum / count)).collect();
        (mean.into_iter().map(E::from_f64).collect(), variance)
    }

    /// `(x - mean) / std * gamma + beta`
    pub(crate) fn normalize(
        &self,
        gamma: &[E],
        beta: &[E],
        mean: &[E],
        variance: &[E],
        epsilon: f64,
    ) -> Vec<E> {
        let shape = [self.count() / self.inner.max(1), self.channels, self.inner];
        Affine::new(gamma, beta, mean, variance, epsilon).apply(self.values, &Shape::new(shape))
    }

    /// `sum(dy)` and `sum(dy * x_hat)` per channel, `x_hat = (x - mean) / std`.
    pub(crate) fn gradient_sums(&self, mean: &[E], inv_std: &[E::Acc], dy: &[E]) -> GradientSums {
        let totals = self.reduce([0.0, 0.0], |channel, range| {
            let mean = mean[channel].widen();
            sums::moments(&self.values[range.clone()], &dy[range], mean)
        });
        let scaled =
            totals.into_iter().zip(inv_std).map(|([dy, product], inv)| [dy, product * inv.into_f64()]);
        GradientSums(scaled.collect())
    }

    /// `dx = gamma / std * (dy - mean(dy) - x_hat * mean(dy * x_hat))`, in place of `dy`.
    pub(crate) fn train_x_backward(
        &self,
        gamma: &[E],
        mean: &[E],
        inv_std: &[E::Acc],
        sums: &GradientSums,
        dy: &mut [E],
    ) {
        /// `dx = scale * dy + slope * (x - mean) + shift`
        struct Line<A> {
            scale: A,
            slope: A,
            mean: A,
            shift: A,
        }
        let count = self.count() as f64;
        let acc = <E::Acc as CpuElement>::from_f64;
        let line = |channel: usize| {
            let inv = inv_std[channel].into_f64();
            let scale = gamma[channel].into_f64() * inv;
            let [sum, product] = sums.0[channel];
            Line {
                scale: acc(scale),
                slope: acc(-scale * inv * product / count),
                mean: mean[channel].widen(),
                shift: acc(-scale * sum / count),
            }
        };
        let lines: Vec<_> = (0..self.channels).map(line).collect();
        let apply = |line: &Line<E::Acc>, x: &E, dy: &mut E| {
            *dy = E::narrow(line.scale * dy.widen() + (line.slope * (x.widen() - line.mean) + line.shift));
        };
        rows(dy, self.channels * self.inner, |start, row| {
            let x = &self.values[start..start + row.len()];
            if self.inner == 1 {
                row.iter_mut().zip(x).zip(&lines).for_each(|((dy, x), line)| apply(line, x, dy));
            } else {
                let planes = row.chunks_mut(self.inner).zip(x.chunks(self.inner)).zip(&lines);
                planes
                    .for_each(|((dy, x), line)| dy.iter_mut().zip(x).for_each(|(dy, x)| apply(line, x, dy)));
            }
        });
    }

    /// Adds up `f(channel, elements)` over all runs of elements of a channel.
    fn reduce<const N: usize>(
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

/// `1 / sqrt(variance + epsilon)`
pub(crate) fn inv_std<E: CpuElement>(variance: &[E], epsilon: f64) -> Vec<E::Acc> {
    variance
        .iter()
        .map(|v| <E::Acc as CpuElement>::from_f64((v.into_f64() + epsilon).sqrt().recip()))
        .collect()
}

/// `gamma / std`
pub(crate) fn scales<E: CpuElement>(gamma: &[E], inv_std: &[E::Acc]) -> Vec<E::Acc> {
    gamma.iter().zip(inv_std).map(|(gamma, &inv)| gamma.widen() * inv).collect()
}

/// Multiplies every channel of `[batch, channels, ...]` by its scale.
pub(crate) fn scale_channels<E: CpuElement>(values: &mut [E], shape: &Shape, scales: &[E::Acc]) {
    map_channels(values, shape, scales, |&scale, x| E::narrow(x.widen() * scale));
}

/// `(x - mean) * scale + beta` per channel.
pub(crate) struct Affine<E: CpuElement> {
    channels: Vec<AffineChannel<E::Acc>>,
}

#[derive(Clone, Copy)]
struct AffineChannel<A> {
    mean: A,
    scale: A,
    beta: A,
}

impl<E: CpuElement> Affine<E> {
    /// Statistics and parameters of a batch norm.
    pub(crate) fn new(gamma: &[E], beta: &[E], mean: &[E], variance: &[E], epsilon: f64) -> Self {
        let scales = scales(gamma, &inv_std(variance, epsilon));
        let channel = |((&scale, mean), beta): ((&E::Acc, &E), &E)| AffineChannel {
            mean: mean.widen(),
            scale,
            beta: beta.widen(),
        };
        Self { channels: scales.iter().zip(mean).zip(beta).map(channel).collect() }
    }

    #[inline(always)]
    fn one(channel: &AffineChannel<E::Acc>, x: E) -> E {
        E::narrow((x.widen() - channel.mean) * channel.scale + channel.beta)
    }

    pub(crate) fn apply_in_place(&self, values: &mut [E], shape: &Shape) {
        map_channels(values, shape, &self.channels, Self::one);
    }

    pub(crate) fn apply(&self, values: &[E], shape: &Shape) -> Vec<E> {
        let (channels, inner) = (shape[1], shape[2..].iter().product::<usize>());
        let size = channels * inner;
        if size == 0 {
            return vec![];
        }
        let normalize = |start: usize, row: &mut [E]| {
            let x = &values[start..start + row.len()];
            if inner == 1 {
                let triples = row.iter_mut().zip(x).zip(&self.channels);
                triples.for_each(|((y, &x), channel)| *y = Self::one(channel, x));
            } else {
                let planes = row.chunks_mut(inner).zip(x.chunks(inner)).zip(&self.channels);
                planes.for_each(|((y, x), channel)| {
                    y.iter_mut().zip(x).for_each(|(y, &x)| *y = Self::one(channel, x));
                });
            }
        };
        let task = task(values.len(), size);
        parallel::filled(values.len(), E::zero(), task, values.len(), |index, chunk| {
            each_row(index * task, chunk, size, normalize);
        })
    }
}

/// Replaces every element of a channel by `f(parameters, element)`.
fn map_channels<E: CpuElement, P: Sync>(
    values: &mut [E],
    shape: &Shape,
    parameters: &[P],
    f: impl Fn(&P, E) -> E + Copy + Send + Sync,
) {
    let inner = shape[2..].iter().product::<usize>();
    rows(values, shape[1] * inner, |_, row| {
        if inner == 1 {
            row.iter_mut().zip(parameters).for_each(|(value, parameters)| *value = f(parameters, *value));
        } else {
            let planes = row.chunks_mut(inner).zip(parameters);
            planes.for_each(|(plane, p)| plane.iter_mut().for_each(|value| *value = f(p, *value)));
        }
    });
}

/// Calls `f(start, row)` for every row of `size` elements, `start` being its position.
fn rows<E: Send>(values: &mut [E], size: usize, f: impl Fn(usize, &mut [E]) + Send + Sync) {
    if size == 0 {
        return;
    }
    let task = task(values.len(), size);
    parallel::chunks_mut(values, task, values.len(), |index, chunk| each_row(index * task, chunk, size, &f));
}

/// The elements of whole rows of `size` that one task should take, of `len` in all.
fn task(len: usize, size: usize) -> usize {
    size * parallel::items_per_task(len / size, size)
}

/// Calls `f(start, row)` for every row of a chunk that begins at `start`.
fn each_row<E>(start: usize, chunk: &mut [E], size: usize, f: impl Fn(usize, &mut [E])) {
    chunk.chunks_mut(size).enumerate().for_each(|(row, values)| f(start + row * size, values));
}
