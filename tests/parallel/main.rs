//! Tests that replicas of a module compute and train like one device with the whole batch. Here one device serves as several; servers are
//! tested in `tests/remote`.
#![cfg(feature = "flex")]
#![recursion_limit = "256"]
use burn::module::{Lora, Module, ModuleVisitor, Param, ParamGroup};
use burn::optim::{AdamConfig, GradientsParams};
use burn::tensor::{DType, Device, Distribution, FloatDType, Int, Tensor};
use burn_memsave::lazy::{LazyLoad, LazyOptions, WeightFile};
use burn_memsave::nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig, conv::Conv2d, conv::Conv2dConfig};
use burn_memsave::parallel::{ParallelError, ReplicaOptions, Replicas};
use burn_memsave::plan::PartsError;
use burn_memsave_paper::text::llama::{LanguageModel, Size, checkpointed, memsave::Llama};
use proptest::prelude::*;

mod faults;
mod shards;
mod synchronized;

fn device() -> Device {
    Device::flex().autodiff()
}

fn devices(count: usize) -> Vec<Device> {
    vec![device(); count]
}

/// The larger number, or NaN if one is.
fn worse(a: f32, b: f32) -> f32 {
    if a.is_nan() || a > b { a } else { b }
}

/// The largest difference of the gradients of two modules, relative to the largest gradient, and how many there are.
fn difference(module: &impl Module, ours: &GradientsParams, whole: &GradientsParams) -> (f32, usize) {
    struct Compare<'a> {
        ours: &'a GradientsParams,
        whole: &'a GradientsParams,
        largest: f32,
        difference: f32,
        count: usize,
    }
    impl ModuleVisitor for Compare<'_> {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            let gradient =
                |of: &GradientsParams| of.get::<D>(param.id).map(|tensor| tensor.cast(FloatDType::F32));
            match (gradient(self.ours), gradient(self.whole)) {
                (Some(ours), Some(whole)) => {
                    let max = |tensor: Tensor<D>| tensor.abs().max().into_scalar::<f32>();
                    self.largest = worse(self.largest, max(whole.clone()));
                    self.difference = worse(self.difference, max(ours - whole));
                    self.count += 1;
                }
                (ours, whole) => {
                    assert_eq!(ours.is_some(), whole.is_some(), "the same parameters have gradients")
                }
            }
        }
    }
    let mut compare = Compare { ours, whole, largest: 0.0, difference: 0.0, count: 0 };
    module.visit(&mut compare);
    assert!(compare.largest > 0.0, "there are gradients");
    (compare.difference / compare.largest, compare.count)
}

fn language_model<M: LanguageModel>(device: &Device) -> M {
    device.seed(5);
    let size = Size { vocabulary: 31, width: 16, heads: 2, hidden: 24, blocks: 2, length: 8 };
    let group = ParamGroup::from_regex(r"^blocks\..*\.weight$").expect("a regular expression");
    let model = M::new(&size, device).apply_lora(Lora::new(2, 4.0).set_param_group(group));
    // The second factors are zero before training, and with them the gradients of the first.
    struct Shift;
    impl burn::module::ModuleMapper for Shift {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
            if !param.is_require_grad() {
                return param;
            }
            param.map(|value| (value.inner() + 0.05).autodiff().require_grad())
        }
    }
    model.map(&mut Shift)
}

fn tokens(step: usize, items: usize) -> (Tensor<2, Int>, Tensor<2, Int>) {
    let of = |first: usize| {
        let tokens: Vec<i64> = (0..items * 8).map(|at| ((first + at * 7 + at / 8) % 31) as i64).collect();
        Tensor::<1, Int>::from_data(tokens.as_slice(), &device()).reshape([items, 8])
    };
    (of(step), of(step + 3))
}

#[test]
fn twenty_steps_equal_one_device() {
    train::<Llama>(20);
}

/// Whose blocks are computed again in the backward passes.
#[test]
fn replicas_train_with_segments() {
    train::<checkpointed::Llama>(3);
}

