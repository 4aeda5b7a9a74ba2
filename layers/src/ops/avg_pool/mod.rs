//! Average pooling, adaptive or not: the mean of every window. Both are cases of [`fixed_linear`](super::fixed_linear).
//!
//! NdArray 0.22.1 computes the windows of adaptive pooling in f32, and is off by one on axes of more than about 4096 elements. The windows
//! of the gradient here are exact. Flex 0.22.1 sums windows of f16 in f16, where the sum of 2049 ones is 2048. Here, half precision is
//! summed in f32.
use super::{
    conv::crop,
    fixed_linear::{FixedLinear, Image, lifted, lifted_image, pooled},
};
use crate::backend::{Placeholders, composing_backends};
use crate::burn_next::avg_pool;
use crate::graph::{Run, extension};
use burn::backend::{
    Backend, TensorMetadata, get_or_init_device_settings, ops::PadMode, tensor::FloatTensor,
};
use burn::tensor::{DType, Shape, ops::AvgPoolOptions};

#[cfg(any(feature = "flex", feature = "ndarray", feature = "wgpu", feature = "cuda"))]
mod axes;

extension! {
    /// Average pooling.
    pub trait AvgPoolOps(AvgPoolKernels) {
        /// Average pooling of `[batch, channels, height, width]` or without the height, which counts as 1.
        fn memsave_avg_pool2d(x: FloatTensor<Self>, options: AvgPoolOptions<2>) -> FloatTensor<Self> {
            Self::run(Image(AvgPool(options)), [Some(x)])
        }
        /// Adaptive average pooling of `[batch, channels, ...]` to as many spatial axes, one to three, of the given sizes.
        fn memsave_adaptive_avg_pool(x: FloatTensor<Self>, sizes: Shape) -> FloatTensor<Self> {
            Self::run(Image(AdaptiveAvgPool(sizes)), [Some(x)])
        }
    }
}

/// An average pool.
#[derive(Clone, Debug)]
pub struct AvgPool(AvgPoolOptions<2>);

impl<B: AvgPoolKernels> FixedLinear<B> for AvgPool {
    const NAME: &'static str = "avg_pool";

    fn image(&self, x: FloatTensor<B>) -> FloatTensor<B> {
        lifted_image::<B>(x, |x| B::mean_of_windows(x, &self.0))
    }

    fn adjoint(&self, x: Shape, dy: FloatTensor<B>) -> FloatTensor<B> {
        lifted::<B>(x, dy, |x, dy| B::avg_pool2d_adjoint(x, dy, &self.0))
    }
}

/// An adaptive average pool to these sizes.
#[derive(Clone, Debug)]
pub struct AdaptiveAvgPool(Shape);

impl<B: AvgPoolKernels> FixedLinear<B> for AdaptiveAvgPool {
    const NAME: &'static str = "adaptive_avg_pool";

    fn image(&self, x: FloatTensor<B>) -> FloatTensor<B> {
        B::adaptive_mean(x, &self.0)
    }

    fn adjoint(&self, x: Shape, dy: FloatTensor<B>) -> FloatTensor<B> {
        B::adaptive_avg_pool_adjoint(x, dy)
    }
}

/// The kernels.
pub trait AvgPoolKernels: Placeholders {
    /// Average pool of `[batch, channels, height, width]`.
    fn mean_of_windows(x: FloatTensor<Self>, options: &AvgPoolOptions<2>) -> FloatTensor<Self> {
        average::<Self>(x, options)
    }

    /// Adaptive average pool of `[batch, channels, ...]` with one to three spatial axes, to these sizes.
    fn adaptive_mean(x: FloatTensor<Self>, sizes: &Shape) -> FloatTensor<Self> {
        adaptive_average::<Self>(x, sizes)
    }

    /// Gradient of an average pool's input of shape `x`, `[batch, channels, height, width]`.
    fn avg_pool2d_adjoint(x: Shape, dy: FloatTensor<Self>, options: &AvgPoolOptions<2>) -> FloatTensor<Self> {
        average_adjoint::<Self>(x, dy, options)
    }

    /// Gradient of an adaptive average pool's input of shape `x`, `[batch, channels, ...]` with one to three spatial axes.
    fn adaptive_avg_pool_adjoint(x: Shape, dy: FloatTensor<Self>) -> FloatTensor<Self> {
        adaptive_adjoint::<Self>(x, dy)
    }
}
composing_backends!(AvgPoolKernels);

// These are free functions, because the kernels call some of them where Burn's own result is right, and the tests run others on a backend
// that has kernels: `Composed` is an autodiff backend, where Burn's gradients of pools do not run.

