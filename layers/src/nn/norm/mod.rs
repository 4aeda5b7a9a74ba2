//! Normalization layers.
mod add_rms;
mod batch;
mod group;
mod instance;
mod layer;
mod local_response;
mod normalization_wrapper;
mod rms;

pub use add_rms::*;
pub use batch::*;
pub use group::*;
pub use instance::*;
pub use layer::*;
pub use local_response::*;
pub use normalization_wrapper::*;
pub use rms::*;
