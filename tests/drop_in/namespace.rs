//! Every public path of `burn::nn` 0.22.1 exists in `burn_memsave::nn`: this file does not compile when one is missing or when
//! the list names one that Burn does not have. Of every layer of the table, every path leads to ours; of others, to Burn's.
use crate::table::{self, Check, Row, Visitor};
use burn::config::Config;
use burn::module::Module;
use burn_memsave::nn::activation::ActivationConfig;
use burn_memsave::nn::transformer::{
    PositionWiseFeedForwardConfig, TransformerDecoderConfig, TransformerEncoderConfig,
};
use burn_memsave::nn::{BiGruConfig, BiLstmConfig, BiRnnConfig, GruConfig, LstmConfig, RnnConfig};
use std::any::type_name;
use std::collections::HashMap;
use std::fmt::Display;

/// A path and the types that it leads to: in Burn and here.
type Path = (String, &'static str, &'static str);

/// Types by their module; the rest is imported only.
macro_rules! paths {
    (
        types { $($($module:ident)::+ { $($type:ident)+ })+ }
        of_a_rank { $($($rank_module:ident)::+ { $($rank_type:ident)+ })+ }
        others { $($($other_module:ident)::+ { $($other:ident)+ })+ }
    ) => {
        fn types() -> Vec<Path> {
            let mut paths = vec![];
            let mut add = |module: &str, names: &[&str], stock: Vec<&'static str>, ours: Vec<&'static str>| {
                for (at, name) in names.iter().enumerate() {
                    paths.push((format!("{module}::{name}"), stock[at], ours[at]));
                }
            };
            $(add(
                stringify!($($module)::+),
                &[$(stringify!($type)),+],
                {
                    use burn::$($module)::+ as from;
                    vec![$(type_name::<from::$type>()),+]
                },
                {
                    use burn_memsave::$($module)::+ as from;
                    vec![$(type_name::<from::$type>()),+]
                },
            );)+
            $(add(
                stringify!($($rank_module)::+),
                &[$(stringify!($rank_type)),+],
                {
                    use burn::$($rank_module)::+ as from;
                    vec![$(type_name::<from::$rank_type<1>>()),+]
                },
                {
                    use burn_memsave::$($rank_module)::+ as from;
                    vec![$(type_name::<from::$rank_type<1>>()),+]
                },
            );)+
            paths
        }

        mod others {
            $(
                #[allow(unused_imports)]
                const _: () = {
                    use burn::$($other_module)::+ as stock;
                    use burn_memsave::$($other_module)::+ as ours;
                    $(
                        use ours::$other as _;
                        use stock::$other as _;
                    )+
                };
            )+
        }
    };
}

