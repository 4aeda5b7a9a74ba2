//! The log-probabilities of targets under a dense layer's outputs, which exist only in chunks.
//!
//! | | |
//! | --- | --- |
//! | computes | `logits[target] - log(sum(exp(logits)))` per row of `logits = x weight + bias`, in f32 at least |
//! | keeps | `x`, `weight` and `bias` (handles), `log(sum(exp(logits)))` per row, the targets, and which rows are padding |
//! | backward | recomputes the logits, a chunk at a time; `dlogits = dy (q - p)`, `q` 1 at the target and 0 elsewhere; |
//! | | `dx = dlogits weight^T`, `dweight = x^T dlogits`, `dbias = sum(dlogits)` |
//!
//! A [`HeadLoss`](super::head_loss) knows the factors of its rows, and can compute its gradients in the forward pass. This operation
//! cannot. As there, the gradient of a weight in half precision is computed in blocks of classes.
//!
//! Rows of padding count as rows of zeros in `x`, whatever they hold. Their result is 0.
use super::{
    cross_entropy::Labels,
    head_loss::{
        BIAS, Blocks, GradientSums, Head, HeadGradients, HeadLossKernels, INPUTS, Loss, WEIGHT, X, joined,
        rows_of, zero_rows,
    },
};
use crate::backend::wide;
use crate::{
    backend::optional::{MaybeMask, MaybeTensor},
    graph::{BackwardPass, Inputs, KeepPlan, Operation, Recorder, Run, Tracking, extension, given},
};
use burn::backend::{
    Backend, TensorMetadata,
    tensor::{BoolTensor, FloatTensor, IntTensor},
};
use burn::tensor::{DType, Shape};

extension! {
    /// Log-probabilities.
    pub trait LinearLogProbOps(HeadLossKernels) {
        /// The log-probability of every row's target, `[rows]`, in f32 at least. x `[rows, d_input]`, weight `[d_input, classes]`, bias
        /// `[classes]`, targets `[rows]`; `padding` `[rows]` marks the rows that do not count.
        fn memsave_linear_log_prob(
            x: FloatTensor<Self>,
            weight: FloatTensor<Self>,
            #[extension_type] bias: MaybeTensor<Self>,
            targets: IntTensor<Self>,
            #[extension_type] padding: MaybeMask<Self>,
            chunk_bytes: Option<usize>,
        ) -> FloatTensor<Self> {
            let padding = match padding {
                MaybeMask::Some(padding) => Some(padding),
                MaybeMask::None => None,
            };
            let operation = LinearLogProb::<<Self as Run>::Plain>::new(targets, padding, chunk_bytes);
            Self::run(operation, [Some(x), Some(weight), bias.into_option()])
        }
    }
}

/// The log-probabilities of targets.
#[derive(Clone, Debug)]
pub(crate) struct LinearLogProb<B: Backend> {
    labels: Labels<B>,
    /// Marks the rows that do not count, `[rows, 1]`.
    padding: Option<BoolTensor<B>>,
    chunk_bytes: Option<usize>,
}

impl<B: HeadLossKernels> LinearLogProb<B> {
    /// `padding`: `[rows]`.
    fn new(targets: IntTensor<B>, padding: Option<BoolTensor<B>>, chunk_bytes: Option<usize>) -> Self {
        let shape = Shape::new([targets.shape().num_elements(), 1]);
        let padding = padding.map(|padding| B::bool_reshape(padding, shape));
        Self { labels: Labels::new(targets, None, None), padding, chunk_bytes }
    }

    /// The sum of the losses times `factors` `[rows, 1]`; a loss is the negative of a result.
    fn loss(self, factors: FloatTensor<B>) -> Loss<B, Labels<B>> {
        let Self { labels, padding, chunk_bytes } = self;
        Loss { what: labels, factors: zero_rows::<B>(factors, &padding), padding, chunk_bytes }
    }

