//! Drop-in modules under the names of [`burn::nn`]: every path that exists there exists here.
//!
//! Some modules have a version here, under Burn's name and under a long one (`Linear` and `MemSaveLinear`); everything else is
//! Burn's. Configs, fields, records, panics and displays are those of the stock modules, but displays show the long name. Each
//! module converts from its stock twin and back (`from_nn_linear`, `into_nn_linear`, `From`).
//!
//! # What each layer keeps
//!
//! The table lists what is kept for the backward pass, apart from tensors of the size of the parameters. "Frozen" means that
//! the input requires a gradient, but no parameter does. A dash marks a case that does not occur. If nothing requires a
//! gradient, nothing is kept.
//!
//! | layer | trainable | frozen | Burn |
//! | --- | --- | --- | --- |
//! | `Linear` | the input | nothing | the same; at the peak, one weight gradient per batch row |
//! | `Linear` with a LoRA adapter on a frozen or quantized weight | the input; `rank` elements per row if only `b` is trained | nothing | the input, and the effective weight |
//! | `Conv1d`, `2d`, `3d`, `ConvTranspose1d`, `2d`, `3d` | the input | nothing | the input |
//! | `DeformConv2d` | the input, offset, mask | offset, mask | the input, offset, mask |
//! | `BatchNorm`, batch statistics | the input | - | the input |
//! | `BatchNorm`, running statistics | the input | nothing | the input (twice at the peak) |
//! | `Relu`, `LeakyRelu`, `Relu6`, `Hardtanh`, `HardSigmoid`, `HardShrink`, `SoftShrink`, `Shrink`, `Threshold`, `ThresholdedRelu` | 1 bit per element | - | the input, booleans or several tensors |
//! | `LayerNorm`, `RmsNorm`, `GroupNorm`, `InstanceNorm` | the input | the input | two tensors of its size, one if frozen |
//! | `norm::AddRmsNorm` (a residual sum and its RMS norm) | the sum | the sum | two tensors of its size, one if frozen |
//! | `LocalResponseNorm` | the input | - | four tensors of its size |
//! | smooth activations: `Gelu`, `SiLU`, `Mish`, `Softplus`, `Softsign`, `Elu`, `Celu`, `Selu`, `LogSigmoid`, `HardSwish`, `Tanhshrink` | the input | - | the input, or up to five tensors of its size |
//! | `Sigmoid`, `Tanh` | the output, shared with the next layer; nothing if the input is kept anyway | - | the input |
//! | `functional::softmax`, `log_softmax`, `softmin`, `quiet_softmax` | the output, shared with the next layer | - | several tensors of its size |
//! | `GLU` | the two halves | - | several tensors of their size |
//! | `SwiGlu` | the input, and the outputs of its linear layers | those outputs | two tensors more |
//! | `MultiHeadAttention`, `CrossAttention`, `functional::attention` | queries, keys, values (and 1 bit per weight under dropout); the inputs of the dense layers | the same without the inputs of the dense layers | several tensors of queries x keys |
//! | `TransformerEncoder`, `TransformerDecoder`, `PositionWiseFeedForward` | what their layers keep; nothing between a norm or an activation and the next dense layer | likewise | what Burn's layers keep |
//! | `Lstm`, `BiLstm` | four tensors of the size of the output (three if the gates are coupled); the input. With `forward_checkpointed`, two states per `every` steps, and the input | the same; the input only with `forward_checkpointed` | ten or more tensors of that size |
//! | `Gru`, `BiGru` | three tensors of the size of the output; the input. With `forward_checkpointed`, one state per `every` steps, and the input | the same; the input only with `forward_checkpointed` | ten or more tensors of that size |
//! | `Rnn`, `BiRnn` | the output (before clipping); the input | the output | several tensors of the size of the output |
//! | `RotaryEncoding` | nothing | - | its constants |
//! | `PRelu` | the input | 1 bit per element | more than the input |
//! | `RRelu` | 4 bytes per element (on wgpu and CUDA: 1 bit per element and a seed of 16 bytes) | 1 bit per element | several tensors |
//! | `Dropout` | 1 bit per element (on wgpu and CUDA: a seed of 16 bytes) | nothing | 4 bytes per element |
//! | `MaxPool1d`, `2d` | 1 byte per output (2 or 4 for windows of more than 255 elements; on remote devices 8) | - | the input and an index of 4 or 8 bytes per output |
//! | `AvgPool1d`, `2d`, `AdaptiveAvgPool1d`, `2d`, `3d`, `Interpolate1d`, `2d` | nothing | - | the input |
//! | `Embedding` | the indices | nothing | the indices, and two tables at the peak |
//! | `CrossEntropyLoss` | the logits, and one number and the target per row; the gradient is computed in place if nothing else holds the logits | - | a tensor of their size, two at the peak |
//! | `FusedLinearCrossEntropy` (a head and its loss) | the gradients of input and weight, never all logits; with fewer rows than features, the input and the gradient of the logits | the input's gradient | a tensor of the size of all logits, two at the peak |
//! | `BinaryCrossEntropyLoss` | one tensor | - | several tensors |
//! | `MseLoss`, `HuberLoss` | the difference; the gradient is computed in place | - | the difference, or several tensors |
//! | `KLDivLoss` | the targets (and the predictions, if the targets are tracked) | - | the same, or several tensors |
//!
//! No layer in the table approximates its results or gradients. Only [`ApproxGelu`](activation::ApproxGelu) and
//! [`ApproxSilu`](activation::ApproxSilu) have approximate gradients.
//!
//! **Recomputed instead of kept.** If the input of a normalization, an activation or a dropout is kept anyway, its output is
//! not kept for the next layer: the backward pass recomputes it. This holds with every checkpointing strategy of the device,
//! and whichever parameters are frozen. `norm -> linear` (or three linear layers) keeps one tensor where Burn keeps three;
//! `conv -> batch norm -> relu -> conv` keeps one tensor and one bit per element. (With Burn's own `Balanced` checkpointing, a
//! stock ReLU recomputes its output and keeps no bits. There, a ReLU costs up to one bit per element more than stock.)
//!
//! If a frozen batch norm uses its running statistics, `conv.forward_norm_relu(x, &norm)` computes
//! `relu(norm.forward(conv.forward(x)))` with a single pass over the result of the convolution, and keeps one bit per element
//! of it. With the statistics of the batch, `norm.forward_activated(x, Smooth::Silu)` computes `silu(norm.forward(x))`, for any
//! activation of single elements, with half the passes on CPUs, and keeps the input only.
//!
//! **Attention** does not hold its weights (queries x keys) as a whole, unless they are few: it computes them in blocks, of
//! about 1 MiB for every four threads on CPUs, and recomputes them in the backward pass. So memory grows linearly with the length
//! of the sequence. `MhaOutput::weights` are computed when they are first read. They have the methods and operators of a tensor; where a
//! `Tensor` is required, `into_tensor` converts them.
//!
//! # Kernels
//!
//! On CPU backends the layers run their own fused kernels. On wgpu and CUDA, activations, gates, dropout, normalizations,
//! pools, losses, rotary encoding, attention weights, adapters and the steps of recurrent layers have kernels, too; the rest
//! composes Burn's operations. Where Burn's `fusion` turns a composition into one kernel, the composition runs instead.
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
