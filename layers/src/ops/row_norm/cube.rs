//! Kernels for devices: one cube for every row, which reads it three times, from memory once.
//!
//! Tensors of any strides are read where they lie. A row of several channels that are the nearest in memory, which is what
//! convolutions return, is walked along them, and so is its result.
//!
//! Of a composition Burn's fusion makes several kernels, one for each sum: ours are taken there, too.
use super::{NormGrads, RowNorm, RowNormKernels};
use crate::backend::cube::{
    Output, Pair, address_type, assert_turns, channels_last, constant, empty, empty_in_order, grid_of_rows,
    row_of_unit, sum_of_vector, sum_over_units, types, unit_of_row, units, units_of_row, vector_size,
};
use crate::backend::optional::MaybeTensor;
use crate::backend::{ChannelSums, wide};
use burn::backend::{
    Backend, Cube, TensorMetadata, backend_extension, ops::FloatTensorOps, tensor::FloatTensor,
};
use burn::tensor::Shape;
use burn_cubecl::CubeBackend;
use burn_cubecl::cubecl::{
    self,
    ir::ElemType,
    prelude::*,
    std::tensor::layout::linear::{LinearView, LinearViewMut},
    zspace::metadata::Metadata,
};
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;

impl RowNormKernels for Cube {
    fn row_norm(
        x: FloatTensor<Self>,
        gamma: Option<FloatTensor<Self>>,
        beta: Option<FloatTensor<Self>>,
        norm: &RowNorm,
    ) -> FloatTensor<Self> {
        Self::cube_row_norm(x, gamma.into(), beta.into(), *norm)
    }

    fn row_norm_backward(
        x: FloatTensor<Self>,
        gamma: Option<FloatTensor<Self>>,
        norm: &RowNorm,
        dy: FloatTensor<Self>,
        wanted: [bool; 3],
    ) -> NormGrads<Self> {
        let dtype = x.dtype();
        let [gamma_grad, beta_grad] = match wanted {
            [_, true, _] => {
                let parts = Self::cube_row_norm_parameters(x.clone(), dy.clone(), *norm);
                let sums =
                    Self::float_reshape(Self::float_sum_dim(parts, 0), Shape::new([2, norm.parameters()]));
                [0, 1].map(|row| {
                    let sum = Self::float_slice(
                        sums.clone(),
                        &[(row..row + 1).into(), (0..norm.parameters()).into()],
                    );
                    let sum = Self::float_reshape(sum, Shape::new([norm.parameters()]));
                    wanted[1 + row].then(|| Self::float_cast(sum, dtype.into()))
                })
            }
            [_, false, true] => {
                let dy = Self::float_reshape(dy.clone(), super::channels_of(&x.shape(), norm));
                [None, Some(Self::sum_to_channels(dy))]
            }
            [_, false, false] => [None, None],
        };
        let x_grad = wanted[0].then(|| Self::cube_row_norm_x_backward(dy, x, gamma.into(), *norm));
        NormGrads { x: x_grad, gamma: gamma_grad, beta: beta_grad }
    }
}

#[backend_extension(Cube, Fusion: cfg(feature = "fusion"))]
pub trait RowNormCube: Backend {
    /// See [`RowNormKernels::row_norm`].
    #[fusion(dtype = x, shape = x)]
    fn cube_row_norm(
        x: FloatTensor<Self>,
        #[extension_type] gamma: MaybeTensor<Self>,
        #[extension_type] beta: MaybeTensor<Self>,
        norm: RowNorm,
    ) -> FloatTensor<Self>;

    /// The gradient of `x`.
    #[fusion(dtype = dy, shape = dy)]
    fn cube_row_norm_x_backward(
        dy: FloatTensor<Self>,
        x: FloatTensor<Self>,
        #[extension_type] gamma: MaybeTensor<Self>,
        norm: RowNorm,
    ) -> FloatTensor<Self>;

    /// Parts of the gradients of gamma and beta, `[parts, 2, parameters]`, to be summed over the first axis.
    #[fusion(dtype = wide(x), shape = parts_shape(x, norm))]
    fn cube_row_norm_parameters(
        x: FloatTensor<Self>,
        dy: FloatTensor<Self>,
        norm: RowNorm,
    ) -> FloatTensor<Self>;
}

