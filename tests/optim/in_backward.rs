//! Updates in the backward pass: the module is the one that a step after it makes.
use super::*;
use burn::grad_clipping::GradientClippingConfig;
use burn::module::{Lora, ParamGroup, ParamId};
use burn::nn as stock;
use burn::optim::{AdamConfig, AdamWConfig, MuonConfig, SgdConfig};
use burn::tensor::Int;
use burn_memsave::checkpoint::checkpoint;
use burn_memsave::mixed::LossScaler;
use burn_memsave::nn::{
    Embedding, EmbeddingConfig, LayerNorm, LayerNormConfig, Linear, LinearConfig, activation::Relu,
};
use burn_memsave::optim::{AdamW8bitConfig, InBackwardError, StepRefused, step_in_backward};

const LR: f64 = 0.01;

/// Trains both ways, and compares all values and the losses, bit by bit.
#[track_caller]
fn same<M: Module>(
    module: &M,
    optimizer: &dyn Fn() -> ModuleOptimizer,
    loss: impl Fn(&M, usize) -> Tensor<1>,
) {
    let (mut after, mut within) = (module.clone(), module.clone());
    let (mut of_after, mut of_within) = (optimizer(), optimizer());
    for round in 0..4 {
        let of_round = loss(&after, round);
        let gradients = GradientsParams::from_grads(of_round.clone().backward(), &after);
        after = of_after.step(LR, after, gradients);
        let found = step_in_backward(within, &mut of_within, LR, |module| loss(module, round));
        let (module, value) = found.expect("nothing is refused");
        assert!(!value.is_tracked());
        assert_eq!(value.into_data(), of_round.inner().into_data());
        within = module;
        assert_eq!(values(&within), values(&after), "round {round}");
    }
    assert_ne!(values(&within), values(module), "something is trained");
    assert_eq!(states(&within), states(module));
}

/// Ids of parameters, and which require gradients.
fn states<M: Module>(module: &M) -> Vec<(ParamId, bool, bool)> {
    struct States(Vec<(ParamId, bool, bool)>);
    impl ModuleVisitor for States {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            self.0.push((param.id, param.is_require_grad(), param.base().is_autodiff()));
        }
    }
    let mut states = States(vec![]);
    module.visit(&mut states);
    states.0
}

/// Every optimizer with a state of its own kind.
fn optimizers() -> Vec<Box<dyn Fn() -> ModuleOptimizer>> {
    let small = AdamW8bitConfig::new().with_min_8bit_size(1);
    let clipped = AdamWConfig::new().with_grad_clipping(Some(GradientClippingConfig::Norm(0.1)));
    let regex = || ParamGroup::from_regex("second.*weight").expect("a pattern");
    vec![
        Box::new(|| SgdConfig::new().init()),
        Box::new(|| AdamConfig::new().init()),
        Box::new(move || clipped.init()),
        Box::new(move || small.init()),
        // Of which group a parameter is depends on its path.
        Box::new(move || AdamW8bitConfig::new().init().with_group(regex(), MuonConfig::new().build(), None)),
    ]
}

#[derive(Module, Debug)]
struct Net {
    first: Linear,
    norm: LayerNorm,
    second: Linear,
    unused: Linear,
}

impl Net {
    fn new(device: &Device) -> Self {
        let linear = || LinearConfig::new(16, 16).init(device);
        Self {
            first: linear(),
            norm: LayerNormConfig::new(16).init(device),
            second: linear(),
            unused: linear(),
        }
    }

    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        let hidden = Relu::new().forward(self.norm.forward(self.first.forward(x)));
        self.second.forward(hidden)
    }
}

/// The same input in every round of both ways.
fn inputs(device: &Device) -> Vec<Tensor<2>> {
    (0..4).map(|_| random([8, 16], device)).collect()
}

