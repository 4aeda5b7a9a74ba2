//! Kernels for devices: a cube reads its row three times, but only once from memory. If rows are too long for a cube, or too few for a
//! device, each is divided among cubes: a two-stage reduction makes its sums, and then every unit applies them to one vector.
//!
//! Tensors with any strides are read where they lie. If several channels of a row are nearest in memory, as convolutions return them, the
//! row is walked along the channels, and so is its result.
//!
//! These kernels are taken with fusion, too: Burn's fusion makes several kernels of the composition, one for each sum.
use super::{NormGrads, RowNorm, RowNormKernels};
use crate::backend::cube::channels::{
    ByChannels, Channels, Factor, Moments, Normalized, NormalizedBy, moments, sums,
};
use crate::backend::cube::columns::Spread;
use crate::backend::cube::{
    Grid, are_rows_divided, empty, launch, planned_multiprocessors, units_of_cube, units_of_row, vector_size,
};
use crate::backend::optional::MaybeTensor;
use crate::backend::{ChannelSums, wide};
#[cfg(feature = "fusion")]
use burn::backend::fusion::custom::TensorSpec;
use burn::backend::{
    Backend, Cube, TensorMetadata, backend_extension, ops::FloatTensorOps, tensor::FloatTensor,
};
use burn::tensor::Shape;
use burn_cubecl::CubeBackend;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
use kernels::{RowShapeLaunch, forward_kernel, statistics_kernel, x_backward_kernel};
use walk::{Walk, by_parameters, lies_along_channels};

mod kernels;
mod walk;

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
        let [gamma_grad, beta_grad] = match wanted {
            [_, true, _] => {
                let (dgamma, dbeta) = Self::cube_row_norm_parameters(x.clone(), dy.clone(), *norm);
                [Some(dgamma), wanted[2].then_some(dbeta)]
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

    /// The gradients of gamma and beta.
    #[fusion(meta = |x, _dy, norm| {
        let of_parameters = TensorSpec { shape: Shape::new([norm.parameters()]), dtype: x.dtype };
        (of_parameters.clone(), of_parameters)
    })]
    fn cube_row_norm_parameters(
        x: FloatTensor<Self>,
        dy: FloatTensor<Self>,
        norm: RowNorm,
    ) -> (FloatTensor<Self>, FloatTensor<Self>);
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
        if let Some(rows) = RowSplit::of(&[&x, &of_y.tensor], &norm) {
            let [mean, inverse_std] = rows.given(rows.divided_statistics(&x, &norm));
            // SAFETY: the kernel compares every position with the shapes.
            unsafe {
                launch!(
                    forward_kernel,
                    rows.grid,
                    rows.size,
                    x.into_linear_view(),
                    of_y.view(),
                    gamma.map(CubeTensor::into_buffer_arg).into(),
                    beta.map(CubeTensor::into_buffer_arg).into(),
                    mean.map(CubeTensor::into_buffer_arg).into(),
                    inverse_std.map(CubeTensor::into_buffer_arg).into(),
                    rows.shape(&norm),
                    rows.grid.scalar(norm.epsilon),
                    norm.centered,
                    walk,
                    rows.takers,
                    rows.grid.dtypes,
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
        if let Some(rows) = RowSplit::of(&[&x, &dy, &of_dx.tensor], &norm) {
            let statistics = rows.divided_statistics(&x, &norm);
            let sums = statistics.as_ref().map(|of| rows.sums(&dy, &x, gamma.clone(), of, walk, &norm));
            let [mean, inverse_std] = rows.given(statistics);
            // SAFETY: the kernel compares every position with the shapes.
            unsafe {
                launch!(
                    x_backward_kernel,
                    rows.grid,
                    rows.size,
                    dy.into_linear_view(),
                    x.into_linear_view(),
                    of_dx.view(),
                    gamma.map(CubeTensor::into_buffer_arg).into(),
                    mean.map(CubeTensor::into_buffer_arg).into(),
                    inverse_std.map(CubeTensor::into_buffer_arg).into(),
                    sums.map(CubeTensor::into_buffer_arg).into(),
                    rows.shape(&norm),
                    rows.grid.scalar(norm.epsilon),
                    norm.centered,
                    walk,
                    rows.takers,
                    rows.grid.dtypes,
                );
            }
        }
        dx.tensor
    }

    fn cube_row_norm_parameters(
        x: FloatTensor<Self>,
        dy: FloatTensor<Self>,
        norm: RowNorm,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let (dtype, walk) = (x.dtype, Walk::of(&x, &norm));
        let of_rows = walk.view(x.clone(), &norm);
        let statistics = RowSplit::of(&[&of_rows], &norm).map(|rows| rows.statistics(&of_rows, &norm));
        let along_channels = lies_along_channels(&x, &norm);
        let [x, dy] = [x, dy].map(|tensor| by_parameters(tensor, along_channels, &norm));
        let normalized = statistics.map(|Moments { mean, spread }| {
            let repeats = if along_channels { norm.inner } else { 1 };
            Normalized { x: &x, mean, spread, by: NormalizedBy::Row { repeats, channels: norm.channels } }
        });
        let of_parameters = sums(&dy, normalized, None, dtype);
        (of_parameters.b, of_parameters.a)
    }
}

/// The parameters as the kernels read them: contiguous, in the dtype of `like`.
fn parameters(tensor: Option<CubeTensor>, like: &CubeTensor) -> Option<CubeTensor> {
    let tensor = into_contiguous(tensor?);
    Some(if tensor.dtype == like.dtype { tensor } else { burn_cubecl::kernel::cast(tensor, like.dtype) })
}

/// Who takes a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Takers {
    /// One unit, or the units of one cube.
    Units(usize),
    /// One unit for each vector. What is reduced is given.
    Grid,
}