impl RowNormCube for CubeBackend {
    fn cube_row_norm(
        x: FloatTensor<Self>,
        gamma: MaybeTensor<Self>,
        beta: MaybeTensor<Self>,
        norm: RowNorm,
    ) -> FloatTensor<Self> {
        let walk = Walk::of(&x, &norm);
        let y = walk.output(&x);
        let [gamma, beta] = [gamma, beta].map(|tensor| parameters(tensor.into_option(), &x));
        let (x, of_y) = (walk.view(x, &norm), walk.view_output(&y, &norm));
        if let Some(rows) = Rows::of(&[&x, &of_y.tensor], &norm) {
            let (client, at, dtypes) = (x.client.clone(), address_type(&[&x, &y.tensor]), types(x.dtype));
            let (count, dim) = rows.grid(&client);
            // SAFETY: the kernel compares every position with the shapes.
            unsafe {
                forward_kernel::launch_unchecked(
                    &client,
                    count,
                    dim,
                    at,
                    rows.size,
                    x.into_linear_view(),
                    of_y.view(),
                    gamma.map(CubeTensor::into_buffer_arg).into(),
                    beta.map(CubeTensor::into_buffer_arg).into(),
                    rows.shape(&norm),
                    InputScalar::new(norm.epsilon, dtypes[1]),
                    norm.centered,
                    walk,
                    rows.units,
                    dtypes,
                );
            }
        }
        y.tensor
    }

    fn cube_row_norm_x_backward(
        dy: FloatTensor<Self>,
        x: FloatTensor<Self>,
        gamma: MaybeTensor<Self>,
        norm: RowNorm,
    ) -> FloatTensor<Self> {
        let walk = Walk::of(&x, &norm);
        let dx = walk.output(&dy);
        let gamma = parameters(gamma.into_option(), &x);
        let [x, dy] = [x, dy].map(|tensor| walk.view(tensor, &norm));
        let of_dx = walk.view_output(&dx, &norm);
        if let Some(rows) = Rows::of(&[&x, &dy, &of_dx.tensor], &norm) {
            let at = address_type(&[&x, &dy, &dx.tensor]);
            let (client, dtypes) = (x.client.clone(), types(x.dtype));
            let (count, dim) = rows.grid(&client);
            // SAFETY: the kernel compares every position with the shapes.
            unsafe {
                x_backward_kernel::launch_unchecked(
                    &client,
                    count,
                    dim,
                    at,
                    rows.size,
                    dy.into_linear_view(),
                    x.into_linear_view(),
                    of_dx.view(),
                    gamma.map(CubeTensor::into_buffer_arg).into(),
                    rows.shape(&norm),
                    InputScalar::new(norm.epsilon, dtypes[1]),
                    norm.centered,
                    walk,
                    rows.units,
                    dtypes,
                );
            }
        }
        dx.tensor
    }

    fn cube_row_norm_parameters(
        x: FloatTensor<Self>,
        dy: FloatTensor<Self>,
        norm: RowNorm,
    ) -> FloatTensor<Self> {
        let parts = empty(&x, parts_shape(&x.shape(), &norm), wide(x.dtype));
        let by = Parts::of(&x.shape(), &norm);
        let walk = Walk::of(&x, &norm);
        let [x, dy] = [x, dy].map(|tensor| walk.view(tensor, &norm));
        let Some(rows) = Rows::of(&[&x, &dy], &norm) else { return parts };
        let statistics = empty(&x, Shape::new([rows.count, 2]), wide(x.dtype));
        let (client, at, dtypes) = (x.client.clone(), address_type(&[&x, &dy, &statistics]), types(x.dtype));
        let (count_of_rows, dim) = rows.grid(&client);
        // SAFETY: the kernel compares every position with the shapes.
        unsafe {
            statistics_kernel::launch_unchecked(
                &client,
                count_of_rows,
                dim,
                at,
                rows.size,
                x.clone().into_linear_view(),
                statistics.clone().into_linear_view(),
                rows.shape(&norm),
                InputScalar::new(norm.epsilon, dtypes[1]),
                norm.centered,
                rows.units,
                dtypes,
            );
        }
        let size = walk.parameters_of_unit(rows.size, &norm);
        let (grid, dim) = units(&client, by.count() * norm.parameters() / size);
        // SAFETY: the kernel compares every position with the shapes.
        unsafe {
            parameters_kernel::launch_unchecked(
                &client,
                grid,
                dim,
                at,
                size,
                x.into_linear_view(),
                dy.into_linear_view(),
                statistics.into_linear_view(),
                parts.clone().into_linear_view(),
                rows.shape(&norm),
                norm.parameters(),
                by.launch(),
                walk,
                dtypes,
            );
        }
        parts
    }
}

