//! Kernels for devices: one pass for the output, and one over its gradient for the gradient of the input.
//!
//! Where operations are fused, the output is Burn's, fused with the operations around it.
use super::PReluKernels;
#[cfg(not(feature = "fusion"))]
use crate::backend::cube::in_memory_order;
use crate::backend::cube::{
    CubeMask, GROUP, Grid, Output, TURNS, bit, group_of_unit, is_set, launch, split, vector_size, words,
};
use burn::backend::{
    Backend, Cube, backend_extension,
    tensor::{FloatTensor, IntTensor},
};
use burn_cubecl::CubeBackend;
use burn_cubecl::cubecl::{
    self,
    ir::ElemType,
    prelude::*,
    std::tensor::layout::linear::{LinearView, LinearViewMut},
};

impl PReluKernels for Cube {
    #[cfg(not(feature = "fusion"))]
    fn prelu_of(x: FloatTensor<Self>, alpha: FloatTensor<Self>) -> FloatTensor<Self> {
        let [y] = in_memory_order([x, alpha], |[x, alpha]| {
            let y = Output::replacing(&x, 0);
            let size = vector_size(&[&x, &y.tensor], GROUP);
            if let Some(grid) = Grid::of_units(x.meta.num_elements() / size, &[&x]) {
                let alpha = alpha.into_linear_view_like(&y.tensor);
                let x = x.into_linear_view();
                // SAFETY: the kernel compares every position with the shapes.
                unsafe { launch!(value_kernel, grid, size, x, y.view(), alpha, grid.dtypes) };
            }
            [y.tensor]
        });
        y
    }

    fn prelu_x_backward(
        mask: &CubeMask,
        alpha: FloatTensor<Self>,
        dy: FloatTensor<Self>,
    ) -> FloatTensor<Self> {
        Self::cube_prelu_x_backward(dy, alpha, mask.written())
    }

    fn prelu_x_backward_of(
        x: FloatTensor<Self>,
        alpha: FloatTensor<Self>,
        dy: FloatTensor<Self>,
    ) -> FloatTensor<Self> {
        Self::cube_prelu_x_backward_of(dy, alpha, x)
    }
}

#[backend_extension(Cube, Fusion: cfg(feature = "fusion"))]
pub trait PReluCube: Backend {
    /// See [`PReluKernels::prelu_x_backward`].
    #[fusion(dtype = dy, shape = dy)]
    fn cube_prelu_x_backward(
        dy: FloatTensor<Self>,
        alpha: FloatTensor<Self>,
        packed: IntTensor<Self>,
    ) -> FloatTensor<Self>;

    /// See [`PReluKernels::prelu_x_backward_of`].
    #[fusion(dtype = dy, shape = dy)]
    fn cube_prelu_x_backward_of(
        dy: FloatTensor<Self>,
        alpha: FloatTensor<Self>,
        x: FloatTensor<Self>,
    ) -> FloatTensor<Self>;
}

impl PReluCube for CubeBackend {
    fn cube_prelu_x_backward(
        dy: FloatTensor<Self>,
        alpha: FloatTensor<Self>,
        packed: IntTensor<Self>,
    ) -> FloatTensor<Self> {
        let dx = Output::replacing(&dy, 0);
        let size = vector_size(&[&dy, &dx.tensor], GROUP);
        if let Some(grid) = Grid::of_units(words(dy.meta.num_elements()), &[&dy]) {
            let alpha = alpha.into_linear_view_like(&dx.tensor);
            let (dy, packed) = (dy.into_linear_view(), packed.into_linear_view());
            // SAFETY: the kernel compares every position with the shapes.
            unsafe { launch!(x_backward_kernel, grid, size, dy, dx.view(), alpha, packed, grid.dtypes) };
        }
        dx.tensor
    }

