//! Steps in half precision, beside the same in f32 and in f64.
#![cfg(feature = "flex")]
#![recursion_limit = "256"]
use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::optim::GradientsParams;
use burn::tensor::{Device, FloatDType, Int, Tensor, TensorData};
use burn_memsave::measure::TrackingAllocator;
use burn_memsave::mixed::Precision;
use burn_memsave::nn::attention::{
    MhaInput, MultiHeadAttention, MultiHeadAttentionConfig, generate_autoregressive_mask,
};
use burn_memsave::nn::conv::{Conv2d, Conv2dConfig};
use burn_memsave::nn::loss::CrossEntropyLossConfig;
use burn_memsave::nn::{
    BatchNorm, BatchNormConfig, Embedding, EmbeddingConfig, Linear, LinearConfig, Relu, RmsNorm,
    RmsNormConfig, RotaryEncoding, RotaryEncodingConfig, SwiGlu, SwiGluConfig,
};

#[path = "../memory/meter.rs"]
#[allow(dead_code, reason = "every test uses its part")]
mod meter;

mod bytes;
mod modules;
mod scaler;
mod sums;
mod training;

#[global_allocator]
static ALLOCATOR: TrackingAllocator = TrackingAllocator::new();

const BOTH: [fn() -> Precision; 2] = [Precision::bf16, Precision::f16];

/// The distance from a number to the next, relative to it.
fn rounding(precision: &Precision) -> f64 {
    match precision.dtype() {
        FloatDType::F16 => 1.0 / 1024.0,
        _ => 1.0 / 128.0,
    }
}

/// Deterministic values in -1..1.
fn values<const D: usize>(shape: [usize; D], seed: usize, device: &Device) -> Tensor<D> {
    let value = |at: usize| ((at * 7919 + seed * 104_729) % 2003) as f32 / 1001.5 - 1.0;
    let values: Vec<f32> = (0..shape.iter().product()).map(value).collect();
    Tensor::from_data(TensorData::new(values, shape), device)
}

fn indices<const D: usize>(shape: [usize; D], below: usize, device: &Device) -> Tensor<D, Int> {
    let values: Vec<i64> =
        (0..shape.iter().product()).map(|at: usize| ((at * at + 3 * at) % below) as i64).collect();
    Tensor::from_data(TensorData::new(values, shape), device)
}

/// Gives a module parameters that are the same on every call: scales of norms near one, others near zero.
#[derive(Default)]
struct Fill {
    seed: usize,
    path: Vec<String>,
}

impl ModuleMapper for Fill {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.path.push(name.into());
    }
    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.pop();
    }
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        self.seed += 1;
        let name = self.path.last().map_or("", String::as_str);
        let (mean, spread) = match name {
            "running_mean" | "running_var" => return param,
            "gamma" => (1.0, 0.1),
            _ if D == 1 => (0.0, 0.1),
            _ => (0.0, (param.dims()[0] as f64).sqrt().recip()),
        };
        let is_trained = param.is_require_grad();
        param.map(|value| {
            let filled = values::<D>(value.dims(), self.seed, &value.device().inner()) * spread + mean;
            Tensor::from_inner(filled).set_require_grad(is_trained)
        })
    }
}

/// Casts parameters to f64.
struct Widen;

impl ModuleMapper for Widen {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let is_trained = param.is_require_grad();
        param
            .map(|value| Tensor::from_inner(value.inner().cast(FloatDType::F64)).set_require_grad(is_trained))
    }
}

/// With batch norm.
#[derive(Module, Debug)]
struct Images {
    conv: Conv2d,
    norm: BatchNorm,
    head: Linear,
}

impl Images {
    fn new(device: &Device) -> Self {
        let model = Self {
            conv: Conv2dConfig::new([3, 8], [3, 3]).init(device),
            norm: BatchNormConfig::new(8).init(device),
            head: LinearConfig::new(8, 5).init(device),
        };
        model.map(&mut Fill::default())
    }

    fn loss(&self, x: Tensor<4>) -> Tensor<1> {
        let [batch, ..] = x.dims();
        let x = Relu::new().forward(self.norm.forward(self.conv.forward(x)));
        let x = x.mean_dim(3).mean_dim(2).reshape([batch, 8]);
        let targets = indices([batch], 5, &x.device());
        CrossEntropyLossConfig::new().init(&x.device()).forward(self.head.forward(x), targets)
    }
}

