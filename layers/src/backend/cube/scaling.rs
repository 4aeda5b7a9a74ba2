//! The product of a tensor and one factor, in one pass and in place. This kernel is taken with fusion, too: the tensor was kept, so
//! there is nothing to fuse the product with.
use super::{Grid, Output, in_memory_order, launch, vector_size};
use crate::backend::Scaling;
use burn::backend::cubecl::dtype_to_storage_type;
use burn::backend::{Backend, Cube, backend_extension, tensor::FloatTensor};
use burn_cubecl::CubeBackend;
use burn_cubecl::cubecl::{
    self,
    ir::ElemType,
    prelude::*,
    std::tensor::layout::linear::{LinearView, LinearViewMut},
};

impl Scaling for Cube {
    fn scale(x: FloatTensor<Self>, factor: FloatTensor<Self>, by: f64) -> FloatTensor<Self> {
        Self::cube_scale(x, factor, by)
    }
}

#[backend_extension(Cube, Fusion: cfg(feature = "fusion"))]
pub trait ScalingCube: Backend {
    /// See [`Scaling::scale`].
    #[fusion(dtype = x, shape = x)]
    fn cube_scale(x: FloatTensor<Self>, factor: FloatTensor<Self>, by: f64) -> FloatTensor<Self>;
}

impl ScalingCube for CubeBackend {
    fn cube_scale(x: FloatTensor<Self>, factor: FloatTensor<Self>, by: f64) -> FloatTensor<Self> {
        let [y] = in_memory_order([x], |[x]| {
            let y = Output::replacing(&x, 0);
            let size = vector_size(&[&x, &y.tensor], usize::MAX);
            if let Some(grid) = Grid::of_units(x.meta.num_elements() / size, &[&x]) {
                let (by, of_factor) = (grid.scalar(by), dtype_to_storage_type(factor.dtype));
                let (x, factor) = (x.into_linear_view(), factor.into_buffer_arg());
                // SAFETY: the kernel compares every position with the shapes.
                unsafe { launch!(scale_kernel, grid, size, x, y.view(), factor, by, grid.dtypes, of_factor) };
            }
            [y.tensor]
        });
        y
    }
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn scale_kernel<T: Float, W: Float, F: Float, N: Size>(
    x: LinearView<'_, Vector<T, N>>,
    mut y: LinearViewMut<'_, Vector<T, N>>,
    factor: &[F],
    by: InputScalar,
    #[define(T, W)] _dtypes: [ElemType; 2],
    #[define(F)] _of_factor: ElemType,
) {
    if !y.is_in_bounds(ABSOLUTE_POS) {
        terminate!();
    }
    let factor = W::cast_from(factor[0]) * by.get::<W>();
    let x = Vector::<W, N>::cast_from(x.read(ABSOLUTE_POS));
    y.write(ABSOLUTE_POS, Vector::cast_from(x * Vector::new(factor)));
}
