//! Losses of logits, and of a dense layer's outputs in chunks.
use super::guard::{into_maybe, is_tracked, require_bias};
use crate::backend::optional::MaybeMask;
use crate::ops::ElementLoss;
use crate::ops::{
    CrossEntropyOps, Divergence, ElementLossOps, HardLabels as MaybeLabels, LinearCrossEntropy,
    LinearCrossEntropyOps, LinearDivergence, LinearDivergenceOps, LinearLogProbOps, TeacherHead,
};
use burn::backend::Dispatch;
use burn::tensor::{Bool, Int, Tensor, assert_shape};

/// The cross entropy of every row of logits, `-sum(q w log(softmax(logits)))`, where `w` are the class weights, and `q` is 1 at
/// the target and 0 elsewhere, smoothed to `(1 - smoothing) q + smoothing / classes`.
///
/// Keeps the logits, and one number and the target per row. The module is
/// [`CrossEntropyLoss`](crate::nn::loss::CrossEntropyLoss).
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
/// Panics if the shapes are not these, if there is no class, or if the weights are tracked. A target that is not a class panics
/// on CPU backends. On wgpu and CUDA it makes the loss of its row NaN, and the gradient of the row, too, unless the gradient of
/// that loss is 0.
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
#[derive(Clone, Debug, Default)]
pub struct LinearCrossEntropyOptions {
    /// How much the loss of each row counts, `[rows]`; in f32 if `x` is in half precision, since factors may be small. A row
    /// with factor 0 does not count, whatever it and its target hold. Default: `1 / rows`, so that the result is the mean.
    pub factors: Option<Tensor<1>>,
    /// The class weights, `[classes]`. Default: all 1.
    pub class_weights: Option<Tensor<1>>,
    /// Label smoothing. Default: none.
    pub smoothing: Option<f32>,
    /// The softcap `c` of the logits, which become `c tanh(logits / c)`. Default: none.
    pub softcap: Option<f64>,
    /// How many bytes of logits exist at a time. These are at least one row; with a tracked weight in half precision, at least
    /// 64 classes of all rows; with a tracked weight, fewer rows than features and no softcap, all logits. Default: 16 MiB, or more
    /// if a device needs more rows to be busy. On an H200 in f32, that is 4 MiB per 1000 classes with 1024 features, and 8 MiB
    /// with 512.
    pub chunk_bytes: Option<usize>,
}

/// `sum(factors * cross_entropy(x weight + bias, targets))`, the [cross entropy](cross_entropy) of a dense layer's outputs,
/// which are computed in chunks.
///
/// The forward pass computes the gradients of what is tracked, and keeps them. With a tracked weight and fewer rows than
/// features, it keeps the gradient of the logits instead, and handles of `x` and the weight. Otherwise, with a tracked weight
/// in half precision, it keeps these handles instead of the weight's gradient. The module is
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
/// Panics if the shapes or dtypes do not fit, if there is no row or no class, if factors or class weights are tracked, or if the
/// softcap is not positive and finite. If the target of a row that counts is not a class, it panics on CPU backends, and the loss
/// is NaN on wgpu and CUDA.
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
    let classes = head_classes("linear_cross_entropy", &x, &weight, &bias);
    assert_shape!(targets, [x.dims()[0]]);
    check_options("linear_cross_entropy", &options, &x);
    let class_weights = class_weights(options.class_weights, classes, &x);
    let targets = targets_that_count(targets, &options.factors);
    Tensor::from_dispatch(Dispatch::memsave_linear_cross_entropy(
        x.into_dispatch(),
        weight.into_dispatch(),
        into_maybe(bias),
        targets.into_dispatch(),
        into_maybe(options.factors),
        into_maybe(class_weights),
        LinearCrossEntropy {
            smoothing: options.smoothing,
            softcap: options.softcap,
            chunk_bytes: options.chunk_bytes,
        },
    ))
}

/// The number of classes that a dense layer gives for this input.
///
/// # Panics
///
/// Panics if there is no row or no class, or if shapes or dtypes do not fit.
fn head_classes(function: &str, x: &Tensor<2>, weight: &Tensor<2>, bias: &Option<Tensor<1>>) -> usize {
    let ([rows, d_input], [_, classes]) = (x.dims(), weight.dims());
    assert_shape!(weight, [d_input, classes]);
    assert!(rows > 0 && classes > 0, "{function}: {rows} rows of {classes} classes have no loss");
    assert!(
        x.dtype() == weight.dtype()
            && require_bias(bias, classes).is_ok()
            && bias.as_ref().is_none_or(|bias| bias.dtype() == x.dtype()),
        "{function}: weight and bias must have the dtype of x, and the bias one number per class"
    );
    classes
}