paths! {
    types {
    nn {
        BatchNorm BatchNormConfig BiGru BiGruConfig BiLstm BiLstmConfig BiRnn BiRnnConfig Celu CeluConfig
        CosineSimilarity CosineSimilarityConfig Dropout DropoutConfig Elu EluConfig Embedding
        EmbeddingConfig Fold4d Fold4dConfig GLU GateController GaussianNoise GaussianNoiseConfig Gelu
        GroupNorm GroupNormConfig Gru GruConfig HardShrink HardShrinkConfig HardSigmoid HardSigmoidConfig
        Identity Initializer InstanceNorm InstanceNormConfig LayerNorm LayerNormConfig LeakyRelu
        LeakyReluConfig Linear LinearConfig LinearLayout LocalResponseNorm LocalResponseNormConfig Lstm
        LstmConfig PRelu PReluConfig PaddingConfig1d PaddingConfig2d PaddingConfig3d PairwiseDistance
        PairwiseDistanceConfig PixelShuffle PixelShuffleConfig PixelUnshuffle PixelUnshuffleConfig
        PositionalEncoding PositionalEncodingConfig Relu RmsNorm RmsNormConfig Rnn RnnConfig RotaryEncoding
        RotaryEncodingConfig Selu Shrink ShrinkConfig Sigmoid SoftShrink SoftShrinkConfig Softplus
        SoftplusConfig Softsign SwiGlu SwiGluConfig Tanh ThresholdedRelu ThresholdedReluConfig Unfold4d
        Unfold4dConfig
    }
    nn::activation {
        Activation ActivationConfig Celu CeluConfig Elu EluConfig GLU Gelu HardShrink HardShrinkConfig
        HardSigmoid HardSigmoidConfig HardSwish Hardtanh HardtanhConfig LeakyRelu LeakyReluConfig LogSigmoid
        Mish PRelu PReluConfig RRelu RReluConfig Relu Relu6 Selu Shrink ShrinkConfig SiLU Sigmoid SoftShrink
        SoftShrinkConfig Softplus SoftplusConfig Softsign SwiGlu SwiGluConfig Tanh Tanhshrink Threshold
        ThresholdConfig ThresholdedRelu ThresholdedReluConfig
    }
    nn::attention {
        CrossAttention CrossAttentionCache CrossAttentionConfig GeneratePaddingMask MhaCache MhaInput
        MhaOutput MultiHeadAttention MultiHeadAttentionConfig SeqLengthOption
    }
    nn::basic {
        BiRnn BiRnnConfig Rnn RnnConfig
    }
    nn::conv {
        Conv1d Conv1dConfig Conv2d Conv2dConfig Conv3d Conv3dConfig ConvTranspose1d ConvTranspose1dConfig
        ConvTranspose2d ConvTranspose2dConfig ConvTranspose3d ConvTranspose3dConfig DeformConv2d
        DeformConv2dConfig
    }
    nn::gru {
        BiGru BiGruConfig Gru GruConfig
    }
    nn::interpolate {
        Interpolate1d Interpolate1dConfig Interpolate2d Interpolate2dConfig InterpolateMode
    }
    nn::loss {
        BinaryCrossEntropyLoss BinaryCrossEntropyLossConfig CTCLoss CTCLossConfig CosineEmbeddingLoss
        CosineEmbeddingLossConfig CrossEntropyLoss CrossEntropyLossConfig GaussianNLLLoss
        GaussianNLLLossConfig HingeEmbeddingLoss HingeEmbeddingLossConfig HuberLoss HuberLossConfig
        KLDivLoss KLDivLossConfig LpLoss LpLossConfig MarginRankingLoss MarginRankingLossConfig MseLoss
        MultiMarginLoss MultiMarginLossConfig PoissonNllLoss PoissonNllLossConfig RNNTLoss RNNTLossConfig
        Reduction SmoothL1Loss SmoothL1LossConfig SoftMarginLoss TripletMarginLoss TripletMarginLossConfig
    }
    nn::lstm {
        BiLstm BiLstmConfig Lstm LstmConfig
    }
    nn::modules {
        BatchNorm BatchNormConfig BiGru BiGruConfig BiLstm BiLstmConfig BiRnn BiRnnConfig CosineSimilarity
        CosineSimilarityConfig Dropout DropoutConfig Embedding EmbeddingConfig Fold4d Fold4dConfig
        GateController GaussianNoise GaussianNoiseConfig GroupNorm GroupNormConfig Gru GruConfig Identity
        InstanceNorm InstanceNormConfig LayerNorm LayerNormConfig Linear LinearConfig LinearLayout
        LocalResponseNorm LocalResponseNormConfig Lstm LstmConfig PairwiseDistance PairwiseDistanceConfig
        PixelShuffle PixelShuffleConfig PixelUnshuffle PixelUnshuffleConfig PositionalEncoding
        PositionalEncodingConfig RmsNorm RmsNormConfig Rnn RnnConfig RotaryEncoding RotaryEncodingConfig
        Unfold4d Unfold4dConfig
    }
    nn::modules::attention {
        CrossAttention CrossAttentionCache CrossAttentionConfig GeneratePaddingMask MhaCache MhaInput
        MhaOutput MultiHeadAttention MultiHeadAttentionConfig SeqLengthOption
    }
    nn::modules::basic {
        BiRnn BiRnnConfig Rnn RnnConfig
    }
    nn::modules::conv {
        Conv1d Conv1dConfig Conv2d Conv2dConfig Conv3d Conv3dConfig ConvTranspose1d ConvTranspose1dConfig
        ConvTranspose2d ConvTranspose2dConfig ConvTranspose3d ConvTranspose3dConfig DeformConv2d
        DeformConv2dConfig
    }
    nn::modules::gru {
        BiGru BiGruConfig Gru GruConfig
    }
    nn::modules::interpolate {
        Interpolate1d Interpolate1dConfig Interpolate2d Interpolate2dConfig InterpolateMode
    }
    nn::modules::lstm {
        BiLstm BiLstmConfig Lstm LstmConfig
    }
    nn::modules::norm {
        BatchNorm BatchNormConfig GroupNorm GroupNormConfig InstanceNorm InstanceNormConfig LayerNorm
        LayerNormConfig LocalResponseNorm LocalResponseNormConfig Normalization NormalizationConfig RmsNorm
        RmsNormConfig
    }
    nn::modules::pool {
        AdaptiveAvgPool1d AdaptiveAvgPool1dConfig AdaptiveAvgPool2d AdaptiveAvgPool2dConfig
        AdaptiveAvgPool3d AdaptiveAvgPool3dConfig AvgPool1d AvgPool1dConfig AvgPool2d AvgPool2dConfig
        MaxPool1d MaxPool1dConfig MaxPool2d MaxPool2dConfig
    }
    nn::modules::transformer {
        PositionWiseFeedForward PositionWiseFeedForwardConfig TransformerDecoder
        TransformerDecoderAutoregressiveCache TransformerDecoderConfig TransformerDecoderInput
        TransformerDecoderLayer TransformerDecoderLayerAutoregressiveCache TransformerEncoder
        TransformerEncoderAutoregressiveCache TransformerEncoderConfig TransformerEncoderInput
        TransformerEncoderLayer TransformerEncoderLayerAutoregressiveCache
    }
    nn::norm {
        BatchNorm BatchNormConfig GroupNorm GroupNormConfig InstanceNorm InstanceNormConfig LayerNorm
        LayerNormConfig LocalResponseNorm LocalResponseNormConfig Normalization NormalizationConfig RmsNorm
        RmsNormConfig
    }
    nn::pool {
        AdaptiveAvgPool1d AdaptiveAvgPool1dConfig AdaptiveAvgPool2d AdaptiveAvgPool2dConfig
        AdaptiveAvgPool3d AdaptiveAvgPool3dConfig AvgPool1d AvgPool1dConfig AvgPool2d AvgPool2dConfig
        MaxPool1d MaxPool1dConfig MaxPool2d MaxPool2dConfig
    }
    nn::transformer {
        PositionWiseFeedForward PositionWiseFeedForwardConfig TransformerDecoder
        TransformerDecoderAutoregressiveCache TransformerDecoderConfig TransformerDecoderInput
        TransformerDecoderLayer TransformerDecoderLayerAutoregressiveCache TransformerEncoder
        TransformerEncoderAutoregressiveCache TransformerEncoderConfig TransformerEncoderInput
        TransformerEncoderLayer TransformerEncoderLayerAutoregressiveCache
    }
    }
    of_a_rank {
    nn {
        LstmState RnnState
    }
    nn::basic {
        RnnState
    }
    nn::cache {
        TensorCache
    }
    nn::lstm {
        LstmState
    }
    nn::modules {
        LstmState RnnState
    }
    nn::modules::basic {
        RnnState
    }
    nn::modules::cache {
        TensorCache
    }
    nn::modules::lstm {
        LstmState
    }
    }
    others {
    nn {
        OptionalInitialLstmState activation attention basic cache conv generate_sinusoids gru interpolate
        loss lstm modules norm pool transformer
    }
    nn::attention {
        generate_autoregressive_mask generate_padding_mask
    }
    nn::lstm {
        OptionalInitialLstmState
    }
    nn::modules {
        OptionalInitialLstmState attention basic cache conv generate_sinusoids gru interpolate lstm norm
        pool transformer
    }
    nn::modules::attention {
        generate_autoregressive_mask generate_padding_mask
    }
    nn::modules::lstm {
        OptionalInitialLstmState
    }
    }
}