fn train<M: LanguageModel>(steps: usize) {
    let device = device();
    let mut one: M = language_model(&device);
    let mut replicas = Replicas::new(&one, devices(3)).expect("three replicas");
    let (mut optimizer, mut of_replicas) = (AdamConfig::new().init(), AdamConfig::new().init());
    for step in 0..steps {
        let (input, next) = tokens(step, 7);
        let loss = one.loss(input.clone(), next.clone());
        let whole = GradientsParams::from_grads(loss.clone().backward(), &one);

        let mut start = 0;
        let parts = [4, 1, 2].map(|items| {
            let rows = start..start + items;
            start += items;
            ((input.clone().slice(rows.clone()), next.clone().slice(rows)), items)
        });
        let (mean, gradients) =
            replicas.backward(parts, |model, (input, next)| model.loss(input, next)).expect("three parts");
        assert!((loss.into_scalar::<f32>() - mean.into_scalar::<f32>()).abs() < 1e-5);
        let (difference, count) = difference(&one, &gradients, &whole);
        assert_eq!(count, 2 * 2 * 7, "two factors per matrix of two blocks");
        assert!(difference < 1e-5, "step {step}: {difference}");

        one = optimizer.step(1e-2, one, whole);
        replicas.update(|model| of_replicas.step(1e-2, model, gradients));
        replicas.sync().expect("nothing can fail on Flex");
    }
}

/// Every replica has the values of the first after an update, and what is frozen stays what it was.
#[test]
fn replicas_stay_the_same() {
    let mut replicas = Replicas::new(&language_model::<Llama>(&device()), devices(2)).expect("two replicas");
    let (input, next) = tokens(0, 2);
    let loss = |model: &Llama| model.loss(input.clone(), next.clone()).into_scalar::<f32>();
    let before = loss(replicas.module());
    let mut optimizer = AdamConfig::new().init();
    let parts = [0, 1].map(|row| ((input.clone().slice(row..row + 1), next.clone().slice(row..row + 1)), 1));
    let (_, gradients) =
        replicas.backward(parts, |model, (input, next)| model.loss(input, next)).expect("two parts");
    replicas.update(|model| optimizer.step(0.1, model, gradients));
    let after = loss(replicas.module());
    assert_ne!(before, after);
    // All of the batch on one replica and the next: the loss and the gradients come from its own parameters.
    for replica in 0..2 {
        let part = |index: usize| match index == replica {
            true => ((input.clone(), next.clone()), 2),
            false => ((input.clone().slice(0..1), next.clone().slice(0..1)), 0),
        };
        let (mean, gradients) = replicas
            .backward([part(0), part(1)], |model, (input, next)| model.loss(input, next))
            .expect("two parts");
        assert_eq!(mean.into_scalar::<f32>(), after, "replica {replica}");
        assert_eq!(gradients.len(), 2 * 2 * 7);
    }
}

#[derive(Module, Debug)]
struct Pair {
    first: Linear,
    second: Linear,
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// Half precision is summed in f32; checkpointing stays; what an update freezes is frozen in all replicas.
    #[test]
    fn half_precision_and_checkpointing(
        items in prop::collection::vec(1usize..5, 1..4), half in any::<bool>(), checkpointing in any::<bool>(),
        divided in any::<bool>(),
    ) {
        let device = match checkpointing {
            true => device().gradient_checkpointing(),
            false => device(),
        };
        let dtype = if half { DType::F16 } else { DType::F32 };
        let linear = || LinearConfig::new(6, 6).init(&device);
        let model = Pair { first: linear(), second: linear() };
        struct Cast(DType);
        impl burn::module::ModuleMapper for Cast {
            fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
                param.map(|value| {
                    let strategy = value.gradient_checkpointing_strategy().expect("autodiff");
                    value.inner().cast(self.0).autodiff().with_gradient_checkpointing_strategy(strategy).require_grad()
                })
            }
        }
        let model = model.map(&mut Cast(dtype));
        let total: usize = items.iter().sum();
        let x = Tensor::<2>::random([total, 6], Distribution::Uniform(-1.0, 1.0), (&device, dtype));
        let loss = |model: &Pair, x: Tensor<2>| model.second.forward(model.first.forward(x)).powf_scalar(2.0).mean();
        let options = if divided { ReplicaOptions::new().with_sharded_optimizer() } else { ReplicaOptions::new() };
        let of = vec![device.clone(); items.len()];
        let mut replicas = Replicas::with_options(&model, of, &options).expect("replicas");
        let mut start = 0;
        let parts: Vec<_> = items.iter().map(|&items| {
            start += items;
            (x.clone().slice(start - items..start), items)
        }).collect();
        let (_, gradients) = replicas.backward(parts, loss).expect("parts");
        let whole = GradientsParams::from_grads(loss(&model, x.clone()).backward(), &model);
        let (difference, count) = difference(&model, &gradients, &whole);
        prop_assert_eq!(count, 4);
        prop_assert!(difference < if half { 4e-3 } else { 1e-5 }, "{}", difference);

