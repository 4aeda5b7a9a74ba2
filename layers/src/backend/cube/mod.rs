//! Kernels for devices, written once for all runtimes of CubeCL.
//!
//! A kernel of a room is a method of an extension trait for [`CubeBackend`](burn_cubecl::CubeBackend), which Burn's macro also makes an operation of
//! the stream where operations are fused; there it is a barrier, so each room says which it has and why. Kernels take tensors with
//! any strides, read them in vectors where they lie in memory so, and compute in `wide` numbers.
use burn::backend::TensorMetadata;
use burn::backend::cubecl::dtype_to_storage_type;
use burn::tensor::{DType, Shape};
use burn_cubecl::cubecl::{
    self, calculate_cube_count_elemwise,
    ir::{ElemType, UIntKind},
    prelude::*,
    std::tensor::layout::linear::LinearViewLaunch,
    tensor_vector_size_parallel,
};
use burn_cubecl::ops::numeric::empty_device_contiguous_dtype;
use burn_cubecl::tensor::CubeTensor;

mod axis_map;
mod capacity;
pub(crate) mod channels;
pub(crate) mod groups;
mod mask;
mod math;
mod order;
mod product;
mod put;
pub(crate) mod random;
mod reduce;
mod scaling;
mod volume;

pub use mask::CubeMask;

pub(crate) use capacity::assert_turns;
#[cfg(feature = "fusion")]
pub(crate) use mask::described_words;
pub(crate) use mask::{GROUP, TURNS, bit, draw_seed, empty_words, group_of_unit, is_set, join, split, words};
pub(crate) use math::{constant, log_1p_exp, number, sigmoid};
pub(crate) use order::in_memory_order;
pub(crate) use product::product;
pub(crate) use put::{Put, put};
pub(crate) use reduce::{
    FEWEST_UNITS, Pair, cubes, grid_of_rows, max_of_vector, max_over_units, row_of_unit, sum_of_vector,
    sum_over_units, unit_of_row, units_of_row,
};
pub(crate) use volume::{Place, Volume, address, channels_last, empty_in_order, place, volume};

/// A tensor whose elements nobody has written, without gaps: kernels may read its rows as one.
pub(crate) fn empty(like: &CubeTensor, shape: Shape, dtype: DType) -> CubeTensor {
    empty_device_contiguous_dtype(like.client.clone(), like.device.clone(), shape, dtype)
}

/// Where a kernel writes a result of the shape and dtype of one of its inputs.
pub(crate) struct Output {
    pub tensor: CubeTensor,
    /// The number of the input whose place it takes.
    replaces: Option<usize>,
}

impl Output {
    /// In the place of the input, which has this number, if nobody else holds it and its elements lie in memory in their order.
    pub fn replacing(x: &CubeTensor, input: usize) -> Self {
        Self::replacing_if(lies_in_order, x, input)
    }

    /// The same if there are no gaps between its elements: where the result stays.
    pub fn replacing_contiguous(x: &CubeTensor, input: usize) -> Self {
        Self::replacing_if(CubeTensor::is_contiguous, x, input)
    }

    fn replacing_if(lies_right: impl FnOnce(&CubeTensor) -> bool, x: &CubeTensor, input: usize) -> Self {
        match may_be_replaced(x) && lies_right(x) {
            true => Self { tensor: x.clone(), replaces: Some(input) },
            false => Self { tensor: empty(x, x.shape(), x.dtype), replaces: None },
        }
    }

    /// The same wherever the input lies; otherwise in a new tensor.
    pub fn replacing_strided(x: &CubeTensor, input: usize, new: impl FnOnce() -> CubeTensor) -> Self {
        match may_be_replaced(x) && (x.is_contiguous() || x.is_nonoverlapping()) {
            true => Self { tensor: x.clone(), replaces: Some(input) },
            false => Self { tensor: new(), replaces: None },
        }
    }

    /// The same; a new tensor lies in memory in the order of the input: after a convolution, whose result has its channels last
    /// there, the next one need not copy it.
    pub fn alike(x: &CubeTensor, input: usize) -> Self {
        Self::replacing_strided(x, input, || order::empty_like(x))
    }

