//! Checks whether arguments fit the operations of this library.
//!
//! Arguments that do not fit go to Burn's own function, for the same result or the same panic. This is decided here and nowhere
//! else: a check returns a [`Fit`], and [`accepts`] reads it. If an argument is tracked, Burn records its own operation, and
//! the [ledger] gets an entry with the [reason](Misfit::reason).
use crate::graph::ledger;
use crate::{backend::optional::MaybeTensor, node::node_id, ops::Weight};
use burn::backend::Dispatch;
use burn::tensor::{DType, Tensor};

/// Why arguments do not fit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Misfit {
    /// Shapes that Burn's function may broadcast, or refuse.
    Shapes,
    /// There are no elements to compute with.
    Empty,
    /// The dtype of a parameter or a second input is not that of the input.
    Dtypes,
    /// A tensor is quantized, and Burn's function dequantizes it.
    Quantized,
    /// A dtype that the operation here does not compute with.
    UnsupportedDtype,
    /// The given statistics have a gradient, which the operation here does not compute.
    TrackedStatistics,
    /// The weights of the classes have a gradient, which the operation here does not compute.
    TrackedClassWeights,
    /// A parameter that the options ask for is not there.
    MissingParameter,
    /// A recurrent layer has other activations than sigmoid for the gates and tanh for the states.
    Activations,
    /// A direction of a bidirectional layer does not take its batch first, as Burn's code expects of it.
    BatchFirst,
    /// The steps of a sequence come one by one, not as one tensor.
    StepByStep,
    /// A three-dimensional convolution pads the two ends of an axis differently.
    AsymmetricPadding,
    /// A lower bound above the upper one, or a bound that is NaN.
    Bounds,
    /// The soft cap of the scores is not positive.
    Softcap,
    /// The rank of an adapter is not below both widths of its layer, so that products with its factors would not be narrow.
    WideAdapter,
    /// Options that the operation here does not have: a dilation of an average pool, coordinates of an interpolation that Burn
    /// 0.22.1 does not have, causal attention aligned with the first key if there are fewer or more keys than queries.
    Options,
}

impl Misfit {
    /// As it reads in the ledger.
    pub(crate) fn reason(self) -> &'static str {
        match self {
            Self::Shapes => "the shapes do not fit",
            Self::Empty => "there are no elements",
            Self::Dtypes => "the dtypes differ",
            Self::Quantized => "a quantized input",
            Self::UnsupportedDtype => "the dtype is not supported",
            Self::TrackedStatistics => "the statistics are tracked",
            Self::TrackedClassWeights => "the weights of the classes are tracked",
            Self::MissingParameter => "a parameter is missing",
            Self::Activations => "the activations are not sigmoid and tanh",
            Self::BatchFirst => "a direction is not batch first",
            Self::StepByStep => "the steps come one by one",
            Self::AsymmetricPadding => "the padding is asymmetric",
            Self::Bounds => "the bounds are not in order",
            Self::Softcap => "the softcap is not positive",
            Self::WideAdapter => "the adapter is as wide as its layer",
            Self::Options => "an option that is not supported",
        }
    }
}

/// Whether arguments fit.
pub(crate) type Fit = Result<(), Misfit>;

/// The `weight` of an operation that has none.
pub(crate) const NO_WEIGHT: Option<&Tensor<1>> = None;

/// Whether the operation of this library accepts the arguments. If it does not and an argument is `tracked`, the ledger gets an
/// entry, under the module of `weight`.
pub(crate) fn accepts<const D: usize>(
    operation: &'static str,
    fit: Fit,
    tracked: bool,
    weight: Option<&Tensor<D>>,
) -> bool {
    let Err(misfit) = fit else { return true };
    if tracked {
        report_misfit(operation, BURNS_OPERATION, misfit, weight);
    }
    false
}

/// What most often replaces an operation.
pub(crate) const BURNS_OPERATION: &str = "Burn's operation";

/// Adds an entry to the ledger: other operations replace the one whose arguments do not fit.
pub(crate) fn report_misfit<const D: usize>(
    operation: &'static str,
    in_its_place: &'static str,
    misfit: Misfit,
    weight: Option<&Tensor<D>>,
) {
    ledger::report(|| ledger::Entry {
        operation,
        tensor: in_its_place,
        bytes: None,
        reason: misfit.reason(),
        node: None,
        weight: weight.and_then(|weight| node_id(weight.clone())),
    });
}

