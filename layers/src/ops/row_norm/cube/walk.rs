//! The orders in which kernels walk the elements of a row.
use crate::backend::cube::channels::{ByChannels, Channels};
use crate::backend::cube::{Output, channels_last, empty_in_order};
use crate::ops::row_norm::RowNorm;
use burn::backend::TensorMetadata;
use burn_cubecl::cubecl::zspace::metadata::Metadata;
use burn_cubecl::tensor::CubeTensor;

/// The order of the elements of a row: `[channels, inner]` or `[inner, channels]`.
#[derive(Clone, Copy, Debug, Hash, PartialEq, Eq)]
pub(super) enum Walk {
    /// Along the channels, each of which has one element.
    Row,
    /// Along the elements of one channel, then those of the next.
    Inner,
    /// Along the channels, which are nearest in memory, then to those of the next element.
    Channels,
}

impl Walk {
    pub fn of(x: &CubeTensor, norm: &RowNorm) -> Self {
        if norm.inner == 1 {
            return Self::Row;
        }
        if norm.channels > 1 && lies_along_channels(x, norm) { Self::Channels } else { Self::Inner }
    }

    /// The tensor with its elements in the order of the walk: along the channels, its axes are `[batch, groups, inner.., channels]`.
    pub fn view(self, mut tensor: CubeTensor, norm: &RowNorm) -> CubeTensor {
        if self != Self::Channels {
            return tensor;
        }
        let (shape, strides) = (tensor.meta.shape(), tensor.meta.strides());
        let axes =
            |of: &[usize], groups: usize, channels: usize| [&[of[0], groups], &of[2..], &[channels]].concat();
        let by_groups = axes(shape, norm.groups, norm.channels);
        let strides = axes(strides, norm.channels * strides[1], strides[1]);
        *tensor.meta = Metadata::new(by_groups, strides);
        tensor
    }

    /// Where a result with the shape and dtype of `x`, the first input, is written.
    pub fn output(self, x: &CubeTensor) -> Output {
        match self {
            Self::Channels => Output::replacing_strided(x, 0, || empty_in_order(x, x.shape(), x.dtype, true)),
            _ => Output::replacing(x, 0),
        }
    }

    /// See [`view`](Self::view).
    pub fn view_output(self, output: &Output, norm: &RowNorm) -> Output {
        output.as_view(|tensor| self.view(tensor, norm))
    }
}

/// Whether the channels of all groups, the second axis, are the nearest in memory.
pub(super) fn lies_along_channels(x: &CubeTensor, norm: &RowNorm) -> bool {
    let shape = x.meta.shape();
    norm.inner > 1 && shape.num_dims() > 2 && shape[1] == norm.parameters() && channels_last(x)
}

/// The tensor with its parameters as channels: along them, or in order.
pub(super) fn by_parameters(tensor: CubeTensor, along_channels: bool, norm: &RowNorm) -> ByChannels {
    if along_channels {
        return ByChannels::along_channels(tensor);
    }
    let (channels, inner) = (norm.parameters(), norm.inner);
    let repeats = tensor.meta.num_elements() / (channels * inner).max(1);
    ByChannels::in_order(tensor, Channels { repeats, channels, inner })
}
