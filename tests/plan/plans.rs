//! Tests plans that fit a budget.
use super::meter::alone;
use super::networks::{Chain, Encoder, Language, Link, Links, Planned, ResNet, random};
use burn::module::{Module, ModuleVisitor, Param};
use burn::tensor::{Device, Gradients, Tensor, TensorData};
use burn_memsave::checkpoint::checkpoint;
use burn_memsave::measure::{StepInput, measure_step};
use burn_memsave::plan::{Plan, PlanError, ProfileOptions, auto_checkpoint, block, profile};
use burn_memsave::saved::SavedPolicy;
use std::panic::{AssertUnwindSafe, catch_unwind};

const BUDGETS: u64 = 20;

/// Whatever the budget: a step needs no more, and as much as predicted; more memory never makes it slower; and the plan for less memory
/// is none that is predicted to need more, which would be worse in both. More memory may be used: that is what it is for. What
/// [`Profile::measured_plan`](burn_memsave::plan::Profile::measured_plan) takes may differ from that by the noise of two measurements.
///
/// `tables`: bytes that the prediction may miss besides, of what a backward pass makes for every operation that was kept: some hundred
/// bytes each, whatever the size of tensors, and a profile keeps at most two of three blocks at a time.
fn fits<P: Planned>(name: &str, model: &P::Model, input: &P::Input, tables: u64) {
    let profile = profile(model, input.copy(), &ProfileOptions::new(), P::loss).unwrap();
    let (least, most) = (profile.least(), profile.most());
    let whole = measure_step(model, input.copy(), P::loss).peak.unwrap();
    assert!(most.abs_diff(whole) <= whole * 3 / 100 + tables, "{name}: {whole} bytes, predicted {most}");
    // What is lost to rounding, and to tables of the graph that double, a few tensors of these small networks.
    let (first, mut before): (u64, Option<Plan>) = (least + least / 50, None);
    for number in 0..=BUDGETS {
        let budget = first + (most - first) * number / BUDGETS;
        let plan = profile.plan(budget).unwrap();
        if let Some(before) = before.replace(plan.clone()) {
            assert!(plan.extra_time <= before.extra_time, "{name}: {plan}\n{before}");
            assert!(plan.predicted + plan.predicted / 100 >= before.predicted, "{name}: {plan}\n{before}");
        }
        let plan = profile.measured_plan(model, input.copy(), budget, P::loss).unwrap();
        let (predicted, measured) = (plan.predicted, plan.measured.unwrap());
        println!("{name}: {budget}, predicted {predicted}, measured {measured}, {:?}", plan.extra_time);
        assert!(measured <= budget, "{name}: {measured} of {budget}");
        assert!(
            predicted.abs_diff(measured) <= measured * 3 / 100 + tables,
            "{name}: {measured}, {predicted} predicted"
        );
    }
    let plan = profile.plan(u64::MAX).unwrap();
    assert!(plan.blocks().all(|(_, treatment)| !treatment.recompute) && plan.extra_time.is_zero());
    let PlanError::Budget { budget, least: found } = profile.plan(least / 2).unwrap_err() else {
        panic!("too small")
    };
    assert_eq!((budget, found), (least / 2, least));
}

#[test]
fn encoder_of_24_layers() {
    let _alone = alone();
    let device = Device::flex().autodiff();
    fits::<Encoder>("encoder", &Encoder::model(24, &device), &random([8, 64, 32], &device), 0);
}

#[test]
fn resnet_101() {
    let _alone = alone();
    let device = Device::flex().autodiff();
    fits::<ResNet>("ResNet-101", &ResNet::model(&device), &random([2, 3, 64, 64], &device), 1 << 19);
}

#[test]
fn language_model_with_lora() {
    let _alone = alone();
    let device = Device::flex().autodiff();
    fits::<Language>("language model", &Language::model(&device), &Language::tokens(&device), 0);
}

#[test]
fn random_chains() {
    let _alone = alone();
    let device = Device::flex().autodiff();
    for seed in 0..3 {
        fits::<Chain>(
            &format!("chain {seed}"),
            &Chain::model(seed, 12, &device),
            &random([512, 64], &device),
            0,
        );
    }
}

/// The gradients of parameters, in their order.
fn gradients<M: Module>(model: &M, gradients: &Gradients) -> Vec<Option<TensorData>> {
    struct All<'a>(&'a Gradients, Vec<Option<TensorData>>);
    impl ModuleVisitor for All<'_> {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            self.1.push(param.base().grad(self.0).map(Tensor::into_data));
        }
    }
    let mut all = All(gradients, vec![]);
    model.visit(&mut all);
    all.1
}

#[test]
fn gradients_are_those_without_a_plan() {
    let _alone = alone();
    let device = Device::flex().autodiff();
    let (model, tokens) = (Language::model(&device), Language::tokens(&device));
    let profile = profile(&model, tokens.copy(), &ProfileOptions::new(), Language::loss).unwrap();
    let plan = profile.plan(profile.least().midpoint(profile.most())).unwrap();
    let recomputed = plan.blocks().filter(|(_, treatment)| treatment.recompute).count();
    assert!((1..6).contains(&recomputed), "{plan}");
    assert_eq!(plan.blocks().map(|(module, _)| module).collect::<Vec<_>>()[5], "blocks.5");
    let without = gradients(&model, &Language::loss(&model, tokens.copy()).backward());
    assert!(without.iter().flatten().count() > 6 * 14 - 1);
    let with = gradients(&model, &plan.scope(|| Language::loss(&model, tokens)).backward());
    assert!(with == without);
}

