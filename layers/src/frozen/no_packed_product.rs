//! Without a backend on CPUs, no product unpacks its weight by parts.
use burn::module::{LoraAdapter, Param};
use burn::tensor::Tensor;

pub(crate) fn packed_product<'a, const D: usize>(
    _: &'a Param<Tensor<2>>,
    _: &Tensor<D>,
) -> Option<(Tensor<D>, Option<&'a LoraAdapter>)> {
    None
}

pub(crate) fn packed_logits<const D: usize>(_: &Param<Tensor<2>>, _: &Tensor<D>) -> Option<Tensor<D>> {
    None
}
