//! Operations that are linear in their input with fixed coefficients: average pooling and interpolation.
//!
//! | | |
//! | --- | --- |
//! | computes | `y = M x` |
//! | keeps | nothing but the shape of `x` |
//! | backward | `dx = M^T dy` |
//!
//! The forward pass is Burn's own, on a tensor without autodiff, except for means in half precision on Flex. Only what is recorded
//! differs. Stock Burn keeps the input, although it reads only its shape.
use crate::graph::{BackwardPass, Inputs, KeepPlan, Operation, Recorder, Tracking, given};
use burn::backend::{Backend, TensorMetadata, tensor::FloatTensor};
use burn::tensor::Shape;

/// A linear map and its adjoint. Implementors hold the options, such as stride and padding.
pub trait FixedLinear<B: Backend>: Clone + Send + core::fmt::Debug + 'static {
    /// The name of the operation.
    const NAME: &'static str;

    /// `M x`
    fn image(&self, x: FloatTensor<B>) -> FloatTensor<B>;

    /// Gradient of `x`, of which only the shape is read.
    fn adjoint(&self, x: Shape, dy: FloatTensor<B>) -> FloatTensor<B>;
}

const X: usize = 0;

/// The image of the input under a linear map.
#[derive(Clone, Debug)]
pub struct Image<M>(pub M);

impl<B: Backend, M: FixedLinear<B>> Operation<B, 1> for Image<M> {
    const INPUTS: [&'static str; 1] = ["x"];
    const SHAPES: &'static [usize] = &[X];
    type Saved = M;

    fn name(&self) -> &'static str {
        M::NAME
    }

    fn plan(&self, _: &Tracking<B, 1>) -> KeepPlan<1> {
        KeepPlan::nothing()
    }

    fn forward(&self, [x]: Inputs<B, 1>) -> FloatTensor<B> {
        self.0.image(given(x))
    }

    fn forward_saving(&self, inputs: Inputs<B, 1>, _: &Recorder<1>) -> (FloatTensor<B>, M) {
        (self.forward(inputs), self.0.clone())
    }

    fn backward(map: M, dy: FloatTensor<B>, pass: &mut BackwardPass<B, 1>) {
        pass.give(X, map.adjoint(pass.shape(X), dy));
    }
}

/// `[batch, channels, 1, length]` for `[batch, channels, length]`; any other shape as it is.
///
/// The operation itself reshapes, because Burn's tracked reshape would keep its input under gradient checkpointing.
pub(crate) fn lift(shape: &Shape) -> Shape {
    match shape.num_dims() {
        3 => Shape::new([shape[0], shape[1], 1, shape[2]]),
        _ => shape.clone(),
    }
}

/// The image of a map over two spatial axes, also for tensors that have only one.
pub(crate) fn lifted_image<B: Backend>(
    x: FloatTensor<B>,
    image: impl FnOnce(FloatTensor<B>) -> FloatTensor<B>,
) -> FloatTensor<B> {
    let shape = x.shape();
    if shape.num_dims() != 3 {
        return image(x);
    }
    let y = image(B::float_reshape(x, lift(&shape)));
    let [batch, channels, _, length] = y.shape().dims();
    B::float_reshape(y, Shape::new([batch, channels, length]))
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

/// The shape of the output of a pool, as [`burn::tensor::module`] computes it, for windows that span `span` elements. No window may be
/// larger than the padded input. `checks_again` says whether Burn checks the last window a second time.
pub(crate) fn pooled(
    x: &Shape,
    span: [usize; 2],
    stride: [usize; 2],
    padding: [(usize, usize); 2],
    ceil_mode: bool,
    checks_again: bool,
) -> Shape {
    let is_asymmetric = padding.iter().any(|(begin, end)| begin != end);
    let windows = |axis: usize| {
        let (size, (begin, end), stride) = (x[axis + 2], padding[axis], stride[axis]);
        let padded = size + begin + end;
        let steps = padded - span[axis];
        if !ceil_mode {
            return steps / stride + 1;
        }
        let mut windows = steps.div_ceil(stride) + 1;
        // The last window must start inside the input. Burn checks this in the backend, which gets an input that is already padded if the
        // padding of some axis is asymmetric. Where Burn knows the true size, it checks again.
        let end_of_input = if is_asymmetric { padded } else { size + begin };
        if (windows - 1) * stride >= end_of_input {
            windows -= 1;
        }
        if checks_again && windows > 1 && (windows - 1) * stride >= size + begin {
            windows -= 1;
        }
        windows
    };
    Shape::new([x[0], x[1], windows(0), windows(1)])
}
