//! The kernels on a CPU: fused loops of one pass.
use super::{Argument, ElementLoss, ElementLossKernels, Factor, LOWEST_LOG};
use crate::backend::cpu::{
    CpuBackend, CpuElement,
    exp::{COST, log_1p, sigmoid},
    parallel, scalar, sums, with_element, zip_in_place,
};
use burn::backend::{TensorMetadata, tensor::FloatTensor};
use burn::tensor::{DType, Shape, bf16, f16};
use num_traits::Zero;

impl<B: CpuBackend> ElementLossKernels for B {
    fn element_loss(x: FloatTensor<B>, targets: Option<FloatTensor<B>>, f: ElementLoss) -> FloatTensor<B> {
        let (x, targets) = (B::contiguous(x), targets.map(B::contiguous));
        with_element!(x.dtype(), "loss", E => {
            let targets = targets.as_ref().map(B::as_slice::<E>);
            B::from_vec(each(B::as_slice(&x), targets, f), x.shape())
        })
    }

    fn element_loss_sum(
        x: FloatTensor<B>,
        targets: Option<FloatTensor<B>>,
        f: ElementLoss,
        scale: f64,
    ) -> FloatTensor<B> {
        let (x, targets) = (B::contiguous(x), targets.map(B::contiguous));
        with_element!(x.dtype(), "loss", E => {
            let sum = sum(B::as_slice(&x), targets.as_ref().map(B::as_slice::<E>), f);
            B::from_vec(vec![E::from_f64(scale * sum)], Shape::new([1]))
        })
    }

    fn element_loss_slopes(
        x: FloatTensor<B>,
        targets: Option<FloatTensor<B>>,
        f: ElementLoss,
        argument: Argument,
        Factor { tensor: factor, by }: Factor<B>,
    ) -> FloatTensor<B> {
        let (mut x, targets) = (B::contiguous(x), targets.map(B::contiguous));
        with_element!(x.dtype(), "loss", E => {
            let by = <E as CpuElement>::Acc::from_f64(by);
            let factor = factor.map_or(by, |factor| scalar::<B, E>(factor) * by);
            let targets = targets.as_ref().map(B::as_slice::<E>);
            slopes(B::as_slice_mut(&mut x), targets, f, argument, factor);
        });
        x
    }

    fn element_loss_backward(
        x: FloatTensor<B>,
        targets: Option<FloatTensor<B>>,
        f: ElementLoss,
        argument: Argument,
        dy: FloatTensor<B>,
    ) -> FloatTensor<B> {
        let (x, targets, mut dy) = (B::contiguous(x), targets.map(B::contiguous), B::contiguous(dy));
        with_element!(x.dtype(), "loss", E => {
            let targets = targets.as_ref().map(B::as_slice::<E>);
            backward(B::as_slice(&x), targets, f, argument, B::as_slice_mut(&mut dy));
        });
        dy
    }

    fn scaled_product(x: FloatTensor<B>, y: FloatTensor<B>, factor: f64) -> FloatTensor<B> {
        let (mut x, y) = (B::contiguous(x), B::contiguous(y));
        with_element!(x.dtype(), "product", E => {
            let (factor, y) = (<E as CpuElement>::Acc::from_f64(factor), B::as_slice::<E>(&y));
            zip_in_place(B::as_slice_mut(&mut x), y, TASK, y.len(), |x, y| x * y * factor);
        });
        x
    }
}

impl ElementLoss {
    /// The time of a loss, or of its slope in an argument, in units of the time to read an element. Logarithms and exponentials take
    /// longest, above all where they are not vectorized.
    fn cost(self, slope: Option<Argument>) -> usize {
        match self {
            Self::Square | Self::Huber { .. } => 1,
            Self::LogAbove { .. } if slope.is_some() => 1,
            Self::Divergence { .. } if slope == Some(Argument::Input) => 1,
            Self::LogAbove { .. } | Self::Divergence { .. } | Self::LogDivergence | Self::BinaryLogits => {
                COST
            }
            Self::BinaryProbabilities => 16,
        }
    }

