//! Our modules are drop-in replacements of those of Burn.
#![recursion_limit = "256"]

#[path = "../table/mod.rs"]
mod table;

mod convert;
mod functions;
mod namespace;
mod peers;
mod refusals;
