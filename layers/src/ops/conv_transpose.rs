//! Transposed convolution over one, two or three axes, a case of [`bilinear`]: the adjoint of [`conv`](super::conv).
//!
//! | | |
//! | --- | --- |
//! | computes | `y[n, o, stride t + dilation k - padding] += weight[i, o, k] x[n, i, t]`, `+ bias[o]` |
//! | keeps | `x` if `weight` is tracked; `weight` (a handle) if `x` is tracked |
//! | backward | `dx`: a convolution of `dy`; `dweight`: a correlation of `dy` with `x` |
//!
//! Stock Burn keeps `x`, `weight` and `bias` whatever is tracked.
use super::{
    bilinear::{Bilinear, Weight, bilinear},
    conv::{ConvKernels, Convolution, crop, reached},
};
use crate::{backend::optional::MaybeTensor, graph::extension};
use burn::backend::{TensorMetadata, tensor::FloatTensor};
use burn::tensor::{
    Shape,
    ops::{ConvOptions, ConvTransposeOptions},
};

macro_rules! conv_transpose {
    ($($op:ident = $conv:ident, $rank:literal;)+) => {
        extension! {
            /// Transposed convolutions.
            pub trait ConvTransposeOps(ConvKernels) {$(
                #[doc = concat!("See [`burn::tensor::module::", stringify!($conv), "`].")]
                fn $op(
                    x: FloatTensor<Self>,
                    #[extension_type] weight: Weight<Self>,
                    #[extension_type] bias: MaybeTensor<Self>,
                    options: ConvTransposeOptions<$rank>,
                ) -> FloatTensor<Self> {
                    bilinear::<Self, _>(ConvTranspose(options), x, weight, bias.into_option())
                }
            )+}
        }
    };
}
conv_transpose! {
    memsave_conv_transpose1d = conv_transpose1d, 1;
    memsave_conv_transpose2d = conv_transpose2d, 2;
    memsave_conv_transpose3d = conv_transpose3d, 3;
}

/// A transposed convolution over `N` axes.
#[derive(Clone, Debug)]
pub struct ConvTranspose<const N: usize>(ConvTransposeOptions<N>);

impl<const N: usize> ConvTranspose<N> {
    pub(super) fn new(options: ConvTransposeOptions<N>) -> Self {
        Self(options)
    }

    /// The options of the convolution that this is the transpose of.
    fn adjoint(&self) -> ConvOptions<N> {
        let ConvTransposeOptions { stride, padding, dilation, groups, .. } = self.0.clone();
        ConvOptions { stride, padding: padding.map(|padding| (padding, padding)), dilation, groups }
    }
}

impl<B: ConvKernels + Convolution<N>, const N: usize> Bilinear<B> for ConvTranspose<N> {
    const NAME: &'static str = ["conv_transpose1d", "conv_transpose2d", "conv_transpose3d"][N - 1];

    fn forward(
        &self,
        x: FloatTensor<B>,
        weight: FloatTensor<B>,
        bias: Option<FloatTensor<B>>,
    ) -> FloatTensor<B> {
        let ConvTransposeOptions { stride, padding, padding_out, dilation, .. } = self.0.clone();
        let reached = reached(&x.shape(), &weight.shape(), stride, dilation);
        let output = core::array::from_fn(|axis| reached[axis] + padding_out[axis] - 2 * padding[axis]);
        B::convolve_transposed(x, weight, bias, output, self.adjoint())
    }

    fn x_backward(&self, x: Shape, weight: FloatTensor<B>, dy: FloatTensor<B>) -> FloatTensor<B> {
        let dx = B::convolve(dy, weight, None, self.adjoint());
        // If the output padding is a stride or more, the convolution has results to which no input belongs.
        match dx.shape() == x {
            true => dx,
            false => crop::<B>(dx, &x, &[0; N]),
        }
    }

    fn weight_backward(&self, x: FloatTensor<B>, weight: Shape, dy: FloatTensor<B>) -> FloatTensor<B> {
        B::weight_gradient(dy, x, weight, self.adjoint())
    }

    fn bias_backward(&self, dy: FloatTensor<B>) -> FloatTensor<B> {
        B::sum_to_channels(dy)
    }
}
