//! What every layer keeps and needs at its peak: exactly what the head of its file says, and never more than stock.
//!
//! Memory is counted for the whole process, so this is one test. Kept bytes are compared as the difference of two sizes:
//! what the graph's own records take does not depend on the size, and cancels out.
#![recursion_limit = "256"]
use burn::module::Module;
use burn::nn::conv::*;
use burn::nn::interpolate::{Interpolate1dConfig, Interpolate2dConfig};
use burn::nn::pool::*;
use burn::nn::{self, activation::*};
use burn::tensor::{Device, Distribution, Int, Tensor};
use burn_memsave::layers::*;
use burn_memsave::measure::{LayerMeasurement, TrackingAllocator, measure_layer};
use std::sync::Mutex;

#[global_allocator]
static ALLOCATOR: TrackingAllocator = TrackingAllocator::new();

/// The forward pass of a layer.
type Forward<L, const D: usize, const O: usize> = fn(&L, Tensor<D>) -> Tensor<O>;

/// One case: what is trainable and tracked.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Case {
    /// Everything.
    Trainable,
    /// The input, with frozen parameters.
    Frozen,
    /// The parameters.
    InputUntracked,
    /// Nothing.
    Untracked,
}

const CASES: [Case; 4] = [Case::Trainable, Case::Frozen, Case::InputUntracked, Case::Untracked];

fn measure<const D: usize, const O: usize>(
    device: &Device,
    shape: [usize; D],
    tracked: bool,
    forward: impl Fn(Tensor<D>) -> Tensor<O>,
) -> LayerMeasurement {
    let normal = Distribution::Normal(0.0, 1.0);
    settled(|| measure_layer(|| Tensor::random(shape, normal, device).set_require_grad(tracked), &forward))
}

/// The second of two runs: the first also initializes parameters.
fn settled(run: impl Fn() -> LayerMeasurement) -> LayerMeasurement {
    run();
    run()
}

fn bytes(measured: Option<u64>) -> i64 {
    measured.expect("the allocator counts") as i64
}

/// The graph's own records: a few hundred bytes per step, more where stock records several.
const RECORDS: i64 = 4096;

/// Compares a layer with its twin in all cases, for two batch sizes. `kept(case, shape)` are the bytes that the layer says
/// it keeps of what grows with the batch.
fn check<const D: usize, const O: usize, S: Module, M: Module + From<S>>(
    name: &str,
    shape: [usize; D],
    stock: [S; 2],
    forward: (Forward<S, D, O>, Forward<M, D, O>),
    kept: impl Fn(Case, [usize; D]) -> usize,
) {
    let mut doubled = shape;
    doubled[0] *= 2;
    for (device, stock) in devices().into_iter().zip(stock) {
        for case in CASES {
            let stock = match case {
                Case::Frozen | Case::Untracked => stock.clone().no_grad(),
                _ => stock.clone(),
            };
            let ours = M::from(stock.clone());
            let tracked = matches!(case, Case::Trainable | Case::Frozen);
            let of_ours = |shape| measure(&device, shape, tracked, |x| forward.1(&ours, x));
            let expected = (kept(case, doubled) - kept(case, shape)) as i64;
            let pair = || {
                let (small, large) = (of_ours(shape), of_ours(doubled));
                (bytes(large.kept) - bytes(small.kept), large)
            };
            // Now and then a table of the graph grows between the two; then another pair tells. Where nothing is kept
            // those tables are all there is to see.
            let (mut grown, mut large) = pair();
            for _ in 0..4 {
                if grown != expected {
                    (grown, large) = pair();
                }
            }
            let noise = if expected == 0 { RECORDS } else { 0 };
            expect((grown - expected).abs() <= noise, || {
                format!("{name}, {case:?}: keeps {grown} bytes more, not {expected}")
            });
            let of_stock = measure(&device, doubled, tracked, |x| forward.0(&stock, x));
            let what = [("kept", large.kept, of_stock.kept), ("peak", large.peak, of_stock.peak)];
            for (what, ours, stock) in what {
                let (ours, stock) = (bytes(ours), bytes(stock));
                let strategy = device.gradient_checkpointing_strategy();
                expect(ours <= stock + RECORDS, || {
                    format!("{name}, {case:?}, {strategy:?}: {what} {ours} bytes, stock {stock}")
                });
            }
        }
    }
}

/// What was not as expected; all of it is reported at the end.
static FAILURES: Mutex<Vec<String>> = Mutex::new(Vec::new());

fn expect(holds: bool, failure: impl FnOnce() -> String) {
    if !holds {
        FAILURES.lock().expect("nobody panics with it").push(failure());
    }
}

/// With Burn's gradient checkpointing and without.
fn devices() -> [Device; 2] {
    [Device::flex().autodiff(), Device::flex().autodiff().gradient_checkpointing()]
}

