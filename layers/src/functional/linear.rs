//! The dense layer and the embedding.
use super::guard::{
    Misfit, accepts, dequantized_bias, into_maybe, into_weight, is_quantized, is_tracked, require,
    require_bias, require_dtype,
};
use crate::ops::{EmbeddingOps, LinearOps};
use burn::backend::Dispatch;
use burn::tensor::{Int, Tensor, module};

/// `x weight + bias`; see [`burn::tensor::module::linear`].
///
/// Keeps `x` only if the weight is tracked, and the weight only if `x` is tracked. The backward pass folds the batch into the
/// rows, where stock builds one weight gradient per batch row. A quantized weight stays packed: it is dequantized in the
/// forward pass and again in the backward pass, on CPU backends block by block.
pub fn linear<const D: usize>(x: Tensor<D>, weight: Tensor<2>, bias: Option<Tensor<1>>) -> Tensor<D> {
    if D == 1 {
        return linear(x.unsqueeze::<2>(), weight, bias).squeeze_dim(0);
    }
    let bias = dequantized_bias(bias, x.dtype());
    let fit = require(!is_quantized(&x), Misfit::Quantized)
        .and(require(x.dims()[D - 1] == weight.dims()[0], Misfit::Shapes))
        .and(require(weight.shape().num_elements() > 0, Misfit::Empty))
        .and(require_bias(&bias, weight.dims()[1]))
        .and(require_dtype(&x, &weight));
    let tracked = x.is_tracked() || weight.is_tracked() || is_tracked(&bias);
    // If nothing is tracked, Burn's own product with a packed matrix runs.
    if !accepts("linear", fit, tracked, Some(&weight)) || is_quantized(&weight) && !tracked {
        return module::linear(x, weight, bias);
    }
    if x.shape().num_elements() == 0 {
        return empty_linear(x, weight, bias);
    }
    Tensor::from_dispatch(Dispatch::memsave_linear(x.into_dispatch(), into_weight(weight), into_maybe(bias)))
}

/// The dense layer of an empty batch: an empty output, and gradients of zero. (On Flex 0.22.1 a matrix product with an empty
/// batch reads beyond its operands and ends the process.)
fn empty_linear<const D: usize>(x: Tensor<D>, weight: Tensor<2>, bias: Option<Tensor<1>>) -> Tensor<D> {
    let mut shape = x.dims();
    shape[D - 1] = weight.dims()[1];
    let sum = x.sum() + weight.sum();
    let sum = bias.into_iter().fold(sum, |sum, bias| sum + bias.sum());
    Tensor::zeros(shape, (&sum.device(), sum.dtype())) + (sum * 0.0).reshape([1; D])
}

/// Rows of `weights`; see [`burn::tensor::module::embedding`]. Keeps the indices.
pub fn embedding(weights: Tensor<2>, indices: Tensor<2, Int>) -> Tensor<3> {
    let fit = require(indices.shape().num_elements() > 0, Misfit::Empty);
    if !weights.is_tracked() || !accepts("embedding", fit, true, Some(&weights)) {
        return module::embedding(weights, indices);
    }
    Tensor::from_dispatch(Dispatch::memsave_embedding(weights.into_dispatch(), indices.into_dispatch()))
}
