//! Cross entropy of a dense layer's outputs, which are made in chunks.
//!
//! | | |
//! | --- | --- |
//! | computes | `sum(factor loss)` over the rows of `logits = x weight + bias`, `loss` as in [`cross_entropy`](super::cross_entropy) |
//! | keeps | the gradients of what is tracked; but |
//! | | with `weight` tracked and fewer rows than `d_input` only `dlogits`, and handles of `x` and, if `x` is tracked, `weight`; |
//! | | else with `weight` tracked in half precision, instead of its gradient, handles of the inputs and `log(sum(exp(logits)))` |
//! | backward | `dx = dlogits weight^T`, `dweight = x^T dlogits`, `dbias = sum(dlogits)` |
//!
//! The forward pass takes a few rows at a time, and makes the gradients right away, as
//! [Liger-Kernel](https://arxiv.org/abs/2410.10989) does. Only for few rows would the gradient of the weight be larger than the
//! logits, which stock keeps: then the gradient of the logits is kept, in their place, and the backward pass makes the rest.
//!
//! In half precision, the contributions of many chunks of rows to the gradient of the weight would have to be summed in f32, at
//! twice its size, and each would be rounded. So the backward pass makes it in blocks of classes: every block is one product over
//! all rows, as in stock, from logits that are computed again. What is kept in f16 is scaled so that its largest possible value
//! fills the range of f16: small gradients, which a scaled loss would bring into that range, are not lost.
//!
//! Rows with a factor of 0, such as padding, count as rows of zeros in `x`, whatever they hold, and have no loss.
use super::{
    MaybeTensor,
    cross_entropy::{Classes, CrossEntropyKernels, Labels},
    extension::extension,
    linear::LinearKernels,
    step::{BackwardPass, Inputs, Operation, Plan, Recorder, Run, Tracking, given},
};
use crate::backend::{Scaling, device_backends, wide, widen, zeros};
use burn::backend::{
    Backend, TensorMetadata,
    tensor::{BoolTensor, FloatTensor, IntTensor},
};
use burn::tensor::{Shape, Slice};

mod chunks;
#[cfg(any(feature = "flex", feature = "ndarray"))]
mod cpu;

use chunks::{Chunk, Head, Loss, add_product, chunks, sum_of_rows, zero_rows};

/// The options of the cross entropy of a dense layer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LinearCrossEntropy {
    /// Label smoothing.
    pub smoothing: Option<f32>,
    /// How many bytes of logits exist at a time; at least one row, for a tracked weight of half precision 64 classes of all
    /// rows, and all if their gradient is kept.
    pub chunk_bytes: usize,
}

extension! {
    /// Cross entropies of dense layers.
    pub trait LinearCrossEntropyOps(LinearCrossEntropyKernels) {
        /// The sum of `factors` times the losses, `[1]`, or without factors the mean; x `[rows, d_input]`, weight
        /// `[d_input, classes]`, bias `[classes]`; untracked: targets and factors `[rows]`, class weights `[classes]`.
        fn memsave_linear_cross_entropy(
            x: FloatTensor<Self>,
            weight: FloatTensor<Self>,
            #[extension_type] bias: MaybeTensor<Self>,
            targets: IntTensor<Self>,
            #[extension_type] factors: MaybeTensor<Self>,
            #[extension_type] class_weights: MaybeTensor<Self>,
            options: LinearCrossEntropy,
        ) -> FloatTensor<Self> {
            let [factors, class_weights] =
                [factors, class_weights].map(|tensor| tensor.into_option().map(Self::plain));
            let labels = Labels::<<Self as Run>::Plain>::new(targets, class_weights, options.smoothing);
            let [rows, d_input] = x.shape().dims();
            let is_half = wide(x.dtype()) != x.dtype();
            let loss = Loss::new(labels, factors, rows, (&x.device(), x.dtype()), options.chunk_bytes);
            Self::run(HeadLoss { loss, has_few_rows: rows < d_input, is_half }, [Some(x), Some(weight), bias.into_option()])
        }
    }
}

/// The kernels, besides those of others.
pub trait LinearCrossEntropyKernels: CrossEntropyKernels + LinearKernels + Scaling {
    /// The bytes of a product that is added to a sum.
    const BLOCK_BYTES: usize = 1 << 24; // launching kernels takes longer than on a CPU

