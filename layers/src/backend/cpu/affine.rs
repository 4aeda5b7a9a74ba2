//! One affine map per channel: a batch normalization with known statistics, and a ReLU after it.
use super::{
    CpuElement,
    channels::{Runs, map_channels, map_run},
    elementwise::Map,
    parallel::{self, Job, vectorized},
};
use burn::tensor::Shape;
use core::mem::MaybeUninit;
use num_traits::Zero;

/// `(x - mean) * scale + beta` per channel.
pub(crate) struct Affine<E: CpuElement> {
    pub(crate) channels: Vec<AffineChannel<E::Acc>>,
}

/// The map of one channel.
#[derive(Clone, Copy)]
pub(crate) struct AffineChannel<A> {
    mean: A,
    scale: A,
    beta: A,
}

impl<A: CpuElement<Acc = A>> AffineChannel<A> {
    /// The ReLU of the value; a NaN stays.
    #[inline(always)]
    pub(crate) fn relu(&self, x: A) -> A {
        let y = self.of(x);
        if y > A::zero() || y.is_nan() { y } else { A::zero() }
    }

    #[inline(always)]
    fn of(&self, x: A) -> A {
        (x - self.mean) * self.scale + self.beta
    }
}

impl<E: CpuElement> Affine<E> {
    /// From the parameters and statistics of a batch norm.
    pub(crate) fn new<S>(gamma: &[E], beta: &[E], mean: &[S], variance: &[S], epsilon: f64) -> Self
    where
        S: CpuElement<Acc = E::Acc>,
    {
        let inverse_std = inverse_std(variance, epsilon);
        let statistics = mean.iter().zip(&inverse_std);
        let channel = |((mean, &inverse_std), (gamma, beta)): ((&S, &E::Acc), (&E, &E))| AffineChannel {
            mean: mean.widen(),
            scale: gamma.widen() * inverse_std,
            beta: beta.widen(),
        };
        Self { channels: statistics.zip(gamma.iter().zip(beta)).map(channel).collect() }
    }

    /// Replaces values of `[batch, channels, ...]`.
    pub(crate) fn apply_in_place(&self, values: &mut [E], shape: &Shape) {
        map_channels(values, shape, &self.channels, AffineChannel::of);
    }

    /// Replaces a chunk of the values of `[batch, channels, ...]`, which begins at `start`, on this thread.
    #[inline(always)]
    pub(crate) fn apply_to_chunk(&self, chunk: &mut [E], shape: &Shape, start: usize) {
        let runs = Runs::of(shape);
        runs.each_of(start, chunk, |_, channel, x| {
            map_run(x, runs, channel, &self.channels, AffineChannel::of);
        });
    }

    /// Replaces values by the ReLU of what they become.
    pub(crate) fn relu_in_place(&self, values: &mut [E], shape: &Shape) {
        map_channels(values, shape, &self.channels, AffineChannel::relu);
    }

    /// What values of `[batch, channels, ...]` become.
    pub(crate) fn apply(&self, values: &[E], shape: &Shape) -> Vec<E> {
        let task = Runs::of(shape).per_task(values.len());
        // SAFETY: `write_chunk` writes every element.
        unsafe {
            parallel::written(values.len(), task, values.len(), |index, chunk| {
                self.write_chunk(values, shape, index * task, chunk);
            })
        }
    }

    /// Writes what values of `[batch, channels, ...]` become, from number `start` on, on this thread.
    #[inline(always)]
    pub(crate) fn write_chunk<'a>(
        &self,
        values: &[E],
        shape: &Shape,
        start: usize,
        chunk: &'a mut [MaybeUninit<E>],
    ) -> &'a mut [E] {
        assert_eq!(self.channels.len(), shape[1], "parameters for every channel");
        let runs = Runs::of(shape);
        runs.each_of(start, chunk, |start, channel, y| {
            let x = &values[start..start + y.len()];
            if runs.inner == 1 {
                let channels = &self.channels[channel..channel + y.len()];
                let triples = y.iter_mut().zip(x).zip(channels);
                triples.for_each(|((y, x), channel)| {
                    y.write(E::narrow(channel.of(x.widen())));
                });
            } else {
                let channel = self.channels[channel];
                vectorized(Map { x, y, f: |x| channel.of(x) });
            }
        });
        // SAFETY: a run has as many elements of `x`, and parameters of each, and all of them have been written.
        unsafe { chunk.assume_init_mut() }
    }
}

/// `1 / sqrt(variance + epsilon)`, in f64. Of few elements it takes as long as their map, so it is vectorized, too.
pub(crate) fn inverse_std<S: CpuElement>(variance: &[S], epsilon: f64) -> Vec<S::Acc> {
    let mut inverse = vec![<S::Acc as Zero>::zero(); variance.len()];
    vectorized(InverseStd { variance, epsilon, inverse: &mut inverse });
    inverse
}

struct InverseStd<'a, S: CpuElement> {
    variance: &'a [S],
    epsilon: f64,
    inverse: &'a mut [S::Acc],
}

impl<S: CpuElement> Job for InverseStd<'_, S> {
    type Result = ();

    #[inline(always)]
    fn run(self) {
        for (inverse, variance) in self.inverse.iter_mut().zip(self.variance) {
            *inverse = S::Acc::from_f64((variance.into_f64() + self.epsilon).sqrt().recip());
        }
    }
}

/// `gamma * inverse_std` per channel.
pub(crate) fn scales<E: CpuElement>(gamma: &[E], inverse_std: &[E::Acc]) -> Vec<E::Acc> {
    gamma.iter().zip(inverse_std).map(|(gamma, &inverse)| gamma.widen() * inverse).collect()
}
