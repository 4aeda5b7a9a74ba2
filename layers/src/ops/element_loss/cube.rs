//! Kernels for devices: every loss, its slope and the sum in one pass over what they read.
//!
//! | | fused | not fused |
//! | --- | --- | --- |
//! | sum of losses, with the slopes or without | two kernels of ours | two kernels of ours |
//! | losses, slopes, products | Burn's fusion makes one of the composition | one kernel of ours |
#[cfg(not(feature = "fusion"))]
use super::{Argument, Factor};
use super::{ElementLoss, ElementLossKernels, LOWEST_LOG};
#[cfg(not(feature = "fusion"))]
use crate::backend::cube::{Output, in_memory_order, units};
use crate::backend::cube::{
    Pair, address_type, cubes, empty, log_1p_exp, number, sigmoid, sum_of_vector, sum_over_units, types,
    vector_size,
};
use crate::backend::optional::MaybeTensor;
use crate::backend::wide;
#[cfg(not(feature = "fusion"))]
use burn::backend::cubecl::dtype_to_storage_type;
use burn::backend::{Backend, Cube, TensorMetadata, backend_extension, tensor::FloatTensor};
use burn::tensor::Shape;
use burn_cubecl::CubeBackend;
use burn_cubecl::cubecl::{
    self,
    ir::ElemType,
    prelude::*,
    std::tensor::layout::linear::{LinearView, LinearViewMut},
};
use burn_cubecl::tensor::CubeTensor;

impl ElementLossKernels for Cube {
    fn element_loss_sum(
        x: FloatTensor<Self>,
        targets: Option<FloatTensor<Self>>,
        f: ElementLoss,
        scale: f64,
    ) -> FloatTensor<Self> {
        Self::cube_element_loss_sum(x, targets.into(), f, scale)
    }

    fn element_loss_sum_with_slopes(
        x: FloatTensor<Self>,
        targets: Option<FloatTensor<Self>>,
        f: ElementLoss,
        scale: f64,
        slope_scale: f64,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        Self::cube_element_loss_sum_with_slopes(x, targets.into(), f, scale, slope_scale)
    }

    #[cfg(not(feature = "fusion"))]
    fn element_loss(
        x: FloatTensor<Self>,
        targets: Option<FloatTensor<Self>>,
        f: ElementLoss,
    ) -> FloatTensor<Self> {
        elementwise(x, targets, f, Wanted::Losses, ByTensor::Nothing)
    }

    #[cfg(not(feature = "fusion"))]
    fn element_loss_slopes(
        x: FloatTensor<Self>,
        targets: Option<FloatTensor<Self>>,
        f: ElementLoss,
        argument: Argument,
        Factor { tensor, by }: Factor<Self>,
    ) -> FloatTensor<Self> {
        let factor = tensor.map_or(ByTensor::Number(by), |factor| ByTensor::One { factor, by });
        elementwise(x, targets, f, Wanted::slopes(argument), factor)
    }

    #[cfg(not(feature = "fusion"))]
    fn element_loss_backward(
        x: FloatTensor<Self>,
        targets: Option<FloatTensor<Self>>,
        f: ElementLoss,
        argument: Argument,
        dy: FloatTensor<Self>,
    ) -> FloatTensor<Self> {
        elementwise(x, targets, f, Wanted::slopes(argument), ByTensor::Each(dy))
    }

    #[cfg(not(feature = "fusion"))]
    fn scaled_product(x: FloatTensor<Self>, y: FloatTensor<Self>, factor: f64) -> FloatTensor<Self> {
        let [product] = in_memory_order([x, y], |[x, y]| {
            let product = Output::replacing(&x, 0);
            let len = x.meta.num_elements();
            if len > 0 {
                let size = vector_size(&[&x, &y, &product.tensor], usize::MAX);
                let (count, dim) = units(&x.client, len / size);
                let (client, at, dtypes) = (x.client.clone(), address_type(&[&x, &y]), types(x.dtype));
                let factor = InputScalar::new(factor, dtypes[1]);
                let [x, y] = [x, y].map(CubeTensor::into_linear_view);
                // SAFETY: the kernel compares every position with the shapes.
                unsafe {
                    product_kernel::launch_unchecked(
                        &client,
                        count,
                        dim,
                        at,
                        size,
                        x,
                        y,
                        product.view(),
                        factor,
                        dtypes,
                    );
                }
            }
            [product.tensor]
        });
        product
    }
}

