//! Kernels for devices, with fusion and without: one pass for the output, and two for the gradient, with one tensor between them.
use super::{LocalResponse, LocalResponseKernels};
use crate::backend::cube::{
    Grid, Place, Volume, address, channels_last, empty_in_order, launch, place, volume,
};
use crate::backend::wide;
use burn::backend::{Backend, Cube, TensorMetadata, backend_extension, tensor::FloatTensor};
use burn::tensor::Shape;
use burn_cubecl::CubeBackend;
use burn_cubecl::cubecl::{self, ir::ElemType, prelude::*};
use burn_cubecl::ops::reshape;
use burn_cubecl::tensor::CubeTensor;

impl LocalResponseKernels for Cube {
    fn local_response_norm(x: FloatTensor<Self>, norm: &LocalResponse) -> FloatTensor<Self> {
        Self::cube_local_response_norm(x, *norm)
    }

    fn local_response_norm_backward(
        x: FloatTensor<Self>,
        norm: &LocalResponse,
        dy: FloatTensor<Self>,
    ) -> FloatTensor<Self> {
        Self::cube_local_response_norm_backward(x, dy, *norm)
    }
}

#[backend_extension(Cube, Fusion: cfg(feature = "fusion"))]
pub trait LocalResponseCube: Backend {
    /// See [`LocalResponseKernels::local_response_norm`].
    #[fusion(dtype = x, shape = x)]
    fn cube_local_response_norm(x: FloatTensor<Self>, norm: LocalResponse) -> FloatTensor<Self>;

    /// See [`LocalResponseKernels::local_response_norm_backward`].
    #[fusion(dtype = x, shape = x)]
    fn cube_local_response_norm_backward(
        x: FloatTensor<Self>,
        dy: FloatTensor<Self>,
        norm: LocalResponse,
    ) -> FloatTensor<Self>;
}

impl LocalResponseCube for CubeBackend {
    fn cube_local_response_norm(x: FloatTensor<Self>, norm: LocalResponse) -> FloatTensor<Self> {
        let (shape, x) = (x.shape(), lifted(x));
        let last = channels_last(&x);
        let y = empty_in_order(&x, x.shape(), x.dtype, last);
        let elements = x.meta.num_elements();
        if let Some(grid) = Grid::of_units(elements, &[&x, &y]) {
            let (of_x, of_y) = (volume(&x), volume(&y));
            // SAFETY: the kernel compares every position with the shapes.
            unsafe {
                launch!(
                    forward_kernel,
                    grid,
                    x.into_buffer_arg(),
                    y.clone().into_buffer_arg(),
                    of_x,
                    of_y,
                    elements,
                    scalars(&norm, &grid),
                    norm.reach(),
                    last,
                    grid.dtypes,
                );
            }
        }
        restored(y, shape)
    }

    fn cube_local_response_norm_backward(
        x: FloatTensor<Self>,
        dy: FloatTensor<Self>,
        norm: LocalResponse,
    ) -> FloatTensor<Self> {
        let (shape, x, dy) = (x.shape(), lifted(x), lifted(dy));
        let last = channels_last(&x);
        let products = empty_in_order(&x, x.shape(), wide(x.dtype), last);
        let dx = empty_in_order(&x, x.shape(), x.dtype, last);
        let elements = x.meta.num_elements();
        if let Some(grid) = Grid::of_units(elements, &[&x, &dy, &products]) {
            let arg = |tensor: &CubeTensor| tensor.clone().into_buffer_arg();
            // SAFETY: the kernels compare every position with the shapes.
            unsafe {
                launch!(
                    products_kernel,
                    grid,
                    arg(&x),
                    arg(&dy),
                    arg(&products),
                    volume(&x),
                    volume(&dy),
                    volume(&products),
                    elements,
                    scalars(&norm, &grid),
                    norm.reach(),
                    last,
                    grid.dtypes,
                );
                let [of_x, of_dy, of_products, of_dx] = [&x, &dy, &products, &dx].map(volume);
                launch!(
                    backward_kernel,
                    grid,
                    x.into_buffer_arg(),
                    dy.into_buffer_arg(),
                    products.into_buffer_arg(),
                    arg(&dx),
                    of_x,
                    of_dy,
                    of_products,
                    of_dx,
                    elements,
                    scalars(&norm, &grid),
                    norm.reach(),
                    last,
                    grid.dtypes,
                );
            }
        }
        restored(dx, shape)
    }
}

/// The tensor with one to three spatial axes.
fn lifted(x: CubeTensor) -> CubeTensor {
    let shape = x.shape();
    match shape.num_dims() {
        2 => reshape(x, Shape::new([shape[0], shape[1], 1])),
        3..=5 => x,
        _ => {
            let inner = shape[2..].iter().product();
            reshape(x, Shape::new([shape[0], shape[1], inner]))
        }
    }
}

