//! A dense layer and a loss of its outputs, which are computed in chunks: what [cross entropy](super::linear_cross_entropy) and
//! [divergences](super::linear_divergence) of heads share.
//!
//! | | |
//! | --- | --- |
//! | computes | `sum(factor loss)` over the rows of `logits = x weight + bias`, `loss` by a [`RowLoss`] |
//! | keeps | the gradients of what is tracked; but if `weight` is tracked, |
//! | | with fewer rows than `d_input`: only `dlogits`, and handles of `x` and, if `x` is tracked, of `weight`; |
//! | | else in half precision: instead of the gradient of `weight`, handles of the inputs, what the loss compares with, |
//! | | and its numbers per row, such as `log(sum(exp(logits)))` |
//! | backward | `dx = dlogits weight^T`, `dweight = x^T dlogits`, `dbias = sum(dlogits)` |
//!
//! The forward pass takes a few rows at a time and computes the gradients at once, as
//! [Liger-Kernel](https://arxiv.org/abs/2410.10989) does. If there are few rows, the gradient of the weight would be larger than the
//! logits, which stock keeps. Then the gradient of the logits is kept in their place, and the backward pass computes the others.
//!
//! In half precision, what many chunks of rows contribute to the gradient of the weight would have to be summed in f32, at twice its
//! size, and each contribution would be rounded. So the backward pass computes it in blocks of classes: every block is one product over
//! all rows, as in stock, from recomputed logits. What is kept in f16 is scaled so that its largest possible value fills the range of
//! f16. Otherwise small gradients would be lost before the backward pass multiplies them by the scale of the loss.
//!
//! Rows with a factor of 0, such as padding, count as rows of zeros in `x`, whatever they hold, and have no loss.
use super::{
    cross_entropy::{Classes, CrossEntropyKernels},
    linear::LinearKernels,
};
use crate::backend::{Capacity, Scaling, device_backends, wide, widen, zeros};
use crate::graph::{BackwardPass, Inputs, KeepPlan, Operation, Recorder, Report, Tracking, given};
use burn::backend::{
    Backend, TensorMetadata,
    tensor::{BoolTensor, FloatTensor},
};
use burn::tensor::{DType, Shape, Slice};
use core::{fmt::Debug, ops::Range};

mod chunks;
#[cfg(any(feature = "flex", feature = "ndarray"))]
mod cpu;

pub(super) use chunks::{Chunk, Head, Loss, chunks, one_wide, rows_of, zero_rows};
use chunks::{add_product, put_rows, sum_of_rows};

/// A loss of rows of logits: what they are compared with, and how losses and gradients follow.
pub(crate) trait RowLoss<B: Backend>: Clone + Send + Debug + 'static {
    /// The names, in the ledger, of the numbers per row from which gradients are computed, besides logits.
    const STATISTICS: &'static [&'static str];
    /// How many logits of a row and a class exist at a time: 1 and as many as the loss makes itself. If it is 1, the gradient takes the
    /// place of the logits.
    const LOGITS: usize;
    /// What some classes of some rows are compared with.
    type Part: Clone;

    /// The operation in the ledger.
    fn name(&self) -> &'static str;

    /// What these classes of these rows are compared with. `padding`: which of the rows must not be read.
    fn part(&self, rows: &Range<usize>, classes: Classes, padding: &Option<BoolTensor<B>>) -> Self::Part;

    /// The losses of rows of logits of all classes, and the [statistics](Self::STATISTICS) of the same rows, in f32 at least.
    fn losses(part: &Self::Part, logits: FloatTensor<B>) -> (FloatTensor<B>, Vec<FloatTensor<B>>);

    /// The gradient of logits, in place if nothing else holds them. If the `dloss` of a row is 0, so is its gradient, whatever its logits
    /// are. `dloss`: `[rows, 1]`, in f32 at least.
    fn gradients(
        part: Self::Part,
        logits: FloatTensor<B>,
        statistics: &[FloatTensor<B>],
        dloss: FloatTensor<B>,
    ) -> FloatTensor<B>;

    /// A bound of the absolute values of the gradient's elements, if no `dloss` exceeds `dloss` `[1]`. Their sum over a row is at most
    /// twice the bound. `padding`: which rows must not be read, `[rows, 1]`.
    fn bound(&self, dloss: FloatTensor<B>, padding: &Option<BoolTensor<B>>) -> FloatTensor<B>;

    /// Reports to the ledger what is kept, that is, all of it.
    fn reported(self, report: &Report, reason: &'static str) -> Self;
}