    /// The largest absolute value of a matrix of f16, `[1]`, in any dtype.
    fn largest_magnitude(x: FloatTensor<Self>) -> FloatTensor<Self> {
        composed_largest_magnitude::<Self>(x)
    }
}
device_backends!(LinearCrossEntropyKernels);

/// Not by `float_max_abs`: that of Flex and CubeCL makes a tensor of the size of `x`.
fn composed_largest_magnitude<B: Backend>(x: FloatTensor<B>) -> FloatTensor<B> {
    let extremes = [B::float_max(x.clone()), B::float_min(x)];
    B::float_max_abs(B::float_cat(extremes.into(), 0))
}

const X: usize = 0;
const WEIGHT: usize = 1;
const BIAS: usize = 2;

/// The loss of a head, that is, of a dense layer's outputs.
#[derive(Clone, Debug)]
pub struct HeadLoss<B: Backend> {
    loss: Loss<B>,
    /// Whether there are fewer rows than `d_input`.
    has_few_rows: bool,
    /// Whether everything is of half precision.
    is_half: bool,
}

/// How the gradient of the weight is made.
#[derive(Clone, Copy, Debug, PartialEq)]
enum WeightGradient {
    /// In the forward pass, if it is wanted.
    Ahead,
    /// In the backward pass, from the gradient of the logits.
    FromLogits,
    /// In the backward pass, block by block, from logits that are computed again.
    ByBlocks,
}

impl<B: LinearCrossEntropyKernels> HeadLoss<B> {
    fn weight_gradient(&self, weight_is_tracked: bool) -> WeightGradient {
        match weight_is_tracked {
            true if self.has_few_rows => WeightGradient::FromLogits,
            true if self.is_half => WeightGradient::ByBlocks,
            _ => WeightGradient::Ahead,
        }
    }

    /// The loss and the gradient of the logits of all rows.
    fn with_logits_gradient(
        self,
        head: &Head<B>,
        x: &FloatTensor<B>,
        recorder: &Recorder<3>,
    ) -> (FloatTensor<B>, Saved<B>) {
        let (scale, padding) = (self.loss.scale(head, false), self.loss.padding.clone());
        let whole = Loss { chunk_bytes: usize::MAX, ..self.loss };
        let mut dlogits = None;
        let sum = whole.sum(head, x, &mut |all| dlogits = Some(all.dlogits(scale.as_ref())));
        let dlogits = dlogits.expect("there are rows");
        let dlogits = recorder.ledger().tensor("dlogits", dlogits, AHEAD);
        let padding =
            padding.map(|padding| recorder.ledger().tensor("padding", padding, "weight is tracked"));
        (sum, Saved { scale, gradients: SavedGradients::OfLogits { dlogits, padding } })
    }
}

/// Why a gradient is kept.
const AHEAD: &str = "made in the forward pass";

impl<B: LinearCrossEntropyKernels> Operation<B, 3> for HeadLoss<B> {
    const INPUTS: [&'static str; 3] = ["x", "weight", "bias"];
    const PARAMETERS: &'static [usize] = &[WEIGHT];
    type Saved = Saved<B>;

    fn name(&self) -> &'static str {
        "linear_cross_entropy"
    }

    fn plan(&self, inputs: &Tracking<B, 3>) -> Plan<3> {
        const WEIGHT_IS_TRACKED: &str = "weight is tracked";
        match self.weight_gradient(inputs.tracked(WEIGHT)) {
            WeightGradient::Ahead => Plan::nothing(),
            WeightGradient::FromLogits => {
                let x_is_kept = Plan::nothing().keep_if(true, X, WEIGHT_IS_TRACKED);
                x_is_kept.keep_if(inputs.tracked(X), WEIGHT, "x is tracked")
            }
            WeightGradient::ByBlocks => [X, WEIGHT, BIAS]
                .into_iter()
                .fold(Plan::nothing(), |plan, input| plan.keep_if(true, input, WEIGHT_IS_TRACKED)),
        }
    }

    fn forward(&self, [x, weight, bias]: Inputs<B, 3>) -> FloatTensor<B> {
        self.loss.sum(&Head { weight: given(weight), bias }, &given(x), &mut |_| ())
    }

