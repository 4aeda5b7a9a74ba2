//! Every layer beside its stock twin.
use burn::module::{Lora, Module, QLora, Quantizer};
use burn::nn::conv::*;
use burn::nn::interpolate::{Interpolate1dConfig, Interpolate2dConfig, InterpolateMode};
use burn::nn::loss::*;
use burn::nn::pool::*;
use burn::nn::{self, PaddingConfig1d, PaddingConfig2d, PaddingConfig3d, activation::*};

use burn::tensor::{
    Device, Int, Tensor, activation,
    ops::AttentionModuleOptions,
    quantization::{Calibration, QuantValue},
};
use burn_memsave::functional;
use burn_memsave::layers::*;
use burn_memsave::nn::loss::{FusedLinearCrossEntropy, FusedLinearCrossEntropyConfig};

/// The forward pass of a layer.
pub type Forward<L, const D: usize, const O: usize> = fn(&L, Tensor<D>) -> Tensor<O>;

/// What to do with a layer and its twin.
pub trait Visitor {
    /// `shape`: of the input. `forward`: of the stock layer, and of ours, which is converted from it.
    fn layer<const D: usize, const O: usize, S: Module, M: Module + From<S>>(
        &mut self,
        name: &str,
        shape: [usize; D],
        stock: S,
        forward: (Forward<S, D, O>, Forward<M, D, O>),
    );
}

/// Runs a layer once, so that its parameters exist: clones of lazy ones share whether they require gradients.
pub fn initialize<const D: usize, const O: usize>(
    shape: [usize; D],
    device: &Device,
    forward: impl Fn(Tensor<D>) -> Tensor<O>,
) {
    forward(Tensor::zeros(shape, device));
}

/// The layer as it is, and with frozen parameters if it has any, by name. Frozen means that no parameter requires a
/// gradient; batch norm uses its running statistics then.
pub fn variants<S: Module>(stock: S) -> Vec<(&'static str, S)> {
    match stock.num_params() {
        0 => vec![("-", stock)],
        _ => vec![("trainable", stock.clone()), ("frozen", stock.freeze())],
    }
}

/// Visits a layer, whose `forward` takes one tensor unless said otherwise.
macro_rules! layer {
    ($visitor:ident, $name:expr, $shape:expr, $stock:expr => $ours:ty) => {
        layer!($visitor, $name, $shape, $stock => $ours, |layer, x| layer.forward(x))
    };
    ($visitor:ident, $name:expr, $shape:expr, $stock:expr => $ours:ty, |$layer:ident, $x:ident| $forward:expr) => {
        $visitor.layer($name, $shape, $stock, (|$layer, $x| $forward, |$layer: &$ours, $x| $forward))
    };
}

/// Shapes of inputs.
pub struct Shapes {
    /// Batch, sequence, features.
    rows: [usize; 3],
    /// Batch, classes.
    logits: [usize; 2],
    /// Batch, sequence, features, of transformers.
    tokens: [usize; 3],
    /// Batch, three times the heads, sequence, features of a head.
    queries: [usize; 4],
    /// Batch, steps, features.
    steps: [usize; 3],
    /// Batch, channels, height, width.
    images: [usize; 4],
    /// Images of twice the height and the width.
    large: [usize; 4],
    /// Batch, channels, length.
    signal: [usize; 3],
    /// Batch, channels, depth, height, width.
    volume: [usize; 5],
}

impl Shapes {
    /// Those of the README's table.
    pub const USUAL: Self = Self {
        rows: [64, 128, 1024],
        logits: [128, 32_000],
        tokens: [4, 512, 1024],
        queries: [1, 24, 2048, 64],
        steps: [16, 64, 128],
        images: [16, 64, 56, 56],
        large: [16, 64, 112, 112],
        signal: [16, 64, 3136],
        volume: [2, 32, 16, 28, 28],
    };
    /// A few thousand elements, where the cost of a call shows.
    #[allow(dead_code, reason = "benches/memory.rs has no use for them")]
    pub const SMALL: Self = Self {
        rows: [2, 8, 1024],
        logits: [16, 1024],
        tokens: [2, 16, 64],
        queries: [2, 12, 16, 16],
        steps: [1, 1, 128],
        images: [2, 64, 7, 7],
        large: [2, 64, 14, 14],
        signal: [2, 64, 49],
        volume: [1, 32, 4, 4, 4],
    };
}

