//! The kernels on a CPU: fused loops over rows. Besides the logits, no tensor of their size exists.
use super::{Divergence, DivergenceKernels, RowDivergences, Tempered};
use crate::backend::cpu::{
    CpuBackend, CpuElement,
    in_place::in_place_or_copied,
    parallel::{self, Job, Work, vectorized},
    sums, with_element,
};
use crate::ops::cross_entropy::cpu::{Parts, parts};
use burn::backend::{TensorMetadata, tensor::FloatTensor};
use burn::tensor::{DType, Shape, bf16, f16};
use num_traits::{One, Zero};

impl<B: CpuBackend> DivergenceKernels for B {
    fn row_divergences(
        student: FloatTensor<B>,
        teacher: FloatTensor<B>,
        divergence: Tempered,
    ) -> RowDivergences<B> {
        let (student, teacher) = (B::contiguous(student), B::contiguous(teacher));
        let [rows, classes] = student.shape().dims();
        with_element!(student.dtype(), "divergence", E => {
            let of_rows = row_divergences::<E>(B::as_slice(&student), B::as_slice(&teacher), classes, divergence);
            let column = |at: usize| {
                B::from_vec(of_rows.iter().map(|row| row.numbers[at]).collect(), Shape::new([rows, 1]))
            };
            let logs = |of: usize| {
                B::from_vec(of_rows.iter().flat_map(|row| row.logs[of]).collect(), Shape::new([rows, 2]))
            };
            RowDivergences { losses: column(0), sums: [logs(0), logs(1), column(1)] }
        })
    }

    fn divergence_gradients(
        student: FloatTensor<B>,
        teacher: FloatTensor<B>,
        sums: [FloatTensor<B>; 3],
        dloss: FloatTensor<B>,
        divergence: Tempered,
    ) -> FloatTensor<B> {
        let (student, teacher) = (B::contiguous(student), B::contiguous(teacher));
        let ([of_student, of_teacher, mean], dloss) = (sums.map(B::contiguous), B::contiguous(dloss));
        let [rows, classes] = student.shape().dims();
        let (task, work) = (parallel::items_per_task(rows, classes), Work::of([COST, rows, classes]));
        with_element!(student.dtype(), "divergence", E => {
            let logs = [&of_student, &of_teacher].map(|logs| parts(B::as_slice(logs)));
            let (teacher, means, dloss) = (B::as_slice::<E>(&teacher), B::as_slice(&mean), B::as_slice(&dloss));
            in_place_or_copied::<B, E>(student, task * classes, work, |index, students| {
                for (at, student) in (index * task..).zip(students.chunks_exact_mut(classes)) {
                    let (teacher, logs) = (&teacher[at * classes..][..classes], logs.map(|logs| logs[at]));
                    let (mean, dloss) = (means[at], dloss[at]);
                    vectorized(GradientOfRow { student, teacher, logs, mean, dloss, divergence });
                }
            })
        })
    }
}

/// The time of the exponentials and logarithms of an element, in units of the time to read one.
const COST: usize = 64;

/// The [`RowDivergences`] of one row.
#[derive(Clone, Copy)]
struct OfRow<A> {
    /// The loss, and `sum(q g)`.
    numbers: [A; 2],
    /// `log(sum(exp(logits / temperature)))` of student and teacher.
    logs: [Parts<A>; 2],
}

/// The loss of every row, and what its gradient is computed from.
fn row_divergences<E: CpuElement>(
    student: &[E],
    teacher: &[E],
    classes: usize,
    divergence: Tempered,
) -> Vec<OfRow<E::Acc>> {
    let rows = student.len() / classes.max(1);
    let task = parallel::items_per_task(rows, classes);
    let zero = [<E::Acc as Zero>::zero(); 2];
    let zero = OfRow { numbers: zero, logs: [zero; 2] };
    parallel::filled(rows, zero, task, Work::of([COST, student.len()]), |index, results| {
        for (result, at) in results.iter_mut().zip(index * task..) {
            let range = at * classes..(at + 1) * classes;
            *result =
                vectorized(Row { student: &student[range.clone()], teacher: &teacher[range], divergence });
        }
    })
}

/// Computes the divergence of one row of logits.
struct Row<'a, E> {
    student: &'a [E],
    teacher: &'a [E],
    divergence: Tempered,
}