    fn cube_prelu_x_backward_of(
        dy: FloatTensor<Self>,
        alpha: FloatTensor<Self>,
        x: FloatTensor<Self>,
    ) -> FloatTensor<Self> {
        let dx = Output::replacing(&dy, 0);
        let size = vector_size(&[&dy, &x, &dx.tensor], GROUP);
        if let Some(grid) = Grid::of_units(dy.meta.num_elements() / size, &[&dy, &x]) {
            let alpha = alpha.into_linear_view_like(&dx.tensor);
            let (dy, x) = (dy.into_linear_view(), x.into_linear_view());
            // SAFETY: the kernel compares every position with the shapes.
            unsafe { launch!(x_backward_of_kernel, grid, size, dy, dx.view(), alpha, x, grid.dtypes) };
        }
        dx.tensor
    }
}

/// The slopes of the elements of a vector, read one by one since they do not lie along the last axis.
#[cube]
fn slopes<T: Float, W: Float, N: Size>(alpha: &LinearView<'_, T>, vector: usize) -> Vector<W, N> {
    let size = N::value().comptime();
    let mut slopes = Vector::<W, N>::new(W::new(0.0));
    #[unroll]
    for i in 0..size {
        slopes.insert(i, W::cast_from(alpha.read(vector * size + i)));
    }
    slopes
}

#[cfg(not(feature = "fusion"))]
#[cube(launch_unchecked, address_type = "dynamic")]
fn value_kernel<T: Float, W: Float, N: Size>(
    x: LinearView<'_, Vector<T, N>>,
    mut y: LinearViewMut<'_, Vector<T, N>>,
    alpha: LinearView<'_, T>,
    #[define(T, W)] _dtypes: [ElemType; 2],
) {
    if !y.is_in_bounds(ABSOLUTE_POS) {
        terminate!();
    }
    let x = Vector::<W, N>::cast_from(x.read(ABSOLUTE_POS));
    let below = x.less_than(&Vector::new(W::new(0.0)));
    let scaled = x * slopes::<T, W, N>(&alpha, ABSOLUTE_POS);
    y.write(ABSOLUTE_POS, Vector::cast_from(select_many(below, scaled, x)));
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn x_backward_kernel<T: Float, W: Float, N: Size>(
    dy: LinearView<'_, Vector<T, N>>,
    mut dx: LinearViewMut<'_, Vector<T, N>>,
    alpha: LinearView<'_, T>,
    packed: LinearView<'_, u32>,
    #[define(T, W)] _dtypes: [ElemType; 2],
) {
    if !packed.is_in_bounds(ABSOLUTE_POS) {
        terminate!();
    }
    let lanes = split::<N>(packed.read(ABSOLUTE_POS));
    let size = N::value().comptime();
    let vectors = comptime!(GROUP / size);
    #[unroll]
    for turn in 0..TURNS {
        let group = group_of_unit(ABSOLUTE_POS, turn);
        #[unroll]
        for part in 0..vectors {
            let at = group * vectors + part;
            if dx.is_in_bounds(at) {
                let slopes = slopes::<T, W, N>(&alpha, at);
                let set = is_set::<N>(lanes, comptime!(bit(turn, part, size)));
                let dy = Vector::<W, N>::cast_from(dy.read(at));
                dx.write(at, Vector::cast_from(select_many(set, dy, dy * slopes)));
            }
        }
    }
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn x_backward_of_kernel<T: Float, W: Float, N: Size>(
    dy: LinearView<'_, Vector<T, N>>,
    mut dx: LinearViewMut<'_, Vector<T, N>>,
    alpha: LinearView<'_, T>,
    x: LinearView<'_, Vector<T, N>>,
    #[define(T, W)] _dtypes: [ElemType; 2],
) {
    if !dx.is_in_bounds(ABSOLUTE_POS) {
        terminate!();
    }
    let below = Vector::<W, N>::cast_from(x.read(ABSOLUTE_POS)).less_than(&Vector::new(W::new(0.0)));
    let dy = Vector::<W, N>::cast_from(dy.read(ABSOLUTE_POS));
    let slopes = slopes::<T, W, N>(&alpha, ABSOLUTE_POS);
    dx.write(ABSOLUTE_POS, Vector::cast_from(select_many(below, dy * slopes, dy)));
}
