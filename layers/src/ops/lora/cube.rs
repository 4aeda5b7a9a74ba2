//! Kernels for devices. One adds an adapter to a product in one pass and in place; it may also multiply each column by a factor and add a
//! bias. The other one scales the gradients of both factors.
//!
//! | | fused | not fused |
//! | --- | --- | --- |
//! | `(y + scale (x a) b) * factor + bias`, of a rank up to [`MOST_RANK_OF_CUBE`] | our kernel: Burn fuses no sum with a product | our kernel |
//! | the same up to [`MOST_RANK`], if `x a` exists already, or if there are few rows | the same kernel, after that product | the same |
//! | the same, of a higher rank | products by tiles, and Burn's sum and product | the same |
//! | `scale` times the gradients of both factors | Burn fuses it with their products | our kernel |
use super::{LoraKernels, composed_product, finished};
use crate::backend::cube::{Grid, Output, constant, launch, planned_multiprocessors, vector_size};
use crate::{backend::optional::MaybeTensor, ops::linear::LinearKernels};
use burn::backend::{Backend, Cube, TensorMetadata, backend_extension, tensor::FloatTensor};
use burn_cubecl::CubeBackend;
use burn_cubecl::cubecl::{
    self,
    ir::ElemType,
    prelude::*,
    std::tensor::layout::linear::{LinearView, LinearViewMut},
};
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;

/// For higher ranks, products by tiles read less.
const MOST_RANK: usize = 32;
/// The same for products with `a`, of which a cube has those of some rows in its registers: of higher ranks, those of one row only, so that
/// every row would read both factors again.
const MOST_RANK_OF_CUBE: usize = 16;

/// A unit holds up to so many products, one for each row of a cube and each rank. A cube of [`UNITS`] adds them up in shared memory.
const SUMS: usize = 32;
/// Units of a cube.
const UNITS: usize = 64;
/// Rows of a cube, which share what is read of the factors.
const MOST_ROWS: usize = 8;
/// With fewer cubes than this a multiprocessor has too little to do.
const CUBES: usize = 4;
/// If there are fewer rows, each has several cubes, which would all compute its product with `a`.
const FEW_ROWS: usize = 16;

impl LoraKernels for Cube {
    const FINISHES: bool = true;

    fn add_scaled_product(
        y: FloatTensor<Self>,
        u: FloatTensor<Self>,
        v: FloatTensor<Self>,
        scale: f64,
    ) -> FloatTensor<Self> {
        Self::adapt(y, u, v, scale, None, None)
    }

    fn adapt(
        y: FloatTensor<Self>,
        u: FloatTensor<Self>,
        v: FloatTensor<Self>,
        scale: f64,
        factor: Option<FloatTensor<Self>>,
        bias: Option<FloatTensor<Self>>,
    ) -> FloatTensor<Self> {
        match is_one_kernel::<Self>(&v, &y, factor.iter().chain(&bias)) {
            true => Self::cube_adapt(y, u, MaybeTensor::None, v, scale, factor.into(), bias.into()),
            false => finished::<Self>(composed_product::<Self>(y, u, v, scale), factor, bias),
        }
    }

    fn adapt_from(
        y: FloatTensor<Self>,
        x: FloatTensor<Self>,
        [a, b]: [FloatTensor<Self>; 2],
        scale: f64,
        factor: Option<FloatTensor<Self>>,
        bias: Option<FloatTensor<Self>>,
    ) -> FloatTensor<Self> {
        let [rank, columns] = b.shape().dims();
        let has_rows = y.shape().num_elements() >= FEW_ROWS * columns && rank <= MOST_RANK_OF_CUBE;
        match has_rows && is_one_kernel::<Self>(&b, &y, factor.iter().chain(&bias)) {
            true => Self::cube_adapt(y, x, Some(a).into(), b, scale, factor.into(), bias.into()),
            false => Self::adapt(y, Self::dense(x, a, None), b, scale, factor, bias),
        }
    }

    // With fusion, Burn fuses the scale with the product before it.
    #[cfg(not(feature = "fusion"))]
    fn scale_both([a, b]: [FloatTensor<Self>; 2], scale: f64) -> [FloatTensor<Self>; 2] {
        let (of_a, of_b) = (Output::replacing(&a, 0), Output::replacing(&b, 1));
        if let Some(grid) = Grid::of_units(a.meta.num_elements().max(b.meta.num_elements()), &[&a, &b]) {
            let (a, b, scale) = (a.into_linear_view(), b.into_linear_view(), grid.scalar(scale));
            // SAFETY: the kernel compares every position with the shapes.
            unsafe { launch!(scale_both_kernel, grid, a, b, of_a.view(), of_b.view(), scale, grid.dtypes) };
        }
        [of_a.tensor, of_b.tensor]
    }
}

/// Whether the kernel takes the factor `b` and these rows.
fn is_one_kernel<'a, B: Backend>(
    b: &FloatTensor<B>,
    y: &FloatTensor<B>,
    mut rows: impl Iterator<Item = &'a FloatTensor<B>>,
) -> bool {
    b.shape()[0] <= MOST_RANK && rows.all(|row| row.dtype() == y.dtype())
}

