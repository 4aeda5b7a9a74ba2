//! Max pooling over one or two axes.
//!
//! | | |
//! | --- | --- |
//! | computes | the maximum of every window |
//! | keeps | the position of the maximum in its window if `x` is tracked: 1 byte per output for windows of up to 255 elements, |
//! | | else 2 or 4 bytes (on wgpu and CUDA always 4, and per tensor 4 more bytes); on remote devices, Burn's index |
//! | backward | every `dy` goes to the element that was the maximum, the winner of its window |
//!
//! Stock Burn keeps `x` and an index of 8 bytes per output (on Flex 4).
use super::fixed_linear::{lift, lifted};
use crate::backend::{Placeholders, Saved, composing_backends};
use crate::graph::{BackwardPass, Inputs, KeepPlan, Operation, Recorder, Run, Tracking, extension, given};
use burn::backend::{TensorMetadata, tensor::FloatTensor};
use burn::tensor::{Shape, ops::MaxPoolOptions};

#[cfg(any(feature = "remote", all(test, feature = "flex")))]
mod composed;
#[cfg(any(feature = "flex", feature = "ndarray"))]
pub(super) mod cpu;
#[cfg(any(feature = "wgpu", feature = "cuda"))]
mod cube;

extension! {
    /// Max pooling.
    pub trait MaxPoolOps(MaxPoolKernels) {
        /// Max pooling of `[batch, channels, height, width]` or without the height, which counts as 1. No window may be larger
        /// than the padded input.
        fn memsave_max_pool2d(x: FloatTensor<Self>, options: MaxPoolOptions<2>) -> FloatTensor<Self> {
            Self::run(MaxPool(options), [Some(x)])
        }
    }
}

const X: usize = 0;

/// A max pool.
#[derive(Clone, Debug)]
pub struct MaxPool(MaxPoolOptions<2>);

impl MaxPool {
    /// Pools over two axes; a single axis counts as the second.
    fn pool<B: MaxPoolKernels>(&self, x: FloatTensor<B>) -> (FloatTensor<B>, B::Offsets) {
        let shape = x.shape();
        let (y, offsets) = B::max_pool2d_with_offsets(B::float_reshape(x, lift(&shape)), &self.0);
        match shape.num_dims() {
            3 => {
                let [batch, channels, _, length] = y.shape().dims();
                (B::float_reshape(y, Shape::new([batch, channels, length])), offsets)
            }
            _ => (y, offsets),
        }
    }
}

impl<B: MaxPoolKernels> Operation<B, 1> for MaxPool {
    const INPUTS: [&'static str; 1] = ["x"];
    const SHAPES: &'static [usize] = &[X];
    type Saved = Winners<B::Offsets>;

    fn name(&self) -> &'static str {
        "max_pool"
    }

    fn plan(&self, _: &Tracking<B, 1>) -> KeepPlan<1> {
        KeepPlan::nothing()
    }

    fn forward(&self, [x]: Inputs<B, 1>) -> FloatTensor<B> {
        self.pool::<B>(given(x)).0
    }

    fn forward_saving(&self, [x]: Inputs<B, 1>, recorder: &Recorder<1>) -> (FloatTensor<B>, Self::Saved) {
        let (y, offsets) = self.pool::<B>(given(x));
        let offsets = recorder.report().state("offsets", offsets, "x is tracked");
        (y, Winners { offsets, options: self.0.clone() })
    }

    fn backward(
        Winners { offsets, options }: Self::Saved,
        dy: FloatTensor<B>,
        pass: &mut BackwardPass<B, 1>,
    ) {
        let dx = lifted::<B>(pass.shape(X), dy, |x, dy| {
            B::max_pool2d_with_offsets_backward(x, &offsets, dy, &options)
        });
        pass.give(X, dx);
    }
}

/// What the backward pass reads.
#[derive(Clone, Debug)]
pub struct Winners<Offsets> {
    /// The position of the maximum of every window.
    offsets: Offsets,
    options: MaxPoolOptions<2>,
}

/// The kernels.
pub trait MaxPoolKernels: Placeholders {
    /// The position of the winner in its window, for every output.
    type Offsets: Saved;

    /// Max pooling of `[batch, channels, height, width]`, and the position of every maximum. No window may be larger than the padded
    /// input.
    fn max_pool2d_with_offsets(
        x: FloatTensor<Self>,
        options: &MaxPoolOptions<2>,
    ) -> (FloatTensor<Self>, Self::Offsets);

    /// Gradient of the input, of shape `x`.
    fn max_pool2d_with_offsets_backward(
        x: Shape,
        offsets: &Self::Offsets,
        dy: FloatTensor<Self>,
        options: &MaxPoolOptions<2>,
    ) -> FloatTensor<Self>;
}
composing_backends!(MaxPoolKernels {
    type Offsets = composed::WinnerIndices<Self>;

    fn max_pool2d_with_offsets(
        x: FloatTensor<Self>,
        options: &MaxPoolOptions<2>,
    ) -> (FloatTensor<Self>, composed::WinnerIndices<Self>) {
        composed::forward::<Self>(x, options)
    }

    fn max_pool2d_with_offsets_backward(
        x: Shape,
        offsets: &composed::WinnerIndices<Self>,
        dy: FloatTensor<Self>,
        options: &MaxPoolOptions<2>,
    ) -> FloatTensor<Self> {
        composed::backward::<Self>(x, offsets, dy, options)
    }
});

/// The shape of the output. No window may be larger than the padded input.
#[cfg(any(feature = "flex", feature = "ndarray", feature = "wgpu", feature = "cuda", feature = "remote"))]
fn output_shape(x: &Shape, options: &MaxPoolOptions<2>) -> Shape {
    let MaxPoolOptions { kernel_size, stride, padding, dilation, ceil_mode } = *options;
    let span = [0, 1].map(|axis| dilation[axis] * (kernel_size[axis] - 1) + 1);
    super::fixed_linear::pooled(x, span, stride, padding, ceil_mode, true)
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use super::*;
    use crate::backend::testing::{assert_close, composed as as_composed, random};
    use burn::backend::Flex;

    #[test]
    fn composed_bodies_equal_the_kernels() {
        for padding in [[(1, 1), (0, 0)], [(0, 1), (1, 0)]] {
            for ceil_mode in [false, true] {
                let options = MaxPoolOptions {
                    kernel_size: [3, 2],
                    stride: [2, 3],
                    padding,
                    dilation: [1, 2],
                    ceil_mode,
                };
                let x = random(&[2, 3, 8, 9]);
                let (body, winners) = composed::forward::<Flex>(x.clone(), &options);
                let (cpu, offsets) = Flex::max_pool2d_with_offsets(x.clone(), &options);
                let dy = random(&cpu.shape().to_vec());
                assert_close("max pool", as_composed(&body), cpu);
                let body = composed::backward::<Flex>(x.shape(), &winners, dy.clone(), &options);
                let cpu = Flex::max_pool2d_with_offsets_backward(x.shape(), &offsets, dy, &options);
                assert_close("max pool, dx", as_composed(&body), cpu);
            }
        }
    }
}
