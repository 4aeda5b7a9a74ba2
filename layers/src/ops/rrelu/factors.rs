//! Slopes from Burn's random numbers, on CPUs and on devices without kernels of this crate.
use super::RReluKernels;
#[cfg(any(feature = "flex", feature = "ndarray"))]
use crate::backend::cpu::CpuBackend;
use crate::backend::{Saved, composing_backends};
use burn::backend::{
    Backend, Distribution, TensorMetadata, get_or_init_device_settings, tensor::FloatTensor,
};

/// The factor of every element: 1 where `x` was not negative.
#[derive(Clone, Debug)]
pub struct Factors<B: Backend>(FloatTensor<B>);

impl<B: Backend> Saved for Factors<B> {
    fn bytes(&self) -> usize {
        self.0.dtype().size() * self.0.shape().num_elements()
    }
}

impl<B: Backend> Factors<B> {
    /// Draws slopes; returns `x` times its factors, and the factors.
    fn draw(x: FloatTensor<B>, [lower, upper]: [f64; 2]) -> (FloatTensor<B>, Self) {
        let device = x.device();
        let slopes = Distribution::Uniform(lower, upper);
        let slopes = B::float_random(x.shape(), slopes, &device, x.dtype().into());
        let bools = get_or_init_device_settings::<B>(&device).bool_dtype;
        // Not `x >= 0`, since a NaN stays, too.
        let stays = B::bool_not(B::float_lower_elem(x.clone(), 0.into(), bools));
        let factors = Self(B::float_mask_fill(slopes, stays, 1.into()));
        (factors.times(x), factors)
    }

    fn times(&self, x: FloatTensor<B>) -> FloatTensor<B> {
        B::float_mul(x, self.0.clone())
    }
}

#[cfg(any(feature = "flex", feature = "ndarray"))]
impl<B: CpuBackend> RReluKernels for B {
    type Slopes = Factors<B>;

    fn rrelu(x: FloatTensor<Self>, bounds: [f64; 2]) -> (FloatTensor<Self>, Factors<Self>) {
        Factors::draw(x, bounds)
    }

    fn rrelu_times(x: FloatTensor<Self>, factors: &Factors<Self>) -> FloatTensor<Self> {
        factors.times(x)
    }
}
composing_backends!(RReluKernels {
    type Slopes = Factors<Self>;

    fn rrelu(x: FloatTensor<Self>, bounds: [f64; 2]) -> (FloatTensor<Self>, Factors<Self>) {
        Factors::draw(x, bounds)
    }

    fn rrelu_times(x: FloatTensor<Self>, factors: &Factors<Self>) -> FloatTensor<Self> {
        factors.times(x)
    }
});
