//! Recurrent networks.
pub mod basic;
mod gate_controller;
pub mod gru;
pub mod lstm;
mod sequence;

pub use basic::{BiRnn, BiRnn as MemSaveBiRnn, BiRnnConfig, Rnn as MemSaveRnn, Rnn, RnnConfig};
pub use gate_controller::{GateController, GateController as MemSaveGateController};
pub use gru::{BiGru, BiGru as MemSaveBiGru, BiGruConfig, Gru, Gru as MemSaveGru, GruConfig};
pub use lstm::{BiLstm, BiLstm as MemSaveBiLstm, BiLstmConfig, Lstm, Lstm as MemSaveLstm, LstmConfig};
