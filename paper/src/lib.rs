//! The models of the experiments, each written once and compiled twice: with Burn's layers and with burn-memsave's.
#![deny(missing_docs)]
#![recursion_limit = "256"]

mod case;
pub mod provenance;
pub mod report;
pub mod text;
pub mod vision;

pub use case::{Case, Statistics, Tracked};