/// The parameters in a row of memory.
fn parameters(tensor: Option<CubeTensor>, like: &CubeTensor) -> Option<CubeTensor> {
    let tensor = into_contiguous(tensor?);
    Some(if tensor.dtype == like.dtype { tensor } else { burn_cubecl::kernel::cast(tensor, like.dtype) })
}

/// In which order the elements of a row are walked: `[channels, inner]`, or `[inner, channels]`.
#[derive(Clone, Copy, Debug, Hash, PartialEq, Eq)]
enum Walk {
    /// Along the channels, where each is one element.
    Row,
    /// Along the elements of one channel, then those of the next.
    Inner,
    /// Along the channels, which are the nearest, then to those of the next element.
    Channels,
}

impl Walk {
    fn of(x: &CubeTensor, norm: &RowNorm) -> Self {
        if norm.inner == 1 {
            return Self::Row;
        }
        // The second axis is that of the channels of all groups.
        let shape = x.meta.shape();
        let by_channels = shape.num_dims() > 2 && shape[1] == norm.parameters() && channels_last(x);
        if norm.channels > 1 && by_channels { Self::Channels } else { Self::Inner }
    }

    /// A tensor whose elements are in the order of the walk: with the axes `[batch, groups, inner.., channels]`.
    fn view(self, mut tensor: CubeTensor, norm: &RowNorm) -> CubeTensor {
        if self != Self::Channels {
            return tensor;
        }
        let (shape, strides) = (tensor.meta.shape(), tensor.meta.strides());
        let axes =
            |of: &[usize], groups: usize, channels: usize| [&[of[0], groups], &of[2..], &[channels]].concat();
        let by_groups = axes(shape, norm.groups, norm.channels);
        let strides = axes(strides, norm.channels * strides[1], strides[1]);
        *tensor.meta = Metadata::new(by_groups, strides);
        tensor
    }

    /// How many parameters, at most `most`, a unit of [`parameters_kernel`] takes, from vectors of as many elements: such as lie side by
    /// side in the walk and belong to one group. (Of several channels that are the nearest a row may have vectors that go on from the
    /// last channel to the first of the next element: not here.)
    fn parameters_of_unit(self, most: usize, norm: &RowNorm) -> usize {
        match self {
            Self::Inner => 1,
            Self::Row | Self::Channels => most.min(1 << norm.channels.trailing_zeros()),
        }
    }

    /// Where the result is written that has the shape and the dtype of `x`, the first input.
    fn output(self, x: &CubeTensor) -> Output {
        match self {
            Self::Channels => Output::replacing_strided(x, 0, || empty_in_order(x, x.shape(), x.dtype, true)),
            _ => Output::replacing(x, 0),
        }
    }

    /// See [`view`](Self::view).
    fn view_output(self, output: &Output, norm: &RowNorm) -> Output {
        output.as_view(|tensor| self.view(tensor, norm))
    }
}

/// How rows are divided among units.
struct Rows {
    count: usize,
    /// Elements of a vector.
    size: usize,
    /// Units of a row.
    units: usize,
}

impl Rows {
    /// `None` if there are no elements.
    fn of(tensors: &[&CubeTensor], norm: &RowNorm) -> Option<Self> {
        let row = norm.row();
        let elements = tensors[0].shape().num_elements();
        if elements == 0 {
            return None;
        }
        // A vector is of one row.
        let fits = |size: &usize| row.is_multiple_of(*size);
        let size =
            (0..3).rev().map(|log| 1 << log).filter(fits).find(|&size| size <= longest(tensors)).unwrap_or(1);
        let units = units_of_row(row);
        // A row is read for its mean, its variance, the sums of its gradient, and the result.
        assert_turns(&tensors[0].client, 4 * row.div_ceil(size * units));
        Some(Self { count: elements / row, size, units })
    }

