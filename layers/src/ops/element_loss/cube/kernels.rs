//! The kernels of element-wise losses on devices.
use crate::backend::cube::{Pair, log_1p_exp, number, sigmoid, sum_of_vector, sum_over_units};
#[cfg(not(feature = "fusion"))]
use crate::ops::element_loss::Argument;
use crate::ops::element_loss::{ElementLoss, LOWEST_LOG};
use burn_cubecl::cubecl::{
    self,
    ir::ElemType,
    prelude::*,
    std::tensor::layout::linear::{LinearView, LinearViewMut},
};

/// Units of a cube.
pub(super) const UNITS: usize = 256;

/// The loss without its numbers, for which a kernel is compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum LossKind {
    Square,
    Huber,
    LogAbove,
    BinaryLogits,
    BinaryProbabilities,
    Divergence,
    LogDivergence,
}

/// The kind of a loss and its two numbers.
pub(super) fn kind(f: ElementLoss) -> (LossKind, [f64; 2]) {
    match f {
        ElementLoss::Square => (LossKind::Square, [0.0; 2]),
        ElementLoss::Huber { delta, bias } => (LossKind::Huber, [delta, bias]),
        ElementLoss::LogAbove { min } => (LossKind::LogAbove, [min, 0.0]),
        ElementLoss::BinaryLogits => (LossKind::BinaryLogits, [0.0; 2]),
        ElementLoss::BinaryProbabilities => (LossKind::BinaryProbabilities, [0.0; 2]),
        ElementLoss::Divergence { min } => (LossKind::Divergence, [min, 0.0]),
        ElementLoss::LogDivergence => (LossKind::LogDivergence, [0.0; 2]),
    }
}

/// The logarithm of a probability, or [`LOWEST_LOG`].
#[cube]
fn bounded<W: Float, N: Size>(log: Vector<W, N>) -> Vector<W, N> {
    let lowest = number::<W, N>(LOWEST_LOG);
    select_many(log.less_than(&lowest), lowest, log)
}

/// The logarithm of a target in a divergence.
#[cube]
fn log_of_target<W: Float, N: Size>(t: Vector<W, N>, min: Vector<W, N>) -> Vector<W, N> {
    t.max(min).min(number::<W, N>(1.0)).ln()
}

#[cube]
fn loss<W: Float, N: Size>(
    x: Vector<W, N>,
    t: Vector<W, N>,
    p: W,
    q: W,
    #[comptime] kind: LossKind,
) -> Vector<W, N> {
    let (p, q) = (Vector::<W, N>::new(p), Vector::<W, N>::new(q));
    let one = number::<W, N>(1.0);
    match comptime!(kind) {
        LossKind::Square => x * x,
        LossKind::Huber => {
            let size = x.abs();
            select_many(size.greater_than(&p), p * size - q, number::<W, N>(0.5) * x * x)
        }
        LossKind::LogAbove => select_many(x.less_than(&p), p, x).ln(),
        LossKind::BinaryLogits => (one - t) * x + log_1p_exp::<W, N>(-x),
        LossKind::BinaryProbabilities => {
            (t - one) * bounded::<W, N>((-x).log1p()) - t * bounded::<W, N>(x.ln())
        }
        LossKind::Divergence => t * (log_of_target::<W, N>(t, p) - x),
        LossKind::LogDivergence => t.exp() * (t - x),
    }
}

/// `weight / x`, and 0 where the logarithm of `x` is not above [`LOWEST_LOG`].
#[cube]
fn log_slope<W: Float, N: Size>(weight: Vector<W, N>, x: Vector<W, N>) -> Vector<W, N> {
    let highest = number::<W, N>(comptime!(LOWEST_LOG.exp().max(f64::from(f32::MIN_POSITIVE))));
    select_many(x.less_equal(&highest), number::<W, N>(0.0), weight / x)
}

#[cube]
fn slope_of_input<W: Float, N: Size>(
    x: Vector<W, N>,
    t: Vector<W, N>,
    p: W,
    #[comptime] kind: LossKind,
) -> Vector<W, N> {
    let p = Vector::<W, N>::new(p);
    let (zero, one) = (number::<W, N>(0.0), number::<W, N>(1.0));
    match comptime!(kind) {
        LossKind::Square => x + x,
        LossKind::Huber => x.max(-p).min(p),
        LossKind::LogAbove => select_many(x.less_than(&p), zero, one / x),
        LossKind::BinaryLogits => sigmoid::<W, N>(x) - t,
        LossKind::BinaryProbabilities => log_slope::<W, N>(one - t, one - x) - log_slope::<W, N>(t, x),
        LossKind::Divergence => -t,
        LossKind::LogDivergence => -t.exp(),
    }
}