impl<E: CpuElement> Job for Row<'_, E> {
    type Result = OfRow<E::Acc>;

    #[inline(always)]
    fn run(self) -> OfRow<E::Acc> {
        let Self { student, teacher, divergence: Tempered { divergence, inverse } } = self;
        let inverse = <E::Acc as CpuElement>::from_f64(inverse);
        let logs = [student, teacher].map(|x| sums::log_sum_exp(x, |x| x * inverse));
        let of = |student: E, teacher: E| {
            Probabilities::<E::Acc>::of(student.widen(), teacher.widen(), inverse, logs)
        };
        let (loss, mean) = match divergence {
            Divergence::Forward => {
                (sums::sum_pairs(student, teacher, |s, t| times(of(s, t).p, of(s, t).ratio)), 0.0)
            }
            Divergence::Reverse => {
                let loss = sums::sum_pairs(student, teacher, |s, t| times(of(s, t).q, -of(s, t).ratio));
                (loss, loss)
            }
            Divergence::JensenShannon { beta } => {
                let share = <E::Acc as CpuElement>::from_f64(beta);
                let of_student = sums::sum_pairs(student, teacher, |s, t| {
                    let of = of(s, t);
                    times(of.q, of.over_mixture(share)[0])
                });
                let of_teacher = sums::sum_pairs(student, teacher, |s, t| {
                    let of = of(s, t);
                    times(of.p, of.over_mixture(share)[1])
                });
                let mean = (1.0 - beta) * of_student;
                (mean + beta * of_teacher, mean)
            }
        };
        OfRow { numbers: [loss, mean].map(<E::Acc as CpuElement>::from_f64), logs }
    }
}

/// The probabilities of one class.
struct Probabilities<A> {
    q: A,
    p: A,
    /// `log(p / q)`
    ratio: A,
}

impl<A: CpuElement<Acc = A>> Probabilities<A> {
    #[inline(always)]
    fn of(student: A, teacher: A, inverse: A, [of_student, of_teacher]: [Parts<A>; 2]) -> Self {
        let log = |x: A, [max, log]: Parts<A>| x * inverse - max - log;
        let (log_q, log_p) = (log(student, of_student), log(teacher, of_teacher));
        Self { q: log_q.fast_exp(), p: log_p.fast_exp(), ratio: log_p - log_q }
    }

    /// `log(q / m)` and `log(p / m)`, where `m` is the mixture.
    #[inline(always)]
    fn over_mixture(&self, beta: A) -> [A; 2] {
        let (zero, one) = (<A as Zero>::zero(), <A as One>::one());
        let above = self.ratio > zero;
        let share = if above { one - beta } else { beta };
        // `log(m)` minus the larger of `log(p)` and `log(q)`.
        let log = (one - share + share * (-self.ratio.abs()).fast_exp()).fast_ln();
        let (more, less) = if above { (self.ratio, zero) } else { (zero, self.ratio) };
        [-(log + more), less - log]
    }
}

/// `probability * log`; 0 where the probability is 0, whatever its logarithm.
#[inline(always)]
fn times<A: CpuElement>(probability: A, log: A) -> A {
    if probability == <A as Zero>::zero() { probability } else { probability * log }
}

/// Replaces a row of the student's logits by its gradient.
struct GradientOfRow<'a, E: CpuElement> {
    student: &'a mut [E],
    teacher: &'a [E],
    logs: [Parts<E::Acc>; 2],
    mean: E::Acc,
    dloss: E::Acc,
    divergence: Tempered,
}

impl<E: CpuElement> Job for GradientOfRow<'_, E> {
    type Result = ();

    #[inline(always)]
    fn run(self) {
        let Self { student, teacher, logs, mean, dloss, divergence: Tempered { divergence, inverse } } = self;
        if dloss == <E::Acc as Zero>::zero() {
            student.fill(E::zero());
            return;
        }
        let inverse = <E::Acc as CpuElement>::from_f64(inverse);
        let factor = dloss * inverse;
        let of = |student: E, teacher: E| {
            Probabilities::<E::Acc>::of(student.widen(), teacher.widen(), inverse, logs)
        };
        let pairs = student.iter_mut().zip(teacher);
        match divergence {
            Divergence::Forward => {
                for (x, &t) in pairs {
                    let of = of(*x, t);
                    *x = E::narrow(factor * (of.q - of.p));
                }
            }
            Divergence::Reverse => {
                for (x, &t) in pairs {
                    let of = of(*x, t);
                    *x = E::narrow(factor * times(of.q, -of.ratio - mean));
                }
            }
            Divergence::JensenShannon { beta } => {
                let rest = <E::Acc as CpuElement>::from_f64(1.0 - beta);
                let share = <E::Acc as CpuElement>::from_f64(beta);
                for (x, &t) in pairs {
                    let of = of(*x, t);
                    *x = E::narrow(factor * times(of.q, rest * of.over_mixture(share)[0] - mean));
                }
            }
        }
    }
}
