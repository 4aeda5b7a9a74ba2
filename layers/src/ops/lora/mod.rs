//! Dense layer with a low-rank adapter ([LoRA](https://arxiv.org/abs/2106.09685)), without the effective weight `weight + scale a b`.
//! With a factor per column it is [DoRA](https://arxiv.org/abs/2402.09353).
//!
//! | | |
//! | --- | --- |
//! | computes | `y = p * factor + bias`, `p = x weight + scale (x a) b`; a quantized weight is dequantized, on a CPU by blocks |
//! | keeps | `x` if `a` (or `weight`) is tracked; else `x a`, `rank` elements per row, if `b` is; handles of `weight`, `a`, `b`; |
//! | | if `factor` is tracked, `p`; or, if `x` has more rows than columns, only `x` |
//! | backward | `dfactor = sum(dy * p)`, `dbias = sum(dy)`, `dp = dy * factor`, |
//! | | `dh = dp b^T`, `dx = dp weight^T + scale dh a^T`, `da = scale x^T dh`, `db = scale (x a)^T dp` |
//!
//! Stock Burn computes the effective weight at every use, keeps it, and computes its gradient, of the same size, from which
//! those of `a` and `b` follow. Here low-rank products are added to `y` and `dx`, in place or block by block. If `x` is kept, `x a` is
//! recomputed: keeping both would be more than stock keeps if `x` is untracked. `p` is recomputed if it is larger than the effective
//! weight, which stock keeps beside `x`. That takes as many operations as stock needs for the gradient of the effective weight.
use super::{
    bilinear::{Bilinear, Weight},
    linear::{Linear, LinearKernels},
};
use crate::backend::composing_backends;
use crate::{
    backend::optional::MaybeTensor,
    graph::{
        BackwardPass, Inputs, KeepPlan, KeptTensor, Operation, Recorder, Run, Tracking, extension, given,
    },
    saved::packing::PackingKernels,
};
use burn::backend::{
    Backend, ExtensionType, TensorMetadata,
    tensor::{FloatTensor, QuantizedTensor},
};
use burn::tensor::Shape;

#[cfg(any(feature = "flex", feature = "ndarray"))]
mod cpu;
#[cfg(any(feature = "wgpu", feature = "cuda"))]
mod cube;

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
        /// `(x weight + scale (x a) b) * factor + bias`; x `[..., d_input]`, weight `[d_input, d_output]`, a `[d_input, rank]`,
        /// b `[rank, d_output]`, factor and bias `[d_output]`. A frozen weight of another dtype than `x` is cast at every use.
        fn memsave_lora(
            x: FloatTensor<Self>,
            #[extension_type] weight: Weight<Self>,
            #[extension_type] factors: LoraFactors<Self>,
            scale: f64,
            #[extension_type] factor: MaybeTensor<Self>,
            #[extension_type] bias: MaybeTensor<Self>,
        ) -> FloatTensor<Self> {
            let LoraFactors { a, b } = factors;
            let d_input = a.shape()[0];
            let (weight, quantized) = weight.into_parts();
            let lora = Lora::<<Self as Run>::Plain> {
                scale,
                quantized,
                product_exceeds_weight: x.shape().num_elements() > d_input * d_input,
            };
            Self::run(lora, [Some(x), Some(a), Some(b), weight, factor.into_option(), bias.into_option()])
        }
    }
}

const X: usize = 0;
const FACTOR_A: usize = 1;
const FACTOR_B: usize = 2;
const WEIGHT: usize = 3;
const FACTOR: usize = 4;
const BIAS: usize = 5;

/// A dense layer with a low-rank adapter. The weight is an input of the step, unless it is quantized: then no gradient flows to it.
#[derive(Clone, Debug)]
pub struct Lora<B: Backend> {
    scale: f64,
    quantized: Option<QuantizedTensor<B>>,
    product_exceeds_weight: bool,
}

