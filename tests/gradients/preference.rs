//! Compares preference losses with their formulas and derivatives in f64, and tests the reference: a model without its adapters.
use crate::common::*;
use crate::loss::labels;
use burn::module::{
    Lora, Module, ModuleMapper, Param, QLora, Quantizer, Reparameterization, Reparameterizer,
};
use burn::nn as stock;
use burn::tensor::{
    Bool, DType, Device, Int, Tensor, TensorData,
    quantization::{Calibration, QuantValue},
};
use burn_memsave::functional::{
    self as F, KtoOptions, Preferences, SequenceReduction, dpo_loss, kto_loss, kto_reference_point,
    orpo_loss, sequence_log_prob, simpo_loss,
};
use burn_memsave::lora::{self, ConvLora};
use burn_memsave::nn;

const PAIRS: usize = 6;

/// The loss of every pair has the values of `formula`, and as gradients its differences: of the first `tracked` of four numbers
/// per pair; the others have none.
fn equals(
    name: &str,
    tracked: usize,
    op: impl Fn([Tensor<1>; 4]) -> Tensor<1>,
    formula: impl Fn(usize, [f64; 4]) -> f64,
) {
    const STEP: f64 = 1e-6;
    for backend in Backend::ALL {
        for device in backend.autodiff_devices() {
            let values: [_; 4] = std::array::from_fn(|at| uniform(PAIRS, 70 + at as u64, -9.0..-0.01));
            let leaves = values
                .each_ref()
                .map(|values| tensor::<1>(values.clone(), &[PAIRS], &device, DType::F64).require_grad());
            let loss = op(leaves.clone());
            let gradients = loss.clone().sum().backward();
            let losses = numbers(&loss.into_data());
            for (at, leaf) in leaves.iter().enumerate() {
                let gradient = leaf.grad(&gradients).map(|gradient| numbers(&gradient.into_data()));
                assert_eq!(gradient.is_some(), at < tracked, "{name}: gradient of input {at}");
                for pair in 0..PAIRS {
                    let of = |by: f64| {
                        let mut numbers: [f64; 4] = std::array::from_fn(|input| values[input][pair]);
                        numbers[at] += by;
                        formula(pair, numbers)
                    };
                    assert!(
                        (losses[pair] - of(0.0)).abs() <= 1e-9,
                        "{name}: {} is not {}",
                        losses[pair],
                        of(0.0)
                    );
                    let Some(gradient) = &gradient else { continue };
                    let difference = (of(STEP) - of(-STEP)) / (2.0 * STEP);
                    assert!(
                        (gradient[pair] - difference).abs() <= 1e-6 * (1.0 + difference.abs()),
                        "{name}: gradient of input {at} is {}, the difference {difference}",
                        gradient[pair]
                    );
                }
            }
        }
    }
}

fn log_sigmoid(h: f64) -> f64 {
    -(-h).exp().ln_1p()
}

fn sigmoid(h: f64) -> f64 {
    1.0 / (1.0 + (-h).exp())
}

fn log_odds(l: f64) -> f64 {
    l - (-l.exp_m1()).ln()
}

fn pairs(chosen: Tensor<1>, rejected: Tensor<1>) -> Preferences {
    Preferences { chosen, rejected }
}

#[test]
fn dpo_equals_its_formula() {
    for smoothing in [0.0, 0.1] {
        equals(
            "dpo",
            2,
            |[c, r, rc, rr]| dpo_loss(pairs(c, r), pairs(rc, rr), 0.3, smoothing),
            |_, [c, r, rc, rr]| {
                let h = 0.3 * ((c - r) - (rc - rr));
                -(1.0 - smoothing) * log_sigmoid(h) - smoothing * log_sigmoid(-h)
            },
        );
    }
}

#[test]
fn orpo_equals_its_formula() {
    equals(
        "orpo",
        2,
        |[c, r, ..]| orpo_loss(pairs(c, r), 0.7),
        |_, [c, r, ..]| -c - 0.7 * log_sigmoid(log_odds(c) - log_odds(r)),
    );
}

