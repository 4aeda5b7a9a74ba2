//! A kernel for devices: rotates in one pass. It is taken with fusion, too, which makes several kernels of the slices and concatenations
//! of the composition.
use super::{Pairing, RotaryKernels};
use crate::backend::cube::{Grid, Output, launch};
use burn::backend::cubecl::dtype_to_storage_type;
use burn::backend::{Backend, Cube, TensorMetadata, backend_extension, tensor::FloatTensor};
use burn_cubecl::CubeBackend;
use burn_cubecl::cubecl::{
    self,
    ir::ElemType,
    prelude::*,
    std::tensor::layout::linear::{LinearView, LinearViewMut},
};
use burn_cubecl::kernel::into_contiguous;

impl RotaryKernels for Cube {
    fn rotate(
        x: FloatTensor<Self>,
        factors: FloatTensor<Self>,
        pairing: Pairing,
        adjoint: bool,
    ) -> FloatTensor<Self> {
        Self::cube_rotate(x, factors, pairing, adjoint)
    }
}

#[backend_extension(Cube, Fusion: cfg(feature = "fusion"))]
pub trait RotaryCube: Backend {
    /// See [`RotaryKernels::rotate`].
    #[fusion(dtype = x, shape = x)]
    fn cube_rotate(
        x: FloatTensor<Self>,
        factors: FloatTensor<Self>,
        pairing: Pairing,
        adjoint: bool,
    ) -> FloatTensor<Self>;
}

impl RotaryCube for CubeBackend {
    fn cube_rotate(
        x: FloatTensor<Self>,
        factors: FloatTensor<Self>,
        pairing: Pairing,
        adjoint: bool,
    ) -> FloatTensor<Self> {
        let y = Output::replacing(&x, 0);
        let factors = into_contiguous(factors);
        let [positions, features, _] = factors.shape().dims();
        let pairs = x.shape().num_elements() / 2;
        if let Some(grid) = Grid::of_units(pairs, &[&x]) {
            let of_factors = dtype_to_storage_type(factors.dtype);
            // SAFETY: the kernel compares every position with the number of pairs.
            unsafe {
                launch!(
                    rotate_kernel,
                    grid,
                    x.into_linear_view(),
                    y.view(),
                    factors.into_buffer_arg(),
                    pairs,
                    positions,
                    features / 2,
                    pairing == Pairing::Halves,
                    adjoint,
                    grid.dtypes,
                    of_factors,
                );
            }
        }
        y.tensor
    }
}

/// One unit for every pair.
#[cube(launch_unchecked, address_type = "dynamic")]
fn rotate_kernel<T: Float, W: Float, V: Float>(
    x: LinearView<'_, T>,
    mut y: LinearViewMut<'_, T>,
    factors: &[V],
    pairs: usize,
    positions: usize,
    pairs_of_position: usize,
    #[comptime] halves: bool,
    #[comptime] adjoint: bool,
    #[define(T, W)] _dtypes: [ElemType; 2],
    #[define(V)] _of_factors: ElemType,
) {
    let pair = ABSOLUTE_POS;
    if pair >= pairs {
        terminate!();
    }
    let (row, pair_of_row) = (pair / pairs_of_position, pair % pairs_of_position);
    let first = 4 * (row % positions * pairs_of_position + pair_of_row);
    let at_a = if comptime!(halves) { row * 2 * pairs_of_position + pair_of_row } else { 2 * pair };
    let at_b = if comptime!(halves) { at_a + pairs_of_position } else { at_a + 1 };
    let (cos_a, sin_a) = (W::cast_from(factors[first]), W::cast_from(factors[first + 1]));
    let (cos_b, sin_b) = (W::cast_from(factors[first + 2]), W::cast_from(factors[first + 3]));
    let (a, b) = (W::cast_from(x.read(at_a)), W::cast_from(x.read(at_b)));
    if comptime!(adjoint) {
        y.write(at_a, T::cast_from(a * cos_a + b * sin_b));
        y.write(at_b, T::cast_from(b * cos_b - a * sin_a));
    } else {
        y.write(at_a, T::cast_from(a * cos_a - b * sin_a));
        y.write(at_b, T::cast_from(b * cos_b + a * sin_b));
    }
}