/// The arguments fit if `condition` holds; otherwise `misfit` says why not.
pub(crate) fn require(condition: bool, misfit: Misfit) -> Fit {
    if condition { Ok(()) } else { Err(misfit) }
}

/// Requires that `x` has elements and that they are not quantized.
pub(crate) fn require_floats<const D: usize>(x: &Tensor<D>) -> Fit {
    require(x.shape().num_elements() > 0, Misfit::Empty)?;
    require(!is_quantized(x), Misfit::Quantized)
}

/// [`require_floats`] for `x`, and that `y` has its shape and dtype, so that there is nothing to broadcast or convert.
pub(crate) fn require_alike<const D: usize>(x: &Tensor<D>, y: &Tensor<D>) -> Fit {
    require_floats(x)?;
    require(x.dims() == y.dims(), Misfit::Shapes)?;
    require(x.dtype() == y.dtype(), Misfit::Dtypes)
}

/// Requires that the bias, if given, is `[length]` and not quantized; see [`dequantized_bias`].
pub(crate) fn require_bias(bias: &Option<Tensor<1>>, length: usize) -> Fit {
    require(bias.as_ref().is_none_or(|bias| bias.dims() == [length]), Misfit::Shapes)?;
    require(bias.as_ref().is_none_or(|bias| !is_quantized(bias)), Misfit::Quantized)
}

/// Requires that the given parameters are `[length]` and have the dtype of `x`, which is not quantized.
pub(crate) fn require_parameters<const D: usize>(
    x: &Tensor<D>,
    length: usize,
    parameters: &[Option<&Tensor<1>>],
) -> Fit {
    let mut parameters = parameters.iter().flatten();
    require(!is_quantized(x), Misfit::Quantized)?;
    require(parameters.clone().all(|parameter| parameter.dims() == [length]), Misfit::Shapes)?;
    require(parameters.all(|parameter| parameter.dtype() == x.dtype()), Misfit::Dtypes)
}

/// [`require_parameters`], with one number per channel of `x` `[batch, channels, ...]`, which must have elements.
pub(crate) fn require_parameters_of_channels<const D: usize>(
    x: &Tensor<D>,
    parameters: &[Option<&Tensor<1>>],
) -> Fit {
    require(D >= 2, Misfit::Shapes)?;
    require(x.shape().num_elements() > 0, Misfit::Empty)?;
    require_parameters(x, x.dims()[1], parameters)
}

/// Requires that `weight` is quantized or has the dtype of `x`.
pub(crate) fn require_dtype<const D: usize, const W: usize>(x: &Tensor<D>, weight: &Tensor<W>) -> Fit {
    require(is_quantized(weight) || weight.dtype() == x.dtype(), Misfit::Dtypes)
}

pub(crate) fn is_quantized<const D: usize>(tensor: &Tensor<D>) -> bool {
    matches!(tensor.dtype(), DType::QFloat(_))
}

/// Whether a tensor that may be missing is tracked.
pub(crate) fn is_tracked<const D: usize>(tensor: &Option<Tensor<D>>) -> bool {
    tensor.as_ref().is_some_and(Tensor::is_tracked)
}

/// A quantized bias as floats: it is small, even if the weight must stay packed.
pub(crate) fn dequantized_bias(bias: Option<Tensor<1>>, dtype: DType) -> Option<Tensor<1>> {
    bias.map(|bias| if is_quantized(&bias) { bias.dequantize().cast(dtype) } else { bias })
}

/// An optional tensor as an operation takes it.
pub(crate) fn into_maybe<const D: usize>(tensor: Option<Tensor<D>>) -> MaybeTensor<Dispatch> {
    tensor.map(Tensor::into_dispatch).into()
}

/// A weight as an operation takes it: dense, or quantized and packed.
pub(crate) fn into_weight<const D: usize>(weight: Tensor<D>) -> Weight<Dispatch> {
    match is_quantized(&weight) {
        true => Weight::Quantized(weight.into_dispatch()),
        false => Weight::Dense(weight.into_dispatch()),
    }
}
