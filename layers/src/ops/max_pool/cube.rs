//! Kernels for devices: the maxima with their offsets, and the gradient, which is gathered for every element of the input, without atomics.
//!
//! A word holds the offsets of four outputs. As in masks of bits, these are not neighbors, so that 32 units read and write whole lines of
//! memory. Outputs are numbered as they lie in memory, with the channels second or last; a word at the end says which.
//!
//! These kernels are taken with fusion, too: Burn's kernels are not fused with others, and copy tensors whose channels are second.
use super::{MaxPoolKernels, output_shape};
use crate::backend::Saved;
use crate::backend::cube::groups::{ChannelsOfUnit, Grouped, channels_of_group, write_channels, zeros};
use crate::backend::cube::{
    Grid, Place, Volume, address, channels_last, empty, empty_in_order, launch, place, volume,
};
use burn::backend::{
    Backend, Cube, TensorMetadata, backend_extension,
    tensor::{FloatTensor, IntTensor},
};
use burn::tensor::{DType, Shape, ops::MaxPoolOptions};
use burn_cubecl::CubeBackend;
use burn_cubecl::cubecl::{self, ir::ElemType, prelude::*};

/// The offsets of the maxima in their windows, in words: see [above](self).
#[derive(Clone, Debug)]
pub struct OffsetWords(IntTensor<Cube>);

impl Saved for OffsetWords {
    fn bytes(&self) -> usize {
        size_of::<u32>() * self.0.shape().num_elements()
    }
}

impl MaxPoolKernels for Cube {
    type Offsets = OffsetWords;

    fn max_pool2d_with_offsets(
        x: FloatTensor<Self>,
        options: &MaxPoolOptions<2>,
    ) -> (FloatTensor<Self>, OffsetWords) {
        let (y, words) = Self::cube_max_pool(x, options.clone());
        (y, OffsetWords(words))
    }

    fn max_pool2d_with_offsets_backward(
        x: Shape,
        offsets: &OffsetWords,
        dy: FloatTensor<Self>,
        options: &MaxPoolOptions<2>,
    ) -> FloatTensor<Self> {
        Self::cube_max_pool_backward(dy, offsets.0.clone(), x, options.clone())
    }
}

#[backend_extension(Cube, Fusion: cfg(feature = "fusion"))]
pub trait MaxPoolCube: Backend {
    /// The maxima and the words of their offsets.
    #[fusion(meta = |x, options| {
        let [mut y, mut words] = [x.clone(), x.clone()];
        y.shape = output_shape(&x.shape, options);
        words.shape = Shape::new([Packing::of(options).words(y.shape.num_elements()) + 1]);
        words.dtype = DType::I32;
        (y, words)
    })]
    fn cube_max_pool(
        x: FloatTensor<Self>,
        options: MaxPoolOptions<2>,
    ) -> (FloatTensor<Self>, IntTensor<Self>);

    /// The gradient of the input, of shape `x`.
    #[fusion(dtype = dy, shape = x.clone())]
    fn cube_max_pool_backward(
        dy: FloatTensor<Self>,
        words: IntTensor<Self>,
        x: Shape,
        options: MaxPoolOptions<2>,
    ) -> FloatTensor<Self>;
}

impl MaxPoolCube for CubeBackend {
    fn cube_max_pool(
        x: FloatTensor<Self>,
        options: MaxPoolOptions<2>,
    ) -> (FloatTensor<Self>, IntTensor<Self>) {
        let (shape, last, packing) =
            (output_shape(&x.shape(), &options), channels_last(&x), Packing::of(&options));
        let elements = shape.num_elements();
        let words = empty(&x, Shape::new([packing.words(elements) + 1]), DType::I32);
        let y = empty_in_order(&x, shape, x.dtype, last);
        if let Some(grid) = Grid::of_units(packing.words(elements), &[&x, &y]) {
            let (of_x, of_y) = (volume(&x), volume(&y));
            // SAFETY: the kernel compares every position with the shapes.
            unsafe {
                launch!(
                    forward_kernel,
                    grid,
                    x.into_buffer_arg(),
                    y.clone().into_buffer_arg(),
                    words.clone().into_buffer_arg(),
                    of_x,
                    of_y,
                    elements,
                    Windows::of(&options),
                    packing,
                    last,
                    grid.dtypes,
                );
            }
        }
        (y, words)
    }

