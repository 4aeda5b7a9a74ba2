//! Dense layer with a low-rank adapter ([LoRA](https://arxiv.org/abs/2106.09685)): the effective weight is
//! `weight + scale a b`, and never exists.
//!
//! | | |
//! | --- | --- |
//! | computes | `y = x weight + scale (x a) b + bias`; a quantized weight is dequantized by blocks |
//! | keeps | `x` if `a` (or `weight`) is tracked; else `x a`, of the rank's width, if `b` is; handles of `weight`, `a`, `b` |
//! | backward | `dh = scale dy b^T`, `dx = dy weight^T + dh a^T`, `da = x^T dh`, `db = scale (x a)^T dy`, `dbias = sum(dy)` |
//!
//! Stock Burn computes the effective weight at every use, keeps it, and computes its gradient, of the same size: from which
//! those of `a` and `b` follow. Here low-rank products are added to `y` and `dx` block by block. Where `x` is kept, `x a` is
//! computed again: it would be more than stock keeps of an untracked `x`.
use super::{
    MaybeTensor,
    bilinear::{Bilinear, KeptWeight, Weight, no_node},
    kept::{Keeper, Kept},
    linear::Linear,
};
use crate::backend::{MemBackend, plain_backends};
use burn::backend::{
    Backend, ExtensionType, TensorMetadata,
    autodiff::{
        Autodiff,
        checkpoint::{base::Checkpointer, strategy::CheckpointStrategy},
        grads::Gradients,
        ops::{Backward, Ops, OpsKind},
    },
    backend_extension,
    tensor::{FloatTensor, QuantizedTensor},
};
use burn::tensor::{DType, Shape};

/// Dense layers with a low-rank adapter.
#[backend_extension(
    Flex: cfg(feature = "flex"),
    NdArray: cfg(feature = "ndarray"),
    Cube: cfg(any(feature = "wgpu", feature = "cuda")),
    Remote: cfg(feature = "remote"),
    Autodiff
)]
pub trait LoraOps: Backend {
    /// `x weight + scale (x a) b + bias`; x `[..., d_input]`, weight `[d_input, d_output]`, a `[d_input, rank]`, b
    /// `[rank, d_output]`, bias `[d_output]`. A weight of another dtype than `x` is cast at every use.
    fn memsave_lora(
        x: FloatTensor<Self>,
        #[extension_type] weight: Weight<Self>,
        #[extension_type] factors: LoraFactors<Self>,
        scale: f64,
        #[extension_type] bias: MaybeTensor<Self>,
    ) -> FloatTensor<Self>;
}
plain_backends!(LoraOps {
    fn memsave_lora(
        x: FloatTensor<Self>,
        weight: Weight<Self>,
        factors: LoraFactors<Self>,
        scale: f64,
        bias: MaybeTensor<Self>,
    ) -> FloatTensor<Self> {
        untracked::<Self>(x, weight, factors, scale, bias.into_option())
    }
});

/// The factors of an adapter.
#[derive(ExtensionType)]
pub struct LoraFactors<B: Backend> {
    /// `[d_input, rank]`
    pub a: FloatTensor<B>,
    /// `[rank, d_output]`
    pub b: FloatTensor<B>,
}

impl<B: LoraOps + MemBackend, C: CheckpointStrategy> LoraOps for Autodiff<B, C> {
    fn memsave_lora(
        x: FloatTensor<Self>,
        weight: Weight<Self>,
        factors: LoraFactors<Self>,
        scale: f64,
        bias: MaybeTensor<Self>,
    ) -> FloatTensor<Self> {
        let LoraFactors { a, b } = factors;
        let (bias, bias_node) = match bias.into_option().map(|bias| bias.into_parts()) {
            Some((bias, node)) => (Some(bias), node),
            None => (None, no_node::<B, C>(&x)),
        };
        let parents = [x.node(), a.node(), b.node(), weight.node(&x), bias_node];
        match (Step { scale }).prepare::<C>(parents).compute_bound().stateful() {
            OpsKind::Tracked(mut prep) => {
                let keeper = Keeper::new("lora", Some(weight.id().unwrap_or(a.id())));
                let x_is_read = a.is_tracked() || weight.is_tracked();
                let dh_is_wanted = x.is_tracked() || a.is_tracked();
                let h_is_kept = b.is_tracked() && !x_is_read;
                let a_is_read = x.is_tracked() || b.is_tracked() && x_is_read;
                let (plain_x, plain_a) = (x.primitive().clone(), a.primitive().clone());
                let kept_weight = x.is_tracked().then(|| keeper.keep_weight(&mut prep, &weight));
                let y = product::<B>(plain_x.clone(), weight.into_primitive(), bias);
                let h = B::linear(plain_x, plain_a, None);
                let saved = Saved {
                    x: x_is_read.then(|| keeper.keep(&mut prep, "x", &x, "a or weight is tracked")),
                    h: h_is_kept.then(|| keeper.keep_tensor("x a", h.clone(), "b is tracked")),
                    a: a_is_read.then(|| keeper.keep(&mut prep, "a", &a, "x or b is tracked")),
                    b: dh_is_wanted.then(|| keeper.keep(&mut prep, "b", &b, "x or a is tracked")),
                    weight: kept_weight,
                    x_shape: x.shape(),
                    h_shape: h.shape(),
                };
                prep.finish(
                    saved,
                    B::add_product(y, B::float_mul_scalar(h, scale.into()), b.into_primitive()),
                )
            }
            OpsKind::UnTracked(prep) => {
                let factors = LoraFactors { a: a.into_primitive(), b: b.into_primitive() };
                let (x, weight) = (x.into_primitive(), weight.into_primitive());
                prep.finish(untracked::<B>(x, weight, factors, scale, bias))
            }
        }
    }
}