    /// The results, and [`RowLoss::STATISTICS`](super::head_loss::RowLoss::STATISTICS) of chunks.
    fn results(&self, head: &Head<B>, x: &FloatTensor<B>) -> (FloatTensor<B>, Vec<Vec<FloatTensor<B>>>) {
        let rows = x.shape()[0];
        let minus = B::float_full(Shape::new([rows, 1]), (-1).into(), &x.device(), wide(x.dtype()).into());
        let (mut results, mut statistics) = (Vec::new(), Vec::new());
        self.clone().loss(minus).each(head, x, &mut |chunk| {
            let (of_rows, of_chunk) = chunk.losses();
            results.push(of_rows);
            statistics.push(of_chunk);
        });
        (B::float_reshape(B::float_cat(results, 0), Shape::new([rows])), statistics)
    }
}

impl<B: HeadLossKernels> Operation<B, 3> for LinearLogProb<B> {
    const INPUTS: [&'static str; 3] = INPUTS;
    const PARAMETERS: &'static [usize] = &[WEIGHT, BIAS];
    type Saved = SavedLogProb<B>;

    fn name(&self) -> &'static str {
        "linear_log_prob"
    }

    fn plan(&self, _: &Tracking<B, 3>) -> KeepPlan<3> {
        let keep = |plan: KeepPlan<3>, input| plan.keep_if(true, input, "the logits are computed again");
        [X, WEIGHT, BIAS].into_iter().fold(KeepPlan::nothing(), keep)
    }

    fn forward(&self, [x, weight, bias]: Inputs<B, 3>) -> FloatTensor<B> {
        self.results(&Head { weight: given(weight), bias }, &given(x)).0
    }

    fn forward_saving(
        &self,
        [x, weight, bias]: Inputs<B, 3>,
        recorder: &Recorder<3>,
    ) -> (FloatTensor<B>, SavedLogProb<B>) {
        const REASON: &str = "the logits are computed again";
        let (results, statistics) = self.results(&Head { weight: given(weight), bias }, &given(x));
        let report = recorder.report();
        let statistics = joined::<B>(statistics).into_iter();
        let statistics = statistics.map(|values| report.tensor("log_sum_exp", values, REASON)).collect();
        let Self { labels, padding, chunk_bytes } = self.clone();
        let labels = labels.reported(report, REASON);
        let padding = padding.map(|padding| report.tensor("padding", padding, REASON));
        (results, SavedLogProb { statistics, operation: Self { labels, padding, chunk_bytes } })
    }

    fn backward(
        SavedLogProb { statistics, operation }: SavedLogProb<B>,
        dy: FloatTensor<B>,
        pass: &mut BackwardPass<B, 3>,
    ) {
        let [x, weight] = [X, WEIGHT].map(|input| given(pass.take(input)));
        let head = Head { weight, bias: pass.take(BIAS) };
        let dtype = x.dtype();
        let by_blocks = pass.wants(WEIGHT) && wide(dtype) != dtype;
        let loss = operation.loss(B::float_reshape(B::float_neg(dy), Shape::new([x.shape()[0], 1])));
        let wanted = [pass.wants(X), pass.wants(WEIGHT) && !by_blocks, pass.wants(BIAS)];
        if wanted.contains(&true) {
            let mut sums = GradientSums::new(wanted, &head, &x);
            loss.each(&head, &x, &mut |chunk| {
                let of_chunk: Vec<_> = statistics.iter().map(|all| rows_of::<B>(all, chunk.rows())).collect();
                sums.add(chunk, &of_chunk, None);
            });
            let HeadGradients { x, weight, bias } = sums.finish();
            pass.give_all([x, weight, bias.map(|bias| B::float_cast(bias, dtype.into()))]);
        }
        if by_blocks {
            let one = B::float_full(Shape::new([1]), 1.into(), &x.device(), DType::F32.into());
            pass.give(WEIGHT, Blocks { statistics, loss }.weight_gradient(x, &head, one));
        }
    }
}

/// What the backward pass reads besides inputs.
#[derive(Clone, Debug)]
pub(crate) struct SavedLogProb<B: Backend> {
    /// `log(sum(exp(logits)))`, in two parts, `[rows, 2]`.
    statistics: Vec<FloatTensor<B>>,
    operation: LinearLogProb<B>,
}
