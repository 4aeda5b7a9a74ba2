//! Kernels for devices: a product with factors of low rank, scaled and added in one pass, and in place, in which every column may
//! be multiplied by a factor and get a bias; and one that scales the gradients of both factors.
//!
//! | | fused | not fused |
//! | --- | --- | --- |
//! | `(y + scale u v) * factor + bias`, of a rank up to [`MOST_RANK`] | one kernel of ours: Burn joins no sum with a product | one kernel of ours |
//! | of a higher rank | a product of matrices, which has tiles, and Burn's sum and product | the same |
//! | `scale` times the gradients of both factors | Burn joins it with their products | one kernel of ours |
use super::{LoraKernels, composed_product, finished};
use crate::backend::cube::{Output, address_type, types, units};
use crate::ops::MaybeTensor;
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
    const DEQUANTIZES_WHOLE: bool = true;
    const FINISHES: bool = true;

    fn add_scaled_product(
        y: FloatTensor<Self>,
        u: FloatTensor<Self>,
        v: FloatTensor<Self>,
        scale: f64,
    ) -> FloatTensor<Self> {
        Self::adapt(y, u, v, scale, None, None)
    }

    fn adapt(
        y: FloatTensor<Self>,
        u: FloatTensor<Self>,
        v: FloatTensor<Self>,
        scale: f64,
        factor: Option<FloatTensor<Self>>,
        bias: Option<FloatTensor<Self>>,
    ) -> FloatTensor<Self> {
        let dtype = y.dtype();
        let are_alike = factor.iter().chain(&bias).all(|row| row.dtype() == dtype);
        match v.shape()[0] {
            ..=MOST_RANK if are_alike => Self::cube_adapt(y, u, v, scale, factor.into(), bias.into()),
            _ => finished::<Self>(composed_product::<Self>(y, u, v, scale), factor, bias),
        }
    }

    // Burn joins the scale with the product that it follows.
    #[cfg(not(feature = "fusion"))]
    fn scale_both([a, b]: [FloatTensor<Self>; 2], scale: f64) -> [FloatTensor<Self>; 2] {
        let (of_a, of_b) = (Output::replacing(&a, 0), Output::replacing(&b, 1));
        let (count, dim) = units(&a.client, a.meta.num_elements().max(b.meta.num_elements()));
        let (client, at, dtypes) = (a.client.clone(), address_type(&[&a, &b]), types(a.dtype));
        // SAFETY: the kernel compares every position with the shapes.
        unsafe {
            scale_both_kernel::launch_unchecked(
                &client,
                count,
                dim,
                at,
                a.into_linear_view(),
                b.into_linear_view(),
                of_a.view(),
                of_b.view(),
                InputScalar::new(scale, dtypes[1]),
                dtypes,
            );
        }
        [of_a.tensor, of_b.tensor]
    }
}

#[backend_extension(Cube, Fusion: cfg(feature = "fusion"))]
pub trait LoraCube: Backend {
    /// See [`LoraKernels::adapt`].
    #[fusion(dtype = y, shape = y)]
    fn cube_adapt(
        y: FloatTensor<Self>,
        u: FloatTensor<Self>,
        v: FloatTensor<Self>,
        scale: f64,
        #[extension_type] factor: MaybeTensor<Self>,
        #[extension_type] bias: MaybeTensor<Self>,
    ) -> FloatTensor<Self>;
}

impl LoraCube for CubeBackend {
    fn cube_adapt(
        y: FloatTensor<Self>,
        u: FloatTensor<Self>,
        v: FloatTensor<Self>,
        scale: f64,
        factor: MaybeTensor<Self>,
        bias: MaybeTensor<Self>,
    ) -> FloatTensor<Self> {
        let ([rank, columns], len) = (v.shape().dims(), y.meta.num_elements());
        let sum = Output::replacing(&y, 0);
        if len == 0 {
            return sum.tensor;
        }
        let u = into_contiguous(u);
        let [factor, bias] =
            [factor, bias].map(|row| row.into_option().map(|row| into_contiguous(row).into_buffer_arg()));
        let [of_rank, of_column] = [v.meta.strides()[0], v.meta.strides()[1]];
        let (count, dim) = units(&y.client, len);
        let (client, at, dtypes) = (y.client.clone(), address_type(&[&y, &u, &v]), types(y.dtype));
        // SAFETY: the kernel compares every position with the shapes.
        unsafe {
            adapt_kernel::launch_unchecked(
                &client,
                count,
                dim,
                at,
                y.into_linear_view(),
                sum.view(),
                u.into_buffer_arg(),
                v.into_buffer_arg(),
                factor.into(),
                bias.into(),
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
fn adapt_kernel<T: Float, W: Float>(
    y: LinearView<'_, T>,
    mut sum: LinearViewMut<'_, T>,
    u: &[T],
    v: &[T],
    factor: ComptimeOption<&[T]>,
    bias: ComptimeOption<&[T]>,
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
    let factor: ComptimeOption<W> = factor.as_ref().map(|factor| W::cast_from(factor[column]));
    let bias: ComptimeOption<W> = bias.as_ref().map(|bias| W::cast_from(bias[column]));
    let y = W::cast_from(y.read(ABSOLUTE_POS)) + scale.get::<W>() * product;
    let y = y * factor.unwrap_or(W::new(1.0)) + bias.unwrap_or(W::new(0.0));
    sum.write(ABSOLUTE_POS, T::cast_from(y));
}

#[cfg(not(feature = "fusion"))]
#[cube(launch_unchecked, address_type = "dynamic")]
fn scale_both_kernel<T: Float, W: Float>(
    a: LinearView<'_, T>,
    b: LinearView<'_, T>,
    mut of_a: LinearViewMut<'_, T>,
    mut of_b: LinearViewMut<'_, T>,
    scale: InputScalar,
    #[define(T, W)] _dtypes: [ElemType; 2],
) {
    let scale = scale.get::<W>();
    if of_a.is_in_bounds(ABSOLUTE_POS) {
        of_a.write(ABSOLUTE_POS, T::cast_from(scale * W::cast_from(a.read(ABSOLUTE_POS))));
    }
    if of_b.is_in_bounds(ABSOLUTE_POS) {
        of_b.write(ABSOLUTE_POS, T::cast_from(scale * W::cast_from(b.read(ABSOLUTE_POS))));
    }
}