/// What belongs to layers of ours and is neither a module nor a config of the table: inputs, outputs, caches, and the configs
/// that name other configs.
const PARTS: [&str; 13] = [
    "ActivationConfig",
    "CrossAttentionCache",
    "MhaCache",
    "MhaInput",
    "MhaOutput",
    "NormalizationConfig",
    "TensorCache",
    "TransformerDecoderAutoregressiveCache",
    "TransformerDecoderInput",
    "TransformerDecoderLayerAutoregressiveCache",
    "TransformerEncoderAutoregressiveCache",
    "TransformerEncoderInput",
    "TransformerEncoderLayerAutoregressiveCache",
];

/// The modules and configs of the table: Burn's, and what takes its place.
#[derive(Default)]
struct Replaced(HashMap<&'static str, &'static str>);

impl Visitor for Replaced {
    fn row<const D: usize, const O: usize, S, M>(&mut self, row: Row<'_, D, O, S, M>)
    where
        S: Module + Display + From<M>,
        M: Module + Display + From<S>,
    {
        if row.notes.leaves_out(Check::Conversion, &row.name) {
            return; // a function, or a layer that takes the place of two
        }
        self.0.insert(type_name::<S>(), type_name::<M>());
    }

    fn configs<S, C>(&mut self, _: &str, _: impl Fn() -> S, _: impl Fn() -> C)
    where
        S: Config + From<C>,
        C: Config + From<S>,
    {
        self.0.insert(type_name::<S>(), type_name::<C>());
    }

    fn configs_one_way<S: Config + From<C>, C: Config>(
        &mut self,
        _: &str,
        _: impl Fn() -> S,
        _: impl Fn() -> C,
    ) {
        self.0.insert(type_name::<S>(), type_name::<C>());
    }
}

#[test]
fn every_path_of_a_replaced_layer_leads_to_ours() {
    let mut replaced = Replaced::default();
    table::visit(&mut replaced);
    let mut wrong = vec![];
    let paths = types();
    assert!(paths.len() > 300, "{} paths", paths.len());
    for (path, stock, ours) in paths {
        let last = path.rsplit("::").next().unwrap_or(&path);
        let (is_right, expected) = match PARTS.contains(&last) {
            true => (ours.starts_with("burn_memsave_layers::"), "ours"),
            false => {
                let expected = replaced.0.get(stock).copied().unwrap_or(stock);
                (ours == expected, expected)
            }
        };
        if !is_right {
            wrong.push(format!("{path} is {ours}, not {expected}"));
        }
    }
    assert!(wrong.is_empty(), "other types than the table says:\n{}", wrong.join("\n"));
}

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
