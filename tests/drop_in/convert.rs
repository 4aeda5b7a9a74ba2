//! Conversions, configs, displays and records of every module.
use crate::peers::outcome;
use burn::config::Config;
use burn::module::{Lora, Module, ModuleVisitor, Param, ParamId, QLora, Quantizer};
use burn::nn;
use burn::store::ModuleRecord;
use burn::tensor::{
    Device, Distribution, Tensor, TensorData,
    quantization::{Calibration, QuantValue},
};
use burn_memsave::layers::*;
use burn_memsave::lora::ConvLora;
use burn_memsave::nn as ours;

/// Ids, values and whether they require gradients, of all parameters.
#[derive(Default, Debug, PartialEq)]
struct Parameters(Vec<(ParamId, TensorData, bool)>);

impl ModuleVisitor for Parameters {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.0.push((param.id, param.val().into_data(), param.val().is_require_grad()));
    }
}

fn parameters(module: &impl Module) -> Parameters {
    let mut parameters = Parameters::default();
    module.visit(&mut parameters);
    parameters
}

/// Converts there and back; displays, configs and records must agree.
fn check<S, M>(name: &str, make: impl Fn() -> S)
where
    S: Module + From<M> + core::fmt::Display,
    M: Module + From<S> + core::fmt::Display,
{
    let stock = make();
    assert_eq!(M::from(stock.clone()).to_string(), format!("MemSave{stock}"), "{name}: displayed");
    check_unlike_displays::<S, M>(name, make);
}

/// Converts there and back, where what is displayed names the modules inside.
fn check_unlike_displays<S, M>(name: &str, make: impl Fn() -> S)
where
    S: Module + From<M> + core::fmt::Display,
    M: Module + From<S>,
{
    let stock = make();
    let before = parameters(&stock);
    let display = stock.to_string();
    let ours = M::from(stock.clone());
    assert_eq!(parameters(&ours), before, "{name}: converted");
    assert_eq!(ours.num_params(), stock.num_params(), "{name}: counted");

    let values = |module: &Parameters| module.0.iter().map(|p| p.1.clone()).collect::<Vec<_>>();
    let bytes = |record: ModuleRecord| record.into_bytes().expect("a record of a module");
    let read = |bytes| ModuleRecord::from_bytes(bytes).expect("a record that was just written");
    let of_stock = M::from(make()).load_record(read(bytes(stock.into_record())));
    assert_eq!(values(&parameters(&of_stock)), values(&before), "{name}: stock's record in ours");
    let of_ours = make().load_record(read(bytes(ours.clone().into_record())));
    assert_eq!(values(&parameters(&of_ours)), values(&before), "{name}: our record in stock");

    let back = S::from(ours);
    assert_eq!(parameters(&back), before, "{name}: converted back");
    assert_eq!(back.to_string(), display, "{name}: displayed after that");
}

/// A config has the same JSON form as its twin, and makes the same module.
fn check_config<S, C>(name: &str, stock: S)
where
    S: Config + From<C>,
    C: Config + Clone + From<S>,
{
    let json = serde_json::to_value(&stock).expect("a config");
    let ours = C::from(stock);
    assert_eq!(serde_json::to_value(&ours).expect("a config"), json, "{name}");
    assert_eq!(serde_json::to_value(S::from(ours)).expect("a config"), json, "{name}, and back");
}

