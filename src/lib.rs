//! Drop-in Burn layers that keep less memory for the backward pass.
#![deny(missing_docs)]
#![recursion_limit = "256"]

pub mod measure;

pub use burn_memsave_layers::{backend, functional, nn, ops};