/// Rounding, if it is allowed, needs less than computing everything again.
#[test]
fn policies() {
    let _alone = alone();
    let device = Device::flex().autodiff();
    let (model, x) = (Encoder::model(8, &device), random([8, 64, 32], &device));
    let exact = profile(&model, x.copy(), &ProfileOptions::new(), Encoder::loss).unwrap();
    let options = ProfileOptions::new().with_policy(SavedPolicy::Half);
    let rounded = profile(&model, x.copy(), &options, Encoder::loss).unwrap();
    assert!(rounded.least() < exact.least());
    let plan = rounded.measured_plan(&model, x, exact.least() * 98 / 100, Encoder::loss).unwrap();
    assert!(plan.blocks().any(|(_, treatment)| treatment.saved == SavedPolicy::Half), "{plan}");
    assert!(plan.predicted.abs_diff(plan.measured.unwrap()) <= plan.predicted * 3 / 100, "{plan}");
    assert!(plan.to_string().contains("in half as many bits"));
}

/// Blocks of which nothing is tracked keep nothing, and are not computed again.
#[test]
fn frozen_blocks_come_first() {
    let _alone = alone();
    let device = Device::flex().autodiff();
    let mut model = Encoder::model(6, &device);
    model.layers = model
        .layers
        .into_iter()
        .enumerate()
        .map(|(at, layer)| if at < 3 { layer.freeze() } else { layer })
        .collect();
    let x = random([4, 32, 32], &device);
    let profile = profile(&model, x.copy(), &ProfileOptions::new(), Encoder::loss).unwrap();
    let tracked: Vec<bool> = profile.blocks.iter().map(|block| block.tracked).collect();
    assert_eq!(tracked, [false, false, false, true, true, true]);
    let plan = profile.measured_plan(&model, x, profile.least() * 101 / 100, Encoder::loss).unwrap();
    assert!(plan.blocks().take(3).all(|(_, treatment)| !treatment.recompute), "{plan}");
}

/// Plans can be made where what the profile runs must fit, too.
#[test]
fn limits() {
    let _alone = alone();
    let device = Device::flex().autodiff();
    let (model, x) = (Encoder::model(6, &device), random([4, 32, 32], &device));
    let known = profile(&model, x.copy(), &ProfileOptions::new(), Encoder::loss).unwrap();
    let budget = known.least() * 102 / 100;
    let plan = auto_checkpoint(&model, x, budget, &ProfileOptions::new(), Encoder::loss).unwrap();
    assert!(plan.measured <= Some(budget));

    let (model, x) = (Encoder::model(6, &device), random([4, 32, 32], &device));
    let result = auto_checkpoint(&model, x, budget / 2, &ProfileOptions::new(), Encoder::loss);
    assert!(matches!(result, Err(PlanError::Budget { least, .. }) if least > budget / 2));
}

fn links(blocks: usize, device: &Device) -> (Links, Tensor<2>) {
    (Chain::model(7, blocks, device), random([128, 64], device))
}

#[test]
fn blocks_within_are_parts() {
    let _alone = alone();
    let device = Device::flex().autodiff();
    let (model, x) = links(4, &device);
    let nested = |model: &Links, x: Tensor<2>| block(model, x, Chain::loss);
    let of_one = profile(&model, x.copy(), &ProfileOptions::new(), nested).unwrap();
    assert_eq!(of_one.blocks.len(), 1);
    let plan = of_one.plan(of_one.least()).unwrap();
    let [with, without] = [plan.scope(|| nested(&model, x.clone())), nested(&model, x.clone())];
    assert_eq!(gradients(&model, &with.backward()).len(), gradients(&model, &without.backward()).len());
    let segment = |model: &Links, x: Tensor<2>| checkpoint(model, x, Chain::loss);
    assert!(matches!(profile(&model, x, &ProfileOptions::new(), segment), Err(PlanError::NoBlocks)));
}

#[test]
fn misuse() {
    let _alone = alone();
    let device = Device::flex().autodiff();
    let (model, x) = links(4, &device);
    let run = |model: &Links, x: &Tensor<2>, loss: fn(&Links, Tensor<2>) -> Tensor<1>| {
        profile(model, x.copy(), &ProfileOptions::new(), loss)
    };
    assert!(matches!(run(&model, &x, |_, x| x.require_grad().mean()), Err(PlanError::NoBlocks)));
    assert!(matches!(run(&links(4, &device).0.freeze(), &x, Chain::loss), Err(PlanError::NoGradient)));
    let server = Device::flex();
    assert!(matches!(
        run(&model.valid(), &x.inner().to_device(&server), Chain::loss),
        Err(PlanError::NoGradient)
    ));

    let (_, x) = links(4, &device);
    let plan = run(&model, &x, Chain::loss).unwrap().plan(u64::MAX).unwrap();
    let panic = |run: &dyn Fn()| {
        let panic = catch_unwind(AssertUnwindSafe(run)).expect_err("it is refused");
        panic.downcast_ref::<String>().expect("a message").clone()
    };
    let run = |model: &Links| drop(plan.scope(|| Chain::loss(model, x.clone())));
    let fewer = panic(&|| run(&links(3, &device).0));
    assert!(fewer.contains("made for 4 blocks, of which 3 ran"), "{fewer}");
    let more = panic(&|| run(&links(5, &device).0));
    assert!(more.contains("made for 4 blocks, and there are more"), "{more}");
    let other =
        panic(&|| drop(plan.scope(|| block(&vec![model.clone()], x.clone(), |m, x| Chain::loss(&m[0], x)))));
    assert!(other.contains(std::any::type_name::<Link>()), "{other}");
    run(&model); // a panic leaves nothing behind
}