        let mut optimizer = burn::optim::SgdConfig::new().init();
        replicas.update(|model| optimizer.step(0.1, model, gradients));
        let strategy = replicas.module().first.weight.val().gradient_checkpointing_strategy();
        prop_assert_eq!(strategy, model.first.weight.val().gradient_checkpointing_strategy());
        // Each replica in turn gets all of the batch: all compute what the first does.
        let mut losses = vec![];
        for replica in 0..items.len() {
            let parts = (0..items.len()).map(|at| (x.clone(), if at == replica { total } else { 0 }));
            let (mean, _) = replicas.backward(parts, loss).expect("parts");
            losses.push(mean.into_scalar::<f32>());
        }
        prop_assert!(losses.iter().all(|loss| loss == &losses[0]), "{:?}", losses);

        replicas.update(|model| Pair { first: model.first.freeze(), ..model });
        let parts: Vec<_> = items.iter().map(|&items| (x.clone().slice(0..items), items)).collect();
        let (_, gradients) = replicas.backward(parts, loss).expect("parts");
        prop_assert_eq!(gradients.len(), 2, "of the second layer alone");
    }
}

/// A parameter in two places has one gradient, and stays one: training is that of one device, on which the optimizer changes the first
/// place and the second is tied to it again.
#[test]
fn tied_parameters_stay_tied() {
    let first = LinearConfig::new(2, 2).init(&device());
    let tied = |first: Linear| Pair { first: first.clone(), second: first };
    let mut one = tied(first);
    let mut replicas = Replicas::new(&one, devices(3)).expect("one value in both places");
    let (mut optimizer, mut of_replicas) = (AdamConfig::new().init(), AdamConfig::new().init());
    let x = Tensor::<2>::random([5, 2], Distribution::Normal(0.0, 1.0), &device());
    let loss = |pair: &Pair, x: Tensor<2>| pair.second.forward(pair.first.forward(x)).powf_scalar(2.0).mean();
    for _ in 0..3 {
        let whole = GradientsParams::from_grads(loss(&one, x.clone()).backward(), &one);
        let parts = [(0..2, 2.0), (2..3, 1.0), (3..5, 2.0)];
        let parts = parts.map(|(range, weight)| (x.clone().slice(range), weight));
        let (_, gradients) = replicas.backward(parts, loss).expect("three parts");
        assert_eq!(gradients.len(), 2);
        let (difference, count) = difference(&one, &gradients, &whole);
        assert_eq!(count, 4);
        assert!(difference < 1e-5, "{difference}");
        one = tied(optimizer.step(1e-2, one, whole).first);
        replicas.update(|model| of_replicas.step(1e-2, model, gradients));
        let [first, second] = [&replicas.module().first, &replicas.module().second];
        first.weight.val().into_data().assert_eq(&second.weight.val().into_data(), true);
    }
    let negative = replicas.backward([(x.clone(), -1.0)], loss);
    assert!(matches!(negative, Err(ParallelError::Parts(PartsError::Weight { .. }))));
    let nothing = replicas.backward([(x, 0.0)], loss);
    assert!(matches!(nothing, Err(ParallelError::Parts(PartsError::NoItems))));
}

