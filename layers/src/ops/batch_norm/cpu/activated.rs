//! Batch normalizations with activations: chunks are normalized, and activated while they are in the cache.
use super::{GradientSums, Products, output_with};
use crate::backend::cpu::{
    CpuBackend, CpuElement,
    affine::{Affine, inverse_std},
    channels::{Channels, Runs, add},
    in_place::in_place_or_new,
    parallel::{self, Work, vectorized},
    sums::Moments,
    with_element,
};
use crate::ops::{
    batch_norm::{
        BatchNormOutput,
        activated::{ActivatedBatchNormKernels, ElementActivation},
    },
    row_norm::NormGrads,
    smooth::cpu as smooth,
};
use burn::backend::{TensorMetadata, tensor::FloatTensor};
use burn::tensor::{DType, bf16, f16};

/// Elements of a chunk, about: of f32, `x`, `z` and `dy` take 96 KiB.
const CHUNK: usize = 1 << 13;

/// Planes of fewer elements are read again for the sums of their gradients: sums of each, of 24 bytes, would be no small part of it.
const LARGE_PLANE: usize = 1 << 8;

impl<B: CpuBackend> ActivatedBatchNormKernels for B {
    fn fuses_activations() -> bool {
        true
    }

    fn train_activated(
        x: FloatTensor<B>,
        gamma: FloatTensor<B>,
        beta: FloatTensor<B>,
        epsilon: f64,
        activation: ElementActivation,
    ) -> BatchNormOutput<B> {
        let (x, gamma, beta) = (B::contiguous(x), B::contiguous(gamma), B::contiguous(beta));
        with_element!(x.dtype(), "batch_norm", E => {
            let view = Channels::of(B::as_slice::<E>(&x), &x.shape());
            let [mean, variance] = view.statistics();
            let affine = Affine::new(B::as_slice(&gamma), B::as_slice(&beta), &mean, &variance, epsilon);
            output_with::<B, E>(activated::<B, E>(x, &affine, activation), [mean, variance])
        })
    }

    fn normalize_activated(
        x: FloatTensor<B>,
        parameters: [FloatTensor<B>; 2],
        statistics: [FloatTensor<B>; 2],
        epsilon: f64,
        activation: ElementActivation,
    ) -> FloatTensor<B> {
        let x = B::contiguous(x);
        let ([gamma, beta], [mean, variance]) =
            (parameters.map(B::contiguous), statistics.map(B::contiguous));
        with_element!(x.dtype(), "batch_norm", E => {
            let [gamma, beta, mean, variance] = [&gamma, &beta, &mean, &variance].map(B::as_slice::<E>);
            activated::<B, E>(x, &Affine::new(gamma, beta, mean, variance, epsilon), activation)
        })
    }

    fn activated_backward(
        x: FloatTensor<B>,
        parameters: [FloatTensor<B>; 2],
        statistics: Option<[FloatTensor<B>; 2]>,
        epsilon: f64,
        activation: ElementActivation,
        dy: FloatTensor<B>,
        wanted: [bool; 3],
    ) -> NormGrads<B> {
        let (x, mut dy, [gamma, beta]) = (B::contiguous(x), B::contiguous(dy), parameters.map(B::contiguous));
        with_element!(x.dtype(), "batch_norm", E => {
            let view = Channels::of(B::as_slice::<E>(&x), &x.shape());
            let [mean, variance] = view.known_or_computed::<B>(statistics);
            let inverse_std = inverse_std(&variance, epsilon);
            let affine = Affine::new(B::as_slice(&gamma), B::as_slice(&beta), &mean, &variance, epsilon);
            let sums = view.activation_backward(&affine, &mean, activation, B::as_slice_mut(&mut dy));
            let sums = GradientSums::new(sums, &inverse_std);
            view.gradients::<B>(gamma, &mean, &inverse_std, &sums, dy, wanted)
        })
    }
}