impl<B: LoraKernels> Lora<B> {
    /// The output; also `x a` and the product, if they are kept.
    fn forward_keeping(&self, inputs: Inputs<B, 6>, keeps: [bool; 2]) -> (FloatTensor<B>, KeptProducts<B>) {
        let [x, a, b, weight, factor, mut bias] = inputs;
        let (x, a, b) = (given(x), given(a), given(b));
        let weight = Weight::<B>::from_parts(weight, self.quantized.clone());
        let of_dense = if factor.is_some() || B::FINISHES { None } else { bias.take() };
        let product = Linear.forward_with(x.clone(), weight, of_dense); // first, as it needs the most memory
        if keeps == [false; 2] && B::FINISHES {
            return (B::adapt_from(product, x, [a, b], self.scale, factor, bias), [None, None]);
        }
        let h = B::dense(x, a, None);
        let kept_h = keeps[0].then(|| h.clone());
        if !keeps[1] {
            return (B::adapt(product, h, b, self.scale, factor, bias), [kept_h, None]);
        }
        let product = B::add_scaled_product(product, h, b, self.scale);
        (finished::<B>(product.clone(), factor, bias), [kept_h, Some(product)])
    }

    /// Whether `x a` and the product are kept.
    fn keeps(&self, recorder: &Recorder<6>) -> [bool; 2] {
        let again = self.computes_product_again(recorder.tracked(FACTOR));
        [recorder.tracked(FACTOR_B) && !recorder.keeps(X), recorder.tracked(FACTOR) && !again]
    }

    /// What is saved besides inputs.
    fn saved(&self, [h, product]: KeptProducts<B>, recorder: &Recorder<6>) -> SavedLora<B> {
        let again = self.computes_product_again(recorder.tracked(FACTOR));
        let quantized = self.quantized.clone().filter(|_| recorder.tracked(X) || again);
        let quantized = quantized.map(|weight| recorder.report().handle("weight", weight));
        let h = h.map(|h| recorder.report().made::<B>("x a", h, "b is tracked"));
        let product = product.map(|p| recorder.report().made::<B>("product", p, "factor is tracked"));
        SavedLora { h, product, lora: Lora { quantized, ..self.clone() } }
    }

    /// Whether the product is recomputed from `x` for the gradient of the factor.
    fn computes_product_again(&self, tracks_factor: bool) -> bool {
        tracks_factor && self.product_exceeds_weight
    }
}

/// `y * factor + bias`
fn finished<B: Backend>(
    mut y: FloatTensor<B>,
    factor: Option<FloatTensor<B>>,
    bias: Option<FloatTensor<B>>,
) -> FloatTensor<B> {
    if let Some(factor) = factor {
        let factor = as_row::<B>(factor, &y);
        y = B::float_mul(y, factor);
    }
    if let Some(bias) = bias {
        let bias = as_row::<B>(bias, &y);
        y = B::float_add(y, bias);
    }
    y
}

/// A row with as many axes as `x`.
fn as_row<B: Backend>(row: FloatTensor<B>, x: &FloatTensor<B>) -> FloatTensor<B> {
    let mut shape = vec![1; x.rank()];
    shape[x.rank() - 1] = row.shape()[0];
    B::float_reshape(row, Shape::from(shape))
}

impl<B: LoraKernels> Operation<B, 6> for Lora<B> {
    const INPUTS: [&'static str; 6] = ["x", "a", "b", "weight", "factor", "bias"];
    const PARAMETERS: &'static [usize] = &[WEIGHT, FACTOR_A, FACTOR_B];
    const SHAPES: &'static [usize] = &[X];
    type Saved = SavedLora<B>;

    fn name(&self) -> &'static str {
        "lora"
    }

    fn plan(&self, inputs: &Tracking<B, 6>) -> KeepPlan<6> {
        let [x, a, b, weight] = [X, FACTOR_A, FACTOR_B, WEIGHT].map(|input| inputs.tracked(input));
        let again = self.computes_product_again(inputs.tracked(FACTOR));
        let keeps_x = a || weight || again;
        KeepPlan::nothing()
            .keep_if(keeps_x, X, if a || weight { "a or weight is tracked" } else { "factor is tracked" })
            .keep_if(x || again || b && keeps_x, FACTOR_A, "x, b or factor is tracked")
            .keep_if(x || again || a, FACTOR_B, "x, a or factor is tracked")
            .keep_if(x || again, WEIGHT, "x or factor is tracked")
            .keep_if(x || a || b || weight, FACTOR, "x, a, b or weight is tracked")
    }

    fn forward(&self, inputs: Inputs<B, 6>) -> FloatTensor<B> {
        self.forward_keeping(inputs, [false; 2]).0
    }

    fn forward_saving(&self, inputs: Inputs<B, 6>, recorder: &Recorder<6>) -> (FloatTensor<B>, SavedLora<B>) {
        let (y, kept) = self.forward_keeping(inputs, self.keeps(recorder));
        (y, self.saved(kept, recorder))
    }

