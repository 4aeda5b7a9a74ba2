//! Kernels for devices: moments and sums by channels, of which a second kernel makes statistics and gradients, and one pass to
//! apply them.
//!
//! Of a composition Burn's fusion makes several kernels, one for each sum: ours are taken there, too. With given statistics the
//! output and the gradient of `x` are elementwise: there Burn's operations are fused with those around them.
use super::{BatchNormKernels, BatchNormOutput, NormGrads};
use crate::backend::cube::channels::{
    ByChannels, Channels, ChannelsShape, Merged, Normalized, VectorsOfPart, merge, read_channels, sums,
};
use crate::backend::cube::{Pair, address_type, empty, sum_of_vector, sum_over_units, types, units};
use crate::backend::{ChannelSums, wide};
use burn::backend::cubecl::dtype_to_storage_type;
use burn::backend::{Backend, Cube, TensorMetadata, backend_extension, tensor::FloatTensor};
#[cfg(feature = "fusion")]
use burn::backend::{fusion::custom::TensorSpec, ops::FloatTensorOps};
use burn::tensor::{DType, Shape};
use burn_cubecl::CubeBackend;
use burn_cubecl::cubecl::{
    self,
    ir::ElemType,
    prelude::*,
    std::tensor::layout::linear::{LinearView, LinearViewMut},
};
use burn_cubecl::kernel::{cast, into_contiguous};
use burn_cubecl::tensor::CubeTensor;

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
    if let Some(Launch { size, count, dim, client, at, dtypes }) = Launch::of(&[&dy]) {
        let [variance, gamma] = [variance, gamma].map(|tensor| Some(tensor.into_buffer_arg()).into());
        // SAFETY: the kernel compares every position with the shapes.
        unsafe {
            scale_kernel::launch_unchecked(
                &client,
                count,
                dim,
                at,
                size,
                dy.tensor.clone().into_linear_view(),
                dx.view(),
                variance,
                gamma,
                dy.shape.launch(),
                InputScalar::new(epsilon, dtypes[1]),
                dy.shape.inner > 1,
                dtypes,
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

    /// The gradients of gamma and beta, which are of `dtype`.
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
        let Moments { mean, variance } = moments(&x);
        let [of_layer, variance_of_layer] =
            [&mean, &variance].map(|statistic| cast(statistic.clone(), dtype));
        let y = normalize(x, Affine { mean, variance, gamma, beta, epsilon });
        (y, of_layer, variance_of_layer)
    }

    fn cube_batch_statistics(x: FloatTensor<Self>) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let Moments { mean, variance } = moments(&ByChannels::of(x));
        (mean, variance)
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
        let merged = gradient_sums(&dy, &x, &mean, &variance, epsilon);
        let (dgamma, dbeta) = (cast(merged.b, dtype), cast(merged.a, dtype));
        let dx = dy.output();
        if let Some(Launch { size, count, dim, client, at, dtypes }) = Launch::of(&[&dy, &x]) {
            let of_statistics = dtype_to_storage_type(mean.dtype);
            let [mean, variance] = [mean, variance].map(|tensor| Some(tensor.into_buffer_arg()).into());
            // SAFETY: the kernel compares every position with the shapes.
            unsafe {
                x_backward_kernel::launch_unchecked(
                    &client,
                    count,
                    dim,
                    at,
                    size,
                    dy.tensor.clone().into_linear_view(),
                    x.tensor.into_linear_view(),
                    dx.view(),
                    mean,
                    variance,
                    Some(gamma.into_buffer_arg()).into(),
                    Some(merged.wide.into_buffer_arg()).into(),
                    dy.shape.launch(),
                    InputScalar::new(epsilon, dtypes[1]),
                    dy.shape.inner > 1,
                    dtypes,
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
        let merged = gradient_sums(&x.like(dy), &x, &mean, &variance, epsilon);
        (cast(merged.b, dtype), cast(merged.a, dtype))
    }
}

/// A parameter as the kernels read it: in a row, in the type of `x`.
fn per_channel(parameter: CubeTensor, x: &CubeTensor) -> CubeTensor {
    into_contiguous(cast(parameter, x.dtype))
}

/// The sums of `dy`, and of its products with the normalized `x`.
fn gradient_sums(
    dy: &ByChannels,
    x: &ByChannels,
    mean: &CubeTensor,
    variance: &CubeTensor,
    epsilon: f64,
) -> Merged {
    let normalized = Normalized { x, mean: mean.clone(), variance: variance.clone(), epsilon };
    merge(sums(dy, Some(normalized)), dy.tensor.dtype)
}

/// What an elementwise kernel is launched with.
struct Launch {
    size: usize,
    count: CubeCount,
    dim: CubeDim,
    client: cubecl::client::Client,
    at: AddressType,
    dtypes: [ElemType; 2],
}

impl Launch {
    /// For tensors of one shape and order; `None` if there are no elements.
    fn of(tensors: &[&ByChannels]) -> Option<Self> {
        let x = tensors[0];
        let size = tensors.iter().map(|of| of.vector_size()).min().unwrap_or(1);
        let elements = x.tensor.meta.num_elements();
        let (count, dim) = units(&x.tensor.client, elements / size);
        let read: Vec<&CubeTensor> = tensors.iter().map(|of| &of.tensor).collect();
        let (at, dtypes) = (address_type(&read), types(x.tensor.dtype));
        (elements > 0).then(|| Self { size, count, dim, client: x.tensor.client.clone(), at, dtypes })
    }
}

/// By channels, in the type that sums are made in.
struct Moments {
    mean: CubeTensor,
    /// Biased.
    variance: CubeTensor,
}

fn moments(x: &ByChannels) -> Moments {
    let Channels { repeats, channels, inner } = x.shape;
    let dtype = wide(x.tensor.dtype);
    let [mean, variance] = [(); 2].map(|()| empty(&x.tensor, Shape::new([channels]), dtype));
    let Some(Launch { size, client, at, dtypes, .. }) = Launch::of(&[x]) else {
        return Moments { mean, variance };
    };
    let parts = x.shape.parts();
    let of_parts = empty(&x.tensor, Shape::new([parts.count, 2, channels]), dtype);
    let (count, dim) = x.shape.grid(&client, size);
    let (read, written) = (x.tensor.clone().into_linear_view(), of_parts.clone().into_linear_view());
    // SAFETY: the kernels compare every position with the shapes.
    unsafe {
        if inner > 1 {
            moments_of_cubes::launch_unchecked(
                &client,
                count,
                dim,
                at,
                size,
                read,
                written,
                x.shape.launch(),
                x.shape.units(),
                parts.length > 1,
                dtypes,
            );
        } else {
            moments_of_units::launch_unchecked(
                &client,
                count,
                dim,
                at,
                size,
                read,
                written,
                x.shape.launch(),
                dtypes,
            );
        }
        let (count, dim) = units(&client, channels);
        merge_moments::launch_unchecked(
            &client,
            count,
            dim,
            at,
            of_parts.into_linear_view(),
            mean.clone().into_linear_view(),
            variance.clone().into_linear_view(),
            parts.count,
            channels,
            parts.length * inner,
            repeats * inner,
            dtypes[1],
        );
    }
    Moments { mean, variance }
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
    if let Some(Launch { size, count, dim, client, at, dtypes }) = Launch::of(&[&x]) {
        let Affine { mean, variance, gamma, beta, epsilon } = affine;
        let of_statistics = dtype_to_storage_type(mean.dtype);
        let [mean, variance] = [mean, variance].map(|tensor| Some(tensor.into_buffer_arg()).into());
        let [gamma, beta] = [gamma, beta].map(|tensor| Some(tensor.into_buffer_arg()).into());
        // SAFETY: the kernel compares every position with the shapes.
        unsafe {
            normalize_kernel::launch_unchecked(
                &client,
                count,
                dim,
                at,
                size,
                x.tensor.clone().into_linear_view(),
                y.view(),
                mean,
                variance,
                gamma,
                beta,
                x.shape.launch(),
                InputScalar::new(epsilon, dtypes[1]),
                x.shape.inner > 1,
                dtypes,
                of_statistics,
            );
        }
    }
    x.restore(y.tensor)
}

/// Mean and sum of squared distances from it of every part and channel, one cube each.
#[cube(launch_unchecked, address_type = "dynamic")]
fn moments_of_cubes<T: Float, W: Float, N: Size>(
    x: LinearView<'_, Vector<T, N>>,
    mut parts: LinearViewMut<'_, W>,
    shape: ChannelsShape,
    #[comptime] units: usize,
    #[comptime] several: bool,
    #[define(T, W)] _dtypes: [ElemType; 2],
) {
    let (part, channel) = (CUBE_POS / shape.channels, CUBE_POS % shape.channels);
    if part * shape.length >= shape.repeats {
        terminate!();
    }
    let size = N::value().comptime();
    let vectors = VectorsOfPart::new(&shape, part, channel, size, several);
    let zero = W::new(0.0);
    let mut sum = Vector::<W, N>::new(zero);
    let mut at = UNIT_POS as usize;
    while at < vectors.count {
        sum += Vector::cast_from(x.read(vectors.position(at)));
        at += units;
    }
    let of_unit = Pair::<W> { a: sum_of_vector::<W, N>(sum), b: zero };
    let mean = sum_over_units::<W>(of_unit, units).a / W::cast_from(vectors.count * size);
    let mut squares = Vector::<W, N>::new(zero);
    let mut at = UNIT_POS as usize;
    while at < vectors.count {
        let distance = Vector::<W, N>::cast_from(x.read(vectors.position(at))) - Vector::new(mean);
        squares += distance * distance;
        at += units;
    }
    let of_unit = Pair::<W> { a: sum_of_vector::<W, N>(squares), b: zero };
    let squares = sum_over_units::<W>(of_unit, units).a;
    if UNIT_POS == 0 {
        parts.write(2 * part * shape.channels + channel, mean);
        parts.write((2 * part + 1) * shape.channels + channel, squares);
    }
}

/// The same of every part and channel, one unit for every vector of channels. Welford, Note on a method for calculating corrected
/// sums of squares and products (Technometrics 1962).
#[cube(launch_unchecked, address_type = "dynamic")]
fn moments_of_units<T: Float, W: Float, N: Size>(
    x: LinearView<'_, Vector<T, N>>,
    mut parts: LinearViewMut<'_, Vector<W, N>>,
    shape: ChannelsShape,
    #[define(T, W)] _dtypes: [ElemType; 2],
) {
    let size = N::value().comptime();
    let vectors = shape.channels / size;
    let (part, vector) = (ABSOLUTE_POS / vectors, ABSOLUTE_POS % vectors);
    if part * shape.length >= shape.repeats {
        terminate!();
    }
    let mut mean = Vector::<W, N>::new(W::new(0.0));
    let mut squares = Vector::<W, N>::new(W::new(0.0));
    let mut count = W::new(0.0);
    for repeat in part * shape.length..min((part + 1) * shape.length, shape.repeats) {
        let x = Vector::<W, N>::cast_from(x.read(repeat * vectors + vector));
        count += W::new(1.0);
        let distance = x - mean;
        mean += distance * Vector::new(W::new(1.0) / count);
        squares += distance * (x - mean);
    }
    parts.write(2 * part * vectors + vector, mean);
    parts.write((2 * part + 1) * vectors + vector, squares);
}

/// Mean and variance of parts together; all but the last one have the same number of elements. Chan, Golub and LeVeque, Updating
/// formulae and a pairwise algorithm for computing sample variances (1979).
#[cube(launch_unchecked, address_type = "dynamic")]
fn merge_moments<W: Float>(
    parts: LinearView<'_, W>,
    mut mean: LinearViewMut<'_, W>,
    mut variance: LinearViewMut<'_, W>,
    number: usize,
    channels: usize,
    length: usize,
    total: usize,
    #[define(W)] _dtype: ElemType,
) {
    let channel = ABSOLUTE_POS;
    if channel >= channels {
        terminate!();
    }
    let mut merged = W::new(0.0);
    let mut squares = W::new(0.0);
    for part in 0..number {
        let before = W::cast_from(part * length);
        let of_part = W::cast_from(min(length, total - part * length));
        let distance = parts.read(2 * part * channels + channel) - merged;
        let share = of_part / (before + of_part);
        merged += distance * share;
        squares += parts.read((2 * part + 1) * channels + channel) + distance * before * distance * share;
    }
    mean.write(channel, merged);
    variance.write(channel, squares / W::cast_from(total));
}

/// The channel of the vector at this position, the first of them.
#[cube]
fn channel_here(shape: &ChannelsShape, #[comptime] size: usize) -> usize {
    ABSOLUTE_POS * size / shape.inner % shape.channels
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn normalize_kernel<T: Float, W: Float, S: Float, N: Size>(
    x: LinearView<'_, Vector<T, N>>,
    mut y: LinearViewMut<'_, Vector<T, N>>,
    mean: ComptimeOption<&[S]>,
    variance: ComptimeOption<&[S]>,
    gamma: ComptimeOption<&[T]>,
    beta: ComptimeOption<&[T]>,
    shape: ChannelsShape,
    epsilon: InputScalar,
    #[comptime] one: bool,
    #[define(T, W)] _dtypes: [ElemType; 2],
    #[define(S)] _of_statistics: ElemType,
) {
    if !y.is_in_bounds(ABSOLUTE_POS) {
        terminate!();
    }
    let channel = channel_here(&shape, N::value().comptime());
    let std = (read_channels::<S, W, N>(&variance, channel, one) + Vector::new(epsilon.get::<W>())).sqrt();
    let distance =
        Vector::<W, N>::cast_from(x.read(ABSOLUTE_POS)) - read_channels::<S, W, N>(&mean, channel, one);
    let scaled = distance * (read_channels::<T, W, N>(&gamma, channel, one) / std);
    y.write(ABSOLUTE_POS, Vector::cast_from(scaled + read_channels::<T, W, N>(&beta, channel, one)));
}

#[cfg(not(feature = "fusion"))]
#[cube(launch_unchecked, address_type = "dynamic")]
fn scale_kernel<T: Float, W: Float, N: Size>(
    dy: LinearView<'_, Vector<T, N>>,
    mut dx: LinearViewMut<'_, Vector<T, N>>,
    variance: ComptimeOption<&[T]>,
    gamma: ComptimeOption<&[T]>,
    shape: ChannelsShape,
    epsilon: InputScalar,
    #[comptime] one: bool,
    #[define(T, W)] _dtypes: [ElemType; 2],
) {
    if !dx.is_in_bounds(ABSOLUTE_POS) {
        terminate!();
    }
    let channel = channel_here(&shape, N::value().comptime());
    let std = (read_channels::<T, W, N>(&variance, channel, one) + Vector::new(epsilon.get::<W>())).sqrt();
    let scale = read_channels::<T, W, N>(&gamma, channel, one) / std;
    dx.write(ABSOLUTE_POS, Vector::cast_from(Vector::<W, N>::cast_from(dy.read(ABSOLUTE_POS)) * scale));
}

/// `sums`: of `dy` and of its products with the normalized `x`, `[2, channels]`.
#[cube(launch_unchecked, address_type = "dynamic")]
fn x_backward_kernel<T: Float, W: Float, S: Float, N: Size>(
    dy: LinearView<'_, Vector<T, N>>,
    x: LinearView<'_, Vector<T, N>>,
    mut dx: LinearViewMut<'_, Vector<T, N>>,
    mean: ComptimeOption<&[S]>,
    variance: ComptimeOption<&[S]>,
    gamma: ComptimeOption<&[T]>,
    sums: ComptimeOption<&[W]>,
    shape: ChannelsShape,
    epsilon: InputScalar,
    #[comptime] one: bool,
    #[define(T, W)] _dtypes: [ElemType; 2],
    #[define(S)] _of_statistics: ElemType,
) {
    if !dx.is_in_bounds(ABSOLUTE_POS) {
        terminate!();
    }
    let channel = channel_here(&shape, N::value().comptime());
    let variance = read_channels::<S, W, N>(&variance, channel, one);
    let inverse_std = Vector::new(W::new(1.0)) / (variance + Vector::new(epsilon.get::<W>())).sqrt();
    let distance =
        Vector::<W, N>::cast_from(x.read(ABSOLUTE_POS)) - read_channels::<S, W, N>(&mean, channel, one);
    let share = Vector::<W, N>::new(W::new(1.0) / W::cast_from(shape.repeats * shape.inner));
    let mean_of_dy = read_channels::<W, W, N>(&sums, channel, one) * share;
    let mean_of_products = read_channels::<W, W, N>(&sums, shape.channels + channel, one) * share;
    let normalized = distance * inverse_std;
    let centered =
        Vector::<W, N>::cast_from(dy.read(ABSOLUTE_POS)) - mean_of_dy - normalized * mean_of_products;
    let scale = read_channels::<T, W, N>(&gamma, channel, one) * inverse_std;
    dx.write(ABSOLUTE_POS, Vector::cast_from(centered * scale));
}
