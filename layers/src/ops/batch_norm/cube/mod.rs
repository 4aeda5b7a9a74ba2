//! Kernels for devices: one makes parts of moments or sums by channels, a second one merges them into statistics or gradients, and a
//! third one applies these in one pass.
//!
//! These kernels are taken with fusion, too: Burn's fusion makes several kernels of the composition, one for each sum. With given
//! statistics, the output and the gradient of `x` are elementwise: there, with fusion, Burn's operations are fused with those around them.
use super::{BatchNormKernels, BatchNormOutput, NormGrads};
use crate::backend::cube::channels::{ByChannels, Moments, Normalized, NormalizedBy, TwoSums, moments, sums};
use crate::backend::cube::columns::Spread;
use crate::backend::cube::{Grid, launch};
use crate::backend::{ChannelSums, wide};
use burn::backend::cubecl::dtype_to_storage_type;
use burn::backend::{Backend, Cube, TensorMetadata, backend_extension, tensor::FloatTensor};
#[cfg(feature = "fusion")]
use burn::backend::{fusion::custom::TensorSpec, ops::FloatTensorOps};
use burn::tensor::DType;
#[cfg(feature = "fusion")]
use burn::tensor::Shape;
use burn_cubecl::CubeBackend;
use burn_cubecl::kernel::{cast, into_contiguous};
use burn_cubecl::tensor::CubeTensor;
#[cfg(not(feature = "fusion"))]
use kernels::scale_kernel;
use kernels::{normalize_kernel, x_backward_kernel};

mod kernels;

impl BatchNormKernels for Cube {
    fn train_batch_norm(
        x: FloatTensor<Self>,
        gamma: FloatTensor<Self>,
        beta: FloatTensor<Self>,
        epsilon: f64,
    ) -> BatchNormOutput<Self> {
        let (output, mean, variance) = Self::cube_train_batch_norm(x, gamma, beta, epsilon);
        BatchNormOutput { output, mean, variance }
    }

    fn rounds_batch_statistics(dtype: DType) -> bool {
        wide(dtype) != dtype
    }

    fn train_batch_norm_backward(
        x: FloatTensor<Self>,
        gamma: FloatTensor<Self>,
        statistics: Option<[FloatTensor<Self>; 2]>,
        epsilon: f64,
        dy: FloatTensor<Self>,
        wanted: [bool; 3],
    ) -> NormGrads<Self> {
        let [mean, variance] = statistics.unwrap_or_else(|| {
            let (mean, variance) = Self::cube_batch_statistics(x.clone());
            [mean, variance]
        });
        if wanted[0] {
            let (dx, dgamma, dbeta) =
                Self::cube_train_batch_norm_backward(dy, x, gamma, mean, variance, epsilon);
            return NormGrads {
                x: Some(dx),
                gamma: wanted[1].then_some(dgamma),
                beta: wanted[2].then_some(dbeta),
            };
        }
        let (dgamma, dbeta) = Self::cube_batch_norm_parameters(dy, x, mean, variance, epsilon, gamma.dtype());
        NormGrads { x: None, gamma: wanted[1].then_some(dgamma), beta: wanted[2].then_some(dbeta) }
    }

    #[cfg(not(feature = "fusion"))]
    fn eval_batch_norm(
        x: FloatTensor<Self>,
        gamma: FloatTensor<Self>,
        beta: FloatTensor<Self>,
        mean: FloatTensor<Self>,
        variance: FloatTensor<Self>,
        epsilon: f64,
    ) -> FloatTensor<Self> {
        let [mean, variance] = [mean, variance].map(into_contiguous);
        let [gamma, beta] = [gamma, beta].map(|tensor| per_channel(tensor, &x));
        normalize(ByChannels::of(x), Affine { mean, variance, gamma, beta, epsilon })
    }

    fn eval_batch_norm_backward(
        x: Option<FloatTensor<Self>>,
        gamma: FloatTensor<Self>,
        mean: FloatTensor<Self>,
        variance: FloatTensor<Self>,
        epsilon: f64,
        dy: FloatTensor<Self>,
        wanted: [bool; 2],
    ) -> NormGrads<Self> {
        let [gamma_grad, beta_grad] = match x {
            Some(x) => {
                let (dgamma, dbeta) = Self::cube_batch_norm_parameters(
                    dy.clone(),
                    x,
                    mean,
                    variance.clone(),
                    epsilon,
                    gamma.dtype(),
                );
                [Some(dgamma), wanted[1].then_some(dbeta)]
            }
            None => [None, wanted[1].then(|| Self::sum_to_channels(dy.clone()))],
        };
        let x_grad = wanted[0].then(|| scaled(dy, gamma, variance, epsilon));
        NormGrads { x: x_grad, gamma: gamma_grad, beta: beta_grad }
    }

    fn batch_moments(x: FloatTensor<Self>) -> [FloatTensor<Self>; 2] {
        let (mean, variance) = Self::cube_batch_statistics(x);
        [mean, variance]
    }

