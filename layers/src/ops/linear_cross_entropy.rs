//! Cross entropy of a dense layer's outputs, which exist only in chunks. It is a [`HeadLoss`], whose docs say what it keeps.
//!
//! | | |
//! | --- | --- |
//! | computes | `sum(factor loss)` over the rows of `logits = x weight + bias`, `loss` as in [`cross_entropy`](super::cross_entropy); |
//! | | with a softcap `c`, of `c tanh(logits / c)` |
use super::{
    cross_entropy::{Classes, Labels, RowLosses},
    head_loss::{HeadLoss, HeadLossKernels, RowLoss, one_wide},
};
use crate::{
    backend::optional::MaybeTensor,
    graph::{Report, Run, extension},
};
use burn::backend::{
    Backend, TensorMetadata, get_or_init_device_settings,
    tensor::{BoolTensor, FloatTensor, IntTensor},
};
use burn::tensor::BoolDType;
use core::ops::Range;

/// The options of the cross entropy of a dense layer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LinearCrossEntropy {
    /// Label smoothing.
    pub smoothing: Option<f32>,
    /// The softcap of the logits.
    pub softcap: Option<f64>,
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
            let (shape, of, chunk) = (x.shape(), (x.device(), x.dtype()), options.chunk_bytes);
            let inputs = [Some(x), Some(weight), bias.into_option()];
            match options.softcap {
                None => Self::run(HeadLoss::new(labels, factors, shape, (&of.0, of.1), chunk), inputs),
                Some(cap) => {
                    let capped = Capped { labels, cap };
                    Self::run(HeadLoss::new(capped, factors, shape, (&of.0, of.1), chunk), inputs)
                }
            }
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

/// Labels of logits with a softcap.
#[derive(Clone, Debug)]
pub(crate) struct Capped<B: Backend> {
    labels: Labels<B>,
    cap: f64,
}

impl<B: HeadLossKernels> RowLoss<B> for Capped<B> {
    const STATISTICS: &'static [&'static str] = <Labels<B> as RowLoss<B>>::STATISTICS;
    const LOGITS: usize = 2; // and the slope
    type Part = (<Labels<B> as RowLoss<B>>::Part, f64);

    fn name(&self) -> &'static str {
        RowLoss::name(&self.labels)
    }

    fn part(&self, rows: &Range<usize>, classes: Classes, padding: &Option<BoolTensor<B>>) -> Self::Part {
        (self.labels.part(rows, classes, padding), self.cap)
    }

    fn losses((part, cap): &Self::Part, logits: FloatTensor<B>) -> (FloatTensor<B>, Vec<FloatTensor<B>>) {
        <Labels<B> as RowLoss<B>>::losses(part, capped::<B>(logits, *cap))
    }

    fn gradients(
        (part, cap): Self::Part,
        logits: FloatTensor<B>,
        statistics: &[FloatTensor<B>],
        dloss: FloatTensor<B>,
    ) -> FloatTensor<B> {
        let logits = capped::<B>(logits, cap);
        // `1 - tanh(logits / cap)^2`
        let tanh = B::float_div_scalar(logits.clone(), cap.into());
        let square = B::float_mul(tanh.clone(), tanh);
        let slope = B::float_add_scalar(B::float_neg(square), 1.0.into());
        // Logits that are not numbers have no gradient where the loss does not count.
        let counts_not = B::bool_expand(
            B::float_equal_elem(dloss.clone(), 0.into(), bool_dtype::<B>(&dloss)),
            logits.shape(),
        );
        let gradient = <Labels<B> as RowLoss<B>>::gradients(part, logits, statistics, dloss);
        B::float_mask_fill(B::float_mul(gradient, slope), counts_not, 0.into())
    }

    /// A slope is at most 1.
    fn bound(&self, dloss: FloatTensor<B>, padding: &Option<BoolTensor<B>>) -> FloatTensor<B> {
        self.labels.bound(dloss, padding)
    }

    fn reported(self, report: &Report, reason: &'static str) -> Self {
        Self { labels: Labels::reported(self.labels, report, reason), ..self }
    }
}

fn capped<B: Backend>(logits: FloatTensor<B>, cap: f64) -> FloatTensor<B> {
    let tanh = B::float_tanh(B::float_div_scalar(logits, cap.into()));
    B::float_mul_scalar(tanh, cap.into())
}

fn bool_dtype<B: Backend>(x: &FloatTensor<B>) -> BoolDType {
    get_or_init_device_settings::<B>(&x.device()).bool_dtype
}
