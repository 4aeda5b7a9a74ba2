//! Convolutions on a CPU, the same code over one, two and three axes: depthwise ones plane by plane ([`depthwise`]), all others as products
//! ([`implicit`]). Where Burn's own are faster, they run: `cargo bench --bench layers -- conv` and `--bench peers` have such cases.
//!
//! How the results of one image are cut; here 4 x 10 points, a kernel of 1 x 3 and tiles of 12 points:
//!
//! ```text
//!                      for threads   for the cache:         for the vector loop: tile 1 of share 1, a row per tap
//!                                    tiles 1 and 2
//!                                                                        0 1 2 3 4 5 6 7 8 9 a b   columns
//! . . . . . . . . . .  slab ┐        1 1 1 1 1 1 1 1 1 1                 ├─────── run ─────┤ ├run┤
//! . . . . . . . . . .  slab ┴ share  1 1 2 2 2 2 2 2 2 2    left tap     0 x x x x x x x x x 0 x   0: padding
//! . . . . . . . . . .  slab ┐        1 1 1 1 1 1 1 1 1 1    center tap   x x x x x x x x x x x x   x: an element that is read,
//! . . . . . . . . . .  slab ┴ share  1 1 2 2 2 2 2 2 2 2    right tap    x x x x x x x x x 0 x x      by spans
//! ```
//!
//! | word | meaning |
//! | --- | --- |
//! | *point* | A result of one channel, by its place in the image. Channels have the same points. |
//! | *phase* | The points that read the input through the same taps: all; in a transposed convolution of stride `s`, every `s`-th. |
//! | *line* | The points, or the elements of a plane, along the whole last axis. |
//! | *slab* | The points of every phase with the same index on the first axis that has several: in two dimensions, a line. |
//! | *share* | What a job computes: some slabs of the batch, in some channels of a group ([`division`]). |
//! | *piece* | The points of a share that are in one image. |
//! | *tile* | Consecutive points of a share, a column each, and what they read, a row per channel and tap. It stays in the cache. |
//! | *run* | The points of a tile that are on one line. |
//! | *span* | Columns of a tile whose inputs or results lie in a plane at equal distances, so that one loop copies them. |
//! | *canvas* | A plane with its padding, as depthwise convolutions read it. |
//! | *band* | The rows of a canvas that are laid out at a time, in the cache. |
//! | *stretch* | Runs that lie close together on a canvas, which the vector loop takes as one. |
//!
//! The vector loops themselves are in [`backend::cpu::product`](crate::backend::cpu::product).
use super::{ConvKernels, Convolution, correlate, sizes, transposed};
use crate::backend::cpu::{CpuBackend, CpuElement, accumulators_of, affine::Affine, parallel, with_element};
use crate::backend::wide;
use crate::ops::linear::LinearKernels;
use burn::backend::{TensorMetadata, tensor::FloatTensor};
use burn::tensor::{DType, Shape, bf16, f16, ops::ConvOptions};
use geometry::{Axes, Axis, Planes, Weighted};
use std::borrow::Cow;

mod canvas;
mod correlate;
mod depthwise;
mod division;
mod geometry;
mod implicit;
mod reader;
mod rows;
#[cfg(test)]
pub(crate) use {correlate::counting as correlate_counting, depthwise::counting as depthwise_counting};

/// Points of all images together for which tiles pay.
const POINTS: usize = 64;

/// Gathering a line takes as long as this many products with its points, per input channel and tap.
const PRODUCTS_OF_LINE: usize = 128;

/// Points of a transposed convolution for which rearranging its weight pays.
const TRANSPOSED_POINTS: usize = 256;

/// A pointwise convolution from few channels at many points is one product, whose time goes into writing the result. Burn writes it
/// faster (64 to 256 channels at 56x56: 4.7 ms instead of 6.3). In f16, its products are faster with any number of channels (256 to 64:
/// 4.4 ms instead of 8.0).
const FEW_CHANNELS: usize = 64;
const MANY_POINTS: usize = 1 << 12;

/// Kernels, and planes of depthwise convolutions, with more elements than this are left to Burn: a thread should hold no copy of them.
const LARGEST_KERNEL: usize = 1 << 12;
const LARGEST_PLANE: usize = 1 << 20;

impl<B: CpuBackend> ConvKernels for B {
    fn convolve<const N: usize>(
        x: FloatTensor<B>,
        weight: FloatTensor<B>,
        bias: Option<FloatTensor<B>>,
        options: ConvOptions<N>,
    ) -> FloatTensor<B>
    where
        B: Convolution<N>,
    {
        with_element!(x.dtype(), "convolution", E => convolve::<B, E, N>(x, weight, bias, options, None))
    }