/// # Panics
///
/// Panics if these options do not fit, or if the softcap is not positive and finite.
pub(super) fn check_options(function: &str, options: &LinearCrossEntropyOptions, x: &Tensor<2>) {
    check_factors(function, &options.factors, x);
    let softcap = options.softcap;
    let is_cap = |cap: f64| cap > 0.0 && cap.is_finite();
    assert!(softcap.is_none_or(is_cap), "{function}: a softcap of {softcap:?}");
}

fn check_factors(function: &str, factors: &Option<Tensor<1>>, x: &Tensor<2>) {
    if let Some(factors) = factors {
        assert_shape!(factors, [x.dims()[0]]);
        assert!(!factors.is_tracked(), "{function}: the factors have no gradient");
    }
}

/// The targets, with the first class where the factor is 0, since data sets may hold anything there.
pub(super) fn targets_that_count(targets: Tensor<1, Int>, factors: &Option<Tensor<1>>) -> Tensor<1, Int> {
    match factors {
        Some(factors) => targets.mask_fill(factors.clone().equal_scalar(0), 0),
        None => targets,
    }
}

/// The hidden states of a teacher and its head; no gradient flows to them.
#[derive(Clone, Debug)]
pub struct Teacher {
    /// The input of the head, `[rows, d_teacher]`.
    pub x: Tensor<2>,
    /// `[d_teacher, classes]`
    pub weight: Tensor<2>,
    /// `[classes]`
    pub bias: Option<Tensor<1>>,
}

/// Labels in addition to the probabilities of a teacher.
#[derive(Clone, Debug)]
pub struct HardLabels {
    /// The class of every row, `[rows]`.
    pub targets: Tensor<1, Int>,
    /// The weight of the cross entropy, where the divergence has weight 1.
    pub weight: f64,
}

/// Options of [`linear_kl_div`] and [`linear_jsd`].
#[derive(Clone, Debug)]
pub struct DistillationOptions {
    /// The number by which the logits of student and teacher are divided before the softmax. The result is not multiplied by
    /// its square, as [some do](https://arxiv.org/abs/1503.02531). Default: 1.
    pub temperature: f64,
    /// How much the loss of each row counts, `[rows]`; in f32 if `x` is in half precision, since factors may be small. A row
    /// with factor 0 does not count, whatever it and its target hold. Default: `1 / rows`, so that the result is the mean.
    pub factors: Option<Tensor<1>>,
    /// Adds to the loss of every row the [cross entropy](cross_entropy) of the student's logits, which are not divided by the
    /// temperature. Default: none.
    pub hard_labels: Option<HardLabels>,
    /// How many bytes of logits, of student and teacher together, exist at a time. These are at least one row and, with a
    /// tracked weight in half precision, at least 64 classes of all rows. Default: as in [`LinearCrossEntropyOptions`].
    pub chunk_bytes: Option<usize>,
}

impl Default for DistillationOptions {
    fn default() -> Self {
        Self { temperature: 1.0, factors: None, hard_labels: None, chunk_bytes: None }
    }
}

/// The direction in which [`linear_kl_div`] compares the probabilities of the teacher, `p`, and those of the student, `q`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KlDirection {
    /// `KL(p, q) = sum(p log(p / q))`, as in [distillation](https://arxiv.org/abs/1503.02531): the student covers all that the
    /// teacher may say.
    Forward,
    /// `KL(q, p) = sum(q log(q / p))`, as in [MiniLLM](https://arxiv.org/abs/2306.08543): the student says nothing that the teacher
    /// would not.
    Reverse,
}

