//! What every layer keeps and needs at its peak: exactly what the head of its file says, and never more than stock.
//!
//! Memory is counted for the whole process, so this is one test. Kept bytes are compared as the difference of two sizes:
//! what does not grow with the batch (the graph's own records, tensors of one element per channel) cancels out, and every
//! byte of the rest has to be accounted for, here and in the ledger.
//!
//! Only the comparison with stock has a slack, of [`RECORDS`] bytes, as it is one of absolute sizes (what stock keeps is not
//! always proportional to the batch): the two sides record different steps, of a few hundred bytes each, and now and then
//! a table of the graph doubles in one of the two runs.
#![recursion_limit = "256"]
use burn::module::{Module, ModuleMapper, Param};
use burn::nn::conv::*;
use burn::nn::interpolate::{Interpolate1dConfig, Interpolate2dConfig};
use burn::nn::loss::*;
use burn::nn::pool::*;
use burn::nn::{self, PaddingConfig1d, PaddingConfig2d, PaddingConfig3d, activation::*};
use burn::tensor::{
    DType, Device, Distribution, GradientCheckpointingStrategy, Int, Tensor, activation,
    ops::AttentionModuleOptions,
};
use burn_memsave::layers::*;
use burn_memsave::measure::{LayerMeasurement, TrackingAllocator, ledger, measure_layer};
use burn_memsave::{functional, nn as memsave};
use std::sync::Mutex;

#[global_allocator]
static ALLOCATOR: TrackingAllocator = TrackingAllocator::new();

/// The graph's own records of one layer.
const RECORDS: i64 = 2048;

/// Of every layer that keeps tensors of one element per channel, and these are three at most: statistics, gamma or alpha.
const CHANNELS: usize = 8;

/// Of the element types that Flex computes with.
const DTYPES: [DType; 3] = [DType::F32, DType::F64, DType::F16];

/// The forward pass of a layer.
type Forward<L, const D: usize, const O: usize> = fn(&L, Tensor<D>) -> Tensor<O>;

/// What is tracked.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Case {
    /// Everything.
    Trainable,
    /// The input.
    Frozen,
    /// The parameters.
    InputUntracked,
    /// The bias (of batch norm: beta) if there is one.
    BiasOnly,
    /// Nothing.
    Untracked,
}

const CASES: [Case; 5] =
    [Case::Trainable, Case::Frozen, Case::InputUntracked, Case::BiasOnly, Case::Untracked];

impl Case {
    fn input(self) -> bool {
        matches!(self, Self::Trainable | Self::Frozen)
    }
    fn weight(self) -> bool {
        matches!(self, Self::Trainable | Self::InputUntracked)
    }
    fn parameter(self, name: &str) -> bool {
        self.weight() || self == Self::BiasOnly && ["bias", "beta"].contains(&name)
    }
}

/// An input.
#[derive(Clone, Copy)]
struct Input<const D: usize> {
    shape: [usize; D],
    dtype: DType,
}

impl<const D: usize> Input<D> {
    fn random(self, device: &Device) -> Tensor<D> {
        Tensor::random(self.shape, Distribution::Normal(0.0, 1.0), (device, self.dtype))
    }
    fn elements(self) -> usize {
        self.shape.iter().product()
    }
    /// Bytes of a tensor of its shape and type.
    fn floats(self) -> usize {
        self.elements() * self.dtype.size()
    }
    /// Bytes of one bit per element, in words of 64.
    fn bits(self) -> usize {
        8 * self.elements().div_ceil(64)
    }
}

/// Gives the parameters of a module their type, and tracks those that the case says.
struct Prepare {
    case: Case,
    dtype: DType,
    parameter: String,
}

impl ModuleMapper for Prepare {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.parameter = name.into();
    }
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let cast = param.map(|tensor| tensor.cast(self.dtype).detach());
        cast.set_require_grad(self.case.parameter(&self.parameter))
    }
}

/// With Burn's gradient checkpointing and without.
fn devices() -> [Device; 2] {
    [Device::flex().autodiff(), Device::flex().autodiff().gradient_checkpointing()]
}

/// What was not as expected; all of it is reported at the end.
static FAILURES: Mutex<Vec<String>> = Mutex::new(Vec::new());

fn expect(holds: bool, failure: impl FnOnce() -> String) {
    if !holds {
        FAILURES.lock().expect("nobody panics with it").push(failure());
    }
}

/// The second of two runs: the first also pays for what is initialized lazily.
fn measure<const D: usize, const O: usize>(
    device: &Device,
    input: Input<D>,
    tracked: bool,
    forward: impl Fn(Tensor<D>) -> Tensor<O>,
) -> LayerMeasurement {
    let run = || {
        // Burn frees the graph of a dropped tensor in the next backward pass.
        drop(Tensor::<1>::ones([1], device).require_grad().backward());
        measure_layer(|| input.random(device).set_require_grad(tracked), &forward)
    };
    run();
    run()
}

fn bytes(measured: Option<u64>) -> i64 {
    measured.expect("the allocator counts") as i64
}

/// How much more is kept for the larger one of two inputs, and all that was measured of that one. Should a table of the graph
/// grow between the two, so that they differ by more than `said`, another pair tells.
fn growth<const D: usize, const O: usize>(
    device: &Device,
    inputs: [Input<D>; 2],
    tracked: bool,
    forward: impl Fn(Tensor<D>) -> Tensor<O>,
    said: i64,
) -> (i64, LayerMeasurement) {
    let pair = || {
        let [small, large] = inputs.map(|input| measure(device, input, tracked, &forward));
        (bytes(large.kept) - bytes(small.kept), large)
    };
    (0..3).map(|_| pair()).find(|&(growth, _)| growth == said).unwrap_or_else(pair)
}