    fn cube_max_pool_backward(
        dy: FloatTensor<Self>,
        words: IntTensor<Self>,
        x: Shape,
        options: MaxPoolOptions<2>,
    ) -> FloatTensor<Self> {
        let (last, elements) = (channels_last(&dy), x.num_elements());
        let dx = empty_in_order(&dy, x, dy.dtype, last);
        if elements == 0 {
            return dx;
        }
        let Grouped { of_dy, of_dx, channels, of_unit, units } = Grouped::of(&dy, &dx);
        let Some(grid) = Grid::of_units(units, &[&dy, &dx]) else { return dx };
        let outputs = dy.meta.num_elements();
        // SAFETY: the kernel compares every position with the shapes.
        unsafe {
            launch!(
                backward_kernel,
                grid,
                dy.into_buffer_arg(),
                words.into_buffer_arg(),
                dx.clone().into_buffer_arg(),
                of_dy,
                of_dx,
                channels,
                units,
                outputs,
                of_unit,
                Windows::of(&options),
                Packing::of(&options),
                last,
                grid.dtypes,
            );
        }
        dx
    }
}

/// What a kernel is compiled for: windows along the height and the width.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Windows {
    size: [usize; 2],
    stride: [usize; 2],
    dilation: [usize; 2],
    /// Before the first element.
    padding: [usize; 2],
}

impl Windows {
    fn of(options: &MaxPoolOptions<2>) -> Self {
        Self {
            size: options.kernel_size,
            stride: options.stride,
            dilation: options.dilation,
            padding: options.padding.map(|(begin, _)| begin),
        }
    }
}

/// How many offsets a word holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Packing {
    /// For windows of up to 255 elements.
    Four,
    One,
}

/// Units that take neighboring outputs.
const LANES: usize = 32;

impl Packing {
    fn of(options: &MaxPoolOptions<2>) -> Self {
        if options.kernel_size.iter().product::<usize>() <= 255 { Self::Four } else { Self::One }
    }

    fn offsets(self) -> usize {
        match self {
            Self::Four => 4,
            Self::One => 1,
        }
    }

    /// The number of words for so many outputs.
    fn words(self, outputs: usize) -> usize {
        let block = LANES * self.offsets();
        outputs / block * LANES + (outputs % block).min(LANES)
    }

    fn bits(self) -> usize {
        32 / self.offsets()
    }