    fn saving(&self, inputs: &Inputs<B, 6>, recorder: &Recorder<6>) -> Option<SavedLora<B>> {
        let [keeps_h, false] = self.keeps(recorder) else { return None };
        let [x, a] = [X, FACTOR_A].map(|input| inputs[input].clone());
        let h = keeps_h.then(|| B::dense(given(x), given(a), None));
        Some(self.saved([h, None], recorder))
    }

    fn backward(saved: SavedLora<B>, mut dy: FloatTensor<B>, pass: &mut BackwardPass<B, 6>) {
        let SavedLora { h, product, lora } = saved;
        let mut h = h.map(KeptTensor::get);
        let [x, a, b, factor] = [X, FACTOR_A, FACTOR_B, FACTOR].map(|input| pass.take(input));
        let mut weight = None;
        if pass.wants(BIAS) {
            pass.give(BIAS, B::linear_bias_backward(dy.clone()));
        }
        if pass.wants(FACTOR) {
            let product = product.map(KeptTensor::get).unwrap_or_else(|| {
                weight = pass.take(WEIGHT);
                let inputs = [x.clone(), a.clone(), b.clone(), weight.clone(), None, None];
                let (product, [of_product, _]) = lora.forward_keeping(inputs, [pass.wants(FACTOR_B), false]);
                h = of_product;
                product
            });
            pass.give(FACTOR, B::linear_bias_backward(B::float_mul(product, dy.clone())));
        }
        if let Some(factor) = factor {
            let factor = as_row::<B>(factor, &dy);
            dy = B::float_mul(dy, factor);
        }
        let dh_of = |b: &FloatTensor<B>, dy: FloatTensor<B>| {
            let mut shape = dy.shape();
            let last = shape.num_dims() - 1;
            shape[last] = b.shape()[0];
            Linear.x_backward_with(shape, Weight::<B>::Dense(b.clone()), dy)
        };
        let (mut da, mut db) = (None, None);
        if pass.wants(FACTOR_B)
            && let Some(h) = h.or_else(|| Some(B::dense(x.clone()?, a.clone()?, None)))
        {
            db = Some(B::dense_weight_backward(h, dy.clone()));
        }
        let mut dh = None;
        if pass.wants(FACTOR_A)
            && let (Some(x), Some(b)) = (&x, &b)
        {
            let dh = dh.insert(dh_of(b, dy.clone())).clone();
            da = Some(B::dense_weight_backward(x.clone(), dh));
        }
        give_scaled(pass, [(FACTOR_A, da), (FACTOR_B, db)], lora.scale);
        if let Some(x) = x.filter(|_| pass.wants(WEIGHT)) {
            pass.give(WEIGHT, B::dense_weight_backward(x, dy.clone()));
        }
        if pass.wants(X)
            && let (Some(a), Some(b)) = (a, b)
        {
            let weight = Weight::<B>::from_parts(weight.or_else(|| pass.take(WEIGHT)), lora.quantized);
            let dx = Linear.x_backward_with(pass.shape(X), weight, dy.clone());
            let [of_a, of_b] = [a, b.clone()].map(|factor| B::float_swap_dims(factor, 0, 1));
            pass.give(
                X,
                match dh {
                    None if B::FINISHES => B::adapt_from(dx, dy, [of_b, of_a], lora.scale, None, None),
                    dh => B::add_scaled_product(dx, dh.unwrap_or_else(|| dh_of(&b, dy)), of_a, lora.scale),
                },
            );
        }
    }
}

/// `x a` and the product.
type KeptProducts<B> = [Option<FloatTensor<B>>; 2];

/// What the backward pass reads besides inputs.
#[derive(Clone, Debug)]
pub struct SavedLora<B: Backend> {
    /// `x a`, if `b` is tracked and `x` is not kept.
    h: Option<KeptTensor<FloatTensor<B>>>,
    /// `p`, if `factor` is tracked and `p` is not recomputed.
    product: Option<KeptTensor<FloatTensor<B>>>,
    /// The operation, without the quantized weight if the backward pass does not read it.
    lora: Lora<B>,
}

/// The kernels.
pub trait LoraKernels: LinearKernels + PackingKernels {
    /// `y + scale u v`, with `y` `[..., columns]`, `u` `[..., rank]` and `v` `[rank, columns]`; if the backend can, in place of `y`, and
    /// without the whole product.
    fn add_scaled_product(
        y: FloatTensor<Self>,
        u: FloatTensor<Self>,
        v: FloatTensor<Self>,
        scale: f64,
    ) -> FloatTensor<Self> {
        composed_product::<Self>(y, u, v, scale)
    }