#[test]
fn modules_convert_there_and_back() {
    use nn::conv::*;
    use nn::interpolate::*;
    use nn::pool::*;
    let device = &Device::flex().autodiff();
    check::<_, MemSaveLinear>("linear", || nn::LinearConfig::new(3, 4).init(device));
    check::<_, MemSaveLinear>("linear, frozen", || {
        nn::LinearConfig::new(3, 4).with_bias(false).init(device).freeze()
    });
    let columns = nn::LinearConfig::new(3, 4).with_layout(nn::LinearLayout::Col);
    check::<_, MemSaveLinear>("linear, columns", || columns.clone().init(device));
    let adapted = || nn::LinearConfig::new(3, 4).init(device).apply_lora(Lora::new(2, 4.0));
    check::<_, MemSaveLinear>("linear, adapted", adapted);
    check::<_, MemSaveLinear>("linear, quantized and adapted", || {
        let scheme = device.settings().quantization.scheme.with_value(QuantValue::Q8S);
        let quantizer = Quantizer::new(Calibration::MinMax, scheme);
        nn::LinearConfig::new(8, 4).init(device).apply_qlora(QLora::new(Lora::new(2, 4.0), quantizer))
    });
    check::<_, MemSaveEmbedding>("embedding, adapted", || {
        nn::EmbeddingConfig::new(5, 4).init(device).apply_lora(Lora::new(2, 4.0))
    });
    check::<_, MemSaveConv2d>("conv2d, adapted", || {
        let conv = Conv2dConfig::new([2, 4], [3, 2]).init(device);
        conv.apply_reparameterization(ConvLora::new(Lora::new(1, 4.0)))
    });
    check::<_, MemSaveConv1d>("conv1d", || Conv1dConfig::new(2, 4, 3).with_groups(2).init(device));
    check::<_, MemSaveConv2d>("conv2d", || {
        Conv2dConfig::new([2, 4], [3, 2]).with_stride([2, 1]).init(device)
    });
    check::<_, MemSaveConv3d>("conv3d", || {
        Conv3dConfig::new([2, 4], [3, 2, 1]).with_bias(false).init(device)
    });
    check::<_, MemSaveConvTranspose1d>("conv_transpose1d", || {
        ConvTranspose1dConfig::new([2, 4], 3).init(device)
    });
    check::<_, MemSaveConvTranspose2d>("conv_transpose2d", || {
        ConvTranspose2dConfig::new([2, 4], [3, 2]).init(device)
    });
    check::<_, MemSaveConvTranspose3d>("conv_transpose3d", || {
        ConvTranspose3dConfig::new([2, 4], [3, 2, 1]).init(device)
    });
    check::<_, MemSaveDeformConv2d>("deform_conv2d", || DeformConv2dConfig::new([2, 4], [3, 3]).init(device));
    check::<_, MemSaveBatchNorm>("batch_norm", || nn::BatchNormConfig::new(3).init(device));
    check::<_, MemSaveBatchNorm>("batch_norm, frozen", || nn::BatchNormConfig::new(3).init(device).freeze());
    for epsilon in [1e-5, 1.0 / 3.0, 0.0, 1e-300] {
        let norm = nn::LayerNormConfig::new(3).with_epsilon(epsilon);
        check::<_, MemSaveLayerNorm>("layer_norm", || norm.init(device));
        let norm = norm.with_bias(false);
        check::<_, MemSaveLayerNorm>("layer_norm, no bias", || norm.init(device).freeze());
    }
    check::<_, MemSaveRmsNorm>("rms_norm", || nn::RmsNormConfig::new(3).init(device));
    for (size, alpha) in [(5, 0.0001), (2, 1.0 / 3.0)] {
        check::<_, MemSaveLocalResponseNorm>("local_response_norm", || {
            nn::LocalResponseNormConfig::new(size).with_alpha(alpha).with_k(1e-300).init()
        });
    }
    check::<_, MemSaveGroupNorm>("group_norm", || nn::GroupNormConfig::new(2, 4).init(device));
    let plain = nn::InstanceNormConfig::new(4).with_affine(false);
    check::<_, MemSaveInstanceNorm>("instance_norm", || plain.init(device));
    let attention = nn::attention::MultiHeadAttentionConfig::new(4, 2).with_quiet_softmax(true);
    check::<_, MemSaveMultiHeadAttention>("attention", || attention.init(device));
    let feed_forward = nn::transformer::PositionWiseFeedForwardConfig::new(4, 6);
    check::<_, MemSavePositionWiseFeedForward>("feed-forward", || feed_forward.init(device));
    let encoder = nn::transformer::TransformerEncoderConfig::new(4, 6, 2, 2).with_norm_first(true);
    check::<_, MemSaveTransformerEncoder>("encoder", || encoder.init(device));
    let decoder = nn::transformer::TransformerDecoderConfig::new(4, 6, 2, 2);
    check::<_, MemSaveTransformerDecoder>("decoder", || decoder.init(device).freeze());
    let layer = nn::transformer::TransformerEncoderLayer::new(&encoder, device);
    check_unlike_displays::<_, MemSaveTransformerEncoderLayer>("encoder layer", || layer.clone());
    let layer = nn::transformer::TransformerDecoderLayer::new(&decoder, device);
    check_unlike_displays::<_, MemSaveTransformerDecoderLayer>("decoder layer", || layer.clone());
    let attention = nn::attention::CrossAttentionConfig::new(4, 3, 4, 2, 5).with_dropout(0.25);
    for attention in [attention.clone(), attention.with_quiet_softmax(true).with_min_float(-1e3)] {
        check_unlike_displays::<_, MemSaveCrossAttention>("cross attention", || attention.init(device));
    }
    check::<_, MemSaveRotaryEncoding>("rotary", || nn::RotaryEncodingConfig::new(8, 4).init(device));
    check::<_, MemSaveDropout>("dropout", || nn::DropoutConfig::new(0.3).init());
    check::<_, MemSaveEmbedding>("embedding", || nn::EmbeddingConfig::new(5, 4).init(device));
    check::<_, MemSaveMaxPool1d>("max_pool1d", || MaxPool1dConfig::new(3).with_stride(2).init());
    check::<_, MemSaveMaxPool2d>("max_pool2d", || MaxPool2dConfig::new([3, 2]).with_dilation([1, 2]).init());
    check::<_, MemSaveAvgPool1d>("avg_pool1d", || AvgPool1dConfig::new(3).with_ceil_mode(true).init());
    check::<_, MemSaveAvgPool2d>("avg_pool2d", || {
        AvgPool2dConfig::new([3, 2]).with_count_include_pad(false).init()
    });
    check::<_, MemSaveAdaptiveAvgPool1d>("adaptive_avg_pool1d", || AdaptiveAvgPool1dConfig::new(3).init());
    check::<_, MemSaveAdaptiveAvgPool2d>("adaptive_avg_pool2d", || {
        AdaptiveAvgPool2dConfig::new([3, 2]).init()
    });
    check::<_, MemSaveAdaptiveAvgPool3d>("adaptive_avg_pool3d", || {
        AdaptiveAvgPool3dConfig::new([3, 2, 1]).init()
    });
    check::<_, MemSaveRnn>("rnn", || nn::RnnConfig::new(3, 4, true).with_clip(Some(0.5)).init(device));
    check::<_, MemSaveBiRnn>("birnn", || nn::BiRnnConfig::new(3, 4, false).init(device));
    check::<_, MemSaveGru>("gru", || nn::GruConfig::new(3, 4, true).with_reset_after(false).init(device));
    check::<_, MemSaveBiGru>("bigru", || nn::BiGruConfig::new(3, 4, true).init(device).freeze());
    for coupled in [false, true] {
        let lstm = nn::LstmConfig::new(3, 4, true).with_input_forget(coupled).with_reverse(true);
        check::<_, MemSaveLstm>("lstm", || lstm.init(device));
        let lstm = nn::BiLstmConfig::new(3, 4, false).with_input_forget(coupled);
        check::<_, MemSaveBiLstm>("bilstm", || lstm.clone().with_batch_first(false).init(device));
    }
    let mode = InterpolateMode::Cubic;
    check::<_, MemSaveInterpolate1d>("interpolate1d", || {
        Interpolate1dConfig::new().with_output_size(Some(3)).init()
    });
    check::<_, MemSaveInterpolate2d>("interpolate2d", || {
        Interpolate2dConfig::new().with_mode(mode.clone()).init()
    });
}

