//! Gradients axis by axis, with exact windows.
use super::AvgPoolKernels;
use crate::backend::cpu::{
    CpuBackend,
    axis_map::{AxisMap, adjoint},
};
use burn::backend::{TensorMetadata, tensor::FloatTensor};
use burn::tensor::{Shape, ops::AvgPoolOptions};

impl<B: CpuBackend> AvgPoolKernels for B {
    fn avg_pool2d_adjoint(x: Shape, dy: FloatTensor<B>, options: &AvgPoolOptions<2>) -> FloatTensor<B> {
        let out = dy.shape();
        let axes: [AxisMap; 2] = core::array::from_fn(|axis| {
            AxisMap::mean_windows(
                x[axis + 2],
                out[axis + 2],
                options.kernel_size[axis],
                options.stride[axis],
                options.padding[axis],
                options.count_include_pad,
            )
        });
        adjoint::<B>(x, dy, &axes)
    }

    fn adaptive_avg_pool_adjoint(x: Shape, dy: FloatTensor<B>) -> FloatTensor<B> {
        let out = dy.shape();
        let axes: Vec<_> = (2..x.num_dims()).map(|axis| AxisMap::adaptive_mean(x[axis], out[axis])).collect();
        adjoint::<B>(x, dy, &axes)
    }
}
