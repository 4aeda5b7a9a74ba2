//! `burn-memsave` provides drop-in replacements for the layers of [Burn](https://burn.dev). The replacements keep less memory for the
//! backward pass. The crate also has a toolbox for training and running models in less memory.
//!
//! Training in Burn runs out of memory earlier than it has to: autodiff keeps tensors that the backward pass never reads, above all
//! when part of the model is frozen. Each layer of this crate looks at which tensors require gradients and keeps only what its backward
//! pass reads. It has the same fields, records and results as the layer of Burn that it replaces. The toolbox can leave frozen weights
//! in their file, recompute parts of a model in the backward pass, and plan a step for a memory budget. It also has optimizers with
//! less state, and tools that measure memory.
//!
#![doc = include_str!("../docs/step.svg")]
//!
//! | memory of one training step, in MiB (f32, CPU) | Burn, kept | **ours, kept** | Burn, peak | **ours, peak** |
//! | --- | ---: | ---: | ---: | ---: |
//! | ResNet-101, 8 images of 224x224, all parameters trained | 1412.92 | **793.16** | 1481.72 | **847.01** |
//! | the same, only norm layers trained | 1408.26 | **512.86** | 1409.84 | **519.04** |
//! | the same, only the input requires a gradient, batch norms use running statistics | 917.26 | **16.09** | 917.67 | **63.01** |
//! | Llama-style model, 4 x 512 tokens, LoRA on all projections, only `use` lines swapped | 3563.33 | **1171.24** | 4063.38 | **1187.23** |
//! | the same with `SwiGlu`, head and loss fused, blocks checkpointed | 3563.33 | **80.35** | 4063.38 | **200.77** |
//!
//! "Kept" is the memory that the forward pass leaves for the backward pass. "Peak" is the most memory in use at one time during the
//! step, not counting parameters and input. The numbers come from
//! `cargo run --release -p burn-memsave-paper --bin resnet -- --depth 101` and `--bin llama`.
//!
//! Results are exact unless you use something with `Approx`, `Half`, `Int8` or `8bit` in its name. Steps of whole models take
//! 0.24-0.73x Burn's time, mostly because of fused kernels (`cargo run --release -p burn-memsave-paper -- models`). If you checkpoint
//! the blocks of the Llama-style model, our steps take 1.07-1.37x as long. The same command measures this with another argument
//! (`-- language`).
//!
//! # The swap
//!
//! Replace `burn::nn` with `burn_memsave::nn` in your `use` lines. The rest of the model stays as it is:
//!
//! ```rust
//! // use burn::nn;
//! use burn_memsave::nn;
//!
//! use burn::module::Module;
//! use burn::tensor::{Device, Tensor};
//! use nn::conv::{Conv2d, Conv2dConfig};
//! use nn::{BatchNorm, BatchNormConfig, Relu};
//!
//! #[derive(Module, Debug)]
//! struct Block {
//!     conv: Conv2d,
//!     norm: BatchNorm,
//!     relu: Relu,
//! }
//!
//! let device = Device::flex().autodiff();
//! let conv = Conv2dConfig::new([3, 8], [3, 3]).init(&device);
//! let block = Block { conv, norm: BatchNormConfig::new(8).init(&device), relu: Relu::new() }.freeze();
//!
//! // Fine-tuning: gradients flow through the frozen block, which keeps only one bit per element, for the ReLU.
//! let x = Tensor::<4>::ones([1, 3, 16, 16], &device).require_grad();
//! let y = block.relu.forward(block.norm.forward(block.conv.forward(x.clone())));
//! assert_eq!(x.grad(&y.sum().backward()).unwrap().dims(), [1, 3, 16, 16]);
//! ```
//!
//! # Modules
//!
//! | module | contents |
//! | --- | --- |
//! | [`nn`] | the layers, under the same paths as in [`burn::nn`], and a table of what each of them keeps |
//! | [`prelude`], [`tensor`] | Burn's modules of the same names, with the layers and functions of this crate |
//! | [`layers`] | the same layers under long names such as `MemSaveLinear`, for converting single layers |
//! | [`functional`] | the operations as functions, attention, and output layers (heads) fused with their losses |
//! | [`lazy`], [`frozen`] | frozen weights that stay in their file until a layer runs |
//! | [`lora`], [`peft`] | low-rank adapters, and the files of Python's `peft` |
//! | [`checkpoint`] | segments of a model that are recomputed in the backward pass |
//! | [`saved`] | policies that keep saved tensors in fewer bits, on the host or on disk |
//! | [`plan`] | plans that fit a step into a budget by recomputing blocks, and batches that are processed in parts |
//! | [`optim`] | 8-bit optimizers, and parameter updates during the backward pass |
//! | [`mixed`] | training steps in bf16 and f16 |
//! | [`parallel`] | one model on several devices and machines; gradients, optimizer and frozen weights in parts |
//! | [`measure`] | how much memory a step keeps and needs, which layer keeps it, and how to keep less |
//! | [`guide`] | a page per technique: what it saves, what it costs, and when to use it |
//!
//! # Features
//!
//! `flex`, `rayon`, `simd` and `x86-v4` (default), `ndarray`, `wgpu`, `cuda`, `remote` and `fusion` turn on the features of Burn with
//! the same names. `remote-server` adds Burn's servers and WebSocket to `remote`. `cli` builds the program `memsave-prepare`, and
//! `criterion` adds `measure::criterion`. `system` (default) adds what needs threads and files: [`lazy`], [`peft`] and
//! [`SavedPolicy::disk`](saved::SavedPolicy::disk).
//!
//! With `flex` alone, and without `system`, the crate builds for `wasm32-unknown-unknown`. There, the application chooses the backend
//! of `getrandom`. Burn has deprecated `ndarray`. The feature adds ten CPU minutes to a first release build. `x86-v4` also compiles
//! matrix products and convolutions for AVX-512, and runs that code only on machines that have it. To use the features `openblas` and
//! `accelerate` of NdArray, turn them on in `burn`.
#![deny(missing_docs)]
#![cfg_attr(docsrs, feature(doc_cfg))] // shows which feature an item needs
#![recursion_limit = "256"]

#[doc(hidden)] // the models of `paper` read it, too
pub mod burn_next;
pub mod checkpoint;
mod explain;
mod gradient_steps;
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
mod widened;

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

/// The README, whose code blocks are compiled and run as doctests.
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
