//! Masks of one bit per element.
use super::Saved;
use burn::backend::{
    Backend,
    tensor::{BoolTensor, FloatTensor},
};
use burn::tensor::{DType, Shape};

/// Masks of one bit per element, in logical (row-major) order whatever the strides of the tensor.
pub trait Masks: Backend {
    /// One bit per element.
    type Mask: Saved;

    /// Packs booleans.
    fn pack(bits: BoolTensor<Self>) -> Self::Mask;

    /// `x * slope`, where the bit of the element chooses the slope: `[if clear, if set]`. A slope of 0 gives 0, even
    /// for an infinite `x`. In the place of `x`, if that is the only handle.
    fn scale_by_mask(x: FloatTensor<Self>, mask: &Self::Mask, slopes: [f64; 2]) -> FloatTensor<Self>;

    /// Bits that are set with probability `probability`: on CPU backends drawn exactly as `float_random` of this shape and dtype
    /// would draw a Bernoulli tensor, without holding that tensor; on devices from a seed that `float_random`'s generator gives.
    fn bernoulli_mask(shape: Shape, dtype: DType, device: &Self::Device, probability: f64) -> Self::Mask;
}
