//! Losses.
use super::guard::{into_maybe, require_bias};
use crate::ops::ElementLoss;
use crate::ops::{CrossEntropyOps, ElementLossOps, LinearCrossEntropy, LinearCrossEntropyOps};
use burn::backend::Dispatch;
use burn::tensor::{Int, Tensor, assert_shape};

/// The cross entropy of every row of logits, `-sum(q w log(softmax(logits)))`, where `w` are the class weights, and `q` is 1 at
/// the target and 0 elsewhere, smoothed to `(1 - smoothing) q + smoothing / classes`.
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
/// Panics if the shapes are not these, if there is no class, or if the weights are tracked.
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
        into_maybe(weights),
        smoothing,
    ))
}

/// The class weights in the dtype of `like`.
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

/// Options of [`linear_cross_entropy`].
#[derive(Clone, Debug)]
pub struct LinearCrossEntropyOptions {
    /// How much the loss of each row counts, `[rows]`; in f32 if `x` is of half precision, since factors may be small. A row with
    /// factor 0 counts nothing, whatever it holds. Default: `1 / rows`, so that the result is the mean.
    pub factors: Option<Tensor<1>>,
    /// The class weights, `[classes]`. Default: all 1.
    pub class_weights: Option<Tensor<1>>,
    /// Label smoothing. Default: none.
    pub smoothing: Option<f32>,
    /// How many bytes of logits exist at a time; at least one row, for a tracked weight of half precision 64 classes of all
    /// rows, and for a tracked weight and fewer rows than features all. Default: 16 MiB.
    pub chunk_bytes: usize,
}

/// How many bytes of logits exist at a time.
pub(crate) const CHUNK_BYTES: usize = 16 << 20;

impl Default for LinearCrossEntropyOptions {
    fn default() -> Self {
        Self { factors: None, class_weights: None, smoothing: None, chunk_bytes: CHUNK_BYTES }
    }
}

/// `sum(factors * cross_entropy(x weight + bias, targets))`, the [cross entropy](cross_entropy) of a dense layer, whose
/// outputs are made in chunks.
///
/// Keeps the gradients of what is tracked, which the forward pass makes. With a tracked weight and fewer rows than features, it
/// keeps the gradient of the logits instead, and handles of `x` and the weight; else with a tracked weight of half precision,
/// these handles instead of the weight's gradient. The module is
/// [`FusedLinearCrossEntropy`](crate::nn::loss::FusedLinearCrossEntropy).
///
/// # Shapes
///
/// - x: `[rows, d_input]`
/// - weight: `[d_input, classes]`
/// - bias: `[classes]`
/// - targets: `[rows]`
/// - output: `[1]`
///
/// # Panics
///
/// Panics if the shapes or dtypes do not fit, if there is no row or no class, if a target is not a class, or if factors or
/// class weights are tracked.
///
/// ```
/// use burn::tensor::{Device, Int, Tensor, Tolerance};
/// use burn_memsave_layers::functional as F;
///
/// let device = Device::flex();
/// let (x, weight) = (Tensor::<2>::ones([3, 4], &device), Tensor::<2>::ones([4, 2], &device));
/// let targets = Tensor::<1, Int>::from_ints([0, 1, 1], &device);
/// let loss = F::linear_cross_entropy(x, weight, None, targets, Default::default());
/// loss.to_data().assert_approx_eq::<f32>(&[0.6931472f32].into(), Tolerance::default());
/// ```
pub fn linear_cross_entropy(
    x: Tensor<2>,
    weight: Tensor<2>,
    bias: Option<Tensor<1>>,
    targets: Tensor<1, Int>,
    options: LinearCrossEntropyOptions,
) -> Tensor<1> {
    let ([rows, d_input], [_, classes]) = (x.dims(), weight.dims());
    assert_shape!(weight, [d_input, classes]);
    assert_shape!(targets, [rows]);
    assert!(rows > 0 && classes > 0, "linear_cross_entropy: {rows} rows of {classes} classes have no mean");
    assert!(
        x.dtype() == weight.dtype() && require_bias(&bias, classes).is_ok(),
        "linear_cross_entropy: the weight must have the dtype of x, and the bias one number per class"
    );
    let class_weights = class_weights(options.class_weights, classes, &x);
    if let Some(factors) = &options.factors {
        assert_shape!(factors, [rows]);
        assert!(!factors.is_tracked(), "linear_cross_entropy: the factors have no gradient");
    }
    Tensor::from_dispatch(Dispatch::memsave_linear_cross_entropy(
        x.into_dispatch(),
        weight.into_dispatch(),
        into_maybe(bias),
        targets.into_dispatch(),
        into_maybe(options.factors),
        into_maybe(class_weights),
        LinearCrossEntropy { smoothing: options.smoothing, chunk_bytes: options.chunk_bytes },
    ))
}

/// `f` of every element of `x`, given targets of its shape and dtype.
pub(crate) fn element_loss<const D: usize>(
    x: Tensor<D>,
    targets: Option<Tensor<D>>,
    f: ElementLoss,
) -> Tensor<D> {
    Tensor::from_dispatch(Dispatch::memsave_element_loss(x.into_dispatch(), into_maybe(targets), f, None))
}

/// `scale` times the sum of [`element_loss`].
pub(crate) fn element_loss_sum<const D: usize>(
    x: Tensor<D>,
    targets: Option<Tensor<D>>,
    f: ElementLoss,
    scale: f64,
) -> Tensor<1> {
    Tensor::from_dispatch(Dispatch::memsave_element_loss(
        x.into_dispatch(),
        into_maybe(targets),
        f,
        Some(scale),
    ))
}
