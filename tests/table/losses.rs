//! Rows of losses.
use super::{Case, Check, Input, LOGITS, Shapes, Visitor, kept, row};
use burn::module::Module;
use burn::nn::{
    Linear,
    loss::{CrossEntropyLoss, CrossEntropyLossConfig},
};
use burn::tensor::{DType, Device, Int, Tensor};
use burn_memsave::nn as memsave;
use burn_memsave::nn::loss::{FusedLinearCrossEntropy, FusedLinearCrossEntropyConfig};

const VARIANT: &[Check] = &[Check::Time];
const IN_F32: &str = "stock computes it, or a factor of its gradient, in f32";

/// A class per row.
fn scattered(logits: &Tensor<2>, classes: usize) -> Tensor<1, Int> {
    let rows = Tensor::<1, Int>::arange(0..logits.dims()[0] as i64, &logits.device());
    rows.mul_scalar(7919).remainder_scalar(classes as i64)
}

fn classes(logits: &Tensor<2>) -> Tensor<1, Int> {
    scattered(logits, logits.dims()[1])
}

fn labels(x: &Tensor<2>) -> Tensor<2, Int> {
    Tensor::ones(x.dims(), &x.device())
}

fn like(x: &Tensor<2>, value: f32) -> Tensor<2> {
    Tensor::full(x.dims(), value, (&x.device(), x.dtype()))
}

fn index_size() -> usize {
    Tensor::<1, Int>::zeros([1], &Device::default()).dtype().size()
}

pub fn visit(visitor: &mut impl Visitor) {
    // The logits are kept, and per row a part of the log-sum-exp (in f32 at least) and the target.
    let logits = |case: Case, x: Input<2>| match case.input() {
        true => x.floats() + x.shape[0] * (x.dtype.size().max(4) + index_size()),
        false => 0,
    };
    row! {
        visitor, "cross_entropy", LOGITS, logits,
        config(device) |nn, _| nn::loss::CrossEntropyLossConfig::new(),
        forward |nn, loss, x| { let targets = classes(&x); loss.forward(x, targets) },
        within(1e-7, IN_F32)
    }
    row! {
        visitor, "cross_entropy, smoothed", LOGITS, logits,
        config(device) |nn, _| nn::loss::CrossEntropyLossConfig::new().with_smoothing(Some(0.1)),
        forward |nn, loss, x| { let targets = classes(&x); loss.forward(x, targets) },
        only_f32("stock smooths in f32")
    }
    for weights in [None, Some(vec![1.0, 2.0])] {
        let name = if weights.is_some() { "weighted" } else { "not weighted" };
        row! {
            visitor, format!("cross_entropy of probabilities, {name}"), Shapes::only([4, 2]), kept::nothing,
            config(device) |nn, _| {
                let loss = nn::loss::CrossEntropyLossConfig::new().with_weights(weights.clone());
                loss.with_smoothing(Some(0.1)).with_pad_tokens(Some(vec![0])).with_logits(false)
            },
            forward |nn, loss, x| { let targets = classes(&x); loss.forward(x, targets) },
            without(VARIANT, "as cross_entropy"),
            without(&[Check::Bytes, Check::Gradients, Check::Wgpu], "options: tests/gradients/loss")
        }
        row! {
            visitor, format!("binary_cross_entropy, {name}"), Shapes::only([4, 2]), kept::nothing,
            config(device) |nn, _|
                nn::loss::BinaryCrossEntropyLossConfig::new().with_weights(weights.clone()).with_logits(true),
            forward |nn, loss, x| { let labels = labels(&x); loss.forward(x, labels) },
            without(VARIANT, "as binary_cross_entropy"),
            without(&[Check::Bytes, Check::Gradients, Check::Wgpu], "options: tests/gradients/loss")
        }
    }
    visit_head(visitor);
    // The slope is kept in f32, because stock computes in no other type.
    let slope = |case: Case, x: Input<2>| if case.input() { size_of::<f32>() * x.elements() } else { 0 };
    row! {
        visitor, "binary_cross_entropy", LOGITS, slope,
        config(device) |nn, _| nn::loss::BinaryCrossEntropyLossConfig::new().with_logits(true),
        forward |nn, loss, x| { let labels = labels(&x); loss.forward(x.cast(DType::F32), labels) },
        within(1e-5, "stock computes in f32 only")
    }
    // Kept are the difference, or the targets.
    row! {
        visitor, "mse", LOGITS, kept::input, module() |nn, _| nn::loss::MseLoss::new(),
        forward |nn, loss, x| { let targets = like(&x, 1.0); loss.forward(x, targets, nn::loss::Reduction::Mean) },
        within(1e-7, IN_F32)
    }
    row! {
        visitor, "huber", LOGITS, kept::input, config() |nn, _| nn::loss::HuberLossConfig::new(0.5),
        forward |nn, loss, x| { let targets = like(&x, 1.0); loss.forward(x, targets, nn::loss::Reduction::Mean) },
        within(1e-7, IN_F32)
    }
    row! {
        visitor, "kl_div", LOGITS, kept::input, config() |nn, _| nn::loss::KLDivLossConfig::new(),
        forward |nn, loss, x| { let targets = like(&x, 0.5); loss.forward(x, targets, nn::loss::Reduction::BatchMean) },
        within(1e-7, IN_F32)
    }
    row! {
        visitor, "kl_div, log target", LOGITS, kept::input,
        config() |nn, _| nn::loss::KLDivLossConfig::new().with_log_target(true),
        forward |nn, loss, x| { let targets = like(&x, -0.5); loss.forward(x, targets, nn::loss::Reduction::Mean) },
        within(1e-7, IN_F32), without(VARIANT, "as kl_div")
    }
}

