//! Kernels for devices: a cube reads its row of logits once for the loss, twice with label smoothing, and once for the gradient. Numbers
//! are computed in f32 at least, and rounded once.
//!
//! These kernels are taken with fusion, too: Burn's fusion makes several kernels of the composition, one for each sum.
use super::{Classes, CrossEntropyKernels, Labels, RowLosses, composed::both_parts};
use crate::backend::cube::{
    Grid, Output, Pair, empty, launch, max_of_vector, max_over_units, row_of_unit, sum_of_vector,
    sum_over_units, unit_of_row, units_of_cube, units_of_row, vector_size,
};
use crate::backend::optional::MaybeTensor;
use crate::backend::wide;
use burn::backend::cubecl::dtype_to_storage_type;
use burn::backend::{
    Backend, Cube, TensorMetadata, backend_extension,
    tensor::{FloatTensor, IntTensor},
};
use burn::tensor::Shape;
use burn_cubecl::CubeBackend;
use burn_cubecl::cubecl::{
    self,
    ir::ElemType,
    prelude::*,
    std::tensor::layout::linear::{LinearView, LinearViewMut},
};
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;

impl CrossEntropyKernels for Cube {
    fn row_losses(x: FloatTensor<Self>, labels: &Labels<Self>) -> RowLosses<Self> {
        let Labels { targets, weights, smoothing } = labels.clone();
        let (losses, log_sum_exp) = Self::cube_row_losses(x, targets, weights.into(), smoothing);
        RowLosses { losses, log_sum_exp }
    }

    fn row_gradients(
        x: FloatTensor<Self>,
        labels: &Labels<Self>,
        log_sum_exp: FloatTensor<Self>,
        dloss: FloatTensor<Self>,
        classes: Classes,
    ) -> FloatTensor<Self> {
        let Labels { targets, weights, smoothing } = labels.clone();
        let options = Gradient { smoothing, classes };
        let log_sum_exp = both_parts::<Self>(&x, log_sum_exp);
        Self::cube_row_gradients(x, targets, weights.into(), log_sum_exp, dloss, options)
    }
}

/// Options of a gradient.
#[derive(Clone, Debug)]
pub struct Gradient {
    smoothing: Option<f32>,
    /// The classes of the columns.
    classes: Classes,
}

#[backend_extension(Cube, Fusion: cfg(feature = "fusion"))]
pub trait CrossEntropyCube: Backend {
    /// See [`CrossEntropyKernels::row_losses`].
    #[fusion(meta = |x, _targets, _weights, _smoothing| {
        let of_rows = |numbers| {
            let mut of_rows = x.clone();
            of_rows.shape = Shape::new([x.shape[0], numbers]);
            of_rows.dtype = wide(x.dtype);
            of_rows
        };
        (of_rows(1), of_rows(2))
    })]
    fn cube_row_losses(
        x: FloatTensor<Self>,
        targets: IntTensor<Self>,
        #[extension_type] weights: MaybeTensor<Self>,
        smoothing: Option<f32>,
    ) -> (FloatTensor<Self>, FloatTensor<Self>);

    /// See [`CrossEntropyKernels::row_gradients`].
    #[fusion(dtype = x, shape = x)]
    fn cube_row_gradients(
        x: FloatTensor<Self>,
        targets: IntTensor<Self>,
        #[extension_type] weights: MaybeTensor<Self>,
        log_sum_exp: FloatTensor<Self>,
        dloss: FloatTensor<Self>,
        options: Gradient,
    ) -> FloatTensor<Self>;
}

/// What a kernel is compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct LossVariant {
    units: usize,
    smoothed: bool,
    weighted: bool,
}

impl CrossEntropyCube for CubeBackend {
    fn cube_row_losses(
        x: FloatTensor<Self>,
        targets: IntTensor<Self>,
        weights: MaybeTensor<Self>,
        smoothing: Option<f32>,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let [rows, classes] = x.shape().dims();
        let [losses, log_sum_exp] =
            [1, 2].map(|numbers| empty(&x, Shape::new([rows, numbers]), wide(x.dtype)));
        let weights = weights.into_option().map(into_contiguous);
        let units = units_of_row(classes, units_of_cube(&x.client));
        if let Some(grid) = Grid::of_rows(rows, units, &[&x]).filter(|_| classes > 0) {
            let size = vector_size(&[&x], 4);
            let variant = LossVariant { units, smoothed: smoothing.is_some(), weighted: weights.is_some() };
            let label_dtypes = label_dtypes(&targets, weights.as_ref(), &x);
            let [rest, spread, no_class] = shares(smoothing, classes).map(|share| grid.scalar(share));
            // SAFETY: the kernel compares every position with the shapes, and targets with the number of classes.
            unsafe {
                launch!(
                    loss_kernel,
                    grid,
                    size,
                    x.into_linear_view(),
                    targets.into_linear_view(),
                    weights.map(CubeTensor::into_buffer_arg).into(),
                    losses.clone().into_linear_view(),
                    log_sum_exp.clone().into_linear_view(),
                    rows,
                    classes,
                    rest,
                    spread,
                    no_class,
                    variant,
                    grid.dtypes,
                    label_dtypes,
                );
            }
        }
        (losses, log_sum_exp)
    }

