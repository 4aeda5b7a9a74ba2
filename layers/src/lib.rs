//! Operations and modules of [burn-memsave](https://docs.rs/burn-memsave): drop-in replacements for [`burn::nn`] that keep
//! only what the backward pass reads, given which tensors require gradients.
//!
//! Most users depend on `burn-memsave`, which re-exports everything here and adds measurement and tools.
//!
//! - [`nn`]: the modules, under the names of [`burn::nn`].
//! - [`functional`]: the same as functions, with the signatures of [`burn::tensor::module`] and
//!   [`burn::tensor::activation`] where Burn has them.
//! - [`ledger`]: a record of what each operation keeps, and why.
//! - [`lora`]: fine-tuning with low-rank adapters.
//! - [`frozen`]: weights that are read when a layer runs.
//! - [`saved`]: kept tensors in fewer bits.
//!
//! The operations and their kernels are in `ops` and `backend`, which are public for Burn's backends but not part of the API.
#![deny(missing_docs)]
#![cfg_attr(docsrs, feature(doc_cfg))] // shows which feature an item needs
#![recursion_limit = "256"]
#![cfg_attr(feature = "ndarray", allow(deprecated))]
// burn-ndarray is deprecated as a whole
// Without a backend nothing takes the arguments of an operation.
#![cfg_attr(
    not(any(feature = "flex", feature = "ndarray", feature = "wgpu", feature = "cuda", feature = "remote")),
    allow(unused_variables)
)]

mod adapter;
#[doc(hidden)]
pub mod backend;
#[doc(hidden)] // the other crate of this workspace reads it, too
pub mod burn_internals;
mod burn_next;
pub mod frozen;
pub mod functional;
#[doc(hidden)]
pub mod graph;
pub mod lora;
pub mod nn;
#[doc(hidden)]
pub mod node;
#[doc(hidden)]
pub mod ops;
pub mod saved;

#[doc(inline)]
pub use graph::{apart, ledger};
