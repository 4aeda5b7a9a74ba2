//! Operations that are linear in their input and linear in their weight: dense layers, convolutions and their transposes.
//!
//! | | |
//! | --- | --- |
//! | computes | `y = op(x, weight) + bias` |
//! | keeps | `x` if `weight` is tracked; `weight` (a handle) if `x` is tracked; shapes; |
//! | | a quantized weight stays packed, and is dequantized in the forward and again in the backward pass |
//! | backward | `dweight = adjoint(x, dy)`, `dx = adjoint(weight, dy)`, `dbias = sum(dy)`; `x` is dropped before `dx` is made |
//!
//! Each gradient reads only the other factor, as [arXiv 2404.12406](https://arxiv.org/abs/2404.12406) observes.
use crate::graph::{BackwardPass, Inputs, KeepPlan, Operation, Recorder, Run, Tracking, given};
use burn::backend::{
    Backend, ExtensionType, TensorMetadata,
    tensor::{FloatTensor, QuantizedTensor},
};
use burn::tensor::{DType, Shape};

/// The weight of a layer.
#[derive(Clone, Debug, ExtensionType)]
pub enum Weight<B: Backend> {
    /// Floats.
    Dense(FloatTensor<B>),
    /// Packed. No gradient flows to it.
    Quantized(QuantizedTensor<B>),
}

impl<B: Backend> Weight<B> {
    /// The weight as an input of a step if it is dense, or else as a quantized tensor, to which no gradient flows.
    pub(crate) fn into_parts(self) -> (Option<FloatTensor<B>>, Option<QuantizedTensor<B>>) {
        match self {
            Self::Dense(weight) => (Some(weight), None),
            Self::Quantized(weight) => (None, Some(weight)),
        }
    }

    /// The quantized weight if it is given, else the dense one.
    pub(crate) fn from_parts(dense: Option<FloatTensor<B>>, quantized: Option<QuantizedTensor<B>>) -> Self {
        match quantized {
            Some(weight) => Self::Quantized(weight),
            None => Self::Dense(given(dense)),
        }
    }

    /// The weight as floats of the given type.
    pub(crate) fn into_dense(self, dtype: DType) -> FloatTensor<B> {
        match self {
            Self::Dense(weight) => cast::<B>(weight, dtype),
            Self::Quantized(weight) => B::dequantize(weight, dtype.into()),
        }
    }
}

/// A map that is linear in `x` and in `weight`, with its two adjoints. Implementors hold the options (stride, padding, ...).
pub trait Bilinear<B: Backend>: Clone + Send + core::fmt::Debug + 'static {
    /// The name of the operation.
    const NAME: &'static str;

    fn forward(
        &self,
        x: FloatTensor<B>,
        weight: FloatTensor<B>,
        bias: Option<FloatTensor<B>>,
    ) -> FloatTensor<B>;
    /// Gradient of `x`. Only the shape of `x` is read.
    fn x_backward(&self, x: Shape, weight: FloatTensor<B>, dy: FloatTensor<B>) -> FloatTensor<B>;
    /// Gradient of `weight`. Only the shape of `weight` is read.
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

    /// [`forward`](Self::forward) with a weight of any kind. A frozen one of another dtype than `x` is cast at every use.
    fn forward_with(
        &self,
        x: FloatTensor<B>,
        weight: Weight<B>,
        bias: Option<FloatTensor<B>>,
    ) -> FloatTensor<B> {
        match weight {
            Weight::Dense(weight) => {
                let weight = cast::<B>(weight, x.dtype());
                self.forward(x, weight, bias)
            }
            Weight::Quantized(weight) => self.forward_quantized(x, weight, bias),
        }
    }
    /// [`x_backward`](Self::x_backward) with a weight of any kind.
    fn x_backward_with(&self, x: Shape, weight: Weight<B>, dy: FloatTensor<B>) -> FloatTensor<B> {
        match weight {
            Weight::Dense(weight) => self.x_backward(x, cast::<B>(weight, dy.dtype()), dy),
            Weight::Quantized(weight) => self.x_backward_quantized(x, weight, dy),
        }
    }
}