    fn forward_saving(
        &self,
        [x, weight, bias]: Inputs<B, 3>,
        recorder: &Recorder<3>,
    ) -> (FloatTensor<B>, Saved<B>) {
        let (x, head) = (given(x), Head { weight: given(weight), bias });
        let by = self.weight_gradient(recorder.tracked(WEIGHT));
        if by == WeightGradient::FromLogits {
            return self.clone().with_logits_gradient(&head, &x, recorder);
        }
        let scale = self.loss.scale(&head, recorder.tracked(X));
        let zeros =
            |wanted: bool, shape, dtype| wanted.then(|| B::float_full(shape, 0.into(), &x.device(), dtype));
        let (dtype, wide) = (x.dtype().into(), wide(x.dtype()).into());
        let adds_to_weight = recorder.tracked(WEIGHT) && by == WeightGradient::Ahead;
        let mut made = Made {
            x: zeros(recorder.tracked(X), x.shape(), dtype),
            weight: zeros(adds_to_weight, head.weight.shape(), dtype),
            bias: zeros(recorder.tracked(BIAS), Shape::new([head.classes()]), wide),
        };
        let mut log_sum_exp = Vec::new();
        let sum = self.loss.sum(&head, &x, &mut |chunk| {
            if by == WeightGradient::ByBlocks {
                log_sum_exp.push(chunk.log_sum_exp.clone());
            }
            made.add(&head, chunk, scale.as_ref());
        });
        let ledger = recorder.ledger();
        let keep = |name, gradient: Option<FloatTensor<B>>| {
            gradient.map(|gradient| ledger.tensor(name, gradient, AHEAD))
        };
        let made = Made {
            x: keep("dx", made.x),
            weight: keep("dweight", made.weight),
            bias: keep("dbias", made.bias),
        };
        let blocks = (by == WeightGradient::ByBlocks).then(|| {
            const REASON: &str = "weight is tracked";
            Blocks {
                log_sum_exp: ledger.tensor("log_sum_exp", B::float_cat(log_sum_exp, 0), REASON),
                loss: self.loss.clone().reported(ledger, REASON),
            }
        });
        (sum, Saved { scale, gradients: SavedGradients::Made(made, blocks) })
    }

    fn backward(saved: Saved<B>, dloss: FloatTensor<B>, pass: &mut BackwardPass<B, 3>) {
        let dtype = dloss.dtype();
        let factor = match saved.scale {
            None => dloss.clone(),
            Some(scale) => B::float_div(widen::<B>(dloss.clone()), scale),
        };
        match saved.gradients {
            SavedGradients::Made(made, blocks) => {
                let scaled = |gradient| B::float_cast(B::scale(gradient, factor.clone(), 1.0), dtype.into());
                pass.give_all([made.x, made.weight, made.bias].map(|gradient| gradient.map(scaled)));
                if let Some(blocks) = blocks {
                    let [x, weight] = [X, WEIGHT].map(|input| given(pass.take(input)));
                    let head = Head { weight, bias: pass.take(BIAS) };
                    pass.give(WEIGHT, blocks.weight_gradient(x, &head, dloss));
                }
            }
            SavedGradients::OfLogits { dlogits, padding } => {
                let dlogits = B::scale(dlogits, factor, 1.0);
                let x = zero_rows::<B>(given(pass.take(X)), &padding);
                pass.give(WEIGHT, B::dense_weight_backward(x, dlogits.clone()));
                if pass.wants(BIAS) {
                    pass.give(BIAS, B::float_cast(sum_of_rows::<B>(dlogits.clone()), dtype.into()));
                }
                if let Some(weight) = pass.take(WEIGHT) {
                    pass.give(X, B::dense_x_backward(weight, dlogits));
                }
            }
        }
    }
}

/// What the backward pass reads besides inputs.
#[derive(Clone, Debug)]
pub struct Saved<B: Backend> {
    /// What the kept gradients are multiplied by, `[1]`; 1 if `None`.
    scale: Option<FloatTensor<B>>,
    gradients: SavedGradients<B>,
}

#[derive(Clone, Debug)]
enum SavedGradients<B: Backend> {
    Made(Made<B>, Option<Blocks<B>>),
    /// The gradient of the logits, if there are few rows.
    OfLogits {
        dlogits: FloatTensor<B>,
        /// The rows of `x` that are not read.
        padding: Option<BoolTensor<B>>,
    },
}

