//! One affine map per channel: a batch normalization with known statistics, and a ReLU after it.
use super::{
    CpuElement,
    channels::{each_item, map_channels},
    elementwise::Map,
    parallel::{self, vectorized},
};
use burn::tensor::Shape;
use core::mem::MaybeUninit;

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
    pub(crate) fn new(gamma: &[E], beta: &[E], mean: &[E::Acc], variance: &[E::Acc], epsilon: f64) -> Self {
        let scales = scales(gamma, &inverse_std(variance, epsilon));
        let channel = |((&scale, &mean), beta): ((&E::Acc, &E::Acc), &E)| AffineChannel {
            mean,
            scale,
            beta: beta.widen(),
        };
        Self { channels: scales.iter().zip(mean).zip(beta).map(channel).collect() }
    }

    /// Replaces values of `[batch, channels, ...]`.
    pub(crate) fn apply_in_place(&self, values: &mut [E], shape: &Shape) {
        map_channels(values, shape, &self.channels, AffineChannel::of);
    }

    /// Replaces values by the ReLU of what they become.
    pub(crate) fn relu_in_place(&self, values: &mut [E], shape: &Shape) {
        map_channels(values, shape, &self.channels, AffineChannel::relu);
    }

    /// What values of `[batch, channels, ...]` become.
    pub(crate) fn apply(&self, values: &[E], shape: &Shape) -> Vec<E> {
        let (channels, inner) = (shape[1], shape[2..].iter().product::<usize>());
        let size = channels * inner;
        if size == 0 {
            return vec![];
        }
        let write = |start: usize, item: &mut [MaybeUninit<E>]| {
            let x = &values[start..start + item.len()];
            if inner == 1 {
                let triples = item.iter_mut().zip(x).zip(&self.channels);
                triples.for_each(|((y, x), channel)| {
                    y.write(E::narrow(channel.of(x.widen())));
                });
            } else {
                let planes = item.chunks_mut(inner).zip(x.chunks(inner)).zip(&self.channels);
                for ((y, x), channel) in planes {
                    vectorized(Map { x, y, f: |x| channel.of(x) });
                }
            }
        };
        let task = size * parallel::items_per_task(values.len() / size, size);
        assert_eq!(self.channels.len(), channels, "parameters for every channel");
        // SAFETY: a chunk is some items of `size` elements each, one per element of `x`, and all of their channels are written.
        unsafe {
            parallel::written(values.len(), task, values.len(), |index, chunk| {
                each_item(index * task, chunk, size, write);
            })
        }
    }
}

/// `1 / sqrt(variance + epsilon)`
pub(crate) fn inverse_std<A: CpuElement>(variance: &[A], epsilon: f64) -> Vec<A> {
    variance.iter().map(|v| A::from_f64((v.into_f64() + epsilon).sqrt().recip())).collect()
}

/// `gamma * inverse_std` per channel.
pub(crate) fn scales<E: CpuElement>(gamma: &[E], inverse_std: &[E::Acc]) -> Vec<E::Acc> {
    gamma.iter().zip(inverse_std).map(|(gamma, &inverse)| gamma.widen() * inverse).collect()
}
