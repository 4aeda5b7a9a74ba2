//! Kernels for devices: the product, and both gradients, in one pass each.
//!
//! Only where operations are not fused: fusion makes one kernel of the composition and the operations around it.
use super::GateKernels;
use crate::backend::cube::{Grid, Output, empty, in_memory_order, launch, vector_size};
use crate::ops::smooth::{
    Smooth,
    cube::{Kind, kind, slope, value},
};
use burn::backend::{Cube, TensorMetadata, tensor::FloatTensor};
use burn_cubecl::cubecl::{
    self,
    ir::ElemType,
    prelude::*,
    std::tensor::layout::linear::{LinearView, LinearViewMut},
};
use burn_cubecl::tensor::CubeTensor;

impl GateKernels for Cube {
    fn gate(a: FloatTensor<Self>, b: FloatTensor<Self>, f: Smooth) -> FloatTensor<Self> {
        let [y] = in_memory_order([a, b], |[a, b]| [times_value(a, b, f)]);
        y
    }

    fn gate_backward(
        a: Option<FloatTensor<Self>>,
        b: FloatTensor<Self>,
        f: Smooth,
        dy: FloatTensor<Self>,
        wants_a: bool,
    ) -> [Option<FloatTensor<Self>>; 2] {
        let Some(a) = a else { return [wants_a.then(|| Self::gate(dy, b, f)), None] };
        let [da, db] = in_memory_order([dy, a, b], |[dy, a, b]| {
            let (kind, parameters) = kind(f);
            let db = Output::replacing(&dy, 0);
            // If it is not wanted, nothing is written to it.
            let da = if wants_a { empty(&dy, dy.shape(), dy.dtype) } else { db.tensor.clone() };
            let size = vector_size(&[&dy, &a, &b, &da, &db.tensor], usize::MAX);
            if let Some(grid) = Grid::of_units(dy.meta.num_elements() / size, &[&dy, &a, &b]) {
                let [p, q] = parameters.map(|parameter| grid.scalar(parameter));
                let written = wants_a.then(|| da.clone().into_linear_view());
                // SAFETY: the kernel compares every position with the shapes.
                unsafe {
                    launch!(
                        backward_kernel,
                        grid,
                        size,
                        dy.into_linear_view(),
                        a.into_linear_view(),
                        b.into_linear_view(),
                        db.view(),
                        written.into(),
                        p,
                        q,
                        kind,
                        f.reads_output(),
                        grid.dtypes,
                    );
                }
            }
            [da, db.tensor]
        });
        [wants_a.then_some(da), Some(db)]
    }
}

/// `a * f(b)`
fn times_value(a: CubeTensor, b: CubeTensor, f: Smooth) -> CubeTensor {
    let (kind, parameters) = kind(f);
    let y = Output::replacing(&a, 0);
    let size = vector_size(&[&a, &b, &y.tensor], usize::MAX);
    if let Some(grid) = Grid::of_units(a.meta.num_elements() / size, &[&a, &b]) {
        let [p, q] = parameters.map(|parameter| grid.scalar(parameter));
        let [a, b] = [a, b].map(CubeTensor::into_linear_view);
        // SAFETY: the kernel compares every position with the shapes.
        unsafe { launch!(product_kernel, grid, size, a, b, y.view(), p, q, kind, grid.dtypes) };
    }
    y.tensor
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn product_kernel<T: Float, W: Float, N: Size>(
    a: LinearView<'_, Vector<T, N>>,
    b: LinearView<'_, Vector<T, N>>,
    mut y: LinearViewMut<'_, Vector<T, N>>,
    p: InputScalar,
    q: InputScalar,
    #[comptime] kind: Kind,
    #[define(T, W)] _dtypes: [ElemType; 2],
) {
    if !y.is_in_bounds(ABSOLUTE_POS) {
        terminate!();
    }
    let a = Vector::<W, N>::cast_from(a.read(ABSOLUTE_POS));
    let b = Vector::<W, N>::cast_from(b.read(ABSOLUTE_POS));
    y.write(ABSOLUTE_POS, Vector::cast_from(a * value::<W, N>(b, p.get::<W>(), q.get::<W>(), kind)));
}

/// `f'(b)`
#[cube]
fn gate_slope<W: Float, N: Size>(
    b: Vector<W, N>,
    p: W,
    q: W,
    #[comptime] kind: Kind,
    #[comptime] reads_output: bool,
) -> Vector<W, N> {
    let mut read = b;
    if comptime!(reads_output) {
        read = value::<W, N>(b, p, q, kind);
    }
    slope::<W, N>(read, p, q, kind)
}

/// The gradient of `b`, and of `a` if it is wanted.
#[cube(launch_unchecked, address_type = "dynamic")]
fn backward_kernel<T: Float, W: Float, N: Size>(
    dy: LinearView<'_, Vector<T, N>>,
    a: LinearView<'_, Vector<T, N>>,
    b: LinearView<'_, Vector<T, N>>,
    mut db: LinearViewMut<'_, Vector<T, N>>,
    da: ComptimeOption<LinearViewMut<'_, Vector<T, N>>>,
    p: InputScalar,
    q: InputScalar,
    #[comptime] kind: Kind,
    #[comptime] reads_output: bool,
    #[define(T, W)] _dtypes: [ElemType; 2],
) {
    if !db.is_in_bounds(ABSOLUTE_POS) {
        terminate!();
    }
    let dy = Vector::<W, N>::cast_from(dy.read(ABSOLUTE_POS));
    let a = Vector::<W, N>::cast_from(a.read(ABSOLUTE_POS));
    let b = Vector::<W, N>::cast_from(b.read(ABSOLUTE_POS));
    let (p, q) = (p.get::<W>(), q.get::<W>());
    #[comptime]
    if let ComptimeOption::Some(mut da) = da {
        da.write(ABSOLUTE_POS, Vector::cast_from(dy * value::<W, N>(b, p, q, kind)));
    }
    db.write(ABSOLUTE_POS, Vector::cast_from(dy * a * gate_slope::<W, N>(b, p, q, kind, reads_output)));
}