#[test]
fn modules_are_those_of_a_step() {
    let _alone = alone();
    for device in meter::devices() {
        let (net, inputs) = (Net::new(&device), inputs(&device));
        for optimizer in optimizers() {
            same(&net, &optimizer, |net, round| net.forward(inputs[round].clone()).powf_scalar(2.0).mean());
        }
    }
}

/// Layers that do not look themselves; with branches side by side, one parameter in several places of the graph, and one in a function
/// of its own.
#[test]
fn stock_layers_are_watched() {
    let _alone = alone();
    #[derive(Module, Debug)]
    struct Branches {
        first: stock::Linear,
        second: stock::Linear,
        shift: Param<Tensor<1>>,
    }
    for device in meter::devices() {
        let linear = || stock::LinearConfig::new(16, 16).init(&device);
        let shift = Param::from_tensor(random([16], &device));
        let (net, inputs) = (Branches { first: linear(), second: linear(), shift }, inputs(&device));
        for optimizer in optimizers() {
            same(&net, &optimizer, |net, round| {
                let x = inputs[round].clone();
                let (a, b) = (net.first.forward(x.clone()), net.second.forward(x));
                let again = net.first.forward(a.clone().tanh() * b.clone());
                let shift = net.shift.val().unsqueeze::<2>();
                let all = Tensor::cat(vec![a, b, again + shift.clone(), shift.exp()], 0);
                all.powf_scalar(2.0).mean()
            });
        }
    }
}

#[test]
fn frozen_parameters_stay() {
    let _alone = alone();
    let device = device();
    let mut net = Net::new(&device);
    net.first = net.first.freeze();
    let inputs = inputs(&device);
    let before = values(&net.first);
    same(&net, &|| AdamW8bitConfig::new().init(), |net, round| {
        net.forward(inputs[round].clone()).powf_scalar(2.0).mean()
    });
    let loss = |net: &Net| net.forward(inputs[0].clone()).sum();
    let (net, _) =
        step_in_backward(net, &mut AdamW8bitConfig::new().init(), LR, loss).expect("the rest is trained");
    assert_eq!(values(&net.first), before);
}

#[test]
fn adapters_are_trained() {
    let _alone = alone();
    let device = device();
    let net = Net::new(&device);
    let inputs = inputs(&device);
    let loss = |net: &Net, round: usize| net.forward(inputs[round].clone()).powf_scalar(2.0).mean();
    for optimizer in &optimizers()[..4] {
        same(&net.clone().apply_lora(Lora::new(2, 4.0)), optimizer, loss);
    }
    #[derive(Module, Debug)]
    struct Stock {
        linear: stock::Linear,
    }
    let stock =
        Stock { linear: stock::LinearConfig::new(16, 16).init(&device) }.apply_lora(Lora::new(2, 4.0));
    same(&stock, &optimizers()[3], |net, round| {
        net.linear.forward(inputs[round].clone()).powf_scalar(2.0).mean()
    });
}

/// Segments that are computed again, one of them with a parameter that is used outside, too.
#[test]
fn segments_are_computed_again() {
    let _alone = alone();
    for device in meter::devices() {
        let (net, inputs) = (Net::new(&device), inputs(&device));
        for optimizer in optimizers() {
            same(&net, &optimizer, |net, round| {
                let y = checkpoint(net, inputs[round].clone(), Net::forward);
                let y = checkpoint(&net.first, y, Linear::forward);
                net.second.forward(net.first.forward(y)).powf_scalar(2.0).mean()
            });
        }
    }
}

/// A segment on another thread, too, leaves a parameter that it does not use without a gradient.
#[test]
fn segments_on_other_threads() {
    let _alone = alone();
    let device = device();
    let (net, inputs) = (Net::new(&device), inputs(&device));
    let before = values(&net.unused);
    let decaying = AdamW8bitConfig::new().with_weight_decay(0.5);
    let loss = |net: &Net| {
        let (net, x) = (net.clone(), inputs[0].clone());
        let forward = std::thread::spawn(move || checkpoint(&net, x, Net::forward).sum());
        forward.join().expect("no panic")
    };
    let (net, _) = step_in_backward(net, &mut decaying.init(), LR, loss).expect("a step");
    assert_eq!(values(&net.unused), before);
}

