//! Frozen weights that are not in memory but, for example, in a file, until a layer uses them.
//!
//! A [`FrozenWeight`] is read whenever its parameter is used, and the tensor is dropped after the operation. It is attached to a
//! parameter of any module, Burn's or this library's, as a [`LazyWeight`]. The layers of this library read it again in the backward
//! pass, where a stock layer keeps the tensor. An embedding reads only the rows that its indices name.
//!
//! `burn_memsave::lazy` reads frozen weights from files, through a cache.
//!
//! ```
//! use burn::module::{Module, Param, Reparameterizer};
//! use burn::tensor::{DType, Device, Shape, Tensor, TensorData};
//! use burn_memsave_layers::frozen::{FrozenWeight, LazyWeight};
//! use burn_memsave_layers::nn::LinearConfig;
//! use std::sync::Arc;
//!
//! #[derive(Debug)]
//! struct Ones(Shape);
//! impl FrozenWeight for Ones {
//!     fn shape(&self) -> Shape {
//!         self.0.clone()
//!     }
//!     fn dtype(&self) -> DType {
//!         DType::F32
//!     }
//!     fn read(&self) -> TensorData {
//!         TensorData::ones::<f32, _>(self.0.clone())
//!     }
//! }
//!
//! struct AllOnes;
//! impl Reparameterizer for AllOnes {
//!     type Reparam = LazyWeight;
//!     fn reparameterize<const D: usize>(
//!         &mut self,
//!         _path: &str,
//!         param: Param<Tensor<D>>,
//!     ) -> (Param<Tensor<D>>, Option<LazyWeight>) {
//!         if D == 1 {
//!             return (param, None);
//!         }
//!         let weight = Arc::new(Ones(param.lazy_shape()));
//!         let (param, lazy) = LazyWeight::attach(param, weight);
//!         (param, Some(lazy))
//!     }
//! }
//!
//! let device = Device::flex();
//! let linear = LinearConfig::new(4, 8).with_bias(false).init(&device).apply_reparameterization(AllOnes);
//! let y = linear.forward(Tensor::<2>::ones([1, 4], &device));
//! y.into_data().assert_eq(&TensorData::new(vec![4.0f32; 8], [1, 8]), true);
//! ```
mod lazy;
mod packed_rows;
mod placeholder;
mod recorded;
mod resident;
mod side_channel;
mod source;
mod unpack;
mod weight;

pub use lazy::LazyWeight;
pub use packed_rows::PackedRows;
pub use recorded::Recorded;
pub use resident::{DeviceBudget, Resident};
pub(crate) use source::WeightSource;
pub use unpack::{BlockFormat, FLOAT8_E4M3, ScaledMatrix, unpack_float8, unpack_nibbles};
pub use weight::FrozenWeight;

use crate::adapter::DoraAdapter;
#[cfg(any(feature = "flex", feature = "ndarray"))]
use crate::backend::cpu::unpacked_rows;
use burn::module::{LoraAdapter, Param, Reparameterization};
#[cfg(any(feature = "flex", feature = "ndarray"))]
use burn::tensor::{DType, TensorData};
use burn::tensor::{Int, Tensor};

/// The weight of a parameter without its adapter, and the adapter.
pub(crate) enum Adapted<'a, const D: usize> {
    Plain(Tensor<D>),
    Lora(Tensor<D>, &'a LoraAdapter),
    Dora(Tensor<D>, &'a DoraAdapter),
}

impl<const D: usize> Adapted<'_, D> {
    /// The weight without its adapter.
    pub(crate) fn weight(&self) -> &Tensor<D> {
        let (Self::Plain(weight) | Self::Lora(weight, _) | Self::Dora(weight, _)) = self;
        weight
    }
}

/// The weight of a parameter, and its adapter. A lazy weight is read, once.
pub(crate) fn adapted<const D: usize>(param: &Param<Tensor<D>>) -> Adapted<'_, D> {
    if let Some(lazy) = param.reparameterization::<LazyWeight>() {
        lazy.read_adapted(param.base())
    } else if let Some(adapter) = param.reparameterization::<DoraAdapter>() {
        Adapted::Dora(param.base(), adapter)
    } else if let Some(adapter) = param.reparameterization::<LoraAdapter>() {
        Adapted::Lora(param.base(), adapter)
    } else {
        Adapted::Plain(param.val())
    }
}

/// [`adapted`] for layers that do not know adapters with a magnitude: such an adapter is applied to the weight.
pub(crate) fn weight_and_adapter<const D: usize>(
    param: &Param<Tensor<D>>,
) -> (Tensor<D>, Option<&LoraAdapter>) {
    match adapted(param) {
        Adapted::Plain(weight) => (weight, None),
        Adapted::Lora(weight, adapter) => (weight, Some(adapter)),
        Adapted::Dora(weight, adapter) => (adapter.apply(weight), None),
    }
}

