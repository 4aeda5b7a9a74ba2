//! Operations that are linear in their input and linear in their weight: dense layers, convolutions and their transposes.
//!
//! | | |
//! | --- | --- |
//! | computes | `y = op(x, weight) + bias` |
//! | keeps | `x` if `weight` is tracked; `weight` (a handle) if `x` is tracked; never more than the shapes of the rest |
//! | | of a quantized weight the handle of the packed one: it is dequantized here and in the backward pass |
//! | backward | `dx = adjoint(weight, dy)`, `dweight = adjoint(x, dy)`, `dbias = sum(dy)` |
//!
//! This is the observation of [arXiv 2404.12406](https://arxiv.org/abs/2404.12406), written once: each gradient reads the
//! other factor only.
use super::kept::{Keeper, Kept};
use burn::backend::{
    AutodiffBackend, Backend, ExtensionType, TensorMetadata,
    autodiff::{
        Autodiff, NodeId,
        checkpoint::{base::Checkpointer, strategy::CheckpointStrategy},
        grads::Gradients,
        ops::{Backward, NodeGuard, Ops, OpsKind},
    },
    tensor::{FloatTensor, QuantizedTensor},
};
use burn::tensor::{DType, Shape};

/// The weight of a layer.
#[derive(Clone, Debug, ExtensionType)]
pub enum Weight<B: Backend> {
    /// Of floats.
    Dense(FloatTensor<B>),
    /// Packed. No gradient flows to it.
    Quantized(QuantizedTensor<B>),
}

impl<B: Backend> Weight<B> {
    /// As floats.
    pub fn into_float(self, dtype: DType) -> FloatTensor<B> {
        match self {
            Self::Dense(weight) => weight,
            Self::Quantized(weight) => B::dequantize(weight, dtype.into()),
        }
    }
}

impl<B: Backend, C: CheckpointStrategy> Weight<Autodiff<B, C>> {
    pub(crate) fn id(&self) -> Option<NodeId> {
        match self {
            Self::Dense(weight) => Some(weight.id()),
            Self::Quantized(_) => None,
        }
    }

    pub(crate) fn is_tracked(&self) -> bool {
        matches!(self, Self::Dense(weight) if weight.is_tracked())
    }

    pub(crate) fn shape(&self) -> Shape {
        match self {
            Self::Dense(weight) => weight.shape(),
            Self::Quantized(weight) => weight.shape(),
        }
    }

    /// The node, or in its place one that nothing depends on.
    pub(crate) fn node(&self, x: &FloatTensor<Autodiff<B, C>>) -> NodeGuard {
        match self {
            Self::Dense(weight) => weight.node(),
            Self::Quantized(_) => no_node::<B, C>(x),
        }
    }

    pub(crate) fn into_primitive(self) -> Weight<B> {
        match self {
            Self::Dense(weight) => Weight::Dense(weight.into_primitive()),
            Self::Quantized(weight) => Weight::Quantized(weight),
        }
    }
}

/// A node that nothing depends on, in the place of an input that is not there.
pub(crate) fn no_node<B: Backend, C: CheckpointStrategy>(like: &FloatTensor<Autodiff<B, C>>) -> NodeGuard {
    Autodiff::<B, C>::from_inner(like.primitive().clone()).node()
}

/// A weight that the backward pass reads.
#[derive(Clone, Debug)]
pub(crate) enum KeptWeight<Quantized> {
    Dense(Kept),
    Quantized(Quantized),
}

impl<Quantized> KeptWeight<Quantized> {
    pub(crate) fn get<B: Backend<QuantizedTensorPrimitive = Quantized>>(
        self,
        checkpointer: &mut Checkpointer,
    ) -> Weight<B> {
        match self {
            Self::Dense(weight) => Weight::Dense(weight.get::<B>(checkpointer)),
            Self::Quantized(weight) => Weight::Quantized(weight),
        }
    }
}