/// The logits of a chunk take at least this many bytes, unless the caller says otherwise.
const CHUNK_BYTES: usize = 16 << 20;

/// The elements of the gradient of `x` per multiprocessor in a chunk. On an H200, a step of 2048 rows of 1024 features and 128,000
/// classes with a frozen weight takes 22x Burn's time in chunks of 32 rows, 1.9x in chunks of 256, 1.05x in chunks of 512, and 0.7x in
/// chunks of 1024, which have this many elements and take 0.17x its memory.
const ELEMENTS: usize = 1 << 13;

/// The kernels, in addition to those of other operations.
pub trait HeadLossKernels: CrossEntropyKernels + LinearKernels + Capacity + Scaling {
    /// The bytes of a product that is added to a sum, on an unknown device.
    const BLOCK_BYTES: usize = 1 << 24; // launching kernels takes longer than on a CPU

    /// The bytes of a product that is added to a sum: more on a GPU, where launches are most of the time of small products.
    fn block_bytes(device: &Self::Device) -> usize {
        Self::busy_bytes(device, Self::BLOCK_BYTES, 1 << 19)
    }

    /// How many bytes of logits exist at a time, unless the caller says it, if a row has `of_row` bytes: 16 MiB; or so many rows that every
    /// multiprocessor computes 8192 elements of a product with `columns` columns, each a sum over the many logits of a row.
    fn chunk_bytes(device: &Self::Device, columns: usize, of_row: usize) -> usize {
        Self::busy_bytes(device, CHUNK_BYTES, ELEMENTS.saturating_mul(of_row).div_ceil(columns.max(1)))
    }

    /// The largest absolute value of a matrix of f16, `[1]`, in any dtype.
    fn largest_magnitude(x: FloatTensor<Self>) -> FloatTensor<Self> {
        composed_largest_magnitude::<Self>(x)
    }
}
device_backends!(HeadLossKernels);

/// Not by `float_max_abs`: that of Flex and CubeCL makes a tensor of the size of `x`.
fn composed_largest_magnitude<B: Backend>(x: FloatTensor<B>) -> FloatTensor<B> {
    let extremes = [B::float_max(x.clone()), B::float_min(x)];
    B::float_max_abs(B::float_cat(extremes.into(), 0))
}

/// The inputs.
pub(super) const INPUTS: [&str; 3] = ["x", "weight", "bias"];
pub(super) const X: usize = 0;
pub(super) const WEIGHT: usize = 1;
pub(super) const BIAS: usize = 2;

/// The loss of a head, that is, of a dense layer's outputs.
#[derive(Clone, Debug)]
pub(crate) struct HeadLoss<B: Backend, L> {
    loss: Loss<B, L>,
    /// Whether there are fewer rows than `d_input`.
    has_few_rows: bool,
    /// Whether everything is of half precision.
    is_half: bool,
}

impl<B: HeadLossKernels, L: RowLoss<B>> HeadLoss<B, L> {
    /// For `x` of a shape, device and dtype. `factors`: those of the rows; without them, the result is the mean.
    pub(crate) fn new(
        what: L,
        factors: Option<FloatTensor<B>>,
        x: Shape,
        (device, dtype): (&B::Device, DType),
        chunk_bytes: Option<usize>,
    ) -> Self {
        let [rows, d_input] = x.dims();
        let loss = Loss::new(what, factors, rows, (device, dtype), chunk_bytes);
        Self { loss, has_few_rows: rows < d_input, is_half: wide(dtype) != dtype }
    }
}

