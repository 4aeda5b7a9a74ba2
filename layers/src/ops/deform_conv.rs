//! Deformable convolution over two axes.
//!
//! | | |
//! | --- | --- |
//! | computes | a convolution that samples `x` at positions moved by `offset` and weighted by `mask`, plus `bias` |
//! | keeps | what the wanted gradients read: `x` for those of offset, weight, mask; `weight` for those of x, offset, mask; `offset` and `mask` for all but the bias |
//! | backward | Burn's, which computes all gradients at once |
//!
//! Stock Burn keeps all of its inputs. Its backward pass, which this one calls, has faults: Flex 0.22.1 computes it in f32,
//! also for f64, and NdArray 0.22.1 computes wrong gradients of offset and mask where there is more than one offset group
//! (`compute_offset_and_mask_gradient` reads the columns of the first group for all).
use super::{
    MaybeTensor,
    kept::{Keeper, Kept},
};
use crate::backend::{MemBackend, plain_backends};
use burn::backend::{
    Backend, TensorMetadata,
    autodiff::{
        Autodiff,
        checkpoint::{base::Checkpointer, strategy::CheckpointStrategy},
        grads::Gradients,
        ops::{Backward, NodeGuard, Ops, OpsKind},
    },
    backend_extension,
    tensor::FloatTensor,
};
use burn::tensor::{Shape, ops::DeformConvOptions};

/// Deformable convolutions.
#[backend_extension(
    Flex: cfg(feature = "flex"),
    NdArray: cfg(feature = "ndarray"),
    Cube: cfg(any(feature = "wgpu", feature = "cuda")),
    Remote: cfg(feature = "remote"),
    Autodiff
)]
pub trait DeformConvOps: Backend {
    /// See [`burn::tensor::module::deform_conv2d`].
    fn memsave_deform_conv2d(
        x: FloatTensor<Self>,
        offset: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        #[extension_type] mask: MaybeTensor<Self>,
        #[extension_type] bias: MaybeTensor<Self>,
        options: DeformConvOptions<2>,
    ) -> FloatTensor<Self> {
        Self::deform_conv2d(x, offset, weight, mask.into_option(), bias.into_option(), options)
    }
}
plain_backends!(DeformConvOps);

impl<B: DeformConvOps + MemBackend, C: CheckpointStrategy> DeformConvOps for Autodiff<B, C> {
    fn memsave_deform_conv2d(
        x: FloatTensor<Self>,
        offset: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        mask: MaybeTensor<Self>,
        bias: MaybeTensor<Self>,
        options: DeformConvOptions<2>,
    ) -> FloatTensor<Self> {
        let inputs = Inputs { x, offset, weight, mask: mask.into_option(), bias: bias.into_option() };
        let [x, offset, weight] = [&inputs.x, &inputs.offset, &inputs.weight].map(|tensor| tensor.node());
        match (inputs.mask.as_ref().map(|mask| mask.node()), inputs.bias.as_ref().map(|bias| bias.node())) {
            (None, None) => record::<B, C, 3>(inputs, [x, offset, weight], options),
            (Some(mask), None) => record::<B, C, 4>(inputs, [x, offset, weight, mask], options),
            (None, Some(bias)) => record::<B, C, 4>(inputs, [x, offset, weight, bias], options),
            (Some(mask), Some(bias)) => record::<B, C, 5>(inputs, [x, offset, weight, mask, bias], options),
        }
    }
}

struct Inputs<T> {
    x: T,
    offset: T,
    weight: T,
    mask: Option<T>,
    bias: Option<T>,
}