#[test]
fn simpo_equals_its_formula() {
    equals(
        "simpo",
        2,
        |[c, r, ..]| simpo_loss(pairs(c, r), 2.5, 0.4),
        |_, [c, r, ..]| -log_sigmoid(2.5 * (c - r) - 0.4),
    );
}

fn desirable(device: &Device) -> Tensor<1, Bool> {
    let desirable = (0..PAIRS).map(|at| at % 3 != 0).collect::<Vec<_>>();
    Tensor::from_data(TensorData::new(desirable, [PAIRS]), device)
}

#[test]
fn kto_equals_its_formula() {
    let options = KtoOptions { beta: 0.4, desirable_weight: 1.3, undesirable_weight: 0.8 };
    // `z` is of the third and fourth inputs, which are detached.
    let mean = |seed| uniform(PAIRS, seed, -9.0..-0.01).iter().sum::<f64>() / PAIRS as f64;
    let z = (mean(72) - mean(73)).max(0.0);
    equals(
        "kto",
        1,
        |[policy, reference, a, b]| {
            let desirable = desirable(&policy.device());
            kto_loss(policy, reference, desirable, kto_reference_point(a, b), options)
        },
        |at, [policy, reference, ..]| {
            let r = policy - reference;
            match at % 3 != 0 {
                true => 1.3 * (1.0 - sigmoid(0.4 * (r - z))),
                false => 0.8 * (1.0 - sigmoid(0.4 * (z - r))),
            }
        },
    );
}

/// Odds of certain and of impossible sequences, in f32.
#[test]
fn odds_are_precise_at_both_ends() {
    let device = &Device::flex().autodiff();
    for l in [-1e-6f32, -1e-4, -0.5, -20.0, -90.0] {
        let chosen = Tensor::<1>::from_floats([l], device).require_grad();
        let rejected = Tensor::<1>::from_floats([-1.0], device);
        let loss = orpo_loss(pairs(chosen.clone(), rejected), 1.0);
        let gradients = loss.backward();
        let exact = |l: f64| -l - log_sigmoid(log_odds(l) - log_odds(-1.0));
        let slope =
            (exact(f64::from(l) * (1.0 + 1e-6)) - exact(f64::from(l) * (1.0 - 1e-6))) / (2e-6 * f64::from(l));
        for (what, value, exact) in [
            ("loss", &loss.into_data(), exact(f64::from(l))),
            ("gradient", &chosen.grad(&gradients).unwrap().into_data(), slope),
        ] {
            let value = numbers(value)[0];
            assert!(
                (value - exact).abs() <= 1e-5 * exact.abs().max(1.0),
                "{what} at {l}: {value} is not {exact}"
            );
        }
    }
    let certain = Tensor::<1>::zeros([1], device).require_grad();
    let loss = orpo_loss(pairs(certain.clone(), Tensor::from_floats([-1.0], device)), 1.0);
    let gradients = loss.backward();
    assert_eq!(numbers(&certain.grad(&gradients).unwrap().into_data()), [-1.0]);
}

#[test]
fn losses_refuse_what_does_not_fit() {
    let device = Device::flex();
    let some = |n: usize| Tensor::<1>::zeros([n], &device);
    let refuses = |f: &dyn Fn() -> Tensor<1>| {
        std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| f().into_data())).is_err()
    };
    assert!(!refuses(&|| dpo_loss(pairs(some(2), some(2)), pairs(some(2), some(2)), 0.1, 0.0)));
    assert!(refuses(&|| dpo_loss(pairs(some(2), some(1)), pairs(some(2), some(2)), 0.1, 0.0)));
    assert!(refuses(&|| dpo_loss(pairs(some(2), some(2)), pairs(some(1), some(1)), 0.1, 0.0)));
    assert!(refuses(&|| dpo_loss(pairs(some(2), some(2)), pairs(some(2), some(2)), 0.1, 0.5)));
    assert!(refuses(&|| simpo_loss(pairs(some(2), some(1)), 1.0, 0.0)));
    assert!(refuses(&|| orpo_loss(pairs(some(2), some(1)), 1.0)));
    assert!(refuses(&|| kto_reference_point(some(2), some(1))));
}