/// When and how the gradient of the weight is computed.
#[derive(Clone, Copy, Debug, PartialEq)]
enum WeightGradient {
    /// In the forward pass, if it is wanted.
    Ahead,
    /// In the backward pass, from the gradient of the logits.
    FromLogits,
    /// In the backward pass, block by block, from recomputed logits.
    ByBlocks,
}

impl<B: HeadLossKernels, L: RowLoss<B>> HeadLoss<B, L> {
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
    ) -> (FloatTensor<B>, SavedHeadLoss<B, L>) {
        let (scale, padding) = (self.loss.scale(head, false), self.loss.padding.clone());
        let is_in_place = L::LOGITS == 1;
        let chunk_bytes = if is_in_place { Some(usize::MAX) } else { self.loss.chunk_bytes };
        let (loss, rows) = (Loss { chunk_bytes, ..self.loss }, x.shape()[0]);
        let mut all: Option<FloatTensor<B>> = None;
        let sum = loss.sum(head, x, &mut |chunk, statistics| {
            let range = chunk.rows.clone();
            let dlogits = chunk.dlogits(&statistics, scale.as_ref());
            all = Some(put_rows::<B>(all.take(), rows, range, dlogits));
        });
        let dlogits = all.expect("there are rows");
        let dlogits = recorder.report().tensor("dlogits", dlogits, AHEAD);
        let padding =
            padding.map(|padding| recorder.report().tensor("padding", padding, "weight is tracked"));
        (sum, SavedHeadLoss { scale, gradients: SavedGradients::OfLogits { dlogits, padding } })
    }
}

/// Why a gradient is kept.
const AHEAD: &str = "made in the forward pass";

impl<B: HeadLossKernels, L: RowLoss<B>> Operation<B, 3> for HeadLoss<B, L> {
    const INPUTS: [&'static str; 3] = INPUTS;
    const PARAMETERS: &'static [usize] = &[WEIGHT, BIAS];
    type Saved = SavedHeadLoss<B, L>;

    fn name(&self) -> &'static str {
        self.loss.what.name()
    }

    fn plan(&self, inputs: &Tracking<B, 3>) -> KeepPlan<3> {
        const WEIGHT_IS_TRACKED: &str = "weight is tracked";
        match self.weight_gradient(inputs.tracked(WEIGHT)) {
            WeightGradient::Ahead => KeepPlan::nothing(),
            WeightGradient::FromLogits => {
                let x_is_kept = KeepPlan::nothing().keep_if(true, X, WEIGHT_IS_TRACKED);
                x_is_kept.keep_if(inputs.tracked(X), WEIGHT, "x is tracked")
            }
            WeightGradient::ByBlocks => [X, WEIGHT, BIAS]
                .into_iter()
                .fold(KeepPlan::nothing(), |plan, input| plan.keep_if(true, input, WEIGHT_IS_TRACKED)),
        }
    }

    fn forward(&self, [x, weight, bias]: Inputs<B, 3>) -> FloatTensor<B> {
        self.loss.sum(&Head { weight: given(weight), bias }, &given(x), &mut |_, _| ())
    }

    fn forward_saving(
        &self,
        [x, weight, bias]: Inputs<B, 3>,
        recorder: &Recorder<3>,
    ) -> (FloatTensor<B>, SavedHeadLoss<B, L>) {
        let (x, head) = (given(x), Head { weight: given(weight), bias });
        let by = self.weight_gradient(recorder.tracked(WEIGHT));
        if by == WeightGradient::FromLogits {
            return self.clone().with_logits_gradient(&head, &x, recorder);
        }
        let scale = self.loss.scale(&head, recorder.tracked(X));
        let adds_to_weight = recorder.tracked(WEIGHT) && by == WeightGradient::Ahead;
        let wanted = [recorder.tracked(X), adds_to_weight, recorder.tracked(BIAS)];
        let mut sums = GradientSums::new(wanted, &head, &x);
        let mut of_rows = Vec::new();
        let sum = self.loss.sum(&head, &x, &mut |chunk, statistics| {
            sums.add(chunk, &statistics, scale.as_ref());
            if by == WeightGradient::ByBlocks {
                of_rows.push(statistics);
            }
        });
        let (gradients, report) = (sums.finish(), recorder.report());
        let keep = |name, gradient: Option<FloatTensor<B>>| {
            gradient.map(|gradient| report.tensor(name, gradient, AHEAD))
        };
        let gradients = HeadGradients {
            x: keep("dx", gradients.x),
            weight: keep("dweight", gradients.weight),
            bias: keep("dbias", gradients.bias),
        };
        let blocks = (by == WeightGradient::ByBlocks).then(|| {
            const REASON: &str = "weight is tracked";
            let statistics = joined::<B>(of_rows).into_iter().zip(L::STATISTICS);
            let statistics = statistics.map(|(values, name)| report.tensor(name, values, REASON)).collect();
            Blocks { statistics, loss: self.loss.clone().reported(report, REASON) }
        });
        (sum, SavedHeadLoss { scale, gradients: SavedGradients::OfInputs(gradients, blocks) })
    }