/// Attention alone: queries, keys and values are three thirds of the heads of the input.
macro_rules! attention {
    ($name:ident, $attention:path) => {
        #[derive(Module, Debug)]
        pub struct $name {
            causal: bool,
        }

        impl $name {
            fn forward(&self, x: Tensor<4>) -> Tensor<4> {
                let heads = x.dims()[1] / 3;
                let [query, key, value] =
                    [0, 1, 2].map(|part| x.clone().slice_dim(1, part * heads..(part + 1) * heads));
                let options = AttentionModuleOptions { scale: None, softcap: None, is_causal: self.causal };
                $attention(query, key, value, None, None, options)
            }
        }
    };
}
attention!(StockAttention, burn::tensor::module::attention);
attention!(MemSaveAttention, burn_memsave::functional::attention);

impl From<StockAttention> for MemSaveAttention {
    fn from(StockAttention { causal }: StockAttention) -> Self {
        Self { causal }
    }
}

/// A function of ours beside the stock one; there is no module of theirs.
type Functions<const D: usize, const O: usize> = (Forward<Relu, D, O>, Forward<MemSaveRelu, D, O>);
const SOFTMAX: Functions<3, 3> = (|_, x| activation::softmax(x, 2), |_, x| functional::softmax(x, 2));
const FIRST_AXIS: Functions<3, 3> = (|_, x| activation::softmax(x, 0), |_, x| functional::softmax(x, 0));
const LOG_SOFTMAX: Functions<3, 3> =
    (|_, x| activation::log_softmax(x, 2), |_, x| functional::log_softmax(x, 2));

/// The classes of a head.
const CLASSES: usize = 8000;

/// The head of a network and its loss.
#[derive(Module, Debug)]
struct Head {
    linear: nn::Linear,
    loss: CrossEntropyLoss,
}

impl Head {
    fn forward(&self, x: Tensor<2>, targets: Tensor<1, Int>) -> Tensor<1> {
        self.loss.forward(self.linear.forward(x), targets)
    }
}

/// The same, fused.
#[derive(Module, Debug)]
struct FusedHead {
    linear: MemSaveLinear,
    loss: FusedLinearCrossEntropy,
}

impl From<Head> for FusedHead {
    fn from(head: Head) -> Self {
        let linear = MemSaveLinear::from(head.linear);
        let loss = FusedLinearCrossEntropyConfig::new().init(&linear.weight.device());
        Self { linear, loss }
    }
}

impl FusedHead {
    fn forward(&self, x: Tensor<2>, targets: Tensor<1, Int>) -> Tensor<1> {
        self.loss.forward(&self.linear, x, targets)
    }
}

/// A class per row.
fn scattered(logits: &Tensor<2>) -> Tensor<1, Int> {
    let [rows, classes] = logits.dims();
    let rows = Tensor::<1, Int>::arange(0..rows as i64, &logits.device());
    rows.mul_scalar(7919).remainder_scalar(classes as i64)
}

