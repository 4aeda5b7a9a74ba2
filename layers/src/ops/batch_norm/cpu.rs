//! Fused loops over channels.
use super::{BatchNormKernels, BatchNormOutput};
use crate::backend::cpu::{
    CpuBackend, CpuElement,
    channels::Channels,
    elementwise::{Map, Update, Update1},
    parallel::{self, vectorized},
    sums::{Moments, Sum},
    with_element,
};
use crate::backend::wide;
use crate::ops::row_norm::NormGrads;
use burn::backend::{TensorMetadata, tensor::FloatTensor};
use burn::tensor::{DType, Shape, bf16, f16};
use core::mem::MaybeUninit;

impl<B: CpuBackend> BatchNormKernels for B {
    fn train_batch_norm(
        x: FloatTensor<B>,
        gamma: FloatTensor<B>,
        beta: FloatTensor<B>,
        epsilon: f64,
    ) -> BatchNormOutput<B> {
        let (x, gamma, beta) = (B::contiguous(x), B::contiguous(gamma), B::contiguous(beta));
        let channels = gamma.shape();
        with_element!(x.dtype(), "batch_norm", E => {
            let view = Channels::of(B::as_slice::<E>(&x), &x.shape());
            let [mean, variance] = view.statistics();
            let output = view.normalize(B::as_slice(&gamma), B::as_slice(&beta), &mean, &variance, epsilon);
            let [mean, variance] = [mean, variance]
                .map(|statistic| statistic.into_iter().map(E::narrow).collect())
                .map(|statistic| B::from_vec(statistic, channels.clone()));
            BatchNormOutput { output: B::from_vec(output, x.shape()), mean, variance }
        })
    }

    fn rounds_batch_statistics(dtype: DType) -> bool {
        wide(dtype) != dtype
    }

    fn train_batch_norm_backward(
        x: FloatTensor<B>,
        gamma: FloatTensor<B>,
        statistics: Option<[FloatTensor<B>; 2]>,
        epsilon: f64,
        dy: FloatTensor<B>,
        wanted: [bool; 3],
    ) -> NormGrads<B> {
        let (x, mut dy, gamma) = (B::contiguous(x), B::contiguous(dy), B::contiguous(gamma));
        let channels = gamma.shape();
        with_element!(x.dtype(), "batch_norm", E => {
            let view = Channels::of(B::as_slice::<E>(&x), &x.shape());
            let [mean, variance] = match statistics {
                Some(statistics) => statistics.map(|of| widened(B::as_slice::<E>(&B::contiguous(of)))),
                None => view.statistics(),
            };
            let inv_std = inv_std(&variance, epsilon);
            let sums = view.gradient_sums(&mean, &inv_std, B::as_slice(&dy));
            let gamma_grad = wanted[1].then(|| B::from_vec(sums.gamma::<E>(), channels.clone()));
            let beta_grad = wanted[2].then(|| B::from_vec(sums.beta::<E>(), channels));
            if wanted[0] {
                let dx = B::as_slice_mut(&mut dy);
                view.train_x_backward(B::as_slice(&gamma), &mean, &inv_std, &sums, dx);
            }
            NormGrads { x: wanted[0].then_some(dy), gamma: gamma_grad, beta: beta_grad }
        })
    }

    fn eval_batch_norm(
        x: FloatTensor<B>,
        gamma: FloatTensor<B>,
        beta: FloatTensor<B>,
        mean: FloatTensor<B>,
        variance: FloatTensor<B>,
        epsilon: f64,
    ) -> FloatTensor<B> {
        let mut x = B::contiguous(x);
        let [gamma, beta, mean, variance] = [gamma, beta, mean, variance].map(B::contiguous);
        let shape = x.shape();
        with_element!(x.dtype(), "batch_norm", E => {
            let affine = Affine::<E>::new(
                B::as_slice(&gamma),
                B::as_slice(&beta),
                &widened(B::as_slice::<E>(&mean)),
                &widened(B::as_slice::<E>(&variance)),
                epsilon,
            );
            if x.can_mut() {
                affine.apply_in_place(B::as_slice_mut(&mut x), &shape);
                x
            } else {
                B::from_vec(affine.apply(B::as_slice(&x), &shape), shape)
            }
        })
    }