/// The head of a network and its loss.
#[derive(Module, Debug)]
pub struct Head {
    linear: Linear,
    loss: CrossEntropyLoss,
}

/// The same, fused.
#[derive(Module, Debug)]
pub struct FusedHead {
    linear: memsave::Linear,
    loss: FusedLinearCrossEntropy,
}

impl From<Head> for FusedHead {
    fn from(head: Head) -> Self {
        let linear = memsave::Linear::from(head.linear);
        let loss = FusedLinearCrossEntropyConfig::new().init(&linear.weight.device());
        Self { linear, loss }
    }
}

impl From<FusedHead> for Head {
    fn from(head: FusedHead) -> Self {
        let linear = Linear::from(head.linear);
        let loss = CrossEntropyLossConfig::new().init(&linear.weight.device());
        Self { linear, loss }
    }
}

fn visit_head(visitor: &mut impl Visitor) {
    const FEATURES: usize = 512;
    const CLASSES: usize = 8000;
    const FEW: usize = 40;
    let of = |features| if features == FEATURES { CLASSES } else { FEW };
    let head = |device: &Device, features: usize| Head {
        linear: burn::nn::LinearConfig::new(features, of(features)).with_bias(false).init(device),
        loss: CrossEntropyLossConfig::new().init(device),
    };
    for (name, factor) in [("linear and cross_entropy", 8), ("linear and cross_entropy, few rows", 2)] {
        let rows = |[rows, _]: [usize; 2]| [rows * factor, FEATURES];
        let shapes = Shapes { test: [12, 16], usual: rows(LOGITS.usual), small: rows(LOGITS.small) };
        visitor.row(super::Row {
            name: name.into(),
            shapes,
            kept: Box::new(kept::nothing),
            stock: super::Twin {
                init: Box::new(|device, [_, features]| head(device, features)),
                forward: Box::new(|head, x| {
                    let targets = scattered(&x, of(x.dims()[1]));
                    head.loss.forward(head.linear.forward(x), targets)
                }),
            },
            ours: super::Twin {
                init: Box::new(|device, [_, features]| FusedHead::from(head(device, features))),
                forward: Box::new(|head: &FusedHead, x| {
                    let targets = scattered(&x, of(x.dims()[1]));
                    head.loss.forward(&head.linear, x, targets)
                }),
            },
            notes: super::Notes::default()
                .without(&[Check::Conversion], "two layers in one")
                .without(&[Check::Bytes], "more than stock for few classes: `the_targets_are_met`")
                .within(1e-6, IN_F32),
        });
    }
}
