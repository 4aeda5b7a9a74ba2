#![doc = include_str!("../README.md")]
//!
//! # Guide
//!
//! The [guide] has a page for every technique: what it saves, what it costs, and when to use it.
#![deny(missing_docs)]
#![recursion_limit = "256"]

pub mod checkpoint;
pub mod guide;
pub mod lazy;
pub mod lora;
pub mod measure;
pub mod mixed;
pub mod optim;
pub mod parallel;
pub mod peft;
pub mod plan;
mod strategy;

#[doc(hidden)]
pub use burn_memsave_layers::{backend, ops};
pub use burn_memsave_layers::{frozen, functional, nn, saved};

/// Every drop-in module by its long name: the same types as in [`nn`].
pub mod layers {
    pub use burn_memsave_layers::nn::activation::{
        MemSaveActivation, MemSaveCelu, MemSaveElu, MemSaveGLU, MemSaveGelu, MemSaveHardShrink,
        MemSaveHardSigmoid, MemSaveHardSwish, MemSaveHardtanh, MemSaveLeakyRelu, MemSaveLogSigmoid,
        MemSaveMish, MemSavePRelu, MemSaveRRelu, MemSaveRelu, MemSaveRelu6, MemSaveSelu, MemSaveShrink,
        MemSaveSiLU, MemSaveSigmoid, MemSaveSoftShrink, MemSaveSoftplus, MemSaveSoftsign, MemSaveSwiGlu,
        MemSaveTanh, MemSaveTanhshrink, MemSaveThreshold, MemSaveThresholdedRelu,
    };
    pub use burn_memsave_layers::nn::attention::{MemSaveCrossAttention, MemSaveMultiHeadAttention};
    pub use burn_memsave_layers::nn::conv::{
        MemSaveConv1d, MemSaveConv2d, MemSaveConv3d, MemSaveConvTranspose1d, MemSaveConvTranspose2d,
        MemSaveConvTranspose3d, MemSaveDeformConv2d,
    };
    pub use burn_memsave_layers::nn::interpolate::{MemSaveInterpolate1d, MemSaveInterpolate2d};
    pub use burn_memsave_layers::nn::loss::{
        MemSaveBinaryCrossEntropyLoss, MemSaveCrossEntropyLoss, MemSaveHuberLoss, MemSaveKLDivLoss,
        MemSaveMseLoss,
    };
    pub use burn_memsave_layers::nn::norm::{
        MemSaveAddRmsNorm, MemSaveBatchNorm, MemSaveGroupNorm, MemSaveInstanceNorm, MemSaveLayerNorm,
        MemSaveLocalResponseNorm, MemSaveNormalization, MemSaveRmsNorm,
    };
    pub use burn_memsave_layers::nn::pool::{
        MemSaveAdaptiveAvgPool1d, MemSaveAdaptiveAvgPool2d, MemSaveAdaptiveAvgPool3d, MemSaveAvgPool1d,
        MemSaveAvgPool2d, MemSaveMaxPool1d, MemSaveMaxPool2d,
    };
    pub use burn_memsave_layers::nn::transformer::{
        MemSavePositionWiseFeedForward, MemSaveTransformerDecoder, MemSaveTransformerDecoderLayer,
        MemSaveTransformerEncoder, MemSaveTransformerEncoderLayer,
    };
    pub use burn_memsave_layers::nn::{
        MemSaveBiGru, MemSaveBiLstm, MemSaveBiRnn, MemSaveDropout, MemSaveEmbedding, MemSaveGateController,
        MemSaveGru, MemSaveLinear, MemSaveLstm, MemSaveRnn, MemSaveRotaryEncoding,
    };
}