#[backend_extension(Cube, Fusion: cfg(feature = "fusion"))]
pub trait LoraCube: Backend {
    /// See [`LoraKernels::adapt_from`]. Without `a`, `x` is the product with it.
    #[fusion(dtype = y, shape = y)]
    fn cube_adapt(
        y: FloatTensor<Self>,
        x: FloatTensor<Self>,
        #[extension_type] a: MaybeTensor<Self>,
        b: FloatTensor<Self>,
        scale: f64,
        #[extension_type] factor: MaybeTensor<Self>,
        #[extension_type] bias: MaybeTensor<Self>,
    ) -> FloatTensor<Self>;
}

impl LoraCube for CubeBackend {
    fn cube_adapt(
        y: FloatTensor<Self>,
        x: FloatTensor<Self>,
        a: MaybeTensor<Self>,
        b: FloatTensor<Self>,
        scale: f64,
        factor: MaybeTensor<Self>,
        bias: MaybeTensor<Self>,
    ) -> FloatTensor<Self> {
        let ([rank, columns], len) = (b.shape().dims(), y.meta.num_elements());
        let sum = Output::alike(&y, 0);
        if len == 0 {
            return sum.tensor;
        }
        let [a, factor, bias] = [a, factor, bias].map(MaybeTensor::into_option);
        let row = |row: Option<CubeTensor>| row.map(|row| into_contiguous(row).into_buffer_arg());
        let [factor, bias] = [factor, bias].map(row);
        let strides = |factor: &CubeTensor| [factor.meta.strides()[0], factor.meta.strides()[1]];
        let ([of_input, of_rank], of_b) = (a.as_ref().map_or([0; 2], strides), strides(&b));
        let (rows, inputs) = (len / columns, a.as_ref().map_or(rank, |a| a.meta.shape()[0]));
        // One of four numbers: the kernel is compiled for each.
        let busy = CUBES * planned_multiprocessors(&y.client);
        let held = if a.is_some() { SUMS / rank.max(1) } else { MOST_ROWS };
        let most = held.min(rows / busy).clamp(1, MOST_ROWS);
        let rows_of_cube = 1 << most.ilog2();
        let holds = rows_of_cube * rank <= SUMS;
        let size = vector_size(&[&y, &sum.tensor], 4);
        let tensors: Vec<&CubeTensor> = [&y, &x, &b].into_iter().chain(&a).collect();
        let row_cubes = rows.div_ceil(rows_of_cube);
        let spread =
            if a.is_some() { 1 } else { (busy / row_cubes).clamp(1, columns.div_ceil(size * UNITS)) };
        let grid = Grid::of_cubes(row_cubes * spread, UNITS, &tensors);
        // SAFETY: the kernel compares every position with the shapes.
        unsafe {
            launch!(
                adapt_kernel,
                grid,
                size,
                y.into_linear_view(),
                sum.view(),
                x.into_linear_view(),
                a.map(CubeTensor::into_buffer_arg).into(),
                b.into_buffer_arg(),
                factor.into(),
                bias.into(),
                AdapterSizesLaunch::new(rows, spread, inputs, columns, of_input, of_rank, of_b[0], of_b[1]),
                grid.scalar(scale),
                AdapterVariant { rank, rows: rows_of_cube, holds },
                grid.dtypes,
            );
        }
        sum.tensor
    }
}

/// Sizes of matrices, and strides of factors.
#[derive(CubeType, CubeLaunch)]
struct AdapterSizes {
    rows: usize,
    /// How many cubes each row has.
    spread: usize,
    inputs: usize,
    columns: usize,
    a_of_input: usize,
    a_of_rank: usize,
    b_of_rank: usize,
    b_of_column: usize,
}

