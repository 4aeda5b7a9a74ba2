//! Text models, each written once and compiled twice: with Burn's layers and with burn-memsave's.
pub use burn_memsave_models::*;

pub mod llama;