#[derive(Module, Debug)]
struct Tied {
    table: Embedding,
    head: Linear,
}

impl Tied {
    fn loss(&self, tokens: Tensor<2, Int>) -> Tensor<1> {
        self.head.forward(self.table.forward(tokens)).powf_scalar(2.0).mean()
    }
}

/// One parameter in two places has the sum of the gradients, and stays one: as if it were used twice from one place.
#[test]
fn tied_parameters_stay_tied() {
    let _alone = alone();
    let device = device();
    let table = EmbeddingConfig::new(16, 16).init(&device);
    let tokens = Tensor::<2, Int>::from_data([[1, 2, 3], [4, 1, 0]], &device);
    for copies in [false, true] {
        let mut head = LinearConfig::new(16, 16).with_bias(false).init(&device);
        // As `load_record` leaves them: two leaves of one id.
        head.weight = match copies {
            false => table.weight.clone(),
            true => Param::initialized(table.weight.id, table.weight.val().detach().require_grad()),
        };
        let (mut tied, mut once) = (Tied { table: table.clone(), head }, table.clone());
        let (mut of_tied, mut of_once) = (AdamW8bitConfig::new().init(), AdamW8bitConfig::new().init());
        for _ in 0..4 {
            let y = once.forward(tokens.clone());
            let y = burn_memsave::functional::linear(y, once.weight.val(), None);
            let gradients = GradientsParams::from_grads(y.powf_scalar(2.0).mean().backward(), &once);
            once = of_once.step(LR, once, gradients);
            let loss = |tied: &Tied| tied.loss(tokens.clone());
            tied = step_in_backward(tied, &mut of_tied, LR, loss).expect("tied").0;
            assert_eq!(tied.table.weight.val().into_data(), once.weight.val().into_data());
            assert_eq!(tied.head.weight.val().into_data(), once.weight.val().into_data());
        }
    }
}

#[test]
fn what_is_refused() {
    let _alone = alone();
    let device = device();
    let x = random([2, 16], &device);
    let mut optimizer = AdamW8bitConfig::new().init();
    let loss = |net: &Net| net.forward(x.clone()).sum();

    let frozen = Net::new(&device).freeze();
    let refused = step_in_backward(frozen, &mut optimizer, LR, loss);
    assert!(matches!(refused, Err(StepRefused { error: InBackwardError::Untracked, .. })));

    let own = |net: &Net| {
        let loss = net.forward(x.clone()).sum();
        drop(loss.clone().backward());
        loss.detach()
    };
    let refused = step_in_backward(Net::new(&device), &mut optimizer, LR, own);
    assert!(matches!(refused, Err(StepRefused { error: InBackwardError::Untracked, .. })));

    let many = |net: &Net| net.forward(x.clone()).reshape([32]);
    let refused = step_in_backward(Net::new(&device), &mut optimizer, LR, many);
    assert!(matches!(refused, Err(StepRefused { error: InBackwardError::NoScalar { elements: 32 }, .. })));

    let mut untied = Net::new(&device);
    untied.second.weight = Param::initialized(untied.first.weight.id, untied.second.weight.val());
    match step_in_backward(untied, &mut optimizer, LR, loss) {
        Err(StepRefused { error: InBackwardError::Untied { first, second }, .. }) => {
            assert_eq!([&first[..], &second], ["first.weight", "second.weight"]);
        }
        _ => panic!("two values of one id"),
    }

    let mut one = Net::new(&device);
    one.second.weight = Param::initialized(ParamId::new(), one.first.weight.val());
    let refused = step_in_backward(one, &mut optimizer, LR, loss);
    assert!(matches!(refused, Err(StepRefused { error: InBackwardError::OneTensor { .. }, .. })));
}