#[test]
fn losses_convert_there_and_back() {
    use nn::loss::*;
    let device = &Device::flex().autodiff();
    for weights in [None, Some(vec![1.0, 2.0])] {
        let loss = CrossEntropyLossConfig::new().with_weights(weights.clone()).with_smoothing(Some(0.1));
        let loss = loss.with_pad_tokens(Some(vec![0])).with_logits(false);
        check::<_, MemSaveCrossEntropyLoss>("cross_entropy", || loss.init(device));
        check_config::<_, ours::loss::CrossEntropyLossConfig>("cross_entropy", loss.clone());
        let loss = BinaryCrossEntropyLossConfig::new().with_weights(weights).with_logits(true);
        check::<_, MemSaveBinaryCrossEntropyLoss>("binary_cross_entropy", || loss.init(device));
        check_config::<_, ours::loss::BinaryCrossEntropyLossConfig>("binary_cross_entropy", loss.clone());
    }
    check::<_, MemSaveMseLoss>("mse", MseLoss::new);
    check::<_, MemSaveHuberLoss>("huber", || HuberLossConfig::new(0.3).init());
    check_config::<_, ours::loss::HuberLossConfig>("huber", HuberLossConfig::new(0.3));
    let loss = KLDivLossConfig::new().with_log_target(true);
    check::<_, MemSaveKLDivLoss>("kl_div", || loss.init());
    check_config::<_, ours::loss::KLDivLossConfig>("kl_div", loss.clone());
}

