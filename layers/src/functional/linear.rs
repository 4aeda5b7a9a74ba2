//! The dense layer and the embedding.
use super::guard::{are_floats, has_length, is_quantized, maybe, of_bias, of_weight};
use crate::ops::{EmbeddingOps, LinearOps};
use burn::backend::Dispatch;
use burn::tensor::{Int, Tensor, module};

/// `x weight + bias`; see [`burn::tensor::module::linear`].
///
/// Keeps `x` only for a tracked weight and the weight only for a tracked `x`; its backward pass folds the batch into the
/// rows, where stock builds one weight gradient per batch row. A quantized weight stays packed: it is dequantized here and
/// again in the backward pass, on CPU backends block by block.
pub fn linear<const D: usize>(x: Tensor<D>, weight: Tensor<2>, bias: Option<Tensor<1>>) -> Tensor<D> {
    if D == 1 {
        return linear(x.unsqueeze::<2>(), weight, bias).squeeze_dim(0);
    }
    let bias = of_bias(bias, x.dtype());
    let fits = x.dims()[D - 1] == weight.dims()[0]
        && weight.shape().num_elements() > 0
        && has_length(&bias, weight.dims()[1])
        && are_floats([x.dtype()]);
    let tracked = || x.is_tracked() || bias.as_ref().is_some_and(Tensor::is_tracked);
    // Burn has its own product with a packed matrix.
    if !fits || is_quantized(&weight) && !tracked() {
        return module::linear(x, weight, bias);
    }
    if x.shape().num_elements() == 0 {
        return empty_linear(x, weight, bias);
    }
    Tensor::from_dispatch(Dispatch::memsave_linear(x.into_dispatch(), of_weight(weight), maybe(bias)))
}

/// The dense layer of an empty batch: an empty output, and gradients of zero. (A matrix product with an empty batch reads
/// beyond its operands on Flex 0.22.1, and ends the process.)
fn empty_linear<const D: usize>(x: Tensor<D>, weight: Tensor<2>, bias: Option<Tensor<1>>) -> Tensor<D> {
    let mut shape = x.dims();
    shape[D - 1] = weight.dims()[1];
    let sum = x.sum() + weight.sum();
    let sum = bias.into_iter().fold(sum, |sum, bias| sum + bias.sum());
    Tensor::zeros(shape, (&sum.device(), sum.dtype())) + (sum * 0.0).reshape([1; D])
}

/// Rows of `weights`; see [`burn::tensor::module::embedding`]. Keeps the indices.
pub fn embedding(weights: Tensor<2>, indices: Tensor<2, Int>) -> Tensor<3> {
    if !weights.is_tracked() || indices.shape().num_elements() == 0 {
        return module::embedding(weights, indices);
    }
    Tensor::from_dispatch(Dispatch::memsave_embedding(weights.into_dispatch(), indices.into_dispatch()))
}