/// A map that is linear in `x` and in `weight`, with its two adjoints. Implementors hold the options (stride, padding, ...).
pub(crate) trait Bilinear<B: Backend>: Clone + Send + core::fmt::Debug + 'static {
    /// The name of the operation.
    const NAME: &'static str;

    fn forward(
        &self,
        x: FloatTensor<B>,
        weight: FloatTensor<B>,
        bias: Option<FloatTensor<B>>,
    ) -> FloatTensor<B>;
    /// Gradient of `x`, from its shape alone.
    fn x_backward(&self, x: Shape, weight: FloatTensor<B>, dy: FloatTensor<B>) -> FloatTensor<B>;
    /// Gradient of `weight`, from its shape alone.
    fn weight_backward(&self, x: FloatTensor<B>, weight: Shape, dy: FloatTensor<B>) -> FloatTensor<B>;
    /// Gradient of the bias.
    fn bias_backward(&self, dy: FloatTensor<B>) -> FloatTensor<B>;

    /// [`forward`](Self::forward) with a quantized weight.
    fn forward_quantized(
        &self,
        x: FloatTensor<B>,
        weight: QuantizedTensor<B>,
        bias: Option<FloatTensor<B>>,
    ) -> FloatTensor<B> {
        let weight = B::dequantize(weight, x.dtype().into());
        self.forward(x, weight, bias)
    }
    /// [`x_backward`](Self::x_backward) with a quantized weight.
    fn x_backward_quantized(
        &self,
        x: Shape,
        weight: QuantizedTensor<B>,
        dy: FloatTensor<B>,
    ) -> FloatTensor<B> {
        self.x_backward(x, B::dequantize(weight, dy.dtype().into()), dy)
    }

    fn forward_with(
        &self,
        x: FloatTensor<B>,
        weight: Weight<B>,
        bias: Option<FloatTensor<B>>,
    ) -> FloatTensor<B> {
        match weight {
            Weight::Dense(weight) => self.forward(x, weight, bias),
            Weight::Quantized(weight) => self.forward_quantized(x, weight, bias),
        }
    }
    fn x_backward_with(&self, x: Shape, weight: Weight<B>, dy: FloatTensor<B>) -> FloatTensor<B> {
        match weight {
            Weight::Dense(weight) => self.x_backward(x, weight, dy),
            Weight::Quantized(weight) => self.x_backward_quantized(x, weight, dy),
        }
    }
}

/// Records `op(x, weight) + bias`, keeping each factor only for the gradient of the other.
pub(crate) fn bilinear<B, C, O>(
    op: O,
    x: FloatTensor<Autodiff<B, C>>,
    weight: Weight<Autodiff<B, C>>,
    bias: Option<FloatTensor<Autodiff<B, C>>>,
) -> FloatTensor<Autodiff<B, C>>
where
    B: Backend,
    C: CheckpointStrategy,
    O: Bilinear<B>,
{
    let nodes = [x.node(), weight.node(&x)];
    match bias {
        None => record::<B, C, O, 2>(op, x, weight, None, nodes),
        Some(bias) => {
            let [x_node, weight_node] = nodes;
            let (bias, bias_node) = bias.into_parts();
            record::<B, C, O, 3>(op, x, weight, Some(bias), [x_node, weight_node, bias_node])
        }
    }
}

fn record<B, C, O, const N: usize>(
    op: O,
    x: FloatTensor<Autodiff<B, C>>,
    weight: Weight<Autodiff<B, C>>,
    bias: Option<FloatTensor<B>>,
    parents: [NodeGuard; N],
) -> FloatTensor<Autodiff<B, C>>
where
    B: Backend,
    C: CheckpointStrategy,
    O: Bilinear<B>,
{
    match Step(op.clone()).prepare::<C>(parents).compute_bound().stateful() {
        OpsKind::Tracked(mut prep) => {
            let keeper = Keeper::new(O::NAME, weight.id());
            let saved = Saved {
                x: weight.is_tracked().then(|| keeper.keep(&mut prep, "x", &x, "weight is tracked")),
                weight: x.is_tracked().then(|| keeper.keep_weight(&mut prep, &weight)),
                x_shape: x.shape(),
                weight_shape: weight.shape(),
            };
            let y = op.forward_with(x.into_primitive(), weight.into_primitive(), bias);
            prep.finish(saved, y)
        }
        OpsKind::UnTracked(prep) => {
            prep.finish(op.forward_with(x.into_primitive(), weight.into_primitive(), bias))
        }
    }
}

#[derive(Debug)]
struct Step<O>(O);

/// What the backward pass reads.
#[derive(Clone, Debug)]
struct Saved<Quantized> {
    /// The input, if the weight is tracked.
    x: Option<Kept>,
    /// The weight, if the input is tracked.
    weight: Option<KeptWeight<Quantized>>,
    x_shape: Shape,
    weight_shape: Shape,
}

impl<B: Backend, O: Bilinear<B>, const N: usize> Backward<B, N> for Step<O> {
    type State = Saved<QuantizedTensor<B>>;

    fn backward(self, ops: Ops<Self::State, N>, grads: &mut Gradients, checkpointer: &mut Checkpointer) {
        let Self(op) = self;
        let dy = grads.consume::<B>(&ops.node);
        let saved = ops.state;
        let x = saved.x.map(|x| x.get::<B>(checkpointer));
        let weight = saved.weight.map(|weight| weight.get::<B>(checkpointer));

        let mut parents = ops.parents.into_iter();
        let mut next = || parents.next().flatten();
        if let Some(node) = next() {
            let weight = weight.expect("kept because x is tracked");
            grads.register::<B>(node.id, op.x_backward_with(saved.x_shape, weight, dy.clone()));
        }
        if let Some(node) = next() {
            let x = x.expect("kept because the weight is tracked");
            grads.register::<B>(node.id, op.weight_backward(x, saved.weight_shape, dy.clone()));
        }
        if let Some(node) = next() {
            grads.register::<B>(node.id, op.bias_backward(dy));
        }
    }
}
