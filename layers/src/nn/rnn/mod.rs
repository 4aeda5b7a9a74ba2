//! Recurrent networks.
mod basic;
mod gru;
mod lstm;

pub use basic::{BiRnnConfig, RnnConfig};
pub use gru::{BiGruConfig, GruConfig};
pub use lstm::{BiLstmConfig, LstmConfig};