    /// With other axes, which the input is read by, too.
    pub fn as_view(&self, view: impl FnOnce(CubeTensor) -> CubeTensor) -> Self {
        Self { tensor: view(self.tensor.clone()), replaces: self.replaces }
    }

    /// For the launch.
    pub fn view(&self) -> LinearViewLaunch {
        match self.replaces {
            Some(input) => self.tensor.as_linear_view_alias(input),
            None => self.tensor.clone().into_linear_view(),
        }
    }
}

/// Whether nobody else holds the tensor, and it is no small part of its memory, which would live as long as the result.
fn may_be_replaced(x: &CubeTensor) -> bool {
    const SMALL: usize = 1 << 10;
    let bytes = x.meta.num_elements() * x.dtype.size();
    x.can_mut() && bytes > 0 && x.handle.size() <= 2 * bytes.max(SMALL) as u64
}

/// Whether the elements lie in memory in their order, with gaps or without: on CUDA, Burn lets rows begin at a multiple of a power of
/// two, up to 512 bytes. Not of an empty tensor.
fn lies_in_order(x: &CubeTensor) -> bool {
    let axes = x.meta.shape().iter().zip(x.meta.strides().iter()).filter(|(len, _)| **len > 1);
    x.is_contiguous() || (x.is_nonoverlapping() && axes.map(|(_, stride)| *stride).is_sorted_by(|a, b| a > b))
}

/// The tensor to write to: a copy, if others hold it.
pub(crate) fn writable(tensor: CubeTensor) -> CubeTensor {
    if tensor.can_mut() { tensor } else { tensor.copy() }
}

/// The longest vectors, up to `most` elements, in which all tensors can be read along their last axis.
pub(crate) fn vector_size(tensors: &[&CubeTensor], most: usize) -> usize {
    let longest = |tensor: &&CubeTensor| {
        let (shape, strides) = (tensor.meta.shape(), tensor.meta.strides());
        let last = shape.num_dims() - 1;
        // Of overlapping windows vectors may begin anywhere.
        let begins_with_vectors =
            |size: usize| (0..last).all(|axis| shape[axis] == 1 || strides[axis].is_multiple_of(size));
        let sizes = tensor.client.io_optimized_vector_sizes(tensor.dtype.size());
        let sizes = sizes.filter(|&size| size <= most && begins_with_vectors(size));
        tensor_vector_size_parallel(sizes, shape, strides, last)
    };
    tensors.iter().map(longest).min().unwrap_or(1)
}

/// The type of indices that reach all elements.
pub(crate) fn address_type(tensors: &[&CubeTensor]) -> AddressType {
    let needed = |tensor: &&CubeTensor| {
        let divides_fast = tensor.client.properties().features.supports_type(UIntKind::U64);
        // An expanded tensor has more elements than its memory.
        tensor.required_address_type().max(address_of(tensor.meta.num_elements(), divides_fast))
    };
    tensors.iter().map(needed).max().unwrap_or_default()
}

/// Of so many elements. CubeCL's fast division, which it has where there are integers of 64 bits, is wrong for 32 bits above 2^31: it
/// adds the dividend to the high half of a product.
fn address_of(elements: usize, divides_fast: bool) -> AddressType {
    if divides_fast { AddressType::from_len_signed(elements) } else { AddressType::from_len(elements) }
}

/// As many cubes as have the given number of units, and their size.
pub(crate) fn units(client: &cubecl::client::Client, units: usize) -> (CubeCount, CubeDim) {
    let dim = CubeDim::new(client, units);
    (calculate_cube_count_elemwise(client, units, dim), dim)
}

/// A type, and the one that kernels compute in.
pub(crate) fn types(dtype: DType) -> [ElemType; 2] {
    [dtype, super::wide(dtype)].map(dtype_to_storage_type)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn indices_are_wide_where_a_fast_division_would_overflow() {
        let (most, more) = (i32::MAX as usize, 1 << 31);
        assert_eq!(
            [most, more].map(|elements| address_of(elements, true)),
            [AddressType::U32, AddressType::U64]
        );
        assert_eq!(address_of(more, false), AddressType::U32);
    }
}