impl Takers {
    /// The units that reduce a row together.
    fn units(self) -> usize {
        match self {
            Self::Units(units) => units,
            Self::Grid => 1,
        }
    }
}

/// How rows are divided among units.
struct RowSplit {
    grid: Grid,
    count: usize,
    /// Elements of a vector.
    size: usize,
    takers: Takers,
}

impl RowSplit {
    /// For kernels over these tensors. `None` if there are no elements.
    fn of(tensors: &[&CubeTensor], norm: &RowNorm) -> Option<Self> {
        let row = norm.row();
        let elements = tensors[0].shape().num_elements();
        if elements == 0 {
            return None;
        }
        // A vector belongs to one row.
        let fits = |size: &usize| row.is_multiple_of(*size);
        let size =
            (0..3).rev().map(|log| 1 << log).filter(fits).find(|&size| size <= longest(tensors)).unwrap_or(1);
        let client = &tensors[0].client;
        let (count, units) = (elements / row, units_of_row(row, units_of_cube(client)));
        let turns = row.div_ceil(size * units);
        let (grid, takers) = match are_rows_divided(count, turns, planned_multiprocessors(client)) {
            true => (Grid::of_units(elements / size, tensors)?, Takers::Grid),
            false => (Grid::of_rows(count, units, tensors)?, Takers::Units(units)),
        };
        Some(Self { grid, count, size, takers })
    }

    fn shape(&self, norm: &RowNorm) -> RowShapeLaunch {
        RowShapeLaunch::new(self.count, norm.row(), norm.groups, norm.channels, norm.inner)
    }

    /// A tensor in the order of the walk with its rows as channels.
    fn by_rows(&self, tensor: &CubeTensor, norm: &RowNorm) -> ByChannels {
        let shape = Channels { repeats: 1, channels: self.count, inner: norm.row() };
        ByChannels::in_order(tensor.clone(), shape)
    }

    /// The mean, or 0 if not centered, and the inverse standard deviation of every row.
    fn statistics(&self, x: &CubeTensor, norm: &RowNorm) -> Moments {
        if let Some(statistics) = self.divided_statistics(x, norm) {
            return statistics;
        }
        let [mean, spread] = [(); 2].map(|()| empty(x, Shape::new([self.count]), wide(x.dtype)));
        // SAFETY: the kernel compares every position with the shapes.
        unsafe {
            launch!(
                statistics_kernel,
                self.grid,
                self.size,
                x.clone().into_linear_view(),
                mean.clone().into_linear_view(),
                spread.clone().into_linear_view(),
                self.shape(norm),
                self.grid.scalar(norm.epsilon),
                norm.centered,
                self.takers,
                self.grid.dtypes,
            );
        }
        Moments { mean, spread }
    }

    /// The same, if rows are divided among cubes.
    fn divided_statistics(&self, x: &CubeTensor, norm: &RowNorm) -> Option<Moments> {
        let wanted = Spread::Inverse { centered: norm.centered };
        (self.takers == Takers::Grid).then(|| moments(&self.by_rows(x, norm), wanted, norm.epsilon))
    }

    fn given(&self, statistics: Option<Moments>) -> [Option<CubeTensor>; 2] {
        statistics.map_or([None, None], |Moments { mean, spread }| [Some(mean), Some(spread)])
    }

    /// The sums of `gamma dy` and of its products with the normalized `x`, by rows.
    fn sums(
        &self,
        dy: &CubeTensor,
        x: &CubeTensor,
        gamma: Option<CubeTensor>,
        statistics: &Moments,
        walk: Walk,
        norm: &RowNorm,
    ) -> CubeTensor {
        let [dy, x] = [dy, x].map(|tensor| self.by_rows(tensor, norm));
        let Moments { mean, spread } = statistics;
        let by = NormalizedBy::Channel;
        let normalized = Normalized { x: &x, mean: mean.clone(), spread: spread.clone(), by };
        let inner = if walk == Walk::Inner { norm.inner } else { 1 };
        let of_values = |values| Factor { values, groups: norm.groups, channels: norm.channels, inner };
        sums(&dy, Some(normalized), gamma.map(of_values), wide(dy.tensor.dtype)).wide
    }
}

/// The longest vectors of the tensors. In contiguous tensors, vectors may go on from one row of an axis to the next.
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