/// With the parameters that it had: they are the same leaves.
#[test]
fn a_refused_step_gives_the_module_back() {
    let _alone = alone();
    let device = device();
    let x = random([2, 16], &device);
    let mut optimizer = AdamW8bitConfig::new().init();
    let loss = |net: &Net| net.forward(x.clone()).sum();
    let net = Net::new(&device);
    let many = |net: &Net| net.forward(x.clone()).reshape([32]);
    let refused = step_in_backward(net.clone(), &mut optimizer, LR, many).expect_err("32 numbers");
    assert_eq!(refused.to_string(), refused.error.to_string());
    let gradients = loss(&refused.module).backward();
    for (before, now) in [
        (net.first.weight.val(), refused.module.first.weight.val()),
        (net.second.weight.val(), refused.module.second.weight.val()),
    ] {
        assert!(before.grad(&gradients).is_some());
        assert_eq!(now.into_data(), before.into_data());
    }
    drop(net);
    step_in_backward(refused.module, &mut optimizer, LR, loss).expect("a step");
}

/// Gradients of a scaled loss could not be unscaled; what is scaled elsewhere does not matter.
#[test]
fn loss_scaling_is_refused() {
    let _alone = alone();
    let device = device();
    let x = random([2, 16], &device);
    let scaler = LossScaler::new();
    let mut optimizer = AdamW8bitConfig::new().init();
    let loss = |net: &Net| net.forward(x.clone()).sum();
    let scaled = |net: &Net| scaler.scale(loss(net));
    let partly = |net: &Net| scaler.scale(loss(net)) + loss(net);
    let refused = step_in_backward(Net::new(&device), &mut optimizer, LR, scaled);
    let error = refused.expect_err("it is scaled");
    assert!(matches!(error.error, InBackwardError::Scaled));
    assert!(error.to_string().contains("LossScaler::unscale"), "{error}");
    let refused = step_in_backward(Net::new(&device), &mut optimizer, LR, partly);
    assert!(matches!(refused, Err(StepRefused { error: InBackwardError::Scaled, .. })));
    assert!(optimizer.to_record().is_empty(), "it is not changed");

    // Neither a step that was refused, nor one that panicked, nor one without updates is remembered.
    let mut passes = || step_in_backward(Net::new(&device), &mut optimizer, LR, loss).is_ok();
    assert!(passes());
    let panics = |net: &Net| -> Tensor<1> { panic!("{}", scaled(net)) };
    let mut other = SgdConfig::new().init();
    let step = || step_in_backward(Net::new(&device), &mut other, LR, panics).is_ok();
    assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(step)).is_err());
    assert!(passes());
    drop(scaled(&Net::new(&device)).backward());
    assert!(passes());
    // One in another's loss is refused for itself.
    let nests = |net: &Net| {
        let inner = step_in_backward(Net::new(&device), &mut other, LR, scaled);
        assert!(matches!(inner, Err(StepRefused { error: InBackwardError::Scaled, .. })));
        loss(net)
    };
    assert!(step_in_backward(Net::new(&device), &mut optimizer, LR, nests).is_ok());
}

/// A backward pass that panics leaves the optimizer where it was.
#[test]
fn the_optimizer_survives_a_panic() {
    let _alone = alone();
    let device = device();
    let (net, x) = (Net::new(&device), random([2, 16], &device));
    let loss = |net: &Net| net.forward(x.clone()).sum();
    // Muon takes no vectors; this one is changed among the last.
    let bias = ParamGroup::from_path("first.bias");
    let mut optimizer = AdamW8bitConfig::new().init().with_group(bias, MuonConfig::new().build(), None);
    let step = || step_in_backward(net, &mut optimizer, LR, loss).is_ok();
    assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(step)).is_err());
    assert!(!optimizer.to_record().is_empty(), "what was changed before has a state");
}
