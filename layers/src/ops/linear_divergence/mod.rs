//! Divergences of a dense layer's outputs from those of another layer, the teacher. The logits of both exist only in chunks. It is a
//! [`HeadLoss`], whose docs say what it keeps.
//!
//! | | |
//! | --- | --- |
//! | computes | `sum(factor loss)` over the rows. `loss` is a divergence of `q = softmax(logits / temperature)` of the student and `p`, |
//! | | that of the teacher, plus `hard_weight` times the cross entropy of the student's logits and labels, if there are labels |
//! | forward | `KL(p, q) = sum(p log(p / q))`; `dlogits = (q - p) / temperature` |
//! | reverse | `KL(q, p)`; `dlogits = q (g - sum(q g)) / temperature` with `g = log(q / p)` |
//! | Jensen-Shannon | `beta KL(p, m) + (1 - beta) KL(q, m)`, `m = beta p + (1 - beta) q`; the same with `g = (1 - beta) log(q / m)` |
//!
//! In f16 the gradients of a reverse divergence are scaled by a bound of the teacher's logits. To find it, the teacher's `x` and weight are
//! read once more.
//!
//! The statistics per row are `log(sum(exp(logits / temperature)))` of both, and `sum(q g)`. A class whose probability is 0 in f32
//! contributes its limit, which is 0.
use super::{
    cross_entropy::{Classes, Labels, RowLosses},
    head_loss::{Head, HeadLoss, HeadLossKernels, RowLoss, chunks, one_wide, rows_of, zero_rows},
};
use crate::backend::{device_backends, widen};
use crate::{
    backend::optional::MaybeTensor,
    graph::{Report, Run, extension},
};
use burn::backend::{
    Backend, ExtensionType, TensorMetadata, get_or_init_device_settings,
    tensor::{BoolTensor, FloatTensor, IntTensor},
};
use burn::tensor::{DType, Shape, Slice, f16};
use core::ops::Range;

mod composed;
#[cfg(any(feature = "flex", feature = "ndarray"))]
pub(super) mod cpu;

/// A measure of how far the probabilities of a student, `q`, are from those of a teacher, `p`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Divergence {
    /// `KL(p, q)`
    Forward,
    /// `KL(q, p)`
    Reverse,
    /// The generalized Jensen-Shannon divergence.
    JensenShannon {
        /// The share of the teacher in the mixture, above 0 and below 1.
        beta: f64,
    },
}

/// The options of the divergence of a dense layer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LinearDivergence {
    /// The divergence.
    pub divergence: Divergence,
    /// What the logits are divided by.
    pub temperature: f64,
    /// The weight of the cross entropy, if there are labels.
    pub hard_weight: f64,
    /// The bytes of logits of both that exist at a time. The least is one row; for a tracked weight of half precision, 64 classes of all
    /// rows.
    pub chunk_bytes: Option<usize>,
}

/// The hidden states and the head of a teacher. They are not tracked.
#[derive(ExtensionType)]
pub enum TeacherHead<B: Backend> {
    /// A head with a bias.
    Biased {
        /// `[rows, d_teacher]`
        x: FloatTensor<B>,
        /// `[d_teacher, classes]`
        weight: FloatTensor<B>,
        /// `[classes]`
        bias: FloatTensor<B>,
    },
    /// A head without a bias.
    Unbiased {
        /// `[rows, d_teacher]`
        x: FloatTensor<B>,
        /// `[d_teacher, classes]`
        weight: FloatTensor<B>,
    },
}

/// The labels of rows, if there are any.
#[derive(ExtensionType)]
pub enum HardLabels<B: Backend> {
    /// `[rows]`
    Some(IntTensor<B>),
    /// No labels.
    None,
}

extension! {
    /// Divergences of dense layers.
    pub trait LinearDivergenceOps(DivergenceKernels) {
        /// The sum of `factors` times the losses, `[1]`, or without factors the mean. x `[rows, d_input]`, weight `[d_input, classes]`,
        /// bias `[classes]`. Not tracked are the teacher, the labels, and the factors `[rows]`.
        fn memsave_linear_divergence(
            x: FloatTensor<Self>,
            weight: FloatTensor<Self>,
            #[extension_type] bias: MaybeTensor<Self>,
            #[extension_type] teacher: TeacherHead<Self>,
            #[extension_type] factors: MaybeTensor<Self>,
            #[extension_type] labels: HardLabels<Self>,
            options: LinearDivergence,
        ) -> FloatTensor<Self> {
            let (teacher_x, weight_of_teacher, bias_of_teacher) = match teacher {
                TeacherHead::Biased { x, weight, bias } => (x, weight, Some(bias)),
                TeacherHead::Unbiased { x, weight } => (x, weight, None),
            };
            let head = Head {
                weight: Self::plain(weight_of_teacher),
                bias: bias_of_teacher.map(Self::plain),
            };
            let labels = match labels {
                HardLabels::Some(targets) => Some(Labels::<<Self as Run>::Plain>::new(targets, None, None)),
                HardLabels::None => None,
            };
            let teacher = Teacher { x: Self::plain(teacher_x), head, labels, options };
            let factors = factors.into_option().map(Self::plain);
            let loss = HeadLoss::new(teacher, factors, x.shape(), (&x.device(), x.dtype()), options.chunk_bytes);
            Self::run(loss, [Some(x), Some(weight), bias.into_option()])
        }
    }
}