/// `sum(factors * KL)` between the probabilities of a dense layer, `q = softmax((x weight + bias) / temperature)`, and those of
/// a [`Teacher`], `p`. The logits of both are computed in chunks.
///
/// Keeps what [`linear_cross_entropy`] keeps: the gradients of what is tracked, which the forward pass computes, or, with a
/// tracked weight and fewer rows than features, the gradient of the student's logits. With a tracked weight in half precision
/// and more rows, it keeps handles of `x` and the weight, the same of the teacher, and five numbers per row.
///
/// # Shapes
///
/// - x: `[rows, d_input]`
/// - weight: `[d_input, classes]`
/// - bias: `[classes]`
/// - output: `[1]`
///
/// # Panics
///
/// Panics if the shapes or dtypes (one dtype for student and teacher) do not fit, if there is no row or no class, if the
/// temperature is not positive and finite, or if the teacher or the factors are tracked. If the target of a row that counts is
/// not a class, it panics on CPU backends, and the loss is NaN on wgpu and CUDA.
///
/// ```
/// use burn::tensor::{Device, Tensor, Tolerance};
/// use burn_memsave_layers::functional::{self as F, DistillationOptions, KlDirection, Teacher};
///
/// let device = Device::flex();
/// let [x, weight] = [Tensor::<2>::ones([3, 4], &device), Tensor::<2>::zeros([4, 2], &device)];
/// let teacher = Teacher {
///     x: Tensor::from_floats([[1.0], [1.0], [1.0]], &device),
///     weight: Tensor::from_floats([[0.0, 1.0986123]], &device), // the probabilities 1/4 and 3/4
///     bias: None,
/// };
/// let loss = F::linear_kl_div(x, weight, None, teacher, KlDirection::Forward, DistillationOptions::default());
/// loss.to_data().assert_approx_eq::<f32>(&[0.130812f32].into(), Tolerance::default());
/// ```
pub fn linear_kl_div(
    x: Tensor<2>,
    weight: Tensor<2>,
    bias: Option<Tensor<1>>,
    teacher: Teacher,
    direction: KlDirection,
    options: DistillationOptions,
) -> Tensor<1> {
    let divergence = match direction {
        KlDirection::Forward => Divergence::Forward,
        KlDirection::Reverse => Divergence::Reverse,
    };
    distillation("linear_kl_div", (x, weight, bias), teacher, divergence, options)
}

/// `sum(factors * JSD)`, the generalized Jensen-Shannon divergence of [GKD](https://arxiv.org/abs/2306.13649) between the
/// probabilities of a dense layer, `q`, and those of a [`Teacher`], `p`: `beta KL(p, m) + (1 - beta) KL(q, m)` with
/// `m = beta p + (1 - beta) q`.
///
/// As `beta` goes to 0, it becomes `beta` times the forward divergence of [`linear_kl_div`], and as it goes to 1, `1 - beta` times
/// the reverse one; at 0 and 1 it is 0. Keeps what [`linear_kl_div`] keeps.
///
/// # Shapes
///
/// - x: `[rows, d_input]`
/// - weight: `[d_input, classes]`
/// - bias: `[classes]`
/// - output: `[1]`
///
/// # Panics
///
/// Panics if `beta` is not above 0 and below 1, and as [`linear_kl_div`] does.
///
/// ```
/// use burn::tensor::{Device, Tensor, Tolerance};
/// use burn_memsave_layers::functional::{self as F, DistillationOptions, Teacher};
///
/// let device = Device::flex();
/// let [x, weight] = [Tensor::<2>::ones([3, 4], &device), Tensor::<2>::zeros([4, 2], &device)];
/// let teacher = Teacher {
///     x: Tensor::from_floats([[1.0], [1.0], [1.0]], &device),
///     weight: Tensor::from_floats([[0.0, 1.0986123]], &device), // the probabilities 1/4 and 3/4
///     bias: None,
/// };
/// let loss = F::linear_jsd(x, weight, None, teacher, 0.5, DistillationOptions::default());
/// loss.to_data().assert_approx_eq::<f32>(&[0.033821f32].into(), Tolerance::default());
/// ```
pub fn linear_jsd(
    x: Tensor<2>,
    weight: Tensor<2>,
    bias: Option<Tensor<1>>,
    teacher: Teacher,
    beta: f64,
    options: DistillationOptions,
) -> Tensor<1> {
    assert!(beta > 0.0 && beta < 1.0, "linear_jsd: beta must be above 0 and below 1, not {beta}");
    distillation("linear_jsd", (x, weight, bias), teacher, Divergence::JensenShannon { beta }, options)
}

