//! Average pooling, adaptive or not: the mean of every window. Two cases of [`fixed_linear`](super::fixed_linear).
//!
//! NdArray 0.22.1 computes the windows of adaptive pooling in f32, and is off by one on axes of more than about 4096 elements;
//! the windows of the gradient here are exact.
use super::{
    conv::crop,
    extension::extension,
    fixed_linear::{FixedLinear, fixed_linear, lifted},
};
use crate::backend::{Placeholders, composing_backends};
use burn::backend::{TensorMetadata, get_or_init_device_settings, ops::PadMode, tensor::FloatTensor};
use burn::tensor::{Shape, ops::AvgPoolOptions};

#[cfg(any(feature = "flex", feature = "ndarray", feature = "wgpu", feature = "cuda"))]
mod axes;

extension! {
    /// Average pooling.
    pub trait AvgPoolOps(AvgPoolKernels) {
        /// Records that `y` is the average pool of `x`, `[batch, channels, height, width]` or without the height, which counts
        /// as 1.
        fn memsave_avg_pool2d(
            x: FloatTensor<Self>,
            y: FloatTensor<Self>,
            options: AvgPoolOptions<2>,
        ) -> FloatTensor<Self> {
            fixed_linear::<Self, _>(AvgPool(options), x, y)
        }
        /// Records that `y` is the adaptive average pool of `x`, `[batch, channels, ...]`, with one to three spatial axes.
        fn memsave_adaptive_avg_pool(x: FloatTensor<Self>, y: FloatTensor<Self>) -> FloatTensor<Self> {
            fixed_linear::<Self, _>(AdaptiveAvgPool, x, y)
        }
    }
}

/// An average pool.
#[derive(Clone, Debug)]
pub struct AvgPool(AvgPoolOptions<2>);

impl<B: AvgPoolKernels> FixedLinear<B> for AvgPool {
    const NAME: &'static str = "avg_pool";

    fn adjoint(&self, x: Shape, dy: FloatTensor<B>) -> FloatTensor<B> {
        lifted::<B>(x, dy, |x, dy| B::avg_pool2d_adjoint(x, dy, &self.0))
    }
}

/// An adaptive average pool.
#[derive(Clone, Debug)]
pub struct AdaptiveAvgPool;

impl<B: AvgPoolKernels> FixedLinear<B> for AdaptiveAvgPool {
    const NAME: &'static str = "adaptive_avg_pool";

    fn adjoint(&self, x: Shape, dy: FloatTensor<B>) -> FloatTensor<B> {
        B::adaptive_avg_pool_adjoint(x, dy)
    }
}

/// The kernels.
pub trait AvgPoolKernels: Placeholders {
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

// Free functions, so that the tests can run them on a backend that has kernels: Burn differentiates no gradient of a pool.

fn average_adjoint<B: Placeholders>(
    x: Shape,
    dy: FloatTensor<B>,
    options: &AvgPoolOptions<2>,
) -> FloatTensor<B> {
    let (device, dtype) = (dy.device(), dy.dtype());
    let (kernel, stride) = (options.kernel_size, options.stride);
    let pool = |x: Shape, dy: FloatTensor<B>, padding: [usize; 2], count_include_pad: bool| {
        let like = B::shape_only(x, dtype, &device);
        B::avg_pool2d_backward(like, dy, kernel, stride, padding, count_include_pad, options.ceil_mode)
    };
    if !options.is_asymmetric() {
        return pool(x, dy, options.padding.map(|(begin, _)| begin), options.count_include_pad);
    }
    // As Burn's forward pass: pool the padded input; if the padding does not count, divide by the share of the window that is
    // input.
    let [rows, columns] = options.padding;
    let padded = Shape::new([x[0], x[1], x[2] + rows.0 + rows.1, x[3] + columns.0 + columns.1]);
    let dy = match options.count_include_pad {
        true => dy,
        false => {
            let ones = B::float_ones(Shape::new([1, 1, x[2], x[3]]), &device, dtype.into());
            let padding = [(0, 0), (0, 0), rows, columns];
            let ones = B::float_pad(ones, &padding, PadMode::Constant(0.0));
            let share = B::avg_pool2d(ones, kernel, stride, [0; 2], false, options.ceil_mode);
            let out = Shape::new([1, 1, dy.shape()[2], dy.shape()[3]]);
            let share = crop::<B>(share, &out, &[0; 2]);
            let bools = get_or_init_device_settings::<B>(&device).bool_dtype;
            let empty = B::float_equal_elem(share.clone(), 0.into(), bools);
            B::float_div(dy, B::float_mask_fill(share, empty, 1.into()))
        }
    };
    let dx = pool(padded, dy, [0; 2], options.count_include_pad);
    crop::<B>(dx, &x, &[rows.0, columns.0])
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
    use crate::ops::testing::{assert_close, composed, random};
    use burn::backend::Flex;

    #[test]
    fn default_bodies_equal_the_kernels() {
        for (padding, count_include_pad) in
            [([(1, 1), (0, 0)], false), ([(0, 1), (1, 0)], true), ([(0, 1), (1, 0)], false)]
        {
            let options = AvgPoolOptions {
                kernel_size: [3, 2],
                stride: [2, 2],
                padding,
                count_include_pad,
                ceil_mode: false,
            };
            let dy = random(&[2, 3, 4, 4]);
            let x = Shape::new([2, 3, 8, if padding[1] == (1, 0) { 7 } else { 8 }]);
            let body = composed(&average_adjoint::<Flex>(x.clone(), dy.clone(), &options));
            assert_close("average pool, dx", body, Flex::avg_pool2d_adjoint(x, dy, &options));
        }
        let (x, dy) = (Shape::new([2, 3, 7, 9]), random(&[2, 3, 4, 5]));
        let body = composed(&adaptive_adjoint::<Flex>(x.clone(), dy.clone()));
        assert_close("adaptive pool, dx", body, Flex::adaptive_avg_pool_adjoint(x, dy));
    }
}
