//! Max pooling by Burn's own operation, with its indices, for backends without kernels.
use super::output_shape;
use crate::backend::{Placeholders, Saved};
use crate::ops::conv::crop;
use burn::backend::{
    Backend, TensorMetadata, get_or_init_device_settings,
    ops::PadMode,
    tensor::{FloatTensor, IntTensor},
};
use burn::tensor::{Shape, ops::MaxPoolOptions};

/// The positions of the winners, as Burn's indices.
#[derive(Clone, Debug)]
pub struct WinnerIndices<B: Backend> {
    indices: IntTensor<B>,
    /// The shape of the input that Burn pooled. It includes the padding if that is asymmetric.
    pooled: Shape,
}

impl<B: Backend> Saved for WinnerIndices<B> {
    fn bytes(&self) -> usize {
        self.indices.dtype().size() * self.indices.shape().num_elements()
    }
}

/// The padding that Burn's max pooling adds: none if the padding is asymmetric, because the input is then padded before.
fn padding(options: &MaxPoolOptions<2>) -> [usize; 2] {
    match options.is_asymmetric() {
        true => [0; 2],
        false => options.padding.map(|(begin, _)| begin),
    }
}

/// See [`MaxPoolKernels::max_pool2d_with_offsets`](super::MaxPoolKernels::max_pool2d_with_offsets).
pub(crate) fn forward<B: Backend>(
    x: FloatTensor<B>,
    options: &MaxPoolOptions<2>,
) -> (FloatTensor<B>, WinnerIndices<B>) {
    let out = output_shape(&x.shape(), options);
    let x = match options.is_asymmetric() {
        true => {
            let [rows, columns] = options.padding;
            B::float_pad(x, &[(0, 0), (0, 0), rows, columns], PadMode::Constant(f32::NEG_INFINITY))
        }
        false => x,
    };
    let pooled = x.shape();
    let ints = get_or_init_device_settings::<B>(&x.device()).int_dtype;
    let result = B::max_pool2d_with_indices(
        x,
        options.kernel_size,
        options.stride,
        padding(options),
        options.dilation,
        options.ceil_mode,
        ints,
    );
    // `crop` drops the windows that only Burn has. Their indices stay, and get gradients of zero, so that the shapes agree.
    (crop::<B>(result.output, &out, &[0; 2]), WinnerIndices { indices: result.indices, pooled })
}

/// See [`MaxPoolKernels::max_pool2d_with_offsets_backward`](super::MaxPoolKernels::max_pool2d_with_offsets_backward).
pub(crate) fn backward<B: Placeholders>(
    x: Shape,
    WinnerIndices { indices, pooled }: &WinnerIndices<B>,
    dy: FloatTensor<B>,
    options: &MaxPoolOptions<2>,
) -> FloatTensor<B> {
    let windows = indices.shape();
    let dropped = [0, 1, 2, 3].map(|axis| (0, windows[axis] - dy.shape()[axis]));
    let dy = match dropped.iter().all(|&(_, end)| end == 0) {
        true => dy,
        false => B::float_pad(dy, &dropped, PadMode::Constant(0.0)),
    };
    let like = B::shape_only(pooled.clone(), dy.dtype(), &dy.device());
    let dx = B::max_pool2d_with_indices_backward(
        like,
        options.kernel_size,
        options.stride,
        padding(options),
        options.dilation,
        options.ceil_mode,
        dy,
        indices.clone(),
    );
    match options.is_asymmetric() {
        true => crop::<B>(dx.x_grad, &x, &options.padding.map(|(begin, _)| begin)),
        false => dx.x_grad,
    }
}