/// All layers.
pub fn visit_layers(visitor: &mut impl Visitor, device: &Device, shapes: &Shapes) {
    let &Shapes { rows, logits, tokens, queries, steps, images, large, signal, volume } = shapes;

    let linear = nn::LinearConfig::new(1024, 1024);
    layer!(visitor, "linear", rows, linear.init(device) => MemSaveLinear);
    let lora = Lora::new(8, 16.0);
    layer!(visitor, "linear, LoRA", rows, linear.init(device).apply_lora(lora.clone()) => MemSaveLinear);
    let scheme = device.settings().quantization.scheme.with_value(QuantValue::Q8S);
    let qlora = QLora::new(lora, Quantizer::new(Calibration::MinMax, scheme));
    layer!(visitor, "linear, QLoRA", rows, linear.init(device).apply_qlora(qlora) => MemSaveLinear);

    let conv1d = Conv1dConfig::new(64, 64, 3).with_padding(PaddingConfig1d::Same).init(device);
    layer!(visitor, "conv1d", signal, conv1d => MemSaveConv1d);
    let same = PaddingConfig2d::Explicit(1, 1, 1, 1);
    let conv2d = Conv2dConfig::new([64, 64], [3, 3]).with_padding(same.clone());
    layer!(visitor, "conv2d", images, conv2d.init(device) => MemSaveConv2d);
    let strided = conv2d.clone().with_stride([2, 2]).init(device);
    layer!(visitor, "conv2d, stride 2", images, strided => MemSaveConv2d);
    let pointwise = Conv2dConfig::new([64, 64], [1, 1]).init(device);
    layer!(visitor, "conv2d, 1x1", images, pointwise => MemSaveConv2d);
    let depthwise = conv2d.clone().with_groups(64).init(device);
    layer!(visitor, "conv2d, depthwise", images, depthwise => MemSaveConv2d);
    let grouped = conv2d.clone().with_groups(4).init(device);
    layer!(visitor, "conv2d, 4 groups", images, grouped => MemSaveConv2d);
    let asymmetric = conv2d.with_padding(PaddingConfig2d::Explicit(0, 1, 2, 1)).init(device);
    layer!(visitor, "conv2d, asymmetric", images, asymmetric => MemSaveConv2d);
    let conv3d = Conv3dConfig::new([32, 32], [3, 3, 3]).with_padding(PaddingConfig3d::Explicit(1, 1, 1));
    layer!(visitor, "conv3d", volume, conv3d.init(device) => MemSaveConv3d);
    let transposed = ConvTranspose1dConfig::new([64, 64], 4).with_stride(2).with_padding(1).init(device);
    layer!(visitor, "conv_transpose1d", signal, transposed => MemSaveConvTranspose1d);
    let transposed =
        ConvTranspose2dConfig::new([64, 64], [4, 4]).with_stride([2, 2]).with_padding([1, 1]).init(device);
    layer!(visitor, "conv_transpose2d", images, transposed => MemSaveConvTranspose2d);
    let transposed = ConvTranspose3dConfig::new([32, 32], [2, 2, 2]).with_stride([2, 2, 2]).init(device);
    layer!(visitor, "conv_transpose3d", volume, transposed => MemSaveConvTranspose3d);
    let deformable = DeformConv2dConfig::new([16, 16], [3, 3]).with_padding(same.clone()).init(device);
    layer!(visitor, "deform_conv2d", [2, 16, 28, 28], deformable => MemSaveDeformConv2d, |layer, x| {
        let offset = Tensor::zeros([2, 18, 28, 28], &x.device());
        layer.forward(x, offset, None)
    });
    // The input stands in for the indices, which no gradient flows to.
    let embedding = nn::EmbeddingConfig::new(32_000, 1024).init(device);
    layer!(visitor, "embedding", [4, 512], embedding => MemSaveEmbedding, |layer, x| {
        let scattered = Tensor::<1, Int>::arange(0..2048, &x.device()).mul_scalar(7919).remainder_scalar(32_000);
        layer.forward(scattered.reshape(x.dims()))
    });

    layer!(visitor, "batch_norm", images, nn::BatchNormConfig::new(64).init(device) => MemSaveBatchNorm);
    let running = nn::BatchNormConfig::new(64).init(device).freeze();
    let running = running.set_require_grad(true);
    layer!(visitor, "batch_norm, running statistics", images, running => MemSaveBatchNorm);

    layer!(visitor, "layer_norm", rows, nn::LayerNormConfig::new(1024).init(device) => MemSaveLayerNorm);
    layer!(visitor, "rms_norm", rows, nn::RmsNormConfig::new(1024).init(device) => MemSaveRmsNorm);
    layer!(visitor, "group_norm", images, nn::GroupNormConfig::new(8, 64).init(device) => MemSaveGroupNorm);
    layer!(visitor, "instance_norm", images, nn::InstanceNormConfig::new(64).init(device) => MemSaveInstanceNorm);

    let norm = nn::LocalResponseNormConfig::new(5).init();
    layer!(visitor, "local_response_norm", images, norm => MemSaveLocalResponseNorm);

    let gru = nn::GruConfig::new(128, 128, true).init(device);
    layer!(visitor, "gru", steps, gru => MemSaveGru, |layer, x| layer.forward(x, None));
    let lstm = nn::LstmConfig::new(128, 128, true).init(device);
    layer!(visitor, "lstm", steps, lstm => MemSaveLstm, |layer, x| layer.forward(x, None).0);
    let rnn = nn::RnnConfig::new(128, 128, true).init(device);
    layer!(visitor, "rnn", steps, rnn => MemSaveRnn, |layer, x| layer.forward(x, None).0);
    let lstm = nn::BiLstmConfig::new(128, 128, true).init(device);
    layer!(visitor, "bilstm", steps, lstm => MemSaveBiLstm, |layer, x| layer.forward(x, None).0);

    layer!(visitor, "relu", images, Relu::new() => MemSaveRelu);
    layer!(visitor, "leaky_relu", images, LeakyReluConfig::new().init() => MemSaveLeakyRelu);
    layer!(visitor, "prelu", images, PReluConfig::new().with_num_parameters(64).init(device) => MemSavePRelu);
    layer!(visitor, "relu6", images, Relu6::new() => MemSaveRelu6);
    layer!(visitor, "hardtanh", images, HardtanhConfig::new().init() => MemSaveHardtanh);
    layer!(visitor, "hard_sigmoid", images, HardSigmoidConfig::new().init() => MemSaveHardSigmoid);
    layer!(visitor, "hard_shrink", images, HardShrinkConfig::new().init() => MemSaveHardShrink);
    layer!(visitor, "soft_shrink", images, SoftShrinkConfig::new().init() => MemSaveSoftShrink);
    layer!(visitor, "shrink", images, ShrinkConfig::new().init() => MemSaveShrink);
    layer!(visitor, "threshold", images, ThresholdConfig::new(0.5, 0.1).init() => MemSaveThreshold);
    layer!(visitor, "thresholded_relu", images, ThresholdedReluConfig::new().init() => MemSaveThresholdedRelu);
    layer!(visitor, "rrelu", images, RReluConfig::new().init() => MemSaveRRelu);
    layer!(visitor, "gelu", images, Gelu::new() => MemSaveGelu);
    layer!(visitor, "gelu, approximate", images, Gelu::new_approximate() => MemSaveGelu);
    layer!(visitor, "silu", images, SiLU::new() => MemSaveSiLU);
    layer!(visitor, "mish", images, Mish::new() => MemSaveMish);
    layer!(visitor, "softplus", images, SoftplusConfig::new().init() => MemSaveSoftplus);
    layer!(visitor, "softsign", images, Softsign::new() => MemSaveSoftsign);
    layer!(visitor, "elu", images, EluConfig::new().init() => MemSaveElu);
    layer!(visitor, "celu", images, CeluConfig::new().init() => MemSaveCelu);
    layer!(visitor, "selu", images, Selu::new() => MemSaveSelu);
    layer!(visitor, "log_sigmoid", images, LogSigmoid::new() => MemSaveLogSigmoid);
    layer!(visitor, "hard_swish", images, HardSwish::new() => MemSaveHardSwish);
    layer!(visitor, "tanhshrink", images, Tanhshrink::new() => MemSaveTanhshrink);
    layer!(visitor, "sigmoid", images, Sigmoid::new() => MemSaveSigmoid);
    layer!(visitor, "tanh", images, Tanh::new() => MemSaveTanh);
    visitor.layer("softmax", rows, Relu::new(), SOFTMAX);
    visitor.layer("softmax, first axis", rows, Relu::new(), FIRST_AXIS);
    visitor.layer("log_softmax", rows, Relu::new(), LOG_SOFTMAX);
    layer!(visitor, "cross_entropy", logits, CrossEntropyLossConfig::new().init(device) => MemSaveCrossEntropyLoss, |layer, x| {
        let targets = scattered(&x);
        layer.forward(x, targets)
    });
    let smoothed = CrossEntropyLossConfig::new().with_smoothing(Some(0.1));
    layer!(visitor, "cross_entropy, smoothed", logits, smoothed.init(device) => MemSaveCrossEntropyLoss, |layer, x| {
        let targets = scattered(&x);
        layer.forward(x, targets)
    });
    let (head, loss) = (nn::LinearConfig::new(512, CLASSES), CrossEntropyLossConfig::new());
    let head = Head { linear: head.with_bias(false).init(device), loss: loss.init(device) };
    for (name, rows) in
        [("linear and cross_entropy", logits[0] * 8), ("linear and cross_entropy, few rows", logits[0] * 2)]
    {
        layer!(visitor, name, [rows, 512], head.clone() => FusedHead, |layer, x| {
            let targets = scattered(&x);
            layer.forward(x, targets)
        });
    }
    let binary = BinaryCrossEntropyLossConfig::new().with_logits(true);
    layer!(visitor, "binary_cross_entropy", logits, binary.init(device) => MemSaveBinaryCrossEntropyLoss, |layer, x| {
        let labels = Tensor::<2, Int>::ones(x.dims(), &x.device());
        layer.forward(x, labels)
    });
    layer!(visitor, "mse", logits, MseLoss::new() => MemSaveMseLoss, |layer, x| {
        let targets = Tensor::ones(x.dims(), &x.device());
        layer.forward(x, targets, Reduction::Mean)
    });
    layer!(visitor, "huber", logits, HuberLossConfig::new(0.5).init() => MemSaveHuberLoss, |layer, x| {
        let targets = Tensor::ones(x.dims(), &x.device());
        layer.forward(x, targets, Reduction::Mean)
    });
    layer!(visitor, "kl_div", logits, KLDivLossConfig::new().init() => MemSaveKLDivLoss, |layer, x| {
        let targets = Tensor::full(x.dims(), 0.5, &x.device());
        layer.forward(x, targets, Reduction::BatchMean)
    });
    layer!(visitor, "glu", images, GLU::new(1) => MemSaveGLU);
    layer!(visitor, "swiglu", rows, SwiGluConfig::new(1024, 1024).init(device) => MemSaveSwiGlu);
    layer!(visitor, "dropout", images, nn::DropoutConfig::new(0.5).init() => MemSaveDropout);

    for (name, causal) in [("attention", false), ("attention, causal", true)] {
        layer!(visitor, name, queries, StockAttention { causal } => MemSaveAttention);
    }
    for dropout in [0.0, 0.1] {
        let config = nn::attention::MultiHeadAttentionConfig::new(tokens[2], 16).with_dropout(dropout);
        visitor.layer(
            &format!("multi-head attention, dropout {dropout}"),
            tokens,
            config.init(device),
            (
                |layer, x| layer.forward(nn::attention::MhaInput::self_attn(x)).context,
                |layer: &MemSaveMultiHeadAttention, x| {
                    layer.forward(burn_memsave::nn::attention::MhaInput::self_attn(x)).context
                },
            ),
        );
        let config = nn::transformer::TransformerEncoderConfig::new(tokens[2], 4 * tokens[2], 16, 1);
        visitor.layer(
            &format!("transformer encoder, dropout {dropout}"),
            tokens,
            config.with_norm_first(true).with_dropout(dropout).init(device),
            (
                |layer, x| layer.forward(nn::transformer::TransformerEncoderInput::new(x)),
                |layer: &MemSaveTransformerEncoder, x| {
                    layer.forward(burn_memsave::nn::transformer::TransformerEncoderInput::new(x))
                },
            ),
        );
    }

    let pool = MaxPool1dConfig::new(3).with_stride(2).with_padding(PaddingConfig1d::Explicit(1, 1)).init();
    layer!(visitor, "max_pool1d", signal, pool => MemSaveMaxPool1d);
    let pool = MaxPool2dConfig::new([3, 3]).with_strides([2, 2]).with_padding(same).init();
    layer!(visitor, "max_pool2d", large, pool => MemSaveMaxPool2d);
    layer!(visitor, "avg_pool1d", signal, AvgPool1dConfig::new(2).init() => MemSaveAvgPool1d);
    layer!(visitor, "avg_pool2d", large, AvgPool2dConfig::new([2, 2]).init() => MemSaveAvgPool2d);
    layer!(visitor, "adaptive_avg_pool1d", signal, AdaptiveAvgPool1dConfig::new(7).init() => MemSaveAdaptiveAvgPool1d);
    let pool = AdaptiveAvgPool2dConfig::new([1, 1]).init();
    layer!(visitor, "adaptive_avg_pool2d", large, pool => MemSaveAdaptiveAvgPool2d);
    let pool = AdaptiveAvgPool3dConfig::new([2, 2, 2]).init();
    layer!(visitor, "adaptive_avg_pool3d", volume, pool => MemSaveAdaptiveAvgPool3d);
    let resize = Interpolate1dConfig::new()
        .with_output_size(Some(signal[2] / 2))
        .with_mode(InterpolateMode::Linear)
        .init();
    layer!(visitor, "interpolate1d", signal, resize => MemSaveInterpolate1d);
    for (name, mode) in [
        ("interpolate, nearest", InterpolateMode::Nearest),
        ("interpolate, linear", InterpolateMode::Linear),
        ("interpolate, cubic", InterpolateMode::Cubic),
    ] {
        let resize =
            Interpolate2dConfig::new().with_output_size(Some([images[2], images[3]])).with_mode(mode).init();
        layer!(visitor, name, large, resize => MemSaveInterpolate2d);
    }
}