/// Of a frozen clone that comes first, and of both when they are frozen, all replicas know.
#[test]
fn a_frozen_clone_does_not_hide_what_is_trained() {
    let student = LinearConfig::new(2, 2).init(&device());
    drop(student.forward(Tensor::<2>::ones([1, 2], &device())));
    let pair = Pair { first: student.clone().freeze(), second: student };
    let mut replicas = Replicas::new(&pair, devices(2)).expect("one of them is frozen");
    let x = Tensor::<2>::ones([3, 2], &device());
    let loss = |pair: &Pair, x: Tensor<2>| pair.second.forward(x).mean();
    let of_second = |replicas: &Replicas<Pair>| {
        let (mean, gradients) = replicas.backward([(x.clone(), 0), (x.clone(), 3)], loss).expect("parts");
        (mean.into_scalar::<f32>(), gradients.len())
    };
    replicas.update(|pair| Pair {
        second: Linear {
            weight: pair.second.weight.map(|w| (w.inner() + 1.0).autodiff().require_grad()),
            ..pair.second
        },
        ..pair
    });
    let first = loss(replicas.module(), x.clone()).into_scalar::<f32>();
    let (second, count) = of_second(&replicas);
    assert_eq!((first, 2), (second, count));
    let first = LinearConfig::new(2, 2).init(&device());
    let mut tied = Replicas::new(&Pair { first: first.clone(), second: first }, devices(2)).expect("tied");
    tied.update(|pair| Pair { first: pair.first.no_grad(), second: pair.second.no_grad() });
    let inner = x.clone().require_grad();
    let (_, gradients) = tied.backward([(inner.clone(), 1), (inner, 1)], loss).expect("parts");
    assert!(gradients.is_empty(), "{}", gradients.len());
}

#[test]
fn parameters_that_are_no_longer_tied_are_refused_unless_frozen() {
    let [first, mut second] = [(); 2].map(|()| LinearConfig::new(2, 2).init(&device()));
    second.weight = Param::initialized(first.weight.id, second.weight.val());
    let untied = Pair { first, second };
    let refused = Replicas::new(&untied, devices(2)).expect_err("two values");
    assert!(
        matches!(&refused, ParallelError::Parts(PartsError::Untied { first, second }) if first == "first.weight" && second == "second.weight"),
        "{refused}"
    );
    assert!(Replicas::new(&untied.freeze(), devices(2)).is_ok());
}

/// Lazy weights with and without adapters, beside one device.
#[test]
fn lazy_weights_stay_lazy() {
    let directory = tempfile::tempdir().expect("a folder");
    let path = directory.path().join("model.bpk");
    let size = Size { vocabulary: 31, width: 16, heads: 2, hidden: 24, blocks: 2, length: 8 };
    let host = device();
    Llama::new(&size, &host).save_file(&path).expect("a burnpack");
    let file = WeightFile::open(&path).expect("what was written");
    let options = LazyOptions::new().with_min_bytes(0);
    let (model, report) =
        Llama::new(&size, &host).freeze().lazy_load(&file, &options).expect("the same module");
    let group = ParamGroup::from_regex(r"^blocks\..*\.weight$").expect("a regular expression");
    let mut one = model.apply_lora(Lora::new(2, 4.0).set_param_group(group));

    let mut replicas = Replicas::new(&one, devices(2)).expect("two replicas");
    let (mut optimizer, mut of_replicas) = (AdamConfig::new().init(), AdamConfig::new().init());
    for step in 0..3 {
        let (input, next) = tokens(step, 4);
        let whole = GradientsParams::from_grads(one.loss(input.clone(), next.clone()).backward(), &one);
        let parts = [0..1, 1..4]
            .map(|rows| ((input.clone().slice(rows.clone()), next.clone().slice(rows.clone())), rows.len()));
        let (_, gradients) =
            replicas.backward(parts, |model, (input, next)| model.loss(input, next)).expect("two parts");
        let (difference, count) = difference(&one, &gradients, &whole);
        assert_eq!(count, 2 * 2 * 7);
        assert!(difference < 1e-5, "step {step}: {difference}");
        one = optimizer.step(1e-2, one, whole);
        replicas.update(|model| of_replicas.step(1e-2, model, gradients));
    }
    assert!(report.cache.statistics().reads > 3, "{}", report.cache);
    assert!(report.cache.held().is_empty(), "{}", report.cache);
}

