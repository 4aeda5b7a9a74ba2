//! The kernels on a CPU: fused loops over rows. Besides the logits, no tensor of their size exists. Rows that are few and long are computed in
//! parts.
use super::{Divergence, DivergenceKernels, RowDivergences, Tempered};
use crate::backend::cpu::{
    CpuBackend, CpuElement,
    in_place::in_place_or_copied_in_pieces,
    long_rows::{self, LongRows},
    parallel::{self, Job, Work, vectorized},
    plan::{Division, Items},
    sums::{self, Parts as PartsOfRow, Sum},
    with_element,
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
        let items = items(rows, classes);
        let chunks = items.division(parallel::threads()).chunks(classes, PartsOfRow::of(classes).size);
        with_element!(student.dtype(), "divergence", E => {
            let logs = [&of_student, &of_teacher].map(|logs| parts(B::as_slice(logs)));
            let (teacher, means, dloss) = (B::as_slice::<E>(&teacher), B::as_slice(&mean), B::as_slice(&dloss));
            in_place_or_copied_in_pieces::<B, E>(student, chunks, items.work, |start, students| {
                let teacher = teacher[start..].chunks(classes);
                for (at, (student, teacher)) in (start / classes..).zip(students.chunks_mut(classes).zip(teacher)) {
                    let (logs, mean, dloss) = (logs.map(|logs| logs[at]), means[at], dloss[at]);
                    vectorized(GradientOfRow { student, teacher, logs, mean, dloss, divergence });
                }
            })
        })
    }
}

/// The loop over rows of so many classes.
fn items(rows: usize, classes: usize) -> Items {
    long_rows::items([rows, classes], Work::of([COST, rows, classes]))
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
    let items = items(rows, classes);
    let task = match items.division(parallel::threads()) {
        Division::Whole(task) => task,
        Division::Cut(steps) => {
            let of_rows = LongRows::new(classes, steps, items.work);
            return divergences_in_parts(student, teacher, rows, &of_rows, divergence);
        }
    };
    let zero = [<E::Acc as Zero>::zero(); 2];
    let zero = OfRow { numbers: zero, logs: [zero; 2] };
    parallel::filled(rows, zero, task, items.work, |index, results| {
        for (result, at) in results.iter_mut().zip(index * task..) {
            let range = at * classes..(at + 1) * classes;
            *result =
                vectorized(Row { student: &student[range.clone()], teacher: &teacher[range], divergence });
        }
    })
}

/// [`row_divergences`] of few long rows.
fn divergences_in_parts<E: CpuElement>(
    student: &[E],
    teacher: &[E],
    rows: usize,
    of_rows: &LongRows,
    divergence: Tempered,
) -> Vec<OfRow<E::Acc>> {
    let number = <E::Acc as CpuElement>::from_f64;
    let inverse = number(divergence.inverse);
    let logs = [student, teacher].map(|x| {
        let maxima: Vec<_> = of_rows.maxima(x).into_iter().map(|max| max * inverse).collect();
        let sums = of_rows.sums(rows, |row, part| {
            vectorized(Sum { values: &x[part], f: |x: E| (x.widen() * inverse - maxima[row]).fast_exp() })
        });
        maxima.into_iter().zip(sums).map(|(max, sum)| [max, number(sum.ln())]).collect::<Vec<_>>()
    });
    let logs_of = |row: usize| [logs[0][row], logs[1][row]];
    let sums = of_rows.map(rows, |row, part| {
        let (student, teacher) = (&student[part.clone()], &teacher[part]);
        vectorized(SumsOfPart { student, teacher, logs: logs_of(row), divergence })
    });
    let sums = of_rows.merged(&sums, |[a, b], [c, d]| [a + c, b + d]).into_iter().enumerate();
    sums.map(|(row, sums)| OfRow { numbers: divergence.numbers(sums).map(number), logs: logs_of(row) })
        .collect()
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
        let Self { student, teacher, divergence } = self;
        let number = <E::Acc as CpuElement>::from_f64;
        let inverse = number(divergence.inverse);
        let logs = [student, teacher].map(|x| sums::log_sum_exp(x, |x| x * inverse));
        let sums = SumsOfPart { student, teacher, logs, divergence }.run();
        OfRow { numbers: divergence.numbers(sums).map(number), logs }
    }
}

/// The sums over a row, or a part of one, from which [`Tempered::numbers`] follow.
struct SumsOfPart<'a, E: CpuElement> {
    student: &'a [E],
    teacher: &'a [E],
    logs: [Parts<E::Acc>; 2],
    divergence: Tempered,
}

impl<E: CpuElement> Job for SumsOfPart<'_, E> {
    type Result = [f64; 2];

    #[inline(always)]
    fn run(self) -> [f64; 2] {
        let Self { student, teacher, logs, divergence: Tempered { divergence, inverse } } = self;
        let inverse = <E::Acc as CpuElement>::from_f64(inverse);
        let of = |student: E, teacher: E| {
            Probabilities::<E::Acc>::of(student.widen(), teacher.widen(), inverse, logs)
        };
        match divergence {
            Divergence::Forward => {
                [sums::sum_pairs(student, teacher, |s, t| times(of(s, t).p, of(s, t).ratio)), 0.0]
            }
            Divergence::Reverse => {
                [sums::sum_pairs(student, teacher, |s, t| times(of(s, t).q, -of(s, t).ratio)), 0.0]
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
                [of_student, of_teacher]
            }
        }
    }
}

impl Tempered {
    /// The loss of a row and `sum(q g)`, from the sums of [`SumsOfPart`].
    fn numbers(self, [first, second]: [f64; 2]) -> [f64; 2] {
        match self.divergence {
            Divergence::Forward => [first, 0.0],
            Divergence::Reverse => [first, first],
            Divergence::JensenShannon { beta } => {
                let mean = (1.0 - beta) * first;
                [mean + beta * second, mean]
            }
        }
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

/// Replaces a row of the student's logits, or a part of one, by its gradient.
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

#[cfg(test)]
pub(crate) mod counting {
    /// The loop over rows of classes.
    pub(crate) fn items([rows, classes]: [usize; 2]) -> super::Items {
        super::items(rows, classes)
    }
}