    fn cube_row_gradients(
        x: FloatTensor<Self>,
        targets: IntTensor<Self>,
        weights: MaybeTensor<Self>,
        log_sum_exp: FloatTensor<Self>,
        dloss: FloatTensor<Self>,
        Gradient { smoothing, classes }: Gradient,
    ) -> FloatTensor<Self> {
        let [rows, columns] = x.shape().dims();
        let dx = Output::replacing(&x, 0);
        let weights = weights.into_option().map(into_contiguous);
        let [smoothed, weighted] = [smoothing.is_some(), weights.is_some()];
        // If losses are smoothed and weighted, the weights of all classes are summed, too.
        let longest = if smoothed && weighted { columns.max(classes.of) } else { columns };
        let units = units_of_row(longest, units_of_cube(&x.client));
        let variant = LossVariant { units, smoothed, weighted };
        if let Some(grid) = Grid::of_rows(rows, variant.units, &[&x]).filter(|_| columns > 0) {
            let size = vector_size(&[&x, &dx.tensor], 4);
            let label_dtypes = label_dtypes(&targets, weights.as_ref(), &x);
            let [rest, spread, no_class] = shares(smoothing, classes.of).map(|share| grid.scalar(share));
            // SAFETY: the kernel compares every position with the shapes, and targets with the number of classes.
            unsafe {
                launch!(
                    gradient_kernel,
                    grid,
                    size,
                    x.into_linear_view(),
                    dx.view(),
                    targets.into_linear_view(),
                    weights.map(CubeTensor::into_buffer_arg).into(),
                    log_sum_exp.into_linear_view(),
                    dloss.into_linear_view(),
                    ColumnsLaunch::new(rows, columns, classes.range.start, classes.of),
                    rest,
                    spread,
                    no_class,
                    variant,
                    grid.dtypes,
                    label_dtypes,
                );
            }
        }
        dx.tensor
    }
}

/// The dtypes of the targets and of the weights.
fn label_dtypes(targets: &CubeTensor, weights: Option<&CubeTensor>, x: &CubeTensor) -> [ElemType; 2] {
    [targets.dtype, weights.unwrap_or(x).dtype].map(dtype_to_storage_type)
}

/// The share of the target, the share that every class has besides, and the share of a target that is no class: NaN, for which WGSL has
/// no constant.
fn shares(smoothing: Option<f32>, classes: usize) -> [f64; 3] {
    let smoothing = smoothing.unwrap_or(0.0);
    [1.0 - smoothing, smoothing / classes as f32, f32::NAN].map(f64::from)
}