fn distillation(
    function: &str,
    (x, weight, bias): (Tensor<2>, Tensor<2>, Option<Tensor<1>>),
    teacher: Teacher,
    divergence: Divergence,
    options: DistillationOptions,
) -> Tensor<1> {
    let DistillationOptions { temperature, factors, hard_labels, chunk_bytes } = options;
    let classes = head_classes(function, &x, &weight, &bias);
    let classes_of_teacher = head_classes(function, &teacher.x, &teacher.weight, &teacher.bias);
    let shapes = [[x.dims()[0], classes], [teacher.x.dims()[0], classes_of_teacher]];
    assert!(
        shapes[0] == shapes[1] && x.dtype() == teacher.x.dtype(),
        "{function}: logits {:?} of {:?} are not those of the teacher, {:?} of {:?}",
        shapes[0],
        x.dtype(),
        shapes[1],
        teacher.x.dtype()
    );
    let tracked = teacher.x.is_tracked() || teacher.weight.is_tracked() || is_tracked(&teacher.bias);
    assert!(!tracked, "{function}: the teacher has no gradient");
    assert!(temperature > 0.0 && temperature.is_finite(), "{function}: a temperature of {temperature}");
    check_factors(function, &factors, &x);
    let (labels, hard_weight) = match hard_labels {
        Some(HardLabels { targets, weight }) => {
            assert_shape!(targets, [x.dims()[0]]);
            (MaybeLabels::Some(targets_that_count(targets, &factors).into_dispatch()), weight)
        }
        None => (MaybeLabels::None, 0.0),
    };
    let (teacher_x, weight_of_teacher) = (teacher.x.into_dispatch(), teacher.weight.into_dispatch());
    let teacher = match teacher.bias {
        Some(bias) => {
            TeacherHead::Biased { x: teacher_x, weight: weight_of_teacher, bias: bias.into_dispatch() }
        }
        None => TeacherHead::Unbiased { x: teacher_x, weight: weight_of_teacher },
    };
    Tensor::from_dispatch(Dispatch::memsave_linear_divergence(
        x.into_dispatch(),
        weight.into_dispatch(),
        into_maybe(bias),
        teacher,
        into_maybe(factors),
        labels,
        LinearDivergence { divergence, temperature, hard_weight, chunk_bytes },
    ))
}

/// Options of [`linear_log_prob`].
#[derive(Clone, Debug, Default)]
pub struct LinearLogProbOptions {
    /// Which rows count, `[rows]`. The result of a row that does not count is 0, whatever the row and its target hold. Default:
    /// all.
    pub mask: Option<Tensor<1, Bool>>,
    /// How many bytes of logits exist at a time. These are at least one row and, in the backward pass of a tracked weight in
    /// half precision, at least 64 classes of all rows. Default: as in [`LinearCrossEntropyOptions`].
    pub chunk_bytes: Option<usize>,
}

/// The logarithm of the probability that a dense layer gives to the target of every row,
/// `log(softmax(x weight + bias))[target]`. The logits are computed in chunks. [`sequence_log_prob`](super::sequence_log_prob)
/// sums the results.
///
/// Keeps handles of `x`, the weight and the bias, `log(sum(exp(logits)))` per row, the targets and the mask. The backward pass
/// recomputes the logits, chunk by chunk (in half precision twice, if `x` and the weight are tracked).
///
/// # Shapes
///
/// - x: `[rows, d_input]`
/// - weight: `[d_input, classes]`
/// - bias: `[classes]`
/// - targets: `[rows]`
/// - output: `[rows]`; in f32 if `x` is in half precision, which is too coarse for the sums that preference losses compare
///
/// # Panics
///
/// Panics if the shapes or dtypes do not fit, or if there is no row or no class. If the target of a row that counts is not a
/// class, it panics on CPU backends, and the result of the row is NaN on wgpu and CUDA.
///
/// ```
/// use burn::tensor::{Device, Int, Tensor, Tolerance};
/// use burn_memsave_layers::functional as F;
///
/// let device = Device::flex();
/// let (x, weight) = (Tensor::<2>::ones([2, 1], &device), Tensor::from_floats([[0.0, 1.0986123]], &device));
/// let targets = Tensor::<1, Int>::from_ints([0, 1], &device);
/// let log_probs = F::linear_log_prob(x, weight, None, targets, Default::default());
/// log_probs.exp().to_data().assert_approx_eq::<f32>(&[0.25f32, 0.75].into(), Tolerance::default());
/// ```
pub fn linear_log_prob(
    x: Tensor<2>,
    weight: Tensor<2>,
    bias: Option<Tensor<1>>,
    targets: Tensor<1, Int>,
    options: LinearLogProbOptions,
) -> Tensor<1> {
    let LinearLogProbOptions { mask, chunk_bytes } = options;
    let rows = x.dims()[0];
    head_classes("linear_log_prob", &x, &weight, &bias);
    assert_shape!(targets, [rows]);
    let (targets, padding) = match mask {
        None => (targets, MaybeMask::None),
        Some(mask) => {
            assert_shape!(mask, [rows]);
            let padding = mask.bool_not();
            (targets.mask_fill(padding.clone(), 0), MaybeMask::Some(padding.into_dispatch()))
        }
    };
    Tensor::from_dispatch(Dispatch::memsave_linear_log_prob(
        x.into_dispatch(),
        weight.into_dispatch(),
        into_maybe(bias),
        targets.into_dispatch(),
        padding,
        chunk_bytes,
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
