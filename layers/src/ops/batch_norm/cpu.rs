//! The kernels on a CPU: fused loops over channels.
use super::{BatchNormKernels, BatchNormOutput};
use crate::backend::cpu::{
    CpuBackend, CpuElement,
    affine::{Affine, inverse_std, scales},
    channels::{ChannelMoments, Channels, Runs, Terms, map_channels},
    elementwise::UpdateWith,
    in_place::in_place_or_new,
    parallel::vectorized,
    sums::Moments,
    widened, with_element,
};
use crate::backend::wide;
use crate::ops::row_norm::NormGrads;
use burn::backend::{TensorMetadata, tensor::FloatTensor};
use burn::tensor::{DType, Shape, bf16, f16};
use core::ops::Range;

mod activated;

impl<B: CpuBackend> BatchNormKernels for B {
    fn train_batch_norm(
        x: FloatTensor<B>,
        gamma: FloatTensor<B>,
        beta: FloatTensor<B>,
        epsilon: f64,
    ) -> BatchNormOutput<B> {
        let (x, gamma, beta) = (B::contiguous(x), B::contiguous(gamma), B::contiguous(beta));
        with_element!(x.dtype(), "batch_norm", E => {
            let view = Channels::of(B::as_slice::<E>(&x), &x.shape());
            let [mean, variance] = view.statistics();
            let output = view.normalize(B::as_slice(&gamma), B::as_slice(&beta), &mean, &variance, epsilon);
            output_with::<B, E>(B::from_vec(output, x.shape()), [mean, variance])
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
        let (x, dy, gamma) = (B::contiguous(x), B::contiguous(dy), B::contiguous(gamma));
        with_element!(x.dtype(), "batch_norm", E => {
            let view = Channels::of(B::as_slice::<E>(&x), &x.shape());
            let [mean, variance] = view.known_or_computed::<B>(statistics);
            let inverse_std = inverse_std(&variance, epsilon);
            let sums = view.gradient_sums(&mean, &inverse_std, B::as_slice(&dy));
            view.gradients::<B>(gamma, &mean, &inverse_std, &sums, dy, wanted)
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
        let x = B::contiguous(x);
        let [gamma, beta, mean, variance] = [gamma, beta, mean, variance].map(B::contiguous);
        let shape = x.shape();
        with_element!(x.dtype(), "batch_norm", E => {
            let affine = Affine::<E>::new(
                B::as_slice(&gamma),
                B::as_slice(&beta),
                B::as_slice::<E>(&mean),
                B::as_slice::<E>(&variance),
                epsilon,
            );
            let change = |x: &mut [E]| affine.apply_in_place(x, &shape);
            in_place_or_new::<B, E>(x, change, |x| affine.apply(x, &shape))
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
            let inverse_std = inverse_std(B::as_slice::<E>(&variance), epsilon);
            let gradient = B::as_slice::<E>(&dy);
            let (gamma_grad, beta_grad) = match x.map(B::contiguous) {
                Some(x) => {
                    let view = Channels::of(B::as_slice::<E>(&x), &shape);
                    let sums = view.gradient_sums(&widened(B::as_slice::<E>(&mean)), &inverse_std, gradient);
                    (Some(sums.gamma()), wanted[1].then(|| sums.beta()))
                }
                None => {
                    let sums = || Channels::of(gradient, &shape).sums();
                    (None, wanted[1].then(|| sums().into_iter().map(E::from_f64).collect()))
                }
            };
            if wanted[0] {
                let dx = B::as_slice_mut::<E>(&mut dy);
                let scales = scales(B::as_slice::<E>(&gamma), &inverse_std);
                map_channels(dx, &shape, &scales, |&scale, dy| dy * scale);
            }
            let per_channel = |grad: Vec<E>| B::from_vec(grad, channels.clone());
            NormGrads {
                x: wanted[0].then_some(dy),
                gamma: gamma_grad.map(per_channel),
                beta: beta_grad.map(per_channel),
            }
        })
    }

    fn batch_moments(x: FloatTensor<B>) -> [FloatTensor<B>; 2] {
        let x = B::contiguous(x);
        with_element!(x.dtype(), "batch_norm", E => {
            let view = Channels::of(B::as_slice::<E>(&x), &x.shape());
            view.statistics().map(of_channels::<B, E>)
        })
    }

    fn normalize_by(
        x: FloatTensor<B>,
        gamma: FloatTensor<B>,
        beta: FloatTensor<B>,
        statistics: [FloatTensor<B>; 2],
        epsilon: f64,
    ) -> FloatTensor<B> {
        let (x, gamma, beta) = (B::contiguous(x), B::contiguous(gamma), B::contiguous(beta));
        let [mean, variance] = statistics.map(B::contiguous);
        with_element!(x.dtype(), "batch_norm", E => {
            let [mean, variance] = [&mean, &variance].map(B::as_slice::<<E as CpuElement>::Acc>);
            let view = Channels::of(B::as_slice::<E>(&x), &x.shape());
            let y = view.normalize(B::as_slice(&gamma), B::as_slice(&beta), mean, variance, epsilon);
            B::from_vec(y, x.shape())
        })
    }

    fn gradient_sums(
        x: FloatTensor<B>,
        statistics: [FloatTensor<B>; 2],
        epsilon: f64,
        dy: FloatTensor<B>,
    ) -> [FloatTensor<B>; 2] {
        let [x, dy] = [x, dy].map(B::contiguous);
        let [mean, variance] = statistics.map(B::contiguous);
        with_element!(x.dtype(), "batch_norm", E => {
            let [mean, variance] = [&mean, &variance].map(B::as_slice::<<E as CpuElement>::Acc>);
            let view = Channels::of(B::as_slice::<E>(&x), &x.shape());
            let sums = view.gradient_sums(mean, &inverse_std(variance, epsilon), B::as_slice(&dy));
            [sums.beta(), sums.gamma()].map(of_channels::<B, E>)
        })
    }

    fn x_backward_by(
        x: FloatTensor<B>,
        gamma: FloatTensor<B>,
        statistics: [FloatTensor<B>; 2],
        epsilon: f64,
        dy: FloatTensor<B>,
        means: [FloatTensor<B>; 2],
    ) -> FloatTensor<B> {
        let (x, mut dy, gamma) = (B::contiguous(x), B::contiguous(dy), B::contiguous(gamma));
        let [mean, variance] = statistics.map(B::contiguous);
        let means = means.map(B::contiguous);
        with_element!(x.dtype(), "batch_norm", E => {
            let [mean, variance, of_dy, of_product] =
                [&mean, &variance, &means[0], &means[1]].map(B::as_slice::<<E as CpuElement>::Acc>);
            let means = of_dy.iter().zip(of_product).map(|(dy, product)| [dy.into_f64(), product.into_f64()]);
            let inverse_std = inverse_std(variance, epsilon);
            let view = Channels::of(B::as_slice::<E>(&x), &x.shape());
            let dx = B::as_slice_mut(&mut dy);
            view.x_backward(B::as_slice(&gamma), mean, &inverse_std, &means.collect::<Vec<_>>(), dx);
        });
        dy
    }
}

/// An output, and the mean and the variance that it was normalized with, rounded.
fn output_with<B: CpuBackend, E: CpuElement>(
    output: FloatTensor<B>,
    statistics: [Vec<E::Acc>; 2],
) -> BatchNormOutput<B> {
    let [mean, variance] = statistics.map(|statistic| {
        let channels = Shape::new([statistic.len()]);
        B::from_vec(statistic.into_iter().map(E::narrow).collect(), channels)
    });
    BatchNormOutput { output, mean, variance }
}

/// A tensor `[channels]` of the type that sums are made in.
fn of_channels<B: CpuBackend, E: CpuElement>(numbers: Vec<E::Acc>) -> FloatTensor<B> {
    let channels = Shape::new([numbers.len()]);
    B::from_vec(numbers, channels)
}

/// `sum(dy)` and `sum(dy * x_hat)` per channel.
struct GradientSums(Vec<[f64; 2]>);

impl GradientSums {
    /// From `sum(dy)` and `sum(dy * (x - mean))`.
    fn new<A: CpuElement>(totals: Vec<[f64; 2]>, inverse_std: &[A]) -> Self {
        let scaled =
            totals.into_iter().zip(inverse_std).map(|([dy, product], inv)| [dy, product * inv.into_f64()]);
        Self(scaled.collect())
    }

    /// The means of as many elements per channel.
    fn means(&self, count: usize) -> Vec<[f64; 2]> {
        self.0.iter().map(|sums| sums.map(|sum| sum / count as f64)).collect()
    }

    fn beta<E: CpuElement>(&self) -> Vec<E> {
        self.0.iter().map(|sums| E::from_f64(sums[0])).collect()
    }

    fn gamma<E: CpuElement>(&self) -> Vec<E> {
        self.0.iter().map(|sums| E::from_f64(sums[1])).collect()
    }
}

impl<'a, E: CpuElement> Channels<'a, E> {
    /// The mean and the biased variance of every channel.
    fn statistics(&self) -> [Vec<E::Acc>; 2] {
        let moments = self.moments();
        let each = |statistic: fn(&ChannelMoments) -> f64| {
            moments.iter().map(|moments| <E::Acc as CpuElement>::from_f64(statistic(moments))).collect()
        };
        [each(ChannelMoments::mean), each(ChannelMoments::variance)]
    }

    /// Given statistics, or if there are none, those of the batch.
    fn known_or_computed<B: CpuBackend>(&self, statistics: Option<[FloatTensor<B>; 2]>) -> [Vec<E::Acc>; 2] {
        match statistics {
            Some(statistics) => statistics.map(|of| widened(B::as_slice::<E>(&B::contiguous(of)))),
            None => self.statistics(),
        }
    }

    /// Gradients with the statistics of the batch, given the sums of a [contiguous](CpuBackend::contiguous) `dy`; `wanted` says which of
    /// x, gamma, beta.
    fn gradients<B: CpuBackend>(
        &self,
        gamma: FloatTensor<B>,
        mean: &[E::Acc],
        inverse_std: &[E::Acc],
        sums: &GradientSums,
        mut dy: FloatTensor<B>,
        wanted: [bool; 3],
    ) -> NormGrads<B> {
        if wanted[0] {
            let means = sums.means(self.count());
            self.x_backward(B::as_slice(&gamma), mean, inverse_std, &means, B::as_slice_mut(&mut dy));
        }
        let per_channel = |grad: Vec<E>| B::from_vec(grad, gamma.shape());
        NormGrads {
            gamma: wanted[1].then(|| per_channel(sums.gamma())),
            beta: wanted[2].then(|| per_channel(sums.beta())),
            x: wanted[0].then_some(dy),
        }
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
        Affine::new(gamma, beta, mean, variance, epsilon).apply(self.values, &self.shape())
    }

    /// `sum(dy)` and `sum(dy * x_hat)` per channel, `x_hat = (x - mean) / std`.
    fn gradient_sums(&self, mean: &[E::Acc], inverse_std: &[E::Acc], dy: &[E]) -> GradientSums {
        GradientSums::new(self.reduce(&Products { x: self.values, dy, mean }), inverse_std)
    }

    /// `dx = gamma / std * (dy - mean(dy) - x_hat * mean(dy * x_hat))`, in place of `dy`, with the means of every channel.
    fn x_backward(
        &self,
        gamma: &[E],
        mean: &[E::Acc],
        inverse_std: &[E::Acc],
        means: &[[f64; 2]],
        dy: &mut [E],
    ) {
        /// `dx = scale * dy + slope * (x - mean) + shift`
        struct Line<A> {
            scale: A,
            slope: A,
            mean: A,
            shift: A,
        }
        let acc = <E::Acc as CpuElement>::from_f64;
        let line = |channel: usize| {
            let inv = inverse_std[channel].into_f64();
            let scale = gamma[channel].into_f64() * inv;
            let [of_dy, of_product] = means[channel];
            Line {
                scale: acc(scale),
                slope: acc(-scale * inv * of_product),
                mean: mean[channel],
                shift: acc(-scale * of_dy),
            }
        };
        let lines: Vec<_> = (0..self.channels).map(line).collect();
        let apply = |line: &Line<E::Acc>, dy: E::Acc, x: E::Acc| {
            line.scale * dy + (line.slope * (x - line.mean) + line.shift)
        };
        let runs = Runs::of(&self.shape());
        runs.each_mut(dy, |start, channel, dy| {
            let x = &self.values[start..start + dy.len()];
            if runs.inner == 1 {
                let each = dy.iter_mut().zip(x).zip(&lines[channel..]);
                each.for_each(|((dy, x), line)| *dy = E::narrow(apply(line, dy.widen(), x.widen())));
            } else {
                let line = &lines[channel];
                vectorized(UpdateWith { x: dy, a: x, f: |dy, x| apply(line, dy, x) });
            }
        });
    }
}

/// `dy` and `dy * (x - mean)`
struct Products<'a, E: CpuElement> {
    x: &'a [E],
    dy: &'a [E],
    mean: &'a [E::Acc],
}

impl<E: CpuElement> Terms<2> for Products<'_, E> {
    fn of_plane(&self, channel: usize, elements: Range<usize>) -> [f64; 2] {
        vectorized(Moments { x: &self.x[elements.clone()], dy: &self.dy[elements], mean: self.mean[channel] })
    }

    #[inline(always)]
    fn add_row(&self, first: usize, elements: Range<usize>, sums: &mut [[f64; 2]]) {
        let pairs = self.x[elements.clone()].iter().zip(&self.dy[elements]);
        for ((sums, (x, dy)), &mean) in sums.iter_mut().zip(pairs).zip(&self.mean[first..]) {
            sums[0] += dy.widen().into_f64();
            sums[1] += (dy.widen() * (x.widen() - mean)).into_f64();
        }
    }
}