    /// Calls the visitor with the loss and its slopes in `x` and in `t`, in the arithmetic of `A`. Every variant has its own call, and so
    /// its own loops.
    #[inline(always)]
    fn with<A: CpuElement<Acc = A>, R>(self, visitor: impl Visitor<A, R>) -> R {
        let num = A::from_f64;
        let [zero, half, one] = [0.0, 0.5, 1.0].map(num);
        let none = move |_: A, _: A| zero;
        match self {
            Self::Square => visitor.visit(|x, _| x * x, |x, _| x + x, none),
            Self::Huber { delta, bias } => {
                let (delta, bias) = (num(delta), num(bias));
                let clamp = move |x: A| {
                    if x > delta {
                        delta
                    } else if x < -delta {
                        -delta
                    } else {
                        x
                    }
                };
                visitor.visit(
                    move |x, _| if x.abs() > delta { clamp(x) * x - bias } else { half * x * x },
                    move |x, _| clamp(x),
                    none,
                )
            }
            Self::LogAbove { min } => {
                let (min, lowest) = (num(min), num(min.ln()));
                visitor.visit(
                    move |x, _| {
                        let log = x.fast_ln();
                        if x < min { lowest } else { log }
                    },
                    move |x, _| if x < min { zero } else { one / x },
                    none,
                )
            }
            Self::BinaryLogits => visitor.visit(
                move |x, t| (one - t) * x - (x.min(zero) - log_1p((-x.abs()).fast_exp())),
                |x, t| sigmoid(x) - t,
                none,
            ),
            Self::BinaryProbabilities => {
                let (lowest, smallest) = (num(LOWEST_LOG), num(LOWEST_LOG.exp()));
                let log = move |log: A| if log < lowest { lowest } else { log };
                let slope = move |weight: A, x: A| if x < smallest { zero } else { weight / x };
                visitor.visit(
                    move |x, t| (t - one) * log((-x).ln_1p()) - t * log(x.fast_ln()),
                    move |x, t| slope(one - t, one - x) - slope(t, x),
                    none,
                )
            }
            Self::Divergence { min } => {
                let (min, lowest) = (num(min), num(min.ln()));
                // The logarithm is computed in any case, so that no element needs a branch.
                let log = move |t: A| {
                    let log = t.fast_ln();
                    let log = if t > one { zero } else { log };
                    if t < min { lowest } else { log }
                };
                visitor.visit(
                    move |x, t| t * (log(t) - x),
                    |_, t| -t,
                    move |x, t| log(t) - x + if t < min || t > one { zero } else { one },
                )
            }
            Self::LogDivergence => visitor.visit(
                |x, t| t.fast_exp() * (t - x),
                |_, t| -t.fast_exp(),
                move |x, t| t.fast_exp() * (t - x + one),
            ),
        }
    }
}

/// What to do with a loss and its slopes.
trait Visitor<A, R> {
    fn visit(
        self,
        loss: impl Fn(A, A) -> A + Copy + Send + Sync,
        x_slope: impl Fn(A, A) -> A + Copy + Send + Sync,
        target_slope: impl Fn(A, A) -> A + Copy + Send + Sync,
    ) -> R;
}

/// Elements per task.
const TASK: usize = 1 << 12;

/// The loss of every element.
fn each<E: CpuElement>(x: &[E], t: Option<&[E]>, f: ElementLoss) -> Vec<E> {
    f.with(Each { x, t, work: parallel::Work::of([f.cost(None), x.len()]) })
}

/// The sum of all losses.
fn sum<E: CpuElement>(x: &[E], t: Option<&[E]>, f: ElementLoss) -> f64 {
    f.with(SumOfLosses { x, t, work: parallel::Work::of([f.cost(None), x.len()]) })
}

/// Replaces every `x` by `factor` times the slope of its loss in an argument.
fn slopes<E: CpuElement>(x: &mut [E], t: Option<&[E]>, f: ElementLoss, argument: Argument, factor: E::Acc) {
    let work = parallel::Work::of([f.cost(Some(argument)), x.len()]);
    f.with(Slopes { x, t, argument, factor, work });
}

/// Replaces every `dy` by its product with the slope of the loss of `x` in an argument.
fn backward<E: CpuElement>(x: &[E], t: Option<&[E]>, f: ElementLoss, argument: Argument, dy: &mut [E]) {
    f.with(Backward { x, t, argument, dy, work: parallel::Work::of([f.cost(Some(argument)), x.len()]) });
}

/// Calls `f(element, x, t)` for the elements from `start` on; `t` is 0 where there are no targets.
#[inline(always)]
fn with_targets<T, E: CpuElement>(
    elements: impl Iterator<Item = (T, E)>,
    t: Option<&[E]>,
    start: usize,
    mut f: impl FnMut(T, E::Acc, E::Acc),
) {
    match t {
        Some(t) => elements.zip(&t[start..]).for_each(|((element, x), t)| f(element, x.widen(), t.widen())),
        None => elements.for_each(|(element, x)| f(element, x.widen(), <E::Acc as Zero>::zero())),
    }
}

struct Each<'a, E> {
    x: &'a [E],
    t: Option<&'a [E]>,
    work: parallel::Work,
}

