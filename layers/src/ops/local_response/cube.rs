//! Kernels for devices, with fusion and without: one pass over the input, and two for the gradient, between which there is one
//! tensor.
use super::{LocalResponse, LocalResponseKernels};
use crate::backend::cube::{
    Place, Volume, address, address_type, channels_last, empty_in_order, place, types, units, volume,
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
        let launch = Launch::new(&x, norm);
        let y = empty_in_order(&x, x.shape(), x.dtype, launch.last);
        if launch.elements > 0 {
            let (at, of) = (address_type(&[&x, &y]), [volume(&x), volume(&y)]);
            let [of_x, of_y] = of;
            // SAFETY: the kernel compares every position with the shapes.
            unsafe {
                forward_kernel::launch_unchecked(
                    &x.client.clone(),
                    launch.count,
                    launch.dim,
                    at,
                    x.into_buffer_arg(),
                    y.clone().into_buffer_arg(),
                    of_x,
                    of_y,
                    launch.elements,
                    launch.norm,
                    launch.reach,
                    launch.last,
                    launch.dtypes,
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
        let [first, second] = [(); 2].map(|()| Launch::new(&x, norm));
        let products = empty_in_order(&x, x.shape(), wide(x.dtype), first.last);
        let dx = empty_in_order(&x, x.shape(), x.dtype, first.last);
        if first.elements > 0 {
            let (client, at) = (x.client.clone(), address_type(&[&x, &dy, &products]));
            let volumes = || [&x, &dy, &products, &dx].map(volume);
            let ([of_x, of_dy, of_products, _], [also_of_x, also_of_dy, also_of_products, of_dx]) =
                (volumes(), volumes());
            // SAFETY: the kernels compare every position with the shapes.
            unsafe {
                products_kernel::launch_unchecked(
                    &client,
                    first.count,
                    first.dim,
                    at,
                    x.clone().into_buffer_arg(),
                    dy.clone().into_buffer_arg(),
                    products.clone().into_buffer_arg(),
                    of_x,
                    of_dy,
                    of_products,
                    first.elements,
                    first.norm,
                    first.reach,
                    first.last,
                    first.dtypes,
                );
                backward_kernel::launch_unchecked(
                    &client,
                    second.count,
                    second.dim,
                    at,
                    x.into_buffer_arg(),
                    dy.into_buffer_arg(),
                    products.into_buffer_arg(),
                    dx.clone().into_buffer_arg(),
                    also_of_x,
                    also_of_dy,
                    also_of_products,
                    of_dx,
                    second.elements,
                    second.norm,
                    second.reach,
                    second.last,
                    second.dtypes,
                );
            }
        }
        restored(dx, shape)
    }
}

/// With a spatial axis at least, and not more than three.
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

/// With the axes as they were.
fn restored(x: CubeTensor, shape: Shape) -> CubeTensor {
    if x.shape() == shape { x } else { reshape(x, shape) }
}

/// What the launches have in common.
struct Launch {
    elements: usize,
    count: CubeCount,
    dim: CubeDim,
    norm: NormLaunch,
    reach: [usize; 2],
    last: bool,
    dtypes: [ElemType; 2],
}

impl Launch {
    fn new(x: &CubeTensor, norm: LocalResponse) -> Self {
        let (elements, dtypes) = (x.shape().num_elements(), types(x.dtype));
        let (count, dim) = units(&x.client, elements);
        let number = |number: f64| InputScalar::new(number, dtypes[1]);
        let of_mean = norm.alpha / norm.size as f64;
        Self {
            elements,
            count,
            dim,
            norm: NormLaunch::new(number(of_mean), number(norm.beta), number(norm.k)),
            reach: norm.reach(),
            last: channels_last(x),
            dtypes,
        }
    }
}

/// See [`LocalResponse`].
#[derive(CubeType, CubeLaunch)]
struct Norm {
    /// Divided by the size.
    alpha: InputScalar,
    beta: InputScalar,
    k: InputScalar,
}

/// The channels of a window.
#[derive(CubeType, Clone, Copy)]
struct Window {
    first: usize,
    end: usize,
}

/// Around a channel.
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

/// What elements are divided by, to the power of beta.
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
    // The windows that this channel is in.
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
