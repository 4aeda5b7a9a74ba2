//! Layers for [Burn](burn) that keep only what their backward pass reads, and a toolbox for training and running models in less memory.
//!
//! Burn's autodiff keeps tensors that the backward pass never reads, most of all when part of the model is frozen. The drop-in versions in
//! [`nn`] have a backward pass of their own, which keeps what is needed, given which tensors require gradients: same fields, same records,
//! same results.
//!
#![doc = include_str!("../docs/step.svg")]
//!
//! | one step, in MiB (f32, CPU) | Burn kept | **kept** | Burn peak | **peak** |
//! | --- | ---: | ---: | ---: | ---: |
//! | ResNet-101, 8 images of 224x224, all parameters trained | 1412.92 | **793.16** | 1481.72 | **847.01** |
//! | the same, only norm layers trained | 1408.26 | **512.86** | 1409.84 | **519.04** |
//! | the same, gradient of the input, frozen statistics | 917.26 | **16.09** | 917.67 | **63.01** |
//! | Llama-style model, 4 x 512 tokens, LoRA on all projections, the swap alone | 3563.33 | **1171.24** | 4063.38 | **1187.23** |
//! | the same with `SwiGlu`, head and loss in one, blocks computed again | 3563.33 | **80.35** | 4063.38 | **200.77** |
//!
//! By `cargo run --release -p burn-memsave-paper --bin resnet -- --depth 101`, and `--bin llama`.
//!
//! ```
//! // use burn::nn;
//! use burn_memsave::nn;
//!
//! use burn::module::Module;
//! use burn::tensor::{Device, Tensor};
//! use nn::{Linear, LinearConfig, Relu};
//!
//! #[derive(Module, Debug)]
//! struct Block {
//!     linear: Linear,
//!     relu: Relu,
//! }
//!
//! let device = Device::flex().autodiff();
//! let block = Block { linear: LinearConfig::new(64, 32).init(&device), relu: Relu::new() }.freeze();
//! let x = Tensor::<2>::ones([8, 64], &device).require_grad();
//! let y = block.relu.forward(block.linear.forward(x.clone())); // kept: one bit per element of `y`
//! assert!(x.grad(&y.sum().backward()).is_some());
//! ```
//!
//! # What is where
//!
//! | module | what it has |
//! | --- | --- |
//! | [`nn`] | the layers, under the paths of [`burn::nn`], with a table of what each keeps |
//! | [`prelude`], [`tensor`] | Burn's, with these layers, and with the functions that this library has |
//! | [`layers`] | the same by long names, to convert single layers |
//! | [`functional`] | the same as functions; attention, heads and losses in one |
//! | [`lazy`], [`frozen`] | frozen weights that stay in their file |
//! | [`lora`], [`peft`] | adapters of low rank, and their files |
//! | [`checkpoint`] | segments that are computed again |
//! | [`saved`] | what is kept in fewer bits, or elsewhere |
//! | [`plan`] | what to compute again so that a step fits a budget; batches in parts |
//! | [`optim`] | 8-bit optimizers, updates in the backward pass |
//! | [`mixed`] | steps in bf16 and f16 |
//! | [`parallel`] | one model on several devices and machines |
//! | [`measure`] | what a step keeps and needs, which layer keeps what, and what would remove it |
//! | [`guide`] | a page per technique: what it saves, what it costs, when to use it |
//!
//! # Features
//!
//! `flex`, `rayon`, `simd` and `x86-v4` (default), `ndarray`, `wgpu`, `cuda`, `remote` and `fusion` turn on the features of Burn with the same
//! names; `remote-server` is `remote` with Burn's servers and WebSocket; `cli` builds the program `memsave-prepare`. `system` (default) is
//! what needs threads and files: [`lazy`], [`peft`], [`SavedPolicy::disk`](saved::SavedPolicy::disk). Without it, and with `flex` alone, the
//! crate builds for `wasm32-unknown-unknown`, where the application chooses the backend of `getrandom`. `ndarray`, which Burn has
//! deprecated, adds ten CPU minutes to a first release build. `x86-v4` compiles matrix products and convolutions for AVX-512, too, and
//! runs that code only on machines that have it. The `openblas` and `accelerate` of NdArray are features of `burn`: turn them on there.
#![deny(missing_docs)]
#![cfg_attr(docsrs, feature(doc_cfg))] // shows which feature an item needs
#![recursion_limit = "256"]

#[doc(hidden)] // the models of `paper` read it, too
pub mod burn_next;
pub mod checkpoint;
pub mod guide;
#[cfg(feature = "system")]
pub mod lazy;
mod lazy_paths;
pub mod lora;
pub mod measure;
pub mod mixed;
pub mod optim;
pub mod parallel;
mod parameters;
#[cfg(feature = "system")]
pub mod peft;
pub mod plan;
mod platform;
mod strategy;
pub mod tensor;

/// What most models import: [`burn::prelude`], with the layers of this library as `nn`.
///
/// ```
/// // use burn::prelude::*;
/// use burn_memsave::prelude::*;
///
/// #[derive(Module, Debug)]
/// struct Block {
///     linear: nn::Linear,
///     relu: nn::Relu,
/// }
///
/// let device = Device::flex().autodiff();
/// let block = Block { linear: nn::LinearConfig::new(64, 32).init(&device), relu: nn::Relu::new() };
/// let y: Tensor<2> = block.relu.forward(block.linear.forward(Tensor::ones([8, 64], &device)));
/// assert_eq!(y.dims(), [8, 32]);
/// ```
pub mod prelude {
    pub use crate::nn;
    pub use burn::prelude::*;
}

/// Its snippets are tests.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

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
