//! Means in half precision, and gradients, computed axis by axis with exact windows.
use super::{AvgPoolKernels, adaptive_average, average, output_shape};
use crate::backend::Placeholders;
use crate::backend::axis_map::{AxisMap, AxisMaps};
use burn::backend::{TensorMetadata, tensor::FloatTensor};
use burn::tensor::{Shape, ops::AvgPoolOptions};

impl<B: AxisMaps + Placeholders> AvgPoolKernels for B {
    fn mean_of_windows(x: FloatTensor<B>, options: &AvgPoolOptions<2>) -> FloatTensor<B> {
        let image =
            B::image_of_half(&x, || mean_windows(&x.shape(), &output_shape(&x.shape(), options), options));
        image.unwrap_or_else(|| average::<B>(x, options))
    }

    fn adaptive_mean(x: FloatTensor<B>, sizes: &Shape) -> FloatTensor<B> {
        let image = B::image_of_half(&x, || adaptive_means(&x.shape()[2..], sizes));
        image.unwrap_or_else(|| adaptive_average::<B>(x, sizes))
    }

    fn avg_pool2d_adjoint(x: Shape, dy: FloatTensor<B>, options: &AvgPoolOptions<2>) -> FloatTensor<B> {
        let axes = mean_windows(&x, &dy.shape(), options);
        B::axis_adjoint(x, dy, axes)
    }

    fn adaptive_avg_pool_adjoint(x: Shape, dy: FloatTensor<B>) -> FloatTensor<B> {
        let axes = adaptive_means(&x[2..], &dy.shape()[2..]);
        B::axis_adjoint(x, dy, axes)
    }
}

/// The maps of an average pool from `x` to `out`, `[batch, channels, height, width]`.
fn mean_windows(x: &Shape, out: &Shape, options: &AvgPoolOptions<2>) -> Vec<AxisMap> {
    let map = |axis: usize| {
        AxisMap::mean_windows(
            x[axis + 2],
            out[axis + 2],
            options.kernel_size[axis],
            options.stride[axis],
            options.padding[axis],
            options.count_include_pad,
        )
    };
    vec![map(0), map(1)]
}

/// The maps of an adaptive average pool between these spatial axes.
fn adaptive_means(sizes: &[usize], out: &[usize]) -> Vec<AxisMap> {
    sizes.iter().zip(out).map(|(&size, &out)| AxisMap::adaptive_mean(size, out)).collect()
}
