//! Pooling and interpolation.
use super::guard::{Fit, Misfit, NO_WEIGHT, accepts, require};
use crate::ops::{AvgPoolOps, InterpolateOps, MaxPoolOps};
use burn::backend::Dispatch;
use burn::tensor::{
    Tensor, module,
    ops::{AvgPoolOptions, InterpolateOptions, MaxPoolOptions},
};

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
/// Keeps the position of each maximum in its window: one byte per output for windows of up to 255 elements, else two
/// or four; on device backends Burn's indices.
pub fn max_pool2d(x: Tensor<4>, options: MaxPoolOptions<2>) -> Tensor<4> {
    let fit = max_pool_fits(&x.dims(), &options);
    match x.is_tracked() && accepts("max_pool2d", fit, true, NO_WEIGHT) {
        true => Tensor::from_dispatch(Dispatch::memsave_max_pool2d(x.into_dispatch(), options)),
        false => module::max_pool2d(x, options),
    }
}

/// The input and the windows have elements, and each window fits into the padded input.
fn max_pool_fits<const N: usize>(x: &[usize], options: &MaxPoolOptions<N>) -> Fit {
    let windows = (0..N).all(|axis| {
        let (begin, end) = options.padding[axis];
        let (kernel, stride) = (options.kernel_size[axis], options.stride[axis]);
        kernel > 0 && stride > 0 && x[axis + 2] + begin + end > options.dilation[axis] * (kernel - 1)
    });
    require(x.iter().product::<usize>() > 0, Misfit::Empty)?;
    require(windows, Misfit::Shapes)
}

/// Average pooling over one axis; see [`burn::tensor::module::avg_pool1d`]. Keeps nothing.
pub fn avg_pool1d(x: Tensor<3>, options: AvgPoolOptions<1>) -> Tensor<3> {
    if !x.is_tracked() {
        return module::avg_pool1d(x, options);
    }
    let lifted = AvgPoolOptions {
        kernel_size: [1, options.kernel_size[0]],
        stride: [1, options.stride[0]],
        padding: [(0, 0), options.padding[0]],
        count_include_pad: options.count_include_pad,
        ceil_mode: options.ceil_mode,
    };
    let y = module::avg_pool1d(x.clone().inner(), options);
    Tensor::from_dispatch(Dispatch::memsave_avg_pool2d(x.into_dispatch(), y.into_dispatch(), lifted))
}

/// Average pooling over two axes; see [`burn::tensor::module::avg_pool2d`]. Keeps nothing.
pub fn avg_pool2d(x: Tensor<4>, options: AvgPoolOptions<2>) -> Tensor<4> {
    if !x.is_tracked() {
        return module::avg_pool2d(x, options);
    }
    let y = module::avg_pool2d(x.clone().inner(), options.clone());
    Tensor::from_dispatch(Dispatch::memsave_avg_pool2d(x.into_dispatch(), y.into_dispatch(), options))
}

macro_rules! adaptive_avg_pool {
    ($($pool:ident, $dims:literal, $size:ty;)+) => {$(
        #[doc = concat!("See [`burn::tensor::module::", stringify!($pool), "`]. Keeps nothing.")]
        pub fn $pool(x: Tensor<$dims>, output_size: $size) -> Tensor<$dims> {
            if !x.is_tracked() {
                return module::$pool(x, output_size);
            }
            let y = module::$pool(x.clone().inner(), output_size);
            Tensor::from_dispatch(Dispatch::memsave_adaptive_avg_pool(x.into_dispatch(), y.into_dispatch()))
        }
    )+};
}
adaptive_avg_pool! {
    adaptive_avg_pool1d, 3, usize;
    adaptive_avg_pool2d, 4, [usize; 2];
    adaptive_avg_pool3d, 5, [usize; 3];
}

/// See [`burn::tensor::module::interpolate`]. Keeps nothing.
pub fn interpolate(x: Tensor<4>, options: InterpolateOptions) -> Tensor<4> {
    if !x.is_tracked() {
        return module::interpolate(x, options);
    }
    let y = module::interpolate(x.clone().inner(), options.clone());
    Tensor::from_dispatch(Dispatch::memsave_interpolate(x.into_dispatch(), y.into_dispatch(), options))
}

/// [`interpolate`] over the last axis of `[batch, channels, length]`.
pub(crate) fn interpolate1d(x: Tensor<3>, options: InterpolateOptions) -> Tensor<3> {
    let resize = |x: Tensor<3>| module::interpolate(x.unsqueeze_dim(2), options.clone()).squeeze_dim::<3>(2);
    if !x.is_tracked() {
        return resize(x);
    }
    let y = resize(x.clone().inner());
    Tensor::from_dispatch(Dispatch::memsave_interpolate(x.into_dispatch(), y.into_dispatch(), options))
}
