//! Dense layer: `y = x weight + bias`, a case of [`bilinear`], which says what is kept and how gradients are computed.
//!
//! Burn's `nn::Linear` is recorded as a broadcast matrix product, because burn-dispatch 0.22.1 does not forward `ModuleOps::linear`. For
//! `x` of more than two axes, the backward pass of that product computes one weight gradient for each matrix of the batch, and sums them.
//! Here all axes of `x` but the last are one axis of rows, so the weight gradient is a single product. There is one exception: if that
//! product has too few tiles to keep a device busy, it is computed in a few parts of the batch, never more than Burn has, and these are
//! summed. On Flex, products write their result into memory that was not zeroed first.
use super::bilinear::{Bilinear, Weight, bilinear};
use crate::backend::{Capacity, device_backends, wide};
use crate::{backend::optional::MaybeTensor, graph::extension};
use burn::backend::{
    Backend, TensorMetadata,
    tensor::{FloatTensor, QuantizedTensor},
};
use burn::tensor::{Shape, Slice};
use core::ops::Range;

#[cfg(any(feature = "flex", feature = "ndarray"))]
mod cpu;

extension! {
    /// Dense layers.
    pub trait LinearOps(LinearKernels) {
        /// `x weight + bias`; x `[..., d_input]`, weight `[d_input, d_output]`, bias `[d_output]`.
        fn memsave_linear(
            x: FloatTensor<Self>,
            #[extension_type] weight: Weight<Self>,
            #[extension_type] bias: MaybeTensor<Self>,
        ) -> FloatTensor<Self> {
            bilinear::<Self, _>(Linear, x, weight, bias.into_option())
        }
    }
}

/// A matrix product with fewer rows than this does not fill a tile.
const FEW_ROWS: usize = 32;

#[derive(Clone, Debug)]
pub struct Linear;

impl<B: LinearKernels> Bilinear<B> for Linear {
    const NAME: &'static str = "linear";

