//! Models of the papers behind burn-memsave, each written once and compiled for both namespaces.
#![deny(missing_docs)]
#![recursion_limit = "256"]

mod case;
pub mod provenance;
pub mod report;
pub mod text;
pub mod vision;

pub use case::{Case, Statistics, Tracked};