/// The teacher and the labels that rows of logits are compared with.
#[derive(Clone, Debug)]
pub(crate) struct Teacher<B: Backend> {
    /// `[rows, d_teacher]`
    x: FloatTensor<B>,
    head: Head<B>,
    labels: Option<Labels<B>>,
    options: LinearDivergence,
}

/// The teacher's logits and the labels that some classes of some rows are compared with.
#[derive(Clone)]
pub(crate) struct TeacherPart<B: Backend> {
    /// The teacher's logits.
    logits: FloatTensor<B>,
    labels: Option<Labels<B>>,
    classes: Classes,
    options: LinearDivergence,
}

impl<B: DivergenceKernels> RowLoss<B> for Teacher<B> {
    const STATISTICS: &'static [&'static str] =
        &["log_sum_exp", "teacher's log_sum_exp", "mean", "log_sum_exp of labels"];
    const LOGITS: usize = 2;
    type Part = TeacherPart<B>;

    fn name(&self) -> &'static str {
        match self.options.divergence {
            Divergence::Forward | Divergence::Reverse => "linear_kl_div",
            Divergence::JensenShannon { .. } => "linear_jsd",
        }
    }

    fn part(&self, rows: &Range<usize>, classes: Classes, padding: &Option<BoolTensor<B>>) -> TeacherPart<B> {
        let x = rows_of::<B>(&self.x, rows);
        let logits = match classes.range.len() == classes.of {
            true => self.head.logits(x),
            false => self.head.columns(&classes.range).logits(x),
        };
        let labels = self.labels.as_ref().map(|labels| labels.rows(rows));
        TeacherPart { logits: zero_rows::<B>(logits, padding), labels, classes, options: self.options }
    }

    fn losses(part: &TeacherPart<B>, logits: FloatTensor<B>) -> (FloatTensor<B>, Vec<FloatTensor<B>>) {
        let LinearDivergence { divergence, temperature, hard_weight, .. } = part.options;
        let divergence = Tempered { divergence, inverse: temperature.recip() };
        let RowDivergences { losses, sums } =
            B::row_divergences(logits.clone(), part.logits.clone(), divergence);
        let mut statistics = sums.to_vec();
        let Some(labels) = &part.labels else { return (losses, statistics) };
        let RowLosses { losses: hard, log_sum_exp } = B::row_losses(logits, labels);
        statistics.push(log_sum_exp);
        (B::float_add(losses, B::float_mul_scalar(hard, hard_weight.into())), statistics)
    }

    fn gradients(
        part: TeacherPart<B>,
        logits: FloatTensor<B>,
        statistics: &[FloatTensor<B>],
        dloss: FloatTensor<B>,
    ) -> FloatTensor<B> {
        let TeacherPart { logits: teacher, labels, classes, options } = part;
        let LinearDivergence { divergence, temperature, hard_weight, .. } = options;
        let divergence = Tempered { divergence, inverse: temperature.recip() };
        let dloss = B::float_cast(dloss, statistics[0].dtype().into());
        let hard = labels.map(|labels| {
            let (log_sum_exp, dloss) = (statistics[LABELS].clone(), dloss.clone());
            let dloss = B::float_mul_scalar(dloss, hard_weight.into());
            B::row_gradients(logits.clone(), &labels, log_sum_exp, dloss, classes)
        });
        let sums = core::array::from_fn(|at| statistics[at].clone());
        let soft = B::divergence_gradients(logits, teacher, sums, dloss, divergence);
        match hard {
            None => soft,
            Some(hard) => B::float_add(soft, hard),
        }
    }

    fn bound(&self, dloss: FloatTensor<B>, padding: &Option<BoolTensor<B>>) -> FloatTensor<B> {
        let LinearDivergence { divergence, temperature, hard_weight, .. } = self.options;
        let hard = if self.labels.is_some() { hard_weight.abs() } else { 0.0 };
        let soft = match divergence {
            Divergence::Forward => temperature.recip(),
            Divergence::Reverse => {
                // The logarithm of a probability is least where the logits are as far apart as they can be; the mean is not below it.
                let logits = B::float_mul_scalar(self.largest_logit(padding), (4.0 / temperature).into());
                let most = 2.0 * (self.head.classes() as f64).ln() + 1.0;
                let soft = B::float_add_scalar(logits, most.into());
                let bound =
                    B::float_add_scalar(B::float_mul_scalar(soft, temperature.recip().into()), hard.into());
                return B::float_mul(dloss, bound);
            }
            // `q log(q / m)` is at most `q log(1 / (1 - beta))`, and at least `-m / e`.
            Divergence::JensenShannon { beta } => {
                let rest = 1.0 - beta;
                rest * (core::f64::consts::E.recip() - 2.0 * rest.ln()) / temperature
            }
        };
        B::float_mul_scalar(dloss, (soft + hard).into())
    }

    fn reported(self, report: &Report, reason: &'static str) -> Self {
        let Self { x, head: Head { weight, bias }, labels, options } = self;
        Self {
            x: report.tensor("teacher's x", x, reason),
            head: Head {
                weight: report.tensor("teacher's weight", weight, reason),
                bias: bias.map(|bias| report.tensor("teacher's bias", bias, reason)),
            },
            labels: labels.map(|labels| labels.reported(report, reason)),
            options,
        }
    }
}

