//! Convolution over one, two or three axes, a case of [`bilinear`].
//!
//! | | |
//! | --- | --- |
//! | computes | `y[n, o, t] = sum_{i, k} weight[o, i, k] x[n, g(o) + i, stride t + dilation k - padding] + bias[o]` |
//! | keeps | `x` if `weight` is tracked; `weight` (a handle) if `x` is tracked |
//! | backward | `dx`: a transposed convolution of `dy`; `dweight`: a correlation of `x` with `dy` |
//!
//! Stock Burn keeps `x`, `weight` and `bias` whatever is tracked. For a grouped 1-D convolution whose stride leaves a remainder, its
//! weight gradient is wrong on Flex and panics on NdArray (Burn 0.22.1); the one here is right.
use super::bilinear::{Bilinear, Weight, bilinear};
use crate::backend::{ChannelSums, device_backends};
use crate::{backend::optional::MaybeTensor, graph::extension};
use burn::backend::{Backend, TensorMetadata, tensor::FloatTensor};
use burn::tensor::{
    Shape, Slice,
    ops::{ConvOptions, ConvTransposeOptions},
};

#[cfg(any(feature = "flex", feature = "ndarray"))]
pub(super) mod cpu;

/// Convolutions and their adjoints. The default bodies are Burn's operations.
pub trait ConvKernels: ChannelSums {
    /// `y[n, o, t] = sum_{i, k} weight[o, i, k] x[n, g(o) + i, stride t + dilation k - padding] + bias[o]`
    fn convolve<const N: usize>(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        bias: Option<FloatTensor<Self>>,
        options: ConvOptions<N>,
    ) -> FloatTensor<Self>
    where
        Self: Convolution<N>,
    {
        Self::conv(x, weight, bias, options)
    }

    /// The transpose of the convolution that `options` describe, with a result of the sizes `output`.
    fn convolve_transposed<const N: usize>(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        bias: Option<FloatTensor<Self>>,
        output: [usize; N],
        options: ConvOptions<N>,
    ) -> FloatTensor<Self>
    where
        Self: Convolution<N>,
    {
        transposed::<Self, N>(x, weight, bias, output, options)
    }

    /// The gradient of the weight of a convolution that reads `signal`, or of a transposed one that makes it.
    fn weight_gradient<const N: usize>(
        signal: FloatTensor<Self>,
        dy: FloatTensor<Self>,
        weight: Shape,
        options: ConvOptions<N>,
    ) -> FloatTensor<Self>
    where
        Self: Convolution<N>,
    {
        correlate::<Self, N>(signal, dy, &weight, &options)
    }
}
device_backends!(ConvKernels);

/// The convolutions of a backend over `N` axes. With this trait, all else is written once for all `N`.
pub trait Convolution<const N: usize>: Backend {
    fn conv(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        bias: Option<FloatTensor<Self>>,
        options: ConvOptions<N>,
    ) -> FloatTensor<Self>;
    fn conv_transpose(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        bias: Option<FloatTensor<Self>>,
        options: ConvTransposeOptions<N>,
    ) -> FloatTensor<Self>;
}

macro_rules! conv {
    ($($op:ident = $conv:ident, $conv_transpose:ident, $rank:literal;)+) => {
        extension! {
            /// Convolutions.
            pub trait ConvOps(ConvKernels) {$(
                #[doc = concat!("See [`burn::tensor::module::", stringify!($conv), "`].")]
                fn $op(
                    x: FloatTensor<Self>,
                    #[extension_type] weight: Weight<Self>,
                    #[extension_type] bias: MaybeTensor<Self>,
                    options: ConvOptions<$rank>,
                ) -> FloatTensor<Self> {
                    bilinear::<Self, _>(Conv::new(options), x, weight, bias.into_option())
                }
            )+}
        }

        $(
            impl<B: Backend> Convolution<$rank> for B {
                fn conv(
                    x: FloatTensor<B>,
                    weight: FloatTensor<B>,
                    bias: Option<FloatTensor<B>>,
                    options: ConvOptions<$rank>,
                ) -> FloatTensor<B> {
                    B::$conv(x, weight, bias, options)
                }
                fn conv_transpose(
                    x: FloatTensor<B>,
                    weight: FloatTensor<B>,
                    bias: Option<FloatTensor<B>>,
                    options: ConvTransposeOptions<$rank>,
                ) -> FloatTensor<B> {
                    B::$conv_transpose(x, weight, bias, options)
                }
            }
        )+
    };
}
conv! {
    memsave_conv1d = conv1d, conv_transpose1d, 1;
    memsave_conv2d = conv2d, conv_transpose2d, 2;
    memsave_conv3d = conv3d, conv_transpose3d, 3;
}

/// A convolution over `N` axes.
#[derive(Clone, Debug)]
pub struct Conv<const N: usize>(ConvOptions<N>);

impl<const N: usize> Conv<N> {
    pub(super) fn new(options: ConvOptions<N>) -> Self {
        Self(options)
    }

    pub(super) fn options(&self) -> &ConvOptions<N> {
        &self.0
    }
}

impl<B: ConvKernels + Convolution<N>, const N: usize> Bilinear<B> for Conv<N> {
    const NAME: &'static str = ["conv1d", "conv2d", "conv3d"][N - 1];

    fn forward(
        &self,
        x: FloatTensor<B>,
        weight: FloatTensor<B>,
        bias: Option<FloatTensor<B>>,
    ) -> FloatTensor<B> {
        B::convolve(x, weight, bias, self.0.clone())
    }

