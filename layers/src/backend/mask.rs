//! Masks of one bit per element.
use super::Saved;
use burn::backend::{
    Backend,
    tensor::{BoolTensor, FloatTensor},
};
use burn::tensor::{DType, Shape};

/// Masks of one bit per element, in row-major order whatever the strides of the tensor.
pub trait Masks: Backend {
    /// One bit per element.
    type Mask: Saved;

    /// Packs booleans.
    fn pack(bits: BoolTensor<Self>) -> Self::Mask;

    /// `x * slope`, where the bit of the element selects the slope: `[if clear, if set]`. A slope of 0 gives 0, even for an infinite
    /// `x`. In place if `x` is the only handle of its tensor.
    fn scale_by_mask(x: FloatTensor<Self>, mask: &Self::Mask, slopes: [f64; 2]) -> FloatTensor<Self>;

    /// Bits that are set with this probability. CPU backends draw them exactly as `float_random` draws a Bernoulli tensor of this shape and
    /// dtype, but without holding that tensor. Devices draw them from a seed, which comes from `float_random`'s generator.
    fn bernoulli_mask(shape: Shape, dtype: DType, device: &Self::Device, probability: f64) -> Self::Mask;
}
