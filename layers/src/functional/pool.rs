//! Pooling and interpolation.
use super::guard::{Fit, Misfit, NO_WEIGHT, accepts, is_quantized, require};
use crate::burn_next::{dilation, has_usual_coordinates};
use crate::ops::{AvgPoolOps, InterpolateOps, MaxPoolOps};
use burn::backend::Dispatch;
use burn::tensor::{
    Shape, Tensor, module,
    ops::{AvgPoolOptions, InterpolateOptions, MaxPoolOptions},
};
use std::convert::identity;

/// Max pooling over one axis; see [`burn::tensor::module::max_pool1d`]. Keeps what [`max_pool2d`] keeps.
pub fn max_pool1d(x: Tensor<3>, options: MaxPoolOptions<1>) -> Tensor<3> {
    if !x.is_tracked() {
        return module::max_pool1d(x, options);
    }
    let lifted = MaxPoolOptions {
        kernel_size: [1, options.kernel_size[0]],
        stride: [1, options.stride[0]],
        padding: [(0, 0), options.padding[0]],
        dilation: [1, options.dilation[0]],
        ceil_mode: options.ceil_mode,
    };
    match accepts("max_pool1d", max_pool_fits(&x.dims(), &options), true, NO_WEIGHT) {
        false => module::max_pool1d(x, options),
        true => Tensor::from_dispatch(Dispatch::memsave_max_pool2d(x.into_dispatch(), lifted)),
    }
}

/// Max pooling over two axes; see [`burn::tensor::module::max_pool2d`].
///
/// Keeps the position of each maximum in its window: one byte per output for windows of up to 255 elements, else two or four;
/// on remote devices, Burn's indices.
pub fn max_pool2d(x: Tensor<4>, options: MaxPoolOptions<2>) -> Tensor<4> {
    let fit = max_pool_fits(&x.dims(), &options);
    match x.is_tracked() && accepts("max_pool2d", fit, true, NO_WEIGHT) {
        true => Tensor::from_dispatch(Dispatch::memsave_max_pool2d(x.into_dispatch(), options)),
        false => module::max_pool2d(x, options),
    }
}

fn max_pool_fits<const N: usize>(x: &[usize], options: &MaxPoolOptions<N>) -> Fit {
    windows_fit(x, options.kernel_size, options.stride, options.padding, options.dilation)
}

fn avg_pool_fits<const D: usize, const N: usize>(x: &Tensor<D>, options: &AvgPoolOptions<N>) -> Fit {
    require(!is_quantized(x), Misfit::Quantized)?;
    require(dilation(options) == [1; N], Misfit::Options)?;
    windows_fit(&x.dims(), options.kernel_size, options.stride, options.padding, [1; N])
}

/// Requires that the input and the windows have elements, and that each window fits into the padded input.
fn windows_fit<const N: usize>(
    x: &[usize],
    kernel: [usize; N],
    stride: [usize; N],
    padding: [(usize, usize); N],
    dilation: [usize; N],
) -> Fit {
    let windows = (0..N).all(|axis| {
        let (begin, end) = padding[axis];
        kernel[axis] > 0
            && stride[axis] > 0
            && x[axis + 2] + begin + end > dilation[axis] * (kernel[axis] - 1)
    });
    require(x.iter().product::<usize>() > 0, Misfit::Empty)?;
    require(windows, Misfit::Shapes)
}

/// Average pooling over one axis; see [`burn::tensor::module::avg_pool1d`]. Keeps nothing. On the CPU, half precision is summed
/// in f32.
pub fn avg_pool1d(x: Tensor<3>, options: AvgPoolOptions<1>) -> Tensor<3> {
    if !accepts("avg_pool1d", avg_pool_fits(&x, &options), x.is_tracked(), NO_WEIGHT) {
        return module::avg_pool1d(x, options);
    }
    let lifted = AvgPoolOptions::new([1, options.kernel_size[0]])
        .with_stride([1, options.stride[0]])
        .with_padding_pairs([(0, 0), options.padding[0]])
        .with_count_include_pad(options.count_include_pad)
        .with_ceil_mode(options.ceil_mode);
    Tensor::from_dispatch(Dispatch::memsave_avg_pool2d(x.into_dispatch(), lifted))
}