#[backend_extension(Cube, Fusion: cfg(feature = "fusion"))]
pub trait ElementLossCube: Backend {
    /// See [`ElementLossKernels::element_loss_sum`].
    #[fusion(dtype = x, shape = Shape::new([1]))]
    fn cube_element_loss_sum(
        x: FloatTensor<Self>,
        #[extension_type] targets: MaybeTensor<Self>,
        f: ElementLoss,
        scale: f64,
    ) -> FloatTensor<Self>;

    /// See [`ElementLossKernels::element_loss_sum_with_slopes`].
    #[fusion(meta = |x, _targets, _f, _scale, _slope_scale| {
        let mut of_sum = x.clone();
        of_sum.shape = [1].into();
        (of_sum, x.clone())
    })]
    fn cube_element_loss_sum_with_slopes(
        x: FloatTensor<Self>,
        #[extension_type] targets: MaybeTensor<Self>,
        f: ElementLoss,
        scale: f64,
        slope_scale: f64,
    ) -> (FloatTensor<Self>, FloatTensor<Self>);
}

/// Units of a cube.
const UNITS: usize = 256;

impl ElementLossCube for CubeBackend {
    fn cube_element_loss_sum(
        x: FloatTensor<Self>,
        targets: MaybeTensor<Self>,
        f: ElementLoss,
        scale: f64,
    ) -> FloatTensor<Self> {
        sum(x, targets.into_option(), f, scale, None)
    }

    fn cube_element_loss_sum_with_slopes(
        x: FloatTensor<Self>,
        targets: MaybeTensor<Self>,
        f: ElementLoss,
        scale: f64,
        slope_scale: f64,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let slopes = empty(&x, x.shape(), x.dtype);
        (sum(x, targets.into_option(), f, scale, Some((&slopes, slope_scale))), slopes)
    }
}

/// The sum of losses times `scale`; slopes are written, times another number, in the same pass.
fn sum(
    x: CubeTensor,
    targets: Option<CubeTensor>,
    f: ElementLoss,
    scale: f64,
    slopes: Option<(&CubeTensor, f64)>,
) -> CubeTensor {
    const MOST_PARTS: usize = 256;
    const VECTORS: usize = 8;
    let (len, dtypes) = (x.shape().num_elements(), types(x.dtype));
    let read: Vec<&CubeTensor> = [&x].into_iter().chain(&targets).collect();
    let (at, size) = (address_type(&read), vector_size(&read, 4));
    let parts = (len / size).div_ceil(VECTORS * UNITS).clamp(1, MOST_PARTS);
    let sums = empty(&x, Shape::new([parts]), wide(x.dtype));
    let sum = empty(&x, Shape::new([1]), x.dtype);
    let client = x.client.clone();
    let (kind, parameters) = kind(f);
    let [p, q, scale] =
        [parameters[0], parameters[1], scale].map(|number| InputScalar::new(number, dtypes[1]));
    let (count, dim) = (cubes(parts), CubeDim::new_1d(UNITS as u32));
    let (x, targets) = (x.into_linear_view(), targets.map(CubeTensor::into_linear_view));
    let parts_of_sum = sums.clone().into_linear_view();
    // SAFETY: the kernels compare every position with the shapes, or with the number of vectors.
    unsafe {
        match slopes {
            None => sum_kernel::launch_unchecked(
                &client,
                count,
                dim,
                at,
                size,
                x,
                targets.into(),
                parts_of_sum,
                len / size,
                p,
                q,
                kind,
                dtypes,
            ),
            Some((slopes, slope_scale)) => sum_with_slopes_kernel::launch_unchecked(
                &client,
                count,
                dim,
                at,
                size,
                x,
                targets.into(),
                parts_of_sum,
                slopes.clone().into_linear_view(),
                p,
                q,
                InputScalar::new(slope_scale, dtypes[1]),
                kind,
                dtypes,
            ),
        }
        total_kernel::launch_unchecked(
            &client,
            cubes(1),
            CubeDim::new_1d(UNITS as u32),
            at,
            sums.into_linear_view(),
            sum.clone().into_linear_view(),
            parts,
            scale,
            dtypes,
        );
    }
    sum
}

/// The loss without its numbers, for which a kernel is compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Kind {
    Square,
    Huber,
    LogAbove,
    BinaryLogits,
    BinaryProbabilities,
    Divergence,
    LogDivergence,
}

