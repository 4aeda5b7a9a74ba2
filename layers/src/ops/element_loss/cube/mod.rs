//! Kernels for devices: one pass over the inputs makes losses, slopes, or parts of the sum of losses.
//!
//! | | fused | not fused |
//! | --- | --- | --- |
//! | sum of losses, with the slopes or without | two kernels of ours | two kernels of ours |
//! | losses, slopes, products | Burn's fusion makes one kernel of the composition | one kernel of ours |
#[cfg(not(feature = "fusion"))]
use super::{Argument, Factor};
use super::{ElementLoss, ElementLossKernels};
use crate::backend::cube::{Grid, empty, launch, parts_of_sum, planned_multiprocessors, vector_size};
#[cfg(not(feature = "fusion"))]
use crate::backend::cube::{Output, in_memory_order};
use crate::backend::optional::MaybeTensor;
use crate::backend::wide;
#[cfg(not(feature = "fusion"))]
use burn::backend::cubecl::dtype_to_storage_type;
use burn::backend::{Backend, Cube, TensorMetadata, backend_extension, tensor::FloatTensor};
use burn::tensor::Shape;
use burn_cubecl::CubeBackend;
use burn_cubecl::tensor::CubeTensor;
use kernels::{UNITS, kind, sum_kernel, sum_with_slopes_kernel, total_kernel};
#[cfg(not(feature = "fusion"))]
use kernels::{Wanted, elementwise_kernel, product_kernel};

mod kernels;

impl ElementLossKernels for Cube {
    fn element_loss_sum(
        x: FloatTensor<Self>,
        targets: Option<FloatTensor<Self>>,
        f: ElementLoss,
        scale: f64,
    ) -> FloatTensor<Self> {
        Self::cube_element_loss_sum(x, targets.into(), f, scale)
    }

    fn element_loss_sum_with_slopes(
        x: FloatTensor<Self>,
        targets: Option<FloatTensor<Self>>,
        f: ElementLoss,
        scale: f64,
        slope_scale: f64,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        Self::cube_element_loss_sum_with_slopes(x, targets.into(), f, scale, slope_scale)
    }

    #[cfg(not(feature = "fusion"))]
    fn element_loss(
        x: FloatTensor<Self>,
        targets: Option<FloatTensor<Self>>,
        f: ElementLoss,
    ) -> FloatTensor<Self> {
        elementwise(x, targets, f, Wanted::Losses, ByTensor::Nothing)
    }

    #[cfg(not(feature = "fusion"))]
    fn element_loss_slopes(
        x: FloatTensor<Self>,
        targets: Option<FloatTensor<Self>>,
        f: ElementLoss,
        argument: Argument,
        Factor { tensor, by }: Factor<Self>,
    ) -> FloatTensor<Self> {
        let factor = tensor.map_or(ByTensor::Number(by), |factor| ByTensor::One { factor, by });
        elementwise(x, targets, f, Wanted::slopes(argument), factor)
    }

    #[cfg(not(feature = "fusion"))]
    fn element_loss_backward(
        x: FloatTensor<Self>,
        targets: Option<FloatTensor<Self>>,
        f: ElementLoss,
        argument: Argument,
        dy: FloatTensor<Self>,
    ) -> FloatTensor<Self> {
        elementwise(x, targets, f, Wanted::slopes(argument), ByTensor::Each(dy))
    }

    #[cfg(not(feature = "fusion"))]
    fn scaled_product(x: FloatTensor<Self>, y: FloatTensor<Self>, factor: f64) -> FloatTensor<Self> {
        let [product] = in_memory_order([x, y], |[x, y]| {
            let product = Output::replacing(&x, 0);
            let size = vector_size(&[&x, &y, &product.tensor], usize::MAX);
            if let Some(grid) = Grid::of_units(x.meta.num_elements() / size, &[&x, &y]) {
                let factor = grid.scalar(factor);
                let [x, y] = [x, y].map(CubeTensor::into_linear_view);
                // SAFETY: the kernel compares every position with the shapes.
                unsafe { launch!(product_kernel, grid, size, x, y, product.view(), factor, grid.dtypes) };
            }
            [product.tensor]
        });
        product
    }
}

#[backend_extension(Cube, Fusion: cfg(feature = "fusion"))]
pub trait ElementLossCube: Backend {
    /// See [`ElementLossKernels::element_loss_sum`].
    #[fusion(dtype = x, shape = Shape::new([1]))]
    fn cube_element_loss_sum(
        x: FloatTensor<Self>,
        #[extension_type] targets: MaybeTensor<Self>,
        f: ElementLoss,
        scale: f64,
    ) -> FloatTensor<Self>;

    /// See [`ElementLossKernels::element_loss_sum_with_slopes`].
    #[fusion(meta = |x, _targets, _f, _scale, _slope_scale| {
        let mut of_sum = x.clone();
        of_sum.shape = [1].into();
        (of_sum, x.clone())
    })]
    fn cube_element_loss_sum_with_slopes(
        x: FloatTensor<Self>,
        #[extension_type] targets: MaybeTensor<Self>,
        f: ElementLoss,
        scale: f64,
        slope_scale: f64,
    ) -> (FloatTensor<Self>, FloatTensor<Self>);
}

