//! Deformable convolution over two axes.
//!
//! | | |
//! | --- | --- |
//! | computes | a convolution that samples `x` at positions moved by `offset` and weighted by `mask`, plus `bias` |
//! | keeps | what the wanted gradients read: `x` for those of offset, weight and mask; `weight` for those of x, offset and mask; |
//! | | `offset` and `mask` for all gradients but that of the bias |
//! | backward | Burn's, which computes all gradients at once |
//!
//! Stock Burn keeps all of its inputs. Its backward pass, which this one calls, has faults: Flex 0.22.1 computes it in f32
//! even for f64, and NdArray 0.22.1 computes wrong gradients of offset and mask if there is more than one offset group
//! (`compute_offset_and_mask_gradient` reads the columns of the first group for all groups).
use crate::backend::{ChannelSums, Placeholders};
use crate::{
    backend::optional::MaybeTensor,
    graph::{BackwardPass, Inputs, KeepPlan, Operation, Recorder, Run, Tracking, extension, given},
};
use burn::backend::{TensorMetadata, tensor::FloatTensor};
use burn::tensor::ops::DeformConvOptions;

extension! {
    /// Deformable convolutions.
    pub trait DeformConvOps(DeformConvKernels) {
        /// See [`burn::tensor::module::deform_conv2d`].
        fn memsave_deform_conv2d(
            x: FloatTensor<Self>,
            offset: FloatTensor<Self>,
            weight: FloatTensor<Self>,
            #[extension_type] mask: MaybeTensor<Self>,
            #[extension_type] bias: MaybeTensor<Self>,
            options: DeformConvOptions<2>,
        ) -> FloatTensor<Self> {
            let inputs = [Some(x), Some(offset), Some(weight), mask.into_option(), bias.into_option()];
            Self::run(DeformConv(options), inputs)
        }
    }
}

/// What the backward pass needs besides Burn's operations.
pub trait DeformConvKernels: ChannelSums + Placeholders {}
impl<B: ChannelSums + Placeholders> DeformConvKernels for B {}

const X: usize = 0;
const OFFSET: usize = 1;
const WEIGHT: usize = 2;
const MASK: usize = 3;
const BIAS: usize = 4;

/// A deformable convolution.
#[derive(Clone, Debug)]
pub struct DeformConv(DeformConvOptions<2>);

impl<B: DeformConvKernels> Operation<B, 5> for DeformConv {
    const INPUTS: [&'static str; 5] = ["x", "offset", "weight", "mask", "bias"];
    const PARAMETERS: &'static [usize] = &[WEIGHT];
    const SHAPES: &'static [usize] = &[X, OFFSET, WEIGHT, MASK, BIAS];
    type Saved = Self;

    fn name(&self) -> &'static str {
        "deform_conv2d"
    }

    fn plan(&self, inputs: &Tracking<B, 5>) -> KeepPlan<5> {
        let sampling = inputs.tracked(OFFSET) || inputs.tracked(MASK);
        let any = sampling || inputs.tracked(X) || inputs.tracked(WEIGHT);
        let reason = "a gradient reads it";
        KeepPlan::nothing()
            .keep_if(sampling || inputs.tracked(WEIGHT), X, reason)
            .keep_if(any, OFFSET, reason)
            .keep_if(sampling || inputs.tracked(X), WEIGHT, reason)
            .keep_if(any, MASK, reason)
    }

    fn forward(&self, [x, offset, weight, mask, bias]: Inputs<B, 5>) -> FloatTensor<B> {
        B::deform_conv2d(given(x), given(offset), given(weight), mask, bias, self.0.clone())
    }

    fn forward_saving(&self, inputs: Inputs<B, 5>, _: &Recorder<5>) -> (FloatTensor<B>, Self) {
        (Operation::<B, 5>::forward(self, inputs), self.clone())
    }

    fn backward(Self(options): Self, dy: FloatTensor<B>, pass: &mut BackwardPass<B, 5>) {
        let Some(offset) = pass.take(OFFSET) else {
            return pass.give(BIAS, B::sum_to_channels(dy));
        };
        // If no wanted gradient reads an input, Burn reads only its shape.
        let mut take = |input: usize| {
            let placeholder =
                |pass: &BackwardPass<B, 5>| B::shape_only(pass.shape(input), dy.dtype(), &dy.device());
            pass.take(input).unwrap_or_else(|| placeholder(pass))
        };
        let (x, weight) = (take(X), take(WEIGHT));
        let bias = pass.wants(BIAS).then(|| B::shape_only(pass.shape(BIAS), dy.dtype(), &dy.device()));
        let all = B::deform_conv2d_backward(x, offset, weight, pass.take(MASK), bias, dy, options);
        let [x, offset, weight] = [all.x_grad, all.offset_grad, all.weight_grad].map(Some);
        pass.give_all([x, offset, weight, all.mask_grad, all.bias_grad]);
    }
}