    /// The offset where no element of a window wins.
    fn none(self) -> u32 {
        u32::MAX >> (32 - self.bits())
    }
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn forward_kernel<T: Float, W: Float>(
    x: &[T],
    y: &mut [T],
    words: &mut [u32],
    of_x: Volume,
    of_y: Volume,
    elements: usize,
    #[comptime] windows: Windows,
    #[comptime] packing: Packing,
    #[comptime] channels_last: bool,
    #[define(T, W)] _dtypes: [ElemType; 2],
) {
    let per_word = comptime!(packing.offsets());
    let (block, unit) = (ABSOLUTE_POS / LANES, ABSOLUTE_POS % LANES);
    let first = block * comptime!(per_word * LANES) + unit;
    if first >= elements {
        terminate!();
    }
    let mut word = 0u32;
    #[unroll]
    for lane in 0..per_word {
        let number = first + comptime!(lane * LANES);
        if number < elements {
            let to = place(&of_y, number, channels_last);
            let winner = winner::<T, W>(x, &of_x, &to, windows, comptime!(packing.none()));
            y[address(&of_y, &to)] = T::cast_from(winner.value);
            word |= winner.offset << comptime!((lane * packing.bits()) as u32);
        }
    }
    words[block * LANES + unit] = word;
    if ABSOLUTE_POS == 0 {
        words[words_of(elements, packing)] = comptime!(channels_last as u32);
    }
}

#[cube]
fn words_of(outputs: usize, #[comptime] packing: Packing) -> usize {
    let block = comptime!(LANES * packing.offsets());
    outputs / block * LANES + min(outputs % block, LANES)
}

#[derive(CubeType, Clone, Copy)]
struct Winner<W: Float> {
    value: W,
    offset: u32,
}

/// The first of the largest elements of a window.
#[cube]
fn winner<T: Float, W: Float>(
    x: &[T],
    of_x: &Volume,
    window: &Place,
    #[comptime] windows: Windows,
    #[comptime] none: u32,
) -> Winner<W> {
    let Windows { size, stride, dilation, padding } = comptime!(windows);
    let mut value = W::cast_from(T::min_value());
    let mut offset = none.runtime();
    for i in 0..size[0] {
        // Counted from the padding on, so that it is not negative.
        let row = window.row * comptime!(stride[0]) + i * comptime!(dilation[0]);
        for j in 0..size[1] {
            let column = window.column * comptime!(stride[1]) + j * comptime!(dilation[1]);
            if row >= comptime!(padding[0])
                && row < of_x.height + comptime!(padding[0])
                && column >= comptime!(padding[1])
                && column < of_x.width + comptime!(padding[1])
            {
                let at = Place {
                    batch: window.batch,
                    channel: window.channel,
                    depth: window.depth,
                    row: row - comptime!(padding[0]),
                    column: column - comptime!(padding[1]),
                };
                let x = W::cast_from(x[address(of_x, &at)]);
                if x > value {
                    value = x;
                    offset = u32::cast_from(i * comptime!(size[1]) + j);
                }
            }
        }
    }
    Winner::<W> { value, offset }
}

/// The windows along one axis that have an element of the input.
#[derive(CubeType, Clone, Copy)]
struct Around {
    /// The number of the element, counted from the padding on.
    at: usize,
    first: usize,
    end: usize,
}

#[cube]
fn around(
    at: usize,
    count: usize,
    #[comptime] size: usize,
    #[comptime] stride: usize,
    #[comptime] dilation: usize,
    #[comptime] padding: usize,
) -> Around {
    let span = comptime!((size - 1) * dilation);
    let at = at + padding;
    Around {
        at,
        // Rounded up.
        first: (max(at, span.runtime()) - span + comptime!(stride - 1)) / stride,
        end: min(at / stride + 1, count),
    }
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn backward_kernel<T: Float, W: Float>(
    dy: &[T],
    words: &[u32],
    dx: &mut [T],
    of_dy: Volume,
    of_dx: Volume,
    channels: ChannelsOfUnit,
    units: usize,
    outputs: usize,
    #[comptime] of_unit: usize,
    #[comptime] windows: Windows,
    #[comptime] packing: Packing,
    #[comptime] channels_last: bool,
    #[define(T, W)] _dtypes: [ElemType; 2],
) {
    if ABSOLUTE_POS >= units {
        terminate!();
    }
    let Windows { size, stride, dilation, padding } = comptime!(windows);
    let to = place(&of_dx, ABSOLUTE_POS, channels_last);
    let rows = around(to.row, of_dy.height, size[0], stride[0], dilation[0], padding[0]);
    let columns = around(to.column, of_dy.width, size[1], stride[1], dilation[1], padding[1]);
    // Numbers of outputs, in the order in which the forward pass walked them.
    let numbered_channels_last = words[words_of(outputs, packing)] == 1;
    let of_plane = of_dy.height * of_dy.width;
    let of_column = select(numbered_channels_last, channels.all, 1usize.runtime());
    let of_channel = select(numbered_channels_last, 1usize.runtime(), of_plane);
    let channel = to.channel * of_unit;
    let first_number = to.batch * channels.all * of_plane + channel * of_channel;
    let window = Place { batch: to.batch, channel: to.channel, depth: to.depth, row: 0, column: 0 };
    let first = address(&of_dy, &window);
    let of_group = channels_of_group(&channels, to.channel, of_unit);
    let mut sums = zeros::<W>(of_unit);
    for row in rows.first..rows.end {
        let i = rows.at - row * comptime!(stride[0]);
        for column in columns.first..columns.end {
            let j = columns.at - column * comptime!(stride[1]);
            // Not 0 between the elements of a dilated window.
            let between = i % comptime!(dilation[0]) + j % comptime!(dilation[1]);
            let offset = i / comptime!(dilation[0]) * comptime!(size[1]) + j / comptime!(dilation[1]);
            let number = first_number + (row * of_dy.width + column) * of_column;
            let at = first + row * of_dy.stride_of_height + column * of_dy.stride_of_width;
            #[unroll]
            for channel in 0..of_unit {
                // Beyond the last channel, it is read again.
                let from = min(channel, of_group - 1);
                let is_winner =
                    offset_of(words, number + from * of_channel, packing) == u32::cast_from(offset);
                if between == 0 && is_winner {
                    sums[channel] += W::cast_from(dy[at + from * channels.stride_of_dy]);
                }
            }
        }
    }
    write_channels::<T, W>(dx, address(&of_dx, &to), &channels, of_group, &sums, of_unit);
}

/// The offset of the output with this number.
#[cube]
fn offset_of(words: &[u32], number: usize, #[comptime] packing: Packing) -> u32 {
    let block = comptime!(LANES * packing.offsets());
    let word = words[number / block * LANES + number % LANES];
    let lane = u32::cast_from(number % block / LANES);
    (word >> (lane * comptime!(packing.bits() as u32))) & comptime!(packing.none())
}
