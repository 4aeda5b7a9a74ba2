//! Whether arguments fit: what does not goes to Burn's own function, for the same result or the same panic.
use crate::ops::{MaybeTensor, Weight};
use burn::backend::Dispatch;
use burn::tensor::{DType, Tensor};

pub(super) fn maybe<const D: usize>(tensor: Option<Tensor<D>>) -> MaybeTensor<Dispatch> {
    tensor.map(Tensor::into_dispatch).into()
}

/// A bias as floats: it is small, even where the weight must stay packed.
pub(super) fn of_bias(bias: Option<Tensor<1>>, dtype: DType) -> Option<Tensor<1>> {
    bias.map(|bias| if is_quantized(&bias) { bias.dequantize().cast(dtype) } else { bias })
}

pub(super) fn has_length(bias: &Option<Tensor<1>>, length: usize) -> bool {
    bias.as_ref().is_none_or(|bias| bias.dims() == [length] && are_floats([bias.dtype()]))
}

pub(super) fn is_quantized<const D: usize>(tensor: &Tensor<D>) -> bool {
    !are_floats([tensor.dtype()])
}

pub(super) fn of_weight<const D: usize>(weight: Tensor<D>) -> Weight<Dispatch> {
    match is_quantized(&weight) {
        true => Weight::Quantized(weight.into_dispatch()),
        false => Weight::Dense(weight.into_dispatch()),
    }
}

/// Not quantized: Burn's own functions dequantize what is.
pub(super) fn are_floats<const N: usize>(dtypes: [DType; N]) -> bool {
    !dtypes.iter().any(|dtype| matches!(dtype, DType::QFloat(_)))
}

/// Floats that are not quantized, one at least.
pub(super) fn has_floats<const D: usize>(x: &Tensor<D>) -> bool {
    x.shape().num_elements() > 0 && are_floats([x.dtype()])
}

pub(super) fn any_tracked<const D: usize>(
    x: &Tensor<D>,
    weight: &Tensor<D>,
    bias: &Option<Tensor<1>>,
) -> bool {
    x.is_tracked() || weight.is_tracked() || bias.as_ref().is_some_and(Tensor::is_tracked)
}

pub(super) fn per_channel<const D: usize>(x: &Tensor<D>, parameters: &[&Tensor<1>]) -> bool {
    let parameters: Vec<_> = parameters.iter().copied().map(Some).collect();
    D >= 2 && x.shape().num_elements() > 0 && are_parameters(x, x.dims()[1], &parameters)
}

/// Whether the parameters that are there are `[length]`, and of the dtype of `x`.
pub(super) fn are_parameters<const D: usize>(
    x: &Tensor<D>,
    length: usize,
    parameters: &[Option<&Tensor<1>>],
) -> bool {
    let fits = |p: &&Tensor<1>| p.dims() == [length] && p.dtype() == x.dtype();
    are_floats([x.dtype()]) && parameters.iter().flatten().all(fits)
}