    fn gradient_sums(
        x: FloatTensor<Self>,
        [mean, variance]: [FloatTensor<Self>; 2],
        epsilon: f64,
        dy: FloatTensor<Self>,
    ) -> [FloatTensor<Self>; 2] {
        let dtype = wide(dy.dtype());
        let (of_product, of_dy) = Self::cube_batch_norm_parameters(dy, x, mean, variance, epsilon, dtype);
        [of_dy, of_product]
    }
}

/// `dy * gamma / std`, one kernel: shapes change before anything is computed.
#[cfg(feature = "fusion")]
fn scaled(
    dy: FloatTensor<Cube>,
    gamma: FloatTensor<Cube>,
    variance: FloatTensor<Cube>,
    epsilon: f64,
) -> FloatTensor<Cube> {
    let rank = dy.shape().num_dims();
    let [gamma, variance] = [gamma, variance].map(|x| super::per_channel::<Cube>(x, rank));
    Cube::float_mul(dy, Cube::float_mul(gamma, super::inverse_std::<Cube>(variance, epsilon)))
}

/// `dy * gamma / std`
#[cfg(not(feature = "fusion"))]
fn scaled(dy: CubeTensor, gamma: CubeTensor, variance: CubeTensor, epsilon: f64) -> CubeTensor {
    let [gamma, variance] = [gamma, variance].map(|tensor| per_channel(tensor, &dy));
    let dy = ByChannels::of(dy);
    let dx = dy.output();
    if let Some((grid, size)) = grid_of_vectors(&[&dy]) {
        let [variance, gamma] = [variance, gamma].map(|tensor| Some(tensor.into_buffer_arg()).into());
        // SAFETY: the kernel compares every position with the shapes.
        unsafe {
            launch!(
                scale_kernel,
                grid,
                size,
                dy.tensor.clone().into_linear_view(),
                dx.view(),
                variance,
                gamma,
                dy.shape.launch(),
                grid.scalar(epsilon),
                dy.shape.inner > 1,
                grid.dtypes,
            );
        }
    }
    dy.restore(dx.tensor)
}

#[backend_extension(Cube, Fusion: cfg(feature = "fusion"))]
pub trait BatchNormCube: Backend {
    /// The output, the mean and the variance.
    #[fusion(meta = |x, gamma, _beta, _epsilon| (x.clone(), gamma.clone(), gamma.clone()))]
    fn cube_train_batch_norm(
        x: FloatTensor<Self>,
        gamma: FloatTensor<Self>,
        beta: FloatTensor<Self>,
        epsilon: f64,
    ) -> (FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>);

    /// The mean and the variance, in the type that sums are made in.
    #[fusion(meta = |x| {
        let of_channels = TensorSpec { shape: Shape::new([x.shape[1]]), dtype: wide(x.dtype) };
        (of_channels.clone(), of_channels)
    })]
    fn cube_batch_statistics(x: FloatTensor<Self>) -> (FloatTensor<Self>, FloatTensor<Self>);

    /// The gradients of `x`, gamma and beta.
    #[fusion(meta = |dy, _x, gamma, _mean, _variance, _epsilon| (dy.clone(), gamma.clone(), gamma.clone()))]
    fn cube_train_batch_norm_backward(
        dy: FloatTensor<Self>,
        x: FloatTensor<Self>,
        gamma: FloatTensor<Self>,
        mean: FloatTensor<Self>,
        variance: FloatTensor<Self>,
        epsilon: f64,
    ) -> (FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>);

    /// The gradients of gamma and beta, in `dtype`.
    #[fusion(meta = |_dy, _x, mean, _variance, _epsilon, dtype| {
        let of_channels = TensorSpec { shape: mean.shape.clone(), dtype: *dtype };
        (of_channels.clone(), of_channels)
    })]
    fn cube_batch_norm_parameters(
        dy: FloatTensor<Self>,
        x: FloatTensor<Self>,
        mean: FloatTensor<Self>,
        variance: FloatTensor<Self>,
        epsilon: f64,
        dtype: DType,
    ) -> (FloatTensor<Self>, FloatTensor<Self>);
}

impl BatchNormCube for CubeBackend {
    fn cube_train_batch_norm(
        x: FloatTensor<Self>,
        gamma: FloatTensor<Self>,
        beta: FloatTensor<Self>,
        epsilon: f64,
    ) -> (FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>) {
        let dtype = gamma.dtype();
        let [gamma, beta] = [gamma, beta].map(|tensor| per_channel(tensor, &x));
        let x = ByChannels::of(x);
        let Moments { mean, spread: variance } = moments(&x, Spread::Variance, epsilon);
        let [of_layer, variance_of_layer] =
            [&mean, &variance].map(|statistic| cast(statistic.clone(), dtype));
        let y = normalize(x, Affine { mean, variance, gamma, beta, epsilon });
        (y, of_layer, variance_of_layer)
    }