/// Whether a parameter holds the placeholder of a lazy weight that is not attached to it. This is so while a mapper has the parameter; the
/// mapper is offered the lazy parameter next.
pub(crate) fn is_offered_later<const D: usize>(param: &Param<Tensor<D>>) -> bool {
    param.reparameterization::<LazyWeight>().is_none() && placeholder::is_placeholder(&param.base())
}

/// The rows of a lazy table without its low-rank adapter, and the adapter. `None` if the table is not lazy or must be read as a whole.
pub(crate) fn rows_and_adapter<'a>(
    param: &'a Param<Tensor<2>>,
    indices: &Tensor<2, Int>,
) -> Option<(Tensor<3>, Option<&'a LoraAdapter>)> {
    let lazy = param.reparameterization::<LazyWeight>()?;
    if lazy.dora_adapter().is_some() {
        return None; // its norms are over all rows
    }
    Some((lazy.read_rows(param.base(), indices)?, lazy.adapter()))
}

/// The rows of a lazy table in blocks of about `bytes` bytes, each of which is read and transposed when the iterator arrives at it. `None`
/// if the table is not lazy, or must be read as a whole (for its adapter, for example).
///
/// Operations read a block again in the backward pass, if they use it before the iterator moves on to the next one.
pub(crate) fn transposed_blocks(
    param: &Param<Tensor<2>>,
    bytes: usize,
) -> Option<impl Iterator<Item = Tensor<2>>> {
    param.reparameterization::<LazyWeight>()?.transposed_blocks(param.base(), bytes)
}

/// The columns of a lazy matrix in blocks, each of which is read when the iterator arrives at it, if the weight is to be
/// [read so](FrozenWeight::columns_at_once). `None` if it is not, or if it must be read as a whole (for its adapter, for example).
///
/// Operations read a block again in the backward pass, as those of [`transposed_blocks`].
pub(crate) fn column_blocks(param: &Param<Tensor<2>>) -> Option<impl Iterator<Item = Tensor<2>>> {
    param.reparameterization::<LazyWeight>()?.column_blocks(param.base())
}

/// `x weight` for a few rows of a lazy matrix whose columns are [packed](FrozenWeight::packed_rows), and its low-rank adapter, which is not
/// applied. `None` where another way is as good: for many rows, on a device, in training, in other dtypes than f32.
pub(crate) fn packed_product<'a, const D: usize>(
    param: &'a Param<Tensor<2>>,
    x: &Tensor<D>,
) -> Option<(Tensor<D>, Option<&'a LoraAdapter>)> {
    packed_rows_product(param, x, true)
}

/// The same for a table whose rows are packed: `x table^T`.
pub(crate) fn packed_logits<const D: usize>(param: &Param<Tensor<2>>, x: &Tensor<D>) -> Option<Tensor<D>> {
    let is_adapted = param.reparameterization::<LazyWeight>()?.adapter().is_some();
    if is_adapted { None } else { Some(packed_rows_product(param, x, false)?.0) }
}

/// Without a backend on CPUs, none.
#[cfg(not(any(feature = "flex", feature = "ndarray")))]
fn packed_rows_product<'a, const D: usize>(
    _: &'a Param<Tensor<2>>,
    _: &Tensor<D>,
    _of_transpose: bool,
) -> Option<(Tensor<D>, Option<&'a LoraAdapter>)> {
    None
}

#[cfg(any(feature = "flex", feature = "ndarray"))]
fn packed_rows_product<'a, const D: usize>(
    param: &'a Param<Tensor<2>>,
    x: &Tensor<D>,
    of_transpose: bool,
) -> Option<(Tensor<D>, Option<&'a LoraAdapter>)> {
    let lazy = param.reparameterization::<LazyWeight>()?;
    let (mut shape, device) = (x.shape(), x.device());
    let rows = shape[..D - 1].iter().product::<usize>();
    let few = (1..=unpacked_rows::FEW_ROWS).contains(&rows) && shape[D - 1] > 0;
    let is_host = resident::is_host(&device.clone().without_autodiff());
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
    let unpack = |row: usize, out: &mut [f32]| packed.unpack(row, out);
    let product = unpacked_rows::product(values.as_slice::<f32>().ok()?, size, unpack);
    packed.were_used();
    shape[D - 1] = outputs;
    Some((Tensor::from_data(TensorData::new(product, shape), &device), lazy.adapter()))
}
