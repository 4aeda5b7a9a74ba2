//! Kernels for devices: a cube reads its row three times, but only once from memory.
//!
//! Tensors with any strides are read where they lie. If several channels of a row are nearest in memory, as convolutions return them, the
//! row is walked along the channels, and so is its result.
//!
//! These kernels are taken with fusion, too: Burn's fusion makes several kernels of the composition, one for each sum.
use super::{NormGrads, RowNorm, RowNormKernels};
use crate::backend::cube::{Grid, assert_turns, empty, launch, units_of_row, vector_size};
use crate::backend::optional::MaybeTensor;
use crate::backend::{ChannelSums, wide};
use burn::backend::{
    Backend, Cube, TensorMetadata, backend_extension, ops::FloatTensorOps, tensor::FloatTensor,
};
use burn::tensor::Shape;
use burn_cubecl::CubeBackend;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
use kernels::{
    ParameterPartsShapeLaunch, RowShapeLaunch, forward_kernel, parameters_kernel, statistics_kernel,
    x_backward_kernel,
};
use walk::Walk;

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

    /// Parts of the gradients of gamma and beta, `[parts, 2, parameters]`. Their sums over the first axis are the gradients.
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
        if let Some(rows) = RowSplit::of(&[&x, &of_y.tensor], &norm) {
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
                    rows.shape(&norm),
                    rows.grid.scalar(norm.epsilon),
                    norm.centered,
                    walk,
                    rows.units,
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
                    rows.shape(&norm),
                    rows.grid.scalar(norm.epsilon),
                    norm.centered,
                    walk,
                    rows.units,
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
    ) -> FloatTensor<Self> {
        let parts = empty(&x, parts_shape(&x.shape(), &norm), wide(x.dtype));
        let by = ParameterParts::of(&x.shape(), &norm);
        let walk = Walk::of(&x, &norm);
        let [x, dy] = [x, dy].map(|tensor| walk.view(tensor, &norm));
        let Some(rows) = RowSplit::of(&[&x, &dy], &norm) else { return parts };
        let statistics = empty(&x, Shape::new([rows.count, 2]), wide(x.dtype));
        let (size, tensors) = (walk.parameters_of_unit(rows.size, &norm), [&x, &dy, &statistics]);
        let grids = Grid::of_rows(rows.count, rows.units, &tensors)
            .zip(Grid::of_units(by.count() * norm.parameters() / size, &tensors));
        let Some((grid_of_rows, grid_of_parts)) = grids else { return parts };
        // SAFETY: the kernels compare every position with the shapes.
        unsafe {
            launch!(
                statistics_kernel,
                grid_of_rows,
                rows.size,
                x.clone().into_linear_view(),
                statistics.clone().into_linear_view(),
                rows.shape(&norm),
                grid_of_rows.scalar(norm.epsilon),
                norm.centered,
                rows.units,
                grid_of_rows.dtypes,
            );
            launch!(
                parameters_kernel,
                grid_of_parts,
                size,
                x.into_linear_view(),
                dy.into_linear_view(),
                statistics.into_linear_view(),
                parts.clone().into_linear_view(),
                rows.shape(&norm),
                norm.parameters(),
                by.launch(),
                walk,
                grid_of_parts.dtypes,
            );
        }
        parts
    }
}

/// The parameters as the kernels read them: contiguous, in the dtype of `like`.
fn parameters(tensor: Option<CubeTensor>, like: &CubeTensor) -> Option<CubeTensor> {
    let tensor = into_contiguous(tensor?);
    Some(if tensor.dtype == like.dtype { tensor } else { burn_cubecl::kernel::cast(tensor, like.dtype) })
}

/// How rows are divided among units.
struct RowSplit {
    grid: Grid,
    count: usize,
    /// Elements of a vector.
    size: usize,
    /// Units of a row.
    units: usize,
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
        let units = units_of_row(row);
        // A row is read for its mean, its variance, the sums of its gradient, and the result.
        assert_turns(&tensors[0].client, 4 * row.div_ceil(size * units));
        let count = elements / row;
        Some(Self { grid: Grid::of_rows(count, units, tensors)?, count, size, units })
    }

    fn shape(&self, norm: &RowNorm) -> RowShapeLaunch {
        RowShapeLaunch::new(self.count, norm.row(), norm.groups, norm.channels, norm.inner)
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

/// How the sums over all repeats and inner elements are divided into parts.
struct ParameterParts {
    /// Repeats of a part.
    length: usize,
    parts_of_repeats: usize,
    /// Inner elements of a part.
    stretch: usize,
    stretches: usize,
}

impl ParameterParts {
    /// So many parts that all units of a device have work, and none adds up many more than 1024 elements.
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

    fn launch(&self) -> ParameterPartsShapeLaunch {
        ParameterPartsShapeLaunch::new(self.length, self.stretch, self.stretches)
    }
}

fn parts_shape(x: &Shape, norm: &RowNorm) -> Shape {
    Shape::new([ParameterParts::of(x, norm).count(), 2, norm.parameters()])
}