    fn eval_batch_norm_backward(
        x: Option<FloatTensor<B>>,
        gamma: FloatTensor<B>,
        mean: FloatTensor<B>,
        variance: FloatTensor<B>,
        epsilon: f64,
        dy: FloatTensor<B>,
        wanted: [bool; 2],
    ) -> NormGrads<B> {
        let mut dy = B::contiguous(dy);
        let [gamma, mean, variance] = [gamma, mean, variance].map(B::contiguous);
        let (shape, channels) = (dy.shape(), gamma.shape());
        with_element!(dy.dtype(), "batch_norm", E => {
            let inv_std = inv_std(&widened(B::as_slice::<E>(&variance)), epsilon);
            let gradient = B::as_slice::<E>(&dy);
            let (gamma_grad, beta_grad) = match x.map(B::contiguous) {
                Some(x) => {
                    let view = Channels::of(B::as_slice::<E>(&x), &shape);
                    let sums = view.gradient_sums(&widened(B::as_slice::<E>(&mean)), &inv_std, gradient);
                    (Some(sums.gamma()), wanted[1].then(|| sums.beta()))
                }
                None => {
                    let sums = || Channels::of(gradient, &shape).sums();
                    (None, wanted[1].then(|| sums().into_iter().map(E::from_f64).collect()))
                }
            };
            if wanted[0] {
                let dx = B::as_slice_mut::<E>(&mut dy);
                scale_channels(dx, &shape, &scales(B::as_slice::<E>(&gamma), &inv_std));
            }
            let per_channel = |grad: Vec<E>| B::from_vec(grad, channels.clone());
            NormGrads {
                x: wanted[0].then_some(dy),
                gamma: gamma_grad.map(per_channel),
                beta: beta_grad.map(per_channel),
            }
        })
    }
}

/// `sum(dy)` and `sum(dy * x_hat)` per channel.
struct GradientSums(Vec<[f64; 2]>);

impl GradientSums {
    fn beta<E: CpuElement>(&self) -> Vec<E> {
        self.0.iter().map(|sums| E::from_f64(sums[0])).collect()
    }

    fn gamma<E: CpuElement>(&self) -> Vec<E> {
        self.0.iter().map(|sums| E::from_f64(sums[1])).collect()
    }
}

impl<'a, E: CpuElement> Channels<'a, E> {
    /// The mean and the biased variance of every channel, in two passes, so that a large mean costs no digits.
    fn statistics(&self) -> [Vec<E::Acc>; 2] {
        let count = self.count() as f64;
        let mean: Vec<f64> = self.sums().into_iter().map(|sum| sum / count).collect();
        let squares = self.reduce([0.0], |channel, range| {
            let mean = <E::Acc as CpuElement>::from_f64(mean[channel]);
            [vectorized(Sum {
                values: &self.values[range],
                f: |x: E| (x.widen() - mean) * (x.widen() - mean),
            })]
        });
        let acc = <E::Acc as CpuElement>::from_f64;
        let variance = squares.into_iter().map(|[sum]| acc(sum / count)).collect();
        [mean.into_iter().map(acc).collect(), variance]
    }

    /// `(x - mean) / std * gamma + beta`
    fn normalize(
        &self,
        gamma: &[E],
        beta: &[E],
        mean: &[E::Acc],
        variance: &[E::Acc],
        epsilon: f64,
    ) -> Vec<E> {
        let shape = [self.count() / self.inner.max(1), self.channels, self.inner];
        Affine::new(gamma, beta, mean, variance, epsilon).apply(self.values, &Shape::new(shape))
    }

    /// `sum(dy)` and `sum(dy * x_hat)` per channel, `x_hat = (x - mean) / std`.
    fn gradient_sums(&self, mean: &[E::Acc], inv_std: &[E::Acc], dy: &[E]) -> GradientSums {
        let totals = self.reduce([0.0, 0.0], |channel, range| {
            let mean = mean[channel];
            vectorized(Moments { x: &self.values[range.clone()], dy: &dy[range], mean })
        });
        let scaled =
            totals.into_iter().zip(inv_std).map(|([dy, product], inv)| [dy, product * inv.into_f64()]);
        GradientSums(scaled.collect())
    }

    /// `dx = gamma / std * (dy - mean(dy) - x_hat * mean(dy * x_hat))`, in place of `dy`.
    fn train_x_backward(
        &self,
        gamma: &[E],
        mean: &[E::Acc],
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
                mean: mean[channel],
                shift: acc(-scale * sum / count),
            }
        };
        let lines: Vec<_> = (0..self.channels).map(line).collect();
        let apply = |line: &Line<E::Acc>, dy: E::Acc, x: E::Acc| {
            line.scale * dy + (line.slope * (x - line.mean) + line.shift)
        };
        rows(dy, self.channels * self.inner, |start, row| {
            let x = &self.values[start..start + row.len()];
            if self.inner == 1 {
                let each = row.iter_mut().zip(x).zip(&lines);
                each.for_each(|((dy, x), line)| *dy = E::narrow(apply(line, dy.widen(), x.widen())));
            } else {
                let planes = row.chunks_mut(self.inner).zip(x.chunks(self.inner)).zip(&lines);
                for ((dy, x), line) in planes {
                    vectorized(Update1 { x: dy, a: x, f: |dy, x| apply(line, dy, x) });
                }
            }
        });
    }
}

/// In the type that sums are made in.
pub(in crate::ops) fn widened<E: CpuElement>(statistic: &[E]) -> Vec<E::Acc> {
    statistic.iter().map(|value| value.widen()).collect()
}