/// Average pooling over two axes; see [`burn::tensor::module::avg_pool2d`]. Keeps nothing. On the CPU, half precision is summed
/// in f32.
pub fn avg_pool2d(x: Tensor<4>, options: AvgPoolOptions<2>) -> Tensor<4> {
    match accepts("avg_pool2d", avg_pool_fits(&x, &options), x.is_tracked(), NO_WEIGHT) {
        true => Tensor::from_dispatch(Dispatch::memsave_avg_pool2d(x.into_dispatch(), options)),
        false => module::avg_pool2d(x, options),
    }
}

macro_rules! adaptive_avg_pool {
    ($($pool:ident, $dims:literal, $size:ty, $sizes:expr;)+) => {$(
        #[doc = concat!("See [`burn::tensor::module::", stringify!($pool), "`]. Keeps nothing. On the CPU half precision is summed in f32.")]
        pub fn $pool(x: Tensor<$dims>, output_size: $size) -> Tensor<$dims> {
            if is_quantized(&x) {
                return module::$pool(x, output_size);
            }
            let sizes = Shape::from($sizes(output_size));
            Tensor::from_dispatch(Dispatch::memsave_adaptive_avg_pool(x.into_dispatch(), sizes))
        }
    )+};
}
adaptive_avg_pool! {
    adaptive_avg_pool1d, 3, usize, |size| [size];
    adaptive_avg_pool2d, 4, [usize; 2], identity;
    adaptive_avg_pool3d, 5, [usize; 3], identity;
}

/// See [`burn::tensor::module::interpolate`]. Keeps nothing.
pub fn interpolate(x: Tensor<4>, options: InterpolateOptions) -> Tensor<4> {
    let [_, _, height, width] = x.dims();
    match resized(&x, [height, width], &options) {
        Some(out) => Tensor::from_dispatch(Dispatch::memsave_interpolate(x.into_dispatch(), out, options)),
        None => module::interpolate(x, options),
    }
}

/// [`interpolate`] over the last axis of `[batch, channels, length]`.
pub(crate) fn interpolate1d(x: Tensor<3>, options: InterpolateOptions) -> Tensor<3> {
    match resized(&x, [1, x.dims()[2]], &options) {
        Some(out) => Tensor::from_dispatch(Dispatch::memsave_interpolate(x.into_dispatch(), out, options)),
        None => module::interpolate(x.unsqueeze_dim::<4>(2), options).squeeze_dim(2),
    }
}

/// The height and width of the output; `None` if Burn's function has to run.
fn resized<const D: usize>(x: &Tensor<D>, size: [usize; 2], options: &InterpolateOptions) -> Option<Shape> {
    let out = output_size(size, options).filter(|_| !is_quantized(x))?;
    let fit = require(has_usual_coordinates(options), Misfit::Options);
    accepts("interpolate", fit, x.is_tracked(), NO_WEIGHT).then_some(out)
}

/// The height and width to which an input of height and width `size` is resized; `None` for options that Burn refuses.
fn output_size(size: [usize; 2], options: &InterpolateOptions) -> Option<Shape> {
    match (options.output_size, options.scale_factor) {
        (Some(size), None) => Some(Shape::new(size)),
        (None, Some(scale)) => {
            let scaled = [0, 1].map(|axis| size[axis] as f64 * f64::from(scale[axis]));
            let fits = scaled.iter().all(|&size| size <= usize::MAX as f64);
            fits.then(|| Shape::new(scaled.map(|size| size as usize)))
        }
        _ => None,
    }
}
