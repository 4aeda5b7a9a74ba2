//! Sums over all axes but the channels, for tensors whose channels are the second axis in memory, or the last.
use super::{
    FEWEST_UNITS, Grid, Output, Pair, assert_turns, channels_last, empty, launch, sum_of_vector,
    sum_over_units, units_of_row, vector_size,
};
use crate::backend::{ChannelSums, wide};
use burn::backend::cubecl::dtype_to_storage_type;
use burn::backend::{Backend, Cube, TensorMetadata, backend_extension, tensor::FloatTensor};
use burn::tensor::{DType, Shape};
use burn_cubecl::CubeBackend;
use burn_cubecl::cubecl::{
    self,
    ir::ElemType,
    prelude::*,
    std::tensor::layout::linear::{LinearView, LinearViewMut},
};
use burn_cubecl::ops::permute;
use burn_cubecl::tensor::CubeTensor;

impl ChannelSums for Cube {
    fn sum_to_channels(x: FloatTensor<Self>) -> FloatTensor<Self> {
        Self::cube_sum_to_channels(x)
    }
}

#[backend_extension(Cube, Fusion: cfg(feature = "fusion"))]
pub trait ChannelSumsCube: Backend {
    /// See [`ChannelSums::sum_to_channels`].
    #[fusion(dtype = x, shape = Shape::new([x[1]]))]
    fn cube_sum_to_channels(x: FloatTensor<Self>) -> FloatTensor<Self>;
}

impl ChannelSumsCube for CubeBackend {
    fn cube_sum_to_channels(x: FloatTensor<Self>) -> FloatTensor<Self> {
        let dtype = x.dtype();
        let parts = sums(&ByChannels::of(x), None);
        merge(parts, dtype).a
    }
}

/// A tensor whose elements are walked as `[repeats, channels, inner]`, wherever they lie in memory.
pub(crate) struct ByChannels {
    pub tensor: CubeTensor,
    pub shape: Channels,
    /// Whether the channels are the last axis of the tensor, which is the second one of the original.
    last: bool,
}

/// `[repeats, channels, inner]`
#[derive(Clone, Copy)]
pub(crate) struct Channels {
    pub repeats: usize,
    pub channels: usize,
    pub inner: usize,
}

impl ByChannels {
    /// Along the channels where they are nearest in memory.
    pub fn of(tensor: CubeTensor) -> Self {
        let last = !tensor.is_contiguous()
            && (channels_last(&tensor) || permute(tensor.clone(), &to_last(&tensor)).is_contiguous());
        Self::as_in(tensor, last)
    }

    /// In the order of another tensor of this shape.
    pub fn like(&self, tensor: CubeTensor) -> Self {
        Self::as_in(tensor, self.last)
    }

    fn as_in(tensor: CubeTensor, last: bool) -> Self {
        let shape = tensor.shape();
        let (channels, elements) = (shape[1], shape.num_elements());
        let inner = if last { 1 } else { shape[2..].iter().product() };
        let repeats = elements / (channels * inner).max(1);
        let axes = to_last(&tensor);
        let tensor = if last { permute(tensor, &axes) } else { tensor };
        Self { tensor, shape: Channels { repeats, channels, inner }, last }
    }

    /// Where a result of this shape, dtype and order of axes is written. The tensor is the first input.
    pub fn output(&self) -> Output {
        let new = || empty(&self.tensor, self.tensor.shape(), self.tensor.dtype);
        match self.last {
            true => Output::replacing_strided(&self.tensor, 0, new),
            false => Output::replacing(&self.tensor, 0),
        }
    }

    /// The tensor with its axes as they were.
    pub fn restore(&self, tensor: CubeTensor) -> CubeTensor {
        if !self.last {
            return tensor;
        }
        let rank = tensor.meta.num_dims();
        let axes: Vec<usize> = [0, rank - 1].into_iter().chain(1..rank - 1).collect();
        permute(tensor, &axes)
    }

    /// The longest vectors whose elements are of one channel, or of neighboring ones.
    pub fn vector_size(&self) -> usize {
        if !self.tensor.is_contiguous() {
            return vector_size(&[&self.tensor], 4);
        }
        let along = if self.shape.inner > 1 { self.shape.inner } else { self.shape.channels };
        let sizes = self.tensor.client.io_optimized_vector_sizes(self.tensor.dtype.size());
        sizes.filter(|&size| size <= 4 && along.is_multiple_of(size)).max().unwrap_or(1)
    }
}

