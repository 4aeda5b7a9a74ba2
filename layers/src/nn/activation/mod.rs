//! Activation functions as modules.
mod activation_wrapper;
mod approx;
mod elementwise;
mod gelu;
mod glu;
mod hardtanh;
mod prelu;
mod rrelu;
mod swiglu;

pub use activation_wrapper::*;
pub use approx::*;
pub use elementwise::*;
pub use gelu::*;
pub use glu::*;
pub use hardtanh::*;
pub use prelu::*;
pub use rrelu::*;
pub use swiglu::*;