#[test]
fn activations_convert_there_and_back() {
    use nn::activation::*;
    let device = &Device::flex().autodiff();
    check::<_, MemSaveRelu>("relu", Relu::new);
    check::<_, MemSaveRelu6>("relu6", Relu6::new);
    check::<_, MemSaveLeakyRelu>("leaky_relu", || LeakyReluConfig::new().with_negative_slope(0.2).init());
    check::<_, MemSavePRelu>("prelu", || PReluConfig::new().with_num_parameters(3).init(device));
    check::<_, MemSaveRRelu>("rrelu", || RReluConfig::new().init());
    check::<_, MemSaveHardtanh>("hardtanh", || HardtanhConfig::new().init());
    check::<_, MemSaveHardSigmoid>("hard_sigmoid", || HardSigmoidConfig::new().init());
    check::<_, MemSaveHardShrink>("hard_shrink", || HardShrinkConfig::new().init());
    check::<_, MemSaveSoftShrink>("soft_shrink", || SoftShrinkConfig::new().init());
    check::<_, MemSaveShrink>("shrink", || ShrinkConfig::new().init());
    check::<_, MemSaveThreshold>("threshold", || ThresholdConfig::new(0.1, 0.2).init());
    check::<_, MemSaveThresholdedRelu>("thresholded_relu", || ThresholdedReluConfig::new().init());
    check::<_, MemSaveGelu>("gelu", Gelu::new_approximate);
    check::<_, MemSaveSiLU>("silu", SiLU::new);
    check::<_, MemSaveMish>("mish", Mish::new);
    check::<_, MemSaveSoftplus>("softplus", || SoftplusConfig::new().with_beta(2.0).init());
    check::<_, MemSaveSoftsign>("softsign", Softsign::new);
    check::<_, MemSaveElu>("elu", || EluConfig::new().with_alpha(0.5).init());
    check::<_, MemSaveCelu>("celu", || CeluConfig::new().with_alpha(0.5).init());
    check::<_, MemSaveSelu>("selu", Selu::new);
    check::<_, MemSaveLogSigmoid>("log_sigmoid", LogSigmoid::new);
    check::<_, MemSaveHardSwish>("hard_swish", HardSwish::new);
    check::<_, MemSaveTanhshrink>("tanhshrink", Tanhshrink::new);
    check::<_, MemSaveSigmoid>("sigmoid", Sigmoid::new);
    check::<_, MemSaveTanh>("tanh", Tanh::new);
    check::<_, MemSaveGLU>("glu", || GLU::new(-2));
    check::<_, MemSaveSwiGlu>("swiglu", || SwiGluConfig::new(3, 4).with_bias(true).init(device));
}

