//! A convolution with a low-rank adapter that makes the effective weight, `weight + scale a b`, at every use. It is for devices, if the
//! effective weight is small beside the input: convolutions with the factors would need launches of their own.
//!
//! | | |
//! | --- | --- |
//! | computes | `y = op(x, weight + scale a b) + bias`, `op` a [convolution](super::conv) or [its transpose](super::conv_transpose) |
//! | keeps | `x` if `a`, `b` or `weight` is tracked; handles of `weight`, `a` and `b` |
//! | backward | `dw = adjoint(x, dy)`, `da = scale dw b^T`, `db = scale a^T dw`; `dx = adjoint(weight + scale a b, dy)` |
//!
//! Stock Burn keeps the effective weight from the forward to the backward pass, and its gradient beside the scaled one.
use super::{
    LoraFactors,
    bilinear::{Bilinear, Weight},
    conv::{Conv, ConvKernels},
    conv_transpose::ConvTranspose,
    lora::{LoraKernels, give_scaled},
};
use crate::{
    backend::optional::MaybeTensor,
    graph::{BackwardPass, Inputs, KeepPlan, Operation, Recorder, Run, Tracking, extension, given},
};
use burn::backend::{
    Backend, TensorMetadata,
    tensor::{FloatTensor, QuantizedTensor},
};
use burn::tensor::{
    DType, Shape,
    ops::{ConvOptions, ConvTransposeOptions},
};

/// The kernels of convolutions and of factors.
pub trait ConvLoraKernels: ConvKernels + LoraKernels {}

impl<B: ConvKernels + LoraKernels> ConvLoraKernels for B {}

macro_rules! conv_lora {
    ($($op:ident = $conv:ident, $map:expr, $options:ident<$rank:literal>;)+) => {
        extension! {
            /// Convolutions with a low-rank adapter.
            pub trait ConvLoraOps(ConvLoraKernels) {$(
                #[doc = concat!("[`", stringify!($conv), "`](burn::tensor::module::", stringify!($conv), ")")]
                /// with the weight `weight + scale a b`; a `[first axis of weight, rank]`, b `[rank, product of the others]`.
                fn $op(
                    x: FloatTensor<Self>,
                    #[extension_type] weight: Weight<Self>,
                    #[extension_type] factors: LoraFactors<Self>,
                    scale: f64,
                    #[extension_type] bias: MaybeTensor<Self>,
                    options: $options<$rank>,
                ) -> FloatTensor<Self> {
                    let (weight, quantized) = weight.into_parts();
                    let adapted = AdaptedConv::<<Self as Run>::Plain, _> { map: $map(options), scale, quantized };
                    let LoraFactors { a, b } = factors;
                    Self::run(adapted, [Some(x), weight, Some(a), Some(b), bias.into_option()])
                }
            )+}
        }
    };
}
conv_lora! {
    memsave_conv1d_lora = conv1d, Conv::new, ConvOptions<1>;
    memsave_conv2d_lora = conv2d, Conv::new, ConvOptions<2>;
    memsave_conv3d_lora = conv3d, Conv::new, ConvOptions<3>;
    memsave_conv_transpose1d_lora = conv_transpose1d, ConvTranspose::new, ConvTransposeOptions<1>;
    memsave_conv_transpose2d_lora = conv_transpose2d, ConvTranspose::new, ConvTransposeOptions<2>;
    memsave_conv_transpose3d_lora = conv_transpose3d, ConvTranspose::new, ConvTransposeOptions<3>;
}

const X: usize = 0;
const WEIGHT: usize = 1;
const FACTOR_A: usize = 2;
const FACTOR_B: usize = 3;
const BIAS: usize = 4;

/// A bilinear map with an adapted weight. The weight is an input of the step, unless it is quantized: then no gradient flows to it.
#[derive(Clone, Debug)]
pub struct AdaptedConv<B: Backend, M> {
    map: M,
    scale: f64,
    quantized: Option<QuantizedTensor<B>>,
}

