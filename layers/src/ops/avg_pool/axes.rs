//! Gradients axis by axis, with exact windows.
use super::AvgPoolKernels;
use crate::backend::Placeholders;
use crate::backend::axis_map::{AxisMap, AxisMaps};
use burn::backend::{TensorMetadata, tensor::FloatTensor};
use burn::tensor::{Shape, ops::AvgPoolOptions};

impl<B: AxisMaps + Placeholders> AvgPoolKernels for B {
    fn avg_pool2d_adjoint(x: Shape, dy: FloatTensor<B>, options: &AvgPoolOptions<2>) -> FloatTensor<B> {
        let out = dy.shape();
        let axes = [0, 1].map(|axis| {
            AxisMap::mean_windows(
                x[axis + 2],
                out[axis + 2],
                options.kernel_size[axis],
                options.stride[axis],
                options.padding[axis],
                options.count_include_pad,
            )
        });
        B::axis_adjoint(x, dy, axes.into())
    }

    fn adaptive_avg_pool_adjoint(x: Shape, dy: FloatTensor<B>) -> FloatTensor<B> {
        let out = dy.shape();
        let axes: Vec<AxisMap> =
            (2..x.num_dims()).map(|axis| AxisMap::adaptive_mean(x[axis], out[axis])).collect();
        B::axis_adjoint(x, dy, axes)
    }
}
