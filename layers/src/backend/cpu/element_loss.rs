//! Losses of elements.
use super::{CpuElement, parallel, sums};
use crate::backend::{ElementLoss, Side, element_loss::Visitor};
use num_traits::Zero;

/// Elements per task.
const TASK: usize = 1 << 12;

/// The loss of every element.
pub(super) fn each<E: CpuElement>(x: &[E], t: Option<&[E]>, f: ElementLoss) -> Vec<E> {
    f.with(Each { x, t, work: f.cost(None) * x.len() })
}

/// The sum of all losses.
pub(super) fn sum<E: CpuElement>(x: &[E], t: Option<&[E]>, f: ElementLoss) -> f64 {
    f.with(Sum { x, t, work: f.cost(None) * x.len() })
}

/// Replaces every `x` by `factor` times the slope of its loss on a side.
pub(super) fn slopes<E: CpuElement>(
    x: &mut [E],
    t: Option<&[E]>,
    f: ElementLoss,
    side: Side,
    factor: E::Acc,
) {
    let work = f.cost(Some(side)) * x.len();
    f.with(Slopes { x, t, side, factor, work });
}

/// Replaces every `dy` by its product with the slope of the loss of `x` on a side.
pub(super) fn backward<E: CpuElement>(x: &[E], t: Option<&[E]>, f: ElementLoss, side: Side, dy: &mut [E]) {
    f.with(Backward { x, t, side, dy, work: f.cost(Some(side)) * x.len() });
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
    work: usize,
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

struct Sum<'a, E> {
    x: &'a [E],
    t: Option<&'a [E]>,
    work: usize,
}

impl<E: CpuElement> Visitor<E::Acc, f64> for Sum<'_, E> {
    fn visit(
        self,
        loss: impl Fn(E::Acc, E::Acc) -> E::Acc + Copy + Send + Sync,
        _: impl Fn(E::Acc, E::Acc) -> E::Acc + Copy + Send + Sync,
        _: impl Fn(E::Acc, E::Acc) -> E::Acc + Copy + Send + Sync,
    ) -> f64 {
        let Self { x, t, work } = self;
        let job = parallel::items_per_job(x.len(), work);
        let parts = parallel::map_ranges(x.len(), job, |range| {
            // Sums of parts, so that a long one is exact in f32, too.
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
    side: Side,
    factor: E::Acc,
    work: usize,
}

impl<E: CpuElement> Visitor<E::Acc, ()> for Slopes<'_, E> {
    fn visit(
        self,
        _: impl Fn(E::Acc, E::Acc) -> E::Acc + Copy + Send + Sync,
        x_slope: impl Fn(E::Acc, E::Acc) -> E::Acc + Copy + Send + Sync,
        target_slope: impl Fn(E::Acc, E::Acc) -> E::Acc + Copy + Send + Sync,
    ) {
        let Self { x, t, side, factor, work } = self;
        parallel::chunks_mut(x, TASK, work, |index, x| {
            let elements = x.iter_mut().map(|x| {
                let value = *x;
                (x, value)
            });
            let start = index * TASK;
            match side {
                Side::X => {
                    with_targets(elements, t, start, |to, x, t| *to = E::narrow(factor * x_slope(x, t)))
                }
                Side::Target => {
                    with_targets(elements, t, start, |to, x, t| *to = E::narrow(factor * target_slope(x, t)));
                }
            }
        });
    }
}

struct Backward<'a, E> {
    x: &'a [E],
    t: Option<&'a [E]>,
    side: Side,
    dy: &'a mut [E],
    work: usize,
}

impl<E: CpuElement> Visitor<E::Acc, ()> for Backward<'_, E> {
    fn visit(
        self,
        _: impl Fn(E::Acc, E::Acc) -> E::Acc + Copy + Send + Sync,
        x_slope: impl Fn(E::Acc, E::Acc) -> E::Acc + Copy + Send + Sync,
        target_slope: impl Fn(E::Acc, E::Acc) -> E::Acc + Copy + Send + Sync,
    ) {
        let Self { x, t, side, dy, work } = self;
        parallel::chunks_mut(dy, TASK, work, |index, dy| {
            let start = index * TASK;
            let elements = dy.iter_mut().zip(x[start..].iter().copied());
            let times = |dy: &mut E, slope: E::Acc| *dy = E::narrow(dy.widen() * slope);
            match side {
                Side::X => with_targets(elements, t, start, |dy, x, t| times(dy, x_slope(x, t))),
                Side::Target => with_targets(elements, t, start, |dy, x, t| times(dy, target_slope(x, t))),
            }
        });
    }
}
