//! Operations that are linear in their input with fixed coefficients: average pooling and interpolation.
//!
//! | | |
//! | --- | --- |
//! | computes | `y = M x` |
//! | keeps | nothing but the shape of `x` |
//! | backward | `dx = M^T dy` |
//!
//! The forward pass is Burn's own, on a tensor without autodiff; only what is recorded differs. Stock Burn keeps the input, of
//! which it reads only the shape.
use super::step::{BackwardPass, Inputs, Operation, Plan, Recorder, Run, Tracking};
use burn::backend::{Backend, TensorMetadata, tensor::FloatTensor};
use burn::tensor::Shape;

/// The adjoint of a linear map. Implementors hold the options (stride, padding, ...).
pub trait FixedLinear<B: Backend>: Clone + Send + core::fmt::Debug + 'static {
    /// The name of the operation.
    const NAME: &'static str;

    /// Gradient of `x`, of which only the shape is read.
    fn adjoint(&self, x: Shape, dy: FloatTensor<B>) -> FloatTensor<B>;
}

const X: usize = 0;

/// Records, if `x` is tracked, that `y` is the image of `x`.
pub fn fixed_linear<B: Run, M: FixedLinear<B::Plain>>(
    map: M,
    x: FloatTensor<B>,
    y: FloatTensor<B>,
) -> FloatTensor<B> {
    B::run(Image { map, output: B::plain(y) }, [Some(x)])
}

/// The image of the input under a linear map, which is known already.
#[derive(Clone)]
pub struct Image<M, T> {
    map: M,
    output: T,
}

impl<B: Backend, M: FixedLinear<B>> Operation<B, 1> for Image<M, FloatTensor<B>> {
    const INPUTS: [&'static str; 1] = ["x"];
    const SHAPES: &'static [usize] = &[X];
    type Saved = M;

    fn name(&self) -> &'static str {
        M::NAME
    }

    fn plan(&self, _: &Tracking<B, 1>) -> Plan<1> {
        Plan::nothing()
    }

    fn forward(&self, _: Inputs<B, 1>) -> FloatTensor<B> {
        self.output.clone()
    }

    fn forward_saving(&self, _: Inputs<B, 1>, _: &Recorder<1>) -> (FloatTensor<B>, M) {
        (self.output.clone(), self.map.clone())
    }

    fn backward(map: M, dy: FloatTensor<B>, pass: &mut BackwardPass<B, 1>) {
        pass.give(X, map.adjoint(pass.shape(X), dy));
    }
}

/// `[batch, channels, length]` as `[batch, channels, 1, length]`; any other shape as it is.
///
/// Done in the operation itself: Burn's own reshape would hold its input under gradient checkpointing.
pub(crate) fn lift(shape: &Shape) -> Shape {
    match shape.num_dims() {
        3 => Shape::new([shape[0], shape[1], 1, shape[2]]),
        _ => shape.clone(),
    }
}

/// The adjoint of a map over two spatial axes, also for tensors that have only one.
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