#[cfg(not(feature = "fusion"))]
#[cube]
fn slope_of_target<W: Float, N: Size>(
    x: Vector<W, N>,
    t: Vector<W, N>,
    p: W,
    #[comptime] kind: LossKind,
) -> Vector<W, N> {
    let p = Vector::<W, N>::new(p);
    let (zero, one) = (number::<W, N>(0.0), number::<W, N>(1.0));
    match comptime!(kind) {
        LossKind::Divergence => {
            let inside = select_many(t.less_than(&p), zero, select_many(t.greater_than(&one), zero, one));
            log_of_target::<W, N>(t, p) - x + inside
        }
        LossKind::LogDivergence => t.exp() * (t - x + one),
        // The others have no gradient of a target.
        _ => zero,
    }
}

#[cube(launch_unchecked, address_type = "dynamic")]
pub(super) fn sum_kernel<T: Float, W: Float, N: Size>(
    x: LinearView<'_, Vector<T, N>>,
    targets: ComptimeOption<LinearView<'_, Vector<T, N>>>,
    mut sums: LinearViewMut<'_, W>,
    vectors: usize,
    p: InputScalar,
    q: InputScalar,
    #[comptime] kind: LossKind,
    #[define(T, W)] _dtypes: [ElemType; 2],
) {
    let mut sum = Vector::<W, N>::new(W::new(0.0));
    let mut at = CUBE_POS * UNITS + UNIT_POS as usize;
    while at < vectors {
        let t = target::<T, W, N>(&targets, at);
        let x = Vector::<W, N>::cast_from(x.read(at));
        sum += loss::<W, N>(x, t, p.get::<W>(), q.get::<W>(), kind);
        at += sums.shape() * UNITS;
    }
    write_sum::<W, N>(sum, &mut sums);
}

#[cube(launch_unchecked, address_type = "dynamic")]
pub(super) fn sum_with_slopes_kernel<T: Float, W: Float, N: Size>(
    x: LinearView<'_, Vector<T, N>>,
    targets: ComptimeOption<LinearView<'_, Vector<T, N>>>,
    mut sums: LinearViewMut<'_, W>,
    mut slopes: LinearViewMut<'_, Vector<T, N>>,
    p: InputScalar,
    q: InputScalar,
    slope_scale: InputScalar,
    #[comptime] kind: LossKind,
    #[define(T, W)] _dtypes: [ElemType; 2],
) {
    let (p, q) = (p.get::<W>(), q.get::<W>());
    let slope_scale = Vector::new(slope_scale.get::<W>());
    let mut sum = Vector::<W, N>::new(W::new(0.0));
    let mut at = CUBE_POS * UNITS + UNIT_POS as usize;
    while at < slopes.shape() {
        let t = target::<T, W, N>(&targets, at);
        let x = Vector::<W, N>::cast_from(x.read(at));
        sum += loss::<W, N>(x, t, p, q, kind);
        slopes.write(at, Vector::cast_from(slope_of_input::<W, N>(x, t, p, kind) * slope_scale));
        at += sums.shape() * UNITS;
    }
    write_sum::<W, N>(sum, &mut sums);
}

/// Writes the sum over all units of a cube.
#[cube]
fn write_sum<W: Float, N: Size>(of_unit: Vector<W, N>, sums: &mut LinearViewMut<'_, W>) {
    let pair = Pair::<W> { a: sum_of_vector::<W, N>(of_unit), b: W::new(0.0) };
    let total = sum_over_units::<W>(pair, UNITS);
    if UNIT_POS == 0 && sums.is_in_bounds(CUBE_POS) {
        sums.write(CUBE_POS, total.a);
    }
}

/// A vector of targets, or zeros without targets.
#[cube]
fn target<T: Float, W: Float, N: Size>(
    targets: &ComptimeOption<LinearView<'_, Vector<T, N>>>,
    at: usize,
) -> Vector<W, N> {
    let target: ComptimeOption<Vector<T, N>> = targets.as_ref().map(|targets| targets.read(at));
    Vector::<W, N>::cast_from(target.unwrap_or(Vector::new(T::new(0.0))))
}

