//! Products with factors of low rank, and with quantized matrices, by Burn's own operations.
use burn::backend::{
    Backend, TensorMetadata,
    tensor::{FloatTensor, QuantizedTensor},
};
use burn::tensor::{DType, Shape};
use core::ops::Range;

/// See [`MemBackend::add_product`](crate::backend::MemBackend::add_product).
pub fn add_product<B: Backend>(y: FloatTensor<B>, u: FloatTensor<B>, v: FloatTensor<B>) -> FloatTensor<B> {
    let ([rank, columns], shape) = (v.shape().dims(), y.shape());
    let rows = shape.num_elements() / columns;
    let product = B::float_matmul(B::float_reshape(u, Shape::new([rows, rank])), v);
    B::float_add(y, B::float_reshape(product, shape))
}

/// See [`MemBackend::by_dequantized_blocks`](crate::backend::MemBackend::by_dequantized_blocks).
pub fn by_dequantized_blocks<B: Backend>(
    weight: &QuantizedTensor<B>,
    axis: usize,
    dtype: DType,
    f: impl Fn(FloatTensor<B>, Range<usize>) -> FloatTensor<B>,
) -> FloatTensor<B> {
    let len = weight.shape()[axis];
    f(B::dequantize(weight.clone(), dtype.into()), 0..len)
}