fn record<B: DeformConvOps + MemBackend, C: CheckpointStrategy, const N: usize>(
    inputs: Inputs<FloatTensor<Autodiff<B, C>>>,
    parents: [NodeGuard; N],
    options: DeformConvOptions<2>,
) -> FloatTensor<Autodiff<B, C>> {
    let Inputs { x, offset, weight, mask, bias } = inputs;
    let forward = |x, offset, weight, mask: Option<_>, bias: Option<_>, options| {
        B::deform_conv2d(x, offset, weight, mask, bias, options)
    };
    match DeformConv.prepare::<C>(parents).compute_bound().stateful() {
        OpsKind::Tracked(mut prep) => {
            let keeper = Keeper::new("deform_conv2d", Some(weight.id()));
            let mask_tracked = mask.as_ref().is_some_and(|mask| mask.is_tracked());
            let sampling = offset.is_tracked() || mask_tracked;
            let any = sampling || x.is_tracked() || weight.is_tracked();
            let mut keep = |needed: bool, name, tensor: &FloatTensor<Autodiff<B, C>>| Operand {
                kept: needed.then(|| keeper.keep(&mut prep, name, tensor, "a gradient reads it")),
                shape: tensor.shape(),
            };
            let saved = Saved {
                x: keep(sampling || weight.is_tracked(), "x", &x),
                offset: keep(any, "offset", &offset),
                weight: keep(sampling || x.is_tracked(), "weight", &weight),
                mask: mask.as_ref().map(|mask| keep(any, "mask", mask)),
                bias: bias.as_ref().map(|bias| keep(false, "bias", bias)),
                options: options.clone(),
                any,
            };
            let (mask, bias) =
                (mask.map(|mask| mask.into_primitive()), bias.map(|bias| bias.into_primitive()));
            let [x, offset, weight] = [x, offset, weight].map(|tensor| tensor.into_primitive());
            prep.finish(saved, forward(x, offset, weight, mask, bias, options))
        }
        OpsKind::UnTracked(prep) => {
            let (mask, bias) =
                (mask.map(|mask| mask.into_primitive()), bias.map(|bias| bias.into_primitive()));
            let [x, offset, weight] = [x, offset, weight].map(|tensor| tensor.into_primitive());
            prep.finish(forward(x, offset, weight, mask, bias, options))
        }
    }
}

#[derive(Debug)]
struct DeformConv;

/// What the backward pass reads.
#[derive(Clone, Debug)]
struct Saved {
    x: Operand,
    offset: Operand,
    weight: Operand,
    mask: Option<Operand>,
    bias: Option<Operand>,
    options: DeformConvOptions<2>,
    /// Whether anything but the bias is tracked.
    any: bool,
}

/// An input: itself if a gradient reads it, or its shape.
#[derive(Clone, Debug)]
struct Operand {
    kept: Option<Kept>,
    shape: Shape,
}

impl Operand {
    fn get<B: MemBackend>(self, like: &FloatTensor<B>, checkpointer: &mut Checkpointer) -> FloatTensor<B> {
        match self.kept {
            Some(kept) => kept.get::<B>(checkpointer),
            None => B::shape_only(self.shape, like.dtype(), &like.device()),
        }
    }
}

impl<B: MemBackend, const N: usize> Backward<B, N> for DeformConv {
    type State = Saved;

    fn backward(self, ops: Ops<Saved, N>, grads: &mut Gradients, checkpointer: &mut Checkpointer) {
        let saved = ops.state;
        let dy = grads.consume::<B>(&ops.node);
        let (has_mask, has_bias) = (saved.mask.is_some(), saved.bias.is_some());
        let mut parents = ops.parents.into_iter();
        let mut next = || parents.next().flatten();
        let nodes = [next(), next(), next()];
        let mask_node = if has_mask { next() } else { None };
        let bias_node = if has_bias { next() } else { None };
        if !saved.any {
            if let Some(node) = bias_node {
                grads.register::<B>(node.id, B::sum_to_channels(dy));
            }
            return;
        }
        let mut get = |operand: Operand| operand.get::<B>(&dy, checkpointer);
        let (x, offset, weight) = (get(saved.x), get(saved.offset), get(saved.weight));
        let (mask, bias) = (saved.mask.map(&mut get), saved.bias.map(&mut get));
        let all = B::deform_conv2d_backward(x, offset, weight, mask, bias, dy, saved.options);
        for (node, grad) in nodes.into_iter().zip([all.x_grad, all.offset_grad, all.weight_grad]) {
            if let Some(node) = node {
                grads.register::<B>(node.id, grad);
            }
        }
        for (node, grad) in [(mask_node, all.mask_grad), (bias_node, all.bias_grad)] {
            if let (Some(node), Some(grad)) = (node, grad) {
                grads.register::<B>(node.id, grad);
            }
        }
    }
}
