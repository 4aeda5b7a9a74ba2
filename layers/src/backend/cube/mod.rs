//! Kernels for devices, written once for all runtimes of CubeCL.
//!
//! A kernel of a room is a method of an extension trait for [`CubeBackend`], which Burn's macro also makes an operation of
//! the stream where operations are fused; there it is a barrier, so each room says which it has and why. Kernels take tensors with
//! any strides, read them in vectors where they lie in memory so, and compute in [`wide`](super::wide) numbers.
use burn::backend::TensorMetadata;
use burn::backend::cubecl::dtype_to_storage_type;
use burn::tensor::{DType, Shape};
use burn_cubecl::cubecl::{
    self, calculate_cube_count_elemwise, ir::ElemType, prelude::*,
    std::tensor::layout::linear::LinearViewLaunch, tensor_vector_size_parallel,
};
use burn_cubecl::ops::numeric::empty_device_dtype;
use burn_cubecl::tensor::CubeTensor;

pub(crate) mod channels;
mod mask;
mod order;
mod random;
mod reduce;

pub use mask::CubeMask;
pub(crate) use mask::{GROUP, TURNS, bit, group_of_unit, is_set, join, split, words};
pub(crate) use order::in_memory_order;
pub(crate) use reduce::{Pair, cubes, sum_of_vector, sum_over_cube, units_of_row};

/// A tensor whose elements nobody has written.
pub(crate) fn empty(like: &CubeTensor, shape: Shape, dtype: DType) -> CubeTensor {
    empty_device_dtype(like.client.clone(), like.device.clone(), shape, dtype)
}

/// Where a kernel writes a result of the shape and dtype of one of its inputs.
pub(crate) struct Output {
    pub tensor: CubeTensor,
    /// The number of the input whose place it takes.
    replaces: Option<usize>,
}

impl Output {
    /// In the place of the input, which has this number, if nobody else holds it.
    pub fn replacing(x: &CubeTensor, input: usize) -> Self {
        if x.can_mut() && x.is_contiguous() && x.is_contiguous_buffer() {
            Self { tensor: x.clone(), replaces: Some(input) }
        } else {
            Self { tensor: empty(x, x.shape(), x.dtype), replaces: None }
        }
    }

    /// For the launch.
    pub fn view(&self) -> LinearViewLaunch {
        match self.replaces {
            Some(input) => self.tensor.as_linear_view_alias(input),
            None => self.tensor.clone().into_linear_view(),
        }
    }
}

/// The longest vectors, up to `most` elements, in which all tensors can be read along their last axis.
pub(crate) fn vector_size(tensors: &[&CubeTensor], most: usize) -> usize {
    let longest = |tensor: &&CubeTensor| {
        let sizes = tensor.client.io_optimized_vector_sizes(tensor.dtype.size()).filter(|&size| size <= most);
        tensor_vector_size_parallel(
            sizes,
            tensor.meta.shape(),
            tensor.meta.strides(),
            tensor.meta.num_dims() - 1,
        )
    };
    tensors.iter().map(longest).min().unwrap_or(1)
}

/// The type of indices that reach all elements.
pub(crate) fn address_type(tensors: &[&CubeTensor]) -> AddressType {
    tensors.iter().map(|tensor| tensor.required_address_type()).max().unwrap_or_default()
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