#[test]
fn wrappers_convert_there_and_back() {
    let device = &Device::flex().autodiff();
    let gate = nn::GateController::new(3, 4, true, nn::Initializer::Ones, device);
    let ours = MemSaveGateController::from_nn_gate_controller(gate.clone());
    assert_eq!(parameters(&ours), parameters(&gate));
    assert_eq!(parameters(&ours.into_nn_gate_controller()), parameters(&gate));
    let prelu = nn::activation::Activation::from(nn::activation::PReluConfig::new().init(device));
    let ours = MemSaveActivation::from_nn_activation(prelu.clone());
    assert_eq!(parameters(&ours), parameters(&prelu));
    assert_eq!(parameters(&ours.into_nn_activation()), parameters(&prelu));
    for norm in [
        nn::norm::Normalization::from(nn::BatchNormConfig::new(3).init(device)),
        nn::LayerNormConfig::new(3).init(device).into(),
        nn::RmsNormConfig::new(3).init(device).into(),
        nn::GroupNormConfig::new(2, 4).init(device).into(),
        nn::InstanceNormConfig::new(4).init(device).into(),
    ] {
        let ours = MemSaveNormalization::from_nn_normalization(norm.clone());
        assert_eq!(ours.num_features(), norm.num_features());
        assert_eq!(parameters(&ours.into_nn_normalization()), parameters(&norm));
    }
}

#[test]
fn configs_are_the_same() {
    check_config::<_, ours::LinearConfig>("linear", nn::LinearConfig::new(3, 4));
    check_config::<_, ours::conv::Conv1dConfig>("conv1d", nn::conv::Conv1dConfig::new(2, 4, 3));
    check_config::<_, ours::conv::Conv2dConfig>("conv2d", nn::conv::Conv2dConfig::new([2, 4], [3, 3]));
    check_config::<_, ours::conv::Conv3dConfig>("conv3d", nn::conv::Conv3dConfig::new([2, 4], [3, 3, 3]));
    let transposed = nn::conv::ConvTranspose2dConfig::new([2, 4], [3, 3]);
    check_config::<_, ours::conv::ConvTranspose2dConfig>("conv_transpose2d", transposed);
    check_config::<_, ours::conv::DeformConv2dConfig>(
        "deform_conv2d",
        nn::conv::DeformConv2dConfig::new([2, 4], [3, 3]),
    );
    check_config::<_, ours::BatchNormConfig>("batch_norm", nn::BatchNormConfig::new(3));
    check_config::<_, ours::LayerNormConfig>("layer_norm", nn::LayerNormConfig::new(3));
    check_config::<_, ours::RotaryEncodingConfig>("rotary", nn::RotaryEncodingConfig::new(8, 4));
    let attention = nn::attention::MultiHeadAttentionConfig::new(4, 2).with_key_bias(false);
    check_config::<_, ours::attention::MultiHeadAttentionConfig>("attention", attention);
    let attention = nn::attention::CrossAttentionConfig::new(4, 3, 2, 1, 5).with_dropout(0.3);
    check_config::<_, ours::attention::CrossAttentionConfig>("cross attention", attention);
    check_config::<_, ours::RmsNormConfig>("rms_norm", nn::RmsNormConfig::new(3));
    check_config::<_, ours::LocalResponseNormConfig>(
        "local_response_norm",
        nn::LocalResponseNormConfig::new(3),
    );
    check_config::<_, ours::GroupNormConfig>("group_norm", nn::GroupNormConfig::new(2, 4));
    check_config::<_, ours::InstanceNormConfig>("instance_norm", nn::InstanceNormConfig::new(3));
    check_config::<_, ours::DropoutConfig>("dropout", nn::DropoutConfig::new(0.1));
    check_config::<_, ours::EmbeddingConfig>("embedding", nn::EmbeddingConfig::new(3, 4));
    check_config::<_, ours::pool::MaxPool2dConfig>("max_pool2d", nn::pool::MaxPool2dConfig::new([3, 2]));
    check_config::<_, ours::pool::AvgPool2dConfig>("avg_pool2d", nn::pool::AvgPool2dConfig::new([3, 2]));
    check_config::<_, ours::interpolate::Interpolate2dConfig>(
        "interpolate2d",
        nn::interpolate::Interpolate2dConfig::new(),
    );
}

