//! Normalizations.
use super::activation::activate;
use super::guard::{
    Misfit, accepts, into_maybe, is_tracked, require, require_alike, require_parameters,
    require_parameters_of_channels,
};
use crate::graph::Member;
use crate::ops::{
    ActivatedBatchNormOps, AddRmsNormOps, BatchNormOps, ElementActivation, LocalResponse, LocalResponseOps,
    RowNorm, RowNormOps, SynchronizedBatchNormOps,
};
use burn::backend::Dispatch;
use burn::tensor::{DType, Tensor, module, module::BatchNormTrainOutput};

/// A batch normalization with given statistics, as after training. All tensors are `[channels]`.
#[derive(Clone, Debug)]
pub struct GivenNorm {
    /// The scale.
    pub gamma: Tensor<1>,
    /// The shift, which is added last.
    pub beta: Tensor<1>,
    /// The mean that is subtracted.
    pub mean: Tensor<1>,
    /// The variance, whose square root is the divisor.
    pub variance: Tensor<1>,
    /// A number that is added to the variance.
    pub epsilon: f64,
}

impl GivenNorm {
    /// Whether it fits `channels` channels of `dtype`, and nothing but `beta` is tracked.
    pub(super) fn is_given(&self, dtype: DType, channels: usize) -> bool {
        let Self { gamma, beta, mean, variance, .. } = self;
        let fits = |tensor: &Tensor<1>| tensor.dims() == [channels] && tensor.dtype() == dtype;
        [gamma, beta, mean, variance].into_iter().all(fits)
            && [gamma, mean, variance].into_iter().all(|tensor| !tensor.is_tracked())
    }
}

/// Batch normalization with given statistics; see [`burn::tensor::module::batch_norm`]. If the statistics are tracked, Burn's
/// own function runs.
///
/// Keeps tensors of the size of `gamma`, and `x` only if `gamma` is tracked.
pub fn batch_norm<const D: usize>(
    x: Tensor<D>,
    gamma: Tensor<1>,
    beta: Tensor<1>,
    mean: Tensor<1>,
    variance: Tensor<1>,
    epsilon: f64,
) -> Tensor<D> {
    let statistics_tracked = mean.is_tracked() || variance.is_tracked();
    let tracked = x.is_tracked() || gamma.is_tracked() || beta.is_tracked() || statistics_tracked;
    let parameters = [&gamma, &beta, &mean, &variance].map(Some);
    let fit = require_parameters_of_channels(&x, &parameters)
        .and(require(!statistics_tracked, Misfit::TrackedStatistics));
    if !tracked || !accepts("batch_norm", fit, tracked, Some(&gamma)) {
        return module::batch_norm(x, gamma, beta, mean, variance, epsilon);
    }
    let [gamma, beta, mean, variance] = [gamma, beta, mean, variance].map(Tensor::into_dispatch);
    let x = x.into_dispatch();
    Tensor::from_dispatch(Dispatch::memsave_batch_norm(x, gamma, beta, mean, variance, epsilon))
}

/// Batch normalization with the statistics of the batch, which it also returns; see [`burn::tensor::module::batch_norm_train`].
///
/// Keeps `x`, or nothing at all if only `beta` is tracked.
///
/// In replicas that [synchronize](https://docs.rs/burn-memsave/latest/burn_memsave/parallel/struct.ReplicaOptions.html#method.with_synchronized_batch_norm)
/// it, on the thread of a replica, the statistics are those of all parts of the batch.
///
/// # Panics
///
/// Panics in such replicas if `x` and the parameters differ in dtype or device.
pub fn batch_norm_train<const D: usize>(
    x: Tensor<D>,
    gamma: Tensor<1>,
    beta: Tensor<1>,
    epsilon: f64,
) -> BatchNormTrainOutput<D> {
    let tracked = x.is_tracked() || gamma.is_tracked() || beta.is_tracked();
    let fit = require_parameters_of_channels(&x, &[Some(&gamma), Some(&beta)]);
    let member = Member::current();
    if !accepts("batch_norm_train", fit, tracked, Some(&gamma)) {
        assert!(
            member.is_none(),
            "a batch norm of replicas is synchronized only if its input is not empty, and of the dtype and on the device of its parameters"
        );
        return module::batch_norm_train(x, gamma, beta, epsilon);
    }
    let (x, gamma, beta) = (x.into_dispatch(), gamma.into_dispatch(), beta.into_dispatch());
    let result = match member {
        None => Dispatch::memsave_batch_norm_train(x, gamma, beta, epsilon),
        Some(member) => Dispatch::memsave_batch_norm_synchronized(x, gamma, beta, epsilon, member),
    };
    BatchNormTrainOutput {
        output: Tensor::from_dispatch(result.output),
        mean: Tensor::from_dispatch(result.mean),
        variance: Tensor::from_dispatch(result.variance),
    }
}

