//! Drop-in modules under the names of [`burn::nn`]: every path that exists there exists here.
//!
//! A module that has a version here is replaced, under its own name and under a long one (`Linear` and `MemSaveLinear`);
//! everything else is Burn's. Configs, fields, records, panics and displays (except for the long name) are those of the
//! stock modules. Each converts from its twin and back (`from_nn_linear`, `into_nn_linear`, `From`).
//!
//! # What each layer keeps
//!
//! For the backward pass, beyond tensors of the size of the parameters. "frozen": no parameter requires a gradient, the input does.
//! Nothing is kept where nothing requires a gradient.
//!
//! | layer | trainable | frozen | Burn |
//! | --- | --- | --- | --- |
//! | `Linear` | the input | nothing | the same, and one weight gradient per batch row at the peak |
//! | `Linear` with a LoRA adapter on a frozen or quantized weight | the input; `rank` elements per row if only `b` is trained | nothing | the input, and the effective weight |
//! | `Conv1d`, `2d`, `3d`, `ConvTranspose1d`, `2d`, `3d` | the input | nothing | the input |
//! | `DeformConv2d` | the input, offset, mask | offset, mask | the input, offset, mask |
//! | `BatchNorm`, batch statistics | the input | - | the input |
//! | `BatchNorm`, running statistics | the input | nothing | the input (twice at the peak) |
//! | `Relu`, `LeakyRelu`, `Relu6`, `Hardtanh`, `HardSigmoid`, `HardShrink`, `SoftShrink`, `Shrink`, `Threshold`, `ThresholdedRelu` | 1 bit per element | - | the input, booleans, or several tensors |
//! | `LayerNorm`, `RmsNorm`, `GroupNorm`, `InstanceNorm` | the input | the input | two tensors of its size, one if frozen |
//! | `norm::AddRmsNorm`: a residual sum and its RMS norm | the sum | the sum | two tensors of its size, one if frozen |
//! | `LocalResponseNorm` | the input | - | four tensors of its size |
//! | `Gelu`, `SiLU`, `Mish`, `Softplus`, `Softsign`, `Elu`, `Celu`, `Selu`, `LogSigmoid`, `HardSwish`, `Tanhshrink` | the input | - | the input, or up to five tensors of its size |
//! | `Sigmoid`, `Tanh` | the output, shared with the layer after it; nothing where the input is kept anyway | - | the input |
//! | `functional::softmax`, `log_softmax`, `softmin`, `quiet_softmax` | the output, shared with the layer after it | - | several tensors of its size |
//! | `GLU` | the two halves | - | several tensors of their size |
//! | `SwiGlu` | the input, and the outputs of its linear layers | the latter | two tensors more |
//! | `MultiHeadAttention`, `CrossAttention`, `functional::attention` | queries, keys, values (and 1 bit per weight under dropout); the inputs of the dense layers | the former | several tensors of queries x keys |
//! | `TransformerEncoder`, `TransformerDecoder`, `PositionWiseFeedForward` | what their layers keep; nothing between a norm or an activation and the dense layer after it | - | what theirs keep |
//! | `Lstm`, `BiLstm` | four tensors of the size of the output (three if the gates are coupled); the input. With `forward_checkpointed` two states every so many steps, and the input | the former | ten or more tensors of that size |
//! | `Gru`, `BiGru` | three tensors of the size of the output; the input. With `forward_checkpointed` a state every so many steps, and the input | the former | ten or more tensors of that size |
//! | `Rnn`, `BiRnn` | the output (before it is clipped); the input | the former | several tensors of the size of the output |
//! | `RotaryEncoding` | nothing | - | its constants |
//! | `PRelu` | the input | 1 bit per element | more than the input |
//! | `RRelu` | 4 bytes per element (on wgpu and CUDA: 1 bit, and a seed of 16 bytes) | 1 bit per element | several tensors |
//! | `Dropout` | 1 bit per element (on wgpu and CUDA: a seed of 16 bytes) | nothing | 4 bytes per element |
//! | `MaxPool1d`, `2d` | 1 byte per output (2 or 4 for windows of more than 255 elements; on remote devices 8) | - | the input and an index of 4 or 8 bytes per output |
//! | `AvgPool1d`, `2d`, `AdaptiveAvgPool1d`, `2d`, `3d`, `Interpolate1d`, `2d` | nothing | - | the input |
//! | `Embedding` | the indices | nothing | the indices, and two tables at the peak |
//! | `CrossEntropyLoss` | the logits, two numbers per row; the gradient is made in place if nobody else holds them | - | a tensor of their size, two at the peak |
//! | `FusedLinearCrossEntropy` (a head and its loss) | the gradients of input and weight, and never all logits; for fewer rows than features the input and the gradient of the logits | the input's gradient | a tensor of the size of all logits, two at the peak |
//! | `BinaryCrossEntropyLoss` | one tensor | - | several tensors |
//! | `MseLoss`, `HuberLoss` | the difference; the gradient is made in place | - | the difference, or several tensors |
//! | `KLDivLoss` | the targets (and the predictions, if the targets are tracked) | - | the same, or several tensors |
//!
//! All of it is exact: no result is approximated.
//!
//! **Computed again instead of kept.** The output of a normalization, an activation or a dropout whose input is kept anyway is offered for
//! recomputation, whatever the checkpointing strategy of the device and whichever parameters are frozen: `norm -> linear` (or three of
//! them) keeps one tensor where Burn keeps three, `conv -> batch norm -> relu -> conv` one tensor and a bit per element. (With Burn's own
//! `Balanced` checkpointing, stock computes a ReLU's output again without its bits: there a ReLU costs up to one bit per element more.)
//!
//! Where a frozen batch norm uses its running statistics, `conv.forward_norm_relu(x, &norm)` is `relu(norm.forward(conv.forward(x)))` in one
//! pass over the result, of which a bit per element is kept.
//!
//! **Attention** never has its weights, queries times keys, as a whole: blocks of a mebibyte are made, and made again in the
//! backward pass, so that memory grows linearly with the length of the sequence. `MhaOutput::weights` are computed
//! when they are first read: they have the methods and operators of a tensor, and `into_tensor` where a `Tensor` is asked for.
//!
//! # Kernels
//!
//! On CPU backends the layers run fused kernels of their own. On wgpu and CUDA, activations, gates, dropout, normalizations, pools,
//! losses, rotary encoding, the weights of attention, adapters and the steps of recurrent layers have kernels, too, and the rest
//! composes Burn's operations; where `fusion` makes one kernel of a composition, the composition is taken.
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
