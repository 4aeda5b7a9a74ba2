//! Operations and modules of [burn-memsave](https://docs.rs/burn-memsave): drop-in replacements for [`burn::nn`] that keep
//! only what the backward pass reads, given which tensors are tracked.
//!
//! Most users depend on `burn-memsave`, which re-exports everything here and adds measurement and other tools.
//!
//! - [`nn`]: the modules, under the names of [`burn::nn`].
//! - [`functional`]: the same as functions, with the signatures of [`burn::tensor::module`] and
//!   [`burn::tensor::activation`] if Burn has them.
//! - [`ledger`]: a record of what each operation keeps, and why.
//! - [`lora`]: fine-tuning with low-rank adapters.
//! - [`frozen`]: weights that are read when a layer runs.
//! - [`saved`]: policies that store kept tensors in fewer bits, on the host, or in a file.
//!
//! The operations and their kernels are in `ops` and `backend`, and the engine that records operations is in `graph`. These modules
//! are public for Burn's backends and for `burn-memsave`, but not part of the API.
#![deny(missing_docs)]
#![cfg_attr(docsrs, feature(doc_cfg))] // shows which feature an item needs
#![recursion_limit = "256"]
#![cfg_attr(feature = "ndarray", allow(deprecated))]
// The whole of burn-ndarray is deprecated.
// Without a backend, nothing uses the arguments of an operation.
#![cfg_attr(
    not(any(feature = "flex", feature = "ndarray", feature = "wgpu", feature = "cuda", feature = "remote")),
    allow(unused_variables)
)]

mod adapter;
#[doc(hidden)]
pub mod backend;
#[doc(hidden)] // burn-memsave uses it, too
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
#[doc(hidden)]
pub mod visit;

#[doc(inline)]
pub use graph::{apart, ledger};