/// The index of the cross entropy's `log(sum(exp(logits)))` among the statistics.
const LABELS: usize = 3;

impl<B: DivergenceKernels> Teacher<B> {
    /// A bound of the teacher's logits in f16, `[1]`, in f32: the largest sum of the absolute values of a row of `x`, times the largest
    /// weight, plus the largest bias, but at most 65504. Rows of padding are left out.
    fn largest_logit(&self, padding: &Option<BoolTensor<B>>) -> FloatTensor<B> {
        let largest = |x| one_wide::<B>(B::largest_magnitude(x));
        let [rows, d_teacher] = self.x.shape().dims();
        let block_bytes = B::block_bytes(&self.x.device());
        let sums = chunks(rows, d_teacher * DType::F32.size(), block_bytes).map(|rows| {
            let magnitudes = B::float_abs(widen::<B>(rows_of::<B>(&self.x, &rows)));
            let padding = padding.clone().map(|all| B::bool_slice(all, &[Slice::from(rows)]));
            one_wide::<B>(B::float_max(zero_rows::<B>(B::float_sum_dim(magnitudes, 1), &padding)))
        });
        let sum = B::float_max(B::float_cat(sums.collect(), 0));
        let mut logit = B::float_mul(one_wide::<B>(sum), largest(self.head.weight.clone()));
        if let Some(bias) = &self.head.bias {
            let row = B::float_reshape(bias.clone(), Shape::new([1, self.head.classes()]));
            logit = B::float_add(logit, largest(row));
        }
        let most = f16::MAX.to_f64();
        let bools = get_or_init_device_settings::<B>(&logit.device()).bool_dtype;
        let unknown = B::float_is_nan(logit.clone(), bools);
        B::float_clamp_max(B::float_mask_fill(logit, unknown, most.into()), most.into())
    }
}

/// A divergence of logits that are multiplied by `inverse`, the inverse of the temperature, first.
#[derive(Clone, Copy, Debug)]
pub struct Tempered {
    divergence: Divergence,
    inverse: f64,
}

/// The losses of rows, and what their gradient is computed from; all in f32 at least.
pub struct RowDivergences<B: Backend> {
    /// The divergences, `[rows, 1]`.
    pub losses: FloatTensor<B>,
    /// `log(sum(exp(logits / temperature)))` of the student and of the teacher, in two parts each as [`RowLosses::log_sum_exp`]; and
    /// `sum(q g)`, `[rows, 1]`.
    pub sums: [FloatTensor<B>; 3],
}

/// The kernels.
pub trait DivergenceKernels: HeadLossKernels {
    /// The divergences of rows of logits. Both tensors are `[rows, classes]` and have one dtype.
    fn row_divergences(
        student: FloatTensor<Self>,
        teacher: FloatTensor<Self>,
        divergence: Tempered,
    ) -> RowDivergences<Self> {
        composed::divergences::<Self>(student, teacher, divergence)
    }

    /// The gradient of the student's logits of all classes or some, in place if they are the only handle of their tensor. A row with a
    /// `dloss` of 0 gets 0, whatever its logits are. `sums` are those of [`row_divergences`](Self::row_divergences); dloss is `[rows, 1]`,
    /// of their dtype.
    fn divergence_gradients(
        student: FloatTensor<Self>,
        teacher: FloatTensor<Self>,
        sums: [FloatTensor<Self>; 3],
        dloss: FloatTensor<Self>,
        divergence: Tempered,
    ) -> FloatTensor<Self> {
        composed::gradients::<Self>(student, teacher, sums, dloss, divergence)
    }
}
device_backends!(DivergenceKernels);