/// What a kernel is compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct AdapterVariant {
    rank: usize,
    /// Rows of a cube.
    rows: usize,
    /// Whether the products of these rows with `a` are in registers. Otherwise, they are read where they are used.
    holds: bool,
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn adapt_kernel<T: Float, W: Float, N: Size>(
    y: LinearView<'_, Vector<T, N>>,
    mut sum: LinearViewMut<'_, Vector<T, N>>,
    x: LinearView<'_, T>,
    a: ComptimeOption<&[T]>,
    b: &[T],
    factor: ComptimeOption<&[T]>,
    bias: ComptimeOption<&[T]>,
    sizes: AdapterSizes,
    scale: InputScalar,
    #[comptime] variant: AdapterVariant,
    #[define(T, W)] _dtypes: [ElemType; 2],
) {
    let AdapterVariant { rank, rows, holds } = variant;
    let first = CUBE_POS / sizes.spread * rows;
    if first >= sizes.rows {
        terminate!();
    }
    let count = comptime!(if holds { rows * rank } else { 0 });
    // Rows beyond the last one have its products.
    let mut products = Array::<W>::new(comptime!(max(count, 1)));
    let mut starts = Array::<usize>::new(rows);
    #[unroll]
    for row in 0..rows {
        starts[row] = min(first + row, sizes.rows - 1);
    }
    #[comptime]
    match a {
        ComptimeOption::Some(a) => {
            #[unroll]
            for i in 0..count {
                products[i] = W::new(0.0);
            }
            let mut input = UNIT_POS as usize;
            while input < sizes.inputs {
                let mut of_rows = Array::<W>::new(rows);
                #[unroll]
                for row in 0..rows {
                    of_rows[row] = W::cast_from(x.read(starts[row] * sizes.inputs + input));
                }
                #[unroll]
                for k in 0..rank {
                    let a = W::cast_from(a[input * sizes.a_of_input + k * sizes.a_of_rank]);
                    #[unroll]
                    for row in 0..rows {
                        let i = comptime!(row * rank + k);
                        products[i] += of_rows[row] * a;
                    }
                }
                input += UNITS;
            }
            sum_all_over_cube::<W>(&mut products, count);
        }
        ComptimeOption::None =>
        {
            #[unroll]
            for i in 0..count {
                let (row, k) = comptime!((i / rank, i % rank));
                products[i] = W::cast_from(x.read(starts[row] * sizes.inputs + k));
            }
        }
    }
    let size = N::value().comptime();
    let vectors = sizes.columns / size;
    let mut vector = CUBE_POS % sizes.spread * UNITS + UNIT_POS as usize;
    while vector < vectors {
        let mut sums = Array::<Vector<W, N>>::new(rows);
        #[unroll]
        for row in 0..rows {
            sums[row] = Vector::new(W::new(0.0));
        }
        let column = vector * size;
        #[unroll]
        for k in 0..rank {
            let mut of_b = Vector::<W, N>::new(W::new(0.0));
            #[unroll]
            for lane in 0..size {
                let at = k * sizes.b_of_rank + (column + lane) * sizes.b_of_column;
                of_b.insert(lane, W::cast_from(b[at]));
            }
            #[unroll]
            for row in 0..rows {
                let product = if comptime!(holds) {
                    products[comptime!(row * rank + k)]
                } else {
                    W::cast_from(x.read(starts[row] * sizes.inputs + k))
                };
                sums[row] += Vector::new(product) * of_b;
            }
        }
        let factors = row_vector::<T, W, N>(&factor, column, 1.0);
        let biases = row_vector::<T, W, N>(&bias, column, 0.0);
        #[unroll]
        for row in 0..rows {
            if first + row < sizes.rows {
                let at = (first + row) * vectors + vector;
                let adapted =
                    Vector::<W, N>::cast_from(y.read(at)) + Vector::new(scale.get::<W>()) * sums[row];
                sum.write(at, Vector::cast_from(adapted * factors + biases));
            }
        }
        vector += UNITS * sizes.spread;
    }
}

/// The elements of a row from a column on; without a row, the same number for each.
#[cube]
fn row_vector<T: Float, W: Float, N: Size>(
    row: &ComptimeOption<&[T]>,
    column: usize,
    #[comptime] or: f32,
) -> Vector<W, N> {
    let mut elements = Vector::<W, N>::new(constant::<W>(or));
    #[comptime]
    if let ComptimeOption::Some(row) = row {
        #[unroll]
        for lane in 0..N::value().comptime() {
            elements.insert(lane, W::cast_from(row[column + lane]));
        }
    }
    elements
}

/// The sums of `count` numbers over all units, for every unit; up to [`SUMS`] numbers.
#[cube]
fn sum_all_over_cube<W: Float>(of_unit: &mut Array<W>, #[comptime] count: usize) {
    let mut parts = Shared::<[W]>::new_slice(comptime!(UNITS * count));
    let unit = UNIT_POS as usize;
    #[unroll]
    for i in 0..count {
        parts[i * UNITS + unit] = of_unit[i];
    }
    sync_cube();
    if unit < count {
        let mut sum = W::new(0.0);
        for part in 0..UNITS {
            // Each unit reads another bank.
            sum += parts[unit * UNITS + (part + unit) % UNITS];
        }
        // Only this unit reads what is here.
        parts[unit * UNITS] = sum;
    }
    sync_cube();
    #[unroll]
    for i in 0..count {
        of_unit[i] = parts[i * UNITS];
    }
}

#[cfg(not(feature = "fusion"))]
#[cube(launch_unchecked, address_type = "dynamic")]
fn scale_both_kernel<T: Float, W: Float>(
    a: LinearView<'_, T>,
    b: LinearView<'_, T>,
    mut of_a: LinearViewMut<'_, T>,
    mut of_b: LinearViewMut<'_, T>,
    scale: InputScalar,
    #[define(T, W)] _dtypes: [ElemType; 2],
) {
    let scale = scale.get::<W>();
    if of_a.is_in_bounds(ABSOLUTE_POS) {
        of_a.write(ABSOLUTE_POS, T::cast_from(scale * W::cast_from(a.read(ABSOLUTE_POS))));
    }
    if of_b.is_in_bounds(ABSOLUTE_POS) {
        of_b.write(ABSOLUTE_POS, T::cast_from(scale * W::cast_from(b.read(ABSOLUTE_POS))));
    }
}
