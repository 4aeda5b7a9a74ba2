//! Recurrent layers.
pub mod basic;
mod gate_controller;
pub mod gru;
pub mod lstm;
mod sequence;

pub use basic::{BiRnn, BiRnnConfig, MemSaveBiRnn, MemSaveRnn, Rnn, RnnConfig};
pub use gate_controller::{GateController, MemSaveGateController};
pub use gru::{BiGru, BiGruConfig, Gru, GruConfig, MemSaveBiGru, MemSaveGru};
pub use lstm::{BiLstm, BiLstmConfig, Lstm, LstmConfig, MemSaveBiLstm, MemSaveLstm};