fn cast<B: Backend>(weight: FloatTensor<B>, dtype: DType) -> FloatTensor<B> {
    if weight.dtype() == dtype { weight } else { B::float_cast(weight, dtype.into()) }
}

const X: usize = 0;
const WEIGHT: usize = 1;
const BIAS: usize = 2;

/// `map(x, weight) + bias`, recorded or not.
pub fn bilinear<B, M: Bilinear<B::Plain>>(
    map: M,
    x: FloatTensor<B>,
    weight: Weight<B>,
    bias: Option<FloatTensor<B>>,
) -> FloatTensor<B>
where
    B: Run + Backend<QuantizedTensorPrimitive = QuantizedTensor<<B as Run>::Plain>>,
{
    let (weight, quantized) = weight.into_parts();
    B::run(BilinearOperation::<B::Plain, M> { map, quantized }, [Some(x), weight, bias])
}

/// A bilinear map with a bias. The weight is an input of the step, unless it is quantized: then no gradient flows to it.
#[derive(Clone, Debug)]
pub struct BilinearOperation<B: Backend, M> {
    map: M,
    quantized: Option<QuantizedTensor<B>>,
}

impl<B: Backend, M: Bilinear<B>> BilinearOperation<B, M> {
    fn saved(&self, recorder: &Recorder<3>) -> Self {
        let quantized = self.quantized.clone().filter(|_| recorder.tracked(X));
        let quantized = quantized.map(|weight| recorder.report().handle("weight", weight));
        Self { map: self.map.clone(), quantized }
    }
}

impl<B: Backend, M: Bilinear<B>> Operation<B, 3> for BilinearOperation<B, M> {
    const INPUTS: [&'static str; 3] = ["x", "weight", "bias"];
    const PARAMETERS: &'static [usize] = &[WEIGHT];
    const SHAPES: &'static [usize] = &[X, WEIGHT];
    /// The operation, without the quantized weight if the input is not tracked.
    type Saved = Self;

    fn name(&self) -> &'static str {
        M::NAME
    }

    fn plan(&self, inputs: &Tracking<B, 3>) -> KeepPlan<3> {
        let [reads_x, reads_weight] = [WEIGHT, X].map(|input| inputs.tracked(input));
        KeepPlan::nothing().keep_if(reads_x, X, "weight is tracked").keep_if(
            reads_weight,
            WEIGHT,
            "x is tracked",
        )
    }

    fn forward(&self, [x, weight, bias]: Inputs<B, 3>) -> FloatTensor<B> {
        let weight = Weight::from_parts(weight, self.quantized.clone());
        self.map.forward_with(given(x), weight, bias)
    }

    fn forward_saving(&self, inputs: Inputs<B, 3>, recorder: &Recorder<3>) -> (FloatTensor<B>, Self) {
        let saved = self.saved(recorder);
        (self.forward(inputs), saved)
    }

    fn saving(&self, _: &Inputs<B, 3>, recorder: &Recorder<3>) -> Option<Self> {
        Some(self.saved(recorder))
    }

    fn backward(Self { map, quantized }: Self, dy: FloatTensor<B>, pass: &mut BackwardPass<B, 3>) {
        give_gradients(&map, quantized, dy, pass);
    }
}

/// Gives the gradients of `x`, `weight` and `bias`, the first three inputs of a step, from the gradient of the map's output.
pub(super) fn give_gradients<B: Backend, M: Bilinear<B>, const N: usize>(
    map: &M,
    quantized: Option<QuantizedTensor<B>>,
    dy: FloatTensor<B>,
    pass: &mut BackwardPass<B, N>,
) {
    if let Some(x) = pass.take(X) {
        let dweight = map.weight_backward(x, pass.shape(WEIGHT), dy.clone());
        pass.give(WEIGHT, dweight);
    }
    if pass.wants(BIAS) {
        pass.give(BIAS, map.bias_backward(dy.clone()));
    }
    if pass.wants(X) {
        let weight = Weight::from_parts(pass.take(WEIGHT), quantized);
        pass.give(X, map.x_backward_with(pass.shape(X), weight, dy));
    }
}