    fn forward(
        &self,
        x: FloatTensor<B>,
        weight: FloatTensor<B>,
        bias: Option<FloatTensor<B>>,
    ) -> FloatTensor<B> {
        B::dense(x, weight, bias)
    }
    fn x_backward(&self, _: Shape, weight: FloatTensor<B>, dy: FloatTensor<B>) -> FloatTensor<B> {
        B::dense_x_backward(weight, dy)
    }
    fn weight_backward(&self, x: FloatTensor<B>, _: Shape, dy: FloatTensor<B>) -> FloatTensor<B> {
        B::dense_weight_backward(x, dy)
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
            B::dense(x.clone(), weight, bias)
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

/// The rows, and the columns, of a tile of a matrix product on a device.
const TILE: usize = 128;

/// The kernels.
pub trait LinearKernels: Capacity {
    /// `x weight + bias`; x `[..., d_input]`, weight `[d_input, d_output]`, bias `[d_output]`.
    fn dense(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        bias: Option<FloatTensor<Self>>,
    ) -> FloatTensor<Self> {
        Self::linear(x, weight, bias)
    }

    /// `dy weight^T`
    fn dense_x_backward(weight: FloatTensor<Self>, dy: FloatTensor<Self>) -> FloatTensor<Self> {
        x_backward::<Self>(weight, dy)
    }

    /// `x^T dy`, over all rows.
    fn dense_weight_backward(x: FloatTensor<Self>, dy: FloatTensor<Self>) -> FloatTensor<Self> {
        let parts = match Self::busy_tiles(&x.device()) {
            Some(tiles) if wide(x.dtype()) == x.dtype() => parts(&x.shape(), &dy.shape(), tiles),
            _ => 1, // in half precision, each part would be rounded
        };
        weight_backward_in_parts::<Self>(x, dy, parts)
    }

    /// `f` of a dequantized matrix. If the backend can, it calls `f` with one block along `axis` after the other, and concatenates the
    /// results along their last axis. Then the whole dense matrix never exists, unless it is small beside the result. `f` multiplies `x` by
    /// the block, which has the dtype of `x`; it also gets the block's range along `axis`.
    fn by_dequantized_blocks(
        x: &FloatTensor<Self>,
        weight: &QuantizedTensor<Self>,
        axis: usize,
        f: impl Fn(FloatTensor<Self>, Range<usize>) -> FloatTensor<Self>,
    ) -> FloatTensor<Self> {
        let len = weight.shape()[axis];
        f(Self::dequantize(weight.clone(), x.dtype().into()), 0..len)
    }
}
device_backends!(LinearKernels);

/// In how many parts of the batch, which is all axes but the last two, a gradient of a weight is computed: as many as divide the batch and
/// together have no more tiles than keep the device busy.
fn parts(x: &Shape, dy: &Shape, busy_tiles: usize) -> usize {
    let rank = x.num_dims();
    let batch: usize = x[..rank.saturating_sub(2)].iter().product();
    let tiles = x[rank - 1].div_ceil(TILE) * dy[rank - 1].div_ceil(TILE);
    let most = (busy_tiles / tiles.max(1)).min(batch);
    (1..=most).rev().find(|&parts| batch.is_multiple_of(parts)).unwrap_or(1)
}

/// `x^T dy`, over all rows: the sum of the products of so many parts of the batch.
fn weight_backward_in_parts<B: Backend>(
    x: FloatTensor<B>,
    dy: FloatTensor<B>,
    parts: usize,
) -> FloatTensor<B> {
    if parts == 1 {
        return B::linear_weight_backward(x, dy);
    }
    let [x, dy] = [x, dy].map(|tensor| {
        let shape = tensor.shape();
        let (rows, columns) = (&shape[..shape.num_dims() - 1], shape[shape.num_dims() - 1]);
        let rows = rows.iter().product::<usize>() / parts;
        B::float_reshape(tensor, Shape::new([parts, rows, columns]))
    });
    let of_parts = B::float_matmul(B::float_swap_dims(x, 1, 2), dy);
    let [_, d_input, d_output] = of_parts.shape().dims();
    B::float_reshape(B::float_sum_dim(of_parts, 0), Shape::new([d_input, d_output]))
}

/// `dy weight^T` by Burn's product.
fn x_backward<B: Backend>(weight: FloatTensor<B>, dy: FloatTensor<B>) -> FloatTensor<B> {
    let (shape, [d_input, d_output]) = (dy.shape(), weight.shape().dims());
    let rank = shape.num_dims();
    let transposed = |weight: FloatTensor<B>| B::float_swap_dims(weight, rank - 2, rank - 1);
    // Only views: `B::linear_x_backward` copies the transposed weight, and folding copies a `dy` that is not contiguous. Folding pays
    // only for matrices of few rows. In half precision a product packs all its rows, so that folding would need more than stock.
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

#[cfg(all(test, feature = "flex"))]
mod tests {
    use super::*;
    use crate::backend::testing::{Composed, assert_close, composed, random};
    use burn::backend::{Flex, ops::QTensorOps};
    use burn::tensor::quantization::{QuantScheme, QuantStore, QuantValue};

    /// `x weight`, or `x weight^T`.
    fn product<B: Backend>(x: &FloatTensor<B>, weight: FloatTensor<B>, transposed: bool) -> FloatTensor<B> {
        let [rows, columns] = weight.shape().dims();
        let weight = B::float_reshape(weight, Shape::new([1, rows, columns]));
        let weight = if transposed { B::float_swap_dims(weight, 1, 2) } else { weight };
        B::float_matmul(x.clone(), weight)
    }

    #[test]
    fn parts_of_the_batch_add_up_to_the_gradient_of_a_weight() {
        let (x, dy) = (random(&[2, 6, 5, 7]), random(&[2, 6, 5, 3]));
        let whole = Flex::dense_weight_backward(x.clone(), dy.clone());
        for parts in [2, 3, 4, 12] {
            let of_parts = weight_backward_in_parts::<Composed>(composed(&x), composed(&dy), parts);
            assert_close("gradient", of_parts, whole.clone());
        }
    }

    #[test]
    fn parts_are_as_many_as_keep_a_device_busy() {
        let of = |x: &[usize], d_output: usize, tiles: usize| {
            let mut dy = x.to_vec();
            dy[x.len() - 1] = d_output;
            parts(&Shape::from(x.to_vec()), &Shape::from(dy), tiles)
        };
        assert_eq!(of(&[64, 128, 1024], 1024, 256), 4);
        assert_eq!(of(&[64, 128, 1024], 8, 256), 32); // of LoRA
        assert_eq!(of(&[64, 128, 4096], 4096, 256), 1);
        assert_eq!(of(&[8192, 1024], 8, 256), 1); // stock has one product, too
        assert_eq!([of(&[7, 128, 1024], 1024, 256), of(&[7, 128, 8], 8, 256)], [1, 7]);
        assert_eq!([of(&[0, 128, 8], 8, 256), of(&[3, 4, 0], 0, 256)], [1, 3]);
    }

    /// In one block and in several, along both axes; also for a tensor whose elements do not lie in order.
    #[test]
    fn quantized_matrices_are_dequantized_as_by_the_kernel() {
        let scheme = QuantScheme::default().with_value(QuantValue::Q8S).with_store(QuantStore::Native);
        for (rows, columns) in [(16, 24), (1024, 300), (300, 1030)] {
            let weight = Flex::quantize_dynamic(random(&[rows, columns]), &scheme);
            let swapped = Flex::q_swap_dims(weight.clone(), 0, 1);
            let (x, dy) = (random(&[2, 3, rows]), random(&[2, 3, columns]));
            for (x, weight, axis) in [(&x, &weight, 1), (&dy, &weight, 0), (&x, &swapped, 0)] {
                let cpu = Flex::by_dequantized_blocks(x, weight, axis, |block, _| {
                    product::<Flex>(x, block, axis == 0)
                });
                let x = composed(x);
                let body = Composed::by_dequantized_blocks(&x, weight, axis, |block, _| {
                    product::<Composed>(&x, block, axis == 0)
                });
                assert_close("product", body, cpu);
            }
        }
    }
}