#[derive(Module, Debug)]
struct Normed {
    conv: Conv2d,
    norms: Vec<BatchNorm>,
}

impl Normed {
    fn new() -> Self {
        let conv = Conv2dConfig::new([2, 3], [1, 1]).init(&device());
        Self { conv, norms: vec![BatchNormConfig::new(3).init(&device())] }
    }
    fn forward(&self, x: Tensor<4>) -> Tensor<4> {
        self.norms[0].forward(self.conv.forward(x))
    }
}

#[test]
fn batch_norms_in_training_are_refused() {
    let refused = Replicas::new(&Normed::new(), devices(2)).expect_err("statistics of a part");
    assert!(
        matches!(&refused, ParallelError::Parts(PartsError::Running { path }) if path == "norms.0"),
        "{refused}"
    );
    assert!(refused.to_string().contains("with_synchronized_batch_norm"), "{refused}");
    let stock = (burn::nn::BatchNormConfig::new(3).init(&device()), LinearConfig::new(2, 2).init(&device()));
    assert!(matches!(
        Replicas::new(&stock, devices(2)),
        Err(ParallelError::Parts(PartsError::Running { .. }))
    ));
}

/// A frozen batch norm normalizes every item alike, and no replica touches the statistics of another or of the module.
#[test]
fn frozen_batch_norms_are_replicated() {
    let mut module = Normed::new();
    module.norms = module.norms.into_iter().map(Module::freeze).collect();
    let replicas = Replicas::new(&module, devices(2)).expect("frozen");
    let x = Tensor::<4>::random([4, 2, 3, 3], Distribution::Default, &device());
    let loss = |model: &Normed, x: Tensor<4>| model.forward(x).powf_scalar(2.0).mean();
    let whole = GradientsParams::from_grads(loss(&module, x.clone()).backward(), &module);
    let parts = [(x.clone().slice(0..3), 3), (x.slice(3..4), 1)];
    let (_, gradients) = replicas.backward(parts, loss).expect("two parts");
    let (difference, count) = difference(&module, &gradients, &whole);
    assert_eq!(count, 2);
    assert!(difference < 1e-5, "{difference}");
}

#[test]
fn wrong_devices_and_parts() {
    let module = LinearConfig::new(2, 2).init(&device());
    assert!(matches!(Replicas::new(&module, []), Err(ParallelError::NoDevices)));
    let inner = [device(), Device::flex()];
    assert!(matches!(Replicas::new(&module, inner), Err(ParallelError::NotAutodiff { index: 1 })));

    let replicas = Replicas::new(&module, devices(2)).expect("two replicas");
    let part = |items| (Tensor::<2>::ones([1, 2], &device()), items);
    let loss = |model: &Linear, x: Tensor<2>| model.forward(x).sum();
    let error = |parts: Vec<_>| replicas.backward(parts, loss).expect_err("wrong parts");
    assert!(matches!(error(vec![]), ParallelError::PartCount { parts: 0, replicas: 2 }));
    assert!(matches!(
        error(vec![part(1), part(1), part(1)]),
        ParallelError::PartCount { parts: 3, replicas: 2 }
    ));
    assert!(matches!(error(vec![part(0)]), ParallelError::Parts(PartsError::NoItems)));
    assert!(replicas.backward([part(1)], loss).is_ok(), "fewer parts than replicas");
}