impl<B: LoraKernels, M> AdaptedConv<B, M> {
    /// `weight + scale a b`, in the shape of `weight`.
    fn effective_weight(&self, [weight, a, b]: [Option<FloatTensor<B>>; 3], dtype: DType) -> FloatTensor<B> {
        let (a, b) = (given(a), given(b));
        let weight = Weight::<B>::from_parts(weight, self.quantized.clone()).into_dense(dtype);
        let (shape, rows) = (weight.shape(), Shape::new([a.shape()[0], b.shape()[1]]));
        let sum = B::add_scaled_product(B::float_reshape(weight, rows), a, b, self.scale);
        B::float_reshape(sum, shape)
    }
}

impl<B: LoraKernels, M: Bilinear<B>> Operation<B, 5> for AdaptedConv<B, M> {
    const INPUTS: [&'static str; 5] = ["x", "weight", "a", "b", "bias"];
    const PARAMETERS: &'static [usize] = &[WEIGHT, FACTOR_A, FACTOR_B];
    const SHAPES: &'static [usize] = &[X];
    type Saved = SavedAdaptedConv<B, M>;

    fn name(&self) -> &'static str {
        M::NAME
    }

    fn plan(&self, inputs: &Tracking<B, 5>) -> KeepPlan<5> {
        let [x, weight, a, b] = [X, WEIGHT, FACTOR_A, FACTOR_B].map(|input| inputs.tracked(input));
        KeepPlan::nothing()
            .keep_if(weight || a || b, X, "a, b or weight is tracked")
            .keep_if(x, WEIGHT, "x is tracked")
            .keep_if(x || b, FACTOR_A, "x or b is tracked")
            .keep_if(x || a, FACTOR_B, "x or a is tracked")
    }

    fn forward(&self, [x, weight, a, b, bias]: Inputs<B, 5>) -> FloatTensor<B> {
        let x = given(x);
        let weight = self.effective_weight([weight, a, b], x.dtype());
        self.map.forward(x, weight, bias)
    }

    fn forward_saving(
        &self,
        inputs: Inputs<B, 5>,
        recorder: &Recorder<5>,
    ) -> (FloatTensor<B>, SavedAdaptedConv<B, M>) {
        let quantized = self.quantized.clone().filter(|_| recorder.tracked(X));
        let quantized = quantized.map(|weight| recorder.report().handle("weight", weight));
        let adapted = Self { quantized, ..self.clone() };
        let weight = match (&inputs[WEIGHT], &self.quantized) {
            (Some(weight), _) => weight.shape(),
            (None, quantized) => quantized.as_ref().expect("a weight").shape(),
        };
        (self.forward(inputs), SavedAdaptedConv { adapted, weight })
    }

    fn backward(saved: SavedAdaptedConv<B, M>, dy: FloatTensor<B>, pass: &mut BackwardPass<B, 5>) {
        let SavedAdaptedConv { adapted, weight: shape } = saved;
        let [a, b] = [FACTOR_A, FACTOR_B].map(|input| pass.take(input));
        if pass.wants(BIAS) {
            pass.give(BIAS, adapted.map.bias_backward(dy.clone()));
        }
        if let Some(x) = pass.take(X) {
            let dweight = adapted.map.weight_backward(x, shape.clone(), dy.clone());
            let rows = Shape::new([shape[0], shape.num_elements() / shape[0]]);
            let of_product = B::float_reshape(dweight.clone(), rows);
            pass.give(WEIGHT, dweight);
            let of_a = b.clone().filter(|_| pass.wants(FACTOR_A));
            let of_b = a.clone().filter(|_| pass.wants(FACTOR_B));
            let da = of_a.map(|b| B::float_matmul(of_product.clone(), B::float_swap_dims(b, 0, 1)));
            let db = of_b.map(|a| B::float_matmul(B::float_swap_dims(a, 0, 1), of_product));
            give_scaled(pass, [(FACTOR_A, da), (FACTOR_B, db)], adapted.scale);
        }
        if pass.wants(X) {
            let weight = adapted.effective_weight([pass.take(WEIGHT), a, b], dy.dtype());
            pass.give(X, adapted.map.x_backward(pass.shape(X), weight, dy));
        }
    }
}

/// What the backward pass reads besides inputs.
#[derive(Clone, Debug)]
pub struct SavedAdaptedConv<B: Backend, M> {
    /// The operation, without the quantized weight if `x` is not tracked.
    adapted: AdaptedConv<B, M>,
    /// The shape of the weight.
    weight: Shape,
}