/// `x weight + scale (x a) b + bias`
fn untracked<B: MemBackend>(
    x: FloatTensor<B>,
    weight: Weight<B>,
    factors: LoraFactors<B>,
    scale: f64,
    bias: Option<FloatTensor<B>>,
) -> FloatTensor<B> {
    let LoraFactors { a, b } = factors;
    let y = product::<B>(x.clone(), weight, bias); // first, since it needs the most
    B::add_product(y, B::float_mul_scalar(B::linear(x, a, None), scale.into()), b)
}

/// `x weight + bias`
fn product<B: MemBackend>(
    x: FloatTensor<B>,
    weight: Weight<B>,
    bias: Option<FloatTensor<B>>,
) -> FloatTensor<B> {
    let weight = cast::<B>(weight, x.dtype());
    Linear.forward_with(x, weight, bias)
}

/// A dense weight in the dtype of the adapter.
fn cast<B: Backend>(weight: Weight<B>, dtype: DType) -> Weight<B> {
    match weight {
        Weight::Dense(weight) if weight.dtype() != dtype => {
            Weight::Dense(B::float_cast(weight, dtype.into()))
        }
        weight => weight,
    }
}

#[derive(Debug)]
struct Step {
    scale: f64,
}

/// What the backward pass reads.
#[derive(Clone, Debug)]
struct Saved<Float, Quantized> {
    /// The input, if `a` or the weight is tracked.
    x: Option<Kept>,
    /// `x a`, if `b` is tracked and the input is not kept.
    h: Option<Float>,
    /// If the input is tracked, or `b` is and `x a` is not kept.
    a: Option<Kept>,
    /// If the input or `a` is tracked.
    b: Option<Kept>,
    /// The weight, if the input is tracked.
    weight: Option<KeptWeight<Quantized>>,
    x_shape: Shape,
    h_shape: Shape,
}

impl<B: MemBackend> Backward<B, 5> for Step {
    type State = Saved<FloatTensor<B>, QuantizedTensor<B>>;

    fn backward(self, ops: Ops<Self::State, 5>, grads: &mut Gradients, checkpointer: &mut Checkpointer) {
        let dy = grads.consume::<B>(&ops.node);
        let Saved { x, h, a, b, weight, x_shape, h_shape } = ops.state;
        let mut get = |kept: Option<Kept>| kept.map(|kept| kept.get::<B>(checkpointer));
        let (x, a, b) = (get(x), get(a), get(b));
        let weight = weight.map(|weight| weight.get::<B>(checkpointer));
        let scaled = |x: FloatTensor<B>| B::float_mul_scalar(x, self.scale.into());
        let dh_of = |b: &FloatTensor<B>, dy: FloatTensor<B>| {
            scaled(Linear.x_backward_with(h_shape.clone(), Weight::<B>::Dense(b.clone()), dy))
        };
        let [x_node, a_node, b_node, weight_node, bias_node] = ops.parents;

        let h = || h.or_else(|| Some(B::linear(x.clone()?, a.clone()?, None)));
        if let Some(node) = b_node
            && let Some(h) = h()
        {
            grads.register::<B>(node.id, scaled(B::linear_weight_backward(h, dy.clone())));
        }
        let mut dh = None;
        if let (Some(node), Some(x), Some(b)) = (a_node, &x, &b) {
            let gradient = dh.insert(dh_of(b, dy.clone())).clone();
            grads.register::<B>(node.id, B::linear_weight_backward(x.clone(), gradient));
        }
        if let (Some(node), Some(x)) = (weight_node, x) {
            grads.register::<B>(node.id, B::linear_weight_backward(x, dy.clone()));
        }
        if let Some(node) = bias_node {
            grads.register::<B>(node.id, B::linear_bias_backward(dy.clone()));
        }
        if let (Some(node), Some(weight), Some(a), Some(b)) = (x_node, weight, a, b) {
            let dx = Linear.x_backward_with(x_shape, cast::<B>(weight, dy.dtype()), dy.clone());
            let dh = dh.unwrap_or_else(|| dh_of(&b, dy));
            grads.register::<B>(node.id, B::add_product(dx, dh, B::float_swap_dims(a, 0, 1)));
        }
    }
}
