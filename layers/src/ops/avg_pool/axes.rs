//! Means in half precision, and gradients, computed axis by axis with exact windows.
use super::{AvgPoolKernels, adaptive_average, average, output_shape};
use crate::backend::Placeholders;
use crate::backend::axis_map::{AxisMap, AxisMaps, Regular, Resized, Rule};
use burn::backend::{TensorMetadata, tensor::FloatTensor};
use burn::tensor::{Shape, ops::AvgPoolOptions};

impl<B: AxisMaps + Placeholders> AvgPoolKernels for B {
    fn mean_of_windows(x: FloatTensor<B>, options: &AvgPoolOptions<2>) -> FloatTensor<B> {
        let image = B::image_of_half(&x, || {
            maps::<B>(&mean_windows(&x.shape(), &output_shape(&x.shape(), options), options))
        });
        image.unwrap_or_else(|| average::<B>(x, options))
    }

    fn adaptive_mean(x: FloatTensor<B>, sizes: &Shape) -> FloatTensor<B> {
        let image = B::image_of_half(&x, || maps::<B>(&adaptive_means(&x.shape()[2..], sizes)));
        image.unwrap_or_else(|| adaptive_average::<B>(x, sizes))
    }

    fn avg_pool2d_adjoint(x: Shape, dy: FloatTensor<B>, options: &AvgPoolOptions<2>) -> FloatTensor<B> {
        let axes = mean_windows(&x, &dy.shape(), options);
        B::regular_adjoint(x, dy, axes)
    }

    fn adaptive_avg_pool_adjoint(x: Shape, dy: FloatTensor<B>) -> FloatTensor<B> {
        let axes = adaptive_means(&x[2..], &dy.shape()[2..]);
        B::regular_adjoint(x, dy, axes)
    }
}

/// The maps of an average pool from `x` to `out`, `[batch, channels, height, width]`.
fn mean_windows(x: &Shape, out: &Shape, options: &AvgPoolOptions<2>) -> Vec<Regular> {
    let map = |axis: usize| Regular {
        axis: Resized::between(x[axis + 2], out[axis + 2]),
        rule: Rule::Windows {
            kernel: options.kernel_size[axis],
            stride: options.stride[axis],
            padding: options.padding[axis],
            count_include_pad: options.count_include_pad,
        },
    };
    vec![map(0), map(1)]
}

/// The maps of an adaptive average pool between these spatial axes.
fn adaptive_means(sizes: &[usize], out: &[usize]) -> Vec<Regular> {
    let map = |(&size, &out)| Regular { axis: Resized::between(size, out), rule: Rule::Adaptive };
    sizes.iter().zip(out).map(map).collect()
}

fn maps<B: AxisMaps>(axes: &[Regular]) -> Vec<AxisMap> {
    axes.iter().map(Regular::map::<B>).collect()
}