/// `f(z)` of `z`, the output of [`batch_norm_train`], which Burn does not have as one function.
///
/// On CPUs, both take the same passes over the elements: `z` is not written to memory, neither here nor in the backward pass. Keeps `x`.
/// On devices, and if only `beta` is tracked, they run one after the other, and keep what they keep alone.
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use burn_memsave_layers::functional::{self as F, PiecewiseLinear};
///
/// let device = Device::flex().autodiff();
/// let x = Tensor::<2>::from_floats([[1.0], [3.0]], &device).require_grad();
/// let [gamma, beta] = [Tensor::<1>::ones([1], &device), Tensor::<1>::zeros([1], &device)];
/// let y = F::batch_norm_train_activated(x, gamma, beta, 1e-5, PiecewiseLinear::Relu).output;
/// y.to_data().assert_approx_eq::<f32>(&[[0.0f32], [1.0]].into(), burn::tensor::Tolerance::default());
/// ```
///
/// # Panics
///
/// Panics if the bounds of a piecewise linear activation are not in order.
pub fn batch_norm_train_activated<const D: usize>(
    x: Tensor<D>,
    gamma: Tensor<1>,
    beta: Tensor<1>,
    epsilon: f64,
    activation: impl Into<ElementActivation>,
) -> BatchNormTrainOutput<D> {
    let activation = activation.into();
    assert!(activation.is_ordered(), "the bounds of {activation:?} are not in order");
    let keeps_x = x.is_tracked() || gamma.is_tracked() || !beta.is_tracked();
    let fit = require_parameters_of_channels(&x, &[Some(&gamma), Some(&beta)]);
    if fit.is_err() || !keeps_x || Member::current().is_some() {
        let BatchNormTrainOutput { output, mean, variance } = batch_norm_train(x, gamma, beta, epsilon);
        return BatchNormTrainOutput { output: activate(output, activation), mean, variance };
    }
    let (x, gamma, beta) = (x.into_dispatch(), gamma.into_dispatch(), beta.into_dispatch());
    let result = Dispatch::memsave_batch_norm_activated(x, gamma, beta, epsilon, activation);
    BatchNormTrainOutput {
        output: Tensor::from_dispatch(result.output),
        mean: Tensor::from_dispatch(result.mean),
        variance: Tensor::from_dispatch(result.variance),
    }
}

/// Layer normalization over the last axis; see [`burn::tensor::module::layer_norm`].
///
/// Keeps `x`, or nothing at all if only `beta` is tracked.
pub fn layer_norm<const D: usize>(
    x: Tensor<D>,
    gamma: Tensor<1>,
    beta: Option<Tensor<1>>,
    epsilon: f64,
) -> Tensor<D> {
    let tracked = x.is_tracked() || gamma.is_tracked() || is_tracked(&beta);
    let features = x.dims()[D - 1];
    let fit = require_parameters(&x, features, &[Some(&gamma), beta.as_ref()]);
    if !tracked || !accepts("layer_norm", fit, tracked, Some(&gamma)) {
        return module::layer_norm(x, gamma, beta, epsilon);
    }
    row_norm(x, Some(gamma), beta, RowNorm::over_last(features, true, epsilon))
}

/// RMS normalization over the last axis, `x / sqrt(mean(x^2) + epsilon) * gamma`, as in [`burn::nn::RmsNorm`] (which computes
/// the root in f32 whatever the dtype; here f64 stays f64).
///
/// Keeps `x`.
///
/// ```
/// use burn::tensor::{Device, Tensor, Tolerance};
/// use burn_memsave_layers::functional as F;
///
/// let device = Device::flex();
/// let (x, gamma) = (Tensor::<1>::from_floats([3.0, 4.0], &device), Tensor::ones([2], &device));
/// let y = F::rms_norm(x, gamma, 0.0); // the root mean square is 5 / sqrt(2)
/// y.to_data().assert_approx_eq::<f32>(&[0.8485281f32, 1.1313708].into(), Tolerance::default());
/// ```
pub fn rms_norm<const D: usize>(x: Tensor<D>, gamma: Tensor<1>, epsilon: f64) -> Tensor<D> {
    let features = x.dims()[D - 1];
    let fit = require(features > 0, Misfit::Empty).and(require_parameters(&x, features, &[Some(&gamma)]));
    if !accepts("rms_norm", fit, x.is_tracked() || gamma.is_tracked(), Some(&gamma)) {
        let dtype = x.dtype();
        let rms = (x.clone().cast(DType::F32).square().mean_dim(D - 1) + epsilon).sqrt();
        return (x / rms.cast(dtype)) * gamma.unsqueeze();
    }
    row_norm(x, Some(gamma), None, RowNorm::over_last(features, false, epsilon))
}