    /// Whether [`adapt`](Self::adapt) and [`adapt_from`](Self::adapt_from) are one pass each. Then they also add the bias, which the
    /// product with the weight adds otherwise.
    const FINISHES: bool = false;

    /// `(y + scale u v) * factor + bias`, with `factor` and `bias` `[columns]`.
    fn adapt(
        y: FloatTensor<Self>,
        u: FloatTensor<Self>,
        v: FloatTensor<Self>,
        scale: f64,
        factor: Option<FloatTensor<Self>>,
        bias: Option<FloatTensor<Self>>,
    ) -> FloatTensor<Self> {
        finished::<Self>(Self::add_scaled_product(y, u, v, scale), factor, bias)
    }

    /// `(y + scale (x a) b) * factor + bias`, with `x` `[..., inputs]`, `a` `[inputs, rank]` and `b` `[rank, columns]`; if the backend can,
    /// without `x a`.
    fn adapt_from(
        y: FloatTensor<Self>,
        x: FloatTensor<Self>,
        [a, b]: [FloatTensor<Self>; 2],
        scale: f64,
        factor: Option<FloatTensor<Self>>,
        bias: Option<FloatTensor<Self>>,
    ) -> FloatTensor<Self> {
        Self::adapt(y, Self::dense(x, a, None), b, scale, factor, bias)
    }

    /// `scale x` of both tensors, which have the same dtype; if the backend can, in one pass.
    fn scale_both(x: [FloatTensor<Self>; 2], scale: f64) -> [FloatTensor<Self>; 2] {
        x.map(|x| scaled::<Self>(x, scale))
    }
}
composing_backends!(LoraKernels);

fn composed_product<B: Backend>(
    y: FloatTensor<B>,
    u: FloatTensor<B>,
    v: FloatTensor<B>,
    scale: f64,
) -> FloatTensor<B> {
    let ([rank, columns], shape) = (v.shape().dims(), y.shape());
    let rows = shape.num_elements() / columns;
    let u = B::float_reshape(scaled::<B>(u, scale), Shape::new([rows, rank]));
    let product = B::float_matmul(u, v);
    B::float_add(y, B::float_reshape(product, shape))
}

/// Gives two gradients, as far as there are any, multiplied by `scale`.
pub(super) fn give_scaled<B: LoraKernels, const N: usize>(
    pass: &mut BackwardPass<B, N>,
    gradients: [(usize, Option<FloatTensor<B>>); 2],
    scale: f64,
) {
    let [(first, a), (second, b)] = gradients;
    let gradients = match (a, b) {
        (Some(a), Some(b)) if scale != 1.0 => B::scale_both([a, b], scale).map(Some),
        (a, b) => [a, b].map(|gradient| gradient.map(|gradient| scaled::<B>(gradient, scale))),
    };
    for (input, gradient) in [first, second].into_iter().zip(gradients) {
        if let Some(gradient) = gradient {
            pass.give(input, gradient);
        }
    }
}

fn scaled<B: Backend>(x: FloatTensor<B>, scale: f64) -> FloatTensor<B> {
    if scale == 1.0 { x } else { B::float_mul_scalar(x, scale.into()) }
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use super::*;
    use crate::backend::testing::{Composed, assert_close, composed, random};
    use burn::backend::{Flex, ops::FloatTensorOps};

    #[test]
    fn products_are_added_as_by_the_kernel() {
        let compare = |y: FloatTensor<Flex>, u: FloatTensor<Flex>, v: FloatTensor<Flex>| {
            for scale in [1.0, -0.75] {
                let body = Composed::add_scaled_product(composed(&y), composed(&u), composed(&v), scale);
                let cpu = Flex::add_scaled_product(y.clone(), u.clone(), v.clone(), scale);
                assert_close("y + scale u v", body, cpu);
            }
        };
        for (rows, columns, rank) in [(3, 7, 1), (400, 5, 4), (700, 1030, 7), (3, 9, 33), (700, 1030, 40)] {
            compare(random(&[2, rows, columns]), random(&[2, rows, rank]), random(&[rank, columns]));
        }
        compare(random(&[9, 5]), random(&[9, 3]), Flex::float_swap_dims(random(&[5, 3]), 0, 1));
    }
}