/// `f` of a map of a [contiguous](CpuBackend::contiguous) `x`.
fn activated<B: CpuBackend, E: CpuElement>(
    x: FloatTensor<B>,
    affine: &Affine<E>,
    activation: ElementActivation,
) -> FloatTensor<B> {
    let shape = x.shape();
    let work = activation.work(shape.num_elements());
    let task = Runs::of(&shape).per_chunk(CHUNK);
    let change = |x: &mut [E]| {
        parallel::chunks_mut(x, task, work, |index, chunk| {
            affine.apply_to_chunk(chunk, &shape, index * task);
            activation.change(chunk);
        });
    };
    let make = |x: &[E]| {
        // SAFETY: `write_chunk` writes every element.
        unsafe {
            parallel::written(x.len(), task, work, |index, chunk| {
                activation.change(affine.write_chunk(x, &shape, index * task, chunk));
            })
        }
    };
    in_place_or_new::<B, E>(x, change, make)
}

impl<E: CpuElement> Channels<'_, E> {
    /// Replaces `dy` by `dz = dy f'(z)`, where `z` is a map of the values. Returns `sum(dz)` and `sum(dz * (x - mean))` per channel.
    fn activation_backward(
        &self,
        affine: &Affine<E>,
        mean: &[E::Acc],
        activation: ElementActivation,
        dy: &mut [E],
    ) -> Vec<[f64; 2]> {
        let shape = self.shape();
        let runs = Runs::of(&shape);
        let task = runs.per_chunk(CHUNK);
        let of_chunk = |index: usize, dy: &mut [E]| {
            let start = index * task;
            let mut z = Vec::with_capacity(dy.len());
            let z = affine.write_chunk(self.values, &shape, start, &mut z.spare_capacity_mut()[..dy.len()]);
            activation.multiply_by_slope(dy, z);
            let mut sums = Vec::new();
            if self.inner >= LARGE_PLANE {
                runs.each_of(start, dy, |start, channel, dy| {
                    let x = &self.values[start..start + dy.len()];
                    sums.push((channel, vectorized(Moments { x, dy, mean: mean[channel] })));
                });
            }
            sums
        };
        let sums_of_runs: Vec<_> = match activation.work(dy.len()).is_worth_it() {
            true => parallel::map_chunks_mut(dy, task, of_chunk),
            false => {
                let chunks = dy.chunks_mut(task).enumerate();
                chunks.map(|(index, dy)| vectorized(|| of_chunk(index, dy))).collect()
            }
        };
        if self.inner < LARGE_PLANE {
            return self.reduce(&Products { x: self.values, dy, mean });
        }
        let mut sums = vec![[0.0; 2]; self.channels];
        sums_of_runs.into_iter().flatten().for_each(|(channel, of_run)| add(&mut sums[channel], of_run));
        sums
    }
}

impl ElementActivation {
    /// What the normalization of so many elements and the activation take.
    fn work(self, elements: usize) -> Work {
        match self {
            Self::PiecewiseLinear(_) => Work::of([elements]),
            Self::Smooth(_) => Work::of([smooth::COST, elements]),
        }
    }

    /// Replaces every `z` by `f(z)`, on this thread.
    fn change<E: CpuElement>(self, z: &mut [E]) {
        match self {
            Self::PiecewiseLinear(f) => f.change(z),
            Self::Smooth(f) => smooth::change(z, f),
        }
    }

    /// Multiplies `dy` by `f'(z)`, on this thread, and may change `z`.
    fn multiply_by_slope<E: CpuElement>(self, dy: &mut [E], z: &mut [E]) {
        match self {
            Self::PiecewiseLinear(f) => f.multiply_by_slope(dy, z),
            Self::Smooth(f) => {
                if f.reads_output() {
                    smooth::change(z, f);
                }
                smooth::multiply_by_slope(dy, z, f);
            }
        }
    }
}
