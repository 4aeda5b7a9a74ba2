//! How kernels are launched: how many cubes of how many units, with vectors of which length and indices of which type.
use crate::backend::wide;
use burn::backend::cubecl::dtype_to_storage_type;
use burn::tensor::DType;
use burn_cubecl::cubecl::{
    calculate_cube_count_elemwise,
    client::Client,
    ir::{ElemType, UIntKind},
    prelude::*,
    tensor_vector_size_parallel,
};
use burn_cubecl::tensor::CubeTensor;

/// What every launch needs besides the arguments of its kernel: see [`launch`].
pub(crate) struct Grid {
    pub client: Client,
    pub count: CubeCount,
    pub dim: CubeDim,
    /// The type of indices.
    pub addresses: AddressType,
    /// The type of the elements, and the one that kernels compute in.
    pub dtypes: [ElemType; 2],
}

/// Launches a kernel: `launch!(kernel, grid, arguments...)`. Kernels with vectors take their length as the first argument.
///
/// # Safety
///
/// The kernel must compare every position with the shapes: nothing else does.
macro_rules! launch {
    ($kernel:ident, $grid:expr, $($argument:expr),+ $(,)?) => {{
        let grid: &$crate::backend::cube::Grid = &$grid;
        $kernel::launch_unchecked(&grid.client, grid.count.clone(), grid.dim, grid.addresses, $($argument),+)
    }};
}
pub(crate) use launch;

impl Grid {
    /// At least so many units, or `None` for no units. The kernel reads or writes the tensors; the first one has the dtype of its elements.
    pub fn of_units(number: usize, tensors: &[&CubeTensor]) -> Option<Self> {
        (number > 0).then(|| Self::new(units(&tensors[0].client, number), tensors))
    }

    /// At least so many cubes of so many units: kernels compare [`CUBE_POS`]. For the tensors see [`of_units`](Self::of_units).
    pub fn of_cubes(number: usize, units: usize, tensors: &[&CubeTensor]) -> Self {
        // Every device takes grids with sides up to this.
        const SIDE: usize = 1 << 15;
        let count = CubeCount::new_2d(number.min(SIDE) as u32, number.div_ceil(SIDE) as u32);
        Self::new((count, CubeDim::new_1d(units as u32)), tensors)
    }

    /// For rows that so many units reduce each: one unit, or a cube of them. `None` for no rows.
    pub fn of_rows(rows: usize, units: usize, tensors: &[&CubeTensor]) -> Option<Self> {
        match units {
            1 => Self::of_units(rows, tensors),
            _ => (rows > 0).then(|| Self::of_cubes(rows, units, tensors)),
        }
    }

    fn new((count, dim): (CubeCount, CubeDim), tensors: &[&CubeTensor]) -> Self {
        let (client, dtypes) = (tensors[0].client.clone(), types(tensors[0].dtype));
        Self { client, count, dim, addresses: address_type(tensors), dtypes }
    }

    /// A number in the type that kernels compute in.
    pub fn scalar(&self, number: f64) -> InputScalar {
        InputScalar::new(number, self.dtypes[1])
    }
}

/// As many cubes as have the given number of units, and their size.
fn units(client: &Client, units: usize) -> (CubeCount, CubeDim) {
    let dim = CubeDim::new(client, units);
    (calculate_cube_count_elemwise(client, units, dim), dim)
}

/// A type, and the one that kernels compute in.
pub(crate) fn types(dtype: DType) -> [ElemType; 2] {
    [dtype, wide(dtype)].map(dtype_to_storage_type)
}

/// The longest vectors, up to `most` elements, in which all tensors can be read along their last axis.
pub(crate) fn vector_size(tensors: &[&CubeTensor], most: usize) -> usize {
    let longest = |tensor: &&CubeTensor| {
        let (shape, strides) = (tensor.meta.shape(), tensor.meta.strides());
        let last = shape.num_dims() - 1;
        // Vectors of overlapping windows may begin anywhere.
        let begins_with_vectors =
            |size: usize| (0..last).all(|axis| shape[axis] == 1 || strides[axis].is_multiple_of(size));
        let sizes = tensor.client.io_optimized_vector_sizes(tensor.dtype.size());
        let sizes = sizes.filter(|&size| size <= most && begins_with_vectors(size));
        tensor_vector_size_parallel(sizes, shape, strides, last)
    };
    tensors.iter().map(longest).min().unwrap_or(1)
}

/// The type of indices that reach all elements.
fn address_type(tensors: &[&CubeTensor]) -> AddressType {
    let needed = |tensor: &&CubeTensor| {
        let divides_fast = tensor.client.properties().features.supports_type(UIntKind::U64);
        // An expanded tensor has more elements than its memory.
        tensor.required_address_type().max(address_of(tensor.meta.num_elements(), divides_fast))
    };
    tensors.iter().map(needed).max().unwrap_or_default()
}

/// The type of indices for so many elements. CubeCL's fast division, which it uses where there are integers of 64 bits, is wrong for 32
/// bits above 2^31: it adds the dividend to the high half of a product.
fn address_of(elements: usize, divides_fast: bool) -> AddressType {
    if divides_fast { AddressType::from_len_signed(elements) } else { AddressType::from_len(elements) }
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
