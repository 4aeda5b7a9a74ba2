//! Every public path of `burn::nn` 0.22.1 exists in `burn_memsave::nn`: this file does not compile when one is missing, when
//! the list names one that Burn does not have, or when one that is replaced leads to Burn's type all the same.
use burn::tensor::Device;
use burn_memsave::layers::*;
use burn_memsave::nn::activation::ActivationConfig;
use burn_memsave::nn::transformer::{
    PositionWiseFeedForwardConfig, TransformerDecoderConfig, TransformerEncoderConfig,
};
use burn_memsave::nn::{BiGruConfig, BiLstmConfig, BiRnnConfig, GruConfig, LstmConfig, RnnConfig};

/// Imports every path from a namespace.
macro_rules! import {
    ($($($path:ident)::+),* $(,)?) => {
        mod stock {
            $(#[allow(unused_imports)] use burn::nn::$($path)::+ as _;)*
        }
        mod ours {
            $(#[allow(unused_imports)] use burn_memsave::nn::$($path)::+ as _;)*
        }
        /// How many paths there are.
        const PATHS: usize = [$(stringify!($($path)::+)),*].len();
    };
}

import! {
    BatchNorm,
    BatchNormConfig,
    BiGru,
    BiGruConfig,
    BiLstm,
    BiLstmConfig,
    BiRnn,
    BiRnnConfig,
    Celu,
    CeluConfig,
    CosineSimilarity,
    CosineSimilarityConfig,
    Dropout,
    DropoutConfig,
    Elu,
    EluConfig,
    Embedding,
    EmbeddingConfig,
    Fold4d,
    Fold4dConfig,
    GLU,
    GateController,
    GaussianNoise,
    GaussianNoiseConfig,
    Gelu,
    GroupNorm,
    GroupNormConfig,
    Gru,
    GruConfig,
    HardShrink,
    HardShrinkConfig,
    HardSigmoid,
    HardSigmoidConfig,
    Identity,
    Initializer,
    InstanceNorm,
    InstanceNormConfig,
    LayerNorm,
    LayerNormConfig,
    LeakyRelu,
    LeakyReluConfig,
    Linear,
    LinearConfig,
    LinearLayout,
    LocalResponseNorm,
    LocalResponseNormConfig,
    Lstm,
    LstmConfig,
    LstmState,
    OptionalInitialLstmState,
    PRelu,
    PReluConfig,
    PaddingConfig1d,
    PaddingConfig2d,
    PaddingConfig3d,
    PairwiseDistance,
    PairwiseDistanceConfig,
    PixelShuffle,
    PixelShuffleConfig,
    PixelUnshuffle,
    PixelUnshuffleConfig,
    PositionalEncoding,
    PositionalEncodingConfig,
    Relu,
    RmsNorm,
    RmsNormConfig,
    Rnn,
    RnnConfig,
    RnnState,
    RotaryEncoding,
    RotaryEncodingConfig,
    Selu,
    Shrink,
    ShrinkConfig,
    Sigmoid,
    SoftShrink,
    SoftShrinkConfig,
    Softplus,
    SoftplusConfig,
    Softsign,
    SwiGlu,
    SwiGluConfig,
    Tanh,
    ThresholdedRelu,
    ThresholdedReluConfig,
    Unfold4d,
    Unfold4dConfig,
    activation,
    activation::Activation,
    activation::ActivationConfig,
    activation::Celu,
    activation::CeluConfig,
    activation::Elu,
    activation::EluConfig,
    activation::GLU,
    activation::Gelu,
    activation::HardShrink,
    activation::HardShrinkConfig,
    activation::HardSigmoid,
    activation::HardSigmoidConfig,
    activation::HardSwish,
    activation::Hardtanh,
    activation::HardtanhConfig,
    activation::LeakyRelu,
    activation::LeakyReluConfig,
    activation::LogSigmoid,
    activation::Mish,
    activation::PRelu,
    activation::PReluConfig,
    activation::RRelu,
    activation::RReluConfig,
    activation::Relu,
    activation::Relu6,
    activation::Selu,
    activation::Shrink,
    activation::ShrinkConfig,
    activation::SiLU,
    activation::Sigmoid,
    activation::SoftShrink,
    activation::SoftShrinkConfig,
    activation::Softplus,
    activation::SoftplusConfig,
    activation::Softsign,
    activation::SwiGlu,
    activation::SwiGluConfig,
    activation::Tanh,
    activation::Tanhshrink,
    activation::Threshold,
    activation::ThresholdConfig,
    activation::ThresholdedRelu,
    activation::ThresholdedReluConfig,
    attention,
    attention::CrossAttention,
    attention::CrossAttentionCache,
    attention::CrossAttentionConfig,
    attention::GeneratePaddingMask,
    attention::MhaCache,
    attention::MhaInput,
    attention::MhaOutput,
    attention::MultiHeadAttention,
    attention::MultiHeadAttentionConfig,
    attention::SeqLengthOption,
    attention::generate_autoregressive_mask,
    attention::generate_padding_mask,
    basic,
    basic::BiRnn,
    basic::BiRnnConfig,
    basic::Rnn,
    basic::RnnConfig,
    basic::RnnState,
    cache,
    cache::TensorCache,
    conv,
    conv::Conv1d,
    conv::Conv1dConfig,
    conv::Conv2d,
    conv::Conv2dConfig,
    conv::Conv3d,
    conv::Conv3dConfig,
    conv::ConvTranspose1d,
    conv::ConvTranspose1dConfig,
    conv::ConvTranspose2d,
    conv::ConvTranspose2dConfig,
    conv::ConvTranspose3d,
    conv::ConvTranspose3dConfig,
    conv::DeformConv2d,
    conv::DeformConv2dConfig,
    generate_sinusoids,
    gru,
    gru::BiGru,
    gru::BiGruConfig,
    gru::Gru,
    gru::GruConfig,
    interpolate,
    interpolate::Interpolate1d,
    interpolate::Interpolate1dConfig,
    interpolate::Interpolate2d,
    interpolate::Interpolate2dConfig,
    interpolate::InterpolateMode,
    loss,
    loss::BinaryCrossEntropyLoss,
    loss::BinaryCrossEntropyLossConfig,
    loss::CTCLoss,
    loss::CTCLossConfig,
    loss::CosineEmbeddingLoss,
    loss::CosineEmbeddingLossConfig,
    loss::CrossEntropyLoss,
    loss::CrossEntropyLossConfig,
    loss::GaussianNLLLoss,
    loss::GaussianNLLLossConfig,
    loss::HingeEmbeddingLoss,
    loss::HingeEmbeddingLossConfig,
    loss::HuberLoss,
    loss::HuberLossConfig,
    loss::KLDivLoss,
    loss::KLDivLossConfig,
    loss::LpLoss,
    loss::LpLossConfig,
    loss::MarginRankingLoss,
    loss::MarginRankingLossConfig,
    loss::MseLoss,
    loss::MultiMarginLoss,
    loss::MultiMarginLossConfig,
    loss::PoissonNllLoss,
    loss::PoissonNllLossConfig,
    loss::RNNTLoss,
    loss::RNNTLossConfig,
    loss::Reduction,
    loss::SmoothL1Loss,
    loss::SmoothL1LossConfig,
    loss::SoftMarginLoss,
    loss::TripletMarginLoss,
    loss::TripletMarginLossConfig,
    lstm,
    lstm::BiLstm,
    lstm::BiLstmConfig,
    lstm::Lstm,
    lstm::LstmConfig,
    lstm::LstmState,
    lstm::OptionalInitialLstmState,
    modules,
    modules::BatchNorm,
    modules::BatchNormConfig,
    modules::BiGru,
    modules::BiGruConfig,
    modules::BiLstm,
    modules::BiLstmConfig,
    modules::BiRnn,
    modules::BiRnnConfig,
    modules::CosineSimilarity,
    modules::CosineSimilarityConfig,
    modules::Dropout,
    modules::DropoutConfig,
    modules::Embedding,
    modules::EmbeddingConfig,
    modules::Fold4d,
    modules::Fold4dConfig,
    modules::GateController,
    modules::GaussianNoise,
    modules::GaussianNoiseConfig,
    modules::GroupNorm,
    modules::GroupNormConfig,
    modules::Gru,
    modules::GruConfig,
    modules::Identity,
    modules::InstanceNorm,
    modules::InstanceNormConfig,
    modules::LayerNorm,
    modules::LayerNormConfig,
    modules::Linear,
    modules::LinearConfig,
    modules::LinearLayout,
    modules::LocalResponseNorm,
    modules::LocalResponseNormConfig,
    modules::Lstm,
    modules::LstmConfig,
    modules::LstmState,
    modules::OptionalInitialLstmState,
    modules::PairwiseDistance,
    modules::PairwiseDistanceConfig,
    modules::PixelShuffle,
    modules::PixelShuffleConfig,
    modules::PixelUnshuffle,
    modules::PixelUnshuffleConfig,
    modules::PositionalEncoding,
    modules::PositionalEncodingConfig,
    modules::RmsNorm,
    modules::RmsNormConfig,
    modules::Rnn,
    modules::RnnConfig,
    modules::RnnState,
    modules::RotaryEncoding,
    modules::RotaryEncodingConfig,
    modules::Unfold4d,
    modules::Unfold4dConfig,
    modules::attention,
    modules::attention::CrossAttention,
    modules::attention::CrossAttentionCache,
    modules::attention::CrossAttentionConfig,
    modules::attention::GeneratePaddingMask,
    modules::attention::MhaCache,
    modules::attention::MhaInput,
    modules::attention::MhaOutput,
    modules::attention::MultiHeadAttention,
    modules::attention::MultiHeadAttentionConfig,
    modules::attention::SeqLengthOption,
    modules::attention::generate_autoregressive_mask,
    modules::attention::generate_padding_mask,
    modules::basic,
    modules::basic::BiRnn,
    modules::basic::BiRnnConfig,
    modules::basic::Rnn,
    modules::basic::RnnConfig,
    modules::basic::RnnState,
    modules::cache,
    modules::cache::TensorCache,
    modules::conv,
    modules::conv::Conv1d,
    modules::conv::Conv1dConfig,
    modules::conv::Conv2d,
    modules::conv::Conv2dConfig,
    modules::conv::Conv3d,
    modules::conv::Conv3dConfig,
    modules::conv::ConvTranspose1d,
    modules::conv::ConvTranspose1dConfig,
    modules::conv::ConvTranspose2d,
    modules::conv::ConvTranspose2dConfig,
    modules::conv::ConvTranspose3d,
    modules::conv::ConvTranspose3dConfig,
    modules::conv::DeformConv2d,
    modules::conv::DeformConv2dConfig,
    modules::generate_sinusoids,
    modules::gru,
    modules::gru::BiGru,
    modules::gru::BiGruConfig,
    modules::gru::Gru,
    modules::gru::GruConfig,
    modules::interpolate,
    modules::interpolate::Interpolate1d,
    modules::interpolate::Interpolate1dConfig,
    modules::interpolate::Interpolate2d,
    modules::interpolate::Interpolate2dConfig,
    modules::interpolate::InterpolateMode,
    modules::lstm,
    modules::lstm::BiLstm,
    modules::lstm::BiLstmConfig,
    modules::lstm::Lstm,
    modules::lstm::LstmConfig,
    modules::lstm::LstmState,
    modules::lstm::OptionalInitialLstmState,
    modules::norm,
    modules::norm::BatchNorm,
    modules::norm::BatchNormConfig,
    modules::norm::GroupNorm,
    modules::norm::GroupNormConfig,
    modules::norm::InstanceNorm,
    modules::norm::InstanceNormConfig,
    modules::norm::LayerNorm,
    modules::norm::LayerNormConfig,
    modules::norm::LocalResponseNorm,
    modules::norm::LocalResponseNormConfig,
    modules::norm::Normalization,
    modules::norm::NormalizationConfig,
    modules::norm::RmsNorm,
    modules::norm::RmsNormConfig,
    modules::pool,
    modules::pool::AdaptiveAvgPool1d,
    modules::pool::AdaptiveAvgPool1dConfig,
    modules::pool::AdaptiveAvgPool2d,
    modules::pool::AdaptiveAvgPool2dConfig,
    modules::pool::AdaptiveAvgPool3d,
    modules::pool::AdaptiveAvgPool3dConfig,
    modules::pool::AvgPool1d,
    modules::pool::AvgPool1dConfig,
    modules::pool::AvgPool2d,
    modules::pool::AvgPool2dConfig,
    modules::pool::MaxPool1d,
    modules::pool::MaxPool1dConfig,
    modules::pool::MaxPool2d,
    modules::pool::MaxPool2dConfig,
    modules::transformer,
    modules::transformer::PositionWiseFeedForward,
    modules::transformer::PositionWiseFeedForwardConfig,
    modules::transformer::TransformerDecoder,
    modules::transformer::TransformerDecoderAutoregressiveCache,
    modules::transformer::TransformerDecoderConfig,
    modules::transformer::TransformerDecoderInput,
    modules::transformer::TransformerDecoderLayer,
    modules::transformer::TransformerDecoderLayerAutoregressiveCache,
    modules::transformer::TransformerEncoder,
    modules::transformer::TransformerEncoderAutoregressiveCache,
    modules::transformer::TransformerEncoderConfig,
    modules::transformer::TransformerEncoderInput,
    modules::transformer::TransformerEncoderLayer,
    modules::transformer::TransformerEncoderLayerAutoregressiveCache,
    norm,
    norm::BatchNorm,
    norm::BatchNormConfig,
    norm::GroupNorm,
    norm::GroupNormConfig,
    norm::InstanceNorm,
    norm::InstanceNormConfig,
    norm::LayerNorm,
    norm::LayerNormConfig,
    norm::LocalResponseNorm,
    norm::LocalResponseNormConfig,
    norm::Normalization,
    norm::NormalizationConfig,
    norm::RmsNorm,
    norm::RmsNormConfig,
    pool,
    pool::AdaptiveAvgPool1d,
    pool::AdaptiveAvgPool1dConfig,
    pool::AdaptiveAvgPool2d,
    pool::AdaptiveAvgPool2dConfig,
    pool::AdaptiveAvgPool3d,
    pool::AdaptiveAvgPool3dConfig,
    pool::AvgPool1d,
    pool::AvgPool1dConfig,
    pool::AvgPool2d,
    pool::AvgPool2dConfig,
    pool::MaxPool1d,
    pool::MaxPool1dConfig,
    pool::MaxPool2d,
    pool::MaxPool2dConfig,
    transformer,
    transformer::PositionWiseFeedForward,
    transformer::PositionWiseFeedForwardConfig,
    transformer::TransformerDecoder,
    transformer::TransformerDecoderAutoregressiveCache,
    transformer::TransformerDecoderConfig,
    transformer::TransformerDecoderInput,
    transformer::TransformerDecoderLayer,
    transformer::TransformerDecoderLayerAutoregressiveCache,
    transformer::TransformerEncoder,
    transformer::TransformerEncoderAutoregressiveCache,
    transformer::TransformerEncoderConfig,
    transformer::TransformerEncoderInput,
    transformer::TransformerEncoderLayer,
    transformer::TransformerEncoderLayerAutoregressiveCache,
}

// The compiler has looked; what is left to see is that the list is not empty.
const _: () = assert!(PATHS > 400);

/// Under each of some paths, a module is ours, and so is its config, which makes it.
macro_rules! ours {
    ($($($path:ident)::+),+ => $modules:tt) => {$(
        const _: () = {
            use burn_memsave::$($path)::+::*;
            ours!(@ $modules);
        };
    )+};
    (@ { $($module:ident = $ours:ident $(by $config:ident($($device:ident: $type:ident)?))?;)+ }) => {$(
        const _: fn($module) -> $ours = |same| same;
        $(const _: fn($config $(, &$type)?) -> $ours = |config $(, $device)?| config.init($($device)?);)?
    )+};
}

ours!(nn, nn::modules => {
    BatchNorm = MemSaveBatchNorm by BatchNormConfig(device: Device);
    Dropout = MemSaveDropout by DropoutConfig();
    Embedding = MemSaveEmbedding by EmbeddingConfig(device: Device);
    GroupNorm = MemSaveGroupNorm by GroupNormConfig(device: Device);
    InstanceNorm = MemSaveInstanceNorm by InstanceNormConfig(device: Device);
    LayerNorm = MemSaveLayerNorm by LayerNormConfig(device: Device);
    Linear = MemSaveLinear by LinearConfig(device: Device);
    LocalResponseNorm = MemSaveLocalResponseNorm by LocalResponseNormConfig();
    RmsNorm = MemSaveRmsNorm by RmsNormConfig(device: Device);
    RotaryEncoding = MemSaveRotaryEncoding by RotaryEncodingConfig(device: Device);
});

ours!(nn::attention, nn::modules::attention => {
    CrossAttention = MemSaveCrossAttention by CrossAttentionConfig(device: Device);
    MultiHeadAttention = MemSaveMultiHeadAttention by MultiHeadAttentionConfig(device: Device);
});

ours!(nn::transformer, nn::modules::transformer => {
    PositionWiseFeedForward = MemSavePositionWiseFeedForward by PositionWiseFeedForwardConfig(device: Device);
    TransformerDecoder = MemSaveTransformerDecoder by TransformerDecoderConfig(device: Device);
    TransformerDecoderLayer = MemSaveTransformerDecoderLayer;
    TransformerEncoder = MemSaveTransformerEncoder by TransformerEncoderConfig(device: Device);
    TransformerEncoderLayer = MemSaveTransformerEncoderLayer;
});

ours!(nn, nn::modules => {
    BiGru = MemSaveBiGru by BiGruConfig(device: Device);
    BiLstm = MemSaveBiLstm by BiLstmConfig(device: Device);
    BiRnn = MemSaveBiRnn by BiRnnConfig(device: Device);
    GateController = MemSaveGateController;
    Gru = MemSaveGru by GruConfig(device: Device);
    Lstm = MemSaveLstm by LstmConfig(device: Device);
    Rnn = MemSaveRnn by RnnConfig(device: Device);
});

ours!(nn::basic, nn::modules::basic => {
    BiRnn = MemSaveBiRnn by BiRnnConfig(device: Device);
    Rnn = MemSaveRnn by RnnConfig(device: Device);
});

ours!(nn::gru, nn::modules::gru => {
    BiGru = MemSaveBiGru by BiGruConfig(device: Device);
    Gru = MemSaveGru by GruConfig(device: Device);
});

ours!(nn::lstm, nn::modules::lstm => {
    BiLstm = MemSaveBiLstm by BiLstmConfig(device: Device);
    Lstm = MemSaveLstm by LstmConfig(device: Device);
});

ours!(nn, nn::activation => {
    Celu = MemSaveCelu by CeluConfig();
    Elu = MemSaveElu by EluConfig();
    GLU = MemSaveGLU;
    Gelu = MemSaveGelu;
    Selu = MemSaveSelu;
    Sigmoid = MemSaveSigmoid;
    Softplus = MemSaveSoftplus by SoftplusConfig();
    Softsign = MemSaveSoftsign;
    SwiGlu = MemSaveSwiGlu by SwiGluConfig(device: Device);
    Tanh = MemSaveTanh;
    HardShrink = MemSaveHardShrink by HardShrinkConfig();
    HardSigmoid = MemSaveHardSigmoid by HardSigmoidConfig();
    LeakyRelu = MemSaveLeakyRelu by LeakyReluConfig();
    PRelu = MemSavePRelu by PReluConfig(device: Device);
    Relu = MemSaveRelu;
    Shrink = MemSaveShrink by ShrinkConfig();
    SoftShrink = MemSaveSoftShrink by SoftShrinkConfig();
    ThresholdedRelu = MemSaveThresholdedRelu by ThresholdedReluConfig();
});

ours!(nn::activation => {
    Activation = MemSaveActivation by ActivationConfig(device: Device);
    HardSwish = MemSaveHardSwish;
    LogSigmoid = MemSaveLogSigmoid;
    Mish = MemSaveMish;
    SiLU = MemSaveSiLU;
    Tanhshrink = MemSaveTanhshrink;
    Hardtanh = MemSaveHardtanh by HardtanhConfig();
    RRelu = MemSaveRRelu by RReluConfig();
    Relu6 = MemSaveRelu6;
    Threshold = MemSaveThreshold by ThresholdConfig();
});

ours!(nn::conv, nn::modules::conv => {
    Conv1d = MemSaveConv1d by Conv1dConfig(device: Device);
    Conv2d = MemSaveConv2d by Conv2dConfig(device: Device);
    Conv3d = MemSaveConv3d by Conv3dConfig(device: Device);
    ConvTranspose1d = MemSaveConvTranspose1d by ConvTranspose1dConfig(device: Device);
    ConvTranspose2d = MemSaveConvTranspose2d by ConvTranspose2dConfig(device: Device);
    ConvTranspose3d = MemSaveConvTranspose3d by ConvTranspose3dConfig(device: Device);
    DeformConv2d = MemSaveDeformConv2d by DeformConv2dConfig(device: Device);
});

ours!(nn::interpolate, nn::modules::interpolate => {
    Interpolate1d = MemSaveInterpolate1d by Interpolate1dConfig();
    Interpolate2d = MemSaveInterpolate2d by Interpolate2dConfig();
});

ours!(nn::loss => {
    BinaryCrossEntropyLoss = MemSaveBinaryCrossEntropyLoss by BinaryCrossEntropyLossConfig(device: Device);
    CrossEntropyLoss = MemSaveCrossEntropyLoss by CrossEntropyLossConfig(device: Device);
    HuberLoss = MemSaveHuberLoss by HuberLossConfig();
    KLDivLoss = MemSaveKLDivLoss by KLDivLossConfig();
    MseLoss = MemSaveMseLoss;
});

ours!(nn::norm, nn::modules::norm => {
    BatchNorm = MemSaveBatchNorm by BatchNormConfig(device: Device);
    GroupNorm = MemSaveGroupNorm by GroupNormConfig(device: Device);
    InstanceNorm = MemSaveInstanceNorm by InstanceNormConfig(device: Device);
    LayerNorm = MemSaveLayerNorm by LayerNormConfig(device: Device);
    LocalResponseNorm = MemSaveLocalResponseNorm by LocalResponseNormConfig();
    RmsNorm = MemSaveRmsNorm by RmsNormConfig(device: Device);
    Normalization = MemSaveNormalization by NormalizationConfig(device: Device);
});

ours!(nn::pool, nn::modules::pool => {
    AdaptiveAvgPool1d = MemSaveAdaptiveAvgPool1d by AdaptiveAvgPool1dConfig();
    AdaptiveAvgPool2d = MemSaveAdaptiveAvgPool2d by AdaptiveAvgPool2dConfig();
    AdaptiveAvgPool3d = MemSaveAdaptiveAvgPool3d by AdaptiveAvgPool3dConfig();
    AvgPool1d = MemSaveAvgPool1d by AvgPool1dConfig();
    AvgPool2d = MemSaveAvgPool2d by AvgPool2dConfig();
    MaxPool1d = MemSaveMaxPool1d by MaxPool1dConfig();
    MaxPool2d = MemSaveMaxPool2d by MaxPool2dConfig();
});

/// Configs of Burn's own modules that name an activation name ours, and are one type under every path.
macro_rules! name_our_activation {
    ($($config:ident.$activation:ident in $($($path:ident)::+),+;)+) => {$(
        const _: fn($config) -> ActivationConfig = |config| config.$activation;
        $(const _: fn(burn_memsave::$($path)::+::$config) -> $config = |same| same;)+
    )+};
}

name_our_activation! {
    BiGruConfig.gate_activation in nn, nn::gru, nn::modules, nn::modules::gru;
    BiLstmConfig.gate_activation in nn, nn::lstm, nn::modules, nn::modules::lstm;
    BiRnnConfig.hidden_activation in nn, nn::basic, nn::modules, nn::modules::basic;
    GruConfig.gate_activation in nn, nn::gru, nn::modules, nn::modules::gru;
    LstmConfig.gate_activation in nn, nn::lstm, nn::modules, nn::modules::lstm;
    RnnConfig.hidden_activation in nn, nn::basic, nn::modules, nn::modules::basic;
    PositionWiseFeedForwardConfig.activation in nn::transformer, nn::modules::transformer;
    TransformerDecoderConfig.activation in nn::transformer, nn::modules::transformer;
    TransformerEncoderConfig.activation in nn::transformer, nn::modules::transformer;
}
