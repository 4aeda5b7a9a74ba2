//! Operations that are linear in their input with fixed coefficients: average pools and interpolations.
//!
//! | | |
//! | --- | --- |
//! | computes | `y = M x` |
//! | keeps | the shape of `x` |
//! | backward | `dx = M^T dy` |
//!
//! The forward pass is Burn's own, on a tensor without autodiff; only what is recorded differs.
use burn::backend::{
    Backend, TensorMetadata,
    autodiff::{
        Autodiff,
        checkpoint::{base::Checkpointer, strategy::CheckpointStrategy},
        grads::Gradients,
        ops::{Backward, Ops, OpsKind, unary},
    },
    tensor::FloatTensor,
};
use burn::tensor::Shape;

/// The adjoint of a linear map. Implementors hold the options (stride, padding, ...).
pub(crate) trait FixedLinear<B: Backend>: Clone + Send + core::fmt::Debug + 'static {
    /// Gradient of `x`, from its shape alone.
    fn adjoint(&self, x: Shape, dy: FloatTensor<B>) -> FloatTensor<B>;
}

/// Records that `y` is the image of `x`.
pub(crate) fn fixed_linear<B, C, O>(
    op: O,
    x: FloatTensor<Autodiff<B, C>>,
    y: FloatTensor<Autodiff<B, C>>,
) -> FloatTensor<Autodiff<B, C>>
where
    B: Backend,
    C: CheckpointStrategy,
    O: FixedLinear<B>,
{
    let shape = x.shape();
    match Step(op).prepare::<C>([x.node()]).compute_bound().stateful() {
        OpsKind::Tracked(prep) => prep.finish(Saved { shape }, y.into_primitive()),
        OpsKind::UnTracked(prep) => prep.finish(y.into_primitive()),
    }
}

/// `[batch, channels, length]` as `[batch, channels, 1, length]`; any other shape as it is.
///
/// Done in the step itself: Burn's own reshape would hold its input under gradient checkpointing.
pub(crate) fn lift(shape: &Shape) -> Shape {
    match shape.num_dims() {
        3 => Shape::new([shape[0], shape[1], 1, shape[2]]),
        _ => shape.clone(),
    }
}

/// The adjoint of a map over two spatial axes, also where there is only one.
pub(crate) fn lifted<B: Backend>(
    x: Shape,
    dy: FloatTensor<B>,
    adjoint: impl FnOnce(Shape, FloatTensor<B>) -> FloatTensor<B>,
) -> FloatTensor<B> {
    if x.num_dims() != 3 {
        return adjoint(x, dy);
    }
    let dy_shape = lift(&dy.shape());
    B::float_reshape(adjoint(lift(&x), B::float_reshape(dy, dy_shape)), x)
}

#[derive(Debug)]
struct Step<O>(O);

/// What the backward pass reads.
#[derive(Clone, Debug)]
struct Saved {
    /// The shape of the input.
    shape: Shape,
}

impl<B: Backend, O: FixedLinear<B>> Backward<B, 1> for Step<O> {
    type State = Saved;

    fn backward(self, ops: Ops<Saved, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
        let shape = ops.state.shape;
        unary::<B, _>(ops.parents, ops.node, grads, |dy| self.0.adjoint(shape, dy));
    }
}
