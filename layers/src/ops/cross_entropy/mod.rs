//! Cross entropy of rows of logits.
//!
//! | | |
//! | --- | --- |
//! | computes | `loss = -sum(q w log p)` per row; `p = softmax(x)`, `w` the class weights, |
//! | | `q = (1 - smoothing) [class is target] + smoothing / classes` |
//! | keeps | `x` (a handle), `log(sum(exp(x - max(x))))` per row, the targets and the weights (handles) |
//! | backward | `dx = dloss (p sum(q w) - q w)`, in place if `x` is the only handle of its tensor |
//!
//! Stock Burn computes the log-softmax first, in several steps, whose peak is two tensors of the size of `x`.
use crate::backend::composing_backends;
use crate::{
    backend::optional::MaybeTensor,
    graph::{BackwardPass, Inputs, KeepPlan, Operation, Recorder, Run, Tracking, extension, given},
};
use burn::backend::{
    Backend, TensorMetadata,
    tensor::{FloatTensor, IntTensor},
};
use burn::tensor::{Shape, Slice};
use core::ops::Range;

pub(crate) mod composed;
#[cfg(any(feature = "flex", feature = "ndarray"))]
pub(crate) mod cpu;
#[cfg(any(feature = "wgpu", feature = "cuda"))]
mod cube;
mod labels;

pub use labels::Labels;

extension! {
    /// Cross entropies.
    pub trait CrossEntropyOps(CrossEntropyKernels) {
        /// The loss of every row; x `[rows, classes]`, targets `[rows]`, weights `[classes]` and untracked.
        fn memsave_cross_entropy(
            x: FloatTensor<Self>,
            targets: IntTensor<Self>,
            #[extension_type] weights: MaybeTensor<Self>,
            smoothing: Option<f32>,
        ) -> FloatTensor<Self> {
            let weights = weights.into_option().map(Self::plain);
            let labels = Labels::<<Self as Run>::Plain>::new(targets, weights, smoothing);
            Self::run(CrossEntropy { labels }, [Some(x)])
        }
    }
}

const X: usize = 0;

/// The loss of every row.
#[derive(Clone, Debug)]
pub struct CrossEntropy<B: Backend> {
    labels: Labels<B>,
}

impl<B: CrossEntropyKernels> CrossEntropy<B> {
    /// The losses, of the dtype of `x`, and [`RowLosses::log_sum_exp`].
    fn losses(&self, x: FloatTensor<B>) -> (FloatTensor<B>, FloatTensor<B>) {
        let ([rows, _], dtype) = (x.shape().dims(), x.dtype());
        let RowLosses { losses, log_sum_exp } = B::row_losses(x, &self.labels);
        (B::float_reshape(B::float_cast(losses, dtype.into()), Shape::new([rows])), log_sum_exp)
    }
}

impl<B: CrossEntropyKernels> Operation<B, 1> for CrossEntropy<B> {
    const INPUTS: [&'static str; 1] = ["x"];
    type Saved = SavedCrossEntropy<B>;

    fn name(&self) -> &'static str {
        "cross_entropy"
    }

    fn plan(&self, inputs: &Tracking<B, 1>) -> KeepPlan<1> {
        KeepPlan::nothing().keep_if(inputs.tracked(X), X, "x is tracked")
    }

    fn forward(&self, [x]: Inputs<B, 1>) -> FloatTensor<B> {
        self.losses(given(x)).0
    }

    fn forward_saving(&self, [x]: Inputs<B, 1>, recorder: &Recorder<1>) -> (FloatTensor<B>, Self::Saved) {
        const REASON: &str = "x is tracked";
        let (losses, log_sum_exp) = self.losses(given(x));
        let [_, log] = parts::<B>(log_sum_exp);
        // Copied, since a view would keep both parts. The backward pass finds the largest logit again.
        let log = recorder.report().tensor("log_sum_exp", B::float_mul_scalar(log, 1.0.into()), REASON);
        let labels = self.labels.clone().reported(recorder.report(), REASON);
        (losses, SavedCrossEntropy { log, labels })
    }

    fn backward(saved: SavedCrossEntropy<B>, dloss: FloatTensor<B>, pass: &mut BackwardPass<B, 1>) {
        let SavedCrossEntropy { log, labels } = saved;
        let x = given(pass.take(X));
        let classes = x.shape()[1];
        let dloss = B::float_cast(B::float_reshape(dloss, log.shape()), log.dtype().into());
        pass.give(X, B::row_gradients(x, &labels, log, dloss, Classes::all(classes)));
    }
}

/// What the backward pass reads.
#[derive(Clone, Debug)]
pub struct SavedCrossEntropy<B: Backend> {
    /// The second part of [`RowLosses::log_sum_exp`], `[rows, 1]`.
    log: FloatTensor<B>,
    labels: Labels<B>,
}

/// The losses of rows, and what their gradient is computed from; both in f32 at least.
pub struct RowLosses<B: Backend> {
    /// `-sum(q w log p)`, `[rows, 1]`.
    pub losses: FloatTensor<B>,
    /// `log(sum(exp(x)))` in two parts, the largest `x` and `log(sum(exp(x - largest)))`; `[rows, 2]`. In a single number, a large first
    /// part would swallow digits of the second: for logits of 1e8, all of them.
    pub log_sum_exp: FloatTensor<B>,
}

/// The classes that the columns of logits belong to.
#[derive(Clone, Debug)]
pub struct Classes {
    /// The classes of the columns.
    pub range: Range<usize>,
    /// The number of all classes.
    pub of: usize,
}

impl Classes {
    /// All classes.
    pub fn all(of: usize) -> Self {
        Self { range: 0..of, of }
    }
}

/// The kernels.
pub trait CrossEntropyKernels: Backend {
    /// The losses of all rows of `[rows, classes]`. For a target that is not a class, CPUs panic, and devices give a loss of NaN.
    fn row_losses(x: FloatTensor<Self>, labels: &Labels<Self>) -> RowLosses<Self> {
        composed::losses(x, labels)
    }

    /// The gradient of logits `[rows, classes]`, in place if they are the only handle of their tensor. A row with a `dloss` of 0, such as
    /// padding, gets 0, whatever its logits are. `log_sum_exp` is that of the losses; if the columns are all classes, its second part is
    /// enough. `dloss` is `[rows, 1]`, of the same dtype.
    fn row_gradients(
        x: FloatTensor<Self>,
        labels: &Labels<Self>,
        log_sum_exp: FloatTensor<Self>,
        dloss: FloatTensor<Self>,
        classes: Classes,
    ) -> FloatTensor<Self> {
        composed::gradients(x, labels, log_sum_exp, dloss, classes)
    }
}
composing_backends!(CrossEntropyKernels);

/// The two parts of [`RowLosses::log_sum_exp`], `[rows, 1]` each. Narrowed to the dtype of the logits, the first is exact: it is a logit.
pub(crate) fn parts<B: Backend>(log_sum_exp: FloatTensor<B>) -> [FloatTensor<B>; 2] {
    let rows = log_sum_exp.shape()[0];
    [0, 1]
        .map(|part| B::float_slice(log_sum_exp.clone(), &[Slice::from(0..rows), Slice::from(part..part + 1)]))
}
