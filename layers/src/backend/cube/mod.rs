//! What kernels for devices share. A kernel is written once for all runtimes of CubeCL.
//!
//! An operation's kernels are methods of an extension trait for [`CubeBackend`](burn_cubecl::CubeBackend). Where operations are fused,
//! Burn's macro also makes each method an operation of the stream. There it is a barrier to fusion, so every `cube` module says which
//! kernels it has and why. Kernels take tensors with any strides, read vectors where memory allows it, and compute in `wide` numbers.
use burn::backend::TensorMetadata;
use burn::tensor::{DType, Shape};
use burn_cubecl::cubecl::std::tensor::layout::linear::LinearViewLaunch;
use burn_cubecl::ops::numeric::empty_device_contiguous_dtype;
use burn_cubecl::tensor::CubeTensor;

mod axis_map;
mod capacity;
pub(crate) mod channels;
pub(crate) mod columns;
mod division;
mod grid;
pub(crate) mod groups;
mod mask;
mod math;
mod order;
mod product;
pub(crate) mod random;
mod reduce;
mod scaling;
mod slice_assign;
mod volume;

pub use mask::CubeMask;

pub(crate) use capacity::{planned_multiprocessors, units_of_cube};
pub(crate) use division::{are_rows_divided, parts_of_sum, units_of_input, units_of_row};
pub(crate) use grid::{Grid, launch, types, vector_size};
#[cfg(feature = "fusion")]
pub(crate) use mask::described_words;
pub(crate) use mask::{TURNS, bit, draw_seed, empty_words, group_of_unit, is_set, join, split, words};
pub(crate) use math::{constant, log_1p_exp, number, sigmoid};
pub(crate) use order::in_memory_order;
pub(crate) use product::product;
pub(crate) use random::GROUP;
pub(crate) use reduce::{
    Pair, max_of_vector, max_over_units, row_of_unit, sum_of_vector, sum_over_units, unit_of_row,
};
pub(crate) use slice_assign::{SliceAssign, assign_slices};
pub(crate) use volume::{Place, Volume, address, channels_last, empty_in_order, place, volume};

/// A tensor without gaps whose elements are not written yet: kernels may read its rows as one.
pub(crate) fn empty(like: &CubeTensor, shape: Shape, dtype: DType) -> CubeTensor {
    empty_device_contiguous_dtype(like.client.clone(), like.device.clone(), shape, dtype)
}

/// Where a kernel writes a result that has the shape and dtype of one of its inputs.
pub(crate) struct Output {
    pub tensor: CubeTensor,
    /// The number of the input whose memory it takes.
    replaces: Option<usize>,
}

impl Output {
    /// In the memory of `x`, the input with this number, if nobody else holds it and its elements lie in memory in their order.
    pub fn replacing(x: &CubeTensor, input: usize) -> Self {
        Self::replacing_if(lies_in_order, x, input)
    }

    /// The same, if there are no gaps between the elements: for results that stay.
    pub fn replacing_contiguous(x: &CubeTensor, input: usize) -> Self {
        Self::replacing_if(CubeTensor::is_contiguous, x, input)
    }

    fn replacing_if(lies_right: impl FnOnce(&CubeTensor) -> bool, x: &CubeTensor, input: usize) -> Self {
        match may_be_replaced(x) && lies_right(x) {
            true => Self { tensor: x.clone(), replaces: Some(input) },
            false => Self { tensor: empty(x, x.shape(), x.dtype), replaces: None },
        }
    }

    /// The same, whatever the strides of the input; otherwise in the new tensor.
    pub fn replacing_strided(x: &CubeTensor, input: usize, new: impl FnOnce() -> CubeTensor) -> Self {
        match may_be_replaced(x) && (x.is_contiguous() || x.is_nonoverlapping()) {
            true => Self { tensor: x.clone(), replaces: Some(input) },
            false => Self { tensor: new(), replaces: None },
        }
    }

    /// The same, where a new tensor lies in memory in the order of the input. The result of a convolution has its channels last in
    /// memory, and the next convolution need not copy it.
    pub fn alike(x: &CubeTensor, input: usize) -> Self {
        Self::replacing_strided(x, input, || order::empty_like(x))
    }

    /// With other axes, by which the input is read, too.
    pub fn as_view(&self, view: impl FnOnce(CubeTensor) -> CubeTensor) -> Self {
        Self { tensor: view(self.tensor.clone()), replaces: self.replaces }
    }

    /// The argument of a launch.
    pub fn view(&self) -> LinearViewLaunch {
        match self.replaces {
            Some(input) => self.tensor.as_linear_view_alias(input),
            None => self.tensor.clone().into_linear_view(),
        }
    }
}

/// Whether nobody else holds the tensor, and it is not just a small part of its memory, which would live as long as the result.
fn may_be_replaced(x: &CubeTensor) -> bool {
    const SMALL: usize = 1 << 10;
    let bytes = x.meta.num_elements() * x.dtype.size();
    x.can_mut() && bytes > 0 && x.handle.size() <= 2 * bytes.max(SMALL) as u64
}

/// Whether the elements lie in memory in their order, with gaps or without: on CUDA, Burn lets rows begin at a multiple of a power of
/// two, up to 512 bytes. Not for an empty tensor.
fn lies_in_order(x: &CubeTensor) -> bool {
    let axes = x.meta.shape().iter().zip(x.meta.strides().iter()).filter(|(len, _)| **len > 1);
    x.is_contiguous() || (x.is_nonoverlapping() && axes.map(|(_, stride)| *stride).is_sorted_by(|a, b| a > b))
}

/// The tensor to write to: a copy if others hold it.
pub(crate) fn writable(tensor: CubeTensor) -> CubeTensor {
    if tensor.can_mut() { tensor } else { tensor.copy() }
}