/// The kind of a loss and its two numbers.
fn kind(f: ElementLoss) -> (Kind, [f64; 2]) {
    match f {
        ElementLoss::Square => (Kind::Square, [0.0; 2]),
        ElementLoss::Huber { delta, bias } => (Kind::Huber, [delta, bias]),
        ElementLoss::LogAbove { min } => (Kind::LogAbove, [min, 0.0]),
        ElementLoss::BinaryLogits => (Kind::BinaryLogits, [0.0; 2]),
        ElementLoss::BinaryProbabilities => (Kind::BinaryProbabilities, [0.0; 2]),
        ElementLoss::Divergence { min } => (Kind::Divergence, [min, 0.0]),
        ElementLoss::LogDivergence => (Kind::LogDivergence, [0.0; 2]),
    }
}

/// The logarithm of a probability, or [`LOWEST_LOG`].
#[cube]
fn bounded<W: Float, N: Size>(log: Vector<W, N>) -> Vector<W, N> {
    let lowest = number::<W, N>(LOWEST_LOG);
    select_many(log.less_than(&lowest), lowest, log)
}

/// Of a target in a divergence.
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
    #[comptime] kind: Kind,
) -> Vector<W, N> {
    let (p, q) = (Vector::<W, N>::new(p), Vector::<W, N>::new(q));
    let one = number::<W, N>(1.0);
    match comptime!(kind) {
        Kind::Square => x * x,
        Kind::Huber => {
            let size = x.abs();
            select_many(size.greater_than(&p), p * size - q, number::<W, N>(0.5) * x * x)
        }
        Kind::LogAbove => select_many(x.less_than(&p), p, x).ln(),
        Kind::BinaryLogits => (one - t) * x + log_1p_exp::<W, N>(-x),
        Kind::BinaryProbabilities => (t - one) * bounded::<W, N>((-x).log1p()) - t * bounded::<W, N>(x.ln()),
        Kind::Divergence => t * (log_of_target::<W, N>(t, p) - x),
        Kind::LogDivergence => t.exp() * (t - x),
    }
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn sum_kernel<T: Float, W: Float, N: Size>(
    x: LinearView<'_, Vector<T, N>>,
    targets: ComptimeOption<LinearView<'_, Vector<T, N>>>,
    mut sums: LinearViewMut<'_, W>,
    vectors: usize,
    p: InputScalar,
    q: InputScalar,
    #[comptime] kind: Kind,
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
fn sum_with_slopes_kernel<T: Float, W: Float, N: Size>(
    x: LinearView<'_, Vector<T, N>>,
    targets: ComptimeOption<LinearView<'_, Vector<T, N>>>,
    mut sums: LinearViewMut<'_, W>,
    mut slopes: LinearViewMut<'_, Vector<T, N>>,
    p: InputScalar,
    q: InputScalar,
    slope_scale: InputScalar,
    #[comptime] kind: Kind,
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

/// The sum of all units of a cube.
#[cube]
fn write_sum<W: Float, N: Size>(of_unit: Vector<W, N>, sums: &mut LinearViewMut<'_, W>) {
    let pair = Pair::<W> { a: sum_of_vector::<W, N>(of_unit), b: W::new(0.0) };
    let total = sum_over_units::<W>(pair, UNITS);
    if UNIT_POS == 0 && sums.is_in_bounds(CUBE_POS) {
        sums.write(CUBE_POS, total.a);
    }
}

/// 0 where there are no targets.
#[cube]
fn target<T: Float, W: Float, N: Size>(
    targets: &ComptimeOption<LinearView<'_, Vector<T, N>>>,
    at: usize,
) -> Vector<W, N> {
    let target: ComptimeOption<Vector<T, N>> = targets.as_ref().map(|targets| targets.read(at));
    Vector::<W, N>::cast_from(target.unwrap_or(Vector::new(T::new(0.0))))
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn total_kernel<T: Float, W: Float>(
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
enum Wanted {
    Losses,
    SlopesOfInput,
    SlopesOfTarget,
}

#[cfg(not(feature = "fusion"))]
impl Wanted {
    fn slopes(argument: Argument) -> Self {
        match argument {
            Argument::Input => Self::SlopesOfInput,
            Argument::Target => Self::SlopesOfTarget,
        }
    }
}

/// What it is multiplied by.
#[cfg(not(feature = "fusion"))]
enum ByTensor {
    Nothing,
    Number(f64),
    One { factor: CubeTensor, by: f64 },
    Each(CubeTensor),
}

#[cfg(not(feature = "fusion"))]
fn elementwise(
    x: CubeTensor,
    targets: Option<CubeTensor>,
    f: ElementLoss,
    wanted: Wanted,
    factor: ByTensor,
) -> CubeTensor {
    let (dtypes, by) = (
        types(x.dtype),
        match factor {
            ByTensor::Number(by) | ByTensor::One { by, .. } => by,
            _ => 1.0,
        },
    );
    let (one, each) = match factor {
        ByTensor::One { factor, .. } => (Some(factor), None),
        ByTensor::Each(dy) => (None, Some(dy)),
        _ => (None, None),
    };
    // Missing tensors are walked along as `x`.
    let present = (targets.is_some(), each.is_some());
    let tensors = [x.clone(), targets.unwrap_or_else(|| x.clone()), each.unwrap_or_else(|| x.clone())];
    drop(x);
    let [y] = in_memory_order(tensors, |[x, targets, dy]| {
        let targets = present.0.then_some(targets);
        let dy = present.1.then_some(dy);
        let y = match &dy {
            Some(dy) => Output::replacing(dy, 1 + usize::from(targets.is_some())),
            None => Output::replacing(&x, 0),
        };
        let len = x.meta.num_elements();
        if len > 0 {
            let read: Vec<&CubeTensor> = [&x, &y.tensor].into_iter().chain(&targets).chain(&dy).collect();
            let (at, size) = (address_type(&read), vector_size(&read, usize::MAX));
            let (count, dim) = units(&x.client, len / size);
            let client = x.client.clone();
            let (kind, parameters) = kind(f);
            let [p, q, by] =
                [parameters[0], parameters[1], by].map(|number| InputScalar::new(number, dtypes[1]));
            let of_factor = one.as_ref().map_or(dtypes[0], |factor| dtype_to_storage_type(factor.dtype));
            // SAFETY: the kernel compares every position with the shapes.
            unsafe {
                elementwise_kernel::launch_unchecked(
                    &client,
                    count,
                    dim,
                    at,
                    size,
                    x.into_linear_view(),
                    targets.map(CubeTensor::into_linear_view).into(),
                    dy.map(CubeTensor::into_linear_view).into(),
                    one.map(CubeTensor::into_buffer_arg).into(),
                    y.view(),
                    p,
                    q,
                    by,
                    kind,
                    wanted,
                    dtypes,
                    of_factor,
                );
            }
        }
        [y.tensor]
    });
    y
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
    #[comptime] kind: Kind,
) -> Vector<W, N> {
    let p = Vector::<W, N>::new(p);
    let (zero, one) = (number::<W, N>(0.0), number::<W, N>(1.0));
    match comptime!(kind) {
        Kind::Square => x + x,
        Kind::Huber => x.max(-p).min(p),
        Kind::LogAbove => select_many(x.less_than(&p), zero, one / x),
        Kind::BinaryLogits => sigmoid::<W, N>(x) - t,
        Kind::BinaryProbabilities => log_slope::<W, N>(one - t, one - x) - log_slope::<W, N>(t, x),
        Kind::Divergence => -t,
        Kind::LogDivergence => -t.exp(),
    }
}

#[cfg(not(feature = "fusion"))]
#[cube]
fn slope_of_target<W: Float, N: Size>(
    x: Vector<W, N>,
    t: Vector<W, N>,
    p: W,
    #[comptime] kind: Kind,
) -> Vector<W, N> {
    let p = Vector::<W, N>::new(p);
    let (zero, one) = (number::<W, N>(0.0), number::<W, N>(1.0));
    match comptime!(kind) {
        Kind::Divergence => {
            let inside = select_many(t.less_than(&p), zero, select_many(t.greater_than(&one), zero, one));
            log_of_target::<W, N>(t, p) - x + inside
        }
        Kind::LogDivergence => t.exp() * (t - x + one),
        // The others have no gradient of a target.
        _ => zero,
    }
}

#[cfg(not(feature = "fusion"))]
#[cube(launch_unchecked, address_type = "dynamic")]
fn elementwise_kernel<T: Float, W: Float, F: Float, N: Size>(
    x: LinearView<'_, Vector<T, N>>,
    targets: ComptimeOption<LinearView<'_, Vector<T, N>>>,
    each: ComptimeOption<LinearView<'_, Vector<T, N>>>,
    one: ComptimeOption<&[F]>,
    mut y: LinearViewMut<'_, Vector<T, N>>,
    p: InputScalar,
    q: InputScalar,
    by: InputScalar,
    #[comptime] kind: Kind,
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
fn product_kernel<T: Float, W: Float, N: Size>(
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