/// Sums of tokens in f32 also for half precision, and nothing of what does not count.
#[test]
fn sequences_are_sums_and_means_of_what_counts() {
    let device = &Device::flex().autodiff();
    const LENGTH: usize = 700;
    let counts = |row: usize, token: usize| token % 5 != row;
    for dtype in [DType::F64, DType::F32, DType::F16, DType::BF16] {
        let values = rounded(uniform(2 * LENGTH, 5, -12.0..0.0), dtype);
        let spoiled = values.iter().enumerate();
        let spoiled =
            spoiled.map(|(at, &x)| if counts(at / LENGTH, at % LENGTH) { x } else { f64::NAN }).collect();
        let leaf = tensor::<2>(spoiled, &[2, LENGTH], device, dtype).require_grad();
        let mask = (0..2 * LENGTH).map(|at| counts(at / LENGTH, at % LENGTH)).collect::<Vec<_>>();
        let mask = Tensor::from_data(TensorData::new(mask, [2, LENGTH]), device);
        for (reduction, is_mean) in [(SequenceReduction::Sum, false), (SequenceReduction::Mean, true)] {
            let result = sequence_log_prob(leaf.clone(), mask.clone(), reduction);
            let gradients = result.clone().sum().backward();
            assert_eq!(result.dtype(), if dtype == DType::F64 { dtype } else { DType::F32 });
            let gradient = numbers(&leaf.grad(&gradients).unwrap().into_data());
            for (row, result) in numbers(&result.into_data()).into_iter().enumerate() {
                let of_row = || (0..LENGTH).filter(move |&token| counts(row, token));
                let (sum, count) = (
                    of_row().map(|token| values[row * LENGTH + token]).sum::<f64>(),
                    of_row().count() as f64,
                );
                let exact = if is_mean { sum / count } else { sum };
                assert!((result / exact - 1.0).abs() < 1e-6, "{dtype:?}: {result} is not {exact}");
                for token in 0..LENGTH {
                    let slope = if is_mean { count.recip() } else { 1.0 };
                    let exact = if counts(row, token) { slope } else { 0.0 };
                    assert!((gradient[row * LENGTH + token] - exact).abs() <= 5e-3 * exact);
                }
            }
        }
    }
}

/// Layers of this library and of Burn, of which each can have an adapter.
#[derive(Module, Debug)]
struct Model {
    embedding: nn::Embedding,
    conv: nn::conv::Conv1d,
    norm: nn::RmsNorm,
    stock: stock::Linear,
    head: nn::Linear,
}

impl Model {
    fn new(device: &Device) -> Self {
        Self {
            embedding: nn::EmbeddingConfig::new(11, 8).init(device),
            conv: nn::conv::Conv1dConfig::new(8, 8, 3)
                .with_padding(stock::PaddingConfig1d::Explicit(2, 0))
                .init(device),
            norm: nn::RmsNormConfig::new(8).init(device),
            stock: stock::LinearConfig::new(8, 8).init(device),
            head: nn::LinearConfig::new(8, 11).init(device),
        }
    }

    fn forward(&self, tokens: Tensor<2, Int>) -> Tensor<3> {
        let x = self.embedding.forward(tokens);
        let x = self.conv.forward(x.swap_dims(1, 2)).swap_dims(1, 2);
        self.stock.forward(self.norm.forward(x))
    }