fn average<B: Backend>(x: FloatTensor<B>, options: &AvgPoolOptions<2>) -> FloatTensor<B> {
    let (kernel, stride, ceil_mode) = (options.kernel_size, options.stride, options.ceil_mode);
    let pool = |x, padding| avg_pool!(B::avg_pool2d(x, kernel, stride, padding; [1; 2]; options.count_include_pad, ceil_mode));
    if !options.is_asymmetric() {
        return pool(x, options.padding.map(|(begin, _)| begin));
    }
    let (shape, device, dtype) = (x.shape(), x.device(), x.dtype());
    let out = output_shape(&shape, options);
    let y = crop::<B>(pool(padded::<B>(x, options), [0; 2]), &out, &[0; 2]);
    match options.count_include_pad {
        true => y,
        false => B::float_div(y, share_of_input::<B>([shape[2], shape[3]], &out, (&device, dtype), options)),
    }
}

fn average_adjoint<B: Placeholders>(
    x: Shape,
    dy: FloatTensor<B>,
    options: &AvgPoolOptions<2>,
) -> FloatTensor<B> {
    let (device, dtype) = (dy.device(), dy.dtype());
    let (kernel, stride) = (options.kernel_size, options.stride);
    let pool = |x: Shape, dy: FloatTensor<B>, padding: [usize; 2], count_include_pad: bool| {
        let like = B::shape_only(x, dtype, &device);
        avg_pool!(B::avg_pool2d_backward(like, dy, kernel, stride, padding; [1; 2]; count_include_pad, options.ceil_mode))
    };
    if !options.is_asymmetric() {
        return pool(x, dy, options.padding.map(|(begin, _)| begin), options.count_include_pad);
    }
    let [rows, columns] = options.padding;
    let padded = Shape::new([x[0], x[1], x[2] + rows.0 + rows.1, x[3] + columns.0 + columns.1]);
    let out = dy.shape();
    let dy = match options.count_include_pad {
        true => dy,
        false => B::float_div(dy, share_of_input::<B>([x[2], x[3]], &out, (&device, dtype), options)),
    };
    let dx = pool(padded, dy, [0; 2], options.count_include_pad);
    crop::<B>(dx, &x, &[rows.0, columns.0])
}

/// The shape of the output of an average pool. No window may be larger than the padded input.
fn output_shape(x: &Shape, options: &AvgPoolOptions<2>) -> Shape {
    let AvgPoolOptions { kernel_size, stride, padding, ceil_mode, .. } = *options;
    pooled(x, kernel_size, stride, padding, ceil_mode, options.is_asymmetric())
}

/// `x` with zeros around.
fn padded<B: Backend>(x: FloatTensor<B>, options: &AvgPoolOptions<2>) -> FloatTensor<B> {
    let [rows, columns] = options.padding;
    B::float_pad(x, &[(0, 0), (0, 0), rows, columns], PadMode::Constant(0.0))
}

/// The share of every window that is not padding, `[1, 1, out height, out width]`; 1 for a window of padding alone. If the padding does not
/// count, Burn divides the means of a padded input by this share.
fn share_of_input<B: Backend>(
    input: [usize; 2],
    out: &Shape,
    (device, dtype): (&B::Device, DType),
    options: &AvgPoolOptions<2>,
) -> FloatTensor<B> {
    let ones = B::float_ones(Shape::new([1, 1, input[0], input[1]]), device, dtype.into());
    let ones = padded::<B>(ones, options);
    let share = avg_pool!(B::avg_pool2d(ones, options.kernel_size, options.stride, [0; 2]; [1; 2]; false, options.ceil_mode));
    let share = crop::<B>(share, &Shape::new([1, 1, out[2], out[3]]), &[0; 2]);
    let bools = get_or_init_device_settings::<B>(device).bool_dtype;
    let empty = B::float_equal_elem(share.clone(), 0.into(), bools);
    B::float_mask_fill(share, empty, 1.into())
}

fn adaptive_average<B: Backend>(x: FloatTensor<B>, sizes: &Shape) -> FloatTensor<B> {
    match sizes[..] {
        [size] => B::adaptive_avg_pool1d(x, size),
        [height, width] => B::adaptive_avg_pool2d(x, [height, width]),
        _ => B::adaptive_avg_pool3d(x, sizes.dims()),
    }
}