macro_rules! check {
    ($name:literal, $shape:expr, $make:expr => $ours:ty, $kept:expr) => {
        check(
            $name,
            $shape,
            devices().map(|device| ($make)(&device)),
            (|layer, x| layer.forward(x), |layer: &$ours, x| layer.forward(x)),
            $kept,
        )
    };
}

/// Bytes of an f32 tensor.
fn floats<const D: usize>(shape: [usize; D]) -> usize {
    4 * shape.iter().product::<usize>()
}

/// Bytes of one bit per element, in words of 64.
fn bits<const D: usize>(shape: [usize; D]) -> usize {
    8 * shape.iter().product::<usize>().div_ceil(64)
}

/// A layer that is linear in its input and its weight keeps each for the gradient of the other; the weight does not grow
/// with the batch.
fn bilinear<const D: usize>(case: Case, shape: [usize; D]) -> usize {
    match case {
        Case::Trainable | Case::InputUntracked => floats(shape),
        Case::Frozen | Case::Untracked => 0,
    }
}

fn mask<const D: usize>(case: Case, shape: [usize; D]) -> usize {
    match case {
        Case::Trainable | Case::Frozen => bits(shape),
        Case::InputUntracked | Case::Untracked => 0,
    }
}

fn nothing<const D: usize>(_: Case, _: [usize; D]) -> usize {
    0
}