/// The residual sum `x + residual` and its [RMS norm](rms_norm), in one pass, for `x` and `residual` of the same shape.
///
/// Keeps the sum.
///
/// ```
/// use burn::tensor::{Device, Tensor, Tolerance};
/// use burn_memsave_layers::functional as F;
///
/// let device = Device::flex();
/// let [x, residual] = [[1.0, 3.0], [2.0, 1.0]].map(|x| Tensor::<1>::from_floats(x, &device));
/// let (sum, norm) = F::add_rms_norm(x, residual, Tensor::ones([2], &device), 0.0);
/// sum.to_data().assert_eq(&[3.0f32, 4.0].into(), true);
/// norm.to_data().assert_approx_eq::<f32>(&[0.8485281f32, 1.1313708].into(), Tolerance::default());
/// ```
pub fn add_rms_norm<const D: usize>(
    x: Tensor<D>,
    residual: Tensor<D>,
    gamma: Tensor<1>,
    epsilon: f64,
) -> (Tensor<D>, Tensor<D>) {
    let features = x.dims()[D - 1];
    let fit = require_alike(&x, &residual).and(require_parameters(&x, features, &[Some(&gamma)]));
    let tracked = x.is_tracked() || residual.is_tracked() || gamma.is_tracked();
    if !accepts("add_rms_norm", fit, tracked, Some(&gamma)) {
        let sum = x + residual;
        return (sum.clone(), rms_norm(sum, gamma, epsilon));
    }
    let [x, residual, gamma] = [x.into_dispatch(), residual.into_dispatch(), gamma.into_dispatch()];
    let result = Dispatch::memsave_add_rms_norm(x, residual, gamma, epsilon);
    (Tensor::from_dispatch(result.sum), Tensor::from_dispatch(result.norm))
}

/// Group normalization of `[batch, channels, ...]`, as in [`burn::nn::GroupNorm`]; with as many groups as channels, instance
/// normalization. `gamma` and `beta` are each optional: without `gamma` nothing is scaled, without `beta` nothing is shifted.
///
/// Keeps `x`, or nothing at all if only `beta` is tracked.
///
/// # Panics
///
/// Panics if the channels cannot be divided into `groups`, or if `gamma` or `beta` is not one number per channel of the
/// dtype of `x`.
pub fn group_norm<const D: usize>(
    x: Tensor<D>,
    gamma: Option<Tensor<1>>,
    beta: Option<Tensor<1>>,
    groups: usize,
    epsilon: f64,
) -> Tensor<D> {
    let dims = x.dims();
    let channels = dims.get(1).copied().unwrap_or(0);
    assert!(
        D >= 2 && groups > 0 && channels.is_multiple_of(groups),
        "group_norm: axis 1 of {dims:?} cannot be {groups} groups"
    );
    assert!(
        require_parameters(&x, channels, &[gamma.as_ref(), beta.as_ref()]).is_ok(),
        "group_norm: gamma and beta must be [{channels}] of {:?}, not {:?} and {:?}",
        x.dtype(),
        gamma.as_ref().map(|gamma| (gamma.dims(), gamma.dtype())),
        beta.as_ref().map(|beta| (beta.dims(), beta.dtype())),
    );
    let inner = dims[2..].iter().product();
    row_norm(x, gamma, beta, RowNorm { centered: true, epsilon, groups, channels: channels / groups, inner })
}

fn row_norm<const D: usize>(
    x: Tensor<D>,
    gamma: Option<Tensor<1>>,
    beta: Option<Tensor<1>>,
    norm: RowNorm,
) -> Tensor<D> {
    Tensor::from_dispatch(Dispatch::memsave_row_norm(
        x.into_dispatch(),
        into_maybe(gamma),
        into_maybe(beta),
        norm,
    ))
}

/// `x / (k + alpha / size * sum(x^2))^beta` of `[batch, channels, ...]`, where the sum is over a window of `size` channels
/// around each channel, as in [`burn::nn::LocalResponseNorm`]. Keeps `x`.
///
/// ```
/// use burn::tensor::{Device, Tensor, Tolerance};
/// use burn_memsave_layers::functional as F;
///
/// let x = Tensor::<3>::from_floats([[[1.0], [3.0]]], &Device::flex());
/// let y = F::local_response_norm(x, 1, 1.0, 0.5, 0.0);
/// y.to_data().assert_approx_eq::<f32>(&[[[1.0f32], [1.0]]].into(), Tolerance::default());
/// ```
///
/// # Panics
///
/// Panics for an input of rank 1, and for an empty window.
pub fn local_response_norm<const D: usize>(
    x: Tensor<D>,
    size: usize,
    alpha: f64,
    beta: f64,
    k: f64,
) -> Tensor<D> {
    assert!(D >= 2, "local_response_norm: an input of rank {D} has no channels");
    assert!(size > 0, "local_response_norm: the window must have a channel");
    let norm = LocalResponse { size, alpha, beta, k };
    Tensor::from_dispatch(Dispatch::memsave_local_response(x.into_dispatch(), norm))
}
