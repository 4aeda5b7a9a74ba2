//! The divergences and their gradient, composed of Burn's operations.
use super::{Divergence, RowDivergences, Tempered};
use crate::backend::{widen, zeros};
use crate::ops::cross_entropy::{composed::log_sum_exp, parts};
use burn::backend::{Backend, TensorMetadata, get_or_init_device_settings, tensor::FloatTensor};

/// See [`DivergenceKernels::row_divergences`](super::DivergenceKernels::row_divergences).
pub(super) fn divergences<B: Backend>(
    student: FloatTensor<B>,
    teacher: FloatTensor<B>,
    divergence: Tempered,
) -> RowDivergences<B> {
    let [student, teacher] = [student, teacher].map(|x| divergence.tempered::<B>(x));
    let logs = [&student, &teacher].map(|x| log_sum_exp::<B>(x.clone()));
    let of = Probabilities::<B>::new([student, teacher], logs.clone());
    let sum = |terms| B::float_sum_dim(terms, 1);
    let (losses, mean) = match divergence.divergence {
        Divergence::Forward => {
            let losses = sum(of.teacher_times(of.ratio()));
            let mean = zeros::<B>(losses.shape(), &losses);
            (losses, mean)
        }
        Divergence::Reverse => {
            let losses = sum(of.student_times(B::float_neg(of.ratio())));
            (losses.clone(), losses)
        }
        Divergence::JensenShannon { beta } => {
            let [of_student, of_teacher] = of.over_mixture(beta);
            let mean = B::float_mul_scalar(sum(of.student_times(of_student)), (1.0 - beta).into());
            let teacher = B::float_mul_scalar(sum(of.teacher_times(of_teacher)), beta.into());
            (B::float_add(mean.clone(), teacher), mean)
        }
    };
    let [student, teacher] = logs;
    RowDivergences { losses, sums: [student, teacher, mean] }
}

/// See [`DivergenceKernels::divergence_gradients`](super::DivergenceKernels::divergence_gradients).
pub(super) fn gradients<B: Backend>(
    student: FloatTensor<B>,
    teacher: FloatTensor<B>,
    sums: [FloatTensor<B>; 3],
    dloss: FloatTensor<B>,
    divergence: Tempered,
) -> FloatTensor<B> {
    let dtype = student.dtype();
    let [student, teacher] = [student, teacher].map(|x| divergence.tempered::<B>(x));
    let [of_student, of_teacher, mean] = sums;
    let of = Probabilities::<B>::new([student, teacher], [of_student, of_teacher]);
    let centered = |g| of.student_times(B::float_sub(g, mean));
    let gradient = match divergence.divergence {
        Divergence::Forward => B::float_sub(of.q.clone(), of.p.clone()),
        Divergence::Reverse => centered(B::float_neg(of.ratio())),
        Divergence::JensenShannon { beta } => {
            let [of_student, _] = of.over_mixture(beta);
            centered(B::float_mul_scalar(of_student, (1.0 - beta).into()))
        }
    };
    let gradient = B::float_mul(gradient, B::float_mul_scalar(dloss.clone(), divergence.inverse.into()));
    let bools = get_or_init_device_settings::<B>(&dloss.device()).bool_dtype;
    let nothing = B::float_equal_elem(dloss, 0.into(), bools);
    let nothing = B::bool_expand(nothing, gradient.shape());
    B::float_cast(B::float_mask_fill(gradient, nothing, 0.into()), dtype.into())
}

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
        // `log(m)` minus the larger of `log(p)` and `log(q)`.
        let log = B::float_mask_where(share(beta), above, share(1.0 - beta));
        let of_student = B::float_neg(B::float_add(log.clone(), B::float_clamp_min(ratio.clone(), 0.into())));
        [of_student, B::float_sub(B::float_clamp_max(ratio, 0.into()), log)]
    }

    /// `q * log`; 0 where `q` is 0.
    fn student_times(&self, log: FloatTensor<B>) -> FloatTensor<B> {
        times::<B>(self.q.clone(), log)
    }

    /// `p * log`; 0 where `p` is 0.
    fn teacher_times(&self, log: FloatTensor<B>) -> FloatTensor<B> {
        times::<B>(self.p.clone(), log)
    }
}

/// `probability * log`; 0 where the probability is 0, whatever its logarithm.
fn times<B: Backend>(probability: FloatTensor<B>, log: FloatTensor<B>) -> FloatTensor<B> {
    let bools = get_or_init_device_settings::<B>(&log.device()).bool_dtype;
    let nothing = B::float_equal_elem(probability.clone(), 0.into(), bools);
    B::float_mask_fill(B::float_mul(probability, log), nothing, 0.into())
}