#[cube(launch_unchecked, address_type = "dynamic")]
pub(super) fn total_kernel<T: Float, W: Float>(
    sums: LinearView<'_, W>,
    mut total: LinearViewMut<'_, T>,
    parts: usize,
    scale: InputScalar,
    #[define(T, W)] _dtypes: [ElemType; 2],
) {
    let mut sum = W::new(0.0);
    let mut at = UNIT_POS as usize;
    while at < parts {
        sum += sums.read(at);
        at += UNITS;
    }
    let sum = sum_over_units::<W>(Pair::<W> { a: sum, b: W::new(0.0) }, UNITS);
    if UNIT_POS == 0 && CUBE_POS == 0 {
        total.write(0usize, T::cast_from(sum.a * scale.get::<W>()));
    }
}

/// What is made of every element.
#[cfg(not(feature = "fusion"))]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Wanted {
    Losses,
    SlopesOfInput,
    SlopesOfTarget,
}

#[cfg(not(feature = "fusion"))]
impl Wanted {
    pub fn slopes(argument: Argument) -> Self {
        match argument {
            Argument::Input => Self::SlopesOfInput,
            Argument::Target => Self::SlopesOfTarget,
        }
    }
}

#[cfg(not(feature = "fusion"))]
#[cube(launch_unchecked, address_type = "dynamic")]
pub(super) fn elementwise_kernel<T: Float, W: Float, F: Float, N: Size>(
    x: LinearView<'_, Vector<T, N>>,
    targets: ComptimeOption<LinearView<'_, Vector<T, N>>>,
    each: ComptimeOption<LinearView<'_, Vector<T, N>>>,
    one: ComptimeOption<&[F]>,
    mut y: LinearViewMut<'_, Vector<T, N>>,
    p: InputScalar,
    q: InputScalar,
    by: InputScalar,
    #[comptime] kind: LossKind,
    #[comptime] wanted: Wanted,
    #[define(T, W)] _dtypes: [ElemType; 2],
    #[define(F)] _of_factor: ElemType,
) {
    if !y.is_in_bounds(ABSOLUTE_POS) {
        terminate!();
    }
    let t = target::<T, W, N>(&targets, ABSOLUTE_POS);
    let x = Vector::<W, N>::cast_from(x.read(ABSOLUTE_POS));
    let (p, q) = (p.get::<W>(), q.get::<W>());
    let made = match comptime!(wanted) {
        Wanted::Losses => loss::<W, N>(x, t, p, q, kind),
        Wanted::SlopesOfInput => slope_of_input::<W, N>(x, t, p, kind),
        Wanted::SlopesOfTarget => slope_of_target::<W, N>(x, t, p, kind),
    };
    let one: ComptimeOption<F> = one.as_ref().map(|one| one[0]);
    let by = W::cast_from(one.unwrap_or(F::new(1.0))) * by.get::<W>();
    let each: ComptimeOption<Vector<T, N>> = each.as_ref().map(|each| each.read(ABSOLUTE_POS));
    let each = Vector::<W, N>::cast_from(each.unwrap_or(Vector::new(T::new(1.0))));
    y.write(ABSOLUTE_POS, Vector::cast_from(made * each * Vector::new(by)));
}

#[cfg(not(feature = "fusion"))]
#[cube(launch_unchecked, address_type = "dynamic")]
pub(super) fn product_kernel<T: Float, W: Float, N: Size>(
    x: LinearView<'_, Vector<T, N>>,
    y: LinearView<'_, Vector<T, N>>,
    mut product: LinearViewMut<'_, Vector<T, N>>,
    factor: InputScalar,
    #[define(T, W)] _dtypes: [ElemType; 2],
) {
    if !product.is_in_bounds(ABSOLUTE_POS) {
        terminate!();
    }
    let x = Vector::<W, N>::cast_from(x.read(ABSOLUTE_POS));
    let y = Vector::<W, N>::cast_from(y.read(ABSOLUTE_POS));
    product.write(ABSOLUTE_POS, Vector::cast_from(x * y * Vector::new(factor.get::<W>())));
}