#[cfg(all(test, feature = "flex"))]
mod tests {
    use super::*;
    use crate::backend::testing::{Composed, assert_close, composed, random};
    use burn::backend::{Flex, ops::FloatTensorOps};

    const ALL: [Divergence; 4] = [
        Divergence::Forward,
        Divergence::Reverse,
        Divergence::JensenShannon { beta: 0.5 },
        Divergence::JensenShannon { beta: 0.1 },
    ];

    #[test]
    fn default_bodies_equal_the_kernels() {
        let logits = || Flex::float_mul_scalar(random(&[5, 39]), 3.0.into());
        for (divergence, inverse) in
            ALL.into_iter().flat_map(|divergence| [(divergence, 1.0), (divergence, 0.4)])
        {
            let divergence = Tempered { divergence, inverse };
            let (student, teacher, dloss) = (logits(), logits(), random(&[5, 1]));
            let body = Composed::row_divergences(composed(&student), composed(&teacher), divergence);
            let cpu = Flex::row_divergences(student.clone(), teacher.clone(), divergence);
            assert_close("losses", body.losses, cpu.losses);
            for (body, cpu) in body.sums.into_iter().zip(&cpu.sums) {
                assert_close("sums", body, cpu.clone());
            }
            let body = Composed::divergence_gradients(
                composed(&student),
                composed(&teacher),
                cpu.sums.each_ref().map(composed),
                composed(&dloss),
                divergence,
            );
            let gradient = |student: FloatTensor<Flex>| {
                Flex::divergence_gradients(
                    student,
                    teacher.clone(),
                    cpu.sums.clone(),
                    dloss.clone(),
                    divergence,
                )
            };
            assert_close("dx", body, gradient(student.clone()));
            let unique = Flex::float_mul_scalar(student.clone(), 1.0.into());
            assert_close("dx in place", composed(&gradient(unique)), gradient(student));
        }
    }

    /// Classes that one head or both exclude, and probabilities that f32 cannot hold.
    #[test]
    fn classes_of_probability_zero_count_nothing() {
        const NONE: f32 = f32::NEG_INFINITY;
        let tensor = |values: [f32; 4]| {
            Flex::float_from_data(
                burn::tensor::TensorData::new(values.to_vec(), [1, 4]),
                &burn::backend::flex::FlexDevice,
            )
        };
        let log = |p: f64| p.ln();
        // Of the first two classes, the student has shares of 1/4 and 3/4, the teacher of 1/2 and 1/2. The others do not count.
        let (student, teacher) = (tensor([0.0, 3f32.ln(), NONE, -200.0]), tensor([0.0, 0.0, NONE, -150.0]));
        let exact = |divergence| match divergence {
            Divergence::Forward => 0.5 * (log(2.0) + log(2.0 / 3.0)),
            Divergence::Reverse => 0.25 * log(0.5) + 0.75 * log(1.5),
            Divergence::JensenShannon { beta } => {
                let of = |q: f64| (beta * 0.5 + (1.0 - beta) * q, q);
                [0.25, 0.75]
                    .map(of)
                    .iter()
                    .map(|(m, q)| beta * 0.5 * log(0.5 / m) + (1.0 - beta) * q * log(q / m))
                    .sum()
            }
        };
        for divergence in ALL {
            let tempered = Tempered { divergence, inverse: 1.0 };
            let of = Flex::row_divergences(student.clone(), teacher.clone(), tempered);
            let body = Composed::row_divergences(composed(&student), composed(&teacher), tempered);
            assert_close("losses", composed(&of.losses), tensor_of(exact(divergence)));
            assert_close("losses", body.losses, tensor_of(exact(divergence)));
            let one = tensor_of(1.0);
            let cpu = Flex::divergence_gradients(
                student.clone(),
                teacher.clone(),
                of.sums.clone(),
                one.clone(),
                tempered,
            );
            let body = Composed::divergence_gradients(
                composed(&student),
                composed(&teacher),
                of.sums.each_ref().map(composed),
                composed(&one),
                tempered,
            );
            let numbers = burn::backend::read_sync(Flex::float_into_data(cpu.clone())).expect("a CPU tensor");
            assert!(numbers.iter::<f32>().all(f32::is_finite), "{divergence:?}: {numbers}");
            assert_close("gradients", body, cpu);
        }
    }

    fn tensor_of(value: f64) -> FloatTensor<Flex> {
        let shape = burn::tensor::Shape::new([1, 1]);
        Flex::float_full(shape, value.into(), &burn::backend::flex::FlexDevice, burn::tensor::FloatDType::F32)
    }
}