    fn convolve_transposed<const N: usize>(
        x: FloatTensor<B>,
        weight: FloatTensor<B>,
        bias: Option<FloatTensor<B>>,
        output: [usize; N],
        options: ConvOptions<N>,
    ) -> FloatTensor<B>
    where
        B: Convolution<N>,
    {
        let [input, kernel] = [x.shape(), weight.shape()];
        let sizes = sizes(&input);
        let channels = kernel[1] * options.groups;
        let shape = with_sizes([input[0], channels], &output);
        let points = input[0] * sizes.iter().product::<usize>();
        let large = is_large(&input, &kernel, options.groups);
        if points < TRANSPOSED_POINTS || is_empty(&[&input, &kernel, &shape]) || large {
            return transposed::<B, N>(x, weight, bias, output, options);
        }
        let axes = axes(&shape, &sizes, &kernel, &options);
        let [x, weight] = [x, weight].map(B::contiguous);
        let finite = with_element!(weight.dtype(), "convolution", E => {
            parallel::all(B::as_slice::<E>(&weight), |weight: &E| weight.is_finite())
        });
        // Zeros are read beyond the ends. Multiplied by an infinite weight, they would be NaN.
        if !finite {
            return transposed::<B, N>(x, weight, bias, output, options);
        }
        let bias = bias.map(B::contiguous);
        with_element!(x.dtype(), "convolution", E => {
            let weight = B::as_slice::<E>(&weight);
            let x = planes(B::as_slice::<E>(&x), &input, options.groups);
            let bias = bias.as_ref().map(B::as_slice::<E>);
            let phases: Vec<Weighted<'_, _>> = axes
                .transposed()
                .into_iter()
                .map(|phase| {
                    let sizes = [kernel[0], kernel[1], kernel[2..].iter().product()];
                    let rows = implicit::transposed_weight(weight, sizes, options.groups, &phase.taps);
                    (phase, Cow::Owned(rows))
                })
                .collect();
            B::from_vec(convolution(x, channels, &phases, Finish { bias, norm: None }), shape)
        })
    }

    fn weight_gradient<const N: usize>(
        signal: FloatTensor<B>,
        dy: FloatTensor<B>,
        weight: Shape,
        options: ConvOptions<N>,
    ) -> FloatTensor<B>
    where
        B: Convolution<N>,
    {
        let [input, output] = [signal.shape(), dy.shape()];
        if is_empty(&[&input, &output, &weight]) || is_large(&input, &weight, options.groups) {
            return correlate::<B, N>(signal, dy, &weight, &options);
        }
        let phase = axes(&input, &sizes(&output), &weight, &options).convolution();
        let copied = input.num_elements() + output.num_elements();
        if phase.is_pointwise() && options.groups == 1 && copied <= weight.num_elements() {
            return B::float_reshape(B::dense_weight_backward(points::<B>(dy), points::<B>(signal)), weight);
        }
        let [signal, dy] = [signal, dy].map(B::contiguous);
        with_element!(dy.dtype(), "convolution", E => {
            let signal = planes(B::as_slice::<E>(&signal), &input, options.groups);
            let dy = planes(B::as_slice::<E>(&dy), &output, options.groups);
            let gradient = match is_depthwise(signal, dy.channels) {
                true => correlate::weight_gradient(signal, dy, &phase),
                false => implicit::weight_gradient(signal, dy, &phase),
            };
            B::from_vec(gradient, weight)
        })
    }
}

/// `x` with a row of channels for every point of all images. If two such copies have fewer elements than a weight, their product is the
/// better way to its gradient: it writes the gradient at once, where [`implicit::weight_gradient`] has sums of the same size beside it.
fn points<B: CpuBackend>(x: FloatTensor<B>) -> FloatTensor<B> {
    let shape = x.shape();
    let (batch, channels) = (shape[0], shape[1]);
    let size = shape[2..].iter().product::<usize>();
    let x = B::float_swap_dims(B::float_reshape(x, Shape::new([batch, channels, size])), 1, 2);
    B::float_reshape(x, Shape::new([batch * size, channels]))
}

