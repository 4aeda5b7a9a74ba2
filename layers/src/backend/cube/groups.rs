//! Units that gather the gradients of inputs from those of outputs, each for several channels, since these share their windows.
use super::volume::{VolumeLaunch, groups_of_channels};
use burn_cubecl::cubecl::{self, prelude::*};
use burn_cubecl::tensor::CubeTensor;

/// The most channels of a unit.
const CHANNELS: usize = 4;

/// The gradients of outputs and inputs, in groups of channels.
pub(crate) struct Grouped {
    pub of_dy: VolumeLaunch,
    pub of_dx: VolumeLaunch,
    pub channels: ChannelsOfUnitLaunch,
    /// Channels of a unit; the last one may have fewer.
    pub of_unit: usize,
    pub units: usize,
}

impl Grouped {
    /// For tensors `[batch, channels, ...]` that are not empty.
    pub fn of(dy: &CubeTensor, dx: &CubeTensor) -> Self {
        let shape = dx.meta.shape();
        let of_unit = shape[1].next_power_of_two().min(CHANNELS);
        let [of_dy, of_dx] = [dy, dx].map(|tensor| groups_of_channels(tensor, of_unit));
        let [stride_of_dy, stride_of_dx] = [dy, dx].map(|tensor| tensor.meta.strides()[1]);
        Self {
            of_dy,
            of_dx,
            channels: ChannelsOfUnitLaunch::new(shape[1], stride_of_dy, stride_of_dx),
            of_unit,
            units: shape.num_elements() / shape[1] * shape[1].div_ceil(of_unit),
        }
    }
}

/// How the channels of a unit lie in memory.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct ChannelsOfUnit {
    pub all: usize,
    pub stride_of_dy: usize,
    pub stride_of_dx: usize,
}

/// How many channels a group has: `of_unit`, or what is left for the last one.
#[cube]
pub(crate) fn channels_of_group(
    channels: &ChannelsOfUnit,
    group: usize,
    #[comptime] of_unit: usize,
) -> usize {
    min(of_unit, channels.all - group * of_unit)
}

/// Writes a number for each of `count` channels.
#[cube]
pub(crate) fn write_channels<T: Float, W: Float>(
    dx: &mut [T],
    first: usize,
    channels: &ChannelsOfUnit,
    count: usize,
    values: &Array<W>,
    #[comptime] of_unit: usize,
) {
    #[unroll]
    for channel in 0..of_unit {
        if channel < count {
            dx[first + channel * channels.stride_of_dx] = T::cast_from(values[channel]);
        }
    }
}

/// Zeros.
#[cube]
pub(crate) fn zeros<W: Float>(#[comptime] len: usize) -> Array<W> {
    let mut zeros = Array::<W>::new(len);
    #[unroll]
    for i in 0..len {
        zeros[i] = W::new(0.0);
    }
    zeros
}
