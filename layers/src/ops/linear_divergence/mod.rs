//! Divergences of a dense layer's outputs from those of another, the teacher: a [`HeadLoss`], in whose head is what it keeps. The
//! logits of both are made in chunks.
//!
//! | | |
//! | --- | --- |
//! | computes | `sum(factor loss)` over the rows, `loss` a divergence of `q = softmax(logits / temperature)` of the student and |
//! | | `p`, the same of the teacher, plus `hard_weight` times the cross entropy of the student's logits and labels, if any |
//! | forward | `KL(p, q) = sum(p log(p / q))`; `dlogits = (q - p) / temperature` |
//! | reverse | `KL(q, p)`; `dlogits = q (g - sum(q g)) / temperature` with `g = log(q / p)` |
//! | Jensen-Shannon | `beta KL(p, m) + (1 - beta) KL(q, m)`, `m = beta p + (1 - beta) q`; the same with `g = (1 - beta) log(q / m)` |
//!
//! In f16 the gradients of a reverse divergence are scaled by what the teacher's logits can be at most, for which its `x` and weight are
//! read once.
//!
//! The numbers per row are the `log(sum(exp(logits / temperature)))` of both, and `sum(q g)`. A class of probability 0 in f32
//! counts as it does in the limit: nothing.
use super::{
    cross_entropy::{Classes, Labels, RowLosses, composed::log_sum_exp, parts},
    head_loss::{Head, HeadLoss, HeadLossKernels, RowLoss, chunks, one_wide, rows_of, zero_rows},
};
use crate::backend::{device_backends, widen, zeros};
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

#[cfg(any(feature = "flex", feature = "ndarray"))]
mod cpu;

/// How far the probabilities of a student, `q`, are from those of a teacher, `p`.
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
    /// Which.
    pub divergence: Divergence,
    /// What the logits are divided by.
    pub temperature: f64,
    /// What the cross entropy counts, if there are labels.
    pub hard_weight: f64,
    /// How many bytes of logits of both exist at a time; at least one row, and for a tracked weight of half precision 64 classes
    /// of all rows.
    pub chunk_bytes: Option<usize>,
}

/// The hidden states and the head of a teacher; untracked.
#[derive(ExtensionType)]
pub enum TeacherHead<B: Backend> {
    /// With a bias `[classes]`.
    Biased {
        /// `[rows, d_teacher]`
        x: FloatTensor<B>,
        /// `[d_teacher, classes]`
        weight: FloatTensor<B>,
        /// `[classes]`
        bias: FloatTensor<B>,
    },
    /// Without.
    Unbiased {
        /// `[rows, d_teacher]`
        x: FloatTensor<B>,
        /// `[d_teacher, classes]`
        weight: FloatTensor<B>,
    },
}

/// The labels of rows, if they have any.
#[derive(ExtensionType)]
pub enum HardLabels<B: Backend> {
    /// `[rows]`
    Some(IntTensor<B>),
    /// They have none.
    None,
}

extension! {
    /// Divergences of dense layers.
    pub trait LinearDivergenceOps(DivergenceKernels) {
        /// The sum of `factors` times the losses, `[1]`, or without factors the mean; x `[rows, d_input]`, weight
        /// `[d_input, classes]`, bias `[classes]`; untracked: the teacher, factors `[rows]`.
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

/// What rows of logits are compared with.
#[derive(Clone, Debug)]
pub(crate) struct Teacher<B: Backend> {
    /// `[rows, d_teacher]`
    x: FloatTensor<B>,
    head: Head<B>,
    labels: Option<Labels<B>>,
    options: LinearDivergence,
}

/// What some classes of some rows are compared with.
#[derive(Clone)]
pub(crate) struct Part<B: Backend> {
    /// The teacher's.
    logits: FloatTensor<B>,
    labels: Option<Labels<B>>,
    classes: Classes,
    options: LinearDivergence,
}

impl<B: DivergenceKernels> RowLoss<B> for Teacher<B> {
    const STATISTICS: &'static [&'static str] =
        &["log_sum_exp", "teacher's log_sum_exp", "mean", "log_sum_exp of labels"];
    const LOGITS: usize = 2;
    type Part = Part<B>;

    fn name(&self) -> &'static str {
        match self.options.divergence {
            Divergence::Forward | Divergence::Reverse => "linear_kl_div",
            Divergence::JensenShannon { .. } => "linear_jsd",
        }
    }

