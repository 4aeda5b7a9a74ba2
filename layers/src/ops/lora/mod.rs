//! Dense layer with a low-rank adapter ([LoRA](https://arxiv.org/abs/2106.09685)): the effective weight,
//! `weight + scale a b`, never exists.
//!
//! | | |
//! | --- | --- |
//! | computes | `y = x weight + scale (x a) b + bias`; a quantized weight is dequantized by blocks |
//! | keeps | `x` if `a` (or `weight`) is tracked; else `x a`, `rank` elements per row, if `b` is; handles of `weight`, `a`, `b` |
//! | backward | `dh = scale dy b^T`, `dx = dy weight^T + dh a^T`, `da = x^T dh`, `db = scale (x a)^T dy`, `dbias = sum(dy)` |
//!
//! Stock Burn computes the effective weight at every use, keeps it, and computes its gradient, of the same size, from which
//! those of `a` and `b` follow. Here low-rank products are added to `y` and `dx` block by block. If `x` is kept, `x a` is
//! computed again: keeping it, too, would be more than stock keeps if `x` is untracked.
use super::{
    MaybeTensor,
    bilinear::{Bilinear, Weight},
    extension::extension,
    linear::{Linear, LinearKernels},
    step::{BackwardPass, Inputs, Operation, Plan, Recorder, Run, Tracking, given},
};
use crate::backend::device_backends;
use burn::backend::{
    Backend, ExtensionType, TensorMetadata,
    tensor::{FloatTensor, QuantizedTensor},
};
use burn::tensor::Shape;

#[cfg(any(feature = "flex", feature = "ndarray"))]
mod cpu;

/// The factors of an adapter.
#[derive(ExtensionType)]
pub struct LoraFactors<B: Backend> {
    /// `[d_input, rank]`
    pub a: FloatTensor<B>,
    /// `[rank, d_output]`
    pub b: FloatTensor<B>,
}

extension! {
    /// Dense layers with a low-rank adapter.
    pub trait LoraOps(LoraKernels) {
        /// `x weight + scale (x a) b + bias`; x `[..., d_input]`, weight `[d_input, d_output]`, a `[d_input, rank]`, b
        /// `[rank, d_output]`, bias `[d_output]`. A frozen weight of another dtype than `x` is cast at every use.
        fn memsave_lora(
            x: FloatTensor<Self>,
            #[extension_type] weight: Weight<Self>,
            #[extension_type] factors: LoraFactors<Self>,
            scale: f64,
            #[extension_type] bias: MaybeTensor<Self>,
        ) -> FloatTensor<Self> {
            let LoraFactors { a, b } = factors;
            let (weight, quantized) = weight.into_parts();
            let lora = Lora::<<Self as Run>::Plain> { scale, quantized };
            Self::run(lora, [Some(x), Some(a), Some(b), weight, bias.into_option()])
        }
    }
}

const X: usize = 0;
const FACTOR_A: usize = 1;
const FACTOR_B: usize = 2;
const WEIGHT: usize = 3;
const BIAS: usize = 4;

/// A dense layer with a low-rank adapter. The weight is an input of the step, or quantized, and no gradient flows to it.
#[derive(Clone, Debug)]
pub struct Lora<B: Backend> {
    scale: f64,
    quantized: Option<QuantizedTensor<B>>,
}

impl<B: LoraKernels> Lora<B> {
    /// The output; also `x a` if it is kept.
    fn forward_keeping(
        &self,
        inputs: Inputs<B, 5>,
        keeps_h: bool,
    ) -> (FloatTensor<B>, Option<FloatTensor<B>>) {
        let [x, a, b, weight, bias] = inputs;
        let (x, weight) = (given(x), Weight::<B>::from_parts(weight, self.quantized.clone()));
        let y = Linear.forward_with(x.clone(), weight, bias); // first, since it needs the most
        let h = B::dense(x, given(a), None);
        let kept = keeps_h.then(|| h.clone());
        (B::add_product(y, self.scaled(h), given(b)), kept)
    }

    fn scaled(&self, x: FloatTensor<B>) -> FloatTensor<B> {
        B::float_mul_scalar(x, self.scale.into())
    }
}

impl<B: LoraKernels> Operation<B, 5> for Lora<B> {
    const INPUTS: [&'static str; 5] = ["x", "a", "b", "weight", "bias"];
    const PARAMETERS: &'static [usize] = &[WEIGHT, FACTOR_A, FACTOR_B];
    const SHAPES: &'static [usize] = &[X];
    type Saved = SavedLora<B>;

    fn name(&self) -> &'static str {
        "lora"
    }

    fn plan(&self, inputs: &Tracking<B, 5>) -> Plan<5> {
        let [x, a, b, weight] = [X, FACTOR_A, FACTOR_B, WEIGHT].map(|input| inputs.tracked(input));
        Plan::nothing()
            .keep_if(a || weight, X, "a or weight is tracked")
            .keep_if(x || b && (a || weight), FACTOR_A, "x or b is tracked")
            .keep_if(x || a, FACTOR_B, "x or a is tracked")
            .keep_if(x, WEIGHT, "x is tracked")
    }