/// A convolution in dtype `E`; with a norm, the ReLU of the normalized result.
pub(in crate::ops) fn convolve<B: CpuBackend + Convolution<N>, E: CpuElement, const N: usize>(
    x: FloatTensor<B>,
    weight: FloatTensor<B>,
    bias: Option<FloatTensor<B>>,
    options: ConvOptions<N>,
    norm: Option<&Affine<E>>,
) -> FloatTensor<B> {
    let [input, kernel] = [x.shape(), weight.shape()];
    let output = core::array::from_fn(|axis| {
        let (begin, end) = options.padding[axis];
        let extent = options.dilation[axis] * (kernel[axis + 2] - 1) + 1;
        (input[axis + 2] + begin + end - extent) / options.stride[axis] + 1
    });
    let axes = axes(&input, &output, &kernel, &options);
    let shape = with_sizes([input[0], kernel[0]], &output);
    let phase = axes.convolution();
    let points = input[0] * phase.points();
    let plain = phase.is_pointwise() && options.groups == 1;
    let writes = kernel[1] <= FEW_CHANNELS && wide(x.dtype()) == x.dtype() || x.dtype() == DType::F16;
    let short = !phase.is_pointwise()
        && options.groups < input[1]
        && output.last().is_some_and(|line| line * kernel[0] / options.groups <= PRODUCTS_OF_LINE);
    let faster = points < POINTS || short || plain && writes && points >= MANY_POINTS;
    if faster || is_empty(&[&input, &kernel, &shape]) || is_large(&input, &kernel, options.groups) {
        let mut y = B::conv(x, weight, bias, options);
        if let Some(norm) = norm {
            y = B::contiguous(y);
            norm.relu_in_place(B::as_slice_mut(&mut y), &shape);
        }
        return y;
    }
    let [x, weight] = [x, weight].map(B::contiguous);
    let bias = bias.map(B::contiguous);
    let weight = widened(B::as_slice::<E>(&weight));
    let x = planes(B::as_slice::<E>(&x), &input, options.groups);
    let finish = Finish { bias: bias.as_ref().map(B::as_slice::<E>), norm };
    B::from_vec(convolution(x, kernel[0], &[(phase, weight)], finish), shape)
}

/// What is applied to sums before they are written.
#[derive(Clone, Copy)]
struct Finish<'a, E: CpuElement> {
    bias: Option<&'a [E]>,
    norm: Option<&'a Affine<E>>,
}

impl<E: CpuElement> Finish<'_, E> {
    /// Applies it to the sums of a channel.
    #[inline(always)]
    fn apply(&self, channel: usize, sums: &mut [E::Acc]) {
        if let Some(bias) = self.bias {
            let bias = bias[channel].widen();
            sums.iter_mut().for_each(|sum| *sum = *sum + bias);
        }
        if let Some(norm) = self.norm {
            let norm = norm.channels[channel];
            sums.iter_mut().for_each(|sum| *sum = norm.relu(*sum));
        }
    }
}

fn is_empty(shapes: &[&Shape]) -> bool {
    shapes.iter().any(|shape| shape.num_elements() == 0)
}

/// Whether a thread would need a large workspace.
fn is_large(input: &Shape, kernel: &Shape, groups: usize) -> bool {
    let size = |shape: &Shape| shape[2..].iter().product::<usize>();
    size(kernel) > LARGEST_KERNEL || groups == input[1] && size(input) > LARGEST_PLANE
}

fn with_sizes(leading: [usize; 2], sizes: &[usize]) -> Shape {
    Shape::from(leading.iter().chain(sizes).copied().collect::<Vec<_>>())
}

/// The axes of a convolution with an input of shape `input` and a result of sizes `output`.
fn axes<const N: usize>(
    input: &Shape,
    output: &[usize; N],
    kernel: &Shape,
    options: &ConvOptions<N>,
) -> Axes {
    let axis = |axis: usize| Axis {
        input: input[axis + 2],
        output: output[axis],
        kernel: kernel[axis + 2],
        stride: options.stride[axis],
        dilation: options.dilation[axis],
        padding: options.padding[axis].0,
    };
    Axes::new(&core::array::from_fn::<_, N, _>(axis))
}

fn planes<'a, E>(values: &'a [E], shape: &Shape, groups: usize) -> Planes<'a, E> {
    Planes { values, channels: shape[1], groups, plane: shape[2..].iter().product() }
}

fn is_depthwise<E>(input: Planes<'_, E>, channels: usize) -> bool {
    input.groups == input.channels && input.groups == channels
}

fn convolution<E: CpuElement>(
    x: Planes<'_, E>,
    channels: usize,
    phases: &[Weighted<'_, E::Acc>],
    finish: Finish<'_, E>,
) -> Vec<E> {
    match is_depthwise(x, channels) {
        true => depthwise::convolve(x, phases, finish),
        false => implicit::convolve(x, channels, phases, finish),
    }
}

/// The values in the type in which products are summed.
fn widened<E: CpuElement>(values: &[E]) -> Cow<'_, [E::Acc]> {
    match accumulators_of(values) {
        Some(values) => Cow::Borrowed(values),
        None => Cow::Owned(values.iter().map(|value| value.widen()).collect()),
    }
}