    fn grid(&self, client: &cubecl::client::Client) -> (CubeCount, CubeDim) {
        grid_of_rows(client, self.count, self.units)
    }

    fn shape(&self, norm: &RowNorm) -> RowShapeLaunch {
        RowShapeLaunch::new(self.count, norm.row(), norm.groups, norm.channels, norm.inner)
    }
}

/// The longest vectors of tensors: of contiguous ones they may go on from one row of an axis to the next.
fn longest(tensors: &[&CubeTensor]) -> usize {
    let longest = |tensor: &&CubeTensor| match tensor.is_contiguous() {
        true => {
            let shape = Shape::new([tensor.shape().num_elements()]);
            vector_size(&[&burn_cubecl::ops::reshape((*tensor).clone(), shape)], 4)
        }
        false => vector_size(&[tensor], 4),
    };
    tensors.iter().map(longest).min().unwrap_or(1)
}

/// How the sums over all repeats and inner elements are divided.
struct Parts {
    /// Repeats of a part.
    length: usize,
    parts_of_repeats: usize,
    /// Inner elements of a part.
    stretch: usize,
    stretches: usize,
}

impl Parts {
    /// So many that there is work for all units of a device, and none adds up many more than 1024 elements.
    fn of(x: &Shape, norm: &RowNorm) -> Self {
        const UNITS: usize = 1 << 14;
        const ELEMENTS: usize = 1 << 10;
        let repeats = x.num_elements() / (norm.parameters() * norm.inner).max(1);
        let most = UNITS.div_ceil(norm.parameters().max(1)).max(repeats.div_ceil(ELEMENTS));
        let length = repeats.div_ceil(most.min(repeats).max(1)).max(1);
        let stretch = norm.inner.clamp(1, ELEMENTS.div_ceil(length));
        Self {
            length,
            parts_of_repeats: repeats.div_ceil(length),
            stretch,
            stretches: norm.inner.div_ceil(stretch),
        }
    }

    fn count(&self) -> usize {
        self.parts_of_repeats * self.stretches
    }

    fn launch(&self) -> PartsShapeLaunch {
        PartsShapeLaunch::new(self.length, self.stretch, self.stretches)
    }
}

fn parts_shape(x: &Shape, norm: &RowNorm) -> Shape {
    Shape::new([Parts::of(x, norm).count(), 2, norm.parameters()])
}

/// Rows, and which elements share a parameter: see [`RowNorm`].
#[derive(CubeType, CubeLaunch)]
struct RowShape {
    rows: usize,
    row: usize,
    groups: usize,
    channels: usize,
    inner: usize,
}

/// See [`Parts`].
#[derive(CubeType, CubeLaunch)]
struct PartsShape {
    length: usize,
    stretch: usize,
    stretches: usize,
}

/// Of one row.
#[derive(CubeType, Clone, Copy)]
struct Statistics<W: Float> {
    mean: W,
    inverse_std: W,
}

/// The statistics of the row of this unit.
#[cube]
fn statistics<T: Float, W: Float, N: Size>(
    x: &LinearView<'_, Vector<T, N>>,
    row: usize,
    epsilon: W,
    #[comptime] centered: bool,
    #[comptime] units: usize,
) -> Statistics<W> {
    let size = N::value().comptime();
    let vectors = row / size;
    let (start, unit) = (row_of_unit(units) * vectors, unit_of_row(units));
    let zero = W::new(0.0);
    let mut mean = zero;
    if comptime!(centered) {
        let mut sum = Vector::<W, N>::new(zero);
        let mut at = unit;
        while at < vectors {
            sum += Vector::cast_from(x.read(start + at));
            at += units;
        }
        let of_unit = Pair::<W> { a: sum_of_vector::<W, N>(sum), b: zero };
        mean = sum_over_units::<W>(of_unit, units).a / W::cast_from(row);
    }
    let mut squares = Vector::<W, N>::new(zero);
    let mut at = unit;
    while at < vectors {
        let x = Vector::<W, N>::cast_from(x.read(start + at)) - Vector::new(mean);
        squares += x * x;
        at += units;
    }
    let of_unit = Pair::<W> { a: sum_of_vector::<W, N>(squares), b: zero };
    let variance = sum_over_units::<W>(of_unit, units).a / W::cast_from(row);
    Statistics::<W> { mean, inverse_std: W::new(1.0) / (variance + epsilon).sqrt() }
}