/// Defaults are written twice, once in Burn and once here.
#[test]
fn defaults_are_the_same() {
    macro_rules! same_defaults {
        ($($($path:ident)::+ ($($argument:expr),*)),+ $(,)?) => {$(
            assert_eq!(
                serde_json::to_value(ours::$($path)::+::new($($argument),*)).expect("a config"),
                serde_json::to_value(nn::$($path)::+::new($($argument),*)).expect("a config"),
                stringify!($($path)::+),
            );
        )+};
    }
    same_defaults!(
        LinearConfig(3, 4),
        conv::Conv1dConfig(2, 4, 3),
        conv::Conv2dConfig([2, 4], [3, 3]),
        conv::Conv3dConfig([2, 4], [3, 3, 3]),
        conv::ConvTranspose1dConfig([2, 4], 3),
        conv::ConvTranspose2dConfig([2, 4], [3, 3]),
        conv::ConvTranspose3dConfig([2, 4], [3, 3, 3]),
        conv::DeformConv2dConfig([2, 4], [3, 3]),
        BatchNormConfig(3),
        LayerNormConfig(3),
        RmsNormConfig(3),
        RotaryEncodingConfig(8, 4),
        attention::MultiHeadAttentionConfig(4, 2),
        attention::CrossAttentionConfig(4, 3, 2, 1, 5),
        LocalResponseNormConfig(3),
        GroupNormConfig(2, 4),
        InstanceNormConfig(3),
        DropoutConfig(0.1),
        EmbeddingConfig(3, 4),
        pool::MaxPool1dConfig(3),
        pool::MaxPool2dConfig([3, 2]),
        pool::AvgPool1dConfig(3),
        pool::AvgPool2dConfig([3, 2]),
        pool::AdaptiveAvgPool1dConfig(3),
        pool::AdaptiveAvgPool2dConfig([3, 2]),
        pool::AdaptiveAvgPool3dConfig([3, 2, 1]),
        interpolate::Interpolate1dConfig(),
        interpolate::Interpolate2dConfig(),
        activation::EluConfig(),
        activation::CeluConfig(),
        activation::SoftplusConfig(),
        activation::SwiGluConfig(3, 4),
        activation::LeakyReluConfig(),
        activation::PReluConfig(),
        activation::RReluConfig(),
        activation::HardtanhConfig(),
        activation::HardSigmoidConfig(),
        activation::HardShrinkConfig(),
        activation::SoftShrinkConfig(),
        activation::ShrinkConfig(),
        activation::ThresholdConfig(0.1, 0.2),
        activation::ThresholdedReluConfig(),
        transformer::PositionWiseFeedForwardConfig(8, 16),
        transformer::TransformerEncoderConfig(8, 16, 2, 1),
        transformer::TransformerDecoderConfig(8, 16, 2, 1),
        RnnConfig(3, 4, true),
        BiRnnConfig(3, 4, true),
        GruConfig(3, 4, true),
        BiGruConfig(3, 4, true),
        LstmConfig(3, 4, true),
        BiLstmConfig(3, 4, true),
    );
}

/// Burn dequantizes what `quantize_weights` has made of a frozen layer, parameter by parameter; so do its twins.
#[test]
fn quantized_layers_compute_as_stock() {
    fn quantized<M: Module>(layer: M, device: &Device) -> M {
        let scheme = device.settings().quantization.scheme.with_value(QuantValue::Q8S);
        layer.freeze().quantize_weights(&mut Quantizer::new(Calibration::MinMax, scheme))
    }
    macro_rules! compare {
        ($shape:expr, $stock:expr => $ours:ty) => {
            let device = Device::flex().autodiff();
            let x = Tensor::<4>::random($shape, Distribution::Default, &device);
            let stock = quantized($stock.init(&device), &device);
            let ours = <$ours>::from(stock.clone());
            let [ours, stock] = [outcome(&x, |x| ours.forward(x)), outcome(&x, |x| stock.forward(x))];
            ours.iter().zip(&stock).for_each(|(ours, stock)| ours.assert_eq(stock, true));
        };
    }
    compare!([2, 3, 4, 32], nn::LinearConfig::new(32, 32) => MemSaveLinear);
    compare!([2, 32, 5, 5], nn::conv::Conv2dConfig::new([32, 32], [3, 3]) => MemSaveConv2d);
    compare!([2, 32, 5, 5], nn::conv::ConvTranspose2dConfig::new([32, 32], [3, 3]) => MemSaveConvTranspose2d);
    compare!([2, 32, 5, 5], nn::BatchNormConfig::new(32) => MemSaveBatchNorm);
    compare!([2, 32, 5, 5], nn::PReluConfig::new().with_num_parameters(32) => MemSavePRelu);
}