/// `1 / sqrt(variance + epsilon)`
fn inv_std<A: CpuElement>(variance: &[A], epsilon: f64) -> Vec<A> {
    variance.iter().map(|v| A::from_f64((v.into_f64() + epsilon).sqrt().recip())).collect()
}

/// `gamma / std`
fn scales<E: CpuElement>(gamma: &[E], inv_std: &[E::Acc]) -> Vec<E::Acc> {
    gamma.iter().zip(inv_std).map(|(gamma, &inv)| gamma.widen() * inv).collect()
}

/// Multiplies every channel of `[batch, channels, ...]` by its scale.
fn scale_channels<E: CpuElement>(values: &mut [E], shape: &Shape, scales: &[E::Acc]) {
    map_channels(values, shape, scales, |&scale, x| x * scale);
}

/// `gamma / sqrt(variance + epsilon)`
pub(in crate::ops) fn channel_scales<E: CpuElement>(
    gamma: &[E],
    variance: &[E::Acc],
    epsilon: f64,
) -> Vec<E::Acc> {
    scales(gamma, &inv_std(variance, epsilon))
}

/// `(x - mean) * scale + beta` per channel.
pub(in crate::ops) struct Affine<E: CpuElement> {
    pub(in crate::ops) channels: Vec<AffineChannel<E::Acc>>,
}

/// Of one channel.
#[derive(Clone, Copy)]
pub(in crate::ops) struct AffineChannel<A> {
    mean: A,
    scale: A,
    beta: A,
}

impl<A: CpuElement<Acc = A>> AffineChannel<A> {
    /// The value, and 0 instead of one below; a NaN stays.
    #[inline(always)]
    pub(in crate::ops) fn relu(&self, x: A) -> A {
        let y = self.of(x);
        if y > A::zero() || y.is_nan() { y } else { A::zero() }
    }

    #[inline(always)]
    fn of(&self, x: A) -> A {
        (x - self.mean) * self.scale + self.beta
    }
}

impl<E: CpuElement> Affine<E> {
    /// Statistics and parameters of a batch norm.
    pub(in crate::ops) fn new(
        gamma: &[E],
        beta: &[E],
        mean: &[E::Acc],
        variance: &[E::Acc],
        epsilon: f64,
    ) -> Self {
        let scales = channel_scales(gamma, variance, epsilon);
        let channel = |((&scale, &mean), beta): ((&E::Acc, &E::Acc), &E)| AffineChannel {
            mean,
            scale,
            beta: beta.widen(),
        };
        Self { channels: scales.iter().zip(mean).zip(beta).map(channel).collect() }
    }

    fn apply_in_place(&self, values: &mut [E], shape: &Shape) {
        map_channels(values, shape, &self.channels, AffineChannel::of);
    }

    /// Replaces values by the ReLU of what they become.
    pub(in crate::ops) fn relu_in_place(&self, values: &mut [E], shape: &Shape) {
        map_channels(values, shape, &self.channels, AffineChannel::relu);
    }

    fn apply(&self, values: &[E], shape: &Shape) -> Vec<E> {
        let (channels, inner) = (shape[1], shape[2..].iter().product::<usize>());
        let size = channels * inner;
        if size == 0 {
            return vec![];
        }
        let normalize = |start: usize, row: &mut [MaybeUninit<E>]| {
            let x = &values[start..start + row.len()];
            if inner == 1 {
                let triples = row.iter_mut().zip(x).zip(&self.channels);
                triples.for_each(|((y, x), channel)| {
                    y.write(E::narrow(channel.of(x.widen())));
                });
            } else {
                let planes = row.chunks_mut(inner).zip(x.chunks(inner)).zip(&self.channels);
                for ((y, x), channel) in planes {
                    vectorized(Map { x, y, f: |x| channel.of(x) });
                }
            }
        };
        let task = task(values.len(), size);
        assert_eq!(self.channels.len(), channels, "parameters for every channel");
        // SAFETY: a chunk is some whole rows of `size` elements, one per element of `x`, all of whose channels are written.
        unsafe {
            parallel::written(values.len(), task, values.len(), |index, chunk| {
                each_row(index * task, chunk, size, normalize);
            })
        }
    }
}

/// Replaces every element of a channel by `f(parameters, element)`, rounded once.
fn map_channels<E: CpuElement, P: Sync>(
    values: &mut [E],
    shape: &Shape,
    parameters: &[P],
    f: impl Fn(&P, E::Acc) -> E::Acc + Copy + Send + Sync,
) {
    let inner = shape[2..].iter().product::<usize>();
    rows(values, shape[1] * inner, |_, row| {
        if inner == 1 {
            let each = row.iter_mut().zip(parameters);
            each.for_each(|(value, parameters)| *value = E::narrow(f(parameters, value.widen())));
        } else {
            let planes = row.chunks_mut(inner).zip(parameters);
            planes.for_each(|(x, p)| vectorized(Update { x, f: |x| f(p, x) }));
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
