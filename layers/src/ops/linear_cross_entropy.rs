//! Cross entropy of a dense layer's outputs, which exist only in chunks. It is a [`HeadLoss`], whose docs say what it keeps.
//!
//! | | |
//! | --- | --- |
//! | computes | `sum(factor loss)` over the rows of `logits = x weight + bias`, `loss` as in [`cross_entropy`](super::cross_entropy) |
use super::{
    cross_entropy::{Classes, Labels, RowLosses},
    head_loss::{HeadLoss, HeadLossKernels, RowLoss, one_wide},
};
use crate::{
    backend::optional::MaybeTensor,
    graph::{Report, Run, extension},
};
use burn::backend::{
    TensorMetadata,
    tensor::{BoolTensor, FloatTensor, IntTensor},
};
use core::ops::Range;

/// The options of the cross entropy of a dense layer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LinearCrossEntropy {
    /// Label smoothing.
    pub smoothing: Option<f32>,
    /// The bytes of logits that exist at a time. The least is one row; for a tracked weight of half precision, 64 classes of all rows;
    /// and if the gradient of the logits is kept, all of them.
    pub chunk_bytes: Option<usize>,
}

extension! {
    /// Cross entropies of dense layers.
    pub trait LinearCrossEntropyOps(HeadLossKernels) {
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
            let loss = HeadLoss::new(labels, factors, x.shape(), (&x.device(), x.dtype()), options.chunk_bytes);
            Self::run(loss, [Some(x), Some(weight), bias.into_option()])
        }
    }
}

impl<B: HeadLossKernels> RowLoss<B> for Labels<B> {
    const STATISTICS: &'static [&'static str] = &["log_sum_exp"];
    const LOGITS: usize = 1;
    type Part = (Self, Classes);

    fn name(&self) -> &'static str {
        "linear_cross_entropy"
    }

    fn part(&self, rows: &Range<usize>, classes: Classes, _: &Option<BoolTensor<B>>) -> Self::Part {
        (self.rows(rows), classes)
    }

    fn losses((labels, _): &Self::Part, logits: FloatTensor<B>) -> (FloatTensor<B>, Vec<FloatTensor<B>>) {
        let RowLosses { losses, log_sum_exp } = B::row_losses(logits, labels);
        (losses, vec![log_sum_exp])
    }

    fn gradients(
        (labels, classes): Self::Part,
        logits: FloatTensor<B>,
        statistics: &[FloatTensor<B>],
        dloss: FloatTensor<B>,
    ) -> FloatTensor<B> {
        let log_sum_exp = statistics[0].clone();
        let dloss = B::float_cast(dloss, log_sum_exp.dtype().into());
        B::row_gradients(logits, &labels, log_sum_exp, dloss, classes)
    }

    fn bound(&self, dloss: FloatTensor<B>, _: &Option<BoolTensor<B>>) -> FloatTensor<B> {
        match self.weights() {
            None => dloss,
            Some(weights) => B::float_mul(dloss, one_wide::<B>(B::float_max_abs(weights.clone()))),
        }
    }

    fn reported(self, report: &Report, reason: &'static str) -> Self {
        Labels::reported(self, report, reason)
    }
}