fn adaptive_adjoint<B: Placeholders>(x: Shape, dy: FloatTensor<B>) -> FloatTensor<B> {
    let rank = x.num_dims();
    let like = B::shape_only(x, dy.dtype(), &dy.device());
    match rank {
        3 => B::adaptive_avg_pool1d_backward(like, dy),
        4 => B::adaptive_avg_pool2d_backward(like, dy),
        _ => B::adaptive_avg_pool3d_backward(like, dy),
    }
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use super::*;
    use crate::backend::testing::{assert_close, composed, random};
    use burn::backend::{Flex, ops::FloatTensorOps, read_sync};
    use burn::tensor::{FloatDType, bf16, f16};

    /// All combinations of a padding, whether it counts, and whether the number of windows is rounded up.
    fn all_options() -> impl Iterator<Item = AvgPoolOptions<2>> {
        [[(1, 1), (0, 0)], [(0, 1), (1, 0)]]
            .into_iter()
            .flat_map(|padding| of_kernel([3, 2], [2, 2], padding))
    }

    fn of_kernel(
        kernel_size: [usize; 2],
        stride: [usize; 2],
        padding: [(usize, usize); 2],
    ) -> impl Iterator<Item = AvgPoolOptions<2>> {
        [(false, false), (false, true), (true, false), (true, true)].into_iter().map(
            move |(count_include_pad, ceil_mode)| {
                AvgPoolOptions::new(kernel_size)
                    .with_stride(stride)
                    .with_padding_pairs(padding)
                    .with_count_include_pad(count_include_pad)
                    .with_ceil_mode(ceil_mode)
            },
        )
    }

    #[test]
    fn means_of_half_precision_are_those_in_full_precision() {
        for (dtype, digits) in
            [(FloatDType::F16, f16::MANTISSA_DIGITS), (FloatDType::BF16, bf16::MANTISSA_DIGITS)]
        {
            let half = |shape: &[usize]| Flex::float_cast(random(shape), dtype);
            let full = |x: &FloatTensor<Flex>| Flex::float_cast(x.clone(), FloatDType::F32);
            let check = |what: &str, y: FloatTensor<Flex>, exact: FloatTensor<Flex>| {
                assert_eq!(y.dtype(), dtype.into());
                let [y, exact] =
                    [y, exact].map(|x| read_sync(Flex::float_into_data(x)).expect("a CPU tensor"));
                assert_eq!(y.shape(), exact.shape(), "{what}");
                for (y, exact) in y.iter::<f32>().zip(exact.iter::<f32>()) {
                    // Rounded once, to half of the last digit, plus a hundredth of that for sums in another order.
                    let bound = 1.01 * exact.abs() * 0.5f32.powi(digits as i32) + 1e-7;
                    assert!((y - exact).abs() <= bound, "{what}: {y}, in f32 {exact}");
                }
            };
            // With windows of padding alone, too. Burn drops different ones if the padding is asymmetric.
            let odd = [[(3, 3), (4, 4)], [(3, 3), (3, 4)]]
                .into_iter()
                .flat_map(|padding| [[1, 1], [3, 2]].map(|stride| of_kernel([1, 2], stride, padding)));
            for options in all_options().chain(odd.flatten()) {
                let x = half(&[2, 3, 8, 9]);
                let y = Flex::mean_of_windows(x.clone(), &options);
                check(&format!("{options:?}"), y, average::<Flex>(full(&x), &options));
            }
            for (shape, sizes) in [
                (&[2, 3, 70][..], &[3][..]),
                (&[2, 3, 7, 9], &[4, 5]),
                (&[2, 3, 7, 9], &[1, 1]),
                (&[2, 3, 5, 6, 7], &[2, 1, 1]),
                (&[2, 3, 5, 6, 7], &[2, 6, 3]),
            ] {
                let (x, sizes) = (half(shape), Shape::from(sizes.to_vec()));
                let y = Flex::adaptive_mean(x.clone(), &sizes);
                check(&format!("{shape:?}"), y, adaptive_average::<Flex>(full(&x), &sizes));
            }
        }
    }

    #[test]
    fn default_bodies_equal_the_kernels() {
        for options in all_options() {
            let x = Shape::new([2, 3, 8, 9]);
            let dy = random(&output_shape(&x, &options));
            let body = composed(&average_adjoint::<Flex>(x.clone(), dy.clone(), &options));
            assert_close("average pool, dx", body, Flex::avg_pool2d_adjoint(x, dy, &options));
        }
        let (x, dy) = (Shape::new([2, 3, 7, 9]), random(&[2, 3, 4, 5]));
        let body = composed(&adaptive_adjoint::<Flex>(x.clone(), dy.clone()));
        assert_close("adaptive pool, dx", body, Flex::adaptive_avg_pool_adjoint(x, dy));
    }
}