/// The tensor with its axes as they were.
fn restored(x: CubeTensor, shape: Shape) -> CubeTensor {
    if x.shape() == shape { x } else { reshape(x, shape) }
}

/// The numbers of a [`LocalResponse`].
#[derive(CubeType, CubeLaunch)]
struct Norm {
    /// Divided by the size.
    alpha: InputScalar,
    beta: InputScalar,
    k: InputScalar,
}

fn scalars(norm: &LocalResponse, grid: &Grid) -> NormLaunch {
    let alpha = norm.alpha / norm.size as f64;
    NormLaunch::new(grid.scalar(alpha), grid.scalar(norm.beta), grid.scalar(norm.k))
}

/// The channels of a window.
#[derive(CubeType, Clone, Copy)]
struct Window {
    first: usize,
    end: usize,
}

/// The window around a channel.
#[cube]
fn window(channel: usize, channels: usize, #[comptime] reach: [usize; 2]) -> Window {
    Window {
        first: max(channel, comptime!(reach[0])) - comptime!(reach[0]),
        end: min(channel + comptime!(reach[1] + 1), channels),
    }
}

#[cube]
fn in_channel(of: &Place, channel: usize) -> Place {
    Place { batch: of.batch, channel, depth: of.depth, row: of.row, column: of.column }
}

/// The scale of an element, which is divided by its scale to the power of beta.
#[cube]
fn scale<T: Float, W: Float>(
    x: &[T],
    of_x: &Volume,
    at: &Place,
    norm: &Norm,
    #[comptime] reach: [usize; 2],
) -> W {
    let window = window(at.channel, of_x.channels, reach);
    let mut sum = W::new(0.0);
    for channel in window.first..window.end {
        let x = W::cast_from(x[address(of_x, &in_channel(at, channel))]);
        sum += x * x;
    }
    norm.k.get::<W>() + norm.alpha.get::<W>() * sum
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn forward_kernel<T: Float, W: Float>(
    x: &[T],
    y: &mut [T],
    of_x: Volume,
    of_y: Volume,
    elements: usize,
    norm: Norm,
    #[comptime] reach: [usize; 2],
    #[comptime] channels_last: bool,
    #[define(T, W)] _dtypes: [ElemType; 2],
) {
    if ABSOLUTE_POS >= elements {
        terminate!();
    }
    let at = place(&of_y, ABSOLUTE_POS, channels_last);
    let power = scale::<T, W>(x, &of_x, &at, &norm, reach).powf(norm.beta.get::<W>());
    y[address(&of_y, &at)] = T::cast_from(W::cast_from(x[address(&of_x, &at)]) / power);
}

/// `dy x` divided by the scale to the power of `beta + 1`.
#[cube(launch_unchecked, address_type = "dynamic")]
fn products_kernel<T: Float, W: Float>(
    x: &[T],
    dy: &[T],
    products: &mut [W],
    of_x: Volume,
    of_dy: Volume,
    of_products: Volume,
    elements: usize,
    norm: Norm,
    #[comptime] reach: [usize; 2],
    #[comptime] channels_last: bool,
    #[define(T, W)] _dtypes: [ElemType; 2],
) {
    if ABSOLUTE_POS >= elements {
        terminate!();
    }
    let at = place(&of_products, ABSOLUTE_POS, channels_last);
    let scale = scale::<T, W>(x, &of_x, &at, &norm, reach);
    let product = W::cast_from(dy[address(&of_dy, &at)]) * W::cast_from(x[address(&of_x, &at)]);
    products[address(&of_products, &at)] = product / scale.powf(norm.beta.get::<W>()) / scale;
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn backward_kernel<T: Float, W: Float>(
    x: &[T],
    dy: &[T],
    products: &[W],
    dx: &mut [T],
    of_x: Volume,
    of_dy: Volume,
    of_products: Volume,
    of_dx: Volume,
    elements: usize,
    norm: Norm,
    #[comptime] reach: [usize; 2],
    #[comptime] channels_last: bool,
    #[define(T, W)] _dtypes: [ElemType; 2],
) {
    if ABSOLUTE_POS >= elements {
        terminate!();
    }
    let at = place(&of_dx, ABSOLUTE_POS, channels_last);
    // The channels whose windows have this one.
    let around = window(at.channel, of_x.channels, comptime!([reach[1], reach[0]]));
    let mut sum = W::new(0.0);
    for channel in around.first..around.end {
        sum += products[address(&of_products, &in_channel(&at, channel))];
    }
    let (beta, alpha) = (norm.beta.get::<W>(), norm.alpha.get::<W>());
    let scaled =
        W::cast_from(dy[address(&of_dy, &at)]) / scale::<T, W>(x, &of_x, &at, &norm, reach).powf(beta);
    let through_scales = W::new(2.0) * alpha * beta * W::cast_from(x[address(&of_x, &at)]) * sum;
    dx[address(&of_dx, &at)] = T::cast_from(scaled - through_scales);
}
