//! Recurrent networks.
pub mod basic;
pub mod gru;
pub mod lstm;

pub use basic::{BiRnnConfig, RnnConfig};
pub use gru::{BiGruConfig, GruConfig};
pub use lstm::{BiLstmConfig, LstmConfig};
