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
mod device_weight;
mod lazy;
#[cfg(any(feature = "flex", feature = "ndarray"))]
mod packed_product;
#[cfg(not(any(feature = "flex", feature = "ndarray")))]
#[path = "no_packed_product.rs"]
mod packed_product;
mod packed_rows;
mod placeholder;
mod recorded;
mod resident;
mod side_channel;
mod source;
mod unpack;
mod weight;

pub use device_weight::{DeviceWeight, Sharing};
pub use lazy::{LazyWeight, unplaced};
pub(crate) use packed_product::{packed_logits, packed_product};
pub use packed_rows::{PackedElements, PackedRows};
pub use recorded::Recorded;
pub use resident::{DeviceBudget, Resident};
pub(crate) use resident::{is_host, like};
pub(crate) use source::WeightSource;
pub use unpack::{BlockFormat, FLOAT8_E4M3, ScaledMatrix, unpack_float8, unpack_nibbles};
pub use weight::FrozenWeight;

use crate::adapter::DoraAdapter;
use burn::module::{LoraAdapter, Param, Reparameterization};
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
