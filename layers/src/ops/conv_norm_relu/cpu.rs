//! The kernels on a CPU: convolutions that normalize their sums before they write them, and one loop for the gradient.
use super::{ConvNormReluKernels, Scale};
use crate::backend::cpu::{
    BitMask, CpuBackend,
    affine::{Affine, inverse_std, scales},
    with_element,
};
use crate::ops::{
    batch_norm::Statistics,
    conv::{Conv, Convolution, cpu::convolve},
};
use burn::backend::{TensorMetadata, tensor::FloatTensor};
use burn::tensor::{DType, bf16, f16};

impl<B: CpuBackend> ConvNormReluKernels for B {
    fn conv_norm_relu<const N: usize>(
        x: FloatTensor<B>,
        weight: FloatTensor<B>,
        bias: Option<FloatTensor<B>>,
        conv: &Conv<N>,
        (gamma, beta, statistics): (FloatTensor<B>, FloatTensor<B>, Statistics<FloatTensor<B>>),
    ) -> FloatTensor<B>
    where
        B: Convolution<N>,
    {
        let Statistics { mean, variance, epsilon } = statistics;
        let [gamma, beta, mean, variance] = [gamma, beta, mean, variance].map(B::contiguous);
        with_element!(x.dtype(), "conv_norm_relu", E => {
            let [gamma, beta, mean, variance] = [&gamma, &beta, &mean, &variance].map(|x| B::as_slice::<E>(x));
            let norm = Affine::<E>::new(gamma, beta, mean, variance, epsilon);
            convolve::<B, E, N>(x, weight, bias, conv.options().clone(), Some(&norm))
        })
    }

    fn norm_relu_backward(
        dy: FloatTensor<B>,
        mask: &BitMask,
        scale: Scale<FloatTensor<B>>,
    ) -> FloatTensor<B> {
        let Scale { gamma, variance, epsilon } = scale;
        let mut dy = B::contiguous(dy);
        let [gamma, variance] = [gamma, variance].map(B::contiguous);
        let inner = dy.shape()[2..].iter().product();
        with_element!(dy.dtype(), "conv_norm_relu", E => {
            let inverse_std = inverse_std(B::as_slice::<E>(&variance), epsilon);
            let scales = scales(B::as_slice::<E>(&gamma), &inverse_std);
            mask.scale_channels(B::as_slice_mut::<E>(&mut dy), inner, &scales);
            dy
        })
    }
}