/// Compares a layer with its twin in all cases and types, for two batch sizes. `kept(case, input)` are the bytes that the
/// layer says it keeps of what grows with the batch.
fn check<const D: usize, const O: usize, S: Module, M: Module + From<S>>(
    name: &str,
    shape: [usize; D],
    make: impl Fn(&Device) -> S,
    of_stock: Forward<S, D, O>,
    of_ours: Forward<M, D, O>,
    kept: impl Fn(Case, Input<D>) -> usize,
) {
    check_types(&DTYPES, name, shape, make, (of_stock, of_ours), kept);
}

/// [`check`] in some types.
fn check_types<const D: usize, const O: usize, S: Module, M: Module + From<S>>(
    dtypes: &[DType],
    name: &str,
    shape: [usize; D],
    make: impl Fn(&Device) -> S,
    (of_stock, of_ours): (Forward<S, D, O>, Forward<M, D, O>),
    kept: impl Fn(Case, Input<D>) -> usize,
) {
    let mut doubled = shape;
    doubled[0] *= 2;
    for (device, &dtype) in
        devices().iter().flat_map(|device| dtypes.iter().map(move |dtype| (device, dtype)))
    {
        let inputs = [shape, doubled].map(|shape| Input { shape, dtype });
        for case in CASES {
            let strategy = device.gradient_checkpointing_strategy();
            let expect = |holds, failure: String| {
                expect(holds, || format!("{name}, {dtype:?}, {case:?}, {strategy:?}: {failure}"));
            };
            let stock = make(device).map(&mut Prepare { case, dtype, parameter: String::new() });
            let ours = M::from(stock.clone());
            let said = inputs.map(|input| kept(case, input) as i64);

            let forward = |x| of_ours(&ours, x);
            let (grown, large) = growth(device, inputs, case.input(), forward, said[1] - said[0]);
            expect(
                grown == said[1] - said[0],
                format!("keeps {grown} bytes more, not {}", said[1] - said[0]),
            );

            let twin = measure(device, inputs[1], case.input(), |x| of_stock(&stock, x));
            for (what, ours, stock) in [("kept", large.kept, twin.kept), ("peak", large.peak, twin.peak)] {
                let (ours, stock) = (bytes(ours), bytes(stock));
                expect(ours <= stock + RECORDS, format!("{what} {ours} bytes, stock {stock}"));
            }

            // The ledger does not see Burn's own operations: the product of `RRelu`.
            let seen = if name == "rrelu" { [0, 0] } else { said };
            let total = |input: Input<D>| {
                let x = input.random(device).set_require_grad(case.input());
                ledger(&ours, x, |ours, x| of_ours(ours, x)).1.total() as i64
            };
            let [small, large] = inputs.map(total);
            expect(
                large - small == seen[1] - seen[0],
                format!("the ledger's totals are {small} and {large}"),
            );
            let per_channel = 0..=(3 * CHANNELS * dtype.size()) as i64;
            expect(per_channel.contains(&(small - seen[0])), format!("the ledger's total is {small}"));
        }
    }
}

macro_rules! check {
    ($name:literal, $shape:expr, $make:expr => $ours:ty, $kept:expr) => {
        check!($name, $shape, $make => $ours, |layer, x| layer.forward(x), $kept)
    };
    ($name:literal, $shape:expr, $make:expr => $ours:ty, |$layer:ident, $x:ident| $forward:expr, $kept:expr) => {
        check($name, $shape, $make, |$layer, $x| $forward, |$layer: &$ours, $x| $forward, $kept)
    };
}

/// A layer that is linear in its input and its weight keeps each for the gradient of the other; the weight does not grow
/// with the batch.
fn bilinear<const D: usize>(case: Case, x: Input<D>) -> usize {
    if case.weight() { x.floats() } else { 0 }
}

fn mask<const D: usize>(case: Case, x: Input<D>) -> usize {
    if case.input() { x.bits() } else { 0 }
}

/// So many bytes per image or signal of the batch.
fn offsets<const D: usize>(each: usize) -> impl Fn(Case, Input<D>) -> usize {
    move |case, x| if case.input() { x.shape[0] * each } else { 0 }
}

fn nothing<const D: usize>(_: Case, _: Input<D>) -> usize {
    0
}

