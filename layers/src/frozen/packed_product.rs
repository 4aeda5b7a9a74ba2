//! Products of few rows with packed weights on CPUs, which unpack a part at a time.
use super::lazy::LazyWeight;
use super::resident::is_host;
use crate::backend::cpu::unpacked_rows;
use burn::module::{LoraAdapter, Param};
use burn::tensor::{DType, Tensor, TensorData};

/// `x weight` for a few rows of a lazy matrix whose columns are [packed](super::FrozenWeight::packed_rows), and its low-rank adapter, which is not
/// applied. `None` where another way is as good: for many rows, on a device, in training, in other dtypes than f32.
pub(crate) fn packed_product<'a, const D: usize>(
    param: &'a Param<Tensor<2>>,
    x: &Tensor<D>,
) -> Option<(Tensor<D>, Option<&'a LoraAdapter>)> {
    rows_product(param, x, true)
}

/// The same for a table whose rows are packed: `x table^T`.
pub(crate) fn packed_logits<const D: usize>(param: &Param<Tensor<2>>, x: &Tensor<D>) -> Option<Tensor<D>> {
    let is_adapted = param.reparameterization::<LazyWeight>()?.adapter().is_some();
    if is_adapted { None } else { Some(rows_product(param, x, false)?.0) }
}

fn rows_product<'a, const D: usize>(
    param: &'a Param<Tensor<2>>,
    x: &Tensor<D>,
    of_transpose: bool,
) -> Option<(Tensor<D>, Option<&'a LoraAdapter>)> {
    let lazy = param.reparameterization::<LazyWeight>()?;
    let (mut shape, device) = (x.shape(), x.device());
    let rows = shape[..D - 1].iter().product::<usize>();
    let few = (1..=unpacked_rows::FEW_ROWS).contains(&rows) && shape[D - 1] > 0;
    let is_host = is_host(&device.clone().without_autodiff());
    let is_trained = |LoraAdapter { a, b, .. }: &LoraAdapter| {
        [a, b].iter().any(|factor| {
            let factor = factor.val();
            factor.is_tracked() || factor.dtype() != DType::F32
        })
    };
    if !few || !is_host || x.is_tracked() || x.dtype() != DType::F32 || lazy.adapter().is_some_and(is_trained)
    {
        return None;
    }
    let packed = lazy.packed_rows(param.base(), of_transpose, shape[D - 1])?;
    let outputs = param.lazy_shape()[usize::from(of_transpose)];
    let values = x.to_data();
    let size = [rows, shape[D - 1], outputs];
    let read = |rows| {
        let packed = packed.read_packed(rows);
        move |first: usize, out: &mut [f32]| packed.unpack(first, out)
    };
    let product = unpacked_rows::product(values.as_slice::<f32>().ok()?, size, read);
    packed.were_used();
    shape[D - 1] = outputs;
    Some((Tensor::from_data(TensorData::new(product, shape), &device), lazy.adapter()))
}
