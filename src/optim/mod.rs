//! Optimizers that keep little.
mod adamw;
mod codes;
mod error;
mod in_backward;
mod muon;
mod rounding;

pub use adamw::{AdamW8bit, AdamW8bitConfig, AdamW8bitState};
pub use error::InBackwardError;
pub use in_backward::step_in_backward;
pub use muon::{Muon8bit, Muon8bitConfig, Muon8bitState};
