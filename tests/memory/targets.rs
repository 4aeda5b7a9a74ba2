//! Tests the shapes and ceilings of the README's table, and attention to long sequences.
use crate::meter::{RECORDS, SCRATCH, alone, bytes, measure};
use crate::table::activations::{Activation, smooth};
use crate::table::{Case, Input, run::Setting};
use burn::module::Module;
use burn::nn::{PaddingConfig2d, loss::CrossEntropyLossConfig};
use burn::tensor::{Bool, DType, Device, Distribution, Int, Tensor, module, ops::AttentionModuleOptions};
use burn_memsave::{functional, measure::LayerMeasurement, nn as memsave};
use burn_memsave_layers::graph::Exchange;
use std::time::Duration;

const ANY: f64 = f64::INFINITY;
const ROWS: [usize; 3] = [64, 128, 1024];
const IMAGES: [usize; 4] = [16, 64, 56, 56];
const LARGE: [usize; 4] = [16, 64, 112, 112];
const AROUND: PaddingConfig2d = PaddingConfig2d::Explicit(1, 1, 1, 1);

fn device() -> Device {
    Device::flex().autodiff()
}

fn random<const D: usize>(shape: [usize; D]) -> Tensor<D> {
    Tensor::random(shape, Distribution::Normal(0.0, 1.0), &device()).require_grad()
}

/// Checks the ceilings of what a layer keeps and needs at its peak, in MiB with two decimals.
fn within<const D: usize, const O: usize>(
    name: &str,
    shape: [usize; D],
    (kept, peak): (f64, f64),
    forward: impl Fn(Tensor<D>) -> Tensor<O>,
) {
    let measured = measure(&device(), || random(shape), forward);
    for (what, measured, ceiling) in [("keeps", measured.kept, kept), ("needs", measured.peak, peak)] {
        let mib = bytes(measured) as f64 / f64::from(1 << 20);
        assert!(mib < ceiling + 0.005, "{name} {what} {mib:.4} MiB, not {ceiling}");
    }
}

#[test]
fn dense_layers_meet_their_targets() {
    let _alone = alone();
    let linear = memsave::LinearConfig::new(1024, 1024).init(&device());
    within("linear", ROWS, (32.0, 100.0), |x| linear.forward(x));
    let gate = memsave::SwiGluConfig::new(1024, 1024).init(&device());
    within("swiglu", ROWS, (96.01, ANY), |x| gate.forward(x));
    let gate = gate.no_grad();
    within("swiglu, frozen", ROWS, (64.0, ANY), |x| gate.forward(x));
}

#[test]
fn convolutions_and_pools_meet_their_targets() {
    let _alone = alone();
    let conv = memsave::conv::Conv2dConfig::new([64, 64], [3, 3]).with_padding(AROUND).init(&device());
    within("conv2d", IMAGES, (12.25, ANY), |x| conv.forward(x));
    let conv = conv.no_grad();
    within("conv2d, frozen", IMAGES, (0.0, ANY), |x| conv.forward(x));

    let pool = memsave::pool::MaxPool2dConfig::new([3, 3]).with_strides([2, 2]).with_padding(AROUND).init();
    within("max_pool2d", LARGE, (3.07, ANY), |x| pool.forward(x));
    let pool = memsave::pool::AvgPool2dConfig::new([2, 2]).init();
    within("avg_pool2d", LARGE, (0.0, ANY), |x| pool.forward(x));
    let pool = memsave::pool::AdaptiveAvgPool2dConfig::new([1, 1]).init();
    within("adaptive_avg_pool2d", LARGE, (0.0, ANY), |x| pool.forward(x));
    let resize = memsave::interpolate::Interpolate2dConfig::new().with_output_size(Some([56, 56])).init();
    within("interpolate2d", LARGE, (0.0, ANY), |x| resize.forward(x));
}

#[test]
fn normalizations_meet_their_targets() {
    let _alone = alone();
    let norm = memsave::BatchNormConfig::new(64).init(&device());
    within("batch_norm", IMAGES, (12.26, ANY), |x| norm.forward(x));
    let norm = norm.freeze();
    within("batch_norm, frozen", IMAGES, (0.01, ANY), |x| norm.forward(x));
    let norm = norm.set_require_grad(true);
    within("batch_norm, running statistics", IMAGES, (12.26, 13.0), |x| norm.forward(x));

    let norm = memsave::LayerNormConfig::new(1024).init(&device());
    within("layer_norm", ROWS, (32.07, 32.5), |x| norm.forward(x));
    let norm = memsave::RmsNormConfig::new(1024).init(&device());
    within("rms_norm", ROWS, (32.07, 32.5), |x| norm.forward(x));
    let norm = memsave::GroupNormConfig::new(8, 64).init(&device());
    within("group_norm", IMAGES, (12.26, 12.5), |x| norm.forward(x));
}