#[test]
fn layers_keep_what_they_say() {
    // Kernels of one thread: how much they take at once must not depend on who comes first.
    rayon::ThreadPoolBuilder::new().num_threads(1).build_global().expect("nothing has run yet");
    let device = &Device::flex().autodiff();
    let images = [4, 8, 24, 20];
    let signal = [4, 8, 300];
    let volume = [2, 4, 8, 10, 6];

    check!("linear", [8, 16, 64], |device| nn::LinearConfig::new(64, 48).init(device) => MemSaveLinear, bilinear);
    check!("conv1d", signal, |device| Conv1dConfig::new(8, 8, 3).init(device) => MemSaveConv1d, bilinear);
    check!("conv2d", images, |device| Conv2dConfig::new([8, 8], [3, 3]).init(device) => MemSaveConv2d, bilinear);
    let grouped = Conv2dConfig::new([8, 16], [3, 3]).with_groups(4).with_stride([2, 1]).with_bias(false);
    check!("conv2d, grouped", images, |device| grouped.init(device) => MemSaveConv2d, bilinear);
    check!("conv3d", volume, |device| Conv3dConfig::new([4, 4], [3, 3, 3]).init(device) => MemSaveConv3d, bilinear);
    let transposed = |device: &Device| ConvTranspose1dConfig::new([8, 8], 3).with_stride(2).init(device);
    check!("conv_transpose1d", signal, transposed => MemSaveConvTranspose1d, bilinear);
    let transposed =
        |device: &Device| ConvTranspose2dConfig::new([8, 8], [3, 3]).with_stride([2, 2]).init(device);
    check!("conv_transpose2d", images, transposed => MemSaveConvTranspose2d, bilinear);
    let transposed = |device: &Device| ConvTranspose3dConfig::new([4, 4], [3, 3, 3]).init(device);
    check!("conv_transpose3d", volume, transposed => MemSaveConvTranspose3d, bilinear);

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
    check!("dropout", images, |_| nn::DropoutConfig::new(0.3).init() => MemSaveDropout, mask);
    let prelu = |device: &Device| PReluConfig::new().with_num_parameters(8).init(device);
    check!("prelu", images, prelu => MemSavePRelu, |case, shape| match case {
        Case::Frozen => bits(shape),
        case => bilinear(case, shape),
    });
    check!("rrelu", images, |_| RReluConfig::new().init() => MemSaveRRelu, |case, shape| match case {
        Case::Trainable | Case::Frozen => floats(shape),
        Case::InputUntracked | Case::Untracked => 0,
    });

    check!("batch_norm", images, |device| nn::BatchNormConfig::new(8).init(device) => MemSaveBatchNorm, |case, shape| {
        if case == Case::Untracked { 0 } else { floats(shape) }
    });
    let running = |device: &Device| nn::BatchNormConfig::new(8).init(device).freeze().set_require_grad(true);
    check!("batch_norm, running statistics", images, running => MemSaveBatchNorm, bilinear);

    let offsets =
        |out: fn([usize; 4]) -> usize| move |case, shape| if mask(case, shape) > 0 { out(shape) } else { 0 };
    let pool = |_: &Device| MaxPool2dConfig::new([3, 3]).with_strides([2, 2]).init();
    check!("max_pool2d", images, pool => MemSaveMaxPool2d, offsets(|[n, c, h, w]| n * c * ((h - 3) / 2 + 1) * ((w - 3) / 2 + 1)));
    let pool = |_: &Device| MaxPool2dConfig::new([16, 16]).with_strides([2, 2]).init();
    check!("max_pool2d, 256 elements", images, pool => MemSaveMaxPool2d, offsets(|[n, c, h, w]| {
        2 * n * c * ((h - 16) / 2 + 1) * ((w - 16) / 2 + 1)
    }));
    check!("max_pool1d", signal, |_| MaxPool1dConfig::new(2).init() => MemSaveMaxPool1d, |case, shape| match case {
        Case::Trainable | Case::Frozen => floats(shape) / 8,
        Case::InputUntracked | Case::Untracked => 0,
    });
    check!("avg_pool1d", signal, |_| AvgPool1dConfig::new(2).init() => MemSaveAvgPool1d, nothing);
    check!("avg_pool2d", images, |_| AvgPool2dConfig::new([2, 2]).init() => MemSaveAvgPool2d, nothing);
    check!("adaptive_avg_pool1d", signal, |_| AdaptiveAvgPool1dConfig::new(7).init() => MemSaveAdaptiveAvgPool1d, nothing);
    let pool = |_: &Device| AdaptiveAvgPool2dConfig::new([1, 1]).init();
    check!("adaptive_avg_pool2d", images, pool => MemSaveAdaptiveAvgPool2d, nothing);
    let pool = |_: &Device| AdaptiveAvgPool3dConfig::new([2, 3, 2]).init();
    check!("adaptive_avg_pool3d", volume, pool => MemSaveAdaptiveAvgPool3d, nothing);
    let resize = |_: &Device| Interpolate1dConfig::new().with_output_size(Some(150)).init();
    check!("interpolate1d", signal, resize => MemSaveInterpolate1d, nothing);
    let resize = |_: &Device| Interpolate2dConfig::new().with_output_size(Some([12, 30])).init();
    check!("interpolate2d", images, resize => MemSaveInterpolate2d, nothing);

    deformable_convolution_keeps_what_gradients_read(device);
    embedding_keeps_its_indices(device);
    a_mask_is_not_kept_where_stock_keeps_nothing();
    the_targets_are_met(device);

    let failures = FAILURES.lock().expect("nobody panics with it");
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

/// With only the bias tracked nothing is kept, with only `x` tracked not `x`.
fn deformable_convolution_keeps_what_gradients_read(device: &Device) {
    let conv = DeformConv2dConfig::new([4, 4], [3, 3]).init(device);
    conv.weight.val(); // a clone that is not initialized yet shares whether it requires a gradient
    let kept = |conv: &DeformConv2d, ours: bool, tracked: bool, batch: usize| {
        let memsave = MemSaveDeformConv2d::from_nn_deform_conv2d(conv.clone());
        let shape = [batch, 4, 12, 12];
        let measured = measure(device, shape, tracked, |x| {
            let offset = Tensor::zeros([batch, 18, 10, 10], &x.device());
            if ours { memsave.forward(x, offset, None) } else { conv.forward(x, offset, None) }
        });
        bytes(measured.kept)
    };
    let grown =
        |conv: &DeformConv2d, ours, tracked| kept(conv, ours, tracked, 4) - kept(conv, ours, tracked, 2);
    let (x, offset) = (floats([2, 4, 12, 12]) as i64, floats([2, 18, 10, 10]) as i64);
    let mut bias_only = conv.clone().no_grad();
    bias_only.bias = conv.bias.clone();
    let check = |what: &str, conv: &DeformConv2d, tracked, expected| {
        let (ours, stock) = (grown(conv, true, tracked), grown(conv, false, tracked));
        expect(ours == expected, || {
            format!("deform_conv2d, {what}: keeps {ours} bytes more, not {expected}")
        });
        expect(ours <= stock, || format!("deform_conv2d, {what}: keeps {ours} bytes more, stock {stock}"));
    };
    check("trainable", &conv, true, x + offset);
    check("frozen", &conv.clone().no_grad(), true, offset);
    check("only the bias trainable", &bias_only, false, 0);
}

/// The table's handle costs nothing, but its gradient is as large as it: no second copy at the peak.
fn embedding_keeps_its_indices(device: &Device) {
    let stock = nn::EmbeddingConfig::new(500, 32).init(device);
    let ours = MemSaveEmbedding::from_nn_embedding(stock.clone());
    let run = |batch: usize, forward: &dyn Fn(Tensor<2, Int>) -> Tensor<3>| {
        let indices = || Tensor::<2, Int>::zeros([batch, 16], device);
        // A float input of one element stands in for the indices, which no gradient flows to.
        settled(|| measure_layer(|| Tensor::<1>::zeros([1], device), |_| forward(indices())))
    };
    let of_ours = |batch| run(batch, &|indices| ours.forward(indices));
    let of_stock = |batch| run(batch, &|indices| stock.forward(indices));
    let index = Tensor::<1, Int>::zeros([1], device).dtype().size();
    let (small, large, stock) = (of_ours(4), of_ours(8), of_stock(8));
    let grown = bytes(large.kept) - bytes(small.kept);
    expect(grown == (4 * 16 * index) as i64, || format!("embedding keeps {grown} bytes more"));
    expect(bytes(large.kept) <= bytes(stock.kept) + RECORDS, || {
        format!("embedding keeps {large:?}, {stock:?}")
    });
    expect(bytes(large.peak) <= bytes(stock.peak) + RECORDS, || {
        format!("embedding needs {large:?}, {stock:?}")
    });
}

/// Under gradient checkpointing stock computes the input of a ReLU again if it can; a mask would be more than it keeps.
fn a_mask_is_not_kept_where_stock_keeps_nothing() {
    let device = Device::flex().autodiff().gradient_checkpointing();
    let kept = |relu: fn(Tensor<2>) -> Tensor<2>, rows: usize| {
        let measured = measure(&device, [rows, 1024], true, |x| relu(x * 2.0).sum_dim(1));
        bytes(measured.kept)
    };
    let stock = |x| burn::tensor::activation::relu(x);
    let ours = |x| burn_memsave::functional::relu(x);
    let (ours, stock) = (kept(ours, 64) - kept(ours, 32), kept(stock, 64) - kept(stock, 32));
    expect(ours == stock, || format!("a recomputed input of relu: keeps {ours} bytes more, stock {stock}"));
}

/// The shapes and ceilings of the README's table.
fn the_targets_are_met(device: &Device) {
    const MIB: f64 = (1 << 20) as f64;
    let mib = |measured: Option<u64>| bytes(measured) as f64 / MIB;
    let rows = [64, 128, 1024];
    let linear = MemSaveLinear::from_nn_linear(nn::LinearConfig::new(1024, 1024).init(device));
    let measured = measure(device, rows, true, |x| linear.forward(x));
    expect(mib(measured.kept) <= 32.01, || format!("linear keeps {:.2} MiB", mib(measured.kept)));
    expect(mib(measured.peak) <= 100.01, || format!("linear needs {:.2} MiB", mib(measured.peak)));

    let images = [16, 64, 56, 56];
    let conv = Conv2dConfig::new([64, 64], [3, 3]).with_padding(nn::PaddingConfig2d::Explicit(1, 1, 1, 1));
    let conv = MemSaveConv2d::from_nn_conv2d(conv.init(device));
    let measured = measure(device, images, true, |x| conv.forward(x));
    expect(mib(measured.kept) <= 12.26, || format!("conv2d keeps {:.2} MiB", mib(measured.kept)));
    let frozen = conv.no_grad();
    let measured = measure(device, images, true, |x| frozen.forward(x));
    expect(mib(measured.kept) <= 0.01, || format!("a frozen conv2d keeps {:.2} MiB", mib(measured.kept)));

    let relu = measure(device, images, true, |x| MemSaveRelu::new().forward(x));
    expect(mib(relu.kept) <= 0.39, || format!("relu keeps {:.2} MiB", mib(relu.kept)));
    let norm = nn::BatchNormConfig::new(64).init(device).freeze().set_require_grad(true);
    let norm = MemSaveBatchNorm::from_nn_batch_norm(norm);
    let measured = measure(device, images, true, |x| norm.forward(x));
    expect(mib(measured.kept) <= 12.26, || format!("batch norm keeps {:.2} MiB", mib(measured.kept)));
    expect(mib(measured.peak) <= 13.0, || format!("batch norm needs {:.2} MiB", mib(measured.peak)));

    let large = [16, 64, 112, 112];
    let pool = MaxPool2dConfig::new([3, 3]).with_strides([2, 2]);
    let pool = MemSaveMaxPool2d::from_nn_max_pool2d(
        pool.with_padding(nn::PaddingConfig2d::Explicit(1, 1, 1, 1)).init(),
    );
    let measured = measure(device, large, true, |x| pool.forward(x));
    expect(mib(measured.kept) <= 3.07, || format!("max_pool2d keeps {:.2} MiB", mib(measured.kept)));
    let pool = MemSaveAvgPool2d::from_nn_avg_pool2d(AvgPool2dConfig::new([2, 2]).init());
    let measured = measure(device, large, true, |x| pool.forward(x));
    expect(mib(measured.kept) <= 0.01, || format!("avg_pool2d keeps {:.2} MiB", mib(measured.kept)));
}