#[test]
fn layers_keep_what_they_say() {
    // Kernels of one thread: how much they take at once must not depend on who comes first.
    rayon::ThreadPoolBuilder::new().num_threads(1).build_global().expect("nothing has run yet");
    let images = [4, 8, 24, 20];
    let signal = [4, 8, 300];
    let volume = [2, 4, 8, 10, 6];
    let uneven = PaddingConfig2d::Explicit(0, 1, 2, 1);

    let linear = nn::LinearConfig::new(64, 48);
    check!("linear", [4, 32, 64], |device| linear.init(device) => MemSaveLinear, bilinear);
    check!("linear, few rows", [8, 16, 64], |device| linear.init(device) => MemSaveLinear, bilinear);
    check!("conv1d", signal, |device| Conv1dConfig::new(8, 8, 3).init(device) => MemSaveConv1d, bilinear);
    let even = Conv1dConfig::new(8, 8, 4).with_padding(PaddingConfig1d::Same);
    check!("conv1d, same", signal, |device| even.init(device) => MemSaveConv1d, bilinear);
    let dilated = Conv1dConfig::new(8, 8, 3).with_padding(PaddingConfig1d::Explicit(0, 3)).with_dilation(2);
    check!("conv1d, asymmetric", signal, |device| dilated.init(device) => MemSaveConv1d, bilinear);
    check!("conv2d", images, |device| Conv2dConfig::new([8, 8], [3, 3]).init(device) => MemSaveConv2d, bilinear);
    let grouped = Conv2dConfig::new([8, 16], [3, 3]).with_groups(4).with_stride([2, 1]).with_bias(false);
    check!("conv2d, grouped", images, |device| grouped.init(device) => MemSaveConv2d, bilinear);
    let even = Conv2dConfig::new([8, 8], [2, 4]).with_padding(PaddingConfig2d::Same);
    check!("conv2d, same", images, |device| even.init(device) => MemSaveConv2d, bilinear);
    let dilated = Conv2dConfig::new([8, 8], [3, 3]).with_padding(uneven.clone()).with_dilation([2, 1]);
    check!("conv2d, asymmetric", images, |device| dilated.init(device) => MemSaveConv2d, bilinear);
    check!("conv3d", volume, |device| Conv3dConfig::new([4, 4], [3, 3, 3]).init(device) => MemSaveConv3d, bilinear);
    let dilated =
        Conv3dConfig::new([4, 4], [3, 1, 3]).with_padding(PaddingConfig3d::Same).with_dilation([2, 1, 1]);
    check!("conv3d, dilated", volume, |device| dilated.init(device) => MemSaveConv3d, bilinear);
    let strided = ConvTranspose1dConfig::new([8, 8], 3).with_stride(2);
    check!("conv_transpose1d", signal, |device| strided.init(device) => MemSaveConvTranspose1d, bilinear);
    let strided = ConvTranspose2dConfig::new([8, 8], [3, 3]).with_stride([2, 2]);
    check!("conv_transpose2d", images, |device| strided.init(device) => MemSaveConvTranspose2d, bilinear);
    let dilated = strided.with_dilation([2, 1]).with_padding([1, 0]).with_padding_out([1, 0]);
    check!("conv_transpose2d, dilated", images, |device| dilated.init(device) => MemSaveConvTranspose2d, bilinear);
    let transposed = ConvTranspose3dConfig::new([4, 4], [3, 3, 3]);
    check!("conv_transpose3d", volume, |device| transposed.init(device) => MemSaveConvTranspose3d, bilinear);
    deformable_convolution_keeps_what_gradients_read();

    check!("relu", images, |_| Relu::new() => MemSaveRelu, mask);
    check!("leaky_relu", images, |_| LeakyReluConfig::new().init() => MemSaveLeakyRelu, mask);
    check!("relu6", images, |_| Relu6::new() => MemSaveRelu6, mask);
    check!("hardtanh", images, |_| HardtanhConfig::new().init() => MemSaveHardtanh, mask);
    check!("hard_sigmoid", images, |_| HardSigmoidConfig::new().init() => MemSaveHardSigmoid, mask);
    check!("hard_shrink", images, |_| HardShrinkConfig::new().init() => MemSaveHardShrink, mask);
    check!("soft_shrink", images, |_| SoftShrinkConfig::new().init() => MemSaveSoftShrink, mask);
    check!("shrink", images, |_| ShrinkConfig::new().init() => MemSaveShrink, mask);
    check!("threshold", images, |_| ThresholdConfig::new(0.5, 0.1).init() => MemSaveThreshold, mask);
    check!("thresholded_relu", images, |_| ThresholdedReluConfig::new().init() => MemSaveThresholdedRelu, mask);
    let one = |case: Case, x: Input<4>| if case.input() { x.floats() } else { 0 };
    check!("gelu", images, |_| Gelu::new() => MemSaveGelu, one);
    check!("gelu, approximate", images, |_| Gelu::new_approximate() => MemSaveGelu, one);
    check!("silu", images, |_| SiLU::new() => MemSaveSiLU, one);
    check!("mish", images, |_| Mish::new() => MemSaveMish, one);
    check!("softplus", images, |_| SoftplusConfig::new().init() => MemSaveSoftplus, one);
    check!("softsign", images, |_| Softsign::new() => MemSaveSoftsign, one);
    check!("elu", images, |_| EluConfig::new().init() => MemSaveElu, one);
    check!("celu", images, |_| CeluConfig::new().init() => MemSaveCelu, one);
    check!("selu", images, |_| Selu::new() => MemSaveSelu, one);
    check!("log_sigmoid", images, |_| LogSigmoid::new() => MemSaveLogSigmoid, one);
    check!("hard_swish", images, |_| HardSwish::new() => MemSaveHardSwish, one);
    check!("tanhshrink", images, |_| Tanhshrink::new() => MemSaveTanhshrink, one);
    check!("glu", images, |_| GLU::new(1) => MemSaveGLU, one);
    softmaxes_keep_their_output(images, one);
    losses_keep_one_tensor();
    check!("dropout", images, |_| nn::DropoutConfig::new(0.3).init() => MemSaveDropout, mask);
    let prelu = PReluConfig::new().with_num_parameters(8);
    check!("prelu", images, |device| prelu.init(device) => MemSavePRelu, |case, x| match case {
        Case::Frozen => x.bits(),
        case => bilinear(case, x),
    });
    check!("rrelu", images, |_| RReluConfig::new().init() => MemSaveRRelu, |case, x| {
        if case.input() { x.floats() } else { 0 }
    });
    check!("rrelu, evaluation", images, |_| RReluConfig::new().init().freeze() => MemSaveRRelu, mask);

    check!("batch_norm", images, |device| nn::BatchNormConfig::new(8).init(device) => MemSaveBatchNorm, |case, x| {
        if case.input() || case.weight() { x.floats() } else { 0 }
    });
    let running = |device: &Device| nn::BatchNormConfig::new(8).init(device).freeze();
    check!("batch_norm, running statistics", images, running => MemSaveBatchNorm, bilinear);

    let x_or_scale = |case: Case, x: Input<4>| if case.input() || case.weight() { x.floats() } else { 0 };
    check!("group_norm", images, |device| nn::GroupNormConfig::new(2, 8).init(device) => MemSaveGroupNorm, x_or_scale);
    let instance = nn::InstanceNormConfig::new(8);
    check!("instance_norm", images, |device| instance.init(device) => MemSaveInstanceNorm, x_or_scale);
    let plain = instance.clone().with_affine(false);
    check!("instance_norm, not affine", images, |device| plain.init(device) => MemSaveInstanceNorm, |case, x| {
        if case.input() { x.floats() } else { 0 }
    });
    attention_keeps_queries_keys_and_values();

    let rows = [4, 32, 8];
    let x_or_scale = |case: Case, x: Input<3>| if case.input() || case.weight() { x.floats() } else { 0 };
    check!("layer_norm", rows, |device| nn::LayerNormConfig::new(8).init(device) => MemSaveLayerNorm, x_or_scale);
    let no_bias = nn::LayerNormConfig::new(8).with_bias(false);
    check!("layer_norm, no bias", rows, |device| no_bias.init(device) => MemSaveLayerNorm, x_or_scale);
    check!("rms_norm", rows, |device| nn::RmsNormConfig::new(8).init(device) => MemSaveRmsNorm, x_or_scale);

    let response = nn::LocalResponseNormConfig::new(5);
    check!("local_response_norm", images, |_| response.init() => MemSaveLocalResponseNorm, one);

    recurrent_layers_keep_their_gates();

    // Offsets of one byte in windows of up to 255 elements, of two up to 65535.
    let pool = MaxPool2dConfig::new([3, 3]).with_strides([2, 2]);
    check!("max_pool2d", images, |_| pool.init() => MemSaveMaxPool2d, offsets(8 * 11 * 9));
    let padded = pool.with_padding(uneven.clone());
    check!("max_pool2d, asymmetric", images, |_| padded.init() => MemSaveMaxPool2d, offsets(8 * 12 * 10));
    let even = MaxPool2dConfig::new([2, 4]).with_strides([1, 1]).with_padding(PaddingConfig2d::Same);
    check!("max_pool2d, same", images, |_| even.init() => MemSaveMaxPool2d, offsets(8 * 24 * 20));
    let pool = MaxPool2dConfig::new([15, 17]).with_strides([2, 2]);
    check!("max_pool2d, 255 elements", images, |_| pool.init() => MemSaveMaxPool2d, offsets(8 * 5 * 2));
    let pool = MaxPool2dConfig::new([16, 16]).with_strides([2, 2]);
    check!("max_pool2d, 256 elements", images, |_| pool.init() => MemSaveMaxPool2d, offsets(2 * 8 * 5 * 3));
    check!("max_pool1d", signal, |_| MaxPool1dConfig::new(2).init() => MemSaveMaxPool1d, offsets(8 * 150));
    let pool = MaxPool1dConfig::new(1 << 16).with_stride(100);
    check!("max_pool1d, 65536 elements", [1, 1, 66_000], |_| pool.init() => MemSaveMaxPool1d, offsets(4 * 5));

    check!("avg_pool1d", signal, |_| AvgPool1dConfig::new(2).init() => MemSaveAvgPool1d, nothing);
    let even = AvgPool1dConfig::new(4).with_stride(1).with_padding(PaddingConfig1d::Same);
    check!("avg_pool1d, same", signal, |_| even.init() => MemSaveAvgPool1d, nothing);
    check!("avg_pool2d", images, |_| AvgPool2dConfig::new([2, 2]).init() => MemSaveAvgPool2d, nothing);
    let padded = AvgPool2dConfig::new([3, 3]).with_strides([2, 2]).with_padding(uneven);
    check!("avg_pool2d, asymmetric", images, |_| padded.init() => MemSaveAvgPool2d, nothing);
    check!("adaptive_avg_pool1d", signal, |_| AdaptiveAvgPool1dConfig::new(7).init() => MemSaveAdaptiveAvgPool1d, nothing);
    let pool = AdaptiveAvgPool2dConfig::new([1, 1]);
    check!("adaptive_avg_pool2d", images, |_| pool.init() => MemSaveAdaptiveAvgPool2d, nothing);
    let pool = AdaptiveAvgPool3dConfig::new([2, 3, 2]);
    check!("adaptive_avg_pool3d", volume, |_| pool.init() => MemSaveAdaptiveAvgPool3d, nothing);
    let resize = Interpolate1dConfig::new().with_output_size(Some(150));
    check!("interpolate1d", signal, |_| resize.clone().init() => MemSaveInterpolate1d, nothing);
    let resize = Interpolate2dConfig::new().with_output_size(Some([12, 30]));
    check!("interpolate2d", images, |_| resize.clone().init() => MemSaveInterpolate2d, nothing);

    // The input stands in for the indices, which no gradient flows to.
    let table = nn::EmbeddingConfig::new(500, 32);
    check!("embedding", [4, 16], |device| table.init(device) => MemSaveEmbedding,
        |table, x| table.forward(indices(&x)),
        |case, x| if case.weight() { x.elements() * indices(&x.random(&Device::flex())).dtype().size() } else { 0 }
    );

    a_mask_is_not_kept_where_stock_keeps_nothing();
    chains_keep_what_their_first_layer_reads();
    attention_grows_linearly(&Device::flex().autodiff());
    the_targets_are_met(&Device::flex().autodiff());

    let failures = FAILURES.lock().expect("nobody panics with it");
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

/// Behind each comes a sum, which does not keep what it sums: the output lives for the softmax only.
fn softmaxes_keep_their_output(shape: [usize; 4], kept: impl Fn(Case, Input<4>) -> usize) {
    macro_rules! check_softmax {
        ($($function:ident),+) => {$(
            check(
                stringify!($function),
                shape,
                |_| Relu::new(), // there is no module
                |_, x| activation::$function(x, 3).sum_dim(2),
                |_: &MemSaveRelu, x| functional::$function(x, 3).sum_dim(2),
                &kept,
            );
        )+};
    }
    check_softmax!(softmax, log_softmax, softmin, quiet_softmax);
}

fn losses_keep_one_tensor() {
    let shape = [16, 40];
    let one = |case: Case, x: Input<2>| if case.input() { x.floats() } else { 0 };
    fn targets(x: &Tensor<2>) -> Tensor<1, Int> {
        Tensor::zeros([x.dims()[0]], &x.device())
    }
    let int = targets(&Tensor::zeros([1, 1], &Device::flex())).dtype().size();
    // The logits, and per row the log-sum-exp (in f32 at least) and the target.
    let logits = move |case: Case, x: Input<2>| match case.input() {
        true => x.floats() + x.shape[0] * (x.dtype.size().max(4) + int),
        false => 0,
    };
    let plain = CrossEntropyLossConfig::new();
    check!("cross_entropy", shape, |device| plain.init(device) => MemSaveCrossEntropyLoss,
        |loss, x| { let targets = targets(&x); loss.forward(x, targets) },
        logits
    );
    fn labels(x: &Tensor<2>) -> Tensor<2, Int> {
        Tensor::zeros(x.dims(), &x.device())
    }
    let binary = BinaryCrossEntropyLossConfig::new().with_logits(true);
    // In f32: stock computes in no other type.
    let slope = |case: Case, x: Input<2>| if case.input() { size_of::<f32>() * x.elements() } else { 0 };
    check!("binary_cross_entropy", shape, |device| binary.init(device) => MemSaveBinaryCrossEntropyLoss,
        |loss, x| { let labels = labels(&x); loss.forward(x.cast(DType::F32), labels) },
        slope
    );
    // A view of one element, which costs nothing: the difference is what is kept.
    fn ones(x: &Tensor<2>) -> Tensor<2> {
        Tensor::<2>::ones([1, 1], (&x.device(), x.dtype())).expand(x.dims())
    }
    check!("mse", shape, |_| MseLoss::new() => MemSaveMseLoss,
        |loss, x| { let targets = ones(&x); loss.forward(x, targets, Reduction::Mean) },
        one
    );
    check!("huber", shape, |_| HuberLossConfig::new(0.5).init() => MemSaveHuberLoss,
        |loss, x| { let targets = ones(&x); loss.forward(x, targets, Reduction::Mean) },
        one
    );
    // The targets.
    check!("kl_div", shape, |_| KLDivLossConfig::new().init() => MemSaveKLDivLoss,
        |loss, x| {
            let targets = Tensor::ones(x.dims(), (&x.device(), x.dtype()));
            loss.forward(x, targets, Reduction::Mean)
        },
        one
    );
}

/// Four heads keep queries, keys, values and a number per query; under dropout a bit per weight; the dense layers what they
/// keep.
fn attention_keeps_queries_keys_and_values() {
    const HEADS: usize = 4;
    for dropout in [0.0, 0.5] {
        let config = nn::attention::MultiHeadAttentionConfig::new(8, HEADS).with_dropout(dropout);
        check(
            &format!("attention, dropout {dropout}"),
            [4, 32, 8],
            |device| config.init(device),
            |layer, x| layer.forward(nn::attention::MhaInput::self_attn(x)).context,
            |layer: &MemSaveMultiHeadAttention, x| {
                layer.forward(memsave::attention::MhaInput::self_attn(x)).context
            },
            |case, x| {
                let [batch, length, _] = x.shape;
                let log_sums = batch * HEADS * length * x.dtype.size().max(size_of::<f32>());
                let bits = 8 * (batch * HEADS * length * length).div_ceil(64);
                let attention = 3 * x.floats() + log_sums + if dropout > 0.0 { bits } else { 0 };
                match case {
                    Case::Trainable | Case::InputUntracked => attention + 2 * x.floats(),
                    Case::Frozen | Case::BiasOnly => attention,
                    Case::Untracked => 0,
                }
            },
        );
    }
}

/// What is kept and needed grows linearly with the length of the sequence: 16,384 tokens fit.
fn attention_grows_linearly(device: &Device) {
    const WIDTH: usize = 64;
    /// What a chunk of weights needs, with the products and gradients beside it.
    const CHUNKS: i64 = 16 << 20;
    let options = || AttentionModuleOptions { scale: None, softcap: None, is_causal: true };
    for length in [1024, 2048, 4096, 8192, 16_384] {
        let input = Input { shape: [1, 3, length, WIDTH], dtype: DType::F32 };
        let measured = measure(device, input, true, |x| {
            let [query, key, value] = [0, 1, 2].map(|part| x.clone().slice_dim(1, part..part + 1));
            functional::attention(query, key, value, None, None, options())
        });
        let tensor = (4 * length * WIDTH) as i64;
        let log_sums = (4 * length) as i64;
        let kept = bytes(measured.kept);
        // The input is one tensor, of which queries, keys and values are views.
        // (Three slices and the attention have records.)
        expect((kept - 3 * tensor - log_sums).abs() <= 4 * RECORDS, || {
            format!("attention to {length} tokens keeps {kept} bytes")
        });
        let peak = bytes(measured.peak);
        expect(peak <= 12 * tensor + CHUNKS, || format!("attention to {length} tokens needs {peak} bytes"));
    }
}

/// The gates of every step, and `x` for the gradients of its weights.
fn recurrent_layers_keep_their_gates() {
    const STEPS: usize = 6;
    const FEATURES: usize = 16;
    const HIDDEN: usize = 24;
    let kept = |gates: usize| {
        move |case: Case, x: Input<3>| {
            let states = Input { shape: [x.shape[0], x.shape[1], HIDDEN], ..x };
            let of_gates = if case == Case::Untracked { 0 } else { gates * states.floats() };
            of_gates + bilinear(case, x)
        }
    };
    macro_rules! check {
        ($name:literal, $x:expr, $config:expr, $stock:ty => $ours:ty, |$layer:ident, $input:ident| $forward:expr, $gates:expr) => {
            check_types(
                &[DType::F32], // the type of the states and outputs that stock makes
                &format!("{}, {:?}", $name, $x),
                $x,
                |device| $config.init(device),
                (|$layer: &$stock, $input| $forward, |$layer: &$ours, $input| $forward),
                kept($gates),
            )
        };
    }
    for x in [[8, STEPS, FEATURES], [1, STEPS, FEATURES], [8, 1, FEATURES], [1, 1, FEATURES]] {
        let lstm = nn::LstmConfig::new(FEATURES, HIDDEN, true);
        check!("lstm", x, lstm, nn::Lstm => MemSaveLstm, |layer, x| layer.forward(x, None).0, 4);
        let coupled = lstm.with_input_forget(true).with_clip(Some(0.5));
        check!("lstm, coupled", x, coupled, nn::Lstm => MemSaveLstm, |layer, x| layer.forward(x, None).0, 3);
        let gru = nn::GruConfig::new(FEATURES, HIDDEN, true);
        check!("gru", x, gru, nn::Gru => MemSaveGru, |layer, x| layer.forward(x, None), 3);
        let before = gru.with_reset_after(false);
        check!("gru, reset before", x, before, nn::Gru => MemSaveGru, |layer, x| layer.forward(x, None), 3);
        // Its gate is its output.
        let rnn = nn::RnnConfig::new(FEATURES, HIDDEN, true);
        check!("rnn", x, rnn, nn::Rnn => MemSaveRnn, |layer, x| layer.forward(x, None).0.sum_dim(2), 1);
        let clipped = rnn.with_clip(Some(0.5));
        check!("rnn, clipped", x, clipped, nn::Rnn => MemSaveRnn, |layer, x| layer.forward(x, None).0, 1);
    }
    // The input and, of an LSTM, two states every three steps.
    let x = [8, STEPS, FEATURES];
    check_types(
        &[DType::F32],
        "lstm with checkpoints",
        x,
        |device| nn::LstmConfig::new(FEATURES, HIDDEN, true).init(device),
        (
            |layer: &nn::Lstm, x| layer.forward(x, None).0,
            |layer: &MemSaveLstm, x| layer.forward_checkpointed(x, None, 3).0,
        ),
        |case, x| match case {
            Case::Untracked => 0,
            _ => x.floats() + 2 * ((STEPS - 1) / 3) * Input { shape: [x.shape[0], 1, HIDDEN], ..x }.floats(),
        },
    );
}

fn indices(x: &Tensor<2>) -> Tensor<2, Int> {
    Tensor::zeros(x.dims(), &x.device())
}

/// `x` for the gradients of the weight, the offset and the mask; the offset and the mask for all but that of the bias.
fn deformable_convolution_keeps_what_gradients_read() {
    /// One per tap of a 3 x 3 kernel and axis.
    const OFFSET: usize = 18;
    /// One per tap.
    const MASK: usize = 9;
    /// An input with these channels at every output position of `x`.
    fn sampling(x: &Tensor<4>, channels: usize) -> Tensor<4> {
        let [batch, _, height, width] = x.dims();
        Tensor::zeros([batch, channels, height - 2, width - 2], (&x.device(), x.dtype()))
    }
    let sampled = |x: Input<4>, channels| {
        let [batch, _, height, width] = x.shape;
        Input { shape: [batch, channels, height - 2, width - 2], ..x }.floats()
    };
    let kept = |channels| {
        move |case: Case, x: Input<4>| {
            let any = case.input() || case.weight();
            bilinear(case, x) + if any { sampled(x, channels) } else { 0 }
        }
    };
    let all = |channels| move |_: Case, x: Input<4>| x.floats() + sampled(x, channels);
    let (x, conv) = ([2, 4, 12, 12], DeformConv2dConfig::new([4, 4], [3, 3]));
    check!("deform_conv2d", x, |device| conv.init(device) => MemSaveDeformConv2d,
        |conv, x| { let offset = sampling(&x, OFFSET); conv.forward(x, offset, None) },
        kept(OFFSET)
    );
    check!("deform_conv2d with a mask", x, |device| conv.init(device) => MemSaveDeformConv2d,
        |conv, x| { let [offset, mask] = [OFFSET, MASK].map(|n| sampling(&x, n)); conv.forward(x, offset, Some(mask)) },
        kept(OFFSET + MASK)
    );
    check!("deform_conv2d, offset tracked", x, |device| conv.init(device) => MemSaveDeformConv2d,
        |conv, x| { let offset = sampling(&x, OFFSET).require_grad(); conv.forward(x, offset, None) },
        all(OFFSET)
    );
    check!("deform_conv2d, mask tracked", x, |device| conv.init(device) => MemSaveDeformConv2d,
        |conv, x| { let [offset, mask] = [OFFSET, MASK].map(|n| sampling(&x, n)); conv.forward(x, offset, Some(mask.require_grad())) },
        all(OFFSET + MASK)
    );
}

/// Under gradient checkpointing stock computes the input of a ReLU again if it can; a mask would be more than it keeps.
fn a_mask_is_not_kept_where_stock_keeps_nothing() {
    let device = Device::flex().autodiff().gradient_checkpointing();
    let kept = |relu: fn(Tensor<2>) -> Tensor<2>, rows: usize| {
        let input = Input { shape: [rows, 1024], dtype: DType::F32 };
        bytes(measure(&device, input, true, |x| relu(x * 2.0).sum_dim(1)).kept)
    };
    let stock = |x| burn::tensor::activation::relu(x);
    let ours = |x| functional::relu(x);
    let (ours, stock) = (kept(ours, 64) - kept(ours, 32), kept(stock, 64) - kept(stock, 32));
    expect(ours == stock, || format!("a recomputed input of relu: keeps {ours} bytes more, stock {stock}"));
}

/// Layers behind each other keep what the first one reads: outputs of normalizations and activations are computed again. Each
/// chain is written once, and built once of stock layers and once of ours; `kept` says how many bytes ours keeps of what grows
/// with the batch, if everything is tracked.
fn chains_keep_what_their_first_layer_reads() {
    macro_rules! chain {
        ($name:literal, $shape:expr, |$nn:ident, $device:ident| $make:expr, |$layers:ident, $x:ident| $forward:expr, $kept:expr) => {{
            let build = |$device: &Device| {
                let stock = {
                    use burn::nn as $nn;
                    $make
                };
                let ours = {
                    use burn_memsave::nn as $nn;
                    $make
                };
                (stock, ours)
            };
            for device in devices() {
                let ($layers, ours) = build(&device);
                let stock = |$x: Tensor<_>| $forward;
                let stock: &dyn Fn(Tensor<{ $shape.len() }>) -> Tensor<{ $shape.len() }> = &stock;
                let $layers = ours;
                let ours: &dyn Fn(Tensor<{ $shape.len() }>) -> Tensor<{ $shape.len() }> = &|$x| $forward;
                compare_chains($name, &device, $shape, [stock, ours], $kept);
            }
        }};
    }
    const ROWS: [usize; 3] = [4, 32, 64];
    const IMAGES: [usize; 4] = [4, 8, 24, 20];
    chain!(
        "layer norm, linear",
        ROWS,
        |nn, device| (nn::LayerNormConfig::new(64).init(device), nn::LinearConfig::new(64, 48).init(device)),
        |layers, x| layers.1.forward(layers.0.forward(x)),
        |x| x.floats()
    );
    chain!(
        "rms norm, three linear",
        ROWS,
        |nn, device| {
            let linear = || nn::LinearConfig::new(64, 48).init(device);
            (nn::RmsNormConfig::new(64).init(device), linear(), linear(), linear())
        },
        |layers, x| {
            let x = layers.0.forward(x);
            layers.1.forward(x.clone()) + layers.2.forward(x.clone()) + layers.3.forward(x)
        },
        |x| x.floats()
    );
    chain!(
        "batch norm, relu, conv",
        IMAGES,
        |nn, device| {
            let conv = nn::conv::Conv2dConfig::new([8, 8], [3, 3]).init(device);
            (nn::BatchNormConfig::new(8).init(device), nn::Relu::new(), conv)
        },
        |layers, x| layers.2.forward(layers.1.forward(layers.0.forward(x))),
        |x| x.floats() + x.bits()
    );
    chain!(
        "batch norm with running statistics, relu, conv",
        IMAGES,
        |nn, device| {
            let conv = nn::conv::Conv2dConfig::new([8, 8], [3, 3]).init(device);
            let norm = nn::BatchNormConfig::new(8).init(device).freeze().set_require_grad(true);
            (norm, nn::Relu::new(), conv)
        },
        |layers, x| layers.2.forward(layers.1.forward(layers.0.forward(x))),
        |x| x.floats() + x.bits()
    );
    chain!(
        "conv beside relu, conv",
        IMAGES,
        |nn, device| {
            let conv = || nn::conv::Conv2dConfig::new([8, 8], [3, 3]).init(device);
            (conv(), nn::Relu::new(), conv())
        },
        |layers, x| {
            let beside = layers.0.forward(x.clone());
            beside + layers.2.forward(layers.1.forward(x))
        },
        |x| x.floats() + x.bits()
    );
}

/// A chain of ours keeps exactly `kept` with everything tracked, and never more than the same chain of stock's; under
/// gradient checkpointing up to a bit per element more, where stock holds a ReLU's input for it.
fn compare_chains<const D: usize>(
    name: &str,
    device: &Device,
    shape: [usize; D],
    [stock, ours]: [&dyn Fn(Tensor<D>) -> Tensor<D>; 2],
    kept: impl Fn(Input<D>) -> usize,
) {
    let mut doubled = shape;
    doubled[0] *= 2;
    let inputs = [shape, doubled].map(|shape| Input { shape, dtype: DType::F32 });
    let strategy = device.gradient_checkpointing_strategy();
    let failure = |what: String| format!("{name}, {strategy:?}: {what}");
    let said = (kept(inputs[1]) - kept(inputs[0])) as i64;
    let (grown, large) = growth(device, inputs, true, ours, said);
    let large = bytes(large.kept);
    let checkpointing = strategy == Some(GradientCheckpointingStrategy::Balanced);
    expect(checkpointing || grown == said, || failure(format!("keeps {grown} bytes more, not {said}")));
    let total = |input: Input<D>| {
        let x = input.random(device).require_grad();
        ledger(&nn::Relu::new(), x, |_, x| ours(x)).1.total() as i64
    };
    let [small, counted] = inputs.map(total);
    expect(checkpointing || counted - small == said, || {
        failure(format!("the ledger's totals are {small} and {counted}, {said} more is kept"))
    });
    let stock = bytes(measure(device, inputs[1], true, stock).kept);
    let masks =
        if strategy == Some(GradientCheckpointingStrategy::Balanced) { inputs[1].bits() as i64 } else { 0 };
    expect(large <= stock + masks + RECORDS, || failure(format!("keeps {large} bytes, stock {stock}")));
}

/// Checks the ceilings of what a layer keeps and needs at its peak, in MiB with two decimals.
fn within<const D: usize, const O: usize>(
    name: &str,
    device: &Device,
    shape: [usize; D],
    (kept, peak): (f64, f64),
    forward: impl Fn(Tensor<D>) -> Tensor<O>,
) {
    let measured = measure(device, Input { shape, dtype: DType::F32 }, true, forward);
    for (what, measured, ceiling) in [("keeps", measured.kept, kept), ("needs", measured.peak, peak)] {
        let mib = bytes(measured) as f64 / f64::from(1 << 20);
        expect(mib < ceiling + 0.005, || format!("{name} {what} {mib:.3} MiB, not {ceiling}"));
    }
}

/// The shapes and ceilings of the README's table.
fn the_targets_are_met(device: &Device) {
    const ANY: f64 = f64::INFINITY;
    let rows = [64, 128, 1024];
    let images = [16, 64, 56, 56];
    let large = [16, 64, 112, 112];
    let around = PaddingConfig2d::Explicit(1, 1, 1, 1);

    let linear = memsave::LinearConfig::new(1024, 1024).init(device);
    within("linear", device, rows, (32.0, 100.0), |x| linear.forward(x));
    let conv = memsave::conv::Conv2dConfig::new([64, 64], [3, 3]).with_padding(around.clone()).init(device);
    within("conv2d", device, images, (12.25, ANY), |x| conv.forward(x));
    let conv = conv.no_grad();
    within("conv2d, frozen", device, images, (0.0, ANY), |x| conv.forward(x));

    let norm = memsave::BatchNormConfig::new(64).init(device);
    within("batch_norm", device, images, (12.26, ANY), |x| norm.forward(x));
    let norm = norm.freeze();
    within("batch_norm, frozen", device, images, (0.01, ANY), |x| norm.forward(x));
    let norm = norm.set_require_grad(true);
    within("batch_norm, running statistics", device, images, (12.26, 13.0), |x| norm.forward(x));

    let norm = memsave::LayerNormConfig::new(1024).init(device);
    within("layer_norm", device, rows, (32.07, 32.5), |x| norm.forward(x));
    let norm = memsave::RmsNormConfig::new(1024).init(device);
    within("rms_norm", device, rows, (32.07, 32.5), |x| norm.forward(x));
    let norm = memsave::GroupNormConfig::new(8, 64).init(device);
    within("group_norm", device, images, (12.26, 12.5), |x| norm.forward(x));

    for (dropout, trainable, frozen) in [(0.0, 40.2, 32.2), (0.1, 43.0, 35.0)] {
        let tokens = [4, 512, 1024];
        let attention = memsave::attention::MultiHeadAttentionConfig::new(1024, 16).with_dropout(dropout);
        let attention = attention.init(device);
        let own = memsave::attention::MhaInput::self_attn;
        within("attention", device, tokens, (trainable, ANY), |x| attention.forward(own(x)).context);
        let attention = attention.no_grad();
        within("attention, frozen", device, tokens, (frozen, ANY), |x| attention.forward(own(x)).context);
    }
    for (dropout, trainable, frozen) in [(0.0, 82.0, 74.0), (0.1, 87.0, 79.0)] {
        let tokens = [4, 512, 1024];
        let config = memsave::transformer::TransformerEncoderConfig::new(1024, 4096, 16, 1);
        let encoder = config.with_norm_first(true).with_dropout(dropout).init(device);
        let input = memsave::transformer::TransformerEncoderInput::new;
        within("encoder", device, tokens, (trainable, ANY), |x| encoder.forward(input(x)));
        let encoder = encoder.no_grad();
        within("encoder, frozen", device, tokens, (frozen, ANY), |x| encoder.forward(input(x)));
    }

    for (name, f) in [
        ("gelu", functional::gelu as fn(Tensor<4>) -> _),
        ("silu", functional::silu),
        ("mish", functional::mish),
    ] {
        within(name, device, images, (12.25, ANY), f);
    }
    let gate = memsave::SwiGluConfig::new(1024, 1024).init(device);
    within("swiglu", device, rows, (96.01, ANY), |x| gate.forward(x));
    let gate = gate.no_grad();
    within("swiglu, frozen", device, rows, (64.0, ANY), |x| gate.forward(x));

    let prelu = memsave::PReluConfig::new().with_num_parameters(64).init(device);
    within("prelu", device, images, (12.25, ANY), |x| prelu.forward(x));
    let prelu = prelu.no_grad();
    let masks: [(_, &dyn Fn(Tensor<4>) -> Tensor<4>); 7] = [
        ("relu", &functional::relu),
        ("leaky_relu", &|x| functional::leaky_relu(x, 0.01)),
        ("relu6", &functional::relu6),
        ("hardtanh", &|x| functional::hardtanh(x, -1.0, 1.0)),
        ("hard_sigmoid", &|x| functional::hard_sigmoid(x, 0.2, 0.5)),
        ("dropout", &|x| functional::dropout(x, 0.5)),
        ("prelu, frozen", &|x| prelu.forward(x)),
    ];
    for (name, forward) in masks {
        within(name, device, images, (0.39, ANY), forward);
    }

    let loss = memsave::loss::CrossEntropyLossConfig::new().init(device);
    within("cross_entropy", device, [512, 32_000], (62.51, 62.53), |x| {
        let targets = Tensor::<1, Int>::ones([512], &x.device());
        loss.forward(x, targets)
    });

    // The gradients: 1 MiB of x, 31.25 of the weight. Logits: 4 MiB at a time of 62.5.
    let head = memsave::LinearConfig::new(256, 32_000).with_bias(false).init(device);
    let loss = memsave::loss::FusedLinearCrossEntropyConfig::new().with_chunk_bytes(4 << 20).init(device);
    let fused = |x: Tensor<2>, head: &MemSaveLinear| {
        let targets = Tensor::<1, Int>::ones([x.dims()[0]], &x.device());
        loss.forward(head, x, targets)
    };
    let x = [512, 256];
    within("linear and cross_entropy", device, x, (31.76, 42.0), |x| fused(x, &head));
    // The input, and 15.63 MiB: the gradient of the logits of few rows. A product takes twice its size for a moment on Flex.
    within("linear and cross_entropy, few rows", device, [128, 256], (15.76, 78.3), |x| fused(x, &head));
    let head = head.no_grad();
    within("linear and cross_entropy, frozen", device, x, (0.51, 8.5), |x| fused(x, &head));

    let pool = memsave::pool::MaxPool2dConfig::new([3, 3]).with_strides([2, 2]).with_padding(around).init();
    within("max_pool2d", device, large, (3.07, ANY), |x| pool.forward(x));
    let pool = memsave::pool::AvgPool2dConfig::new([2, 2]).init();
    within("avg_pool2d", device, large, (0.0, ANY), |x| pool.forward(x));
    let pool = memsave::pool::AdaptiveAvgPool2dConfig::new([1, 1]).init();
    within("adaptive_avg_pool2d", device, large, (0.0, ANY), |x| pool.forward(x));
    let resize = memsave::interpolate::Interpolate2dConfig::new().with_output_size(Some([56, 56])).init();
    within("interpolate2d", device, large, (0.0, ANY), |x| resize.forward(x));
}
