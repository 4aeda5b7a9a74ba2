//! Dense layer: `y = x weight + bias`, one case of [`bilinear`].
//!
//! Stock `nn::Linear` is recorded as a broadcast matrix product, because burn-dispatch 0.22.1 does not forward
//! `ModuleOps::linear`: its backward pass builds one weight gradient per batch row and sums them. Here the batch is folded
//! into the rows.
use super::{
    MaybeTensor,
    bilinear::{Bilinear, bilinear},
};
use crate::backend::plain_backends;
use burn::backend::{
    Backend, TensorMetadata,
    autodiff::{Autodiff, checkpoint::strategy::CheckpointStrategy},
    backend_extension,
    tensor::FloatTensor,
};
use burn::tensor::Shape;

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
        weight: FloatTensor<Self>,
        #[extension_type] bias: MaybeTensor<Self>,
    ) -> FloatTensor<Self> {
        Self::linear(x, weight, bias.into_option())
    }
}
plain_backends!(LinearOps);

impl<B: LinearOps, C: CheckpointStrategy> LinearOps for Autodiff<B, C> {
    fn memsave_linear(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        bias: MaybeTensor<Self>,
    ) -> FloatTensor<Self> {
        bilinear::<B, C, _>(Linear, x, weight, bias.into_option())
    }
}

/// A matrix product with fewer rows than this wastes a tile.
const FEW_ROWS: usize = 32;

#[derive(Clone, Debug)]
struct Linear;

impl<B: Backend> Bilinear<B> for Linear {
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
}
