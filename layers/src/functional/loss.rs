//! Losses.
use super::maybe;
use crate::backend::ElementLoss;
use crate::ops::{CrossEntropyOps, ElementLossOps};
use burn::backend::Dispatch;
use burn::tensor::{Int, Tensor, assert_shape};

/// The cross entropy of every row of logits, `-sum(q w log(softmax(logits)))`, with the weights `w` of the classes, and with
/// `q` 1 at the target and 0 elsewhere, smoothed to `(1 - smoothing) q + smoothing / classes`.
///
/// Keeps the logits and one number per row. The module is [`CrossEntropyLoss`](crate::nn::loss::CrossEntropyLoss).
///
/// # Shapes
///
/// - logits: `[rows, classes]`
/// - targets: `[rows]`
/// - weights: `[classes]`
/// - output: `[rows]`
///
/// # Panics
///
/// Panics if the shapes are others, if there is no class, or if the weights are tracked.
///
/// ```
/// use burn::tensor::{Device, Int, Tensor, Tolerance};
/// use burn_memsave_layers::functional as F;
///
/// let device = Device::flex();
/// let logits = Tensor::<2>::from_floats([[0.0, 0.0], [0.0, 1.0]], &device);
/// let loss = F::cross_entropy(logits, Tensor::<1, Int>::from_ints([0, 1], &device), None, None);
/// loss.to_data().assert_approx_eq::<f32>(&[0.6931472f32, 0.3132617].into(), Tolerance::default());
/// ```
pub fn cross_entropy(
    logits: Tensor<2>,
    targets: Tensor<1, Int>,
    weights: Option<Tensor<1>>,
    smoothing: Option<f32>,
) -> Tensor<1> {
    let [rows, classes] = logits.dims();
    assert_shape!(targets, [rows]);
    assert!(classes > 0, "cross_entropy: logits of shape {:?} have no class", logits.dims());
    let weights = class_weights(weights, classes, &logits);
    if rows == 0 {
        return logits.sum_dim(1).reshape([rows]);
    }
    Tensor::from_dispatch(Dispatch::memsave_cross_entropy(
        logits.into_dispatch(),
        targets.into_dispatch(),
        maybe(weights),
        smoothing,
    ))
}

/// The weights of classes in the dtype of `like`.
pub(crate) fn class_weights<const D: usize>(
    weights: Option<Tensor<1>>,
    classes: usize,
    like: &Tensor<D>,
) -> Option<Tensor<1>> {
    weights.map(|weights| {
        assert_shape!(weights, [classes]);
        assert!(!weights.is_tracked(), "cross_entropy: the weights of the classes have no gradient");
        weights.cast(like.dtype())
    })
}

/// `f` of every element of `x`, given targets of its shape and dtype.
pub(crate) fn element_loss<const D: usize>(
    x: Tensor<D>,
    targets: Option<Tensor<D>>,
    f: ElementLoss,
) -> Tensor<D> {
    Tensor::from_dispatch(Dispatch::memsave_element_loss(x.into_dispatch(), maybe(targets), f, None))
}

/// `scale` times the sum of [`element_loss`].
pub(crate) fn element_loss_sum<const D: usize>(
    x: Tensor<D>,
    targets: Option<Tensor<D>>,
    f: ElementLoss,
    scale: f64,
) -> Tensor<1> {
    Tensor::from_dispatch(Dispatch::memsave_element_loss(x.into_dispatch(), maybe(targets), f, Some(scale)))
}