#[test]
fn attention_and_encoder_meet_their_targets() {
    let _alone = alone();
    // A quarter of the batch, and of the ceilings with what `within` rounds them by: what is kept grows with the batch.
    let tokens = [1, 512, 1024];
    let quarter = |ceiling: f64| (ceiling + 0.005) / 4.0 - 0.005;
    for (dropout, trainable, frozen) in [(0.0, 40.2, 32.2), (0.1, 43.0, 35.0)] {
        let attention = memsave::attention::MultiHeadAttentionConfig::new(1024, 16).with_dropout(dropout);
        let attention = attention.init(&device());
        let own = memsave::attention::MhaInput::self_attn;
        within("attention", tokens, (quarter(trainable), ANY), |x| attention.forward(own(x)).context);
        let attention = attention.no_grad();
        within("attention, frozen", tokens, (quarter(frozen), ANY), |x| attention.forward(own(x)).context);
    }
    for (dropout, trainable, frozen) in [(0.0, 82.0, 74.0), (0.1, 87.0, 79.0)] {
        let config = memsave::transformer::TransformerEncoderConfig::new(1024, 4096, 16, 1);
        let encoder = config.with_norm_first(true).with_dropout(dropout).init(&device());
        let input = memsave::transformer::TransformerEncoderInput::new;
        within("encoder", tokens, (quarter(trainable), ANY), |x| encoder.forward(input(x)));
        let encoder = encoder.no_grad();
        within("encoder, frozen", tokens, (quarter(frozen), ANY), |x| encoder.forward(input(x)));
    }
}

#[test]
fn activations_meet_their_targets() {
    let _alone = alone();
    let [batch, channels, height, width] = IMAGES;
    for Activation { name, ours, notes, .. } in smooth() {
        // The sum of an output keeps nothing. The output itself would be left out if it were returned.
        let forward = |x| if notes.summed { ours(x).sum_dim(2) } else { ours(x) };
        within(name, [batch, channels, height * width], (12.25, ANY), forward);
    }
    let prelu = memsave::PReluConfig::new().with_num_parameters(64).init(&device());
    within("prelu", IMAGES, (12.25, ANY), |x| prelu.forward(x));
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
        within(name, IMAGES, (0.39, ANY), forward);
    }
}

#[test]
fn losses_meet_their_targets() {
    let _alone = alone();
    let loss = memsave::loss::CrossEntropyLossConfig::new().init(&device());
    within("cross_entropy", [512, 32_000], (62.51, 62.53), |x| {
        let targets = Tensor::<1, Int>::ones([512], &x.device());
        loss.forward(x, targets)
    });

    // The gradients: 1 MiB of x, 31.25 of the weight. Logits: 4 MiB at a time of 62.5.
    let head = memsave::LinearConfig::new(256, 32_000).with_bias(false).init(&device());
    let loss =
        memsave::loss::FusedLinearCrossEntropyConfig::new().with_chunk_bytes(Some(4 << 20)).init(&device());
    let fused = |x: Tensor<2>, head: &memsave::Linear| {
        let targets = Tensor::<1, Int>::ones([x.dims()[0]], &x.device());
        loss.forward(head, x, targets)
    };
    let x = [512, 256];
    within("linear and cross_entropy", x, (31.76, 42.0), |x| fused(x, &head));
    // The input, and 15.63 MiB: the gradient of the logits of few rows. A product takes twice its size for a moment on Flex.
    within("linear and cross_entropy, few rows", [128, 256], (15.76, 78.3), |x| fused(x, &head));
    let head = head.no_grad();
    within("linear and cross_entropy, frozen", x, (0.51, 8.5), |x| fused(x, &head));
}

/// In half precision, too, where what the chunks add up to needs f32.
#[test]
fn heads_of_half_precision_need_no_more_than_stock() {
    let _alone = alone();
    let device = &device();
    let config = memsave::loss::FusedLinearCrossEntropyConfig::new().with_chunk_bytes(Some(1 << 20));
    let (fused, stock) = (config.init(device), CrossEntropyLossConfig::new().init(device));
    for dtype in [DType::F16, DType::BF16] {
        for (rows, case) in [(512, Case::Trainable), (512, Case::Frozen), (128, Case::Trainable)] {
            let setting = Setting::new(device, case, dtype);
            let head = setting.cast(memsave::LinearConfig::new(256, 8000).init(device));
            let targets = || Tensor::<1, Int>::ones([rows], device);
            let x = || Input { shape: [rows, 256], dtype }.random(device).require_grad();
            let ours = measure(device, x, |x| fused.forward(&head, x, targets()));
            let stock = measure(device, x, |x| stock.forward(head.forward(x), targets()));
            for (what, ours, stock) in [("keeps", ours.kept, stock.kept), ("needs", ours.peak, stock.peak)] {
                let [ours, stock] = [ours, stock].map(bytes);
                assert!(
                    ours <= stock,
                    "{dtype:?}, {rows} rows, {case:?}: {what} {ours} bytes, stock {stock}"
                );
            }
        }
    }
}