    fn cube_batch_statistics(x: FloatTensor<Self>) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let Moments { mean, spread } = moments(&ByChannels::of(x), Spread::Variance, 0.0);
        (mean, spread)
    }

    fn cube_train_batch_norm_backward(
        dy: FloatTensor<Self>,
        x: FloatTensor<Self>,
        gamma: FloatTensor<Self>,
        mean: FloatTensor<Self>,
        variance: FloatTensor<Self>,
        epsilon: f64,
    ) -> (FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>) {
        let dtype = gamma.dtype();
        let gamma = per_channel(gamma, &x);
        let [mean, variance] = [mean, variance].map(into_contiguous);
        let x = ByChannels::of(x);
        let dy = x.like(dy);
        let of_channels = gradient_sums(&dy, &x, &mean, &variance, epsilon, dy.tensor.dtype);
        let (dgamma, dbeta) = (cast(of_channels.b, dtype), cast(of_channels.a, dtype));
        let dx = dy.output();
        if let Some((grid, size)) = grid_of_vectors(&[&dy, &x]) {
            let of_statistics = dtype_to_storage_type(mean.dtype);
            let [mean, variance] = [mean, variance].map(|tensor| Some(tensor.into_buffer_arg()).into());
            // SAFETY: the kernel compares every position with the shapes.
            unsafe {
                launch!(
                    x_backward_kernel,
                    grid,
                    size,
                    dy.tensor.clone().into_linear_view(),
                    x.tensor.into_linear_view(),
                    dx.view(),
                    mean,
                    variance,
                    Some(gamma.into_buffer_arg()).into(),
                    Some(of_channels.wide.into_buffer_arg()).into(),
                    dy.shape.launch(),
                    grid.scalar(epsilon),
                    dy.shape.inner > 1,
                    grid.dtypes,
                    of_statistics,
                );
            }
        }
        (dy.restore(dx.tensor), dgamma, dbeta)
    }

    fn cube_batch_norm_parameters(
        dy: FloatTensor<Self>,
        x: FloatTensor<Self>,
        mean: FloatTensor<Self>,
        variance: FloatTensor<Self>,
        epsilon: f64,
        dtype: DType,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let [mean, variance] = [mean, variance].map(into_contiguous);
        let x = ByChannels::of(x);
        // Rounded once, if at all.
        let of_sums = if wide(dtype) == wide(x.tensor.dtype) { dtype } else { x.tensor.dtype };
        let of_channels = gradient_sums(&x.like(dy), &x, &mean, &variance, epsilon, of_sums);
        (cast(of_channels.b, dtype), cast(of_channels.a, dtype))
    }
}

/// A parameter as the kernels read it: contiguous, in the dtype of `x`.
fn per_channel(parameter: CubeTensor, x: &CubeTensor) -> CubeTensor {
    into_contiguous(cast(parameter, x.dtype))
}

/// The sums of `dy`, and of its products with the normalized `x`, in a dtype whose sums are made in the type of those of `dy`.
fn gradient_sums(
    dy: &ByChannels,
    x: &ByChannels,
    mean: &CubeTensor,
    variance: &CubeTensor,
    epsilon: f64,
    dtype: DType,
) -> TwoSums {
    let by = NormalizedBy::Variance { epsilon };
    let normalized = Normalized { x, mean: mean.clone(), spread: variance.clone(), by };
    sums(dy, Some(normalized), None, dtype)
}

/// The grid of an elementwise kernel over tensors of one shape and order, and the size of its vectors. `None` without elements.
fn grid_of_vectors(tensors: &[&ByChannels]) -> Option<(Grid, usize)> {
    let size = tensors.iter().map(|of| of.vector_size()).min().unwrap_or(1);
    let tensors: Vec<&CubeTensor> = tensors.iter().map(|of| &of.tensor).collect();
    Some((Grid::of_units(tensors[0].meta.num_elements() / size, &tensors)?, size))
}

/// What is applied to every channel.
struct Affine {
    mean: CubeTensor,
    variance: CubeTensor,
    gamma: CubeTensor,
    beta: CubeTensor,
    epsilon: f64,
}

fn normalize(x: ByChannels, affine: Affine) -> CubeTensor {
    let y = x.output();
    if let Some((grid, size)) = grid_of_vectors(&[&x]) {
        let Affine { mean, variance, gamma, beta, epsilon } = affine;
        let of_statistics = dtype_to_storage_type(mean.dtype);
        let [mean, variance] = [mean, variance].map(|tensor| Some(tensor.into_buffer_arg()).into());
        let [gamma, beta] = [gamma, beta].map(|tensor| Some(tensor.into_buffer_arg()).into());
        // SAFETY: the kernel compares every position with the shapes.
        unsafe {
            launch!(
                normalize_kernel,
                grid,
                size,
                x.tensor.clone().into_linear_view(),
                y.view(),
                mean,
                variance,
                gamma,
                beta,
                x.shape.launch(),
                grid.scalar(epsilon),
                x.shape.inner > 1,
                grid.dtypes,
                of_statistics,
            );
        }
    }
    x.restore(y.tensor)
}
