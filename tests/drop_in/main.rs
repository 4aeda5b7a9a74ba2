//! Our modules are drop-in replacements of those of Burn.
#![recursion_limit = "256"]

mod convert;
mod namespace;
mod peers;
mod refusals;