impl<E: CpuElement> Visitor<E::Acc, Vec<E>> for Each<'_, E> {
    fn visit(
        self,
        loss: impl Fn(E::Acc, E::Acc) -> E::Acc + Copy + Send + Sync,
        _: impl Fn(E::Acc, E::Acc) -> E::Acc + Copy + Send + Sync,
        _: impl Fn(E::Acc, E::Acc) -> E::Acc + Copy + Send + Sync,
    ) -> Vec<E> {
        let Self { x, t, work } = self;
        parallel::filled(x.len(), E::zero(), TASK, work, |index, y| {
            let start = index * TASK;
            let elements = y.iter_mut().zip(x[start..].iter().copied());
            with_targets(elements, t, start, |y, x, t| *y = E::narrow(loss(x, t)));
        })
    }
}

struct SumOfLosses<'a, E> {
    x: &'a [E],
    t: Option<&'a [E]>,
    work: parallel::Work,
}

impl<E: CpuElement> Visitor<E::Acc, f64> for SumOfLosses<'_, E> {
    fn visit(
        self,
        loss: impl Fn(E::Acc, E::Acc) -> E::Acc + Copy + Send + Sync,
        _: impl Fn(E::Acc, E::Acc) -> E::Acc + Copy + Send + Sync,
        _: impl Fn(E::Acc, E::Acc) -> E::Acc + Copy + Send + Sync,
    ) -> f64 {
        let Self { x, t, work } = self;
        let job = parallel::items_per_job(x.len(), work);
        let parts = parallel::map_ranges(x.len(), job, |range| {
            // Sums of parts, so that a long sum is exact in f32, too.
            let parts = range.clone().step_by(TASK).map(|start| {
                let part = start..(start + TASK).min(range.end);
                match t {
                    Some(t) => sums::sum_pairs(&x[part.clone()], &t[part], |x, t| loss(x.widen(), t.widen())),
                    None => sums::sum(&x[part], |x| loss(x.widen(), <E::Acc as Zero>::zero())),
                }
            });
            parts.sum::<f64>()
        });
        parts.into_iter().sum()
    }
}

struct Slopes<'a, E: CpuElement> {
    x: &'a mut [E],
    t: Option<&'a [E]>,
    argument: Argument,
    factor: E::Acc,
    work: parallel::Work,
}

impl<E: CpuElement> Visitor<E::Acc, ()> for Slopes<'_, E> {
    fn visit(
        self,
        _: impl Fn(E::Acc, E::Acc) -> E::Acc + Copy + Send + Sync,
        x_slope: impl Fn(E::Acc, E::Acc) -> E::Acc + Copy + Send + Sync,
        target_slope: impl Fn(E::Acc, E::Acc) -> E::Acc + Copy + Send + Sync,
    ) {
        let Self { x, t, argument, factor, work } = self;
        parallel::chunks_mut(x, TASK, work, |index, x| {
            let elements = x.iter_mut().map(|x| {
                let value = *x;
                (x, value)
            });
            let start = index * TASK;
            match argument {
                Argument::Input => {
                    with_targets(elements, t, start, |to, x, t| *to = E::narrow(factor * x_slope(x, t)))
                }
                Argument::Target => {
                    with_targets(elements, t, start, |to, x, t| *to = E::narrow(factor * target_slope(x, t)));
                }
            }
        });
    }
}

struct Backward<'a, E> {
    x: &'a [E],
    t: Option<&'a [E]>,
    argument: Argument,
    dy: &'a mut [E],
    work: parallel::Work,
}

impl<E: CpuElement> Visitor<E::Acc, ()> for Backward<'_, E> {
    fn visit(
        self,
        _: impl Fn(E::Acc, E::Acc) -> E::Acc + Copy + Send + Sync,
        x_slope: impl Fn(E::Acc, E::Acc) -> E::Acc + Copy + Send + Sync,
        target_slope: impl Fn(E::Acc, E::Acc) -> E::Acc + Copy + Send + Sync,
    ) {
        let Self { x, t, argument, dy, work } = self;
        parallel::chunks_mut(dy, TASK, work, |index, dy| {
            let start = index * TASK;
            let elements = dy.iter_mut().zip(x[start..].iter().copied());
            let times = |dy: &mut E, slope: E::Acc| *dy = E::narrow(dy.widen() * slope);
            match argument {
                Argument::Input => with_targets(elements, t, start, |dy, x, t| times(dy, x_slope(x, t))),
                Argument::Target => {
                    with_targets(elements, t, start, |dy, x, t| times(dy, target_slope(x, t)))
                }
            }
        });
    }
}