    fn part(&self, rows: &Range<usize>, classes: Classes, padding: &Option<BoolTensor<B>>) -> Part<B> {
        let x = rows_of::<B>(&self.x, rows);
        let logits = match classes.range.len() == classes.of {
            true => self.head.logits(x),
            false => self.head.columns(&classes.range).logits(x),
        };
        let labels = self.labels.as_ref().map(|labels| labels.rows(rows));
        Part { logits: zero_rows::<B>(logits, padding), labels, classes, options: self.options }
    }

    fn losses(part: &Part<B>, logits: FloatTensor<B>) -> (FloatTensor<B>, Vec<FloatTensor<B>>) {
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
        part: Part<B>,
        logits: FloatTensor<B>,
        statistics: &[FloatTensor<B>],
        dloss: FloatTensor<B>,
    ) -> FloatTensor<B> {
        let Part { logits: teacher, labels, classes, options } = part;
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
                // A logarithm of a probability, and so the mean, is at least that of logits as far apart as can be.
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

/// Where the `log(sum(exp(logits)))` of the cross entropy is among the statistics.
const LABELS: usize = 3;

impl<B: DivergenceKernels> Teacher<B> {
    /// What no logit of the teacher exceeds in f16, `[1]`, in f32: the largest sum of the absolute values of a row of `x`, times the
    /// largest weight, plus the largest bias; 65504 at most. Rows of padding are left out.
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

/// A divergence of logits that are multiplied by `inverse` first.
#[derive(Clone, Copy, Debug)]
pub struct Tempered {
    divergence: Divergence,
    inverse: f64,
}

/// The losses of rows, and what their gradient is made of; all of f32 at least.
pub struct RowDivergences<B: Backend> {
    /// The divergences, `[rows, 1]`.
    pub losses: FloatTensor<B>,
    /// `log(sum(exp(logits / temperature)))` of the student, in two parts as [`RowLosses::log_sum_exp`], the same of the teacher, and
    /// `sum(q g)`, `[rows, 1]`.
    pub sums: [FloatTensor<B>; 3],
}

/// The kernels.
pub trait DivergenceKernels: HeadLossKernels {
    /// The divergences of rows of logits, both `[rows, classes]` and of one dtype.
    fn row_divergences(
        student: FloatTensor<Self>,
        teacher: FloatTensor<Self>,
        divergence: Tempered,
    ) -> RowDivergences<Self> {
        let [student, teacher] = [student, teacher].map(|x| divergence.tempered::<Self>(x));
        let logs = [&student, &teacher].map(|x| log_sum_exp::<Self>(x.clone()));
        let of = Probabilities::<Self>::new([student, teacher], logs.clone());
        let sum = |terms| Self::float_sum_dim(terms, 1);
        let (losses, mean) = match divergence.divergence {
            Divergence::Forward => {
                let losses = sum(of.teacher_times(of.ratio()));
                let mean = zeros::<Self>(losses.shape(), &losses);
                (losses, mean)
            }
            Divergence::Reverse => {
                let losses = sum(of.student_times(Self::float_neg(of.ratio())));
                (losses.clone(), losses)
            }
            Divergence::JensenShannon { beta } => {
                let [of_student, of_teacher] = of.over_mixture(beta);
                let mean = Self::float_mul_scalar(sum(of.student_times(of_student)), (1.0 - beta).into());
                let teacher = Self::float_mul_scalar(sum(of.teacher_times(of_teacher)), beta.into());
                (Self::float_add(mean.clone(), teacher), mean)
            }
        };
        let [student, teacher] = logs;
        RowDivergences { losses, sums: [student, teacher, mean] }
    }

    /// The gradient of the student's logits, in place if nothing else holds them, of all classes or some. A row with a `dloss` of 0
    /// gets 0, whatever its logits are. `sums`: of [`row_divergences`](Self::row_divergences); dloss `[rows, 1]`, of their dtype.
    fn divergence_gradients(
        student: FloatTensor<Self>,
        teacher: FloatTensor<Self>,
        sums: [FloatTensor<Self>; 3],
        dloss: FloatTensor<Self>,
        divergence: Tempered,
    ) -> FloatTensor<Self> {
        let dtype = student.dtype();
        let [student, teacher] = [student, teacher].map(|x| divergence.tempered::<Self>(x));
        let [of_student, of_teacher, mean] = sums;
        let of = Probabilities::<Self>::new([student, teacher], [of_student, of_teacher]);
        let centered = |g| of.student_times(Self::float_sub(g, mean));
        let gradient = match divergence.divergence {
            Divergence::Forward => Self::float_sub(of.q.clone(), of.p.clone()),
            Divergence::Reverse => centered(Self::float_neg(of.ratio())),
            Divergence::JensenShannon { beta } => {
                let [of_student, _] = of.over_mixture(beta);
                centered(Self::float_mul_scalar(of_student, (1.0 - beta).into()))
            }
        };
        let gradient =
            Self::float_mul(gradient, Self::float_mul_scalar(dloss.clone(), divergence.inverse.into()));
        let bools = get_or_init_device_settings::<Self>(&dloss.device()).bool_dtype;
        let nothing = Self::float_equal_elem(dloss, 0.into(), bools);
        let nothing = Self::bool_expand(nothing, gradient.shape());
        Self::float_cast(Self::float_mask_fill(gradient, nothing, 0.into()), dtype.into())
    }
}
device_backends!(DivergenceKernels);

impl Tempered {
    /// Logits in f32 at least, divided by the temperature.
    fn tempered<B: Backend>(self, x: FloatTensor<B>) -> FloatTensor<B> {
        B::float_mul_scalar(widen::<B>(x), self.inverse.into())
    }
}

/// The probabilities of two heads, and their logarithms.
struct Probabilities<B: Backend> {
    q: FloatTensor<B>,
    p: FloatTensor<B>,
    log_q: FloatTensor<B>,
    log_p: FloatTensor<B>,
}

impl<B: Backend> Probabilities<B> {
    fn new([student, teacher]: [FloatTensor<B>; 2], [of_student, of_teacher]: [FloatTensor<B>; 2]) -> Self {
        let log = |x, log_sum_exp| {
            let [largest, log] = parts::<B>(log_sum_exp);
            B::float_sub(B::float_sub(x, largest), log)
        };
        let (log_q, log_p) = (log(student, of_student), log(teacher, of_teacher));
        Self { q: B::float_exp(log_q.clone()), p: B::float_exp(log_p.clone()), log_q, log_p }
    }

    /// `log(p / q)`
    fn ratio(&self) -> FloatTensor<B> {
        B::float_sub(self.log_p.clone(), self.log_q.clone())
    }

    /// `log(q / m)` and `log(p / m)`, where `m` is the mixture.
    fn over_mixture(&self, beta: f64) -> [FloatTensor<B>; 2] {
        let ratio = self.ratio();
        let bools = get_or_init_device_settings::<B>(&ratio.device()).bool_dtype;
        let less = B::float_exp(B::float_neg(B::float_abs(ratio.clone())));
        let share = |beta: f64| {
            B::float_log(B::float_add_scalar(
                B::float_mul_scalar(less.clone(), beta.into()),
                (1.0 - beta).into(),
            ))
        };
        let above = B::float_greater_elem(ratio.clone(), 0.into(), bools);
        // `log(m)` less the larger of `log(p)` and `log(q)`.
        let log = B::float_mask_where(share(beta), above, share(1.0 - beta));
        let of_student = B::float_neg(B::float_add(log.clone(), B::float_clamp_min(ratio.clone(), 0.into())));
        [of_student, B::float_sub(B::float_clamp_max(ratio, 0.into()), log)]
    }

    /// `q` times `log`; 0 where `q` is.
    fn student_times(&self, log: FloatTensor<B>) -> FloatTensor<B> {
        times::<B>(self.q.clone(), log)
    }

    /// `p` times `log`; 0 where `p` is.
    fn teacher_times(&self, log: FloatTensor<B>) -> FloatTensor<B> {
        times::<B>(self.p.clone(), log)
    }
}

/// `probability * log`; 0 where the probability is, whatever its logarithm.
fn times<B: Backend>(probability: FloatTensor<B>, log: FloatTensor<B>) -> FloatTensor<B> {
    let bools = get_or_init_device_settings::<B>(&log.device()).bool_dtype;
    let nothing = B::float_equal_elem(probability.clone(), 0.into(), bools);
    B::float_mask_fill(B::float_mul(probability, log), nothing, 0.into())
}

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
        // Of two classes the student has the shares 1/4 and 3/4, the teacher 1/2 and 1/2; others do not count.
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
