//! Drop-in modules under the names of [`burn::nn`]: every path that exists there exists here.
//!
//! A module that has a version here is replaced, under its own name and under a long one (`Linear` and `MemSaveLinear`);
//! everything else is Burn's. Configs, fields, records, panics and displays (except for the long name) are those of the
//! stock modules. Each converts from its twin and back (`from_nn_linear`, `into_nn_linear`, `From`).
pub use burn::nn::*;

pub mod activation;
pub mod attention;
pub mod cache;
pub mod conv;
mod drop_in;
mod dropout;
mod embedding;
pub mod interpolate;
mod linear;
pub mod loss;
pub mod norm;
mod padding;
pub mod pool;
mod rnn;
mod rotary_encoding;
pub mod transformer;

pub use activation::{
    Celu, CeluConfig, Elu, EluConfig, GLU, Gelu, HardShrink, HardShrinkConfig, HardSigmoid,
    HardSigmoidConfig, LeakyRelu, LeakyReluConfig, MemSaveCelu, MemSaveElu, MemSaveGLU, MemSaveGelu,
    MemSaveHardShrink, MemSaveHardSigmoid, MemSaveLeakyRelu, MemSavePRelu, MemSaveRelu, MemSaveSelu,
    MemSaveShrink, MemSaveSigmoid, MemSaveSoftShrink, MemSaveSoftplus, MemSaveSoftsign, MemSaveSwiGlu,
    MemSaveTanh, MemSaveThresholdedRelu, PRelu, PReluConfig, Relu, Selu, Shrink, ShrinkConfig, Sigmoid,
    SoftShrink, SoftShrinkConfig, Softplus, SoftplusConfig, Softsign, SwiGlu, SwiGluConfig, Tanh,
    ThresholdedRelu, ThresholdedReluConfig,
};
pub use dropout::{Dropout, DropoutConfig, MemSaveDropout};
pub use embedding::{Embedding, EmbeddingConfig, MemSaveEmbedding};
pub use linear::{Linear, LinearConfig, MemSaveLinear};
pub use norm::{
    BatchNorm, BatchNormConfig, GroupNorm, GroupNormConfig, InstanceNorm, InstanceNormConfig, LayerNorm,
    LayerNormConfig, LocalResponseNorm, LocalResponseNormConfig, MemSaveBatchNorm, MemSaveGroupNorm,
    MemSaveInstanceNorm, MemSaveLayerNorm, MemSaveLocalResponseNorm, MemSaveRmsNorm, RmsNorm, RmsNormConfig,
};
pub use rnn::{
    BiGru, BiGruConfig, BiLstm, BiLstmConfig, BiRnn, BiRnnConfig, GateController, Gru, GruConfig, Lstm,
    LstmConfig, MemSaveBiGru, MemSaveBiLstm, MemSaveBiRnn, MemSaveGateController, MemSaveGru, MemSaveLstm,
    MemSaveRnn, Rnn, RnnConfig, basic, gru, lstm,
};
pub use rotary_encoding::{MemSaveRotaryEncoding, RotaryEncoding, RotaryEncodingConfig};

/// The modules of this namespace under their second path, as in Burn.
pub mod modules {
    pub use super::{
        BatchNorm, BatchNormConfig, BiGru, BiGruConfig, BiLstm, BiLstmConfig, BiRnn, BiRnnConfig, Dropout,
        DropoutConfig, Embedding, EmbeddingConfig, GateController, GroupNorm, GroupNormConfig, Gru,
        GruConfig, InstanceNorm, InstanceNormConfig, LayerNorm, LayerNormConfig, Linear, LinearConfig,
        LocalResponseNorm, LocalResponseNormConfig, Lstm, LstmConfig, RmsNorm, RmsNormConfig, Rnn, RnnConfig,
        RotaryEncoding, RotaryEncodingConfig, attention, basic, cache, conv, gru, interpolate, lstm, norm,
        pool, transformer,
    };
    pub use burn::nn::modules::*;
}
