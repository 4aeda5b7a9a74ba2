//! Sums over all axes but the channels, for tensors whose channels are the second axis in memory, or the last.
use super::columns::{
    ColumnsShapeLaunch, ColumnsVariant, RowsShapeLaunch, Spread, Statistics, merge_moments, merge_sums,
    moments_kernel, sums_kernel,
};
use super::division::Columns;
use super::{Grid, Output, channels_last, empty, launch, planned_multiprocessors, vector_size};
use crate::backend::{ChannelSums, wide};
use burn::backend::cubecl::dtype_to_storage_type;
use burn::backend::{Backend, Cube, TensorMetadata, backend_extension, tensor::FloatTensor};
use burn::tensor::{DType, Shape};
use burn_cubecl::CubeBackend;
use burn_cubecl::cubecl::{self, prelude::*};
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
        sums(&ByChannels::of(x), None, None, dtype).a
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

impl Channels {
    /// In vectors of this size: columns, terms of each, and terms that lie side by side.
    fn columns(&self, size: usize) -> (usize, usize, usize) {
        let plane = self.plane(size);
        let columns = if self.inner == 1 { self.channels / size } else { self.channels };
        (columns, self.repeats * plane, plane)
    }

    /// Vectors of one channel that lie side by side.
    fn plane(&self, size: usize) -> usize {
        if self.inner == 1 { 1 } else { self.inner / size }
    }

    pub fn launch(&self) -> ChannelsShapeLaunch {
        ChannelsShapeLaunch::new(self.repeats, self.channels, self.inner)
    }
}

/// See [`Channels`].
#[derive(CubeType, CubeLaunch)]
pub(crate) struct ChannelsShape {
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

    /// A tensor whose elements are in this order already.
    pub fn in_order(tensor: CubeTensor, shape: Channels) -> Self {
        Self { tensor, shape, last: false }
    }