    fn x_backward(&self, x: Shape, weight: FloatTensor<B>, dy: FloatTensor<B>) -> FloatTensor<B> {
        B::convolve_transposed(dy, weight, None, sizes(&x), self.0.clone())
    }

    fn weight_backward(&self, x: FloatTensor<B>, weight: Shape, dy: FloatTensor<B>) -> FloatTensor<B> {
        B::weight_gradient(x, dy, weight, self.0.clone())
    }

    fn bias_backward(&self, dy: FloatTensor<B>) -> FloatTensor<B> {
        B::sum_to_channels(dy)
    }
}

/// The sizes of a tensor along the axes of a convolution.
pub(super) fn sizes<const N: usize>(shape: &Shape) -> [usize; N] {
    core::array::from_fn(|axis| shape[axis + 2])
}

/// The sizes of the output of a transposed convolution without padding.
pub(super) fn reached<const N: usize>(
    input: &Shape,
    kernel: &Shape,
    stride: [usize; N],
    dilation: [usize; N],
) -> [usize; N] {
    core::array::from_fn(|axis| {
        (input[axis + 2] - 1) * stride[axis] + dilation[axis] * (kernel[axis + 2] - 1) + 1
    })
}

/// [`ConvKernels::convolve_transposed`], by Burn's transposed convolution.
fn transposed<B: Convolution<N>, const N: usize>(
    x: FloatTensor<B>,
    weight: FloatTensor<B>,
    bias: Option<FloatTensor<B>>,
    output: [usize; N],
    options: ConvOptions<N>,
) -> FloatTensor<B> {
    // What the transposed convolution does not reach at the end of an axis is its output padding. What it computes beyond the ends is
    // the padding of the input, which it leaves out itself; only asymmetric padding must be cut off.
    let cut = options.is_asymmetric();
    let ConvOptions { stride, padding, dilation, groups } = options;
    let begin = padding.map(|(begin, _)| if cut { 0 } else { begin });
    let size =
        |axis: usize| if cut { output[axis] + padding[axis].0 + padding[axis].1 } else { output[axis] };
    let input = x.shape();
    let reached = reached(&input, &weight.shape(), stride, dilation);
    let rest = core::array::from_fn(|axis| (size(axis) + 2 * begin[axis]) - reached[axis]);
    let options = ConvTransposeOptions { stride, padding: begin, padding_out: rest, dilation, groups };
    let y = B::conv_transpose(x, weight, bias, options);
    if !cut {
        return y;
    }
    let shape = Shape::from([&y.shape()[..2], &output].concat());
    crop::<B>(y, &shape, &padding.map(|(begin, _)| begin))
}

/// The gradient of a convolution's weight `[groups * o, i, kernel...]`, from its input `signal` `[n, groups * i, ...]` and the
/// gradient `taps` `[n, groups * o, ...]` of its output; for a transposed convolution the two are exchanged.
///
/// `dweight[o, i, k] = sum_{n, t} taps[n, o, t] signal[n, i, stride t + dilation k - padding]`
///
/// is itself a convolution, with the batch as channels, and stride and dilation exchanged. There is one per group; but if every
/// group has a single input channel, one convolution with `groups` groups computes all.
pub(crate) fn correlate<B: Convolution<N>, const N: usize>(
    signal: FloatTensor<B>,
    taps: FloatTensor<B>,
    weight: &Shape,
    options: &ConvOptions<N>,
) -> FloatTensor<B> {
    let groups = options.groups;
    let options = ConvOptions {
        stride: options.dilation,
        padding: options.padding,
        dilation: options.stride,
        groups: 1,
    };
    let gradient = |signal: FloatTensor<B>, taps: FloatTensor<B>, shape: &Shape, options: ConvOptions<N>| {
        let dweight = B::float_swap_dims(B::conv(signal, taps, None, options), 0, 1);
        // If the stride left a remainder of the input unread, the result is larger than the kernel.
        match dweight.shape() == *shape {
            true => dweight,
            false => crop::<B>(dweight, shape, &[0; N]),
        }
    };
    if weight[1] == 1 {
        let [signal, taps] = [signal, taps].map(|x| B::float_swap_dims(x, 0, 1));
        let mut image = signal.shape();
        (image[0], image[1]) = (1, image[0] * image[1]);
        return gradient(B::float_reshape(signal, image), taps, weight, ConvOptions { groups, ..options });
    }
    let mut shape = weight.clone();
    shape[0] /= groups;
    let of_group = |group: usize| {
        let [signal, taps] =
            [&signal, &taps].map(|x| B::float_swap_dims(channels::<B>(x, group, groups), 0, 1));
        gradient(signal, taps, &shape, options.clone())
    };
    match groups {
        1 => of_group(0),
        _ => B::float_cat((0..groups).map(of_group).collect(), 0),
    }
}

/// The channels of one group.
fn channels<B: Backend>(x: &FloatTensor<B>, group: usize, groups: usize) -> FloatTensor<B> {
    let (batch, size) = (x.shape()[0], x.shape()[1] / groups);
    match groups {
        1 => x.clone(),
        _ => {
            B::float_slice(x.clone(), &[Slice::from(0..batch), Slice::from(group * size..(group + 1) * size)])
        }
    }
}

/// The part of `x` of shape `shape` that begins at `start` on the spatial axes.
pub(crate) fn crop<B: Backend>(x: FloatTensor<B>, shape: &Shape, start: &[usize]) -> FloatTensor<B> {
    let start = [0, 0].iter().chain(start);
    let ranges: Vec<Slice> =
        shape.iter().zip(start).map(|(&size, &start)| Slice::from(start..start + size)).collect();
    B::float_slice(x, &ranges)
}