/// The axes with the channels last.
fn to_last(tensor: &CubeTensor) -> Vec<usize> {
    let rank = tensor.meta.num_dims();
    [0].into_iter().chain(2..rank).chain([1]).collect()
}

/// How repeats are divided into parts. Each unit adds up one part of a column, or each cube one part with all inner elements.
pub(crate) struct ChannelParts {
    pub count: usize,
    /// Repeats of a part.
    pub length: usize,
}

impl Channels {
    /// As few parts as keep all units of a device busy, and leave each cube a thousand elements, or each unit 4096, since every part and
    /// channel makes two numbers in f32. But no more than one unit can merge.
    pub fn parts(&self) -> ChannelParts {
        const UNITS: usize = 1 << 12;
        const CUBES: usize = 1 << 10;
        const ELEMENTS: usize = 1 << 10;
        const MERGED: usize = 1 << 14;
        let channels = self.channels.max(1);
        let most = match self.inner {
            0 | 1 => UNITS.div_ceil(channels).max(self.repeats.div_ceil(UNITS)),
            inner => CUBES.div_ceil(channels).max((self.repeats * inner).div_ceil(ELEMENTS)),
        };
        let most = most.min(MERGED);
        let length = self.repeats.div_ceil(most.clamp(1, self.repeats.max(1))).max(1);
        ChannelParts { count: self.repeats.div_ceil(length), length }
    }

    pub fn launch(&self) -> ChannelsShapeLaunch {
        ChannelsShapeLaunch::new(self.repeats, self.channels, self.inner, self.parts().length)
    }

    /// For a kernel that reads the tensors in vectors of this size, and makes two numbers per part and channel. `None` for no elements.
    pub fn grid(&self, size: usize, tensors: &[&CubeTensor]) -> Option<Grid> {
        let ChannelParts { count, length } = self.parts();
        let (grid, turns) = if self.inner > 1 {
            let of_cube = self.units();
            // For the variance, elements are read twice.
            let turns = 2 * (length * self.inner).div_ceil(size * of_cube);
            (Grid::of_rows(count * self.channels, of_cube, tensors)?, turns)
        } else {
            (Grid::of_units(count * self.channels / size, tensors)?, length)
        };
        assert_turns(&grid.client, turns);
        Some(grid)
    }

    /// The units of a cube that adds up the inner elements.
    pub fn units(&self) -> usize {
        units_of_row(self.parts().length * self.inner).max(FEWEST_UNITS)
    }
}

/// See [`Channels`].
#[derive(CubeType, CubeLaunch)]
pub(crate) struct ChannelsShape {
    pub repeats: usize,
    pub channels: usize,
    pub inner: usize,
    pub length: usize,
}

/// The tensor that [`sums`] normalizes and multiplies with a gradient.
pub(crate) struct Normalized<'a> {
    pub x: &'a ByChannels,
    pub mean: CubeTensor,
    pub variance: CubeTensor,
    pub epsilon: f64,
}

/// Parts of `sum(dy)` and `sum(dy * normalized)` by channels, `[parts, 2, channels]`. Without `normalized`, the second sums are zeros.
pub(crate) fn sums(dy: &ByChannels, normalized: Option<Normalized<'_>>) -> CubeTensor {
    let Channels { channels, inner, .. } = dy.shape;
    let shape = Shape::new([dy.shape.parts().count, 2, channels]);
    let parts = empty(&dy.tensor, shape, wide(dy.tensor.dtype));
    let read: Vec<&ByChannels> = [dy].into_iter().chain(normalized.as_ref().map(|of| of.x)).collect();
    let size = read.iter().map(|of| of.vector_size()).min().unwrap_or(1);
    let tensors: Vec<&CubeTensor> = read.into_iter().map(|of| &of.tensor).collect();
    let Some(grid) = dy.shape.grid(size, &tensors) else { return parts };
    let epsilon = normalized.as_ref().map_or(1.0, |normalized| normalized.epsilon);
    let (mut x, mut mean, mut variance, mut of_statistics) = (None, None, None, grid.dtypes[1]);
    if let Some(of) = normalized {
        of_statistics = dtype_to_storage_type(of.mean.dtype);
        x = Some(of.x.tensor.clone().into_linear_view());
        mean = Some(of.mean.into_buffer_arg());
        variance = Some(of.variance.into_buffer_arg());
    }
    let written = parts.clone();
    // SAFETY: the kernels compare every position with the shapes.
    unsafe {
        if inner > 1 {
            launch!(
                sums_of_cubes,
                grid,
                size,
                dy.tensor.clone().into_linear_view(),
                x.into(),
                mean.into(),
                variance.into(),
                written.into_linear_view(),
                dy.shape.launch(),
                grid.scalar(epsilon),
                dy.shape.units(),
                dy.shape.parts().length > 1,
                grid.dtypes,
                of_statistics,
            );
        } else {
            launch!(
                sums_of_units,
                grid,
                size,
                dy.tensor.clone().into_linear_view(),
                x.into(),
                mean.into(),
                variance.into(),
                // Vectors of channels.
                written.into_linear_view(),
                dy.shape.launch(),
                grid.scalar(epsilon),
                grid.dtypes,
                of_statistics,
            );
        }
    }
    parts
}