    fn forward(&self, inputs: Inputs<B, 5>) -> FloatTensor<B> {
        self.forward_keeping(inputs, false).0
    }

    fn forward_saving(&self, inputs: Inputs<B, 5>, recorder: &Recorder<5>) -> (FloatTensor<B>, SavedLora<B>) {
        let quantized = self.quantized.clone().filter(|_| recorder.tracked(X));
        let quantized = quantized.map(|weight| recorder.ledger().handle("weight", weight));
        let (y, h) = self.forward_keeping(inputs, recorder.tracked(FACTOR_B) && !recorder.keeps(X));
        let h = h.map(|h| recorder.ledger().tensor("x a", h, "b is tracked"));
        (y, SavedLora { h, lora: Lora { scale: self.scale, quantized } })
    }

    fn backward(SavedLora { h, mut lora }: SavedLora<B>, dy: FloatTensor<B>, pass: &mut BackwardPass<B, 5>) {
        let quantized = lora.quantized.take();
        let [x, a, b] = [X, FACTOR_A, FACTOR_B].map(|input| pass.take(input));
        let dh_of = |b: &FloatTensor<B>, dy: FloatTensor<B>| {
            let mut shape = dy.shape();
            let last = shape.num_dims() - 1;
            shape[last] = b.shape()[0];
            lora.scaled(Linear.x_backward_with(shape, Weight::<B>::Dense(b.clone()), dy))
        };
        if pass.wants(FACTOR_B)
            && let Some(h) = h.or_else(|| Some(B::dense(x.clone()?, a.clone()?, None)))
        {
            pass.give(FACTOR_B, lora.scaled(B::dense_weight_backward(h, dy.clone())));
        }
        let mut dh = None;
        if pass.wants(FACTOR_A)
            && let (Some(x), Some(b)) = (&x, &b)
        {
            let dh = dh.insert(dh_of(b, dy.clone())).clone();
            pass.give(FACTOR_A, B::dense_weight_backward(x.clone(), dh));
        }
        if let Some(x) = x.filter(|_| pass.wants(WEIGHT)) {
            pass.give(WEIGHT, B::dense_weight_backward(x, dy.clone()));
        }
        if pass.wants(BIAS) {
            pass.give(BIAS, B::linear_bias_backward(dy.clone()));
        }
        if pass.wants(X)
            && let (Some(a), Some(b)) = (a, b)
        {
            let weight = Weight::<B>::from_parts(pass.take(WEIGHT), quantized);
            let dx = Linear.x_backward_with(pass.shape(X), weight, dy.clone());
            let dh = dh.unwrap_or_else(|| dh_of(&b, dy));
            pass.give(X, B::add_product(dx, dh, B::float_swap_dims(a, 0, 1)));
        }
    }
}

/// What the backward pass reads besides inputs.
#[derive(Clone, Debug)]
pub struct SavedLora<B: Backend> {
    /// `x a`, if `b` is tracked and `x` is not kept.
    h: Option<FloatTensor<B>>,
    /// The operation, without the quantized weight if `x` is not tracked.
    lora: Lora<B>,
}

/// The kernels.
pub trait LoraKernels: LinearKernels {
    /// `y + u v`, with `y` `[..., columns]`, `u` `[..., rank]` and `v` `[rank, columns]`; where the backend can, in `y`, and
    /// without making the whole product.
    fn add_product(y: FloatTensor<Self>, u: FloatTensor<Self>, v: FloatTensor<Self>) -> FloatTensor<Self> {
        let ([rank, columns], shape) = (v.shape().dims(), y.shape());
        let rows = shape.num_elements() / columns;
        let product = Self::float_matmul(Self::float_reshape(u, Shape::new([rows, rank])), v);
        Self::float_add(y, Self::float_reshape(product, shape))
    }
}
device_backends!(LoraKernels);

#[cfg(all(test, feature = "flex"))]
mod tests {
    use super::*;
    use crate::ops::testing::{Composed, assert_close, composed, random};
    use burn::backend::{Flex, ops::FloatTensorOps};

    #[test]
    fn products_are_added_as_by_the_kernel() {
        let compare = |y: FloatTensor<Flex>, u: FloatTensor<Flex>, v: FloatTensor<Flex>| {
            let body = Composed::add_product(composed(&y), composed(&u), composed(&v));
            assert_close("y + u v", body, Flex::add_product(y, u, v));
        };
        for (rows, columns, rank) in [(3, 7, 1), (400, 5, 4), (700, 1030, 7), (3, 9, 33), (700, 1030, 40)] {
            compare(random(&[2, rows, columns]), random(&[2, rows, rank]), random(&[rank, columns]));
        }
        compare(random(&[9, 5]), random(&[9, 3]), Flex::float_swap_dims(random(&[5, 3]), 0, 1));
    }
}