/// The statistics of half precision would be rounded ones: they are computed again, and not kept.
#[test]
fn batch_norm_keeps_no_statistics_of_half_precision() {
    const CHANNELS: usize = 1 << 16;
    let _alone = alone();
    let device = &device();
    for (dtype, spared) in [(DType::F32, 0), (DType::F16, 4 * CHANNELS), (DType::BF16, 4 * CHANNELS)] {
        let x = || Input { shape: [4, CHANNELS, 2], dtype }.random(device).require_grad();
        let [gamma, beta] = [(); 2].map(|()| Tensor::<1>::ones([CHANNELS], (device, dtype)).require_grad());
        let parameters = || (gamma.clone(), beta.clone());
        let ours = bytes(
            measure(device, x, |x| {
                let (gamma, beta) = parameters();
                functional::batch_norm_train(x, gamma, beta, 1e-5).output
            })
            .kept,
        );
        let burn = bytes(
            measure(device, x, |x| {
                let (gamma, beta) = parameters();
                module::batch_norm_train(x, gamma, beta, 1e-5).output
            })
            .kept,
        );
        assert!((burn - ours - spared as i64).abs() <= RECORDS, "{dtype:?}: {ours} bytes, Burn's {burn}");

        // Of replicas, a part keeps its mean and variance, in f32.
        let synchronized = bytes(
            measure(device, x, |x| {
                let (gamma, beta) = parameters();
                let exchange = Exchange::new(1, Duration::from_secs(60));
                let norm =
                    || functional::batch_norm_train(x.clone(), gamma.clone(), beta.clone(), 1e-5).output;
                exchange.member(0).run(norm).expect("nothing fails")
            })
            .kept,
        );
        let statistics = if spared > 0 { 2 * 4 * CHANNELS } else { 0 };
        let more = synchronized - ours - statistics as i64;
        assert!(more.abs() <= RECORDS, "{dtype:?}: {synchronized} bytes, {ours} without replicas");
    }
}

/// A table in f32 is read as it is, and no cast of it is kept.
#[test]
fn rotary_encoding_of_half_precision_keeps_nothing_but_its_table() {
    let _alone = alone();
    let device = &device();
    let encoding = memsave::RotaryEncodingConfig::new(512, 64).init(device);
    let table = 4 * encoding.freq_complex.shape().num_elements() as i64;
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        let x = || Input { shape: [1, 2, 512, 64], dtype }.random(device).require_grad();
        for (name, forward) in [
            ("adjacent", &(|x| encoding.forward(x)) as &dyn Fn(Tensor<4>) -> Tensor<4>),
            ("halves", &|x| encoding.forward_halves(x)),
        ] {
            let kept = bytes(measure(device, x, forward).kept);
            assert!(kept < table / 32, "{dtype:?}, {name}: {kept} bytes beside the table's {table}");
        }
    }
}

/// The weights of so few tokens are less than their queries, keys and values: it counts when each of those is dropped.
#[test]
fn attention_to_few_tokens_needs_no_more_than_burn() {
    let _alone = alone();
    for (batch, length, dropout) in [
        (128, 1, 0.0),
        (64, 4, 0.1),
        (16, 16, 0.0),
        (16, 16, 0.1),
        (8, 50, 0.0),
        (32, 50, 0.1),
        (16, 96, 0.0),
    ] {
        let config = burn::nn::attention::MultiHeadAttentionConfig::new(512, 8).with_dropout(dropout);
        let stock = config.init(&device());
        for (parameters, stock) in [("trainable", stock.clone()), ("frozen", stock.no_grad())] {
            let layer = memsave::attention::MultiHeadAttention::from(stock.clone());
            let input = || random([batch, length, 512]);
            let ours = measure(&device(), input, |x| {
                layer.forward(memsave::attention::MhaInput::self_attn(x)).context
            });
            let burn = measure(&device(), input, |x| {
                stock.forward(burn::nn::attention::MhaInput::self_attn(x)).context
            });
            for (what, ours, burn) in [("keeps", ours.kept, burn.kept), ("needs", ours.peak, burn.peak)] {
                let [ours, burn] = [ours, burn].map(bytes);
                let name = format!("{batch} x {length} tokens, dropout {dropout}, {parameters}");
                assert!(ours <= burn + SCRATCH, "{name}: {what} {ours} bytes, Burn's {burn}");
            }
        }
    }
    for length in [4, 16, 50] {
        let [ours, burn] = [functional::attention as Attention, module::attention].map(|attention| {
            let input = || random([16, 8, length, 64]);
            measure(&device(), input, |x| {
                attention(x.clone(), x.clone(), x, None, None, AttentionModuleOptions::default())
            })
        });
        let [ours, burn] = [ours, burn].map(|of| bytes(of.peak));
        assert!(ours <= burn + SCRATCH, "{length} tokens, to themselves: {ours} bytes, Burn's {burn}");
    }
}

