//! Pooling and interpolation.
use super::guard::{Fit, Misfit, NO_WEIGHT, accepts, require};
use crate::ops::{AvgPoolOps, InterpolateOps, MaxPoolOps};
use burn::backend::Dispatch;
use burn::tensor::{
    DType, Device, FloatDType, Tensor, module,
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

/// Average pooling over one axis; see [`burn::tensor::module::avg_pool1d`]. Keeps nothing. Half precision is summed in f32.
pub fn avg_pool1d(x: Tensor<3>, options: AvgPoolOptions<1>) -> Tensor<3> {
    let pool = |x| module::avg_pool1d(x, options.clone());
    if !x.is_tracked() {
        return summed_in_f32(x, pool);
    }
    let lifted = AvgPoolOptions {
        kernel_size: [1, options.kernel_size[0]],
        stride: [1, options.stride[0]],
        padding: [(0, 0), options.padding[0]],
        count_include_pad: options.count_include_pad,
        ceil_mode: options.ceil_mode,
    };
    let y = summed_in_f32(x.clone().inner(), pool);
    Tensor::from_dispatch(Dispatch::memsave_avg_pool2d(x.into_dispatch(), y.into_dispatch(), lifted))
}

/// Average pooling over two axes; see [`burn::tensor::module::avg_pool2d`]. Keeps nothing. Half precision is summed in f32.
pub fn avg_pool2d(x: Tensor<4>, options: AvgPoolOptions<2>) -> Tensor<4> {
    let pool = |x| module::avg_pool2d(x, options.clone());
    if !x.is_tracked() {
        return summed_in_f32(x, pool);
    }
    let y = summed_in_f32(x.clone().inner(), pool);
    Tensor::from_dispatch(Dispatch::memsave_avg_pool2d(x.into_dispatch(), y.into_dispatch(), options))
}

/// The average pool of an untracked tensor. Flex 0.22.1 sums windows of f16 in f16, where the sum of 2049 ones is 2048: there, some
/// planes at a time are pooled in f32.
fn summed_in_f32<const D: usize>(x: Tensor<D>, pool: impl Fn(Tensor<D>) -> Tensor<D>) -> Tensor<D> {
    /// Bytes of the planes in f32.
    const PART: usize = 1 << 18;
    let [batch, channels, ref axes @ ..] = x.dims()[..] else { return pool(x) };
    let (planes, plane) = (batch * channels, axes.iter().product::<usize>());
    if x.dtype() != DType::F16 || !is_flex(&x.device()) || planes * plane == 0 {
        return pool(x);
    }
    let device = x.device();
    // `[planes, 1, ...]`
    let shape = |planes: usize, channels: usize, of: &Tensor<D>| {
        let mut shape = of.dims();
        (shape[0], shape[1]) = (planes, channels);
        shape
    };
    let as_planes = shape(planes, 1, &x);
    let x = x.reshape(as_planes);
    let at_once = (PART / (size_of::<f32>() * plane)).clamp(1, planes);
    let mut y: Option<Tensor<D>> = None;
    for begin in (0..planes).step_by(at_once) {
        let count = at_once.min(planes - begin);
        let part = pool(x.clone().narrow(0, begin, count).cast(FloatDType::F32)).cast(FloatDType::F16);
        let whole = y.unwrap_or_else(|| Tensor::empty(shape(planes, 1, &part), (&device, DType::F16)));
        y = Some(whole.slice_assign(begin..begin + count, part));
    }
    let y = y.expect("there are planes");
    let as_images = shape(batch, channels, &y);
    y.reshape(as_images)
}

/// Whether tensors of the device are Flex's.
fn is_flex(device: &Device) -> bool {
    match device.clone().without_autodiff().as_dispatch() {
        #[cfg(feature = "flex")]
        burn::backend::DispatchDevice::Flex(_) => true,
        #[allow(unreachable_patterns)] // without any other backend
        _ => false,
    }
}

macro_rules! adaptive_avg_pool {
    ($($pool:ident, $dims:literal, $size:ty;)+) => {$(
        #[doc = concat!("See [`burn::tensor::module::", stringify!($pool), "`]. Keeps nothing. Half precision is summed in f32.")]
        pub fn $pool(x: Tensor<$dims>, output_size: $size) -> Tensor<$dims> {
            let pool = |x| module::$pool(x, output_size);
            if !x.is_tracked() {
                return summed_in_f32(x, pool);
            }
            let y = summed_in_f32(x.clone().inner(), pool);
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
