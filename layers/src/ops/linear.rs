//! Dense layer: `y = x weight + bias`, one case of [`bilinear`].
//!
//! Stock `nn::Linear` is recorded as a broadcast matrix product, because burn-dispatch 0.22.1 does not forward
//! `ModuleOps::linear`: its backward pass builds one weight gradient per batch row and sums them. Here the batch is folded
//! into the rows.
use super::{
    MaybeTensor,
    bilinear::{Bilinear, Weight, bilinear},
};
use crate::backend::{MemBackend, plain_backends};
use burn::backend::{
    Backend, TensorMetadata,
    autodiff::{Autodiff, checkpoint::strategy::CheckpointStrategy},
    backend_extension,
    tensor::{FloatTensor, QuantizedTensor},
};
use burn::tensor::{Shape, Slice};

/// Dense layers.
#[backend_extension(
    Flex: cfg(feature = "flex"),
    NdArray: cfg(feature = "ndarray"),
    Cube: cfg(any(feature = "wgpu", feature = "cuda")),
    Remote: cfg(feature = "remote"),
    Autodiff
)]
pub trait LinearOps: Backend {
    /// `x weight + bias`; x `[..., d_input]`, weight `[d_input, d_output]`, bias `[d_output]`.
    fn memsave_linear(
        x: FloatTensor<Self>,
        #[extension_type] weight: Weight<Self>,
        #[extension_type] bias: MaybeTensor<Self>,
    ) -> FloatTensor<Self> {
        let weight = weight.into_float(x.dtype());
        Self::linear(x, weight, bias.into_option())
    }
}
plain_backends!(LinearOps);

impl<B: LinearOps + MemBackend, C: CheckpointStrategy> LinearOps for Autodiff<B, C> {
    fn memsave_linear(
        x: FloatTensor<Self>,
        weight: Weight<Self>,
        bias: MaybeTensor<Self>,
    ) -> FloatTensor<Self> {
        bilinear::<B, C, _>(Linear, x, weight, bias.into_option())
    }
}

/// A matrix product with fewer rows than this wastes a tile.
const FEW_ROWS: usize = 32;

#[derive(Clone, Debug)]
pub(crate) struct Linear;

impl<B: MemBackend> Bilinear<B> for Linear {
    const NAME: &'static str = "linear";

    fn forward(
        &self,
        x: FloatTensor<B>,
        weight: FloatTensor<B>,
        bias: Option<FloatTensor<B>>,
    ) -> FloatTensor<B> {
        B::linear(x, weight, bias)
    }
    fn x_backward(&self, _: Shape, weight: FloatTensor<B>, dy: FloatTensor<B>) -> FloatTensor<B> {
        let (shape, [d_input, d_output]) = (dy.shape(), weight.shape().dims());
        let rank = shape.num_dims();
        let transposed = |weight: FloatTensor<B>| B::float_swap_dims(weight, rank - 2, rank - 1);
        // Views all the way: `B::linear_x_backward` copies the transposed weight, a fold copies a `dy` that is not
        // contiguous. Only matrices of few rows are worth folding; in half precision a product packs all its rows, and the fold
        // would need more than stock.
        let half = dy.dtype().size() < size_of::<f32>();
        if rank > 2 && (half || shape[rank - 2] >= FEW_ROWS) {
            let mut leading = vec![1; rank];
            leading[rank - 2..].copy_from_slice(&[d_input, d_output]);
            return B::float_matmul(dy, transposed(B::float_reshape(weight, Shape::from(leading))));
        }
        let rows = shape.num_elements() / d_output;
        let dy = B::float_reshape(dy, Shape::new([rows, d_output]));
        let dx = B::float_matmul(dy, B::float_swap_dims(weight, 0, 1));
        let mut x = shape.to_vec();
        x[rank - 1] = d_input;
        B::float_reshape(dx, Shape::from(x))
    }
    fn weight_backward(&self, x: FloatTensor<B>, _: Shape, dy: FloatTensor<B>) -> FloatTensor<B> {
        B::linear_weight_backward(x, dy)
    }
    fn bias_backward(&self, dy: FloatTensor<B>) -> FloatTensor<B> {
        B::linear_bias_backward(dy)
    }
    fn forward_quantized(
        &self,
        x: FloatTensor<B>,
        weight: QuantizedTensor<B>,
        bias: Option<FloatTensor<B>>,
    ) -> FloatTensor<B> {
        // Blocks of columns are columns of `y`.
        B::by_dequantized_blocks(&x, &weight, 1, |weight, columns| {
            let bias = bias.clone().map(|bias| B::float_slice(bias, &[Slice::from(columns)]));
            B::linear(x.clone(), weight, bias)
        })
    }
    fn x_backward_quantized(
        &self,
        x: Shape,
        weight: QuantizedTensor<B>,
        dy: FloatTensor<B>,
    ) -> FloatTensor<B> {
        // Blocks of rows are columns of `dx`.
        B::by_dequantized_blocks(&dy, &weight, 0, |weight, rows| {
            let mut block = x.clone();
            block[x.num_dims() - 1] = rows.len();
            Bilinear::<B>::x_backward(self, block, weight, dy.clone())
        })
    }
}