    /// The log probabilities of the tokens after the first.
    fn log_prob(&self, tokens: Tensor<2, Int>) -> Tensor<1> {
        let [batch, length] = tokens.dims();
        let x = self.forward(tokens.clone().narrow(1, 0, length - 1)).reshape([batch * (length - 1), 8]);
        let next = tokens.narrow(1, 1, length - 1).reshape([batch * (length - 1)]);
        let bias = self.head.bias.as_ref().map(|bias| bias.val());
        let logs = F::linear_log_prob(x, self.head.weight.val(), bias, next, Default::default());
        let mask = Tensor::<2, Int>::ones([batch, length - 1], &logs.device()).equal_scalar(1);
        sequence_log_prob(logs.reshape([batch, length - 1]), mask, SequenceReduction::Sum)
    }
}

/// Adds to every parameter that is trained.
struct Train;

impl ModuleMapper for Train {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        match param.is_require_grad() {
            true => param.map(|x| x.inner().add_scalar(0.2).autodiff().require_grad()),
            false => param,
        }
    }
}

fn tokens(device: &Device) -> Tensor<2, Int> {
    labels([3, 6], 11, device)
}

#[test]
fn a_model_without_its_adapters_is_the_one_before() {
    let _generator = generator();
    for backend in Backend::ALL {
        let device = backend.device().autodiff();
        let base = Model::new(&device);
        let before = base.log_prob(tokens(&device)).into_data();
        let mut model =
            base.clone().apply_reparameterization(ConvLora::new(Lora::new(2, 4.0))).map(&mut Train);
        model.norm = model.norm.unfreeze();
        let adapted = model.log_prob(tokens(&device)).into_data();
        assert_ne!(adapted, before);

        let reference = lora::without_adapters(&model);
        let result = reference.log_prob(tokens(&device));
        assert!(!result.is_tracked());
        result.into_data().assert_eq(&before, true);
        let inner = lora::without_adapters(&model.valid()).log_prob(tokens(&device.clone().inner()));
        inner.into_data().assert_eq(&before, true);

        // Neither changes the other.
        model.log_prob(tokens(&device)).into_data().assert_eq(&adapted, true);
        assert!(model.norm.gamma.is_require_grad() && !reference.norm.gamma.is_require_grad());
        let adapter = model.head.weight.adapter().expect("an adapter");
        assert!(adapter.a.is_require_grad() && adapter.a.dims() == [8, 2]);
        let model = model.map(&mut Train);
        assert_ne!(model.log_prob(tokens(&device)).into_data(), adapted);
        let again = reference.log_prob(tokens(&device)).into_data();
        // But for the norm's weight, of which the reference has the value from before.
        again.assert_eq(&before, true);
    }
}

#[test]
fn a_quantized_base_stays_packed() {
    let _generator = generator();
    let device = Device::flex().autodiff();
    let scheme = device.settings().quantization.scheme.with_value(QuantValue::Q8S);
    let quantizer = || Quantizer::new(Calibration::MinMax, scheme);
    let head = nn::LinearConfig::new(8, 16).with_bias(false).init(&device);
    let model = head.apply_qlora(QLora::new(Lora::new(2, 4.0), quantizer()));
    let x = || tensor::<2>(uniform(24, 1, -1.0..1.0), &[3, 8], &device, DType::F32);
    let before = model.forward(x()).into_data(); // `b` is 0
    let model = model.map(&mut Train);
    assert_ne!(model.forward(x()).into_data(), before);
    let reference = lora::without_adapters(&model);
    assert!(matches!(reference.weight.base().dtype(), DType::QFloat(_)));
    reference.forward(x()).into_data().assert_eq(&before, true);
}