type Attention = fn(
    Tensor<4>,
    Tensor<4>,
    Tensor<4>,
    Option<Tensor<4, Bool>>,
    Option<Tensor<4>>,
    AttentionModuleOptions,
) -> Tensor<4>;

/// Where no gradient flows to the weights, whatever is less is held for later: they, or what they are computed from. Burn holds the
/// weights, for the backward pass of the values and in the output of a layer.
#[test]
fn attention_holds_no_more_than_its_weights() {
    let _alone = alone();
    const WIDTH: usize = 64;
    let no_more = |name: &str, ours: LayerMeasurement, burn: LayerMeasurement| {
        for (what, ours, burn) in [("holds", ours.kept, burn.kept), ("needs", ours.peak, burn.peak)] {
            let [ours, burn] = [ours, burn].map(bytes);
            assert!(ours <= burn + RECORDS, "{name}: {what} {ours} bytes, Burn's {burn}");
        }
    };
    for (length, bias) in [(16, false), (100, false), (300, false), (300, true)] {
        let value = || random([4, 2, length, WIDTH]);
        let untracked = |shape| Tensor::random(shape, Distribution::Default, &device());
        let [ours, burn] = [functional::attention as Attention, module::attention].map(|attention| {
            measure(&device(), value, |value| {
                let [query, key] = [(); 2].map(|()| untracked(value.dims()));
                let bias = bias.then(|| untracked([4, 2, length, length]));
                attention(query, key, value, None, bias, AttentionModuleOptions::default())
            })
        });
        no_more(&format!("only the values of {length} tokens are tracked, bias {bias}"), ours, burn);
    }
    for (batch, length) in [(64, 4), (16, 16), (8, 50), (2, 300)] {
        let stock = burn::nn::attention::MultiHeadAttentionConfig::new(512, 8).init(&Device::flex());
        let layer = memsave::attention::MultiHeadAttention::from(stock.clone());
        let input = || Tensor::random([batch, length, 512], Distribution::Default, &Device::flex());
        let ours = measure(&device(), input, |x| {
            let output = layer.forward(memsave::attention::MhaInput::self_attn(x));
            std::mem::forget(output.weights); // for good: a later run begins with those of the one before
            output.context
        });
        let burn = measure(&device(), input, |x| {
            let output = stock.forward(burn::nn::attention::MhaInput::self_attn(x));
            std::mem::forget(output.weights);
            output.context
        });
        no_more(&format!("the output of {batch} x {length} tokens"), ours, burn);
    }
}

/// What is kept and needed grows linearly with the length of the sequence: 16,384 tokens fit.
#[test]
fn attention_grows_linearly() {
    let _alone = alone();
    const WIDTH: usize = 64;
    /// What a chunk of weights needs, with the products and gradients beside it: less than half of all scores of the shortest
    /// sequence.
    const CHUNK: i64 = 3 << 19;
    let options = || AttentionModuleOptions { is_causal: true, ..Default::default() };
    for length in [1024, 2048, 4096, 8192, 16_384] {
        let measured = measure(
            &device(),
            || random([1, 3, length, WIDTH]),
            |x| {
                let [query, key, value] = [0, 1, 2].map(|part| x.clone().slice_dim(1, part..part + 1));
                functional::attention(query, key, value, None, None, options())
            },
        );
        let tensor = (4 * length * WIDTH) as i64;
        let kept = bytes(measured.kept);
        // The input is one tensor, of which queries, keys and values are views.
        // (Three slices and the attention have records.)
        assert!((kept - 3 * tensor).abs() <= 4 * RECORDS, "attention to {length} tokens keeps {kept} bytes");
        let peak = bytes(measured.peak);
        // Queries, keys, values, output and their gradients.
        assert!(peak <= 8 * tensor + CHUNK, "attention to {length} tokens needs {peak} bytes");
    }
}
