//! What differs between Burn 0.22.1, which `Cargo.toml` pins, and the next Burn, for which `.ci/next-burn` sets `cfg(burn_next)`; nothing
//! of the kind is elsewhere in this crate. On the day of the release one half of each pair goes.
use burn_store::burn_pack;

/// A tensor on its way from a store to a module, through adapters.
#[cfg(not(burn_next))]
pub type StoreTensor = burn_pack::Tensor;
#[cfg(burn_next)]
pub use burn_store::StoreTensor;

/// A tensor as an adapter takes it.
#[allow(clippy::useless_conversion)] // of the next Burn it is none
pub fn handed(tensor: burn_pack::Tensor) -> StoreTensor {
    tensor.into()
}

/// A tensor as a store or an adapter gives it, its bytes not read yet.
#[cfg(not(burn_next))]
pub fn packed(tensor: StoreTensor) -> burn_pack::Tensor {
    tensor
}
#[cfg(burn_next)]
pub fn packed(tensor: StoreTensor) -> burn_pack::Tensor {
    tensor.into_pack()
}