/// The weight of a class, or 1 without weights.
#[cube]
fn weight<V: Float, W: Float>(weights: &ComptimeOption<&[V]>, class: usize) -> W {
    let weight: ComptimeOption<V> = weights.as_ref().map(|weights| weights[class]);
    W::cast_from(weight.unwrap_or(V::new(1.0)))
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn loss_kernel<T: Float, W: Float, I: Int, V: Float, N: Size>(
    x: LinearView<'_, Vector<T, N>>,
    targets: LinearView<'_, I>,
    weights: ComptimeOption<&[V]>,
    mut losses: LinearViewMut<'_, W>,
    mut log_sum_exp: LinearViewMut<'_, W>,
    rows: usize,
    classes: usize,
    rest: InputScalar,
    spread: InputScalar,
    no_class: InputScalar,
    #[comptime] variant: LossVariant,
    #[define(T, W)] _dtypes: [ElemType; 2],
    #[define(I, V)] _label_dtypes: [ElemType; 2],
) {
    let units = comptime!(variant.units);
    let (row, unit) = (row_of_unit(units), unit_of_row(units));
    if row >= rows {
        terminate!();
    }
    let size = N::value().comptime();
    let vectors = classes / size;
    let label = usize::cast_from(targets.read(row));
    let target = min(label, classes - 1);
    let rest = select(label == target, rest.get::<W>(), no_class.get::<W>());
    // Not infinite: the difference of two infinities is NaN.
    let mut largest = Vector::<W, N>::new(W::min_value());
    let mut sum = Vector::<W, N>::new(W::new(0.0));
    let mut picked = W::new(0.0);
    let mut at = unit;
    while at < vectors {
        let x = Vector::<W, N>::cast_from(x.read(row * vectors + at));
        let before = largest;
        largest = largest.max(x);
        sum = sum * (before - largest).exp() + (x - largest).exp();
        if at == target / size {
            #[unroll]
            for lane in 0..size {
                picked = select(target % size == lane, x.extract(lane), picked);
            }
        }
        at += units;
    }
    let largest_of_all = max_over_units::<W>(max_of_vector::<W, N>(largest), units);
    let sum = sum_of_vector::<W, N>(sum * (largest - Vector::new(largest_of_all)).exp());
    let total = sum_over_units::<W>(Pair::<W> { a: sum, b: picked }, units);
    let log = total.a.ln();
    let mut loss = rest * weight::<V, W>(&weights, target) * (log - (total.b - largest_of_all));
    if comptime!(variant.smoothed) {
        let mut sum = W::new(0.0);
        let mut at = unit;
        while at < vectors {
            let x = Vector::<W, N>::cast_from(x.read(row * vectors + at));
            #[unroll]
            for lane in 0..size {
                let log_probability = x.extract(lane) - largest_of_all - log;
                sum += weight::<V, W>(&weights, at * size + lane) * log_probability;
            }
            at += units;
        }
        loss -= spread.get::<W>() * sum_over_units::<W>(Pair::<W> { a: sum, b: W::new(0.0) }, units).a;
    }
    if unit == 0 {
        losses.write(row, loss);
        log_sum_exp.write(2 * row, largest_of_all);
        log_sum_exp.write(2 * row + 1, log);
    }
}

/// Rows of logits, and the classes that their columns belong to.
#[derive(CubeType, CubeLaunch)]
struct Columns {
    rows: usize,
    columns: usize,
    first_class: usize,
    classes: usize,
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn gradient_kernel<T: Float, W: Float, I: Int, V: Float, N: Size>(
    x: LinearView<'_, Vector<T, N>>,
    mut dx: LinearViewMut<'_, Vector<T, N>>,
    targets: LinearView<'_, I>,
    weights: ComptimeOption<&[V]>,
    log_sum_exp: LinearView<'_, W>,
    dloss: LinearView<'_, W>,
    shape: Columns,
    rest: InputScalar,
    spread: InputScalar,
    no_class: InputScalar,
    #[comptime] variant: LossVariant,
    #[define(T, W)] _dtypes: [ElemType; 2],
    #[define(I, V)] _label_dtypes: [ElemType; 2],
) {
    let units = comptime!(variant.units);
    let (row, unit) = (row_of_unit(units), unit_of_row(units));
    if row >= shape.rows {
        terminate!();
    }
    let size = N::value().comptime();
    let vectors = shape.columns / size;
    let label = usize::cast_from(targets.read(row));
    let target = min(label, shape.classes - 1);
    let (largest, log) = (log_sum_exp.read(2 * row), log_sum_exp.read(2 * row + 1));
    let dloss = dloss.read(row);
    let rest = select(label == target, rest.get::<W>(), no_class.get::<W>());
    let spread = spread.get::<W>();
    // `q w` of the target beyond that of every class, and `sum(q w)`.
    let of_target = rest * weight::<V, W>(&weights, target);
    let mut total = of_target;
    if comptime!(variant.smoothed) {
        let mut all = W::cast_from(shape.classes);
        if comptime!(variant.weighted) {
            let mut sum = W::new(0.0);
            let mut class = unit;
            while class < shape.classes {
                sum += weight::<V, W>(&weights, class);
                class += units;
            }
            all = sum_over_units::<W>(Pair::<W> { a: sum, b: W::new(0.0) }, units).a;
        }
        total += spread * all;
    }
    let nothing = dloss == W::new(0.0);
    let mut at = unit;
    while at < vectors {
        let x = Vector::<W, N>::cast_from(x.read(row * vectors + at));
        let probability = (x - Vector::new(largest) - Vector::new(log)).exp();
        let mut gradient = Vector::<W, N>::new(W::new(0.0));
        #[unroll]
        for lane in 0..size {
            let class = shape.first_class + at * size + lane;
            let mut share = select(class == target, of_target, W::new(0.0));
            if comptime!(variant.smoothed) {
                share += spread * weight::<V, W>(&weights, class);
            }
            gradient.insert(lane, dloss * (probability.extract(lane) * total - share));
        }
        // Even where logits are not finite.
        if nothing {
            gradient = Vector::new(W::new(0.0));
        }
        dx.write(row * vectors + at, Vector::cast_from(gradient));
        at += units;
    }
}