/// Gradients that the forward pass makes, of those that are wanted.
#[derive(Clone, Debug)]
struct Made<B: Backend> {
    x: Option<FloatTensor<B>>,
    weight: Option<FloatTensor<B>>,
    /// In f32 at least.
    bias: Option<FloatTensor<B>>,
}

impl<B: LinearCrossEntropyKernels> Made<B> {
    /// Adds what a chunk of rows contributes.
    fn add(&mut self, head: &Head<B>, chunk: Chunk<B>, scale: Option<&FloatTensor<B>>) {
        if self.x.is_none() && self.weight.is_none() && self.bias.is_none() {
            return;
        }
        let (rows, x) = (chunk.rows.clone(), self.weight.is_some().then(|| chunk.x()));
        let dlogits = chunk.dlogits(scale);
        if let (Some(sum), Some(x)) = (self.weight.take(), x) {
            self.weight = Some(add_product::<B>(sum, B::float_transpose(x), dlogits.clone()));
        }
        if let Some(sum) = self.bias.take() {
            self.bias = Some(B::float_add(sum, sum_of_rows::<B>(dlogits.clone())));
        }
        if let Some(all) = self.x.take() {
            let dx = B::dense_x_backward(head.weight.clone(), dlogits);
            self.x = Some(B::float_slice_assign(all, &[Slice::from(rows)], dx));
        }
    }
}

/// What the gradient of a weight of half precision is made of besides inputs, block by block of the classes.
#[derive(Clone, Debug)]
struct Blocks<B: Backend> {
    /// `log(sum(exp(logits)))`, `[rows, 1]`.
    log_sum_exp: FloatTensor<B>,
    loss: Loss<B>,
}

/// The columns of a block of a weight of half precision: a product with fewer is slow, and Flex makes one with a single column
/// in f16.
const FEWEST_COLUMNS: usize = 64;

impl<B: LinearCrossEntropyKernels> Blocks<B> {
    fn weight_gradient(self, x: FloatTensor<B>, head: &Head<B>, dloss: FloatTensor<B>) -> FloatTensor<B> {
        let Self { log_sum_exp, loss } = self;
        let x = zero_rows::<B>(x, &loss.padding);
        let dloss = B::float_mul(loss.factors, B::float_reshape(widen::<B>(dloss), Shape::new([1, 1])));
        let dloss = B::float_cast(dloss, log_sum_exp.dtype().into());
        let [rows, d_input] = x.shape().dims();
        let column = rows * x.dtype().size();
        let mut dweight = zeros::<B>(head.weight.shape(), &head.weight);
        for block in chunks(head.classes(), column, loss.chunk_bytes.max(FEWEST_COLUMNS * column)) {
            let logits = zero_rows::<B>(head.columns(&block).logits(x.clone()), &loss.padding);
            let classes = Classes { range: block.clone(), of: head.classes() };
            let dlogits = B::row_gradients(logits, &loss.labels, log_sum_exp.clone(), dloss.clone(), classes);
            let product = B::dense_weight_backward(x.clone(), dlogits);
            dweight = B::float_slice_assign(dweight, &[Slice::from(0..d_input), Slice::from(block)], product);
        }
        dweight
    }
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use super::*;
    use crate::ops::testing::{Composed, assert_close, composed, random};
    use burn::backend::{Flex, ops::FloatTensorOps};
    use burn::tensor::FloatDType;

    #[test]
    fn the_default_body_equals_the_kernel() {
        for sign in [1.0, -1.0] {
            let x = Flex::float_cast(random(&[300, 700]), FloatDType::F16);
            let peak =
                Flex::float_full(Shape::new([1, 700]), (7.0 * sign).into(), &x.device(), FloatDType::F16);
            let x = Flex::float_cat(vec![x.clone(), peak, x], 0);
            let views =
                [x.clone(), Flex::float_transpose(x.clone()), Flex::float_slice(x, &[Slice::from(100..400)])];
            for x in views {
                let cpu = Flex::largest_magnitude(x.clone());
                assert_close("largest", Composed::largest_magnitude(composed(&x)), cpu.clone());
                assert_close(
                    "largest",
                    composed(&cpu),
                    Flex::float_full(cpu.shape(), 7.0.into(), &x.device(), FloatDType::F16),
                );
            }
        }
    }
}
