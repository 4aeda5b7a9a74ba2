//! A kernel for devices: a product with factors of low rank, scaled and added in one pass, and in place.
//!
//! | | fused | not fused |
//! | --- | --- | --- |
//! | `y + scale u v`, of a rank up to [`MOST_RANK`] | one kernel of ours: Burn joins no sum with a product | one kernel of ours |
//! | of a higher rank | a product of matrices, which has tiles, and Burn's sum | the same |
use super::{LoraKernels, composed_product};
use crate::backend::cube::{Output, address_type, types, units};
use burn::backend::{Backend, Cube, TensorMetadata, backend_extension, tensor::FloatTensor};
use burn_cubecl::CubeBackend;
use burn_cubecl::cubecl::{
    self,
    ir::ElemType,
    prelude::*,
    std::{
        FastDivmod,
        tensor::layout::linear::{LinearView, LinearViewMut},
    },
};
use burn_cubecl::kernel::into_contiguous;

/// Every element reads a row of `u` and a column of `v`, from caches: of more than these a product by tiles reads less.
const MOST_RANK: usize = 32;

impl LoraKernels for Cube {
    fn add_scaled_product(
        y: FloatTensor<Self>,
        u: FloatTensor<Self>,
        v: FloatTensor<Self>,
        scale: f64,
    ) -> FloatTensor<Self> {
        match v.shape()[0] {
            ..=MOST_RANK => Self::cube_add_scaled_product(y, u, v, scale),
            _ => composed_product::<Self>(y, u, v, scale),
        }
    }
}

#[backend_extension(Cube, Fusion: cfg(feature = "fusion"))]
pub trait LoraCube: Backend {
    /// See [`LoraKernels::add_scaled_product`].
    #[fusion(dtype = y, shape = y)]
    fn cube_add_scaled_product(
        y: FloatTensor<Self>,
        u: FloatTensor<Self>,
        v: FloatTensor<Self>,
        scale: f64,
    ) -> FloatTensor<Self>;
}

impl LoraCube for CubeBackend {
    fn cube_add_scaled_product(
        y: FloatTensor<Self>,
        u: FloatTensor<Self>,
        v: FloatTensor<Self>,
        scale: f64,
    ) -> FloatTensor<Self> {
        let ([rank, columns], len) = (v.shape().dims(), y.meta.num_elements());
        let sum = Output::replacing(&y, 0);
        if len == 0 {
            return sum.tensor;
        }
        let u = into_contiguous(u);
        let [of_rank, of_column] = [v.meta.strides()[0], v.meta.strides()[1]];
        let (count, dim) = units(&y.client, len);
        let (client, at, dtypes) = (y.client.clone(), address_type(&[&y, &u, &v]), types(y.dtype));
        // SAFETY: the kernel compares every position with the shapes.
        unsafe {
            add_product_kernel::launch_unchecked(
                &client,
                count,
                dim,
                at,
                y.into_linear_view(),
                sum.view(),
                u.into_buffer_arg(),
                v.into_buffer_arg(),
                rank,
                of_rank,
                of_column,
                columns,
                InputScalar::new(scale, dtypes[1]),
                dtypes,
            );
        }
        sum.tensor
    }
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn add_product_kernel<T: Float, W: Float>(
    y: LinearView<'_, T>,
    mut sum: LinearViewMut<'_, T>,
    u: &[T],
    v: &[T],
    rank: usize,
    of_rank: usize,
    of_column: usize,
    columns: FastDivmod<usize>,
    scale: InputScalar,
    #[define(T, W)] _dtypes: [ElemType; 2],
) {
    if !sum.is_in_bounds(ABSOLUTE_POS) {
        terminate!();
    }
    let (row, column) = columns.div_mod(ABSOLUTE_POS);
    let mut product = W::new(0.0);
    for k in 0..rank {
        product += W::cast_from(u[row * rank + k]) * W::cast_from(v[k * of_rank + column * of_column]);
    }
    let y = W::cast_from(y.read(ABSOLUTE_POS));
    sum.write(ABSOLUTE_POS, T::cast_from(y + scale.get::<W>() * product));
}