/// The parameters of the vector that begins at an element of the row of this unit, or what changes nothing.
#[cube]
fn read_parameters<T: Float, W: Float, N: Size>(
    parameters: &ComptimeOption<&[T]>,
    element: usize,
    shape: &RowShape,
    #[comptime] walk: Walk,
    #[comptime] units: usize,
    #[comptime] missing: f32,
) -> Vector<W, N> {
    let size = N::value().comptime();
    let group = row_of_unit(units) % shape.groups * shape.channels;
    let mut read = Vector::<W, N>::new(W::new(0.0));
    #[unroll]
    for i in 0..size {
        let mut channel = element + i;
        if comptime!(walk == Walk::Inner) {
            channel /= shape.inner;
        }
        if comptime!(walk == Walk::Channels) {
            channel %= shape.channels;
        }
        let parameter: ComptimeOption<T> = parameters.as_ref().map(|parameters| parameters[group + channel]);
        read.insert(i, W::cast_from(parameter.unwrap_or(constant::<T>(missing))));
    }
    read
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn forward_kernel<T: Float, W: Float, N: Size>(
    x: LinearView<'_, Vector<T, N>>,
    mut y: LinearViewMut<'_, Vector<T, N>>,
    gamma: ComptimeOption<&[T]>,
    beta: ComptimeOption<&[T]>,
    shape: RowShape,
    epsilon: InputScalar,
    #[comptime] centered: bool,
    #[comptime] walk: Walk,
    #[comptime] units: usize,
    #[define(T, W)] _dtypes: [ElemType; 2],
) {
    let (row, unit) = (row_of_unit(units), unit_of_row(units));
    if row >= shape.rows {
        terminate!();
    }
    let statistics = statistics::<T, W, N>(&x, shape.row, epsilon.get::<W>(), centered, units);
    let size = N::value().comptime();
    let vectors = shape.row / size;
    let start = row * vectors;
    let mut at = unit;
    while at < vectors {
        let x = Vector::<W, N>::cast_from(x.read(start + at));
        let mut normalized = (x - Vector::new(statistics.mean)) * Vector::new(statistics.inverse_std);
        normalized *= read_parameters::<T, W, N>(&gamma, at * size, &shape, walk, units, 1.0);
        normalized += read_parameters::<T, W, N>(&beta, at * size, &shape, walk, units, 0.0);
        y.write(start + at, Vector::cast_from(normalized));
        at += units;
    }
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn x_backward_kernel<T: Float, W: Float, N: Size>(
    dy: LinearView<'_, Vector<T, N>>,
    x: LinearView<'_, Vector<T, N>>,
    mut dx: LinearViewMut<'_, Vector<T, N>>,
    gamma: ComptimeOption<&[T]>,
    shape: RowShape,
    epsilon: InputScalar,
    #[comptime] centered: bool,
    #[comptime] walk: Walk,
    #[comptime] units: usize,
    #[define(T, W)] _dtypes: [ElemType; 2],
) {
    let (row, unit) = (row_of_unit(units), unit_of_row(units));
    if row >= shape.rows {
        terminate!();
    }
    let statistics = statistics::<T, W, N>(&x, shape.row, epsilon.get::<W>(), centered, units);
    let size = N::value().comptime();
    let vectors = shape.row / size;
    let start = row * vectors;
    let (mean, inverse_std) =
        (Vector::<W, N>::new(statistics.mean), Vector::<W, N>::new(statistics.inverse_std));
    let mut sum = Vector::<W, N>::new(W::new(0.0));
    let mut products = Vector::<W, N>::new(W::new(0.0));
    let mut at = unit;
    while at < vectors {
        let mut g = Vector::<W, N>::cast_from(dy.read(start + at));
        g *= read_parameters::<T, W, N>(&gamma, at * size, &shape, walk, units, 1.0);
        sum += g;
        products += g * ((Vector::cast_from(x.read(start + at)) - mean) * inverse_std);
        at += units;
    }
    let of_unit = Pair::<W> { a: sum_of_vector::<W, N>(sum), b: sum_of_vector::<W, N>(products) };
    let total = sum_over_units::<W>(of_unit, units);
    let length = W::cast_from(shape.row);
    let mut mean_g = W::new(0.0);
    if comptime!(centered) {
        mean_g = total.a / length;
    }
    let mean_product = total.b / length;
    let mut at = unit;
    while at < vectors {
        let mut g = Vector::<W, N>::cast_from(dy.read(start + at));
        g *= read_parameters::<T, W, N>(&gamma, at * size, &shape, walk, units, 1.0);
        let normalized = (Vector::cast_from(x.read(start + at)) - mean) * inverse_std;
        let gradient = (g - Vector::new(mean_g) - normalized * Vector::new(mean_product)) * inverse_std;
        dx.write(start + at, Vector::cast_from(gradient));
        at += units;
    }
}

/// Mean and inverse standard deviation of every row.
#[cube(launch_unchecked, address_type = "dynamic")]
fn statistics_kernel<T: Float, W: Float, N: Size>(
    x: LinearView<'_, Vector<T, N>>,
    mut of_rows: LinearViewMut<'_, W>,
    shape: RowShape,
    epsilon: InputScalar,
    #[comptime] centered: bool,
    #[comptime] units: usize,
    #[define(T, W)] _dtypes: [ElemType; 2],
) {
    let (row, unit) = (row_of_unit(units), unit_of_row(units));
    if row >= shape.rows {
        terminate!();
    }
    let statistics = statistics::<T, W, N>(&x, shape.row, epsilon.get::<W>(), centered, units);
    if unit == 0 {
        of_rows.write(2 * row, statistics.mean);
        of_rows.write(2 * row + 1, statistics.inverse_std);
    }
}

/// One unit for every vector of parameters and part: sums over the repeats of the part, and over its stretch of `inner`.
#[cube(launch_unchecked, address_type = "dynamic")]
fn parameters_kernel<T: Float, W: Float, N: Size>(
    x: LinearView<'_, Vector<T, N>>,
    dy: LinearView<'_, Vector<T, N>>,
    of_rows: LinearView<'_, W>,
    mut parts: LinearViewMut<'_, Vector<W, N>>,
    shape: RowShape,
    parameters: usize,
    by: PartsShape,
    #[comptime] walk: Walk,
    #[define(T, W)] _dtypes: [ElemType; 2],
) {
    let size = N::value().comptime();
    let vectors = parameters / size;
    let part = ABSOLUTE_POS / vectors;
    let vector = ABSOLUTE_POS % vectors;
    let repeats = shape.rows / shape.groups;
    let first = part / by.stretches * by.length;
    if first >= repeats {
        terminate!();
    }
    let zero = Vector::<W, N>::new(W::new(0.0));
    let (mut gamma, mut beta) = (zero, zero);
    let group = vector * size / shape.channels;
    let begin = part % by.stretches * by.stretch;
    let end = min(begin + by.stretch, shape.inner);
    for repeat in first..min(first + by.length, repeats) {
        let row = repeat * shape.groups + group;
        let mean = Vector::<W, N>::new(of_rows.read(2 * row));
        let inverse_std = Vector::<W, N>::new(of_rows.read(2 * row + 1));
        // Of one row in sums of their own, so that a part of many elements is as exact as one of few.
        let (mut gamma_of_row, mut beta_of_row) = (zero, zero);
        let mut at = (repeat * vectors + vector) * shape.inner;
        let mut step = 1usize.runtime();
        if comptime!(walk == Walk::Channels) {
            step = shape.channels / size;
            at = row * shape.inner * step + vector % step;
        }
        at += begin * step;
        for _ in begin..end {
            let dy = Vector::<W, N>::cast_from(dy.read(at));
            beta_of_row += dy;
            gamma_of_row += dy * ((Vector::cast_from(x.read(at)) - mean) * inverse_std);
            at += step;
        }
        gamma += gamma_of_row;
        beta += beta_of_row;
    }
    parts.write(2 * part * vectors + vector, gamma);
    parts.write((2 * part + 1) * vectors + vector, beta);
}
