//! Tensors `[batch, channels, ...]` with up to three spatial axes, for kernels that walk them in the order of memory.
use super::empty;
use super::order::empty_along;
use burn::tensor::{DType, Shape};
use burn_cubecl::cubecl::{self, prelude::*, std::FastDivmod};
use burn_cubecl::tensor::CubeTensor;

/// Sizes and strides of `[batch, channels, depth, height, width]`. If a tensor lacks spatial axes, the first ones have one element.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct Volume {
    pub channels: usize,
    pub height: usize,
    pub width: usize,
    stride_of_batch: usize,
    stride_of_channel: usize,
    pub stride_of_depth: usize,
    pub stride_of_height: usize,
    pub stride_of_width: usize,
    by_channels: FastDivmod<usize>,
    by_depth: FastDivmod<usize>,
    by_height: FastDivmod<usize>,
    by_width: FastDivmod<usize>,
}

/// The place of an element.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct Place {
    pub batch: usize,
    pub channel: usize,
    pub depth: usize,
    pub row: usize,
    pub column: usize,
}

/// The argument of a launch.
pub(crate) fn volume(tensor: &CubeTensor) -> VolumeLaunch {
    groups_of_channels(tensor, 1)
}

/// The same for groups of channels: places are those of the first channel of a group. The last group may have fewer channels.
pub(crate) fn groups_of_channels(tensor: &CubeTensor, of_group: usize) -> VolumeLaunch {
    let (shape, strides) = (tensor.meta.shape(), tensor.meta.strides());
    let missing = 5 - shape.num_dims();
    let axis = |axis: usize| match axis {
        0 => (shape[0], strides[0]),
        1 => (shape[1].div_ceil(of_group), strides[1] * of_group),
        _ if axis - 2 < missing => (1, 0),
        _ => (shape[axis - missing], strides[axis - missing]),
    };
    let [batch, channels, depth, height, width] = [0, 1, 2, 3, 4].map(axis);
    VolumeLaunch::new(
        channels.0, height.0, width.0, batch.1, channels.1, depth.1, height.1, width.1, channels.0, depth.0,
        height.0, width.0,
    )
}

/// Whether channels are nearer to each other in memory than the elements of a row.
pub(crate) fn channels_last(tensor: &CubeTensor) -> bool {
    let (shape, strides) = (tensor.meta.shape(), tensor.meta.strides());
    let last = shape.num_dims() - 1;
    shape[1] > 1 && shape[last] > 1 && strides[1] < strides[last]
}

/// A tensor in one of the two orders, not written yet.
pub(crate) fn empty_in_order(
    like: &CubeTensor,
    shape: Shape,
    dtype: DType,
    channels_last: bool,
) -> CubeTensor {
    if !channels_last {
        return empty(like, shape, dtype);
    }
    let rank = shape.num_dims();
    let axes: Vec<usize> = [0].into_iter().chain(2..rank).chain([1]).collect();
    empty_along(like, shape, dtype, &axes)
}

/// The place of the element with this number in one of the two orders.
#[cube]
pub(crate) fn place(volume: &Volume, number: usize, #[comptime] channels_last: bool) -> Place {
    if comptime!(channels_last) {
        let (pixel, channel) = volume.by_channels.div_mod(number);
        let (row, column) = volume.by_width.div_mod(pixel);
        let (slice, row) = volume.by_height.div_mod(row);
        let (batch, depth) = volume.by_depth.div_mod(slice);
        Place { batch, channel, depth, row, column }
    } else {
        let (row, column) = volume.by_width.div_mod(number);
        let (slice, row) = volume.by_height.div_mod(row);
        let (plane, depth) = volume.by_depth.div_mod(slice);
        let (batch, channel) = volume.by_channels.div_mod(plane);
        Place { batch, channel, depth, row, column }
    }
}

/// Where an element lies in memory.
#[cube]
pub(crate) fn address(volume: &Volume, place: &Place) -> usize {
    place.batch * volume.stride_of_batch
        + place.channel * volume.stride_of_channel
        + place.depth * volume.stride_of_depth
        + place.row * volume.stride_of_height
        + place.column * volume.stride_of_width
}