    /// With the channels last.
    pub fn along_channels(tensor: CubeTensor) -> Self {
        Self::as_in(tensor, true)
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

/// A two-stage reduction of tensors in the same order.
struct Reduction {
    grid: Grid,
    /// Elements of a vector.
    size: usize,
    columns: Columns,
    shape: Channels,
    variant: ColumnsVariant,
}

impl Reduction {
    /// In vectors of up to `most` elements. `None` without elements.
    fn of(read: &[&ByChannels], most: usize) -> Option<Self> {
        let shape = read[0].shape;
        let size = read.iter().map(|of| of.vector_size()).min().unwrap_or(1).min(most);
        let tensors: Vec<&CubeTensor> = read.iter().map(|of| &of.tensor).collect();
        if tensors[0].meta.num_elements() == 0 {
            return None;
        }
        let (count, terms, _) = shape.columns(size);
        let near = shape.inner == 1;
        let columns = Columns::of(count, terms, near, planned_multiprocessors(&tensors[0].client));
        let Columns { cubes, .. } = columns;
        let variant = ColumnsVariant { cubes, near, several: !near && shape.repeats > 1 };
        let grid = Grid::of_cubes(columns.count(count), cubes.across * cubes.along, &tensors);
        Some(Self { grid, size, columns, shape, variant })
    }

    fn shape(&self) -> ColumnsShapeLaunch {
        let (columns, terms, plane) = self.shape.columns(self.size);
        ColumnsShapeLaunch::new(columns, terms, self.columns.length, plane)
    }

    /// Elements of a channel in a part.
    fn length(&self) -> usize {
        self.columns.length * if self.variant.near { 1 } else { self.size }
    }

    /// Two numbers for each part and channel, not written yet.
    fn parts(&self, like: &CubeTensor) -> CubeTensor {
        empty(like, Shape::new([self.columns.parts, 2, self.shape.channels]), wide(like.dtype))
    }
}

/// The second stage of a [`Reduction`].
struct Merge {
    grid: Grid,
    shape: ColumnsShapeLaunch,
    variant: ColumnsVariant,
}

impl Merge {
    /// Of `[parts, 2, channels]`. The first tensor has the dtype of elements.
    fn of(parts: &CubeTensor, tensors: &[&CubeTensor]) -> Option<Self> {
        let [number, _, channels] = parts.shape().dims();
        if channels == 0 {
            return None;
        }
        let columns = Columns::merging(channels, number);
        let Columns { cubes, length, .. } = columns;
        Some(Self {
            grid: Grid::of_cubes(columns.count(channels), cubes.across * cubes.along, tensors),
            shape: ColumnsShapeLaunch::new(channels, number, length, 1),
            variant: ColumnsVariant { cubes, near: true, several: false },
        })
    }
}

/// The tensor that [`sums`] normalizes and multiplies with a gradient.
pub(crate) struct Normalized<'a> {
    pub x: &'a ByChannels,
    pub mean: CubeTensor,
    /// Variances, or inverse standard deviations.
    pub spread: CubeTensor,
    pub by: NormalizedBy,
}

/// What has statistics of its own.
#[derive(Clone, Copy)]
pub(crate) enum NormalizedBy {
    /// Each channel has a variance.
    Variance { epsilon: f64 },
    /// Each channel has an inverse standard deviation.
    Channel,
    /// Each row has one: all elements of `repeats` repeats, and of a group of so many channels.
    Row { repeats: usize, channels: usize },
}

/// What the elements of a gradient are multiplied by: see [`RowsShape`](super::columns::RowsShape).
pub(crate) struct Factor {
    pub values: CubeTensor,
    pub groups: usize,
    pub channels: usize,
    pub inner: usize,
}

/// Two sums per channel.
pub(crate) struct TwoSums {
    pub a: CubeTensor,
    pub b: CubeTensor,
    /// Both sums, `[2, channels]`, in the type that sums are made in.
    pub wide: CubeTensor,
}

/// `sum(dy * factor)` and `sum(dy * factor * normalized)` by channels, in this dtype. Without `normalized`, the second sums mean nothing.
pub(crate) fn sums(
    dy: &ByChannels,
    normalized: Option<Normalized<'_>>,
    factor: Option<Factor>,
    dtype: DType,
) -> TwoSums {
    let read: Vec<&ByChannels> = [dy].into_iter().chain(normalized.as_ref().map(|of| of.x)).collect();
    let most = match normalized.as_ref().map(|of| of.by) {
        // A vector belongs to one row.
        Some(NormalizedBy::Row { channels, .. }) if dy.shape.inner == 1 => 1 << channels.trailing_zeros(),
        _ => usize::MAX,
    };
    let Some(reduction) = Reduction::of(&read, most) else {
        return merge(empty(&dy.tensor, Shape::new([0, 2, dy.shape.channels]), wide(dy.tensor.dtype)), dtype);
    };
    let parts = reduction.parts(&dy.tensor);
    let (grid, written) = (&reduction.grid, parts.clone().into_linear_view());
    let (mut x, mut mean, mut spread, mut of_statistics) = (None, None, None, grid.dtypes[1]);
    let (mut statistics, mut epsilon) = (Statistics::Channels, 1.0);
    let mut rows = factor.as_ref().map_or([1; 3], |of| [of.groups, of.channels, of.inner]);
    if let Some(of) = normalized {
        of_statistics = dtype_to_storage_type(of.mean.dtype);
        x = Some(of.x.tensor.clone().into_linear_view());
        mean = Some(of.mean.into_buffer_arg());
        spread = Some(of.spread.into_buffer_arg());
        match of.by {
            NormalizedBy::Variance { epsilon: added } => {
                (statistics, epsilon) = (Statistics::Variances, added)
            }
            NormalizedBy::Channel => {}
            NormalizedBy::Row { repeats, channels } => {
                let inner = repeats * reduction.shape.plane(reduction.size);
                statistics = if inner == 1 { Statistics::Terms } else { Statistics::Rows };
                rows = [dy.shape.channels / channels, channels, inner];
            }
        }
    }
    let weighted = factor.is_some();
    // SAFETY: the kernel compares every position with the shapes.
    unsafe {
        launch!(
            sums_kernel,
            grid,
            reduction.size,
            dy.tensor.clone().into_linear_view(),
            x.into(),
            mean.into(),
            spread.into(),
            factor.map(|of| of.values.into_buffer_arg()).into(),
            written,
            reduction.shape(),
            RowsShapeLaunch::new(rows[0], rows[1], rows[2]),
            grid.scalar(epsilon),
            reduction.variant,
            statistics,
            weighted,
            grid.dtypes,
            of_statistics,
        );
    }
    merge(parts, dtype)
}

/// The sums over all parts, `[parts, 2, channels]`.
fn merge(parts: CubeTensor, dtype: DType) -> TwoSums {
    debug_assert_eq!(
        wide(dtype),
        parts.dtype,
        "the kernel reads parts in the type that sums of its output are made in"
    );
    let channels = parts.shape()[2];
    let [a, b] = [(); 2].map(|()| empty(&parts, Shape::new([channels]), dtype));
    let wide = empty(&parts, Shape::new([2, channels]), parts.dtype);
    if let Some(Merge { grid, shape, variant }) = Merge::of(&parts, &[&a, &parts]) {
        // SAFETY: the kernel compares every position with the shapes.
        unsafe {
            launch!(
                merge_sums,
                grid,
                1,
                parts.into_linear_view(),
                a.clone().into_linear_view(),
                b.clone().into_linear_view(),
                wide.clone().into_linear_view(),
                shape,
                variant,
                grid.dtypes,
            );
        }
    }
    TwoSums { a, b, wide }
}

/// The moments of every channel, in the type that sums are made in.
pub(crate) struct Moments {
    pub mean: CubeTensor,
    /// The biased variance, or what [`Spread`] says.
    pub spread: CubeTensor,
}

/// The moments of every channel. `epsilon` is added to a variance whose inverse root is wanted.
pub(crate) fn moments(x: &ByChannels, wanted: Spread, epsilon: f64) -> Moments {
    let Channels { repeats, channels, inner } = x.shape;
    let [mean, spread] = [(); 2].map(|()| empty(&x.tensor, Shape::new([channels]), wide(x.tensor.dtype)));
    let Some(reduction) = Reduction::of(&[x], usize::MAX) else { return Moments { mean, spread } };
    let (parts, grid) = (reduction.parts(&x.tensor), &reduction.grid);
    let Some(merge) = Merge::of(&parts, &[&parts]) else { return Moments { mean, spread } };
    let (read, written) = (x.tensor.clone().into_linear_view(), parts.clone().into_linear_view());
    // SAFETY: the kernels compare every position with the shapes.
    unsafe {
        launch!(
            moments_kernel,
            grid,
            reduction.size,
            read,
            written,
            reduction.shape(),
            reduction.variant,
            grid.dtypes,
        );
        launch!(
            merge_moments,
            merge.grid,
            1,
            parts.into_linear_view(),
            mean.clone().into_linear_view(),
            spread.clone().into_linear_view(),
            merge.shape,
            reduction.length(),
            repeats * inner,
            merge.grid.scalar(epsilon),
            merge.variant,
            wanted,
            grid.dtypes[1],
        );
    }
    Moments { mean, spread }
}