/// Of one block.
#[derive(Module, Debug)]
struct Language {
    tokens: Embedding,
    norms: [RmsNorm; 3],
    attention: MultiHeadAttention,
    rotary: RotaryEncoding,
    swiglu: SwiGlu,
    down: Linear,
    head: Linear,
}

const WIDTH: usize = 32;
const WORDS: usize = 40;

impl Language {
    fn new(device: &Device) -> Self {
        let norm = || RmsNormConfig::new(WIDTH).init(device);
        let model = Self {
            tokens: EmbeddingConfig::new(WORDS, WIDTH).init(device),
            norms: [norm(), norm(), norm()],
            attention: MultiHeadAttentionConfig::new(WIDTH, 4).with_dropout(0.0).init(device),
            rotary: RotaryEncodingConfig::new(64, WIDTH).init(device),
            swiglu: SwiGluConfig::new(WIDTH, 48).with_bias(false).init(device),
            down: LinearConfig::new(48, WIDTH).with_bias(false).init(device),
            head: LinearConfig::new(WIDTH, WORDS).with_bias(false).init(device),
        };
        model.map(&mut Fill::default())
    }

    fn loss(&self, text: Tensor<2, Int>) -> Tensor<1> {
        let [batch, length] = text.dims();
        let mask = generate_autoregressive_mask(batch, length, &text.device());
        let [before, middle, after] = &self.norms;
        let x = self.tokens.forward(text.clone());
        let input = MhaInput::self_attn(self.rotary.forward(before.forward(x.clone()))).mask_attn(mask);
        let x = x + self.attention.forward(input).context;
        let x = x.clone() + self.down.forward(self.swiglu.forward(middle.forward(x)));
        let logits = self.head.forward(after.forward(x));
        let next = (text + 7) % WORDS as i64;
        CrossEntropyLossConfig::new().init(&logits.device()).forward(logits.flatten(0, 1), next.flatten(0, 1))
    }
}

/// Every gradient of one step beside that of another, by the norm of the difference, relative to that of the gradient. (What is
/// zero but for rounding, as that of the bias of keys, is beside the largest.)
struct Compare<'a> {
    found: &'a GradientsParams,
    exact: &'a GradientsParams,
    path: Vec<String>,
    largest: f64,
    tolerance: f64,
    worst: f64,
    count: usize,
}

fn compare(
    module: &impl Module,
    found: &GradientsParams,
    exact: &GradientsParams,
    tolerance: f64,
) -> (f64, usize) {
    struct Largest<'a>(&'a GradientsParams, f64);
    impl ModuleVisitor for Largest<'_> {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            let found =
                self.0.get::<D>(param.id).map(|found| norm(&found.into_data().iter().collect::<Vec<_>>()));
            self.1 = self.1.max(found.unwrap_or(0.0));
        }
    }
    let mut largest = Largest(exact, 0.0);
    module.visit(&mut largest);
    let mut compare =
        Compare { found, exact, path: vec![], largest: largest.1, tolerance, worst: 0.0, count: 0 };
    module.visit(&mut compare);
    (compare.worst, compare.count)
}

fn norm(values: &[f64]) -> f64 {
    values.iter().map(|v| v * v).sum::<f64>().sqrt()
}

impl ModuleVisitor for Compare<'_> {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.path.push(name.into());
    }
    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.pop();
    }
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let path = self.path.join(".");
        let [found, exact] = [self.found, self.exact].map(|of| of.get::<D>(param.id));
        assert_eq!(found.is_some(), exact.is_some(), "{path}");
        let Some((found, exact)) = found.zip(exact) else { return };
        assert_eq!(found.dtype(), param.dtype(), "{path}: of the type of its master");
        let [found, exact] = [found, exact].map(|of| of.into_data().iter::<f64>().collect::<Vec<_>>());
        let difference: Vec<f64> = found.iter().zip(&exact).map(|(a, b)| a - b).collect();
        let error = norm(&difference) / norm(&exact).max(1e-2 * self.largest);
        assert!(error <= self.tolerance, "{path}: {error}");
        self.worst = self.worst.max(error);
        self.count += 1;
    }
}