    fn backward(saved: SavedHeadLoss<B, L>, dloss: FloatTensor<B>, pass: &mut BackwardPass<B, 3>) {
        let dtype = dloss.dtype();
        let factor = match saved.scale {
            None => dloss.clone(),
            Some(scale) => B::float_div(widen::<B>(dloss.clone()), scale),
        };
        match saved.gradients {
            SavedGradients::OfInputs(gradients, blocks) => {
                let scaled = |gradient| B::float_cast(B::scale(gradient, factor.clone(), 1.0), dtype.into());
                let HeadGradients { x, weight, bias } = gradients;
                pass.give_all([x, weight, bias].map(|gradient| gradient.map(scaled)));
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
pub(crate) struct SavedHeadLoss<B: Backend, L> {
    /// What the kept gradients are multiplied by, `[1]`; 1 if `None`.
    scale: Option<FloatTensor<B>>,
    gradients: SavedGradients<B, L>,
}

#[derive(Clone, Debug)]
enum SavedGradients<B: Backend, L> {
    OfInputs(HeadGradients<B>, Option<Blocks<B, L>>),
    /// The gradient of the logits, if there are few rows.
    OfLogits {
        dlogits: FloatTensor<B>,
        /// The rows of `x` that are not read.
        padding: Option<BoolTensor<B>>,
    },
}

/// The statistics of all rows, from those of the chunks in order.
pub(super) fn joined<B: Backend>(chunks: Vec<Vec<FloatTensor<B>>>) -> Vec<FloatTensor<B>> {
    let mut all: Vec<Vec<FloatTensor<B>>> = Vec::new();
    for chunk in chunks {
        all.resize_with(chunk.len(), Vec::new);
        all.iter_mut().zip(chunk).for_each(|(all, values)| all.push(values));
    }
    all.into_iter().map(|values| B::float_cat(values, 0)).collect()
}

/// The wanted gradients of the inputs.
#[derive(Clone, Debug)]
pub(crate) struct HeadGradients<B: Backend> {
    pub(super) x: Option<FloatTensor<B>>,
    pub(super) weight: Option<FloatTensor<B>>,
    /// In f32 at least.
    pub(super) bias: Option<FloatTensor<B>>,
}

/// Sums the gradients of the inputs, chunk by chunk.
pub(crate) struct GradientSums<'a, B: Backend> {
    head: &'a Head<B>,
    x: &'a FloatTensor<B>,
    /// Of x, weight and bias.
    wanted: [bool; 3],
    /// The sums so far; before the first chunk, `None`.
    gradients: HeadGradients<B>,
}

impl<'a, B: HeadLossKernels> GradientSums<'a, B> {
    /// `wanted`: which of the gradients of x, weight and bias are.
    pub(super) fn new(wanted: [bool; 3], head: &'a Head<B>, x: &'a FloatTensor<B>) -> Self {
        Self { head, x, wanted, gradients: HeadGradients { x: None, weight: None, bias: None } }
    }

    /// Adds the contributions of a chunk of rows.
    pub(super) fn add<L: RowLoss<B>>(
        &mut self,
        chunk: Chunk<B, L>,
        statistics: &[FloatTensor<B>],
        scale: Option<&FloatTensor<B>>,
    ) {
        let (rows, gradients) = (chunk.rows.clone(), &mut self.gradients);
        let [of_x, of_weight, of_bias] = self.wanted;
        if !(of_x || of_weight || of_bias) {
            return;
        }
        let x = of_weight.then(|| chunk.x());
        let dlogits = chunk.dlogits(statistics, scale);
        if let Some(x) = x {
            gradients.weight = Some(match gradients.weight.take() {
                None => B::dense_weight_backward(x, dlogits.clone()),
                Some(sum) => add_product::<B>(sum, B::float_transpose(x), dlogits.clone()),
            });
        }
        if of_bias {
            let more = sum_of_rows::<B>(dlogits.clone());
            gradients.bias = Some(match gradients.bias.take() {
                None => more,
                Some(sum) => B::float_add(sum, more),
            });
        }
        if of_x {
            let dx = B::dense_x_backward(self.head.weight.clone(), dlogits);
            gradients.x = Some(put_rows::<B>(gradients.x.take(), self.x.shape()[0], rows, dx));
        }
    }

    /// The sums. If there was no chunk, they are zeros.
    pub(super) fn finish(self) -> HeadGradients<B> {
        let Self { head, x, wanted, gradients } = self;
        let of = |input: usize, sum: Option<FloatTensor<B>>, shape: Shape, dtype: DType| {
            let zeros = || B::float_full(shape, 0.into(), &x.device(), dtype.into());
            wanted[input].then(|| sum.unwrap_or_else(zeros))
        };
        HeadGradients {
            x: of(X, gradients.x, x.shape(), x.dtype()),
            weight: of(WEIGHT, gradients.weight, head.weight.shape(), x.dtype()),
            bias: of(BIAS, gradients.bias, Shape::new([head.classes()]), wide(x.dtype())),
        }
    }
}

/// Computes the gradient of a weight of half precision, block by block of the classes, from this and the inputs.
#[derive(Clone, Debug)]
pub(crate) struct Blocks<B: Backend, L> {
    /// The statistics of all rows, see [`RowLoss::STATISTICS`].
    pub(super) statistics: Vec<FloatTensor<B>>,
    pub(super) loss: Loss<B, L>,
}

/// A block of a weight of half precision has at least this many columns: a product with fewer is slow, and Flex computes a product with
/// a single column in f16.
const FEWEST_COLUMNS: usize = 64;

impl<B: HeadLossKernels, L: RowLoss<B>> Blocks<B, L> {
    pub(super) fn weight_gradient(
        self,
        x: FloatTensor<B>,
        head: &Head<B>,
        dloss: FloatTensor<B>,
    ) -> FloatTensor<B> {
        let Self { statistics, loss } = self;
        let x = zero_rows::<B>(x, &loss.padding);
        let [rows, d_input] = x.shape().dims();
        let column = L::LOGITS * rows * x.dtype().size();
        let chunk_bytes = loss.chunk_bytes(&x, column).max(FEWEST_COLUMNS * column);
        let dloss = B::float_reshape(widen::<B>(dloss), Shape::new([1, 1]));
        let dloss = B::float_mul(loss.factors, dloss);
        let mut dweight = zeros::<B>(head.weight.shape(), &head.weight);
        for block in chunks(head.classes(), column, chunk_bytes) {
            let classes = Classes { range: block.clone(), of: head.classes() };
            let part = loss.what.part(&(0..rows), classes, &loss.padding);
            let logits = zero_rows::<B>(head.columns(&block).logits(x.clone()), &loss.padding);
            let dlogits = L::gradients(part, logits, &statistics, dloss.clone());
            let product = B::dense_weight_backward(x.clone(), dlogits);
            dweight = B::float_slice_assign(dweight, &[Slice::from(0..d_input), Slice::from(block)], product);
        }
        dweight
    }
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use super::*;
    use crate::backend::testing::{Composed, assert_close, composed, random};
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