/// Two sums per channel.
pub(crate) struct Merged {
    pub a: CubeTensor,
    pub b: CubeTensor,
    /// Both sums, `[2, channels]`, in the type that sums are made in.
    pub wide: CubeTensor,
}

/// The sums over all parts, `[parts, 2, channels]`.
pub(crate) fn merge(parts: CubeTensor, dtype: DType) -> Merged {
    let channels = parts.shape()[2];
    let [a, b] = [(); 2].map(|()| empty(&parts, Shape::new([channels]), dtype));
    let both = empty(&parts, Shape::new([2, channels]), parts.dtype);
    if let Some(grid) = Grid::of_units(channels, &[&a, &parts]) {
        let number = parts.shape()[0];
        // SAFETY: the kernel compares every position with the shapes.
        unsafe {
            launch!(
                merge_kernel,
                grid,
                parts.into_linear_view(),
                a.clone().into_linear_view(),
                b.clone().into_linear_view(),
                both.clone().into_linear_view(),
                number,
                channels,
                grid.dtypes,
            );
        }
    }
    Merged { a, b, wide: both }
}

/// `dy` and its product with `x`, normalized.
#[cube]
fn products<T: Float, W: Float, N: Size>(
    dy: &LinearView<'_, Vector<T, N>>,
    x: &ComptimeOption<LinearView<'_, Vector<T, N>>>,
    at: usize,
    mean: Vector<W, N>,
    inverse_std: Vector<W, N>,
) -> Products<W, N> {
    let dy = Vector::<W, N>::cast_from(dy.read(at));
    let x: ComptimeOption<Vector<T, N>> = x.as_ref().map(|x| x.read(at));
    let x = Vector::<W, N>::cast_from(x.unwrap_or(Vector::new(T::new(0.0))));
    Products::<W, N> { dy, product: dy * ((x - mean) * inverse_std) }
}

#[derive(CubeType, Clone, Copy)]
struct Products<W: Float, N: Size> {
    dy: Vector<W, N>,
    product: Vector<W, N>,
}

/// The values of the channels from this one on; with `one`, the value of this channel. Zeros without values.
#[cube]
pub(crate) fn read_channels<T: Float, W: Float, N: Size>(
    values: &ComptimeOption<&[T]>,
    channel: usize,
    #[comptime] one: bool,
) -> Vector<W, N> {
    let size = N::value().comptime();
    let mut read = Vector::<W, N>::new(W::new(0.0));
    #[unroll]
    for i in 0..size {
        let mut of = channel;
        if comptime!(!one) {
            of += i;
        }
        let value: ComptimeOption<T> = values.as_ref().map(|values| values[of]);
        read.insert(i, W::cast_from(value.unwrap_or(T::new(0.0))));
    }
    read
}

/// The vectors of the inner elements of one part and channel, one after another.
#[derive(CubeType)]
pub(crate) struct VectorsOfPart {
    pub count: usize,
    /// Vectors of one repeat.
    vectors: usize,
    start: usize,
    /// From one repeat to the next.
    stride: usize,
    #[cube(comptime)]
    several: bool,
}

#[cube]
impl VectorsOfPart {
    /// `several`: whether the part has several repeats.
    pub fn new(
        shape: &ChannelsShape,
        part: usize,
        channel: usize,
        #[comptime] size: usize,
        #[comptime] several: bool,
    ) -> Self {
        let vectors = shape.inner / size;
        let first = part * shape.length;
        let count = min(shape.length, shape.repeats - first) * vectors;
        let start = (first * shape.channels + channel) * vectors;
        VectorsOfPart { count, vectors, start, stride: shape.channels * vectors, several }
    }

    /// The position of a vector in the tensor.
    pub fn position(&self, vector: usize) -> usize {
        if comptime!(self.several) {
            self.start + vector / self.vectors * self.stride + vector % self.vectors
        } else {
            self.start + vector
        }
    }
}

