//! Frozen weights that are not in memory until a layer runs, but in a file, for example.
//!
//! A [`FrozenWeight`] is read whenever its parameter is used, and the tensor is dropped after the operation. It is attached to a
//! parameter of any module, Burn's or this library's, as a [`LazyWeight`]. In the backward pass the layers of this library read
//! it again, where a stock layer keeps the tensor; an embedding reads only the rows that its indices name.
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
mod placeholder;
mod recorded;
mod resident;
mod side_channel;
mod source;
mod weight;

pub use lazy::LazyWeight;
pub use recorded::Recorded;
pub use resident::{DeviceBudget, Resident};
pub(crate) use source::WeightSource;
pub use weight::FrozenWeight;

use crate::adapter::DoraAdapter;
use burn::module::{LoraAdapter, Param};
use burn::tensor::{Int, Tensor};

/// The weight of a parameter without its low-rank adapter, and the adapter.
pub(crate) fn weight_and_adapter<const D: usize>(
    param: &Param<Tensor<D>>,
) -> (Tensor<D>, Option<&LoraAdapter>) {
    if let Some(lazy) = param.reparameterization::<LazyWeight>() {
        return (lazy.read_for_lora(param.base()), lazy.adapter());
    }
    match param.reparameterization::<LoraAdapter>() {
        Some(adapter) => (param.base(), Some(adapter)),
        None => (param.val(), None),
    }
}

/// The weight of a parameter without its adapter with a magnitude, and the adapter; `None` if it has none.
pub(crate) fn weight_and_dora<const D: usize>(param: &Param<Tensor<D>>) -> Option<(Tensor<D>, &DoraAdapter)> {
    if let Some(lazy) = param.reparameterization::<LazyWeight>() {
        let adapter = lazy.dora_adapter()?;
        return Some((lazy.read(param.base()), adapter));
    }
    let adapter = param.reparameterization::<DoraAdapter>()?;
    Some((param.base(), adapter))
}

/// Whether a parameter holds the placeholder of a lazy weight, which is not attached to it: a mapper has it now, and is offered the
/// weight next.
pub(crate) fn is_offered_later<const D: usize>(param: &Param<Tensor<D>>) -> bool {
    param.reparameterization::<LazyWeight>().is_none() && placeholder::is_placeholder(&param.base())
}

/// The rows of a lazy table without its low-rank adapter, and the adapter; `None` if the table is not lazy, or is read as a whole.
pub(crate) fn rows_and_adapter<'a>(
    param: &'a Param<Tensor<2>>,
    indices: &Tensor<2, Int>,
) -> Option<(Tensor<3>, Option<&'a LoraAdapter>)> {
    let lazy = param.reparameterization::<LazyWeight>()?;
    if lazy.dora_adapter().is_some() {
        return None; // its norms are those of all rows
    }
    Some((lazy.read_rows(param.base(), indices)?, lazy.adapter()))
}

/// The rows of a lazy table in blocks of about `bytes` bytes, each read and transposed when the iterator arrives at it; `None`
/// if the table is not lazy, or is read as a whole (for its adapter, for example).
///
/// Operations read a block again in the backward pass, provided that it is used before the iterator moves on to the next.
pub(crate) fn transposed_blocks(
    param: &Param<Tensor<2>>,
    bytes: usize,
) -> Option<impl Iterator<Item = Tensor<2>>> {
    param.reparameterization::<LazyWeight>()?.transposed_blocks(param.base(), bytes)
}