impl ElementLossCube for CubeBackend {
    fn cube_element_loss_sum(
        x: FloatTensor<Self>,
        targets: MaybeTensor<Self>,
        f: ElementLoss,
        scale: f64,
    ) -> FloatTensor<Self> {
        sum(x, targets.into_option(), f, scale, None)
    }

    fn cube_element_loss_sum_with_slopes(
        x: FloatTensor<Self>,
        targets: MaybeTensor<Self>,
        f: ElementLoss,
        scale: f64,
        slope_scale: f64,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let slopes = empty(&x, x.shape(), x.dtype);
        (sum(x, targets.into_option(), f, scale, Some((&slopes, slope_scale))), slopes)
    }
}

/// The sum of losses times `scale`. The same pass writes the slopes, times another number, if there is a tensor for them.
fn sum(
    x: CubeTensor,
    targets: Option<CubeTensor>,
    f: ElementLoss,
    scale: f64,
    slopes: Option<(&CubeTensor, f64)>,
) -> CubeTensor {
    let read: Vec<&CubeTensor> = [&x].into_iter().chain(&targets).collect();
    let size = vector_size(&read, 4);
    let vectors = x.meta.num_elements() / size;
    let parts = parts_of_sum(vectors, planned_multiprocessors(&x.client));
    let [grid, grid_of_total] = [parts, 1].map(|cubes| Grid::of_cubes(cubes, UNITS, &read));
    let sums = empty(&x, Shape::new([parts]), wide(x.dtype));
    let sum = empty(&x, Shape::new([1]), x.dtype);
    let (kind, parameters) = kind(f);
    let [p, q] = parameters.map(|number| grid.scalar(number));
    let (x, targets) = (x.into_linear_view(), targets.map(CubeTensor::into_linear_view));
    let parts_of_sum = sums.clone().into_linear_view();
    // SAFETY: the kernels compare every position with the shapes, or with the number of vectors.
    unsafe {
        match slopes {
            None => {
                launch!(
                    sum_kernel,
                    grid,
                    size,
                    x,
                    targets.into(),
                    parts_of_sum,
                    vectors,
                    p,
                    q,
                    kind,
                    grid.dtypes
                );
            }
            Some((slopes, slope_scale)) => launch!(
                sum_with_slopes_kernel,
                grid,
                size,
                x,
                targets.into(),
                parts_of_sum,
                slopes.clone().into_linear_view(),
                p,
                q,
                grid.scalar(slope_scale),
                kind,
                grid.dtypes,
            ),
        }
        let (sums, sum) = (sums.into_linear_view(), sum.clone().into_linear_view());
        launch!(total_kernel, grid_of_total, sums, sum, parts, grid.scalar(scale), grid.dtypes);
    }
    sum
}

/// The factor of what is made of every element.
#[cfg(not(feature = "fusion"))]
enum ByTensor {
    Nothing,
    Number(f64),
    One { factor: CubeTensor, by: f64 },
    Each(CubeTensor),
}

#[cfg(not(feature = "fusion"))]
fn elementwise(
    x: CubeTensor,
    targets: Option<CubeTensor>,
    f: ElementLoss,
    wanted: Wanted,
    factor: ByTensor,
) -> CubeTensor {
    let by = match factor {
        ByTensor::Number(by) | ByTensor::One { by, .. } => by,
        _ => 1.0,
    };
    let (one, each) = match factor {
        ByTensor::One { factor, .. } => (Some(factor), None),
        ByTensor::Each(dy) => (None, Some(dy)),
        _ => (None, None),
    };
    // `x` stands in for missing tensors.
    let present = (targets.is_some(), each.is_some());
    let tensors = [x.clone(), targets.unwrap_or_else(|| x.clone()), each.unwrap_or_else(|| x.clone())];
    drop(x);
    let [y] = in_memory_order(tensors, |[x, targets, dy]| {
        let targets = present.0.then_some(targets);
        let dy = present.1.then_some(dy);
        let y = match &dy {
            Some(dy) => Output::replacing(dy, 1 + usize::from(targets.is_some())),
            None => Output::replacing(&x, 0),
        };
        let read: Vec<&CubeTensor> = [&x, &y.tensor].into_iter().chain(&targets).chain(&dy).collect();
        let size = vector_size(&read, usize::MAX);
        if let Some(grid) = Grid::of_units(x.meta.num_elements() / size, &read) {
            let (kind, [p, q]) = kind(f);
            let of_factor = one.as_ref().map_or(grid.dtypes[0], |factor| dtype_to_storage_type(factor.dtype));
            // SAFETY: the kernel compares every position with the shapes.
            unsafe {
                launch!(
                    elementwise_kernel,
                    grid,
                    size,
                    x.into_linear_view(),
                    targets.map(CubeTensor::into_linear_view).into(),
                    dy.map(CubeTensor::into_linear_view).into(),
                    one.map(CubeTensor::into_buffer_arg).into(),
                    y.view(),
                    grid.scalar(p),
                    grid.scalar(q),
                    grid.scalar(by),
                    kind,
                    wanted,
                    grid.dtypes,
                    of_factor,
                );
            }
        }
        [y.tensor]
    });
    y
}