/// One cube for every part and channel.
#[cube(launch_unchecked, address_type = "dynamic")]
fn sums_of_cubes<T: Float, W: Float, S: Float, N: Size>(
    dy: LinearView<'_, Vector<T, N>>,
    x: ComptimeOption<LinearView<'_, Vector<T, N>>>,
    mean: ComptimeOption<&[S]>,
    variance: ComptimeOption<&[S]>,
    mut parts: LinearViewMut<'_, W>,
    shape: ChannelsShape,
    epsilon: InputScalar,
    #[comptime] units: usize,
    #[comptime] several: bool,
    #[define(T, W)] _dtypes: [ElemType; 2],
    #[define(S)] _of_statistics: ElemType,
) {
    let (part, channel) = (CUBE_POS / shape.channels, CUBE_POS % shape.channels);
    if part * shape.length >= shape.repeats {
        terminate!();
    }
    let mean = read_channels::<S, W, N>(&mean, channel, true);
    let variance = read_channels::<S, W, N>(&variance, channel, true);
    let inverse_std = Vector::new(W::new(1.0)) / (variance + Vector::new(epsilon.get::<W>())).sqrt();
    let vectors = VectorsOfPart::new(&shape, part, channel, N::value().comptime(), several);
    let mut sum = Vector::<W, N>::new(W::new(0.0));
    let mut product = Vector::<W, N>::new(W::new(0.0));
    let mut at = UNIT_POS as usize;
    while at < vectors.count {
        let products = products::<T, W, N>(&dy, &x, vectors.position(at), mean, inverse_std);
        sum += products.dy;
        product += products.product;
        at += units;
    }
    let of_unit = Pair::<W> { a: sum_of_vector::<W, N>(sum), b: sum_of_vector::<W, N>(product) };
    let total = sum_over_units::<W>(of_unit, units);
    if UNIT_POS == 0 {
        parts.write(2 * part * shape.channels + channel, total.a);
        parts.write((2 * part + 1) * shape.channels + channel, total.b);
    }
}

/// One unit for every part and vector of channels.
#[cube(launch_unchecked, address_type = "dynamic")]
fn sums_of_units<T: Float, W: Float, S: Float, N: Size>(
    dy: LinearView<'_, Vector<T, N>>,
    x: ComptimeOption<LinearView<'_, Vector<T, N>>>,
    mean: ComptimeOption<&[S]>,
    variance: ComptimeOption<&[S]>,
    mut parts: LinearViewMut<'_, Vector<W, N>>,
    shape: ChannelsShape,
    epsilon: InputScalar,
    #[define(T, W)] _dtypes: [ElemType; 2],
    #[define(S)] _of_statistics: ElemType,
) {
    let size = N::value().comptime();
    let vectors = shape.channels / size;
    let (part, vector) = (ABSOLUTE_POS / vectors, ABSOLUTE_POS % vectors);
    if part * shape.length >= shape.repeats {
        terminate!();
    }
    let mean = read_channels::<S, W, N>(&mean, vector * size, false);
    let variance = read_channels::<S, W, N>(&variance, vector * size, false);
    let inverse_std = Vector::new(W::new(1.0)) / (variance + Vector::new(epsilon.get::<W>())).sqrt();
    let mut sum = Vector::<W, N>::new(W::new(0.0));
    let mut product = Vector::<W, N>::new(W::new(0.0));
    for repeat in part * shape.length..min((part + 1) * shape.length, shape.repeats) {
        let products = products::<T, W, N>(&dy, &x, repeat * vectors + vector, mean, inverse_std);
        sum += products.dy;
        product += products.product;
    }
    parts.write(2 * part * vectors + vector, sum);
    parts.write((2 * part + 1) * vectors + vector, product);
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn merge_kernel<T: Float, W: Float>(
    parts: LinearView<'_, W>,
    mut a: LinearViewMut<'_, T>,
    mut b: LinearViewMut<'_, T>,
    mut both: LinearViewMut<'_, W>,
    number: usize,
    channels: usize,
    #[define(T, W)] _dtypes: [ElemType; 2],
) {
    let channel = ABSOLUTE_POS;
    if channel >= channels {
        terminate!();
    }
    let mut sum = W::new(0.0);
    let mut product = W::new(0.0);
    for part in 0..number {
        sum += parts.read(2 * part * channels + channel);
        product += parts.read((2 * part + 1) * channels + channel);
    }
    a.write(channel, T::cast_from(sum));
    b.write(channel, T::cast_from(product));
    both.write(channel, sum);
    both.write(channels + channel, product);
}