/// Dense and quantized, on a layer that computes with the factors, and on one that makes the effective weight.
#[test]
fn magnitudes_are_left_out() {
    let _generator = generator();
    for backend in Backend::ALL {
        let device = backend.device().autodiff();
        let base = Model::new(&device);
        let before = base.log_prob(tokens(&device)).into_data();
        let model = base.apply_reparameterization(lora::Dora::new(Lora::new(2, 4.0))).map(&mut Train);
        let adapted = model.log_prob(tokens(&device)).into_data();
        assert_ne!(adapted, before);
        let reference = lora::without_adapters(&model);
        let result = reference.log_prob(tokens(&device));
        assert!(!result.is_tracked());
        result.into_data().assert_eq(&before, true);
        let inner = lora::without_adapters(&model.valid()).log_prob(tokens(&device.clone().inner()));
        inner.into_data().assert_eq(&before, true);
        model.log_prob(tokens(&device)).into_data().assert_eq(&adapted, true);
        let adapter = model.head.weight.reparameterization::<lora::DoraAdapter>().expect("an adapter");
        assert!(adapter.magnitude.is_require_grad() && adapter.magnitude.dims() != [0]);
    }

    let device = Device::flex().autodiff();
    let scheme = device.settings().quantization.scheme.with_value(QuantValue::Q8S);
    let layer = nn::LinearConfig::new(8, 16).with_bias(false).init(&device);
    let layer = layer.quantize_weights(&mut Quantizer::new(Calibration::MinMax, scheme)).freeze();
    let x = || tensor::<2>(uniform(24, 1, -1.0..1.0), &[3, 8], &device, DType::F32);
    let before = layer.forward(x()).into_data();
    let layer = layer.apply_reparameterization(lora::Dora::new(Lora::new(2, 4.0))).map(&mut Train);
    assert_ne!(layer.forward(x()).into_data(), before);
    lora::without_adapters(&layer).forward(x()).into_data().assert_eq(&before, true);
}

/// What it adds is not known.
#[test]
#[should_panic(expected = "weight has an adapter of another kind, \"doubled\"")]
fn other_adapters_are_refused() {
    #[derive(Module, Debug)]
    struct Doubled {}

    impl Reparameterization for Doubled {
        const NAME: &'static str = "doubled";

        fn apply<const D: usize>(&self, base: Tensor<D>) -> Tensor<D> {
            base * 2.0
        }
    }

    struct Double;

    impl Reparameterizer for Double {
        type Reparam = Doubled;

        fn reparameterize<const D: usize>(
            &mut self,
            _path: &str,
            param: Param<Tensor<D>>,
        ) -> (Param<Tensor<D>>, Option<Doubled>) {
            (param, Some(Doubled {}))
        }
    }

    let model = nn::LinearConfig::new(8, 16).init(&Device::flex().autodiff());
    lora::without_adapters(&model.apply_reparameterization(Double));
}

/// A step of DPO: at first both models agree, and gradients reach the adapters only.
#[test]
fn adapters_learn_a_preference() {
    let _generator = generator();
    let device = Device::flex().autodiff();
    let model = Model::new(&device).apply_reparameterization(ConvLora::new(Lora::new(2, 4.0)));
    let answers = || (tokens(&device), tokens(&device).flip([1]));
    let policy = |model: &Model| {
        let (chosen, rejected) = answers();
        pairs(model.log_prob(chosen), model.log_prob(rejected))
    };
    let reference = lora::without_adapters(&model);
    let loss = |model: &Model| dpo_loss(policy(model), policy(&reference), 0.5, 0.0).mean();
    let first = loss(&model);
    let gradients = first.backward();
    let first = numbers(&first.into_data())[0];
    assert!((first - 2f64.ln()).abs() < 1e-6, "{first}");

    struct Descend<'a>(&'a burn::tensor::Gradients, usize);
    impl ModuleMapper for Descend<'_> {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
            let Some(gradient) = param.base().grad(self.0) else { return param };
            self.1 += 1;
            param.map(|x| (x.inner() - gradient.mul_scalar(0.1)).autodiff().require_grad())
        }
    }
    let mut descend = Descend(&gradients, 0);
    let model = model.map(&mut descend);
    assert_eq!(descend.1, 2 * 4, "factors with a gradient");
    let second = numbers(&loss(&model).into_data())[0];
    assert!(second < first - 1e-4, "{second} is not below {first}");
}
